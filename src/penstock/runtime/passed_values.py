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
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from penstock.cost.profile import SCALE_BYTES
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


# ---------------------------------------------------------------- between two stages
class TensorSpec(NamedTuple):
    """A tensor between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # on a rank
    sent_as: torch.dtype  # between ranks

    @property
    def quantized(self) -> bool:
        """Whether its rows travel as int8, each with its scale."""
        return self.sent_as is torch.int8 and self.dtype.is_floating_point

    @property
    def travels_as_it_is(self) -> bool:
        """Whether it has the same type between ranks as on a rank."""
        return self.sent_as is self.dtype

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape on its way to another rank."""
        return quantized_shape(self.shape) if self.quantized else self.shape

    @property
    def sent_bytes(self) -> int:
        """The bytes of the tensor on its way to another rank."""
        return prod(self.sent_shape) * self.sent_as.itemsize


TensorSpecs: TypeAlias = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """What one stage of a path passes to the next."""

    values: int  # tensors for the first arguments of the next stage
    names: tuple[str, ...]  # of the tensors after these
    tensors: TensorSpecs

    @property
    def gradients(self) -> TensorSpecs:
        """The tensors that come back: the gradients of all that can have one."""
        return tuple(spec for spec in self.tensors if has_gradient(spec.dtype))

    @property
    def sent_bytes(self) -> int:
        """The bytes of all its tensors on their way to another rank."""
        return sum(spec.sent_bytes for spec in self.tensors)

    def sliced(self, stage: int, tokens: int, piece: int) -> Edge:
        """The edge for a slice of `piece` tokens of a sequence of `tokens`."""
        tensors = []
        for spec in self.tensors:
            if len(spec.shape) < 2 or spec.shape[1] != tokens:
                raise ShapeError(
                    f"stage {stage} makes a tensor of shape {spec.shape} of a sequence of {tokens} tokens, so it "
                    f"cannot be sliced: slices need (rows, {tokens}, ...)\n  make the schedule with slices=1"
                )
            shape = (spec.shape[0], piece, *spec.shape[2:])
            tensors.append(spec._replace(shape=shape))
        return replace(self, tensors=tuple(tensors))

    def arguments(self, value: Value) -> tuple[Value, dict[str, Tensor]]:
        """The first arguments of the next stage, and the tensors with names."""
        named = dict(zip(self.names, value[self.values :], strict=True))
        return value[: self.values], named

    def value_of(
        self, returned: object, travelling: Mapping[str, Tensor]
    ) -> Value | None:
        """What a stage passes on: what it returned, and what travels along; None if the edge has something else."""
        passed = passed_by(returned)
        if passed is None or len(passed.values) != self.values:
            return None
        tensors = list(passed.values)
        for name in self.names:
            tensor = passed.named.get(name, travelling.get(name))
            if tensor is None:
                return None
            tensors.append(tensor)
        return tuple(tensors)


# ---------------------------------------------------------------- values
# The tensors of an edge on their way from one stage to the next, or their gradients on the way back.
#
# forward    x ──────► stage ──► y        tensors that the stage does not return, but a later one asks for,
#            skip ─────────────► skip     go through it untouched
# backward   dx ◄───── stage ◄── dy       whole numbers have no gradients; where a stage both uses a value
#            dskip ◄─── + ◄──── dskip     and passes it on, autograd adds the two gradients


def leaves(value: Value, trains: bool) -> Value:
    """The tensors as inputs of the next stage, without the graph that made them."""
    inputs = []
    for tensor in value:
        x = tensor.detach()
        if trains and has_gradient(x.dtype):
            x.requires_grad_()
        inputs.append(x)
    return tuple(inputs)


def take_gradients(value: Value) -> Value:
    """The gradients of all that can have one, zero where nothing used them; they are forgotten here."""
    gradients = []
    for x in value:
        if has_gradient(x.dtype):
            gradients.append(torch.zeros_like(x) if x.grad is None else x.grad)
            x.grad = None
    return tuple(gradients)


def backward_roots(value: Value, gradients: Value) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors from which a backward begins, and their gradients."""
    differentiable = [x for x in value if has_gradient(x.dtype)]
    roots = []
    given = []
    for x, gradient in zip(differentiable, gradients, strict=True):
        if x.requires_grad:
            roots.append(x)
            given.append(gradient.to(x.dtype))
    return roots, given


# ---------------------------------------------------------------- messages in int8
# Messages of one byte a number: every row has its own scale, and what rounding loses is sent along next time.
#
#     x          0.30   -1.27    0.02      a row: the hidden state of one token, or its gradient
#     int8         30    -127       2      with the scale 1.27 / 127, in four bytes at the end of the row
#     lost       0.00    0.00    0.00      added to the message of the same action in the next step
#
# Rounding errors of gradients would add up over the steps. The sender keeps the error of each message and adds
# it to the next message of the same action, so that the errors cancel over time instead (error feedback).


LARGEST = 127

SMALLEST_SCALE = 1e-30  # of a row of zeros


def quantized_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a message whose numbers have one byte."""
    return (*shape[:-1], shape[-1] + SCALE_BYTES)


def quantize(x: Tensor) -> Tensor:
    """Round each row to 8 bits; the result holds the rows and their scales."""
    numbers = x.float()
    scales = numbers.abs().amax(-1, keepdim=True) / LARGEST
    scales = scales.clamp_min(SMALLEST_SCALE)  # NaN stays NaN, and reaches the loss.
    width = x.shape[-1]
    packed = torch.empty(quantized_shape(x.shape), dtype=torch.int8, device=x.device)
    packed[..., :width] = (numbers / scales).round_().to(torch.int8)
    packed[..., width:] = scales.view(torch.int8)
    return packed


def restore(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a message that `quantize` has made."""
    width = packed.shape[-1] - SCALE_BYTES
    # A copy, because the scale of a single row need not lie where a float may lie.
    scales = packed[..., width:].clone(memory_format=torch.contiguous_format)
    scales = scales.view(torch.float32)
    return (packed[..., :width].float() * scales).to(dtype)


@dataclass(eq=False, slots=True)
class Feedback:
    """What rounding has lost of the last message of each action.

    Only gradients get it back, unless `states` says that hidden states do, too.
    """

    states: bool = False
    # Keys: the number of the action, and the place among the tensors that it passes on.
    lost: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False)

    def quantize(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        """Quantize a message together with what the last one of the same place has lost."""
        lost = self.lost.get(place)
        if lost is not None and lost.shape == x.shape:
            x = x + lost
        packed = quantize(x)
        lost = x - restore(packed, x.dtype)
        # An error that is not finite would spoil all later steps.
        self.lost[place] = lost.nan_to_num_(0.0, 0.0, 0.0)
        return packed
