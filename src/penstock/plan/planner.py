"""From a config to a plan: the schedule that it asks for, with the layers of each part.

schedule.name = plan.json, plan.csv   read the file; its shape replaces the config's
schedule.name = auto                  search for the fastest plan that fits (`penstock.plan.search`)
schedule.name = hanayo, ...           make the schedule of that name
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from penstock.config import (
    AUTO,
    FULL_AS_PLANNED,
    Config,
    ParallelConfig,
    PathsConfig,
    ScheduleConfig,
    check_config,
    is_plan_file,
)
from penstock.errors import ConfigError
from penstock.formats import read_plan, read_torch_csv
from penstock.ir import Plan, lower, verify
from penstock.ir.plan import Facts
from penstock.ir.schedule import stretch
from penstock.ir.sums import fitting_sums
from penstock.ir.verify_sums import verify_sums
from penstock.partition import even_partition
from penstock.plan.candidates import Candidate, candidate_plan, title
from penstock.plan.paths.rules import rules_from
from penstock.plan.search import Landscape, rival_facts
from penstock.plan.space import skipped_share
from penstock.schedules import make, read_name, shape_of, transform
from penstock.schedules.coverage import (
    count_pipelines,
    drop_empty_ranks,
    full_schedule,
    hold_every_part,
    ranks_with_stages,
    visits_all_parts,
)
from penstock.schedules.facts import FACTS
from penstock.schedules.skip import skipping_schedules, skips_of
from penstock.schedules.transforms import replicate
from penstock.shaped import write_shape

SKIPPING = "micro-batches leave out layers, which changes what is computed"
PATHS_NAME = "paths"  # the name of the plans of `penstock.plan.paths`
BOUND_HOLDS_FOR = "every plan that the search could have returned"
SIZE_KEYS = ("parallel.pp", "schedule.microbatches")


def plan_run(
    config: Config,
    layers: int,
    given: Collection[str] | None = None,
    plan_auto: Callable[[Config], Plan] | None = None,
) -> tuple[Config, Plan]:
    """Return the plan that a config asks for, for a model with `layers` layers.

    A plan brings its own ranks, micro-batches, mesh and shape; the returned config has them
    too. `given` names the values that the user wrote, such as "parallel.pp". One that
    contradicts a plan file is an error. Without `given`, every value that differs from its
    default counts as written. `plan_auto` makes the plan if schedule.name is auto.
    """
    shape = config.schedule
    if is_plan_file(shape.name):
        plan = _without_empty_ranks(_read_plan_file(Path(shape.kind)))
        _check_mesh(plan, config, given)
        config = _adopt(_shape_from_file(plan, config, given), plan)
        copies = 1  # The file has them all.
    elif shape.kind == AUTO:
        _refuse_unused(shape)
        assert plan_auto is not None, "auto needs a planner"
        plan = plan_auto(config)
        copies = plan.schedule.ranks // _ranks_of_a_copy(plan)
        config = _adopt(_with_sizes(config, plan, copies), plan)
        copies = 1
    else:
        plan = _named_plan(config)
        copies = config.parallel.dp_replicate
    plan = plan.map_schedules(hold_every_part)
    config, plan = _settle_paths(config, plan)
    plan = _replicate_plan(plan, copies)
    for microbatch in set(plan.schedule.microbatches):
        stretch(microbatch, config.data.seq_len)  # Raises if slices outnumber tokens.
    return config, _partition_plan(plan, config, layers)


def _with_sizes(config: Config, plan: Plan, copies: int) -> Config:
    """Return the config with the ranks, micro-batches and copies of a plan."""
    schedule = replace(
        config.schedule,
        microbatches=len(plan.schedule.microbatches) // copies,
    )
    parallel = replace(
        config.parallel,
        devices=0,
        pp=plan.schedule.ranks // copies,
        dp_replicate=copies,
    )
    return replace(config, schedule=schedule, parallel=parallel)


def _ranks_of_a_copy(plan: Plan) -> int:
    return plan.schedule.ranks // max(1, count_pipelines(plan.schedule))


def _adopt(config: Config, plan: Plan) -> Config:
    """Return the config with the mesh of a plan, unless the plan leaves it open, checked."""
    parallel = config.parallel
    if plan.tensor:
        parallel = replace(parallel, tp=plan.tensor, dp_shard=plan.shard)
    return check_config(replace(config, parallel=parallel), counted=True)


def _written(
    section: str, values: ScheduleConfig | ParallelConfig, given: Collection[str] | None
) -> dict[str, Any]:
    """The values of a section that the user wrote; without `given`, those that differ from their defaults."""
    default = type(values)()
    written = {}
    for item in fields(values):
        value = getattr(values, item.name)
        is_written = value != getattr(default, item.name)
        if given is not None:
            is_written = f"{section}.{item.name}" in given
        if is_written:
            written[item.name] = value
    return written


def _check_mesh(plan: Plan, config: Config, given: Collection[str] | None) -> None:
    """Raise if the user wrote a mesh that contradicts the one of a plan file."""
    planned = {"tp": plan.tensor, "dp_shard": plan.shard}
    faults = [
        f"parallel.{key} = {value}, but {config.schedule.name} has {planned[key]}"
        for key, value in _written("parallel", config.parallel, given).items()
        if planned.get(key) and value != planned[key]
    ]
    if faults:
        faults.append("  a plan file has its own mesh: leave these values out")
        raise ConfigError("\n".join(faults))


def _named_plan(config: Config) -> Plan:
    shape = config.schedule
    paths = config.paths
    ranks = config.parallel.pp
    family, own = read_name(shape.own_name)
    if paths.share:
        own = {"skips": skips_of(ranks, paths.share), **own}
    sizes = {"ranks": ranks, "microbatches": shape.microbatches, **own}
    words = tuple(item for item in own.items() if item[0] != "split")
    plan = Plan(make(family, **sizes), title(family, words))
    if paths.rotate < 2 and not paths.swaps and not paths.keep:
        return plan
    own_words = shape_of(family)
    drawn = skipping_schedules(
        ranks,
        shape.microbatches,
        sizes.get("skips"),
        max(paths.rotate, 1),
        paths.swaps,
        paths.keep,
        config.run.seed,
    )
    first, *others = [transform(schedule, own_words, sizes) for schedule in drawn]
    return replace(plan, schedule=first, rotation=tuple(others))


# ---------------------------------------------------------------- paths that change from step to step
def _settle_paths(config: Config, plan: Plan) -> tuple[Config, Plan]:
    """Give a plan the schedules that schedule.name asks for, and the config the numbers it left to the plan.

    All schedules are verified here, before any worker starts.
    """
    paths = config.paths
    if visits_all_parts(plan.schedule) and not plan.rotation:
        verify_sums(plan.schedule, plan.sums)
        if paths != PathsConfig() and config.schedule.kind != AUTO:
            raise ConfigError(
                f"schedule.name = {config.schedule.name} says something about lab paths that leave out parts, and "
                f"{config.schedule.kind} leaves out none\n  leave it out, or name another plan"
            )
        return config, plan
    sets = 1 + len(plan.rotation)
    if paths.rotate > sets:
        raise ConfigError(
            f"rotate = {paths.rotate}, but {config.schedule.kind} has {sets} "
            f"set{'s' if sets > 1 else ''} of paths\n"
            "  plan more with `penstock lab paths --rotate`, or leave rotate out to take all it has"
        )
    rotate = paths.rotate or sets
    full = paths.full
    if full == FULL_AS_PLANNED:
        rules = plan.facts.get("rules")
        full = rules_from(rules.split()).full if isinstance(rules, str) else 0
    plan = replace(plan, rotation=plan.rotation[: rotate - 1])
    if full or paths.warmup:
        plan = replace(plan, full=plan.full or full_schedule(plan.schedule))
    if len(plan.schedules) > 1:
        config = _without_recordings(config)
    for schedule in plan.schedules:
        verify(lower(schedule))
        verify_sums(schedule, plan.sums)
    settled = {**config.schedule.path_shape, "rotate": rotate, "full": full}
    text = write_shape("", settled).lstrip(":")
    own = config.schedule.own_name
    name = f"{own}{',' if ':' in own else ':'}{text}"
    return replace(config, schedule=replace(config.schedule, name=name)), plan


def _without_recordings(config: Config) -> Config:
    """Switch recordings off, since every set of paths would need its own; refuse them if the user has asked."""
    if config.run.cuda_graphs == "true":
        raise ConfigError(
            "run.cuda_graphs = true does not go with paths that change from step to step: every set of "
            "paths would need recordings of its own\n"
            "  set run.cuda_graphs=false, or rotate=1, full=0 and warmup=0 in schedule.name"
        )
    return replace(config, run=replace(config.run, cuda_graphs="false"))


def _replicate_plan(plan: Plan, copies: int) -> Plan:
    if copies == 1:
        return plan
    plan = plan.map_schedules(lambda schedule: replicate(schedule, copies))
    joint = "," if ":" in plan.name else ":"
    return replace(plan, name=f"{plan.name}{joint}copies={copies}")


def _has_own_head(plan: Plan) -> bool:
    """Whether the last part of a plan is the head alone: it has no layers unless the plan says so."""
    family = plan.name.partition(" ")[0]
    if family == PATHS_NAME:
        # The last part of a wave is the way up through the first part, with the head.
        return plan.facts.get("waves") is not True
    return family in FACTS and FACTS[family].own_head


def _partition_plan(plan: Plan, config: Config, layers: int) -> Plan:
    """Add the number of layers of each part to a plan."""
    parts = plan.schedule.parts
    given = config.schedule.partition or plan.partition
    if given and (len(given) != parts or sum(given) != layers):
        raise ConfigError(
            f"the partition {list(given)} is for {len(given)} parts and {sum(given)} "
            f"layers, but there are {parts} parts and {layers} layers"
        )
    if given:
        return replace(plan, partition=tuple(given))
    head = (0,) if _has_own_head(plan) else ()
    with_layers = parts - len(head)
    if with_layers > layers:
        counted = f"{with_layers} parts and a head" if head else f"{parts} parts"
        raise ConfigError(
            f"{plan.name} on {plan.schedule.ranks} ranks has {counted}, but the model "
            f"has only {layers} layers: set model.layers={with_layers}, or fewer "
            "parallel.pp, waves or chunks"
        )
    return replace(plan, partition=(*even_partition(layers, with_layers), *head))


# ---------------------------------------------------------------- schedule.name = auto
def unused_settings(shape: ScheduleConfig) -> list[str]:
    """Return the settings that a search for a plan ignores, because it chooses them itself."""
    return [] if shape.own_name == AUTO else [f"schedule.name = {shape.name}"]


def _refuse_unused(shape: ScheduleConfig) -> None:
    """Raise if the config fixes a shape, because `auto` would ignore it."""
    if shape.own_name != AUTO:
        raise ConfigError(
            f"auto picks the shape, so {shape.own_name} would change nothing\n"
            "  name a schedule in schedule.name (`penstock draw`), or leave the rest out"
        )


def chosen_plan(landscape: Landscape, assumptions: Facts = ()) -> Plan:
    """Return the best plan of a search, with all its copies and the reasons for it."""
    best = landscape.best
    division = best.division
    facts: Facts = (
        *assumptions,
        ("copies", division.copies),
        ("rows", division.rows),
        ("lower_bound", landscape.bound),
        ("gap", landscape.gap if landscape.bound else None),
        ("bound_holds_for", BOUND_HOLDS_FOR),
        ("cut_short", landscape.interrupted),
        *skip_facts(best),
        *rival_facts(landscape),
    )
    plan = candidate_plan(best, facts)
    name = title(best.name, best.shape, division.copies)
    schedule = plan.schedule
    if division.copies > 1:
        schedule = replicate(schedule, division.copies, division.side_by_side)
    return replace(
        plan, schedule=schedule, name=name, tensor=division.tensor, shard=division.shard
    )


def skip_facts(candidate: Candidate) -> Facts:
    """Return how much of the model each micro-batch leaves out; nothing if all visit every part."""
    share = skipped_share(candidate.schedule, candidate.partition)
    if not share:
        return ()
    return (("skipped_share", share), ("skipping", SKIPPING))


# ---------------------------------------------------------------- a plan file
def _read_plan_file(file: Path) -> Plan:
    if file.suffix == ".csv":
        return Plan(read_torch_csv(file), file.stem)
    return read_plan(file)


def _without_empty_ranks(plan: Plan) -> Plan:
    """Renumber the ranks of a plan that leaves out nodes; its facts then name the node of each rank."""
    ranks = ranks_with_stages(plan.schedule)
    if len(ranks) == plan.schedule.ranks:
        return plan
    smaller = plan.map_schedules(drop_empty_ranks)
    sums = fitting_sums(smaller.schedule, plan.sums, ranks)
    nodes = " ".join(map(str, ranks))
    return replace(smaller, why=(*plan.why, ("nodes", nodes)), sums=sums)


def _shape_from_file(
    plan: Plan, config: Config, given: Collection[str] | None
) -> Config:
    """A config with the shape of a plan file, after a check that the user's own values agree with it.

    A value of 0 or an empty list leaves the choice to the file.
    """
    shape = config.schedule
    if shape.own_name != shape.kind:
        raise ConfigError(
            f"schedule.name = {shape.name}: a plan file has its own shape; leave {shape.own_name.partition(':')[2]} out"
        )
    actual = _shape_of(plan)
    written = {
        f"{section}.{key}": value
        for section, values in (("schedule", shape), ("parallel", config.parallel))
        for key, value in _written(section, values, given).items()
    }
    stated = {key: written[key] for key in actual if written.get(key)}
    copies = stated.get("parallel.dp_replicate", 1)
    faults = []
    for key, value in stated.items():
        total = value * copies if key in SIZE_KEYS else value
        if actual[key] in ((), total) or (key, value) == ("parallel.dp_replicate", 1):
            continue
        factor = f" x parallel.dp_replicate = {copies}" if total != value else ""
        faults.append(
            f"{key} = {_config_text(value)}{factor}, but {shape.name} has "
            f"{_config_text(actual[key])}"
        )
    if faults:
        faults.append(
            "  a plan file has its own shape: leave these values out, or name another plan"
        )
        raise ConfigError("\n".join(faults))
    partition = () if plan.partition else stated.get("schedule.partition", ())
    schedule = ScheduleConfig(
        shape.name,
        microbatches=len(plan.schedule.microbatches),
        partition=partition,
    )
    parallel = replace(
        config.parallel, devices=0, pp=plan.schedule.ranks, dp_replicate=1
    )
    return replace(config, schedule=schedule, parallel=parallel)


def _shape_of(plan: Plan) -> dict[str, object]:
    """The value of each setting of the shape in a plan, over all copies."""
    schedule = plan.schedule
    return {
        "parallel.pp": schedule.ranks,
        "schedule.microbatches": len(schedule.microbatches),
        "parallel.dp_replicate": count_pipelines(schedule),
        "schedule.partition": plan.partition,
    }


def _config_text(value: object) -> str:
    """A value as a config file shows it."""
    return str(list(value)) if isinstance(value, tuple) else str(value).lower()
