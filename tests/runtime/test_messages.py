"""Messages in another type than the stages compute with: what travels, and what the rounding changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from again_tape import Again
from penstock import lower, make
from penstock.ir.action import BACKWARD
from penstock.ir.lane import lane_turns
from penstock.models import split, token_loss
from penstock.runtime import Executor, batch_of, run_threads
from penstock.runtime.comm.thread import ThreadComm
from penstock.runtime.executor import RunOptions
from penstock.runtime.passed_values import Feedback, quantize, restore
from pipelines import data, gradients_of, layers_of, llama, piped, worst

pytestmark = pytest.mark.numerics


def rounded(x, dtype):
    """What arrives of a message."""
    if dtype is torch.int8:
        return restore(quantize(x), x.dtype)
    return x.to(dtype).to(x.dtype)


class Rounded(torch.autograd.Function):
    """Rounds a hidden state, and its gradient on the way back."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return rounded(x, dtype)

    @staticmethod
    def backward(ctx, gradient):
        return rounded(gradient, ctx.dtype), None


def rounded_between_ranks(schedule, model, batch, dtype):
    """The gradients of the unsplit model whose hidden states are rounded between ranks."""
    model = copy.deepcopy(model)
    parts = split(model, layers_of(schedule))
    for number, labels in enumerate(batch.labels):
        x, rank = batch.inputs[number], None
        for stage in schedule.microbatches[number].path:
            if rank not in (None, schedule.stages[stage].rank):
                x = Rounded.apply(x, dtype)
            x = parts[schedule.stages[stage].part](x)
            rank = schedule.stages[stage].rank
        (token_loss(x, labels) / batch.valid).backward()
    return gradients_of(model)


@pytest.mark.parametrize(
    ("name", "recorded", "dtype"),
    [
        ("1f1b", False, torch.bfloat16),
        ("1f1b", True, torch.bfloat16),
        ("zb-v", False, torch.bfloat16),
        ("zb-v", True, torch.bfloat16),
        ("1f1b", True, torch.int8),
        ("zb-v", False, torch.int8),
    ],
)
def test_small_messages_round_what_goes_between_ranks_and_nothing_else(
    name, recorded, dtype, monkeypatch
):
    """Parts on one rank hand each other the whole numbers; only the bytes between ranks are fewer."""
    sent = set()
    send = ThreadComm.send

    def note(self, tensor, target):
        sent.add(tensor.dtype)
        return send(self, tensor, target)

    monkeypatch.setattr(ThreadComm, "send", note)
    schedule = make(name, ranks=3, microbatches=4)
    whole, batch = llama(schedule.parts), data(4)
    expected = rounded_between_ranks(schedule, whole, batch, dtype)
    ours = piped(
        schedule,
        whole,
        [batch],
        each=lambda rank: {"tape": Again()} if recorded else {},
        options=RunOptions(messages=dtype),
    )
    assert sent == {dtype}
    assert worst(ours, expected) < 1e-12
    plain = piped(schedule, whole, [batch])
    assert worst(plain, expected) > 1e-6
    assert ours.losses[0] == pytest.approx(plain.losses[0], rel=1e-2)


# ---------------------------------------------------------------- int8
def test_each_row_is_rounded_with_its_own_scale_and_carries_it():
    x = torch.tensor([[0.3, -1.27, 0.02], [3e5, 0.0, -1.0], [0.0, 0.0, 0.0]])
    packed = quantize(x)
    assert packed.dtype is torch.int8
    assert packed.shape == (3, 3 + 4)
    assert packed[0, :3].tolist() == [30, -127, 2]
    error = (restore(packed, torch.float32) - x).abs().amax(-1)
    assert (error <= x.abs().amax(-1) / 127 / 2 * 1.001).all()
    assert restore(packed, torch.float32)[2].tolist() == [0.0, 0.0, 0.0]
    spoiled = torch.tensor([[1.0, float("nan")], [1.0, float("inf")]])
    assert not restore(quantize(spoiled), torch.float32).isfinite().any()


def test_feedback_makes_rounding_errors_cancel_over_the_steps():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(5, 64, generator=draw)
    feedback = Feedback()
    steps = 50
    total = sum(restore(feedback.quantize(x, (3, 0)), x.dtype) for _ in range(steps))
    alone = sum(restore(quantize(x), x.dtype) for _ in range(steps))
    quantum = x.abs().amax(-1, keepdim=True) / 127
    assert ((total - steps * x).abs() <= 1.5 * quantum).all()
    assert ((alone - steps * x).abs() > 10 * quantum).any()
    feedback.quantize(x * float("nan"), (3, 0))  # One bad step does not spoil the next.
    assert restore(feedback.quantize(x, (3, 0)), x.dtype).isfinite().all()
    longer = torch.ones(5, 70)  # Other shapes have other errors.
    assert torch.equal(restore(feedback.quantize(longer, (3, 0)), x.dtype), longer)


def test_a_rank_keeps_the_errors_of_the_gradients_that_it_sends_and_of_nothing_else():
    schedule = make("1f1b", ranks=3, microbatches=4)
    whole, batch = llama(schedule.parts), data(4)
    program = lower(schedule)

    def work(comm):
        parts = split(copy.deepcopy(whole), layers_of(schedule))
        executor = Executor(
            program,
            {comm.rank: parts[comm.rank]},
            comm,
            token_loss,
            options=RunOptions(messages=torch.int8),
        )
        executor.evaluate(batch)
        assert not executor.feedback.lost
        executor.step(batch)
        return set(executor.feedback.lost)

    kept = run_threads(3, work)
    turns = [lane_turns(program, rank) for rank in range(3)]
    gradients = [
        {
            (turn.step.value, 0)
            for turn in lane
            if turn.step and turn.step.do == BACKWARD
        }
        for lane in turns
    ]
    assert kept == [set(), *gradients[1:]]
    assert len(kept[1]) == 4


class Fork(nn.Linear):
    """Passes two tensors on."""

    def forward(self, x):
        y = super().forward(x)
        return y, y.sin()


class Join(nn.Linear):
    """Takes both."""

    def forward(self, x, other):
        return super().forward(x + other)


def test_each_of_several_tensors_has_rounding_errors_of_its_own():
    schedule = make("1f1b", ranks=2, microbatches=1)
    x = torch.ones(2, 3, 4)

    def work(comm):
        stage = (Fork, Join)[comm.rank](4, 4)
        loss = nn.MSELoss(reduction="sum")
        executor = Executor(
            lower(schedule),
            {comm.rank: stage},
            comm,
            loss,
            options=RunOptions(messages=torch.int8),
        )
        executor.step(batch_of([x], [x]))
        return {place for _, place in executor.feedback.lost}

    assert run_threads(2, work) == [set(), {0, 1}]
