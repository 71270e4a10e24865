"""Causal attention, of a whole sequence or of a slice of one that sees what came before it."""

from __future__ import annotations

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
    """Mixes values: (batch, heads, tokens, head width) to (batch, tokens, width).

    A slice puts its keys and values after those of the slices before it. Then there are fewer queries than keys, and
    `is_causal` would align them to the first keys instead of the last: so the slice says what is seen.
    """
    if piece is not None and piece.partial:
        k, v = piece.extend(owner, "keys", k), piece.extend(owner, "values", v)
    mask = None if piece is None or piece.causal else piece.mask(q.device, q.dtype)
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )
    return mixed.transpose(1, 2).flatten(2)
