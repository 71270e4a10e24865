"""Messages in another type than the stages compute with: what travels, and what the rounding changes."""

from __future__ import annotations

import copy

import pytest
import torch
from test_replay import Again

from penstock import make
from penstock.models import split, token_loss
from penstock.runtime.comm.thread import ThreadComm
from pipelines import data, gradients_of, layers_of, llama, piped, worst

pytestmark = pytest.mark.numerics


class Rounded(torch.autograd.Function):
    """Rounds a hidden state, and its gradient on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(torch.bfloat16).to(gradient.dtype)


def rounded_between_ranks(schedule, model, batch):
    """The gradients of the unsplit model whose hidden states are rounded between ranks."""
    model = copy.deepcopy(model)
    parts = split(model, layers_of(schedule))
    for number, labels in enumerate(batch.labels):
        x, rank = batch.inputs[number], None
        for stage in schedule.microbatches[number].path:
            if rank not in (None, schedule.stages[stage].rank):
                x = Rounded.apply(x)
            x = parts[schedule.stages[stage].part](x)
            rank = schedule.stages[stage].rank
        (token_loss(x, labels) / batch.valid).backward()
    return gradients_of(model)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_messages_in_bfloat16_round_what_goes_between_ranks_and_nothing_else(
    name, recorded, monkeypatch
):
    """Parts on one rank hand each other the whole numbers; only the bytes between ranks are halved."""
    sent = set()
    send = ThreadComm.send

    def note(self, tensor, target):
        sent.add(tensor.dtype)
        return send(self, tensor, target)

    monkeypatch.setattr(ThreadComm, "send", note)
    schedule = make(name, ranks=3, microbatches=4)
    whole, batch = llama(schedule.parts), data(4)
    expected = rounded_between_ranks(schedule, whole, batch)
    ours = piped(
        schedule,
        whole,
        [batch],
        each=lambda rank: {"tape": Again()} if recorded else {},
        messages=torch.bfloat16,
    )
    assert sent == {torch.bfloat16}
    assert worst(ours, expected) < 1e-12
    plain = piped(schedule, whole, [batch])
    assert worst(plain, expected) > 1e-6
    assert ours.losses[0] == pytest.approx(plain.losses[0], rel=1e-2)
