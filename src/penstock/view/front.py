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
        x = (size - self.small) / (self.large - self.small)
        y = (self.slow - time) / (self.slow - self.fast)
        return LEFT + (WIDTH - LEFT - RIGHT) * x, TOP + (HEIGHT - TOP - BOTTOM) * y


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
    sizes = [dot.size for dot in dots]
    times = [dot.time for dot in dots]
    if front.limit is not None and front.limit <= 1.3 * max(sizes):
        sizes.append(front.limit)
    size_room = (max(sizes) - min(sizes)) * 0.06 or max(sizes) * 0.1 or 1.0
    time_room = (max(times) - min(times)) * 0.08 or max(times) * 0.1 or 1.0
    return _Axes(
        max(0.0, min(sizes) - size_room),
        max(sizes) + size_room,
        max(0.0, min(times) - time_room),
        max(times) + time_room,
    )


def _grid(front: Front, axes: _Axes) -> Iterator[str]:
    bottom = HEIGHT - BOTTOM
    right = WIDTH - RIGHT
    for time in _ticks(axes.fast, axes.slow, front.times):
        y = axes.place(axes.small, time)[1]
        text = front.times.number(time, 5)
        yield _path("grid", f"M{LEFT:g} {y:.1f}H{right:g}")
        yield _text(text, LEFT - 7, y + 4, class_="tick", text_anchor="end")
    for size in _ticks(axes.small, axes.large, front.sizes):
        x = axes.place(size, axes.fast)[0]
        text = front.sizes.number(size, 5)
        yield _path("axis", f"M{x:.1f} {bottom:g}v5")
        yield _text(text, x, bottom + 19, class_="tick", text_anchor="middle")
    yield _path("axis", f"M{LEFT:g} {TOP:g}V{bottom:g}H{right:g}")
    yield _text(front.across, (LEFT + right) / 2, bottom + 39, text_anchor="middle")
    turned = f"translate(14 {(TOP + bottom) / 2:g}) rotate(-90)"
    yield element("text", escape(front.up), transform=turned, text_anchor="middle")


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
    x = axes.place(front.limit, axes.fast)[0]
    yield _path("limit", f"M{x:.1f} {TOP:g}V{HEIGHT - BOTTOM:g}")
    words = "memory of a device"
    yield _text(words, x - 5, TOP - 8, class_="tick", text_anchor="end")


def _front_line(axes: _Axes, dots: list[Dot]) -> Iterator[str]:
    """Steps from one dot of the front to the next: with this memory, nothing is faster."""
    line = ""
    for dot in _in_front(dots):
        x, y = axes.place(dot.size, dot.time)
        line += f"H{x:.1f}V{y:.1f}" if line else f"M{x:.1f} {TOP:g}V{y:.1f}"
    if line:
        yield _path("line", f"{line}H{WIDTH - RIGHT:g}")


def _in_front(dots: list[Dot]) -> list[Dot]:
    return sorted((dot for dot in dots if dot.place), key=lambda dot: dot.place)


def _badge_places(axes: _Axes, dots: list[Dot]) -> list[tuple[float, float, int]]:
    """Where the numbers of the front stand: below and left of their dots, if they have room."""
    placed: list[tuple[float, float, int]] = []
    for dot in _in_front(dots):
        x, y = axes.place(dot.size, dot.time)
        right, base = x - 6, y + 15
        near = any(
            max(abs(right - other), abs(base - other_base)) < BADGE_DISTANCE
            for other, other_base, _ in placed
        )
        if not near:
            placed.append((right, base, dot.place))
    return placed


def _badges(axes: _Axes, dots: list[Dot]) -> Iterator[str]:
    """The numbers of the front."""
    for right, base, place in _badge_places(axes, dots):
        yield _text(
            str(place),
            right,
            base,
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
    taken = []
    for right, base, place in _badge_places(axes, dots):
        width = LABEL_WIDTH * len(str(place))
        taken.append(_Box(right - width, base - 9, right, base))
    for dot in dots:
        if dot.place or dot.label:
            x, y = axes.place(dot.size, dot.time)
            taken.append(_Box(x - 6, y - 6, x + 6, y + 6))
    for dot in sorted((dot for dot in dots if dot.label), key=lambda dot: dot.time):
        x, y = axes.place(dot.size, dot.time)
        width = LABEL_WIDTH * len(dot.label)
        for left, base in _label_places(x, y, width):
            box = _Box(left, base - 10, left + width, base + 3)
            if not any(box.meets(other) for other in taken):
                break
        taken.append(box)
        yield _text(dot.label, left, base, class_="halo")


def _label_places(x: float, y: float, width: float) -> Iterator[tuple[float, float]]:
    """Where a label of a dot may begin, the best place first: above it, beside it, below it, further above."""
    last = WIDTH - RIGHT - width

    def inside(left: float) -> float:
        return min(max(left, LEFT + 4), last)

    yield inside(x - width / 2), y - 11
    yield inside(x + 13), y + 4
    yield inside(x - 13 - width), y + 4
    yield inside(x - width / 2), y + 23
    for lines in range(1, MAX_LABEL_LINES):
        yield inside(x - width / 2), y - 11 - 14 * lines
