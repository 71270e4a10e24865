"""The rings through which ranks of one GPU talk, without a GPU: their protocol on threads and plain memory."""

from __future__ import annotations

import random
import threading
from itertools import chain

import pytest

from penstock import lower, make
from penstock.ir.program import Receive, Run, Send
from penstock.runtime.comm.ring import FLAG, Ring, pieces, slots_of

SLOTS, SLOT = 4, 1 << 10


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
    sender, receiver = (Ring(memory, 0, SLOTS, SLOT) for _ in range(2))

    def walk(ring: Ring, place: int, act) -> None:
        for size in sizes:
            act(place, size, 0)
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
    assert sender.turn == receiver.turn == sum(len(pieces(size, SLOT)) for size in sizes)


def test_a_sender_stops_when_the_ring_is_full():
    memory = Memory(2 * (SLOTS + 1) * SLOT + 2 * FLAG)
    ring = Ring(memory, 0, SLOTS, SLOT)
    done = threading.Event()

    def send() -> None:
        ring.put(SLOTS * SLOT + 2 * FLAG, (SLOTS + 1) * SLOT, 0)
        done.set()

    threading.Thread(target=send, daemon=True).start()
    assert not done.wait(0.2)
    assert memory.flags[ring.head] == SLOTS
    memory.write(ring.tail, 1, 1)
    assert done.wait(5)


@pytest.mark.parametrize("seed", range(4))
def test_messages_asked_for_ahead_may_be_fetched_in_any_order(seed):
    draw = random.Random(seed)
    sizes = [draw.choice([1, 7, SLOT, SLOT + 1, 2 * SLOT]) for _ in range(10)]
    begin, total = SLOTS * SLOT + 2 * FLAG, sum(sizes)
    memory = Memory(begin + 2 * total)
    memory.bytes[begin : begin + total] = b"".join(bytes([1 + n]) * size for n, size in enumerate(sizes))
    sender, receiver = (Ring(memory, 0, SLOTS, SLOT) for _ in range(2))
    places = [sum(sizes[:n]) for n in range(len(sizes))]

    def send() -> None:
        for place, size in zip(places, sizes, strict=True):
            sender.put(begin + place, size, 0)

    thread = threading.Thread(target=send)
    thread.start()
    asked = [receiver.ask(begin + total + place, size, 1) for place, size in zip(places, sizes, strict=True)]
    assert sum(slots_of(due.size, SLOT) for due in receiver.due) <= SLOTS // 2
    for due in draw.sample(asked, len(asked)):
        receiver.fetch(due, 1)
        assert due.taken
    thread.join(30)
    assert not thread.is_alive()
    assert memory.bytes[begin + total :] == memory.bytes[begin : begin + total]


def test_a_message_stays_in_the_ring_until_it_is_needed():
    memory = Memory(2 * SLOTS * SLOT + 2 * FLAG)
    sender, receiver = (Ring(memory, 0, SLOTS, SLOT) for _ in range(2))
    due = receiver.ask(SLOTS * SLOT + 2 * FLAG, SLOT, 1)  # nothing is there, and nobody waits
    sender.put(SLOTS * SLOT + 2 * FLAG, SLOT, 0)
    assert receiver.tail not in memory.flags
    receiver.fetch(due, 1)
    assert memory.flags[receiver.tail] == 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "hanayo", "zb-v", "chimera"])
def test_programs_run_through_the_smallest_rings(name):
    """Every lane as a thread that blocks where a GPU's stream would; a ring holds two messages of one slot."""
    program = lower(make(name, ranks=4, microbatches=8))
    memory = Memory(4096)
    rings = {(a, b): [Ring(memory, 256 * (4 * a + b), 2, 1) for _ in range(2)] for a in range(4) for b in range(4)}
    for (a, b), ends in rings.items():
        for end in ends:  # numbers of their own
            end.head, end.tail = 10_000 + 2 * (4 * a + b), 10_001 + 2 * (4 * a + b)

    def walk(rank: int) -> None:
        asked = {}
        needs = program.schedule.table
        number = {str(a): n for n, a in enumerate(chain.from_iterable(program.schedule.lanes))}
        for step in program.lanes[rank]:
            if isinstance(step, Send):
                rings[rank, step.peer][0].put(4000, 1, rank)
            elif isinstance(step, Receive):
                ring = rings[step.peer, rank][1]
                asked[number[str(step.action)]] = (ring, ring.ask(4001, 1, rank))
            elif isinstance(step, Run):
                for one in needs.needs[number[str(step.action)]]:
                    if int(one) in asked:
                        ring, due = asked[int(one)]
                        ring.fetch(due, rank)
        done.append(rank)

    done: list[int] = []
    threads = [threading.Thread(target=walk, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    assert sorted(done) == [0, 1, 2, 3]
