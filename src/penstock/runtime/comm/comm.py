"""How ranks talk: tensors point to point, in order, without tags; sums over groups of ranks.

    send      returns at once; the tensor must not be written to until `wait`
    receive   returns at once; `wait` gives the tensor
    add       sums a tensor over a group of ranks, in place; `wait` when the sum is needed

Between two ranks messages arrive in the order in which they are sent, so that a program of `lower` needs no tags. Raw
tensors travel; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.ir.program import Program


class Pending(Protocol):
    """Something on its way."""

    def wait(self) -> None:
        """Blocks until it is done; a `StuckError` or `PeerLostError` if it never will be."""
        ...


class Arriving(Protocol):
    """A tensor on its way here."""

    def wait(self) -> Tensor:
        """Blocks until it is here, and gives it."""
        ...


class Comm(Protocol):
    """One rank's connection to the others."""

    @property
    def rank(self) -> int:
        """Which rank this is."""
        ...

    @property
    def ranks(self) -> int:
        """How many there are."""
        ...

    @property
    def window(self) -> int:
        """Bytes of receives that may be posted before the program has them; 0: none."""
        ...

    def send(self, tensor: Tensor, target: int) -> Pending:
        """Sends a tensor."""
        ...

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> Arriving:
        """Receives the next tensor of a rank, which has that shape and type."""
        ...

    def give_back(self, tensor: Tensor) -> None:
        """A received tensor that nobody looks at any more: its memory may take the next one."""
        ...

    def prepare(self, groups: list[tuple[int, ...]]) -> None:
        """Makes ready the groups that `add` will be asked for; all ranks call it with the same list."""
        ...

    def reserve(
        self, program: Program, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        """Makes room for the messages of a program, a shape for each unit; all ranks call it with the same."""
        ...

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> Pending:
        """Sums a tensor over a group of ranks, in place. All of a group call it in the same order."""
        ...

    def barrier(self) -> None:
        """Waits for all ranks."""
        ...
