"""Orders under more and more memory, on a ladder of caps that does not depend on how much memory there is.

A search for orders is not exact. Under a larger cap it goes another way, and may end with a slower order. So no order
is searched under the cap that was asked for. Every placement has its own ladder of caps, and every rung within the
memory counts:

    rung      1      1.25   1.5    1.75   2      2.5    3  ...  M        micro-batches that the fullest rank can hold
    found     19.2   18.1   17.0   17.3   16.1   15.8   15.9
              ╰─────────── a memory of 2.2 ───╯                          sees all that a memory of 1.5 sees

The rungs, and the work on each of them, follow from the placement, its cuts and its cost. So all orders that are found
in some memory are also found in more memory. A rung is left out only if no order under its cap can beat the best plan.

If messages wait for each other, as over NCCL, bounds are farther below what is possible, and few rungs are left out.
So the order of the highest rung is searched first, and is also the order of every rung that holds it. The other rungs
get less work. This, too, follows from the placement, its cuts and its cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.cost.columns import columns
from penstock.cost.cost import Cost
from penstock.cost.memory import MAX_SENDS_IN_FLIGHT, device_memory
from penstock.ir.schedule import MicroBatch, Schedule, Stage
from penstock.ir.table import Floats
from penstock.plan.candidates import ROUNDING, Judge
from penstock.plan.improve import fits_caps, problem_of
from penstock.plan.orders import LIST_WORK, OrderSearch
from penstock.schedules.list_scheduling import (
    held_by_one,
    least_caps,
    sequential_schedule,
)

# Rungs between one power of two and the next, for schedules with at most this many actions.
# Large schedules take long to list, so they have fewer rungs.
STEPS = ((2_000, (1.0, 1.25, 1.5, 1.75)), (6_000, (1.0, 1.5)))
FEW_STEPS = (1.0,)
LOW_STEP = 1.5  # A rung of every ladder: more helps most where there is little memory.
WORK_PER_ACTION = 100  # simulations on a rung, of small schedules
RUNG_ACTIONS = 12_000_000  # actions in all simulations on a rung, of large schedules
UNEVEN_GRANULES = 4  # of a slice on a stage, where ranks differ
MIN_LISTINGS = 2  # orders that are listed on a rung, of very large schedules
# If messages wait for each other, the rungs below the highest get this part of the work.
SHARE_OF_LOWER_RUNGS = 1 / 16
# A bound that knows the cap takes long for more actions than this.
MAX_BOUND_ACTIONS = 2_000


@dataclass(frozen=True, slots=True)
class Rung:
    """A memory of every device, and what it leaves for the activations of each rank."""

    memory: float
    caps: tuple[float, ...]


def rungs_of(
    judge: Judge, stages: Sequence[Stage], microbatches: Sequence[MicroBatch]
) -> list[Rung]:
    """Return all rungs of a placement, the lowest first: from one micro-batch to all of them."""
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
    if judge.cost.units.bytes:
        beside = device_memory(draft, judge.cost, judge.recorded).beside
    costs = columns(draft, judge.cost)
    least = float((beside + least_caps(draft, costs)).max())
    unit = float(held_by_one(draft, costs).max())
    if judge.cost.units.bytes:  # The ranks hold granules of different sizes.
        granules *= UNEVEN_GRANULES
    actions = 3 * len(stages) * len(microbatches) * draft.slices
    rungs = []
    for share in shares_of(len(microbatches), granules, actions):
        memory = least + (share - 1.0) * unit
        rungs.append(Rung(memory, tuple((memory - beside).tolist())))
    return rungs


def shares_of(microbatches: int, granules: int, actions: int) -> list[float]:
    """Return the micro-batches that the fullest rank can hold on each rung.

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


def rung_work(size: int) -> int:
    """Return the simulations that a rung is worth, for a schedule with this many actions."""
    work = min(WORK_PER_ACTION * size, RUNG_ACTIONS // size)
    return max(work, MIN_LISTINGS * LIST_WORK)


def orders_on_ladder(
    search: OrderSearch,
    rungs: Sequence[Rung],
    memory: float | None,
    cannot_win: Callable[[float], bool],
) -> Iterator[Schedule]:
    """Yield the best order of each rung within the memory, from the highest to the lowest.

    `cannot_win` says whether no order that takes at least this long can be chosen.
    """
    size = search.size
    free = search.bound()
    work = rung_work(size)
    less_work = max(int(SHARE_OF_LOWER_RUNGS * work), MIN_LISTINGS * LIST_WORK)
    highest: Schedule | None = None  # the order of the highest rung
    for rung in reversed(rungs):
        if cannot_win(free):
            return
        if memory is not None and rung.memory > memory * (1 + ROUNDING):
            continue
        bound = search.bound(rung.caps) if size <= MAX_BOUND_ACTIONS else free
        if cannot_win(bound):
            continue
        if search.cost.channels is None:
            yield search.best(rung.caps, work, bound=bound)
            continue
        if highest is None:
            highest = search.best(rungs[-1].caps, work, bound=free)
        if _fits(highest, search.cost, rung):
            yield highest
        else:
            yield search.best(rung.caps, less_work, bound=bound)


def _fits(schedule: Schedule, cost: Cost, rung: Rung) -> bool:
    """Whether a rung holds the activations of a schedule."""
    problem = problem_of(schedule, cost, rung.caps)
    return fits_caps(problem, np.arange(len(problem)))
