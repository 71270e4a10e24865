"""Local workers; the layers on rank 1 wrongly look at later tokens."""

from __future__ import annotations

import os

from torch import Tensor

from penstock.models.llama import LlamaLayer
from penstock.train import launch as entry
from penstock.train.job import Verdict

start = entry.run_worker


def leaking(layer: LlamaLayer, x: Tensor, *others: object) -> Tensor:
    return x + x.mean(1, keepdim=True) + layer.mlp(layer.mlp_norm(x))


def rank(folder: str, resume: bool) -> Verdict:
    """Run a worker as the launcher does."""
    if os.environ["RANK"] == "1":
        LlamaLayer.forward = leaking
    return start(folder, resume)
