"""Figures over two axes: curves, such as those of the loss, and plans by memory and time.

    title
    4 |\\__                     ── full, 3 seeds      each series is a line; its band reaches from the lowest
    3 |   \\____                ── half skipped       to the highest of the values whose mean it is
      +----------- x

    time │ ·╎ ·                   a dot for each plan
         │  1  ·                  the numbers are places on the front
         │  └──2╌╌ chosen         the line: with this memory, nothing is faster
         └────────────── memory

The names of one or two curves stand next to the title, those of more curves next to the plot. The page that shows a
front has its colours, by the classes `.plot` and `.g0` to `.g2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

from penstock.errors import ShapeError
from penstock.view.numbers import COUNT, Scale
from penstock.view.palette import (
    element,
    figure,
    group,
    round_step,
)

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
AXIS_HEIGHT = 52.0  # for the values and the name of the axis below the plot
PLOT_AREA = "plot"  # the id of the area to which curves are clipped
LEGEND_WIDTH = 210.0
MARGIN = 24.0
LETTER_WIDTH = 6.6
MAX_INLINE_NAMES = 2  # names that fit next to the title
MAX_TICKS = 6


class Box(NamedTuple):
    """A rectangle, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, others: Iterable[Box]) -> bool:
        """Whether it overlaps one of the others."""
        return any(
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
            for other in others
        )


PLOT = Box(62.0, 44.0, 582.0, 344.0)  # the area of curves
FRONT = Box(66.0, 22.0, 742.0, 352.0)  # the area of plans by memory and time


# ---------------------------------------------------------------- axes
class Axis(NamedTuple):
    """The values of an axis and the pixels where they are."""

    name: str
    least: float
    most: float
    begin: float  # where the least value is
    end: float
    scale: Scale = COUNT

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.least) / (self.most - self.least)
        return self.begin + (self.end - self.begin) * share

    def ticks(self) -> list[tuple[str, float]]:
        """Round values that divide the axis into a few pieces, each with its pixel."""
        factor = self.scale.factor
        step = round_step((self.most - self.least) / factor, MAX_TICKS) * factor
        first = int(self.least / step) - 1
        values = [number * step for number in range(first, first + 20)]
        return [
            (self.scale.number(value, 5), self.at(value))
            for value in values
            if self.least <= value <= self.most
        ]


# The attributes of grid lines, of the axes, and of the numbers beside them.
Look = tuple[dict[str, str], dict[str, str], dict[str, str]]
DRAWN: Look = (
    {"stroke": LINE_COLOUR},
    {"stroke": TEXT_COLOUR},
    {"fill": TEXT_COLOUR},
)
STYLED: Look = ({"class_": "grid"}, {"class_": "axis"}, {"class_": "tick"})


def _axes(x: Axis, y: Axis, look: Look) -> Iterator[str]:
    """Grid lines with their values, ticks with theirs, and what both axes mean."""
    grid, axis, digits = look
    for number, height in y.ticks():
        yield _path(f"M{x.begin:g} {height:.1f}H{x.end:g}", **grid)
        right = {"text_anchor": "end", **digits}
        yield element("text", number, x=x.begin - 7, y=f"{height + 4:.1f}", **right)
    for number, across in x.ticks():
        yield _path(f"M{across:.1f} {y.begin:g}v5", **axis)
        below = {"text_anchor": "middle", **digits}
        yield element("text", number, x=f"{across:.1f}", y=y.begin + 19, **below)
    frame = f"M{x.begin:g} {y.end:g}V{y.begin:g}H{x.end:g}"
    yield _path(frame, fill="none", **axis)
    middle = (x.begin + x.end) / 2
    yield _text(x.name, middle, y.begin + 40, text_anchor="middle")
    turned = f"translate(15 {(y.begin + y.end) / 2:g}) rotate(-90)"
    yield element("text", escape(y.name), transform=turned, text_anchor="middle")


def _path(steps: str, **attributes: str | float) -> str:
    return element("path", d=steps, **attributes)


def _text(words: str, x: float, y: float, **attributes: str | float) -> str:
    """Words at a place of the figure."""
    return element("text", escape(words), x=x, y=y, **attributes)


# ---------------------------------------------------------------- curves
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

    @property
    def dash(self) -> dict[str, str]:
        """The attributes of a dashed line."""
        return {"stroke_dasharray": "6 4"} if self.dashed else {}


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
    x = _x_axis(drawn, across)
    y = _y_axis(drawn, up, top)
    colours = []
    bands: list[str] = []
    curves: list[str] = []
    for number, line in enumerate(drawn):
        colour = line.colour or COLOURS[number % len(COLOURS)]
        colours.append(colour)
        if line.low:
            around = _points(x, y, line.x, line.high)
            around += reversed(_points(x, y, line.x, line.low))
            look = {"fill": colour, "fill_opacity": "0.13"}
            bands.append(element("polygon", points=" ".join(around), **look))
        curves += _curve(x, y, line, colour, marks)
    plot = [*bands, *_moments(x, moments), *curves]
    clipped = {"clip_path": f"url(#{PLOT_AREA})"} if top is not None else {}
    size = {"width": PLOT.right - PLOT.left, "height": PLOT.bottom - PLOT.top}
    area = element("rect", x=PLOT.left, y=PLOT.top, **size)
    content = [
        _text(title, PLOT.left, 24, font_size=15, font_weight="bold"),
        *_axes(x, y, DRAWN),
        element("clipPath", area, id=PLOT_AREA),
        *group(plot, **clipped),
        *_legend(drawn, colours),
    ]
    right_margin = LEGEND_WIDTH if len(drawn) > MAX_INLINE_NAMES else MARGIN
    height = PLOT.bottom + AXIS_HEIGHT
    return figure(escape(title), PLOT.right + right_margin, height, content)


def _x_axis(lines: Sequence[Series], name: str) -> Axis:
    values = [x for line in lines for x in line.x]
    left, right = min(values), max(values)
    return Axis(name, left, right if right > left else left + 1, PLOT.left, PLOT.right)


def _y_axis(lines: Sequence[Series], name: str, top: float | None) -> Axis:
    """The axis of all values up to `top`, with a little room above and below them."""
    values: list[float] = []
    for line in lines:
        values += [*line.y, *line.low, *line.high]
    if top is not None:
        values = [min(value, top) for value in values]
    low, high = min(values), max(values)
    room = (high - low) * 0.04 or 1.0
    return Axis(name, low - room, high + room, PLOT.bottom, PLOT.top)


def _points(x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    """The positions of points, as SVG writes them."""
    pairs = zip(xs, ys, strict=True)
    return [f"{x.at(one):.1f},{y.at(other):.1f}" for one, other in pairs]


def _curve(x: Axis, y: Axis, line: Series, colour: str, marks: bool) -> Iterator[str]:
    """A line through the points, and a dot on each of them if `marks` says so."""
    points = _points(x, y, line.x, line.y)
    yield element(
        "polyline",
        points=" ".join(points),
        fill="none",
        stroke=colour,
        stroke_width=1.8,
        stroke_linejoin="round",
        **line.dash,
    )
    if marks or len(points) == 1:  # A line through one point has no length.
        for point in points:
            across, down = point.split(",")
            yield element("circle", cx=across, cy=down, r=3.2, fill=colour)


def _moments(x: Axis, moments: Sequence[tuple[float, str]]) -> Iterator[str]:
    """A numbered line from top to bottom for each moment; its tooltip says what happened."""
    for number, (moment, text) in enumerate(moments, start=1):
        if not x.least <= moment <= x.most:
            continue
        across = f"{x.at(moment):.1f}"
        steps = f"M{across} {PLOT.top:g}V{PLOT.bottom:g}"
        line = _path(steps, stroke=TEXT_COLOUR, stroke_dasharray="2 3")
        label = element(
            "text",
            str(number),
            x=across,
            y=PLOT.top - 4,
            font_size=10,
            text_anchor="middle",
            fill=TEXT_COLOUR,
        )
        yield element("g", element("title", escape(text)), line, label)


def _legend(lines: Sequence[Series], colours: Sequence[str]) -> Iterator[str]:
    """The names of the lines: beside each other above the plot, or in a column next to it."""
    is_inline = len(lines) <= MAX_INLINE_NAMES
    widths = [44 + LETTER_WIDTH * len(line.name) for line in lines]
    left = PLOT.right + 16
    if is_inline:
        left -= sum(widths)
    for number, line in enumerate(lines):
        y = 20 if is_inline else PLOT.top + 10 + 20 * number
        look = {"stroke": colours[number], "stroke_width": "2.5", **line.dash}
        yield _path(f"M{left:g} {y:g}h22", **look)
        yield _text(line.name, left + 28, y + 4)
        if is_inline:
            left += widths[number]


# ---------------------------------------------------------------- plans by memory and time
NUMBER_SIZE = 15.0  # a number on the front that meets an earlier one in squares of this size is left out
LABEL_WIDTH = 6.4  # pixels of a letter
MAX_LABEL_LINES = 12  # how far above its dot a label may stand
# Plans that take this much longer than the best are left out, unless the front or a label needs them.
MAX_SHOWN_TIME = 1.6


@dataclass(frozen=True, slots=True)
class Dot:
    """A plan in the figure of time over memory."""

    size: float
    time: float
    tip: str
    group: int  # of the names in `Front.groups`
    place: int = 0  # on the front, from 1; 0 for the others
    label: str = ""
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class Front:
    """Plans by memory and time, and the line of those that no other one beats in both."""

    dots: tuple[Dot, ...]
    groups: tuple[str, ...]
    sizes: Scale
    times: Scale
    across: str
    up: str
    limit: float | None = None  # the memory of a device


_Drawn = tuple[Dot, float, float]  # a dot and its pixel


def shown_dots(front: Front) -> list[Dot]:
    """The dots that the figure has room for: not those that are much slower than the others."""
    fastest = min(dot.time for dot in front.dots)
    named = [dot.time for dot in front.dots if dot.place or dot.label]
    slowest = max([fastest * MAX_SHOWN_TIME, *named])
    return [dot for dot in front.dots if dot.time <= slowest]


def front_figure(front: Front, dots: list[Dot]) -> str:
    """The figure of these dots, as an SVG element."""
    sizes = [dot.size for dot in dots]
    if front.limit is not None and front.limit <= 1.3 * max(sizes):
        sizes.append(front.limit)
    x = Axis(front.across, *_range(sizes, 0.06), FRONT.left, FRONT.right, front.sizes)
    times = _range([dot.time for dot in dots], 0.08)
    y = Axis(front.up, *times, FRONT.bottom, FRONT.top, front.times)
    drawn = [(dot, x.at(dot.size), y.at(dot.time)) for dot in dots]
    placed = sorted(
        (one for one in drawn if one[0].place), key=lambda one: one[0].place
    )
    content = [
        element("title", "The time of a step over the memory of the fullest device"),
        *_axes(x, y, STYLED),
        *_limit(x, front.limit),
        *_front_line(placed),
        *_dots(drawn),
        *_names(placed, drawn),
    ]
    return element(
        "svg",
        "\n".join(content),
        xmlns="http://www.w3.org/2000/svg",
        viewBox="0 0 760 400",
        font_size=12,
        role="img",
    )


def _range(values: list[float], room: float) -> tuple[float, float]:
    """The least and the greatest value, each with a share of their distance as room."""
    least, greatest = min(values), max(values)
    distance = (greatest - least) * room or greatest * 0.1 or 1.0
    return max(0.0, least - distance), greatest + distance


def _limit(x: Axis, limit: float | None) -> Iterator[str]:
    """A line at the memory of a device, if it lies in the figure."""
    if limit is None or not x.least <= limit <= x.most:
        return
    across = x.at(limit)
    yield _path(f"M{across:.1f} {FRONT.top:g}V{FRONT.bottom:g}", class_="limit")
    words = "memory of a device"
    yield _text(words, across - 5, FRONT.top - 8, class_="tick", text_anchor="end")


def _front_line(placed: list[_Drawn]) -> Iterator[str]:
    """Steps from one dot of the front to the next: with this memory, nothing is faster."""
    line = ""
    for _, x, y in placed:
        line += f"H{x:.1f}V{y:.1f}" if line else f"M{x:.1f} {FRONT.top:g}V{y:.1f}"
    if line:
        yield _path(f"{line}H{FRONT.right:g}", class_="line")


def _dots(drawn: list[_Drawn]) -> Iterator[str]:
    """All dots; those with a name and those of the front last, so that nothing covers them."""
    for dot, x, y in sorted(
        drawn, key=lambda one: (bool(one[0].label), one[0].place > 0)
    ):
        radius = 5 if dot.place or dot.label else 3.4
        tip = element("title", escape(dot.tip))
        yield element("circle", tip, class_=f"g{dot.group}", cx=x, cy=y, r=radius)
        if dot.chosen:
            yield element("circle", class_="chosen", cx=x, cy=y, r=8)


def _names(placed: list[_Drawn], drawn: list[_Drawn]) -> Iterator[str]:
    """The numbers of the front and the names of a few dots, where they cover neither each other nor such dots.

    A number stands below and left of its dot, and is left out if there is no room.
    """
    taken: list[Box] = []
    numbers: list[Box] = []
    for dot, x, y in placed:
        right, base = x - 6, y + 15
        square = Box(right - NUMBER_SIZE, base - NUMBER_SIZE, right, base)
        if square.meets(numbers):
            continue
        numbers.append(square)
        number = str(dot.place)
        taken.append(Box(right - LABEL_WIDTH * len(number), base - 9, right, base))
        bold = {"font_weight": "600", "font_size": "11"}
        yield _text(number, right, base, class_="halo", text_anchor="end", **bold)
    for dot, x, y in drawn:
        if dot.place or dot.label:
            taken.append(Box(x - 6, y - 6, x + 6, y + 6))
    named = [one for one in drawn if one[0].label]
    for dot, x, y in sorted(named, key=lambda one: one[0].time):
        width = LABEL_WIDTH * len(dot.label)
        for left, base in _label_places(x, y, width):
            box = Box(left, base - 10, left + width, base + 3)
            if not box.meets(taken):
                break
        taken.append(box)
        yield _text(dot.label, left, base, class_="halo")


def _label_places(x: float, y: float, width: float) -> Iterator[tuple[float, float]]:
    """Where a label of a dot may begin, the best place first.

       5        further above
       1
    3  ●  2
       4
    """

    def inside(left: float) -> float:
        return min(max(left, FRONT.left + 4), FRONT.right - width)

    centred = inside(x - width / 2)
    above = y - 11
    yield centred, above
    yield inside(x + 13), y + 4
    yield inside(x - 13 - width), y + 4
    yield centred, y + 23
    for lines in range(1, MAX_LABEL_LINES):
        yield centred, above - 14 * lines
