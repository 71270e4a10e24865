"""Compiles the layers of a stage with torch.compile, once for all layers of a class, so that a backward can be split.

    whole sequence    forward ─────────────────────────────►   one graph per class of layers
    slice             before ─► attention ─► after             two graphs; the keys and values of earlier slices
                                                               stay outside, and the number of tokens is dynamic

All parts of a process share the compiled code, because it is cached by the method and not by the layer: the weights
are its inputs. `CompiledMethod` counts the graphs and warns before torch stops compiling at its limit.

A compiled layer is a single node for autograd, which computes all of its gradients at once. For a split backward, each
linear layer therefore gets two more inputs, its ghosts. They hold no numbers, but their gradients are what W needs:

    ghost of x    (zeros without memory)   ─┐                       its "gradient" is x
    ghost of y                             ─┼─► y = x W^T + b       its gradient is that of y
    x                                      ─┘                       its gradient is computed in I

The weight itself gets no gradient from the compiled code; W multiplies the two gradients (`penstock.runtime.backward`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.models.slice import Slice
from penstock.runtime.backward import (
    Ghosts,
    can_wait,
    current_ledger,
    deferrable_layers,
    ghost_trace,
    ghosts_of,
)
from penstock.runtime.passed_values import has_gradient
from penstock.torch_internals import (
    call_uncompiled,
    compile_graph,
    compiler_limit,
    has_hooks,
    is_compiled,
    known_compilers,
    let_size_vary,
    set_compiled_call,
    size_varies,
)

DEFAULT_COMPILER = "inductor"

SPARE_GRAPHS = 1  # warn when this many are left before torch gives up

_log = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)


# ---------------------------------------------------------------- one method
class Way(StrEnum):
    """How a compiled layer runs. Torch compiles each of these separately, so each has its own limit."""

    WHOLE = "whole"  # autograd computes all gradients
    GHOSTS = "ghosts"  # the weight gradients of linear layers are left to a ledger
    EVALUATION = "evaluation"  # without gradients


class CompiledMethod:
    """A method of a class of layers, or a function, which is compiled for all its callers together."""

    def __init__(self, method: Callable[..., Any], compiler: str) -> None:
        self.name = method.__qualname__
        self.compiler = compiler
        self.graphs = 0  # compiled so far
        # Torch counts by code object, so each method needs its own.
        own_code: CodeType = _call.__code__.replace(co_name=f"compiled {self.name}")
        own_call = FunctionType(own_code, _call.__globals__)
        self.call: Callable[..., Any] = torch.compile(
            own_call, backend=self.compile_graph
        )

    def compile_graph(self, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        """Compile one graph, as torch.compile asks for it."""
        self.graphs += 1
        limit = compiler_limit()
        if self.graphs == limit - SPARE_GRAPHS:
            _log.warning(
                "%s was compiled %d times, and after %d torch runs it uncompiled\n"
                "  something changes from call to call, such as shapes or attributes of its layers; "
                "TORCH_LOGS=recompiles says what. Use fewer shapes, or do not compile (run.compile = false)",
                self.name,
                self.graphs,
                limit,
            )
        return compile_graph(self.compiler, graph, inputs)


def _call(
    method: Callable[..., Any],
    ghosts: tuple[Ghosts | None, ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The function that is compiled: `method` on `args`, whose linear layers find their ghosts in `ghost_trace`."""
    ghost_trace.ghosts = list(ghosts)
    result = method(*args, **kwargs)
    ghost_trace.ghosts = []
    return result


@cache
def compiled_method(
    method: Callable[..., Any], compiler: str, way: Way = Way.WHOLE
) -> CompiledMethod:
    """The compiled form of a method that runs in one way, the same for all its callers in this process."""
    return CompiledMethod(method, compiler)


# ---------------------------------------------------------------- one layer
class CompiledLayer:
    """What runs instead of a layer.

    A slice brings a `piece`, a Python object with the keys and values of earlier slices. A layer that has a method
    `forward_slice(call, ...)` runs such a slice with `call(method, *tensors)` for everything that sees only tensors.
    Any other layer runs slices uncompiled.
    """

    def __init__(self, layer: nn.Module, compiler: str) -> None:
        self.layer = layer
        self.compiler = compiler
        self.linears = deferrable_layers(layer)
        for number, linear in enumerate(self.linears):
            linear.ghost_number = number  # type: ignore[assignment]
        self.forward_slice = getattr(layer, "forward_slice", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer."""
        piece = kwargs.get("piece", args[-1] if args else None)
        if isinstance(piece, Slice) and self.forward_slice is not None:
            return self.forward_slice(self.run_slice, *args, **kwargs)
        if _bring_slice((*args, *kwargs.values())):
            return call_uncompiled(self.layer, *args, **kwargs)
        return self.run(self.layer.forward, False, *args, **kwargs)

    def run_slice(self, method: Callable[..., Any], *args: Any) -> Any:
        """Run a method of the layer on the tensors of a slice, which may have any number of tokens.

        The result says so too, because the head gets it without a piece.
        """
        result = self.run(method, True, *args)
        let_tokens_vary([result])
        return result

    def run(
        self, method: Callable[..., Any], dynamic: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the compiled form of a bound method."""
        assert isinstance(method, MethodType)
        compiled = compiled_method(method.__func__, self.compiler, Way.EVALUATION)
        dynamic = dynamic or any(map(size_varies, args))
        if not torch.is_grad_enabled():
            # Otherwise torch would compile again for inputs that need a gradient elsewhere.
            args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
            if dynamic:
                let_tokens_vary(args)
            return compiled.call(method.__func__, (), self.layer, *args, **kwargs)
        ghosts = self.ghosts(args[0])
        way = Way.GHOSTS if ghosts else Way.WHOLE
        compiled = compiled_method(method.__func__, self.compiler, way)
        if dynamic:
            let_tokens_vary(args)
            for each in ghosts:
                let_tokens_vary(each[:2] if each else ())
        return compiled.call(method.__func__, ghosts, self.layer, *args, **kwargs)

    def ghosts(self, x: Tensor) -> tuple[Ghosts | None, ...]:
        """The ghosts of all linear layers whose weight gradient is not autograd's; none if there is no ledger."""
        ledger = current_ledger()
        if ledger is None or not self.linears or not torch.is_grad_enabled():
            return ()
        waiting = [can_wait(ledger, linear) for linear in self.linears]
        return ghosts_of(ledger, self.linears, waiting, x)


def _bring_slice(arguments: Iterable[object]) -> bool:
    """Whether one of the arguments is a slice, or the keys and values of one."""
    return any(isinstance(getattr(one, "piece", one), Slice) for one in arguments)


def let_tokens_vary(tensors: Iterable[object]) -> None:
    """Make the number of tokens dynamic: it is the last size of ids and positions, else the one before the last."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.dim() > 0:
            hidden = has_gradient(tensor.dtype)
            let_size_vary(tensor, tensor.dim() - 2 if hidden else tensor.dim() - 1)


# ---------------------------------------------------------------- stages and losses
def compile_stage(stage: Module, compiler: str = DEFAULT_COMPILER) -> Module:
    """Compile the layers of a stage in place and return it. Call it before the `Executor` is made.

    The parts of `penstock.models.split` compile each layer, the embedding and the head; any other module is compiled
    as one piece. `compiler` is a backend of torch.compile. The first step is slow, because compiling takes a while.
    """
    if compiler not in known_compilers():
        raise ShapeError(
            f"torch.compile has no backend {compiler!r}; there are: {', '.join(known_compilers())}"
        )
    for layer in getattr(stage, "pieces_to_compile", [stage]):
        if is_compiled(layer):
            continue
        reason = _why_uncompiled(layer)
        if reason:
            name = type(layer).__name__
            _log.warning("a layer of class %s is not compiled: %s", name, reason)
            continue
        set_compiled_call(layer, CompiledLayer(layer, compiler))
    return stage


def _why_uncompiled(layer: nn.Module) -> str:
    """Why a layer cannot be compiled; empty if it can."""
    if has_hooks(layer):
        return "compiled code would not call its hooks"
    if not isinstance(layer.forward, MethodType):
        return "its forward was replaced by something that is not a method"
    return ""


class CompiledLoss:
    """A compiled loss. `plain` is the same loss, not compiled, for checks on a few labels at a time."""

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        compiler: str = DEFAULT_COMPILER,
    ) -> None:
        self.plain = loss
        self.compiled = compiled_method(loss, compiler)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of these logits."""
        labels = labels.contiguous()  # those of a slice are a view of all labels
        let_tokens_vary((logits, labels))
        loss: Tensor = self.compiled.call(self.plain, (), logits, labels)
        return loss
