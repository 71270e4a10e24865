"""Lines over a common axis, as a figure: loss curves and the like.

    title
    4 |\\__                     ── full, 3 seeds      a line a series, in its colour; its band is from the lowest
    3 |   \\____                ── half skipped       to the highest of what it is a mean of
      +----------- x

Names of one or two lines stand beside the title, those of more beside the plot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from penstock.errors import ShapeError
from penstock.view.numbers import short
from penstock.view.palette import IDLE, INK, round_step

COLOURS = (
    "#1c4fae",
    "#d1495b",
    "#1d8a4e",
    "#a85005",
    "#6b3fa0",
    "#0b7d87",
    "#8a8a2a",
    "#5b6675",
)
TEXT_COLOUR, LINE_COLOUR = "#5b6675", "#e3e7ec"
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, LEGEND, MARGIN = (
    62.0,
    44.0,
    520.0,
    300.0,
    210.0,
    24.0,
)
INLINE_LEGEND_LINES, LETTER_WIDTH = (
    2,
    6.6,
)  # lines whose names fit beside the title; width of a letter


@dataclass(frozen=True, slots=True)
class Series:
    """A series: points from left to right, with a band around them where `low` and `high` are given."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    dashed: bool = False
    colour: str = ""  # without one: the next of COLOURS

    def __post_init__(self) -> None:
        if (
            len(self.x) != len(self.y)
            or len(self.low) != len(self.high)
            or len(self.low) not in (0, len(self.x))
        ):
            raise ShapeError(
                f"line {self.name!r} has {len(self.x)} x, {len(self.y)} y, {len(self.low)} in its band"
            )


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the axes show."""

    left: float
    right: float
    low: float
    high: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + PLOT_WIDTH * (x - self.left) / (self.right - self.left),
            TOP + PLOT_HEIGHT * (self.high - y) / (self.high - self.low),
        )


def chart(
    lines: Sequence[Series],
    title: str,
    across: str,
    up: str,
    top: float | None = None,
    marks: bool = False,
) -> str:
    """The figure, as the text of an SVG file; what is above `top` is cut off; `marks` puts a dot on each point.

    >>> chart([Series("loss", (0, 1), (2, 1))], "Training", "steps", "loss")[:4]
    '<svg'
    """
    drawn = [line for line in lines if line.x]
    if not drawn:
        raise ShapeError("a chart needs a line with points")
    frame = _frame(drawn, top)
    colours = [
        line.colour or COLOURS[number % len(COLOURS)]
        for number, line in enumerate(drawn)
    ]
    width, height = (
        LEFT + PLOT_WIDTH + (LEGEND if len(drawn) > INLINE_LEGEND_LINES else MARGIN),
        TOP + PLOT_HEIGHT + 52,
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
            f' height="{height:g}" font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="100%" height="100%" fill="{IDLE}"/>',
            f'<text x="{LEFT:g}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
            *_axes(frame, across, up),
            f'<clipPath id="plot"><rect x="{LEFT:g}" y="{TOP:g}" width="{PLOT_WIDTH:g}" height="{PLOT_HEIGHT:g}"/></clipPath>',
            '<g clip-path="url(#plot)">' if top is not None else "<g>",
            *[
                part
                for line, colour in zip(drawn, colours, strict=True)
                for part in _band(frame, line, colour)
            ],
            *[
                part
                for line, colour in zip(drawn, colours, strict=True)
                for part in _line(frame, line, colour, marks)
            ],
            "</g>",
            *_legend(drawn, colours),
            "</svg>\n",
        ]
    )


def _frame(lines: Sequence[Series], top: float | None) -> _Frame:
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for y in (*line.y, *line.low, *line.high)]
    ys = ys if top is None else [min(y, top) for y in ys]
    room = (max(ys) - min(ys)) * 0.04 or 1.0
    return _Frame(
        min(xs),
        max(xs) if max(xs) > min(xs) else min(xs) + 1,
        min(ys) - room,
        max(ys) + room,
    )


def _axes(frame: _Frame, across: str, up: str) -> Iterator[str]:
    bottom, right = TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH
    for y in _ticks(frame.low, frame.high):
        at = frame.at(frame.left, y)[1]
        yield f'<path d="M{LEFT:g} {at:.1f}H{right:g}" stroke="{LINE_COLOUR}"/>'
        yield f'<text x="{LEFT - 7:g}" y="{at + 4:.1f}" text-anchor="end" fill="{TEXT_COLOUR}">{short(y, 5)}</text>'
    for x in _ticks(frame.left, frame.right):
        at = frame.at(x, frame.low)[0]
        yield f'<path d="M{at:.1f} {bottom:g}v5" stroke="{TEXT_COLOUR}"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 19:g}" text-anchor="middle" fill="{TEXT_COLOUR}">{short(x, 5)}</text>'
    yield f'<path d="M{LEFT:g} {TOP:g}V{bottom:g}H{right:g}" fill="none" stroke="{TEXT_COLOUR}"/>'
    yield f'<text x="{LEFT + PLOT_WIDTH / 2:g}" y="{bottom + 40:g}" text-anchor="middle">{escape(across)}</text>'
    middle = TOP + PLOT_HEIGHT / 2
    yield f'<text transform="translate(15 {middle:g}) rotate(-90)" text-anchor="middle">{escape(up)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    step = round_step(high - low, 6)
    first = int(low / step) - 1
    return [
        number * step
        for number in range(first, first + 20)
        if low <= number * step <= high
    ]


def _band(frame: _Frame, line: Series, colour: str) -> Iterator[str]:
    if line.low:
        there = [frame.at(x, y) for x, y in zip(line.x, line.high, strict=True)]
        back = [frame.at(x, y) for x, y in zip(line.x, line.low, strict=True)][::-1]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*there, *back))
        yield f'<polygon points="{points}" fill="{colour}" fill-opacity="0.13"/>'


def _line(frame: _Frame, line: Series, colour: str, marks: bool) -> Iterator[str]:
    points = [frame.at(x, y) for x, y in zip(line.x, line.y, strict=True)]
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    yield (
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" stroke="{colour}"'
        f' stroke-width="1.8" stroke-linejoin="round"{dash}/>'
    )
    if marks or len(points) == 1:  # a line of one point is none
        yield from (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>'
            for x, y in points
        )


def _legend(lines: Sequence[Series], colours: Sequence[str]) -> Iterator[str]:
    few = len(lines) <= INLINE_LEGEND_LINES
    left = (
        LEFT
        + PLOT_WIDTH
        + (
            16 - sum(44 + LETTER_WIDTH * len(line.name) for line in lines)
            if few
            else 16
        )
    )
    for number, (line, colour) in enumerate(zip(lines, colours, strict=True)):
        y = 20 if few else TOP + 10 + 20 * number
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        yield f'<path d="M{left:g} {y:g}h22" stroke="{colour}" stroke-width="2.5"{dash}/>'
        yield f'<text x="{left + 28:g}" y="{y + 4:g}">{escape(line.name)}</text>'
        left += 44 + LETTER_WIDTH * len(line.name) if few else 0
