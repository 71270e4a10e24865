"""Starts the workers of a run on this machine, restarts them from the last checkpoint when one dies, and is what they
run.

    launch ──► rank 0 ─ rank 1 ─ rank 2 ─ rank 3
                         ✗ killed              the others are ended
           ──► rank 0 ─ rank 1 ─ rank 2 ─ rank 3      each resumes; at most `restarts` times
    Ctrl-C ──► RUN/stop ──► all finish their step, save, leave
    a failure that would repeat ──► RUN/failure.json ──► no restart

To train on several machines, run `torchrun --nnodes … -m penstock train config.toml` on each. The
launcher here gives its workers the same variables.

A worker finds everything it needs in the folder of the run:

    RUN/config.toml    what to do          RUN/stop          asks all ranks to stop after this step
    RUN/plan.json      in which order      RUN/ranks/3.pid   the process id of rank 3

SIGINT and SIGTERM ask for the same as the file RUN/stop: the process finishes its step, all ranks save a checkpoint,
and all leave. The launcher imports this module in the process that it forks workers from. It imports nothing of the
command line, so workers start faster and hold less memory.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from errno import ENOSPC
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from penstock.config import Config, is_recording
from penstock.errors import (
    ConfigError,
    FileError,
    PeerLostError,
    PenstockError,
    ProofError,
    RunError,
    ShapeError,
    StuckError,
)
from penstock.formats.config_toml import CONFIG_FILE, read_config
from penstock.formats.text import put_in_place
from penstock.runtime import ProcessComm, finish, init
from penstock.runtime.process.launch import (
    ENDING_SIGNALS,
    KILLED,
    LOCALHOST,
    Meeting,
    WorkerOutcome,
    end_with_parent,
    hear_signals,
    run_workers,
    serve_forks,
    under_launcher,
)
from penstock.runtime.process.machine import own_gpu, use_threads
from penstock.torch_internals import (
    MODULE_OF_OPTIMIZERS,
    is_connection_error_text,
    is_memory_error_text,
)
from penstock.train.checkpoints.checkpoint import (
    CHECKPOINTS_FOLDER,
    newest,
    step_of,
    sweep,
)
from penstock.train.checkpoints.separate import SeparateFolders
from penstock.train.compiling import starting_patience
from penstock.train.history import (
    METRICS,
    ROOM,
    Event,
    EventLog,
    SayLine,
    Screen,
    WatchRow,
    last_step,
    log_to,
)
from penstock.train.job import Verdict, job_of
from penstock.train.loop import Trainer
from penstock.train.placement import Placement, check_gpu_exists, launched_placement

# Files in the folder of a run.
STOP_FILE = "stop"
PIDS_FOLDER = "ranks"
FAILURE_FILE = "failure.json"
FULL_FILE = "full"  # A rank ran out of memory once.
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"  # a variable that torchrun sets, too
_log = logging.getLogger(__name__)


def work(
    folder: Path,
    resume: bool,
    watch: WatchRow | None = None,
    separate: SeparateFolders | None = None,
) -> Verdict:
    """Train as the rank that the environment names.

    Raises errors that a restart may fix; returns the others.
    """
    hear_signals()
    again = restarted()
    if again:
        earlier = _earlier_verdict(folder)
        if earlier is not None:
            return earlier
    threading.Thread(target=end_with_parent, daemon=True).start()
    saved = saved_step(folder) if resume or again else 0
    done, ended = last_step(folder), _last_sign(folder)
    trainer: Trainer | None = None

    def ready() -> None:
        if again and trainer is not None and trainer.leads:
            _note_restart(folder, trainer, done, time.time() - ended)

    try:
        trainer, stop = _prepare(folder, resume or again, again, watch, separate)
        verdict = trainer.run(stop, ready)
    except (PeerLostError, StuckError):
        raise
    except PenstockError as error:
        write_failure(folder, error)
        if trainer is None:
            # Only this rank knows. The others wait for it, and read the failure when the
            # launcher starts all of them again.
            raise
        # Most often all ranks have the same error. This process waits until they have ended; if one of them crashes
        # instead, the launcher must be able to end this one.
        hear_signals()
        return Verdict(error=type(error).__name__, text=str(error))
    except Exception as error:
        started = trainer is not None and trainer.step > saved
        note_crash(folder, error, started)
        raise
    finish()
    return verdict


def restarted() -> bool:
    """Whether the launcher started this process to replace one that died."""
    return int(os.environ.get(RESTART_COUNT, "0")) > 0


def _last_sign(folder: Path) -> float:
    """When the last finished step was written down; now if none was."""
    with suppress(OSError):
        return (folder / METRICS).stat().st_mtime
    return time.time()


def _note_restart(folder: Path, trainer: Trainer, done: int, seconds: float) -> None:
    """Write down that all workers have started again, and how far they went back from the `done` steps."""
    step, ranks = trainer.step, range(trainer.comm.ranks)
    text = "a worker was lost, so all started again"
    event = Event(
        step,
        "restart",
        round(max(seconds, 0.0), 3),
        text,
        tuple(ranks),
        back=max(done - step, 0),
    )
    EventLog(folder, resume=True).put(event)


# ---------------------------------------------------------------- failures
def note_crash(folder: Path, error: Exception, started: bool) -> None:
    """Write down a crash that would repeat, so that the launcher gives up.

    A rank that runs out of memory may try once more, because a neighbour may have used
    the memory.
    """
    full = ran_out_of_memory(error)
    full_again = full and (folder / FULL_FILE).exists()
    would_repeat = not started and not broken_connection(error)
    if full_again or would_repeat:
        write_failure(folder, RunError(_crash_text(error, folder, started)))
    elif full:
        (folder / FULL_FILE).touch()


def saved_step(folder: Path) -> int:
    """The step of the newest checkpoint, or 0."""
    checkpoints = newest(folder / CHECKPOINTS_FOLDER)
    return step_of(checkpoints[0]) if checkpoints else 0


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: on a GPU, or on the CPU in torch or Python."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and is_memory_error_text(str(error))


def broken_connection(error: Exception) -> bool:
    """Whether an error says that another process is gone."""
    kinds = ConnectionError | EOFError | TimeoutError | torch.distributed.DistError
    if isinstance(error, kinds):
        return True
    return isinstance(error, RuntimeError) and is_connection_error_text(str(error))


def _crash_text(error: Exception, folder: Path, started: bool) -> str:
    """Why a rank gives up; with the traceback, unless it ran out of memory."""
    rank = os.environ.get("RANK", "0")
    if ran_out_of_memory(error):
        return out_of_memory_text(int(rank), error, read_config(folder / CONFIG_FILE))
    when = "during a step" if started else "before its first step"
    trace = "".join(traceback.format_exception(error)).rstrip()
    return (
        f"rank {rank} failed {when}: {type(error).__name__}: {error}\n"
        "  it would fail again, so it was not restarted; if your files and settings are "
        f"in order, please report this:\n\n{trace}"
    )


def out_of_memory_text(rank: int, error: Exception, config: Config) -> str:
    """Say that a rank has no memory left, and which settings would help."""
    remedies = [
        "fewer data.seq_len",
        "a smaller data.global_batch or more micro-batches",
    ]
    if config.run.recompute != "full":
        remedies.append("run.recompute=full")
    if is_recording(config, torch.cuda.is_available()):
        remedies.append("run.cuda_graphs=false")
    message = str(error)
    allocation = re.search(r"tried to allocate (\d+) bytes", message)
    if allocation:
        reason = f"it tried to allocate {int(allocation[1]) / 1e9:,.1f} GB"
    else:
        reason = message.partition(". GPU ")[0]
    return (
        f"rank {rank} has no memory left: {reason}\n"
        f"  {', '.join(remedies)}; `--dry-run` says what a rank will need"
    )


def write_failure(folder: Path, error: PenstockError) -> None:
    """Write down why this rank gives up, because a restart would fail in the same way.

    On a full disk the file is empty; `read_failure` knows what that means, and `tidy_up` removes it.
    """
    text = json.dumps([type(error).__name__, str(error)])
    with suppress(OSError):
        try:
            put_in_place(folder / FAILURE_FILE, text)
        except OSError:
            (folder / FAILURE_FILE).touch()


def read_failure(folder: Path) -> Verdict | None:
    """Return why a rank gave up, if one did."""
    try:
        content = (folder / FAILURE_FILE).read_text(encoding="utf-8")
        if not content:
            reason = os.strerror(ENOSPC)
            text = f"cannot write to {folder}: {reason}\n  {ROOM}"
            return Verdict(error="RunError", text=text)
        kind, text = json.loads(content)
    except (OSError, ValueError):
        return None
    return Verdict(error=str(kind), text=str(text))


def tidy_up(folder: Path) -> None:
    """Remove what is half-written once all workers have ended: checkpoints, and an empty failure."""
    sweep(folder / CHECKPOINTS_FOLDER)
    with suppress(OSError):
        if not (folder / FAILURE_FILE).stat().st_size:
            (folder / FAILURE_FILE).unlink()


def _earlier_verdict(folder: Path) -> Verdict | None:
    """The verdict of the workers before a restart, if there is nothing left to do."""
    failure = read_failure(folder)
    if failure is not None:
        return failure
    if (folder / STOP_FILE).exists():
        # A worker was killed before it could say that it had stopped.
        return Verdict(saved_step(folder), stopped=True, interrupted=True)
    return None


# ---------------------------------------------------------------- before the first step
def _prepare(
    folder: Path,
    resume: bool,
    again: bool,
    watch: WatchRow | None,
    separate: SeparateFolders | None,
) -> tuple[Trainer, Callable[[], bool]]:
    """Return the trainer of this rank, and a function that says whether to stop."""
    config = read_config(folder / CONFIG_FILE)
    placement = launched_placement(config)
    use_threads(placement.threads)
    comm = join(config, placement)
    # Until now a signal ended the process at once, since it could not reach the others.
    asked = threading.Event()
    listen(asked)
    if again and comm.rank == 0:
        restart = os.environ[RESTART_COUNT]
        _log.warning(
            "a worker was lost; restart %s of %d", restart, config.elastic.restarts
        )
    write_pid(folder, comm.rank)
    job = replace(job_of(folder, config, resume, again), separate=separate)
    stop_file = folder / STOP_FILE

    def stop() -> bool:
        return asked.is_set() or (job.keeps_folder(comm.rank) and stop_file.exists())

    return Trainer(job, comm, comm.device, watch), stop


def join(
    config: Config, placement: Placement, meeting: Meeting | None = None
) -> ProcessComm:
    """Connect to the other processes of a run, at the store of their `meeting` if they have met.

    The backend is NCCL where every process has its own GPU, our own where processes of
    one machine share GPUs, and gloo otherwise.
    """
    check_gpu_exists(config)
    on_gpu = placement.backend is None and placement.wanted == "cuda"
    patience = starting_patience(config, torch.device("cuda" if on_gpu else "cpu"))
    if placement.backend is not None:
        return init(placement.backend, patience, "cpu", meeting)
    if placement.wanted == "cuda":
        gpu = torch.device("cuda", own_gpu())
        torch.cuda.set_device(gpu)
        return init(None, patience, gpu, meeting)
    return init(None, patience, meeting=meeting)


def listen(asked: threading.Event) -> None:
    """Let a signal set an event instead of interrupting the process."""

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)
        # The server of forks blocks SIGINT, and workers inherit that (`serve_forks`).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def write_pid(folder: Path, rank: int) -> None:
    """Write down the process id of a rank."""
    (folder / PIDS_FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / PIDS_FOLDER / f"{rank}.pid").write_text(f"{os.getpid()}\n")


# The time that clean-up gets before an ending signal comes again.
SIGNAL_REPEAT_SECONDS = 10.0
ERROR_TYPES: dict[str, type[PenstockError]] = {
    kind.__name__: kind for kind in (ConfigError, FileError, ProofError, ShapeError)
}
HINTS = {  # by the exit code of a worker
    -signal.SIGKILL: "\n  often the system, out of memory: "
    "fewer data.seq_len or a smaller batch; run.recompute=full",
    -signal.SIGILL: "\n  the processor does not have an instruction that was used: "
    "run.precision=float32 may do without it",
}
# What every worker needs, loaded once in the process that they are forked from.
LOADED_MODULES = ("penstock.train.launch", MODULE_OF_OPTIMIZERS)
WorkerEntry = Callable[[str, bool], Verdict]


def forget_previous_end(folder: Path) -> None:
    """Remove the files that tell workers how an earlier run in this folder ended."""
    for name in (STOP_FILE, FAILURE_FILE, FULL_FILE):
        (folder / name).unlink(missing_ok=True)
    for file in (folder / PIDS_FOLDER).glob("*.pid"):
        file.unlink(missing_ok=True)


def load_ahead(entry: WorkerEntry) -> None:
    """Load what workers need in the process that they will be forked from, while this one has other work."""
    if under_launcher():
        return
    set_launch_environment()
    if sys.platform == "linux":
        serve_forks([entry.__module__, *LOADED_MODULES])


def launch(
    entry: WorkerEntry,
    folder: Path,
    ranks: int,
    restarts: int,
    resume: bool,
    say: SayLine = lambda line: None,
) -> Verdict:
    """Run `entry(folder, resume)` in `ranks` processes, and return how rank 0 ended.

    `entry` must be a function of a module, because it is pickled for the workers. If a worker is lost, all are started
    again, at most `restarts` times. A failure of a worker is raised as an error.
    """
    forget_previous_end(folder)
    EventLog(folder, resume)
    load_ahead(entry)

    def words_of(attempt: int, rank: int, port: int) -> tuple[object, ...]:
        return entry, str(folder), resume, launch_variables(rank, ranks, port, attempt)

    with tidying(folder), stopping(folder / STOP_FILE, say):
        for attempt in range(restarts + 1):
            try:
                outcomes = run_workers(ranks, _work_with, partial(words_of, attempt))
            except (EOFError, ConnectionError):
                raise lost_server(folder) from None
            verdicts = [one.result for one in outcomes if one.result is not None]
            if len(verdicts) == ranks:
                return raise_worst(verdicts)
            failure = read_failure(folder)
            if failure is not None:
                return raise_worst([failure])
    raise RunError(_story(max(outcomes, key=attrgetter("blame")), restarts, folder))


def set_launch_environment() -> None:
    """Set the variables that workers inherit."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def launch_variables(rank: int, ranks: int, port: int, attempt: int) -> dict[str, str]:
    """The variables with which torchrun would describe a rank on one machine, whose store we keep."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        RESTART_COUNT: str(attempt),
    }


def _work_with(
    entry: WorkerEntry, folder: str, resume: bool, variables: dict[str, str]
) -> Verdict:
    os.environ.update(variables)
    return entry(folder, resume)


def lost_server(folder: Path) -> RunError:
    """The error when multiprocessing has lost the process that it forks workers from."""
    return RunError(
        "the process that starts the workers is gone: "
        f"somebody or the system has killed it\n  {way_on(folder)}"
    )


def raise_worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of rank 0, or raise the error of a failed rank.

    A RunError often only follows from the error of another rank, so others come first.
    """
    failures = [verdict for verdict in verdicts if verdict.error]
    if not failures:
        return verdicts[0]
    failures.sort(key=lambda verdict: verdict.error == "RunError")
    worst = failures[0]
    raise ERROR_TYPES.get(worst.error, RunError)(worst.text)


# ---------------------------------------------------------------- signals
@contextmanager
def stopping(stop_file: Path, say: SayLine) -> Iterator[None]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP ask workers to stop, and the second end them."""

    def ask(number: int, frame: FrameType | None) -> None:
        if stop_file.exists():
            raise KeyboardInterrupt
        stop_file.touch()
        say("this step is finished and saved first; Ctrl-C ends all at once")

    try:
        with _handling((signal.SIGINT, *ENDING_SIGNALS), ask):
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            stop_file.unlink(missing_ok=True)


@contextmanager
def tidying(folder: Path) -> Iterator[None]:
    """Leave nothing half-written behind, however the workers end."""
    try:
        yield
    finally:
        tidy_up(folder)


@contextmanager
def ended_by_signals(say: SayLine) -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that the caller can clean up.

    While `launch` runs, it handles these signals itself. Python drops an exception that is raised
    within a destructor or the callback of a weak reference, so the signal comes again until the
    context ends.
    """
    repeats: list[threading.Timer] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not repeats:
            say(f"by {signal.Signals(number).name}")
        repeat = threading.Timer(SIGNAL_REPEAT_SECONDS, os.kill, (os.getpid(), number))
        repeat.daemon = True
        repeat.start()
        repeats.append(repeat)
        raise SystemExit(128 + number)

    with _handling(ENDING_SIGNALS, end):
        try:
            yield
        finally:
            for repeat in repeats:
                repeat.cancel()


@contextmanager
def _handling(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals, except those that end a job and that this process ignores; only the main thread can."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            ignores = signal.getsignal(number) is signal.SIG_IGN
            if number not in ENDING_SIGNALS or not ignores:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


# ---------------------------------------------------------------- messages
def _story(outcome: WorkerOutcome[Verdict], restarts: int, folder: Path) -> str:
    """What happened to the first worker that failed, and how to continue."""
    event = outcome.text
    if outcome.error != KILLED:
        event = f"failed: {outcome.error}: {outcome.text}"
    attempts = f", {restarts} restarts did not help" if restarts else ""
    hint = HINTS.get(outcome.code or 0, "")
    return f"rank {outcome.rank} {event}{attempts}\n  {way_on(folder)}{hint}"


def way_on(folder: Path) -> str:
    """Say how to continue a run that ended too early."""
    checkpoints = newest(folder / CHECKPOINTS_FOLDER)
    if not checkpoints:
        return "there is no checkpoint yet; start again with the same command"
    return (
        f"the last checkpoint is {checkpoints[0]}; "
        f"go on with: penstock train {folder} --resume"
    )


def run_worker(
    folder: str, resume: bool, separate: SeparateFolders | None = None
) -> Verdict:
    """Train as the rank that the environment names; rank 0 shows how it goes."""
    first = os.environ.get("RANK") == "0"
    console = Console(stderr=True)
    log_to(console, first)
    if not first:
        return work(Path(folder), resume, separate=separate)
    run = read_config(Path(folder) / CONFIG_FILE).run
    with Screen(run.steps, run.log_every, console) as screen:
        return work(Path(folder), resume, screen.put, separate)
