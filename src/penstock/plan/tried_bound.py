"""Times that no plan on the placements that a search tries can beat, in the units of the papers.

`space_bound` holds for any placement, and so it ignores what collides on one of them. A search returns a plan on one of
a short list of placements, cut into one of a few numbers of slices. For each of these pairs `lower_bound` is closer,
since it knows every chain of actions. So no plan of the search beats the least of them:

    3 ranks, 3 micro-batches, hops of 0.1, whole sequences, at most 4 stages on a rank

    space_bound    any placement   10.1
    lower_bound    1 chunk 11.4    2 chunks 10.7    3 chunks 10.67    1 wave 10.6    2 waves 10.5    the best plan: 10.5

**Split and whole backwards.** Any plan becomes one with split backwards that takes no longer, if an I takes at most as
long as a B, and an I with its W too: put both in the place of the B. The gradient leaves no later, and the memory is
the same. Where the cost does not have this property, the bound is that of a cheaper cost that has it.

The pair with the least bound is looked at first, and the search for the least one ends at the first pair whose close
bound is known. Large schedules, which take long, keep their bound of the space.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from penstock.cost.unit import UnitCost
from penstock.plan.bound import lower_bound
from penstock.plan.recipes import (
    Limits,
    StagePlacement,
    allowed_placements,
    even_cuts_only,
    slice_counts,
)
from penstock.plan.space import space_bound
from penstock.schedules.list_scheduling import sequential_schedule

MAX_CLOSE_ACTIONS = 3_000  # of a schedule whose close bound is computed
# Passes over actions, in all close bounds of a search. They take about a second.
CLOSE_BOUND_WORK = 20_000_000


def tried_bound(
    cost: UnitCost,
    ranks: int,
    microbatches: int,
    limits: Limits,
    memory: float | None,
) -> float:
    """Return a time that no plan on the placements of a search can beat.

    Every micro-batch must visit all stages, and there must be one copy of the weights.
    """
    cheaper = with_free_choice(cost)
    pairs = [
        (placement, slices)
        for placement in allowed_placements(ranks, limits)
        for slices in slice_counts(limits)
    ]
    waiting = []
    for number, (placement, slices) in enumerate(pairs):
        quick = space_bound(
            cost,
            ranks,
            microbatches,
            placement.stages_per_rank,
            slices,
            memory,
            limits.split,
        )
        waiting.append((quick, number, False))
    heapq.heapify(waiting)
    left = CLOSE_BOUND_WORK
    while True:
        bound, number, is_close = waiting[0]
        placement, slices = pairs[number]
        actions, work = _size(placement, slices, ranks, microbatches, memory)
        if is_close or actions > MAX_CLOSE_ACTIONS or work > left:
            return bound
        left -= work
        stages = placement.stages(ranks)
        cuts = even_cuts_only(slices)[0]
        paths = placement.paths(stages, microbatches, cuts)
        draft = sequential_schedule(stages, paths, limits.split)
        close = max(bound, lower_bound(draft, cheaper, memory))
        heapq.heapreplace(waiting, (close, number, True))


def with_free_choice(cost: UnitCost) -> UnitCost:
    """Return a cost, no higher in anything, in which splitting a backward takes no time."""
    back, backward = cost.least_backward(split=True)
    return replace(cost, I=back, W=backward - back)


def _size(
    placement: StagePlacement,
    slices: int,
    ranks: int,
    microbatches: int,
    memory: float | None,
) -> tuple[int, int]:
    """Return the actions of a schedule, and about how many passes over actions its close bound takes.

    With a limited memory, micro-batches may be numbered by any of their forwards.
    """
    path = ranks * placement.stages_per_rank
    actions = 3 * path * microbatches * slices
    anchors = 1 if memory is None else 2 * path
    return actions, actions * anchors
