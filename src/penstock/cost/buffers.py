"""How long a message over NCCL keeps its two ranks busy: less than it travels, because buffers hold it.

A channel of NCCL carries the messages of a rank one after the other. But a sender only copies a message into buffers,
and then goes on to its next one:

    rank 0   ├─ send ─┤ next message
    rank 1   ├─────── latency + bytes / bandwidth ───────┤

If the receiver comes late, most of the message is there already, and it only takes the rest:

    rank 0   ├─ send ─┤ next message
    rank 1   .................. computes ................... ├─ receive ─┤

A message that the buffers cannot hold keeps its sender until it has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ShapeError
from penstock.ir.table import Floats


@dataclass(frozen=True, slots=True)
class BufferedMessage:
    """What was measured with messages of one size.

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
