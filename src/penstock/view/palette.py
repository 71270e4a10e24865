"""What things look like, in the terminal, in figures and on the page: one truth for colours and headers.

    F  blue     forward             the further along the model and the sentence, the darker:
    B  green    backward
    I  teal     input gradient      first part, first slice  ░▒▓█  last part, last slice
    W  orange   weight gradient

Idle is white. A *tone* is one of `TONES` steps from light to dark; a *paint* is op * TONES + tone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from penstock.ir.action import OPS, Op
from penstock.ir.table import Floats, Ints
from penstock.ir.timeline import Timeline
from penstock.view.numbers import write_size, write_time

TONES = 24
SHADES = {
    Op.F: ("#d5e4fc", "#6d9ff0", "#1c4fae"),
    Op.B: ("#cdebc7", "#69b86c", "#1d6630"),
    Op.I: ("#c3efea", "#3fbdb2", "#0b6e69"),
    Op.W: ("#fde3be", "#f2a33c", "#a85005"),
}  # the lightest, the middle and the darkest of each op
OP_NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
}
IDLE, INK, PALE = "#ffffff", "#101823", "#ffffff"


class Paint(NamedTuple):
    """A fill and the ink that can be read on it, as #rrggbb."""

    fill: str
    ink: str


def mix(light: str, dark: str, share: float) -> str:
    """A colour between two.  mix("#000000", "#ffffff", 0.5) is "#808080"."""
    pairs = zip(bytes.fromhex(light[1:]), bytes.fromhex(dark[1:]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def luminance(colour: str) -> float:
    """How bright the eye finds it, 0 to 1 (WCAG)."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in _fractions(colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """How well one can be read on the other, 1 to 21 (WCAG)."""
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def _fractions(colour: str) -> list[float]:
    return [byte / 255 for byte in bytes.fromhex(colour[1:])]


def _paint(op: Op, tone: int) -> Paint:
    light, middle, dark = SHADES[op]
    level = (tone + 0.5) / TONES * 2
    fill = mix(light, middle, level) if level < 1 else mix(middle, dark, level - 1)
    return Paint(fill, max(INK, PALE, key=lambda ink: contrast(fill, ink)))


PAINTS = tuple(_paint(op, tone) for op in OPS for tone in range(TONES))


def places(timeline: Timeline) -> Ints:
    """Of each stage: how many stages come before it on its rank."""
    seen: dict[int, int] = {}
    found = []
    for stage in timeline.schedule.stages:
        found.append(seen.get(stage.rank, 0))
        seen[stage.rank] = found[-1] + 1
    return np.array(found, dtype=np.int64)


def paints(timeline: Timeline) -> Ints:
    """The paint of every action: its op's colour, its stage's place on the rank and its slice from light to dark."""
    table, place = timeline.schedule.table, places(timeline)
    along = (table.slice + 0.5) / table.slices[table.microbatch]
    level = (place[table.stage] + along) / (int(place.max()) + 1)
    found: Ints = table.op.astype(np.int64) * TONES + (level * TONES).astype(np.int64)
    return found


def paint_of(op: Op, level: float = 0.5) -> Paint:
    """An op's paint at a level from 0, light, to 1, dark."""
    return PAINTS[OPS.index(op) * TONES + min(int(level * TONES), TONES - 1)]


def means(
    timeline: Timeline, rank: int, columns: int, paint: Ints
) -> tuple[Floats, Floats]:
    """For boxes too narrow to see: of each column of time, the share at work and the mean colour of that work.

    Sums of colour over time grow in straight lines, so their values at the edges of columns tell all.
    """
    here = timeline.lane(rank)
    edges = np.linspace(0.0, timeline.makespan, columns + 1)
    seconds = (timeline.end - timeline.start)[here, None]
    weighed = seconds * np.column_stack([np.ones(len(seconds)), _RGB[paint[here]]])
    sums = np.concatenate([np.zeros((1, 4)), np.cumsum(weighed, axis=0)])
    times = np.column_stack([timeline.start[here], timeline.end[here]]).ravel()
    knots = np.repeat(sums, 2, axis=0)[1:-1]
    at = np.stack(
        [
            np.interp(edges, times, column) if len(times) else edges * 0
            for column in knots.T
        ],
        axis=1,
    )
    inside = np.diff(at, axis=0)
    work = inside[:, 0]
    colour = inside[:, 1:] / np.maximum(work, 1e-300)[:, None]
    return work * (columns / timeline.makespan), colour


_RGB = np.array(
    [list(bytes.fromhex(paint.fill[1:])) for paint in PAINTS], dtype=np.float64
)


def ops_of(timeline: Timeline) -> tuple[Op, ...]:
    """The ops that occur, for a legend."""
    return tuple(OPS[code] for code in np.unique(timeline.schedule.table.op).tolist())


def label_of(microbatch: int, piece: int) -> str:
    """The number in a box: `3`, or `3.1` past the first slice, as an action prints it."""
    return f"{microbatch}.{piece}" if piece else f"{microbatch}"


# ---------------------------------------------------------------- numbers
def facts(timeline: Timeline) -> tuple[str, ...]:
    """What a header says: `4 ranks`, `8 micro-batches`, `makespan 33`, `bubble 27.3%`, `peak 4`."""
    schedule = timeline.schedule
    peak = float((timeline.weights + timeline.peak_activations).max())
    return (
        _count(schedule.ranks, "rank"),
        _count(len(schedule.microbatches), "micro-batch"),
        f"makespan {write_time(timeline.makespan, timeline.units)}",
        f"bubble {timeline.bubble:.1%}",
        f"peak {write_size(peak, timeline.units)}",
    )


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def round_step(extent: float, most: int) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides an extent into at most so many."""
    raw = extent / max(most, 1)
    power: float = 10.0 ** math.floor(math.log10(raw))
    return next(
        factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9)
    )


def activation_steps(timeline: Timeline, rank: int) -> tuple[Floats, Floats]:
    """Times and bytes of a rank's activations as steps. Between two actions: the lesser of theirs; in the end, none."""
    here = timeline.lane(rank)
    start, end, held = (
        timeline.start[here],
        timeline.end[here],
        timeline.activations[here],
    )
    after = np.minimum(held, np.append(held[1:], 0.0))
    return np.column_stack([start, end]).ravel(), np.column_stack([held, after]).ravel()
