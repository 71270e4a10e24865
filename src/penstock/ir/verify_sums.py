"""Prove that the planned sums of gradients end, and that every rank gets the sum of all ranks.

A thread of each rank takes part in its sums, one after the other, over a connection that has
messages of nothing else. A lane never waits for a sum before its own end, and `verify` proves that
all lanes reach theirs, so every rank begins its first sum. From there on the messages of the sums
run on the machine below:

    a rank starts all messages of its round together and waits for all of them, sent and received
    a message moves when both ends have started it; between two ranks they come in one order

Sums that go through on this machine go through on every connection that we use, since those wait
for less. While they run, every cell of every rank counts whose gradients are in it:

    rank 1, cell 0    1 1 0      has added those of ranks 0 and 1; in the end it must be 1 1 1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import ProgramError
from penstock.ir.schedule import Schedule
from penstock.ir.sums import (
    Round,
    RoundKind,
    SumPlan,
    cell_shares,
    completion,
    rounds_of,
    unfit_sums,
)
from penstock.ir.table import Ints


class RankRound(NamedTuple):
    """A round of one rank, and the number of the sum that it belongs to."""

    number: int
    round: Round


class StartedSend(NamedTuple):
    """A message that its sender has started: its sum, its cells, and what they contain."""

    number: int
    cells: tuple[int, ...]
    content: Ints


class StartedReceive(NamedTuple):
    """A message that its receiver waits for: its sum and its cells."""

    number: int
    cells: tuple[int, ...]


class Connection(NamedTuple):
    """The started messages from one rank to another, in their order."""

    sent: deque[StartedSend]
    awaited: deque[StartedReceive]


def ordered_sums(schedule: Schedule, sums: Sequence[SumPlan]) -> list[SumPlan]:
    """The sums in the order in which all ranks begin them (`penstock.ir.sums`)."""

    def begin(plan: SumPlan) -> tuple[int, bool, tuple[int, ...]]:
        _, ready = completion(schedule, plan.parts, plan.ranks[0])
        return ready, len(plan.parts) > 1, plan.parts

    return sorted(sums, key=begin)


def verify_sums(schedule: Schedule, sums: Sequence[SumPlan]) -> int:
    """Return the number of messages of all sums, or raise a `ProgramError` that says what fails."""
    faults = unfit_sums(schedule, sums)
    if faults:
        advice = "plan the paths again, or remove `sums` from the plan"
        raise ProgramError("\n".join(faults) + f"\n  {advice}")
    return run_rounds(ordered_sums(schedule, sums))


def run_rounds(sums: Sequence[SumPlan]) -> int:
    """Run all sums, one after the other on each rank; return the number of their messages."""
    machine = _Machine(sums)
    machine.run()
    for number, plan in enumerate(sums):
        _check_cells(plan, machine.held[number])
    return machine.moved


def _check_cells(plan: SumPlan, held: Ints) -> None:
    """Raise if a cell does not contain every rank's gradients once [rank, cell, source]."""
    wrong = held != 1
    is_empty = np.array(cell_shares(plan)) == 0
    wrong[:, is_empty] = False  # Empty cells do not travel.
    if not wrong.any():
        return
    place, cell, source = (int(one[0]) for one in np.nonzero(wrong))
    raise ProgramError(
        f"the sum of {plan.name} is wrong: on rank {plan.ranks[place]}, cell {cell} "
        f"has the gradients of rank {plan.ranks[source]} {held[place, cell, source]} times"
    )


class _Machine:
    """The state of all ranks: their rounds, the messages that wait, and what cells contain."""

    def __init__(self, sums: Sequence[SumPlan]) -> None:
        self.sums = sums
        self.rounds: dict[int, list[RankRound]] = {}
        # For each sum: how often a cell of a rank contains each rank's gradients.
        self.held: list[Ints] = []
        for number, plan in enumerate(sums):
            for rank in plan.ranks:
                own = self.rounds.setdefault(rank, [])
                own += [RankRound(number, one) for one in rounds_of(plan, rank)]
            at_first = np.eye(len(plan.ranks), dtype=np.int64)[:, None, :]
            self.held.append(np.repeat(at_first, len(cell_shares(plan)), axis=1))
        self.place = dict.fromkeys(self.rounds, -1)  # the round of each rank
        self.unfinished = dict.fromkeys(self.rounds, 0)  # messages of that round
        self.connections: dict[tuple[int, int], Connection] = {}
        self.moved = 0

    def cells_of(self, number: int, rank: int) -> Ints:
        """What the cells of a rank contain in one of the sums [cell, source]."""
        place = self.sums[number].ranks.index(rank)
        cells: Ints = self.held[number][place]
        return cells

    def connection(self, source: int, target: int) -> Connection:
        """The messages from one rank to another."""
        ends = (source, target)
        return self.connections.setdefault(ends, Connection(deque(), deque()))

    def run(self) -> None:
        """Let all ranks go on until nobody can."""
        awake = list(self.rounds)
        while awake:
            awake += self.begin_next_round(awake.pop())
        for rank, rounds in self.rounds.items():
            place = self.place[rank]
            if place >= len(rounds):
                continue
            plan = self.sums[rounds[place].number]
            raise ProgramError(
                f"the sum of {plan.name} never ends: rank {rank} waits for "
                f"{self.unfinished[rank]} messages that nobody sends or receives"
            )

    def begin_next_round(self, rank: int) -> list[int]:
        """Begin the next round of a rank; return the ranks whose rounds are over because of it."""
        self.place[rank] += 1
        if self.place[rank] >= len(self.rounds[rank]):
            return []
        now = self.rounds[rank][self.place[rank]]
        sends, receives = now.round.sends, now.round.receives
        self.unfinished[rank] = len(sends) + len(receives)
        if not self.unfinished[rank]:
            return [rank]
        self.start_messages(rank, now)
        over: list[int] = []
        for receive in receives:
            over += self.move_messages(receive.peer, rank)
        for send in sends:
            over += self.move_messages(rank, send.peer)
        return over

    def start_messages(self, rank: int, now: RankRound) -> None:
        """Start all messages of a round, with what the cells contain before any of them moves."""
        number = now.number
        for receive in now.round.receives:
            awaited = self.connection(receive.peer, rank).awaited
            awaited.append(StartedReceive(number, receive.cells))
        own = self.cells_of(number, rank)
        for send in now.round.sends:
            content = own[list(send.cells)].copy()
            sent = self.connection(rank, send.peer).sent
            sent.append(StartedSend(number, send.cells, content))

    def move_messages(self, source: int, target: int) -> list[int]:
        """Move the messages that both ends have started; return the ranks whose rounds are over."""
        sent, awaited = self.connection(source, target)
        over = []
        while sent and awaited:
            self.deliver(source, target, sent.popleft(), awaited.popleft())
            for rank in (source, target):
                self.unfinished[rank] -= 1
                if not self.unfinished[rank]:
                    over.append(rank)
        return over

    def deliver(
        self,
        source: int,
        target: int,
        message: StartedSend,
        expected: StartedReceive,
    ) -> None:
        """Let the receiver add the content of a message to its cells, or copy it."""
        number, cells, content = message
        if (number, cells) != expected:
            raise ProgramError(
                f"rank {source} sends cells {cells} of the sum of "
                f"{self.sums[number].name}, but rank {target} expects cells "
                f"{expected.cells} of the sum of {self.sums[expected.number].name}"
            )
        held = self.cells_of(number, target)
        kind = self.rounds[target][self.place[target]].round.kind
        if kind is RoundKind.COPY:
            held[list(cells)] = content
        else:
            held[list(cells)] += content
        self.moved += 1
