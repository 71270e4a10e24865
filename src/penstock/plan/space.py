"""Everything that can be tried in one pipeline: where stages live, how sequences are cut, in which order ranks act.

                     whole    2 slices   3 slices   4 slices ...        of equal length, or planned
    loop of 1        x        x          x          x
    loop of 2        x        x          x
    wave of 1        x        x          x          x                   x: fixed orders, split ones, listed ones
    wave of 2        x        x

A row is a placement. What is tried in a field depends neither on other fields nor on the limits, so a larger limit only
adds candidates.

Partial paths in a search: each micro-batch may leave out a share of the layers (SkipPipe, Blagoev et al., 2025).

    parts   0 1 2 3 4 5 6 7      two parts left out of eight: at most a quarter of the layers
    mb 0    x . . x x x x x      the first part has the embedding and the last one the head, so all visit them
    mb 1    x x x . . x x x      the parts left out move on, so that all others are left out equally often
    mb 2    x x x x x . . x

Leaving out layers changes what is computed: every micro-batch trains a shorter model. So a search does it only where
the user allows it, and a bound for such a search must count only the layers that every micro-batch visits.

**The bound.** Every micro-batch runs at least V layers, the embedding and the head. A rank without a first part can
begin only after a hop. The ranks share all work, so the step takes at least the mean over the ranks. One micro-batch
takes the way there and the way back, and no backward starts before a way there. The bounds do not count hops between
the later ranks, since a path may skip any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.cost.cost import Cost
from penstock.ir.schedule import MicroBatch, Schedule, Stage
from penstock.plan.bound import lower_bound
from penstock.plan.candidates import ROUNDING, Evaluator, Runtime, ShapeWords
from penstock.plan.workload import Division
from penstock.schedules import REGISTRY, make, shape_of
from penstock.schedules.facts import FACTS
from penstock.schedules.list_scheduling import defer_weights
from penstock.schedules.orders import loop_placement, wave_placement
from penstock.schedules.skip import path_with_skips
from penstock.schedules.transforms import recut, slice_tokens, split_backward
from penstock.sim.simulate import simulate

Cuts = tuple[int, ...]
TRIED_CHUNKS = (1, 2, 3, 4, 6, 8)
TRIED_WAVES = (1, 2, 3, 4, 5, 6, 8)
TRIED_SLICES = (1, 2, 4, 8, 16, 32, 64)
# Other numbers of slices. In the units of the papers more slices cost nothing, so these are tried
# only where a rank has few stages.
ODD_SLICES = (3, 6, 12, 24)
ODD_SLICED_STAGES = 2
# Those with slices in their own shape are made from whole ones here.
SCHEDULES_NOT_TRIED = ("terapipe", "seq1f1b")
WITH_WHOLE_BACKWARDS = ("1f1b", "interleaved", "chimera", "hanayo")  # worth splitting
SLICED_NAMES = {"gpipe": "terapipe", "1f1b": "seq1f1b"}
# Fixed orders that are also tried with slices.
FIXED_WITH_SLICES = ("gpipe", "1f1b", "zb-h1", "zb-v", "hanayo")


@dataclass(frozen=True, slots=True)
class Limits:
    """What every candidate must keep to, besides the memory."""

    stages: int = 16  # stages of a rank at most
    slices: int = 16  # slices of a sequence at most; 1: do not slice
    weights: int = 1  # copies of the weights at most
    split: bool = True  # whether backwards may be split
    # The share of the layers that a micro-batch may leave out, which changes what is computed.
    skip: float = 0.0
    # The runtime of another framework, which must be able to run the plans; None for our own.
    runtime: Runtime | None = None

    def refuse_stages(self, stages: Sequence[Stage]) -> str:
        """Say why the runtime cannot place stages in this way; empty if it can."""
        return "" if self.runtime is None else self.runtime.refuse_stages(stages)

    def refuse_order(self, schedule: Schedule) -> str:
        """Say why the runtime cannot run a schedule; empty if it can."""
        return "" if self.runtime is None else self.runtime.refuse_order(schedule)


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """The pipeline of a division: what times its schedules, what they must keep to, and how sequences are cut."""

    division: Division
    evaluator: Evaluator
    limits: Limits
    # The different cuts into a number of slices; none if there is no such number.
    cuts: Callable[[int], list[Cuts]]
    # A time that no order of a placement with given cuts can beat.
    least_time: Callable[[StagePlacement, Cuts], float] = lambda placement, cuts: 0.0


@dataclass(frozen=True, slots=True)
class FixedRecipe:
    """An order from the registry, with its shape and cuts."""

    name: str
    shape: ShapeWords
    order_kind: str
    build: Callable[[], Schedule]
    stages: int  # of a rank
    least_time: float  # that no order with its stages and cuts can beat


def limits_of(division: Division, limits: Limits, layers: int) -> Limits:
    """Return narrower limits where more choices cannot help: no rank has more stages than layers.

    On a single rank without copies nothing overlaps, so all orders take the same time, unless
    they leave out work.
    """
    if division.ranks == 1 and division.copies == 1 and not limits.skip:
        return replace(limits, stages=1, slices=1, split=False)
    return replace(limits, stages=max(1, min(limits.stages, layers // division.ranks)))


def even_cuts_only(slices: int) -> list[Cuts]:
    """Return the one way to cut sequences if only proportions matter: into equal slices."""
    return [tuple(range(slices + 1))]


# ---------------------------------------------------------------- placements
@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Stages of the ranks in a loop (this many chunks) or in waves, and the parts that each micro-batch leaves out."""

    word: str  # "chunks" or "waves"
    count: int
    skips: int = 0

    @property
    def stages_per_rank(self) -> int:
        """The number of stages on each rank."""
        return self.count if self.word == "chunks" else 2 * self.count

    def stages(self, ranks: int) -> list[Stage]:
        """Return the stages on this many ranks."""
        place = loop_placement if self.word == "chunks" else wave_placement
        return place(ranks, self.count)

    def paths(
        self, stages: list[Stage], microbatches: int, cuts: Cuts
    ) -> list[MicroBatch]:
        """Return the paths of all micro-batches through these stages, with these cuts."""
        if self.skips:
            return partial_paths(len(stages), self.skips, microbatches, cuts)
        path = tuple(range(len(stages)))
        return [MicroBatch(path, cuts[-1], cuts)] * microbatches

    @property
    def shape(self) -> ShapeWords:
        """The placement as a row shows it."""
        shape: ShapeWords = ((self.word, self.count),)
        return (*shape, ("skips", self.skips)) if self.skips else shape


def sliced_shape(shape: ShapeWords, cuts: Cuts) -> ShapeWords:
    """Return a shape with the number of slices, if sequences are cut."""
    slices = len(cuts) - 1
    return (*shape, ("slices", slices)) if slices > 1 else shape


def placements(ranks: int, limits: Limits) -> Iterator[StagePlacement]:
    """Yield the placements to try, from few stages to many; where it is allowed, also with partial paths.

    On one rank every placement does the same work in the same order, so one is enough for whole
    paths, and waves are the same as chunks.
    """
    for placement in allowed_placements(ranks, limits):
        if ranks == 1 and placement.word == "waves":
            continue
        if ranks > 1 or placement.count == 1:
            yield placement
        skips = most_skips(ranks * placement.stages_per_rank, limits.skip)
        if skips:
            yield replace(placement, skips=skips)


def allowed_placements(ranks: int, limits: Limits) -> list[StagePlacement]:
    """Return all placements that the limits allow, from few stages to many."""
    every = [StagePlacement("chunks", count) for count in TRIED_CHUNKS]
    every += [StagePlacement("waves", count) for count in TRIED_WAVES]
    allowed = [
        one
        for one in every
        if one.stages_per_rank <= limits.stages
        and not limits.refuse_stages(one.stages(ranks))
    ]
    return sorted(allowed, key=lambda one: one.stages_per_rank)


def slice_counts(limits: Limits) -> list[int]:
    """Return the numbers of slices that are tried within the limits, the smallest first."""
    return sorted(one for one in (*TRIED_SLICES, *ODD_SLICES) if one <= limits.slices)


# ---------------------------------------------------------------- fixed orders
def fixed_recipes(pipeline: PipelineShape, slices: int) -> Iterator[FixedRecipe]:
    """Yield the orders of the registry with this number of slices, as they are and split."""
    limits = pipeline.limits
    for name in REGISTRY:
        if name in SCHEDULES_NOT_TRIED or FACTS[name].weights > limits.weights:
            continue
        if slices > 1 and name not in FIXED_WITH_SLICES:
            continue
        if FACTS[name].splits and not limits.split:
            continue
        for shape in _shapes(name, limits, pipeline.division.ranks):
            for cuts in pipeline.cuts(slices):
                yield from _fixed_with_cuts(pipeline, name, shape, cuts)


def _fixed_with_cuts(
    pipeline: PipelineShape, name: str, shape: ShapeWords, cuts: Cuts
) -> Iterator[FixedRecipe]:
    placement = _placement_of(name, shape)
    limits = pipeline.limits
    if limits.refuse_stages(placement.stages(pipeline.division.ranks)):
        return
    slices = len(cuts) - 1
    build = partial(_build_fixed, pipeline.division, name, shape, cuts)
    full_shape = sliced_shape(shape, cuts)
    shown = name if slices == 1 else SLICED_NAMES.get(name, name)
    stages = placement.stages_per_rank
    least = pipeline.least_time(placement, cuts)
    yield FixedRecipe(shown, full_shape, "fixed", build, stages, least)
    if limits.split and name in WITH_WHOLE_BACKWARDS:
        split = f"{shown}+split"
        build_split = partial(_build_split, build, pipeline.evaluator)
        yield FixedRecipe(split, full_shape, "split", build_split, stages, least)


def _placement_of(name: str, shape: ShapeWords) -> StagePlacement:
    """Return the placement of a schedule's stages: those with two stages on a rank are waves."""
    for word, count in shape:
        if word in ("chunks", "waves"):
            return StagePlacement(word, count)
    return StagePlacement("waves" if FACTS[name].stages > 1 else "chunks", 1)


def _build_fixed(
    division: Division, name: str, shape: ShapeWords, cuts: Cuts
) -> Schedule:
    slices = len(cuts) - 1
    sizes = {"ranks": division.ranks, "microbatches": division.microbatches}
    if slices > 1 and name in SLICED_NAMES:
        sliced = make(SLICED_NAMES[name], **sizes, slices=slices)
        return recut(sliced, cuts)
    return slice_tokens(make(name, **sizes, **dict(shape)), cuts)


def _shapes(name: str, limits: Limits, ranks: int) -> Iterator[ShapeWords]:
    """Yield the shapes of a schedule to try, without ranks and micro-batches.

    `skip` leaves out part of the work, so it is tried only where that is allowed.
    """
    words = shape_of(name)
    if "skips" in words:
        if skips := most_skips(ranks, limits.skip):
            yield (("skips", skips),)
        return
    if "chunks" in words:
        counts = [count for count in TRIED_CHUNKS if 1 < count <= limits.stages]
        yield from ((("chunks", count),) for count in counts)
    elif "waves" in words:
        counts = [count for count in TRIED_WAVES if 2 * count <= limits.stages]
        yield from ((("waves", count),) for count in counts)
    elif FACTS[name].stages <= limits.stages:
        yield ()


def _build_split(build: Callable[[], Schedule], evaluator: Evaluator) -> Schedule:
    def fits(schedule: Schedule) -> bool:
        return evaluator.fits(evaluator.peak(schedule))

    return split_and_defer(build(), evaluator.cost, fits)


def split_and_defer(
    schedule: Schedule, cost: Cost, fits: Callable[[Schedule], bool]
) -> Schedule:
    """Split the backwards, and put each W where its rank would idle.

    Two ways are tried: in the memory that the schedule needs anyway, and in any memory. More
    memory lets more W wait, which does not always help the actions after them.
    """
    split = split_backward(schedule)
    in_own_memory = defer_weights(split, cost)
    makespan = simulate(in_own_memory, cost).makespan
    if makespan <= lower_bound(in_own_memory, cost) * (1 + ROUNDING):
        return in_own_memory
    in_any_memory = defer_weights(split, cost, math.inf)
    if simulate(in_any_memory, cost).makespan < makespan and fits(in_any_memory):
        return in_any_memory
    return in_own_memory


# ---------------------------------------------------------------- partial paths
# A share of a count may come out just below a whole number.
COUNT_ROUNDING = 1e-9


def partial_paths(
    parts: int, skips: int, microbatches: int, cuts: tuple[int, ...]
) -> list[MicroBatch]:
    """Return micro-batches that each leave out `skips` of the parts between the first and the last.

    >>> [one.path for one in partial_paths(5, 1, 3, (0, 1))]
    [(0, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 4)]
    """
    last = parts - 1
    return [
        MicroBatch((*path_with_skips(last, skips, number), last), cuts[-1], cuts)
        for number in range(microbatches)
    ]


def most_skips(parts: int, share: float) -> int:
    """Return how many of some equal parts may be left out if `share` of the layers may.

    One of the parts between the first and the last must be visited, or no path would visit it.

    >>> most_skips(8, 0.25), most_skips(3, 0.25), most_skips(4, 0.9)
    (2, 0, 1)
    """
    return min(math.floor(parts * share + COUNT_ROUNDING), max(parts - 3, 0))


def skipped_share(schedule: Schedule, partition: tuple[int, ...] = ()) -> float:
    """Return the largest share of the layers that a micro-batch leaves out.

    Without a partition, all ranks have equally many layers, and so have the parts of a rank.
    """
    work = [0.0] * schedule.parts
    for number, stage in enumerate(schedule.stages):
        layers = 1.0 / int(schedule.table.stages_on_rank[number])
        if partition:
            layers = float(partition[stage.part])
        work[stage.part] = layers
    whole = sum(work)
    least = whole
    for path in {microbatch.path for microbatch in schedule.microbatches}:
        visited = {schedule.stages[stage].part for stage in path}
        least = min(least, sum(work[part] for part in visited))
    return 1.0 - least / whole if whole else 0.0


def visited_layers(layers: int, share: float) -> int:
    """Return the fewest layers that a micro-batch visits if it may leave out `share` of them."""
    return layers - math.floor(layers * share + COUNT_ROUNDING)
