"""Colours, headers and elements, shared by the terminal, the figures and the pages.

    F  blue     forward             later parts and later tokens are darker:
    B  green    backward
    I  teal     input gradient      first part, first slice  ░▒▓█  last part, last slice
    W  orange   weight gradient
    +  purple   sum of gradients    a strip below the actions, which go on meanwhile

Idle is white. A *tone* is one of `TONES` steps from light to dark. A *paint* is the number
op * TONES + tone.

    element("rect", x=4.0, y=0.5, fill="#ffffff")         <rect x="4" y="0.5" fill="#ffffff"/>
    element("text", "rank 0", x=56.0, text_anchor="end")  <text x="56" text-anchor="end">rank 0</text>

Elements write words and colours as they are: whoever shows the text of a user escapes it. A page is one HTML file that
loads nothing else, in light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

import numpy as np

from penstock.ir.action import OPS, Op
from penstock.ir.table import Floats, Ints
from penstock.ir.timeline import Timeline
from penstock.view.numbers import (
    MICROBATCHES,
    RANKS,
    count_of,
    name_size,
    name_time,
    short,
)

TONES = 24
SUM_NAME = "sum of gradients"
SUM_COLOUR = "#8457c8"
IDLE = "#ffffff"
INK = "#101823"
PALE_INK = "#ffffff"
FONT = "Helvetica, Arial, sans-serif"
FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
{body}
</body>
</html>
"""


class Paint(NamedTuple):
    """A fill colour and a readable ink on it, as #rrggbb."""

    fill: str
    ink: str


def mix_colors(light: str, dark: str, share: float) -> str:
    """A colour between two: mix_colors("#000000", "#ffffff", 0.5) is "#808080"."""
    pairs = zip(bytes.fromhex(light[1:]), bytes.fromhex(dark[1:]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def luminance(colour: str) -> float:
    """The perceived brightness of a colour, from 0 to 1 (WCAG)."""
    red, green, blue = (_linear(byte / 255) for byte in bytes.fromhex(colour[1:]))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(fraction: float) -> float:
    """The intensity of a colour component of the sRGB scale."""
    if fraction <= 0.04045:
        return fraction / 12.92
    intensity: float = ((fraction + 0.055) / 1.055) ** 2.4
    return intensity


def contrast(one: str, other: str) -> float:
    """The contrast between two colours, from 1 to 21 (WCAG)."""
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def _paint(op: Op, tone: int) -> Paint:
    light, middle, dark = op.row.shades
    level = (tone + 0.5) / TONES * 2
    begin, end = (light, middle) if level < 1 else (middle, dark)
    fill = mix_colors(begin, end, level % 1)
    ink = max(INK, PALE_INK, key=lambda candidate: contrast(fill, candidate))
    return Paint(fill, ink)


PAINTS = tuple(_paint(op, tone) for op in OPS for tone in range(TONES))


def places(timeline: Timeline) -> Ints:
    """For each stage, the number of stages before it on its rank."""
    on_rank: dict[int, int] = {}
    before = []
    for stage in timeline.schedule.stages:
        count = on_rank.get(stage.rank, 0)
        before.append(count)
        on_rank[stage.rank] = count + 1
    return np.array(before, dtype=np.int64)


def paints(timeline: Timeline) -> Ints:
    """The paint of every action.

    The op gives the colour. The place of the stage on its rank, and then the slice, give
    the tone.
    """
    table = timeline.schedule.table
    place = places(timeline)
    share_of_slices = (table.slice + 0.5) / table.slices[table.microbatch]
    level = (place[table.stage] + share_of_slices) / (int(place.max()) + 1)
    tone = (level * TONES).astype(np.int64)
    paint: Ints = table.op.astype(np.int64) * TONES + tone
    return paint


def paint_of(op: Op, level: float = 0.5) -> Paint:
    """The paint of an op, at a level from 0 (light) to 1 (dark)."""
    tone = min(int(level * TONES), TONES - 1)
    return PAINTS[OPS.index(op) * TONES + tone]


def means(
    timeline: Timeline, rank: int, columns: int, paint: Ints
) -> tuple[Floats, Floats]:
    """The share of each column of time in which a rank works, and the mean colour of that work.

    This is for boxes that are too narrow to see. The sum of the colours grows linearly
    during an action, so its values at the edges of the columns are enough.
    """
    here = timeline.lane(rank)
    edges = np.linspace(0.0, timeline.makespan, columns + 1)
    seconds = (timeline.end - timeline.start)[here, None]
    weighted = seconds * np.column_stack([np.ones(len(seconds)), _RGB[paint[here]]])
    sums = np.concatenate([np.zeros((1, 4)), np.cumsum(weighted, axis=0)])
    times = np.column_stack([timeline.start[here], timeline.end[here]]).ravel()
    knots = np.repeat(sums, 2, axis=0)[1:-1]
    if not len(times):
        return np.zeros(columns), np.zeros((columns, 3))
    at_edges = [np.interp(edges, times, column) for column in knots.T]
    inside = np.diff(np.stack(at_edges, axis=1), axis=0)
    work = inside[:, 0]
    colour = inside[:, 1:] / np.maximum(work, 1e-300)[:, None]
    return work * (columns / timeline.makespan), colour


_RGB = np.array(
    [list(bytes.fromhex(paint.fill[1:])) for paint in PAINTS], dtype=np.float64
)


def ops_of(timeline: Timeline) -> tuple[Op, ...]:
    """The ops that occur."""
    codes = np.unique(timeline.schedule.table.op).tolist()
    return tuple(OPS[code] for code in codes)


def label_of(microbatch: int, piece: int) -> str:
    """The text in a box: `3`, or `3.1` for a slice after the first."""
    return f"{microbatch}.{piece}" if piece else f"{microbatch}"


# ---------------------------------------------------------------- numbers
def facts(timeline: Timeline) -> tuple[str, ...]:
    """The facts of a header: `4 ranks`, `8 micro-batches`, `makespan 33 forwards`, `bubble 27.3%`, and the peak."""
    schedule = timeline.schedule
    peak = float((timeline.weights + timeline.peak_activations).max())
    return (
        count_of(schedule.ranks, *RANKS),
        count_of(len(schedule.microbatches), *MICROBATCHES),
        f"makespan {name_time(timeline.makespan, timeline.units)}",
        f"bubble {timeline.bubble:.1%}",
        f"peak {name_size(peak, timeline.units)}",
    )


def round_step(extent: float, most: int) -> float:
    """The smallest round step that divides an extent into at most `most` pieces.

    Round steps are 1, 2 and 5 times a power of ten.
    """
    raw = extent / max(most, 1)
    power: float = 10.0 ** math.floor(math.log10(raw))
    steps = [factor * power for factor in (1, 2, 5, 10)]
    return next((one for one in steps if one >= raw * (1 - 1e-9)), steps[-1])


def activation_steps(timeline: Timeline, rank: int) -> tuple[Floats, Floats]:
    """The activations of a rank as steps: times, and the bytes from each time on.

    Between two actions it holds the smaller of their bytes, and after the last one nothing.
    """
    here = timeline.lane(rank)
    held = timeline.activations[here]
    after = np.minimum(held, np.append(held[1:], 0.0))
    times = np.column_stack([timeline.start[here], timeline.end[here]]).ravel()
    sizes = np.column_stack([held, after]).ravel()
    return times, sizes


# ---------------------------------------------------------------- elements of figures
def element(name: str, /, *content: str, **attributes: str | float) -> str:
    """An element in one line, with other elements or words as its content."""
    tag = _open_tag(name, attributes)
    if not content:
        return f"<{tag}/>"
    return f"<{tag}>{''.join(content)}</{name}>"


def group(content: Iterable[str], **attributes: str | float) -> Iterator[str]:
    """A group of elements, one in a line, that share the attributes."""
    yield f"<{_open_tag('g', attributes)}>"
    yield from content
    yield "</g>"


def figure(title: str, width: float, height: float, content: Iterable[str]) -> str:
    """The text of an SVG file: elements on a white sheet, which the title names to a screen reader."""
    attributes: dict[str, str | float] = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {write_number(width)} {write_number(height)}",
        "width": width,
        "height": height,
        "font_family": FONT,
        "font_size": 12,
        "fill": INK,
        "role": "img",
    }
    lines = [
        f"<{_open_tag('svg', attributes)}>",
        element("title", title),
        element("rect", width="100%", height="100%", fill=IDLE),
        *content,
        "</svg>\n",
    ]
    return "\n".join(lines)


def write_number(number: float) -> str:
    """A number of pixels with at most two decimals.

    >>> write_number(64.0), write_number(1 / 3)
    ('64', '0.33')
    """
    return short(round(number, 2), 7)


def _open_tag(name: str, attributes: dict[str, str | float]) -> str:
    """The name of an element and its attributes.

    Python's `class_` and `text_anchor` are `class` and `text-anchor` in SVG.
    """
    words = [name]
    for key, value in attributes.items():
        text = value if isinstance(value, str) else write_number(value)
        svg_key = key.rstrip("_").replace("_", "-")
        words.append(f'{svg_key}="{text}"')
    return " ".join(words)


# ---------------------------------------------------------------- pages
def framed(title: str, css: str, body: str) -> str:
    """A whole page around a body in HTML."""
    return FRAME.format(title=escape(title), css=css, body=body)
