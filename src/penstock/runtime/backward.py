"""Splits a backward in one traversal: linear layers compute their input gradient and defer their weight gradient.

    I   one walk through the graph; each linear layer gives  grad_x = grad_y W   and keeps (x, grad_y) in the ledger
    W   settles the ledger; for each entry                   grad_W += grad_y^T x

A layer can wait if it is an `nn.Linear`, a subclass with the same forward, or the `Conv1D` of transformers, and if its
weight is a plain parameter of real numbers without hooks. All other weight gradients are computed in I: norms and
embeddings, which are little work, and layers with their own computation, about which the executor warns. A custom
module can defer such work too: it calls `defer` inside the backward of an autograd function.

Under autocast a whole backward has a ledger too, which settles everything at once. Autograd would compute a weight
gradient in bfloat16, cast it to float32, and add it to the gradient of earlier micro-batches. Here the product itself
adds to that gradient in float32 (`add_product`), which is faster and rounds less.

Layers that `penstock.runtime.compiled` has compiled wait as well: their compiled backward hands x and grad_y
out, as the gradients of two ghosts. A module that the user has compiled is a single node for autograd, so its I does
everything and its W nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.parametrize import is_parametrized

from penstock.runtime.passed_values import has_gradient
from penstock.torch_internals import (
    as_no_view,
    compiled_call,
    copy_all,
    gradient_version,
    has_gradient_hooks,
    is_compiled,
    local_share,
    transforms_are_active,
)

DeferredWork = Callable[[], None]

_here = threading.local()  # the ledger of the forward that runs on this thread


class WeightCopies(Protocol):
    """Copies of weights in another type (`penstock.runtime.backward`)."""

    def copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The copy of a weight in this type; None if there is none."""
        ...


@dataclass(eq=False, slots=True)
class Ledger:
    """The deferred weight gradients of one forward.

    If the backward is not split (`splits=False`), nothing waits. `copies` has the weights in the type of autocast.
    """

    # Ids of parameters to which other threads add too. Only autograd does that safely.
    common: frozenset[int] = frozenset()
    splits: bool = True
    copies: WeightCopies | None = None
    due: list[DeferredWork] = field(default_factory=list, init=False)
    # Whether the backward of the forward has begun.
    begun: bool = field(default=False, init=False)
    # Whether the current backward may defer work.
    open: bool = field(default=False, init=False)

    def begin_backward(self) -> None:
        """Let work wait from now on, if the backward is split."""
        self.begun = True
        self.open = self.splits

    def settle(self) -> None:
        """Do all deferred work."""
        with torch.no_grad():
            for work in self.due:
                work()
        self.due.clear()


def current_ledger() -> Ledger | None:
    """The ledger of the forward that runs now. Keep it in the context of an autograd function, for `defer`."""
    return getattr(_here, "ledger", None)


def weight_in(ledger: Ledger | None, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in another type: the copy of this step if there is one, else cast now."""
    copies = None if ledger is None else ledger.copies
    copy = None if copies is None else copies.copy_of(weight, dtype)
    return weight.to(dtype) if copy is None else copy


def defer(ledger: Ledger | None, work: DeferredWork) -> None:
    """Leave work for W if this backward is split; otherwise do it now."""
    if ledger is not None and ledger.open:
        ledger.due.append(work)
    else:
        work()


def record_in(ledger: Ledger | None) -> None:
    """Make forwards on this thread use this ledger from now on."""
    _here.ledger = ledger


class _Linear(torch.autograd.Function):
    """y = x W^T + b, or x W + b where the weight lies `turned`. Its weight gradient can wait.

    `dtype` is autocast's, if that is on: the weight is cast in here, so that its gradient can wait for the cast too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        turned: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # activation checkpointing hands the backward a detached copy, which gathers no gradient
        ctx.bias, ctx.ledger, ctx.turned = bias, current_ledger(), turned
        if dtype is not None:
            weight = weight_in(ctx.ledger, weight, dtype)
            bias = None if bias is None else bias.to(dtype)
        y = (_turned if turned else nn.functional.linear)(x, weight, bias)
        # What a function of one's own returns as a view cannot be changed in place, as by nn.ReLU(inplace=True).
        return as_no_view(y)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, _ = ctx.saved_tensors
        weight, bias, turned, ledger = ctx.weight, ctx.bias, ctx.turned, ctx.ledger
        # Whether the forward itself asks for a derivative (autograd.grad). That is no gradient of the step, but may
        # have derivatives, which the copy of a weight has not.
        inside = ledger is not None and not (ledger.begun or ledger.open)
        grad_x = None
        if ctx.needs_input_grad[0]:
            there = weight_in(None if inside else ledger, weight, grad.dtype)
            grad_x = grad @ (there.t() if turned else there)
        if inside:
            rows = grad.reshape(-1, grad.shape[-1])
            taken = x.reshape(-1, x.shape[-1]).to(rows.dtype)
            grad_weight = taken.t() @ rows if turned else rows.t() @ taken
            grad_bias = None if bias is None else rows.sum(0).to(bias.dtype)
            return grad_x, grad_weight.to(weight.dtype), grad_bias, None, None

        def settle() -> None:
            accumulate_linear(weight, bias, turned, x, grad)

        defer(ledger, settle)
        return grad_x, None, None, None, None


def _turned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W + b, by the same kernel as transformers' `Conv1D`, so that not even rounding differs."""
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


def accumulate_linear(
    weight: Tensor, bias: Tensor | None, turned: bool, x: Tensor, grad: Tensor
) -> None:
    """Add to the gradients of a linear layer, from its input and the gradient of its output."""
    rows = grad.reshape(-1, grad.shape[-1])
    if weight.requires_grad:
        taken = x.reshape(-1, x.shape[-1]).to(rows.dtype)
        accumulate_product(weight, *((taken, rows) if turned else (rows, taken)))
    if bias is not None and bias.requires_grad:
        accumulate(bias, rows.sum(0))


def accumulate_product(weight: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad^T x to a weight's gradient, without a temporary copy where the types allow it."""
    kept = _kept_type(weight, grad)
    if weight.grad is not None:
        add_product(weight.grad, grad.t(), x)
    elif _sums_in_float32(grad, kept):
        weight.grad = torch.mm(grad.t(), x, out_dtype=kept)
    else:
        weight.grad = (grad.t() @ x).to(kept)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to a total, within the product where the types allow it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif _sums_in_float32(a, total.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b  # casts while it adds


def _sums_in_float32(factor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product of factors in half precision can have a result of this type, which is float32.

    CUDA sums such products in float32 anyway, and need not round them.
    """
    is_half = factor.dtype in (torch.bfloat16, torch.float16)
    on_cuda = factor.is_cuda and torch.version.cuda is not None
    return is_half and on_cuda and dtype == torch.float32


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add to a parameter's gradient, as autograd would."""
    if parameter.grad is None:
        parameter.grad = grad.to(_kept_type(parameter, grad))
    else:
        parameter.grad += grad  # casts while it adds


def _kept_type(parameter: Tensor, grad: Tensor) -> torch.dtype:
    """The type in which a parameter keeps a gradient: its own one, unless it was told another one, or any.

    From torch 2.15 on, FSDP tells its gathered parameters to keep gradients in the type in which it sums them.
    """
    return parameter.grad_dtype or grad.dtype


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool = False
) -> Tensor:
    """`nn.functional.linear` with a weight gradient that can wait. Under autocast it computes in autocast's type."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _Linear.apply(x.to(dtype), weight, bias, turned, dtype)  # type: ignore[no-untyped-call]
            return out
    plain: Tensor = _Linear.apply(x, weight, bias, turned, None)  # type: ignore[no-untyped-call]
    return plain


# ---------------------------------------------------------------- compiled linear layers
# The ghosts of x and y, and the weight in the type of autocast if that was cast before.
Ghosts: TypeAlias = tuple[Tensor, Tensor, Tensor | None]


class Trace:
    """The ghosts of the layer that torch.compile traces now, by `ghost_number`. Empty in compiled code."""

    def __init__(self) -> None:
        self.ghosts: list[Ghosts | None] = []


ghost_trace = Trace()


class _CompiledLinear(torch.autograd.Function):
    """y = x W^T + b, or x W + b where the weight lies `turned`, inside a compiled layer.

    The gradients of the ghosts are x and that of y. The weight and the bias get none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        turned: bool,
        ghost_x: Tensor,
        ghost_y: Tensor,
        copy: Tensor | None,
    ) -> Tensor:
        weight = weight if copy is None else copy
        ctx.save_for_backward(x, weight)
        ctx.turned = turned
        weight = weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        return (_turned if turned else nn.functional.linear)(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None, None, None, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        weight = weight.to(grad.dtype)
        grad_x = grad @ (weight.t() if ctx.turned else weight)
        return grad_x, None, None, None, x, grad, None


class _MakeGhosts(torch.autograd.Function):
    """Makes the ghosts of some linear layers, and hands their gradients to the ledger."""

    @staticmethod
    def forward(
        ctx: Any,
        ledger: Ledger,
        linears: Sequence[nn.Module],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.ledger, ctx.linears = ledger, linears
        ctx.set_materialize_grads(False)
        ghosts = []
        for linear, weight in zip(linears, weights, strict=True):
            zero = _zero(weight.device, dtype)
            sizes = weight.shape if is_turned(linear) else weight.shape[::-1]
            ghosts += [zero.expand(*shape, size) for size in sizes]
        return tuple(ghosts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        for number, linear in enumerate(ctx.linears):
            x, grad = gradients[2 * number : 2 * number + 2]
            if x is not None and grad is not None:
                defer(ctx.ledger, _work_of(linear, x, grad))
        return (None,) * (4 + len(ctx.linears))


def _work_of(linear: Any, x: Tensor, grad: Tensor) -> DeferredWork:
    turned = is_turned(linear)

    def settle() -> None:
        accumulate_linear(linear.weight, linear.bias, turned, x, grad)

    return settle


_zeros: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def _zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A zero that all ghosts share. It is kept, so that recordings find it where it was."""
    zero = _zeros.get((device, dtype))
    if zero is None:
        zero = _zeros[device, dtype] = torch.zeros((), dtype=dtype, device=device)
    return zero


def ghosts_of(
    ledger: Ledger, linears: Sequence[nn.Module], waiting: Sequence[bool], x: Tensor
) -> tuple[Ghosts | None, ...]:
    """Ghosts for the linear layers that can wait, for a layer with the input x; None for the others."""
    chosen = [linear for linear, waits in zip(linears, waiting, strict=True) if waits]
    if not chosen:
        return ()
    weights: list[Tensor] = [linear.weight for linear in chosen]  # type: ignore[misc]
    device = weights[0].device.type
    dtype = weights[0].dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    shape = x.shape[:-1] if has_gradient(x.dtype) else x.shape
    made: tuple[Tensor, ...]
    made = _MakeGhosts.apply(ledger, chosen, tuple(shape), dtype, *weights)  # type: ignore[no-untyped-call]
    copies: list[Tensor | None] = [None] * len(weights)
    if ledger.copies is not None:
        copies = [ledger.copies.copy_of(weight, dtype) for weight in weights]
    each = iter(zip(made[::2], made[1::2], copies, strict=True))
    return tuple(next(each) if waits else None for waits in waiting)


def compiled_linear(layer: Any, x: Tensor, turned: bool = False) -> Tensor | None:
    """The output of a linear layer while torch.compile traces it; None if the layer has no ghosts.

    Ghosts serve once: if a layer is called again, autograd computes the weight gradient of that call. The same
    happens if x has other rows or tokens than the input of the compiled layer, which the ghosts were made for.
    """
    number = getattr(layer, "ghost_number", 0)
    if number >= len(ghost_trace.ghosts):
        return None
    ghosts = ghost_trace.ghosts[number]
    if ghosts is None or x.shape != ghosts[0].shape:
        return None
    ghost_trace.ghosts[number] = None
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        y: Tensor = _CompiledLinear.apply(x, layer.weight, layer.bias, turned, *ghosts)  # type: ignore[no-untyped-call]
        return y
    with torch.autocast(device, enabled=False):
        x = x.to(ghosts[0].dtype)
        y = _CompiledLinear.apply(x, layer.weight, layer.bias, turned, *ghosts)  # type: ignore[no-untyped-call]
        return y


# ---------------------------------------------------------------- which layers can wait
def make_deferrable(module: nn.Module) -> None:
    """Let the linear layers inside a module defer their weight gradients. Calling it again changes nothing."""
    if is_compiled(module) and not hands_out_ghosts(module):  # one piece
        return
    if (
        "forward" not in module.__dict__
    ):  # else it is done already, or has a forward of its own
        if _is_linear(module):
            module.forward = MethodType(_linear_forward, module)
        elif is_turned(module):
            module.forward = MethodType(_turned_forward, module)
    for inner in module.children():
        make_deferrable(inner)


def hands_out_ghosts(module: nn.Module) -> bool:
    """Whether `penstock.runtime.compiled` has compiled this module, so that its W has work to do."""
    return hasattr(compiled_call(module), "ghosts")


def deferrable_layers(module: nn.Module) -> list[nn.Module]:
    """The linear layers inside a module that can defer their weight gradients, each of them once."""
    layers = []
    for layer in module.modules():
        own_forward = layer.__dict__.get("forward")
        patched = getattr(own_forward, "__func__", None) in (
            _linear_forward,
            _turned_forward,
        )
        # To ask for a parametrized weight is to compute it, and a spectral norm would count that.
        waits = (own_forward is None or patched) and not is_parametrized(layer)
        linear = _is_linear(layer) or is_turned(layer)
        if waits and linear and not layer.weight.is_complex():  # type: ignore[operator]
            layers.append(layer)
    return layers


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_turned(module: nn.Module) -> bool:
    """Whether this is the linear layer of transformers' GPT-2, judged by its name, shapes and forward."""
    if (
        type(module).__name__ != "Conv1D"
        or "addmm" not in type(module).forward.__code__.co_names
    ):
        return False
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    shapes = [x.shape if isinstance(x, Tensor) else () for x in (weight, bias)]
    return len(shapes[0]) == 2 and tuple(shapes[1]) == (
        getattr(module, "nf", None),
    ) == tuple(shapes[0][1:])


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    """The forward of a linear layer, whose weight gradient can wait if there is a ledger."""
    if torch.compiler.is_compiling():
        y = compiled_linear(self, x)
        return nn.functional.linear(x, self.weight, self.bias) if y is None else y
    ledger, weight, bias = current_ledger(), self.weight, self.bias
    if ledger is None or not _can_wait(ledger, weight, bias):
        return nn.functional.linear(x, weight, bias)
    return linear(x, weight, bias)


def _turned_forward(self: nn.Module, x: Tensor) -> Tensor:
    """The same for a layer with a transposed weight."""
    if torch.compiler.is_compiling():
        y = compiled_linear(self, x, turned=True)
        return type(self).forward(self, x) if y is None else y
    ledger, weight, bias = current_ledger(), self.weight, self.bias
    if ledger is None or not _can_wait(ledger, weight, bias):  # type: ignore[arg-type]
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    return linear(x, weight, bias, turned=True)  # type: ignore[arg-type]


def can_wait(ledger: Ledger, layer: nn.Module) -> bool:
    """Whether the weight gradient of a linear layer can wait for W."""
    return _can_wait(ledger, layer.weight, layer.bias)  # type: ignore[arg-type]


def _can_wait(ledger: Ledger, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether adding the gradient later gives the same result: for plain, real, trained parameters without hooks.

    A parametrized weight is computed in every forward, and the parameters it is computed from get their gradient in I.
    So do weights inside the transforms of `torch.func`, which know nothing of functions such as ours.
    """
    if (
        not weight.requires_grad
        or not torch.is_grad_enabled()
        or id(weight) in ledger.common
        or transforms_are_active()
    ):
        return False
    return _is_plain(weight) and (bias is None or _is_plain(bias))


def _is_plain(parameter: Tensor) -> bool:
    real = not parameter.is_complex()
    return real and parameter.is_leaf and not has_gradient_hooks(parameter)


# ---------------------------------------------------------------- cast weights
# The weights of linear layers in the type of autocast, cast once in a step.
#
# Autocast casts a float32 weight for every micro-batch, in the forward and again in the backward. The weights change
# only between steps, so one cast is enough:
#
#     step     weights ──cast──► copies      F0  F1  B0  F2  B1 ...  all read the copies
#     update   weights change                                        the next step casts again
#
# The copies take as much memory as the weights have in that type: 2 bytes for each number in bfloat16, beside 16 for
# the weight, its gradient and the state of AdamW. They stay where they are, so recorded actions find them.


class CastWeights:
    """The copies of some modules' weights. They are made by the first `refresh`."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self.dtype = dtype
        weights: dict[nn.Parameter, None] = {}
        for module in modules:
            for layer in deferrable_layers(module):
                weight = layer.weight
                if isinstance(weight, nn.Parameter) and weight.dtype != dtype:
                    weights[weight] = None
        self.weights = list(weights)
        self.copies: dict[int, Tensor] = {}  # by id of the weight

    def refresh(self) -> None:
        """Cast the weights as they are now."""
        if not self.copies:
            for weight in self.weights:
                self.copies[id(weight)] = torch.empty_like(
                    weight, dtype=self.dtype, requires_grad=False
                )
        if self.weights:
            with torch.no_grad():
                copy_all(list(self.copies.values()), self.weights)

    def copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The copy of a weight; None if it has none of this type."""
        return self.copies.get(id(weight)) if dtype == self.dtype else None


def cast_weights(
    modules: Iterable[nn.Module], autocast: torch.dtype | None
) -> CastWeights | None:
    """The weights of a rank's modules for autocast; None without it, or if processes share their weights."""
    modules = list(modules)
    if autocast is None:
        return None
    for module in modules:
        sharded = isinstance(module, FSDPModule)
        if sharded or any(local_share(p) is not p for p in module.parameters()):
            return None
    return CastWeights(modules, autocast)


# ---------------------------------------------------------------- deferral report
# Reports, once in the first step, which weight gradients of a split backward could not wait for W.

MAX_NAMED_LAYERS = 4

_log = logging.getLogger(__name__)


class WatchedWeight(NamedTuple):
    """A weight and the version of its gradient before an I."""

    name: str
    parameter: nn.Parameter
    version: tuple[int, int]


@dataclass(eq=False, slots=True)
class DeferralReport:
    """The weights of each stage whose gradient was computed in I already."""

    modules: Mapping[int, nn.Module]
    # Names of weights, by stage.
    early: dict[int, list[str]] = field(default_factory=dict, init=False)
    watched: list[WatchedWeight] | None = field(default=None, init=False)
    # Stages with weights, none of which waited.
    without_work: set[int] = field(default_factory=set, init=False)

    def begin(self, stage: int) -> None:
        """Before the first I of a stage: note the versions of its gradients."""
        if stage in self.early:
            self.watched = None
            return
        module = self.modules[stage]
        embeddings = _embedding_ids(module)
        self.watched = []
        for name, parameter in module.named_parameters():
            # Norms (one dimension) and embeddings are little work.
            is_matrix = parameter.dim() > 1 and id(parameter) not in embeddings
            if parameter.requires_grad and is_matrix:
                version = gradient_version(parameter.grad)
                self.watched.append(WatchedWeight(name, parameter, version))

    def end(self, stage: int) -> None:
        """After the first I: weights whose gradient has changed did not wait."""
        if self.watched is None:
            return
        self.early[stage] = [
            weight.name
            for weight in self.watched
            if gradient_version(weight.parameter.grad) != weight.version
        ]
        if self.watched and len(self.early[stage]) == len(self.watched):
            self.without_work.add(stage)

    def warn(self) -> None:
        """Log a warning if any large weight gradient did not wait."""
        early = sorted(self.early.items())
        stages = [self.describe(stage, names) for stage, names in early if names]
        if stages:
            _log.warning(
                "this split backward computes some weight gradients in I, so W has less to do than planned:\n"
                "  %s\n"
                "  an nn.Linear of real numbers can wait, also a subclass that keeps its forward, and transformers' "
                "Conv1D; other layers cannot, nor can modules that you compiled yourself "
                "(penstock.runtime.compile_stage compiles them so that they can). Use penstock.runtime.defer in a "
                "layer of your own, or a schedule whose backwards are whole (1f1b)",
                "\n  ".join(stages),
            )

    def describe(self, stage: int, names: list[str]) -> str:
        """Which layers of a stage did not wait, and their share of the parameters."""
        module = self.modules[stage]
        named = module.named_parameters()
        sizes = {name: p.numel() for name, p in named if p.requires_grad}
        share = sum(sizes[name] for name in names) / sum(sizes.values())
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        layers = []
        for owner in owners[:MAX_NAMED_LAYERS]:
            kind = type(module.get_submodule(owner)).__name__
            layers.append(f"{owner or 'the module'} ({kind})")
        listed = ", ".join(layers)
        if len(owners) > MAX_NAMED_LAYERS:
            listed += f" and {len(owners) - MAX_NAMED_LAYERS} more"
        own = is_compiled(module) and not hands_out_ghosts(module)
        compiled = ", which is compiled" if own else ""
        return f"stage {stage}{compiled}: {share:.0%} of its trained parameters, in {listed}"


def _embedding_ids(module: nn.Module) -> set[int]:
    ids: set[int] = set()
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            ids.update(id(parameter) for parameter in layer.parameters())
    return ids
