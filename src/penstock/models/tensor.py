"""Tensor parallelism with torch's DTensor: each process holds some heads and features, and all hold x.

    tokens ─► embedding: some words ─(sum)─► x
    x ─► query, key, value: some heads ─► attention ─► output ─(sum)─► x
    x ─► gate, up: some features ─────────────────────► down ───(sum)─► x           one sum forward, one sum backward
    x ─► norm ─► head: some words ─(gather)─► logits

Norms are small, so every process has them whole. Parameters keep their names and, as DTensors, their shapes.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from penstock.families import check_family_shares, undividable, words_of_share
from penstock.models.decoder import DecoderConfig
from penstock.models.family import AnyModelConfig
from penstock.models.split import Part

ROW_SHARDED = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.qkv",
    "mlp.gate",
    "mlp.up",
)
COLUMN_SHARDED = ("attention.output", "mlp.down")
REPLICATED_INPUT = ("attention", "mlp")


class ReplicateInput(ParallelStyle):
    """Replicates the input x of a module.

    Several matrices read x. Their gradients for x are summed once for the module, not
    once for each matrix.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            placements = (Replicate(),)
            x = DTensor.from_local(args[0], device_mesh, placements, run_check=False)
            return (x, *args[1:])

        module.register_forward_pre_hook(enter)
        return module


class ShardWords(ParallelStyle):
    """Gives each process some words of an embedding; it returns zeros for the others.

    Torch's own style does the same in the forward, but its backward computes the
    gradient of all words in every process.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        weight = distribute_tensor(
            module.weight, device_mesh, [Shard(0)], src_data_rank=None
        )
        module.weight = nn.Parameter(weight)
        words_each = words_of_share(module.num_embeddings, device_mesh.size())
        first = device_mesh.get_local_rank() * words_each

        def forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
            assert isinstance(self.weight, DTensor)
            rows = self.weight.to_local()
            local = tokens - first
            others = (local < 0) | (local >= len(rows))
            vectors = F.embedding(local.masked_fill(others, 0), rows)
            own = vectors.masked_fill(others[..., None], 0.0)
            partial_sum = DTensor.from_local(own, device_mesh, (Partial(),))
            return partial_sum.redistribute(placements=(Replicate(),)).to_local()

        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        return module


def share_layers(part: Part, mesh: DeviceMesh) -> None:
    """Reduce a part to the share of this process. Its parameters may be on `meta`."""
    styles = {}
    for path, module in part.named_modules():
        style = _style(path, module)
        if style is not None:
            styles[path] = style
    parallelize_module(part, mesh, styles, src_data_rank=None)
    part.tie()


def _style(path: str, module: nn.Module) -> ParallelStyle | None:
    """Return how to divide a module; None if every process has it whole."""
    if path in ("embed", "embed.tokens") and isinstance(module, nn.Embedding):
        return ShardWords()
    if path == "head.output":
        return ColwiseParallel(output_layouts=Replicate())
    inner = ".".join(path.split(".")[2:]) if path.startswith("layers.") else ""
    if inner in REPLICATED_INPUT:
        return ReplicateInput()
    if inner in ROW_SHARDED:
        return ColwiseParallel()
    if inner in COLUMN_SHARDED:
        return RowwiseParallel()
    return None


def largest_share(piece: nn.Module, path: str, tensor: int) -> int:
    """Return how many parameters of a piece the fullest of `tensor` processes holds.

    A piece is the embedding, a layer or the head of a model.
    """
    count = 0
    for inner, module in piece.named_modules():
        style = _style(f"{path}.{inner}".removesuffix("."), module)
        for leaf, parameter in module.named_parameters(recurse=False):
            by_column = isinstance(style, RowwiseParallel)
            if style is None or (by_column and leaf == "bias"):
                count += parameter.numel()
                continue
            length = parameter.shape[1 if by_column else 0]
            count += parameter.numel() // length * words_of_share(length, tensor)
    return count


def check_shares(sizes: AnyModelConfig, tensor: int) -> None:
    """Refuse a number of shares that would divide a head or leave a process without words."""
    if not isinstance(sizes, DecoderConfig):
        check_family_shares(sizes, tensor)
    elif tensor > 1:
        raise undividable(f"{sizes.architecture} of transformers", tensor)
