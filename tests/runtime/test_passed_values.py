"""Stages that pass several tensors: tuples, names that travel, tensors of the batch, added losses, any shapes."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import branching_workers as workers
from again_tape import Again
from penstock import Pipeline, lower, make
from penstock.errors import RunError, ShapeError
from penstock.models import token_loss
from penstock.pipeline import cut_into_parts
from penstock.runtime import (
    Executor,
    add_loss,
    collected_losses,
    cut_batch,
    prove,
    replay,
    run_threads,
    spawn,
)
from penstock.runtime.passed_values import LayerChain, passed_by
from penstock.schedules.transforms import slice_tokens
from pipelines import own_stages

pytestmark = pytest.mark.numerics


def assert_same_as_in_one_piece(results, microbatches: int = 2) -> None:
    loss, gradients, outputs = workers.in_one_piece(microbatches)
    seen, ended = set(), 0
    for found, held, kept, predicted, evaluated in results:
        assert found == pytest.approx(loss, abs=1e-12)
        assert evaluated == pytest.approx(loss, abs=1e-12)
        seen |= set(held)
        for name, gradient in held.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-12)
        if predicted is not None:
            ended += 1
            assert not any(y.requires_grad for y in kept)
            torch.testing.assert_close(torch.cat(kept), outputs, rtol=0, atol=1e-12)
            torch.testing.assert_close(predicted, outputs, rtol=0, atol=1e-12)
    assert seen == set(gradients)
    assert ended == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("1f1b", {"partition": (1, 7)}),  # three tensors between ranks
        ("zb-v", {"partition": (1, 3, 2, 2)}),  # a tuple, and the skip with it
        ("hanayo", {"recompute": True}),
    ],
)
def test_layers_that_pass_several_tensors_train_as_in_one_piece(name, options):
    """The loss, all gradients, the outputs of a step, predictions and evaluation; every stage is proven, too."""
    results = run_threads(2, lambda comm: workers.train(comm, name, options, True))
    assert_same_as_in_one_piece(results)


def test_two_processes_pass_several_tensors():
    options = {"partition": (4, 4)}
    assert_same_as_in_one_piece(spawn(2, workers.train, "zb-h1", options))


def test_what_travels_is_only_what_later_stages_ask_for():
    """After Enter the skip and the mask; past the last user of the mask only the skip, with its bytes."""

    def work(comm):
        pipeline = Pipeline(
            workers.layers(),
            make("zb-v", ranks=2, microbatches=2),
            workers.summed,
            comm=comm,
            partition=(1, 3, 2, 2),
        )
        given = workers.batch()
        given.pop("y")
        named = {name: given[name] for name in ("kinds", "mask")}
        edges = pipeline.executor.edges(pipeline.cut(given["x"], given["x"], named))
        return [edge.names for edge in edges[0]], pipeline.edge_bytes(**given)

    names, sizes = run_threads(2, work)[0]
    assert names == [("skip", "odd"), ("skip",), ("skip",)]
    rows, tokens = 3, workers.TOKENS
    x, skip, pooled = rows * tokens * 6 * 8, rows * tokens * 3 * 8, rows * 2 * 8
    assert sizes == (x + skip + rows * tokens * 8, x + pooled + skip, x + skip)


# ---------------------------------------------------------------- frozen stages
def test_frozen_stages_pass_tensors_on_and_get_no_gradients():
    """Enter is frozen, so nothing comes back to it, and what goes through it untouched is still there."""
    received = []

    def work(comm):
        layers = workers.layers()
        layers[0].requires_grad_(False)
        pipeline = Pipeline(
            layers,
            make("1f1b", ranks=2, microbatches=2),
            workers.summed,
            comm=comm,
            partition=(1, 7),
        )
        loss = pipeline.step(**workers.batch()).loss
        received.extend(pipeline.executor.lane.receives)
        return loss, {key: one.grad for key, one in pipeline.named_parameters()}

    loss, gradients, _ = workers.in_one_piece(2)
    for found, held in run_threads(2, work):
        assert found == pytest.approx(loss, abs=1e-12)
        for name, gradient in held.items():
            if name.startswith("0."):
                assert gradient is None
            else:
                torch.testing.assert_close(
                    gradient, gradients[name], rtol=0, atol=1e-12
                )
    assert not any(message.goes_back for message in received)


# ---------------------------------------------------------------- shapes
class Patches(nn.Module):
    """A small ViT's entry: images become patches."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 8, 4, 4)
        self.place = nn.Parameter(torch.randn(4, 8) / 9)

    def forward(self, images: Tensor) -> Tensor:
        return self.cut(images).flatten(2).transpose(1, 2) + self.place


class Classes(nn.Module):
    """Classes of an image, from the mean of its patches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(1))


def vision() -> list[nn.Module]:
    torch.manual_seed(2)
    encoders = [
        nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True) for _ in range(2)
    ]
    return [one.double() for one in (Patches(), *encoders, Classes())]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_vision_transformer_with_class_labels_trains_as_in_one_piece(reduction):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(6, 3, 8, 8, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 5, (6,), generator=draw)
    y[1] = -100
    model = nn.Sequential(*vision())
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    expected = {name: one.grad for name, one in model.named_parameters()}

    def work(comm):
        pipeline = Pipeline(
            models[comm.rank],
            make("1f1b", ranks=2, microbatches=3),
            nn.CrossEntropyLoss(reduction=reduction),
            comm=comm,
            reduction=reduction,
        )
        assert pipeline.prove(x, y).stages == 2
        result = pipeline.step(x, y)
        return result.loss, dict(pipeline.named_parameters()), pipeline.predict(x)

    models = [vision(), vision()]
    for found, held, predicted in run_threads(2, work):
        assert found == pytest.approx(loss.item(), abs=1e-12)
        for name, one in held.items():
            torch.testing.assert_close(one.grad, expected[name], rtol=0, atol=1e-11)
        if predicted is not None:
            torch.testing.assert_close(predicted, model(x), rtol=0, atol=1e-11)


class Shy(nn.Module):
    """Cannot run on meta tensors, keeps a count, and draws a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) == float("inf"):  # no number on a meta tensor
            return x
        self.calls += 1
        return self.linear(x) + 0 * torch.rand(())


def test_a_stage_that_cannot_run_on_meta_tensors_is_tried_on_zeros_and_left_as_it_was():
    stages = [Shy(), nn.Linear(3, 2)]
    x = torch.ones(4, 3)

    def work(comm):
        executor = Executor(
            lower(make("1f1b", ranks=2, microbatches=2)),
            {comm.rank: stages[comm.rank]},
            comm,
            lambda y, labels: (y * labels[:, None]).sum(),
        )
        state = torch.get_rng_state()
        edges = executor.edges(cut_batch(x, torch.ones(4), 2))
        return edges[0][0].tensors[0].shape, torch.equal(state, torch.get_rng_state())

    assert run_threads(2, work) == [((2, 3), True)] * 2
    assert stages[0].calls == 0


# ---------------------------------------------------------------- what is refused
class Asks(nn.Module):
    def forward(self, x: Tensor, kinds: Tensor, memory: Tensor) -> Tensor:
        return x + kinds + memory


class Makes(nn.Module):
    def forward(self, x: Tensor, kinds: Tensor) -> dict[str, Tensor]:
        return {"x": x, "kinds": kinds}


class Uses(nn.Module):
    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        return x + kinds


class Doubles(nn.Module):
    def forward(self, x: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + kinds


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(workers.WORDS, 3)

    def forward(self, x: Tensor, piece: object = None) -> Tensor:
        return self.embed(x).mean(1)


def ask(comm, middle: nn.Module, schedule=None, last=None, **options):
    tokens = workers.batch()["x"]
    first = nn.Embedding(workers.WORDS, 3)
    if isinstance(middle, Pools):
        first, middle = middle, Pools()
    last = last or nn.Linear(3, workers.WORDS)
    executor = Executor(
        lower(schedule or make("1f1b", ranks=3, microbatches=2)),
        {comm.rank: [first, middle, last][comm.rank]},
        comm,
        workers.summed,
        **options,
    )
    named = {"kinds": torch.zeros(6, 5, 3)}
    executor.step(cut_batch(tokens, tokens, 2, named=named))


@pytest.mark.parametrize(
    ("middle", "options", "words"),
    [
        (Asks(), {}, r"stage 1 \(Asks\) does not fit: its forward asks for memory"),
        (
            Makes(),
            {},
            "returns a value named kinds, but the batch has a tensor of that",
        ),
        (nn.Linear(3, 3), {}, "has a tensor named kinds, but no stage asks for it"),
        (
            Uses(),
            {"last": Asks()},
            r"stage 2 \(Asks\) does not fit: its forward asks for memory",
        ),
        (
            Uses(),
            {"last": LayerChain(OrderedDict(a=nn.Linear(3, 3), b=Asks()))},
            r"stage 2 \(LayerChain\) does not fit: its forward asks for memory",
        ),
        (
            Doubles(),
            {"last": nn.Linear(3, 3)},
            r"stage 2 \(Linear\) does not fit: .* too many positional arguments",
        ),
    ],
)
def test_what_cannot_be_passed_is_refused_on_every_rank(middle, options, words):
    def work(comm):
        with pytest.raises(ShapeError, match=words):
            ask(comm, middle, **options)
        return True

    assert all(run_threads(3, work, patience=20))


def test_slices_need_a_tensor_for_each_token():
    schedule = slice_tokens(make("1f1b", ranks=2, microbatches=2), (0, 2, 5))

    class Head(nn.Linear):
        def forward(self, x: Tensor, piece: object = None) -> Tensor:
            return super().forward(x)

    def work(comm):
        stage = Pools() if comm.rank == 0 else Head(3, 4)
        tokens = workers.batch()["x"]
        executor = Executor(lower(schedule), {comm.rank: stage}, comm, workers.summed)
        with pytest.raises(ShapeError, match=r"slices need \(rows, 5, ...\)"):
            executor.step(cut_batch(tokens, tokens, 2))
        with pytest.raises(ShapeError, match="slices need a label for each token"):
            executor.step(cut_batch(tokens, tokens[:, 0], 2))
        return True

    assert all(run_threads(2, work, patience=20))


def test_ranks_with_different_batches_are_told_before_the_first_message():
    def work(comm):
        stages = [nn.Embedding(9, 3), nn.Linear(3, 9)]
        program = lower(make("1f1b", ranks=2, microbatches=1))
        executor = Executor(
            program, {comm.rank: stages[comm.rank]}, comm, workers.summed
        )
        x = torch.zeros(1 + comm.rank, 4, dtype=torch.long)
        with pytest.raises(
            ShapeError, match=r"rank 1 .* inputs: 1 x \(2, 4\) instead of 1 x \(1, 4\)"
        ):
            executor.step(cut_batch(x, x, 1))
        return True

    assert all(run_threads(2, work, patience=20))


def test_named_tensors_have_a_row_for_each_row_of_the_batch():
    tokens = workers.batch()["x"]
    with pytest.raises(ShapeError, match=r"mask has the shape \(5, 5\), but .* 6 rows"):
        cut_batch(tokens, tokens, 2, named={"mask": torch.zeros(5, 5)})


def test_a_loss_is_added_only_where_somebody_collects_it():
    add_loss(torch.ones(()))
    with collected_losses() as losses:
        add_loss(torch.ones(1))
    assert [float(loss) for loss in losses] == [1.0]
    with pytest.raises(
        ShapeError, match="one number as a tensor, not a float32 tensor"
    ):
        add_loss(torch.ones(2))


def test_what_a_stage_passes():
    x, y = torch.zeros(1), torch.ones(1)
    assert passed_by([x, y]).values == (x, y)
    assert passed_by({"a": x, "b": y, "c": None}).named == {"b": y, "c": None}
    for other in ("x", (), {}, (x, None), {"a": None}, {"a": x, "b": 3}, None):
        assert passed_by(other) is None


class Balanced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        add_loss(x.mean())
        return super().forward(x)


# ---------------------------------------------------------------- recorded actions
@pytest.mark.parametrize("memory", ["of a lane", "of takes"])
@pytest.mark.parametrize(
    ("name", "partition", "recompute"),
    [
        ("1f1b", (1, 7), ()),
        ("zb-v", (1, 3, 2, 2), ()),
        ("hanayo", (2, 2, 2, 2), range(4)),
    ],
)
def test_recorded_actions_pass_several_tensors(
    name, partition, recompute, memory, monkeypatch
):
    """Tuples, travelling and named tensors and added losses, in steps on other numbers than the recorded ones."""
    if memory == "of takes":
        monkeypatch.setattr(replay, "MAX_RECORDED_ACTIONS", 0)
    schedule = make(name, ranks=2, microbatches=2)
    given = workers.batch()
    x, y = given.pop("x"), given.pop("y")
    blank = {key: torch.zeros_like(one) for key, one in given.items()}
    tapes = [Again(), Again()]

    def work(comm):
        parts = cut_into_parts(workers.layers(), schedule.parts, partition)
        stages = own_stages(schedule, parts, comm.rank)
        executor = Executor(
            lower(schedule),
            stages,
            comm,
            workers.summed,
            recompute=frozenset(recompute) & stages.keys(),
            tape=tapes[comm.rank],
        )
        executor.step(cut_batch(torch.zeros_like(x), y, 2, named=blank))
        for part in stages.values():
            part.zero_grad()
        loss = executor.step(cut_batch(x, y, 2, named=given)).loss
        named = {key: one for p in stages.values() for key, one in p.named_parameters()}
        return loss, {key: one.grad for key, one in named.items()}

    loss, gradients, _ = workers.in_one_piece(2)
    seen = set()
    for found, held in run_threads(2, work):
        assert found == pytest.approx(loss, abs=1e-12)
        seen |= set(held)
        for key, gradient in held.items():
            torch.testing.assert_close(gradient, gradients[key], rtol=0, atol=1e-12)
    assert seen == set(gradients)
    assert sum(tape.plays for tape in tapes) == 2 * schedule.actions


class Refuses(Again):
    def record(self, work, prepare=None):
        raise RuntimeError("not now")


def test_a_recording_that_one_rank_refuses_is_refused_on_all():
    program = lower(make("1f1b", ranks=2, microbatches=2))
    layers = [nn.Linear(3, 3), Balanced(3, 2)]
    layers[0].weight.grad = earlier = torch.ones(3, 3)

    def work(comm):
        stages = {comm.rank: layers[comm.rank]}
        tape = Refuses() if comm.rank else Again()
        executor = Executor(program, stages, comm, lambda y, _: y.sum(), tape=tape)
        with pytest.raises(RunError, match=r"F0 cannot be recorded: not now"):
            executor.step(cut_batch(torch.ones(2, 3), torch.ones(2), 2))
        return [parameter.grad for parameter in layers[comm.rank].parameters()]

    assert run_threads(2, work, patience=20) == [[earlier, None], [None, None]]


# ---------------------------------------------------------------- slices
class FirstSlice(nn.Module):
    """Takes its own tokens of a named tensor, which is that of the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(workers.WORDS, 3)

    def forward(self, x: Tensor, kinds: Tensor, piece=None) -> dict[str, Tensor]:
        here = slice(None) if piece is None else slice(piece.begin, piece.end)
        y = self.embed(x) * kinds[:, here, None]
        return {"y": y, "skip": y.square(), "odd": x % 2}


class MiddleSlice(nn.Linear):
    def forward(self, x: Tensor, odd: Tensor, piece=None) -> Tensor:
        return super().forward(x).masked_fill(odd[..., None] == 1, 0.1)


class LastSlice(nn.Linear):
    def forward(self, x: Tensor, skip: Tensor, piece=None) -> Tensor:
        return super().forward(x + skip)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_slices_pass_several_tensors(name):
    """And the proof runs them slice by slice, too."""
    torch.manual_seed(4)
    stages = [FirstSlice(), MiddleSlice(3, 3), LastSlice(3, workers.WORDS)]
    stages = [stage.double() for stage in stages]
    given = workers.batch()
    x, kinds = given["x"], given["kinds"]
    parts = stages[0](x, kinds)
    y = stages[2](stages[1](parts["y"], parts["odd"]), parts["skip"])
    loss = token_loss(y, x) / x.numel()
    loss.backward()
    expected = [one.grad for stage in stages for one in stage.parameters()]
    for stage in stages:
        stage.zero_grad()
    schedule = slice_tokens(make(name, ranks=3, microbatches=2), (0, 2, 5))

    def work(comm):
        mine = {comm.rank: stages[comm.rank]}
        executor = Executor(lower(schedule), mine, comm, token_loss)
        batch = cut_batch(x, x, 2, named={"kinds": kinds})
        assert prove(executor, batch).stages == 3
        result = executor.step(batch, outputs=True)
        return result.loss, result.outputs

    *_, (found, outputs) = run_threads(3, work)
    assert found == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(torch.cat(outputs), y, rtol=0, atol=1e-12)
    grads = [one.grad for stage in stages for one in stage.parameters()]
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
