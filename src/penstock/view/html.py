"""A timeline as a page to explore: one HTML file that needs nothing else.

    page.html ─┬ page.css                    the style
               ├ columns.js plot.js page.js  the data, the drawing, the controls
               └ data: JSON                  facts, colours, and columns with one entry per action:
                   start  "f4" base64(zlib(...))     1 000 000 actions take about 10 MB

Several timelines share a time axis, and the rows of each rank lie next to each other: predicted
above measured.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ShapeError
from penstock.ir.action import OPS
from penstock.ir.timeline import Timeline
from penstock.view.palette import (
    PAINTS,
    SUM_COLOUR,
    SUM_NAME,
    TONES,
    framed,
    paints,
    places,
)

Column = dict[str, str]

SCRIPT = """<script type="application/json" id="data">{data}</script>
<script>
"use strict";
(async () => {{
{js}}})();
</script>"""

BODY = """<header>
<h1>{title}</h1>
<dl id="stats"></dl>
</header>
<nav aria-label="View">
<span class="group"><button id="out" title="Zoom out (-)" aria-label="Zoom out">&minus;</button>\
<button id="in" title="Zoom in (+)" aria-label="Zoom in">+</button>\
<button id="fit" title="Show everything (0)">Fit</button></span>
<span class="group"><button id="lower" title="Lower rows ([)" aria-label="Lower rows">&#8681;</button>\
<button id="taller" title="Taller rows (])" aria-label="Taller rows">&#8679;</button></span>
<label class="field">Micro-batch <input id="microbatch" type="number" min="0" placeholder="all" \
title="Highlight the path of one micro-batch"></label>
<span class="group"><button id="memory" aria-pressed="false" title="Activations over time (m)">Memory</button>\
<button id="critical" aria-pressed="false" title="The chain of actions that sets the makespan (c)">\
Critical path</button></span>
<span id="legend"></span>
<details id="help"><summary>Keys</summary><dl>
<dt><kbd>&larr;</kbd><kbd>&rarr;</kbd><kbd>&uarr;</kbd><kbd>&darr;</kbd></dt>\
<dd>pan; also drag, or the wheel with Shift</dd>
<dt><kbd>+</kbd><kbd>-</kbd></dt><dd>zoom; also the wheel</dd>
<dt><kbd>0</kbd></dt><dd>show everything</dd>
<dt><kbd>[</kbd><kbd>]</kbd></dt><dd>row height; also the wheel with Ctrl</dd>
<dt><kbd>n</kbd><kbd>p</kbd></dt><dd>next, previous action of the rank</dd>
<dt><kbd>j</kbd><kbd>k</kbd></dt><dd>next, previous rank</dd>
<dt><kbd>Enter</kbd></dt><dd>highlight its micro-batch; also click</dd>
<dt><kbd>m</kbd><kbd>c</kbd></dt><dd>memory, critical path</dd>
<dt><kbd>Esc</kbd></dt><dd>clear</dd>
</dl></details>
</nav>
<main><canvas id="plot" tabindex="0" role="img" aria-label="Timeline with a row for each rank"></canvas></main>
<footer><canvas id="overview" role="img" aria-label="Share of ranks at work over time"></canvas></footer>
<div id="tip" role="status" aria-live="polite" hidden></div>
"""


def page(timelines: Sequence[tuple[str, Timeline]], title: str = "") -> str:
    """The HTML of a page that shows timelines, each with its name.

    >>> from penstock import UnitCost, make, simulate
    >>> page([("predicted", simulate(make("1f1b", ranks=4, microbatches=8), UnitCost()))])[:15]
    '<!doctype html>'
    """
    if not timelines:
        raise ShapeError("a page needs at least one timeline")
    schedules = [timeline.schedule for _, timeline in timelines]
    data = {
        "timelines": [_timeline(name, timeline) for name, timeline in timelines],
        # An action has the same number in all of them.
        "alike": all(one in schedules[:1] for one in schedules),
        "paints": PAINTS,
        "tones": TONES,
        "ops": [{"letter": op.value, "name": op.row.label} for op in OPS],
        "sum": {"name": SUM_NAME, "colour": SUM_COLOUR},
    }
    if not title:
        title = " and ".join(name for name, _ in timelines) or "Pipeline schedule"
    data_text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    code = "".join(map(_asset, ("columns.js", "plot.js", "page.js")))
    script = SCRIPT.format(data=data_text, js=code)
    body = BODY.format(title=escape(title))
    return framed(title, _asset("page.css"), f"{body}\n{script}")


def _asset(name: str) -> str:
    """The text of a file that comes with this package."""
    return files("penstock.view").joinpath(name).read_text(encoding="utf-8")


def _timeline(name: str, timeline: Timeline) -> dict[str, object]:
    schedule = timeline.schedule
    table = schedule.table
    cut_numbers: dict[tuple[int, ...], int] = {}
    cuts = [
        cut_numbers.setdefault(microbatch.cuts, len(cut_numbers))
        for microbatch in schedule.microbatches
    ]
    whole: dict[str, ArrayLike] = {
        "first": table.first,
        "home": [stage.rank for stage in schedule.stages],
        "part": [stage.part for stage in schedule.stages],
        "cut": cuts,
        "paint": paints(timeline),
        "stage": table.stage,
        "microbatch": table.microbatch,
        "slice": table.slice,
        "target": table.target() + 1,  # 0 if it sends no message
        "cause": timeline.cause.astype(np.int64) + 1,  # 0 if there is none
    }
    real = {
        "start": timeline.start,
        "end": timeline.end,
        # The difference of two large 32-bit times would not be exact.
        "lasts": timeline.end - timeline.start,
        "held": timeline.activations,
        "sent": timeline.sent,
        "arrived": timeline.arrived,
        "bytes": timeline.bytes,
    }
    columns = {name: _ints(np.array(values)) for name, values in whole.items()}
    columns |= {name: _column(values, "f4") for name, values in real.items()}
    return {
        "name": name,
        "units": {
            "seconds": timeline.units.seconds,
            "inBytes": timeline.units.bytes,
        },
        "ranks": schedule.ranks,
        "microbatches": len(schedule.microbatches),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "peak": float((timeline.weights + timeline.peak_activations).max()),
        "places": int(places(timeline).max()) + 1,
        "slices": schedule.slices,
        "cuts": list(cut_numbers),
        "weights": timeline.weights.tolist(),
        "sums": [(list(one.ranks), one.start, one.end) for one in timeline.sums],
        "last": timeline.last_cause,
        "columns": columns,
    }


def _ints(values: NDArray[Any]) -> Column:
    """A column of the smallest type that holds the values."""
    largest = int(values.max(initial=0))
    return _column(values, np.min_scalar_type(largest).str[1:])


def _column(values: NDArray[Any], kind: str) -> Column:
    packed = zlib.compress(values.astype(f"<{kind}").tobytes(), 5)
    return {"kind": kind, "data": b64encode(packed).decode("ascii")}
