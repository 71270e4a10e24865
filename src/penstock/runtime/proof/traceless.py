"""Ways to run a module that leave it as it was: what it remembers, what it draws, how it is compiled.

Memory         buffers and plain attributes, put back after every run
uncompiled     the module as it was written        silenced    without dropout
noisy          every output off by one rounding    fired       whose gradients autograd itself has added
kept_numbers   torch's random numbers go on afterwards where they were
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.torch_internals import (
    compiled_call,
    is_dropout,
    module_attributes,
    original_module,
    own_buffers,
    own_layers,
    set_compiled_call,
)
from penstock.runtime.torch_internals import is_compiled as is_compiled_itself


class Memory:
    """What a module keeps besides its parameters: buffers, and plain attributes, which some modules change as they run.

    Tensors get their numbers back, lists and dicts what they held, generators of random numbers their state; other
    attributes are set to what they were.
    """

    OWN = module_attributes()  # of every module: parameters, hooks, ...

    def __init__(self, module: nn.Module) -> None:
        self.kept: list[tuple[dict[str, Any], dict[str, tuple[Any, Any]]]] = []
        for one in module.modules():
            for values, skipped in (
                (one.__dict__, self.OWN),
                (own_buffers(one), frozenset[str]()),
            ):
                saved = {
                    name: (value, _copied(value))
                    for name, value in values.items()
                    if name not in skipped
                }
                self.kept.append((values, saved))

    def restore(self) -> None:
        """Puts everything back."""
        for values, saved in self.kept:
            skipped = self.OWN if "_parameters" in values else frozenset[str]()
            for name in [
                name for name in values if name not in saved and name not in skipped
            ]:
                del values[name]
            for name, (value, copy) in saved.items():
                _put_back(value, copy)
                values[name] = value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return type(value)(value) if type(value) in (list, dict, set) else None


def _put_back(value: Any, copy: Any) -> None:
    if isinstance(value, Tensor):
        if not torch.equal(
            value.detach(), copy
        ):  # writing would make autograd believe that it has changed
            value.data.copy_(copy)
    elif isinstance(value, torch.Generator):
        value.set_state(copy)
    elif type(value) is list:
        value[:] = copy
    elif type(value) in (dict, set):
        value.clear()
        value.update(copy)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile looks after it, or after any layer of it."""
    return any(is_compiled_itself(layer) for layer in module.modules())


@contextmanager
def uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """The module as it was written, its layers too."""
    plain = original_module(module)
    layers = [
        (parent, name, child)
        for parent in list(plain.modules())
        for name, child in list(own_layers(parent).items())
        if child is not None and original_module(child) is not child
    ]
    calls = [
        (one, compiled_call(one))
        for one in plain.modules()
        if compiled_call(one) is not None
    ]
    try:
        for parent, name, child in layers:
            own_layers(parent)[name] = original_module(child)
        for one, _ in calls:
            set_compiled_call(one, None)
        yield plain
    finally:
        for parent, name, child in layers:
            own_layers(parent)[name] = child
        for one, compiled in calls:
            set_compiled_call(one, compiled)


@contextmanager
def silenced(module: nn.Module) -> Iterator[None]:
    """Without dropout: layers of torch's, and layers that keep its probability in an attribute that says so."""
    changed: list[tuple[nn.Module, str, float]] = []
    for one in module.modules():
        words = ["p"] if is_dropout(one) else []
        words += [
            name
            for name, value in vars(one).items()
            if "drop" in name and type(value) is float
        ]
        changed += [(one, name, getattr(one, name)) for name in words]
    try:
        for one, name, _ in changed:
            setattr(one, name, 0.0)
        yield
    finally:
        for one, name, value in changed:
            setattr(one, name, value)


@contextmanager
def noisy(module: nn.Module, noise: float, seed: int) -> Iterator[None]:
    """Every layer's output is off by that share of itself, up or down by chance."""
    draw = torch.Generator().manual_seed(seed)

    def blur(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            signs = torch.randint(
                0, 2, value.shape, generator=draw, dtype=torch.int8
            ).to(value.device)
            return value * (1 + noise * (2 * signs - 1).double()).to(value.dtype)
        return type(value)(map(blur, value)) if type(value) in (list, tuple) else value

    layers = module.modules() if noise else ()
    hooks = [
        one.register_forward_hook(lambda _, __, output: blur(output)) for one in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def fired(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[set[str]]:
    """Names of parameters whose gradients autograd itself adds: not those that are left to a W."""
    fired: set[str] = set()

    def note(name: str) -> Callable[[Tensor | None], None]:
        return lambda gradient: None if gradient is None else fired.add(name)

    hooks = [parameter.register_hook(note(name)) for name, parameter in parameters]  # type: ignore[no-untyped-call]
    try:
        yield fired
    finally:
        for hook in hooks:
            hook.remove()


# ---------------------------------------------------------------- random numbers
def drawn(device: torch.device) -> list[Tensor]:
    """Where torch's random numbers stand."""
    there = [torch.get_rng_state()]
    return (
        [*there, torch.cuda.get_rng_state(device)] if device.type == "cuda" else there
    )


@contextmanager
def kept_numbers(
    devices: Iterable[torch.device], meet: Callable[[], None]
) -> Iterator[None]:
    """Random numbers go on afterwards where they were. Threads share them: all meet before and after."""
    gpus = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    state, of_gpus = (
        torch.get_rng_state(),
        [torch.cuda.get_rng_state(gpu) for gpu in gpus],
    )
    meet()
    try:
        yield
        meet()
    finally:
        torch.set_rng_state(state)
        for gpu, there in zip(gpus, of_gpus, strict=True):
            torch.cuda.set_rng_state(there, gpu)
    meet()
