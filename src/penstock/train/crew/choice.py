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
    if placement.device == "cuda":
        reasons += _reasons_against_gpus(config, placement)
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


def _reasons_against_gpus(config: Config, placement: Placement) -> list[str]:
    """Why workers with GPUs cannot go on without one of them. Over NCCL, with a GPU each, they can."""
    machine = placement.machine
    reasons = []
    if placement.shares_gpus and machine.workers_per_gpu > 1:
        reasons.append(
            "its workers share a GPU through MPS, where the end of one ends the work of all; "
            "a GPU for each, or run.device=cpu, would do"
        )
    elif placement.shares_gpus and not machine.nccl_shares_gpus:
        reasons.append(
            "its workers share a GPU and talk through its memory, which ends with them; "
            "a GPU for each, or run.device=cpu, would do"
        )
    if config.run.listen:
        reasons.append("run.listen connects workers on CPUs; run.device=cpu would do")
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
        safe = placement.device == "cpu" and not parts_without_replica(plan)
        return not reasons and (mirrored or safe)
    return wanted == "true"
