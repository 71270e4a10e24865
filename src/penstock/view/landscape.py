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
from penstock.view.front import Front, front_figure, shown_dots
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
def _front(page: LandscapePage) -> Iterator[str]:
    front = page.front
    shown = shown_dots(front)
    hidden = len(front.dots) - len(shown)
    yield "<h2>Time against memory</h2>"
    yield '<div class="front">'
    yield f'<figure class="card plot">{front_figure(front, shown)}{_front_key(front)}'
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
