"""Prove that a program runs to the end, no matter who wrote it.

Nothing here knows how `lower` works. A program is correct if:

(a) each rank runs its lane of the schedule, in order
(b) each send has its receive, and between two ranks they come in the same order on both sides
(c) it never gets stuck on a machine where a send and its receive are one step
(d) each action finds all that it needs on its rank; nothing is freed too early, twice, or never

The machine of (c) is the strictest there is: a rank does one thing after the other, in the order of
its lane, and both ends of a message wait for each other. Every transport that we use waits for less:

    gloo, threads   receives and sends are started in that order, and nothing waits for a send
    penstock_ipc    a rank waits for a message where it needs it, and for a send where the ring is full
    nccl            the messages of a rank wait for each other, or those that go to higher ranks and those
                    that go to lower ranks do so among themselves; actions go on meanwhile

A thing can only get stuck if things wait for each other in a circle. The transfers in the order that
`verify` returns are a moment each at which the strictest machine has done everything that came
before in the lanes of both ranks. So whatever a transport makes a message wait for, as long as it
comes earlier in the lane of its sender or its receiver, was over before, and there is no circle. The
same holds if the host waits at any instruction until everything before it is done, as CUDA does
when it loads a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from penstock.errors import ProgramError
from penstock.ir.action import Action
from penstock.ir.check import draw_lane, find_circle
from penstock.ir.program import (
    Free,
    Instruction,
    Program,
    Receive,
    RunAction,
    Send,
    Transfer,
)
from penstock.ir.schedule import Schedule

MAX_SHOWN_FAULTS = 8

# The messages in one direction between two ranks, in order, and their place in the lane.
Places: TypeAlias = dict[Action, int]


def verify(program: Program) -> tuple[Transfer, ...]:
    """Prove that a program runs its schedule to the end, or raise a `ProgramError`.

    The proof is the list of all transfers, in an order in which they happen if every send
    blocks until its receive.
    """
    faults = list(_unknown_faults(program))
    if faults:
        raise _error(faults)
    message_faults = list(_message_faults(program))
    faults = [*_lane_faults(program), *message_faults, *_memory_faults(program)]
    transfers: list[Transfer] = []
    if not message_faults:
        faults += _run_messages(program, transfers)
    if faults:
        raise _error(faults)
    return tuple(transfers)


def _error(faults: Sequence[str]) -> ProgramError:
    shown = list(faults[:MAX_SHOWN_FAULTS])
    hidden = len(faults) - len(shown)
    if hidden > 0:
        shown.append(f"and {hidden} more faults")
    return ProgramError("\n\n".join(shown))


def _draw(program: Program, *places: tuple[int, int]) -> str:
    """Lanes, each with carets under one of its instructions."""
    return "\n".join(draw_lane(program.lanes, rank, index) for rank, index in places)


# ---------------------------------------------------------------- unknown ranks and actions
def _unknown_faults(program: Program) -> Iterator[str]:
    """Instructions that name ranks or actions that do not exist."""
    ranks = len(program.lanes)
    if ranks != program.schedule.ranks:
        yield (
            f"the program has {ranks} lanes, "
            f"but its schedule has {program.schedule.ranks} ranks; each rank needs one"
        )
    known = set(chain.from_iterable(program.schedule.lanes))
    for rank, lane in enumerate(program.lanes):
        for index, instruction in enumerate(lane):
            fault = _unknown_fault(instruction, rank, ranks, known)
            if fault:
                yield f"rank {rank}: {fault}\n\n{_draw(program, (rank, index))}"


def _unknown_fault(
    instruction: Instruction, rank: int, ranks: int, known: set[Action]
) -> str:
    if not isinstance(instruction, RunAction | Send | Receive | Free):
        return (
            f"{instruction!r} is not an instruction; "
            "there are RunAction, Send, Receive and Free"
        )
    if instruction.action not in known:
        return f"{instruction} is of {instruction.action}, which is not in the schedule"
    if not isinstance(instruction, Send | Receive):
        return ""
    if not 0 <= instruction.peer < ranks:
        return (
            f"{instruction} names rank {instruction.peer}, "
            f"which does not exist (ranks 0..{ranks - 1})"
        )
    if instruction.peer == rank:
        return f"{instruction} is a message to itself; a rank has its own results"
    return ""


# ---------------------------------------------------------------- lanes
def _lane_faults(program: Program) -> Iterator[str]:
    """Ranks that do not run their lane of the schedule, at the first difference."""
    for rank, lane in enumerate(program.lanes):
        expected = program.schedule.lanes[rank]
        places = []
        actions = []
        for index, instruction in enumerate(lane):
            if isinstance(instruction, RunAction):
                places.append(index)
                actions.append(instruction.action)
        if actions == list(expected):
            continue
        difference = _first_difference(actions, expected)
        fault = _lane_fault(rank, actions, expected, difference)
        drawing = ""
        if lane:
            places.append(len(lane) - 1)
            drawing = _draw(program, (rank, places[difference]))
        advice = "a program runs the lane of its schedule, in order"
        yield f"{fault}\n\n{drawing}\n  {advice}"


def _first_difference(one: Sequence[Action], other: Sequence[Action]) -> int:
    shorter = min(len(one), len(other))
    for index in range(shorter):
        if one[index] != other[index]:
            return index
    return shorter


def _lane_fault(
    rank: int, actions: Sequence[Action], expected: Sequence[Action], index: int
) -> str:
    if index >= len(actions):
        return f"rank {rank} never runs {expected[index]}"
    if index >= len(expected):
        return f"rank {rank} runs {actions[index]} after the end of its lane"
    return f"rank {rank} runs {actions[index]} where its schedule has {expected[index]}"


# ---------------------------------------------------------------- messages
def _message_faults(program: Program) -> Iterator[str]:
    """Messages without another end, or with another end in a different order."""
    sent: dict[tuple[int, int], Places] = {}
    received: dict[tuple[int, int], Places] = {}
    for rank, lane in enumerate(program.lanes):
        for index, instruction in enumerate(lane):
            if isinstance(instruction, Send):
                places = sent.setdefault((rank, instruction.peer), {})
            elif isinstance(instruction, Receive):
                places = received.setdefault((instruction.peer, rank), {})
            else:
                continue
            fault = _message_fault(program.schedule, instruction, rank, places)
            if fault:
                yield f"{fault}\n\n{_draw(program, (rank, index))}"
            places.setdefault(instruction.action, index)
    for pair in sorted({*sent, *received}):
        yield from _pair_faults(
            program, pair, sent.get(pair, {}), received.get(pair, {})
        )


def _message_fault(
    schedule: Schedule, message: Send | Receive, rank: int, places: Places
) -> str:
    action = message.action
    home = schedule.rank_of(action)
    verb = "sends"
    source = rank
    if isinstance(message, Receive):
        verb = "receives"
        source = message.peer
    if home != source:
        return (
            f"rank {rank} {verb} {message}, "
            f"but {action} runs on rank {home}, not on rank {source}"
        )
    if action in places:
        return f"rank {rank} {verb} {message} twice; once is enough"
    return ""


def _pair_faults(
    program: Program, pair: tuple[int, int], sent: Places, received: Places
) -> Iterator[str]:
    """Messages from one rank to another that do not match."""
    source, target = pair
    lost = [action for action in sent if action not in received]
    for action in lost:
        drawing = _draw(program, (source, sent[action]))
        yield (
            f"rank {source} sends {action} to rank {target}, which never receives it"
            f"\n\n{drawing}\n  every send needs its receive"
        )
    awaited = [action for action in received if action not in sent]
    for action in awaited:
        drawing = _draw(program, (target, received[action]))
        yield (
            f"rank {target} waits to receive {action} from rank {source}, "
            f"which never sends it\n\n{drawing}\n  every receive needs its send"
        )
    send_order = list(sent)
    receive_order = list(received)
    if lost or awaited or send_order == receive_order:
        return
    number = _first_difference(send_order, receive_order)
    actual = send_order[number]
    assumed = receive_order[number]
    drawing = _draw(program, (source, sent[actual]), (target, received[assumed]))
    yield (
        f"message {number} from rank {source} to rank {target} is {actual}, "
        f"but rank {target} takes it for {assumed}\n\n{drawing}\n"
        "  messages have no tags: receive them in the order in which they are sent"
    )


def _run_messages(program: Program, transfers: list[Transfer]) -> list[str]:
    """Run the messages on a machine where a send and its receive are one step.

    Appends the steps to `transfers`.
    """
    waiting: list[list[Send | Receive]] = []  # of each rank, the next one last
    for lane in program.lanes:
        messages = [each for each in lane if isinstance(each, Send | Receive)]
        messages.reverse()
        waiting.append(messages)
    awake = list(range(len(waiting)))
    while awake:
        rank = awake.pop()
        while waiting[rank] and _meets_its_other_end(waiting, rank):
            message = waiting[rank].pop()
            peer = message.peer
            waiting[peer].pop()
            awake.append(peer)
            if isinstance(message, Send):
                transfers.append(Transfer(message.action, rank, peer))
            else:
                transfers.append(Transfer(message.action, peer, rank))
    return [_draw_circle(program, waiting)] if any(waiting) else []


def _meets_its_other_end(
    waiting: Sequence[Sequence[Send | Receive]], rank: int
) -> bool:
    """Whether the next message of a rank is also the next one of its peer."""
    message = waiting[rank][-1]
    if not waiting[message.peer]:
        return False
    other = waiting[message.peer][-1]
    is_same = other.peer == rank and other.action == message.action
    return is_same and type(other) is not type(message)


def _draw_circle(program: Program, waiting: Sequence[Sequence[Send | Receive]]) -> str:
    """The message for ranks that wait for each other."""
    stuck = next(rank for rank, messages in enumerate(waiting) if messages)
    waits = []
    places = []
    for member in find_circle(stuck, lambda rank: waiting[rank][-1].peer):
        message = waiting[member][-1]
        waits.append(f"  rank {member} waits {_purpose(message)}")
        places.append((member, program.lanes[member].index(message)))
    return "\n".join(
        [
            "this program deadlocks if sends block: "
            "the ranks wait for each other, in a circle",
            "",
            *waits,
            "",
            _draw(program, *places),
            "  put a receive before the send behind which its sender waits, as `lower` does",
        ]
    )


def _purpose(message: Send | Receive) -> str:
    if isinstance(message, Send):
        return f"to send {message.action} to rank {message.peer}"
    return f"to receive {message.action} from rank {message.peer}"


# ---------------------------------------------------------------- memory
def _memory_faults(program: Program) -> Iterator[str]:
    """Results that are used while they are not on the rank, or freed twice or never."""
    needed = _needed_actions(program.schedule)
    for rank, lane in enumerate(program.lanes):
        held: Places = {}
        freed: set[Action] = set()
        for index, instruction in enumerate(lane):
            for fault in _step(instruction, needed, held, freed, index):
                yield f"rank {rank}: {fault}\n\n{_draw(program, (rank, index))}"
        for action, index in held.items():
            drawing = _draw(program, (rank, index))
            yield (
                f"rank {rank} never frees {action}\n\n{drawing}\n"
                f"  put ~{action} after its last use"
            )


def _needed_actions(schedule: Schedule) -> dict[Action, list[Action]]:
    actions = tuple(chain.from_iterable(schedule.lanes))
    needed = {}
    for action, numbers in zip(actions, schedule.table.needs.tolist(), strict=True):
        needed[action] = [actions[number] for number in numbers if number >= 0]
    return needed


def _step(
    instruction: Instruction,
    needed: dict[Action, list[Action]],
    held: Places,
    freed: set[Action],
    index: int,
) -> list[str]:
    """Apply an instruction to the results that a rank holds, and return the faults."""
    action = instruction.action
    faults = []
    for used in _used_results(instruction, needed):
        if used not in held:
            reason = "is not here yet: neither run nor received before"
            if used in freed:
                reason = "is freed before"
            faults.append(f"{instruction} uses {used}, which {reason}")
    if isinstance(instruction, Free):
        held.pop(action, None)
        freed.add(action)
    elif not isinstance(instruction, Send):
        if action in held:
            faults.append(f"{instruction} brings {action}, which is here already")
        held[action] = index
    return faults


def _used_results(
    instruction: Instruction, needed: dict[Action, list[Action]]
) -> Iterable[Action]:
    if isinstance(instruction, RunAction):
        return needed[instruction.action]
    if isinstance(instruction, Receive):
        return ()
    return (instruction.action,)
