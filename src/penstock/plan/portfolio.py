"""Builds, simulates and ranks every schedule that fits, for given ranks and micro-batches.

1. fixed orders with whole sequences
2. fixed orders with slices, and orders that are searched for this cost and memory, those with the least bounds first
3. of the fastest ones, the one that suffers least from noise

**More memory or more slices never give a slower plan.** Every candidate is built by itself: which candidates there are,
and how much work each one gets, depends neither on the memory, nor on the limits, nor on the other candidates. The
memory and the limits only leave out candidates that exceed them. (Orders are searched under the caps of a ladder of
their own, see `penstock.plan.ladder`.) So the candidates of a smaller question are among those of a larger one. A
candidate is left out only if a bound shows that it takes as long as the best one so far, or longer. So the best time is
the least of all candidates that fit, and the least of more candidates is no larger. The last step chooses only among
candidates whose times print as the same number.

The work is counted, in schedules and moves, so the ranking is the same on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from penstock.cost.cost import Cost
from penstock.cost.unit import UnitCost
from penstock.errors import ShapeError
from penstock.ir.compiled import many_schedules
from penstock.ir.schedule import Schedule
from penstock.plan.candidates import (
    ROUNDING,
    Candidate,
    Judge,
    ShapeWords,
    add_noise,
    evaluate_schedule,
    merge_equal,
    title,
)
from penstock.plan.ladder import Rung, orders_on_ladder, rung_work, rungs_of
from penstock.plan.orders import OrderSearch
from penstock.plan.partial import skipped_share
from penstock.plan.recipes import (
    ODD_SLICED_STAGES,
    ODD_SLICES,
    TRIED_SLICES,
    Cuts,
    FixedRecipe,
    Limits,
    Setting,
    StagePlacement,
    even_cuts_only,
    fixed_recipes,
    placements,
    slice_counts,
    unit_setting,
    useful_limits,
)
from penstock.schedules.coverage import visited_parts, visits_all_parts
from penstock.schedules.list_scheduling import sequential_schedule
from penstock.schedules.orders import require_at_least
from penstock.schedules.size import MAX_ACTIONS, refuse_if_too_large

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


@dataclass(frozen=True, slots=True)
class Portfolio:
    """All candidates that fit, the fastest first.

    too_large: name and peak of the candidates that exceed the memory.
    work: actions that were simulated, about.
    interrupted: whether Ctrl-C ended the search early.
    """

    candidates: tuple[Candidate, ...]
    too_large: tuple[tuple[str, float], ...]
    work: int = 0
    interrupted: bool = False

    @property
    def best(self) -> Candidate:
        """The fastest candidate."""
        return self.candidates[0]


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
) -> Portfolio:
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
    setting = Setting(ranks, microbatches, even_cuts_only)
    if isinstance(cost, UnitCost):
        setting = unit_setting(cost, ranks, microbatches, memory, limits)
    found = rank_setting(setting, Judge(cost, memory), limits, watch)
    if not found.candidates:
        raise ShapeError(nothing_fits(found.too_large, memory, shown))
    return found


def nothing_fits(
    too_large: Sequence[tuple[str, float]],
    memory: float | None,
    shown: Callable[[float], str],
) -> str:
    """Say that the memory is too small, and which candidate needs the least."""
    name, peak = min(too_large, key=lambda row: row[1])
    return (
        f"nothing fits into a memory of {shown(memory or 0.0)}; "
        f"the smallest plan needs {shown(peak)}: {name}"
    )


def rank_setting(
    setting: Setting,
    judge: Judge,
    limits: Limits,
    watch: Callable[[str], None] = lambda name: None,
    bound: float = 0.0,
    note: Callable[[float], None] = lambda step: None,
    rival: float = math.inf,
) -> Portfolio:
    """Rank all candidates of one setting. Raises if no schedule can be built at all.

    `bound` is a time that no step can beat. The search ends when it is reached. `note` is called
    with the time of each candidate that fits. `rival` is the time of a plan of another setting:
    candidates that cannot beat it are left out. Ctrl-C ends a ranking with the best so far.
    """
    refuse_if_too_large(
        2 * setting.ranks * setting.microbatches,
        f"any schedule with ranks={setting.ranks} microbatches={setting.microbatches}",
    )
    limits = useful_limits(setting, judge, limits)
    ranking = _Ranking(setting, judge, limits, watch, note)
    ranking.best = rival
    try:
        ranking.try_everything(bound)
        return ranking.portfolio()
    except KeyboardInterrupt:
        if not ranking.fits:
            raise
        return replace(ranking.portfolio(noise=False), interrupted=True)


def survey_setting(
    setting: Setting, judge: Judge, limits: Limits, rival: float = math.inf
) -> Portfolio:
    """Rank a few good candidates of a setting, to see whether it is worth more work.

    They are the fixed orders with at most `SURVEYED_STAGES` stages on a rank, whole sequences.
    Those that cannot beat a rival are left out.
    """
    limits = useful_limits(setting, judge, limits)
    limits = replace(limits, stages=min(limits.stages, SURVEYED_STAGES))
    few = min(setting.microbatches, SURVEYED_ROUNDS * setting.ranks)
    ranking = _Ranking(
        replace(setting, microbatches=few), judge, limits, lambda name: None
    )
    for recipe in ranking.affordable(1):
        if recipe.least_time < rival:
            ranking.try_recipe(recipe)
    if rival == math.inf:
        ranking.require_any()
    if few < setting.microbatches:
        ranking = _lengthened(ranking, setting)
    return ranking.portfolio(noise=False)


def weigh_setting(
    setting: Setting, judge: Judge, limits: Limits
) -> list[tuple[str, float]]:
    """Return name and peak of the orders that hold the least: one micro-batch after the other."""
    limits = useful_limits(setting, judge, limits)
    rows = []
    for placement in placements(setting.ranks, limits):
        stages = placement.stages(setting.ranks)
        for slices in TRIED_SLICES:
            for cuts in setting.cuts(slices) if slices <= limits.slices else ():
                few = min(2, setting.microbatches)
                paths = placement.paths(stages, few, cuts)
                try:
                    peak = judge.peak(sequential_schedule(stages, paths))
                except ShapeError:  # the cost has no such shape
                    continue
                shape = placement.shape
                if slices > 1:
                    shape = (*shape, ("slices", slices))
                rows.append((title("one micro-batch after the other,", shape), peak))
    return rows


def _lengthened(short: _Ranking, setting: Setting) -> _Ranking:
    """Return a ranking of the best orders of a short one, with all micro-batches of a setting."""
    short.sort()
    ranking = _Ranking(setting, short.judge, short.limits, short.watch)
    ranking.too_large = short.too_large
    recipes = {
        (recipe.name, recipe.shape): recipe
        for recipe in fixed_recipes(setting, short.judge, short.limits, 1)
    }
    for candidate in short.fits[:SURVEYED_ORDERS]:
        recipe = recipes[candidate.name, candidate.shape]
        ranking.try_schedule(recipe.name, recipe.shape, recipe.sort, recipe.build)
        if ranking.fits:
            break
    return ranking


class _Task(NamedTuple):
    """Candidates to try, with a time that none of them can beat."""

    least_time: float
    size: int
    run: Callable[[], None]


class _Ranking:
    """The candidates found so far."""

    def __init__(
        self,
        setting: Setting,
        judge: Judge,
        limits: Limits,
        watch: Callable[[str], None],
        note: Callable[[float], None] = lambda step: None,
    ) -> None:
        self.setting = setting
        self.judge = judge
        self.limits = limits
        self.watch = watch
        self.note = note
        self.work = 0
        self.fits: list[Candidate] = []
        self.too_large: list[tuple[str, float]] = []
        self.first_error: ShapeError | None = None
        self.best = math.inf

    # ------------------------------------------------------------ candidates
    def try_everything(self, bound: float) -> None:
        """Try all candidates, until one is as fast as the bound."""
        has_rival = self.best < math.inf
        if not has_rival:
            self.try_fixed(1)
        with many_schedules():
            for task in self.tasks(fewest=1 if has_rival else 2):
                if self.reaches(bound):
                    break
                if not self.cannot_win(task.least_time):
                    task.run()
        if not has_rival:
            self.require_any()

    def try_fixed(self, slices: int) -> None:
        """Try the orders of the registry with this number of slices."""
        for recipe in self.affordable(slices):
            self.try_recipe(recipe)

    def try_recipe(self, recipe: FixedRecipe) -> None:
        """Try one order of the registry."""
        self.try_schedule(recipe.name, recipe.shape, recipe.sort, recipe.build)

    def affordable(self, slices: int) -> Iterator[FixedRecipe]:
        """Yield the orders of the registry, the smallest first, until trying more would take too long."""
        each = 2 * self.setting.ranks * self.setting.microbatches * slices
        if slices > 1 and each > MAX_SLICED_ACTIONS:
            return
        recipes = list(fixed_recipes(self.setting, self.judge, self.limits, slices))
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
                for cuts in self.setting.cuts(slices):
                    size = placement.stages_per_rank * slices
                    run = partial(self.try_placement, placement, cuts)
                    least = self.setting.least_time(placement, cuts)
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
        if slices in ODD_SLICES and not self.judge.cost.units.seconds:
            most = min(most, ODD_SLICED_STAGES)
        runtime = self.limits.runtime
        if runtime is not None and not runtime.takes_lists:
            return []
        every = placements(self.setting.ranks, self.limits)
        return [one for one in every if one.stages_per_rank <= most]

    def try_placement(self, placement: StagePlacement, cuts: Cuts) -> None:
        """Try the orders of a placement with these cuts, with more and more memory."""
        setting = self.setting
        stages = placement.stages(setting.ranks)
        slices = len(cuts) - 1
        actions = 3 * len(stages) * setting.microbatches * slices
        if actions > min(MAX_LISTED_ACTIONS, MAX_ACTIONS):
            return
        shape = placement.shape
        if slices > 1:
            shape = (*shape, ("slices", slices))
        paths = placement.paths(stages, setting.microbatches, cuts)
        self.watch(title("listed", shape))
        try:
            rungs = rungs_of(self.judge, stages, paths)
            if not self.judge.fits(rungs[0].memory):
                self.too_large.append((title("listed", shape), rungs[0].memory))
                return
            for split in self.ways_back():
                search = OrderSearch(stages, paths, self.judge.cost, split)
                self.try_rungs(search, rungs, shape)
        except ShapeError as error:  # the cost has no such shape
            self.first_error = self.first_error or error

    def try_rungs(
        self, search: OrderSearch, rungs: Sequence[Rung], shape: ShapeWords
    ) -> None:
        """Try the orders of all rungs that fit."""
        memory = self.judge.memory
        draft = search.drafts[0].schedule

        def cannot_win(makespan: float) -> bool:
            return self.cannot_win(self.judge.step(draft, makespan))

        added: set[Schedule] = set()
        for schedule in orders_on_ladder(search, rungs, memory, cannot_win):
            self.work += search.size * rung_work(search.size)
            if schedule not in added:  # else less memory gives the same order
                added.add(schedule)
                self.add("listed", shape, "listed", schedule)

    def ways_back(self) -> tuple[bool, ...]:
        """Return whether to list split backwards, whole ones, or both.

        In the units of the papers I and W take as long as B, so split backwards are never slower.
        """
        if not self.limits.split:
            return (False,)
        return (True, False) if self.judge.cost.units.seconds else (True,)

    def try_schedule(
        self,
        name: str,
        shape: ShapeWords,
        sort: str,
        build: Callable[[], Schedule],
    ) -> None:
        """Build and add a schedule, unless it cannot be built."""
        self.watch(title(name, shape))
        try:
            schedule = build()
            self.work += BUILDING_WORK * schedule.actions
            self.add(name, shape, sort, schedule)
        except ShapeError as error:  # this schedule, or the cost, has no such shape
            self.first_error = self.first_error or error

    def add(self, name: str, shape: ShapeWords, sort: str, schedule: Schedule) -> None:
        """Add a schedule to those that fit, or to those that are too large."""
        if reason := self.limits.refuse_order(schedule):
            raise ShapeError(reason)
        candidate = evaluate_schedule(name, shape, sort, schedule, self.judge)
        check_skips(candidate, self.limits.skip)
        if not self.judge.fits(candidate.peak):
            self.too_large.append((title(name, shape), candidate.peak))
            return
        self.fits.append(candidate)
        self.best = min(self.best, candidate.step)
        self.note(candidate.step)

    def require_any(self) -> None:
        """Raise if no schedule could be built so far, whether it fits or not."""
        if not self.fits and not self.too_large:
            raise ShapeError(f"no schedule can be built: {self.first_error}")

    def cannot_win(self, least_time: float) -> bool:
        """Whether a step that takes at least this long is not faster than the best so far."""
        return least_time >= self.best * (1 - ROUNDING)

    def reaches(self, bound: float) -> bool:
        """Whether the best step so far is as short as any can be."""
        return self.best <= bound * (1 + ROUNDING)

    # ------------------------------------------------------------ the end
    def sort(self) -> None:
        """Sort the candidates that fit, the fastest first."""
        self.fits.sort(key=lambda one: (one.step, one.peak, one.schedule.actions))

    def portfolio(self, noise: bool = True) -> Portfolio:
        """Return the ranking; with `noise`, the best rows are also timed under noise, unless they are large."""
        self.sort()
        self.fits = merge_equal(self.fits)
        self.too_large.sort(key=lambda row: row[1])
        size = 2 * self.setting.ranks * self.setting.microbatches
        if not noise or size > MAX_NOISY_ACTIONS:
            return Portfolio(tuple(self.fits), tuple(self.too_large), self.work)
        rows = [add_noise(one, self.judge) for one in self.fits[:FINALISTS]]
        if rows:
            chosen = _steadiest(rows)
            rows = [chosen, *(one for one in rows if one is not chosen)]
        rows += self.fits[FINALISTS:]
        return Portfolio(tuple(rows), tuple(self.too_large), self.work)


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
