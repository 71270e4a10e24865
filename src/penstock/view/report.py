"""The report of a run: one HTML file that needs nothing else.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite

from penstock.ir.idle import message_seconds, split_idle_time
from penstock.ir.timeline import Timeline
from penstock.view.chart import Series, chart
from penstock.view.frame import framed
from penstock.view.html import page
from penstock.view.numbers import write_time

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
    cells = [fact(name, value) for name, value in facts]
    body = [f"<h1>{escape(title)}</h1>", f"<dl>{''.join(cells)}</dl>"]
    charts = "".join(_figure(*figure, moments) for figure in figures)
    if charts:
        body.append(f'<h2>Curves</h2>\n<div class="charts">{charts}</div>')
    if timelines:
        inner = escape(page(timelines, "One step"), quote=True)
        frame = f'<iframe title="Timelines of one step" srcdoc="{inner}"></iframe>'
        body.append(f"<h2>Predicted over measured</h2>\n{frame}")
    if time_rows:
        times = table(TIME_HEADS, time_rows)
        body.append(f'<h2>Where the time went</h2>\n<div class="time">{times}</div>')
    if why[0]:
        sentences, heads, rows = why
        paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
        rivals = table(heads, rows) if rows else ""
        block = f'<div class="why">{paragraphs}{rivals}</div>'
        body.append(f"<h2>Why this plan</h2>\n{block}")
    for heading, lines in lists:
        if lines:
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            body.append(f"<h2>{escape(heading)}</h2>\n<ul>{items}</ul>")
    if sample:
        body.append(f"<h2>Sample</h2>\n<pre>{escape(sample)}</pre>")
    return framed(title, CSS, "\n".join(body))


def time_rows_of(predicted: Timeline, measured: Timeline) -> list[list[str]]:
    """The time of each rank in a measured step, as shares of the makespan.

    The prediction says how long a message takes.
    """
    idle_seconds = split_idle_time(measured, message_seconds(predicted))
    rows = []
    for rank, working in enumerate(measured.busy.tolist()):
        seconds = (
            working,
            idle_seconds.schedule[rank],
            idle_seconds.hop[rank],
            idle_seconds.host[rank],
            idle_seconds.end[rank],
        )
        cells = [_share(each, measured) for each in seconds]
        rows.append([str(rank), *cells])
    return rows


def _share(seconds: float, timeline: Timeline) -> str:
    share = seconds / (timeline.makespan or 1.0)
    return f"{write_time(seconds, timeline.units)} ({share:.0%})"


def fact(name: str, value: str) -> str:
    """A name and its value, as an item of a `dl`."""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


def table(heads: Sequence[str], rows: TableRows) -> str:
    """A table of texts."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    body = "".join(lines)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


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
