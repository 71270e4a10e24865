"""Whether a run is trained by a crew that survives losses (`run.elastic`)."""

from __future__ import annotations

from penstock.config import AUTO, Config
from penstock.errors import ConfigError
from penstock.ir.plan import Plan
from penstock.runtime.wire.door import split_address
from penstock.train.crew.succession import parts_without_replica
from penstock.train.placement import Placement


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
    if config.mesh.size > 1:
        reasons.append("mesh.shard and mesh.tensor need all processes of a rank")
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
    wanted = config.run.elastic
    mirrored = config.run.mirror == "true"
    reasons = reasons_against_crew(config, plan, placement)
    if config.run.listen:
        split_address(config.run.listen, "run.listen")
        if reasons:
            raise ConfigError(
                f"run.listen lets workers join, but this run cannot change its workers: {reasons[0]}"
            )
        return True
    for key, value in (("elastic", wanted), ("mirror", config.run.mirror)):
        if value == "true" and reasons:
            raise ConfigError(
                f"run.{key} = true, but this run cannot go on without a worker: "
                f"{reasons[0]}"
            )
    if mirrored and wanted == "false":
        raise ConfigError(
            "run.mirror = true, but run.elastic = false: mirrors help only runs "
            "that go on without a lost worker; remove one of the two"
        )
    if wanted == AUTO:
        return not reasons and (mirrored or not parts_without_replica(plan))
    return wanted == "true"
