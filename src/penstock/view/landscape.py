"""The page of a search for a plan: one HTML file that needs nothing else and runs no script.

┌──────────────────────────────┐
│ facts, sentences             │   what won, and how good it can be at most
│ why it won                   │   the best plan of every other kind
│ ▓▓▒▒░░  ▒▒░░                 │   heat maps; what does not fit is hatched
│ ·   ╲__·  ·                  │   time over memory, with the front
│ [][][]  [][][]               │   timelines on one time axis
│ the best rows, what is left  │   tables
└──────────────────────────────┘

This file only draws. All texts and numbers come in a `LandscapePage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape

from penstock.ir.timeline import Timeline
from penstock.view.frame import framed
from penstock.view.numbers import Scale
from penstock.view.palette import round_step
from penstock.view.report import CSS, TableRows, fact, table
from penstock.view.svg import svg

# The strongest colour of a heat map has this share of the accent, so that ink is readable on it.
MAX_TINT = 52
MIN_TINT = 5
TIMELINE_WIDTH = 920  # pixels, without the names of the ranks


class Mark(StrEnum):
    """How a cell of a heat map is drawn."""

    VALUE = "value"
    TOO_LARGE = "large"
    TOO_SLOW = "slow"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class HeatCell:
    """A cell of a heat map; `level` is 0 for the slowest and 1 for the fastest."""

    mark: Mark
    text: str
    note: str = ""  # a second, smaller line
    tip: str = ""
    level: float = 0.0
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Cells in rows and columns; None leaves a cell empty.

    A map that is not roomy leaves out the second line of its cells.
    """

    title: str
    corner: str  # what the rows and the columns are
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[HeatCell | None, ...]], ...]
    roomy: bool = True


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
class LandscapePage:
    """Everything that the page shows."""

    title: str
    facts: Sequence[tuple[str, str]]
    sentences: Sequence[str]
    warning: str  # stands out from the other sentences; empty if there is none
    reasons: Sequence[str]
    heat_sentences: Sequence[str]
    heat_maps: Sequence[HeatMap]
    front: Front
    front_heads: Sequence[str]
    front_rows: TableRows
    timelines: Sequence[tuple[str, Timeline]]
    heads: Sequence[str]
    rows: TableRows
    rows_note: str
    misfit_title: str
    misfit_heads: Sequence[str]
    misfits: TableRows


PAGE_CSS = """\
:root {
  --accent: #2a63d4; --mark: #c2410c; --warn: #fff4d6; --g0: #2a63d4; --g1: #1d8a4e; --g2: #6b7686; --plate: #fff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --accent: #7aa8ff; --mark: #ff9a5c; --warn: #3a2f12; --g0: #7aa8ff; --g1: #6fcf8c; --g2: #8b97a7; --plate: #171c23;
  }
  .timeline svg { fill: var(--ink); }
  .timeline rect[fill="#ffffff"] { fill: var(--card); }
  .timeline rect[stroke="#d7dce3"] { stroke: var(--line); }
  .timeline .spans { stroke: var(--card); }
  .timeline [fill="#5b6675"] { fill: var(--soft); }
  .timeline [stroke="#5b6675"] { stroke: var(--soft); }
}
body { max-width: 1440px; margin: 0 auto; }
h3 { font-size: 13px; font-weight: 600; margin: 0 0 6px; }
.card, .warning { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; }
.card { overflow-x: auto; }
.card p, .warning p { margin: 5px 0; max-width: 130ch; }
.warning { background: var(--warn); margin: 10px 0; }
.card ul { background: none; border: 0; padding: 0 0 0 18px; }
.card li { margin: 4px 0; max-width: 130ch; }
.card + .card, dl + .card { margin-top: 10px; }
.soft { color: var(--soft); }
.maps { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 10px; }
.maps .card { margin: 0; max-width: 100%; }
.heat { border-collapse: separate; border-spacing: 3px; margin: 0; }
.heat th { border: 0; padding: 2px 6px; text-align: center; white-space: nowrap; }
.heat tbody th { text-align: right; }
.heat thead th:first-child { text-align: right; }
.heat td {
  padding: 4px 8px; min-width: 62px; text-align: center; border-radius: 5px; white-space: normal; line-height: 1.25;
  outline: 1px solid transparent;
}
.heat td small { display: block; font-size: 11px; color: var(--soft); }
.heat td.value { background: color-mix(in srgb, var(--accent) calc(var(--tint) * 1%), var(--card)); font-weight: 600; }
.heat td.value small { font-weight: 400; color: inherit; opacity: 0.85; }
.heat td.large {
  background: repeating-linear-gradient(135deg, var(--line) 0 2px, transparent 2px 7px); outline-color: var(--line);
}
.heat td.large span { background: var(--card); box-shadow: 0 0 0 2px var(--card); border-radius: 2px; }
.heat td.large small { color: var(--ink); }
.heat td.slow, .heat td.open { outline-color: var(--line); color: var(--soft); }
.heat td.chosen { outline: 2.5px solid var(--mark); }
.heat.tight td { min-width: 40px; padding: 3px 4px; font-size: 12px; }
.heat.tight td small { display: none; }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 10px; color: var(--soft); font-size: 12px; }
.key span { display: inline-flex; align-items: center; gap: 6px; }
.key i { width: 26px; height: 13px; border-radius: 3px; outline: 1px solid var(--line); }
.key .scale { width: 70px; background: linear-gradient(90deg,
  color-mix(in srgb, var(--accent) 5%, var(--card)), color-mix(in srgb, var(--accent) 52%, var(--card))); }
.key .hatch { background: repeating-linear-gradient(135deg, var(--line) 0 2px, transparent 2px 7px); }
.key .ring { outline: 2.5px solid var(--mark); }
.front { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: 10px; }
.front .card { margin: 0; }
@media (max-width: 1100px) { .front { grid-template-columns: minmax(0, 1fr); } }
.front svg { fill: var(--ink); }
.plot .grid { stroke: var(--line); }
.plot .axis { stroke: var(--soft); fill: none; }
.plot .tick { fill: var(--soft); }
.plot .line { fill: none; stroke: var(--mark); stroke-width: 1.8; }
.plot .limit { stroke: var(--soft); stroke-dasharray: 5 4; }
.plot circle { stroke: var(--card); stroke-width: 0.8; fill-opacity: 0.85; }
.plot .halo { paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
.g0 { fill: var(--g0); background: var(--g0); }
.g1 { fill: var(--g1); background: var(--g1); }
.g2 { fill: var(--g2); background: var(--g2); }
.plot .chosen { fill: none; stroke: var(--mark); stroke-width: 2.5; }
.front td { white-space: normal; }
.front td:first-child { font-weight: 600; }
.best td:nth-child(2) { white-space: normal; min-width: 200px; }
.best tbody tr:first-child { font-weight: 600; }
.timeline { padding: 4px 6px; }
.timeline svg { max-width: 1280px; }
summary { cursor: pointer; padding: 2px 0; }
"""


def render_landscape(page: LandscapePage) -> str:
    """The HTML of the page, without its empty sections."""
    facts = "".join(fact(name, value) for name, value in page.facts)
    body = [f"<h1>{escape(page.title)}</h1>", f"<dl>{facts}</dl>"]
    if page.warning:
        body.append(f'<div class="warning"><p>{escape(page.warning)}</p></div>')
    body.append(f'<div class="card">{_paragraphs(page.sentences)}</div>')
    if page.reasons:
        items = "".join(f"<li>{escape(reason)}</li>" for reason in page.reasons)
        body.append(f'<h2>Why it won</h2>\n<div class="card"><ul>{items}</ul></div>')
    body += _heat_maps(page)
    body += _front(page)
    body += _timelines(page.timelines)
    body.append("<h2>The best plans</h2>")
    note = f'<p class="soft">{escape(page.rows_note)}</p>' if page.rows_note else ""
    body.append(f'<div class="card best">{table(page.heads, page.rows)}{note}</div>')
    if page.misfits:
        summary = f"<summary>{escape(page.misfit_title)}</summary>"
        misfits = table(page.misfit_heads, page.misfits)
        body.append("<h2>What has no plan</h2>")
        body.append(f'<details class="card" id="misfits">{summary}{misfits}</details>')
    return framed(page.title, CSS + PAGE_CSS, "\n".join(body))


def _paragraphs(sentences: Sequence[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


# ---------------------------------------------------------------- heat maps
HEAT_KEYS = {
    Mark.VALUE: (
        '<span>slower <i class="scale"></i> faster</span>'
        '<span><i class="ring"></i> the chosen plan</span>'
    ),
    Mark.TOO_LARGE: '<span><i class="hatch"></i> has no plan; the reason is in the cell or in its tooltip</span>',
    Mark.TOO_SLOW: (
        "<span><i></i> gray number: cannot win, because no plan there does better than this</span>"
    ),
    Mark.OPEN: "<span><i></i> dash: not tried, or too large</span>",
}


def _heat_maps(page: LandscapePage) -> Iterator[str]:
    """The maps, and what their colours mean."""
    if not page.heat_maps:
        return
    used = {
        cell.mark
        for heat_map in page.heat_maps
        for _, cells in heat_map.rows
        for cell in cells
        if cell is not None
    }
    key = "".join(text for mark, text in HEAT_KEYS.items() if mark in used)
    yield f"<h2>The whole space</h2>\n{_paragraphs(page.heat_sentences)}"
    yield f'<div class="key">{key}<span>Point at a cell for its plan.</span></div>'
    yield '<div class="maps">'
    for heat_map in page.heat_maps:
        yield f'<section class="card"><h3>{escape(heat_map.title)}</h3>'
        yield _heat_table(heat_map)
        yield "</section>"
    yield "</div>"


def _heat_table(heat_map: HeatMap) -> str:
    heads = "".join(
        f'<th scope="col">{escape(column)}</th>' for column in heat_map.columns
    )
    lines = []
    for name, cells in heat_map.rows:
        tds = "".join(map(_heat_cell, cells))
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{tds}</tr>')
    classes = "heat" if heat_map.roomy else "heat tight"
    corner = f"<th>{escape(heat_map.corner)}</th>"
    return (
        f'<table class="{classes}"><thead><tr>{corner}{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _heat_cell(cell: HeatCell | None) -> str:
    if cell is None:
        return "<td></td>"
    classes = f"{cell.mark} chosen" if cell.chosen else cell.mark.value
    style = ""
    if cell.mark is Mark.VALUE:
        tint = MIN_TINT + (MAX_TINT - MIN_TINT) * cell.level
        style = f' style="--tint:{tint:.0f}"'
    tip = f' title="{escape(cell.tip, quote=True)}"' if cell.tip else ""
    note = f"<small><span>{escape(cell.note)}</span></small>" if cell.note else ""
    return (
        f'<td class="{classes}"{style}{tip}><span>{escape(cell.text)}</span>{note}</td>'
    )


# ---------------------------------------------------------------- time over memory
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


def _front(page: LandscapePage) -> Iterator[str]:
    front = page.front
    shown = shown_dots(front)
    hidden = len(front.dots) - len(shown)
    yield "<h2>Time against memory</h2>"
    yield '<div class="front">'
    yield f'<figure class="card plot">{_figure(front, shown)}{_front_key(front)}'
    if hidden:
        noun = "plan is" if hidden == 1 else "plans are"
        yield f'<p class="soft">{hidden} {noun} much slower and not shown.</p>'
    yield "</figure>"
    caption = "The front: no other plan is better in both. The numbers are those in the figure."
    rows = table(page.front_heads, page.front_rows)
    yield f'<div class="card"><p class="soft">{caption}</p>{rows}</div></div>'


def _front_key(front: Front) -> str:
    used = sorted({dot.group for dot in front.dots})
    items = [
        f'<span><i class="g{group}" style="width:12px;height:12px;border-radius:6px"></i>'
        f" {escape(front.groups[group])}</span>"
        for group in used
    ]
    return f'<div class="key">{"".join(items)}</div>'


def _figure(front: Front, dots: list[Dot]) -> str:
    axes = _axes_of(front, dots)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" font-size="12" role="img">',
        "<title>The time of a step over the memory of the fullest device</title>",
        *_grid(front, axes),
        *_limit(front, axes),
        *_front_line(axes, dots),
    ]
    # The chosen plan and the front are drawn last, so that nothing covers them.
    for dot in sorted(dots, key=lambda dot: (bool(dot.label), dot.place > 0)):
        x, y = axes.place(dot.size, dot.time)
        radius = 5 if dot.place or dot.label else 3.4
        lines.append(
            f'<circle class="g{dot.group}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
            f"<title>{escape(dot.tip)}</title></circle>"
        )
        if dot.chosen:
            lines.append(f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="8"/>')
    lines += _badges(axes, dots)
    lines += _labels(axes, dots)
    lines.append("</svg>")
    return "\n".join(lines)


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
        yield f'<path class="grid" d="M{LEFT:g} {y:.1f}H{right:g}"/>'
        text = front.times.number(time, 5)
        yield f'<text class="tick" x="{LEFT - 7:g}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    for size in _ticks(axes.small, axes.large, front.sizes):
        x = axes.place(size, axes.fast)[0]
        yield f'<path class="axis" d="M{x:.1f} {bottom:g}v5"/>'
        text = front.sizes.number(size, 5)
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 19:g}" text-anchor="middle">{text}</text>'
    yield f'<path class="axis" d="M{LEFT:g} {TOP:g}V{bottom:g}H{right:g}"/>'
    across = (LEFT + right) / 2
    yield f'<text x="{across:g}" y="{bottom + 39:g}" text-anchor="middle">{escape(front.across)}</text>'
    middle = (TOP + bottom) / 2
    yield (
        f'<text transform="translate(14 {middle:g}) rotate(-90)" text-anchor="middle">'
        f"{escape(front.up)}</text>"
    )


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
    yield f'<path class="limit" d="M{x:.1f} {TOP:g}V{HEIGHT - BOTTOM:g}"/>'
    yield (
        f'<text class="tick" x="{x - 5:.1f}" y="{TOP - 8:g}" text-anchor="end">'
        "memory of a device</text>"
    )


def _front_line(axes: _Axes, dots: list[Dot]) -> Iterator[str]:
    """Steps from one dot of the front to the next: with this memory, nothing is faster."""
    line = ""
    for dot in _in_front(dots):
        x, y = axes.place(dot.size, dot.time)
        line += f"H{x:.1f}V{y:.1f}" if line else f"M{x:.1f} {TOP:g}V{y:.1f}"
    if line:
        yield f'<path class="line" d="{line}H{WIDTH - RIGHT:g}"/>'


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
        yield (
            f'<text class="halo" x="{right:.1f}" y="{base:.1f}" text-anchor="end"'
            f' font-weight="600" font-size="11">{place}</text>'
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
        yield (
            f'<text class="halo" x="{left:.1f}" y="{base:.1f}">{escape(dot.label)}</text>'
        )


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


# ---------------------------------------------------------------- timelines
def _timelines(timelines: Sequence[tuple[str, Timeline]]) -> Iterator[str]:
    if not timelines:
        return
    latest = max(timeline.makespan for _, timeline in timelines)
    note = (
        "One pass through the pipeline each, without the optimizer, on one time axis."
    )
    yield f'<h2>Timelines</h2>\n<p class="soft">{note}</p>'
    for title, timeline in timelines:
        drawing = svg(timeline, title, until=latest, width=TIMELINE_WIDTH)
        yield f'<div class="card timeline">{drawing}</div>'
