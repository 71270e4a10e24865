"""Whether a run can go on without some of its workers, with which plan, and who mirrors whose parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from penstock.config import AUTO, Config
from penstock.errors import ConfigError
from penstock.ir import Plan, Schedule, lower, verify
from penstock.ir.sums import fitting_sums
from penstock.ir.verify_sums import verify_sums
from penstock.plan.survivors import (
    PacedCost,
    least_time,
    orphans,
    part_work,
    without_ranks,
)
from penstock.sim.simulate import simulate
from penstock.train.placement import Placement

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


def holders_of(schedule: Schedule) -> list[set[int]]:
    """Return the ranks that hold each part."""
    holders: list[set[int]] = [set() for _ in range(schedule.parts)]
    for stage in schedule.stages:
        holders[stage.part].add(stage.rank)
    return holders


def choose_mirrors(
    schedule: Schedule, known: Sequence[Collection[int]]
) -> tuple[PartTransfer, ...]:
    """Return, for each part that one rank holds alone, that rank and the rank of its mirror.

    `known` has the parts whose weights each rank has already. A rank that has those of the part goes first, then the
    one with the fewest parts and mirrors, then the next one.
    """
    ranks = schedule.ranks
    counts = [0] * ranks
    for rank, _ in {(stage.rank, stage.part) for stage in schedule.stages}:
        counts[rank] += 1
    mirrors = []
    for part, holders in enumerate(holders_of(schedule)):
        if len(holders) > 1 or ranks == 1:
            continue
        (holder,) = holders

        def order(rank: int, part: int = part, holder: int = holder) -> tuple[int, ...]:
            return int(part not in known[rank]), counts[rank], (rank - holder) % ranks

        others = [rank for rank in range(ranks) if rank != holder]
        chosen = min(others, key=order)
        counts[chosen] += 1
        mirrors.append(PartTransfer(part, holder, chosen))
    return tuple(mirrors)


def reasons_against_crew(config: Config, plan: Plan, placement: Placement) -> list[str]:
    """Return why a run cannot go on without one of its workers; empty if it can."""
    reasons = []
    if placement.device != "cpu" and placement.machine.workers_per_gpu > 1:
        reasons.append(
            "its workers share a GPU through MPS, which fails for all of them if one ends; "
            "run.device=cpu would do"
        )
    elif placement.device != "cpu":
        reasons.append(
            "its workers use GPUs, and only connections between CPUs can be made anew; "
            "run.device=cpu would do"
        )
    if config.parallel.size > 1:
        reasons.append("parallel.dp_shard and parallel.tp need all processes of a rank")
    if config.run.early_stop:
        reasons.append(
            "run.early_stop needs all workers to have seen all evaluations; "
            "a checkpoint remembers them, so restarts work"
        )
    if plan.schedule.ranks == 1:
        reasons.append("it has only one worker")
    return reasons


def is_elastic(config: Config, plan: Plan, placement: Placement) -> bool:
    """Whether a run goes on without lost workers; raise ConfigError if it should but cannot."""
    wanted = config.elastic.named
    reasons = reasons_against_crew(config, plan, placement)
    if config.elastic.listen:
        split_address(config.elastic.listen, "elastic.listen")
        if reasons:
            raise ConfigError(
                f"elastic.listen lets workers join, but this run cannot change its workers: {reasons[0]}"
            )
        return True
    if wanted == "on" and reasons:
        raise ConfigError(
            f"elastic.mode = {config.elastic.mode}, but this run cannot continue without a worker: "
            f"{reasons[0]}"
        )
    if wanted == AUTO:
        alone = any(len(ranks) == 1 for ranks in holders_of(plan.schedule))
        return not reasons and not alone
    return wanted == "on"


def split_address(text: str, key: str = "the address") -> tuple[str, int]:
    """Split HOST:PORT, where HOST may be an IPv6 address in brackets.

    >>> split_address("10.0.0.1:29500")
    ('10.0.0.1', 29500)
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigError(
            f"{key} is {text!r}, but it must be HOST:PORT\n  for example 10.0.0.1:29500"
        )
    return host, int(port)


class PartTransfer(NamedTuple):
    """A part that one rank sends to another."""

    part: int
    source: int
    target: int
