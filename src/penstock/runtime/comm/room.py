"""Computes how large a ring must be so that no rank waits for room, from the lane of the receiving rank.

    lane        recv a  F  recv b  recv c  F  F(a)  F(b) ...     a message is requested where the program receives it
    requested      a        a b     a b c       b c    c         and leaves the ring where it is used

A ring takes the oldest messages out early, and makes the stream that computes wait for
them, once the outstanding requests cover more than half of it. Wave schedules over slices
request many messages long before they use them: with 65,536 tokens, a rank spent a third
of its time waiting in rings of 32 MiB. So a ring gets twice the room of the largest
amount that is ever requested at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.runtime.comm.ring import count_slots
from penstock.runtime.lane import Do, LaneStep, Turn

SLOT_ALIGNMENT = 4096  # a slot's bytes are a multiple of this
MAX_RING_BYTES = 1 << 30  # a program that needs more still runs, but waits for room


class RingShape(NamedTuple):
    """The number of slots of a ring, and the bytes of each."""

    slots: int
    size: int


def fit_ring(
    turns: Sequence[Turn], source: int, sizes: Sequence[int], current: RingShape
) -> RingShape:
    """The shape that the ring from `source` to the rank with these turns needs.

    That is its current shape if it is large enough. `sizes` has the message bytes of each
    unit. Both ends compute the shape, and get the same answer. The number of slots is a
    power of two, so that a ring seldom has to grow.
    """
    if 2 * peak_slots(turns, source, sizes, current.size) <= current.slots:
        return current
    largest = 0
    for turn in turns:
        for step in _receives(turn, source):
            largest = max(largest, sizes[step.unit])
    aligned = count_slots(largest, SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    size = min(current.size, aligned)
    needed = 2 * peak_slots(turns, source, sizes, size)
    slots = 1 << (needed - 1).bit_length()
    max_slots = max(MAX_RING_BYTES // size, current.slots)
    return RingShape(min(slots, max_slots), size)


def peak_slots(
    turns: Sequence[Turn], source: int, sizes: Sequence[int], slot_size: int
) -> int:
    """The most slots that hold requested but not yet used messages at any moment."""
    requested: deque[tuple[int, int]] = deque()  # a value and its slots, oldest first
    level = 0
    peak = 0
    for turn in turns:
        if turn.step is not None:
            level -= _drop_used(requested, turn.step.source)
        for step in _receives(turn, source):
            slots = count_slots(sizes[step.unit], slot_size)
            requested.append((step.value, slots))
            level += slots
            peak = max(peak, level)
    return peak


def _drop_used(requested: deque[tuple[int, int]], used: int) -> int:
    """Drop a used value and all before it, if it was requested; return their slots."""
    if all(value != used for value, _ in requested):
        return 0
    freed = 0
    while True:
        value, slots = requested.popleft()
        freed += slots
        if value == used:
            return freed


def _receives(turn: Turn, source: int) -> Iterator[LaneStep]:
    """The receives of a turn that come from one rank."""
    for step in turn.messages:
        if step.do is Do.RECEIVE and step.peer == source:
            yield step
