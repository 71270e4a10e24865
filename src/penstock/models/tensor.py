"""Layers over several processes at once, by torch's DTensor: each holds some heads and some features, all hold x.

    tokens ─► embedding: some words ─(sum)─► x
    x ─► query, key, value: some heads ─► attention ─► output ─(sum)─► x
    x ─► gate, up: some features ─────────────────────► down ───(sum)─► x           one sum there, one sum back
    x ─► norm ─► head: some words ─(gather)─► logits

Norms are small and alike everywhere. Parameters keep their names and, as DTensors, their shapes.
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

from penstock.errors import ShapeError
from penstock.models.gpt import GPTConfig
from penstock.models.llama import LlamaConfig
from penstock.models.split import Part

ROW_SHARED = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.qkv",
    "mlp.gate",
    "mlp.up",
)
COLUMN_SHARED = ("attention.output", "mlp.down")
DOORS = ("attention", "mlp")


class Door(ParallelStyle):
    """Where x comes in: several layers take it, and their gradients for it are summed once, not once a layer."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (
                DTensor.from_local(
                    args[0], device_mesh, (Replicate(),), run_check=False
                ),
                *args[1:],
            )

        module.register_forward_pre_hook(enter)
        return module


class Words(ParallelStyle):
    """An embedding of which each holds some words, and gives zeros for the others'.

    Torch's own style does the same forward, but makes the gradient of all words everywhere.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        module.weight = nn.Parameter(
            distribute_tensor(
                module.weight, device_mesh, [Shard(0)], src_data_rank=None
            )
        )
        first = device_mesh.get_local_rank() * _share(
            module.num_embeddings, device_mesh.size()
        )

        def forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
            assert isinstance(self.weight, DTensor)
            rows = self.weight.to_local()
            places = tokens - first
            others = (places < 0) | (places >= len(rows))
            mine = F.embedding(places.masked_fill(others, 0), rows).masked_fill(
                others[..., None], 0.0
            )
            shares = DTensor.from_local(mine, device_mesh, (Partial(),))
            return shares.redistribute(placements=(Replicate(),)).to_local()

        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
        return module


def _share(words: int, shares: int) -> int:
    """Words of each share but the last, as DTensor cuts them."""
    return -(-words // shares)


def share_layers(part: Part, mesh: DeviceMesh) -> None:
    """Leaves this process its share of a part; parameters may still be without memory."""
    styles = {
        path: style
        for path, module in part.named_modules()
        if (style := _style(path, module)) is not None
    }
    parallelize_module(part, mesh, styles, src_data_rank=None)
    part.tie()


def _style(path: str, module: nn.Module) -> ParallelStyle | None:
    if path in ("embed", "embed.tokens") and isinstance(module, nn.Embedding):
        return Words()
    if path == "head.output":
        return ColwiseParallel(output_layouts=Replicate())
    inner = ".".join(path.split(".")[2:]) if path.startswith("layers.") else ""
    if inner in DOORS:
        return Door()
    if inner in ROW_SHARED:
        return ColwiseParallel()
    return RowwiseParallel() if inner in COLUMN_SHARED else None


def largest_share(piece: nn.Module, path: str, tensor: int) -> int:
    """Numbers that the fullest of so many processes holds of a piece of a model: its embedding, a layer, its head."""
    found = 0
    for inner, module in piece.named_modules():
        style = _style(f"{path}.{inner}".removesuffix("."), module)
        for leaf, parameter in module.named_parameters(recurse=False):
            whole = style is None or (
                isinstance(style, RowwiseParallel) and leaf == "bias"
            )
            cut = 1 if isinstance(style, RowwiseParallel) else 0  # dimension
            found += (
                parameter.numel()
                if whole
                else parameter.numel()
                // parameter.shape[cut]
                * _share(parameter.shape[cut], tensor)
            )
    return found


def check_shares(sizes: LlamaConfig | GPTConfig, tensor: int) -> None:
    """Refuses to cut a model into so many shares if a head or a feature would be cut through."""
    counts = {"heads": sizes.heads, "inner": sizes.inner}
    if isinstance(sizes, LlamaConfig):
        counts["kv_heads"] = sizes.kv_heads
    for name, count in counts.items():
        if count % tensor:
            fits = [
                n for n in range(1, tensor) if all(c % n == 0 for c in counts.values())
            ]
            raise ShapeError(
                f"mesh.tensor = {tensor} does not divide {name} = {count} of the model; {fits[-1]} does"
            )
    if (tensor - 1) * _share(sizes.vocab, tensor) >= sizes.vocab:
        raise ShapeError(
            f"mesh.tensor = {tensor} leaves a process without any of the {sizes.vocab} words"
        )
