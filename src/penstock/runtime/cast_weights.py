"""The weights of linear layers in the type of autocast, cast once in a step.

Autocast casts a float32 weight for every micro-batch, in the forward and again in the backward. The weights change
only between steps, so one cast is enough:

    step     weights ──cast──► copies      F0  F1  B0  F2  B1 ...  all read the copies
    update   weights change                                        the next step casts again

The copies take as much memory as the weights have in that type: 2 bytes for each number in bfloat16, beside 16 for the
weight, its gradient and the state of AdamW. They stay where they are, so recorded actions find them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from penstock.runtime.backward import deferrable_layers
from penstock.runtime.dtensor_share import local_share
from penstock.runtime.torch_internals import copy_all


class CastWeights:
    """The copies of some modules' weights. They are made by the first `refresh`."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self.dtype = dtype
        weights: dict[nn.Parameter, None] = {}
        for module in modules:
            for layer in deferrable_layers(module):
                weight = layer.weight
                if isinstance(weight, nn.Parameter) and weight.dtype != dtype:
                    weights[weight] = None
        self.weights = list(weights)
        self.copies: dict[int, Tensor] = {}  # by id of the weight

    def refresh(self) -> None:
        """Cast the weights as they are now."""
        if not self.copies:
            for weight in self.weights:
                self.copies[id(weight)] = torch.empty_like(
                    weight, dtype=self.dtype, requires_grad=False
                )
        if self.weights:
            with torch.no_grad():
                copy_all(list(self.copies.values()), self.weights)

    def copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The copy of a weight; None if it has none of this type."""
        return self.copies.get(id(weight)) if dtype == self.dtype else None


def cast_weights(
    modules: Iterable[nn.Module], autocast: torch.dtype | None
) -> CastWeights | None:
    """The weights of a rank's modules for autocast; None without it, or if processes share their weights."""
    modules = list(modules)
    if autocast is None:
        return None
    for module in modules:
        sharded = isinstance(module, FSDPModule)
        if sharded or any(local_share(p) is not p for p in module.parameters()):
            return None
    return CastWeights(modules, autocast)
