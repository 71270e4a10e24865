"""Weights that several processes shard between steps with torch's FSDP2: gathered and summed once per step.

    rank 1, shard 0 │ ▄   F0 gathers │ ▄▀  F1 B0 B1  sum │ ▄           each runs the whole lane of the rank, on
    rank 1, shard 1 │  ▀  F2         │ ▄▀  F3 B2 B3      │  ▀          its own micro-batches

FSDP would gather and sum around every forward and backward. A pipeline has many of them, and a split backward adds to
the gradients outside of autograd. Here a part is therefore summed once, when its last action on this rank is done.
Gathers and sums need memory for whole layers once per step, which is given back (`penstock.runtime.process.malloc`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from penstock.ir.schedule import Schedule
from penstock.ir.sums import completion, weight_actions
from penstock.runtime.backward import accumulate
from penstock.runtime.dtensor_share import local_share
from penstock.runtime.gradients import Tied
from penstock.runtime.process.malloc import (
    SHARDED_KEPT_BYTES,
    TRANSIENT_KEPT_BYTES,
    keep_freed_memory,
    return_freed_memory,
)
from penstock.runtime.torch_internals import (
    finish_sharded_backward,
    ignore_fsdp_view_warning,
    sums_in_other_type,
    widen_sharded_gradients,
)


def shard_layers(part: nn.Module, layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Leave this process its share of each layer of a part, and of the rest of the part."""
    ignore_fsdp_view_warning()
    for module in (*layers, part):
        sharded: FSDPModule = fully_shard(
            module, mesh=mesh, reshard_after_forward=False
        )
        # A sum, not a mean: losses are divided by the valid tokens of all processes already.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # One hook runs before FSDP's own, which gathers, and one after it.
        module.register_forward_pre_hook(_before_gather, prepend=True)
        module.register_forward_pre_hook(_after_gather)


def _before_gather(*_: object) -> None:
    keep_freed_memory(TRANSIENT_KEPT_BYTES)


def _after_gather(*_: object) -> None:
    keep_freed_memory(SHARDED_KEPT_BYTES)


class Shards:
    """The sharded parts of one rank. Without any, every method does nothing."""

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        rank: int,
        tied: Mapping[str, Tied] | None = None,
    ) -> None:
        self.parts: dict[int, FSDPModule] = {}  # by their last action on this rank
        self.all: list[FSDPModule] = []  # parts and their layers
        # Parts that compute in a narrow type and sum in a wide one, by each W of theirs.
        self.narrow: dict[int, FSDPModule] = {}
        first_modules: dict[int, nn.Module] = {}  # by part
        for stage, module in modules.items():
            first_modules.setdefault(schedule.stages[stage].part, module)
        for part, module in sorted(first_modules.items()):
            if isinstance(module, FSDPModule):
                last, _ = completion(schedule, (part,), rank)
                self.parts[last] = module
                if sums_in_other_type(module):
                    for action in weight_actions(schedule, part, rank):
                        self.narrow[action] = module
                self.all += [m for m in module.modules() if isinstance(m, FSDPModule)]
        self.twins: list[tuple[nn.Parameter, nn.Parameter]] = []
        for tie in (tied or {}).values():
            if tie.parameter is not None:
                self.twins += [(tie.parameter, twin) for twin in tie.twins]

    def begin(self) -> None:
        """Begin a step. The first forward of each layer will gather its weights, which then stay."""
        with torch.no_grad():
            for first, twin in self.twins:
                local_share(twin).copy_(local_share(first))
        for part in self.parts.values():
            _set_last_backward(part, False)

    def after(self, action: int) -> None:
        """If an action was the last of a part, sum the part's gradients and drop the gathered weights.

        FSDP widens gradients in its hooks of autograd, which see nothing of a W.
        """
        narrow = self.narrow.get(action)
        if narrow is not None:
            widen_sharded_gradients(narrow)
        part = self.parts.get(action)
        if part is None:
            return
        _set_last_backward(part, True)
        with return_freed_memory():
            finish_sharded_backward(part)
        for first, twin in self.twins:
            if twin.grad is not None:
                accumulate(first, twin.grad)
                twin.grad = None

    def finish(self) -> None:
        """Drop all weights that are still gathered: after an evaluation, all of them."""
        for module in self.all:
            module.reshard()


def _set_last_backward(part: FSDPModule, last: bool) -> None:
    part.set_is_last_backward(last)
    part.set_requires_gradient_sync(last)
    part.set_reshard_after_backward(last)
