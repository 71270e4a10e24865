"""Searches the whole space of plans: how to divide devices and batch, and for each division the best schedule.

    divisions  copies x ranks x tensor x shard, micro-batches x rows, recomputation      sorted by their bounds
                  │
    survey     a few good schedules of every division that could still win                   the first answer
                  │
    ranking    all placements, slices and orders of the most promising divisions             the answer
                  │
    bound      the least bound of all divisions: no plan of the whole space is faster

A division whose bound is above the best plan so far cannot win, so it is left out. All work is counted and nothing is
timed, so the same workload and profile give the same plan on any machine. Ctrl-C ends a search with the best so far.

**More memory, more devices or more slices never give a slower plan** if the larger search is complete, which means
that it has ranked every division that could win. Within a division, a larger question has all candidates of a smaller
one (see below), and with more devices there are more divisions. So the candidates of the smaller question are among
those of the larger one, whose answer is the least of all its candidates. A search with very many divisions ends when
its work is done. Then `Landscape.left_out` counts the divisions that could have won, and a smaller question may have
a faster plan.

Builds, simulates and ranks every schedule that fits, for given ranks and micro-batches.

1. fixed orders with whole sequences
2. fixed orders with slices, and orders that are searched for this cost and memory, those with the least bounds first
3. of the fastest ones, the one that suffers least from noise

**More memory or more slices never give a slower plan.** Every candidate is built by itself: which candidates there are,
and how much work each one gets, depends neither on the memory, nor on the limits, nor on the other candidates. The
memory and the limits only leave out candidates that exceed them. (Orders are searched at levels of memory of
their own, see `penstock.plan.orders`.) So the candidates of a smaller question are among those of a larger one. A
candidate is left out only if a bound shows that it takes as long as the best one so far, or longer. So the best time is
the least of all candidates that fit, and the least of more candidates is no larger. The last step chooses only among
candidates whose times print as the same number.

The work is counted, in schedules and moves, so the ranking is the same on any machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import NamedTuple

from penstock.cost.cost import Cost
from penstock.errors import NothingFitsError, ShapeError
from penstock.ir.compiled import many_schedules
from penstock.ir.plan import Fact, Facts
from penstock.ir.schedule import Schedule
from penstock.plan.candidates import (
    LISTED,
    ROUNDING,
    Candidate,
    ShapeWords,
    add_noise,
    evaluate_schedule,
    merge_equal,
    title,
)
from penstock.plan.orders import (
    MemoryLevel,
    OrderSearch,
    level_work,
    memory_levels,
    orders_by_memory,
)
from penstock.plan.pricing import Question, UnitPricing, unit_workload
from penstock.plan.space import (
    ODD_SLICED_STAGES,
    ODD_SLICES,
    TRIED_SLICES,
    Cuts,
    FixedRecipe,
    Limits,
    PipelineShape,
    StagePlacement,
    fixed_recipes,
    placements,
    skipped_share,
    slice_counts,
    sliced_shape,
)
from penstock.plan.workload import RECOMPUTED_SHARES, Division, Workload, divisions_of
from penstock.schedules.coverage import visited_parts, visits_all_parts
from penstock.schedules.facts import MAX_ACTIONS, refuse_if_too_large
from penstock.schedules.list_scheduling import sequential_schedule
from penstock.schedules.orders import require_at_least

# Listed orders have at most this many actions; larger ones take too long to list.
MAX_LISTED_ACTIONS = 16_000
# Fixed orders with slices have at most this many actions: with that many micro-batches, slices
# help little.
MAX_SLICED_ACTIONS = 16_000
# Actions of all fixed orders with one number of slices. They take about 30 seconds.
FIXED_ACTIONS = 4_000_000
# The smallest orders with more actions than this are not timed under noise, which takes long.
MAX_NOISY_ACTIONS = 200_000
MAX_SLICED_STAGES = 8  # of a rank, in listed orders with slices
SURVEYED_STAGES = 4
# A survey compares orders with at most this many micro-batches for each rank, because more of
# them repeat what these do. Then it builds the best orders with all micro-batches.
SURVEYED_ROUNDS = 3
SURVEYED_ORDERS = 3  # that are built with all micro-batches, until one fits
BUILDING_WORK = 500  # Building a fixed order takes as long as this many simulations.
FINALISTS = 8  # candidates that are timed under noise
# Times that agree in this many digits are printed as the same number.
PRINTED_DIGITS = 4
# Means under noise that differ by less than this share count as equal: they are of few samples.
SAMPLING = 0.0025


def portfolio(
    ranks: int,
    microbatches: int,
    cost: Cost,
    memory: float | None = None,
    stages: int = 16,
    slices: int = 8,
    weights: int = 1,
    watch: Callable[[str], None] = lambda name: None,
    shown: Callable[[float], str] = "{:g}".format,
) -> Landscape:
    """Rank every schedule whose fullest rank holds at most `memory` bytes.

    stages: the largest number of stages per rank, because a model has a limited number of layers.
    slices: the largest number of slices of a sequence; 1 for models that cannot be cut.
    weights: the largest number of copies of the weights.
    watch: called with the name of each candidate before it is built.
    shown: formats sizes in error messages.
    """
    require_at_least(
        1,
        ranks=ranks,
        microbatches=microbatches,
        stages=stages,
        slices=slices,
        weights=weights,
    )
    limits = Limits(stages, slices, weights)
    workload = unit_workload(ranks, microbatches, memory)
    question = Question(workload, UnitPricing(cost, memory, limits))
    return search(question, lambda progress: watch(progress.doing), shown)


def rank_pipeline(
    pipeline: PipelineShape,
    watch: Callable[[str], None] = lambda name: None,
    bound: float = 0.0,
    note: Callable[[float], None] = lambda step: None,
    rival: float = math.inf,
) -> Ranking:
    """Rank all candidates of one division. Raises if no schedule can be built at all.

    `bound` is a time that no step can beat. The search ends when it is reached. `note` is called
    with the time of each candidate that fits. `rival` is the time of a plan of another division:
    candidates that cannot beat it are left out. Ctrl-C ends a ranking with the best so far.
    """
    ranks, microbatches = pipeline.division.ranks, pipeline.division.microbatches
    refuse_if_too_large(
        2 * ranks * microbatches,
        f"any schedule with ranks={ranks} microbatches={microbatches}",
    )
    ranking = Ranking(pipeline, watch, note, rival)
    try:
        ranking.try_everything(bound)
        ranking.sort()
        ranking.add_noise()
    except KeyboardInterrupt:
        if not ranking.candidates:
            raise
        ranking.sort()
        ranking.interrupted = True
    return ranking


def survey_pipeline(pipeline: PipelineShape, rival: float = math.inf) -> Ranking:
    """Rank a few good candidates of a division, to see whether it is worth more work.

    They are the fixed orders with at most `SURVEYED_STAGES` stages on a rank, whole sequences.
    Those that cannot beat a rival are left out. Where there are many micro-batches, few of them
    tell which orders are the best, and only these are built with all of them.
    """
    division = pipeline.division
    limits = replace(
        pipeline.limits, stages=min(pipeline.limits.stages, SURVEYED_STAGES)
    )
    pipeline = replace(pipeline, limits=limits)
    few = min(division.microbatches, SURVEYED_ROUNDS * division.ranks)
    short = replace(pipeline, division=replace(division, microbatches=few))
    ranking = Ranking(short)
    for recipe in ranking.affordable(1):
        if recipe.least_time < rival:
            ranking.try_recipe(recipe)
    if rival == math.inf:
        ranking.require_any()
    if few < division.microbatches:
        best = sorted(ranking.candidates, key=_order_of_candidates)[:SURVEYED_ORDERS]
        recipes = {(one.name, one.shape): one for one in fixed_recipes(pipeline, 1)}
        whole = Ranking(pipeline)
        whole.too_large = ranking.too_large
        for candidate in best:
            whole.try_recipe(recipes[candidate.name, candidate.shape])
            if whole.candidates:
                break
        ranking = whole
    ranking.sort()
    return ranking


def weigh_pipeline(pipeline: PipelineShape) -> list[tuple[str, float]]:
    """Return name and peak of the orders that hold the least: one micro-batch after the other."""
    division, limits = pipeline.division, pipeline.limits
    few = min(2, division.microbatches)
    rows = []
    for placement in placements(division.ranks, limits):
        stages = placement.stages(division.ranks)
        for slices in TRIED_SLICES:
            for cuts in pipeline.cuts(slices) if slices <= limits.slices else ():
                paths = placement.paths(stages, few, cuts)
                try:
                    peak = pipeline.evaluator.peak(sequential_schedule(stages, paths))
                except ShapeError:  # the cost has no such shape
                    continue
                shape = sliced_shape(placement.shape, cuts)
                rows.append(
                    (f"one micro-batch after the other, {title(LISTED, shape)}", peak)
                )
    return rows


class _Task(NamedTuple):
    """Candidates to try, with a time that none of them can beat."""

    least_time: float
    size: int
    run: Callable[[], None]


class Ranking:
    """The candidates of one division that were found so far.

    too_large: name and peak of the candidates that exceed the memory.
    work: actions that were simulated, about.
    interrupted: whether Ctrl-C ended the search early.
    best: the time of the fastest candidate, or of a rival from another division.
    """

    def __init__(
        self,
        pipeline: PipelineShape,
        watch: Callable[[str], None] = lambda name: None,
        note: Callable[[float], None] = lambda step: None,
        best: float = math.inf,
    ) -> None:
        self.pipeline = pipeline
        self.limits = pipeline.limits
        self.evaluator = pipeline.evaluator
        self.watch = watch
        self.note = note
        self.best = best
        self.work = 0
        self.interrupted = False
        self.candidates: list[Candidate] = []
        self.too_large: list[tuple[str, float]] = []
        self.first_error: ShapeError | None = None

    # ------------------------------------------------------------ candidates
    def try_everything(self, bound: float) -> None:
        """Try all candidates, until one is as fast as the bound."""
        has_rival = self.best < math.inf
        if not has_rival:
            for recipe in self.affordable(1):
                self.try_recipe(recipe)
        with many_schedules():
            for task in self.tasks(fewest=1 if has_rival else 2):
                if self.best <= bound * (1 + ROUNDING):
                    break
                if not self.cannot_win(task.least_time):
                    task.run()
        if not has_rival:
            self.require_any()

    def affordable(self, slices: int) -> Iterator[FixedRecipe]:
        """Yield the orders of the registry, the smallest first, until trying more would take too long."""
        division = self.pipeline.division
        each = 2 * division.ranks * division.microbatches * slices
        if slices > 1 and each > MAX_SLICED_ACTIONS:
            return
        recipes = list(fixed_recipes(self.pipeline, slices))
        recipes.sort(key=lambda one: (one.stages, one.name == "gpipe"))
        left = FIXED_ACTIONS
        for place, recipe in enumerate(recipes):
            actions = each * recipe.stages
            if actions <= left or not place:
                left -= actions
                yield recipe

    def tasks(self, fewest: int) -> list[_Task]:
        """Return all that is still to be tried: those first that could be the fastest, and of these the smallest.

        Fixed orders have at least `fewest` slices.
        """
        found = []
        for slices in slice_counts(self.limits):
            for recipe in self.affordable(slices) if slices >= fewest else ():
                run = partial(self.try_recipe, recipe)
                found.append(_Task(recipe.least_time, recipe.stages * slices, run))
            for placement in self.placements(slices):
                for cuts in self.pipeline.cuts(slices):
                    size = placement.stages_per_rank * slices
                    run = partial(self.try_placement, placement, cuts)
                    least = self.pipeline.least_time(placement, cuts)
                    found.append(_Task(least, size, run))
        found.sort(key=lambda one: (one.least_time, one.size))
        return found

    def placements(self, slices: int) -> list[StagePlacement]:
        """Return the placements on which this number of slices is tried.

        Whole sequences are tried on all of them. Slices multiply the actions, so they are
        tried on those with few stages.
        """
        most = self.limits.stages
        if slices > 1:
            most = min(most, MAX_SLICED_STAGES)
        if slices in ODD_SLICES and not self.evaluator.cost.units.seconds:
            most = min(most, ODD_SLICED_STAGES)
        runtime = self.limits.runtime
        if runtime is not None and not runtime.takes_lists:
            return []
        every = placements(self.pipeline.division.ranks, self.limits)
        return [one for one in every if one.stages_per_rank <= most]

    def try_recipe(self, recipe: FixedRecipe) -> None:
        """Build and add an order of the registry, unless it cannot be built."""
        self.watch(title(recipe.name, recipe.shape))
        try:
            schedule = recipe.build()
            self.work += BUILDING_WORK * schedule.actions
            self.add(recipe.name, recipe.shape, recipe.order_kind, schedule)
        except ShapeError as error:  # this schedule, or the cost, has no such shape
            self.first_error = self.first_error or error

    def try_placement(self, placement: StagePlacement, cuts: Cuts) -> None:
        """Try the orders of a placement with these cuts, with more and more memory."""
        division = self.pipeline.division
        stages = placement.stages(division.ranks)
        actions = 3 * len(stages) * division.microbatches * (len(cuts) - 1)
        if actions > min(MAX_LISTED_ACTIONS, MAX_ACTIONS):
            return
        shape = sliced_shape(placement.shape, cuts)
        paths = placement.paths(stages, division.microbatches, cuts)
        self.watch(title("listed", shape))
        try:
            levels = memory_levels(self.evaluator, stages, paths)
            if not self.evaluator.fits(levels[0].memory):
                self.too_large.append((title("listed", shape), levels[0].memory))
                return
            for split in self.ways_back():
                search = OrderSearch(stages, paths, self.evaluator.cost, split)
                self.try_levels(search, levels, shape)
        except ShapeError as error:  # the cost has no such shape
            self.first_error = self.first_error or error

    def try_levels(
        self, search: OrderSearch, levels: Sequence[MemoryLevel], shape: ShapeWords
    ) -> None:
        """Try the orders of all levels that fit."""
        memory = self.evaluator.memory
        draft = search.drafts[0].schedule

        def cannot_win(makespan: float) -> bool:
            return self.cannot_win(self.evaluator.step(draft, makespan))

        added: set[Schedule] = set()
        for schedule in orders_by_memory(search, levels, memory, cannot_win):
            self.work += search.size * level_work(search.size)
            if schedule not in added:  # else less memory gives the same order
                added.add(schedule)
                self.add("listed", shape, "listed", schedule)

    def ways_back(self) -> tuple[bool, ...]:
        """Return whether to list split backwards, whole ones, or both.

        In the units of the papers I and W take as long as B, so split backwards are never slower.
        """
        if not self.limits.split:
            return (False,)
        return (True, False) if self.evaluator.cost.units.seconds else (True,)

    def add(
        self, name: str, shape: ShapeWords, order_kind: str, schedule: Schedule
    ) -> None:
        """Add a schedule to those that fit, or to those that are too large."""
        if reason := self.limits.refuse_order(schedule):
            raise ShapeError(reason)
        candidate = evaluate_schedule(
            self.pipeline.division, name, shape, order_kind, schedule, self.evaluator
        )
        check_skips(candidate, self.limits.skip)
        if not self.evaluator.fits(candidate.peak):
            self.too_large.append((title(name, shape), candidate.peak))
            return
        self.candidates.append(candidate)
        self.best = min(self.best, candidate.step)
        self.note(candidate.step)

    def require_any(self) -> None:
        """Raise if no schedule could be built so far, whether it fits or not."""
        if not self.candidates and not self.too_large:
            raise ShapeError(f"no schedule can be built: {self.first_error}")

    def cannot_win(self, least_time: float) -> bool:
        """Whether a step that takes at least this long is not faster than the best so far."""
        return least_time >= self.best * (1 - ROUNDING)

    # ------------------------------------------------------------ the end
    def sort(self) -> None:
        """Sort the candidates that fit, the fastest first, each once; and the others, the smallest first."""
        ordered = sorted(self.candidates, key=_order_of_candidates)
        self.candidates = merge_equal(ordered)
        self.too_large.sort(key=lambda row: row[1])

    def add_noise(self) -> None:
        """Time the best candidates under noise, unless they are large, and put the steadiest first."""
        division = self.pipeline.division
        large = 2 * division.ranks * division.microbatches > MAX_NOISY_ACTIONS
        if large or not self.candidates:
            return
        rows = [add_noise(one, self.evaluator) for one in self.candidates[:FINALISTS]]
        chosen = _steadiest(rows)
        others = [one for one in rows if one is not chosen]
        self.candidates = [chosen, *others, *self.candidates[FINALISTS:]]


def _order_of_candidates(candidate: Candidate) -> tuple[float, float, int]:
    return candidate.step, candidate.peak, candidate.schedule.actions


def check_skips(candidate: Candidate, most: float) -> None:
    """Raise if micro-batches leave out more than `most` of the layers, or all of them leave out the same part."""
    schedule = candidate.schedule
    if visits_all_parts(schedule):
        return
    share = skipped_share(schedule, candidate.partition)
    if share > most * (1 + ROUNDING):
        raise ShapeError(
            f"a micro-batch leaves out {share:.1%} of the layers, but at most {most:.1%} may be left out"
        )
    if len(visited_parts(schedule)) < schedule.parts:
        raise ShapeError("a part is on no path, so it would never be trained")


def _steadiest(rows: Sequence[Candidate]) -> Candidate:
    """Choose the steadiest and simplest candidate of those whose times print as that of the fastest.

    It is the one with the fewest actions among those that noise delays least.
    """
    printed = f"{rows[0].step:.{PRINTED_DIGITS}g}"
    equal = [one for one in rows if f"{one.step:.{PRINTED_DIGITS}g}" == printed]
    limit = min(one.noisy for one in equal) * (1 + SAMPLING)
    steady = [one for one in equal if one.noisy <= limit]
    return min(steady, key=lambda one: (one.schedule.actions, one.peak, one.noisy))


# ---------------------------------------------------------------- all divisions
# With more divisions than this, only those are weighed that could win by their bounds.
MAX_WEIGHED_DIVISIONS = 1_000
WEIGHED_DIVISIONS = 6  # divisions that are weighed if nothing fits
MAX_COMPARED_DIVISIONS = 50_000  # more would take minutes to compare
# Simulated actions in all divisions in which everything is tried. They take about 10 seconds. One
# division is tried in any case.
RANKING_WORK = 1_000_000_000
# Actions of one order of each surveyed division, in all. Divisions with worse estimates are left out.
SURVEYED_ACTIONS = 20_000
DIVISION_NOT_TRIED = (
    "left out: many divisions seem to be better"  # reason of a division
)
NOTHING_FITS = "no placement fits into the memory"  # reason of a division
CANNOT_WIN = "cannot win: its bound is above the best plan"  # reason of a division


@dataclass(frozen=True, slots=True)
class DivisionResult:
    """A division, and what the search found out about it."""

    division: Division
    bound: float
    best: Candidate | None = None
    reason: str = ""  # why there is no candidate


@dataclass(frozen=True, slots=True)
class Landscape:
    """All that a search found.

    candidates: those of all divisions that fit, the fastest first.
    divisions: what is known of each division, those with the least bounds first.
    too_large: name and peak of the candidates that exceed the memory.
    bound: no plan of the space takes less time.
    interrupted: whether Ctrl-C ended the search early.
    left_out: divisions that could have won, but were not ranked because the work was done.
    work: actions that were simulated, about.
    """

    candidates: tuple[Candidate, ...]
    divisions: tuple[DivisionResult, ...]
    too_large: tuple[tuple[str, float], ...]
    bound: float
    interrupted: bool = False
    left_out: int = 0
    work: int = 0

    @property
    def best(self) -> Candidate:
        """The fastest plan."""
        return self.candidates[0]

    @property
    def gap(self) -> float:
        """How far the best plan is above the bound, as a fraction of the bound."""
        return self.best.step / self.bound - 1.0 if self.bound else math.inf


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """What a search does at the moment, and the best so far."""

    doing: str
    best: float = math.inf  # seconds of a step
    bound: float = 0.0
    share: float = (
        0.0  # of the layouts that were looked at: first in a survey, then closely
    )


def search(
    question: Question,
    watch: Callable[[SearchProgress], None] = lambda progress: None,
    shown: Callable[[float], str] = "{:g}".format,
) -> Landscape:
    """Search all divisions of a workload. Raises if no plan fits."""
    with many_schedules():
        found = _Search(question, watch, shown)
        interrupted = False
        try:
            found.survey()
            found.rank_promising()
        except KeyboardInterrupt:
            if not found.candidates:
                raise
            interrupted = True
        return found.landscape(interrupted)


class _Search:
    """The state of a search."""

    def __init__(
        self,
        question: Question,
        watch: Callable[[SearchProgress], None],
        shown: Callable[[float], str],
    ) -> None:
        self.workload = question.workload
        self.pricing = question.pricing
        self.watch = watch
        self.shown = shown
        divisions = _divisions(question.workload, question.limits)
        results = [DivisionResult(one, self.pricing.bound(one)) for one in divisions]
        # Of equal bounds, those come first that recompute less.
        results.sort(
            key=lambda one: (one.bound, one.division.recomputed, one.division.processes)
        )
        self.results = results
        self.bound = min((one.bound for one in results), default=math.inf)
        self.close_bound = cache(self.pricing.close_bound)
        self.candidates: list[Candidate] = []
        self.too_large: list[tuple[str, float]] = []
        self.best = math.inf
        # Divisions in which everything fits, so that recomputing could only cost time.
        self.roomy: set[Division] = set()
        # The bytes of the smallest plan that was tried, of divisions in which none fits so far.
        self.least_peak: dict[Division, float] = {}
        self.left = SURVEYED_ACTIONS
        self.left_out: set[Division] = set()
        self.work = 0
        self.share = 0.0

    def tell(self, doing: str) -> None:
        """Report the progress."""
        self.watch(SearchProgress(doing, self.best, self.bound, self.share))

    # ------------------------------------------------------------ the two passes
    def survey(self) -> None:
        """Try a few good schedules in the divisions that could win, the most promising first."""
        if len(self.results) == 1:
            return
        order = self.order_of_survey()
        for number, place in enumerate(order):
            self.share = number / len(order) / 2
            self.results[place] = self.survey_division(self.results[place])

    def order_of_survey(self) -> list[int]:
        """Return the places of all divisions: those first that seem to fit and to be fast."""
        memory = self.workload.memory or math.inf
        keys = []
        for place, result in enumerate(self.results):
            seconds, size = self.pricing.estimate(result.division)
            too_full = max(0.0, size / memory - 1.0)
            keys.append((too_full, seconds, place))
        return [place for _, _, place in sorted(keys)]

    def survey_division(self, result: DivisionResult) -> DivisionResult:
        """Survey one division, or say why not."""
        division = result.division
        refusal = self.refusal(result)
        if not refusal:
            result = self.examine(result)
            refusal = self.refusal(result)
        if refusal:
            return replace(result, reason=refusal)
        self.tell(division.name)
        self.left -= division.ranks * min(
            division.microbatches, SURVEYED_ROUNDS * division.ranks
        )
        try:
            found = survey_pipeline(self.pricing.pipeline(division), self.best)
        except ShapeError as error:
            return replace(result, reason=str(error).splitlines()[0])
        return self.take(result, found.candidates, found.too_large)

    def rank_promising(self) -> None:
        """Try everything in the divisions that could win, those first that the survey found best.

        Where nothing fits yet, slices may still save enough memory. So the divisions come first whose
        surveyed plans need the least.
        """
        order = sorted(range(len(self.results)), key=self.promise_of)
        for number, place in enumerate(order):
            done = max(number / len(order), min(1.0, self.work / RANKING_WORK))
            self.share = (1 + done) / 2
            if self.cannot_win(self.results[place]):
                continue
            if self.work >= RANKING_WORK:
                self.left_out.add(self.results[place].division)
                continue
            self.results[place] = self.examine(self.results[place])
            if not self.cannot_win(self.results[place]):
                rival = math.inf if place == order[0] else self.best
                self.rank_division(place, rival)

    def cannot_win(self, result: DivisionResult) -> bool:
        """Whether no plan of a division is faster than the best so far."""
        division = result.division
        if result.bound == math.inf or result.bound >= self.best:
            return True
        return result.best is None and self.exceeds_memory(division)

    def rank_division(self, place: int, rival: float) -> None:
        """Rank everything in one division that could beat its rival."""
        result = self.results[place]
        division = result.division
        several = len(self.results) > 1
        prefix = f"{division.name}: " if several else ""
        try:
            found = rank_pipeline(
                self.pricing.pipeline(division),
                lambda doing: self.tell(prefix + doing),
                result.bound,
                self.note,
                rival,
            )
        except ShapeError as error:
            if not several:
                raise
            self.results[place] = replace(result, reason=str(error).splitlines()[0])
            return
        self.work += found.work
        known = [one for one in self.candidates if one.division == division]
        self.candidates = [one for one in self.candidates if one.division != division]
        merged = merge_equal([*found.candidates, *known])
        taken = self.take(result, merged, found.too_large)
        # The ranking has chosen among equally fast candidates, which it lists first.
        rivals = [*merged[:1], *merged[len(found.candidates) :]]
        best = min(rivals, key=lambda one: one.step, default=None)
        self.results[place] = replace(taken, best=best)
        if found.interrupted:
            raise KeyboardInterrupt

    def note(self, step: float) -> None:
        """Note the time of a plan that fits."""
        self.best = min(self.best, step)

    # ------------------------------------------------------------ bounds
    def examine(self, result: DivisionResult) -> DivisionResult:
        """Return a division with its close bound."""
        return replace(
            result, bound=max(result.bound, self.close_bound(result.division))
        )

    def examine_until_proven(self) -> None:
        """Raise the bound of the whole space: the least one of all divisions, until it is a close one.

        Divisions that were not tried count too, because their plans are in the space.
        """
        waiting = [(one.bound, place) for place, one in enumerate(self.results)]
        heapq.heapify(waiting)
        try:
            self.tell("proving the bound")
            while waiting[0][0] < self.best:
                bound, place = waiting[0]
                result = self.examine(self.results[place])
                self.results[place] = result
                if result.bound == bound:
                    break
                heapq.heapreplace(waiting, (result.bound, place))
        except KeyboardInterrupt:  # The least of all bounds so far holds too.
            pass
        self.bound = min(waiting[0][0], self.best)

    # ------------------------------------------------------------ small things
    def refusal(self, result: DivisionResult) -> str:
        """Say why a division need not be tried; empty if it must be."""
        division = result.division
        few = len(self.results) <= MAX_WEIGHED_DIVISIONS
        if few and self.exceeds_memory(division):
            return self.misfit(division)
        if result.bound == math.inf:
            return NOTHING_FITS
        if result.bound >= self.best:
            return CANNOT_WIN
        less = [share for share in RECOMPUTED_SHARES if share < division.recomputed]
        if any(replace(division, recomputed=share) in self.roomy for share in less):
            return "everything fits with less to recompute"
        if self.candidates and self.left <= 0:
            return DIVISION_NOT_TRIED
        return self.misfit(division) if self.exceeds_memory(division) else ""

    def misfit(self, division: Division) -> str:
        """Say how much memory a division would need."""
        return f"needs at least {self.shown(self.pricing.least_bytes(division))}"

    def exceeds_memory(self, division: Division) -> bool:
        """Whether no plan of a division can fit."""
        memory = self.workload.memory
        return memory is not None and self.pricing.least_bytes(division) > memory

    def take(
        self,
        result: DivisionResult,
        candidates: Sequence[Candidate],
        too_large: Sequence[tuple[str, float]],
    ) -> DivisionResult:
        """Take the candidates of a division into the ranking."""
        self.candidates += candidates
        self.too_large += too_large
        if not too_large:
            self.roomy.add(result.division)
        if candidates:
            best = candidates[0]
            self.best = min(self.best, best.step)
            return replace(result, best=best, reason="")
        if result.best is not None:
            return result
        if not too_large:  # It looked only for plans that are faster.
            return replace(result, reason=CANNOT_WIN)
        name, peak = too_large[0]
        self.least_peak[result.division] = peak
        return replace(result, reason=f"needs at least {self.shown(peak)} ({name})")

    def promise_of(self, place: int) -> tuple[float, float]:
        """Return the time of a division's best plan, and what it needs if no plan fits: the less, the better."""
        result = self.results[place]
        seconds = math.inf if result.best is None else result.best.step
        return seconds, self.least_peak.get(result.division, math.inf)

    def landscape(self, interrupted: bool) -> Landscape:
        """Return all that was found."""
        if not self.candidates:
            self.weigh_smallest()
            raise NothingFitsError(self.why_nothing_fits())
        self.examine_until_proven()
        self.candidates.sort(key=lambda one: one.step)
        # Among equally fast candidates of a division, its ranking chose by noise.
        best = [one.best for one in self.results if one.best is not None]
        chosen = min(best, key=lambda one: one.step)
        others = [one for one in self.candidates if one is not chosen]
        self.too_large.sort(key=lambda row: row[1])
        return Landscape(
            (chosen, *others),
            tuple(self.results),
            tuple(self.too_large),
            self.bound,
            interrupted,
            sum(
                one.division in self.left_out and one.bound < self.best
                for one in self.results
            ),
            self.work,
        )

    def weigh_smallest(self) -> None:
        """Weigh plans of the divisions that seem to need the least, to say how much is missing."""

        def size(result: DivisionResult) -> float:
            return self.pricing.estimate(result.division).bytes

        for result in sorted(self.results, key=size)[:WEIGHED_DIVISIONS]:
            self.too_large += weigh_pipeline(self.pricing.pipeline(result.division))

    def why_nothing_fits(self) -> str:
        """Say why no division has a plan."""
        if not self.results:
            return "no division of the devices and the batch is possible"
        memory = self.shown(self.workload.memory or 0.0)
        refusal = f"nothing fits into a memory of {memory}; the "
        if self.too_large:
            name, peak = min(self.too_large, key=lambda row: row[1])
            return f"{refusal}smallest plan needs {self.shown(peak)}: {name}"
        least = min(self.pricing.least_bytes(one.division) for one in self.results)
        return f"{refusal}least that a device would hold is {self.shown(least)}"


def _divisions(workload: Workload, limits: Limits) -> list[Division]:
    """Return the divisions of a workload that its runtime can run. Refuses too many of them, and too large ones."""
    divisions = list(islice(divisions_of(workload), MAX_COMPARED_DIVISIONS + 1))
    if len(divisions) > MAX_COMPARED_DIVISIONS:
        raise ShapeError(
            f"there are more than {MAX_COMPARED_DIVISIONS:,} ways to divide {workload.devices:,} devices "
            f"and {workload.batch:,} sequences\n"
            "  fix some of them: --pp 8, --microbatches 32, "
            "--set parallel.tp=1 and so on"
        )
    runtime = limits.runtime
    if runtime is not None:
        reasons = {
            division: runtime.refuse_division(division, workload.tied)
            for division in divisions
        }
        if all(reasons.values()):
            reason = next(iter(reasons.values()), "there are none")
            raise ShapeError(f"{runtime.name} can run none of these plans: {reason}")
        divisions = [division for division in divisions if not reasons[division]]
    if divisions:
        smallest = min(
            divisions, key=lambda division: division.ranks * division.microbatches
        )
        refuse_if_too_large(
            2 * smallest.ranks * smallest.microbatches,
            f"any schedule with ranks={smallest.ranks} "
            f"microbatches={smallest.microbatches}",
        )
    return divisions


MAX_SHOWN_RIVALS = 6  # rows that a plan.json stores besides the chosen one


def rival_facts(landscape: Landscape) -> Facts:
    """Return facts about the candidates that a plan was chosen from.

    These are their number, and the time and memory of the best of the others. The plain
    `1f1b` is always among them, because everybody knows it.
    """
    facts: dict[str, Fact] = {
        "candidates": len(landscape.candidates),
        "too_large": len(landscape.too_large),
    }
    for place, rival in enumerate(landscape.candidates[1:]):
        if place < MAX_SHOWN_RIVALS or rival.name == "1f1b":
            name = row_title(rival, landscape)
            facts.setdefault(f"step of {name}", rival.step)
            facts.setdefault(f"peak of {name}", rival.peak)
    return tuple(facts.items())


def row_title(candidate: Candidate, landscape: Landscape) -> str:
    """Return the name of a candidate: with its division, if there are several."""
    name = title(candidate.name, candidate.shape)
    several = len(landscape.divisions) > 1
    return f"{name} on {candidate.division.name}" if several else name
