"""Links between ranks: one number for all pairs, or one number for each pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.table import Floats

PerPair = float | tuple[tuple[float, ...], ...]  # the same for all, or [source][target]
MIN_BANDWIDTH = 1e-30  # bytes per second
Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class Network:
    """Latency in seconds and bandwidth in bytes per second.

    A `serial` link carries one message at a time. With `channels`, all messages of a rank wait for each other, as over
    NCCL: 1 if they share a channel, 2 if each direction has its own (`penstock.sim.simulate`). `buffers` says how much
    earlier than a message arrives its sender goes on, by measured sizes; without them, a
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


def pair_matrix(
    places: Sequence[Place], value: Callable[[Place, Place], float], diagonal: float
) -> tuple[tuple[float, ...], ...]:
    """A value for each ordered pair of places, and `diagonal` from a place to itself."""
    rows = []
    for i, one in enumerate(places):
        row = [value(one, other) for other in places]
        row[i] = diagonal
        rows.append(tuple(row))
    return tuple(rows)


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


@dataclass(frozen=True, slots=True)
class BufferedMessage:
    """How long a message of one size over NCCL keeps its two ranks busy: less than it travels, because buffers hold it.

    A channel of NCCL carries the messages of a rank one after the other. But a sender only copies a message into
    buffers, and then goes on to its next one:

        rank 0   ├─ send ─┤ next message
        rank 1   ├─────── latency + bytes / bandwidth ───────┤

    If the receiver comes late, most of the message is there already, and it only takes the rest:

        rank 0   ├─ send ─┤ next message
        rank 1   .................. computes ................... ├─ receive ─┤

    A message that the buffers cannot hold keeps its sender until it has arrived.

    send: seconds until the sender goes on; infinite if it waits until the message has arrived.
    receive: seconds of a receiver that comes after the message was sent.
    """

    bytes: float
    send: float
    receive: float


def check_buffers(buffers: Sequence[BufferedMessage]) -> None:
    """Refuse sizes that do not grow, and times that are negative or missing."""
    before = 0.0
    for one in buffers:
        if not before < one.bytes < math.inf:
            raise ShapeError(
                f"a buffered message of {one.bytes:g} bytes comes after one of {before:g}: "
                "list them from the smallest to the largest"
            )
        if not (one.send >= 0 and 0 <= one.receive < math.inf):
            raise ShapeError(
                f"a buffered message of {one.bytes:g} bytes keeps its sender for {one.send:g} s and its receiver for "
                f"{one.receive:g} s, but both must be at least 0, and the second finite"
            )
        before = one.bytes


def busy_seconds(
    buffers: Sequence[BufferedMessage], size: Floats, hop: Floats
) -> tuple[Floats, Floats]:
    """Return how long messages keep their senders busy, and receivers that come late.

    hop: the seconds of each message from its sender to a receiver that waits for it. Between two measured sizes, times
    lie on a straight line. Larger messages are not buffered: they keep both ranks busy for their whole way.

    >>> size, hop = np.array([1e6, 2e6, 4e6]), np.array([0.4, 0.7, 1.3])
    >>> buffers = [BufferedMessage(1e6, 0.1, 0.2), BufferedMessage(3e6, math.inf, 0.6)]
    >>> send, receive = busy_seconds(buffers, size, hop)
    >>> send.tolist(), receive.tolist()
    ([0.1, inf, inf], [0.2, 0.4, 1.3])
    """
    send = np.full(len(size), math.inf)
    receive = hop.copy()
    if not buffers:
        return send, receive
    held = held_whole(buffers)
    if held:
        is_held = size <= held[-1].bytes
        sizes = [one.bytes for one in held]
        send[is_held] = np.interp(size[is_held], sizes, [one.send for one in held])
    is_measured = size <= buffers[-1].bytes
    sizes = [one.bytes for one in buffers]
    seconds = [one.receive for one in buffers]
    receive[is_measured] = np.interp(size[is_measured], sizes, seconds)
    return send, np.minimum(receive, hop)


def held_whole(buffers: Sequence[BufferedMessage]) -> list[BufferedMessage]:
    """Return the sizes that do not keep their sender until they have arrived."""
    return [one for one in buffers if one.send < math.inf]


def least_byte_seconds(
    buffers: Sequence[BufferedMessage], latency: float, bandwidth: float
) -> tuple[float, float]:
    """Return the fewest seconds that a byte keeps a sender and a receiver busy, whatever the size of its message.

    Both times are lines between the measured sizes, so they are the smallest share of the bytes at one of these, or in
    messages that are not buffered.
    """
    send = receive = 1.0 / bandwidth
    for one in buffers:
        hop = latency + one.bytes / bandwidth
        send = min(send, min(one.send, hop) / one.bytes)
        receive = min(receive, min(one.receive, hop) / one.bytes)
    return send, receive
