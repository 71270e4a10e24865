"""Random numbers of a forward that is computed twice: dropout must drop the same values both times.

    F     remembers the generators before and after it        seed 7, 0 drawn  ──►  seed 7, 64 drawn
    B     sets them back, computes the forward again, checks that they end where they did, and goes on from now

torch has one generator for the CPU and one for each GPU, for all threads of a process. Ranks that are threads therefore
take turns at their forwards if any of them recomputes (`TURN`); otherwise one would draw in the middle of another's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.errors import RunError

States: TypeAlias = tuple[
    Tensor, ...
]  # of the CPU's generator and, on a GPU, of that GPU's
TURN = threading.RLock()


class Drawn(NamedTuple):
    """The generators before and after a forward that drew."""

    before: States
    after: States


def states(device: torch.device) -> States:
    """The generators that a forward on this device may draw from; a few microseconds."""
    cpu = torch.get_rng_state()
    return (
        (cpu,)
        if device.type == "cpu"
        else (cpu, torch.get_device_module(device).get_rng_state(device))
    )


def drawn_since(before: States, device: torch.device) -> Drawn | None:
    """What was drawn since then; None if nothing was, as in most models."""
    after = states(device)
    return None if same(before, after) else Drawn(before, after)


def same(some: States, others: States) -> bool:
    """Whether they will draw the same numbers."""
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def set_back(to: States, device: torch.device) -> None:
    """Makes the generators draw what they drew from there."""
    torch.set_rng_state(to[0])
    if len(to) > 1:
        torch.get_device_module(device).set_rng_state(to[1], device)


@contextmanager
def drawing_again(
    drawn: Drawn | None, device: torch.device, what: object
) -> Iterator[None]:
    """Inside, the numbers of the first time are drawn once more; afterwards it goes on as if nothing had been drawn."""
    if drawn is None:
        yield
        return
    with TURN:
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
    """What is drawn inside is drawn again afterwards."""
    with TURN:
        now = states(device)
        try:
            yield
        finally:
            set_back(now, device)
