"""A one-way ring buffer in memory that two processes share, with two counters that say how full it is.

    sender's stream    wait tail > n - slots │ copy x ──► slot n % slots │ head = n + 1
                                                              │
    receiver's stream                   wait head > n │ copy slot ──► y  │ tail = n + 1

A message longer than a slot takes several consecutive slots. All of them together are one
wait, one copy (two at the end of the ring) and one count, because waiting and counting take a
stream longer than copying a slot does. Only a message longer than half of the ring goes in
several such runs. Nobody polls: the streams wait, on the device.

A message leaves the ring when it is needed, not when it is requested; otherwise the
stream that computes would wait for it earlier than it must. The exception: once the
outstanding requests cover more than half of the ring, the oldest messages are taken out
at once. A sender therefore finds room for a message as soon as the receiver has requested
the messages half a ring before it. So a lowered program, whose sends and receives may
block, cannot get stuck here either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

FLAG_BYTES = 256  # distance between the two counters, which lie behind the slots

# Memory that a message can be copied to: its address, and the object that owns it.
Room: TypeAlias = tuple[int, object]


class Driver(Protocol):
    """The operations a ring needs, each executed in the order of a stream."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy bytes from one address to another."""
        ...

    def wait(self, address: int, value: int, stream: int) -> None:
        """Make a stream wait until the number at `address` is at least `value`."""
        ...

    def write(self, address: int, value: int, stream: int) -> None:
        """Make a stream write a number, once its earlier work is done and visible."""
        ...


@dataclass(slots=True)
class SlotRequest:
    """A message that the receiver has asked for, and the room that it will be copied to.

    Without room, the message stays in the ring until somebody has chosen one. If it has to
    leave the ring earlier, `make_room` provides it. The request keeps the owner alive.
    """

    size: int
    room: Room | None = None
    make_room: Callable[[], Room] | None = None
    taken: bool = False


class Ring:
    """One end of a ring of `slots` slots of `size` bytes each."""

    __slots__ = (
        "base",
        "driver",
        "head",
        "requests",
        "size",
        "slots",
        "slots_used",
        "tail",
    )

    def __init__(self, driver: Driver, base: int, slots: int, size: int) -> None:
        self.driver = driver
        self.base = base
        self.slots = slots
        self.size = size
        # The sender writes to `head` how many slots it has filled,
        # and the receiver to `tail` how many it has emptied.
        self.head = base + slots * size
        self.tail = self.head + FLAG_BYTES
        self.slots_used = 0  # since the start, by this end
        self.requests: deque[SlotRequest] = deque()  # oldest first

    def put(self, address: int, size: int, stream: int) -> None:
        """Copy a message into the ring."""
        for begin, length in cut(size, self._run_bytes):
            filled = self.slots_used + count_slots(length, self.size)
            if filled > self.slots:
                self.driver.wait(self.tail, filled - self.slots, stream)
            for offset, slot, piece in self._pieces(length):
                self.driver.copy(slot, address + begin + offset, piece, stream)
            self.slots_used = filled
            self.driver.write(self.head, filled, stream)

    def take(self, address: int, size: int, stream: int) -> None:
        """Copy the next message out of the ring."""
        for begin, length in cut(size, self._run_bytes):
            emptied = self.slots_used + count_slots(length, self.size)
            self.driver.wait(self.head, emptied, stream)
            for offset, slot, piece in self._pieces(length):
                self.driver.copy(address + begin + offset, slot, piece, stream)
            self.slots_used = emptied
            self.driver.write(self.tail, emptied, stream)

    def request(self, request: SlotRequest, stream: int) -> SlotRequest:
        """Ask for the next message, to be copied later."""
        self.requests.append(request)
        while self._requested_slots() > self.slots // 2:
            self.take_oldest(stream)
        return request

    def fetch(self, request: SlotRequest, stream: int) -> None:
        """Take out a requested message, and all requested before it."""
        while not request.taken:
            self.take_oldest(stream)

    def take_oldest(self, stream: int) -> None:
        """Take out the message that was requested first."""
        request = self.requests.popleft()
        if request.room is None:
            assert request.make_room is not None
            request.room = request.make_room()
        address, _ = request.room
        self.take(address, request.size, stream)
        request.taken = True

    @property
    def _run_bytes(self) -> int:
        """The most bytes that go at once: half of the ring, which a requested message always finds free."""
        return max(self.slots // 2, 1) * self.size

    def _pieces(self, length: int) -> list[tuple[int, int, int]]:
        """Where the next bytes lie in the ring: their offset, the address, and how many; two pieces at its end."""
        first = self.slots_used % self.slots
        until_end = (self.slots - first) * self.size
        pieces = [(0, self.base + first * self.size, min(length, until_end))]
        if length > until_end:
            pieces.append((until_end, self.base, length - until_end))
        return pieces

    def _requested_slots(self) -> int:
        """Slots that the outstanding requests will take."""
        return sum(count_slots(request.size, self.size) for request in self.requests)


def ring_bytes(slots: int, size: int) -> int:
    """The memory of a ring: its slots and its two counters."""
    return slots * size + 2 * FLAG_BYTES


def count_slots(size: int, slot_size: int) -> int:
    """The number of slots that a message takes."""
    return -(-size // slot_size)


def cut(size: int, most: int) -> list[tuple[int, int]]:
    """Cut a message into pieces of at most so many bytes: where each begins, and its bytes.

    >>> cut(11, 4)
    [(0, 4), (4, 4), (8, 3)]
    """
    return [(begin, min(most, size - begin)) for begin in range(0, size, most)]
