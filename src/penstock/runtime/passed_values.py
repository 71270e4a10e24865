"""What a stage passes to the next one: one tensor, several, or tensors with names.

    returned by a stage        the next stage is called with          and then
    x                          forward(x)
    (x, y)                     forward(x, y)
    {"x": x, "skip": s}        forward(x), forward(x, skip=s)         `skip` travels on to every later stage that asks

The first value of a dict is the main one: it is the first argument of the next stage, whatever that calls it. The
others have names. A stage gets those that its forward has a parameter for; the others travel along, and what no later
stage asks for stays behind. A stage that returns `None` under a name ends the journey of that value. Tensors that
belong to the batch, such as masks, go by name to every stage that asks for them, without travelling.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.models.slice import Slice
from penstock.torch_internals import original_module

Value: TypeAlias = tuple[Tensor, ...]  # what one stage passes to the next, or gradients

PIECE = "piece"  # the parameter of a forward that takes a slice (penstock.models.slice)


@dataclass(frozen=True, slots=True)
class Passed:
    """The values for the first arguments of the next stage, and values with names.

    A name with the value None says that this value ends here. `returned` is what the last of several layers returned.
    """

    values: tuple[Tensor, ...]
    named: Mapping[str, Tensor | None] = field(default_factory=dict)
    returned: object = None


def passed_by(returned: object) -> Passed | None:
    """What a stage passes on, from what its forward returned; None if that is something else than tensors."""
    if isinstance(returned, Tensor):
        return Passed((returned,))
    if isinstance(returned, Passed):
        return returned
    if isinstance(returned, Mapping) and returned:
        main, *names = returned
        named = {name: returned[name] for name in names}
        present = [value for value in named.values() if value is not None]
        if _are_tensors([returned[main], *present]):
            return Passed((returned[main],), named)
    elif isinstance(returned, tuple | list) and returned and _are_tensors(returned):
        return Passed(tuple(returned))
    return None


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can have gradients: floating point and complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


def _are_tensors(values: Sequence[object]) -> bool:
    return all(isinstance(value, Tensor) for value in values)


@dataclass(frozen=True, slots=True)
class ForwardParameters:
    """The parameters of a forward, in order, those that must be given, and names that it asks for besides."""

    names: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    besides: tuple[str, ...] = ()

    def after(self, count: int) -> tuple[str, ...]:
        """The names that are left when the first parameters are given."""
        return self.names[count:] + self.besides


def forward_parameters(module: nn.Module) -> ForwardParameters:
    """The parameters of a module's forward that values can be given to by name.

    A module with a forward of *values and **named can say what it asks for: `asked_names`.
    """
    original: Any = original_module(module)
    asked = getattr(original, "asked_names", None)
    if asked is not None:
        return ForwardParameters(besides=tuple(asked))
    names = []
    required = set()
    for name, parameter in inspect.signature(original.forward).parameters.items():
        if name == PIECE or parameter.kind in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            continue
        names.append(name)
        if parameter.default is inspect.Parameter.empty:
            required.add(name)
    return ForwardParameters(tuple(names), frozenset(required))


def named_arguments(
    parameters: ForwardParameters, count: int, *sources: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """The values that a stage asks for by name, out of the first source that has them."""
    arguments = {}
    for name in parameters.after(count):
        for source in sources:
            value = source.get(name)
            if value is not None:
                arguments[name] = value
                break
    return arguments


def refuse_missing(
    parameters: ForwardParameters, count: int, named: Mapping[str, Tensor]
) -> None:
    """Raise an error if a forward asks for a value that nobody has."""
    for name in parameters.after(count):
        if name in parameters.required and name not in named:
            raise ShapeError(
                f"its forward asks for {name}, which neither the batch nor an earlier stage on its path has"
            )


# Layers of torch that compute every token by itself, so that slices need nothing from each other.
TOKENWISE = (
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Mish),
)


def takes_slices(module: nn.Module) -> bool:
    """Whether a module's forward has the parameter `piece`."""
    return PIECE in inspect.signature(original_module(module).forward).parameters


def is_tokenwise(module: nn.Module) -> bool:
    """Whether a module is known to compute every token by itself, or says so: `tokenwise = True`."""
    if isinstance(module, nn.Sequential) and not isinstance(module, LayerChain):
        return all(map(is_tokenwise, module))
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return len(module.normalized_shape) == 1
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        return False  # it counts the tokens of a call
    return type(module) in TOKENWISE or bool(getattr(module, "tokenwise", False))


class LayerChain(nn.Sequential):
    """Layers that pass values to each other as stages do, so that it does not matter where a list of layers is cut.

    A layer whose forward has the parameter `piece` gets the slice that it runs on. `first_names` has the names of
    parameters and buffers that the list has in several places, by their ids, and `shared` the parts that hold such a
    parameter.
    """

    def __init__(
        self,
        layers: OrderedDict[str, nn.Module],
        first_names: Mapping[int, str] | None = None,
        shared: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(layers)
        self.shared = dict(shared or {})
        # Own names of parameters and buffers that have another name in the whole list.
        self.renamed = {}
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            first = (first_names or {}).get(id(tensor), name)
            if first != name:
                self.renamed[name] = first
        self.parameters_by_layer = [forward_parameters(layer) for layer in self]
        self.sliced = [takes_slices(layer) for layer in self]

    def whole_names(self) -> dict[str, nn.Parameter]:
        """Its parameters by the names that they have in the whole list, where a layer may come several times."""
        return {self.renamed.get(name, name): p for name, p in self.named_parameters()}

    def whole_buffers(self) -> dict[str, Tensor]:
        """Its buffers by the names that they have in the whole list."""
        return {self.renamed.get(name, name): x for name, x in self.named_buffers()}

    @property
    def unsliceable(self) -> str:
        """Why it cannot run slice by slice; empty if it can."""
        for (number, layer), sliced in zip(
            self.named_children(), self.sliced, strict=True
        ):
            name = f"layer {number}, {type(layer).__name__},"
            reason = str(getattr(original_module(layer), "unsliceable", ""))
            if reason:
                return f"{name} says: {reason}"
            if not sliced and not is_tokenwise(original_module(layer)):
                return (
                    f"the forward of {name} has no parameter `piece`, so it would see each slice alone\n"
                    "  give it one, and let it take what later slices need from earlier ones (penstock.models.slice); "
                    "if it computes every token by itself, set `tokenwise = True` in its class"
                )
        return ""

    @property
    def asked_names(self) -> tuple[str, ...]:
        """The names that any layer asks for."""
        names: dict[str, None] = {}
        for parameters in self.parameters_by_layer:
            names |= dict.fromkeys(parameters.after(1))
        return tuple(names)

    def forward(self, *values: Any, piece: Slice | None = None, **named: Tensor) -> Any:
        """Run the layers; return what the last one returns, with all named values that the layers have made."""
        made: dict[str, Tensor | None] = {}
        known: Mapping[str, Tensor | None] = named
        returned: Any = values[0] if len(values) == 1 else values
        layers = zip(self, self.parameters_by_layer, self.sliced, strict=True)
        for layer, parameters, sliced in layers:
            given: dict[str, Any] = {}
            given |= named_arguments(parameters, len(values), known)
            refuse_missing(parameters, len(values), given)
            if sliced and piece is not None:
                given[PIECE] = piece
            returned = layer(*values, **given)
            passed = passed_by(returned)
            values = (returned,) if passed is None else passed.values
            if passed is not None and passed.named:
                made |= passed.named
                known = {**named, **made}
        return Passed(values, made, returned) if made else returned


def described(value: object) -> str:
    """A value in words: its type and, for a tensor, its data type and shape."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(one).__name__ for one in value)})"
    return f"a {type(value).__name__}"
