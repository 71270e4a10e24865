"""A run on one page: figures, curves, the timelines, a sample of text. One HTML file that needs nothing else.

┌──────────────────────────────┐
│ facts                        │
│ loss ╲__    norm ~~  speed ‾ │   `chart`
│ ┌──────────────────────────┐ │
│ │ predicted over measured  │ │   `page`, in a frame of its own
│ └──────────────────────────┘ │
│ why this plan                │   sentences and a table
│ memory, differences          │   lists
│ sample                       │
└──────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite

from penstock.ir.timeline import Timeline
from penstock.view.chart import Series, chart
from penstock.view.frame import framed
from penstock.view.html import page

Why = tuple[
    Sequence[str], Sequence[str], Sequence[Sequence[str]]
]  # sentences; heads and rows of a table
Figure = tuple[str, Sequence[Series]]  # a title, and curves over the steps

CSS = """\
:root { color-scheme: light dark; --page: #f5f6f8; --card: #fff; --ink: #1b2430; --soft: #5b6675; --line: #dde2e9; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0f1318; --card: #171c23; --ink: #e6eaf0; --soft: #97a3b3; --line: #2b333e; }
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
.why { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 2px 12px; }
.why { overflow-x: auto; }
.why p { margin: 6px 0; max-width: 90ch; }
table { border-collapse: collapse; margin: 8px 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 18px 3px 0; white-space: nowrap; }
th { color: var(--soft); font-weight: 400; font-size: 12px; border-bottom: 1px solid var(--line); }
tbody tr:first-child { font-weight: 600; }
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
) -> str:
    """The text of the page; empty sections are left out. `lists`: lines under a heading each; `why`: why this plan.

    >>> "<svg" in report_page("A run", [("steps", "3")], [("loss", [Series("train", (1, 2), (2.0, 1.0))])], [])
    True
    """
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts
    )
    body = [f"<dl>{cells}</dl>"]
    drawn = "".join(_figure(*figure) for figure in figures)
    if drawn:
        body.append(f'<h2>Curves</h2>\n<div class="charts">{drawn}</div>')
    if timelines:
        words = escape(page(timelines, "One step"), quote=True)
        frame = f'<iframe title="Timelines of one step" srcdoc="{words}"></iframe>'
        body.append(f"<h2>Predicted over measured</h2>\n{frame}")
    if why[0]:
        body.append(f'<h2>Why this plan</h2>\n<div class="why">{_reasons(*why)}</div>')
    for heading, lines in lists:
        if lines:
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            body.append(f"<h2>{escape(heading)}</h2>\n<ul>{items}</ul>")
    if sample:
        body.append(f"<h2>Sample</h2>\n<pre>{escape(sample)}</pre>")
    return framed(title, CSS, "\n".join([f"<h1>{escape(title)}</h1>", *body]))


def _reasons(
    sentences: Sequence[str], heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """Paragraphs, and a table if there are rows."""
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    if not rows:
        return words
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return f"{words}<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"


def _figure(title: str, lines: Sequence[Series]) -> str:
    """Of each line the points that are numbers."""
    shown = []
    for line in lines:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if isfinite(y)]
        if points:
            shown.append(
                Series(
                    line.name, tuple(x for x, _ in points), tuple(y for _, y in points)
                )
            )
    return f"<figure>{chart(shown, title, 'step', '')}</figure>" if shown else ""
