"""Finds a good order of the lanes for given stages, micro-batches, cost and memory.

The search begins with the schedules of the registry for these stages. With slices they are tried only if messages wait
for each other, as over NCCL: the list scheduler does not know that. Then many orders are listed, each with another rule
of the list scheduler:

    priority   which of the ready actions a rank starts: backwards first, the oldest micro-batch first, or the one with
               the longest way to the end still before it
    release    how much later than the one before a micro-batch may enter. One that enters as soon as it can often waits
               later on, where it takes memory, and others wait for it. So some micro-batches enter at once, and the
               others at some pace, from much faster than the ranks can work to a little slower.
    cap        the scheduler may be given less memory than there is; then it starts fewer micro-batches at a time

The best few are then improved by local search (`penstock.plan.improve`). Work is counted in simulations of all lanes,
and what is tried first does not depend on how much work is allowed. So more work never gives a slower schedule.

Orders at more and more levels of memory, which do not depend on how much memory there is.

A search for orders is not exact. Under a larger cap it goes another way, and may end with a slower order. So no order
is searched under the cap that was asked for. Every placement has its own levels of memory, and every one within the
memory counts:

    level     1      1.25   1.5    1.75   2      2.5    3  ...  M        micro-batches that the fullest rank can hold
    found     19.2   18.1   17.0   17.3   16.1   15.8   15.9
              ╰─────────── a memory of 2.2 ───╯                          sees all that a memory of 1.5 sees

The levels, and the work on each of them, follow from the placement, its cuts and its cost. So all orders that are found
in some memory are also found in more memory. A level is left out only if no order under its cap can beat the best plan.

If messages wait for each other, as over NCCL, bounds are farther below what is possible, and few levels are left out.
So the order of the highest level is searched first, and is also the order of every level that holds it. The others get
less work. This, too, follows from the placement, its cuts and its cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, product

import numpy as np

from penstock.cost.columns import columns
from penstock.cost.cost import Cost
from penstock.cost.memory import MAX_SENDS_IN_FLIGHT, device_memory
from penstock.errors import ShapeError
from penstock.ir.action import BACKWARD, FORWARD, WEIGHTS
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.ir.table import Floats, Ints
from penstock.plan.bound import longest_tails, lower_bound
from penstock.plan.candidates import ROUNDING, Evaluator
from penstock.plan.improve import (
    OrderProblem,
    Search,
    fits_caps,
    problem_of,
)
from penstock.schedules import REGISTRY, make, shape_of
from penstock.schedules.list_scheduling import (
    KIND_ORDER,
    Lister,
    caps_of_ranks,
    defer_weights,
    held_by_one,
    least_caps,
    sequential_schedule,
)
from penstock.schedules.transforms import slice_tokens, split_backward

LIST_WORK = 50  # listing takes about as long as this many simulations
# How many orders take part in each round of moves; later rounds have one.
IMPROVED = (4, 2, 1)
MAX_KEPT_ORDERS = 16
# The rules that give the best orders most often: pace, head start and priority, as below. The best of these orders is
# seldom much slower than the best of all rules.
FIRST_RULES = (
    (1.15, 0.5, 0),
    (1.0, 0.0, 3),
    (0.0, 0.0, 3),
    (0.25, 0.0, 0),
    (1.0, 0.0, 0),
    (1.05, 0.25, 0),
    (1.2, 0.0, 0),
    (0.4, 0.0, 3),
    (1.2, 0.0, 3),
    (1.05, 0.25, 3),
    (1.1, 0.0, 3),
    (0.5, 0.0, 4),
)
FIRST_BATCH = len(FIRST_RULES)  # listed orders before the first moves
LATER_BATCH = 60  # and between later rounds of moves
# Paces at which micro-batches enter, in a rank's time for one micro-batch, and the share of the ranks that they may
# fill at once before. The most useful ones come first.
FIRST_RELEASES = (
    (0.0, 0.0),
    (1.0, 0.0),
    (0.5, 0.0),
    (0.15, 0.0),
    (0.8, 0.0),
    (0.9, 0.0),
    (1.15, 0.5),
    (0.25, 0.0),
    (1.05, 0.25),
    (0.65, 0.0),
    (1.1, 0.0),
    (0.4, 0.0),
    (1.2, 0.0),
)
LATER_PACES = tuple(round(0.05 * step, 2) for step in range(1, 26))
LATER_HEAD_STARTS = (0.0, 0.25, 0.375, 0.5, 0.625)
CAP_SHARES = (1.0, 0.8, 0.6)
MAX_WORK = 200_000
MAX_TIMED_ACTIONS = 100_000_000  # in all simulations of a search together
EQUAL_TIMES = 1e-9


def best_order(
    stages: Sequence[Stage],
    microbatches: Sequence[MicroBatch],
    cost: Cost,
    cap: float | Sequence[float] | None = None,
    work: int | None = None,
    split: bool | None = None,
) -> Schedule:
    """Return the fastest schedule found in which no rank holds more than its cap.

    work: how many simulations of all lanes to spend; by default about as many as fit into a second.
    split: whether backwards are split; by default both ways are tried.

    >>> from penstock import UnitCost, simulate
    >>> from penstock.schedules.orders import paths_through, wave_placement
    >>> stages = wave_placement(3, 1)
    >>> best = best_order(stages, paths_through(stages, 4), UnitCost(), cap=2, work=500)
    >>> float(max(simulate(best, UnitCost()).peak_activations)) <= 2
    True
    """
    return OrderSearch(stages, microbatches, cost, split).best(cap, work)


class OrderSearch:
    """Searches the orders of given stages and micro-batches, under one cap after the other."""

    def __init__(
        self,
        stages: Sequence[Stage],
        microbatches: Sequence[MicroBatch],
        cost: Cost,
        split: bool | None = None,
    ) -> None:
        self.cost = cost
        self.split = split
        ways = (True, False) if split is None else (split,)
        self.drafts = [
            Draft(sequential_schedule(stages, microbatches, way), cost) for way in ways
        ]
        self.known = list(registry_orders(stages, microbatches))
        if cost.network.channels is not None:
            self.known += sliced_orders(stages, microbatches)
        self.size = self.drafts[0].size

    def bound(self, cap: float | Sequence[float] | None = None) -> float:
        """Return a time that no order under this cap can beat."""
        return min(lower_bound(draft.schedule, self.cost, cap) for draft in self.drafts)

    def best(
        self,
        cap: float | Sequence[float] | None = None,
        work: int | None = None,
        bound: float | None = None,
    ) -> Schedule:
        """Return the best order that is found under a cap; the arguments are those of `best_order`.

        `bound` is a time that no order can beat, if the caller knows one already.
        """
        if work is None:  # about a second
            work = min(MAX_WORK, MAX_TIMED_ACTIONS // max(self.size, 1))
        bound = self.bound(cap) if bound is None else bound
        pool = _OrderPool(self.cost, cap, bound)
        for draft in self.drafts:
            pool.add_draft(draft, work)
        for known in self._known(cap):
            pool.add_known(known, work)
        pool.run(work)
        return pool.schedule()

    def _known(self, cap: float | Sequence[float] | None) -> Iterator[Schedule]:
        """Yield the orders of the registry as they are, and split where they have whole backwards."""
        for known in self.known:
            is_split = known.is_split
            if self.split is None or self.split == is_split:
                yield known
            if not is_split and self.split is not False:
                yield defer_weights(split_backward(known), self.cost, cap)


def registry_orders(
    stages: Sequence[Stage], microbatches: Sequence[MicroBatch]
) -> Iterator[Schedule]:
    """Yield the schedules of the registry that have these stages.

    There are none for micro-batches that are cut or do not visit all stages.
    """
    every_stage = tuple(range(len(stages)))
    if any(m.slices > 1 or m.path != every_stage for m in microbatches):
        return
    ranks = 1 + max(stage.rank for stage in stages)
    chunks = len(stages) // ranks
    for name in REGISTRY:
        words = shape_of(name)
        if "slices" in words or name == "skip":
            continue
        shape = {"ranks": ranks, "microbatches": len(microbatches)}
        if "chunks" in words:
            shape["chunks"] = chunks
        if "waves" in words:
            shape["waves"] = max(chunks // 2, 1)
        try:
            made = make(name, **shape)
        except ShapeError:  # there is no such shape
            continue
        if made.stages == tuple(stages) and all(
            m.path == every_stage for m in made.microbatches
        ):
            yield schedule_of(stages, microbatches, made.lanes)


def sliced_orders(
    stages: Sequence[Stage], microbatches: Sequence[MicroBatch]
) -> Iterator[Schedule]:
    """Yield the schedules of the registry that have these stages, cut into the slices of the micro-batches.

    There are none for micro-batches that are not cut, differ, or do not visit all stages.
    """
    if len(set(microbatches)) > 1 or microbatches[0].slices == 1:
        return
    cuts = microbatches[0].cuts
    whole = [replace(one, cuts=(0, one.tokens)) for one in microbatches]
    for known in registry_orders(stages, whole):
        yield slice_tokens(known, cuts)


class _OrderPool:
    """Lists orders and improves the best of them until the work is done."""

    def __init__(
        self,
        cost: Cost,
        cap: float | Sequence[float] | None,
        bound: float,
    ) -> None:
        self.cost = cost
        self.cap = cap
        self.bound = bound
        self.drafts: list[tuple[Draft, OrderProblem]] = []
        self.searches: list[Search] = []
        self.left = 0

    def add_draft(self, draft: Draft, work: int) -> None:
        """Search orders of these actions."""
        caps = caps_of_ranks(draft.schedule, draft.costs, self.cap)
        self.drafts.append((draft, draft.problem.with_caps(caps, work)))

    def add_known(self, schedule: Schedule, work: int) -> None:
        """Begin with this schedule, unless it holds too much."""
        problem = problem_of(schedule, self.cost, self.cap, work)
        lanes = np.arange(len(problem))
        if fits_caps(problem, lanes):
            self._add(problem, lanes)

    @property
    def is_over(self) -> bool:
        """Whether the work is done, or the best order cannot be improved."""
        if not self.searches:
            return False
        best = min(search.makespan for search in self.searches)
        return self.left <= 0 or best <= self.bound * (1 + EQUAL_TIMES)

    def run(self, work: int) -> None:
        """Spend the work. At least one order is listed in any case."""
        self.left = work
        recipes = [
            (problem, draft.recipes(problem.columns.caps))
            for draft, problem in self.drafts
        ]
        for number in count():
            batch = LATER_BATCH if number else FIRST_BATCH
            for problem, waiting in recipes:
                for lanes in islice(waiting, batch):
                    self.left -= LIST_WORK
                    self._add(problem, lanes)
                    if self.is_over:
                        return
            for search in self._best(IMPROVED[min(number, len(IMPROVED) - 1)]):
                moves = min(search.round_moves, self.left)
                search.run(moves)
                self.left -= moves
                if self.is_over:
                    return

    def schedule(self) -> Schedule:
        """Return the best schedule."""
        return min(self.searches, key=lambda search: search.makespan).schedule()

    def _add(self, problem: OrderProblem, lanes: Ints) -> None:
        self.searches.append(Search(problem, lanes))
        if len(self.searches) > 2 * MAX_KEPT_ORDERS:
            self.searches = self._best(MAX_KEPT_ORDERS)

    def _best(self, most: int) -> list[Search]:
        """Return the best orders, only one of each makespan."""
        chosen: list[Search] = []
        for one in sorted(self.searches, key=lambda search: search.makespan):
            if not chosen or one.makespan > chosen[-1].makespan * (1 + EQUAL_TIMES):
                chosen.append(one)
        return chosen[:most]


class Draft:
    """Actions to be listed, and the rules to list them with."""

    def __init__(self, schedule: Schedule, cost: Cost) -> None:
        self.schedule = schedule
        self.size = len(schedule.table)
        self.problem = problem_of(schedule, cost, None)
        self.costs = columns(schedule, cost)
        self.lister = Lister(schedule, self.costs, len(FIRST_RULES))
        self.priorities = list(self._priorities())

    def recipes(self, caps: Floats) -> Iterator[Ints]:
        """Yield the orders that are listed under these caps, one for each rule."""
        ranks = self.schedule.ranks
        for pace, share, number in FIRST_RULES:
            times = self._release_times(pace, round(ranks * share))
            yield self.lister.lanes(self.priorities[number], caps, times)
        for share in CAP_SHARES:
            fewer = self._share_of(caps, share)
            if fewer is None:
                continue
            for pace, head_start in self._releases():
                times = self._release_times(pace, head_start)
                for ordinals in self.priorities:
                    yield self.lister.lanes(ordinals, fewer, times)

    def _share_of(self, caps: Floats, share: float) -> Floats | None:
        """Return a share of the caps, or None if they are infinite or the share does not hold one micro-batch."""
        if share == 1.0:
            return caps
        if not np.isfinite(caps).all():
            return None
        fewer = caps * share
        least = least_caps(self.schedule, self.costs)
        return None if (fewer < least).any() else fewer

    def _releases(self) -> list[tuple[float, int]]:
        """Return pairs of a pace and the number of micro-batches that enter at once, each pair only once."""
        ranks = self.schedule.ranks
        pairs = [*FIRST_RELEASES, *product(LATER_PACES, LATER_HEAD_STARTS)]
        return list(
            dict.fromkeys((pace, round(ranks * share)) for pace, share in pairs)
        )

    def _release_times(self, pace: float, head_start: int) -> Floats:
        """Let each micro-batch enter `pace` times a rank's work for one after the one before it."""
        table = self.schedule.table
        work = np.bincount(table.rank, self.costs.seconds).max()
        seconds = pace * work / len(self.schedule.microbatches)
        enters = (table.kind == FORWARD) & (table.position == 0) & (table.slice == 0)
        waiting = np.maximum(table.microbatch - head_start, 0)
        times: Floats = np.where(enters, waiting * seconds, 0.0)
        return times

    def _priorities(self) -> Iterator[Ints]:
        """Yield the position of each action in different orders of priority."""
        table = self.schedule.table
        kind = np.array(KIND_ORDER)[table.kind]
        is_weight = table.kind == WEIGHTS
        depth = table.position
        inner = np.where(table.kind == BACKWARD, depth, -depth)
        piece = np.where(table.kind == FORWARD, table.slice, -table.slice)
        tail = longest_tails(self.schedule, self.costs)
        pace = tail.max() / len(self.schedule.microbatches)
        later = table.microbatch * pace
        # The last key counts most.
        for keys in (
            (piece, table.microbatch, inner, kind),
            (piece, -depth, kind, table.microbatch, is_weight),
            (piece, table.microbatch, -tail, kind),
            (piece, later - tail, is_weight),
            (piece, table.microbatch, -tail, is_weight),
        ):
            ordinals = np.empty(self.size, dtype=np.int64)
            ordinals[np.lexsort(keys)] = np.arange(self.size)
            yield ordinals


# ---------------------------------------------------------------- more and more memory
# Levels between one power of two and the next, for schedules with at most this many actions.
# Large schedules take long to list, so they have fewer levels.
STEPS = ((2_000, (1.0, 1.25, 1.5, 1.75)), (6_000, (1.0, 1.5)))
FEW_STEPS = (1.0,)
LOW_STEP = (
    1.5  # A level of every placement: more helps most where there is little memory.
)
WORK_PER_ACTION = 100  # simulations on a level, of small schedules
LEVEL_ACTIONS = 12_000_000  # actions in all simulations on a level, of large schedules
UNEVEN_GRANULES = 4  # of a slice on a stage, where ranks differ
MIN_LISTINGS = 2  # orders that are listed on a level, of very large schedules
# If messages wait for each other, the levels below the highest get this part of the work.
SHARE_OF_LOWER_LEVELS = 1 / 16
# A bound that knows the cap takes long for more actions than this.
MAX_BOUND_ACTIONS = 2_000


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """A memory of every device, and what it leaves for the activations of each rank."""

    memory: float
    caps: tuple[float, ...]


def memory_levels(
    evaluator: Evaluator, stages: Sequence[Stage], microbatches: Sequence[MicroBatch]
) -> list[MemoryLevel]:
    """Return all levels of a placement, the lowest first: from one micro-batch to all of them."""
    granules = microbatches[0].slices * max(
        Counter(one.rank for one in stages).values()
    )
    few = list(dict.fromkeys(microbatches))
    if (
        len(few) == 1
    ):  # Enough of them to have all messages under way that there can be.
        few = list(microbatches[: -(-MAX_SENDS_IN_FLIGHT // granules)])
    draft = sequential_schedule(stages, few)
    beside: Floats = np.zeros(draft.ranks)
    if evaluator.cost.units.bytes:
        beside = device_memory(draft, evaluator.cost, evaluator.recorded).beside
    costs = columns(draft, evaluator.cost)
    least = float((beside + least_caps(draft, costs)).max())
    unit = float(held_by_one(draft, costs).max())
    if evaluator.cost.units.bytes:  # The ranks hold granules of different sizes.
        granules *= UNEVEN_GRANULES
    actions = 3 * len(stages) * len(microbatches) * draft.slices
    levels = []
    for share in shares_of(len(microbatches), granules, actions):
        memory = least + (share - 1.0) * unit
        levels.append(MemoryLevel(memory, tuple((memory - beside).tolist())))
    return levels


def shares_of(microbatches: int, granules: int, actions: int) -> list[float]:
    """Return the micro-batches that the fullest rank can hold on each level.

    A micro-batch is held in whole granules, so caps between two of them are the same.

    >>> shares_of(4, 1, 100), shares_of(4, 2, 100)
    ([1.0, 2.0, 3.0, 4.0], [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    >>> shares_of(8, 16, 10_000)
    [1.0, 1.5, 2.0, 4.0, 8.0]
    """
    steps = next((steps for most, steps in STEPS if actions <= most), FEW_STEPS)
    powers = [2.0**power for power in range(microbatches.bit_length())]
    shares = {power * step for power in powers for step in steps} | {LOW_STEP}
    rounded = {int(share * granules) / granules for share in shares}
    return sorted(one for one in {*rounded, float(microbatches)} if one <= microbatches)


def level_work(size: int) -> int:
    """Return the simulations that a level is worth, for a schedule with this many actions."""
    work = min(WORK_PER_ACTION * size, LEVEL_ACTIONS // size)
    return max(work, MIN_LISTINGS * LIST_WORK)


def orders_by_memory(
    search: OrderSearch,
    levels: Sequence[MemoryLevel],
    memory: float | None,
    cannot_win: Callable[[float], bool],
) -> Iterator[Schedule]:
    """Yield the best order of each level within the memory, from the highest to the lowest.

    `cannot_win` says whether no order that takes at least this long can be chosen.
    """
    size = search.size
    free = search.bound()
    work = level_work(size)
    less_work = max(int(SHARE_OF_LOWER_LEVELS * work), MIN_LISTINGS * LIST_WORK)
    highest: Schedule | None = None  # the order of the highest level
    for level in reversed(levels):
        if cannot_win(free):
            return
        if memory is not None and level.memory > memory * (1 + ROUNDING):
            continue
        bound = search.bound(level.caps) if size <= MAX_BOUND_ACTIONS else free
        if cannot_win(bound):
            continue
        if search.cost.network.channels is None:
            yield search.best(level.caps, work, bound=bound)
            continue
        if highest is None:
            highest = search.best(levels[-1].caps, work, bound=free)
        if _fits(highest, search.cost, level):
            yield highest
        else:
            yield search.best(level.caps, less_work, bound=bound)


def _fits(schedule: Schedule, cost: Cost, level: MemoryLevel) -> bool:
    """Whether a level holds the activations of a schedule."""
    problem = problem_of(schedule, cost, level.caps)
    return fits_caps(problem, np.arange(len(problem)))
