"""Modules that change their buffers in a forward train as in one piece, or are refused."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from again_tape import Again
from penstock import Pipeline, lower, make
from penstock.errors import ProofError, ShapeError
from penstock.ir import Schedule
from penstock.pipeline import cut_into_parts
from penstock.runtime import Executor, cut_batch, prove, run_threads
from penstock.runtime.module_state import (
    DRAWING_LOCK,
    buffers_as_before,
    buffers_of,
    copied,
)
from penstock.schedules.transforms import slice_tokens
from pipelines import own_stages

pytestmark = pytest.mark.numerics
WIDTH = 4


class MovingMean(nn.Module):
    """Takes a moving average off its input, and then moves the average, in a way that autograd does not see."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean.clone()
        self.mean.data.mul_(0.5).add_(
            0.5 * x.detach().mean((0, *range(1, x.dim() - 1)))
        )
        return y


class Replaced(MovingMean):
    """The same with a new tensor in the place of the buffer."""

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, *range(1, x.dim() - 1)))
        return y


class Codebook(nn.Module):
    """Adds the nearest of a few words, and pulls those words towards what was near them."""

    def __init__(self) -> None:
        super().__init__()
        words = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64)
        self.register_buffer("words", words.view(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.words).argmin(1)
        y = x * (1 + self.words[nearest])
        with torch.no_grad():
            self.words.index_add_(0, nearest, 0.1 * (x - self.words[nearest]))
        return y


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


LAYERS = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH, dtype=torch.float64),
    "spectral norm": lambda: spectral_norm(linear()),
    "moving mean": lambda: MovingMean(WIDTH),
    "replaced": lambda: Replaced(WIDTH),
    "codebook": Codebook,
}


def model(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [linear(), LAYERS[kind](), linear(), LAYERS[kind](), linear()]


def batch() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(3)
    drawn = torch.randn(2, 8, WIDTH, generator=dice, dtype=torch.float64)
    return drawn[0], drawn[1]


def squares(y: Tensor, wanted: Tensor) -> Tensor:
    return (y - wanted).square().sum()


def in_one_piece(kind: str, microbatches: int) -> dict[str, Tensor]:
    """The gradients and buffers after a step, one micro-batch after the other."""
    whole = nn.Sequential(*model(kind))
    x, y = batch()
    pairs = zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
    for rows, wanted in pairs:
        (squares(whole(rows), wanted) / y.numel()).backward()
    found = {f"gradient of {name}": one.grad for name, one in whole.named_parameters()}
    return found | {name: x.clone() for name, x in whole.named_buffers()}


def after_a_step(executor: Executor) -> dict[str, Tensor]:
    found = {}
    for module in executor.modules.values():
        for name, one in module.named_parameters():
            found[f"gradient of {name}"] = one.grad
        found |= dict(module.named_buffers())
    return found


@pytest.mark.parametrize("kind", LAYERS)
def test_buffers_count_once_in_a_recomputed_stage(kind):
    expected = in_one_piece(kind, 3)
    models = [model(kind), model(kind)]

    def work(comm):
        schedule = make("1f1b", ranks=2, microbatches=3)
        pipeline = Pipeline(
            models[comm.rank], schedule, squares, comm=comm, recompute=True
        )
        x, y = batch()
        pipeline.prove(x, y)
        pipeline.step(x, y)
        return after_a_step(pipeline.executor)

    first, last = run_threads(2, work)
    found = first | last
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_recording_leaves_no_trace_in_buffers(kind, recompute):
    """Actions are recorded on zeros, and rehearsed before that."""
    expected = in_one_piece(kind, 2)
    found = recorded(kind, recompute, Again())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=name)


def recorded(kind: str, recompute: bool, tape: Again) -> dict[str, Tensor]:
    layers = model(kind)

    def work(comm):
        schedule = make("1f1b", ranks=1, microbatches=2)
        executor = Executor(
            lower(schedule),
            own_stages(schedule, cut_into_parts(layers, 1), comm.rank),
            comm,
            squares,
            tape=tape,
            recompute=frozenset({0} if recompute else ()),
        )
        executor.step(cut_batch(*batch(), 2))
        return after_a_step(executor)

    return run_threads(1, work)[0]


def test_a_recording_cannot_follow_a_buffer_that_is_replaced():
    tape = Again()
    tape.replays_memory = True  # as that of a GPU does
    with pytest.raises(ShapeError, match=r"stage 0 cannot be recorded.* buffer mean"):
        recorded("replaced", False, tape)


# ---------------------------------------------------------------- the proof
class SlicedMean(MovingMean):
    """Moves the average in every slice. Nothing that it returns depends on that."""

    def forward(self, x: Tensor, piece: object = None) -> Tensor:
        super().forward(x)
        return x.clone()


def test_a_proof_compares_buffers():
    """Each slice moves the average, which a plain call does once."""
    layers = [linear(), SlicedMean(WIDTH), linear()]
    layers[0].tokenwise = layers[2].tokenwise = True
    schedule: Schedule = slice_tokens(make("1f1b", ranks=1, microbatches=2), (0, 3, 6))
    dice = torch.Generator().manual_seed(4)
    x, y = torch.randn(2, 4, 6, WIDTH, generator=dice, dtype=torch.float64)

    def work(comm):
        stages = own_stages(schedule, cut_into_parts(layers, 1), comm.rank)
        executor = Executor(lower(schedule), stages, comm, squares)
        before = layers[1].mean.clone()
        with pytest.raises(ProofError, match=r"the buffer 1\.mean differs") as found:
            prove(executor, cut_batch(x, y, 2))
        assert "cause: token slices" in str(found.value)
        assert torch.equal(layers[1].mean, before)

    run_threads(1, work)


# ---------------------------------------------------------------- threads
def test_no_other_forward_runs_while_a_module_has_the_buffers_of_before():
    norm = nn.BatchNorm1d(2)
    own = norm.running_mean
    buffers = buffers_of(norm)
    before = copied(buffers)
    with buffers_as_before(buffers, before), ThreadPoolExecutor(1) as other:
        assert norm.running_mean is not own
        assert not other.submit(DRAWING_LOCK.acquire, blocking=False).result()
    assert norm.running_mean is own


def test_buffers_that_are_one_tensor_stay_one():
    module = nn.Module()
    module.register_buffer("one", torch.zeros(2))
    module.register_buffer("same", module.one)
    module.register_buffer("nothing", None)
    (held,) = copied(buffers_of(module))
    assert held["one"] is held["same"] is not module.one
    assert held["nothing"] is None


# ---------------------------------------------------------------- copies on several ranks
def train_copies(layers: list[nn.Module], copies: int, partition=()) -> None:
    """Run a step on two ranks that hold copies of the layers, as processes do."""
    models = [copy.deepcopy(layers), copy.deepcopy(layers)]

    def work(comm):
        schedule = make("1f1b", ranks=2 // copies, microbatches=2, copies=copies)
        pipeline = Pipeline(
            models[comm.rank], schedule, squares, comm=comm, partition=partition
        )
        pipeline.step(*batch())

    run_threads(2, work)


@pytest.mark.parametrize("kind", LAYERS)
def test_copies_of_a_part_that_changes_buffers_are_refused(kind):
    words = r"stage [01] \(LayerChain\) changes the buffer 1\..* the ranks 0 and 1 hold"
    with pytest.raises(ShapeError, match=words):
        train_copies(model(kind), copies=2)


def test_a_norm_that_two_ranks_have_in_their_list_is_refused():
    """Its gradients would be summed, but its running mean would not."""
    norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
    words = r"changes the buffer 1\..* and the ranks 0 and 1 hold a copy"
    with pytest.raises(ShapeError, match=words):
        train_copies([linear(), norm, linear(), norm], 1, (2, 2))


@pytest.mark.parametrize("copies", [1, 2])
def test_copies_whose_buffers_stay_as_they_are_train(copies):
    norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64).eval()
    train_copies([linear(), norm, linear(), norm], copies)
