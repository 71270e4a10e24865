"""Any schedule on real tensors: gradients and losses are those of the model in one piece."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from penstock import REGISTRY, UnitCost, lower, make, needs, simulate
from penstock.errors import ShapeError
from penstock.ir.timeline import largest_differences
from penstock.models import Llama, LlamaConfig, split
from penstock.runtime import (
    Executor,
    Ledger,
    Mean,
    Tied,
    batch_of,
    cut_batch,
    make_deferrable,
    run_threads,
)
from penstock.runtime.actions import ComputedActions
from penstock.runtime.backward import record_in
from penstock.runtime.comm.thread import ThreadComm
from penstock.runtime.executor import RunOptions
from penstock.runtime.gradients import Visits
from penstock.runtime.replicas import Replicas
from penstock.runtime.step import Walk
from penstock.schedules.transforms import split_backward
from pipelines import data, gpt, layers_of, llama, piped, unsplit, worst

pytestmark = pytest.mark.numerics  # run once more with other kernels by .ci/run

MODELS = {"llama": llama, "gpt": gpt}


def shape_for(name: str, ranks: int, microbatches: int) -> dict[str, int]:
    extra = {"slices": 1} if name in ("terapipe", "seq1f1b") else {}
    return {"ranks": ranks, "microbatches": microbatches, **extra}


@pytest.mark.parametrize(("ranks", "model"), [(1, "gpt"), (2, "llama"), (4, "gpt")])
@pytest.mark.parametrize("name", REGISTRY)
def test_gradients_and_loss_are_those_of_the_unsplit_model(name, ranks, model):
    if name == "chimera" and ranks == 1:
        return  # refused: an even number of ranks
    for microbatches in (1, 5) if ranks == 4 else (3,):
        schedule = make(name, **shape_for(name, ranks, microbatches))
        whole = MODELS[model](sum(layers_of(schedule)))
        batch = data(microbatches)
        (loss,), gradients = unsplit(schedule, whole, [batch])
        ours = piped(schedule, whole, [batch])
        assert worst(ours, gradients) < 1e-10
        assert [losses[0] for losses in ours.losses] == pytest.approx(
            [loss] * ranks, abs=1e-12
        )
        assert ours.evaluated == pytest.approx([loss] * ranks, abs=1e-12)


@pytest.mark.parametrize(
    "name",
    ["gpipe", "1f1b", "interleaved", "hanayo", "zb-h1", "interleaved-zb", "zb-v"],
)
def test_where_the_order_of_sums_is_the_same_gradients_are_bit_for_bit(name):
    schedule = make(name, ranks=4, microbatches=6)
    whole, batch = llama(schedule.parts), data(6)
    # W adds the product in one step: another rounding.
    split_ones = name in ("zb-h1", "interleaved-zb", "zb-v")
    difference = worst(
        piped(schedule, whole, [batch]), unsplit(schedule, whole, [batch])[1]
    )
    assert difference <= (1e-15 if split_ones else 0.0)


COPIED = ("chimera", "1f1b")
TIED = ("1f1b", "interleaved-zb", "chimera", "zb-v")


@pytest.mark.parametrize(
    ("name", "shape", "model", "steps"),
    [
        ("hanayo", {"waves": 2, "copies": 2, "split": True}, llama, 1),
        *((name, {"microbatches": 3, "copies": 2}, gpt, 3) for name in COPIED),
        *((name, {"ranks": 4, "microbatches": 4}, llama, 1) for name in TIED),
        *((name, {"ranks": 4, "microbatches": 4}, gpt, 1) for name in TIED),
    ],
)
def test_replicas_and_tied_embeddings_sum_their_gradients_once(
    name, shape, model, steps
):
    """Over several steps, gradients add up."""
    schedule = make(name, **{"ranks": 2, "microbatches": 2, **shape})
    tied = "waves" not in shape
    whole, count = model(schedule.parts, tied=tied), len(schedule.microbatches)
    batches = [data(count, seed=seed) for seed in range(steps)]
    expected = unsplit(schedule, whole, batches)[1]
    assert worst(piped(schedule, whole, batches), expected) < 1e-12


@pytest.mark.parametrize("channels", [None, 1])
def test_sums_wait_for_the_last_message_of_their_rank_if_all_share_a_channel(
    monkeypatch, channels
):
    summing: set[int] = set()  # ranks that have begun their sums
    sent: list[int] = []  # the rank of each message that leaves meanwhile
    send, start, finish = ThreadComm.send, Replicas.start, Replicas.finish

    def note_send(comm, tensor, target):
        if comm.rank in summing:
            sent.append(comm.rank)
        return send(comm, tensor, target)

    def note_start(replicas, shared):
        summing.add(replicas.comm.rank)
        start(replicas, shared)

    def note_finish(replicas):
        finish(replicas)
        summing.remove(replicas.comm.rank)

    monkeypatch.setattr(ThreadComm, "send", note_send)
    monkeypatch.setattr(Replicas, "start", note_start)
    monkeypatch.setattr(Replicas, "finish", note_finish)
    monkeypatch.setattr(ThreadComm, "channels", property(lambda comm: channels))
    schedule = make("chimera", ranks=4, microbatches=4)
    whole, batch = gpt(schedule.parts, tied=True), data(4)
    ours = piped(schedule, whole, [batch])
    assert worst(ours, unsplit(schedule, whole, [batch])[1]) < 1e-12
    assert bool(sent) == (channels is None)


def test_the_next_step_may_have_other_rows_and_another_length():
    schedule = make("zb-v", ranks=2, microbatches=3)
    whole = llama(schedule.parts)
    batches = [data(3), data(3, tokens=11, seed=1), data(3, tokens=4, seed=2)]
    losses, gradients = unsplit(schedule, whole, batches)
    ours = piped(schedule, whole, batches)
    assert all(mine == pytest.approx(losses, abs=1e-12) for mine in ours.losses)
    assert worst(ours, gradients) < 1e-12  # and gradients add up over steps


def test_the_loss_is_the_mean_over_all_valid_tokens():
    draw = torch.randint(0, 9, (7, 5))
    batch = cut_batch(draw, draw.clone(), 3)
    assert [x.shape[0] for x in batch.inputs] == [3, 2, 2]
    assert batch.valid == 35
    with pytest.raises(ShapeError, match="7 rows cannot make 8 micro-batches"):
        cut_batch(draw, draw, 8)
    with pytest.raises(ShapeError, match="micro-batch 0 has an input of shape"):
        batch_of([draw], [draw[:2]])


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-zb"])
def test_recomputed_activations_give_the_same_gradients(name):
    schedule = make(name, ranks=2, microbatches=3)
    whole, batch = llama(schedule.parts), data(3)
    ours = piped(
        schedule, whole, [batch], recompute=frozenset(range(len(schedule.stages)))
    )
    assert worst(ours, unsplit(schedule, whole, [batch])[1]) <= 1e-15


def test_half_precision_runs_close_to_the_whole_model(no_onednn):
    schedule = make("interleaved-zb", ranks=2, microbatches=3)
    whole, batch = llama(schedule.parts), data(3)
    (loss,), gradients = unsplit(schedule, whole, [batch])
    ours = piped(schedule, whole, [batch], autocast=torch.bfloat16)
    assert ours.losses[0] == ours.losses[1] == pytest.approx([loss], rel=2e-2)
    for name, gradient in ours.gradients.items():
        other = gradients[name.split(":")[2]]
        assert float((gradient - other).norm()) <= 0.05 * float(other.norm()) + 1e-6


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_compiled_stages_run(name):
    # One thread: the compiler is not made for several.
    schedule = make(name, ranks=1, microbatches=1)
    whole, batch = llama(sum(layers_of(schedule))), data(1)
    ours = piped(
        schedule,
        whole,
        [batch],
        prepare=lambda part: torch.compile(part, backend="aot_eager"),
    )
    assert worst(ours, unsplit(schedule, whole, [batch])[1]) < 1e-10


# ---------------------------------------------------------------- partial paths
@pytest.mark.parametrize("copies", [1, 2])
def test_a_skipped_part_can_have_the_mean_over_its_visits(copies):
    schedule = make("skip", ranks=4, microbatches=5, skips=1, copies=copies)
    whole, batches = (
        llama(sum(layers_of(schedule))),
        [data(5 * copies, seed=seed) for seed in range(2)],
    )
    plain = [unsplit(schedule, whole, [batch])[1] for batch in batches]
    ours = piped(schedule, whole, batches, options=RunOptions(mean=Mean.VISITS))
    assert len(ours.gradients) > 20
    for name, gradient in ours.gradients.items():
        _, part, inner = name.split(":")
        expected = torch.zeros_like(gradient)
        for batch, gradients in zip(batches, plain, strict=True):
            counts = [int((labels != -100).sum()) for labels in batch.labels]
            there = [
                int(part) in {schedule.stages[stage].part for stage in m.path}
                for m in schedule.microbatches
            ]
            expected += (
                gradients[inner]
                * sum(counts)
                / sum(c for c, came in zip(counts, there, strict=True) if came)
            )
        assert float((gradient - expected).abs().max()) < 1e-12
    # They do differ from the mean over all.
    assert worst(ours, unsplit(schedule, whole, batches)[1]) > 1e-4


def test_tied_parameters_of_skipped_parts_have_no_mean_over_visits():
    schedule = make("skip", ranks=3, microbatches=2, skips=1)
    tied = {"embed.weight": Tied((0, 1), None)}
    with pytest.raises(
        ShapeError,
        match=r"embed\.weight is in parts 0 and 1, of which some are skipped",
    ):
        Visits(schedule, {}, Mean.VISITS, tied)


# ---------------------------------------------------------------- split backwards
class Watched(nn.Module):
    """A stage that counts the activations it holds, by the life of what autograd keeps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.alive = self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0  # a tensor of its own, which the linear layer keeps
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(x, self.drop)
        return self.linear(x)

    def drop(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize(
    "name",
    [
        "gpipe",
        "1f1b",
        "interleaved",
        "hanayo",
        "zb-h1",
        "zb-v",
        "interleaved-zb",
        "v-min",
    ],
)
def test_no_more_activations_live_than_the_simulator_predicts(name):
    schedule = make(name, ranks=3, microbatches=7)
    width, stages = 4, {n: Watched(4) for n in range(len(schedule.stages))}

    def work(comm):
        mine = {
            n: stages[n] for n, s in enumerate(schedule.stages) if s.rank == comm.rank
        }
        executor = Executor(lower(schedule), mine, comm, lambda y, _: y.sum())
        x = [torch.zeros(1, 2, width, dtype=torch.float64)] * 7
        return executor.step(
            batch_of(x, [torch.zeros(1, 2, dtype=torch.long)] * 7), timed=True
        )

    results = run_threads(3, work, patience=300)
    predicted = simulate(schedule, UnitCost())
    assert results[0].timeline.activations == pytest.approx(predicted.activations)
    for rank in range(3):
        mine = [n for n, s in enumerate(schedule.stages) if s.rank == rank]
        assert all(stages[n].alive == 0 for n in mine)
        if len(mine) == 1:
            assert stages[mine[0]].most == predicted.peak_activations[rank]


def test_a_split_backward_leaves_every_linear_weight_to_w():
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3, bias=False)
    ).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    block(x).sum().backward()
    expected, expected_x = [p.grad.clone() for p in block.parameters()], x.grad.clone()
    block.zero_grad()
    x.grad = None
    make_deferrable(block)
    ledger = Ledger()
    record_in(ledger)
    y = block(x)
    record_in(None)
    ledger.open = True
    y.sum().backward()
    assert torch.equal(x.grad, expected_x)
    assert block[0].weight.grad is None
    assert block[3].weight.grad is None
    assert block[2].weight.grad is not None  # a norm's is done at once: it is small
    ledger.settle()
    assert all(
        torch.equal(p.grad, e)
        for p, e in zip(block.parameters(), expected, strict=True)
    )


def ledger_after_i(layer: nn.Linear, common: tuple[nn.Parameter, ...] = ()) -> Ledger:
    """Run a forward and an I of a linear layer; return what is left to W."""
    make_deferrable(layer)
    ledger = Ledger(frozenset(map(id, common)))
    record_in(ledger)
    y = layer(torch.ones(5, 4))
    record_in(None)
    ledger.begin_backward()
    y.sum().backward()
    return ledger


def test_a_frozen_bias_beside_a_trained_weight_gets_no_gradient():
    layer = nn.Linear(4, 3)
    layer.bias.requires_grad_(False)
    ledger_after_i(layer).settle()
    assert torch.equal(layer.weight.grad, torch.full((3, 4), 5.0))
    assert layer.bias.grad is None


def test_a_hook_on_a_weight_sees_its_gradient_in_a_split_backward():
    layer = nn.Linear(4, 3)
    layer.weight.register_hook(lambda gradient: 0.5 * gradient)
    ledger_after_i(layer).settle()
    assert torch.equal(layer.weight.grad, torch.full((3, 4), 2.5))


def test_autograd_adds_up_the_gradient_of_a_weight_that_threads_share():
    """It locks what it adds to; work that is left to W does not."""
    layer = nn.Linear(4, 3)
    assert not ledger_after_i(layer, (layer.weight,)).due
    assert layer.weight.grad is not None


def product_flops(_: torch.Size, a: torch.Size, b: torch.Size, **beside: object) -> int:
    return 2 * a[0] * a[1] * b[1]


IN_PLACE = {torch.ops.aten.addmm_: product_flops}  # torch counts it only out of place


class Counted(TorchDispatchMode):
    """The operations that torch does, without those that only look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations += 1
            self.bytes += sum(
                x.nbytes
                for x in tree_leaves((args, found))
                if isinstance(x, torch.Tensor)
            )
        return found


def test_the_halves_of_a_backward_do_little_more_than_the_whole():
    """As many flops, and at most 5% more bytes to read and write: counted, because a clock would judge the machine."""
    config = LlamaConfig(vocab=64, width=64, layers=4, heads=8, kv_heads=8, inner=168)
    part = split(Llama(config), (0, 3, 1))[1]
    make_deferrable(part)
    x = torch.randn(2, 32, 64)

    def backward(with_ledger: bool) -> tuple[int, int, int]:
        ledger = Ledger() if with_ledger else None
        record_in(ledger)
        y = part(x.detach().requires_grad_())
        record_in(None)
        with (
            FlopCounterMode(display=False, custom_mapping=IN_PLACE) as flops,
            Counted() as counted,
        ):
            if ledger is not None:
                ledger.open = True
            y.backward(torch.ones_like(y))
            if ledger is not None:
                ledger.settle()
        return flops.get_total_flops(), counted.bytes, counted.operations

    backward(False)  # from now on there are gradients to add to
    (flops, moved, operations), (more_flops, more_moved, more_operations) = (
        backward(False),
        backward(True),
    )
    assert more_flops == flops > 0
    assert more_moved <= 1.05 * moved
    assert more_operations <= 1.05 * operations


# ---------------------------------------------------------------- what was measured
def test_the_measured_timeline_obeys_the_needs_and_is_the_same_on_every_rank():
    schedule = split_backward(make("hanayo", ranks=3, microbatches=4))
    ours = piped(schedule, llama(schedule.parts), [data(4)], timed=True)
    timelines = [result.timeline for result in ours.results]
    assert all((t.start == timelines[0].start).all() for t in timelines)
    spans = {span.action: span for span in timelines[0].spans()}
    for action, span in spans.items():
        assert all(
            spans[needed].end <= span.start + 1e-9 for needed in needs(schedule, action)
        )
    for rank in range(3):
        lane = timelines[0].lane(rank)
        assert (timelines[0].start[lane][1:] >= timelines[0].end[lane][:-1]).all()
    predicted = simulate(schedule, UnitCost())
    assert len(largest_differences(predicted, timelines[0])) == 5


@pytest.mark.parametrize(
    ("name", "more"),
    [("1f1b", {}), ("zb-v", {}), ("seq1f1b", {"slices": 2}), ("hanayo", {})],
)
def test_nothing_of_a_step_waits_for_the_garbage_collector(name, more, monkeypatch):
    """A reference cycle would keep a step's tensors for many steps: on a GPU hardly anything calls the collector."""
    made: list[weakref.ref] = []
    for kind in (Walk, ComputedActions):
        monkeypatch.setattr(kind, "__init__", noting(kind.__init__, made))
    schedule = make(name, ranks=2, microbatches=4, **more)
    gc.disable()
    try:
        piped(schedule, llama(schedule.parts), [data(4), data(4, seed=1)])
        alive = [reference for reference in made if reference() is not None]
    finally:
        gc.enable()
    assert len(made) == 2 * 6
    assert not alive


def noting(construct, made):
    """A constructor that also notes, weakly, what it constructs."""

    def construct_and_note(self, *args, **options) -> None:
        made.append(weakref.ref(self))
        construct(self, *args, **options)

    return construct_and_note


def test_an_error_in_a_stage_reaches_the_caller_as_it_is():
    schedule = make("1f1b", ranks=2, microbatches=2)

    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("a layer of the user's is broken")

    with pytest.raises(ValueError, match="a layer of the user's is broken"):
        piped(schedule, llama(2), [data(2)], prepare=lambda part: Broken())
