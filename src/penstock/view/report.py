"""The report of a run and the page of a search for a plan: each one HTML file that needs nothing else.

┌──────────────────────────────┐
│ facts                        │
│ loss ╲__    norm ~~  speed ‾ │   `chart`
│ ┌──────────────────────────┐ │
│ │ predicted over measured  │ │   `page`, in a frame
│ └──────────────────────────┘ │
│ where the time went          │   a table with a row for each rank
│ why this plan                │   sentences and a table
│ memory, differences          │   lists
│ sample                       │
└──────────────────────────────┘
┌──────────────────────────────┐
│ facts, sentences             │   what won, and how good it can be at most
│ why it won                   │   the best plan of every other kind
│ ▓▓▒▒░░  ▒▒░░                 │   heat maps; what does not fit is hatched
│ ·   ╲__·  ·                  │   time over memory, with the front
│ [][][]  [][][]               │   timelines on one time axis
│ the best rows, what is left  │   tables
└──────────────────────────────┘

This file only draws. The page of a search, which runs no script, is put together by `penstock.cli.landscape`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import Any

from penstock.ir.timeline import Timeline, message_seconds, split_idle_time
from penstock.view.chart import Front, Series, chart, front_figure, shown_dots
from penstock.view.html import page
from penstock.view.numbers import write_time
from penstock.view.palette import (
    framed,
)
from penstock.view.svg import svg

TableRows = Sequence[Sequence[str]]


# Sentences, and the heads and rows of a table.
Why = tuple[Sequence[str], Sequence[str], TableRows]
Figure = tuple[str, Sequence[Series]]  # a title, and curves over the steps
MarkedMoments = Sequence[tuple[float, str]]
TIME_HEADS = (
    "rank",
    "working",
    "waiting for other ranks",
    "messages on the way",
    "host",
    "after its last action",
)

CSS = """\
:root { color-scheme: light dark; --page: #f5f6f8; --card: #fff; --ink: #1b2430; --soft: #5b6675; --line: #dde2e9; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0f1318; --card: #171c23; --ink: #e6eaf0; --soft: #97a3b3; --line: #2b333e; }
  .charts svg { fill: var(--ink); }
  .charts rect[fill="#ffffff"] { fill: var(--card); }
  .charts [fill="#5b6675"] { fill: var(--soft); }
  .charts [stroke="#5b6675"] { stroke: var(--soft); }
  .charts [stroke="#e3e7ec"] { stroke: var(--line); }
  .charts [stroke="#1c4fae"] { stroke: #7aa8ff; }
  .charts [stroke="#d1495b"] { stroke: #ff8c9b; }
  .charts [fill="#1c4fae"] { fill: #7aa8ff; }
  .charts [fill="#d1495b"] { fill: #ff8c9b; }
}
body {
  margin: 0; padding: 16px 20px; background: var(--page); color: var(--ink); font: 14px/1.45 system-ui, sans-serif;
}
h1 { font-size: 20px; margin: 0 0 12px; }
h2 { font-size: 15px; margin: 22px 0 8px; }
dl { display: flex; flex-wrap: wrap; gap: 8px; margin: 0; }
dl div, figure, ul { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 6px 12px; }
dt { color: var(--soft); font-size: 12px; }
dd { margin: 0; font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 10px; }
figure { margin: 0; }
ul { margin: 0; padding-left: 28px; }
.why, .time { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 2px 12px; }
.why, .time { overflow-x: auto; }
.why p { margin: 6px 0; max-width: 90ch; }
table { border-collapse: collapse; margin: 8px 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 18px 3px 0; white-space: nowrap; }
th { color: var(--soft); font-weight: 400; font-size: 12px; border-bottom: 1px solid var(--line); }
.why tbody tr:first-child { font-weight: 600; }
@media (max-width: 600px) { th, td { white-space: normal; padding-right: 10px; } }
svg { width: 100%; height: auto; display: block; }
iframe { width: 100%; height: min(70vh, 760px); border: 1px solid var(--line); border-radius: 8px; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow-x: auto; }
"""


def report_page(
    title: str,
    facts: Sequence[tuple[str, str]],
    figures: Sequence[Figure],
    timelines: Sequence[tuple[str, Timeline]],
    sample: str = "",
    lists: Sequence[tuple[str, Sequence[str]]] = (),
    why: Why = ((), (), ()),
    time_rows: TableRows = (),
    moments: MarkedMoments = (),
) -> str:
    """The HTML of the report, without its empty sections.

    `lists` are lines under headings, `why` explains the plan, and `time_rows` come from
    `time_rows_of`. `moments` are steps at which something happened, with what it was; all
    figures show them.

    >>> "<svg" in report_page("A run", [("steps", "3")], [("loss", [Series("train", (1, 2), (2.0, 1.0))])], [])
    True
    """
    charts = "".join(_figure(*figure, moments) for figure in figures)
    sentences, heads, rivals = why
    sections = [
        ("Curves", within("div", charts, "charts")),
        ("Predicted over measured", _frame(timelines)),
        ("Where the time went", within("div", table(TIME_HEADS, time_rows), "time")),
        (
            "Why this plan",
            within("div", paragraphs(sentences) + table(heads, rivals), "why"),
        ),
        *((name, list_of(lines)) for name, lines in lists),
        ("Sample", within("pre", escape(sample))),
    ]
    body = [heading(title, facts), *(titled(*section) for section in sections)]
    return framed(title, CSS, "\n".join(filter(None, body)))


def _frame(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """A page to explore inside of this one; nothing if there are no timelines."""
    if not timelines:
        return ""
    inner = escape(page(timelines, "One step"), quote=True)
    return f'<iframe title="Timelines of one step" srcdoc="{inner}"></iframe>'


def time_rows_of(predicted: Timeline, measured: Timeline) -> list[list[str]]:
    """The time of each rank in a measured step, as shares of the makespan.

    The prediction says how long a message takes.
    """
    idle = split_idle_time(measured, message_seconds(predicted))
    whole = measured.makespan or 1.0
    columns = (measured.busy, idle.schedule, idle.hop, idle.host, idle.end)
    rows = []
    for rank, seconds in enumerate(zip(*columns, strict=True)):
        cells = [
            f"{write_time(float(one), measured.units)} ({one / whole:.0%})"
            for one in seconds
        ]
        rows.append([str(rank), *cells])
    return rows


# ---------------------------------------------------------------- pieces of pages
def heading(title: str, facts: Sequence[tuple[str, str]]) -> str:
    """The title of a page, and names with their values; a name without a value is left out."""
    cells = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts
        if value
    ]
    return f"<h1>{escape(title)}</h1>\n<dl>{''.join(cells)}</dl>"


def soft(note: str) -> str:
    """A note in a soft colour."""
    return f'<p class="soft">{escape(note)}</p>'


def titled(title: str, content: str) -> str:
    """Some HTML under a title; nothing if there is none."""
    return f"<h2>{escape(title)}</h2>\n{content}" if content else ""


def within(tag: str, content: str, kind: str = "") -> str:
    """An element around some HTML; nothing if there is none."""
    style = f' class="{kind}"' if kind else ""
    return f"<{tag}{style}>{content}</{tag}>" if content else ""


def each(tag: str, texts: Iterable[str]) -> str:
    """An element around each text."""
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def paragraphs(sentences: Iterable[str]) -> str:
    """Sentences, each in a paragraph of its own."""
    return each("p", sentences)


def list_of(lines: Iterable[str]) -> str:
    """A list with a point for each line; nothing if there is none."""
    return within("ul", each("li", lines))


def table(heads: Sequence[str], rows: TableRows) -> str:
    """A table of texts; nothing if it has no rows."""
    lines = "".join(within("tr", each("td", row)) for row in rows)
    body = within("tbody", lines)
    head = within("thead", within("tr", each("th", heads)))
    return within("table", head + body) if body else ""


def _figure(title: str, lines: Sequence[Series], moments: MarkedMoments) -> str:
    """A chart of the finite points of each line; nothing if there are none."""
    shown = []
    for line in lines:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if isfinite(y)]
        if points:
            xs, ys = zip(*points, strict=True)
            shown.append(Series(line.name, xs, ys))
    if not shown:
        return ""
    return f"<figure>{chart(shown, title, 'step', '', moments=moments)}</figure>"


# ---------------------------------------------------------------- the page of a search
# The strongest colour of a heat map has this share of the accent, so that ink is readable on it.
MAX_TINT = 52
MIN_TINT = 5
TIMELINE_WIDTH = 920  # pixels, without the names of the ranks


@dataclass(frozen=True, slots=True)
class HeatCell:
    """A cell of a heat map; `level` is 0 for the slowest and 1 for the fastest."""

    mark: str  # of HEAT_KEYS
    text: str
    note: str = ""  # a second, smaller line
    tip: str = ""
    level: float = 0.0
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Cells by row and column, which have names; where there is no cell, the map stays empty.

    A map that is not roomy leaves out the second line of its cells.
    """

    title: str
    corner: str  # what the rows and the columns are
    cells: Mapping[tuple[Any, Any], HeatCell]
    rows: Mapping[Any, str]
    columns: Mapping[Any, str]
    roomy: bool = True


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
.front svg { fill: var(--ink); min-width: 520px; }
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
.timeline svg { max-width: 1280px; min-width: 720px; }
summary { cursor: pointer; padding: 2px 0; }
"""


# ---------------------------------------------------------------- heat maps
HEAT_KEYS = {
    "value": (
        '<span>slower <i class="scale"></i> faster</span>'
        '<span><i class="ring"></i> the chosen plan</span>'
    ),
    "large": '<span><i class="hatch"></i> has no plan; the reason is in the cell or in its tooltip</span>',
    "slow": (
        "<span><i></i> gray number: cannot win, because no plan there does better than this</span>"
    ),
    "open": "<span><i></i> dash: not tried, or too large</span>",
}


def heat_section(heat_maps: Sequence[HeatMap], sentence: str) -> Iterator[str]:
    """The maps, and what their numbers and colours mean."""
    used = {one.mark for heat_map in heat_maps for one in heat_map.cells.values()}
    key = "".join(text for mark, text in HEAT_KEYS.items() if mark in used)
    yield f"<h2>The whole space</h2>\n{paragraphs([sentence])}"
    yield f'<div class="key">{key}<span>Point at a cell for its plan.</span></div>'
    yield '<div class="maps">'
    for heat_map in heat_maps:
        title = f"<h3>{escape(heat_map.title)}</h3>"
        yield f'<section class="card">{title}\n{_heat_table(heat_map)}\n</section>'
    yield "</div>"


def _heat_table(heat_map: HeatMap) -> str:
    heads = "".join(
        f'<th scope="col">{escape(name)}</th>' for name in heat_map.columns.values()
    )
    lines = []
    for row, name in heat_map.rows.items():
        cells = [heat_map.cells.get((row, column)) for column in heat_map.columns]
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
    classes = f"{cell.mark} chosen" if cell.chosen else cell.mark
    style = ""
    if cell.mark == "value":
        tint = MIN_TINT + (MAX_TINT - MIN_TINT) * cell.level
        style = f' style="--tint:{tint:.0f}"'
    tip = f' title="{escape(cell.tip, quote=True)}"' if cell.tip else ""
    note = f"<small><span>{escape(cell.note)}</span></small>" if cell.note else ""
    return (
        f'<td class="{classes}"{style}{tip}><span>{escape(cell.text)}</span>{note}</td>'
    )


# ---------------------------------------------------------------- time over memory
def front_section(front: Front, plans: str) -> Iterator[str]:
    """The figure of time over memory, and the table of its front."""
    shown = shown_dots(front)
    hidden = len(front.dots) - len(shown)
    used = sorted({dot.group for dot in front.dots})
    key = "".join(
        f'<span><i class="g{group}" style="width:12px;height:12px;border-radius:6px"></i>'
        f" {escape(front.groups[group])}</span>"
        for group in used
    )
    yield "<h2>Time against memory</h2>"
    yield '<div class="front">'
    yield f'<figure class="card plot">{front_figure(front, shown)}<div class="key">{key}</div>'
    if hidden:
        noun = "plan is" if hidden == 1 else "plans are"
        yield soft(f"{hidden} {noun} much slower and not shown.")
    yield "</figure>"
    yield f'<div class="card">{plans}</div></div>'


# ---------------------------------------------------------------- timelines
def timeline_section(timelines: Sequence[tuple[str, Timeline]]) -> Iterator[str]:
    """Timelines one below the other, on one time axis."""
    latest = max(timeline.makespan for _, timeline in timelines)
    note = (
        "One pass through the pipeline each, without the optimizer, on one time axis."
    )
    yield f"<h2>Timelines</h2>\n{soft(note)}"
    for title, timeline in timelines:
        drawing = svg(timeline, title, until=latest, width=TIMELINE_WIDTH)
        yield f'<div class="card timeline">{drawing}</div>'
