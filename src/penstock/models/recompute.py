"""Selective recomputation: attention or MLP of a layer runs again in the backward, so that less need be kept.

    kept without it    x, norm(x), q, k, v, their mixture │ x, norm(x), gate, silu(gate), up, their product
    kept with it       x                                  │ x

A stage that is recomputed as a whole (`run.recompute`) runs everything twice and keeps only its input. This is the
middle way. The MLP sees each token by itself, so it does not matter whether a sequence comes in slices. The attention
of a slice sees keys and values of earlier slices, which the carry keeps in any case; running again, it writes the same
numbers into the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.dropout import current_place, standing_at


def recomputed(call: Callable[[Tensor], Tensor], x: Tensor, wanted: bool) -> Tensor:
    """Return call(x); if wanted, keep only x of it for the backward."""
    if not wanted or not torch.is_grad_enabled():
        return call(x)
    place = current_place()

    def call_there(x: Tensor) -> Tensor:
        with standing_at(place):  # Other micro-batches may have run in between.
            return call(x)

    y: Tensor = checkpoint(call_there, x, use_reentrant=False, preserve_rng_state=False)
    return y


def recompute_inside(model: nn.Module, blocks: Iterable[str]) -> int:
    """Let all layers of one of our models recompute their "attention" or "mlp"; return how many layers can."""
    layers: list[Any] = list(model.modules())
    layers = [one for one in layers if hasattr(one, "recomputes_mlp")]
    for layer in layers:
        for block in blocks:
            setattr(layer, f"recomputes_{block}", True)
    return len(layers)
