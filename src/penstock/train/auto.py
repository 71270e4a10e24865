"""schedule.name = auto: measures the model on this machine, then searches for the fastest plan.

workload ──► measure ──► profiles for several numbers of rows ──► search ──► landscape, plan
                                                                                 │
                                     the profile of the plan's own rows is the forecast's
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from penstock.config import Config, ModelConfig
from penstock.cost import RowProfiles
from penstock.cost.profile import enlarge, tile_of
from penstock.ir import Plan
from penstock.plan.planner import chosen_plan
from penstock.plan.pricing import ProfilePricing
from penstock.plan.search import Landscape, SearchProgress, search
from penstock.plan.space import Limits
from penstock.plan.workload import (
    MIN_GRANULARITY,
    USABLE_SHARE,
    Workload,
    cells_of,
    workload_of,
)
from penstock.runtime.process.launch import under_launcher
from penstock.train.capacity import memory_pools
from penstock.train.launch import model_sizes
from penstock.train.own_models import limits_of
from penstock.train.placement import Placement, decide_placement
from penstock.train.profile import (
    ProfileRequest,
    affordable,
    measure_rows_of,
    profile_rows,
    request_of,
)
from penstock.view.numbers import write_size

MAX_MEASURED_ROWS = 3


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """A plan, the profiles that it was made with, and everything that was compared with it."""

    plan: Plan
    profiles: RowProfiles
    landscape: Landscape


def machine_workload(
    config: Config,
    layers: int,
    given: Collection[str] | None = None,
    devices: int = 0,
    memory: float | None = None,
    granularity: int | None = None,
    uneven: bool = False,
    model: ModelConfig | None = None,
) -> tuple[Workload, Placement]:
    """Return the workload of a config on this machine, with its memory and processors.

    If a number of devices is given, the plan is for that many devices of their own, and
    only `memory` limits it. `model` has the sizes of the model, if they are not those of the
    config.
    """
    workload = workload_of(config, layers, given, devices)
    placement = decide_placement(config, workload.devices)
    processors = None
    allowed = devices
    if not devices and is_better_alone(workload, placement):
        allowed = 1
        placement = decide_placement(config, allowed)
    if not devices:
        memory = memory or memory_of_process(config, placement)
        if placement.processors < placement.neighbours:
            processors = placement.processors
    workload = workload_of(
        config,
        layers,
        given,
        allowed,
        memory,
        processors,
        granularity or max(MIN_GRANULARITY, tile_of(placement.device)),
        exact=under_launcher(),
        uneven=uneven,
        model=model,
        on_gpu=placement.device == "cuda",
    )
    return workload, placement


def is_better_alone(workload: Workload, placement: Placement) -> bool:
    """Whether one process does the work of all that a workload allows, only sooner.

    That is so if they take turns on one GPU: it computes for one of them at a time, it has
    one memory for all of them, and it loses time whenever it goes from one to another. What
    the user has asked for and needs several processes is an exception.
    """
    config = workload.config
    assert config is not None, "only a config has a place to run"
    run = config.run
    fixed = workload.fixed
    wants_several = (
        max(fixed.ranks, fixed.copies, config.mesh.size) > 1
        or "true" in (run.elastic, run.mirror)
        or bool(run.listen or run.workers or config.schedule.skip)
        or under_launcher()
    )
    takes_turns = placement.device == "cuda" and placement.processors == 1
    return takes_turns and not wants_several


def memory_of_process(config: Config, placement: Placement) -> float | None:
    """Return the bytes that a plan may use in each process; None if that is not checked."""
    if not config.run.check_memory:
        return None
    pools = memory_pools(placement, config.mesh.size)
    return USABLE_SHARE * min(pool.bytes / max(1, len(pool.ranks)) for pool in pools)


def measure_workload(
    workload: Workload,
    placement: Placement,
    watch: Callable[[str], None] = lambda text: None,
    whole: bool = False,
) -> RowProfiles:
    """Measure the model of a workload, with the numbers of rows that a plan may choose.

    Numbers of rows that take too long are left out: `RowProfiles` scales them from the others. If one row is already
    too much, so are some of its tokens. With `whole`, no slices are measured. Nothing is sliced on one device either.
    """
    config = workload.config
    assert config is not None, "only the model of a config can be measured"
    request = request_of(config, placement, 1, quick=True)
    request, counts = affordable(request, quick_rows(workload, request))
    if whole or workload.devices == 1:
        request = replace(request, where=((request.tokens, 0),))
    if under_launcher():  # Only one of the launched processes plans; the others wait.
        profiles = measure_rows_of(None, request, counts, watch)
    else:
        measured = profile_rows(request, counts, placement.measurers, watch)
        assert measured is not None, "only torchrun returns None"
        profiles = measured
    tokens = config.data.tokens
    if request.tokens == tokens:
        return profiles
    enlarged = [enlarge(each, each.rows, tokens) for each in profiles.measured]
    return RowProfiles(tuple(enlarged))


def rows_to_measure(workload: Workload) -> list[int]:
    """Return the smallest and the largest number of rows of a cell, and one between them."""
    return _few(_rows_of(workload))


def quick_rows(workload: Workload, request: ProfileRequest) -> list[int]:
    """Return such numbers of rows whose passes do not take too long.

    Larger micro-batches are scaled from the largest one that is measured. A GPU is the more
    efficient the larger they are, so it should be as large as possible.
    """
    _, rows = affordable(request, _rows_of(workload))
    return _few(rows)


def _rows_of(workload: Workload) -> list[int]:
    return sorted({cell.rows for cell in cells_of(workload)})


def _few(rows: list[int]) -> list[int]:
    if len(rows) <= MAX_MEASURED_ROWS:
        return rows
    return [rows[0], rows[len(rows) // 2], rows[-1]]


def model_limits(config: Config, limits: Limits) -> Limits:
    """Return the limits without slices, if the model of a config cannot run slice by slice."""
    return limits_of(model_sizes(config), limits)


def workload_limits(workload: Workload, limits: Limits) -> Limits:
    """Return the limits without slices, if there is only one device.

    Slices let one rank work on a sequence while another one has the rest of it. Alone, a
    rank computes them one after the other, which takes longer than the whole sequence.
    """
    return replace(limits, slices=1) if workload.devices == 1 else limits


def plan_workload(
    workload: Workload,
    profiles: RowProfiles,
    limits: Limits | None = None,
    watch: Callable[[SearchProgress], None] = lambda progress: None,
    source: str = "measured",
) -> AutoPlan:
    """Search for the fastest plan of a workload. `source` tells where the profiles are from."""
    if limits is None:
        limits = Limits()
        if workload.config is not None:
            skip = workload.config.schedule.skip
            limits = model_limits(workload.config, Limits(skip=skip))
    limits = workload_limits(workload, limits)
    pricing = ProfilePricing(workload, profiles.at, limits)
    landscape = search(workload, pricing, limits, watch, write_size)
    plan = chosen_plan(landscape, (("profile", source),))
    return AutoPlan(plan, profiles, landscape)
