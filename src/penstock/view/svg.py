"""A timeline as a figure, in the style of the papers.

    title
    rank 0 [0][1][2]      [ 0 ][3]...      a row a rank, a box an action, its micro-batch's number in it
    rank 1    [0][1]   [ 0 ]               idle is white; the further along model and sentence, the darker
           0     5     10    15            time
    [] forward  [] backward                what the colours mean
    4 ranks · 8 micro-batches · makespan 33 · bubble 27.3%

Few boxes are drawn one by one. Of too many to see, each pixel gets the mean colour of what happens in its time.
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
from penstock.view.numbers import short, write_time
from penstock.view.palette import (
    IDLE,
    INK,
    OP_NAMES,
    PAINTS,
    label_of,
)

MAX_BOXES = 20_000  # more than so many are drawn as means
MAX_NAMED_BOXES = 2_000  # more than so many get neither a name under the mouse nor an element of their own
DIGIT_WIDTH = 0.58  # of the font's size: how wide a digit is
AXIS_COLOUR, GRID_COLOUR = "#5b6675", "#d7dce3"


@dataclass(frozen=True, slots=True)
class Sheet:
    """Where things lie, in pixels."""

    left: float
    top: float
    width: float  # of the plot
    row: float
    gap: float
    rows: int
    makespan: float

    @property
    def bottom(self) -> float:
        """Below the last row."""
        return self.top + self.rows * self.row

    @property
    def font(self) -> float:
        """Size of the numbers in boxes."""
        return min(11.0, (self.row - self.gap) * 0.62)

    def x(self, time: Floats) -> Floats:
        """Where a time lies."""
        found: Floats = self.left + time * (self.width / self.makespan)
        return found

    def y(self, rank: int) -> float:
        """The upper edge of a rank's boxes."""
        return self.top + rank * self.row + self.gap / 2


def svg(timeline: Timeline, title: str = "") -> str:
    """The figure, as the text of an SVG file.

    >>> from penstock import UnitCost, make, simulate
    >>> svg(simulate(make("1f1b", ranks=4, microbatches=8), UnitCost()))[:4]
    '<svg'
    """
    sheet = _sheet(timeline, title)
    width, height = sheet.left + sheet.width + 16, sheet.bottom + 82
    few = len(timeline.start) <= MAX_BOXES and sheet.width * sheet.rows >= 3 * len(
        timeline.start
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}"'
            f' height="{_n(height)}" font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}" role="img">',
            f"<title>{_text(title or 'Pipeline schedule')}</title>",
            f'<rect width="100%" height="100%" fill="{IDLE}"/>',
            *(
                [
                    f'<text x="{sheet.left}" y="22" font-size="15" font-weight="bold">{_text(title)}</text>'
                ]
                if title
                else []
            ),
            *_rows(sheet),
            *(_boxes(timeline, sheet) if few else _image(timeline, sheet)),
            *_axis(timeline, sheet),
            *_legend(timeline, sheet),
            f'<text x="{sheet.left}" y="{_n(sheet.bottom + 70)}">{_text(" · ".join(palette.facts(timeline)))}</text>',
            "</svg>\n",
        ]
    )


def _sheet(timeline: Timeline, title: str) -> Sheet:
    """A short box gets room for its number, as long as the whole stays on a page."""
    ranks, seconds = timeline.schedule.ranks, timeline.end - timeline.start
    brief = (
        float(np.quantile(seconds[seconds > 0], 0.1)) if (seconds > 0).any() else 1.0
    )
    wide = 7.0 * _longest(timeline) + 9
    width = float(np.clip(timeline.makespan / brief * wide, 460, 1500))
    row = float(np.clip(900 // ranks, 2, 26))
    gap = 4.0 if row >= 16 else 1.0 if row >= 5 else 0.0
    return Sheet(
        64, 36 if title else 12, round(width), row, gap, ranks, timeline.makespan or 1.0
    )


def _n(number: float) -> str:
    return short(round(number, 2), 7)


def _text(words: str) -> str:
    return escape("".join(sign for sign in words if sign.isprintable() or sign == " "))


# ---------------------------------------------------------------- what ranks do
def _rows(sheet: Sheet) -> Iterator[str]:
    """A frame around each row of boxes, or around all of them where rows are thin; ranks by name."""
    tall = sheet.gap >= 4
    for rank in range(sheet.rows if tall else 1):
        height = sheet.row - sheet.gap if tall else sheet.bottom - sheet.top
        yield (
            f'<rect x="{sheet.left}" y="{_n(sheet.y(rank))}" width="{_n(sheet.width)}" height="{_n(height)}"'
            f' fill="{IDLE}" stroke="{GRID_COLOUR}"/>'
        )
    step = (
        1
        if sheet.row >= 14
        else int(palette.round_step(sheet.rows, int(sheet.rows * sheet.row / 16)) + 0.5)
    )
    yield '<g text-anchor="end">'
    for rank in range(0, sheet.rows, max(step, 1)):
        yield f'<text x="{sheet.left - 8}" y="{_n(sheet.top + (rank + 0.5) * sheet.row + 4)}">rank {rank}</text>'
    yield "</g>"


def _boxes(timeline: Timeline, sheet: Sheet) -> Iterator[str]:
    """A rectangle a span, and then the numbers that fit."""
    begin, end = sheet.x(timeline.start).tolist(), sheet.x(timeline.end).tolist()
    paint = palette.paints(timeline).tolist()
    yield f'<g class="spans"{_edge(sheet)}>'
    yield from (_named if len(begin) <= MAX_NAMED_BOXES else _outlined)(
        timeline, sheet, begin, end, paint
    )
    yield "</g>"
    yield from _numbers(timeline, sheet, begin, end, paint)


def _named(
    timeline: Timeline,
    sheet: Sheet,
    begin: list[float],
    end: list[float],
    paint: list[int],
) -> Iterator[str]:
    height = _n(sheet.row - sheet.gap)
    units = timeline.units
    for number, (rank, action, start, stop) in enumerate(timeline.spans()):
        name = f"{action} on rank {rank}: {write_time(start, units)} to {write_time(stop, units)}"
        yield (
            f'<rect x="{_n(begin[number])}" y="{_n(sheet.y(rank))}" width="{_n(end[number] - begin[number])}"'
            f' height="{height}" fill="{PAINTS[paint[number]].fill}"><title>{name}</title></rect>'
        )


def _outlined(
    timeline: Timeline,
    sheet: Sheet,
    begin: list[float],
    end: list[float],
    paint: list[int],
) -> Iterator[str]:
    """One path a paint: a box takes a third of the letters of a rectangle."""
    lines: defaultdict[int, list[str]] = defaultdict(list)
    height = _n(sheet.row - sheet.gap)
    for number, span in enumerate(timeline.spans()):
        width = _n(end[number] - begin[number])
        lines[paint[number]].append(
            f"M{_n(begin[number])} {_n(sheet.y(span.rank))}h{width}v{height}h-{width}z"
        )
    yield from (
        f'<path fill="{PAINTS[tone].fill}" d="{"".join(line)}"/>'
        for tone, line in lines.items()
    )


def _edge(sheet: Sheet) -> str:
    return f' stroke="{IDLE}" stroke-width="0.8"' if sheet.gap >= 1 else ""


def _numbers(
    timeline: Timeline,
    sheet: Sheet,
    begin: list[float],
    end: list[float],
    paint: list[int],
) -> Iterator[str]:
    """The numbers that fit their boxes. If short boxes have no room for `3.1`, all say `3`: shades tell the slices."""
    if sheet.font < 6:
        return
    digit = sheet.font * DIGIT_WIDTH
    exact = (
        _longest(timeline) * digit
        <= float(np.quantile(np.subtract(end, begin), 0.1)) - 2
    )
    yield f'<g class="numbers" text-anchor="middle" font-size="{_n(sheet.font)}" pointer-events="none">'
    for number, (rank, action, _, _) in enumerate(timeline.spans()):
        label = label_of(action.microbatch, action.slice if exact else 0)
        if len(label) * digit <= end[number] - begin[number] - 2:
            x, y = (
                (begin[number] + end[number]) / 2,
                sheet.top + (rank + 0.5) * sheet.row + sheet.font * 0.36,
            )
            yield f'<text x="{_n(x)}" y="{_n(y)}" fill="{PAINTS[paint[number]].ink}">{label}</text>'
    yield "</g>"


def _longest(timeline: Timeline) -> int:
    """Signs of the longest label."""
    return len(
        label_of(len(timeline.schedule.microbatches) - 1, timeline.schedule.slices - 1)
    )


def _image(timeline: Timeline, sheet: Sheet) -> Iterator[str]:
    """A picture with a pixel row a rank, stretched over the rows."""
    paint, columns = palette.paints(timeline), int(sheet.width)
    pixels = np.empty((sheet.rows, columns, 3))
    for rank in range(sheet.rows):
        work, colour = palette.means(timeline, rank, columns, paint)
        pixels[rank] = 255.0 + work[:, None] * (colour - 255.0)
    data = b64encode(_png(pixels.clip(0, 255).astype(np.uint8))).decode("ascii")
    yield (
        f'<image class="spans" x="{sheet.left}" y="{_n(sheet.top)}" width="{_n(sheet.width)}"'
        f' height="{_n(sheet.bottom - sheet.top)}" preserveAspectRatio="none" image-rendering="pixelated"'
        f' href="data:image/png;base64,{data}"/>'
    )


def _png(pixels: Ints) -> bytes:
    """The smallest PNG there is: signature, header, data, end. A row begins with its filter, 0: none."""

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
    """Time under the rows, in round numbers."""
    step = palette.round_step(sheet.makespan, int(sheet.width / 70))
    times: Floats = (
        np.arange(int(sheet.makespan / step * (1 + 1e-9)) + 1).astype(np.float64) * step
    )
    base = sheet.bottom + 3
    line = f"M{sheet.left} {_n(base)}h{_n(sheet.width)}" + "".join(
        f"M{_n(x)} {_n(base)}v4" for x in sheet.x(times)
    )
    yield f'<path d="{line}" stroke="{AXIS_COLOUR}" fill="none"/>'
    yield f'<g class="time" text-anchor="middle" font-size="11" fill="{AXIS_COLOUR}">'
    for time, x in zip(times.tolist(), sheet.x(times).tolist(), strict=True):
        yield f'<text x="{_n(x)}" y="{_n(base + 16)}">{write_time(time, timeline.units) if time else 0}</text>'
    yield "</g>"


def _legend(timeline: Timeline, sheet: Sheet) -> Iterator[str]:
    """Each op that occurs, from its lightest to its darkest shade where shades have a meaning."""
    x, y = sheet.left, sheet.bottom + 36
    shaded = " and ".join(_shades(timeline))
    yield '<g class="legend">'
    for op in palette.ops_of(timeline):
        levels = (0.15, 0.5, 0.85) if shaded else (0.5,)
        wide = 21 / len(levels)
        for piece, level in enumerate(levels):
            box = f'<rect x="{_n(x + wide * piece)}" y="{_n(y)}" width="{_n(wide)}" height="12"'
            yield f'{box} fill="{palette.paint_of(op, level).fill}"/>'
        yield f'<text x="{_n(x + 27)}" y="{_n(y + 10.5)}">{OP_NAMES[op]}</text>'
        x += 27 + 5.2 * len(OP_NAMES[op]) + 26
    yield f'<rect x="{_n(x)}" y="{_n(y)}" width="21" height="12" fill="{IDLE}" stroke="{GRID_COLOUR}"/>'
    yield f'<text x="{_n(x + 27)}" y="{_n(y + 10.5)}">idle</text>'
    if shaded:
        yield f'<text x="{_n(x + 64)}" y="{_n(y + 10.5)}" fill="{AXIS_COLOUR}">light to dark: {shaded}</text>'
    yield "</g>"


def _shades(timeline: Timeline) -> list[str]:
    """What light and dark stand for."""
    several = int(palette.places(timeline).max()) > 0
    return ["stages of a rank"] * several + ["slices of a micro-batch"] * (
        timeline.schedule.slices > 1
    )
