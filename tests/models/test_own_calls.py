"""Hooks and forwards of a user's own run once and at the right place, or are refused."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import transformers
from torch import Tensor, nn

from penstock import Pipeline, make
from penstock.errors import PenstockError
from penstock.models import Llama, LlamaConfig, shift_labels, split, token_loss
from penstock.runtime import run_threads

pytestmark = pytest.mark.numerics
WORDS = 29


def hugging_face() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).double()


def ours() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(vocab=WORDS, width=16, layers=3, heads=4, kv_heads=2, inner=24)
    return Llama(config).double()


def nothing(*_: object) -> None:
    """A hook that changes nothing."""


HOOKS = {
    "forward hook": nn.Module.register_forward_hook,
    "forward pre-hook": nn.Module.register_forward_pre_hook,
    "backward hook": nn.Module.register_full_backward_hook,
    "backward pre-hook": nn.Module.register_full_backward_pre_hook,
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize(
    ("make_model", "path", "named"),
    [
        (hugging_face, "", "the model itself"),
        (hugging_face, "model", r"model \(LlamaModel\)"),
        (hugging_face, "model.rotary_emb", "model.rotary_emb"),
        (ours, "", "the model itself"),
        (ours, "rotary", "rotary"),
    ],
)
def test_hooks_on_what_is_taken_apart_or_copied_are_refused(
    make_model, path, named, kind
):
    model = make_model()
    HOOKS[kind](model.get_submodule(path), nothing)
    with pytest.raises(PenstockError, match=f"{named} has a {kind}") as found:
        split(model, (1, 2))
    assert "such as " in str(found.value)


@pytest.mark.parametrize(
    "path", ["model.embed_tokens", "model.layers.1", "model.layers.2.mlp", "model.norm"]
)
def test_hooks_on_whole_modules_run_as_in_one_piece(path):
    """A forward hook and a backward hook each change what goes through them."""

    def grow(_: nn.Module, __: object, y: Tensor) -> Tensor:
        return 3 * y

    def shrink(_: nn.Module, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(0.5 * gradient for gradient in gradients)

    whole = hugging_face()
    whole.get_submodule(path).register_forward_hook(grow)
    if path != "model.embed_tokens":  # whose input has no gradient
        whole.get_submodule(path).register_full_backward_pre_hook(shrink)
    tokens = torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(1))
    labels = shift_labels(tokens)
    loss = token_loss(whole(tokens).logits, labels) / (labels != -100).sum()
    # The threads share the model, which has no gradients yet.
    models = [copy.deepcopy(whole), copy.deepcopy(whole)]
    loss.backward()

    def work(comm):
        schedule = make("interleaved", ranks=2, microbatches=2, chunks=2)
        pipeline = Pipeline(
            models[comm.rank], schedule, comm=comm, partition=(0, 1, 1, 1)
        )
        pipeline.step(tokens, labels)
        return dict(pipeline.named_parameters())

    first, last = run_threads(2, work)
    found = first | last
    for name, parameter in whole.named_parameters():
        gradient = found[name].grad
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("path", ["", "model"])
def test_a_replaced_forward_of_what_is_taken_apart_is_refused(path):
    model = hugging_face()
    module = model.get_submodule(path)
    inner = module.forward
    module.forward = types.MethodType(lambda self, *a, **k: inner(*a, **k), module)
    with pytest.raises(PenstockError, match="has been replaced, and parts would not"):
        split(model, (1, 2))


def test_a_class_of_our_models_that_overrides_forward_is_refused():
    class Louder(Llama):
        def forward(self, *args: object) -> Tensor:
            return 2 * super().forward(*args)

    config = LlamaConfig(vocab=WORDS, width=16, layers=3, heads=4, kv_heads=2, inner=24)
    with pytest.raises(PenstockError, match="this Louder: it overrides forward"):
        split(Louder(config), (1, 2))


# ---------------------------------------------------------------- lists of layers
class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize(
    ("hooked", "words"),
    [(False, "Twice overrides the forward"), (True, "has a forward hook")],
)
def test_a_sequence_of_layers_that_does_more_is_refused(hooked, words):
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*layers) if hooked else Twice(*layers)
    if hooked:
        model.register_forward_hook(nothing)

    def work(comm):
        Pipeline(model, make("1f1b", ranks=1, microbatches=1), comm=comm)

    with pytest.raises(PenstockError, match=words):
        run_threads(1, work)
