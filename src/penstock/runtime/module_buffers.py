"""Lets every forward count once in the buffers of a module, such as the running mean of a batch norm.

Some modules change their buffers in every forward: batch norms, spectral norms, codebooks, moving averages. That goes
wrong in four cases:

- A recomputed stage computes its forward twice, and other micro-batches may have run in between. The second forward
  starts from the buffers of the first one, and its changes are dropped (`buffers_as_before`).
- Actions are recorded on made-up numbers, which must not count (`buffers_restored`).
- Several ranks may hold copies of a buffer, and each copy sees only the micro-batches of its rank. That is refused in
  the first step (`refuse_changed_copies`).
- Ranks that are threads may share a norm. If both read its mean and then both write theirs, the first update is lost.
  So a norm belongs to one forward at a time (`statistics_locks`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.runtime.randomness import DRAWING_LOCK
from penstock.runtime.torch_internals import Norm, original_module, own_buffers

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
def gathering_norms(module: nn.Module) -> list[Norm]:
    """The norms inside a module that gather statistics."""
    norms = [one for one in module.modules() if isinstance(one, Norm)]
    return [norm for norm in norms if norm.track_running_stats]


def statistics_locks(norms: Sequence[Norm]) -> list[threading.Lock]:
    """The locks that a forward through these norms holds.

    Their order is the same for all threads, so that two of them cannot wait for each other.
    """
    ordered = sorted(norms, key=id)
    return [_LOCKS.setdefault(norm, threading.Lock()) for norm in ordered]
