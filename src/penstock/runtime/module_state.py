"""What a forward changes besides its result: random number generators, buffers and plain attributes of modules.

Who runs a forward twice, or only to look at it, puts these back with the contexts of this file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from penstock.errors import RunError, ShapeError
from penstock.runtime.passed_values import has_gradient
from penstock.torch_internals import (
    Norm,
    compiled_call,
    is_compiled,
    is_dropout,
    module_attributes,
    original_module,
    own_buffers,
    own_layers,
    set_compiled_call,
)

# ---------------------------------------------------------------- random numbers
# Repeats the random numbers of a forward that is computed twice: dropout must drop the same values both times.
#
#     F     remembers the generators before and after it        seed 7, 0 drawn  ──►  seed 7, 64 drawn
#     B     sets them back, computes the forward again, and checks that they end in the same state; then restores them
#
# Torch has one generator for the CPU and one for each GPU, which all threads of a process share. If any rank
# recomputes, ranks that are threads therefore run their forwards one at a time (`DRAWING_LOCK`). Otherwise one thread
# would draw in the middle of another's forward.


States: TypeAlias = tuple[Tensor, ...]  # of the CPU's generator, and of the GPU's

DRAWING_LOCK = threading.RLock()


class Drawn(NamedTuple):
    """The states of the generators before and after a forward that drew random numbers."""

    before: States
    after: States


def states(device: torch.device) -> States:
    """The states of the generators that a forward on this device may use. Takes a few microseconds."""
    cpu = torch.get_rng_state()
    if device.type == "cpu":
        return (cpu,)
    return cpu, torch.get_device_module(device).get_rng_state(device)


def drawn_since(before: States, device: torch.device) -> Drawn | None:
    """The states then and now; None if nothing was drawn in between, as in most models."""
    after = states(device)
    return None if same(before, after) else Drawn(before, after)


def same(states: States, others: States) -> bool:
    """Whether generators in these states draw the same numbers."""
    return all(torch.equal(a, b) for a, b in zip(states, others, strict=True))


def set_back(states: States, device: torch.device) -> None:
    """Set the generators back to these states."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)


@contextmanager
def drawing_again(
    drawn: Drawn | None, device: torch.device, what: object
) -> Iterator[None]:
    """Inside, draw the numbers of the first time again; afterwards go on as if nothing had been drawn."""
    if drawn is None:
        yield
        return
    with DRAWING_LOCK:
        now = states(device)
        set_back(drawn.before, device)
        try:
            yield
            end = states(device)
        finally:
            set_back(now, device)
    if not same(end, drawn.after):
        raise RunError(
            f"{what} computed its forward again and drew other random numbers than the first time (dropout?)\n"
            "  another thread drew meanwhile, or the forward depends on more than its input: let only the executors "
            "draw while a step runs, or train without `recompute`"
        )


@contextmanager
def undrawn(device: torch.device) -> Iterator[None]:
    """Afterwards, set the generators back to their states before."""
    with DRAWING_LOCK:
        now = states(device)
        try:
            yield
        finally:
            set_back(now, device)


# ---------------------------------------------------------------- module buffers
# Lets every forward count once in the buffers of a module, such as the running mean of a batch norm.
#
# Some modules change their buffers in every forward: batch norms, spectral norms, codebooks, moving averages. That goes
# wrong in four cases:
#
# - A recomputed stage computes its forward twice, and other micro-batches may have run in between. The second forward
#   starts from the buffers of the first one, and its changes are dropped (`buffers_as_before`).
# - Actions are recorded on made-up numbers, which must not count (`buffers_restored`).
# - Several ranks may hold copies of a buffer, and each copy sees only the micro-batches of its rank. That is refused in
#   the first step (`refuse_changed_copies`).
# - Ranks that are threads may share a norm. If both read its mean and then both write theirs, the first update is lost.
#   So a norm belongs to one forward at a time (`statistics_locks`).

Buffers: TypeAlias = dict[str, Tensor | None]  # of one module itself, by name

# Not attributes of the norms: a module that holds a lock can be neither copied nor pickled.
_LOCKS: WeakKeyDictionary[Norm, threading.Lock] = WeakKeyDictionary()


def buffers_of(module: nn.Module) -> list[Buffers]:
    """The buffers of a module and of all modules inside, which can be replaced there."""
    return [own_buffers(one) for one in module.modules() if own_buffers(one)]


def copied(buffers: Sequence[Buffers]) -> list[Buffers]:
    """The same buffers in memory of their own. What was one tensor still is one."""
    copies: dict[int, Tensor | None] = {id(None): None}
    for held in buffers:
        for x in held.values():
            if x is not None and id(x) not in copies:
                copies[id(x)] = x.detach().clone()
    return [{name: copies[id(x)] for name, x in held.items()} for held in buffers]


@contextmanager
def buffers_as_before(
    buffers: Sequence[Buffers], before: Sequence[Buffers]
) -> Iterator[None]:
    """Inside, modules have these earlier buffers, which they may change; afterwards they have their own again.

    Ranks that are threads may share the modules, so no other forward may run meanwhile.
    """
    if not buffers:
        yield
        return
    with DRAWING_LOCK:
        now = [dict(held) for held in buffers]
        _replace(buffers, before)
        try:
            yield
        finally:
            _replace(buffers, now)


def _replace(buffers: Sequence[Buffers], others: Sequence[Buffers]) -> None:
    for held, other in zip(buffers, others, strict=True):
        held.clear()
        held.update(other)


@contextmanager
def buffers_restored(
    modules: Mapping[int, nn.Module], in_place: bool
) -> Iterator[None]:
    """Afterwards, the buffers of these stages have their numbers of before.

    With `in_place`, what ran inside will run again in the same memory. Then a module that puts a new tensor in the
    place of a buffer is refused, because its changes would not add up.
    """
    held = {stage: buffers_of(module) for stage, module in modules.items()}
    own = {stage: [dict(one) for one in each] for stage, each in held.items()}
    numbers = {stage: copied(each) for stage, each in held.items()}
    try:
        yield
        if in_place:
            for stage, each in held.items():
                _refuse_replaced(stage, each, own[stage])
    finally:
        for stage, each in held.items():
            _replace(each, own[stage])
            for x, saved in _pairs(each, numbers[stage]):
                x.data.copy_(saved)


def _pairs(
    buffers: Iterable[Buffers], saved: Iterable[Buffers]
) -> Iterator[tuple[Tensor, Tensor]]:
    for held, other in zip(buffers, saved, strict=True):
        for name, x in held.items():
            numbers = other[name]
            if x is not None and numbers is not None:
                yield x, numbers


def _refuse_replaced(
    stage: int, buffers: Sequence[Buffers], before: Sequence[Buffers]
) -> None:
    for held, other in zip(buffers, before, strict=True):
        for name, x in held.items():
            if x is not other.get(name):
                raise ShapeError(
                    f"stage {stage} cannot be recorded: its forward puts a new tensor in the place of the buffer "
                    f"{name}, but a recording always reads the old one\n"
                    f"  let the forward change it in place, with copy_() or mul_(), or train without recordings: "
                    "graphs=False"
                )


# ---------------------------------------------------------------- copies on several ranks
def whole_buffers(part: int, module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a stage, under names that are the same on all ranks."""
    named = getattr(original_module(module), "whole_buffers", None)
    if named is not None:
        held: dict[str, Tensor] = named()
        return held
    return {f"{name} of part {part}": x for name, x in module.named_buffers()}


def refuse_changed_copies(
    stage: int,
    module: nn.Module,
    held: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    ranks: Mapping[str, Sequence[int]],
) -> None:
    """Raise an error if a forward has changed a buffer of which several `ranks` hold copies."""
    for name, old in before.items():
        new = held.get(name)
        if new is not None and new.shape == old.shape and torch.equal(new, old):
            continue
        owners = " and ".join(map(str, ranks[name]))
        raise ShapeError(
            f"stage {stage} ({type(original_module(module)).__name__}) changes the buffer {name} in its forward, and "
            f"the ranks {owners} hold a copy of it each, which would see only the micro-batches of its rank\n"
            "  let one rank hold the layer (a schedule without copies of a part; a layer that comes only once in the "
            "list), call eval() on it, or use a norm without running statistics, such as nn.LayerNorm"
        )


# ---------------------------------------------------------------- norms that threads share
def statistics_locks(module: nn.Module) -> list[threading.Lock]:
    """The locks that a forward of a module holds: those of the norms inside that gather statistics.

    Their order is the same for all threads, so that two of them cannot wait for each other.
    """
    norms = [one for one in module.modules() if isinstance(one, Norm)]
    gathering = sorted((norm for norm in norms if norm.track_running_stats), key=id)
    return [_LOCKS.setdefault(norm, threading.Lock()) for norm in gathering]


# ---------------------------------------------------------------- traceless
# Contexts in which a module runs differently for a moment, and which leave it as it was.
#
# ModuleMemory       restores buffers and plain attributes after a run
# uncompiled         runs the module without torch.compile
# without_dropout    switches dropout off
# noisy              changes every output by one rounding
# restored_random    restores torch's random number generators

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
        saved = {
            name: (value, _copy_contents(value))
            for name, value in values.items()
            if name not in skipped
        }
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


@contextmanager
def restored_random(
    devices: Iterable[torch.device], barrier: Callable[[], None]
) -> Iterator[None]:
    """Restore torch's random number generators afterwards.

    Ranks that are threads share them, so all ranks meet at a barrier before and after.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    before = {device: states(device) for device in (torch.device("cpu"), *gpus)}
    barrier()
    try:
        yield
        barrier()
    finally:
        for device, now in before.items():
            set_back(now, device)
    barrier()
