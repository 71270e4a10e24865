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

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.hf import Anatomy, Encoding, Pieces, find_pieces, small_config
from penstock.models.hf_own import Stock, stock_of
from penstock.models.hf_part import (
    UNSLICEABLE,
    EncoderRunner,
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
from penstock.models.slice import Carry

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


DOCUMENTS = (4, 5)  # tokens of two documents in one row
PADDING = 3  # tokens of padding in one row
# Where attention sees both ways, the bias of its keys changes nothing, and its gradient is rounding alone. So gradients
# count as no smaller than this share of the largest one.
SMALL_GRADIENT = 0.05
WORDS_IN_CONFIG = ("pad_token_id", "mask_token_id")


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


# ---------------------------------------------------------------- the trial
def fault_of_encoder(model: Any, pieces: Pieces, tokens: Tensor) -> str:
    """What is wrong when two parts run one after the other; empty if they are the whole model."""
    logits = model(tokens).logits
    if logits.shape != (*tokens.shape, model.config.vocab_size):
        return "it does not give a logit for every word at every token"
    if not _sees_later_words(model, tokens, logits):
        return "its words do not see later words, so it is not an encoder"
    types = _draw_types(model, pieces, tokens)
    case = _Case(model, pieces, tokens, types)
    for check in (_as_they_are, _with_padding, _with_documents):
        fault = check(case)
        if fault:
            return fault
    return ""


def _sees_later_words(model: Any, tokens: Tensor, logits: Tensor) -> bool:
    """Whether another last word changes the logits of the words before it."""
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % model.config.vocab_size
    before = model(other).logits[:, :-1]
    return not torch.equal(before, logits[:, :-1])


@dataclass(frozen=True, slots=True)
class _Case:
    """A model and the rows that it is tried on."""

    model: Any
    pieces: Pieces
    tokens: Tensor
    types: Tensor | None

    def whole(self, begin: int, end: int, mask: Tensor | None = None) -> Tensor:
        """The logits of the whole model for some of the tokens of each row."""
        arguments: dict[str, Any] = {"attention_mask": mask}
        if self.types is not None:
            arguments["token_type_ids"] = self.types[:, begin:end]
        logits: Tensor = self.model(self.tokens[:, begin:end], **arguments).logits
        return logits

    def parts(self, mask: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """The logits of two parts, one after the other."""
        model = self.model
        layers = range(model.config.num_hidden_layers)
        tokens = self.tokens.shape[1]

        def run(own: range, ends: tuple[bool, bool], x: Tensor) -> Tensor:
            runner = EncoderRunner(model, self.pieces, model, own, ends)
            piece = None
            if starts is not None:
                piece = Carry(tokens, starts).open(0, tokens)
            is_first, _ = ends
            types = self.types if is_first else None
            return runner(x, piece, types, mask)

        cut = max(1, len(layers) // 2)
        x = run(layers[:cut], (True, False), self.tokens)
        return run(layers[cut:], (False, True), x)


def _draw_types(model: Any, pieces: Pieces, tokens: Tensor) -> Tensor | None:
    """A random type for every word; None if the model takes no types."""
    if pieces.encoding is None or not pieces.encoding.types:
        return None
    return torch.randint(0, model.config.type_vocab_size, tokens.shape)


def _as_they_are(case: _Case) -> str:
    """The fault in rows that are full of text."""
    tokens = case.tokens.shape[1]
    counts = torch.ones_like(case.tokens, dtype=torch.bool)

    def whole() -> Tensor:
        return case.whole(0, tokens)

    return _difference(case, counts, whole, case.parts, "rows of text")


def _with_padding(case: _Case) -> str:
    """The fault if a mask hides the end of a row."""
    tokens = case.tokens.shape[1]
    mask = torch.ones_like(case.tokens)
    mask[0, -PADDING:] = 0

    def whole() -> Tensor:
        return case.whole(0, tokens, mask)

    def parts() -> Tensor:
        return case.parts(mask)

    return _difference(case, mask == 1, whole, parts, "rows with padding")


def _with_documents(case: _Case) -> str:
    """The fault if each row has two documents, which the whole model sees one by one."""
    tokens = case.tokens.shape[1]
    border = DOCUMENTS[0]
    starts = torch.zeros_like(case.tokens)
    starts[:, border:] = border
    counts = torch.ones_like(case.tokens, dtype=torch.bool)

    def whole() -> Tensor:
        documents = [case.whole(0, border), case.whole(border, tokens)]
        return torch.cat(documents, dim=1)

    def parts() -> Tensor:
        return case.parts(starts=starts)

    return _difference(case, counts, whole, parts, "documents in one row")


def _difference(
    case: _Case,
    counts: Tensor,
    whole: Callable[[], Tensor],
    parts: Callable[[], Tensor],
    what: str,
) -> str:
    """Where the logits that count, or the gradients, are not those of the whole model; empty if they all are."""
    counted = counts[..., None]
    expected = whole().where(counted, 0.0)
    expected_gradients = _gradients(case.model, expected)
    try:
        found = parts().where(counted, 0.0)
    except Exception as error:
        return f"its forward does not run in parts, for {what} ({first_line(error)})"
    if not near(found, expected):
        return f"its parts, one after the other, do not give its logits for {what}"
    found_gradients = _gradients(case.model, found)
    other = _other_gradient(expected_gradients, found_gradients)
    if other:
        return f"the gradient of {other} in its parts is not that of the whole model, for {what}"
    return ""


def _gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    """The gradients of the weights for a sum of the logits, in which each has a weight of its own."""
    weights = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)
    loss = (logits * weights).sum()
    torch.autograd.backward(loss)
    return take_gradients(model)


def _other_gradient(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """The first weight whose gradient was not found as expected; empty if all were."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    least = SMALL_GRADIENT * largest
    for name, gradient in expected.items():
        if name not in found or not near(found[name], gradient, least):
            return name
    return ""
