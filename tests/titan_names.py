"""What torchtitan 0.3.0 calls and torch up to 2.13 lacks, filled in for the tests.

torchtitan 0.3.0 is written for a torch that is newer than the ones Penstock supports. Import this before torchtitan.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import fsdp, pipelining
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.pipelining import schedules
from torch.nn.attention import flex_attention, varlen


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Only to be imported: torchtitan makes none with the backend `partial_dtensor`."""

    shard: Any = None
    replicate: Any = None


@dataclass
class ShardPlacementResult:
    """Only to be imported: torchtitan makes one for models with experts."""

    placement: Any
    mesh_info: Any


def fill_missing() -> list[str]:
    """Fill in what this torch lacks; return the names."""
    found = [
        _fill(fsdp, "DataParallelMeshDims", DataParallelMeshDims),  # torch 2.11
        _fill(_fsdp_common, "ShardPlacementResult", ShardPlacementResult),  # torch 2.11
        _drop_argument(pipelining, "PipelineStage", "get_mesh"),  # torch 2.11
        _drop_argument(varlen, "varlen_attn", "num_splits"),  # torch 2.11
        # torch 2.11 always does what torchtitan asks for.
        _drop_argument(flex_attention, "create_block_mask", "separate_full_blocks"),
        _take_microbatches(schedules.PipelineScheduleSingle),
        _take_microbatches(schedules.PipelineScheduleMulti),
    ]
    return [name for name in found if name]


def _fill(module: Any, name: str, value: Any) -> str:
    if hasattr(module, name):
        return ""
    setattr(module, name, value)
    return f"{module.__name__}.{name}"


def _drop_argument(module: Any, name: str, argument: str) -> str:
    """Let a function ignore an argument that it does not know yet."""
    original = getattr(module, name)
    if argument in inspect.signature(original).parameters:
        return ""

    @functools.wraps(original, updated=())
    def call(*args: Any, **keywords: Any) -> Any:
        keywords.pop(argument, None)
        return original(*args, **keywords)

    setattr(module, name, call)
    return f"{module.__name__}.{name}({argument})"


def _take_microbatches(kind: Any) -> str:
    """Let `step` and `eval` of torch's schedules take micro-batches, as torchtitan's trainer passes them."""
    original = kind.step
    if "arg_mbs" in inspect.signature(original).parameters:
        return ""

    @functools.wraps(original)
    def step(self: Any, *args: Any, kwarg_mbs: Any = None, **others: Any) -> Any:
        if kwarg_mbs is None:
            return original(self, *args, **others)
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        # torch splits a whole batch, so that ranks without tokens have empty arguments.
        arg_mbs = others.pop("arg_mbs", None) or [()] * len(kwarg_mbs)
        others.pop("target", None)
        return _run(self, arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, **others)

    kind.step = step
    return f"{kind.__name__}.step(arg_mbs)"


def _run(schedule: Any, *, loss_kwargs: Any = None, **arguments: Any) -> Any:
    """Call `_step_microbatches`, with the arguments of the loss if this torch takes them."""
    run: Callable[..., Any] = schedule._step_microbatches
    if "loss_kwargs" in inspect.signature(run).parameters:
        return run(loss_kwargs=loss_kwargs, **arguments)
    loss = schedule._loss_fn
    schedule._loss_fn = functools.partial(loss, **(loss_kwargs or {}))
    try:
        return run(**arguments)
    finally:
        schedule._loss_fn = loss


FILLED = fill_missing()
