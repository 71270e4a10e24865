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
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from penstock.ir.table import Floats, Ints
from penstock.ir.timeline import Timeline
from penstock.view import palette
from penstock.view.numbers import FORWARDS, short, write_time
from penstock.view.palette import (
    IDLE,
    INK,
    OP_NAMES,
    PAINTS,
    SUM_COLOUR,
    SUM_NAME,
    label_of,
)

MAX_BOXES = 20_000  # beyond that, pixels show mean colours
MAX_NAMED_BOXES = 2_000  # beyond that, boxes have no tooltip and share elements
MAX_SUM_HEIGHT = 4.0  # pixels, of the strip that shows a sum of gradients
DIGIT_WIDTH = 0.58  # width of a digit over the font size
AXIS_COLOUR = "#5b6675"
GRID_COLOUR = "#d7dce3"
FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'


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
        return min(11.0, (self.row - self.gap) * 0.62)

    def x(self, time: Floats) -> Floats:
        """The horizontal positions of times."""
        pixels: Floats = self.left + time * (self.width / self.makespan)
        return pixels

    def y(self, rank: int) -> float:
        """The upper edge of the boxes of a rank."""
        return self.top + rank * self.row + self.gap / 2


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
    full_width = _n(sheet.left + sheet.width + 16)
    height = _n(sheet.bottom + 82)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width} {height}"'
        f' width="{full_width}" height="{height}" {FONT} fill="{INK}" role="img">',
        f"<title>{_text(title or 'Pipeline schedule')}</title>",
        f'<rect width="100%" height="100%" fill="{IDLE}"/>',
    ]
    if title:
        style = 'font-size="15" font-weight="bold"'
        lines.append(f'<text x="{sheet.left}" y="22" {style}>{_text(title)}</text>')
    lines += _rows(sheet)
    boxes = len(timeline.start)
    if boxes <= MAX_BOXES and sheet.width * sheet.rows >= 3 * boxes:
        lines += _boxes(timeline, sheet)
    else:
        lines += _image(timeline, sheet)
    lines += _sums(timeline, sheet)
    lines += _axis(timeline, sheet)
    lines += _legend(timeline, sheet)
    facts = _text(" · ".join(palette.facts(timeline)))
    lines.append(f'<text x="{sheet.left}" y="{_n(sheet.bottom + 70)}">{facts}</text>')
    lines.append("</svg>\n")
    return "\n".join(lines)


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
        gap = 4.0
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


def _n(number: float) -> str:
    """A number as SVG writes it."""
    return short(round(number, 2), 7)


def _text(text: str) -> str:
    """A text as SVG writes it, without control characters."""
    printable = [sign for sign in text if sign.isprintable()]
    return escape("".join(printable))


# ---------------------------------------------------------------- rows and boxes
def _rows(sheet: Sheet) -> Iterator[str]:
    """A frame around each row, or around all of them if they are thin, and the names of the ranks."""
    is_tall = sheet.gap >= 4
    frames = sheet.rows if is_tall else 1
    height = sheet.row - sheet.gap if is_tall else sheet.bottom - sheet.top
    for rank in range(frames):
        yield (
            f'<rect x="{sheet.left}" y="{_n(sheet.y(rank))}" width="{_n(sheet.width)}" height="{_n(height)}"'
            f' fill="{IDLE}" stroke="{GRID_COLOUR}"/>'
        )
    step = 1
    if sheet.row < 14:
        names = int(sheet.rows * sheet.row / 16)
        step = max(round(palette.round_step(sheet.rows, names)), 1)
    yield '<g text-anchor="end">'
    for rank in range(0, sheet.rows, step):
        y = sheet.top + (rank + 0.5) * sheet.row + 4
        yield f'<text x="{sheet.left - 8}" y="{_n(y)}">rank {rank}</text>'
    yield "</g>"


def _boxes(timeline: Timeline, sheet: Sheet) -> Iterator[str]:
    """A box for each action, and then the numbers that fit."""
    begin = sheet.x(timeline.start).tolist()
    end = sheet.x(timeline.end).tolist()
    paint = palette.paints(timeline).tolist()
    edge = f' stroke="{IDLE}" stroke-width="0.8"' if sheet.gap >= 1 else ""
    yield f'<g class="spans"{edge}>'
    if len(begin) <= MAX_NAMED_BOXES:
        yield from _named_boxes(timeline, sheet, begin, end, paint)
    else:
        yield from _box_paths(timeline, sheet, begin, end, paint)
    yield "</g>"
    yield from _numbers(timeline, sheet, begin, end, paint)


def _named_boxes(
    timeline: Timeline,
    sheet: Sheet,
    begin: list[float],
    end: list[float],
    paint: list[int],
) -> Iterator[str]:
    """A rectangle for each action, with a tooltip."""
    height = _n(sheet.row - sheet.gap)
    units = timeline.units
    for number, (rank, action, start, stop) in enumerate(timeline.spans()):
        name = f"{action} on rank {rank}: {write_time(start, units)} to {write_time(stop, units)}"
        yield (
            f'<rect x="{_n(begin[number])}" y="{_n(sheet.y(rank))}" width="{_n(end[number] - begin[number])}"'
            f' height="{height}" fill="{PAINTS[paint[number]].fill}"><title>{name}</title></rect>'
        )


def _box_paths(
    timeline: Timeline,
    sheet: Sheet,
    begin: list[float],
    end: list[float],
    paint: list[int],
) -> Iterator[str]:
    """One path for each paint, which takes a third of the bytes of rectangles."""
    lines: defaultdict[int, list[str]] = defaultdict(list)
    height = _n(sheet.row - sheet.gap)
    for number, span in enumerate(timeline.spans()):
        width = _n(end[number] - begin[number])
        lines[paint[number]].append(
            f"M{_n(begin[number])} {_n(sheet.y(span.rank))}h{width}v{height}h-{width}z"
        )
    for tone, boxes in lines.items():
        yield f'<path fill="{PAINTS[tone].fill}" d="{"".join(boxes)}"/>'


def _numbers(
    timeline: Timeline,
    sheet: Sheet,
    begin: list[float],
    end: list[float],
    paint: list[int],
) -> Iterator[str]:
    """The numbers that fit into their boxes.

    If short boxes have no room for `3.1`, all boxes say `3`, and the shades tell the slices.
    """
    if sheet.font < 6:
        return
    digit = sheet.font * DIGIT_WIDTH
    short_width = float(np.quantile(np.subtract(end, begin), 0.1))
    shows_slices = _longest_label(timeline) * digit <= short_width - 2
    yield f'<g class="numbers" text-anchor="middle" font-size="{_n(sheet.font)}" pointer-events="none">'
    for number, (rank, action, _, _) in enumerate(timeline.spans()):
        label = label_of(action.microbatch, action.slice if shows_slices else 0)
        if len(label) * digit <= end[number] - begin[number] - 2:
            x = (begin[number] + end[number]) / 2
            y = sheet.top + (rank + 0.5) * sheet.row + sheet.font * 0.36
            yield f'<text x="{_n(x)}" y="{_n(y)}" fill="{PAINTS[paint[number]].ink}">{label}</text>'
    yield "</g>"


def _sums(timeline: Timeline, sheet: Sheet) -> Iterator[str]:
    """A strip at the lower edge of a rank's row for each sum of gradients that it takes part in."""
    if not timeline.sums:
        return
    height = min(MAX_SUM_HEIGHT, sheet.row / 3)
    units = timeline.units
    yield f'<g class="sums" fill="{SUM_COLOUR}">'
    for one in timeline.sums:
        left, right = sheet.x(np.array([one.start, one.end])).tolist()
        times = f"{write_time(one.start, units)} to {write_time(one.end, units)}"
        title = f"<title>sum of {one.name}: {times}</title>"
        for rank in one.ranks:
            y = sheet.y(rank) + sheet.row - sheet.gap - height
            box = f'<rect x="{_n(left)}" y="{_n(y)}" width="{_n(right - left)}" height="{_n(height)}">'
            yield f"{box}{title}</rect>"
    yield "</g>"


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
    yield (
        f'<image class="spans" x="{sheet.left}" y="{_n(sheet.top)}" width="{columns}"'
        f' height="{_n(sheet.bottom - sheet.top)}" preserveAspectRatio="none" image-rendering="pixelated"'
        f' href="data:image/png;base64,{data}"/>'
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
    line = f"M{sheet.left} {_n(base)}h{_n(sheet.width)}"
    line += "".join(f"M{_n(x)} {_n(base)}v4" for x in sheet.x(times))
    yield f'<path d="{line}" stroke="{AXIS_COLOUR}" fill="none"/>'
    yield f'<g class="time" text-anchor="middle" font-size="11" fill="{AXIS_COLOUR}">'
    for time, x in zip(times.tolist(), sheet.x(times).tolist(), strict=True):
        label = write_time(time, timeline.units) if time else "0"
        yield f'<text x="{_n(x)}" y="{_n(base + 16)}">{label}</text>'
    if not timeline.units.seconds:
        unit = f'x="{sheet.left - 8}" y="{_n(base + 16)}" text-anchor="end"'
        yield f"<text {unit}>{FORWARDS[1]}</text>"
    yield "</g>"


def _legend(timeline: Timeline, sheet: Sheet) -> Iterator[str]:
    """Each op that occurs, with several shades if they have a meaning."""
    x = sheet.left
    y = sheet.bottom + 36
    meaning = " and ".join(_shade_meanings(timeline))
    levels = (0.15, 0.5, 0.85) if meaning else (0.5,)
    width = 21 / len(levels)
    yield '<g class="legend">'
    for op in palette.ops_of(timeline):
        for number, level in enumerate(levels):
            left = x + width * number
            box = f'<rect x="{_n(left)}" y="{_n(y)}" width="{_n(width)}" height="12"'
            yield f'{box} fill="{palette.paint_of(op, level).fill}"/>'
        yield f'<text x="{_n(x + 27)}" y="{_n(y + 10.5)}">{OP_NAMES[op]}</text>'
        x += 27 + 5.2 * len(OP_NAMES[op]) + 26
    if timeline.sums:
        yield f'<rect x="{_n(x)}" y="{_n(y + 4)}" width="21" height="4" fill="{SUM_COLOUR}"/>'
        yield f'<text x="{_n(x + 27)}" y="{_n(y + 10.5)}">{SUM_NAME}</text>'
        x += 27 + 5.2 * len(SUM_NAME) + 26
    yield f'<rect x="{_n(x)}" y="{_n(y)}" width="21" height="12" fill="{IDLE}" stroke="{GRID_COLOUR}"/>'
    yield f'<text x="{_n(x + 27)}" y="{_n(y + 10.5)}">idle</text>'
    if meaning:
        text = f"light to dark: {meaning}"
        yield f'<text x="{_n(x + 64)}" y="{_n(y + 10.5)}" fill="{AXIS_COLOUR}">{text}</text>'
    yield "</g>"


def _shade_meanings(timeline: Timeline) -> list[str]:
    """The meanings of light and dark."""
    meanings = []
    if int(palette.places(timeline).max()) > 0:
        meanings.append("stages of a rank")
    if timeline.schedule.slices > 1:
        meanings.append("slices of a micro-batch")
    return meanings
