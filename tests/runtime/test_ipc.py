"""Tests the rings between ranks that share a GPU, on threads and plain memory instead of a GPU."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from itertools import chain, pairwise

import pytest

from penstock import lower, make
from penstock.ir.lane import RECEIVE, lane_turns
from penstock.ir.program import Receive, RunAction, Send
from penstock.runtime.comm.ipc import (
    FLAG_BYTES,
    MAX_RING_BYTES,
    IpcGroup,
    Ring,
    RingShape,
    SlotRequest,
    count_slots,
    fit_ring,
    peak_slots,
)

SLOTS, SLOT = 4, 1 << 10


class Memory:
    """A driver for threads: a wait blocks the thread, and all others see a write at once."""

    def __init__(self, size: int) -> None:
        self.bytes, self.flags = bytearray(size), {}
        self.changed = threading.Condition()

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.bytes[target : target + size] = self.bytes[source : source + size]

    def wait(self, place: int, value: int, stream: int) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.flags.get(place, 0) >= value, timeout=300
            ), "stuck"

    def write(self, place: int, value: int, stream: int) -> None:
        with self.changed:
            self.flags[place] = value
            self.changed.notify_all()


@pytest.mark.parametrize("seed", range(4))
def test_messages_of_any_size_arrive_whole_and_in_order(seed):
    draw = random.Random(seed)
    sizes = [
        draw.choice([0, 1, 7, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT + 5, 6 * SLOT])
        for _ in range(12)
    ]
    # Behind the ring lie the bytes to send, and behind those the bytes received.
    begin = SLOTS * SLOT + 2 * FLAG_BYTES
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
        threading.Thread(
            target=walk, args=(receiver, begin + sum(sizes), receiver.take)
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert bytes(memory.bytes[begin + sum(sizes) :]) == b"".join(words)
    assert (
        sender.slots_used
        == receiver.slots_used
        == sum(count_slots(size, SLOT) for size in sizes)
    )


def test_a_message_of_several_slots_waits_and_counts_once():
    tape = Tape()
    ring = Ring(tape, 0, 8, SLOT)
    sizes = [3 * SLOT, 3 * SLOT, 4 * SLOT]
    for size in sizes:
        ring.put(0, size, 0)
    writes = [what for what in tape.does if what[0] == "write"]
    assert writes == [("write", ring.head, filled) for filled in (3, 6, 10)]
    # The third one needs two of the slots that the first one has filled.
    assert [what for what in tape.does if what[0] == "wait"] == [("wait", ring.tail, 2)]
    # It goes over the end of the ring, so it takes two copies.
    assert tape.copies == [3 * SLOT, 3 * SLOT, 2 * SLOT, 2 * SLOT]


def test_a_sender_stops_when_the_ring_is_full():
    memory = Memory(2 * (SLOTS + 1) * SLOT + 2 * FLAG_BYTES)
    ring = Ring(memory, 0, SLOTS, SLOT)
    done = threading.Event()

    def send() -> None:
        ring.put(SLOTS * SLOT + 2 * FLAG_BYTES, (SLOTS + 1) * SLOT, 0)
        done.set()

    threading.Thread(target=send, daemon=True).start()
    assert not done.wait(0.2)
    assert memory.flags[ring.head] == SLOTS
    memory.write(ring.tail, 1, 1)
    assert done.wait(5)


@pytest.mark.parametrize("seed", range(4))
def test_messages_requested_ahead_may_be_fetched_in_any_order(seed):
    draw = random.Random(seed)
    sizes = [draw.choice([1, 7, SLOT, SLOT + 1, 2 * SLOT]) for _ in range(10)]
    begin, total = SLOTS * SLOT + 2 * FLAG_BYTES, sum(sizes)
    memory = Memory(begin + 2 * total)
    memory.bytes[begin : begin + total] = b"".join(
        bytes([1 + n]) * size for n, size in enumerate(sizes)
    )
    sender, receiver = (Ring(memory, 0, SLOTS, SLOT) for _ in range(2))
    places = [sum(sizes[:n]) for n in range(len(sizes))]

    def send() -> None:
        for place, size in zip(places, sizes, strict=True):
            sender.put(begin + place, size, 0)

    thread = threading.Thread(target=send)
    thread.start()
    asked = [
        receiver.request(SlotRequest(size, (begin + total + place, None)), 1)
        for place, size in zip(places, sizes, strict=True)
    ]
    assert sum(count_slots(due.size, SLOT) for due in receiver.requests) <= SLOTS // 2
    for due in draw.sample(asked, len(asked)):
        receiver.fetch(due, 1)
        assert due.taken
    thread.join(30)
    assert not thread.is_alive()
    assert memory.bytes[begin + total :] == memory.bytes[begin : begin + total]


def test_a_message_stays_in_the_ring_until_it_is_needed():
    memory = Memory(2 * SLOTS * SLOT + 2 * FLAG_BYTES)
    sender, receiver = (Ring(memory, 0, SLOTS, SLOT) for _ in range(2))
    # Nothing is there, and nobody waits.
    room = SLOTS * SLOT + 2 * FLAG_BYTES, None
    due = receiver.request(SlotRequest(SLOT, room), 1)
    sender.put(SLOTS * SLOT + 2 * FLAG_BYTES, SLOT, 0)
    assert receiver.tail not in memory.flags
    receiver.fetch(due, 1)
    assert memory.flags[receiver.tail] == 1


def test_a_message_goes_straight_to_the_room_that_is_chosen_when_it_is_needed():
    memory = Memory(4 * SLOTS * SLOT)
    sender, receiver = (Ring(memory, 0, SLOTS, SLOT) for _ in range(2))
    begin = SLOTS * SLOT + 2 * FLAG_BYTES
    memory.bytes[begin : begin + SLOT] = b"x" * SLOT
    due = receiver.request(SlotRequest(SLOT, make_room=refuse_room), 1)
    sender.put(begin, SLOT, 0)
    due.room = begin + SLOT, "the place of an action"
    receiver.fetch(due, 1)
    assert bytes(memory.bytes[begin + SLOT : begin + 2 * SLOT]) == b"x" * SLOT


def refuse_room():
    raise AssertionError("nothing is short of room")


def test_a_message_that_must_leave_early_gets_room_of_its_own():
    memory = Memory(8 * SLOTS * SLOT)
    sender, receiver = (Ring(memory, 0, SLOTS, SLOT) for _ in range(2))
    begin = SLOTS * SLOT + 2 * FLAG_BYTES
    made = []

    def make_room():
        made.append(begin + (1 + len(made)) * SLOT)
        return made[-1], "a buffer"

    for letter in b"ab":
        memory.bytes[begin : begin + SLOT] = bytes([letter]) * SLOT
        sender.put(begin, SLOT, 0)
    first, second = (
        receiver.request(SlotRequest(SLOT, make_room=make_room), 1) for _ in range(2)
    )
    # The second one is needed first, so the first one has to leave the ring before it.
    second.room = begin + 4 * SLOT, "the place of an action"
    receiver.fetch(second, 1)
    assert first.taken
    assert first.room == (made[0], "a buffer")
    assert len(made) == 1
    assert memory.bytes[made[0]] == ord("a")
    assert memory.bytes[begin + 4 * SLOT] == ord("b")


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "hanayo", "zb-v", "chimera"]
)
def test_programs_run_through_the_smallest_rings(name):
    """Each lane is a thread that blocks where a GPU's stream would; a ring holds two messages."""
    program = lower(make(name, ranks=4, microbatches=8))
    memory = Memory(4096)
    rings = {
        (a, b): [Ring(memory, 256 * (4 * a + b), 2, 1) for _ in range(2)]
        for a in range(4)
        for b in range(4)
    }
    for (a, b), ends in rings.items():
        for end in ends:  # each ring has its own counters
            end.head, end.tail = 10_000 + 2 * (4 * a + b), 10_001 + 2 * (4 * a + b)

    def walk(rank: int) -> None:
        asked = {}
        needs = program.schedule.table
        number = {
            str(a): n for n, a in enumerate(chain.from_iterable(program.schedule.lanes))
        }
        for step in program.lanes[rank]:
            if isinstance(step, Send):
                rings[rank, step.peer][0].put(4000, 1, rank)
            elif isinstance(step, Receive):
                ring = rings[step.peer, rank][1]
                due = ring.request(SlotRequest(1, (4001, None)), rank)
                asked[number[str(step.action)]] = (ring, due)
            elif isinstance(step, RunAction):
                for one in needs.needs[number[str(step.action)]]:
                    if int(one) in asked:
                        ring, due = asked[int(one)]
                        ring.fetch(due, rank)
        done.append(rank)

    done: list[int] = []
    threads = [
        threading.Thread(target=walk, args=(rank,), daemon=True) for rank in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    assert sorted(done) == [0, 1, 2, 3]


# ---------------------------------------------------------------- how large a ring must be
class Tape:
    """A driver that records what a rank's stream does."""

    def __init__(self) -> None:
        self.does: list[tuple] = []
        self.copies: list[int] = []  # their bytes

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Only note the size: copies take no time here."""
        self.copies.append(size)

    def wait(self, place: int, value: int, stream: int) -> None:
        self.does.append(("wait", place, value))

    def write(self, place: int, value: int, stream: int) -> None:
        self.does.append(("write", place, value))


def shapes_of(program, sizes, now: RingShape) -> dict[tuple[int, int], RingShape]:
    """The shapes of all rings of a program."""
    ranks = range(program.schedule.ranks)
    lanes = [lane_turns(program, rank) for rank in ranks]
    return {(a, b): fit_ring(lanes[b], a, sizes, now) for a in ranks for b in ranks}


def streams_of(program, sizes, seconds, shapes) -> list[list[tuple]]:
    """What each rank's stream does with real rings; `seconds` gives the time of an action."""
    ranks, streams = program.schedule.ranks, []
    for rank in range(ranks):
        tape, held = Tape(), {}
        out = {
            to: Ring(tape, (rank * ranks + to + 1) << 40, *shapes[rank, to])
            for to in range(ranks)
        }
        into = {
            of: Ring(tape, (of * ranks + rank + 1) << 40, *shapes[of, rank])
            for of in range(ranks)
        }
        for turn in lane_turns(program, rank):
            if turn.step is not None:
                if turn.step.source in held:
                    ring, due = held[turn.step.source]
                    ring.fetch(due, 0)
                tape.does.append(("act", seconds(turn.step.instruction.action)))
            for step in turn.messages:
                if step.do == RECEIVE:
                    ring = into[step.peer]
                    request = SlotRequest(sizes[step.unit], (0, None))
                    held[step.value] = ring, ring.request(request, 0)
                else:
                    out[step.peer].put(0, sizes[step.unit], 0)
        streams.append(tape.does)
    return streams


def makespan(streams) -> float:
    """When the last of several streams ends that wait for each other's counters."""
    at, now, when = [0] * len(streams), [0.0] * len(streams), defaultdict(dict)
    while any(at[rank] < len(does) for rank, does in enumerate(streams)):
        before = list(at)
        for rank, does in enumerate(streams):
            while at[rank] < len(does):
                kind, *what = does[at[rank]]
                if kind == "wait" and what[1] not in when[what[0]]:
                    break
                if kind == "wait":
                    now[rank] = max(now[rank], when[what[0]][what[1]])
                elif kind == "write":
                    when[what[0]][what[1]] = now[rank]
                else:
                    now[rank] += what[0]
                at[rank] += 1
        assert at != before, "stuck"
    return max(now)


def sliced_program(name, slices, tokens=4096, width=64, **shape):
    """A program over slices, the bytes of its units, and the seconds of its actions."""
    schedule = make(name, ranks=4, microbatches=2, slices=slices, **shape)
    units = [cuts for batch in schedule.microbatches for cuts in pairwise(batch.cuts)]
    sizes = [width * tokens * (end - begin) // units[-1][1] for begin, end in units]
    return (
        lower(schedule),
        sizes,
        lambda action: (
            {"F": 1.0, "B": 2.0, "I": 1.4, "W": 0.6}[action.op.value]
            * (1 + action.slice / slices)
        ),
    )


@pytest.mark.parametrize(
    ("name", "shape", "hurts"),
    [
        ("hanayo", {"waves": 1, "split": True}, True),
        ("hanayo", {"waves": 2}, True),
        ("zb-v", {}, True),
        ("interleaved", {"chunks": 2}, True),
        ("gpipe", {}, False),
    ],
)
def test_nobody_waits_for_room_in_a_ring_that_fits(name, shape, hurts):
    given = sliced_program(name, 8, **shape)
    small, endless = RingShape(2, 16 << 10), RingShape(1 << 16, 16 << 10)
    every = {(a, b) for a in range(4) for b in range(4)}
    free = makespan(streams_of(*given, dict.fromkeys(every, endless)))
    fits = shapes_of(*given[:2], small)
    assert makespan(streams_of(*given, fits)) == pytest.approx(free)
    assert (
        makespan(streams_of(*given, dict.fromkeys(every, small))) > free + 0.1
    ) is hurts


def test_a_ring_that_is_large_enough_stays():
    program, sizes, _ = sliced_program("hanayo", 8)
    lanes = [lane_turns(program, rank) for rank in range(4)]
    once = shapes_of(program, sizes, RingShape(4, 16 << 10))
    for (a, b), shape in once.items():
        assert fit_ring(lanes[b], a, sizes, shape) == shape
        assert 2 * peak_slots(lanes[b], a, sizes, shape.size) <= shape.slots
        assert fit_ring(lanes[b], a, [size // 2 for size in sizes], shape) == shape


def test_a_ring_has_small_slots_for_small_messages_and_never_exceeds_its_limit():
    program, sizes, _ = sliced_program("hanayo", 8, waves=2)
    small = shapes_of(program, [1000] * len(sizes), RingShape(2, 2 << 20))
    assert {shape.size for shape in small.values() if shape.slots > 2} == {4096}
    huge = shapes_of(
        program, [MAX_RING_BYTES // 4] * len(sizes), RingShape(16, 2 << 20)
    )
    assert max(shape.slots * shape.size for shape in huge.values()) == MAX_RING_BYTES


class Shop(Memory):
    """A driver with memory to allocate, for several processes that are really one."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.free = 0

    def allocate(self, size: int) -> int:
        self.free += size
        return self.free - size

    def handle(self, place: int) -> bytes:
        return place.to_bytes(8, "big")

    def open(self, handle: bytes) -> int:
        return int.from_bytes(handle, "big")


class Store(dict):
    """The store through which the processes find each other's rings."""

    def set(self, key: str, value: str) -> None:
        assert key not in self, f"{key} was set already"
        self[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self[key]


def test_both_ends_of_a_grown_ring_use_the_new_one():
    shop, store, groups = Shop(), Store(), []
    for rank in range(2):
        group = IpcGroup.__new__(IpcGroup)
        group.driver, group.store, group.mine, group.out = shop, store, rank, {}
        group.into = {source: group.own("ring", source, 2, 64) for source in range(2)}
        groups.append(group)
    first, second = groups
    old = second.into[0]
    for shape in (RingShape(4, 64), RingShape(8, 64)):
        second.reserve({0: shape, 1: second.shape(1, 1)}, {0: second.shape(1, 0)})
        first.reserve({0: first.shape(0, 0), 1: first.shape(1, 0)}, {1: shape})
        assert first.shape(0, 1) == second.shape(0, 1) == shape
        assert second.into[0].base == first.out[1].base != old.base
        assert (first.out[1].slots, second.into[0].slots) == (shape.slots, shape.slots)
        old = second.into[0]
    place = shop.allocate(400)
    shop.bytes[place : place + 200] = bytes(range(200))
    first.out[1].put(place, 200, 0)
    second.into[0].take(place + 200, 200, 1)
    assert shop.bytes[place + 200 : place + 400] == bytes(range(200))
    first.reserve({}, {1: RingShape(8, 64)})  # the shape it has already
    assert first.out[1].slots_used == 4
    second.sums_into = {}
    assert second.held == (8 + 2) * 64 + 4 * FLAG_BYTES
