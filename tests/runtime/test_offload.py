"""What forwards keep goes to the host and comes back, and nothing else changes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from penstock import REGISTRY, Pipeline, UnitCost, make, simulate
from penstock.errors import FileError, ScheduleError, ShapeError
from penstock.formats import dump_torch_csv
from penstock.ir import MicroBatch, Schedule, Stage, parse_action
from penstock.ir.program import lower
from penstock.runtime import Executor
from penstock.runtime.actions import SavedTensors
from penstock.runtime.comm.thread import Hub, ThreadComm, run_threads
from pipelines import TOKENS, VOCAB, llama


def words(seed: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (8, TOKENS + 1), generator=dice)


def trained(name: str, recompute: bool = False, **shape: int):
    """The loss and the gradients of each rank."""
    models = [llama(8) for _ in range(2)]
    schedule = make(name, ranks=2, microbatches=4, **shape)

    def work(comm):
        pipeline = Pipeline(models[comm.rank], schedule, comm=comm, recompute=recompute)
        loss = pipeline.step(words(3), words(4)).loss
        return loss, {key: one.grad for key, one in pipeline.named_parameters()}

    return run_threads(2, work)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1f1b", {}),
        ("gpipe", {"slices": 2, "split": 1}),
        ("hanayo", {"waves": 2}),
        ("zb-v", {}),
        ("gpipe", {"recompute": True}),
    ],
)
def test_saved_tensors_that_were_away_give_the_same_gradients(name, shape):
    before = trained(name, **shape)
    after = trained(name, offload=1, **shape)
    for (loss, gradients), (same_loss, same) in zip(before, after, strict=True):
        assert loss == same_loss
        assert gradients.keys() == same.keys()
        assert all(torch.equal(one, same[key]) for key, one in gradients.items())


def test_an_offload_frees_what_only_autograd_holds():
    """Weights, the input and the output stay, because others hold them as well."""
    x = torch.ones(4, requires_grad=True)
    weight = nn.Parameter(torch.ones(4))
    inner = [x.detach() * 2]
    saved = SavedTensors([x, weight])
    with saved.saving():
        y = ((inner[0] * weight).exp() * x).tanh()
    kept = weakref.ref(inner.pop().untyped_storage())
    assert len(saved.storages) == 3  # the doubled x, its exp, and the output
    saved.leave([y])
    gc.collect()
    assert kept() is None
    assert len(saved.away) == 2
    saved.come_back(x.device)
    assert not saved.away
    y.sum().backward()
    plain = [one.detach().clone().requires_grad_() for one in (x, weight)]
    ((2 * plain[0].detach() * plain[1]).exp() * plain[0]).tanh().sum().backward()
    assert torch.equal(x.grad, plain[0].grad)
    assert torch.equal(weight.grad, plain[1].grad)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_schedule_with_offloads_holds_less_and_takes_their_time(name):
    plain = make(name, ranks=2, microbatches=8)
    moved = make(name, ranks=2, microbatches=8, offload=1)
    added = len(moved.table) - len(plain.table)
    assert added > 0
    before, after = (simulate(one, UnitCost(copy=0.125)) for one in (plain, moved))
    peaks = [max(map(one.peak_bytes, range(2))) for one in (before, after)]
    assert peaks[1] <= peaks[0]
    assert after.makespan >= before.makespan
    free = simulate(moved, UnitCost())
    assert free.makespan == simulate(plain, UnitCost()).makespan


def test_gpipe_with_offloads_holds_two_micro_batches():
    timeline = simulate(make("gpipe", ranks=2, microbatches=6, offload=1), UnitCost())
    assert [timeline.peak_bytes(rank) for rank in range(2)] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("lane", "fault"),
    [
        ("0F0 0O0 0B0", "0O0 has no 0R0: what it moves away never comes back"),
        ("0F0 0R0 0B0", "0R0 has no 0O0: nothing was moved away"),
        ("0F0 0O0 0O0 0R0 0B0", "0O0 occurs twice"),
    ],
)
def test_what_leaves_comes_back_once(lane, fault):
    actions = tuple(map(parse_action, lane.split()))
    with pytest.raises(ScheduleError) as error:
        Schedule((Stage(0, 0),), (MicroBatch((0,)),), (actions,))
    assert fault in str(error.value)


def test_what_cannot_hold_an_offload_refuses_it():
    schedule = make("gpipe", ranks=1, microbatches=4, offload=1)
    with pytest.raises(FileError, match="0O0 has the op offload"):
        dump_torch_csv(schedule)
    with pytest.raises(ShapeError, match="cannot be recorded"):
        Executor(
            lower(schedule),
            {0: nn.Linear(2, 2)},
            ThreadComm(Hub(1), 0),
            nn.CrossEntropyLoss(reduction="sum"),
            tape=object(),
        )
