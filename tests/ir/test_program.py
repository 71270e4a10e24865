"""Programs: what `lower` writes runs to the end on real blocking channels, and `verify` finds every fault."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queues import never_run
from penstock.errors import ProgramError, ScheduleError
from penstock.ir import (
    Action,
    MicroBatch,
    Schedule,
    Stage,
    needs,
    parse_action,
    schedule_of,
)
from penstock.ir.program import (
    Free,
    Instruction,
    InstructionLane,
    Program,
    Receive,
    RunAction,
    Send,
    lower,
)
from penstock.ir.verify import verify
from penstock.schedules import REGISTRY, make
from random_schedules import broken, named_schedules, random_schedule

# ---------------------------------------------------------------- programs by hand
READ: dict[str, Callable[..., Instruction]] = {">": Send, "<": Receive}


def instruction(text: str) -> Instruction:
    if text.startswith("~"):
        return Free(parse_action(text[1:]))
    for sign, kind in READ.items():
        if sign in text:
            action, peer = text.split(sign)
            return kind(parse_action(action), int(peer))
    return RunAction(parse_action(text))


def lanes(*texts: str) -> tuple[InstructionLane, ...]:
    return tuple(tuple(map(instruction, text.split())) for text in texts)


@pytest.fixture
def program() -> Program:
    return lower(make("1f1b", ranks=2, microbatches=2))


def edit(program: Program, rank: int, old: str, new: str) -> Program:
    """The program with a stretch of a rank's lane written anew."""
    text = " ".join(map(str, program.lanes[rank]))
    assert f" {old} " in f" {text} ", text
    edited = list(program.lanes)
    (edited[rank],) = lanes(f" {text} ".replace(f" {old} ", f" {new} "))
    return replace(program, lanes=tuple(edited))


def fault(program: Program) -> str:
    with pytest.raises(ProgramError) as caught:
        verify(program)
    return str(caught.value)


def test_a_program_reads_as_it_prints(program: Program) -> None:
    assert program.lanes == lanes(
        "0F0 0F0>1 0F1 0F1>1 1B0<1 0B0 ~0F0 ~1B0 ~0B0 1B1<1 0B1 ~0F1 ~1B1 ~0B1",
        "0F0<0 1F0 ~0F0 0F1<0 1B0 ~1F0 1B0>0 ~1B0 1F1 ~0F1 1B1 ~1F1 1B1>0 ~1B1",
    )


def test_instructions_of_different_kinds_differ() -> None:
    action = parse_action("2F0")
    assert (
        len({RunAction(action), Free(action), Send(action, 1), Receive(action, 1)}) == 4
    )


def test_the_proof_is_every_transfer_in_a_possible_order(program: Program) -> None:
    assert [str(transfer) for transfer in verify(program)] == [
        "0F0 0>1",
        "0F1 0>1",
        "1B0 1>0",
        "1B1 1>0",
    ]


# claim | rank | what its lane has | what is written there | what the error says
FAULTS = """
a run left out | 0 | 0B1 ~0F1 ~1B1 ~0B1 | ~0F1 ~1B1 | rank 0 never runs 0B1
a run too many | 1 | 1B1>0 ~1B1 | 1B1>0 1F1 ~1B1 | rank 1 runs 1F1 after the end of its lane
another schedule's action | 0 | 0F0 | 7F0 | 7F0 is of 7F0, which is not in the schedule
a rank that is not | 0 | 0F0>1 | 0F0>2 | names rank 2, which does not exist (ranks 0..1)
a send to oneself | 0 | 0F0>1 | 0F0>0 | rank 0: 0F0>0 is a message to itself
a send nobody receives | 1 | 0F1<0 |  | rank 0 sends 0F1 to rank 1, which never receives it
a receive nobody sends | 1 | 1B0>0 |  | rank 0 waits to receive 1B0 from rank 1, which never sends it
a need not received | 1 | 0F0<0 1F0 ~0F0 | 1F0 0F0<0 ~0F0 | 1F0 uses 0F0, which is not here yet
a need freed before | 0 | 1B0<1 0B0 ~0F0 | 1B0<1 ~0F0 0B0 | rank 0: 0B0 uses 0F0, which is freed before
a send before its run | 0 | 0F0 0F0>1 | 0F0>1 0F0 | rank 0: 0F0>1 uses 0F0, which is not here yet
a send of what is freed | 1 | 1B0>0 ~1B0 | ~1B0 1B0>0 | rank 1: 1B0>0 uses 1B0, which is freed before
freeing twice | 0 | ~0F0 | ~0F0 ~0F0 | rank 0: ~0F0 uses 0F0, which is freed before
freeing what never was | 0 | 0F0 | 0F0 ~1F0 | rank 0: ~1F0 uses 1F0, which is not here yet
never freeing | 1 | ~0F1 |  | rank 1 never frees 0F1
"""


@pytest.mark.parametrize("row", FAULTS.strip().splitlines())
def test_a_program_with_one_fault_is_refused(program: Program, row: str) -> None:
    _, rank, old, new, what = map(str.strip, row.split("|"))
    text = fault(edit(program, int(rank), old, new))
    assert what in text
    assert "^" in text


def test_a_run_out_of_order_is_refused(program: Program) -> None:
    text = fault(edit(program, 0, "0F0 0F0>1 0F1 0F1>1", "0F1 0F1>1 0F0 0F0>1"))
    assert "rank 0 runs 0F1 where its schedule has 0F0\n\n  rank 0 | 0F1 0F1>1" in text
    assert "           ^^^" in text


def test_a_missing_lane_is_refused(program: Program) -> None:
    assert "rank 1 never runs 1F0" in fault(
        replace(program, lanes=(program.lanes[0], ()))
    )
    assert "the program has 1 lanes, but its schedule has 2 ranks" in fault(
        replace(program, lanes=program.lanes[:1])
    )


def test_an_object_that_is_not_an_instruction_is_refused(program: Program) -> None:
    strange = replace(program, lanes=((parse_action("0F0"),), program.lanes[1]))  # type: ignore[arg-type]
    assert "<0F0> is not an instruction" in fault(strange)


def test_a_message_sent_twice_is_refused(program: Program) -> None:
    text = fault(
        edit(edit(program, 0, "0F0>1", "0F0>1 0F0>1"), 1, "0F0<0", "0F0<0 0F0<0")
    )
    assert "rank 0 sends 0F0>1 twice" in text
    assert "rank 1 receives 0F0<0 twice" in text
    assert "rank 1: 0F0<0 brings 0F0, which is here already" in text


def test_a_message_from_the_wrong_rank_is_refused() -> None:
    program = lower(make("gpipe", ranks=3, microbatches=1))
    text = fault(edit(program, 2, "1F0<1", "1F0<0"))
    assert "rank 2 receives 1F0<0, but 1F0 runs on rank 1, not on rank 0" in text
    assert "rank 1 sends 1F0 to rank 2, which never receives it" in text


def test_forwarding_the_result_of_another_rank_is_refused() -> None:
    program = lower(make("gpipe", ranks=3, microbatches=1))
    assert "rank 1 sends 0F0>2, but 0F0 runs on rank 0" in fault(
        edit(program, 1, "0F0<0", "0F0<0 0F0>2")
    )


def test_messages_received_in_another_order_than_sent_are_refused() -> None:
    program = lower(make("gpipe", ranks=2, microbatches=2))
    text = fault(edit(program, 1, "0F0<0 1F0 ~0F0 0F1<0", "0F1<0 0F0<0 1F0 ~0F0"))
    assert "message 0 from rank 0 to rank 1 is 0F0, but rank 1 takes it for 0F1" in text
    assert "receive them in the order in which they are sent" in text


def test_a_circle_of_ranks_that_wait_for_each_other_is_drawn(program: Program) -> None:
    late = edit(program, 1, "0F1<0 1B0 ~1F0 1B0>0 ~1B0", "1B0 ~1F0 1B0>0 ~1B0 0F1<0")
    assert fault(late) == (
        "this program deadlocks if sends block: the ranks wait for each other, in a circle\n\n"
        "  rank 0 waits to send 0F1 to rank 1\n"
        "  rank 1 waits to send 1B0 to rank 0\n\n"
        "  rank 0 | 0F0 0F0>1 0F1 0F1>1 1B0<1 0B0 ~0F0 ~1B0 ~0B0 1B1<1 ...\n"
        "                         ^^^^^\n"
        "  rank 1 | 0F0<0 1F0 ~0F0 1B0 ~1F0 1B0>0 ~1B0 0F1<0 1F1 ~0F1 1B1 ~1F1 ...\n"
        "                                   ^^^^^\n"
        "  put a receive before the send behind which its sender waits, as `lower` does"
    )


def test_a_circle_of_three_leaves_out_a_rank_that_only_waits_for_it() -> None:
    paths = [(0, 1, 3), (1, 2), (2, 0)]
    acts = ["0F0 0F2 0B2 0B0", "1F1 1F0 1B0 1B1", "2F2 2F1 2B1 2B2", "3F0 3B0"]
    tables = (
        [Stage(rank, rank) for rank in range(4)],
        [MicroBatch(path) for path in paths],
    )
    schedule = schedule_of(
        *tables, [[parse_action(word) for word in lane.split()] for lane in acts]
    )
    ring = lanes(
        "0F0 0F0>1 2F2<2 0F2 ~2F2 0B2 ~0F2 0B2>2 ~0B2 1B0<1 0B0 ~0F0 ~1B0 ~0B0",
        "1F1 1F1>2 0F0<0 1F0 ~0F0 1F0>3 3B0<3 1B0 ~1F0 ~3B0 1B0>0 ~1B0 2B1<2 1B1 ~1F1 ~2B1 ~1B1",
        "2F2 2F2>0 1F1<1 2F1 ~1F1 2B1 ~2F1 0B2<0 2B2 ~2F2 ~0B2 ~2B2 2B1>1 ~2B1",
        "1F0<1 3F0 ~1F0 3B0 ~3F0 3B0>1 ~3B0",
    )
    text = fault(Program(schedule, ring))
    assert (
        "rank 0 waits to send 0F0 to rank 1\n  rank 1 waits to send 1F1 to rank 2"
        in text
    )
    assert "rank 2 waits to send 2F2 to rank 0" in text
    assert "rank 3" not in text
    verify(lower(schedule))


def test_one_error_has_all_faults_and_counts_those_it_does_not_show(
    program: Program,
) -> None:
    bare = tuple(
        tuple(i for i in lane if isinstance(i, RunAction)) for lane in program.lanes
    )
    text = fault(replace(program, lanes=bare))
    assert "rank 1: 1F0 uses 0F0" in text
    assert "rank 0 never frees 0F0" in text
    assert text.endswith("and 4 more faults")


def test_a_different_program_is_accepted_if_it_is_safe(program: Program) -> None:
    verify(edit(program, 0, "~0F0 ~1B0 ~0B0 1B1<1", "1B1<1 ~0F0 ~1B0 ~0B0"))


# ---------------------------------------------------------------- any schedule
def prove(schedule: Schedule) -> Program:
    """Lowers and verifies; the transfers are exactly the needs across ranks, and frees come right after a use."""
    program = lower(schedule)
    abroad = {
        (needed, schedule.rank_of(needed), schedule.rank_of(action))
        for lane in schedule.lanes
        for action in lane
        for needed in needs(schedule, action)
        if schedule.rank_of(needed) != schedule.rank_of(action)
    }
    assert sorted(verify(program)) == sorted(abroad)
    return program


def assert_frees_follow_the_last_use(program: Program) -> None:
    for lane in filter(None, program.lanes):
        last = lane[0]
        for step in lane:
            last = last if isinstance(step, Free) else step
            used = (
                last.action,
                *(
                    needs(program.schedule, last.action)
                    if isinstance(last, RunAction)
                    else ()
                ),
            )
            assert step.action in used


def assert_needs_agree(schedule: Schedule) -> None:
    table = schedule.table
    for number in range(len(table)):
        row = [table.action(n) for n in table.needs[number].tolist() if n >= 0]
        assert row == list(needs(schedule, table.action(number)))


def ticks_when_sends_block(program: Program) -> dict[Action, int]:
    """When each action ends if it takes one tick, messages take none, and both ends of one wait for each other."""
    clock = [0 for _ in program.lanes]
    ends: dict[Action, int] = {}
    left = [list(reversed(lane)) for lane in program.lanes]

    def catch_up(rank: int) -> None:
        while left[rank] and not isinstance(left[rank][-1], (Send, Receive)):
            step = left[rank].pop()
            if isinstance(step, RunAction):
                clock[rank] += 1
                ends[step.action] = clock[rank]

    for transfer in verify(program):
        pair = (transfer.source, transfer.target)
        for rank in pair:
            catch_up(rank)
            assert left[rank].pop().action == transfer.action
        clock[pair[0]] = clock[pair[1]] = max(clock[rank] for rank in pair)
    for rank in range(len(left)):
        catch_up(rank)
    return ends


def test_blocking_sends_delay_no_rank_on_the_clock() -> None:
    for seed in range(100):
        schedule = random_schedule(np.random.default_rng([6, seed]))
        table = schedule.table
        free = {
            table.action(number): tick
            for number, tick in enumerate(table.tick.tolist())
        }
        assert ticks_when_sends_block(lower(schedule)) == free


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 4),
)
@settings(max_examples=120)
def test_any_schedule_lowers_to_a_program_that_verifies(
    seed: int, ranks: int, parts: int, microbatches: int, slices: int
) -> None:
    program = prove(
        random_schedule(np.random.default_rng(seed), ranks, parts, microbatches, slices)
    )
    assert_frees_follow_the_last_use(program)


@pytest.mark.parametrize("block", range(4))
def test_random_schedules_lower_verify_and_agree_on_needs(block: int) -> None:
    for seed in range(block * 200, block * 200 + 200):
        schedule = random_schedule(np.random.default_rng(seed))
        prove(schedule)
        if seed % 4 == 0:
            assert_needs_agree(schedule)


@pytest.mark.parametrize("block", range(2))
def test_broken_tables_are_refused_or_still_run(block: int) -> None:
    refused = 0
    for seed in range(block * 500, block * 500 + 500):
        rng = np.random.default_rng([7, seed])
        tables = broken(rng, random_schedule(rng, microbatches=2, slices=2))
        try:
            schedule = schedule_of(*tables)
        except ScheduleError:
            refused += 1
            continue
        verify(lower(schedule))
    assert 250 < refused < 500  # both happen


@pytest.mark.parametrize("block", range(2))
def test_broken_programs_are_refused_or_still_run(block: int) -> None:
    """An edited program that `verify` lets pass really runs on the threaded machine."""
    passed = 0
    for seed in range(block * 300, block * 300 + 300):
        rng = np.random.default_rng([8, seed])
        program = lower(random_schedule(rng, ranks=3, microbatches=2, slices=2))
        edited = [list(lane) for lane in program.lanes]
        lane = max(edited, key=len)
        at = int(rng.integers(len(lane)))
        lane.insert(int(rng.integers(max(at - 3, 0), at + 3)), lane.pop(at))
        mixed = replace(program, lanes=tuple(map(tuple, edited)))
        try:
            verify(mixed)
        except ProgramError:
            continue
        passed += 1
        run_on_threads(mixed)
    assert 20 < passed < 280


def test_a_program_that_lacks_or_repeats_any_instruction_is_refused() -> None:
    for seed in range(200):
        rng = np.random.default_rng([2, seed])
        program = lower(random_schedule(rng, microbatches=2))
        rank = int(
            rng.choice([rank for rank, lane in enumerate(program.lanes) if lane])
        )
        lane = program.lanes[rank]
        at = int(rng.integers(len(lane)))
        for count in (0, 2):
            edited = (*lane[:at], *[lane[at]] * count, *lane[at + 1 :])
            fault(
                replace(
                    program,
                    lanes=(*program.lanes[:rank], edited, *program.lanes[rank + 1 :]),
                )
            )


# ---------------------------------------------------------------- the threaded machine
class Channel:
    """From one rank to another: `send` returns only once the other side took the message."""

    def __init__(self) -> None:
        self.there: SimpleQueue[str] = SimpleQueue()
        self.back: SimpleQueue[None] = SimpleQueue()

    def send(self, message: str, seconds: float) -> None:
        self.there.put(message)
        self.back.get(timeout=seconds)

    def receive(self, seconds: float) -> str:
        message = self.there.get(timeout=seconds)
        self.back.put(None)
        return message


def run_lane(
    program: Program,
    rank: int,
    channels: dict[tuple[int, int], Channel],
    done: list[object],
    seconds: float,
) -> None:
    held: set[str] = set()
    try:
        for step in program.lanes[rank]:
            name = str(step.action)
            match step:
                case RunAction():
                    assert held >= set(
                        map(str, needs(program.schedule, step.action))
                    ), (rank, step)
                    held.add(name)
                case Send():
                    assert name in held
                    channels[rank, step.peer].send(name, seconds)
                case Receive():
                    assert channels[step.peer, rank].receive(seconds) == name
                    held.add(name)
                case Free():
                    held.remove(name)
        assert not held
        done[rank] = True
    except (AssertionError, Empty, KeyError) as error:
        done[rank] = error


def run_on_threads(program: Program, seconds: float = 20.0) -> None:
    ranks = range(len(program.lanes))
    channels = {(a, b): Channel() for a in ranks for b in ranks}
    done: list[object] = [None for _ in ranks]
    threads = [
        threading.Thread(
            target=partial(run_lane, program, rank, channels, done, seconds),
            daemon=True,
        )
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert done == [True for _ in ranks], f"{done}\n{program}"


@pytest.mark.parametrize("block", range(3))
def test_random_programs_run_on_threads_whose_sends_block(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        run_on_threads(lower(random_schedule(np.random.default_rng([9, seed]))))


def test_the_threaded_machine_hangs_on_a_program_that_deadlocks(
    program: Program,
) -> None:
    late = edit(program, 1, "0F1<0 1B0 ~1F0 1B0>0 ~1B0", "1B0 ~1F0 1B0>0 ~1B0 0F1<0")
    with pytest.raises(AssertionError, match="Empty"):
        run_on_threads(late, seconds=0.2)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_named_schedule_runs_on_threads_and_with_queues(name: str) -> None:
    schedules = list(named_schedules(name))
    assert schedules
    for schedule in schedules:
        program = prove(schedule)
        assert_frees_follow_the_last_use(program)
        assert_needs_agree(schedule)
        run_on_threads(program)
        assert never_run(program) == []
        assert never_run(program, separate=True) == []


def test_lowering_is_linear_enough_for_large_schedules() -> None:
    program = lower(make("1f1b", ranks=8, microbatches=1200))
    assert len(verify(program)) == 2 * 7 * 1200


# ---------------------------------------------------------------- queues of messages
def test_what_verify_accepts_runs_with_queues_of_messages():
    """That is how messages travel over NCCL; with any paths and slices."""
    for seed in range(60):
        lowered = lower(random_schedule(np.random.default_rng([11, seed])))
        verify(lowered)
        assert never_run(lowered) == []
        assert never_run(lowered, separate=True) == []


def test_queues_find_the_actions_that_wait_for_a_message_in_vain(program):
    """In the wrong order, the second forward arrives in the place of the first."""
    ours, theirs = program.lanes
    sends = [each for each in ours if isinstance(each, Send)]
    swapped = dict(zip(sends, reversed(sends), strict=True))
    changed = tuple(swapped.get(each, each) for each in ours)
    stuck = never_run(replace(program, lanes=(changed, theirs)))
    assert parse_action("1F0") in stuck
