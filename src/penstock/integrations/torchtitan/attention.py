"""Token slices in torchtitan's attention: the keys and values of earlier slices are carried along.

torchtitan hands the argument `attention_masks` through to the innermost attention of every layer, untouched. For a
slice we hand a `Slice` through instead of a mask. The innermost attention then appends its keys and values to those of
the earlier slices, and attends with the mask of the slice, which also keeps packed documents apart. For whole sequences
it runs torchtitan's own code.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.common.attention import (
    FlexAttention,
    GQAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from penstock.models.slice import Slice

CAUSAL_WINDOW = (-1, 0)  # all tokens before, none after
MASKED = (FlexAttention.Config, VarlenAttention.Config)  # documents are kept apart


def why_unsliceable(config: Trainer.Config) -> str:
    """Why the sequences of a model cannot be cut into token slices; empty if they can."""
    model = config.model_spec.model
    owner = model._owner
    if owner is None or owner.get_attention_masks is not Decoder.get_attention_masks:
        return "it makes attention masks of its own"
    for number, layer in enumerate(model.layers):
        reason = _why_unsliceable_layer(layer)
        if reason:
            return f"layer {number} {reason}"
    if config.compile.enable and "model" in config.compile.components:
        return "--compile.enable compiles its layers for whole sequences"
    return ""


def _why_unsliceable_layer(layer: Any) -> str:
    if getattr(layer, "moe", None) is not None:
        return "has experts"
    attention = layer.attention
    if type(attention) is not GQAttention.Config:
        return f"has {type(attention).__qualname__}, not grouped-query attention"
    inner = attention.inner_attention
    if isinstance(inner, VarlenAttention.Config) and inner.window_size != CAUSAL_WINDOW:
        return "sees a window of the tokens before"
    if not isinstance(inner, (*MASKED, ScaledDotProductAttention.Config)):
        return f"has {type(inner).__qualname__}"
    return ""


def separates_documents(part: Any) -> bool:
    """Whether attention stays within the documents that `positions` marks by starting at 0 again."""
    attention = part.config.first_attention
    return attention is not None and isinstance(attention.inner_attention, MASKED)


def why_uncut_loss(loss: object, lengths: set[int]) -> str:
    """Why a loss cannot take slices of these lengths; empty if it can."""
    if not isinstance(loss, ChunkedLossWrapper):
        return ""
    chunks = loss.num_chunks
    odd = [length for length in sorted(lengths) if length % chunks]
    if not odd:
        return ""
    return (
        f"the loss cuts sequences into {chunks} chunks, but there is a slice of {odd[0]} tokens: "
        f"use slices of a multiple of {chunks} tokens, or another --loss.num_chunks"
    )


def slice_attention(part: Any) -> None:
    """Let the layers of a part take a `Slice` in the place of attention masks."""
    for layer in part.layers.values():
        inner = layer.attention.inner_attention
        inner.forward = _SliceableAttention(inner)


class _SliceableAttention:
    """The forward of an innermost attention, for whole sequences and for slices."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.whole = module.forward

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, **options: Any
    ) -> Tensor:
        if not isinstance(attention_masks, Slice):
            mixed: Tensor = self.whole(
                q, k, v, attention_masks=attention_masks, **options
            )
            return mixed
        return self.attend(q, k, v, attention_masks, **options)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        piece: Slice,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Mix the values of this slice and of all before it: (rows, tokens, heads, features)."""
        k = piece.extend(self.module, "keys", k, dim=1)
        v = piece.extend(self.module, "values", v, dim=1)
        mask = None if piece.causal else piece.mask(q.device, q.dtype)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return mixed.transpose(1, 2)
