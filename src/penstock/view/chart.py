"""A figure of curves over a common axis, such as loss curves.

    title
    4 |\\__                     ── full, 3 seeds      each series is a line; its band reaches from the lowest
    3 |   \\____                ── half skipped       to the highest of the values whose mean it is
      +----------- x

The names of one or two lines stand next to the title, those of more lines next to the plot.
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
TEXT_COLOUR = "#5b6675"
LINE_COLOUR = "#e3e7ec"
LEFT = 62.0
TOP = 44.0
PLOT_WIDTH = 520.0
PLOT_HEIGHT = 300.0
LEGEND_WIDTH = 210.0
MARGIN = 24.0
LETTER_WIDTH = 6.6
MAX_INLINE_NAMES = 2  # names that fit next to the title


@dataclass(frozen=True, slots=True)
class Series:
    """Points from left to right, with a band around them if `low` and `high` are given."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    dashed: bool = False
    colour: str = ""  # empty: the next of COLOURS

    def __post_init__(self) -> None:
        points = len(self.x)
        has_band = len(self.low) in (0, points) and len(self.low) == len(self.high)
        if points != len(self.y) or not has_band:
            raise ShapeError(
                f"the series {self.name!r} has {points} x values, {len(self.y)} y values, "
                f"and a band of {len(self.low)} low and {len(self.high)} high values"
            )


@dataclass(frozen=True, slots=True)
class _Frame:
    """The ranges of the axes."""

    left: float
    right: float
    low: float
    high: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a point."""
        share_x = (x - self.left) / (self.right - self.left)
        share_y = (self.high - y) / (self.high - self.low)
        return LEFT + PLOT_WIDTH * share_x, TOP + PLOT_HEIGHT * share_y

    def places(self, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
        """The pixels of points, as SVG writes them."""
        pixels = [self.place(x, y) for x, y in zip(xs, ys, strict=True)]
        return [f"{x:.1f},{y:.1f}" for x, y in pixels]


def chart(
    lines: Sequence[Series],
    title: str,
    across: str,
    up: str,
    top: float | None = None,
    marks: bool = False,
    moments: Sequence[tuple[float, str]] = (),
) -> str:
    """The text of an SVG file.

    Curves are cut off above `top`, and `marks` puts a dot on each point. `moments` are
    places on the axis with what happened there: numbered lines from top to bottom.

    >>> chart([Series("loss", (0, 1), (2, 1))], "Training", "steps", "loss")[:4]
    '<svg'
    """
    drawn = [line for line in lines if line.x]
    if not drawn:
        raise ShapeError("a chart needs a line with points")
    frame = _frame(drawn, top)
    colours = []
    bands: list[str] = []
    curves: list[str] = []
    for number, line in enumerate(drawn):
        colour = line.colour or COLOURS[number % len(COLOURS)]
        colours.append(colour)
        bands += _band(frame, line, colour)
        curves += _curve(frame, line, colour, marks)
    right_margin = LEGEND_WIDTH if len(drawn) > MAX_INLINE_NAMES else MARGIN
    width = LEFT + PLOT_WIDTH + right_margin
    height = TOP + PLOT_HEIGHT + 52
    clip = f'<rect x="{LEFT:g}" y="{TOP:g}" width="{PLOT_WIDTH:g}" height="{PLOT_HEIGHT:g}"/>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
            f' height="{height:g}" font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="100%" height="100%" fill="{IDLE}"/>',
            f'<text x="{LEFT:g}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
            *_axes(frame, across, up),
            f'<clipPath id="plot">{clip}</clipPath>',
            '<g clip-path="url(#plot)">' if top is not None else "<g>",
            *bands,
            *_moments(frame, moments),
            *curves,
            "</g>",
            *_legend(drawn, colours),
            "</svg>\n",
        ]
    )


def _frame(lines: Sequence[Series], top: float | None) -> _Frame:
    xs: list[float] = []
    ys: list[float] = []
    for line in lines:
        xs += line.x
        ys += [*line.y, *line.low, *line.high]
    if top is not None:
        ys = [min(y, top) for y in ys]
    left = min(xs)
    right = max(xs)
    if right == left:
        right = left + 1
    room = (max(ys) - min(ys)) * 0.04 or 1.0
    return _Frame(left, right, min(ys) - room, max(ys) + room)


def _axes(frame: _Frame, across: str, up: str) -> Iterator[str]:
    bottom = TOP + PLOT_HEIGHT
    right = LEFT + PLOT_WIDTH
    for y in _ticks(frame.low, frame.high):
        at = frame.place(frame.left, y)[1]
        yield f'<path d="M{LEFT:g} {at:.1f}H{right:g}" stroke="{LINE_COLOUR}"/>'
        yield f'<text x="{LEFT - 7:g}" y="{at + 4:.1f}" text-anchor="end" fill="{TEXT_COLOUR}">{short(y, 5)}</text>'
    for x in _ticks(frame.left, frame.right):
        at = frame.place(x, frame.low)[0]
        yield f'<path d="M{at:.1f} {bottom:g}v5" stroke="{TEXT_COLOUR}"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 19:g}" text-anchor="middle" fill="{TEXT_COLOUR}">{short(x, 5)}</text>'
    yield f'<path d="M{LEFT:g} {TOP:g}V{bottom:g}H{right:g}" fill="none" stroke="{TEXT_COLOUR}"/>'
    yield f'<text x="{LEFT + PLOT_WIDTH / 2:g}" y="{bottom + 40:g}" text-anchor="middle">{escape(across)}</text>'
    middle = TOP + PLOT_HEIGHT / 2
    yield f'<text transform="translate(15 {middle:g}) rotate(-90)" text-anchor="middle">{escape(up)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    step = round_step(high - low, 6)
    first = int(low / step) - 1
    multiples = [number * step for number in range(first, first + 20)]
    return [multiple for multiple in multiples if low <= multiple <= high]


def _band(frame: _Frame, line: Series, colour: str) -> Iterator[str]:
    if line.low:
        upper_edge = frame.places(line.x, line.high)
        lower_edge = frame.places(line.x, line.low)
        points = " ".join(upper_edge + lower_edge[::-1])
        yield f'<polygon points="{points}" fill="{colour}" fill-opacity="0.13"/>'


def _curve(frame: _Frame, line: Series, colour: str, marks: bool) -> Iterator[str]:
    points = " ".join(frame.places(line.x, line.y))
    yield (
        f'<polyline points="{points}" fill="none" stroke="{colour}"'
        f' stroke-width="1.8" stroke-linejoin="round"{_dash(line)}/>'
    )
    if marks or len(line.x) == 1:  # a line of one point would be invisible
        for point in zip(line.x, line.y, strict=True):
            x, y = frame.place(*point)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>'


def _moments(frame: _Frame, moments: Sequence[tuple[float, str]]) -> Iterator[str]:
    bottom = TOP + PLOT_HEIGHT
    for number, (x, text) in enumerate(moments, start=1):
        if not frame.left <= x <= frame.right:
            continue
        at = frame.place(x, frame.low)[0]
        line = f'<path d="M{at:.1f} {TOP:g}V{bottom:g}" stroke="{TEXT_COLOUR}" stroke-dasharray="2 3"/>'
        label = (
            f'<text x="{at:.1f}" y="{TOP - 4:g}" font-size="10" text-anchor="middle"'
            f' fill="{TEXT_COLOUR}">{number}</text>'
        )
        yield f"<g><title>{escape(text)}</title>{line}{label}</g>"


def _dash(line: Series) -> str:
    return ' stroke-dasharray="6 4"' if line.dashed else ""


def _legend(lines: Sequence[Series], colours: Sequence[str]) -> Iterator[str]:
    is_inline = len(lines) <= MAX_INLINE_NAMES
    widths = [44 + LETTER_WIDTH * len(line.name) for line in lines]
    left = LEFT + PLOT_WIDTH + 16
    if is_inline:
        left -= sum(widths)
    for number, line in enumerate(lines):
        y = 20 if is_inline else TOP + 10 + 20 * number
        stroke = f'stroke="{colours[number]}" stroke-width="2.5"{_dash(line)}'
        yield f'<path d="M{left:g} {y:g}h22" {stroke}/>'
        yield f'<text x="{left + 28:g}" y="{y + 4:g}">{escape(line.name)}</text>'
        if is_inline:
            left += widths[number]
