"""Modules that do what others do not: they change things in place, have no shape yet, return what is rare."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Pipeline, make
from penstock.errors import PenstockError
from penstock.runtime import run_threads
from penstock.runtime.loss import Reduction, refuse_other_loss

WIDTH = 4
X = torch.linspace(-1, 1, 8 * 3 * WIDTH).reshape(8, 3, WIDTH)
Y = torch.arange(24).reshape(8, 3) % WIDTH


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def summed(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="sum")


def stepped(layers, loss=summed, name="zb-h1", ranks=2, prove=False, **options):
    """The loss of a step."""
    schedule = make(name, ranks=ranks, microbatches=4)

    def work(comm):
        pipeline = Pipeline(layers, schedule, loss, comm=comm, prove=prove, **options)
        return pipeline.step(X, Y).loss

    return run_threads(ranks, work)[0]


def in_one_piece(layers, loss=summed) -> float:
    return float(loss(nn.Sequential(*layers)(X), Y).detach()) / Y.numel()


def test_an_activation_in_place_may_follow_a_linear_layer_of_a_split_backward():
    layers = [linear(), nn.ReLU(inplace=True), linear(), linear()]
    expected = in_one_piece(layers)
    assert stepped(layers, partition=(2, 2)) == pytest.approx(expected)


def test_a_loss_may_have_the_shape_of_one_number():
    layers = [linear(), linear()]
    found = stepped(layers, lambda y, t: summed(y, t).reshape(1))
    assert found == pytest.approx(in_one_piece(layers))


def test_the_trial_of_a_loss_leaves_the_logits_as_they_are():
    def halved(y: Tensor, labels: Tensor) -> Tensor:
        return summed(y.mul_(0.5), labels)

    layers = [linear(), linear()]
    assert stepped(layers, halved) == pytest.approx(in_one_piece(layers, halved))


def test_ranks_that_do_not_hold_a_shared_layer_know_of_it():
    shared = linear()
    layers = [shared, shared, linear()]
    expected = in_one_piece(layers)
    assert stepped(layers, ranks=3) == pytest.approx(expected)


def test_a_forward_that_was_put_into_a_module_counts_only_the_calls_of_a_step():
    """A copy of such a module runs the module itself, also when shapes are found."""
    counted = linear()
    counted.register_buffer("calls", torch.zeros((), dtype=torch.long))
    plain = counted.forward

    def forward(x: Tensor) -> Tensor:
        counted.calls += 1
        return plain(x)

    counted.forward = functools.partial(forward)
    stepped([counted, linear()], name="1f1b")
    assert counted.calls == 4


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (nn.LazyLinear(WIDTH), r"weights without a shape, in 0 .LazyLinear."),
        (nn.Embedding(9, WIDTH, sparse=True), "sparse gradients, in 0 .Embedding."),
    ],
)
def test_weights_that_cannot_be_summed_are_refused(first, words):
    with pytest.raises(PenstockError, match=words):
        stepped([first, linear()])


def test_a_stage_that_changes_its_weights_is_not_proven():
    class Normed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.bias.div_(self.bias.norm())
            return super().forward(x)

    with pytest.raises(PenstockError, match=r"changes its weights itself.*0.bias"):
        stepped([Normed(WIDTH, WIDTH), linear()], name="1f1b", prove=True)


def test_a_proof_takes_outputs_in_a_dict_and_single_numbers():
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"main": super().forward(x), "memory": x}

    class Totals(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x.mean()

    class Adds(nn.Linear):
        def forward(self, x: Tensor, total: Tensor) -> Tensor:
            return super().forward(x) + total

    def loss(y, labels: Tensor) -> Tensor:
        return summed(y["main"] if isinstance(y, dict) else y, labels)

    stepped([Named(WIDTH, WIDTH)], loss, name="gpipe", ranks=1, prove=True)
    stepped([Totals(WIDTH, WIDTH), Adds(WIDTH, WIDTH)], name="1f1b", prove=True)


def test_a_mean_is_tried_on_all_labels_of_a_micro_batch():
    def root(y: Tensor, labels: Tensor) -> Tensor:
        return (summed(y, labels) / labels.numel()).sqrt()

    with pytest.raises(PenstockError, match="not a mean over labels"):
        stepped([linear(), linear()], root, reduction="mean")


def test_a_proof_blurs_layers_inside_of_vmap():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(self.inner)(x)

    stepped([Mapped(), linear()], name="1f1b", prove=True)


@pytest.mark.parametrize("outputs", [torch.tensor(1.0), torch.zeros(6, 4)])
def test_the_trial_of_a_loss_asks_outputs_for_no_rows_that_they_lack(outputs):
    """On a CPU that would be an error; a GPU does not survive it."""
    labels = torch.zeros(2, 3, dtype=torch.long)
    asked = []

    def loss(y: Tensor, known: Tensor) -> Tensor:
        asked.append(len(known))
        return y.sum()

    assert not refuse_other_loss(loss, outputs, labels, Reduction.SUM, 0, False)
    assert asked == [2]
