"""The launcher's side of a crew: starts the workers, sees who is lost, and decides how the others go on.

    start ──► generation 1 ──► trains ──► finished
                   ▲             │ a worker ends, is silent, or reports a lost connection
                   │             ▼
              decide ◄── all others have reported, and the lost ones are certainly dead

The launcher keeps the store at which workers meet, so no worker is special: rank 0 may be lost like
any other. A worker that shows no life is killed before the others go on without it, so that it cannot
come back and disturb them. A worker from another machine (`penstock.crew.admission`) takes the place of a
rank without a worker; its connection is cut instead, which ends it too.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

from penstock.config import Config
from penstock.crew.admission import Admission, RemoteWorker
from penstock.crew.decision import (
    Decision,
    NoteKind,
    Report,
    Situation,
    decide,
    has_note,
    load_report,
    note_key,
    read_note,
    write_note,
)
from penstock.crew.files import RunFiles
from penstock.crew.member import key_of
from penstock.crew.pace import PaceWatch
from penstock.crew.tls import keep_key
from penstock.errors import RunError
from penstock.ir.plan import Plan
from penstock.runtime.process.launch import (
    KILLED,
    LOCALHOST,
    WorkerProcess,
    keep_store,
    serve_forks,
)
from penstock.runtime.process.watchdog import Failure, announce
from penstock.torch_internals import PrefixStore, Store
from penstock.train.checkpoints.checkpoint import CHECKPOINTS_FOLDER, good_step
from penstock.train.elastic import (
    holders_of,
    plan_without,
    rank_work,
    shares_a_part,
    speed_limit,
    step_length,
)
from penstock.train.history import Event, EventLog, SayLine, last_step
from penstock.train.job import Verdict
from penstock.train.launch import (
    LOADED_MODULES,
    STOP_FILE,
    forget_previous_end,
    lost_server,
    raise_worst,
    read_failure,
    saved_step,
    set_launch_environment,
    stopping,
    tidying,
    way_on,
)

# Between two looks at the workers: while workers wait for a decision or a place, and while all
# train. A worker that ends is noticed at once, and looking often would take time from those
# that train on this machine.
LOOK_SECONDS = 0.05
CALM_LOOK_SECONDS = 0.25
SILENT_SHARE = 1 / 20  # of run.timeout: 15 s of 300 without a heartbeat
BEATS_LOOK_SECONDS = 0.8  # between two looks at the workers' signs of life
# The longest time between two looks that counts as silence of a worker: if this machine was
# asleep, all workers were silent.
MAX_LOOK_SECONDS = 1.0
# A worker that the system has stopped (SIGSTOP) for this long in one go is lost.
MAX_STOPPED_SECONDS = 1.0
# How long workers may take to report after a loss, if run.timeout is longer.
MAX_REPORT_SECONDS = 60.0
# When the launcher loads what makes plans, so that nobody waits for that after the first loss.
# Workers that start need the cores more, and short runs hardly lose a worker.
SECONDS_TO_LOAD_PLANNER = 5.0
SECONDS_TO_FINISH = 12.0  # for the other workers, once one has finished
# What a worker has written that the next one with its number must not find.
FORGOTTEN: tuple[NoteKind, ...] = ("alive", "arrival", "place")
MemberEntry = Callable[[int, int, str, int, str, bool, bool], Verdict]
OpenAdmission = Callable[[Store], Admission]  # lets workers from other machines in


@dataclass(slots=True)
class Worker:
    """A worker as the launcher sees it."""

    number: int
    process: WorkerProcess | RemoteWorker
    newcomer: bool = False  # whether it has come during the run and has no place yet
    beats: int = 0
    silent: float = 0.0  # seconds since its last sign of life
    stop: int | None = None  # the stop in which the last look has found it
    stopped: float = 0.0  # seconds that looks have found it in this stop

    @property
    def is_remote(self) -> bool:
        """Whether it runs on another machine."""
        return isinstance(self.process, RemoteWorker)

    def kill(self) -> None:
        """End the process for certain; of one on another machine, its connection."""
        self.process.kill()
        self.process.close()


class Coordinator:
    """Keeps the workers of a run together until it is over."""

    def __init__(
        self,
        entry: MemberEntry,
        folder: Path,
        plan: Plan,
        config: Config,
        resume: bool,
        say: SayLine,
        open_admission: OpenAdmission | None = None,
    ) -> None:
        self.entry = entry
        self.folder = folder
        self.plan = plan
        self.settings = settings = config.elastic
        self.timeout = config.run.timeout
        self.silence = self.timeout * SILENT_SHARE
        self.resume = resume
        self.say = say
        self.store = keep_store()
        write_note(self.store, secrets.token_hex(8), "launch")
        self.admission = (
            open_admission(self.store) if open_admission is not None else None
        )
        ranks = plan.schedule.ranks
        # The number of workers that this machine may have at a time.
        self.own_workers = min(settings.workers or ranks, ranks)
        self.workers: dict[int, Worker] = {}
        self.generation = 0
        self.decision: Decision | None = None  # of this generation
        self.reports: dict[int, Report] = {}  # at its end
        self.losses: list[str] = []  # during this generation
        self.vacant: list[int] = []  # workers that were lost and not replaced
        self.replaced = 0  # how often a worker was replaced
        # Generations in a row that ended without a loss and without a step.
        self.retries = 0
        self.broken_at: float | None = None  # when this generation ended
        self.announced = False  # whether its workers were told why
        self.broken_before = 0.0  # when the last step of the generation before was done
        self.done_at: dict[int, float] = {}  # when each worker has done its last step
        self.last_look = time.monotonic()
        self.unheard = 0.0  # seconds since the last look at signs of life
        self.watch = PaceWatch(settings.slow)
        self.windows = 0  # whose times were heard in this generation
        self.changed_paces: list[str] = []  # during this generation
        self.events = EventLog(folder, resume)
        # An event whose generation does not train yet.
        self.pending: Event | None = None

    # ------------------------------------------------------------ the life of a run
    def run(self) -> Verdict:
        """Start the workers, and return how the run ended."""
        loader = threading.Timer(SECONDS_TO_LOAD_PLANNER, self.load_planner)
        loader.daemon = True
        try:
            # Generation 0 only starts the workers that this machine is to have.
            for number in range(self.own_workers):
                self.workers[number] = self.start_worker(number, newcomer=False)
            self.broken_at = time.monotonic()
            loader.start()
            while True:
                verdict = self.look()
                if verdict is not None:
                    self.finish()
                    return verdict
        finally:
            loader.cancel()
            for worker in self.workers.values():
                worker.kill()
            if self.admission is not None:
                self.admission.close()

    def load_planner(self) -> None:
        """Make a plan that nobody needs: the first one loads compiled loops, which takes a second."""
        plan_without(self.plan, (self.plan.schedule.ranks - 1,), {})

    def start_worker(self, number: int, newcomer: bool) -> Worker:
        """Start one worker."""
        words = (
            number,
            self.plan.schedule.ranks,
            LOCALHOST,
            self.store.port,
            str(self.folder),
            self.resume,
            newcomer,
        )
        name = f"worker {number}"
        process = WorkerProcess(number, name, self.entry, words, ends_at_once=True)
        return Worker(number, process, newcomer)

    def look(self) -> Verdict | None:
        """Look once at all workers, and do what is due; return a verdict at the end of the run."""
        numbers = {one.process.pipe: one.number for one in self.workers.values()}
        for pipe in wait(list(numbers), timeout=self.look_seconds):
            verdict = self.hear(self.workers[numbers[pipe]])  # type: ignore[index]
            if verdict is not None:
                return verdict
        self.check_signs_of_life()
        self.read_reports()
        waiting = set(self.members) - set(self.reports)
        if self.broken_at is None:
            self.note_ready()
            self.place_remote_workers()
            self.replace_lost()
            self.hear_work()
            self.take_in()
        elif not waiting:
            self.begin_generation()
        elif time.monotonic() - self.broken_at > self.report_limit:
            for number in waiting:
                self.lose(self.workers[number], "did not stop after the loss")
        return None

    @property
    def look_seconds(self) -> float:
        """How long to wait for news before the next look."""
        changing = self.broken_at is not None or self.pending is not None
        if changing or any(worker.newcomer for worker in self.workers.values()):
            return LOOK_SECONDS
        return CALM_LOOK_SECONDS

    @property
    def members(self) -> list[int]:
        """The workers that belong to this generation."""
        workers = self.workers.values()
        return [worker.number for worker in workers if not worker.newcomer]

    @property
    def report_limit(self) -> float:
        """Seconds that workers may take to report; at the start they load text first."""
        if self.generation == 0:
            return float("inf")
        return min(self.timeout, MAX_REPORT_SECONDS)

    def finish(self) -> None:
        """Let the others finish, since one has."""
        self.write_event()
        write_note(self.store, "yes", "finished")
        end = time.monotonic() + SECONDS_TO_FINISH
        for worker in self.workers.values():
            worker.process.join(max(0.0, end - time.monotonic()))

    # ------------------------------------------------------------ losses
    def hear(self, worker: Worker) -> Verdict | None:
        """Hear the last words of a worker: its verdict, or the reason of its end."""
        outcome = worker.process.outcome()
        verdict: Verdict | None = outcome.result
        if outcome.error == KILLED:
            self.lose(worker, outcome.text)
        elif verdict is None:
            # The worker has printed the rest, which can be long: CUDA adds advice to its errors.
            story = f"failed: {outcome.error}: {outcome.text}"
            self.lose(worker, story.splitlines()[0])
        elif worker.is_remote and verdict.error:
            # What ends the run also ends the workers of this machine.
            self.lose(worker, f"failed: {verdict.text.splitlines()[0]}")
        else:
            return verdict
        return None

    def check_signs_of_life(self) -> None:
        """Lose the workers that have been silent for too long."""
        now = time.monotonic()
        passed = min(now - self.last_look, MAX_LOOK_SECONDS)
        self.last_look = now
        for worker in list(self.workers.values()):
            stop = find_stop(worker.process.pid)
            lasts = stop is not None and stop == worker.stop
            worker.stopped = worker.stopped + passed if lasts else 0.0
            worker.stop = stop
            if worker.stopped > MAX_STOPPED_SECONDS:
                self.lose(worker, "was stopped (SIGSTOP), so it was ended")
        self.unheard += passed
        # A question to the store takes time from the workers, and silence is long.
        if self.unheard >= min(BEATS_LOOK_SECONDS, self.silence / 4):
            self.hear_beats(self.unheard)
            self.unheard = 0.0

    def hear_beats(self, passed: float) -> None:
        """Count the seconds since the last sign of life of each worker."""
        for worker in list(self.workers.values()):
            beats = self.store.add(note_key("alive", worker.number), 0)
            worker.silent = 0.0 if beats != worker.beats else worker.silent + passed
            worker.beats = beats
            if beats and worker.silent > self.silence:
                limit = f"{self.silence:g} s"
                self.lose(worker, f"has shown no life for {limit} and was ended")

    def lose(self, worker: Worker, event: str) -> None:
        """Go on without a worker, or raise an error if the run cannot."""
        worker.kill()
        del self.workers[worker.number]
        self.reports.pop(worker.number, None)
        failure = read_failure(self.folder)
        if failure is not None:
            raise RunError(failure.text)
        story = f"worker {worker.number} {event}"
        self.vacant.append(worker.number)
        if worker.newcomer:
            self.say(f"{story} before it had begun")
            return
        self.losses.append(story)
        self.watch.forget(worker.number)
        if not any(not self.workers[number].is_remote for number in self.members):
            left = "no worker is left"
            if self.members:
                left += " on this machine, which keeps the files of the run"
            raise RunError(f"{story}, and {left}")
        self.break_generation(story)

    def has(self, kind: NoteKind, *numbers: int) -> bool:
        """Whether a worker has written such an entry in this generation."""
        return has_note(self.store, kind, self.generation, *numbers)

    def break_generation(self, story: str) -> None:
        """Tell the workers of this generation that it is over."""
        if self.broken_at is None:
            self.broken_at = time.monotonic()
        # Without a story, all leave by themselves, because somebody has come. If one is lost
        # on the way out, the others must not wait for it.
        if not story or self.announced:
            return
        self.announced = True
        write_note(self.store, story, "broken", self.generation)
        meeting = PrefixStore(f"g{self.generation}", self.store)
        announce(meeting, Failure("PeerLostError", story))

    def read_reports(self) -> None:
        """Read what workers have reported. A report also ends a generation in which all live."""
        if self.broken_at is None and not self.has("left"):
            return
        for number in self.members:
            if number not in self.reports and self.has("report", number):
                text = read_note(self.store, "report", self.generation, number)
                report = load_report(text)
                self.reports[number] = report
                self.done_at[number] = time.monotonic() - report.idle
                self.break_generation(report.error)

    # ------------------------------------------------------------ newcomers
    def replace_lost(self) -> None:
        """Start new workers in place of lost ones, once the others train again."""
        if not self.vacant or self.pending is not None:
            return
        while self.vacant and self.can_replace:
            number = self.vacant.pop(0)
            self.replaced += 1
            self.forget(number)
            self.workers[number] = self.start_worker(number, newcomer=True)

    @property
    def can_replace(self) -> bool:
        """Whether this machine may start one more worker in place of a lost one."""
        own = sum(not worker.is_remote for worker in self.workers.values())
        return own < self.own_workers and self.replaced < self.settings.restarts

    def place_remote_workers(self) -> None:
        """Give workers from other machines the ranks that have no worker."""
        if self.admission is None or self.pending is not None:
            return
        ranks = self.plan.schedule.ranks
        for remote in self.admission.waiting():
            places = [n for n in range(ranks) if n not in self.workers]
            if not places:
                if not remote.told:
                    remote.told = True
                    self.say(
                        f"{remote.name} waits as a spare, and takes the place of the next "
                        "worker that is lost"
                    )
                continue
            number = places[0]
            if number in self.vacant:
                self.vacant.remove(number)
            self.forget(number)
            self.workers[number] = Worker(number, remote, newcomer=True)
            remote.give_place(worker=number, workers=ranks, resume=self.resume)

    def forget(self, number: int) -> None:
        """Forget what the last worker with this number has written."""
        for kind in FORGOTTEN:
            self.store.delete_key(note_key(kind, number))

    def arrivals(self) -> list[int]:
        """The newcomers that wait for a place."""
        newcomers = [worker for worker in self.workers.values() if worker.newcomer]
        return [
            worker.number
            for worker in newcomers
            if has_note(self.store, "arrival", worker.number)
        ]

    def take_in(self) -> None:
        """Let the generation end after its step if somebody waits for a place."""
        waits = self.arrivals() or self.changed_paces
        if waits and not self.has("change"):
            write_note(self.store, "yes", "change", self.generation)

    # ------------------------------------------------------------ slow workers
    def hear_work(self) -> None:
        """Hear how long the workers have worked in a window of steps, and who is slow."""
        decision = self.decision
        if not self.settings.slow or decision is None:
            return
        if not self.has("worked", self.windows):
            return
        key = note_key("worked", self.generation, self.windows)
        seconds = json.loads(self.store.get(key))
        self.store.delete_key(key)
        self.windows += 1
        if self.changed_paces:
            return  # All are about to leave this generation.
        members = decision.members
        changes = self.watch.hear(
            dict(zip(members, seconds, strict=True)),
            dict(zip(members, rank_work(decision.plan), strict=True)),
        )
        for worker, story in changes.items():
            if shares_a_part(decision.plan.schedule, members.index(worker)):
                self.changed_paces.append(story)
            else:
                self.say(f"{story}; nobody else has its part, so it keeps its work")

    # ------------------------------------------------------------ going on
    def begin_generation(self) -> None:
        """Decide how the workers go on, and tell them."""
        before = self.decision
        arrived = self.arrivals()
        for number in arrived:
            self.reports[number] = load_report(read_note(self.store, "arrival", number))
        situation = Situation(
            self.plan,
            self.reports,
            self.generation + 1,
            self.resume,
            mirror=True,
            saved=lambda: good_step(self.folder / CHECKPOINTS_FOLDER),
            paces=self.watch.paces,
            written=lambda: last_step(self.folder),
            seats=before.seat_of if before is not None else {},
            moving=before is not None and not self.expects_workers(arrived),
        )
        decision = decide(situation)
        # The first rank whose worker is on this machine, where the files of the run are.
        own = [not self.workers[number].is_remote for number in decision.members]
        decision = replace(decision, leader=own.index(True))
        if before is not None:
            self.note_change(before, decision, arrived)
        self.generation = decision.generation
        self.decision = decision
        self.reports = {}
        self.losses = []
        self.changed_paces = []
        self.windows = 0
        write_note(self.store, decision.dump(), "decision", decision.generation)
        for number in arrived:
            self.workers[number].newcomer = False
            write_note(self.store, str(decision.generation), "place", number)
        assert self.broken_at is not None
        # Long before a loss is noticed, it may have stopped the steps.
        self.broken_before = min([self.broken_at, *self.done_at.values()])
        self.done_at = {}
        self.broken_at = None
        self.announced = False

    def expects_workers(self, arrived: list[int]) -> bool:
        """Whether workers for empty seats are about to come, so that nobody should move there."""
        if self.can_replace or (
            self.admission is not None and self.admission.waiting()
        ):
            return True
        newcomers = [worker for worker in self.workers.values() if worker.newcomer]
        return any(one.number not in arrived for one in newcomers)

    def note_change(
        self, before: Decision, decision: Decision, arrived: list[int]
    ) -> None:
        """Tell the user why a generation ended; give up if retrying does not help."""
        self.write_event()  # of a generation that ended before it trained
        joined = []
        for number in arrived:
            process = self.workers[number].process
            place = f" on {process.name}" if isinstance(process, RemoteWorker) else ""
            joined.append(f"worker {number}{place} has joined")
        told = {"lost": self.losses, "joined": joined, "pace": self.changed_paces}
        kind = next((kind for kind, lines in told.items() if lines), "retry")
        stories = [*self.losses, *joined, *self.changed_paces]
        if stories:
            self.retries = 0
        else:
            stories.append(self.reason_to_retry(before, decision))
        text = " and ".join(stories)
        workers = len(decision.members)
        step, back = decision.step, 0
        if decision.keep:
            text += describe_takeovers(before, decision)
            text += self.describe_moves(before, decision)
            self.say(f"{text}; {workers} workers go on after step {step}")
        else:
            step = saved_step(self.folder) if decision.resume else 0
            done = max(report.step for report in self.reports.values())
            back = max(done, last_step(self.folder), step) - step
            self.say(
                f"{text}; it alone had its part, so {workers} workers go back to step {step}"
            )
        self.pending = Event(step, kind, 0.0, text, decision.members, back=back)

    def describe_moves(self, before: Decision, decision: Decision) -> str:
        """Say which workers change their seats; how fast they were there says nothing any more."""
        sentences = []
        for worker, seat in decision.seat_of.items():
            if before.seat_of.get(worker, seat) != seat:
                self.watch.forget(worker)
                parts = {s.part for s in self.plan.schedule.stages if s.rank == seat}
                listed = " and ".join(map(str, sorted(parts)))
                sentences.append(f"; worker {worker} moves to part {listed}")
        return "".join(sentences)

    def reason_to_retry(self, before: Decision, decision: Decision) -> str:
        """Why a generation ended in which all live; raise an error after too many of them."""
        self.retries = self.retries + 1 if decision.step == before.step else 1
        reasons = {report.error for report in self.reports.values() if report.error}
        reason = min(reasons, key=len, default="the connections broke")
        if self.retries > self.settings.restarts:
            raise RunError(
                f"{reason}\n\nthe workers connected again {self.settings.restarts} times, "
                "which did not help"
            )
        return reason.splitlines()[0]

    def note_ready(self) -> None:
        """Write down an event once its generation trains again."""
        if self.pending is not None and self.has("ready"):
            self.write_event()

    def write_event(self) -> None:
        """Write down the last event, if it is not written yet."""
        if self.pending is not None:
            seconds = round(time.monotonic() - self.broken_before, 3)
            speed, limit = self.speeds()
            event = replace(
                self.pending,
                seconds=seconds,
                speed=round(speed, 3),
                limit=round(limit, 3),
            )
            self.events.put(event)
            self.pending = None

    def speeds(self) -> tuple[float, float]:
        """The speed of this generation by its plan, compared with the plan for all workers, and its limit."""
        decision = self.decision
        assert decision is not None
        paces = [self.watch.paces.get(worker, 1.0) for worker in decision.members]
        speed = step_length(self.plan) / step_length(decision.plan, paces)
        slow = {
            seat: pace
            for seat, pace in zip(decision.seats, paces, strict=True)
            if pace != 1.0
        }
        return speed, speed_limit(self.plan, decision.seats, slow)


def describe_takeovers(before: Decision, decision: Decision) -> str:
    """Say which workers go on with parts that were lost with their only holder."""
    sentences = []
    for part, holder, _ in before.mirrors:
        if before.members[holder] not in decision.members:
            worker = decision.members[min(holders_of(decision.plan.schedule)[part])]
            sentences.append(f"worker {worker} has part {part} from its mirror")
    for rank, part in decision.restores:
        worker = decision.members[rank]
        sentences.append(f"worker {worker} has part {part} from the checkpoint")
    return "".join(f"; {sentence}" for sentence in sentences)


def find_stop(pid: int | None) -> int | None:
    """Return a number for the stop (SIGSTOP) in which a process is, or None; known only on Linux.

    It is how often the process has left a processor, so it is another number if the process has
    run in between, however shortly. Two looks that find the same number have seen the same stop.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if not fields["State"].strip().startswith("T"):
        return None
    return sum(int(fields[name]) for name in fields if name.endswith("_switches"))


def launch_crew(
    entry: MemberEntry,
    folder: Path,
    plan: Plan,
    config: Config,
    resume: bool,
    version: str,
    say: SayLine = lambda line: None,
    say_event: SayLine = lambda line: None,
) -> Verdict:
    """Run `entry` in a process for each rank of a plan, and go on without those that are lost.

    `say` tells the user that the run stops, `say_event` that workers were lost or can join.
    Workers of other machines must run the same `version` of Penstock.
    """
    forget_previous_end(folder)
    set_launch_environment()
    serve_forks([entry.__module__, *LOADED_MODULES])

    def open_admission(store: Store) -> Admission:
        key = key_of(folder)
        keep_key(key)
        files = RunFiles(folder, config)
        ranks = plan.schedule.ranks
        listen = config.elastic.listen
        admission = Admission(listen, key, store, files, version, say_event, ranks)
        host, _, _ = config.elastic.listen.rpartition(":")
        say_event(f"others can join: penstock join {host}:{admission.port} --key {key}")
        return admission

    coordinator = Coordinator(
        entry,
        folder,
        plan,
        config,
        resume,
        say_event,
        open_admission if config.elastic.listen else None,
    )
    with tidying(folder), stopping(folder / STOP_FILE, say):
        try:
            verdict = coordinator.run()
        except (EOFError, ConnectionError):
            raise lost_server(folder) from None
        except RunError as error:
            raise RunError(f"{error}\n  {way_on(folder)}") from None
    return raise_worst([verdict])
