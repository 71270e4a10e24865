"""Tries a class of Hugging Face models on a small model before any part of it is used.

    logits and gradients of the whole model  ══?══  those of two parts, one after the other
    logits of the whole model                ══?══  those of slices, and of documents in one row

The small model (`penstock.models.hf_config`) keeps everything that changes what is computed. So a class that does
something between its pieces which parts do not do is refused with the first weight whose gradient differs, and one
whose attention cannot go on from earlier keys runs whole sequences only. Encoders have a trial of their own
(`penstock.models.hf_encoder_trial`), and so have modules that a user has replaced (`penstock.models.hf_own_modules`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.carry import Carry
from penstock.errors import PenstockError
from penstock.models.hf import Anatomy, Encoding, Pieces, find_pieces
from penstock.models.hf_config import small_config
from penstock.models.hf_encoder import UNSLICEABLE
from penstock.models.hf_encoder_trial import (
    fault_of_encoder,
    find_encoding,
    trial_words,
)
from penstock.models.hf_own_modules import Stock, stock_of
from penstock.models.hf_part import (
    LayerCall,
    Runner,
    attention_of,
    refuse_kernel,
)
from penstock.models.hf_small import (
    ConfigText,
    first_line,
    near,
    random_model,
    take_gradients,
)

TRIAL_TOKENS = 9  # of the sequences in a trial
TRIAL_SEED = 1


def tried_anatomy(model: nn.Module) -> Anatomy:
    """Return the anatomy of a Hugging Face model, after a trial of its class and config."""
    encodes = (
        find_pieces(model).encoding is not None
    )  # refuses what no trial needs to show
    config: Any = model.config
    refuse_kernel(str(config._attn_implementation))
    small = small_config(config, encodes)
    kernel = str(config._attn_implementation)
    kind = next(
        one for one in type(model).__mro__ if one.__module__.startswith("transformers.")
    )
    found = _trial(kind, ConfigText(small, kernel), _forwards_of(model))
    if found.fault:
        raise PenstockError(
            f"cannot split a {kind.__name__}: {found.fault}\n"
            "use a model of penstock.models, or another class of transformers with one stack of layers"
        )
    pieces = replace(
        find_pieces(model, found.called),
        cached=not found.unsliceable,
        tuples=found.tuples,
        encoding=found.encoding,
        stock=found.stock,
    )
    return pieces.anatomy(config, found.unsliceable)


@dataclass(frozen=True, slots=True)
class Findings:
    """What a trial has found out about a class of models."""

    fault: str = ""  # why it cannot be split
    unsliceable: str = ""  # why it cannot be sliced
    tuples: bool = False  # whether its layers return tuples
    called: tuple[str, ...] = ()  # modules of its base model, as its forward calls them
    encoding: Encoding | None = None  # of an encoder
    stock: Stock = frozenset()  # what its modules are


# ---------------------------------------------------------------- the trial
_one_at_a_time = Lock()  # ranks may be threads that split the same model


def _forwards_of(model: nn.Module) -> frozenset[object]:
    """The forwards of all of transformers' classes in a model, which anybody may have replaced since the last trial."""
    kinds = {type(module) for module in model.modules()}
    theirs = [kind for kind in kinds if kind.__module__.startswith("transformers.")]
    return frozenset(kind.forward for kind in theirs)


def _trial(
    kind: type[nn.Module], text: ConfigText, forwards: frozenset[object]
) -> Findings:
    with _one_at_a_time:
        return _try_once(cast(Hashable, kind), text, forwards)


@lru_cache(maxsize=64)
def _try_once(kind: Any, text: ConfigText, forwards: frozenset[object]) -> Findings:
    """Try a class of models, once for each config, and again if a forward has changed."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        torch.manual_seed(TRIAL_SEED)
        return _try_small_model(kind, text)


def _try_small_model(kind: type[nn.Module], text: ConfigText) -> Findings:
    try:
        model = random_model(kind, text)
        encodes = find_pieces(model).encoding is not None
        if encodes:
            tokens = trial_words(model, 2, TRIAL_TOKENS)
        else:
            tokens = torch.randint(0, model.config.vocab_size, (2, TRIAL_TOKENS))
        model(tokens, **_plainly(encodes))
    except PenstockError:
        raise
    except Exception as error:
        fault = (
            f"a small model with its config does not run ({first_line(error)}); "
            "do the sizes in its config fit together?"
        )
        return Findings(fault)
    if encodes:
        return _try_encoder(model, tokens)
    called, tuples = _watch_calls(model, find_pieces(model), tokens)
    pieces = replace(find_pieces(model, called), tuples=tuples)
    sliced = _fault_of_slices(model, pieces, tokens)
    pieces = replace(pieces, cached=not sliced)
    fault = _fault_of_parts(model, pieces, tokens)
    stock = stock_of(model, pieces)
    return Findings(fault, sliced, tuples, called, stock=stock)


def _plainly(encodes: bool) -> dict[str, bool]:
    """How a whole model is called; only decoders have a cache to do without."""
    return {} if encodes else {"use_cache": False}


def _try_encoder(model: Any, tokens: Tensor) -> Findings:
    try:
        called, tuples = _watch_calls(model, find_pieces(model), tokens)
        pieces = replace(find_pieces(model, called), tuples=tuples)
        plain = trial_words(model, 2, TRIAL_TOKENS, special=False)
        encoding = find_encoding(model, pieces, plain, tokens)
        pieces = replace(pieces, encoding=encoding)
        fault = fault_of_encoder(model, pieces, tokens)
    except PenstockError:
        raise
    except Exception as error:
        return Findings(f"its forward cannot be followed ({first_line(error)})")
    stock = stock_of(model, pieces)
    return Findings(fault, UNSLICEABLE, tuples, called, encoding, stock)


def _watch_calls(
    model: Any, pieces: Pieces, tokens: Tensor
) -> tuple[tuple[str, ...], bool]:
    """In which order a model calls the modules of its base model, and whether its layers return tuples."""
    base = model.get_submodule(pieces.base)
    watched = dict(base.named_children())
    holder, _, _ = pieces.layers.rpartition(".")
    if holder:
        inner = watched.pop(holder).named_children()
        watched |= {f"{holder}.{name}": module for name, module in inner}
    watched[pieces.layers] = watched[pieces.layers][0]
    results: dict[str, object] = {}
    hooks = []
    for name, module in watched.items():

        def note(_: nn.Module, __: object, result: object, name: str = name) -> None:
            results.setdefault(name, result)

        hooks.append(module.register_forward_hook(note))
    with torch.no_grad():
        model(tokens, **_plainly(pieces.encoding is not None))
    for hook in hooks:
        hook.remove()
    if pieces.layers not in results:
        raise PenstockError(
            f"cannot split a {type(model).__name__}: its layers are not called as modules"
        )
    return tuple(results), isinstance(results[pieces.layers], tuple)


def _fault_of_parts(model: Any, pieces: Pieces, tokens: Tensor) -> str:
    """What is wrong when two parts run one after the other; empty if they are the whole model."""
    layers = model.config.num_hidden_layers
    cut = max(1, layers // 2)
    first = Runner(model, pieces, model, range(cut), (True, False))
    last = Runner(model, pieces, model, range(cut, layers), (False, True))
    whole = model(tokens, use_cache=False).logits
    weights = torch.linspace(-1, 1, whole.numel()).reshape(whole.shape)
    torch.autograd.backward((whole * weights).sum())
    wanted = take_gradients(model)
    try:
        logits = last(first(tokens, None), None)
    except Exception as error:
        return f"its forward does not run in parts ({first_line(error)})"
    if not near(logits, whole):
        return "its parts, one after the other, do not give its logits"
    torch.autograd.backward((logits * weights).sum())
    found = take_gradients(model)
    for name, gradient in wanted.items():
        if name not in found or not near(found[name], gradient):
            return f"the gradient of {name} in its parts is not that of the whole model"
    return ""


def _fault_of_slices(model: Any, pieces: Pieces, tokens: Tensor) -> str:
    """Why the model cannot run slice by slice; empty if it can."""
    layers = range(model.config.num_hidden_layers)
    runner = Runner(model, pieces, model, layers, (True, True))
    carry = Carry(TRIAL_TOKENS)
    bounds = (0, 4, 6, TRIAL_TOKENS)
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        try:
            for layer in runner.layers:
                assert isinstance(layer, LayerCall)
                attention_of(layer.layer)
            logits = [
                runner(tokens[:, begin:end], carry.open(begin, end))
                for begin, end in pairwise(bounds)
            ]
        except Exception as error:
            return f"its layers do not go on from the keys and values of earlier slices ({first_line(error)})"
        if not near(torch.cat(logits, dim=1), whole):
            return "its slices do not give the logits of the whole sequence"
        starts = torch.zeros_like(tokens)
        starts[:, bounds[1] :] = bounds[1]
        packed = runner(tokens, Carry(TRIAL_TOKENS, starts).open(0, TRIAL_TOKENS))
        alone = model(tokens[:, bounds[1] :], use_cache=False).logits
    if not near(packed[:, bounds[1] :], alone):
        return "documents in one row do not give the logits that they give alone"
    return ""
