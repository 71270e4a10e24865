"""Forwards with transforms of `torch.func` or hooks on tensors train as in one piece, or the error says where."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from penstock import Pipeline, make
from penstock.errors import RunError
from penstock.runtime import run_threads

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]
WIDTH = 4


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class Mapped(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return vmap(self.linear)(x)


class Tangent(Wrapped):
    """Takes turns: torch computes the tangents of all threads of a process at one level, and mixes them up."""

    turn = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.turn:
            return x + jvp(self.linear, (x,), (torch.ones_like(x),))[1]


class Slope(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return x + grad(lambda z: self.linear(z).sin().sum())(x)


class Hooked(Wrapped):
    """Halves the gradient of a tensor in its middle."""

    asks = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad or not self.asks:
            y.register_hook(lambda gradient: 0.5 * gradient)
        return y.relu()


class Asking(Hooked):
    """The same, unless there is no gradient."""

    asks = True


class Derived(Wrapped):
    """Returns a derivative by its input."""

    def forward(self, x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        y = self.linear(inner).sin().sum()
        (slope,) = torch.autograd.grad(y, inner, create_graph=True)
        return x + slope


class Downhill(Wrapped):
    """Takes a step down an energy, also where a forward runs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            start = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.linear(start).tanh().square().sum()
            (slope,) = torch.autograd.grad(energy, start, create_graph=True)
        return x - 0.5 * slope


def layers(kind: type[Wrapped]) -> nn.Sequential:
    torch.manual_seed(0)
    ends = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    return nn.Sequential(ends[0], kind(), ends[1], kind(), ends[2])


def batch() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1)
    drawn = torch.randn(2, 4, WIDTH, generator=dice, dtype=torch.float64)
    return drawn[0], drawn[1]


def squares(y: Tensor, wanted: Tensor) -> Tensor:
    return (y - wanted).square().sum()


def in_one_piece(model: nn.Sequential) -> dict[str, Tensor]:
    whole = copy.deepcopy(model)
    x, y = batch()
    (squares(whole(x), y) / y.numel()).backward()
    return {name: one.grad for name, one in whole.named_parameters()}


def in_a_pipeline(
    model: nn.Sequential, name: str, recompute: bool, microbatches: int = 2
) -> dict[str, Tensor | None]:
    models = [copy.deepcopy(model), copy.deepcopy(model)]

    def work(comm):
        schedule = make(name, ranks=2, microbatches=microbatches)
        pipeline = Pipeline(
            models[comm.rank], schedule, squares, comm=comm, recompute=recompute
        )
        assert pipeline.prove(*batch()).stages == len(schedule.stages)
        pipeline.step(*batch())
        return {key: one.grad for key, one in pipeline.named_parameters()}

    first, last = run_threads(2, work)
    return first | last


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        *((kind, False) for kind in (Mapped, Tangent, Slope, Hooked, Asking, Derived)),
        *((kind, True) for kind in (Mapped, Tangent, Slope, Asking)),
    ],
)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
# torch 2.15 says it of itself when it first computes a tangent.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_transforms_and_hooks_train_as_in_one_piece(kind, recompute, name):
    model = layers(kind)
    expected = in_one_piece(model)
    found = in_a_pipeline(model, name, recompute)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        here = found[key]
        if (
            gradient is None or here is None
        ):  # of a bias that a derivative does not have
            assert not any(one is not None and one.any() for one in (gradient, here))
            continue
        torch.testing.assert_close(here, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_derivative_in_a_forward_is_not_left_to_the_weight_gradients_of_another(
    name, recompute
):
    """Some forwards run between the I of another micro-batch and its W."""
    model = layers(Downhill)
    expected = in_one_piece(model)
    found = in_a_pipeline(model, name, recompute, microbatches=4)
    for key, gradient in expected.items():
        if gradient is not None and gradient.any():
            torch.testing.assert_close(found[key], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [Hooked, Derived])
def test_a_recomputed_forward_that_needs_gradients_is_refused_with_its_stage(kind):
    model = layers(kind)

    def work(comm):
        schedule = make("1f1b", ranks=2, microbatches=2)
        pipeline = Pipeline(
            model, schedule, squares, comm=comm, recompute=True, prove=False
        )
        pipeline.step(*batch())

    words = r"stage [01] \(LayerChain\) cannot run [01]F0 without gradients: .*"
    with pytest.raises(RunError, match=words) as found:
        run_threads(2, work)
    assert "train without `recompute`" in str(found.value)


def test_a_derivative_in_a_forward_under_autocast_is_no_gradient_of_the_step():
    """Under autocast linear layers add to the gradients of the step by themselves."""
    model = layers(Derived).float()
    x, y = (one.float() for one in batch())
    whole = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        returned = whole(x)
    (squares(returned.float(), y) / y.numel()).backward()

    def work(comm):
        schedule = make("1f1b", ranks=1, microbatches=1)
        pipeline = Pipeline(
            model, schedule, squares, comm=comm, autocast=torch.bfloat16
        )
        pipeline.step(x, y)

    run_threads(1, work)
    for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        if wanted.grad is not None and wanted.grad.any():
            scale = float(wanted.grad.norm())
            assert float((found.grad - wanted.grad).norm()) < 0.05 * scale
