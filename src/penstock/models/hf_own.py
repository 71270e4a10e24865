"""What a user has changed in a model: own modules are tried, and hooks that parts would run wrongly are refused.

    class and config        tried on a small model of transformers' own modules      `penstock.models.hf_trial`
    replaced or patched     the user's layer itself, on random hidden states         here
    modules, and hooks
                            whole sequence  ══?══  slices, one after the other
                            a document      ══?══  the same document in one row with another

A layer is tried if one of its modules has another class than the small model has there, another forward, or a hook.
Everything runs on copies, so the trial leaves no trace.

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.hf import Pieces
from penstock.models.hf_part import Runner, graft, runner_class
from penstock.models.slice import Carry

TOKENS = 9  # of the sequence in a trial
CUTS = (0, 4, 6, TOKENS)
BORDER = CUTS[1]  # between two documents
SEED = 1
SLACK = 2e-4  # relative difference that rounding in float32 explains, with wide margins
ROUNDINGS = (
    16  # in the type of the weights, that may separate two ways to compute the same
)
OURS = "penstock."  # where forwards come from with which linear layers defer their weight gradients
_one_at_a_time = Lock()  # ranks may be threads that hold the same part


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


# ---------------------------------------------------------------- which pieces are tried
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
    with _one_at_a_time:
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
    base = pieces.base
    everywhere = tuple(f"{base}.{name}" for name in pieces.everywhere)
    shared = ""  # a module that every layer uses, and that is not as it was
    for name, path in zip(pieces.everywhere, everywhere, strict=True):
        shared = shared or _first_own(part, path, name, pieces.stock)
    for number in layers:
        path = f"{base}.{pieces.layers}.{number}"
        own = _first_own(part, path, pieces.layers, pieces.stock) or shared
        if own:
            alone = range(number, number + 1)
            yield OwnPiece(alone, (False, False), (path, *everywhere), own)
    first, last = ends
    before = {name: f"{base}.{name}" for name in pieces.before}
    after = {name: f"{base}.{name}" for name in pieces.after}
    after |= {name: name for name in pieces.outside}
    sides = [(before, range(0), (True, False))] if first else []
    end = range(layers.stop, layers.stop)
    sides += [(after, end, (False, True))] if last else []
    for side, none, its_ends in sides:
        for name, path in side.items():
            own = _first_own(part, path, name, pieces.stock)
            if own:
                yield OwnPiece(none, its_ends, (*side.values(), *everywhere), own)
                break


def _first_own(part: nn.Module, path: str, name: str, stock: Stock) -> str:
    """The path of the first module in a piece that is not transformers' own; empty if all are."""
    for inner, trait in traits(part.get_submodule(path)):
        if (name, trait) not in stock:
            return f"{path}.{inner}" if inner else path
    return ""


# ---------------------------------------------------------------- the trial
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
        if slices and not self.near(self.run_sliced(), whole):
            return "with it, slices do not give what the whole sequence gives"
        alone = self.run(BORDER, TOKENS)
        if not self.near(self.run_packed()[:, BORDER:], alone):
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

    def run_sliced(self) -> Tensor:
        """All tokens, slice by slice."""
        runner, carry = self.runner(), Carry(TOKENS)
        slices = [
            runner(self.x[:, begin:end], carry.open(begin, end))
            for begin, end in pairwise(CUTS)
        ]
        return torch.cat(slices, dim=1)

    def run_packed(self) -> Tensor:
        """All tokens as two documents in each row."""
        starts = torch.zeros(2, TOKENS, dtype=torch.long, device=self.device)
        starts[:, BORDER:] = BORDER
        return self.runner()(self.x, Carry(TOKENS, starts).open(0, TOKENS))

    def near(self, one: Tensor, other: Tensor) -> bool:
        """Whether two results differ by no more than rounding in the type of the weights."""
        slack = max(SLACK, ROUNDINGS * torch.finfo(self.dtype).eps)
        return one.shape == other.shape and near(one, other, slack=slack)


def near(one: Tensor, other: Tensor, least: float = 0.0, slack: float = SLACK) -> bool:
    """Whether two tensors differ by no more than rounding explains, in numbers of at least this size."""
    one, other = one.detach(), other.detach()
    scale = max(float(other.abs().max()), least, 1e-6)
    return float((one - other).abs().max()) <= slack * scale


def first_line(error: Exception) -> str:
    """Say in one line what an error is."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


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
