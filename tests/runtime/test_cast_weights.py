"""Tests of autocast in the executor: weights are cast once a step, and products add up in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from penstock import lower, make
from penstock.models import split, token_loss
from penstock.runtime import (
    ChunkedLoss,
    Executor,
    batch_of,
    run_threads,
)
from penstock.runtime.backward import add_product, cast_weights
from pipelines import VOCAB, llama

MICROBATCHES = 3
# Two bfloat16 results differ by a few units in the last of 8 bits.
TOLERANCE = 2e-2


def data(seed: int):
    draw = torch.Generator().manual_seed(seed)
    words = [torch.randint(0, VOCAB, (2, 12), generator=draw) for _ in range(3)]
    return batch_of(words, words)


def train(stage: nn.Module, name: str, loss=token_loss) -> tuple[Executor, list[float]]:
    """Three steps with an update after each, which the next step must see."""
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)

    def work(comm):
        executor = Executor(
            lower(make(name, ranks=1, microbatches=MICROBATCHES)),
            {0: stage},
            comm,
            loss,
            autocast=torch.bfloat16,
        )
        losses = []
        for seed in range(3):
            losses.append(executor.step(data(seed)).loss)
            optimizer.step()
            optimizer.zero_grad()
        return executor, losses

    return run_threads(1, work, patience=300)[0]


def train_plainly(model: nn.Module) -> list[float]:
    """The same by a loop over micro-batches, in which autocast casts as it likes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for seed in range(3):
        batch = data(seed)
        total = 0.0
        for x, y in zip(batch.inputs, batch.labels, strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = token_loss(model(x), y) / batch.valid
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("1f1b", token_loss),
        ("zb-h1", token_loss),
        # Few words: all of the weight's gradient at once. Chunks of 5 of 24 tokens.
        ("1f1b", ChunkedLoss(token_loss, 5, min_bytes=0)),
        ("zb-h1", ChunkedLoss(token_loss, 5, min_bytes=0)),
    ],
)
def test_steps_under_autocast_train_like_a_plain_loop(name, loss):
    model = llama(2).float()
    twin = copy.deepcopy(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    executor, losses = train(split(model, [2])[0], name, loss)
    expected = train_plainly(twin)
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    for old, ours, theirs in zip(
        before, model.parameters(), twin.parameters(), strict=True
    ):
        moved = theirs.detach() - old
        assert float(moved.norm()) > 0
        assert (
            float((ours.detach() - theirs.detach()).norm() / moved.norm()) < TOLERANCE
        )
    assert executor.casts is not None
    assert len(executor.casts.copies) == 7 * 2 + 1  # all linear layers and the head


def test_a_step_casts_each_weight_once_and_copies_never_move():
    layer = nn.Linear(4, 4)
    module = nn.Sequential(layer, nn.LayerNorm(4), layer)
    casts = cast_weights([module, layer], torch.bfloat16)
    assert casts is not None
    assert casts.copy_of(layer.weight, torch.bfloat16) is None  # nothing before a step
    casts.refresh()
    (copied,) = casts.copies.values()
    with torch.no_grad():
        layer.weight += 1
    casts.refresh()
    assert casts.copy_of(layer.weight, torch.bfloat16) is copied
    assert torch.equal(copied, layer.weight.detach().bfloat16())
    assert casts.copy_of(layer.weight, torch.float16) is None
    assert cast_weights([module], None) is None


def test_weights_of_the_type_of_autocast_need_no_copies():
    casts = cast_weights([nn.Linear(4, 4).bfloat16()], torch.bfloat16)
    assert casts is not None
    casts.refresh()
    assert not casts.copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_add_to_a_total_of_any_type(dtype):
    a, b = torch.randn(3, 5).bfloat16(), torch.randn(5, 4).bfloat16()
    total = torch.ones(3, 4, dtype=dtype)
    add_product(total, a, b)
    expected = 1 + a.double() @ b.double()
    assert float((total.double() - expected).norm() / expected.norm()) < TOLERANCE
