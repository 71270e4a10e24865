"""Tries a class of Hugging Face models on a small model before any part of it is used, and what a user has changed.

    logits and gradients of the whole model                 ══?══  those of two parts, one after the other
    logits of a decoder                                     ══?══  those of slices, and of documents in one row
    an encoder with an attention_mask that hides padding    ══?══  two parts with that mask
    an encoder on documents one by one                      ══?══  two parts with both in one row

The small model (`small_config`) keeps everything that changes what is computed. So a class that does something between
its pieces which parts do not do is refused with the first weight whose gradient differs, and one whose attention cannot
go on from earlier keys runs whole sequences only.

How an encoder counts positions is read off its embedding of positions: the position of the first word, and whether
padding is counted. The words of the trial include those of padding and of the mask, so a class that treats them in a
way that parts do not is refused.

Modules that a user has replaced or patched are tried themselves, on random hidden states:

    whole sequence  ══?══  slices, one after the other
    a document      ══?══  the same document in one row with another

A layer is tried if one of its modules has another class than the small model has there, another forward, or a hook.
Everything runs on copies, so the trial leaves no trace. Hooks that parts would run wrongly are refused:

    LlamaForCausalLM          taken apart: a hook here would run in every part, in none, or in the wrong one
    ├─ model                  taken apart
    │  ├─ embed_tokens          whole, in the first part: its hooks run where they always ran
    │  ├─ layers.0, layers.1    whole
    │  ├─ norm                  whole, in the last part
    │  └─ rotary_emb          copied into every part: a hook would run once for each of them
    └─ lm_head                  whole
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.hf import (
    BUILDING,
    Anatomy,
    Encoding,
    Pieces,
    find_pieces,
    small_config,
)
from penstock.models.hf_part import (
    UNSLICEABLE,
    LayerCall,
    Runner,
    attention_of,
    graft,
    refuse_kernel,
    runner_class,
)
from penstock.models.slice import Carry, Slice

TOKENS = 9  # of the sequences in a trial
CUTS = (0, 4, 6, TOKENS)
BORDER = CUTS[1]  # between two documents in one row
PADDING = 3  # tokens of padding in one row
SEED = 1
SLACK = 2e-4  # relative difference that rounding in float32 explains, with wide margins
ROUNDINGS = (
    16  # in the type of the weights, that may separate two ways to compute the same
)
# Where attention sees both ways, the bias of its keys changes nothing, and its gradient is rounding alone. So gradients
# count as no smaller than this share of the largest one.
SMALL_GRADIENT = 0.05
WORDS_IN_CONFIG = ("pad_token_id", "mask_token_id")
OURS = "penstock."  # where forwards come from with which linear layers defer their weight gradients


# ---------------------------------------------------------------- what is compared
def in_slices(runner: Runner, x: Tensor) -> Tensor:
    """What a runner makes of all tokens, slice by slice."""
    carry = Carry(TOKENS)
    slices = [
        runner(x[:, begin:end], carry.open(begin, end)) for begin, end in pairwise(CUTS)
    ]
    return torch.cat(slices, dim=1)


def two_documents(x: Tensor) -> Slice:
    """All tokens as two documents in each row."""
    starts = torch.zeros(len(x), TOKENS, dtype=torch.long, device=x.device)
    starts[:, BORDER:] = BORDER
    return Carry(TOKENS, starts).open(0, TOKENS)


def near(one: Tensor, other: Tensor, least: float = 0.0, slack: float = SLACK) -> bool:
    """Whether two tensors differ by no more than rounding explains, in numbers of at least this size."""
    one, other = one.detach(), other.detach()
    scale = max(float(other.abs().max()), least, 1e-6)
    return float((one - other).abs().max()) <= slack * scale


def first_line(error: Exception) -> str:
    """Say in one line what an error is."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


# ---------------------------------------------------------------- the trial of a class
def tried_anatomy(model: nn.Module) -> Anatomy:
    """Return the anatomy of a Hugging Face model, after a trial of its class and config."""
    # This refuses what no trial needs to show.
    encodes = find_pieces(model).encoding is not None
    config: Any = model.config
    kernel = str(config._attn_implementation)
    refuse_kernel(kernel)
    kernel = kernel if kernel in ("eager", "sdpa") else "sdpa"
    small = small_config(config, encodes)
    said = json.dumps(small.to_dict(), sort_keys=True, default=str)
    text = f"{type(small).__name__} {kernel} {said}"
    kind = next(
        one for one in type(model).__mro__ if one.__module__.startswith("transformers.")
    )
    with BUILDING:
        found = _try_once(kind, SmallConfig(text, small, kernel), _forwards_of(model))
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


@dataclass(frozen=True, slots=True)
class SmallConfig:
    """The config of a small model. Two are equal if they say the same, so that trials can be cached."""

    text: str
    config: Any = field(compare=False)
    kernel: str = field(compare=False)


def _forwards_of(model: nn.Module) -> frozenset[object]:
    """The forwards of all of transformers' classes in a model, which anybody may have replaced since the last trial."""
    kinds = {type(module) for module in model.modules()}
    theirs = [kind for kind in kinds if kind.__module__.startswith("transformers.")]
    return frozenset(kind.forward for kind in theirs)


@lru_cache(maxsize=64)
def _try_once(kind: Any, small: SmallConfig, forwards: frozenset[object]) -> Findings:
    """Try a class of models, once for each config, and again if a forward has changed."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        torch.manual_seed(SEED)
        what = "a small model with its config does not run ({}); do the sizes in its config fit together?"
        try:
            model = random_model(kind, small)
            encodes = find_pieces(model).encoding is not None
            if encodes:
                tokens = trial_words(model, 2, TOKENS)
            else:
                tokens = torch.randint(0, model.config.vocab_size, (2, TOKENS))
            model(tokens, **_plainly(encodes))
            what = "its forward cannot be followed ({})"
            return _try_small_model(model, tokens)
        except PenstockError:
            raise
        except Exception as error:  # of transformers, or of a user's own modules
            return Findings(what.format(first_line(error)))


def random_model(kind: Any, small: SmallConfig) -> Any:
    """A small model whose biases and norms are random too."""
    config = copy.deepcopy(small.config)
    config._attn_implementation = small.kernel
    model: Any = kind(config).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()


def _try_small_model(model: Any, tokens: Tensor) -> Findings:
    called, tuples = _watch_calls(model, find_pieces(model), tokens)
    pieces = replace(find_pieces(model, called), tuples=tuples)
    fault, unsliceable, types = "", UNSLICEABLE, None
    if pieces.encoding is None:
        unsliceable = _fault_of_slices(_Small(model, pieces, tokens))
        pieces = replace(pieces, cached=not unsliceable)
    else:
        plain = trial_words(model, 2, TOKENS, special=False)
        encoding = find_encoding(model, pieces, plain, tokens)
        pieces = replace(pieces, encoding=encoding)
        fault = _why_no_encoder(model, tokens)
        if encoding.types:
            types = torch.randint(0, model.config.type_vocab_size, tokens.shape)
    fault = fault or _fault_of_parts(_Small(model, pieces, tokens, types))
    stock = stock_of(model, pieces)
    return Findings(fault, unsliceable, tuples, called, pieces.encoding, stock)


def _plainly(encodes: bool) -> dict[str, bool]:
    """How a whole model is called; only decoders have a cache to do without."""
    return {} if encodes else {"use_cache": False}


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
        self, begin: int = 0, end: int = TOKENS, mask: Tensor | None = None
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

    def parts(self, mask: Tensor | None = None, packed: bool = False) -> Tensor:
        """The logits of two parts, one after the other."""
        layers = range(self.model.config.num_hidden_layers)
        cut = max(1, len(layers) // 2)
        first = self.runner(layers[:cut], (True, False))
        last = self.runner(layers[cut:], (False, True))
        pieces = [two_documents(self.tokens) if packed else None for _ in range(2)]
        x = first(self.tokens, pieces[0], self.types, mask)
        return last(x, pieces[1], None, mask)

    def runner(self, layers: range, ends: tuple[bool, bool]) -> Runner:
        """A part of the model."""
        kind = runner_class(self.pieces)
        return kind(self.model, self.pieces, self.model, layers, ends)


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
        cases = [
            _Case("rows of text", every, small.whole, small.parts),
            _Case(
                *("rows with padding", mask),
                *(partial(small.whole, mask=mask), partial(small.parts, mask)),
            ),
            _Case(
                *("documents in one row", every),
                *(small.documents, partial(small.parts, packed=True)),
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
    whole = small.whole()
    try:
        for layer in runner.layers:
            assert isinstance(layer, LayerCall)
            attention_of(layer.layer)
        logits = in_slices(runner, small.tokens)
    except Exception as error:
        return f"its layers do not go on from the keys and values of earlier slices ({first_line(error)})"
    if not near(logits, whole):
        return "its slices do not give the logits of the whole sequence"
    packed = runner(small.tokens, two_documents(small.tokens))
    if not near(packed[:, BORDER:], small.whole(BORDER)):
        return "documents in one row do not give the logits that they give alone"
    return ""


# ---------------------------------------------------------------- encoders
def _why_no_encoder(model: Any, tokens: Tensor) -> str:
    """Why a model is no encoder; empty if it is one."""
    logits = model(tokens).logits
    if logits.shape != (*tokens.shape, model.config.vocab_size):
        return "it does not give a logit for every word at every token"
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % model.config.vocab_size
    if torch.equal(model(other).logits[:, :-1], logits[:, :-1]):
        return "its words do not see later words, so it is not an encoder"
    return ""


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


# ---------------------------------------------------------------- what a user has changed
class Trait(NamedTuple):
    """What a module is: where, of which class, with which forward."""

    path: str  # inside its piece, with * for the numbers of lists
    kind: type
    forward: object
    hooked: bool


Stock: TypeAlias = frozenset[tuple[str, Trait]]  # traits, by the name of the piece


def traits(module: nn.Module) -> Iterator[tuple[str, Trait]]:
    """The traits of a module and of all modules inside, by their paths."""
    for path, one in module.named_modules():
        words = ("*" if word.isdigit() else word for word in path.split("."))
        forward = vars(one).get("forward")
        if forward is None or getattr(forward, "__module__", "").startswith(OURS):
            forward = type(one).forward
        forward = getattr(forward, "__func__", forward)
        yield path, Trait(".".join(words), type(one), forward, has_hook(one))


def stock_of(model: nn.Module, pieces: Pieces) -> Stock:
    """The traits of a model as transformers makes it. All layers have the name of their list."""
    count = len(list(model.get_submodule(f"{pieces.base}.{pieces.layers}").children()))
    found = set()
    for name, path in _paths(pieces, range(count), (True, True)):
        for _, trait in traits(model.get_submodule(path)):
            found.add((name, trait))
    return frozenset(found)


def own_traits(
    part: nn.Module, pieces: Pieces, layers: range, ends: tuple[bool, bool]
) -> Stock:
    """The traits of a part that no model of transformers' own modules has."""
    found = set()
    for name, path in _paths(pieces, layers, ends):
        for _, trait in traits(part.get_submodule(path)):
            if (name, trait) not in pieces.stock:
                found.add((path, trait))
    return frozenset(found)


def _paths(
    pieces: Pieces, layers: range, ends: tuple[bool, bool]
) -> Iterator[tuple[str, str]]:
    """The name in a stock, and the path in the model, of each piece of a part."""
    first, last = ends
    names = (*(pieces.before if first else ()), *(pieces.after if last else ()))
    for name in (*names, *pieces.everywhere):
        yield name, f"{pieces.base}.{name}"
    for name in pieces.outside if last else ():
        yield name, name
    for number in layers:
        yield pieces.layers, f"{pieces.base}.{pieces.layers}.{number}"


@dataclass(frozen=True, slots=True)
class OwnPiece:
    """A piece of a part that is to be tried: a layer by its number, or what is before or after all layers."""

    layers: range
    ends: tuple[bool, bool]
    paths: tuple[str, ...]  # of the modules that it consists of
    own: str  # the path of the first module that is not transformers' own


def fault_of_own_modules(
    part: nn.Module,
    source: Runner,
    pieces: Pieces,
    layers: range,
    ends: tuple[bool, bool],
) -> str:
    """Why a part cannot run slice by slice or packed because of a user's own modules; empty if it can.

    A part without numbers is not tried, nor is one whose numbers several processes share.
    """
    tried = list(_own_pieces(part, pieces, layers, ends))
    if not tried or not _has_numbers(part):
        return ""
    with BUILDING:  # ranks may be threads that hold the same part
        for piece in tried:
            fault = _fault_of(part, source, pieces, piece)
            if fault:
                kind = type(part.get_submodule(piece.own)).__name__
                return (
                    f"{piece.own} ({kind}) is not as transformers has it, and {fault}"
                )
    return ""


def _has_numbers(part: nn.Module) -> bool:
    plain = (Tensor, nn.Parameter)
    return all(
        not p.is_meta and (type(p) in plain or not hasattr(p, "device_mesh"))
        for p in part.parameters()
    )


def _own_pieces(
    part: nn.Module, pieces: Pieces, layers: range, ends: tuple[bool, bool]
) -> Iterator[OwnPiece]:
    """The pieces of a part with modules that are not transformers' own.

    What every part has a copy of is tried with each of the layers, which use it.
    """
    first, last = ends
    sides = [(range(number, number + 1), (False, False)) for number in layers]
    sides += [(range(0), (True, False))] if first else []
    sides += [(range(layers.stop, layers.stop), (False, True))] if last else []
    for numbers, its_ends in sides:
        named = list(_paths(pieces, numbers, its_ends))
        mine = [one for one in named if one[0] not in pieces.everywhere]
        for name, path in [*mine, *named] if numbers else mine:
            own = _first_own(part, path, name, pieces.stock)
            if own:
                paths = tuple(path for _, path in named)
                yield OwnPiece(numbers, its_ends, paths, own)
                break


def _first_own(part: nn.Module, path: str, name: str, stock: Stock) -> str:
    """The path of the first module in a piece that is not transformers' own; empty if all are."""
    for inner, trait in traits(part.get_submodule(path)):
        if (name, trait) not in stock:
            return f"{path}.{inner}" if inner else path
    return ""


def _fault_of(part: nn.Module, source: Runner, pieces: Pieces, piece: OwnPiece) -> str:
    """What is wrong with a piece in slices or in packed rows; empty if nothing is.

    It is tried with its own weights and with random ones, because a gate may be closed in a model that is not trained.
    """
    try:
        with torch.no_grad():
            for random in (False, True):
                trial = _Trial(part, source, pieces, piece, random)
                fault = trial.fault()
                if fault:
                    return fault
    except Exception as error:  # a module may raise anything
        return f"it cannot be tried on slices and packed rows ({first_line(error)})"
    return ""


class _Trial:
    """One piece, which runs on copies of its modules. `training` is the mode in which they run."""

    def __init__(
        self,
        part: nn.Module,
        source: Runner,
        pieces: Pieces,
        piece: OwnPiece,
        random: bool,
    ) -> None:
        self.part = part
        self.source = source
        self.pieces = pieces
        self.piece = piece
        self.random = random
        self.training = True
        weights = [p for p in part.parameters() if p.is_floating_point()]
        self.dtype = weights[0].dtype if weights else torch.float32
        self.device = weights[0].device if weights else torch.device("cpu")
        self.x = self._input()

    def fault(self) -> str:
        """What is wrong; empty if nothing is, or if the numbers are too large to tell."""
        whole = self.run(0, TOKENS)
        if not self.near(self.run(0, TOKENS), whole):
            self.training = False  # It draws random numbers.
            whole = self.run(0, TOKENS)
        if not whole.isfinite().all():
            return ""
        slices = self.pieces.encoding is None and self.pieces.cached
        if slices and not self.near(in_slices(self.runner(), self.x), whole):
            return "with it, slices do not give what the whole sequence gives"
        alone = self.run(BORDER, TOKENS)
        packed = self.runner()(self.x, two_documents(self.x))
        if not self.near(packed[:, BORDER:], alone):
            return "with it, documents in one row do not give what they give alone"
        return ""

    def _input(self) -> Tensor:
        dice = torch.Generator().manual_seed(SEED)
        config: Any = self.source.model.config
        first, _ = self.piece.ends
        if first:
            words = torch.randint(config.vocab_size, (2, TOKENS), generator=dice)
            return words.to(self.device)
        x = torch.randn(2, TOKENS, config.hidden_size, generator=dice)
        return x.to(self.device, self.dtype)

    def runner(self) -> Runner:
        """The model with copies of the piece's modules."""
        held = nn.Module()
        memo: dict[int, Any] = {}
        for path in self.piece.paths:
            graft(held, path, copy.deepcopy(self.part.get_submodule(path), memo))
        held.train(self.training)
        for module in held.modules():
            if _drops(module):
                module.training = False
        if self.random:
            _draw(held)
        kind = runner_class(self.pieces)
        model, piece = self.source.model, self.piece
        return kind(model, self.pieces, held, piece.layers, piece.ends)

    def run(self, begin: int, end: int) -> Tensor:
        """Some of the tokens as a sequence of their own."""
        return self.runner()(self.x[:, begin:end], None)

    def near(self, one: Tensor, other: Tensor) -> bool:
        """Whether two results differ by no more than rounding in the type of the weights."""
        slack = max(SLACK, ROUNDINGS * torch.finfo(self.dtype).eps)
        return one.shape == other.shape and near(one, other, slack=slack)


def _draw(held: nn.Module) -> None:
    """Draw all weights, so that nothing is zero and numbers stay of a size."""
    dice = torch.Generator().manual_seed(SEED)
    for parameter in held.parameters():
        if not parameter.is_floating_point():
            continue
        drawn = torch.randn(parameter.shape, generator=dice)
        drawn = (
            drawn / parameter.shape[-1] ** 0.5
            if parameter.dim() > 1
            else 1 + 0.2 * drawn
        )
        parameter.data.copy_(drawn)


def _drops(module: nn.Module) -> bool:
    """Whether a module is a dropout, or has a probability named after it."""
    if "Dropout" in type(module).__name__:
        return True
    return any("drop" in name and type(x) is float for name, x in vars(module).items())


# Where torch keeps the hooks of a module, and what they are.
HOOKS: Mapping[str, str] = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


def refuse_own_calls(
    model: nn.Module, pieces: Iterable[str], copied: Iterable[str] = ()
) -> None:
    """Refuse a model unless only its `pieces`, and what is inside of them, have hooks and forwards of their own.

    Every part gets a copy of the `copied` pieces. Such a copy may have a forward of its own, but no hook.
    """
    pieces = list(pieces)
    kept = ", ".join(pieces[:2]) or "its layers"
    way_out = f"register it on a module that stays whole, such as {kept}"
    for path in _above([*pieces, *copied]):
        module = model.get_submodule(path)
        hook = _hook_of(module)
        if hook:
            raise PenstockError(
                f"cannot split this {type(model).__name__}: {_named(path, module)} has {hook}, but parts take this "
                f"module apart, and would run the hook several times or not at all\n  {way_out}"
            )
        if "forward" in vars(module):
            raise PenstockError(
                f"cannot split this {type(model).__name__}: the forward of {_named(path, module)} has been replaced, "
                "and parts would not run it\n"
                "  move what it adds into the layers, the embedding or the loss"
            )
    for path in copied:
        hook = _hook_of(model.get_submodule(path))
        if hook:
            raise PenstockError(
                f"cannot split this {type(model).__name__}: {path} has {hook}, but every part gets a copy of this "
                f"module, so the hook would run once for each part\n  {way_out}"
            )


def has_hook(module: nn.Module) -> bool:
    """Whether a hook runs before or after the forward or backward of a module."""
    return bool(_hook_of(module))


def _hook_of(module: nn.Module) -> str:
    """What kind of hook a module has; empty if it has none."""
    for name, kind in HOOKS.items():
        if vars(module).get(name):
            return kind
    return ""


def _above(pieces: Iterable[str]) -> list[str]:
    """The modules that hold these pieces, the model itself first."""
    above: dict[str, None] = {"": None}
    for piece in pieces:
        words = piece.split(".")
        above |= dict.fromkeys(".".join(words[:end]) for end in range(1, len(words)))
    return list(above)


def _named(path: str, module: nn.Module) -> str:
    return f"{path} ({type(module).__name__})" if path else "the model itself"
