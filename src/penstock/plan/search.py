"""Searches the whole space of plans: how to divide devices and batch, and for each division the best schedule.

    cells      copies x ranks x tensor x shard, micro-batches x rows, recomputation      sorted by their bounds
                  │
    survey     a few good schedules of every cell that could still win                   the first answer
                  │
    ranking    all placements, slices and orders of the most promising cells             the answer
                  │
    bound      the least bound of all cells: no plan of the whole space is faster

A cell whose bound is above the best plan so far cannot win, so it is left out. All work is counted and nothing is
timed, so the same workload and profile give the same plan on any machine. Ctrl-C ends a search with the best so far.

**More memory, more devices or more slices never give a slower plan** if the larger search is complete, which means
that it has ranked every cell that could win. Within a cell, a larger question has all candidates of a smaller one
(`penstock.plan.portfolio`), and with more devices there are more cells. So the candidates of the smaller question are
among those of the larger one, whose answer is the least of all its candidates. A search with very many cells ends when
its work is done. Then `Landscape.left_out` counts the cells that could have won, and a smaller question may have a
faster plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from penstock.errors import ShapeError
from penstock.ir.compiled import many_schedules
from penstock.ir.plan import Fact, Facts
from penstock.plan.candidates import Candidate, Judge, merge_equal, title
from penstock.plan.portfolio import (
    SURVEYED_ROUNDS,
    Portfolio,
    nothing_fits,
    rank_setting,
    survey_setting,
    weigh_setting,
)
from penstock.plan.pricing import Estimate
from penstock.plan.recipes import Limits, Setting
from penstock.plan.workload import RECOMPUTED_SHARES, Cell, Workload, cells_of
from penstock.schedules.size import refuse_if_too_large

# With more cells than this, only those are weighed that could win by their bounds.
MAX_WEIGHED_CELLS = 1_000
WEIGHED_CELLS = 6  # cells that are weighed if nothing fits
MAX_COMPARED_CELLS = 50_000  # more would take minutes to compare
# Simulated actions in all cells in which everything is tried. They take about 10 seconds. One
# cell is tried in any case.
RANKING_WORK = 1_000_000_000
# Actions of one order of each surveyed cell, in all. Cells with worse estimates are left out.
SURVEYED_ACTIONS = 20_000
CELL_NOT_TRIED = "left out: many cells seem to be better"  # reason of a cell
NOTHING_FITS = "no placement fits into the memory"  # reason of a cell
CANNOT_WIN = "cannot win: its bound is above the best plan"  # reason of a cell


class Pricing(Protocol):
    """What the cells of a workload cost."""

    def judge(self, cell: Cell) -> Judge:
        """Return what times and weighs the schedules of a cell."""

    def setting(self, cell: Cell) -> Setting:
        """Return the ranks and micro-batches of a cell, and how to cut its sequences."""

    def bound(self, cell: Cell) -> float:
        """Return a time that no step of this cell can beat."""

    def close_bound(self, cell: Cell) -> float:
        """Return a larger such time, with more work; infinite if no plan fits."""

    def estimate(self, cell: Cell) -> Estimate:
        """Return about how long a step takes and how much a device holds, quickly."""

    def least_bytes(self, cell: Cell) -> float:
        """Return the bytes that the fullest device of a cell holds at least."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """A cell, and what the search found out about it."""

    cell: Cell
    bound: float
    best: Candidate | None = None
    reason: str = ""  # why there is no candidate

    @property
    def fits(self) -> bool:
        """Whether a plan of this cell was found."""
        return self.best is not None


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate of a cell."""

    cell: Cell
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Landscape:
    """All that a search found.

    rows: the candidates of all cells, the fastest first.
    cells: what is known of each cell, those with the least bounds first.
    bound: no plan of the space takes less time.
    interrupted: whether Ctrl-C ended the search early.
    left_out: cells that could have won, but were not ranked because the work was done.
    """

    rows: tuple[Row, ...]
    cells: tuple[CellResult, ...]
    too_large: tuple[tuple[str, float], ...]
    bound: float
    interrupted: bool = False
    left_out: int = 0

    @property
    def best(self) -> Row:
        """The fastest plan."""
        return self.rows[0]

    @property
    def gap(self) -> float:
        """How far the best plan is above the bound, as a fraction of the bound."""
        return self.best.candidate.step / self.bound - 1.0 if self.bound else math.inf


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """What a search does at the moment, and the best so far."""

    doing: str
    best: float = math.inf  # seconds of a step
    bound: float = 0.0


def search(
    workload: Workload,
    pricing: Pricing,
    limits: Limits,
    watch: Callable[[SearchProgress], None] = lambda progress: None,
    shown: Callable[[float], str] = "{:g}".format,
) -> Landscape:
    """Search all cells of a workload. Raises if no plan fits."""
    with many_schedules():
        found = _Search(workload, pricing, limits, watch, shown)
        interrupted = False
        try:
            found.survey()
            found.rank_promising()
        except KeyboardInterrupt:
            if not found.rows:
                raise
            interrupted = True
        return found.landscape(interrupted)


class _Search:
    """The state of a search."""

    def __init__(
        self,
        workload: Workload,
        pricing: Pricing,
        limits: Limits,
        watch: Callable[[SearchProgress], None],
        shown: Callable[[float], str],
    ) -> None:
        self.workload = workload
        self.pricing = pricing
        self.limits = limits
        self.watch = watch
        self.shown = shown
        cells = _cells(workload, limits)
        results = [CellResult(cell, pricing.bound(cell)) for cell in cells]
        results.sort(key=_order_of_bounds)
        self.results = results
        self.bound = min((one.bound for one in results), default=math.inf)
        self.close_bounds: dict[Cell, float] = {}
        self.rows: list[Row] = []
        self.too_large: list[tuple[str, float]] = []
        self.best = math.inf
        # Cells in which everything fits, so that recomputing could only cost time.
        self.roomy: set[Cell] = set()
        # The bytes of the smallest plan that was tried, of cells in which none fits so far.
        self.least_peak: dict[Cell, float] = {}
        self.left = SURVEYED_ACTIONS
        self.left_out: set[Cell] = set()

    def tell(self, doing: str) -> None:
        """Report the progress."""
        self.watch(SearchProgress(doing, self.best, self.bound))

    # ------------------------------------------------------------ the two passes
    def survey(self) -> None:
        """Try a few good schedules in the cells that could win, the most promising first."""
        if len(self.results) == 1:
            return
        for place in self.order_of_survey():
            self.results[place] = self.survey_cell(self.results[place])

    def order_of_survey(self) -> list[int]:
        """Return the places of all cells: those first that seem to fit and to be fast."""
        memory = self.workload.memory or math.inf
        keys = []
        for place, result in enumerate(self.results):
            seconds, size = self.pricing.estimate(result.cell)
            too_full = max(0.0, size / memory - 1.0)
            keys.append((too_full, seconds, place))
        return [place for _, _, place in sorted(keys)]

    def survey_cell(self, result: CellResult) -> CellResult:
        """Survey one cell, or say why not."""
        cell = result.cell
        refusal = self.refusal(result)
        if not refusal:
            result = self.examine(result)
            refusal = self.refusal(result)
        if refusal:
            return replace(result, reason=refusal)
        self.tell(cell.name)
        self.left -= cell.ranks * min(cell.microbatches, SURVEYED_ROUNDS * cell.ranks)
        limits = self.limits_of(cell)
        try:
            found = survey_setting(
                self.pricing.setting(cell), self.pricing.judge(cell), limits, self.best
            )
        except ShapeError as error:
            return replace(result, reason=str(error).splitlines()[0])
        return self.take(result, found)

    def rank_promising(self) -> None:
        """Try everything in the cells that could win, those first that the survey found best.

        Where nothing fits yet, slices may still save enough memory. So the cells come first whose
        surveyed plans need the least.
        """
        order = sorted(
            range(len(self.results)),
            key=lambda place: self.promise_of(self.results[place]),
        )
        left = RANKING_WORK
        for place in order:
            if self.cannot_win(self.results[place]):
                continue
            if left <= 0:
                self.left_out.add(self.results[place].cell)
                continue
            self.results[place] = self.examine(self.results[place])
            if not self.cannot_win(self.results[place]):
                rival = math.inf if place == order[0] else self.best
                left -= self.rank_cell(place, rival)

    def cannot_win(self, result: CellResult) -> bool:
        """Whether no plan of a cell is faster than the best so far."""
        cell = result.cell
        if result.bound == math.inf or result.bound >= self.best:
            return True
        return result.best is None and self.exceeds_memory(cell)

    def rank_cell(self, place: int, rival: float) -> int:
        """Rank everything in one cell that could beat its rival; return the work that it took."""
        result = self.results[place]
        cell = result.cell
        name = cell.name if len(self.results) > 1 else ""

        def watch(doing: str) -> None:
            self.tell(f"{name}: {doing}" if name else doing)

        try:
            found = rank_setting(
                self.pricing.setting(cell),
                self.pricing.judge(cell),
                self.limits_of(cell),
                watch,
                result.bound,
                self.note,
                rival,
            )
        except ShapeError as error:
            if len(self.results) == 1:
                raise
            self.results[place] = replace(result, reason=str(error).splitlines()[0])
            return 0
        self.results[place] = self.replace_rows(result, found)
        if found.interrupted:
            raise KeyboardInterrupt
        return found.work

    def replace_rows(self, result: CellResult, found: Portfolio) -> CellResult:
        """Take what a ranking has found, and keep what the survey of the cell knew besides."""
        known = [row.candidate for row in self.rows if row.cell == result.cell]
        self.rows = [row for row in self.rows if row.cell != result.cell]
        merged = merge_equal([*found.candidates, *known])
        taken = self.take(result, replace(found, candidates=tuple(merged)))
        # The ranking has chosen among equally fast candidates, which it lists first.
        rivals = [*merged[:1], *merged[len(found.candidates) :]]
        return replace(taken, best=min(rivals, key=lambda one: one.step, default=None))

    def note(self, step: float) -> None:
        """Note the time of a plan that fits."""
        self.best = min(self.best, step)

    # ------------------------------------------------------------ bounds
    def examine(self, result: CellResult) -> CellResult:
        """Return a cell with its close bound."""
        cell = result.cell
        if cell not in self.close_bounds:
            self.close_bounds[cell] = self.pricing.close_bound(cell)
        return replace(result, bound=max(result.bound, self.close_bounds[cell]))

    def examine_until_proven(self) -> None:
        """Raise the bound of the whole space: the least one of all cells, until it is a close one.

        Cells that were not tried count too, because their plans are in the space.
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
    def refusal(self, result: CellResult) -> str:
        """Say why a cell need not be tried; empty if it must be."""
        cell = result.cell
        few = len(self.results) <= MAX_WEIGHED_CELLS
        if few and self.exceeds_memory(cell):
            return self.misfit(cell)
        if result.bound == math.inf:
            return NOTHING_FITS
        if result.bound >= self.best:
            return CANNOT_WIN
        less = [share for share in RECOMPUTED_SHARES if share < cell.recomputed]
        if any(replace(cell, recomputed=share) in self.roomy for share in less):
            return "everything fits with less to recompute"
        if self.rows and self.left <= 0:
            return CELL_NOT_TRIED
        return self.misfit(cell) if self.exceeds_memory(cell) else ""

    def misfit(self, cell: Cell) -> str:
        """Say how much memory a cell would need."""
        return f"needs at least {self.shown(self.pricing.least_bytes(cell))}"

    def exceeds_memory(self, cell: Cell) -> bool:
        """Whether no plan of a cell can fit."""
        memory = self.workload.memory
        return memory is not None and self.pricing.least_bytes(cell) > memory

    def limits_of(self, cell: Cell) -> Limits:
        """Return the limits of a cell: a rank cannot have more stages than layers."""
        most = max(1, self.workload.layers // cell.ranks)
        return replace(self.limits, stages=min(self.limits.stages, most))

    def take(self, result: CellResult, found: Portfolio) -> CellResult:
        """Take the candidates of a cell into the ranking."""
        self.rows += [Row(result.cell, one) for one in found.candidates]
        self.too_large += found.too_large
        if not found.too_large:
            self.roomy.add(result.cell)
        if not found.candidates and found.too_large and not result.fits:
            name, peak = found.too_large[0]
            self.least_peak[result.cell] = peak
            return replace(result, reason=f"needs at least {self.shown(peak)} ({name})")
        if not found.candidates:  # It looked only for plans that are faster.
            return result if result.fits else replace(result, reason=CANNOT_WIN)
        best = found.best
        self.best = min(self.best, best.step)
        return replace(result, best=best, reason="")

    def time_of(self, result: CellResult) -> float:
        """Return the time of a cell's best plan; its bound if it is the only cell."""
        if result.best is not None:
            return result.best.step
        return result.bound if len(self.results) == 1 else math.inf

    def promise_of(self, result: CellResult) -> tuple[float, float]:
        """Return the time of a cell's best plan, and what it needs if no plan fits: the less, the better."""
        return self.time_of(result), self.least_peak.get(result.cell, math.inf)

    def landscape(self, interrupted: bool) -> Landscape:
        """Return all that was found."""
        if not self.rows:
            self.weigh_smallest()
            raise ShapeError(self.why_nothing_fits())
        self.examine_until_proven()
        self.rows.sort(key=lambda row: row.candidate.step)
        best_cell = min(
            (one for one in self.results if one.best is not None),
            key=lambda one: one.best.step if one.best else math.inf,
        )
        # Among equally fast candidates of a cell, its ranking chose by noise.
        assert best_cell.best is not None
        chosen = Row(best_cell.cell, best_cell.best)
        others = [row for row in self.rows if row.candidate is not chosen.candidate]
        self.too_large.sort(key=lambda row: row[1])
        return Landscape(
            (chosen, *others),
            tuple(self.results),
            tuple(self.too_large),
            self.bound,
            interrupted,
            sum(
                one.cell in self.left_out and one.bound < self.best
                for one in self.results
            ),
        )

    def weigh_smallest(self) -> None:
        """Weigh plans of the cells that seem to need the least, to say how much is missing."""

        def size(result: CellResult) -> float:
            return self.pricing.estimate(result.cell).bytes

        for result in sorted(self.results, key=size)[:WEIGHED_CELLS]:
            cell = result.cell
            self.too_large += weigh_setting(
                self.pricing.setting(cell),
                self.pricing.judge(cell),
                self.limits_of(cell),
            )

    def why_nothing_fits(self) -> str:
        """Say why no cell has a plan."""
        if self.too_large:
            return nothing_fits(self.too_large, self.workload.memory, self.shown)
        if not self.results:
            return "no division of the devices and the batch is possible"
        least = min(self.pricing.least_bytes(one.cell) for one in self.results)
        memory = self.shown(self.workload.memory or 0.0)
        return (
            f"nothing fits into a memory of {memory}; "
            f"the least that a device would hold is {self.shown(least)}"
        )


def _cells(workload: Workload, limits: Limits) -> list[Cell]:
    """Return the cells of a workload that its runtime can run. Refuses too many cells and too large ones at once."""
    cells = list(islice(cells_of(workload), MAX_COMPARED_CELLS + 1))
    if len(cells) > MAX_COMPARED_CELLS:
        raise ShapeError(
            f"there are more than {MAX_COMPARED_CELLS:,} ways to divide {workload.devices:,} devices "
            f"and {workload.batch:,} sequences\n"
            "  fix some of them: --set schedule.ranks=8, schedule.microbatches=32, "
            "mesh.tensor=1 and so on"
        )
    runtime = limits.runtime
    if runtime is not None:
        reasons = {cell: runtime.refuse_cell(cell, workload.tied) for cell in cells}
        if all(reasons.values()):
            reason = next(iter(reasons.values()), "there are none")
            raise ShapeError(f"{runtime.name} can run none of these plans: {reason}")
        cells = [cell for cell in cells if not reasons[cell]]
    if cells:
        smallest = min(cells, key=lambda cell: cell.ranks * cell.microbatches)
        refuse_if_too_large(
            2 * smallest.ranks * smallest.microbatches,
            f"any schedule with ranks={smallest.ranks} "
            f"microbatches={smallest.microbatches}",
        )
    return cells


def _order_of_bounds(result: CellResult) -> tuple[float, float, int]:
    """Sort cells by their bounds; of equal ones, those that recompute less come first."""
    return result.bound, result.cell.recomputed, result.cell.processes


MAX_SHOWN_RIVALS = 6  # rows that a plan.json stores besides the chosen one


def rival_facts(landscape: Landscape) -> Facts:
    """Return facts about the candidates that a plan was chosen from.

    These are their number, and the time and memory of the best of the others. The plain
    `1f1b` is always among them, because everybody knows it.
    """
    facts: dict[str, Fact] = {
        "candidates": len(landscape.rows),
        "too_large": len(landscape.too_large),
    }
    for place, row in enumerate(landscape.rows[1:]):
        rival = row.candidate
        if place < MAX_SHOWN_RIVALS or rival.name == "1f1b":
            name = row_title(row, landscape)
            facts.setdefault(f"step of {name}", rival.step)
            facts.setdefault(f"peak of {name}", rival.peak)
    return tuple(facts.items())


def row_title(row: Row, landscape: Landscape) -> str:
    """Return the name of a row: with its cell, if there are several."""
    name = title(row.candidate.name, row.candidate.shape)
    return name if len(landscape.cells) == 1 else f"{name} on {row.cell.name}"
