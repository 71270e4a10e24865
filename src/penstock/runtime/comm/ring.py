"""One direction between two processes that see the same memory: a ring of slots, and two numbers.

    sender's stream    wait tail > n - slots │ copy x ──► slot n % slots │ head = n + 1
                                                              │
    receiver's stream                   wait head > n │ copy slot ──► y  │ tail = n + 1

A message longer than a slot takes several, one after the other. Nobody polls: what waits is a stream, on the device.

A message is taken out when it is needed, not when it is asked for: the stream that computes would wait for it earlier
than it must. Unless more than half of the ring is asked for: then the oldest are taken at once. So a sender finds room
for a message as soon as the receiver has asked for those half a ring before it, and a program of `lower`, in which
sends and receives may block, cannot get stuck here either.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

FLAG_BYTES = 256  # bytes between the two numbers, which lie behind the slots


class Driver(Protocol):
    """What a ring needs: copies, and waits and writes of a number, all in the order of a stream."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Bytes from one place to another."""
        ...

    def wait(self, place: int, value: int, stream: int) -> None:
        """Until that place has at least that value."""
        ...

    def write(self, place: int, value: int, stream: int) -> None:
        """A value, after all before it is done and visible."""
        ...


@dataclass(slots=True)
class Due:
    """A message that was asked for: where it is to go, and who must stay until then."""

    place: int
    size: int
    owner: object = None
    taken: bool = False


class Ring:
    """One end of a ring of `slots` of `size` bytes each."""

    __slots__ = ("base", "driver", "due", "head", "size", "slots", "tail", "turn")

    def __init__(self, driver: Driver, base: int, slots: int, size: int) -> None:
        self.driver, self.base, self.slots, self.size = driver, base, slots, size
        self.head = (
            base + slots * size
        )  # where the sender writes how many slots it has filled
        self.tail = (
            self.head + FLAG_BYTES
        )  # where the receiver writes how many it has emptied
        self.turn = 0  # slots used so far
        self.due: deque[Due] = deque()  # messages asked for, not yet taken out

    def put(self, place: int, size: int, stream: int) -> None:
        """Fills slots from there."""
        driver = self.driver
        for begin, length in cut_into_slots(size, self.size):
            if self.turn >= self.slots:
                driver.wait(self.tail, self.turn - self.slots + 1, stream)
            driver.copy(
                self.base + self.turn % self.slots * self.size,
                place + begin,
                length,
                stream,
            )
            self.turn += 1
            driver.write(self.head, self.turn, stream)

    def ask(self, place: int, size: int, stream: int, owner: object = None) -> Due:
        """Asks for the next message, to be taken to there."""
        due = Due(place, size, owner)
        self.due.append(due)
        while (
            self.due
            and sum(slots_of(one.size, self.size) for one in self.due) > self.slots // 2
        ):
            self.next(stream)
        return due

    def next(self, stream: int) -> None:
        """Takes out the oldest message that was asked for."""
        due = self.due.popleft()
        self.take(due.place, due.size, stream)
        due.taken, due.owner = True, None

    def fetch(self, due: Due, stream: int) -> None:
        """Takes out a message, and those before it."""
        while not due.taken:
            self.next(stream)

    def take(self, place: int, size: int, stream: int) -> None:
        """Empties slots to there."""
        driver = self.driver
        for begin, length in cut_into_slots(size, self.size):
            driver.wait(self.head, self.turn + 1, stream)
            driver.copy(
                place + begin,
                self.base + self.turn % self.slots * self.size,
                length,
                stream,
            )
            self.turn += 1
            driver.write(self.tail, self.turn, stream)


def ring_bytes(slots: int, size: int) -> int:
    """Bytes of a ring: its slots and its two numbers."""
    return slots * size + 2 * FLAG_BYTES


def slots_of(size: int, most: int) -> int:
    """How many slots a message takes."""
    return -(-size // most)


def cut_into_slots(size: int, most: int) -> list[tuple[int, int]]:
    """A message cut into slots: where each piece begins, and its bytes.

    >>> cut_into_slots(11, 4)
    [(0, 4), (4, 4), (8, 3)]
    """
    return [(begin, min(most, size - begin)) for begin in range(0, size, most)]
