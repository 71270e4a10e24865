"""A run on one page: figures, curves, the timelines, a sample of text. One HTML file that needs nothing else.

    ┌──────────────────────────────┐
    │ facts                        │
    │ loss ╲__    norm ~~  speed ‾ │   SVG, drawn here
    │ ┌──────────────────────────┐ │
    │ │ predicted over measured  │ │   `page`, in a frame of its own
    │ └──────────────────────────┘ │
    │ sample                       │
    └──────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite

from penstock.ir.timeline import Timeline
from penstock.view.frame import framed
from penstock.view.html import page

Points = Sequence[tuple[float, float]]
WIDE, HIGH = 640, 200
LEFT, BELOW, ABOVE = 56, 26, 12
COLOURS = ("#2a63d4", "#d6264b", "#1d7a3a")

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
dl div, figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 6px 12px; }
dt, figcaption { color: var(--soft); font-size: 12px; }
dd { margin: 0; font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 10px; }
figure { margin: 0; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--line); }
iframe { width: 100%; height: 70vh; border: 1px solid var(--line); border-radius: 8px; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow-x: auto; }
"""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over the steps, each with its name."""

    title: str
    curves: tuple[tuple[str, Points], ...]


def report(
    title: str, facts: Sequence[tuple[str, str]], charts: Sequence[Chart], timelines: Sequence[tuple[str, Timeline]],
    sample: str = "",
) -> str:  # fmt: skip
    """The text of the page; what there is none of is left out.

    >>> "<svg" in report("A run", [("steps", "3")], [Chart("loss", (("train", [(1, 2.0), (2, 1.0)]),))], [])
    True
    """
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    body = [f"<dl>{cells}</dl>"]
    drawn = "".join(map(_figure, charts))
    if drawn:
        body.append(f'<h2>Curves</h2>\n<div class="charts">{drawn}</div>')
    if timelines:
        words = escape(page(timelines, "One step"), quote=True)
        body.append(f'<h2>One step</h2>\n<iframe title="Timelines of one step" srcdoc="{words}"></iframe>')
    if sample:
        body.append(f"<h2>Sample</h2>\n<pre>{escape(sample)}</pre>")
    return framed(title, CSS, "\n".join([f"<h1>{escape(title)}</h1>", *body]))


def _figure(chart: Chart) -> str:
    points = [(x, y) for _, curve in chart.curves for x, y in curve if isfinite(y)]
    if not points:
        return ""
    (left, right), (low, high) = _span([x for x, _ in points]), _span([y for _, y in points])

    def place(x: float, y: float) -> str:
        across = LEFT + (x - left) / (right - left) * (WIDE - LEFT - 10)
        return f"{across:.1f},{HIGH - BELOW - (y - low) / (high - low) * (HIGH - BELOW - ABOVE):.1f}"

    grid = "".join(_level(low + (high - low) * k / 4, k) for k in range(5))
    ends = (f'<text x="{LEFT}" y="{HIGH - 8}">{left:g}</text>'
            f'<text x="{WIDE - 10}" y="{HIGH - 8}" text-anchor="end">{right:g}</text>')  # fmt: skip
    lines = "".join(
        f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="'
        f'{" ".join(place(x, y) for x, y in curve if isfinite(y))}"/>'
        for (_, curve), colour in zip(chart.curves, COLOURS, strict=False)
    )
    names = ", ".join(
        f'<span style="color:{colour}">{escape(name)}</span>'
        for (name, _), colour in zip(chart.curves, COLOURS, strict=False)
    )
    return (
        f'<figure><figcaption>{escape(chart.title)}: {names}</figcaption>'
        f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(chart.title)}">{grid}{ends}{lines}</svg>'
        "</figure>"
    )


def short(value: float) -> str:
    """A number beside an axis, three digits of it.

    >>> short(2937.4), short(0.00213), short(5.5493)
    ('2,937', '0.00213', '5.55')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _level(value: float, quarter: int) -> str:
    y = HIGH - BELOW - quarter / 4 * (HIGH - BELOW - ABOVE)
    return (f'<line class="grid" x1="{LEFT}" x2="{WIDE - 10}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')  # fmt: skip


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
