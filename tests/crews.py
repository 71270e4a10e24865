"""Crews of threads for tests: ranks that die at any message, and how the others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.errors import PeerLostError
from penstock.runtime import ThreadComm, run_threads
from penstock.train.checkpoint import good_step
from penstock.train.crew.handover import CrewChange
from penstock.train.crew.notes import Decision, Report
from penstock.train.crew.succession import decide
from penstock.train.history import last_step
from penstock.train.job import Job
from penstock.train.loop import Trainer


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


Connect = Callable[[ThreadComm], ThreadComm]


class Crew:
    """The workers of a run as threads; each keeps its trainer from generation to generation."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.trainers: dict[int, Trainer] = {}
        self.reports = {n: Report(n) for n in range(job.plan.schedule.ranks)}
        self.generation = 0
        self.seats: dict[int, int] = {}  # of the generation before
        self.moving = False  # whether workers may change their seats
        self.change_at = 0  # the step after which all leave, because somebody has come

    def decide(self) -> Decision:
        self.generation += 1
        decision = decide(
            self.job.plan,
            self.reports,
            self.generation,
            self.job.resume,
            self.job.config.run.mirror != "false",
            lambda: good_step(self.job.checkpoints),
            written=lambda: last_step(self.job.folder),
            seats=self.seats,
            moving=self.moving,
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
            if trainer is None:
                self.reports[worker] = Report(worker)
                return
            report = Report(
                worker,
                trainer.step,
                trainer.figures,
                trainer.saver.step is not None,
                tuple(sorted(trainer.parts)),
                seen=trainer.seen,
                closed=trainer.closed,
                mirrors=tuple(sorted(trainer.mirrors.kept)),
            )
            trainer.saver.abandon()
            with lock:
                trainers[worker] = trainer
                self.reports[worker] = report

        with suppress(Killed):
            run_threads(len(decision.members), work, patience=300)
        self.trainers = trainers
