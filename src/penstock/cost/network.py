"""Links between ranks: one number for all pairs, or one number for each pair."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.cost.buffers import BufferedMessage, check_buffers
from penstock.errors import ShapeError

PerPair = float | tuple[tuple[float, ...], ...]  # the same for all, or [source][target]
MIN_BANDWIDTH = 1e-30  # bytes per second


@dataclass(frozen=True, slots=True)
class Network:
    """Latency in seconds and bandwidth in bytes per second.

    A `serial` link carries one message at a time. With `channels`, all messages of a rank wait for each other, as over
    NCCL: 1 if they share a channel, 2 if each direction has its own (`penstock.sim.simulate`). `buffers` says how much
    earlier than a message arrives its sender goes on, by measured sizes (`penstock.cost.buffers`); without them, a
    message keeps both of its ranks until it has arrived.

    `bandwidth` is that of a message. A sum of gradients sends with `sum_bandwidth`, which was measured while all ranks
    summed, because they share sockets and cores then; if it was not measured, a sum is as fast as messages are.
    """

    latency: PerPair = 0.0
    bandwidth: PerPair = math.inf
    serial: bool = False
    channels: int | None = None
    sum_bandwidth: PerPair | None = None
    buffers: tuple[BufferedMessage, ...] = ()

    def __post_init__(self) -> None:
        check_channels(self.channels)
        check_buffers(self.buffers)
        _check_pairs("latency", self.latency, least=0.0)
        _check_pairs("bandwidth", self.bandwidth, least=MIN_BANDWIDTH)
        _check_pairs("bandwidth of sums", sum_bandwidth(self), least=MIN_BANDWIDTH)


@dataclass(frozen=True, slots=True)
class Link:
    """Latency in seconds and bandwidth in bytes per second, in one direction."""

    latency: float
    bandwidth: float


def check_channels(channels: int | None) -> None:
    """Refuse a number of channels that no transport has."""
    if channels not in (None, 1, 2):
        raise ShapeError(
            f"channels is {channels}, but the messages of a rank have 1 or 2 channels"
        )


def sums_wait(channels: int | None) -> bool:
    """Return whether replicas begin to sum gradients only after the last action of their rank.

    Where all messages of a rank share one channel, a rank has few cores. A sum beside messages would then slow them
    down by a factor that nobody can predict, and the step would not end earlier (docs/results/nccl.md).
    """
    return channels == 1


def sum_bandwidth(network: Network) -> PerPair:
    """Return the bandwidth with which sums of gradients send, between all pairs or between each.

    >>> sum_bandwidth(Network(bandwidth=3e9)), sum_bandwidth(Network(bandwidth=3e9, sum_bandwidth=1e9))
    (3000000000.0, 1000000000.0)
    """
    measured = network.sum_bandwidth
    return network.bandwidth if measured is None else measured


def slowest_sum_link(network: Network) -> Link:
    """Return the longest latency and the least bandwidth that a sum can meet between two ranks.

    >>> slowest_sum_link(Network(0.5, ((0.0, 8.0), (4.0, 0.0))))
    Link(latency=0.5, bandwidth=4.0)
    """
    return _slowest(network.latency, sum_bandwidth(network))


def slowest_link(network: Network) -> Link:
    """Return the longest latency and the least bandwidth of all pairs.

    >>> slowest_link(Network(0.5, ((0.0, 8.0), (4.0, 0.0))))
    Link(latency=0.5, bandwidth=4.0)
    """
    return _slowest(network.latency, network.bandwidth)


def fastest_link(network: Network) -> Link:
    """Return the shortest latency and the largest bandwidth of all pairs.

    >>> fastest_link(Network(0.5, ((0.0, 8.0), (4.0, 0.0))))
    Link(latency=0.5, bandwidth=8.0)
    """
    return Link(
        min(_values(network.latency), default=0.0),
        max(_values(network.bandwidth), default=math.inf),
    )


def _slowest(latency: PerPair, bandwidth: PerPair) -> Link:
    return Link(
        max(_values(latency), default=0.0),
        min(_values(bandwidth), default=math.inf),
    )


def _values(value: PerPair) -> list[float]:
    """The numbers of all pairs; no message goes from a rank to itself."""
    if not isinstance(value, tuple):
        return [value]
    return [
        number
        for source, row in enumerate(value)
        for target, number in enumerate(row)
        if source != target
    ]


def _check_pairs(quantity: str, value: PerPair, least: float) -> None:
    rows = value if isinstance(value, tuple) else ((value,),)
    if any(len(row) != len(rows) for row in rows):
        raise ShapeError(
            f"the {quantity} matrix has {len(rows)} rows, but one of them has another "
            "length: the matrix must be square"
        )
    for source, row in enumerate(rows):
        for target, number in enumerate(row):
            if source == target and len(rows) > 1:
                continue  # no message goes from a rank to itself
            if math.isnan(number) or number < least:
                raise ShapeError(
                    f"the {quantity} from rank {source} to rank {target} is {number:g}, "
                    f"but it must be at least {least:g}"
                )


def value_of_pair(value: PerPair, source: int, target: int, quantity: str) -> float:
    """The number that holds for a pair of ranks."""
    if not isinstance(value, tuple):
        return value
    if max(source, target) >= len(value):
        raise ShapeError(
            f"the {quantity} matrix is for {len(value)} ranks, but a message goes from "
            f"rank {source} to rank {target}"
        )
    return value[source][target]
