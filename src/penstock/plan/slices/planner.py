"""Decides whether to slice sequences, into how many slices, where and in which order, by simulating every choice.

The cuts come from `best_cuts`, which is exact for TeraPipe's order and equal stages. The simulator says how good they
are in another order, with uneven stages or with serial links. The orders are, each with several numbers of slices,

    terapipe          all forwards, then all backwards       gpipe if not sliced
    seq1f1b           1F1B over slices                       1f1b if not sliced
    hanayo            waves
    zb-h1, zb-v       zero bubble
    ...+split         backwards split, weight gradients where a rank would idle

They run with slices of equal length, with planned slices and with whole sequences, which are often the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from penstock.cost.columns import columns, levels
from penstock.cost.cost import Cost
from penstock.cost.memory import gathered_gradients
from penstock.cost.model import ModelCost, finer
from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats
from penstock.plan.candidates import (
    Candidate,
    Judge,
    ShapeWords,
    add_noise,
    evaluate_schedule,
    title,
)
from penstock.plan.recipes import split_and_defer
from penstock.plan.slices.closed_form import equal_length
from penstock.plan.slices.cuts import best_cuts
from penstock.plan.slices.stage_times import (
    SlicedPipeline,
    coarse_step,
    coarsen,
    even_times,
    mean_pipeline,
    sliced_pipeline,
    tabulate_slices,
)
from penstock.plan.slices.uneven_stages import uneven_cuts
from penstock.schedules import make
from penstock.schedules.orders import loop_placement, require_at_least
from penstock.schedules.transforms import recut, slice_tokens
from penstock.sim.simulate import simulate

# The numbers of slices to try, besides those that are best for equal and for uneven stages.
SLICE_COUNTS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
# The most passes of a search for cuts; its best cuts so far are then simulated.
MAX_CUT_PASSES = 2_000
# The number of fastest candidates that are also simulated under noise.
SLICED_FINALISTS = 8
# The most points for uneven stages, where every slice of every stage is tabulated.
MAX_UNEVEN_POINTS = 64
# The labels that the exact search for uneven stages may extend.
UNEVEN_EFFORT = 100_000
# A peak may exceed the memory by this factor because of rounding.
MEMORY_TOLERANCE = 1 + 1e-9

Regroup = Callable[[int], Cost]


@dataclass(frozen=True, slots=True)
class SlicedCandidate:
    """A candidate with the cuts of its sequences, in tokens.

    Its peak counts activations and the gradients of keys and values, not all of a device.
    """

    candidate: Candidate
    cuts: tuple[int, ...]
    speedup: float | None  # over the best with whole sequences; None if none fits

    @property
    def slices(self) -> int:
        """The slices of each sequence; 1 if it is not sliced."""
        return len(self.cuts) - 1


@dataclass(frozen=True, slots=True)
class SlicedPlans:
    """All candidates that fit, the fastest first, and those that exceed the memory."""

    rows: tuple[SlicedCandidate, ...]
    too_large: tuple[tuple[str, float], ...]  # name and peak

    @property
    def best(self) -> SlicedCandidate:
        """The fastest."""
        return self.rows[0]

    @property
    def verdict(self) -> str:
        """Whether slicing pays, in a sentence."""
        best = self.best
        makespan = best.candidate.makespan
        name = f"{title(best.candidate.name, best.candidate.shape)} ({makespan:.4g} s)"
        if best.slices > 1 and best.speedup is None:
            return f"slice: {name}; nothing fits without slices"
        if best.slices > 1:
            return (
                f"slice: {name} is {best.speedup:.3f} times as fast "
                "as the best without slices"
            )
        sliced = [row.candidate for row in self.rows if row.slices > 1]
        if not sliced:
            return f"not sliced: {name}"
        other = title(sliced[0].name, sliced[0].shape)
        loss = sliced[0].makespan / makespan - 1
        return (
            f"do not slice: {name} is best, "
            f"and the best with slices, {other}, takes {loss:.2%} longer"
        )


def sliced_plans(
    ranks: int,
    microbatches: int,
    tokens: int,
    cost: Cost,
    granularity: int = 8,
    memory: float | None = None,
    slices: Sequence[int] = SLICE_COUNTS,
    waves: Sequence[int] = (1, 2),
    gradients: float = 0.0,
    regrouped: Regroup | None = None,
    watch: Callable[[str], None] = lambda name: None,
    limit: int | None = None,
) -> SlicedPlans:
    """Rank every way to slice sequences, or not to slice them, by makespan.

    `cost` has as many parts as ranks; `regrouped` returns the cost of the model in
    another number of parts (without it, the parts of a `ModelCost` are cut evenly). Cuts
    are multiples of `granularity`. `memory` is the bytes of activations that fit on a
    rank, and `gradients` the bytes per token of the gradients of keys and values there
    while a sliced sequence runs backward. `watch` is called with each name in turn. No
    candidate has more slices than `limit`, and a higher limit only adds candidates, so
    that its best plan is never slower.
    """
    fewest = {"slices": min(slices, default=1), "waves": min(waves, default=1)}
    fewest["limit"] = 1 if limit is None else limit
    require_at_least(1, ranks=ranks, microbatches=microbatches, **fewest)
    if isinstance(cost, ModelCost) and len(cost.parts) != ranks:
        raise ShapeError(
            f"the cost has {len(cost.parts)} parts; for {ranks} ranks it must have {ranks}"
        )
    choices = cut_choices(
        ranks, microbatches, tokens, cost, granularity, memory, slices, limit
    )
    # The order of whole micro-batches is built once, and then cut in many ways.
    build = cache(partial(_build, ranks, microbatches))
    fitting: list[tuple[Candidate, tuple[int, ...]]] = []
    too_large: list[tuple[str, float]] = []
    refused: list[ShapeError] = []
    for sort, cuts in choices:
        for order in _every_order(cuts, waves, build):
            name = title(order.name, order.shape)
            watch(name)
            try:
                price = _regroup_cost(cost, regrouped, ranks, order.stages_per_rank)
                candidate = _simulate_order(order, sort, price, memory, gradients)
            except ShapeError as error:  # this schedule or cost lacks such a shape
                refused.append(error)
                continue
            if memory is not None and candidate.peak > memory * MEMORY_TOLERANCE:
                too_large.append((name, candidate.peak))
            else:
                fitting.append((candidate, cuts))
    too_large.sort(key=lambda row: row[1])
    if not fitting and not too_large:
        raise refused[0]
    if not fitting:
        name, peak = too_large[0]
        raise ShapeError(
            f"nothing fits into a memory of {memory:g}; the smallest plan needs {peak:g}: {name}"
        )
    fitting.sort(key=lambda row: (row[0].makespan, len(row[1]), row[0].peak))
    for index, (candidate, cuts) in enumerate(fitting[:SLICED_FINALISTS]):
        noisy = _simulate_noise(candidate, cost, regrouped, ranks)
        fitting[index] = (noisy, cuts)
    return SlicedPlans(_with_speedups(fitting), tuple(too_large))


def _with_speedups(
    fitting: Sequence[tuple[Candidate, tuple[int, ...]]],
) -> tuple[SlicedCandidate, ...]:
    """Compare every candidate with the fastest one whose sequences are whole."""
    whole = [candidate.makespan for candidate, cuts in fitting if len(cuts) == 2]
    rows = []
    for candidate, cuts in fitting:
        speedup = min(whole) / candidate.makespan if whole else None
        rows.append(SlicedCandidate(candidate, cuts, speedup))
    return tuple(rows)


# ---------------------------------------------------------------- the choices
class CutChoice(NamedTuple):
    """One way to cut sequences, in tokens; its sort is whole, even or planned."""

    sort: str
    cuts: tuple[int, ...]


def cut_choices(
    ranks: int,
    microbatches: int,
    tokens: int,
    cost: Cost,
    granularity: int = 8,
    memory: float | None = None,
    slices: Sequence[int] = SLICE_COUNTS,
    limit: int | None = None,
) -> list[CutChoice]:
    """Return the ways to cut sequences that are worth simulating, without repetition.

    The arguments are those of `sliced_plans`. Which cuts are found does not depend on
    `limit`, which only leaves out those with more slices.
    """
    pipeline = sliced_pipeline(loop_placement(ranks), cost, tokens, granularity)
    counts = {count for count in slices if count <= pipeline.points}
    if memory is not None:
        counts |= _counts_for_memory(ranks, tokens, cost, memory, pipeline.points)
    choices: dict[tuple[int, ...], CutChoice] = {}
    for sort, lengths in _every_lengths(pipeline, ranks, microbatches, counts, limit):
        cuts = tuple((np.cumsum([0, *lengths]) * pipeline.grain).tolist())
        choices.setdefault(cuts, CutChoice(sort, cuts))
    return list(choices.values())


def _every_lengths(
    pipeline: SlicedPipeline,
    ranks: int,
    microbatches: int,
    counts: set[int],
    limit: int | None,
) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield lengths of at most `limit` slices in points with their sort."""
    points = pipeline.points
    most = points if limit is None else limit
    even_pipeline = pipeline if pipeline.even else mean_pipeline(pipeline)
    times = even_times(even_pipeline, microbatches)
    yield "whole", [points]
    if most == 1:
        return
    found = [best_cuts(times, ranks, patience=MAX_CUT_PASSES).lengths]
    if not pipeline.even:
        found.append(tuple(_uneven_lengths(pipeline, microbatches)))
    for lengths in found:
        if len(lengths) <= most:
            yield "planned", lengths
    best_count = len(found[0])
    for count in sorted({*counts, best_count} - {1}):
        if count > most:
            continue
        yield "even", equal_length(points, count)
        if count != best_count:
            planned = best_cuts(times, ranks, slices=count, patience=MAX_CUT_PASSES)
            yield "planned", planned.lengths


def _uneven_lengths(pipeline: SlicedPipeline, microbatches: int) -> list[int]:
    """Return slices for the stages as they are, on a grid that is coarse enough to tabulate."""
    step = coarse_step(pipeline.points, MAX_UNEVEN_POINTS)
    coarse = coarsen(pipeline, step)
    slicing = uneven_cuts(tabulate_slices(coarse), microbatches, effort=UNEVEN_EFFORT)
    return [step * length for length in slicing.lengths]


class _Order(NamedTuple):
    """A schedule to try: its name and shape, and how to build it."""

    name: str
    shape: ShapeWords
    stages_per_rank: int
    build: Callable[[], Schedule]
    split: bool = False  # whether to split backwards and defer the weight gradients


def _build(
    ranks: int, microbatches: int, name: str, word: str = "slices", number: int = 1
) -> Schedule:
    return make(name, ranks=ranks, microbatches=microbatches, **{word: number})


def _every_order(
    cuts: tuple[int, ...], waves: Sequence[int], build: Callable[..., Schedule]
) -> Iterator[_Order]:
    """Yield every order for given cuts.

    `build` makes a schedule from its name, a word of its shape, and the number for that.
    """
    count = len(cuts) - 1
    is_sliced = count > 1
    shape: ShapeWords = (("slices", count),) if is_sliced else ()

    def move_cuts(name: str) -> Schedule:
        """For schedules that have slices of their own."""
        return recut(build(name, "slices", count), cuts)

    def cut(name: str, *word: str | int) -> Schedule:
        """For schedules of whole micro-batches."""
        return slice_tokens(build(name, *word), cuts)

    gpipe_name = "terapipe" if is_sliced else "gpipe"
    yield _Order(gpipe_name, shape, 1, partial(move_cuts, "terapipe"))
    one_f_one_b_name = "seq1f1b" if is_sliced else "1f1b"
    one_f_one_b = partial(move_cuts, "seq1f1b")
    yield _Order(one_f_one_b_name, shape, 1, one_f_one_b)
    yield _Order(f"{one_f_one_b_name}+split", shape, 1, one_f_one_b, split=True)
    yield _Order("zb-h1", shape, 1, partial(cut, "zb-h1"))
    yield _Order("zb-v", shape, 2, partial(cut, "zb-v"))
    for number in waves:
        wave_shape: ShapeWords = (("waves", number), *shape)
        wave = partial(cut, "hanayo", "waves", number)
        yield _Order("hanayo", wave_shape, 2 * number, wave)
        yield _Order("hanayo+split", wave_shape, 2 * number, wave, split=True)


# ---------------------------------------------------------------- simulation
def _regroup_cost(
    cost: Cost, regrouped: Regroup | None, ranks: int, stages_per_rank: int
) -> Cost:
    """Return the cost of the model with this many parts on each rank."""
    if regrouped is not None:
        return regrouped(ranks * stages_per_rank)
    if isinstance(cost, ModelCost):
        return finer(cost, stages_per_rank)
    return cost


def _simulate_order(
    order: _Order, sort: str, cost: Cost, memory: float | None, gradients: float
) -> Candidate:
    """Build and simulate an order; the peak counts activations and the gradients of keys and values."""
    schedule = order.build()
    if order.split:
        schedule = split_and_defer(schedule, cost, partial(_fits, cost, memory))
    candidate = evaluate_schedule(order.name, order.shape, sort, schedule, Judge(cost))
    # A judge weighs a whole device, but `memory` is only what activations may fill.
    held = levels(schedule, columns(schedule, cost))
    if gradients:
        held = held + key_value_gradient_bytes(schedule, gradients)
    return replace(candidate, peak=float(held.max()))


def _fits(cost: Cost, memory: float | None, schedule: Schedule) -> bool:
    """Whether the activations of every rank fit."""
    if memory is None:
        return True
    peak = float(levels(schedule, columns(schedule, cost)).max())
    return peak <= memory * MEMORY_TOLERANCE


def _simulate_noise(
    candidate: Candidate, cost: Cost, regrouped: Regroup | None, ranks: int
) -> Candidate:
    """Return the candidate with its makespan under noise."""
    schedule = candidate.schedule
    price = _regroup_cost(cost, regrouped, ranks, len(schedule.stages) // ranks)
    return add_noise(candidate, Judge(price))


# ---------------------------------------------------------------- memory
def key_value_gradient_bytes(schedule: Schedule, gradients: float) -> Floats:
    """Return the bytes of the gradients of keys and values on each action's rank while it runs.

    A sequence gathers them from the backward of its last slice, which computes them for
    all tokens before it, to the backward of its first slice. `gradients` is the number
    of bytes per token for all stages of a rank.
    """
    table = schedule.table
    tokens_of = np.array([m.tokens for m in schedule.microbatches], dtype=np.float64)
    whole = gradients * tokens_of[table.microbatch] / table.crowd[table.stage]
    return gathered_gradients(schedule, whole)


def _counts_for_memory(
    ranks: int, tokens: int, cost: Cost, memory: float, points: int
) -> set[int]:
    """Return the numbers of slices with which 1F1B over slices fits into the memory.

    With s slices and P ranks it holds s + P - 1 slices, which is (s + P - 1) / s of one
    micro-batch.
    """
    whole = slice_tokens(make("1f1b", ranks=ranks, microbatches=1), (0, tokens))
    microbatch_bytes = float(simulate(whole, cost).peak_activations.max())
    if memory <= microbatch_bytes or not microbatch_bytes:
        return set()
    spare = memory - microbatch_bytes
    least = math.ceil((ranks - 1) * microbatch_bytes / spare - 1e-9)
    return {count for count in (least, 2 * least) if 1 < count <= points}
