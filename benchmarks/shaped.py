"""Emulates a slow network: every message takes the latency and bandwidth that a `Network` gives its link.

    sender     ──── leaves ──────── wire ────────┐
               (serial: once the link is free)   └─ latency ─┐
    receiver                                                 arrives: the rank gets it no earlier

Each message carries its arrival time, on the clock that all processes of a machine share, and
the receiver sleeps until then. `scale` multiplies all times (0.01 runs a hundred times as
fast) and `inflate` multiplies all sizes, so that a small machine can emulate a large network
with small tensors. A sum over replicas takes as long as a ring all-reduce would.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor

from penstock.cost.network import Network, sum_bandwidth, value_of_pair
from penstock.runtime.comm.comm import Arriving, Comm, Pending


class ShapedComm:
    """A `Comm` that slows another one down. All ranks must run on one machine."""

    def __init__(
        self, inner: Comm, network: Network, scale: float = 1.0, inflate: float = 1.0
    ) -> None:
        self.inner = inner
        self.network = network
        self.scale = scale
        self.inflate = inflate
        self.link_free = [0.0] * inner.ranks  # when the link to each rank becomes free
        self.lock = threading.Lock()  # of `link_free`, which a second connection shares
        self.second: ShapedComm | None = None

    def __getattr__(self, name: str) -> Any:
        """The ranks, the window, barriers and all else are those of the underlying `Comm`."""
        return getattr(self.inner, name)

    def wire_seconds(self, tensor: Tensor, target: int) -> float:
        """How long a tensor occupies the link to a rank."""
        size = tensor.nbytes * self.inflate
        return self.scale * size / self._bandwidth(self.rank, target)

    def send(self, tensor: Tensor, target: int) -> Pending:
        """Start sending a tensor, preceded by its arrival time."""
        leaves = time.monotonic()
        wire = self.wire_seconds(tensor, target)
        if self.network.serial:
            with self.lock:
                leaves = max(leaves, self.link_free[target])
                self.link_free[target] = leaves + wire
        latency = self.scale * self._latency(self.rank, target)
        arrival = torch.tensor([leaves + wire + latency], dtype=torch.float64)
        sent_arrival = self.inner.send(arrival, target)
        return _DelayedSend(sent_arrival, self.inner.send(tensor, target))

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> Arriving:
        """Start receiving the next tensor from a rank."""
        arrival = self.inner.receive((1,), torch.float64, source)
        tensor = self.inner.receive(shape, dtype, source)
        return _DelayedReceive(arrival, tensor)

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> Pending:
        """Start a sum that takes as long as a ring all-reduce over the slowest link.

        The time counts from when the last rank of the group has joined.
        """
        following = (*group[1:], group[0])
        pairs = list(zip(group, following, strict=True))
        latency = max(self._latency(*pair) for pair in pairs)
        widths = sum_bandwidth(self.network)
        bandwidth = min(value_of_pair(widths, *pair, "bandwidth") for pair in pairs)
        hops = 2 * (len(group) - 1)
        size = tensor.nbytes * self.inflate / len(group)
        seconds = self.scale * hops * (latency + size / bandwidth)
        return _DelayedSum(self.inner.add(tensor, group), seconds)

    def second_connection(self) -> ShapedComm:
        """A second connection over the same links: serial ones carry a message of either at a time."""
        if self.second is None:
            second = ShapedComm(
                self.inner.second_connection(), self.network, self.scale, self.inflate
            )
            second.link_free, second.lock = self.link_free, self.lock
            self.second = second
        return self.second

    def _latency(self, source: int, target: int) -> float:
        return value_of_pair(self.network.latency, source, target, "latency")

    def _bandwidth(self, source: int, target: int) -> float:
        return value_of_pair(self.network.bandwidth, source, target, "bandwidth")


def sleep_until(moment: float) -> None:
    """Sleep until a moment of the monotonic clock."""
    remaining = moment - time.monotonic()
    if remaining > 0:
        time.sleep(remaining)


class _DelayedSend:
    """A send of an arrival time and a tensor."""

    __slots__ = ("arrival", "tensor")

    def __init__(self, arrival: Pending, tensor: Pending) -> None:
        self.arrival = arrival
        self.tensor = tensor

    def wait(self) -> None:
        """Block until both have left."""
        self.arrival.wait()
        self.tensor.wait()


class _DelayedReceive:
    """A tensor that is not available before its arrival time."""

    __slots__ = ("arrival", "tensor")

    def __init__(self, arrival: Arriving, tensor: Arriving) -> None:
        self.arrival = arrival
        self.tensor = tensor

    def wait(self, into: Tensor | None = None) -> Tensor:
        """Block until the arrival time, and return the tensor."""
        arrival = self.arrival.wait()
        tensor = self.tensor.wait(into)
        sleep_until(float(arrival))
        return tensor


class _DelayedSum:
    """A sum with an extra delay, which counts from when somebody waits for the sum."""

    __slots__ = ("inner", "seconds")

    def __init__(self, inner: Pending, seconds: float) -> None:
        self.inner = inner
        self.seconds = seconds

    def wait(self) -> None:
        """Block until the sum would be done on the emulated network."""
        self.inner.wait()
        time.sleep(self.seconds)
        self.seconds = 0.0
