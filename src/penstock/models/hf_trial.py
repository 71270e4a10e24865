"""Tries a class of Hugging Face models on a small model before any part of it is used.

    logits and gradients of the whole model                 ══?══  those of two parts, one after the other
    logits of a decoder                                     ══?══  those of slices, and of documents in one row
    an encoder with an attention_mask that hides padding    ══?══  two parts with that mask
    an encoder on documents one by one                      ══?══  two parts with both in one row

The small model (`small_config`) keeps everything that changes what is computed. So a class that does something between
its pieces which parts do not do is refused with the first weight whose gradient differs, and one whose attention cannot
go on from earlier keys runs whole sequences only. Modules that a user has replaced have a trial of their own
(`penstock.models.hf_own`).

How an encoder counts positions is read off its embedding of positions: the position of the first word, and whether
padding is counted. The words of the trial include those of padding and of the mask, so a class that treats them in a
way that parts do not is refused.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.hf import Anatomy, Encoding, Pieces, find_pieces, small_config
from penstock.models.hf_own import Stock, first_line, near, stock_of
from penstock.models.hf_part import (
    UNSLICEABLE,
    LayerCall,
    Runner,
    attention_of,
    refuse_kernel,
    runner_class,
)
from penstock.models.slice import Carry, Slice

TRIAL_TOKENS = 9  # of the sequences in a trial
TRIAL_CUTS = (0, 4, 6, TRIAL_TOKENS)
TRIAL_SEED = 1
BORDER = 4  # between two documents in one row
PADDING = 3  # tokens of padding in one row
# Where attention sees both ways, the bias of its keys changes nothing, and its gradient is rounding alone. So gradients
# count as no smaller than this share of the largest one.
SMALL_GRADIENT = 0.05
WORDS_IN_CONFIG = ("pad_token_id", "mask_token_id")


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


# ---------------------------------------------------------------- a small model
class ConfigText:
    """A config that can be compared and cached: two are equal if they say the same."""

    def __init__(self, config: Any, kernel: str) -> None:
        self.config = config
        self.kernel = kernel if kernel in ("eager", "sdpa") else "sdpa"
        said = json.dumps(config.to_dict(), sort_keys=True, default=str)
        self.text = f"{type(config).__name__} {self.kernel} {said}"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigText) and self.text == other.text


def random_model(kind: type[nn.Module], text: ConfigText) -> Any:
    """A small model whose biases and norms are random too."""
    config = copy.deepcopy(text.config)
    config._attn_implementation = text.kernel
    model: Any = kind(config).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()


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
    sliced = _fault_of_slices(_Small(model, pieces, tokens))
    pieces = replace(pieces, cached=not sliced)
    fault = _fault_of_parts(_Small(model, pieces, tokens))
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
        fault = _fault_of_encoder(model, pieces, tokens)
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


# ---------------------------------------------------------------- whole and in parts
@dataclass(frozen=True, slots=True)
class _Small:
    """A small model, the rows that it is tried on, and the types of their words if it takes any."""

    model: Any
    pieces: Pieces
    tokens: Tensor
    types: Tensor | None = None

    def whole(
        self, begin: int = 0, end: int = TRIAL_TOKENS, mask: Tensor | None = None
    ) -> Tensor:
        """The logits of the whole model for some of the tokens of each row."""
        arguments: dict[str, Any] = dict(_plainly(self.pieces.encoding is not None))
        if mask is not None:
            arguments["attention_mask"] = mask
        if self.types is not None:
            arguments["token_type_ids"] = self.types[:, begin:end]
        logits: Tensor = self.model(self.tokens[:, begin:end], **arguments).logits
        return logits

    def documents(self) -> Tensor:
        """The logits of the whole model for the two documents of each row, one by one."""
        return torch.cat([self.whole(0, BORDER), self.whole(BORDER)], dim=1)

    def parts(self, mask: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """The logits of two parts, one after the other."""
        layers = range(self.model.config.num_hidden_layers)
        cut = max(1, len(layers) // 2)
        first = self.runner(layers[:cut], (True, False))
        last = self.runner(layers[cut:], (False, True))
        x = first(self.tokens, self.piece(starts), self.types, mask)
        return last(x, self.piece(starts), None, mask)

    def runner(self, layers: range, ends: tuple[bool, bool]) -> Runner:
        """A part of the model."""
        kind = runner_class(self.pieces)
        return kind(self.model, self.pieces, self.model, layers, ends)

    def piece(self, starts: Tensor | None) -> Slice | None:
        """Whole rows that are packed with documents; None if they are not."""
        if starts is None:
            return None
        return Carry(TRIAL_TOKENS, starts).open(0, TRIAL_TOKENS)

    def starts(self) -> Tensor:
        """The start of each token's document, for two documents in each row."""
        starts = torch.zeros_like(self.tokens)
        starts[:, BORDER:] = BORDER
        return starts


class _Case(NamedTuple):
    """Rows that the whole model and its parts compute alike, where they count."""

    what: str  # empty if there are no others
    counted: Tensor
    whole: Callable[[], Tensor]
    parts: Callable[[], Tensor]


def _fault_of_parts(small: _Small) -> str:
    """What is wrong when two parts run one after the other; empty if they are the whole model."""
    every = torch.ones_like(small.tokens)
    cases = [_Case("", every, small.whole, small.parts)]
    if small.pieces.encoding is not None:
        mask = torch.ones_like(small.tokens)
        mask[0, -PADDING:] = 0
        starts = small.starts()
        cases = [
            _Case("rows of text", every, small.whole, small.parts),
            _Case(
                *("rows with padding", mask),
                *(partial(small.whole, mask=mask), partial(small.parts, mask)),
            ),
            _Case(
                *("documents in one row", every),
                *(small.documents, partial(small.parts, starts=starts)),
            ),
        ]
    return next(filter(None, (_fault_of_case(small, case) for case in cases)), "")


def _fault_of_case(small: _Small, case: _Case) -> str:
    """Where the logits that count, or the gradients, are not those of the whole model; empty if they all are."""
    counted = case.counted[..., None] == 1
    expected = case.whole().where(counted, 0.0)
    expected_gradients = _gradients(small.model, expected)
    given = f" for {case.what}" if case.what else ""
    comma = "," if case.what else ""
    try:
        found = case.parts().where(counted, 0.0)
    except Exception as error:
        return f"its forward does not run in parts{comma}{given} ({first_line(error)})"
    if not near(found, expected):
        return f"its parts, one after the other, do not give its logits{given}"
    least = 0.0
    if small.pieces.encoding is not None:
        largest = max(float(one.abs().max()) for one in expected_gradients.values())
        least = SMALL_GRADIENT * largest
    found_gradients = _gradients(small.model, found)
    for name, gradient in expected_gradients.items():
        if name not in found_gradients or not near(
            found_gradients[name], gradient, least
        ):
            return f"the gradient of {name} in its parts is not that of the whole model{comma}{given}"
    return ""


def _gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    """The gradients of the weights for a sum of the logits, in which each has a weight of its own."""
    weights = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)
    torch.autograd.backward((logits * weights).sum())
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
            parameter.grad = None
    return found


@torch.no_grad()
def _fault_of_slices(small: _Small) -> str:
    """Why a decoder cannot run slice by slice; empty if it can."""
    layers = range(small.model.config.num_hidden_layers)
    runner = small.runner(layers, (True, True))
    carry = Carry(TRIAL_TOKENS)
    whole = small.whole()
    try:
        for layer in runner.layers:
            assert isinstance(layer, LayerCall)
            attention_of(layer.layer)
        logits = [
            runner(small.tokens[:, begin:end], carry.open(begin, end))
            for begin, end in pairwise(TRIAL_CUTS)
        ]
    except Exception as error:
        return f"its layers do not go on from the keys and values of earlier slices ({first_line(error)})"
    if not near(torch.cat(logits, dim=1), whole):
        return "its slices do not give the logits of the whole sequence"
    packed = runner(small.tokens, small.piece(small.starts()))
    if not near(packed[:, BORDER:], small.whole(BORDER)):
        return "documents in one row do not give the logits that they give alone"
    return ""


# ---------------------------------------------------------------- encoders
def _fault_of_encoder(model: Any, pieces: Pieces, tokens: Tensor) -> str:
    """Why a model is no encoder, or cannot run in parts; empty if it can."""
    logits = model(tokens).logits
    if logits.shape != (*tokens.shape, model.config.vocab_size):
        return "it does not give a logit for every word at every token"
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % model.config.vocab_size
    if torch.equal(model(other).logits[:, :-1], logits[:, :-1]):
        return "its words do not see later words, so it is not an encoder"
    types = None
    if pieces.encoding is not None and pieces.encoding.types:
        types = torch.randint(0, model.config.type_vocab_size, tokens.shape)
    return _fault_of_parts(_Small(model, pieces, tokens, types))


def trial_words(model: Any, rows: int, tokens: int, special: bool = True) -> Tensor:
    """Random words; if wanted, also those with a meaning of their own, which are otherwise left out."""
    vocabulary = range(model.config.vocab_size)
    with_meaning = []
    for key in WORDS_IN_CONFIG:
        word: Any = getattr(model.config, key, None)
        if word in vocabulary:
            with_meaning.append(word)
    plain = torch.tensor([word for word in vocabulary if word not in with_meaning])
    drawn = torch.randint(0, len(plain), (rows, tokens))
    words = plain[drawn]
    if special:
        for place, word in enumerate(with_meaning):
            words[0, 2 + 3 * place] = word
    return words


def find_encoding(model: Any, pieces: Pieces, plain: Tensor, words: Tensor) -> Encoding:
    """How a model counts positions and whether it takes types; `words` has padding where `plain` has none."""
    embeddings = f"{pieces.base}.{pieces.before[0]}"
    types = _takes_types(model)
    for name, module in model.get_submodule(embeddings).named_modules():
        if not isinstance(module, nn.Embedding) or not name:
            continue
        positions = _looked_up(model, module, plain)
        if positions is None or not _counts_up(positions):
            continue
        first = int(positions[0, 0])
        with_padding = _looked_up(model, module, words)
        padding = getattr(model.config, "pad_token_id", None)
        if with_padding is None or torch.equal(with_padding, positions):
            padding = None  # It is counted like any other word.
        table = f"{embeddings}.{name}"
        return Encoding(first, padding, table, types)
    return Encoding(types=types)


def _takes_types(model: Any) -> bool:
    """Whether a model tells segments apart."""
    asked = inspect.signature(type(model).forward).parameters
    known = getattr(model.config, "type_vocab_size", 0)
    return "token_type_ids" in asked and bool(known)


def _counts_up(positions: Tensor) -> bool:
    """Whether each number of a row is one more than the number before it."""
    steps = positions.diff(dim=1)
    return bool((steps == 1).all())


def _looked_up(model: Any, table: nn.Embedding, words: Tensor) -> Tensor | None:
    """What a table is asked for, a row for each row of words; None if it is not asked for that many."""
    asked: list[Tensor] = []
    hook = table.register_forward_pre_hook(lambda _, given: asked.append(given[0]))
    with torch.no_grad():
        model(words)
    hook.remove()
    if not asked or asked[0].shape[-1:] != words.shape[-1:]:
        return None
    return asked[0].expand_as(words)
