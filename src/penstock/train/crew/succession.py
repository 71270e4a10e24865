"""Decides how a run goes on with the workers that are left, from what each of them reports.

    worker 0   step 41                      It has the sums of step 41, so everybody's gradients were
    worker 2   step 40, gradients of 41     complete: worker 2 commits step 41 with worker 0's figures.
    worker 3   step 41
               ─► all go on from step 41; step 42 was in flight, and is done again

    worker 0   step 40                      Nobody has the sums of step 41, so nobody has changed its
    worker 2   step 40                      weights: step 41 is done again.

Ranks can never be further apart than that, because every step ends with one sum over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from penstock.ir.plan import Plan
from penstock.ir.program import lower
from penstock.ir.schedule import Schedule
from penstock.ir.sum_plan import fitting_sums
from penstock.ir.verify import verify
from penstock.ir.verify_sums import verify_sums
from penstock.plan.seats import (
    LEAST_SAVED_BY_A_MOVE,
    least_time,
    seats_to_change,
)
from penstock.plan.survivors import PacedCost, orphans, part_work, without_ranks
from penstock.schedules.coverage import hold_every_part
from penstock.sim.simulate import simulate
from penstock.train.crew.handover import PartTransfer
from penstock.train.crew.notes import Decision, Report

# The share of a step that must be saved to replan around a slow worker.
LEAST_SAVED_SHARE = 0.05


def plan_without(
    plan: Plan,
    lost: tuple[int, ...],
    homes: Mapping[int, int],
    paces: Mapping[int, float] = MappingProxyType({}),
) -> Plan:
    """Return the plan for the ranks that are left, checked and verified.

    `paces` has the ranks that are slow. If less work for them makes a step no faster, the
    plan stays as it is.
    """
    if not lost and not paces:
        return plan
    work = part_work(plan)
    ranks = range(plan.schedule.ranks)
    pace = [paces.get(rank, 1.0) for rank in ranks] if paces else []
    # All schedules of a plan have the same stages, so a part that the first one gives to a
    # rank has its home there in all others.
    first = without_ranks(plan.schedule, lost, work, homes, pace)
    if not lost:
        cost = PacedCost(parts=tuple(work), paces=tuple(pace))
        now, then = (simulate(one, cost).makespan for one in (plan.schedule, first))
        if then > (1 - LEAST_SAVED_SHARE) * now:
            return plan
    left = [rank for rank in ranks if rank not in lost]
    adopted = dict(homes)
    for stage in first.stages:
        if stage.part in orphans(plan.schedule, lost):
            adopted[stage.part] = left[stage.rank]
    smaller = plan.map_schedules(
        lambda one: (
            first
            if one is plan.schedule
            else without_ranks(one, lost, work, adopted, pace)
        )
    )
    # Sums are planned again: the ranks that are left divide what the lost ones did.
    sums = fitting_sums(smaller.schedule, plan.sums, left)
    smaller = replace(smaller, sums=sums)
    for schedule in smaller.schedules:
        verify(lower(schedule))
        verify_sums(schedule, sums)
    name = plan.name
    if lost:
        name += f" without {' '.join(map(str, lost))}"
    slow = [str(rank) for rank in sorted(paces) if rank in left]
    if slow:
        name += f", slow {' '.join(slow)}"
    return replace(smaller, name=name)


def first_plan(plan: Plan, workers: int) -> Plan:
    """Return the plan with which the launcher's own workers begin; 0 is one for every rank."""
    ranks = plan.schedule.ranks
    return plan_without(plan, tuple(range(workers or ranks, ranks)), {})


def rank_work(plan: Plan) -> list[float]:
    """Return the work of each rank in a step, in layers; the mean if steps take different paths."""
    work = part_work(plan)
    totals = [0.0] * plan.schedule.ranks
    for schedule in plan.schedules:
        for microbatch in schedule.microbatches:
            for number in microbatch.path:
                stage = schedule.stages[number]
                totals[stage.rank] += work[stage.part] / len(plan.schedules)
    return totals


def step_length(plan: Plan, paces: Sequence[float] = ()) -> float:
    """Return how long a step of a plan takes, in layers; the mean if steps take different paths."""
    cost = PacedCost(parts=tuple(part_work(plan)), paces=tuple(paces))
    lengths = [simulate(schedule, cost).makespan for schedule in plan.schedules]
    return sum(lengths) / len(lengths)


def speed_limit(
    plan: Plan, seats: Collection[int], paces: Mapping[int, float]
) -> float:
    """Return the speed that no plan for some of the seats can exceed, compared with the plan for all.

    It is at most 1, which is the speed of that plan.
    """
    work = part_work(plan)
    empty = set(range(plan.schedule.ranks)) - set(seats)
    least = [least_time(one, empty, work, paces) for one in plan.schedules]
    return min(1.0, step_length(plan) * len(least) / sum(least))


def shares_a_part(schedule: Schedule, rank: int) -> bool:
    """Whether another rank holds one of a rank's parts, and could do some of its work."""
    holders = holders_of(schedule)
    return any(
        len(holders[stage.part]) > 1 for stage in schedule.stages if stage.rank == rank
    )


def decide(
    plan: Plan,
    reports: Mapping[int, Report],
    generation: int,
    resume: bool,
    mirror: bool = False,
    saved: Callable[[], int] = lambda: -1,
    paces: Mapping[int, float] = MappingProxyType({}),
    written: Callable[[], int] | None = None,
    seats: Mapping[int, int] = MappingProxyType({}),
    moving: bool = False,
) -> Decision:
    """Return how the workers that have reported go on.

    A worker keeps its seat, the rank that it has in the plan for all. Worker n begins on seat n.

    resume: whether the run was started from a checkpoint.
    mirror: whether parts that only one rank holds have a mirror on another one.
    saved: returns the step of the newest checkpoint without damage, or -1.
    paces: workers that are slow, and how many times as long as before they take.
    written: returns the last step that is written down. A worker that is lost right after its
        step may have been the one to write it down.
    seats: the seats of workers in the generation before.
    moving: whether workers may change their seats, because nobody comes for those that are empty.
    """
    seated = seat_workers(plan, reports, seats)
    smaller = _plan_for(plan, seated, reports, paces)
    if moving:
        moved = move_workers(plan, seated)
        if moved != seated:
            other = _plan_for(plan, moved, reports, paces)
            least = (1 - LEAST_SAVED_BY_A_MOVE) * _paced_length(smaller, seated, paces)
            if _paced_length(other, moved, paces) <= least:
                seated, smaller = moved, other
    members = tuple(seated.values())
    schedule = hold_every_part(smaller.schedule)
    # Newcomers have no weights, and neither have those that were taken in by a generation
    # that ended before it had begun.
    veterans = [reports[n] for n in members if reports[n].step >= 0]
    mirrors = choose_mirrors(schedule, members, reports) if mirror else ()
    plain = Decision(
        generation,
        members,
        smaller,
        keep=False,
        resume=resume,
        whole=smaller is plan,
        mirrors=mirrors,
        seats=tuple(seated),
    )
    if max((report.step for report in veterans), default=0) == 0:
        return plain  # Nobody has done a step.
    ahead = max(veterans, key=lambda report: report.step)
    steps = {report.step for report in veterans}
    assert steps <= {ahead.step, ahead.step - 1}, f"ranks are at steps {sorted(steps)}"
    restores: dict[int, int] = {}  # from a part to the rank that reads it
    transfers = []
    for rank, part in _missing(schedule, mirrors, members, reports):
        source = _source(part, members, veterans)
        if source is None:
            source = restores.setdefault(part, rank)
        if source != rank:
            transfers.append(PartTransfer(part, source, rank))
    if restores and saved() != ahead.step:
        return replace(plain, resume=True)
    save = any(report.saving for report in veterans)
    closed = len(steps) == 1 and all(report.closed for report in veterans)
    if written is not None and written() < ahead.step:
        closed = False
    return replace(
        plain,
        step=ahead.step,
        figures=ahead.figures,
        keep=True,
        save=save,
        seen=ahead.seen,
        close=save or not closed,
        transfers=tuple(transfers),
        restores=tuple((rank, part) for part, rank in sorted(restores.items())),
    )


def choose_mirrors(
    schedule: Schedule, members: tuple[int, ...], reports: Mapping[int, Report]
) -> tuple[PartTransfer, ...]:
    """Return, for each part that one rank holds alone, that rank and the rank of its mirror.

    A worker that has the weights already goes first, then the one with the fewest parts and
    mirrors, then the next one.
    """
    ranks = len(members)
    counts = [0] * ranks
    for rank, _ in {(stage.rank, stage.part) for stage in schedule.stages}:
        counts[rank] += 1
    mirrors = []
    for part, holders in enumerate(holders_of(schedule)):
        if len(holders) > 1 or ranks == 1:
            continue
        (holder,) = holders

        def order(rank: int, part: int = part, holder: int = holder) -> tuple[int, ...]:
            known = part in reports[members[rank]].known_parts
            return int(not known), counts[rank], (rank - holder) % ranks

        others = [rank for rank in range(ranks) if rank != holder]
        chosen = min(others, key=order)
        counts[chosen] += 1
        mirrors.append(PartTransfer(part, holder, chosen))
    return tuple(mirrors)


def first_mirrors(schedule: Schedule) -> tuple[PartTransfer, ...]:
    """Return the mirrors of a run that begins, in which nobody has any weights."""
    members = tuple(range(schedule.ranks))
    reports = {worker: Report(worker) for worker in members}
    return choose_mirrors(hold_every_part(schedule), members, reports)


def _source(
    part: int, members: tuple[int, ...], veterans: Sequence[Report]
) -> int | None:
    """The rank that sends a part to one that does not have it; None if nobody has it."""
    for known in ([one.parts for one in veterans], [one.mirrors for one in veterans]):
        for report, parts in zip(veterans, known, strict=True):
            if part in parts:
                return members.index(report.worker)
    return None


def _plan_for(
    plan: Plan,
    seated: Mapping[int, int],
    reports: Mapping[int, Report],
    paces: Mapping[int, float],
) -> Plan:
    """The plan for the seats that are taken."""
    lost = tuple(n for n in range(plan.schedule.ranks) if n not in seated)
    homes = _homes(plan, lost, seated, reports)
    slow = {seat: paces[worker] for seat, worker in seated.items() if worker in paces}
    return plan_without(plan, lost, homes, slow)


def _paced_length(
    plan: Plan, seated: Mapping[int, int], paces: Mapping[int, float]
) -> float:
    """How long a step takes with these workers."""
    return step_length(plan, [paces.get(worker, 1.0) for worker in seated.values()])


def seat_workers(
    plan: Plan, workers: Collection[int], seats: Mapping[int, int]
) -> dict[int, int]:
    """Return the worker on each seat that is taken, in the order of the seats.

    Newcomers get the seats with their numbers, or others if these are taken.
    """
    seated = {seats[worker]: worker for worker in sorted(workers) if worker in seats}
    for worker in sorted(workers):
        if worker not in seats:
            free = [n for n in range(plan.schedule.ranks) if n not in seated]
            seated[worker if worker in free else free[0]] = worker
    return dict(sorted(seated.items()))


def move_workers(plan: Plan, seated: Mapping[int, int]) -> dict[int, int]:
    """Return the worker on each seat after the moves that promise to pay."""
    moved = dict(seated)
    empty = [n for n in range(plan.schedule.ranks) if n not in seated]
    for seat, goal in seats_to_change(plan, empty).items():
        moved[goal] = moved.pop(seat)
    return dict(sorted(moved.items()))


def _homes(
    plan: Plan,
    lost: tuple[int, ...],
    seated: Mapping[int, int],
    reports: Mapping[int, Report],
) -> dict[int, int]:
    """The seats of workers that have orphaned parts already: adopted before, or as a mirror."""
    homes: dict[int, int] = {}
    for part in orphans(plan.schedule, lost):
        for seat, worker in seated.items():
            if part in reports[worker].parts:
                homes.setdefault(part, seat)
        for seat, worker in seated.items():
            if part in reports[worker].mirrors:
                homes.setdefault(part, seat)
    return homes


def _missing(
    schedule: Schedule,
    mirrors: Sequence[PartTransfer],
    members: tuple[int, ...],
    reports: Mapping[int, Report],
) -> list[tuple[int, int]]:
    """The ranks and parts for which a rank has no weights: first those to train, then mirrors."""
    held = sorted({(stage.rank, stage.part) for stage in schedule.stages})
    mirrored = [(target, part) for part, _, target in mirrors]
    return [
        (rank, part)
        for rank, part in [*held, *mirrored]
        if part not in reports[members[rank]].known_parts
    ]


def holders_of(schedule: Schedule) -> list[set[int]]:
    """Return the ranks that hold each part."""
    holders: list[set[int]] = [set() for _ in range(schedule.parts)]
    for stage in schedule.stages:
        holders[stage.part].add(stage.rank)
    return holders


def parts_without_replica(plan: Plan) -> list[int]:
    """Return the parts that only one rank holds."""
    holders = holders_of(plan.schedule)
    return [part for part, ranks in enumerate(holders) if len(ranks) == 1]
