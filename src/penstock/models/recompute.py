"""Selective recomputation: the MLP of a layer runs again in the backward, so that its inner features need not be kept.

    kept without it    x, norm(x), gate, silu(gate), up, their product        about four times `inner` a token
    kept with it       x

A stage that is recomputed as a whole (`run.recompute`) runs everything twice and keeps only its input. This is the
middle way. The MLP sees each token by itself, so it does not matter whether a sequence comes in slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(call: Callable[[Tensor], Tensor], x: Tensor, wanted: bool) -> Tensor:
    """Return call(x); if wanted, keep only x of it for the backward."""
    if not wanted or not torch.is_grad_enabled():
        return call(x)
    y: Tensor = checkpoint(call, x, use_reentrant=False, preserve_rng_state=False)
    return y


def recompute_mlps(model: nn.Module) -> int:
    """Let all layers of one of our models recompute their MLPs; return how many can."""
    layers: list[Any] = list(model.modules())
    layers = [one for one in layers if hasattr(one, "recomputes_mlp")]
    for layer in layers:
        layer.recomputes_mlp = True
    return len(layers)
