"""How a run computes: its precision, and whether it can compile its stages and record its actions."""

from __future__ import annotations

from penstock.config.sections import Config
from penstock.config.values import AUTO


def reasons_against_compiling(config: Config) -> list[str]:
    """Return why the stages of a run cannot be compiled; empty if they can."""
    reasons = _changing_calls(config)
    mesh = config.mesh
    if mesh.size > 1:
        reasons.append(
            f"mesh.shard = {mesh.shard} and mesh.tensor = {mesh.tensor}: "
            "layers that are shared by processes are not compiled"
        )
    return reasons


def reasons_against_recording(config: Config) -> list[str]:
    """Return why the actions of a run cannot be recorded as CUDA graphs; empty if they can.

    A graph replays what is the same in every step, on one GPU.
    """
    reasons = _changing_calls(config)
    mesh = config.mesh
    if config.data.separate:
        reasons.append("data.separate = true: documents differ from step to step")
    elif config.data.apart:
        reasons.append("data.segments > 0: the padding differs from step to step")
    if mesh.size > 1:
        reasons.append(
            f"mesh.shard = {mesh.shard} and mesh.tensor = {mesh.tensor}: "
            "the processes of a mesh talk within an action"
        )
    if config.run.device == "cpu":
        reasons.append("run.device = cpu: a CPU has no graphs")
    return reasons


def _changing_calls(config: Config) -> list[str]:
    """Why the calls of a stage are not all alike, which compiling and recording both need."""
    reasons = []
    if config.drops:
        reasons.append("dropout, which depends on the step and the micro-batch")
    return reasons + [
        f"run.recompute_{block} = true: it runs again inside a backward"
        for block in config.run.recomputed_inside
    ]


def is_recording(config: Config, on_gpu: bool) -> bool:
    """Whether a run records its actions, if it computes on GPUs or not.

    `auto` records on GPUs, where it was measured to help, if nothing is in its way. Models
    that are not Penstock's own (model.weights, model.config) may read a number back from the
    GPU, which a recording cannot do.
    """
    if config.run.graphs == AUTO:
        own_model = not config.model.folder
        return on_gpu and own_model and not reasons_against_recording(config)
    return config.run.graphs == "true"


def precision_of(config: Config, on_gpu: bool) -> str:
    """Return the type in which a run computes, on GPUs that have bfloat16 or elsewhere."""
    if config.run.precision == AUTO:
        return "bfloat16" if on_gpu else "float32"
    return config.run.precision
