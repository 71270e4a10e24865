"""Builds, simulates and ranks every schedule that fits, for given ranks and micro-batches.

1. fixed and listed orders with whole sequences, then with more and more slices
2. the best few are improved by local search
3. the best of all are timed once more under noise that none of them has seen

The work is counted, in schedules and moves, so the ranking is the same on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.cost.cost import Cost
from penstock.errors import ShapeError
from penstock.ir.compiled import many_schedules
from penstock.ir.needs import WEIGHTS
from penstock.ir.schedule import MicroBatch, Schedule, Stage
from penstock.plan.candidates import (
    ROUNDING,
    Candidate,
    Judge,
    ShapeWords,
    add_noise,
    evaluate_schedule,
    title,
)
from penstock.plan.orders import best_order, default_work
from penstock.plan.partial import skipped_share
from penstock.plan.recipes import (
    PATIENCE,
    TRIED_SLICES,
    Cuts,
    FixedRecipe,
    Limits,
    Placement,
    Setting,
    even_cuts_only,
    fixed_recipes,
    placements,
    useful_limits,
)
from penstock.schedules.coverage import visited_parts, visits_all_parts
from penstock.schedules.list_scheduling import sequential_schedule
from penstock.schedules.orders import require_at_least
from penstock.schedules.size import MAX_ACTIONS, refuse_if_too_large

# Listed orders have at most this many actions; larger ones take too long to list.
MAX_LISTED_ACTIONS = 16_000
# Fixed orders with slices have at most this many actions: with so many micro-batches, slices
# help little.
MAX_SLICED_ACTIONS = 16_000
# Actions of all fixed orders that are tried, in all. They take about 30 seconds.
FIXED_ACTIONS = 4_000_000
# The smallest orders with more actions than this are not timed under noise, which takes long.
MAX_NOISY_ACTIONS = 200_000
MAX_SLICED_STAGES = 8  # of a rank, in listed orders with slices
REFINED_PLACEMENTS = 3  # placements on which other numbers of slices are tried
REFINED_SLICES = (3, 6, 12, 24)
# More slices must make a family of candidates faster by this share, or they count as useless.
LEAST_GAIN = 0.002
IMPROVED = 4  # candidates that are improved by local search
LISTING_WORK = 1_000  # simulations for each placement and cuts, of small schedules
LISTING_ACTIONS = 1_500_000  # actions in all these simulations, of large schedules
MIN_LISTING_WORK = 20
IMPROVING_WORK = 20_000  # simulations for each candidate that is improved
# A candidate this much slower than the best is not worth a local search.
WORTH_IMPROVING = 1.03
SURVEYED_STAGES = 4
# A survey compares orders with at most this many micro-batches for each rank, because more of
# them repeat what these do. Then it builds the best orders with all micro-batches.
SURVEYED_ROUNDS = 3
SURVEYED_ORDERS = 3  # that are built with all micro-batches, until one fits
FINALISTS = 8  # candidates that are timed under noise
FIXED_FINALISTS = 4  # fixed orders that are timed under noise besides
# Of candidates whose times differ by less than this share, the one that takes less time
# under noise is chosen.
EQUALLY_FAST = 0.002
# A fixed order that takes less time under noise wins if it is slower by less than this share
# without noise. More memory made no plan slower by more than this share in the searches of
# tests/plan/test_search.py. That is observed, not proven.
NEARLY_AS_FAST = 0.01
# Means under noise that differ by less than this share count as equal: they are of few samples.
SAMPLING = 0.0025


@dataclass(frozen=True, slots=True)
class Portfolio:
    """All candidates that fit, the fastest first.

    too_large: name and peak of the candidates that exceed the memory.
    interrupted: whether Ctrl-C ended the search early.
    """

    candidates: tuple[Candidate, ...]
    too_large: tuple[tuple[str, float], ...]
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

    stages: the largest number of stages per rank, because a model has only so many layers.
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
    setting = Setting(ranks, microbatches, even_cuts_only)
    limits = Limits(stages, slices, weights)
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
        f"the least is {name} with {shown(peak)}"
    )


def rank_setting(
    setting: Setting,
    judge: Judge,
    limits: Limits,
    watch: Callable[[str], None] = lambda name: None,
    bound: float = 0.0,
    note: Callable[[float], None] = lambda step: None,
) -> Portfolio:
    """Rank all candidates of one setting. Raises if no schedule can be built at all.

    `bound` is a time that no step can beat. The search ends when it is reached. `note` is called
    with the time of each candidate that fits. Ctrl-C ends a ranking with the best so far.
    """
    refuse_if_too_large(
        2 * setting.ranks * setting.microbatches,
        f"any schedule with ranks={setting.ranks} microbatches={setting.microbatches}",
    )
    limits = useful_limits(setting, judge, limits)
    ranking = _Ranking(setting, judge, limits, watch, note)
    try:
        ranking.try_everything(bound)
        return ranking.portfolio()
    except KeyboardInterrupt:
        if not ranking.fits:
            raise
        return replace(ranking.portfolio(noise=False), interrupted=True)


def survey_setting(setting: Setting, judge: Judge, limits: Limits) -> Portfolio:
    """Rank a few good candidates of a setting, to see whether it is worth more work.

    They are the fixed orders with at most `SURVEYED_STAGES` stages on a rank, whole sequences.
    """
    limits = useful_limits(setting, judge, limits)
    limits = replace(limits, stages=min(limits.stages, SURVEYED_STAGES))
    few = min(setting.microbatches, SURVEYED_ROUNDS * setting.ranks)
    ranking = _Ranking(
        replace(setting, microbatches=few), judge, limits, lambda name: None
    )
    ranking.try_fixed(1)
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
    ranking.require_any()
    return ranking


class _Ranking:
    """The candidates found so far, and which families are still worth more slices."""

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
        self.left = FIXED_ACTIONS
        self.fits: list[Candidate] = []
        self.too_large: list[tuple[str, float]] = []
        self.first_error: ShapeError | None = None
        self.family_best: dict[object, float] = {}
        self.family_failures: dict[object, int] = {}
        self.drafts: dict[object, tuple[list[Stage], list[MicroBatch]]] = {}

    # ------------------------------------------------------------ candidates
    def try_everything(self, bound: float) -> None:
        """Try all candidates, from whole sequences to many slices, until one is as fast as the bound."""
        self.try_fixed(1)
        with many_schedules():
            for slices in TRIED_SLICES:
                if slices > self.limits.slices or self.reaches(bound):
                    break
                if slices > 1:
                    self.try_fixed(slices)
                if not self.reaches(bound):
                    self.try_listed(slices)
            self.require_any()
            if not self.reaches(bound):
                self.refine()
                self.improve_best()

    def try_fixed(self, slices: int, every: bool = False) -> None:
        """Try the orders of the registry with this number of slices: those still open, or every one."""
        times: dict[object, float] = {}
        actions = 2 * self.setting.ranks * self.setting.microbatches * slices
        if slices > 1 and actions > MAX_SLICED_ACTIONS:
            return
        for recipe in self.affordable(slices):
            own_shape = tuple(pair for pair in recipe.shape if pair[0] != "slices")
            family = (recipe.name.split("+")[0], own_shape)
            if self.is_closed(family) and not every:
                continue
            if self.cannot_win(recipe.least_time):
                continue
            time = self.try_schedule(
                recipe.name, recipe.shape, recipe.sort, recipe.build
            )
            times[family] = min(time, times.get(family, math.inf))
        self.close_families(times)

    def affordable(self, slices: int) -> Iterator[FixedRecipe]:
        """Yield the orders of the registry, the smallest first, until so many actions are tried that it takes long."""
        recipes = list(fixed_recipes(self.setting, self.judge, self.limits, slices))
        each = 2 * self.setting.ranks * self.setting.microbatches * slices
        recipes.sort(key=lambda one: (one.stages, one.name == "gpipe"))
        for recipe in recipes:
            actions = each * recipe.stages
            if actions <= self.left or not (self.fits or self.too_large):
                self.left -= actions
                yield recipe

    def try_listed(self, slices: int) -> None:
        """Build orders for this cost and memory, on every placement that is still open."""
        times: dict[object, float] = {}
        for placement in self.open_placements(slices):
            if any(
                not self.is_beaten(placement, cuts)
                for cuts in self.setting.cuts(slices)
            ):
                times[placement] = self.try_cuts(placement, slices)
        self.close_families(times)

    def refine(self) -> None:
        """Try other numbers of slices with fixed orders, and with listed ones on the best placements.

        Fixed orders are tried again because a listed order may miss them: its work can end
        before it has tried whole backwards.
        """
        best = self.best_placements()
        for slices in REFINED_SLICES:
            if slices <= self.limits.slices:
                self.try_fixed(slices, every=True)
        for placement in best:
            for slices in REFINED_SLICES:
                if slices <= self.limits.slices:
                    self.try_cuts(placement, slices)

    def try_cuts(self, placement: Placement, slices: int) -> float:
        """Try a placement with all cuts into this many slices; return the least time."""
        times = [
            self.try_placement(placement, cuts) for cuts in self.setting.cuts(slices)
        ]
        return min(times, default=math.inf)

    def try_placement(self, placement: Placement, cuts: Sequence[int]) -> float:
        """Try the listed orders of a placement; return the least time."""
        setting = self.setting
        stages = placement.stages(setting.ranks)
        slices = len(cuts) - 1
        actions = 3 * len(stages) * setting.microbatches * slices
        if actions > min(MAX_LISTED_ACTIONS, MAX_ACTIONS):
            return math.inf
        if self.is_beaten(placement, tuple(cuts)):
            return math.inf
        shape = placement.shape
        if slices > 1:
            shape = (*shape, ("slices", slices))
        paths = placement.paths(stages, setting.microbatches, tuple(cuts))
        self.drafts[shape, tuple(cuts)] = (stages, paths)
        ways = self.ways_back()
        work = max(MIN_LISTING_WORK, min(LISTING_WORK, LISTING_ACTIONS // actions))
        times = []
        for split in ways:
            build = partial(self.order, stages, paths, work // len(ways), split)
            times.append(self.try_schedule("listed", shape, "listed", build))
        return min(times)

    def ways_back(self) -> tuple[bool, ...]:
        """Return whether to list split backwards, whole ones, or both.

        In the units of the papers I and W take as long as B, so split backwards are never slower.
        """
        if not self.limits.split:
            return (False,)
        return (True, False) if self.judge.cost.units.seconds else (True,)

    def order(
        self,
        stages: list[Stage],
        paths: list[MicroBatch],
        work: int,
        split: bool,
        starts: Sequence[Schedule] = (),
    ) -> Schedule:
        """Return the best order of a placement that is found with this much work."""
        # One path is enough if all are the same; partial paths differ.
        different = list(dict.fromkeys(paths))
        caps = self.judge.caps(sequential_schedule(stages, different))
        return best_order(
            stages,
            paths,
            self.judge.cost,
            None if caps is None else caps.tolist(),
            work,
            split=split,
            starts=starts,
        )

    def try_schedule(
        self,
        name: str,
        shape: ShapeWords,
        sort: str,
        build: Callable[[], Schedule],
    ) -> float:
        """Build and add a schedule; return its time, infinite if it cannot be built or does not fit."""
        self.watch(title(name, shape))
        try:
            return self.add(name, shape, sort, build())
        except ShapeError as error:  # this schedule, or the cost, has no such shape
            self.first_error = self.first_error or error
            return math.inf

    def add(self, name: str, shape: ShapeWords, sort: str, schedule: Schedule) -> float:
        """Add a schedule to those that fit, or to those that are too large."""
        candidate = evaluate_schedule(name, shape, sort, schedule, self.judge)
        check_skips(candidate, self.limits.skip)
        if not self.judge.fits(candidate.peak):
            self.too_large.append((title(name, shape), candidate.peak))
            return math.inf
        self.fits.append(candidate)
        self.note(candidate.step)
        return candidate.step

    def require_any(self) -> None:
        """Raise if no schedule could be built so far, whether it fits or not."""
        if not self.fits and not self.too_large:
            raise ShapeError(f"no schedule can be built: {self.first_error}")

    def is_beaten(self, placement: Placement, cuts: Cuts) -> bool:
        """Whether no order of a placement with these cuts can win; whole sequences are always tried."""
        least = self.setting.least_time
        return len(cuts) > 2 and self.cannot_win(least(placement, cuts))

    def cannot_win(self, least_time: float) -> bool:
        """Whether a step that takes at least this long cannot be chosen, not even for its steadiness."""
        best = min((one.step for one in self.fits), default=math.inf)
        return least_time > best * (1 + NEARLY_AS_FAST)

    def reaches(self, bound: float) -> bool:
        """Whether the best step so far is as short as any can be."""
        best = min((one.step for one in self.fits), default=math.inf)
        return best <= bound * (1 + ROUNDING)

    # ------------------------------------------------------------ families
    def open_placements(self, slices: int) -> list[Placement]:
        """Return the placements that are worth trying with this number of slices.

        Whole sequences are tried on all of them. Slices multiply the actions, so they are
        tried on those with few stages, as long as they help.
        """
        every = list(placements(self.setting.ranks, self.limits))
        if slices == 1:
            return every
        few = [one for one in every if one.stages_per_rank <= MAX_SLICED_STAGES]
        return [one for one in few if not self.is_closed(one)]

    def best_placements(self) -> list[Placement]:
        """Return the best few placements.

        Of placements that are about equally fast, those with fewer stages come first.
        """
        best = min(self.family_best.values(), default=math.inf)
        found = [one for one in self.family_best if isinstance(one, Placement)]

        def merit(placement: Placement) -> tuple[float, int]:
            excess = self.family_best[placement] / best - 1
            return excess // LEAST_GAIN, placement.stages_per_rank

        found.sort(key=merit)
        return found[:REFINED_PLACEMENTS]

    def is_closed(self, family: object) -> bool:
        """Whether more slices have stopped helping a family of candidates."""
        return self.family_failures.get(family, 0) >= PATIENCE

    def close_families(self, times: dict[object, float]) -> None:
        """Count a failure for every family that the last number of slices has not made faster."""
        for family, time in times.items():
            best = self.family_best.get(family, math.inf)
            if time < best * (1 - LEAST_GAIN):
                self.family_best[family] = time
                self.family_failures[family] = 0
            elif best < math.inf:
                self.family_failures[family] = self.family_failures.get(family, 0) + 1

    # ------------------------------------------------------------ the end
    def improve_best(self) -> None:
        """Improve the best few orders by local search."""
        self.sort()
        for candidate in self.fits[:IMPROVED]:
            if candidate.step > self.fits[0].step * WORTH_IMPROVING:
                break
            if candidate.gap <= ROUNDING:
                continue
            key = (candidate.shape, candidate.schedule.microbatches[0].cuts)
            if key not in self.drafts:
                continue
            self.watch(f"improving {title(candidate.name, candidate.shape)}")
            stages, paths = self.drafts[key]
            work = min(IMPROVING_WORK, default_work(candidate.schedule.actions))
            split = bool((candidate.schedule.table.kind == WEIGHTS).any())
            try:
                better = self.order(stages, paths, work, split, [candidate.schedule])
            except ShapeError:  # a fixed order fits, but the caps leave no room to list
                continue
            improved = evaluate_schedule(
                candidate.name, candidate.shape, "improved", better, self.judge
            )
            if improved.step < candidate.step * (1 - ROUNDING) and self.judge.fits(
                improved.peak
            ):
                self.fits.append(improved)
                self.note(improved.step)
        self.sort()

    def sort(self) -> None:
        """Sort the candidates that fit, the fastest first."""
        self.fits.sort(key=lambda one: (one.step, one.peak, one.schedule.actions))

    def portfolio(self, noise: bool = True) -> Portfolio:
        """Return the ranking; with `noise`, the best rows are also timed under noise, unless they are large."""
        self.sort()
        self.too_large.sort(key=lambda row: row[1])
        size = 2 * self.setting.ranks * self.setting.microbatches
        if not noise or size > MAX_NOISY_ACTIONS:
            return Portfolio(tuple(self.fits), tuple(self.too_large))
        fixed = [one for one in self.fits if one.sort == "fixed"]
        finalists = {
            id(one) for one in (*self.fits[:FINALISTS], *fixed[:FIXED_FINALISTS])
        }
        rows = [
            add_noise(one, self.judge) if id(one) in finalists else one
            for one in self.fits
        ]
        if rows:
            chosen = _robust(rows)
            rows = [chosen, *(one for one in rows if one is not chosen)]
        return Portfolio(tuple(rows), tuple(self.too_large))


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


def _robust(rows: Sequence[Candidate]) -> Candidate:
    """Choose a candidate that is fast, also under noise, and as simple as can be.

    Of those that are about as fast as the best, it is the one that noise delays least, or
    one with fewer actions that noise delays about as little. A fixed order that is nearly
    as fast wins if it is faster under noise, because then the others are only faster on
    paper.
    """
    limit = rows[0].step * (1 + EQUALLY_FAST)
    fixed_limit = rows[0].step * (1 + NEARLY_AS_FAST)
    timed = [one for one in rows if not math.isnan(one.noisy)]
    best = _simplest([one for one in timed if one.step <= limit])
    fixed = [one for one in timed if one.sort == "fixed" and one.step <= fixed_limit]
    steadiest = min([best, *fixed], key=lambda one: one.noisy)
    return steadiest if steadiest.noisy < best.noisy * (1 - SAMPLING) else best


def _simplest(rows: Sequence[Candidate]) -> Candidate:
    """Return the row with the fewest actions among those that noise delays least."""
    limit = min(one.noisy for one in rows) * (1 + SAMPLING)
    steady = [one for one in rows if one.noisy <= limit]
    return min(steady, key=lambda one: (one.schedule.actions, one.peak, one.noisy))
