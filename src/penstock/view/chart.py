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
from penstock.view.element import element, figure, group
from penstock.view.numbers import short
from penstock.view.palette import round_step

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
PLOT_LEFT = 62.0
PLOT_TOP = 44.0
PLOT_WIDTH = 520.0
PLOT_HEIGHT = 300.0
PLOT_RIGHT = PLOT_LEFT + PLOT_WIDTH
PLOT_BOTTOM = PLOT_TOP + PLOT_HEIGHT
AXIS_HEIGHT = 52.0  # for the values and the name of the axis below the plot
PLOT_AREA = "plot"  # the id of the area to which curves are clipped
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

    def x(self, value: float) -> float:
        """The horizontal position of a value, in pixels."""
        share = (value - self.left) / (self.right - self.left)
        return PLOT_LEFT + PLOT_WIDTH * share

    def y(self, value: float) -> float:
        """The vertical position of a value, in pixels."""
        share = (self.high - value) / (self.high - self.low)
        return PLOT_TOP + PLOT_HEIGHT * share

    def points(self, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
        """The positions of points, as SVG writes them."""
        pairs = zip(xs, ys, strict=True)
        return [f"{_pixel(self.x(x))},{_pixel(self.y(y))}" for x, y in pairs]


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
    plot = [*bands, *_moments(frame, moments), *curves]
    clipped = {"clip_path": f"url(#{PLOT_AREA})"} if top is not None else {}
    content = [
        element(
            "text", escape(title), x=PLOT_LEFT, y=24, font_size=15, font_weight="bold"
        ),
        *_axes(frame, across, up),
        _plot_area(),
        *group(plot, **clipped),
        *_legend(drawn, colours),
    ]
    right_margin = LEGEND_WIDTH if len(drawn) > MAX_INLINE_NAMES else MARGIN
    width = PLOT_LEFT + PLOT_WIDTH + right_margin
    height = PLOT_TOP + PLOT_HEIGHT + AXIS_HEIGHT
    return figure(escape(title), width, height, content)


def _frame(lines: Sequence[Series], top: float | None) -> _Frame:
    """The ranges in which all points lie, with a little room above and below them."""
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


def _pixel(number: float) -> str:
    """A position to a tenth of a pixel."""
    return f"{number:.1f}"


def _plot_area() -> str:
    """The area to which curves are clipped."""
    area = element(
        "rect", x=PLOT_LEFT, y=PLOT_TOP, width=PLOT_WIDTH, height=PLOT_HEIGHT
    )
    return element("clipPath", area, id=PLOT_AREA)


# ---------------------------------------------------------------- axes
def _axes(frame: _Frame, across: str, up: str) -> Iterator[str]:
    """Grid lines with their values, ticks with theirs, and what both axes mean."""
    for value in _ticks(frame.low, frame.high):
        yield from _grid_line(frame, value)
    for value in _ticks(frame.left, frame.right):
        yield from _tick(frame, value)
    yield element(
        "path",
        d=f"M{PLOT_LEFT:g} {PLOT_TOP:g}V{PLOT_BOTTOM:g}H{PLOT_RIGHT:g}",
        fill="none",
        stroke=TEXT_COLOUR,
    )
    yield element(
        "text",
        escape(across),
        x=PLOT_LEFT + PLOT_WIDTH / 2,
        y=PLOT_BOTTOM + 40,
        text_anchor="middle",
    )
    middle = PLOT_TOP + PLOT_HEIGHT / 2
    yield element(
        "text",
        escape(up),
        transform=f"translate(15 {middle:g}) rotate(-90)",
        text_anchor="middle",
    )


def _grid_line(frame: _Frame, value: float) -> Iterator[str]:
    """A line across the plot, with its value to the left."""
    y = frame.y(value)
    yield element(
        "path", d=f"M{PLOT_LEFT:g} {_pixel(y)}H{PLOT_RIGHT:g}", stroke=LINE_COLOUR
    )
    yield element(
        "text",
        short(value, 5),
        x=PLOT_LEFT - 7,
        y=_pixel(y + 4),
        text_anchor="end",
        fill=TEXT_COLOUR,
    )


def _tick(frame: _Frame, value: float) -> Iterator[str]:
    """A tick below the plot, with its value."""
    x = _pixel(frame.x(value))
    yield element("path", d=f"M{x} {PLOT_BOTTOM:g}v5", stroke=TEXT_COLOUR)
    yield element(
        "text",
        short(value, 5),
        x=x,
        y=PLOT_BOTTOM + 19,
        text_anchor="middle",
        fill=TEXT_COLOUR,
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round values that divide a range into at most six pieces."""
    step = round_step(high - low, 6)
    first = int(low / step) - 1
    multiples = [number * step for number in range(first, first + 20)]
    return [multiple for multiple in multiples if low <= multiple <= high]


# ---------------------------------------------------------------- lines
def _band(frame: _Frame, line: Series, colour: str) -> Iterator[str]:
    """The area between the lowest and the highest values, if a line has them."""
    if not line.low:
        return
    upper_edge = frame.points(line.x, line.high)
    lower_edge = frame.points(line.x, line.low)
    around = " ".join(upper_edge + lower_edge[::-1])
    yield element("polygon", points=around, fill=colour, fill_opacity=0.13)


def _curve(frame: _Frame, line: Series, colour: str, marks: bool) -> Iterator[str]:
    """A line through the points, and a dot on each of them if `marks` says so."""
    yield element(
        "polyline",
        points=" ".join(frame.points(line.x, line.y)),
        fill="none",
        stroke=colour,
        stroke_width=1.8,
        stroke_linejoin="round",
        **_dash(line),
    )
    is_invisible = len(line.x) == 1  # A line through one point has no length.
    if marks or is_invisible:
        for x, y in zip(line.x, line.y, strict=True):
            cx = _pixel(frame.x(x))
            cy = _pixel(frame.y(y))
            yield element("circle", cx=cx, cy=cy, r=3.2, fill=colour)


def _dash(line: Series) -> dict[str, str]:
    return {"stroke_dasharray": "6 4"} if line.dashed else {}


def _moments(frame: _Frame, moments: Sequence[tuple[float, str]]) -> Iterator[str]:
    """A numbered line from top to bottom for each moment; its tooltip says what happened."""
    for number, (moment, text) in enumerate(moments, start=1):
        if not frame.left <= moment <= frame.right:
            continue
        x = _pixel(frame.x(moment))
        line = element(
            "path",
            d=f"M{x} {PLOT_TOP:g}V{PLOT_BOTTOM:g}",
            stroke=TEXT_COLOUR,
            stroke_dasharray="2 3",
        )
        label = element(
            "text",
            str(number),
            x=x,
            y=PLOT_TOP - 4,
            font_size=10,
            text_anchor="middle",
            fill=TEXT_COLOUR,
        )
        yield element("g", element("title", escape(text)), line, label)


def _legend(lines: Sequence[Series], colours: Sequence[str]) -> Iterator[str]:
    """The names of the lines: beside each other above the plot, or in a column next to it."""
    is_inline = len(lines) <= MAX_INLINE_NAMES
    widths = [44 + LETTER_WIDTH * len(line.name) for line in lines]
    left = PLOT_RIGHT + 16
    if is_inline:
        left -= sum(widths)
    for number, line in enumerate(lines):
        y = 20 if is_inline else PLOT_TOP + 10 + 20 * number
        yield element(
            "path",
            d=f"M{left:g} {y:g}h22",
            stroke=colours[number],
            stroke_width=2.5,
            **_dash(line),
        )
        yield element("text", escape(line.name), x=left + 28, y=y + 4)
        if is_inline:
            left += widths[number]
