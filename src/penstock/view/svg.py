"""A timeline as a figure, in the style of the papers.

    title
    rank 0 [0][1][2]      [ 0 ][3]...      a row per rank, a box per action with the number of its micro-batch
    rank 1    [0][1]   [ 0 ]               idle is white; later parts and later tokens are darker
  forwards 0     5     10    15            time
    [] forward  [] backward                what the colours mean
    4 ranks · 8 micro-batches · makespan 33 forwards · bubble 27.3%

If there are too many boxes to see, each pixel gets the mean colour of its time instead.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.ir.timeline import Span, Timeline, Units
from penstock.view import palette
from penstock.view.numbers import FORWARDS, write_time
from penstock.view.palette import (
    IDLE,
    PAINTS,
    SUM_COLOUR,
    SUM_NAME,
    Paint,
    element,
    figure,
    group,
    label_of,
    write_number,
)

MAX_BOXES = 20_000  # beyond that, pixels show mean colours
MIN_BOX_WIDTH = 3  # pixels, in the mean; with less, pixels show mean colours
MAX_NAMED_BOXES = 2_000  # beyond that, boxes have no tooltip and share elements
MAX_SUM_HEIGHT = 4.0  # pixels, of the strip that shows a sum of gradients
DIGIT_WIDTH = 0.58  # width of a digit over the font size
AXIS_COLOUR = "#5b6675"
GRID_COLOUR = "#d7dce3"
MIN_FONT = 6.0  # smaller numbers could not be read
TALL_GAP = 4.0  # pixels between the boxes of two ranks, if their rows are tall
LEGEND_BOX = 21.0  # width of a coloured box in the legend
LEGEND_NAME = 27.0  # from the left edge of such a box to its name
LEGEND_LETTER = 5.2
LEGEND_SPACE = 26.0  # between a name and the next box


@dataclass(frozen=True, slots=True)
class Sheet:
    """The layout, in pixels."""

    left: float
    top: float
    width: float  # of the plot
    row: float
    gap: float
    rows: int
    makespan: float  # the time at the right edge

    @property
    def bottom(self) -> float:
        """The lower edge of the last row."""
        return self.top + self.rows * self.row

    @property
    def font(self) -> float:
        """The size of the numbers in boxes."""
        return min(11.0, self.box_height * 0.62)

    @property
    def box_height(self) -> float:
        """The height of a box."""
        return self.row - self.gap

    def x(self, time: Floats) -> Floats:
        """The horizontal positions of times."""
        pixels: Floats = self.left + time * (self.width / self.makespan)
        return pixels

    def y(self, rank: int) -> float:
        """The upper edge of the boxes of a rank."""
        return self.top + rank * self.row + self.gap / 2

    def middle(self, rank: int) -> float:
        """The middle of the row of a rank."""
        return self.top + (rank + 0.5) * self.row


def svg(
    timeline: Timeline, title: str = "", until: float = 0.0, width: float = 0.0
) -> str:
    """The text of an SVG file.

    Figures with the same `until` and `width` have the same time axis: it ends at `until`, or
    at the makespan if that is later, and is `width` pixels long. Without a width, the plot is
    as wide as its numbers need.

    >>> from penstock import UnitCost, make, simulate
    >>> svg(simulate(make("1f1b", ranks=4, microbatches=8), UnitCost()))[:4]
    '<svg'
    """
    sheet = _sheet(timeline, title, until, width)
    content = []
    if title:
        style: dict[str, str | float] = {"font_size": 15, "font_weight": "bold"}
        content.append(element("text", _text(title), x=sheet.left, y=22, **style))
    content += _rows(sheet)
    boxes = len(timeline.start)
    has_room = sheet.width * sheet.rows >= MIN_BOX_WIDTH * boxes
    if boxes <= MAX_BOXES and has_room:
        content += _boxes(timeline, sheet)
    else:
        content += _image(timeline, sheet)
    content += _sums(timeline, sheet)
    content += _axis(timeline, sheet)
    content += _legend(timeline, sheet)
    facts = _text(" · ".join(palette.facts(timeline)))
    content.append(element("text", facts, x=sheet.left, y=sheet.bottom + 70))
    name = _text(title or "Pipeline schedule")
    full_width = sheet.left + sheet.width + 16
    height = sheet.bottom + 82
    return figure(name, full_width, height, content)


def _sheet(timeline: Timeline, title: str, until: float, width: float) -> Sheet:
    """A layout in which short boxes have room for their numbers, if the page is large enough."""
    ranks = timeline.schedule.ranks
    seconds = timeline.end - timeline.start
    positive = seconds[seconds > 0]
    short_seconds = float(np.quantile(positive, 0.1)) if len(positive) else 1.0
    short_width = 7.0 * _longest_label(timeline) + 9
    wanted = timeline.makespan / short_seconds * short_width
    fitting_width = round(float(np.clip(wanted, 460, 1500)))
    row = float(np.clip(900 // ranks, 2, 26))
    gap = 0.0
    if row >= 16:
        gap = TALL_GAP
    elif row >= 5:
        gap = 1.0
    return Sheet(
        left=64,
        top=36 if title else 12,
        width=width or fitting_width,
        row=row,
        gap=gap,
        rows=ranks,
        makespan=max(until, timeline.makespan) or 1.0,
    )


def _text(text: str) -> str:
    """A text as SVG writes it, without control characters."""
    printable = [sign for sign in text if sign.isprintable()]
    return escape("".join(printable))


# ---------------------------------------------------------------- rows and boxes
def _rows(sheet: Sheet) -> Iterator[str]:
    """A frame around each row, or around all of them if they are thin, and the names of the ranks."""
    is_tall = sheet.gap >= TALL_GAP
    frames = sheet.rows if is_tall else 1
    height = sheet.box_height if is_tall else sheet.bottom - sheet.top
    for rank in range(frames):
        yield element(
            "rect",
            x=sheet.left,
            y=sheet.y(rank),
            width=sheet.width,
            height=height,
            fill=IDLE,
            stroke=GRID_COLOUR,
        )
    names = []
    for rank in range(0, sheet.rows, _ranks_per_name(sheet)):
        y = sheet.middle(rank) + 4
        names.append(element("text", f"rank {rank}", x=sheet.left - 8, y=y))
    yield from group(names, text_anchor="end")


def _ranks_per_name(sheet: Sheet) -> int:
    """Every how many ranks there is room for a name."""
    if sheet.row >= 14:
        return 1
    names = int(sheet.rows * sheet.row / 16)
    return max(round(palette.round_step(sheet.rows, names)), 1)


class Box(NamedTuple):
    """The box of an action: its left and right edge in pixels, and its paint."""

    span: Span
    left: float
    right: float
    paint: Paint

    @property
    def width(self) -> float:
        """The width in pixels."""
        return self.right - self.left


def _boxes(timeline: Timeline, sheet: Sheet) -> Iterator[str]:
    """A box for each action, and then the numbers that fit."""
    columns = zip(
        timeline.spans(),
        sheet.x(timeline.start).tolist(),
        sheet.x(timeline.end).tolist(),
        palette.paints(timeline).tolist(),
        strict=True,
    )
    boxes = [
        Box(span, left, right, PAINTS[paint]) for span, left, right, paint in columns
    ]
    drawn = _box_paths(boxes, sheet)
    if len(boxes) <= MAX_NAMED_BOXES:
        drawn = _named_boxes(boxes, sheet, timeline.units)
    edge = {"stroke": IDLE, "stroke_width": "0.8"} if sheet.gap >= 1 else {}
    yield from group(drawn, class_="spans", **edge)
    if sheet.font >= MIN_FONT:
        yield from _numbers(boxes, sheet, _longest_label(timeline))


def _named_boxes(boxes: Sequence[Box], sheet: Sheet, units: Units) -> Iterator[str]:
    """A rectangle for each action, with a tooltip."""
    for box in boxes:
        rank, action, start, end = box.span
        times = f"{write_time(start, units)} to {write_time(end, units)}"
        yield element(
            "rect",
            element("title", f"{action} on rank {rank}: {times}"),
            x=box.left,
            y=sheet.y(rank),
            width=box.width,
            height=sheet.box_height,
            fill=box.paint.fill,
        )


def _box_paths(boxes: Sequence[Box], sheet: Sheet) -> Iterator[str]:
    """One path for each paint, which takes a third of the bytes of rectangles."""
    height = write_number(sheet.box_height)
    outlines: defaultdict[str, list[str]] = defaultdict(list)  # by colour
    for box in boxes:
        left = write_number(box.left)
        top = write_number(sheet.y(box.span.rank))
        width = write_number(box.width)
        outline = f"M{left} {top}h{width}v{height}h-{width}z"
        outlines[box.paint.fill].append(outline)
    for fill, path in outlines.items():
        yield element("path", fill=fill, d="".join(path))


def _numbers(boxes: Sequence[Box], sheet: Sheet, longest: int) -> Iterator[str]:
    """The numbers that fit into their boxes; `longest` is the length of the longest one.

    If short boxes have no room for `3.1`, all boxes say `3`, and the shades tell the slices.
    """
    digit = sheet.font * DIGIT_WIDTH
    widths = [box.width for box in boxes]
    short_width = float(np.quantile(widths, 0.1))
    shows_slices = longest * digit <= short_width - 2
    numbers = []
    for box in boxes:
        action = box.span.action
        label = label_of(action.microbatch, action.slice if shows_slices else 0)
        if len(label) * digit > box.width - 2:
            continue
        number = element(
            "text",
            label,
            x=(box.left + box.right) / 2,
            y=sheet.middle(box.span.rank) + sheet.font * 0.36,
            fill=box.paint.ink,
        )
        numbers.append(number)
    yield from group(
        numbers,
        class_="numbers",
        text_anchor="middle",
        font_size=sheet.font,
        pointer_events="none",
    )


def _sums(timeline: Timeline, sheet: Sheet) -> Iterator[str]:
    """A strip at the lower edge of a rank's row for each sum of gradients that it takes part in."""
    if not timeline.sums:
        return
    height = min(MAX_SUM_HEIGHT, sheet.row / 3)
    units = timeline.units
    strips = []
    for one in timeline.sums:
        left, right = sheet.x(np.array([one.start, one.end])).tolist()
        times = f"{write_time(one.start, units)} to {write_time(one.end, units)}"
        title = element("title", f"sum of {one.name}: {times}")
        for rank in one.ranks:
            lower_edge = sheet.y(rank) + sheet.row - sheet.gap
            strip = element(
                "rect",
                title,
                x=left,
                y=lower_edge - height,
                width=right - left,
                height=height,
            )
            strips.append(strip)
    yield from group(strips, class_="sums", fill=SUM_COLOUR)


def _longest_label(timeline: Timeline) -> int:
    """The number of characters of the longest label."""
    schedule = timeline.schedule
    return len(label_of(len(schedule.microbatches) - 1, schedule.slices - 1))


def _image(timeline: Timeline, sheet: Sheet) -> Iterator[str]:
    """A picture with a row of pixels for each rank, stretched over the rows."""
    paint = palette.paints(timeline)
    columns = max(1, round(sheet.width * timeline.makespan / sheet.makespan))
    pixels = np.empty((sheet.rows, columns, 3))
    for rank in range(sheet.rows):
        work, colour = palette.means(timeline, rank, columns, paint)
        pixels[rank] = 255.0 + work[:, None] * (colour - 255.0)
    data = b64encode(_png(pixels.clip(0, 255).astype(np.uint8))).decode("ascii")
    yield element(
        "image",
        class_="spans",
        x=sheet.left,
        y=sheet.top,
        width=columns,
        height=sheet.bottom - sheet.top,
        preserveAspectRatio="none",
        image_rendering="pixelated",
        href=f"data:image/png;base64,{data}",
    )


def _png(pixels: Ints) -> bytes:
    """A minimal PNG: signature, header, data, end. Each row begins with 0, for no filter."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data))
            + kind
            + data
            + struct.pack(">I", zlib.crc32(kind + data))
        )

    height, width, _ = pixels.shape
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (
        chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
        + chunk(b"IEND", b"")
    )
    return b"\x89PNG\r\n\x1a\n" + chunks


# ---------------------------------------------------------------- what is around them
def _axis(timeline: Timeline, sheet: Sheet) -> Iterator[str]:
    """Round times below the rows."""
    step = palette.round_step(sheet.makespan, int(sheet.width / 70))
    last = int(sheet.makespan / step * (1 + 1e-9))
    times: Floats = np.arange(last + 1).astype(np.float64) * step
    base = sheet.bottom + 3
    y = write_number(base)
    line = f"M{write_number(sheet.left)} {y}h{write_number(sheet.width)}"
    labels = []
    for time, x in zip(times.tolist(), sheet.x(times).tolist(), strict=True):
        line += f"M{write_number(x)} {y}v4"
        label = write_time(time, timeline.units) if time else "0"
        labels.append(element("text", label, x=x, y=base + 16))
    if not timeline.units.seconds:
        labels.append(
            element(
                *("text", FORWARDS[1]),
                x=sheet.left - 8,
                y=base + 16,
                text_anchor="end",
            )
        )
    yield element("path", d=line, stroke=AXIS_COLOUR, fill="none")
    yield from group(
        labels, class_="time", text_anchor="middle", font_size=11, fill=AXIS_COLOUR
    )


def _legend(timeline: Timeline, sheet: Sheet) -> Iterator[str]:
    """Each op that occurs, with several shades if they have a meaning, then sums and idle time."""
    meaning = " and ".join(_shade_meanings(timeline))
    levels = (0.15, 0.5, 0.85) if meaning else (0.5,)
    kinds = [
        (op.row.label, [palette.paint_of(op, level).fill for level in levels])
        for op in palette.ops_of(timeline)
    ]
    if timeline.sums:
        kinds.append((SUM_NAME, [SUM_COLOUR]))
    kinds.append(("idle", [IDLE]))
    left = sheet.left
    y = sheet.bottom + 36
    entries = []
    for name, fills in kinds:
        x = left
        width = LEGEND_BOX / len(fills)
        top, height = (y + 4, 4) if name == SUM_NAME else (y, 12)
        edge = {"stroke": GRID_COLOUR} if name == "idle" else {}
        for number, fill in enumerate(fills):
            size = {"width": width, "height": height}
            box = element(
                "rect", x=x + width * number, y=top, **size, fill=fill, **edge
            )
            entries.append(box)
        entries.append(element("text", name, x=x + LEGEND_NAME, y=y + 10.5))
        left += LEGEND_NAME + LEGEND_LETTER * len(name) + LEGEND_SPACE
    if meaning:
        words = f"light to dark: {meaning}"
        entries.append(element("text", words, x=x + 64, y=y + 10.5, fill=AXIS_COLOUR))
    yield from group(entries, class_="legend")


def _shade_meanings(timeline: Timeline) -> list[str]:
    """The meanings of light and dark."""
    meanings = []
    if int(palette.places(timeline).max()) > 0:
        meanings.append("stages of a rank")
    if timeline.schedule.slices > 1:
        meanings.append("slices of a micro-batch")
    return meanings
