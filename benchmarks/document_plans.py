"""Plans for documents of different lengths, made at every step: long ones are cut and short ones packed.

    budget 8 tokens             lengths 20 7 5 3 1
    bundle 0 | 8 | 7 | 5        the document of 20 in slices, each a unit of the pipeline
    bundle 1 | 7+1              short ones that fit together are one unit
    bundle 2 | 5+3

All units go through one pipeline, so the longest of them counts once for every stage, as in `best_cuts`. For a given
limit on a unit's time, one pass finds the best slices of *every* length at once, because the time of a slice depends on
what comes before it and not on what follows. Each short document goes into the fullest pack in which it still fits. A
few limits are tried, and the best is taken. The packs are not proven to be the best; `bound` is a lower bound.

On a CPU attention runs document by document, so a pack takes the time of its documents. On a GPU it computes the whole
pack and hides what a document must not see, so a pack takes the time of one document of its length (`masked`).

The longest document comes first. Then each later one has forwarded its slices by the time its backward begins, so 1F1B
over units never waits for a forward that has not begun. The planner, with all its times, is made once for all steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.cost.cost import Cost
from penstock.cost.curve import Curve, Seconds, seconds_along, sum_curves
from penstock.errors import ShapeError
from penstock.ir.action import Action, Op
from penstock.ir.compiled import compile_if_large
from penstock.ir.schedule import MicroBatch, Schedule, schedule_of
from penstock.ir.table import Floats, Ints
from penstock.plan.slices.curves import Grid, sliced_pipeline, times_from_curves
from penstock.plan.slices.cuts import EXPECTED_PASSES, PeakLimits, reach, retrace
from penstock.schedules.orders import loop_placement, weave, whole_backwards

LIMIT_ROUNDS = 12  # rounds of the golden-section search for a limit
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class DocumentPlanner:
    """The part of planning that no step changes: the curves of a stage, and the times of all slices in the budget."""

    stages: int
    grain: int
    budget: int  # the most tokens of a unit
    forward: Seconds
    backward: Seconds
    onward: Seconds  # the hop of a forward's result
    homeward: Seconds  # the hop of a backward's result
    grid: Grid
    masked: bool = False  # attention computes whole packs

    @property
    def longest(self) -> int:
        """The tokens of the longest document that can be planned."""
        return (len(self.grid.first) - 1) * self.grain


@dataclass(frozen=True, slots=True)
class DocumentBundle:
    """A micro-batch: one document in slices, or several documents in one unit.

    `cuts` are tokens, from 0 to the end of the bundle.
    """

    documents: tuple[int, ...]
    cuts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """The tokens of all its documents."""
        return self.cuts[-1]


@dataclass(frozen=True, slots=True)
class DocumentPlan:
    """Bundles, the longest document first; the latency of a step, and a lower bound for any bundles."""

    bundles: tuple[DocumentBundle, ...]
    latency: float
    bound: float


def document_planner(
    ranks: int,
    cost: Cost,
    longest: int,
    granularity: int,
    budget: int,
    masked: bool = False,
) -> DocumentPlanner:
    """Return a planner for documents of up to `longest` tokens.

    A unit has at most `budget` tokens, and cuts are multiples of `granularity`. With `masked`,
    attention computes whole packs, as on a GPU, and not one document after the other. If
    stages differ, the latency and its bound take all of them to be as slow as the
    slowest.
    """
    if granularity < 1 or budget < granularity or longest < 1:
        raise ShapeError(
            f"documents of up to {longest} tokens cannot be cut "
            f"into units of {budget} tokens in steps of {granularity}; "
            "all three must be at least 1, and a unit at least one step long"
        )
    points = -(-longest // granularity)
    pipeline = sliced_pipeline(ranks, cost, points * granularity, granularity)
    stages = list(zip(pipeline.forward, pipeline.backward, strict=True))
    work = max(stages, key=lambda pair: sum(curve.of(budget, 0) for curve in pair))
    forward, backward = (add_curves([curve]) for curve in work)
    onward = add_curves(pipeline.onward[:1])
    homeward = add_curves(pipeline.homeward[-1:])
    peak = add_curves([forward, backward, onward, homeward])
    times = times_from_curves(points, granularity, [forward, backward], [peak])
    longest = np.minimum(budget // granularity, points - np.arange(points))
    bounded = replace(times, longest_below=lambda limit: longest)
    return DocumentPlanner(
        stages=ranks,
        grain=granularity,
        budget=budget,
        forward=forward,
        backward=backward,
        onward=onward,
        homeward=homeward,
        grid=bounded.grid_below(math.inf),
        masked=masked,
    )


def add_curves(curves: Sequence[Curve]) -> Seconds:
    """Return the formula of several ops that run one after the other."""
    total = sum_curves([(1, curve) for curve in curves])
    if not isinstance(total, Seconds):
        raise ShapeError("documents are planned by formulas, not by corrected curves")
    return total


def plan_documents(planner: DocumentPlanner, lengths: Sequence[int]) -> DocumentPlan:
    """Return bundles for documents of these lengths in tokens."""
    for number, length in enumerate(lengths):
        if not 1 <= length <= planner.longest:
            raise ShapeError(
                f"document {number} has {length} tokens; it must have from 1 to "
                f"{planner.longest} here"
            )
    if not lengths:
        raise ShapeError("there must be at least 1 document, not 0")
    step = _prepare_step(planner, lengths)
    bundles = _make_bundles(step, _find_limit(step))
    latency = _latency(planner, bundles, lengths)
    return DocumentPlan(bundles, latency, _lower_bound(step))


def documents_schedule(plan: DocumentPlan, ranks: int) -> Schedule:
    """Return 1F1B over the units of a plan, in which every bundle is a micro-batch.

    A cost that knows only tokens takes a pack for one document, and so counts more
    attention than the pack has.
    """
    stages = loop_placement(ranks)
    path = tuple(range(ranks))
    table = [MicroBatch(path, bundle.tokens, bundle.cuts) for bundle in plan.bundles]
    most_slices = max(microbatch.slices for microbatch in table)
    lanes = []
    for rank in range(ranks):
        there: list[Action] = []
        back: list[Action] = []
        for number, microbatch in enumerate(table):
            pieces = range(microbatch.slices)
            there += [Action(Op.F, rank, number, piece) for piece in pieces]
            back += [Action(Op.B, rank, number, piece) for piece in reversed(pieces)]
        head_start = most_slices + ranks - 1 - rank
        lanes.append(weave(head_start, there, whole_backwards(back)))
    return schedule_of(stages, table, lanes)


# ---------------------------------------------------------------- one step
class _Step(NamedTuple):
    """The documents of a step, the longest first; a unit takes `base` besides the work of its documents.

    A document's `place` is its index in these columns.
    """

    planner: DocumentPlanner
    order: list[int]  # the number of each document as given
    tokens: list[int]
    points: Ints
    work: list[float]  # seconds of a document, forward and backward, without the base
    time: list[float]  # the same with its hops
    base: float
    hop: float  # the part of the hops that does not depend on the tokens
    reached: Floats


def _prepare_step(planner: DocumentPlanner, lengths: Sequence[int]) -> _Step:
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    tokens = np.array([lengths[number] for number in order], dtype=np.int64)
    size = tokens.astype(np.float64)
    nothing = np.zeros(len(tokens))
    both = add_curves([planner.forward, planner.backward])
    hops = add_curves([planner.onward, planner.homeward])
    work = seconds_along(both, size, nothing) - both.base
    wire = seconds_along(hops, size, nothing) - hops.base
    return _Step(
        planner,
        order,
        tokens.tolist(),
        points=-(-tokens // planner.grain),
        work=work.tolist(),
        time=(work + wire).tolist(),
        base=both.base,
        hop=hops.base,
        reached=np.empty((1, len(planner.grid.first))),
    )


def _find_limit(step: _Step) -> float:
    """Return the limit on the time of a unit with the least latency, by golden-section search."""
    peaks = step.planner.grid.peaks[0]
    most = max(float(peaks.max()), 1e-300) * (1 + 1e-9)
    low = math.log(max(float(peaks.min()), 1e-9 * most))
    high = math.log(most)
    tried: dict[float, float] = {}

    def latency(log_limit: float) -> float:
        if log_limit not in tried:
            tried[log_limit] = _estimate_latency(step, math.exp(log_limit))
        return tried[log_limit]

    latency(high)
    left = high - GOLDEN * (high - low)
    right = low + GOLDEN * (high - low)
    for _ in range(LIMIT_ROUNDS):
        if latency(left) < latency(right):
            high = right
            right = left
            left = high - GOLDEN * (high - low)
        else:
            low = left
            left = right
            right = low + GOLDEN * (high - low)
    return math.exp(min(tried, key=tried.__getitem__))


def _estimate_latency(step: _Step, limit: float) -> float:
    """Return the latency if the longest unit takes as long as the limit."""
    short = _find_short(step, limit)
    _run_pass(step, limit)
    cut_seconds = 0.0
    for place, is_short in enumerate(short):
        if not is_short:
            cut_seconds += float(step.reached[0, step.points[place]])
    packs = _pack(step, short, limit)
    packed_seconds = sum(_pack_work(step, pack) for pack in packs)
    packed_seconds += step.base * len(packs)
    return cut_seconds + packed_seconds + (step.planner.stages - 1) * limit


def _pack_work(step: _Step, pack: Sequence[int]) -> float:
    """Return the seconds of a pack, forward and backward, without the base."""
    if not step.planner.masked:
        return sum(step.work[place] for place in pack)
    both = add_curves([step.planner.forward, step.planner.backward])
    return both.of(sum(step.tokens[place] for place in pack), 0) - both.base


def _most_tokens(step: _Step, limit: float) -> int:
    """Return the most tokens of a pack whose attention computes all of it within the limit."""
    planner = step.planner
    curves = [planner.forward, planner.backward, planner.onward, planner.homeward]
    unit = add_curves(curves)
    low, high = 0, planner.budget
    while low < high:
        middle = (low + high + 1) // 2
        if unit.of(middle, 0) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _find_short(step: _Step, limit: float) -> list[bool]:
    """Return for each document whether it can be in a pack."""
    budget = step.planner.budget
    most_seconds = limit - step.base - step.hop
    return [
        tokens <= budget and seconds < most_seconds
        for tokens, seconds in zip(step.tokens, step.time, strict=True)
    ]


def _run_pass(step: _Step, limit: float) -> None:
    """Fill `reached` with the least sum of every length, in points, with slices below a limit."""
    grid = step.planner.grid
    walk = compile_if_large(reach, len(grid.sums) * EXPECTED_PASSES)
    walk(grid, PeakLimits(limit, limit, limit), step.reached)


def _pack(step: _Step, short: Sequence[bool], limit: float) -> list[list[int]]:
    """Put each short document, the longest first, into the fullest pack that has room for it."""
    masked = step.planner.masked
    budget = _most_tokens(step, limit) if masked else step.planner.budget
    packs: list[list[int]] = []
    tokens_left: list[int] = []
    seconds_left: list[float] = []
    for place, is_short in enumerate(short):
        if not is_short:
            continue
        tokens = step.tokens[place]
        # In a masked pack, only the tokens count.
        seconds = 0.0 if masked else step.time[place]
        best = -1
        best_room = budget + 1
        for pack, room in enumerate(tokens_left):
            if tokens <= room < best_room and seconds < seconds_left[pack]:
                best = pack
                best_room = room
        if best < 0:
            best = len(packs)
            packs.append([])
            tokens_left.append(budget)
            seconds_left.append(math.inf if masked else limit - step.base - step.hop)
        packs[best].append(place)
        tokens_left[best] -= tokens
        seconds_left[best] -= seconds
    return packs


def _make_bundles(step: _Step, limit: float) -> tuple[DocumentBundle, ...]:
    """Return all documents in bundles, the longest first."""
    short = _find_short(step, limit)
    _run_pass(step, limit)
    members: list[tuple[list[int], tuple[int, ...]]] = []
    for pack in _pack(step, short, limit):
        tokens = sum(step.tokens[place] for place in pack)
        members.append((pack, (0, tokens)))
    for place, is_short in enumerate(short):
        if not is_short:
            members.append(([place], _cut_document(step, place, limit)))
    # The first document of a bundle is its longest.
    members.sort(key=lambda member: member[0][0])
    return tuple(
        DocumentBundle(tuple(step.order[place] for place in places), cuts)
        for places, cuts in members
    )


def _cut_document(step: _Step, place: int, limit: float) -> tuple[int, ...]:
    """Return the cuts of one document that the last pass found."""
    grid = step.planner.grid
    steps = np.empty(len(grid.first), dtype=np.int64)
    highest = np.empty(2)
    walk_back = compile_if_large(retrace, len(grid.sums) * EXPECTED_PASSES)
    count = walk_back(
        grid,
        PeakLimits(limit, limit, limit),
        step.reached,
        int(step.points[place]),
        steps,
        highest,
    )
    lengths = steps[:count][::-1]
    ends = (np.cumsum(lengths) * step.planner.grain).tolist()
    return (0, *ends[:-1], step.tokens[place])


def _latency(
    planner: DocumentPlanner, bundles: Sequence[DocumentBundle], lengths: Sequence[int]
) -> float:
    """Return the time of all units one after the other, and of the longest on every other stage, there and back."""
    latency = 0.0
    for curve, hop in (
        (planner.forward, planner.onward),
        (planner.backward, planner.homeward),
    ):
        units: list[tuple[float, float]] = []
        for bundle in bundles:
            units += _unit_seconds(curve, hop, bundle, lengths, planner.masked)
        total = sum(seconds for seconds, _ in units)
        longest = max(map(sum, units))
        latency += total + (planner.stages - 1) * longest
    return latency


def _unit_seconds(
    curve: Seconds,
    hop: Seconds,
    bundle: DocumentBundle,
    lengths: Sequence[int],
    masked: bool,
) -> list[tuple[float, float]]:
    """Return the seconds of each unit of a bundle, and of its hop."""
    if len(bundle.cuts) > 2:
        units = []
        for begin, end in pairwise(bundle.cuts):
            tokens = end - begin
            units.append((curve.of(tokens, begin), hop.of(tokens, begin)))
        return units
    seconds = curve.of(bundle.tokens, 0)
    if not masked:
        own = (curve.of(lengths[number], 0) - curve.base for number in bundle.documents)
        seconds = curve.base + sum(own)
    return [(seconds, hop.of(bundle.tokens, 0))]


def _lower_bound(step: _Step) -> float:
    """Return a latency that no bundles beat.

    M units take the work of all documents and M bases, and the longest unit takes at
    least their mean. The bound is the least of this over all M.
    """
    planner = step.planner
    both = add_curves([planner.forward, planner.backward])
    work = sum(both.of(tokens, 0) - both.base for tokens in step.tokens)
    fewest = -(-sum(step.tokens) // planner.budget)
    most = int(step.points.sum())
    best: float = most
    if both.base:
        best = math.sqrt((planner.stages - 1) * work / both.base)

    def latency(units: int) -> float:
        units = min(max(units, fewest), most)
        total = work + units * both.base
        return total * (1 + (planner.stages - 1) / units)

    return min(latency(math.floor(best)), latency(math.ceil(best)))
