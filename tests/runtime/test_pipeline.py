"""The short way to train: a model or layers, a plan and a loss become `step(x, y)`."""

from __future__ import annotations

import re
import threading
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import tied_workers
from drawing import drawn_from
from penstock import Pipeline, Plan, make
from penstock.errors import ProofError, ShapeError
from penstock.models import shift_labels, token_loss
from penstock.models.attention import attend
from penstock.models.slice import Slice
from penstock.runtime import run_threads
from penstock.runtime.gradients import square_norm

pytestmark = pytest.mark.numerics

VOCAB, WIDTH, TOKENS = 17, 8, 5


@drawn_from(0)
def layers() -> list[nn.Module]:
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return [nn.Embedding(VOCAB, WIDTH), *middle, nn.Linear(WIDTH, VOCAB)]


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randint(0, VOCAB, (rows, TOKENS), generator=draw)
    return x, shift_labels(x)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return token_loss(logits, labels) / (labels != -100).sum()


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


def in_one_piece(steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = nn.Sequential(*layers()).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = batch()
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mean_loss(model(x), y)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, model.state_dict()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("1f1b", {}),
        ("zb-v", {"recompute": True}),
        ("hanayo", {"copies": 2}),
        ("chimera", {"reduction": "mean"}),
    ],
)
def test_a_list_of_layers_trains_as_in_one_piece(name, options):
    """On every rank: the loss, the norm that is clipped, and the weights after three steps."""
    copies = options.pop("copies", 1)
    schedule = make(name, ranks=2, microbatches=2, copies=copies)
    losses, norms, weights = in_one_piece(3)
    loss = mean_loss if "reduction" in options else token_loss
    models = [[one.double() for one in layers()] for _ in range(schedule.ranks)]

    def work(comm):
        pipeline = Pipeline(models[comm.rank], schedule, loss, comm=comm, **options)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
        x, y = batch()
        found = []
        for _ in range(3):
            pipeline.zero_grad()
            result = pipeline.step(x, y)
            found.append((result.loss, pipeline.clip(0.1)))
            optimizer.step()
        return found, pipeline.state_dict(), pipeline.evaluate(x, y)

    for found, state, held_out in run_threads(schedule.ranks, work):
        assert [loss for loss, _ in found] == pytest.approx(losses, abs=1e-12)
        assert [norm for _, norm in found] == pytest.approx(norms, abs=1e-12)
        assert held_out < losses[-1]
        for path, tensor in state.items():
            torch.testing.assert_close(tensor, weights[path], rtol=0, atol=1e-12)


def test_a_decoder_of_transformers_with_tied_weights_trains_as_in_one_piece():
    plan = Plan(make("1f1b", ranks=2, microbatches=2), "1f1b", partition=(1, 1))
    whole = tied_workers.gpt2()
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(0, 37, (4, 9), generator=draw)
    y = shift_labels(x)
    mean_loss(whole(x).logits, y).backward()
    expected = {name: one.grad for name, one in whole.named_parameters()}
    models = [tied_workers.gpt2() for _ in range(2)]

    def work(comm):
        pipeline = Pipeline(models[comm.rank], plan, comm=comm)
        assert pipeline.prove(x, y).seconds >= 0
        loss = pipeline.step(x, y).loss
        norm = pipeline.clip(1e9)
        return loss, norm, dict(pipeline.named_parameters())

    for loss, norm, held in run_threads(2, work):
        assert loss == pytest.approx(mean_loss(whole(x).logits, y).item(), abs=1e-7)
        for name, parameter in held.items():
            torch.testing.assert_close(
                parameter.grad, expected[name], rtol=0, atol=1e-7
            )
        # The embedding is tied to the head, on the other rank, and counts once.
        squares = sum(float(grad.square().sum()) for grad in expected.values())
        assert norm == pytest.approx(squares**0.5, rel=1e-6)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("one_tensor", [False, True])
def test_a_layer_that_a_list_has_twice_trains_as_in_one_piece(name, one_tensor):
    """Its gradients come from both ranks, whether they share it or, like processes, have a copy each."""

    def twice() -> list[nn.Module]:
        torch.manual_seed(0)
        again = nn.Linear(WIDTH, WIDTH)
        ends = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        return [ends[0], again, nn.Tanh(), again, ends[1]]

    x, y = batch()
    whole = nn.Sequential(*twice()).double()
    mean_loss(whole(x), y).backward()
    expected = {one: p.grad for one, p in whole.named_parameters()}
    squares = sum(float(gradient.square().sum()) for gradient in expected.values())
    copies = [nn.ModuleList(twice()).double() for _ in range(2)]
    schedule = make(name, ranks=2, microbatches=4)

    def work(comm):
        mine = list(copies[0 if one_tensor else comm.rank])
        pipeline = Pipeline(mine, schedule, comm=comm, partition=(2, 3))
        assert pipeline.step(x, y).loss > 0
        found = {one: p.grad.clone() for one, p in pipeline.named_parameters()}
        comm.barrier()
        return found, pipeline.clip(1e9), pipeline.state_dict()

    (first, norm, states), (last, _, more) = run_threads(2, work)
    assert first.keys() & last.keys() == {"1.weight", "1.bias"}
    for found in (first, last):
        for one, gradient in found.items():
            torch.testing.assert_close(gradient, expected[one])
    assert norm == pytest.approx(squares**0.5)
    torch.testing.assert_close(states | more, dict(whole.state_dict()))


def test_evaluation_drops_nothing_and_buffers_are_saved():
    """As with eval() and state_dict() of the unsplit model; the modes of the layers are left as they were."""

    def layers():
        torch.manual_seed(3)
        norm, frozen = nn.BatchNorm1d(4), nn.Dropout(0.5).eval()
        return [nn.Linear(4, 4), norm, nn.Dropout(0.5), frozen, nn.Linear(4, 3)]

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    y = torch.arange(8) % 3
    whole = nn.Sequential(*layers())
    for rows in x.tensor_split(2):
        whole[:2](rows)
    whole.eval()
    expected = whole(x)
    # Threads share torch's random numbers, so the layers are drawn before they start.
    layers_of = [layers(), layers()]

    def work(comm):
        mine = layers_of[comm.rank]
        pipeline = Pipeline(
            mine,
            make("1f1b", ranks=2, microbatches=2),
            nn.CrossEntropyLoss(reduction="sum"),
            comm=comm,
        )
        pipeline.step(x, y)
        found = pipeline.evaluate(x, y), pipeline.predict(x), pipeline.state_dict()
        assert [one.training for one in mine] == [True, True, True, False, True]
        return found

    (loss, _, first), (_, outputs, last) = run_threads(2, work)
    assert loss == pytest.approx(nn.functional.cross_entropy(expected, y).item())
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(first | last, dict(whole.state_dict()))


def test_norms_gather_their_statistics_once_if_they_are_recomputed():
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))

    def work(comm, recompute):
        torch.manual_seed(0)
        instance = nn.InstanceNorm1d(1, track_running_stats=True)
        model = [
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Sequential(nn.Unflatten(1, (1, WIDTH)), instance, nn.Flatten()),
            nn.Linear(WIDTH, 3),
        ]
        schedule = make("1f1b", ranks=1, microbatches=2)
        pipeline = Pipeline(model, schedule, class_loss, comm=comm, recompute=recompute)
        pipeline.step(x, torch.arange(8) % 3)
        return pipeline.state_dict()

    once, twice = (
        run_threads(1, lambda comm, again=again: work(comm, again))[0]
        for again in (False, True)
    )
    assert once["1.num_batches_tracked"] == 2
    assert once["2.1.running_mean"] != 0
    for name, tensor in once.items():
        assert torch.equal(tensor, twice[name]), name


def test_threads_that_share_a_norm_update_its_statistics_one_after_the_other():
    both_inside = threading.Barrier(2)

    class Slow(nn.BatchNorm1d):
        """Waits between reading its statistics and writing them, until another thread has read the same ones."""

        def forward(self, x: Tensor) -> Tensor:
            before = self.num_batches_tracked.clone()
            with suppress(threading.BrokenBarrierError):
                both_inside.wait(timeout=1)
            y = super().forward(x)
            self.num_batches_tracked.copy_(before + 1)
            return y

    norm = Slow(WIDTH)
    model = [norm, nn.Linear(WIDTH, 3)]
    schedule = make("gpipe", ranks=1, microbatches=1, copies=2)

    def work(comm):
        pipeline = Pipeline(model, schedule, class_loss, comm=comm)
        pipeline.step(torch.randn(8, WIDTH), torch.arange(8) % 3)

    run_threads(2, work)
    assert norm.num_batches_tracked == 2


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ([Doubled(WIDTH, 3)], "stage 0 .* changes its input in place in 0F0"),
        (
            [nn.Linear(WIDTH, 3), nn.ReLU(inplace=True)],
            "stage 1 .* changes its input in place in 1",
        ),
    ],
    ids=["first", "inner"],
)
def test_a_stage_that_changes_its_input_is_refused(model, words, recompute):
    """Recomputed from a changed input, its gradients would be wrong."""

    def work(comm):
        schedule = make("1f1b", ranks=len(model), microbatches=2)
        pipeline = Pipeline(model, schedule, class_loss, comm=comm, recompute=recompute)
        pipeline.step(torch.ones(4, WIDTH), torch.arange(4) % 3)

    with pytest.raises(ShapeError, match=words):
        run_threads(len(model), work)


def test_a_first_stage_that_changes_its_weights_is_not_said_to_change_its_input():
    class Growing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.bias.mul_(2)

    def work(comm):
        schedule = make("1f1b", ranks=1, microbatches=2)
        pipeline = Pipeline([Growing(WIDTH, 3)], schedule, class_loss, comm=comm)
        pipeline.step(torch.randn(4, WIDTH), torch.arange(4) % 3)

    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        run_threads(1, work)


def test_a_batch_is_made_of_tensors():
    def work(comm):
        schedule = make("1f1b", ranks=1, microbatches=2)
        pipeline = Pipeline([nn.Linear(WIDTH, 3)], schedule, class_loss, comm=comm)
        x = torch.randn(4, WIDTH)
        with pytest.raises(ShapeError, match="y is a NoneType, but it must be a ten"):
            pipeline.step(x, None)
        with pytest.raises(ShapeError, match="flag is a bool"):
            pipeline.step(x, torch.arange(4) % 3, flag=True)
        with pytest.raises(ShapeError, match="x is a ndarray"):
            pipeline.predict(x.numpy())

    run_threads(1, work)


def test_the_norm_of_large_gradients_is_no_infinity():
    large = torch.full((4,), 1e20)
    assert float(square_norm(large)) == pytest.approx(4e40)
    assert float(square_norm(large.fill_(6e4).half())) == pytest.approx(4 * 6e4**2)


def test_clipping_counts_both_parts_of_complex_gradients():
    """As torch does."""
    models = [nn.Linear(4, 4).double() for _ in range(2)]

    def work(comm):
        one = models[comm.rank]
        one.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        schedule = make("1f1b", ranks=2, microbatches=2)
        pipeline = Pipeline([models[0], models[1]], schedule, comm=comm)
        one.phase.grad = torch.tensor([3 + 4j, 0, 1j], dtype=torch.complex64)
        one.weight.grad = torch.full_like(one.weight, 2.0)
        norm = pipeline.clip(1.0)
        return norm, pipeline.clip(1.0)

    for before, after in run_threads(2, work):
        assert before == pytest.approx((2 * (25 + 1 + 16 * 4)) ** 0.5, rel=1e-12)
        assert after == pytest.approx(1.0, rel=1e-5)


class Remembering(nn.Linear):
    """Uses a number that it has left in another call, so that a plan with recomputation changes what it computes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize("options", [{}, {"prove": True}])
def test_a_pipeline_is_proven_before_its_first_step(options):
    def work(comm):
        model = [nn.Linear(WIDTH, WIDTH), Remembering(WIDTH, 3)]
        schedule = make("1f1b", ranks=2, microbatches=2)
        pipeline = Pipeline(
            model, schedule, class_loss, comm=comm, recompute=True, **options
        )
        x, y = torch.ones(4, WIDTH), torch.arange(4) % 3
        with pytest.raises(ProofError, match=r"Pipeline\(prove=False\), skips"):
            pipeline.step(x, y)
        assert all(one.grad is None for one in pipeline.parameters())

    run_threads(2, work)


def test_a_pipeline_can_be_told_not_to_prove_itself():
    def work(comm):
        model = [nn.Linear(WIDTH, WIDTH), Remembering(WIDTH, 3)]
        schedule = make("1f1b", ranks=2, microbatches=2)
        pipeline = Pipeline(
            model, schedule, class_loss, comm=comm, recompute=True, prove=False
        )
        return pipeline.step(torch.ones(4, WIDTH), torch.arange(4) % 3).loss

    assert all(loss > 0 for loss in run_threads(2, work))


def test_a_pipeline_is_proven_once(caplog):
    """The first step says so."""

    def work(comm):
        schedule = make("1f1b", ranks=2, microbatches=2)
        pipeline = Pipeline(layers(), schedule, comm=comm)
        for _ in range(2):
            pipeline.step(*batch())

    with caplog.at_level("INFO", logger="penstock"):
        run_threads(2, work)
    (line,) = [words for words in caplog.messages if "gradient check" in words]
    assert re.match(r"gradient check passed in .*: 2 stages match plain calls", line)


def test_graphs_need_a_gpu():
    one = make("1f1b", ranks=1, microbatches=1)
    with pytest.raises(ShapeError, match=r"graphs=True records .* the device is cpu"):
        run_threads(1, lambda comm: Pipeline(layers(), one, comm=comm, graphs=True))


def test_weights_are_loaded_out_of_those_of_the_whole_model():
    weights = nn.Sequential(*layers()).state_dict()
    changed = {name: tensor + 1 for name, tensor in weights.items()}

    def work(comm):
        pipeline = Pipeline(
            layers(), make("1f1b", ranks=2, microbatches=1), comm=comm, partition=(4, 2)
        )
        pipeline.load_state_dict(changed)
        with pytest.raises(ShapeError, match="the state has no"):
            pipeline.load_state_dict({})
        return pipeline.state_dict()

    first, last = run_threads(2, work)
    assert {name.partition(".")[0] for name in first} == {"0", "1", "2", "3"}
    for name, tensor in (first | last).items():
        assert torch.equal(tensor, changed[name])


@pytest.mark.parametrize(
    ("model", "partition", "words"),
    [
        (layers(), (1, 1), "2 parts and 2 layers, but the schedule has 2 parts"),
        ([layers()[1], *layers()], (1, 6), "mat1 and mat2 must have the same dtype"),
        (nn.Linear(2, 2), (), "cannot split a Linear"),
    ],
)
def test_what_is_no_pipeline_is_refused(model, partition, words):
    def work(comm):
        pipeline = Pipeline(
            model, make("1f1b", ranks=2, microbatches=1), comm=comm, partition=partition
        )
        pipeline.step(*batch(1))

    with pytest.raises(Exception, match=words):
        run_threads(2, work, patience=5)


# ---------------------------------------------------------------- slices
class Mixer(nn.Module):
    """Causal attention with one head, which takes slices."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return x + attend(self, q, k, v, piece)


class Mean(nn.Linear):
    """Looks at earlier tokens, but knows nothing of slices."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(1))


class Own(nn.Linear):
    tokenwise = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


@drawn_from(0)
def mixed_layers() -> list[nn.Module]:
    first, *middle, last = layers()
    return [first, Mixer(), *middle[:2], Mixer(), Own(WIDTH, WIDTH), last]


def test_a_list_of_layers_trains_in_slices_as_in_one_piece():
    schedule = make("seq1f1b", ranks=2, microbatches=2, slices=2)
    model = nn.Sequential(*mixed_layers()).double()
    x, y = batch()
    loss = mean_loss(model(x), y)
    loss.backward()
    copies = [mixed_layers() for _ in range(2)]

    def work(comm):
        own = [one.double() for one in copies[comm.rank]]
        pipeline = Pipeline(own, schedule, comm=comm)
        assert pipeline.prove(x, y).stages == 2
        found = pipeline.step(x, y).loss
        return found, {n: p.grad for n, p in pipeline.named_parameters()}

    for found, gradients in run_threads(2, work):
        assert found == pytest.approx(float(loss.detach()), rel=1e-12)
        for name, gradient in gradients.items():
            expected = model.get_parameter(name).grad
            assert (gradient - expected).abs().max() <= 1e-12, name


def test_layers_that_would_see_each_slice_alone_are_refused():
    schedule = make("seq1f1b", ranks=1, microbatches=2, slices=2)
    first, *_, last = layers()
    own = [first, Mean(WIDTH, WIDTH), last]
    words = r"(?s)layer 1, Mean, has no parameter `piece`.*penstock\.models\.slice.*tokenwise = True.*slices=1"

    def work(comm):
        with pytest.raises(ShapeError, match=words):
            Pipeline(own, schedule, comm=comm).step(*batch())

    run_threads(1, work)
