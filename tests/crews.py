"""Crews of threads for tests: ranks that die at any message, and how the others go on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from penstock.crew.decision import Decision, Report, Situation, decide
from penstock.crew.member import report_of
from penstock.errors import PeerLostError
from penstock.runtime import ThreadComm, run_threads
from penstock.train.checkpoints.checkpoint import good_step
from penstock.train.history import last_step
from penstock.train.job import Job
from penstock.train.loop import Trainer
from penstock.train.rank_weights import CrewChange


class Killed(Exception):
    """The end of a rank."""


class MortalComm(ThreadComm):
    """A connection that counts what it does, and ends its rank at a given count."""

    def __init__(self, comm: ThreadComm, end: int | None = None) -> None:
        super().__init__(comm.hub, comm.rank)
        self.end = end
        self.count = 0

    def live(self) -> None:
        self.count += 1
        if self.count == self.end:
            raise Killed(f"rank {self.rank} at {self.count}")

    def send(self, *words: Any) -> Any:
        self.live()
        return super().send(*words)

    def receive(self, *words: Any) -> Any:
        self.live()
        return super().receive(*words)

    def add(self, *words: Any) -> Any:
        self.live()
        return super().add(*words)

    def barrier(self) -> None:
        self.live()
        super().barrier()


class Standstill:
    """Knows which ranks can go on, so that one can die when the others have come as far as they can without it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: Counter[tuple[int, int]] = Counter()  # by source and target
        self.joined: Counter[tuple[Any, int]] = Counter()  # of a sum or a barrier
        self.waiting: dict[int, Callable[[], bool]] = {}  # whether a rank can go on

    def wait(
        self, rank: int, can_go_on: Callable[[], bool], wait: Callable[[], Any]
    ) -> Any:
        """Let a rank wait for something."""
        with self.changed:
            self.waiting[rank] = can_go_on
            self.changed.notify_all()
        result = wait()
        with self.changed:
            del self.waiting[rank]
        return result

    def wait_for_others(self, rank: int, ranks: int) -> None:
        """Wait until no other rank can go on."""
        others = [n for n in range(ranks) if n != rank]

        def stand_still() -> bool:
            waiting = [self.waiting.get(n) for n in others]
            return all(one is not None and not one() for one in waiting)

        with self.changed:
            self.changed.wait_for(stand_still)


class LastComm(MortalComm):
    """A mortal connection whose rank dies last: before that, the others come as far as they can.

    What it counts are the points between which something reaches another rank or this one: before each message,
    sum and barrier, and after each that comes.
    """

    def __init__(
        self, comm: ThreadComm, others: Standstill, end: int | None = None
    ) -> None:
        super().__init__(comm, end)
        self.others = others
        self.over = False  # whether the handover is, so that nothing counts any more

    def live(self) -> None:
        if self.over:
            return
        if self.count + 1 == self.end:
            self.others.wait_for_others(self.rank, self.ranks)
        super().live()

    def wait(self, can_go_on: Callable[[], bool], wait: Callable[[], Any]) -> Any:
        result = self.others.wait(self.rank, can_go_on, wait)
        self.live()
        return result

    def send(self, tensor: Any, target: int) -> Any:
        self.live()
        with self.others.changed:
            self.others.sent[self.rank, target] += 1
        return ThreadComm.send(self, tensor, target)

    def receive(self, shape: Any, dtype: Any, source: int) -> Any:
        arriving = super().receive(shape, dtype, source)
        number = self.started[self.connection, source, self.rank]
        flow = (source, self.rank)
        return SimpleNamespace(
            wait=lambda into=None: self.wait(
                lambda: self.others.sent[flow] >= number, arriving.wait
            )
        )

    def add(self, tensor: Any, group: Any) -> Any:
        self.live()
        place = (group, self.started[group])
        with self.others.changed:
            self.others.joined[place] += 1
        pending = ThreadComm.add(self, tensor, group)
        return SimpleNamespace(
            wait=lambda: self.wait(
                lambda: self.others.joined[place] == len(group), pending.wait
            )
        )

    def barrier(self) -> None:
        self.live()
        self.barriers = getattr(self, "barriers", 0) + 1
        place = ("barrier", self.barriers)
        with self.others.changed:
            self.others.joined[place] += 1
        self.wait(
            lambda: self.others.joined[place] == self.ranks,
            lambda: ThreadComm.barrier(self),
        )


def let_die_in_handover(
    crew: Crew, decision: Decision
) -> Iterator[tuple[int, LastComm]]:
    """Kill each rank at each point of the handover that begins a generation; yield the dead worker and its connection.

    The crew is then as the kill has left it. It is the same before each.
    """
    trainers, reports = crew.trainers, crew.reports

    def run(victim: int = -1, end: int | None = None) -> dict[int, LastComm]:
        crew.trainers, crew.reports = dict(trainers), dict(reports)
        comms: dict[int, LastComm] = {}
        others = Standstill()

        def connect(comm: ThreadComm) -> LastComm:
            dies = comm.rank == victim
            comms[comm.rank] = LastComm(comm, others, end if dies else None)
            return comms[comm.rank]

        def end_of_handover(trainer: Trainer) -> None:
            begin = trainer.begin

            def begin_and_stop() -> None:
                begin()
                comms[trainer.comm.rank].over = True
                if victim < 0:  # Nobody changes the weights.
                    raise PeerLostError("the handover is over")

            trainer.begin = begin_and_stop

        crew.run(decision, connect, end_of_handover)
        return comms

    counted = run()
    for victim, counting in sorted(counted.items()):
        for end in range(1, counting.count + 1):
            comms = run(victim, end)
            worker = decision.members[victim]
            assert worker not in crew.reports
            assert set(crew.reports) == set(decision.members) - {worker}
            yield worker, comms[victim]


Connect = Callable[[ThreadComm], ThreadComm]


class Crew:
    """The workers of a run as threads; each keeps its trainer from generation to generation."""

    def __init__(self, job: Job, mirror: bool = True) -> None:
        self.job = job
        self.mirror = mirror
        self.trainers: dict[int, Trainer] = {}
        self.reports = {n: Report(n) for n in range(job.plan.schedule.ranks)}
        self.generation = 0
        self.seats: dict[int, int] = {}  # of the generation before
        self.moving = False  # whether workers may change their seats
        self.change_at = 0  # the step after which all leave, because somebody has come

    def decide(self) -> Decision:
        self.generation += 1
        decision = decide(
            Situation(
                self.job.plan,
                self.reports,
                self.generation,
                self.job.resume,
                self.mirror,
                lambda: good_step(self.job.checkpoints),
                written=lambda: last_step(self.job.folder),
                seats=self.seats,
                moving=self.moving,
            )
        )
        self.seats = decision.seat_of
        return decision

    def run(
        self,
        decision: Decision,
        connect: Connect = lambda comm: comm,
        prepare: Callable[[Trainer], None] = lambda trainer: None,
    ) -> None:
        """Train in one generation, to the end of the run or until a rank is killed.

        `prepare` may change the trainer of each rank before it runs.
        """
        trainers: dict[int, Trainer] = {}
        lock = threading.Lock()
        self.reports = {}

        def work(comm: ThreadComm) -> None:
            worker = decision.members[comm.rank]
            trainer = self.trainers.get(worker) if decision.keep else None
            if trainer is not None and trainer.step < decision.step:
                assert decision.figures is not None
                trainer.commit(decision.figures)
            job = replace(
                self.job,
                plan=decision.plan,
                resume=decision.resume,
                fresh=True,
                whole=decision.whole,
                mirrors=decision.mirrors,
            )
            handover = decision.handover
            new = Trainer(job, connect(comm), before=trainer, handover=handover)
            new.changing = lambda: new.step + 1 == self.change_at
            prepare(new)
            with suppress(PeerLostError, CrewChange):
                new.run()
            trainer = new if new.begun else trainer
            report = report_of(worker, trainer)
            if trainer is not None:
                trainer.saver.abandon()
            with lock:
                if trainer is not None:
                    trainers[worker] = trainer
                self.reports[worker] = report

        with suppress(Killed):
            run_threads(len(decision.members), work, patience=300)
        self.trainers = trainers
