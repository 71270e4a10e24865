"""A machine on which messages wait in queues, as they do over NCCL.

A rank starts its messages and goes on; an action waits only for its own inputs. A message waits
for those before it in the queues of its source and its target:

    queue of rank 0   0F0>1  0F1>1              0F0>1 is first in both queues, so it goes
    queue of rank 1   0F0>1  1B0>0  0F1>1       0F1>1 then waits for 1B0>0

Each rank has one queue, or separate ones for messages to higher and to lower ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import chain
from typing import TypeAlias

from penstock import Schedule, needs
from penstock.ir.action import Action
from penstock.ir.program import Program, Receive, RunAction, Send, Transfer

Queue: TypeAlias = tuple[int, bool]  # a rank, and whether its messages go up


class QueueMachine:
    """Runs a program as far as it can."""

    def __init__(self, program: Program, separate: bool) -> None:
        self.program = program
        self.separate = separate
        self.inputs = inputs_of(program.schedule)
        self.next = [0] * len(program.lanes)  # the next instruction of each rank
        self.results: list[set[Action]] = [set() for _ in program.lanes]  # on each rank
        self.queues: defaultdict[Queue, deque[Transfer]] = defaultdict(deque)

    def run(self) -> None:
        """Go on until no rank and no message can."""
        moves = True
        while moves:
            moves = self.deliver()
            for rank in range(len(self.next)):
                moves |= self.run_lane(rank)

    def run_lane(self, rank: int) -> bool:
        """Run the lane of a rank up to an action whose inputs are missing."""
        lane = self.program.lanes[rank]
        before = self.next[rank]
        while self.next[rank] < len(lane):
            instruction = lane[self.next[rank]]
            action = instruction.action
            if isinstance(instruction, RunAction):
                if not self.results[rank].issuperset(self.inputs[action]):
                    break
                self.results[rank].add(action)
            elif isinstance(instruction, Send):
                self.enqueue(rank, Transfer(action, rank, instruction.peer))
            elif isinstance(instruction, Receive):
                self.enqueue(rank, Transfer(action, instruction.peer, rank))
            self.next[rank] += 1
        return self.next[rank] > before

    def enqueue(self, rank: int, transfer: Transfer) -> None:
        goes_up = self.separate and transfer.source < transfer.target
        self.queues[rank, goes_up].append(transfer)

    def deliver(self) -> bool:
        """Deliver the messages that are first in the queues of both ends."""
        delivered = False
        for (rank, goes_up), queue in list(self.queues.items()):
            while queue and queue[0].source == rank:
                transfer = queue[0]
                other = self.queues[transfer.target, goes_up]
                if not other or other[0] != transfer:
                    break
                queue.popleft()
                other.popleft()
                self.results[transfer.target].add(transfer.action)
                delivered = True
        return delivered


def inputs_of(schedule: Schedule) -> dict[Action, tuple[Action, ...]]:
    """Return what each action needs."""
    actions = chain.from_iterable(schedule.lanes)
    return {action: needs(schedule, action) for action in actions}


def never_run(program: Program, separate: bool = False) -> list[Action]:
    """Return the actions that wait for a message in vain; none, if `verify` accepts the program."""
    machine = QueueMachine(program, separate)
    machine.run()
    waiting = []
    for rank, lane in enumerate(program.lanes):
        rest = lane[machine.next[rank] :]
        waiting += [each.action for each in rest if isinstance(each, RunAction)]
    return waiting
