"""Repeats the random numbers of a forward that is computed twice: dropout must drop the same values both times.

    F     remembers the generators before and after it        seed 7, 0 drawn  ──►  seed 7, 64 drawn
    B     sets them back, computes the forward again, and checks that they end in the same state; then restores them

Torch has one generator for the CPU and one for each GPU, which all threads of a process share. If any rank recomputes,
ranks that are threads therefore run their forwards one at a time (`DRAWING_LOCK`). Otherwise one thread would draw in
the middle of another's forward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.errors import RunError

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
