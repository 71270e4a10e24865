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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import ProgramError
from penstock.ir.schedule import Schedule
from penstock.ir.sum_plan import SumPlan, unfit_sums
from penstock.ir.sum_rounds import CellMessage, Round, RoundKind, cell_shares, rounds_of
from penstock.ir.sums import completion
from penstock.ir.table import Ints

Link = tuple[int, int]  # source and target


class SumTurn(NamedTuple):
    """A round of one of a rank's sums."""

    plan: int
    round: Round


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
    turns: dict[int, list[SumTurn]] = {}
    for number, plan in enumerate(sums):
        for rank in plan.ranks:
            own = turns.setdefault(rank, [])
            own += [SumTurn(number, one) for one in rounds_of(plan, rank)]
    machine = _Machine(sums, turns)
    machine.run()
    for number, plan in enumerate(sums):
        wrong = machine.held[number] != 1
        wrong[:, np.array(cell_shares(plan)) == 0] = False  # Empty cells do not travel.
        if wrong.any():
            place, cell, source = (int(one[0]) for one in np.nonzero(wrong))
            count = int(machine.held[number][place, cell, source])
            raise ProgramError(
                f"the sum of {plan.name} is wrong: on rank {plan.ranks[place]}, cell {cell} "
                f"has the gradients of rank {plan.ranks[source]} {count} times"
            )
    return machine.moved


class _Machine:
    """The state of all ranks: their rounds, the messages that wait, and what cells contain."""

    def __init__(
        self, sums: Sequence[SumPlan], turns: dict[int, list[SumTurn]]
    ) -> None:
        self.sums = sums
        self.turns = turns
        self.place = dict.fromkeys(turns, -1)  # the round of each rank
        self.unfinished = dict.fromkeys(turns, 0)  # messages of that round
        # For each sum: how often a cell of a rank contains each rank's gradients.
        self.held: list[Ints] = []
        for plan in sums:
            own = np.eye(len(plan.ranks), dtype=np.int64)[:, None, :]
            self.held.append(np.repeat(own, len(cell_shares(plan)), axis=1))
        # Started messages, by link: of the sender with what its cells contain, and of the receiver.
        self.sent: dict[Link, list[tuple[int, CellMessage, Ints]]] = {}
        self.awaited: dict[Link, list[tuple[int, CellMessage]]] = {}
        self.moved = 0

    def run(self) -> None:
        """Let all ranks go on until nobody can."""
        awake = list(self.turns)
        while awake:
            awake += self.next_round(awake.pop())
        stuck = [r for r, turns in self.turns.items() if self.place[r] < len(turns)]
        if stuck:
            rank = stuck[0]
            plan = self.sums[self.turns[rank][self.place[rank]].plan]
            raise ProgramError(
                f"the sum of {plan.name} never ends: rank {rank} waits for "
                f"{self.unfinished[rank]} messages that nobody sends or receives"
            )

    def next_round(self, rank: int) -> list[int]:
        """Begin the next round of a rank; return the ranks whose rounds are over because of it."""
        over: list[int] = []
        self.place[rank] += 1
        if self.place[rank] >= len(self.turns[rank]):
            return over
        number, one = self.turns[rank][self.place[rank]]
        mine = self.held[number][self.sums[number].ranks.index(rank)]
        self.unfinished[rank] = len(one.sends) + len(one.receives)
        for message in one.receives:
            self.awaited.setdefault((message.peer, rank), []).append((number, message))
        for message in one.sends:
            content = mine[list(message.cells)].copy()
            self.sent.setdefault((rank, message.peer), []).append(
                (number, message, content)
            )
        if not self.unfinished[rank]:
            return [rank]
        for message in one.receives:
            over += self.match((message.peer, rank))
        for message in one.sends:
            over += self.match((rank, message.peer))
        return over

    def match(self, link: Link) -> list[int]:
        """Move the messages of a link that both ends have started; return the ranks that are done."""
        source, target = link
        sent, awaited = self.sent.get(link, []), self.awaited.get(link, [])
        done = []
        while sent and awaited:
            number, message, content = sent.pop(0)
            expected, receive = awaited.pop(0)
            if (number, message.cells) != (expected, receive.cells):
                raise ProgramError(
                    f"rank {source} sends cells {message.cells} of the sum of "
                    f"{self.sums[number].name}, but rank {target} expects cells "
                    f"{receive.cells} of the sum of {self.sums[expected].name}"
                )
            held = self.held[number][self.sums[number].ranks.index(target)]
            cells = list(receive.cells)
            kind = self.turns[target][self.place[target]].round.kind
            added = held[cells] + content
            held[cells] = content if kind is RoundKind.COPY else added
            self.moved += 1
            for rank in link:
                self.unfinished[rank] -= 1
                if not self.unfinished[rank]:
                    done.append(rank)
        return done
