"""The parts of a model that this rank holds, cut out of torchtitan's whole model and made ready by torchtitan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torch import nn

from penstock.errors import RunError
from penstock.ir import Op, Schedule
from penstock.runtime import make_deferrable

PIPELINING = "torchtitan.distributed.pipeline_parallel"


def cut_parts(
    model: nn.Module,
    schedule: Schedule,
    rank: int,
    modules: Sequence[Sequence[str]],
    parallelize: Callable[[Any], Any],
) -> dict[int, nn.Module]:
    """Return the parts of this rank by their number.

    `modules` has the names of each part's modules. `parallelize` applies what torchtitan does besides the pipeline:
    FSDP, activation checkpointing, compiling.
    """
    split_module = getattr(import_module(PIPELINING), "_split_module", None)
    if split_module is None:
        raise RunError(
            f"this torchtitan cannot cut a model into parts: {PIPELINING} has no _split_module\n"
            "  pip install 'torchtitan==0.3.0'"
        )
    splits = any(action.op is Op.W for lane in schedule.lanes for action in lane)
    parts = {}
    for number in sorted(s.part for s in schedule.stages if s.rank == rank):
        part = split_module(model, list(modules[number]))
        if splits:
            # torchtitan wraps the forwards of layers, so ours must be in place before.
            make_deferrable(part)
        parts[number] = parallelize(part)
    return parts
