"""Where a worker of a crew runs, and what it has there: its folder, its connections, its checkpoints."""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from penstock.crew.decision import (
    Decision,
    NoteKind,
    Report,
    has_note,
    load_decision,
    note_key,
    read_note,
    write_note,
)
from penstock.crew.links import MOST_EARLY_BYTES, Exchange, GlooComm, WireComm
from penstock.crew.pace import WorkWindow
from penstock.crew.store import RemoteStore
from penstock.crew.tls import KEY_FILE, write_address
from penstock.errors import PeerLostError, PenstockError, StuckError
from penstock.formats.config_toml import CONFIG_FILE, read_config
from penstock.models.family import count_parameters
from penstock.runtime.process.launch import end_with_parent, hear_signals
from penstock.torch_internals import (
    MODULE_OF_OPTIMIZERS,
    PrefixStore,
    Store,
    TCPStore,
)
from penstock.train.checkpoints.checkpoint import RemoteFiles
from penstock.train.elastic import split_address
from penstock.train.history import Screen, WatchRow, log_to
from penstock.train.job import Job, Verdict, job_of
from penstock.train.launch import (
    STOP_FILE,
    listen,
    note_crash,
    saved_step,
    write_failure,
    write_pid,
)
from penstock.train.loop import Trainer
from penstock.train.lora import adapted_blueprint
from penstock.train.placement import launched_placement
from penstock.train.rank_weights import CrewChange


@dataclass(frozen=True, slots=True)
class Site:
    """The surroundings of one worker."""

    folder: Path
    exchange: Exchange | None = None  # encrypted connections; None if gloo connects
    remote_files: RemoteFiles | None = (
        None  # the launcher's files, if it does not see them
    )

    @property
    def is_elsewhere(self) -> bool:
        """Whether this worker runs on another machine than the launcher."""
        return self.remote_files is not None


def key_of(folder: Path) -> Path:
    """The file with the key of a run."""
    return folder / KEY_FILE


def own_site(folder: Path, worker: int, workers: int) -> Site:
    """The site of one of the workers of a run, on the launcher's machine."""
    config = read_config(folder / CONFIG_FILE)
    if not config.elastic.listen:
        return Site(folder)
    host, port = split_address(config.elastic.listen, "elastic.listen")
    own = port + 1 + worker if port else 0
    address = write_address(host, own)
    return Site(folder, Exchange(address, key_of(folder), workers))


BEAT_SECONDS = 0.5  # between two signs of life
POLL_SECONDS = 0.02  # between two looks for a decision
STORE_SECONDS = 60.0  # how long the launcher's store may take to answer
# What may come before a worker waits for it. These are limits, not estimates.
LEAST_EARLY_BYTES = 1 << 26
BYTES_PER_NUMBER = 8
NUMBERS_PER_PARAMETER = 6  # its value, its gradient, its state, and sums on their way
STATES_PER_TOKEN = 8  # vectors that cross a border, with those of the way back
Show = Callable[[], WatchRow]  # begins to show steps; called when this worker is rank 0


class Member:
    """One worker's side of the crew's store."""

    def __init__(self, worker: int, store: Store) -> None:
        self.worker = worker
        self.store = store
        self.generation = 0
        self.meeting: Store | None = None  # the connection of this generation
        threading.Thread(target=self.beat, name="beats", daemon=True).start()

    def beat(self) -> None:
        """Show again and again that this process lives, over a connection of its own."""
        # If the launcher is gone, others will notice that too.
        with suppress(dist.DistError):
            store = self.own_connection()
            while True:
                store.add(note_key("alive", self.worker), 1)
                time.sleep(BEAT_SECONDS)

    def own_connection(self) -> Store:
        """A second connection to the store, which no wait on the first one can block."""
        return self.store.clone()  # type: ignore[attr-defined,no-any-return]

    def report(self, report: Report) -> None:
        """Report at the end of a generation."""
        text = report.dump()
        write_note(self.store, text, "report", self.generation, self.worker)
        write_note(self.store, "yes", "left", self.generation)

    def arrive(self) -> Decision | None:
        """Come during the run, and wait for a place; return None if the run is over."""
        report = Report(self.worker, newcomer=True)
        write_note(self.store, report.dump(), "arrival", self.worker)
        place = self.wait_for("place", self.worker)
        if place is None:
            return None
        self.generation = int(place) - 1
        return self.next_decision()

    def next_decision(self) -> Decision | None:
        """Wait for the next decision; return None if the run is over."""
        text = self.wait_for("decision", self.generation + 1)
        if text is None:
            return None
        decision = load_decision(text)
        self.generation = decision.generation
        return decision

    def wait_for(self, kind: NoteKind, number: int) -> str | None:
        """Wait for something that the launcher writes down; return None if the run is over."""
        while not has_note(self.store, kind, number):
            if has_note(self.store, "finished"):
                return None
            time.sleep(POLL_SECONDS)
        return read_note(self.store, kind, number)

    def connect(
        self,
        decision: Decision,
        patience: float,
        exchange: Exchange | None = None,
        most_early: int = MOST_EARLY_BYTES,
    ) -> GlooComm:
        """Connect to the other workers of a generation, encrypted if there is an exchange."""
        is_broken = partial(has_note, self.store, "broken", decision.generation)
        name = f"g{decision.generation}"
        self.meeting = self.own_connection()
        meeting = PrefixStore(name, self.meeting)
        rank = decision.members.index(self.worker)
        ranks = len(decision.members)
        if exchange is None:
            return GlooComm(meeting, rank, ranks, patience, is_broken)
        launch = read_note(self.store, "launch")
        return WireComm(
            meeting,
            rank,
            ranks,
            patience,
            is_broken,
            exchange,
            f"{launch}/{name}",
            most_early,
        )

    def leave(self) -> None:
        """End the connections to the store that only this generation had."""
        if isinstance(self.meeting, RemoteStore):
            self.meeting.close()
        self.meeting = None

    def is_changing(self, decision: Decision) -> bool:
        """Whether all should leave a generation after their step."""
        return has_note(self.store, "change", decision.generation)


def local_store(host: str, port: int) -> Store:
    """Connect to the store of a launcher on this machine."""
    limit = timedelta(seconds=STORE_SECONDS)
    return TCPStore(host, port, is_master=False, timeout=limit)


def work_in_crew(
    member: Member, site: Site, resume: bool, newcomer: bool, show: Show
) -> Verdict:
    """Train as a worker of a crew, from its start or as a newcomer.

    Raises errors that only this worker has; returns the others.
    """
    if not site.is_elsewhere:  # There the command itself hears signals.
        hear_signals()
    threading.Thread(target=end_with_parent, daemon=True).start()
    folder = site.folder
    saved = saved_step(folder) if resume else 0
    generations = None
    try:
        generations = Generations(member, site, resume, show)
        return generations.run(newcomer)
    except PenstockError as error:
        write_failure(folder, error)
        return Verdict(error=type(error).__name__, text=str(error))
    except Exception as error:
        trainer = generations.trainer if generations is not None else None
        note_crash(folder, error, trainer is not None and trainer.step > saved)
        raise


class Generations:
    """The generations of one worker, one after the other."""

    def __init__(self, member: Member, site: Site, resume: bool, show: Show) -> None:
        self.member = member
        self.site = site
        self.show = show
        self.watch: WatchRow | None = None
        config = read_config(site.folder / CONFIG_FILE)
        torch.set_num_threads(launched_placement(config).threads)
        self.asked = threading.Event()
        if not site.is_elsewhere:  # Ctrl-C on another machine ends only its worker.
            listen(self.asked)
        write_pid(site.folder, member.worker)
        self.stop_file = site.folder / STOP_FILE
        job = job_of(site.folder, config, resume)
        self.job = replace(job, remote_files=site.remote_files)
        self.trainer: Trainer | None = None  # with the weights of the last step

    def run(self, newcomer: bool) -> Verdict:
        """Train in one generation after the other until the run is over."""
        # What has been loaded until now stays, so that the collection after each generation
        # looks only at what the generation has left. Otherwise it takes a sixth of a second.
        gc.freeze()
        if newcomer:
            self.load_libraries()
            decision = self.member.arrive()
        else:
            self.member.report(self.report())
            decision = self.member.next_decision()
        while decision is not None:
            try:
                return self.train_generation(decision)
            except (PeerLostError, StuckError) as error:
                text = str(error)
            except CrewChange:
                text = ""
            report = self.report(text)
            if self.trainer is not None:
                self.trainer.saver.abandon()
            gc.collect()  # The error's traceback held the tensors of the step in flight.
            self.member.report(report)
            decision = self.member.next_decision()
        step = self.trainer.step if self.trainer is not None else 0
        return Verdict(step)

    def load_libraries(self) -> None:
        """Load what a trainer needs before this worker gets a place, while nobody waits for it."""
        adapted_blueprint(self.job.sizes, self.job.config.lora)
        import_module(MODULE_OF_OPTIMIZERS)

    def report(self, error: str = "") -> Report:
        """What this worker has now."""
        return report_of(self.member.worker, self.trainer, error)

    def train_generation(self, decision: Decision) -> Verdict:
        """Train in one generation, from its decision to the end of the run."""
        before = self.trainer if decision.keep else None
        if before is not None and before.step < decision.step:
            assert decision.figures is not None
            before.commit(decision.figures)
        if not decision.keep:
            self.trainer = None  # Its weights are of no use any more.
        patience = self.job.config.run.timeout
        most = most_early_bytes(self.job)
        try:
            comm = self.member.connect(decision, patience, self.site.exchange, most)
            try:
                return self.train(decision, comm, before)
            finally:
                comm.abandon()
        finally:
            self.member.leave()

    def train(
        self, decision: Decision, comm: GlooComm, before: Trainer | None
    ) -> Verdict:
        """Train over a connection that exists."""
        leads = comm.rank == decision.leader
        store, generation = self.member.store, decision.generation
        if leads and self.watch is None:
            self.watch = self.show()
        job = self.job_for(decision)
        trainer = Trainer(job, comm, comm.device, self.watch, before, decision.handover)
        if leads:
            trainer.changing = lambda: self.member.is_changing(decision)
            if self.job.config.elastic.slow:
                windows = itertools.count()

                def tell(seconds: list[float]) -> None:
                    """How long each rank has worked in a window of steps."""
                    told = json.dumps(seconds)
                    write_note(store, told, "worked", generation, next(windows))

                trainer.tell_work = WorkWindow(tell).put

        def stop() -> bool:
            return self.asked.is_set() or (leads and self.stop_file.exists())

        def ready() -> None:
            if leads:
                write_note(store, "yes", "ready", generation)

        try:
            outcome = trainer.run(stop, ready)
            comm.barrier()
            return outcome
        finally:
            if trainer.begun:
                self.trainer = trainer

    def job_for(self, decision: Decision) -> Job:
        """The run with the plan of a generation."""
        again = decision.generation > 1
        return replace(
            self.job,
            plan=decision.plan,
            resume=decision.resume,
            fresh=again,
            whole=decision.whole,
            leader=decision.leader,
            mirrors=decision.mirrors,
        )


def report_of(worker: int, trainer: Trainer | None, error: str = "") -> Report:
    """Return the report of a worker, whose trainer may have been broken at any moment."""
    if trainer is None or not trainer.weights.known:
        return Report(worker, error=error)
    if trainer.saver.step is not None:
        trainer.save_again = True
    known = set(trainer.weights.known)
    parts = known.intersection(trainer.weights.parts)
    return Report(
        worker,
        trainer.step,
        trainer.figures,
        trainer.save_again,
        tuple(sorted(parts)),
        error,
        trainer.seen,
        trainer.closed,
        mirrors=tuple(sorted(known - parts)),
        idle=time.monotonic() - trainer.done_at,
    )


def most_early_bytes(job: Job) -> int:
    """Return how many bytes another worker can send before this one waits for them.

    A worker is ahead of another by less than a step or a handover. So it is at most all parts with
    gradients and optimizer state, and what crosses all borders between parts in a step. Numbers have
    at most eight bytes.
    """
    sizes, schedule = job.sizes, job.plan.schedule
    model = count_parameters(sizes).total * NUMBERS_PER_PARAMETER
    tokens = job.config.data.global_batch * job.config.data.seq_len
    states = tokens * sizes.width * schedule.parts * STATES_PER_TOKEN
    return LEAST_EARLY_BYTES + BYTES_PER_NUMBER * (model + states)


def set_environment(worker: int, workers: int, neighbours: int) -> None:
    """Describe this process as a launcher would, for all who ask how many there are.

    `neighbours` is the number of workers on this machine.
    """
    os.environ.update(
        RANK=str(worker),
        LOCAL_RANK=str(worker % neighbours),
        WORLD_SIZE=str(workers),
        LOCAL_WORLD_SIZE=str(neighbours),
    )


def run_member(
    worker: int,
    workers: int,
    host: str,
    port: int,
    folder: str,
    resume: bool,
    newcomer: bool,
) -> Verdict:
    """Train as a worker of a crew; whoever is rank 0 shows how it goes."""
    config = read_config(Path(folder) / CONFIG_FILE)
    set_environment(worker, workers, min(config.elastic.workers or workers, workers))
    console = Console(stderr=True)
    log_to(console, everything=False)
    with ExitStack() as screens:

        def show() -> WatchRow:
            log_to(console, everything=True)
            return screens.enter_context(
                Screen(config.run.steps, config.run.log_every, console)
            ).put

        member = Member(worker, local_store(host, port))
        site = own_site(Path(folder), worker, workers)
        return work_in_crew(member, site, resume, newcomer, show)
