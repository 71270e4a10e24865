"""Documents of different lengths, planned anew at every step: long ones cut, short ones packed, the longest first.

    budget 8 tokens             lengths 20 7 5 3 1
    bundle 0 | 8 | 7 | 5        the document of 20 in slices, each a unit of the pipeline
    bundle 1 | 7+1              short ones that fit together are one unit
    bundle 2 | 5+3

All units go through one pipeline, so the longest of them counts as often as there are stages, as in `best_cuts`. For a
limit on a unit's time one pass finds the best slices of *every* length at once, since the time of a slice depends on
what comes before it and not on what follows; short documents go into the fullest pack in which they still fit. A few
limits are tried and the best is taken. Packs are not proven to be the best; `bound` is what no bundles go below.

With the longest document first, each later one has its slices forwarded by the time its backward begins, so 1F1B over
units never waits for a forward that it has not begun. The desk, with all its times, is made once and serves every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.cost.cost import Cost
from penstock.cost.curve import Seconds
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.compiled import at_speed
from penstock.ir.schedule import MicroBatch, Schedule, schedule_of
from penstock.ir.table import Floats, Ints
from penstock.plan.slices.dynamic_program import EXPECTED_PASSES, reach, retrace
from penstock.plan.slices.slice_times import (
    Grid,
    add_curves,
    full_grid,
    seconds_along,
    times_from_curves,
)
from penstock.plan.slices.stage_times import stage_curves
from penstock.schedules.orders import loop_placement, weave, whole_backwards

MAX_LIMITS_TRIED = 12  # limits that are tried
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class DocumentPlanner:
    """What planning a step needs and no step changes: curves of a stage, and the times of all slices in the budget."""

    stages: int
    grain: int
    budget: int  # tokens a unit may have
    forward: Seconds
    backward: Seconds
    onward: Seconds  # the hops
    homeward: Seconds
    grid: Grid

    @property
    def longest(self) -> int:
        """Tokens of the longest document it can plan."""
        return (len(self.grid.first) - 1) * self.grain


@dataclass(frozen=True, slots=True)
class Bundle:
    """A micro-batch: one document in slices, or several in one. `cuts` are tokens, from 0 to its end."""

    documents: tuple[int, ...]
    cuts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """All of its documents'."""
        return self.cuts[-1]


@dataclass(frozen=True, slots=True)
class DocumentPlan:
    """Bundles, the longest document first; the latency of a step, and one that no bundles go below."""

    bundles: tuple[Bundle, ...]
    latency: float
    bound: float


def document_planner(
    ranks: int, cost: Cost, longest: int, granularity: int, budget: int
) -> DocumentPlanner:
    """A desk for documents up to a length, units of at most `budget` tokens, and cuts at multiples of `granularity`.

    Stages that differ are all taken to be as slow as the slowest, in the latency and in its bound.
    """
    if granularity < 1 or budget < granularity or longest < 1:
        raise ShapeError(
            f"units of {budget} tokens in steps of {granularity}, documents of up to {longest} tokens"
        )
    points = -(-longest // granularity)
    curves = stage_curves(loop_placement(ranks), cost, points * granularity)
    slow = max(curves, key=lambda c: c.forward.of(budget, 0) + c.backward.of(budget, 0))
    onward, homeward = curves[0].onward, curves[-1].homeward
    work = [slow.forward, slow.backward]
    times = times_from_curves(
        points, granularity, work, [add_curves([*work, onward, homeward])]
    )
    grid = full_grid(times, budget // granularity)
    return DocumentPlanner(
        ranks, granularity, budget, slow.forward, slow.backward, onward, homeward, grid
    )


def plan_documents(desk: DocumentPlanner, lengths: Sequence[int]) -> DocumentPlan:
    """Bundles for documents of these lengths in tokens."""
    for number, length in enumerate(lengths):
        if not 1 <= length <= desk.longest:
            raise ShapeError(
                f"document {number} has {length} tokens; the least is 1, the most here {desk.longest}"
            )
    if not lengths:
        raise ShapeError("0 documents; the least is 1")
    step = _step_of(desk, lengths)
    bundles = _bundles(step, _best_limit(step))
    return DocumentPlan(bundles, _latency(desk, bundles, lengths), _bound(step))


def documents_schedule(plan: DocumentPlan, ranks: int) -> Schedule:
    """1F1B over the units of a plan, every bundle a micro-batch.

    A cost that knows only tokens takes a pack for one document, and so counts more attention than there is in it.
    """
    stages = loop_placement(ranks)
    table = [
        MicroBatch(tuple(range(ranks)), each.tokens, each.cuts) for each in plan.bundles
    ]
    most = max(each.slices for each in table)
    lanes = []
    for rank in range(ranks):
        there = [
            Action(Op.F, rank, m, piece)
            for m, each in enumerate(table)
            for piece in range(each.slices)
        ]
        back = [
            Action(Op.B, rank, m, piece)
            for m, each in enumerate(table)
            for piece in reversed(range(each.slices))
        ]
        lanes.append(weave(most + ranks - 1 - rank, there, whole_backwards(back)))
    return schedule_of(stages, table, lanes)


# ---------------------------------------------------------------- one step
class _Step(NamedTuple):
    """The documents of a step at a desk, the longest first. A unit costs `base` beside the work of its documents."""

    desk: DocumentPlanner
    order: list[int]
    tokens: list[int]
    points: Ints
    work: list[float]  # seconds of a document in a unit, there and back, less the base
    time: list[float]  # the same with its hops
    base: float
    hop: float  # what hops take however few the tokens
    reached: Floats


def _step_of(desk: DocumentPlanner, lengths: Sequence[int]) -> _Step:
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    tokens = np.array([lengths[number] for number in order], dtype=np.int64)
    both, hops = (
        add_curves([desk.forward, desk.backward]),
        add_curves([desk.onward, desk.homeward]),
    )
    size, nothing = tokens.astype(np.float64), np.zeros(len(tokens))
    work, wire = (
        seconds_along(both, size, nothing) - both.base,
        seconds_along(hops, size, nothing) - hops.base,
    )
    reached, points = np.empty((1, len(desk.grid.first))), -(-tokens // desk.grain)
    times = (work.tolist(), (work + wire).tolist(), both.base, hops.base)
    return _Step(desk, order, tokens.tolist(), points, *times, reached)


def _best_limit(step: _Step) -> float:
    """Of some limits on the time of a unit, the one with the least latency, by golden section."""
    peaks = step.desk.grid.peaks[0]
    most = max(float(peaks.max()), 1e-300) * (1 + 1e-9)
    low, high = math.log(max(float(peaks.min()), 1e-9 * most)), math.log(most)
    tried: dict[float, float] = {}

    def latency(place: float) -> float:
        if place not in tried:
            tried[place] = _estimate(step, math.exp(place))
        return tried[place]

    latency(high)
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    for _ in range(MAX_LIMITS_TRIED):
        if latency(left) < latency(right):
            high, right = right, left
            left = high - GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + GOLDEN * (high - low)
    return math.exp(min(tried, key=tried.__getitem__))


def _estimate(step: _Step, limit: float) -> float:
    """The latency if the longest unit is as long as the limit."""
    short = _is_short(step, limit)
    _pass(step, limit)
    long = sum(
        float(step.reached[0, point])
        for point, fits in zip(step.points, short, strict=True)
        if not fits
    )
    packs = _packs(step, short, limit)
    packed = sum(
        work for work, fits in zip(step.work, short, strict=True) if fits
    ) + step.base * len(packs)
    return long + packed + (step.desk.stages - 1) * limit


def _is_short(step: _Step, limit: float) -> list[bool]:
    """Which documents can be in a pack."""
    budget, most = step.desk.budget, limit - step.base - step.hop
    return [
        tokens <= budget and time < most
        for tokens, time in zip(step.tokens, step.time, strict=True)
    ]


def _pass(step: _Step, limit: float) -> None:
    """The least sum of every length, in points, with slices below a limit."""
    first, sums, peaks = step.desk.grid
    walk = at_speed(reach, len(sums) * EXPECTED_PASSES)
    walk(first, sums, peaks[0], peaks[0], False, limit, limit, limit, step.reached)


def _packs(step: _Step, short: Sequence[bool], limit: float) -> list[list[int]]:
    """Short documents, the longest first, each in the fullest pack that has room for it."""
    packs: list[list[int]] = []
    tokens_left: list[int] = []
    seconds_left: list[float] = []
    for at in [at for at, fits in enumerate(short) if fits]:
        tokens, time = step.tokens[at], step.time[at]
        best, room = -1, step.desk.budget + 1
        for pack, left in enumerate(tokens_left):
            if tokens <= left < room and time < seconds_left[pack]:
                best, room = pack, left
        if best < 0:
            best = len(packs)
            packs.append([])
            tokens_left.append(step.desk.budget)
            seconds_left.append(limit - step.base - step.hop)
        packs[best].append(at)
        tokens_left[best] -= tokens
        seconds_left[best] -= time
    return packs


def _bundles(step: _Step, limit: float) -> tuple[Bundle, ...]:
    """All documents in bundles, the longest first."""
    short = _is_short(step, limit)
    _pass(step, limit)
    found: list[tuple[list[int], tuple[int, ...]]] = []
    found += [
        (pack, (0, sum(step.tokens[at] for at in pack)))
        for pack in _packs(step, short, limit)
    ]
    found += [
        ([at], _cut(step, at, limit)) for at, fits in enumerate(short) if not fits
    ]
    found.sort(
        key=lambda each: each[0][0]
    )  # by the first, which is the longest, of its documents
    return tuple(
        Bundle(tuple(step.order[at] for at in documents), cuts)
        for documents, cuts in found
    )


def _cut(step: _Step, at: int, limit: float) -> tuple[int, ...]:
    """The slices of one document, as the pass found them."""
    first, sums, peaks = step.desk.grid
    steps, highest = np.empty(len(first), dtype=np.int64), np.empty(2)
    back = at_speed(retrace, len(sums) * EXPECTED_PASSES)
    count = back(
        first,
        sums,
        peaks[0],
        peaks[0],
        False,
        limit,
        limit,
        limit,
        step.reached,
        int(step.points[at]),
        steps,
        highest,
    )
    ends = (np.cumsum(steps[:count][::-1]) * step.desk.grain).tolist()
    return (0, *ends[:-1], step.tokens[at])


def _latency(
    desk: DocumentPlanner, bundles: Sequence[Bundle], lengths: Sequence[int]
) -> float:
    """All units one after the other, and the longest for every other stage, there and back."""
    latency = 0.0
    for curve, hop in ((desk.forward, desk.onward), (desk.backward, desk.homeward)):
        units = [unit for each in bundles for unit in _units(curve, hop, each, lengths)]
        latency += sum(seconds for seconds, _ in units) + (desk.stages - 1) * max(
            map(sum, units)
        )
    return latency


def _units(
    curve: Seconds, hop: Seconds, bundle: Bundle, lengths: Sequence[int]
) -> list[tuple[float, float]]:
    """The seconds of each unit of a bundle, and of its hop."""
    if len(bundle.cuts) > 2:
        slices = [(end - begin, begin) for begin, end in pairwise(bundle.cuts)]
        return [
            (curve.of(tokens, prefix), hop.of(tokens, prefix))
            for tokens, prefix in slices
        ]
    works = sum(
        curve.of(lengths[number], 0) - curve.base for number in bundle.documents
    )
    return [(curve.base + works, hop.of(bundle.tokens, 0))]


def _bound(step: _Step) -> float:
    """M units take the work of all documents and M bases; the longest takes at least their mean. The least over M."""
    desk = step.desk
    both = add_curves([desk.forward, desk.backward])
    work = sum(both.of(tokens, 0) - both.base for tokens in step.tokens)
    fewest, most = -(-sum(step.tokens) // desk.budget), int(step.points.sum())
    best = math.sqrt((desk.stages - 1) * work / both.base) if both.base else most
    units = {
        min(max(count, fewest), most) for count in (math.floor(best), math.ceil(best))
    }
    return min(
        (work + count * both.base) * (1 + (desk.stages - 1) / count) for count in units
    )
