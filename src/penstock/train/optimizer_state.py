"""What an optimizer of torch remembers of each parameter: found by one step on a tiny parameter.

    AdamW       exp_avg, exp_avg_sq   as large as the parameter        step      one number
    SGD         momentum_buffer, if it has momentum
    Adafactor   row_var, col_var      one number a row, one a column   step      one number

Checkpoints and other processes must know the shapes of this state before a parameter has taken its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.runtime import local_share

Build: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
State: TypeAlias = dict[str, Tensor]
PROBE_SHAPE = (2, 3, 5, 7, 11)
COUNTER = "step"  # most optimizers count the steps of each parameter


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of the state of a parameter."""

    name: str
    # For each dimension, whether the state has all of it or one entry; None for a single number.
    dimensions: tuple[bool, ...] | None
    dtype: torch.dtype
    on_cpu: bool

    @property
    def is_number(self) -> bool:
        """Whether it is a single number for the whole parameter."""
        return self.dimensions is None

    def blank(self, parameter: Tensor) -> Tensor:
        """Return zeros in the shape that the state of a parameter has."""
        device = torch.device("cpu") if self.on_cpu else parameter.device
        if self.dimensions is None:
            return torch.zeros((), dtype=self.dtype, device=device)
        if all(self.dimensions):
            return torch.zeros_like(parameter, dtype=self.dtype)
        sizes = zip(parameter.shape, self.dimensions, strict=True)
        shape = [size if full else 1 for size, full in sizes]
        return torch.zeros(shape, dtype=self.dtype, device=device)

    def numbers(self, shape: tuple[int, ...]) -> int:
        """How many numbers it has for a parameter of this shape."""
        total = 1
        for size, full in zip(shape, self.dimensions or (), strict=False):
            total *= size if full else 1
        return total


def find_slots(build: Build, dimensions: int, device: torch.device) -> tuple[Slot, ...]:
    """Return the state that an optimizer keeps of parameters with this many dimensions."""
    shape = PROBE_SHAPE[:dimensions]
    probe = nn.Parameter(torch.ones(shape, device=device))
    probe.grad = torch.ones_like(probe)
    optimizer = build([probe])
    optimizer.step()
    slots = []
    for name, value in sorted(optimizer.state[probe].items()):
        if value is None:
            continue
        full = _dimensions(value, shape)
        if not isinstance(value, Tensor) or (full is None and value.dim()):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {name!r} in a form that no checkpoint here has\n"
                "  choose another optimizer.name"
            )
        on_cpu = value.device.type == "cpu"
        slots.append(Slot(name, full, value.dtype, on_cpu))
    return tuple(slots)


def _dimensions(value: object, shape: tuple[int, ...]) -> tuple[bool, ...] | None:
    """Which dimensions of a parameter a tensor has in full; None if it is not shaped like that."""
    if not isinstance(value, Tensor) or value.dim() != len(shape) or not shape:
        return None
    pairs = list(zip(value.shape, shape, strict=True))
    if any(size not in (1, whole) for size, whole in pairs):
        return None
    return tuple(size == whole for size, whole in pairs)


def filled(
    slots: tuple[Slot, ...], state: Mapping[str, Tensor | None], parameter: Tensor
) -> Iterator[tuple[Slot, Tensor]]:
    """Yield the state of a parameter, with zeros for what it does not have yet."""
    for slot in slots:
        value = state.get(slot.name)
        yield slot, slot.blank(parameter) if value is None else value.detach()


def is_unused(state: Mapping[str, Tensor]) -> bool:
    """Whether the state in a checkpoint is that of a parameter that has not taken a step yet.

    Such state is left out, because optimizers begin with more than zeros (Rprop with its rate).
    """
    if COUNTER in state:
        return not bool(state[COUNTER].any())
    return not any(bool(local_share(value).any()) for value in state.values())
