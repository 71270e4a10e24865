"""Attention over packed documents: document by document, or with a mask."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from penstock.models import attention, document_starts
from penstock.models.attention import attend
from penstock.models.slice import Carry

HEADS = 4
WIDTH = 8


def run(lengths, cuts, monkeypatch, by_document, kv_heads=HEADS):
    """Outputs and gradients of attention over packed rows, slice by slice."""
    monkeypatch.setattr(attention, "pays_off", lambda rows, keys: by_document)
    starts = torch.stack([document_starts(torch.tensor(each)) for each in lengths])
    rows, tokens = starts.shape
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    q = draw(rows, HEADS, tokens, WIDTH).requires_grad_()
    k = draw(rows, kv_heads, tokens, WIDTH).requires_grad_()
    v = draw(rows, kv_heads, tokens, WIDTH).requires_grad_()
    gradient = draw(rows, tokens, HEADS * WIDTH)
    carry = Carry(tokens, starts)
    owner = torch.nn.Identity()
    done = []
    for begin, end in pairwise(cuts):
        piece = carry.open(begin, end)
        parts = (x[:, :, begin:end] for x in (q, k, v))
        done.append((piece, attend(owner, *parts, piece, kv_heads != HEADS)))
    for piece, y in reversed(done):
        carry.back(piece)
        y.backward(gradient[:, piece.begin : piece.end])
        carry.close(piece)
    outputs = torch.cat([y for _, y in done], 1)
    return [outputs.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("cuts", [(0, 24), (0, 7, 20, 24), (0, 12, 24)])
@pytest.mark.parametrize(
    "lengths",
    [[[24]], [[5, 12, 7]], [[5, 12, 7], [5, 12, 7]], [[1, 22, 1], [24], [12, 12]]],
)
def test_document_by_document_is_what_the_mask_gives(
    lengths, cuts, kv_heads, monkeypatch
):
    found = run(lengths, cuts, monkeypatch, True, kv_heads)
    expected = run(lengths, cuts, monkeypatch, False, kv_heads)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cuts", [(0, 1024), (0, 300, 1024)])
def test_no_query_meets_the_keys_of_another_document(cuts, monkeypatch):
    keys = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **options):
        keys.append(k.shape[-2])
        return plain(q, k, v, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    starts = document_starts(torch.tensor([256] * 4))[None]
    carry = Carry(1024, starts)
    for begin, end in pairwise(cuts):
        x = torch.randn(1, HEADS, end - begin, WIDTH)
        attend(torch.nn.Identity(), x, x, x, carry.open(begin, end))
    assert max(keys) == 256
    assert len(keys) == 4 + len(cuts) - 2  # a cut document has two parts


def test_short_documents_share_one_call():
    """The calls would take longer than the pairs that they save."""
    starts = document_starts(torch.tensor([4] * 8))[None]
    piece = Carry(32, starts).open(0, 32)
    assert len(piece.documents()[0]) == 8
    assert not attention.pays_off(piece.documents(), 32)
