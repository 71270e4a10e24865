"""A slow network, emulated: every message takes the latency and the bandwidth that a `Network` gives its link.

    sender     ──── leaves ──────── wire ────────┐
               (serial: once the link is free)   └─ latency ─┐
    receiver                                                 there: not given to the rank before

Each message goes with the moment at which it is due, on the clock that the processes of one machine share; whoever
waits for it sleeps until then. Times are multiplied by `scale` (0.01: a hundred times as fast), sizes by `inflate`, so
that a small machine can play a large network with small tensors. Sums over replicas take as long as a ring would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.cost.network import Network, value_of_pair
from penstock.ir.program import Program
from penstock.runtime.comm.comm import Arriving, Comm, Pending

SPIN_SECONDS = ((1,), torch.float64)


class ShapedComm:
    """A `Comm` whose links are as slow as you say. All ranks must be on one machine."""

    def __init__(
        self, inner: Comm, network: Network, scale: float = 1.0, inflate: float = 1.0
    ) -> None:
        self.inner, self.network, self.scale, self.inflate = (
            inner,
            network,
            scale,
            inflate,
        )
        self.free = [0.0] * inner.ranks  # when the link to each rank is

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self.inner.rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.inner.ranks

    @property
    def window(self) -> int:
        """As the real one."""
        return self.inner.window

    def wire(self, tensor: Tensor, target: int) -> float:
        """Seconds that a tensor keeps the link to a rank busy."""
        size = tensor.nbytes * self.inflate
        return (
            self.scale
            * size
            / value_of_pair(self.network.bandwidth, self.rank, target, "bandwidth")
        )

    def send(self, tensor: Tensor, target: int) -> Pending:
        """Sends a tensor, and before it the moment at which it is due."""
        leaves, wire = time.monotonic(), self.wire(tensor, target)
        if self.network.serial:
            leaves = max(leaves, self.free[target])
            self.free[target] = leaves + wire
        due = (
            leaves
            + wire
            + self.scale
            * value_of_pair(self.network.latency, self.rank, target, "latency")
        )
        moment = self.inner.send(torch.tensor([due], dtype=torch.float64), target)
        return _Both(moment, self.inner.send(tensor, target))

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> Arriving:
        """Receives the next tensor of a rank, once it is due."""
        return _Due(
            self.inner,
            self.inner.receive(*SPIN_SECONDS, source),
            self.inner.receive(shape, dtype, source),
        )

    def give_back(self, tensor: Tensor) -> None:
        """As the real one."""
        self.inner.give_back(tensor)

    def prepare(self, groups: list[tuple[int, ...]]) -> None:
        """As the real one."""
        self.inner.prepare(groups)

    def reserve(
        self, program: Program, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        """As the real one."""
        self.inner.reserve(program, shapes, dtype)

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> Pending:
        """Sums over a group; from when the last has come it takes what a ring over its slowest link does."""
        pairs = list(zip(group, (*group[1:], group[0]), strict=True))
        latency = max(
            value_of_pair(self.network.latency, *pair, "latency") for pair in pairs
        )
        bandwidth = min(
            value_of_pair(self.network.bandwidth, *pair, "bandwidth") for pair in pairs
        )
        turns = 2 * (len(group) - 1)
        size = tensor.nbytes * self.inflate / len(group)
        return _Ring(
            self.inner.add(tensor, group),
            self.scale * turns * (latency + size / bandwidth),
        )

    def barrier(self) -> None:
        """As the real one: it is no part of a step."""
        self.inner.barrier()


def sleep_until(moment: float) -> None:
    """On the monotonic clock."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


class _Both:
    """A message and its moment."""

    __slots__ = ("first", "second")

    def __init__(self, first: Pending, second: Pending) -> None:
        self.first, self.second = first, second

    def wait(self) -> None:
        """Until both have left."""
        self.first.wait()
        self.second.wait()


class _Due:
    """A tensor that is not there before its moment."""

    __slots__ = ("comm", "moment", "tensor")

    def __init__(self, comm: Comm, moment: Arriving, tensor: Arriving) -> None:
        self.comm, self.moment, self.tensor = comm, moment, tensor

    def wait(self) -> Tensor:
        """Until it is due."""
        due, tensor = self.moment.wait(), self.tensor.wait()
        sleep_until(float(due))
        self.comm.give_back(due)
        return tensor


class _Ring:
    """A sum that takes a while. It is waited for where it is needed, and the while is counted from there."""

    __slots__ = ("seconds", "summed")

    def __init__(self, summed: Pending, seconds: float) -> None:
        self.summed, self.seconds = summed, seconds

    def wait(self) -> None:
        """Until it would be there."""
        self.summed.wait()
        time.sleep(self.seconds)
        self.seconds = 0.0
