"""Splits a model, which is a stack of pieces, into parts. A part is a run of pieces; a partition says where to cut.

    tokens ─► embed ─► layer 0 ─► layer 1 ─► layer 2 ─► … ─► layer L-1 ─► head ─► logits
             └────────── part 0 ─────────┘ └─── part 1 ───┘ └───── last part ─────┘
                                          x                x
                                    (batch, tokens, width) flows between parts

A part has the structure of the model without the other pieces. So `layers.3.mlp.up.weight` has the same name in the
model and in the part that holds it, and weights saved under these names can be loaded into any other split.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

from torch import Tensor, nn

from penstock.errors import PenstockError, ShapeError
from penstock.families import require_sizes
from penstock.models import hf, hf_part, hf_trial
from penstock.models.slice import Slice

OURS = "penstock.models."  # the modules of our own classes


# ---------------------------------------------------------------- the stack
class Stack(nn.Module):
    """An embedding, equal layers and a head: the structure that Llama, GPT and Bert share.

    A `rotary` module has no weights. It is called once per forward, and every layer gets
    its result besides x.
    """

    unsliceable = hf_part.UNSLICEABLE

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
    """A stack whose tokens see only earlier tokens, so it can run slice by slice."""

    unsliceable = ""

    def forward(self, tokens: Tensor, piece: Slice | None = None) -> Tensor:
        """Turn token ids, (batch, tokens), into logits, (batch, tokens, vocab).

        If a `piece` is given, the tokens are that slice of a sequence.
        """
        x = _enter(self, tokens, piece)
        x = _through(self, self.layers, x, piece)
        logits: Tensor = self.head(x)
        return logits


def draw_weights(model: nn.Module, std: float = 0.02) -> None:
    """Draw normal weights; set biases and the vector of padding to zero.

    Norms stay as they are created, which is the identity. A model without memory has no weights to draw.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for module in model.modules():  # last, because a tied head draws its weight again
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight.data[module.padding_idx])


def find_layout(model: nn.Module) -> hf.ModelLayout:
    """Return the layout of one of our models, a part with all layers, or a Hugging Face model.

    Refuses any other model.
    """
    if isinstance(model, Part):
        if not (model.first and model.last):
            raise ShapeError(
                f"cannot split the part with layers {model.begin}:{model.end}: it is not a whole model"
            )
        return model.layout
    if not isinstance(model, Stack):
        return hf_trial.tried_layout(model)
    if not type(model).forward.__module__.startswith(OURS):
        raise PenstockError(
            f"cannot split this {type(model).__name__}: it overrides forward, and parts would not run that\n"
            "  move what it adds into the layers, the embedding or the loss"
        )
    layers = tuple(f"layers.{i}" for i in range(len(model.layers)))
    rotary = ("rotary",) if hasattr(model, "rotary") else ()
    return hf.ModelLayout(
        model.width,
        ("embed",),
        layers,
        ("head",),
        rotary,
        model.unsliceable,
    )


def _enter(
    root: nn.Module, tokens: Tensor, piece: Slice | None, types: Tensor | None = None
) -> Tensor:
    """Turn token ids into a hidden state; a plain embedding does not need the slice."""
    embed = root.get_submodule("embed")
    if isinstance(embed, nn.Embedding):
        return cast(Tensor, embed(tokens))
    if types is None:
        return cast(Tensor, embed(tokens, *_optional(piece)))
    return cast(Tensor, embed(tokens, *_optional(piece), types=types))


def _through(
    root: nn.Module, layers: Iterable[nn.Module], x: Tensor, piece: Slice | None
) -> Tensor:
    """Run a hidden state through some layers."""
    angles: tuple[Tensor, ...] = ()
    if hasattr(root, "rotary"):
        angles = root.get_submodule("rotary")(x, *_optional(piece))
    for layer in layers:
        x = layer(x, *angles, *_optional(piece))
    return x


def _optional(piece: Slice | None) -> tuple[Slice, ...]:
    """Return no argument if there is no slice: layers may know nothing about slices."""
    return () if piece is None else (piece,)


def model_width(model: nn.Module) -> int:
    """Return the number of features of the hidden state between two parts."""
    return find_layout(model).width


def layer_count(model: nn.Module) -> int:
    """Return the number of layers, which a partition must add up to."""
    return len(find_layout(model).layers)


# ---------------------------------------------------------------- the parts
class Part(nn.Module):
    """The layers `begin` to `end` of a model.

    The first part also has the embedding, the last part the head.
    """

    def __init__(
        self,
        layout: hf.ModelLayout,
        layers: tuple[int, int],
        ends: tuple[bool, bool],
        tied: dict[str, str],
    ):
        super().__init__()
        self.layout = layout
        self.begin, self.end = layers
        self.first, self.last = ends
        self.tied = tied
        self.shared: dict[
            str, tuple[int, ...]
        ] = {}  # see `shared_names`; set by `split`
        # The first name of each buffer that has several names in the whole model; set by `split`.
        self.tied_buffers: dict[str, str] = {}
        self.runner: hf_part.Runner | None = None  # of a Hugging Face model
        # What of a Hugging Face model is a user's own, and the fault that a trial of it has found.
        self.tried: tuple[hf_trial.Own, str] | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The names of the pieces that have weights, in the order they run."""
        embed = self.layout.embed if self.first else ()
        head = self.layout.head if self.last else ()
        return (*embed, *self.layout.layers[self.begin : self.end], *head)

    @property
    def hidden_width(self) -> int:
        """The number of features of the hidden state that it returns, of shape (rows, tokens, features)."""
        return self.layout.width

    @property
    def pieces_to_compile(self) -> list[nn.Module]:
        """The modules that torch.compile compiles one by one.

        A plain embedding is a single kernel, which no compiler makes faster. What a Hugging Face model does before its
        first layer differs from model to model, so only its layers and its head are compiled.
        """
        paths = list(self.paths)
        if self.runner is None:
            paths += self.layout.everywhere
        elif self.first:
            paths = [path for path in paths if path not in self.layout.embed]
        pieces = map(self.get_submodule, paths)
        return [piece for piece in pieces if not isinstance(piece, nn.Embedding)]

    @property
    def unsliceable(self) -> str:
        """Why it cannot run slice by slice; "" if it can."""
        return self._unsliceable_class() or self.try_own_modules()

    def _unsliceable_class(self) -> str:
        """The same, by the class of the model and the options of its layers."""
        if self.layout.unsliceable:
            return self.layout.unsliceable
        for layer in self._layers():
            if getattr(layer, "gradient_checkpointing", False):
                return hf_part.CHECKPOINTED
        return ""

    def try_own_modules(self) -> str:
        """Why a user's own modules in a Hugging Face model do not go with slices and packed rows; "" if they do."""
        if self.runner is None:
            return ""
        own = hf_trial.own_modules(self, self.runner.pieces, self.portion)
        if self.tried is None or self.tried[0] != own:
            fault = hf_trial.fault_of_own_modules(self, self.runner, self.portion)
            self.tried = own, fault
        return self.tried[1]

    @property
    def portion(self) -> hf_part.Portion:
        """Which pieces of the model it has."""
        return hf_part.Portion(range(self.begin, self.end), self.first, self.last)

    @property
    def remembers_lengths(self) -> bool:
        """Whether the length of one sequence changes what the part computes for another."""
        modules = map(self.get_submodule, self.layout.everywhere)
        return any(map(hf_part.remembers_lengths, modules))

    def refuse_lengths(self, lengths: Sequence[int]) -> None:
        """Refuse a batch whose sequences cannot be mixed.

        `lengths` has the length of the longest sequence of each micro-batch, or of the
        longest document if rows are packed. A part also checks what it runs, but a
        replica sees only some of the micro-batches.
        """
        for path in self.layout.everywhere:
            hf_part.refuse_lengths(self.get_submodule(path), lengths)

    @property
    def asked_names(self) -> tuple[str, ...]:
        """The tensors of a batch that it asks for by name, besides x.

        An embedding may ask for `types`, and every part of a Hugging Face encoder for an `attention_mask`.
        """
        pieces = self.layout.pieces
        if pieces is not None and pieces.encoding is not None:
            types = ("types",) if self.first and pieces.encoding.types else ()
            return (*types, "attention_mask")
        if not self.first or pieces is not None:
            return ()
        return tuple(getattr(self.get_submodule("embed"), "asked_names", ()))

    def forward(
        self,
        x: Tensor,
        piece: Slice | None = None,
        types: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Turn a hidden state into the next one.

        The first part takes token ids instead, and the last part returns logits. If a
        `piece` is given, x is that slice of a sequence. The first part of an encoder also
        takes the `types` of the tokens' segments. Every part of a Hugging Face encoder
        takes an `attention_mask`, which is 0 for padding.
        """
        if piece is not None:
            self._refuse_slice(piece)
        if self.runner is not None:
            return self.runner(x, piece, types, attention_mask)
        x = self._through(x, piece, types)
        if self.last:
            x = self.get_submodule("head")(x)
        return x

    def _through(
        self, x: Tensor, piece: Slice | None, types: Tensor | None = None
    ) -> Tensor:
        """Run the embedding, if it is here, and the layers."""
        if self.first:
            x = _enter(self, x, piece, types)
        if self.begin < self.end:
            x = _through(self, self._layers(), x, piece)
        return x

    @property
    def output_layer(self) -> nn.Linear | None:
        """The layer that makes logits of what `hidden` returns; None if the part has no such layer."""
        if not self.last or self.runner is not None:
            return None
        head = self.get_submodule("head")
        output = getattr(head, "output", None)
        plain = isinstance(output, nn.Linear) and hasattr(head, "hidden")
        return output if plain else None

    def hidden(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        """Run everything but the `output_layer`, for a loss that does not need all logits at once."""
        if piece is not None:
            self._refuse_slice(piece)
        head: Any = self.get_submodule("head")
        hidden: Tensor = head.hidden(self._through(x, piece))
        return hidden

    def _layers(self) -> list[nn.Module]:
        paths = self.layout.layers[self.begin : self.end]
        return [self.get_submodule(path) for path in paths]

    def _refuse_slice(self, piece: Slice) -> None:
        """Refuse a slice, or packed documents, if the part cannot run them."""
        pieces = self.layout.pieces
        packs = pieces is None or pieces.encoding is not None
        whole = not piece.partial and (packs or not self.layout.unsliceable)
        if whole and piece.carry.starts is None:
            return
        reason = "" if whole else self._unsliceable_class()
        if not reason:
            reason = self.try_own_modules() if self.tried is None else self.tried[1]
        if reason:
            what = "packed documents" if whole else "a slice"
            raise ShapeError(f"cannot run {what}: {reason}")

    def whole_names(self) -> dict[str, nn.Parameter]:
        """Return its parameters by their names in the whole model.

        A tied parameter has the first of its names there.
        """
        return {
            self.tied.get(name, name): parameter
            for name, parameter in self.named_parameters()
        }

    def whole_buffers(self) -> dict[str, Tensor]:
        """Return its buffers by their names in the whole model, without those that every part has a copy of."""
        copies = tuple(f"{path}." for path in self.layout.everywhere)
        return {
            self.tied_buffers.get(name, name): x
            for name, x in self.named_buffers()
            if not name.startswith(copies)
        }

    def extra_repr(self) -> str:
        """Return the layers, and whether it has the embedding and the head."""
        pieces = [f"layers {self.begin}:{self.end}"]
        if self.first:
            pieces.append("embedding")
        if self.last:
            pieces.append("head")
        return ", ".join(pieces)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Part:
        """Keep tied parameters tied where torch creates new ones, as in `to_empty`."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()
        return self

    def tie(self) -> None:
        """Replace every further copy of a tied parameter by the first one."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for other, name in self.tied.items():
            if other in parameters and name in parameters:
                path, _, leaf = other.rpartition(".")
                setattr(self.get_submodule(path), leaf, parameters[name])


def split(model: nn.Module, partition: Sequence[int]) -> list[Part]:
    """Split a model into parts with these numbers of layers. The parts share the model's own parameters.

    With the partition (3, 2, 3):

    embed  0 1 2 │ 3 4 │ 5 6 7  head
          part 0    1       2
    """
    layout = find_layout(model)
    _check(tuple(partition), len(layout.layers))
    pieces = (*layout.layers, *layout.embed, *layout.head)
    hf_trial.refuse_own_calls(model, pieces, copied=layout.everywhere)
    tied = tied_names(model)
    tied_buffers = _further_names(model.named_buffers(remove_duplicate=False))
    bounds = pairwise(accumulate(partition, initial=0))
    parts = []
    for index, layers in enumerate(bounds):
        ends = (index == 0, index == len(partition) - 1)
        part = Part(layout, layers, ends, tied)
        part.tied_buffers = tied_buffers
        _fill(part, model)
        parts.append(part)
    _refuse_common_memory(parts)
    shared = shared_names(parts)
    for part in parts:
        part.shared = shared
    return parts


def part_parameters(part: Part) -> dict[str, nn.Parameter]:
    """Return the parameters of a part by their names in the whole model."""
    return part.whole_names()


def shared_names(parts: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    """Return the tied parameters that several parts hold: {"embed.weight": (0, 2)}."""
    owners: dict[str, tuple[int, ...]] = {}
    for index, part in enumerate(parts):
        for name in part_parameters(part):
            owners[name] = (*owners.get(name, ()), index)
    return {name: indices for name, indices in owners.items() if len(indices) > 1}


def _refuse_common_memory(parts: Sequence[Part]) -> None:
    """Refuse parameters of two parts that are not one parameter, but have one memory.

    A model in one piece trains both in the same place. Its parts may be on different devices, where nobody would tell
    one of the other.
    """
    owners: dict[int, tuple[int, str]] = {}
    for index, part in enumerate(parts):
        for name, parameter in part_parameters(part).items():
            address = 0 if parameter.is_meta else parameter.data_ptr()
            owner, first = owners.setdefault(address, (index, name))
            if address and first != name and owner != index:
                raise ShapeError(
                    f"{first} (part {owner}) and {name} (part {index}) are two parameters with one memory, as after a "
                    "weight norm of a tied layer\n  use one parameter for both, or give one of them a copy: "
                    "nn.Parameter(weight.detach().clone())"
                )


def _check(partition: tuple[int, ...], layers: int) -> None:
    require_sizes(1, parts=len(partition))
    for part, count in enumerate(partition):
        require_sizes(0, **{f"layers of part {part}": count})
    for part in range(1, len(partition) - 1):
        if not partition[part]:
            raise ShapeError(
                f"part {part} of {partition} has no layers: only the first and the last part may have none"
            )
    if sum(partition) != layers:
        raise ShapeError(
            f"the partition {partition} has {sum(partition)} layers, but the model has {layers}"
        )


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return every further name of a tied parameter, with its first name."""
    return _further_names(model.named_parameters(remove_duplicate=False))


def _further_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Every further name of a tensor that has several names, with its first name."""
    first_names: dict[int, str] = {}
    further = {}
    for name, tensor in named:
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            further[name] = first
    return further


def _fill(part: Part, model: nn.Module) -> None:
    """Add the pieces of a part.

    Pieces with weights are the model's own. Pieces that every part needs are copied,
    because parts may be on different devices.
    """
    for path in part.paths:
        hf_part.graft(part, path, model.get_submodule(path))
    for path in part.layout.everywhere:
        hf_part.graft(part, path, copy.deepcopy(model.get_submodule(path)))
    part.training = model.training
    pieces = part.layout.pieces
    if pieces is not None:
        source = (
            model.runner.model if isinstance(model, Part) and model.runner else model
        )
        part.runner = hf_part.runner_of(source, pieces, part, part.portion)
