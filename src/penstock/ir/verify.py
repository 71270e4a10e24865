"""The proof that a program runs to the end, whoever wrote it: nothing here knows how `lower` works.

(a) each rank runs its lane of the schedule, in order
(b) each send has its receive; between two ranks they come in the same order on both sides
(c) a machine on which a send and its receive are one step never gets stuck
(d) each action finds all that it needs on its rank; nothing is freed too early, twice, or never
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from penstock.errors import ProgramError
from penstock.ir.action import Action
from penstock.ir.check import draw_lane
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


def verify(program: Program) -> tuple[Transfer, ...]:
    """Proves that a program runs its schedule to the end; else a `ProgramError` with the faults.

    The evidence: all transfers, in an order in which they happen when every send blocks until its receive.
    """
    faults = list(_strange(program))
    if faults:
        raise _error(faults)
    unpaired = list(_unpaired(program))
    faults = [*_misrun(program), *unpaired, *_memory_faults(program)]
    transfers: list[Transfer] = []
    if not unpaired:
        faults += _rendezvous(program, transfers)
    if faults:
        raise _error(faults)
    return tuple(transfers)


def _error(faults: Sequence[str], shown: int = 8) -> ProgramError:
    hidden = len(faults) - shown
    rest = [f"and {hidden} more faults"] if hidden > 0 else []
    return ProgramError("\n\n".join([*faults[:shown], *rest]))


def _drawn(program: Program, *places: tuple[int, int]) -> str:
    """Lanes, each with a caret under one of its instructions."""
    return "\n".join(draw_lane(program.lanes, rank, index) for rank, index in places)


def _strange(program: Program) -> Iterator[str]:
    """Instructions that speak of ranks or actions that do not exist."""
    ranks = len(program.lanes)
    if ranks != program.schedule.ranks:
        yield f"the program has {ranks} lanes, but its schedule has {program.schedule.ranks} ranks: one lane a rank"
    known = set(chain.from_iterable(program.schedule.lanes))
    for rank, lane in enumerate(program.lanes):
        for index, instruction in enumerate(lane):
            what = _strange_one(instruction, rank, ranks, known)
            if what:
                yield f"rank {rank}: {what}\n\n{_drawn(program, (rank, index))}"


def _strange_one(
    instruction: Instruction, rank: int, ranks: int, known: set[Action]
) -> str:
    if not isinstance(instruction, (RunAction, Send, Receive, Free)):
        return (
            f"{instruction!r} is no instruction; there are Run, Send, Receive and Free"
        )
    if instruction.action not in known:
        return f"{instruction} is of {instruction.action}, which is not in the schedule"
    if not isinstance(instruction, (Send, Receive)):
        return ""
    if not 0 <= instruction.peer < ranks:
        return f"{instruction} names rank {instruction.peer}, which does not exist (ranks 0..{ranks - 1})"
    return (
        f"{instruction} is a message to itself; what runs here is here"
        if instruction.peer == rank
        else ""
    )


def _misrun(program: Program) -> Iterator[str]:
    """Ranks that do not run their lane of the schedule; the first difference of each."""
    for rank, (lane, expected) in enumerate(
        zip(program.lanes, program.schedule.lanes, strict=True)
    ):
        places = [
            index
            for index, instruction in enumerate(lane)
            if isinstance(instruction, RunAction)
        ]
        runs = [lane[index].action for index in places]
        if runs != list(expected):
            differ = (
                k
                for k, (a, b) in enumerate(zip(runs, expected, strict=False))
                if a != b
            )
            at = next(differ, min(len(runs), len(expected)))
            place = [(rank, [*places, len(lane) - 1][at])] if lane else []
            what = _misrun_one(rank, runs[at : at + 1], expected[at : at + 1])
            yield f"{what}\n\n{_drawn(program, *place)}\n  a program runs the lane of its schedule, in order"


def _misrun_one(rank: int, run: Sequence[Action], expected: Sequence[Action]) -> str:
    if run and expected:
        return f"rank {rank} runs {run[0]} where its schedule has {expected[0]}"
    return (
        f"rank {rank} runs {run[0]} after the end of its lane"
        if run
        else f"rank {rank} never runs {expected[0]}"
    )


# ---------------------------------------------------------------- messages
Places: TypeAlias = dict[
    Action, int
]  # each message of one direction of a pair of ranks, in order: where it stands


def _unpaired(program: Program) -> Iterator[str]:
    """Messages that do not find their other end, or not in the same order."""
    sent: dict[tuple[int, int], Places] = {}
    received: dict[tuple[int, int], Places] = {}
    for rank, lane in enumerate(program.lanes):
        for index, instruction in enumerate(lane):
            if isinstance(instruction, (Send, Receive)):
                out = isinstance(instruction, Send)
                pair = (rank, instruction.peer) if out else (instruction.peer, rank)
                messages = (sent if out else received).setdefault(pair, {})
                what = _misplaced(program.schedule, instruction, rank, messages)
                if what:
                    yield f"{what}\n\n{_drawn(program, (rank, index))}"
                messages.setdefault(instruction.action, index)
    for pair in sorted({*sent, *received}):
        yield from _pair_faults(
            program, pair, sent.get(pair, {}), received.get(pair, {})
        )


def _misplaced(
    schedule: Schedule, message: Send | Receive, rank: int, messages: Places
) -> str:
    action, home = message.action, schedule.rank_of(message.action)
    verb, owner = (
        ("sends", rank) if isinstance(message, Send) else ("receives", message.peer)
    )
    if home != owner:
        return f"rank {rank} {verb} {message}, but {action} runs on rank {home}, not on rank {owner}"
    return (
        f"rank {rank} {verb} {message} twice; once is enough"
        if action in messages
        else ""
    )


def _pair_faults(
    program: Program, pair: tuple[int, int], sent: Places, received: Places
) -> Iterator[str]:
    source, target = pair
    lost, awaited = (
        [a for a in sent if a not in received],
        [a for a in received if a not in sent],
    )
    for action in lost:
        what = f"rank {source} sends {action} to rank {target}, which never receives it"
        yield f"{what}\n\n{_drawn(program, (source, sent[action]))}\n  every send needs its receive"
    for action in awaited:
        what = f"rank {target} waits to receive {action} from rank {source}, which never sends it"
        yield f"{what}\n\n{_drawn(program, (target, received[action]))}\n  every receive needs its send"
    if not lost and not awaited and list(sent) != list(received):
        number, (a, b) = next(
            (k, ab)
            for k, ab in enumerate(zip(sent, received, strict=True))
            if ab[0] != ab[1]
        )
        what = f"message {number} from rank {source} to rank {target} is {a}, but rank {target} takes it for {b}"
        drawn = _drawn(program, (source, sent[a]), (target, received[b]))
        yield f"{what}\n\n{drawn}\n  messages carry no name: receive them in the order in which they are sent"


def _rendezvous(program: Program, transfers: list[Transfer]) -> list[str]:
    """Runs the messages on a machine where a send and its receive are one step. Fills `transfers` with the steps."""
    todo = [
        [i for i in lane if isinstance(i, (Send, Receive))] for lane in program.lanes
    ]
    for lane in todo:
        lane.reverse()  # the next one is the last
    awake = list(range(len(todo)))
    while awake:
        rank = awake.pop()
        while todo[rank] and _meet(todo, rank):
            mine = todo[rank].pop()
            todo[mine.peer].pop()
            awake.append(mine.peer)
            ends = (rank, mine.peer) if isinstance(mine, Send) else (mine.peer, rank)
            transfers.append(Transfer(mine.action, *ends))
    return [_circle(program, todo)] if any(todo) else []


def _meet(todo: Sequence[Sequence[Send | Receive]], rank: int) -> bool:
    """Does a rank's next message stand face to face with its other end?"""
    mine = todo[rank][-1]
    if not todo[mine.peer]:
        return False
    other = todo[mine.peer][-1]
    return (
        other.peer == rank
        and other.action == mine.action
        and type(other) is not type(mine)
    )


def _circle(program: Program, todo: Sequence[Sequence[Send | Receive]]) -> str:
    rank = next(rank for rank, left in enumerate(todo) if left)
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = todo[rank][-1].peer
    circle = seen[seen.index(rank) :]
    lines = [f"  rank {member} waits {_wish(todo[member][-1])}" for member in circle]
    places = [
        (member, program.lanes[member].index(todo[member][-1])) for member in circle
    ]
    return "\n".join(
        [
            "this program deadlocks if sends block: each rank waits for the next, in a circle",
            "",
            *lines,
            "",
            _drawn(program, *places),
            "  put a receive before the send that its sender waits behind, as `lower` does",
        ]
    )


def _wish(message: Send | Receive) -> str:
    if isinstance(message, Send):
        return f"to send {message.action} to rank {message.peer}"
    return f"to receive {message.action} from rank {message.peer}"


# ---------------------------------------------------------------- memory
def _memory_faults(program: Program) -> Iterator[str]:
    """Results that are used where they are not, or not any more; what is freed twice, or never."""
    actions = tuple(chain.from_iterable(program.schedule.lanes))
    rows = program.schedule.table.needs.tolist()
    needed = {
        action: [actions[n] for n in row if n >= 0]
        for action, row in zip(actions, rows, strict=True)
    }
    for rank, lane in enumerate(program.lanes):
        held: Places = {}
        gone: set[Action] = set()
        for index, instruction in enumerate(lane):
            for what in _step(instruction, needed, held, gone, index):
                yield f"rank {rank}: {what}\n\n{_drawn(program, (rank, index))}"
        for action, index in held.items():
            what = f"rank {rank} never frees {action}"
            yield f"{what}\n\n{_drawn(program, (rank, index))}\n  put ~{action} after its last use"


def _step(
    instruction: Instruction,
    needed: dict[Action, list[Action]],
    held: Places,
    gone: set[Action],
    index: int,
) -> list[str]:
    """Does an instruction to what the rank holds; says what it misses."""
    action, uses = instruction.action, _uses(instruction, needed)
    missing = [
        f"{instruction} uses {use}, which {_absence(use, gone)}"
        for use in uses
        if use not in held
    ]
    if isinstance(instruction, Free):
        held.pop(action, None)
        gone.add(action)
    elif not isinstance(instruction, Send):
        if action in held:
            missing.append(f"{instruction} brings {action}, which is here already")
        held[action] = index
    return missing


def _uses(
    instruction: Instruction, needed: dict[Action, list[Action]]
) -> Iterable[Action]:
    if isinstance(instruction, RunAction):
        return needed[instruction.action]
    return () if isinstance(instruction, Receive) else (instruction.action,)


def _absence(action: Action, gone: set[Action]) -> str:
    return (
        "is freed before"
        if action in gone
        else "is not here yet: neither run nor received before"
    )
