"""Tries a class of Hugging Face decoders on a small model before any part of it is used.

    the user's config ──► the same with few layers, few words and little width ──► a model with random weights
                                                                                        │
                    logits and gradients of the whole model  ══?══  those of two parts, one after the other
                    logits of the whole model                ══?══  those of slices, and of documents in one row

The small model keeps everything that changes what is computed: kinds of layers, windows, rotary types, head sizes,
biases, experts. So a class that does something between its pieces which parts do not do is refused with the first
weight whose gradient differs, and one whose attention cannot go on from earlier keys runs whole sequences only.
"""

from __future__ import annotations

import copy
import json
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
from penstock.models.hf import Anatomy, Pieces, find_pieces
from penstock.models.hf_config import small_config
from penstock.models.hf_part import (
    LayerCall,
    Runner,
    attention_of,
    refuse_kernel,
)

TRIAL_TOKENS = 9  # of the sequences in a trial
TRIAL_SEED = 1
SLACK = 2e-4  # relative difference that rounding in float32 explains, with wide margins


def tried_anatomy(model: nn.Module) -> Anatomy:
    """Return the anatomy of a Hugging Face decoder, after a trial of its class and config."""
    find_pieces(model)  # refuses what no trial needs to show
    config: Any = model.config
    refuse_kernel(str(config._attn_implementation))
    small = small_config(config)
    kernel = str(config._attn_implementation)
    kind = next(
        one for one in type(model).__mro__ if one.__module__.startswith("transformers.")
    )
    found = _trial(kind, _Text(small, kernel))
    if found.fault:
        raise PenstockError(
            f"cannot split a {kind.__name__}: {found.fault}\n"
            "use a model of penstock.models, or another class of transformers with one stack of layers"
        )
    pieces = replace(
        find_pieces(model, found.called),
        cached=not found.unsliceable,
        tuples=found.tuples,
    )
    return pieces.anatomy(config, found.unsliceable)


@dataclass(frozen=True, slots=True)
class Findings:
    """What a trial has found out about a class of models."""

    fault: str = ""  # why it cannot be split
    unsliceable: str = ""  # why it cannot be sliced
    tuples: bool = False  # whether its layers return tuples
    called: tuple[str, ...] = ()  # modules of its base model, as its forward calls them


class _Text:
    """A config that can be compared and cached: two are equal if they say the same."""

    def __init__(self, config: Any, kernel: str) -> None:
        self.config = config
        self.kernel = kernel if kernel in ("eager", "sdpa") else "sdpa"
        said = json.dumps(config.to_dict(), sort_keys=True, default=str)
        self.text = f"{type(config).__name__} {self.kernel} {said}"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Text) and self.text == other.text


# ---------------------------------------------------------------- the trial
_one_at_a_time = Lock()  # ranks may be threads that split the same model


def _trial(kind: type[nn.Module], text: _Text) -> Findings:
    with _one_at_a_time:
        return _try_once(cast(Hashable, kind), text)


@lru_cache(maxsize=64)
def _try_once(kind: Any, text: _Text) -> Findings:
    """Try a class of models, once for each config."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        torch.manual_seed(TRIAL_SEED)
        return _try_small_model(kind, text)


def _try_small_model(kind: type[nn.Module], text: _Text) -> Findings:
    try:
        model = _random_model(kind, text)
        tokens = torch.randint(0, model.config.vocab_size, (2, TRIAL_TOKENS))
        model(tokens, use_cache=False)
    except Exception as error:
        fault = (
            f"a small model with its config does not run ({_first_line(error)}); "
            "do the sizes in its config fit together?"
        )
        return Findings(fault)
    called, tuples = _watch_calls(model, find_pieces(model), tokens)
    pieces = replace(find_pieces(model, called), tuples=tuples)
    sliced = _fault_of_slices(model, pieces, tokens)
    pieces = replace(pieces, cached=not sliced)
    fault = _fault_of_parts(model, pieces, tokens)
    return Findings(fault, sliced, tuples, called)


def _watch_calls(
    model: Any, pieces: Pieces, tokens: Tensor
) -> tuple[tuple[str, ...], bool]:
    """In which order a model calls the modules of its base model, and whether its layers return tuples."""
    base = model.get_submodule(pieces.base)
    watched = dict(base.named_children())
    watched[pieces.layers] = watched[pieces.layers][0]
    results: dict[str, object] = {}
    hooks = []
    for name, module in watched.items():

        def note(_: nn.Module, __: object, result: object, name: str = name) -> None:
            results.setdefault(name, result)

        hooks.append(module.register_forward_hook(note))
    with torch.no_grad():
        model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return tuple(results), isinstance(results[pieces.layers], tuple)


def _random_model(kind: type[nn.Module], text: _Text) -> Any:
    """A small model whose biases and norms are random too."""
    config = copy.deepcopy(text.config)
    config._attn_implementation = text.kernel
    model: Any = kind(config).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()


def _fault_of_parts(model: Any, pieces: Pieces, tokens: Tensor) -> str:
    """What is wrong when two parts run one after the other; empty if they are the whole model."""
    layers = model.config.num_hidden_layers
    cut = max(1, layers // 2)
    first = Runner(model, pieces, model, range(cut), (True, False))
    last = Runner(model, pieces, model, range(cut, layers), (False, True))
    whole = model(tokens, use_cache=False).logits
    weights = torch.linspace(-1, 1, whole.numel()).reshape(whole.shape)
    torch.autograd.backward((whole * weights).sum())
    wanted = _take_gradients(model)
    try:
        logits = last(first(tokens, None), None)
    except Exception as error:
        return f"its forward does not run in parts ({_first_line(error)})"
    if not _near(logits, whole):
        return "its parts, one after the other, do not give its logits"
    torch.autograd.backward((logits * weights).sum())
    found = _take_gradients(model)
    for name, gradient in wanted.items():
        if name not in found or not _near(found[name], gradient):
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
            return f"its layers do not go on from the keys and values of earlier slices ({_first_line(error)})"
        if not _near(torch.cat(logits, dim=1), whole):
            return "its slices do not give the logits of the whole sequence"
        starts = torch.zeros_like(tokens)
        starts[:, bounds[1] :] = bounds[1]
        packed = runner(tokens, Carry(TRIAL_TOKENS, starts).open(0, TRIAL_TOKENS))
        alone = model(tokens[:, bounds[1] :], use_cache=False).logits
    if not _near(packed[:, bounds[1] :], alone):
        return "documents in one row do not give the logits that they give alone"
    return ""


def _take_gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
            parameter.grad = None
    return found


def _near(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach(), other.detach()
    scale = float(other.abs().max())
    return float((one - other).abs().max()) <= SLACK * max(scale, 1e-6)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
