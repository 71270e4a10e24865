"""A model is a stack of pieces; a part is a run of them, cut out where a partition says.

    tokens ─► embed ─► layer 0 ─► layer 1 ─► layer 2 ─► … ─► layer L-1 ─► head ─► logits
             └────────── part 0 ─────────┘ └─── part 1 ───┘ └───── last part ─────┘
                                          x                x
                                    (batch, tokens, width) flows between parts

A part has the shape of the model with the other pieces left out, so `layers.3.mlp.up.weight` is called so in the model
and in whichever part holds it: what is saved under these names can be read back into any other split.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

from torch import Tensor, nn

from penstock.carry import Slice
from penstock.errors import ShapeError
from penstock.models import hf


# ---------------------------------------------------------------- sizes
def require_sizes(least: int, **sizes: int) -> None:
    """Refuses any size under `least`, by its name."""
    for name, size in sizes.items():
        if size < least:
            raise ShapeError(f"{name} must be at least {least}, not {size}")


def require_multiple(whole: str, size: int, by: str, of: int) -> None:
    """Refuses a `size` that does not cut into `of` equal pieces; says which ones near it do."""
    if size % of:
        near = " or ".join(
            str(fit) for fit in (size // of * of, -(-size // of) * of) if fit
        )
        raise ShapeError(
            f"{whole} must be a multiple of {by}: {size} is not one of {of}; {near} is"
        )


# ---------------------------------------------------------------- the stack
class Stack(nn.Module):
    """Embedding, equal layers, head, one after the other; the shape that Llama, GPT and Bert share.

    `rotary`, where there is one, has no weights and is asked once a call; its answer goes to every layer beside x.
    """

    unsliceable = "its tokens see those after them, so no slice can be run before the whole sequence is there"

    def __init__(
        self,
        width: int,
        embed: nn.Module,
        layers: Iterable[nn.Module],
        head: nn.Module,
        rotary: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.width = width
        self.embed = embed
        self.layers = nn.ModuleList(layers)
        self.head = head
        if rotary is not None:
            self.rotary = rotary


class Decoder(Stack):
    """A stack whose tokens see only those before them: a sequence can be run slice by slice."""

    unsliceable = ""

    def forward(self, tokens: Tensor, piece: Slice | None = None) -> Tensor:
        """(batch, tokens) of token ids to (batch, tokens, vocab) of logits; of a slice, if `piece` says so."""
        logits: Tensor = self.head(
            _through(self, self.layers, _enter(self, tokens, piece), piece)
        )
        return logits


def draw_weights(model: nn.Module, std: float = 0.02) -> None:
    """Normal weights, zero biases and a zero vector for padding; norms stay the identity they are born as."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for (
        module
    ) in model.modules():  # last: the weight of a tied head is drawn again above
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight.data[module.padding_idx])


def find_anatomy(model: nn.Module) -> hf.Anatomy:
    """Of one of our models, a part that is all of one, or a Hugging Face decoder; refuses what it does not know."""
    if isinstance(model, Part):
        if not (model.first and model.last):
            raise ShapeError(
                f"a part of the layers {model.begin}:{model.end} is no whole model: it cannot be split"
            )
        return model.anatomy
    if not isinstance(model, Stack):
        return hf.hf_anatomy(model)
    layers = tuple(f"layers.{i}" for i in range(len(model.layers)))
    rotary = ("rotary",) if hasattr(model, "rotary") else ()
    return hf.Anatomy(
        model.width,
        ("embed",),
        layers,
        ("head",),
        rotary,
        _enter,
        _through,
        model.unsliceable,
    )


def _enter(root: nn.Module, tokens: Tensor, piece: Slice | None) -> Tensor:
    embed = root.get_submodule("embed")
    return cast(
        Tensor,
        embed(tokens)
        if isinstance(embed, nn.Embedding)
        else embed(tokens, *_beside(piece)),
    )


def _through(
    root: nn.Module, layers: Iterable[nn.Module], x: Tensor, piece: Slice | None
) -> Tensor:
    angles = (
        root.get_submodule("rotary")(x, *_beside(piece))
        if hasattr(root, "rotary")
        else ()
    )
    for layer in layers:
        x = layer(x, *angles, *_beside(piece))
    return x


def _beside(piece: Slice | None) -> tuple[Slice, ...]:
    """A layer that knows nothing of slices runs as long as there are none."""
    return () if piece is None else (piece,)


def model_width(model: nn.Module) -> int:
    """Features of the hidden state that flows from part to part."""
    return find_anatomy(model).width


def layer_count(model: nn.Module) -> int:
    """Layers that a partition of the model must add up to."""
    return len(find_anatomy(model).layers)


# ---------------------------------------------------------------- the parts
class Part(nn.Module):
    """The layers `begin` to `end` of a model, after the embedding if `first`, before the head if `last`."""

    def __init__(
        self,
        anatomy: hf.Anatomy,
        layers: tuple[int, int],
        ends: tuple[bool, bool],
        tied: dict[str, str],
    ):
        super().__init__()
        self.anatomy = anatomy
        self.begin, self.end = layers
        self.first, self.last = ends
        self.tied = tied
        self.shared: dict[
            str, tuple[int, ...]
        ] = {}  # tied parameters that several parts hold; filled by `split`

    @property
    def paths(self) -> tuple[str, ...]:
        """Names of the pieces that hold weights, in the order they run."""
        embed = self.anatomy.embed if self.first else ()
        head = self.anatomy.head if self.last else ()
        return (*embed, *self.anatomy.layers[self.begin : self.end], *head)

    @property
    def unsliceable(self) -> str:
        """Why it cannot be run slice by slice; empty if it can."""
        layers = (
            self.get_submodule(path)
            for path in self.anatomy.layers[self.begin : self.end]
        )
        checkpointed = any(
            getattr(layer, "gradient_checkpointing", False) for layer in layers
        )
        return self.anatomy.unsliceable or (hf.CHECKPOINTED if checkpointed else "")

    @property
    def remembers_lengths(self) -> bool:
        """Whether the length of one sequence changes what the part computes for another."""
        return any(
            hf.remembers_lengths(self.get_submodule(path))
            for path in self.anatomy.everywhere
        )

    def refuse_lengths(self, lengths: Sequence[int]) -> None:
        """Raises if a batch with these longest sequences (of packed rows: documents), one a micro-batch, cannot be run.

        A part checks what it sees by itself. Replicas see only some of the micro-batches, so a batch is checked whole.
        """
        for path in self.anatomy.everywhere:
            hf.refuse_lengths(self.get_submodule(path), lengths)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        """Token ids in if `first`, logits out if `last`, hidden states else; of a slice, if `piece` says so."""
        if (
            piece is not None
            and (piece.partial or self.anatomy.unsliceable)
            and self.unsliceable
        ):
            raise ShapeError(f"cannot run a slice: {self.unsliceable}")
        if self.first:
            x = self.anatomy.enter(self, x, piece)
        if self.begin < self.end:
            layers = [
                self.get_submodule(path)
                for path in self.anatomy.layers[self.begin : self.end]
            ]
            x = self.anatomy.through(self, layers, x, piece)
        for path in self.anatomy.head if self.last else ():
            x = self.get_submodule(path)(x)
        return x

    def whole_names(self) -> dict[str, nn.Parameter]:
        """Its parameters under their names in the whole model, a tied one under its first name there."""
        return {
            self.tied.get(name, name): parameter
            for name, parameter in self.named_parameters()
        }

    def extra_repr(self) -> str:
        """Which layers, and what else."""
        ends = [
            word
            for word, there in (("embedding", self.first), ("head", self.last))
            if there
        ]
        return ", ".join([f"layers {self.begin}:{self.end}", *ends])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Part:
        """Torch, where it makes new parameters (`to_empty`), would make two of a tied one; here it stays one."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self

    def tie(self) -> None:
        """Makes one parameter again of what should be one."""
        held = dict(self.named_parameters(remove_duplicate=False))
        for other, name in self.tied.items():
            if other in held and name in held:
                path, _, leaf = other.rpartition(".")
                setattr(self.get_submodule(path), leaf, held[name])


def split(model: nn.Module, partition: Sequence[int]) -> list[Part]:
    """Cuts a model into parts of so many layers each, (3, 2, 3) say. The parts share the model's own parameters:

    embed  0 1 2 │ 3 4 │ 5 6 7  head
          part 0    1       2
    """
    anatomy = find_anatomy(model)
    _check(tuple(partition), len(anatomy.layers))
    tied, bounds = _tied(model), pairwise(accumulate(partition, initial=0))
    parts = [
        Part(anatomy, layers, (index == 0, index == len(partition) - 1), tied)
        for index, layers in enumerate(bounds)
    ]
    for part in parts:
        _fill(part, model)
    shared = shared_names(parts)
    for part in parts:
        part.shared = shared
    return parts


def part_parameters(part: Part) -> dict[str, nn.Parameter]:
    """A part's parameters under their names in the whole model, a tied one under its first name there."""
    return part.whole_names()


def shared_names(parts: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    """Names of tied parameters that live in several parts, and in which: {"embed.weight": (0, 2)}."""
    owners: dict[str, tuple[int, ...]] = {}
    for index, part in enumerate(parts):
        for name in part_parameters(part):
            owners[name] = (*owners.get(name, ()), index)
    return {name: held for name, held in owners.items() if len(held) > 1}


def _check(partition: tuple[int, ...], layers: int) -> None:
    require_sizes(1, parts=len(partition))
    require_sizes(
        0, **{f"layers of part {part}": count for part, count in enumerate(partition)}
    )
    for part in range(1, len(partition) - 1):
        if not partition[part]:
            raise ShapeError(
                f"part {part} of {partition} is empty: only the first and the last may have 0 layers"
            )
    if sum(partition) != layers:
        raise ShapeError(
            f"the partition {partition} has {sum(partition)} layers, the model {layers}"
        )


def _tied(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter, with its first one."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {
        name: first[id(parameter)]
        for name, parameter in names
        if first[id(parameter)] != name
    }


def _fill(part: Part, model: nn.Module) -> None:
    """Pieces with weights are the model's own; what is everywhere is copied, as parts may live on different devices."""
    for path in part.paths:
        _graft(part, path, model.get_submodule(path))
    for path in part.anatomy.everywhere:
        _graft(part, path, copy.deepcopy(model.get_submodule(path)))
    part.training = model.training


def _graft(root: nn.Module, path: str, module: nn.Module) -> None:
    *way, leaf = path.split(".")
    for name in way:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(leaf, module)
