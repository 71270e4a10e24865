"""The rings through which ranks of one GPU talk, without a GPU: their protocol on threads and plain memory."""

from __future__ import annotations

import random
import threading

import pytest

from penstock.runtime.comm.ipc import FLAG, SLOT, SLOTS, Ring, pieces


class Memory:
    """Two threads for two streams; waits block the thread, writes are seen by the other at once."""

    def __init__(self, size: int) -> None:
        self.bytes, self.flags = bytearray(size), {}
        self.changed = threading.Condition()

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.bytes[target : target + size] = self.bytes[source : source + size]

    def wait(self, place: int, value: int, stream: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.flags.get(place, 0) >= value, timeout=20), "stuck"

    def write(self, place: int, value: int, stream: int) -> None:
        with self.changed:
            self.flags[place] = value
            self.changed.notify_all()


@pytest.mark.parametrize("seed", range(4))
def test_messages_of_any_size_come_through_a_ring_whole_and_in_order(seed):
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 7, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT + 5, 6 * SLOT]) for _ in range(12)]
    begin = SLOTS * SLOT + 2 * FLAG  # behind the ring: what is sent, and behind that what is received
    memory = Memory(begin + 2 * sum(sizes))
    words = [bytes([1 + number]) * size for number, size in enumerate(sizes)]
    memory.bytes[begin : begin + sum(sizes)] = b"".join(words)
    sender, receiver = Ring(memory, 0, 0), Ring(memory, 0, 1)

    def walk(ring: Ring, place: int, act) -> None:
        for size in sizes:
            act(place, size)
            place += size

    threads = [
        threading.Thread(target=walk, args=(sender, begin, sender.put)),
        threading.Thread(target=walk, args=(receiver, begin + sum(sizes), receiver.take)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert bytes(memory.bytes[begin + sum(sizes) :]) == b"".join(words)
    assert sender.turn == receiver.turn == sum(len(pieces(size)) for size in sizes)


def test_a_sender_stops_when_the_ring_is_full():
    memory = Memory(2 * (SLOTS + 1) * SLOT + 2 * FLAG)
    ring = Ring(memory, 0, 0)
    done = threading.Event()

    def send() -> None:
        ring.put(SLOTS * SLOT + 2 * FLAG, (SLOTS + 1) * SLOT)
        done.set()

    threading.Thread(target=send, daemon=True).start()
    assert not done.wait(0.2)
    assert memory.flags[ring.head] == SLOTS
    memory.write(ring.tail, 1, 1)
    assert done.wait(5)
