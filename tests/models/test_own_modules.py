"""Modules that a user has put into a Hugging Face model are tried before the model runs in slices or packed."""

from __future__ import annotations

import types
from itertools import pairwise

import pytest
import torch
import transformers
from torch import Tensor, nn

from hugging_face import bert_sizes, decoder_sizes
from penstock import lower, make
from penstock.errors import ShapeError
from penstock.models import split, token_loss
from penstock.models.slice import Carry
from penstock.runtime import Executor, run_threads
from pipelines import own_stages, without_float32

pytestmark = pytest.mark.numerics
WORDS, TOKENS = 29, 8


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**decoder_sizes(WORDS, layers=3))
    return transformers.LlamaForCausalLM(config)


class Mixing(nn.Module):
    """Adds to each token something of the one before it, once the gate opens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.gate * x.roll(1, 1))


class Scaled(nn.Module):
    """Looks at each token alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.dropout(self.inner(x))


def replace_module(model: nn.Module) -> None:
    layer = model.model.layers[1]
    layer.mlp = Mixing(layer.mlp)


def replace_by_torch(model: nn.Module) -> None:
    """Torch's own batch norm mixes all tokens while it trains."""
    model.model.layers[1].mlp = nn.Sequential(
        nn.Unflatten(2, (1, 16)),
        nn.Flatten(1, 2),
        nn.BatchNorm1d(TOKENS, track_running_stats=False),
    )


def patch_instance(model: nn.Module) -> None:
    mlp = model.model.layers[1].mlp
    inner = type(mlp).forward
    mlp.forward = types.MethodType(lambda self, x: inner(self, x + x.roll(1, 1)), mlp)


def hook(model: nn.Module) -> None:
    mlp = model.model.layers[1].mlp
    mlp.register_forward_hook(lambda _, __, y: y + y.cumsum(1))


def replace_norm(model: nn.Module) -> None:
    model.model.norm = Mixing(model.model.norm)


def replace_embedding(model: nn.Module) -> None:
    embedding = model.model.embed_tokens
    embedding.register_forward_hook(lambda _, __, y: y + y.cumsum(1))


def sliced(model: nn.Module) -> None:
    """Make the executor of a schedule with slices."""
    schedule = make("terapipe", ranks=2, microbatches=1, slices=2)
    parts = split(model, (1, 2))

    def work(comm):
        stages = own_stages(schedule, parts, comm.rank)
        Executor(lower(schedule), stages, comm, token_loss)

    run_threads(2, work)


CHANGES = {
    "model.layers.1.mlp (Mixing)": replace_module,
    "model.layers.1.mlp (LlamaMLP)": patch_instance,
    "model.norm (Mixing)": replace_norm,
    "model.embed_tokens (Embedding)": replace_embedding,
}


@pytest.mark.parametrize("named", CHANGES)
def test_modules_that_mix_tokens_are_not_sliced(named):
    model = llama()
    CHANGES[named](model)
    with pytest.raises(ShapeError, match="cannot be sliced") as found:
        sliced(model)
    assert f"{named} is not as transformers has it" in str(found.value)
    assert "slices=1" in str(found.value)


@pytest.mark.parametrize("change", [hook, replace_by_torch])
def test_hooks_and_modules_of_torch_that_mix_tokens_are_not_sliced(change):
    model = llama()
    change(model)
    with pytest.raises(ShapeError, match=r"cannot be sliced: model\.layers\.1\.mlp"):
        sliced(model)


def test_a_class_that_is_patched_after_a_trial_is_tried_again(monkeypatch):
    sliced(llama())
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    inner = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: inner(self, x + x.roll(1, 1)))
    with pytest.raises(ShapeError, match="cannot be sliced"):
        sliced(llama())


def test_modules_that_see_each_token_alone_are_sliced_and_keep_no_trace():
    model = without_float32(llama())
    layer = model.model.layers[2]
    layer.mlp = Scaled(layer.mlp)
    seen = []
    layer.mlp.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    sliced(model)
    assert seen
    assert modes == [module.training for module in model.modules()]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_part_without_own_modules_is_not_tried():
    """The layers of a stock model run no more often than before."""
    part = split(llama(), (3,))[0]
    calls = []
    part.runner.base.register_forward_hook(lambda *_: calls.append(1))
    assert part.unsliceable == ""
    assert not calls


# ---------------------------------------------------------------- packed documents
def packed(part: nn.Module, tokens: Tensor) -> Tensor:
    starts = torch.zeros_like(tokens)
    starts[:, 4:] = 4
    return part(tokens, Carry(TOKENS, starts).open(0, TOKENS))


def test_documents_are_not_packed_where_a_users_module_mixes_them():
    model = llama()
    replace_module(model)
    part = split(model, (3,))[0]
    tokens = torch.randint(0, WORDS, (2, TOKENS))
    assert part(tokens).shape == (2, TOKENS, WORDS)
    with pytest.raises(ShapeError, match=r"packed documents: model\.layers\.1"):
        packed(part, tokens)


@pytest.mark.parametrize("mixes", [False, True])
def test_documents_are_packed_in_an_encoder_unless_a_users_module_mixes_them(mixes):
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**bert_sizes(WORDS, layers=2))
    model = transformers.RobertaForMaskedLM(config).eval()
    for layer in model.roberta.encoder.layer:
        kind = Mixing if mixes else Scaled
        layer.intermediate = kind(layer.intermediate)
    part = split(model, (2,))[0]
    tokens = torch.randint(5, WORDS, (2, TOKENS))
    if mixes:
        with pytest.raises(ShapeError, match="cannot run packed documents"):
            packed(part, tokens)
    else:
        assert packed(part.eval(), tokens).shape == (2, TOKENS, WORDS)


def test_slices_of_a_tried_part_are_those_of_the_whole_sequence():
    model = llama()
    layer = model.model.layers[1]
    layer.mlp = Scaled(layer.mlp)
    part = split(model, (3,))[0].eval()
    tokens = torch.randint(0, WORDS, (2, TOKENS))
    carry = Carry(TOKENS)
    with torch.no_grad():
        slices = [
            part(tokens[:, begin:end], carry.open(begin, end))
            for begin, end in pairwise((0, 3, TOKENS))
        ]
        torch.testing.assert_close(torch.cat(slices, 1), part(tokens))
