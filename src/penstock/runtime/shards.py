"""Weights that several processes share between steps, by torch's FSDP2: gathered once a step, gradients summed once.

    rank 1, shard 0 │ ▄   F0 gathers │ ▄▀  F1 B0 B1  sum │ ▄           each runs the whole lane of the rank, on
    rank 1, shard 1 │  ▀  F2         │ ▄▀  F3 B2 B3      │  ▀          micro-batches of its own

FSDP would gather and sum around every forward and backward. A pipeline has many of them, and a split backward adds to
the weights outside of autograd; so here the sum of a part is made when its last action on this rank is done. Gathers
and sums take memory for whole layers, once a step: it is given back (`penstock.runtime.process.malloc`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from penstock.ir.schedule import Schedule
from penstock.runtime.backward import accumulate
from penstock.runtime.dtensor_share import local_share
from penstock.runtime.gradients import Tied, completion
from penstock.runtime.process.malloc import ONCE, USED, keep_freed_memory, taken_once
from penstock.runtime.torch_internals import (
    finish_sharded_backward,
    ignore_fsdp_view_warning,
)


def shard_layers(part: nn.Module, layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Leaves this process its share of each layer of a part, and of the rest of it."""
    ignore_fsdp_view_warning()
    for module in (*layers, part):
        made: FSDPModule = fully_shard(module, mesh=mesh, reshard_after_forward=False)
        made.set_gradient_divide_factor(
            1.0
        )  # a sum: losses are divided by the tokens of all already
        made.set_force_sum_reduction_for_comms(True)
        module.register_forward_pre_hook(
            _gathers, prepend=True
        )  # before FSDP's own, and
        module.register_forward_pre_hook(_has_gathered)  # after it


def _gathers(*_: object) -> None:
    keep_freed_memory(ONCE)


def _has_gathered(*_: object) -> None:
    keep_freed_memory(USED)


class Shards:
    """One rank's parts that are shared so; none, and nothing is done."""

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        rank: int,
        tied: Mapping[str, Tied] | None = None,
    ) -> None:
        self.parts: dict[int, FSDPModule] = {}  # by the last action of this rank on it
        self.all: list[FSDPModule] = []
        for part in sorted({schedule.stages[stage].part for stage in modules}):
            module = next(
                m for stage, m in modules.items() if schedule.stages[stage].part == part
            )
            if isinstance(module, FSDPModule):
                self.parts[completion(schedule, (part,), rank)[0]] = module
                self.all += [
                    inner for inner in module.modules() if isinstance(inner, FSDPModule)
                ]
        self.twins = [
            (one.parameter, twin)
            for one in (tied or {}).values()
            for twin in one.twins
            if one.parameter is not None
        ]

    def begin(self) -> None:
        """A new pass: each layer is gathered by its first forward, and stays."""
        with torch.no_grad():
            for first, twin in self.twins:
                local_share(twin).copy_(local_share(first))
        for part in self.parts.values():
            _last(part, False)

    def after(self, number: int) -> None:
        """An action is done: if it was the last of a part, sums the part's gradients and drops its gathered weights."""
        part = self.parts.get(number)
        if part is not None:
            _last(part, True)
            with taken_once():
                finish_sharded_backward(part)
            for first, twin in self.twins:
                if twin.grad is not None:
                    accumulate(first, twin.grad)
                    twin.grad = None

    def finish(self) -> None:
        """Drops what is gathered still: all of it after an evaluation."""
        for module in self.all:
            module.reshard()


def _last(part: FSDPModule, last: bool) -> None:
    part.set_is_last_backward(last)
    part.set_requires_gradient_sync(last)
    part.set_reshard_after_backward(last)
