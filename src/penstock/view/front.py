"""A figure of plans by memory and time, and the line of those that no other plan beats in both.

    time │ ·╎ ·                   a dot for each plan
         │  1  ·                  the numbers are places on the front
         │  └──2╌╌ chosen         the line: with this memory, nothing is faster
         └────────────── memory

The page that shows it has the colours, by the classes `.plot` and `.g0` to `.g2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from penstock.view.element import element
from penstock.view.numbers import Scale
from penstock.view.palette import round_step

WIDTH = 760.0
HEIGHT = 400.0
LEFT = 66.0
RIGHT = 18.0
TOP = 22.0
BOTTOM = 48.0
END = WIDTH - RIGHT  # of the axis of memory
FLOOR = HEIGHT - BOTTOM  # where that axis lies
BADGE_DISTANCE = 15.0  # numbers on the front that are closer than this are left out
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


@dataclass(frozen=True, slots=True)
class _Axes:
    """The ranges of the figure."""

    small: float
    large: float
    fast: float
    slow: float

    def place(self, size: float, time: float) -> tuple[float, float]:
        """The pixel of a plan."""
        return self.x(size), self.y(time)

    def x(self, size: float) -> float:
        """How far to the right a size is, in pixels."""
        share = (size - self.small) / (self.large - self.small)
        return LEFT + (END - LEFT) * share

    def y(self, time: float) -> float:
        """How far down a time is, in pixels."""
        share = (self.slow - time) / (self.slow - self.fast)
        return TOP + (FLOOR - TOP) * share


def shown_dots(front: Front) -> list[Dot]:
    """The dots that the figure has room for: not those that are much slower than the others."""
    fastest = min(dot.time for dot in front.dots)
    named = [dot.time for dot in front.dots if dot.place or dot.label]
    slowest = max([fastest * MAX_SHOWN_TIME, *named])
    return [dot for dot in front.dots if dot.time <= slowest]


def front_figure(front: Front, dots: list[Dot]) -> str:
    """The figure of these dots, as an SVG element."""
    axes = _axes_of(front, dots)
    title = "The time of a step over the memory of the fullest device"
    content = [
        element("title", title),
        *_grid(front, axes),
        *_limit(front, axes),
        *_front_line(axes, dots),
        *_dots(axes, dots),
        *_badges(axes, dots),
        *_labels(axes, dots),
    ]
    return element(
        "svg",
        "\n".join(content),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        font_size=12,
        role="img",
    )


def _dots(axes: _Axes, dots: list[Dot]) -> Iterator[str]:
    """All dots; those with a name and those of the front last, so that nothing covers them."""
    for dot in sorted(dots, key=lambda dot: (bool(dot.label), dot.place > 0)):
        x, y = axes.place(dot.size, dot.time)
        radius = 5 if dot.place or dot.label else 3.4
        tip = element("title", escape(dot.tip))
        yield element("circle", tip, class_=f"g{dot.group}", cx=x, cy=y, r=radius)
        if dot.chosen:
            yield element("circle", class_="chosen", cx=x, cy=y, r=8)


def _axes_of(front: Front, dots: list[Dot]) -> _Axes:
    """Ranges that have all dots and some room around them, and the limit if it is not far away."""
    sizes = [dot.size for dot in dots]
    times = [dot.time for dot in dots]
    if front.limit is not None and front.limit <= 1.3 * max(sizes):
        sizes.append(front.limit)
    small, large = _range(sizes, 0.06)
    fast, slow = _range(times, 0.08)
    return _Axes(small, large, fast, slow)


def _range(values: list[float], room: float) -> tuple[float, float]:
    """The least and the greatest value, each with a share of their distance as room."""
    least = min(values)
    greatest = max(values)
    distance = (greatest - least) * room
    if distance == 0:
        distance = greatest * 0.1 or 1.0
    return max(0.0, least - distance), greatest + distance


def _grid(front: Front, axes: _Axes) -> Iterator[str]:
    """The two axes, with numbers and names."""
    yield from _time_lines(front, axes)
    yield from _size_marks(front, axes)
    yield _path("axis", f"M{LEFT:g} {TOP:g}V{FLOOR:g}H{END:g}")
    yield _text(front.across, (LEFT + END) / 2, FLOOR + 39, text_anchor="middle")
    turned = f"translate(14 {(TOP + FLOOR) / 2:g}) rotate(-90)"
    yield element("text", escape(front.up), transform=turned, text_anchor="middle")


def _time_lines(front: Front, axes: _Axes) -> Iterator[str]:
    """A line across the figure for each round time."""
    for time in _ticks(axes.fast, axes.slow, front.times):
        y = axes.y(time)
        number = front.times.number(time, 5)
        yield _path("grid", f"M{LEFT:g} {y:.1f}H{END:g}")
        yield _text(number, LEFT - 7, y + 4, class_="tick", text_anchor="end")


def _size_marks(front: Front, axes: _Axes) -> Iterator[str]:
    """A mark below the figure for each round size."""
    for size in _ticks(axes.small, axes.large, front.sizes):
        x = axes.x(size)
        number = front.sizes.number(size, 5)
        yield _path("axis", f"M{x:.1f} {FLOOR:g}v5")
        yield _text(number, x, FLOOR + 19, class_="tick", text_anchor="middle")


def _path(kind: str, steps: str) -> str:
    """A line of a kind that the style sheet of the page knows."""
    return element("path", class_=kind, d=steps)


def _text(words: str, x: float, y: float, **attributes: str | float) -> str:
    """Words at a place of the figure."""
    return element("text", escape(words), x=x, y=y, **attributes)


def _ticks(low: float, high: float, scale: Scale) -> list[float]:
    """Round numbers of the scale's unit between two values."""
    step = round_step((high - low) / scale.factor, 7) * scale.factor
    first = int(low / step)
    multiples = [number * step for number in range(first, first + 12)]
    return [one for one in multiples if low <= one <= high]


def _limit(front: Front, axes: _Axes) -> Iterator[str]:
    """A line at the memory of a device, if it lies in the figure."""
    if front.limit is None or not axes.small <= front.limit <= axes.large:
        return
    x = axes.x(front.limit)
    yield _path("limit", f"M{x:.1f} {TOP:g}V{FLOOR:g}")
    words = "memory of a device"
    yield _text(words, x - 5, TOP - 8, class_="tick", text_anchor="end")


def _front_line(axes: _Axes, dots: list[Dot]) -> Iterator[str]:
    """Steps from one dot of the front to the next: with this memory, nothing is faster."""
    line = ""
    for dot in _in_front(dots):
        x, y = axes.place(dot.size, dot.time)
        line += f"H{x:.1f}V{y:.1f}" if line else f"M{x:.1f} {TOP:g}V{y:.1f}"
    if line:
        yield _path("line", f"{line}H{END:g}")


def _in_front(dots: list[Dot]) -> list[Dot]:
    """The dots of the front, in the order of their places."""
    placed = [dot for dot in dots if dot.place]
    return sorted(placed, key=lambda dot: dot.place)


@dataclass(frozen=True, slots=True)
class _Badge:
    """A number on the front and where it stands, in pixels."""

    right: float
    base: float
    number: int

    def near(self, other: _Badge) -> bool:
        """Whether two numbers would be hard to tell apart."""
        across = abs(self.right - other.right)
        up = abs(self.base - other.base)
        return max(across, up) < BADGE_DISTANCE


def _badge_places(axes: _Axes, dots: list[Dot]) -> list[_Badge]:
    """Where the numbers of the front stand: below and left of their dots, if they have room."""
    placed: list[_Badge] = []
    for dot in _in_front(dots):
        x, y = axes.place(dot.size, dot.time)
        badge = _Badge(x - 6, y + 15, dot.place)
        if not any(badge.near(other) for other in placed):
            placed.append(badge)
    return placed


def _badges(axes: _Axes, dots: list[Dot]) -> Iterator[str]:
    """The numbers of the front."""
    for badge in _badge_places(axes, dots):
        yield _text(
            str(badge.number),
            badge.right,
            badge.base,
            class_="halo",
            text_anchor="end",
            font_weight="600",
            font_size=11,
        )


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle of the figure, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        """Whether two boxes overlap."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def _labels(axes: _Axes, dots: list[Dot]) -> Iterator[str]:
    """The names of a few dots, where they cover neither each other nor a dot or number of the front."""
    taken = _taken_boxes(axes, dots)
    named = [dot for dot in dots if dot.label]
    for dot in sorted(named, key=lambda dot: dot.time):
        x, y = axes.place(dot.size, dot.time)
        width = LABEL_WIDTH * len(dot.label)
        for left, base in _label_places(x, y, width):
            box = _Box(left, base - 10, left + width, base + 3)
            if not any(box.meets(other) for other in taken):
                break
        taken.append(box)
        yield _text(dot.label, left, base, class_="halo")


def _taken_boxes(axes: _Axes, dots: list[Dot]) -> list[_Box]:
    """What labels must not cover: the numbers of the front, its dots, and dots with a label."""
    taken = []
    for badge in _badge_places(axes, dots):
        width = LABEL_WIDTH * len(str(badge.number))
        left = badge.right - width
        taken.append(_Box(left, badge.base - 9, badge.right, badge.base))
    for dot in dots:
        if dot.place or dot.label:
            x, y = axes.place(dot.size, dot.time)
            taken.append(_Box(x - 6, y - 6, x + 6, y + 6))
    return taken


def _label_places(x: float, y: float, width: float) -> Iterator[tuple[float, float]]:
    """Where a label of a dot may begin, the best place first.

       5        further above
       1
    3  ●  2
       4
    """
    last = END - width

    def inside(left: float) -> float:
        return min(max(left, LEFT + 4), last)

    centred = inside(x - width / 2)
    above = y - 11
    yield centred, above
    yield inside(x + 13), y + 4
    yield inside(x - 13 - width), y + 4
    yield centred, y + 23
    for lines in range(1, MAX_LABEL_LINES):
        yield centred, above - 14 * lines
