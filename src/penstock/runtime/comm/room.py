"""How large a ring must be so that nobody waits for room: read from the lane of the rank that receives.

    lane      recv a  F  recv b  recv c  F  F(a)  F(b) ...     a message is asked for where the program has it, and
    asked        a        a b     a b c       b c    c         taken out of its ring where it is used

A ring takes the oldest messages out early, and lets the stream that computes wait for them, once more than half of it
is asked for. With waves over slices much is asked for long before its use: on 65,536 tokens a rank waited a third of
its time in rings of 32 MiB. So a ring has twice the room of what is asked for at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.runtime.comm.ring import slots_of
from penstock.runtime.lane import Do, Step, Turn

SLOT_ALIGNMENT = 4096  # bytes that a slot is a multiple of
MAX_RING_BYTES = (
    1 << 30
)  # bytes of a ring, at most: with less than it needs a program runs all the same


class RingShape(NamedTuple):
    """Of a ring: so many slots, of so many bytes each."""

    slots: int
    size: int


def fit_ring(
    turns: Sequence[Turn], source: int, sizes: Sequence[int], now: RingShape
) -> RingShape:
    """The ring from a rank to the one with these turns: as it is now, or a larger one. `sizes`: bytes of each unit.

    Both ends ask, and get the same answer. Slots are powers of two, so that a ring seldom grows.
    """
    if 2 * most_asked(turns, source, sizes, now.size) <= now.slots:
        return now
    largest = max(
        sizes[step.unit]
        for turn in turns
        for step in turn.messages
        if _from(step, source)
    )
    size = min(now.size, -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT)
    slots = 1 << (2 * most_asked(turns, source, sizes, size) - 1).bit_length()
    return RingShape(min(slots, max(MAX_RING_BYTES // size, now.slots)), size)


def most_asked(
    turns: Sequence[Turn], source: int, sizes: Sequence[int], size: int
) -> int:
    """Slots of that size that hold what is asked for and not yet used, at the fullest moment."""
    asked: deque[tuple[int, int]] = deque()  # values, with their slots
    level = most = 0
    for turn in turns:
        if turn.step is not None and any(
            value == turn.step.source for value, _ in asked
        ):
            taken = -1
            while taken != turn.step.source:  # and all that came before it
                taken, slots = asked.popleft()
                level -= slots
        for step in turn.messages:
            if _from(step, source):
                asked.append((step.value, slots_of(sizes[step.unit], size)))
                level += asked[-1][1]
                most = max(most, level)
    return most


def _from(step: Step, source: int) -> bool:
    return step.do is Do.RECEIVE and step.peer == source
