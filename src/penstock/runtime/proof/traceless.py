"""Contexts in which a module runs differently for a moment, and which leave it as it was.

ModuleMemory       restores buffers and plain attributes after a run
uncompiled         runs the module without torch.compile
without_dropout    switches dropout off
noisy              changes every output by one rounding
restored_random    restores torch's random number generators
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.runtime.passed_values import has_gradient
from penstock.runtime.torch_internals import (
    compiled_call,
    is_compiled,
    is_dropout,
    module_attributes,
    original_module,
    own_buffers,
    own_layers,
    set_compiled_call,
)

NO_NAMES: frozenset[str] = frozenset()


class ModuleMemory:
    """What a module stores besides its parameters: buffers and plain attributes.

    Some modules change these while they run. `restore` gives tensors their old numbers,
    lists, dicts and sets their old items, random generators their old state, and sets all
    other attributes to their old values.
    """

    # Attributes that every module has, such as its parameters and hooks.
    COMMON = module_attributes()

    def __init__(self, module: nn.Module) -> None:
        # A dict of a layer, the names in it that stay as they are, and for each other name the value and a copy of
        # its contents.
        self.saved: list[
            tuple[dict[str, Any], frozenset[str], dict[str, tuple[Any, Any]]]
        ] = []
        # The buffers of a layer, the name of the layer, and copies of the buffers.
        self.buffers: list[tuple[dict[str, Any], str, dict[str, Any]]] = []
        for path, layer in module.named_modules():
            self._save(layer.__dict__, self.COMMON)
            self._save(own_buffers(layer), NO_NAMES, path)

    def _save(
        self, values: dict[str, Any], skipped: frozenset[str], path: str | None = None
    ) -> None:
        saved = {}
        for name, value in values.items():
            if name not in skipped:
                saved[name] = (value, _copy_contents(value))
        self.saved.append((values, skipped, saved))
        if path is not None:
            before = {name: contents for name, (_, contents) in saved.items()}
            self.buffers.append((values, f"{path}." if path else "", before))

    def changed_buffers(self) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
        """Yield each buffer that has changed since, by its name: as it was, and as it is."""
        for values, prefix, before in self.buffers:
            for name in dict.fromkeys([*before, *values]):
                old, new = before.get(name), values.get(name)
                if old is None and new is None:
                    continue
                if old is None or new is None or not _same(old, new):
                    yield f"{prefix}{name}", old, new

    def restore(self) -> None:
        """Restore everything that was saved, and delete what was added since."""
        for values, skipped, saved in self.saved:
            for name in list(values):
                if name not in saved and name not in skipped:
                    del values[name]
            for name, (value, contents) in saved.items():
                _restore_contents(value, contents)
                values[name] = value


def _same(one: Tensor, other: Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (
        other.shape,
        other.dtype,
        other.device,
    )
    return alike and torch.equal(one, other)


def _copy_contents(value: Any) -> Any:
    """A copy of what a mutable value holds; None for other values."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if type(value) in (list, dict, set):
        return type(value)(value)
    return None


def _restore_contents(value: Any, contents: Any) -> None:
    if isinstance(value, Tensor):
        # Writing the same numbers would make autograd believe that the tensor changed.
        if not torch.equal(value.detach(), contents):
            value.data.copy_(contents)
    elif isinstance(value, torch.Generator):
        value.set_state(contents)
    elif type(value) is list:
        value[:] = contents
    elif type(value) in (dict, set):
        value.clear()
        value.update(contents)


def has_compiled_layer(module: nn.Module) -> bool:
    """Whether torch.compile was applied to a module or to any layer of it."""
    return any(is_compiled(layer) for layer in module.modules())


@contextmanager
def uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """The module without torch.compile, and its layers without it too."""
    plain = original_module(module)
    wrappers: list[tuple[nn.Module, str, nn.Module]] = []  # parent, name, child
    calls: list[tuple[nn.Module, Callable[..., Any]]] = []
    for layer in plain.modules():
        for name, child in own_layers(layer).items():
            if child is not None and original_module(child) is not child:
                wrappers.append((layer, name, child))
        call = compiled_call(layer)
        if call is not None:
            calls.append((layer, call))
    try:
        for parent, name, child in wrappers:
            own_layers(parent)[name] = original_module(child)
        for layer, _ in calls:
            set_compiled_call(layer, None)
        yield plain
    finally:
        for parent, name, child in wrappers:
            own_layers(parent)[name] = child
        for layer, call in calls:
            set_compiled_call(layer, call)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Switch off torch's dropout layers, and layers with a probability named after it."""
    changed: list[tuple[nn.Module, str, float]] = []
    for layer in module.modules():
        names = ["p"] if is_dropout(layer) else []
        for name, value in vars(layer).items():
            if "drop" in name and type(value) is float:
                names.append(name)
        changed += [(layer, name, getattr(layer, name)) for name in names]
    try:
        for layer, name, _ in changed:
            setattr(layer, name, 0.0)
        yield
    finally:
        for layer, name, value in changed:
            setattr(layer, name, value)


@contextmanager
def noisy(module: nn.Module, noise: float, seed: int) -> Iterator[None]:
    """Change every number of every layer's output by the share `noise`, up or down at random."""
    # Inside of vmap, torch's own generators refuse to draw.
    generator = np.random.default_rng(seed)

    def blur(value: Any) -> Any:
        if isinstance(value, Tensor) and has_gradient(value.dtype):
            bits = generator.integers(0, 2, tuple(value.shape), dtype=np.int8)
            signs = 2 * torch.from_numpy(np.asarray(bits)).to(value.device) - 1
            return value * (1 + noise * signs.double()).to(value.dtype)
        if type(value) in (list, tuple):
            return type(value)(map(blur, value))
        if type(value) is dict:
            return {name: blur(one) for name, one in value.items()}
        return value

    layers = module.modules() if noise else ()
    hooks = [
        layer.register_forward_hook(lambda _, __, output: blur(output))
        for layer in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ---------------------------------------------------------------- random numbers
def random_states(device: torch.device) -> list[Tensor]:
    """The states of torch's random number generators: the CPU's, and the GPU's if used."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


@contextmanager
def restored_random(
    devices: Iterable[torch.device], barrier: Callable[[], None]
) -> Iterator[None]:
    """Restore torch's random number generators afterwards.

    Ranks that are threads share them, so all ranks meet at a barrier before and after.
    """
    gpus = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    cpu_state = torch.get_rng_state()
    gpu_states = [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    barrier()
    try:
        yield
        barrier()
    finally:
        torch.set_rng_state(cpu_state)
        for gpu, state in zip(gpus, gpu_states, strict=True):
            torch.cuda.set_rng_state(state, gpu)
    barrier()
