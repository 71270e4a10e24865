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
    Encoding,
    ModelLayout,
    Pieces,
    find_pieces,
    small_config,
    stack_of,
)
from penstock.models.hf_part import (
    UNSLICEABLE,
    LayerCall,
    Portion,
    Runner,
    attention_of,
    graft,
    refuse_kernel,
    runner_of,
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
class Case(NamedTuple):
    """Rows that are run in two ways, which must give the same."""

    fails: str  # what is wrong if the second way raises an error
    differs: str  # what is wrong if it gives something else
    whole: Callable[[], Tensor]
    parts: Callable[[], Tensor]
    # What else is wrong if they give the same.
    more: Callable[[Tensor, Tensor], str] = lambda expected, found: ""


Ways: TypeAlias = tuple[Callable[[], Tensor], Callable[[], Tensor]]


def first_fault(cases: Iterable[Case], slack: float = SLACK) -> str:
    """What is wrong with the first case whose two ways differ; empty if none does."""
    for case in cases:
        expected = case.whole()
        try:
            found = case.parts()
        except Exception as error:  # a module may raise anything
            return f"{case.fails} ({first_line(error)})"
        if not near(found, expected, slack=slack):
            return case.differs
        fault = case.more(expected, found)
        if fault:
            return fault
    return ""


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
    if one.shape != other.shape:
        return False
    one, other = one.detach(), other.detach()
    scale = max(float(other.abs().max()), least, 1e-6)
    return float((one - other).abs().max()) <= slack * scale


def first_line(error: Exception) -> str:
    """Say in one line what an error is."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


# ---------------------------------------------------------------- the trial of a class
def tried_layout(model: nn.Module) -> ModelLayout:
    """Return the layout of a Hugging Face model, after a trial of its class and config."""
    # This refuses what no trial needs to show.
    encodes = find_pieces(model).encoding is not None
    config: Any = model.config
    kernel = str(config._attn_implementation)
    refuse_kernel(kernel)
    kernel = kernel if kernel in ("eager", "sdpa") else "sdpa"
    small = small_config(config, encodes)
    small._attn_implementation = kernel
    small.use_cache = False
    said = json.dumps(small.to_dict(), sort_keys=True, default=str)
    text = f"{type(small).__name__} {kernel} {said}"
    kind = next(
        one for one in type(model).__mro__ if one.__module__.startswith("transformers.")
    )
    with BUILDING:
        found = _try_once(kind, SmallConfig(text, small), _forwards_of(model))
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
        theirs=found.theirs,
    )
    return pieces.layout(config, found.unsliceable)


@dataclass(frozen=True, slots=True)
class Findings:
    """What a trial has found out about a class of models."""

    fault: str = ""  # why it cannot be split
    unsliceable: str = ""  # why it cannot be sliced
    tuples: bool = False  # whether its layers return tuples
    called: tuple[str, ...] = ()  # modules of its base model, as its forward calls them
    encoding: Encoding | None = None  # of an encoder
    theirs: TheirTraits = frozenset()  # what its modules are


@dataclass(frozen=True, slots=True)
class SmallConfig:
    """The config of a small model. Two are equal if they say the same, so that trials can be cached."""

    text: str
    config: Any = field(compare=False)


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
            model = random_model(kind, small.config)
            if find_pieces(model).encoding is not None:
                tokens = trial_words(model, 2, TOKENS)
            else:
                tokens = torch.randint(0, model.config.vocab_size, (2, TOKENS))
            model(tokens)
            what = "its forward cannot be followed ({})"
            return _try_small_model(model, tokens)
        except PenstockError:
            raise
        except Exception as error:  # of transformers, or of a user's own modules
            return Findings(what.format(first_line(error)))


def random_model(kind: Any, config: Any) -> Any:
    """A small model whose biases and norms are random too."""
    model: Any = kind(copy.deepcopy(config)).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()


def _try_small_model(model: Any, tokens: Tensor) -> Findings:
    called, tuples = _watch_layers(model, find_pieces(model), tokens)
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
    theirs = their_traits(model, pieces)
    return Findings(fault, unsliceable, tuples, called, pieces.encoding, theirs)


Call: TypeAlias = tuple[tuple[Any, ...], object]  # what a module is given, and returns


@torch.no_grad()
def calls_of(
    model: Any, watched: Mapping[str, nn.Module], tokens: Tensor
) -> dict[str, Call]:
    """What some modules of a model are given and return when it is called, in the order of their ends."""
    calls: dict[str, Call] = {}

    def note(name: str, _: nn.Module, given: tuple[Any, ...], result: object) -> None:
        calls.setdefault(name, (given, result))

    hooks = [
        module.register_forward_hook(partial(note, name))
        for name, module in watched.items()
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return calls


def _watch_layers(
    model: Any, pieces: Pieces, tokens: Tensor
) -> tuple[tuple[str, ...], bool]:
    """In which order a model calls the modules of its base model, and whether its layers return tuples."""
    base = model.get_submodule(pieces.base)
    count, encodes = model.config.num_hidden_layers, pieces.encoding is not None
    watched, layers = stack_of(base, count, encodes)
    watched[layers] = base.get_submodule(f"{layers}.0")
    calls = calls_of(model, watched, tokens)
    if pieces.layers not in calls:
        raise PenstockError(
            f"cannot split a {type(model).__name__}: its layers are not called as modules"
        )
    _, result = calls[pieces.layers]
    return tuple(calls), isinstance(result, tuple)


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
        """The logits of the whole model for some of the tokens of each row; zeros for padding."""
        arguments: dict[str, Any] = {}
        if mask is not None:
            arguments["attention_mask"] = mask
        if self.types is not None:
            arguments["token_type_ids"] = self.types[:, begin:end]
        logits: Tensor = self.model(self.tokens[:, begin:end], **arguments).logits
        return _without_padding(logits, mask)

    def documents(self) -> Tensor:
        """The logits of the whole model for the two documents of each row, one by one."""
        return torch.cat([self.whole(0, BORDER), self.whole(BORDER)], dim=1)

    def parts(self, mask: Tensor | None = None, packed: bool = False) -> Tensor:
        """The logits of two parts, one after the other; zeros for padding."""
        layers = range(self.model.config.num_hidden_layers)
        cut = max(1, len(layers) // 2)
        first = self.runner(Portion(layers[:cut], True, False))
        last = self.runner(Portion(layers[cut:], False, True))
        pieces = [two_documents(self.tokens) if packed else None for _ in range(2)]
        x = first(self.tokens, pieces[0], self.types, mask)
        return _without_padding(last(x, pieces[1], None, mask), mask)

    def runner(self, portion: Portion) -> Runner:
        """A part of the model."""
        return runner_of(self.model, self.pieces, self.model, portion)

    def fault_of_gradients(self, what: str, expected: Tensor, found: Tensor) -> str:
        """Which weight has another gradient for the logits of the parts; empty if none has."""
        gradients, own = self._gradients(expected), self._gradients(found)
        least = 0.0
        if self.pieces.encoding is not None:
            largest = max(float(one.abs().max()) for one in gradients.values())
            least = SMALL_GRADIENT * largest
        for name, gradient in gradients.items():
            if name not in own or not near(own[name], gradient, least):
                return f"the gradient of {name} in its parts is not that of the whole model{what}"
        return ""

    def _gradients(self, logits: Tensor) -> dict[str, Tensor]:
        """The gradients of the weights for a sum of the logits, in which each has a weight of its own."""
        weights = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)
        torch.autograd.backward((logits * weights).sum())
        found = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad
                parameter.grad = None
        return found


def _without_padding(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else logits.where(mask[..., None] == 1, 0.0)


def _fault_of_parts(small: _Small) -> str:
    """What is wrong when two parts run one after the other; empty if they are the whole model."""
    plain: Ways = small.whole, small.parts
    ways = {"": plain}
    if small.pieces.encoding is not None:
        mask = torch.ones_like(small.tokens)
        mask[0, -PADDING:] = 0
        padded = partial(small.whole, mask=mask), partial(small.parts, mask)
        packed = small.documents, partial(small.parts, packed=True)
        ways = {
            " for rows of text": plain,
            " for rows with padding": padded,
            " for documents in one row": packed,
        }
    return first_fault(
        Case(
            f"its forward does not run in parts{what}",
            f"its parts, one after the other, do not give its logits{what}",
            whole,
            parts,
            partial(small.fault_of_gradients, what),
        )
        for what, (whole, parts) in ways.items()
    )


@torch.no_grad()
def _fault_of_slices(small: _Small) -> str:
    """Why a decoder cannot run slice by slice; empty if it can."""
    layers = range(small.model.config.num_hidden_layers)
    runner = small.runner(Portion(layers, True, True))

    def slices() -> Tensor:
        for layer in runner.layers:
            assert isinstance(layer, LayerCall)
            attention_of(layer.layer)
        return in_slices(runner, small.tokens)

    def documents() -> Tensor:
        return runner(small.tokens, two_documents(small.tokens))[:, BORDER:]

    refuses = "its layers do not go on from the keys and values of earlier slices"
    sliced = "its slices do not give the logits of the whole sequence"
    packed = "documents in one row do not give the logits that they give alone"
    return first_fault(
        [
            Case(refuses, sliced, small.whole, slices),
            Case(packed, packed, partial(small.whole, BORDER), documents),
        ]
    )


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
    named: list[Any] = [getattr(model.config, key, None) for key in WORDS_IN_CONFIG]
    with_meaning = [word for word in named if word in vocabulary]
    plain = torch.tensor([word for word in vocabulary if word not in with_meaning])
    drawn = torch.randint(0, len(plain), (rows, tokens))
    words = plain[drawn]
    if special:
        for place, word in enumerate(with_meaning):
            words[0, 2 + 3 * place] = word
    return words


def find_encoding(model: Any, pieces: Pieces, plain: Tensor, words: Tensor) -> Encoding:
    """How a model counts positions and whether it takes types; `words` has padding where `plain` has none."""
    asked = inspect.signature(type(model).forward).parameters
    kinds = getattr(model.config, "type_vocab_size", 0)
    types = "token_type_ids" in asked and bool(kinds)
    embeddings = model.get_submodule(f"{pieces.base}.{pieces.before[0]}")
    tables = {
        name: module
        for name, module in embeddings.named_modules()
        if isinstance(module, nn.Embedding) and name
    }
    found = _looked_up(model, tables, plain)
    with_padding = _looked_up(model, tables, words)
    for name, positions in found.items():
        if not bool((positions.diff(dim=1) == 1).all()):
            continue  # They do not count up.
        padding = getattr(model.config, "pad_token_id", None)
        if torch.equal(with_padding.get(name, positions), positions):
            padding = None  # It is counted like any other word.
        table = f"{pieces.base}.{pieces.before[0]}.{name}"
        return Encoding(int(positions[0, 0]), padding, table, types)
    return Encoding(types=types)


def _looked_up(
    model: Any, tables: Mapping[str, nn.Module], words: Tensor
) -> dict[str, Tensor]:
    """What tables are asked for, a row for each row of words; without those that are not asked for that many."""
    calls = calls_of(model, tables, words)
    asked = {name: calls[name][0][0] for name in tables if name in calls}
    return {
        name: places.expand_as(words)
        for name, places in asked.items()
        if places.shape[-1:] == words.shape[-1:]
    }


# ---------------------------------------------------------------- what a user has changed
class Trait(NamedTuple):
    """What a module is: where, of which class, with which forward."""

    path: str  # inside its piece, with * for the numbers of lists
    kind: type
    forward: object
    hooked: bool


TheirTraits: TypeAlias = frozenset[tuple[str, Trait]]  # with the name of the piece
Own: TypeAlias = dict[str, Trait]  # what is not theirs, by its path in the whole model


def _traits(
    model: nn.Module, pieces: Pieces, portion: Portion
) -> Iterator[tuple[str, str, Trait]]:
    """The traits of all modules of a part, each with the name of its piece in all models, and its path."""
    for name, path in _paths(pieces, portion):
        for inner, one in model.get_submodule(path).named_modules():
            words = ("*" if word.isdigit() else word for word in inner.split("."))
            forward = vars(one).get("forward")
            if forward is None or getattr(forward, "__module__", "").startswith(OURS):
                forward = type(one).forward
            forward = getattr(forward, "__func__", forward)
            trait = Trait(".".join(words), type(one), forward, bool(_hook_of(one)))
            yield name, f"{path}.{inner}".removesuffix("."), trait


def their_traits(model: nn.Module, pieces: Pieces) -> TheirTraits:
    """The traits of a model as transformers makes it. All layers have the name of their list."""
    count = len(list(model.get_submodule(f"{pieces.base}.{pieces.layers}").children()))
    everything = Portion(range(count), True, True)
    return frozenset(
        (name, trait) for name, _, trait in _traits(model, pieces, everything)
    )


def own_modules(part: nn.Module, pieces: Pieces, portion: Portion) -> Own:
    """The modules of a part that no model of transformers' own modules has; those of its layers come first."""
    return {
        path: trait
        for name, path, trait in _traits(part, pieces, portion)
        if (name, trait) not in pieces.theirs
    }


def _paths(pieces: Pieces, portion: Portion) -> Iterator[tuple[str, str]]:
    """The name in all models, and the path in this one, of each piece of a part."""
    for number in portion.layers:
        yield pieces.layers, f"{pieces.base}.{pieces.layers}.{number}"
    before = pieces.before if portion.first else ()
    after = pieces.after if portion.last else ()
    for name in (*before, *after, *pieces.everywhere):
        yield name, f"{pieces.base}.{name}"
    for name in pieces.outside if portion.last else ():
        yield name, name


def fault_of_own_modules(part: nn.Module, source: Runner, portion: Portion) -> str:
    """Why a part cannot run slice by slice or packed because of a user's own modules; empty if it can.

    Each of its layers is tried alone, and so is what comes before and after all layers. A part without numbers is not
    tried, nor is one whose numbers several processes share.
    """
    plain = (Tensor, nn.Parameter)
    for p in part.parameters():
        if p.is_meta or (type(p) not in plain and hasattr(p, "device_mesh")):
            return ""
    layers = portion.layers
    tried = [Portion(range(number, number + 1), False, False) for number in layers]
    if portion.first:
        tried.append(Portion(range(0), True, False))
    if portion.last:
        tried.append(Portion(range(layers.stop, layers.stop), False, True))
    with BUILDING:  # ranks may be threads that hold the same part
        for piece in tried:
            own = next(iter(own_modules(part, source.pieces, piece)), "")
            fault = _fault_of(part, source, piece) if own else ""
            if fault:
                kind = type(part.get_submodule(own)).__name__
                return f"{own} ({kind}) is not as transformers has it, and {fault}"
    return ""


def _fault_of(part: nn.Module, source: Runner, piece: Portion) -> str:
    """What is wrong with a piece in slices or in packed rows; empty if nothing is.

    It is tried with its own weights and with random ones, because a gate may be closed in a model that is not trained.
    """
    try:
        with torch.no_grad():
            own = _try_copy(part, source, piece, drawn=False)
            return own or _try_copy(part, source, piece, drawn=True)
    except Exception as error:  # a module may raise anything
        return f"it cannot be tried on slices and packed rows ({first_line(error)})"


def _try_copy(part: nn.Module, source: Runner, piece: Portion, drawn: bool) -> str:
    """What is wrong with copies of the modules of a piece, whose weights may be drawn anew.

    Numbers that are too large tell nothing.
    """
    numbers = (p for p in part.parameters() if p.is_floating_point())
    like = next(numbers, torch.zeros(0))
    slack = max(SLACK, ROUNDINGS * torch.finfo(like.dtype).eps)
    pieces: Pieces = source.pieces
    x = _random_input(source.model.config, piece, like)
    training = True

    def runner() -> Runner:
        held = _copied(part, pieces, piece, training)
        if drawn:
            _draw(held)
        return runner_of(source.model, pieces, held, piece)

    def alone(begin: int, end: int) -> Tensor:
        return runner()(x[:, begin:end], None)

    whole = alone(0, TOKENS)
    if not near(alone(0, TOKENS), whole, slack=slack):
        training = False  # It draws random numbers.
        whole = alone(0, TOKENS)
    if not whole.isfinite().all():
        return ""
    sliced = "with it, slices do not give what the whole sequence gives"
    packed = "with it, documents in one row do not give what they give alone"
    cases = [
        Case(
            packed,
            packed,
            lambda: alone(BORDER, TOKENS),
            lambda: runner()(x, two_documents(x))[:, BORDER:],
        )
    ]
    if pieces.encoding is None and pieces.cached:
        slices = Case(sliced, sliced, lambda: whole, lambda: in_slices(runner(), x))
        cases.insert(0, slices)
    return first_fault(cases, slack)


def _random_input(config: Any, piece: Portion, like: Tensor) -> Tensor:
    """Words for what comes before all layers, and hidden states for the others."""
    dice = torch.Generator().manual_seed(SEED)
    if piece.first:
        words = torch.randint(config.vocab_size, (2, TOKENS), generator=dice)
        return words.to(like.device)
    x = torch.randn(2, TOKENS, config.hidden_size, generator=dice)
    return x.to(like)


def _copied(
    part: nn.Module, pieces: Pieces, piece: Portion, training: bool
) -> nn.Module:
    """Copies of the modules of a piece, in which nothing drops."""
    held = nn.Module()
    memo: dict[int, Any] = {}
    for _, path in _paths(pieces, piece):
        graft(held, path, copy.deepcopy(part.get_submodule(path), memo))
    held.train(training)
    for module in held.modules():
        if _drops(module):
            module.training = False
    return held


def _draw(held: nn.Module) -> None:
    """Draw all weights, so that nothing is zero and numbers stay of a size."""
    dice = torch.Generator().manual_seed(SEED)
    for parameter in held.parameters():
        if not parameter.is_floating_point():
            continue
        drawn = torch.randn(parameter.shape, generator=dice)
        is_matrix = parameter.dim() > 1
        scaled = drawn / parameter.shape[-1] ** 0.5 if is_matrix else 1 + 0.2 * drawn
        parameter.data.copy_(scaled)


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
