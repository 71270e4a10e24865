"""Causal attention over a whole sequence, or over a slice that also sees the slices before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.carry import Slice


def attend(
    owner: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    piece: Slice | None,
    grouped: bool = False,
) -> Tensor:
    """Mix values: (batch, heads, tokens, head width) to (batch, tokens, width).

    A slice appends its keys and values to those of the slices before it. There are then
    fewer queries than keys, and `is_causal` would align the queries with the first keys
    instead of the last. So the slice brings its own mask.
    """
    if piece is not None and piece.partial:
        k = piece.extend(owner, "keys", k)
        v = piece.extend(owner, "values", v)
    mask = None
    if piece is not None and not piece.causal:
        mask = piece.mask(q.device, q.dtype)
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )
    return mixed.transpose(1, 2).flatten(2)


def token_positions(x: Tensor, piece: Slice | None) -> Tensor:
    """Return the positions of the tokens of x, (batch, tokens, ...), in their sequence."""
    if piece is not None:
        return piece.positions(x.device)
    return torch.arange(x.shape[1], device=x.device)
