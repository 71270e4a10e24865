"""Causal attention over a whole sequence, or over a slice that also sees the slices before it.

Packed documents do not see each other. Where a mask would hide much, attention runs document by document instead:

    keys    a a a b b c          a mask computes all 36 pairs and hides 26 of them,
    a       ■ . .                the documents one by one have at most 9 + 4 + 1
    a       ■ ■ .
    a       ■ ■ ■                a document that began in an earlier slice brings its earlier keys along
    b             ■ .
    b             ■ ■
    c                 ■
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.models.slice import DocumentPart, Slice

# Pairs of queries and keys that take about as long as one more call.
PAIRS_PER_CALL = 4096


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
    if piece is not None and q.device.type == "cpu":
        # On a GPU, finding the documents would make the host wait for it.
        rows = piece.documents()
        if rows and pays_off(rows, piece.end):
            mixed = _attend_to_documents(q, k, v, rows, grouped)
            return mixed.transpose(1, 2).flatten(2)
    mask = None
    if piece is not None and not piece.causal:
        mask = piece.mask(q.device, q.dtype)
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )
    return mixed.transpose(1, 2).flatten(2)


def pays_off(rows: Sequence[Sequence[DocumentPart]], keys: int) -> bool:
    """Whether attention document by document saves more than its calls take."""
    tokens = rows[0][-1].end - rows[0][0].begin
    masked_pairs = len(rows) * tokens * keys
    pairs = 0
    calls = 0
    for parts in rows:
        calls += len(parts)
        for part in parts:
            queries = part.end - part.begin
            pairs += queries * (part.end - part.start)
            if part.begin == part.start:  # the kernel for causal attention skips half
                pairs -= queries * (queries - 1) // 2
    if all(parts == rows[0] for parts in rows):
        calls = len(rows[0])
    return masked_pairs - pairs > PAIRS_PER_CALL * calls


def _attend_to_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Sequence[Sequence[DocumentPart]],
    grouped: bool,
) -> Tensor:
    """Mix the values of each document by itself: (batch, heads, tokens, head width)."""
    if all(parts == rows[0] for parts in rows):
        return _attend_to_row(q, k, v, rows[0], grouped)
    mixed = []
    ones = [1] * len(rows)
    every_row = zip(*(x.split_with_sizes(ones) for x in (q, k, v)), rows, strict=True)
    for q_row, k_row, v_row, parts in every_row:
        mixed.append(_attend_to_row(q_row, k_row, v_row, parts, grouped))
    return torch.cat(mixed)


def _attend_to_row(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[DocumentPart], grouped: bool
) -> Tensor:
    """Mix the values of rows that all have the same documents."""
    first = parts[0].start  # keys before it belong to documents that ended
    queries = [part.end - part.begin for part in parts]
    keys = [first, *(part.end - part.start for part in parts)]
    mixed = []
    every_part = zip(
        q.split_with_sizes(queries, -2),
        k.split_with_sizes(keys, -2)[1:],
        v.split_with_sizes(keys, -2)[1:],
        strict=True,
    )
    for q_part, k_part, v_part in every_part:
        mask = None
        if k_part.shape[-2] > q_part.shape[-2]:
            mask = _continued_mask(q_part, k_part)
        part = F.scaled_dot_product_attention(
            q_part,
            k_part,
            v_part,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=grouped,
        )
        mixed.append(part)
    return torch.cat(mixed, -2)


def _continued_mask(q: Tensor, k: Tensor) -> Tensor:
    """The mask of a document that began in an earlier slice: its queries are the last of its keys."""
    queries = q.shape[-2]
    keys = k.shape[-2]
    hidden = q.new_full((queries, keys), -torch.inf)
    return hidden.triu(keys - queries + 1)


def token_positions(x: Tensor, piece: Slice | None) -> Tensor:
    """Return the positions of the tokens of x, (batch, tokens, ...), in their sequence."""
    if piece is not None:
        return piece.positions(x.device)
    return torch.arange(x.shape[1], device=x.device)
