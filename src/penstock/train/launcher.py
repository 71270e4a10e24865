"""Starts the workers of a run on this machine, and restarts them from the last checkpoint when one dies.

    launch ──► rank 0 ─ rank 1 ─ rank 2 ─ rank 3
                         ✗ killed              the others are ended
           ──► rank 0 ─ rank 1 ─ rank 2 ─ rank 3      each resumes; at most `restarts` times
    Ctrl-C ──► RUN/stop ──► all finish their step, save, leave
    a failure that would repeat ──► RUN/failure.json ──► no restart

The launcher is torch's elastic launcher. To train on several machines, run `torchrun --nnodes …
-m penstock train config.toml` on each; that is the same launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.config import Config
from penstock.errors import (
    ConfigError,
    FileError,
    PenstockError,
    ProofError,
    RunError,
    ShapeError,
)
from penstock.ir.plan import Plan
from penstock.runtime.process.launch import (
    ENDING_SIGNALS,
    LOCALHOST,
    serve_forks,
    under_launcher,
)
from penstock.runtime.torch_internals import MODULE_OF_OPTIMIZERS, Store
from penstock.runtime.wire.key import keep_key
from penstock.train.checkpoint import CHECKPOINTS_FOLDER, newest
from penstock.train.crew.depot import RunFiles
from penstock.train.crew.events import EventLog
from penstock.train.crew.gate import Gate
from penstock.train.crew.keeper import Keeper, MemberEntry
from penstock.train.crew.site import key_of
from penstock.train.screen import SayLine
from penstock.train.worker import (
    FAILURE_FILE,
    FULL_FILE,
    PIDS_FOLDER,
    STOP_FILE,
    Verdict,
    read_failure,
    tidy_up,
)

__all__ = [
    "ended_by_signals",
    "launch",
    "launch_crew",
    "load_ahead",
    "under_launcher",
    "way_on",
]

SECONDS_TO_SAVE = 60  # Time that workers get to save once they are asked to stop.
CHECK_SECONDS = 0.1  # Time between two looks at the workers.
# The time that clean-up gets before an ending signal comes again.
SIGNAL_REPEAT_SECONDS = 10.0
ERROR_TYPES: dict[str, type[PenstockError]] = {
    kind.__name__: kind for kind in (ConfigError, FileError, ProofError, ShapeError)
}
HINTS = {  # by the exit code of a worker
    -signal.SIGKILL: "\n  often the system, out of memory: "
    "fewer data.tokens or a smaller batch; run.recompute=true",
    -signal.SIGILL: "\n  the processor does not have an instruction that was used: "
    "run.precision=float32 may do without it",
}
# What every worker needs, loaded once in the process that they are forked from.
LOADED_MODULES = ("penstock.train.worker", MODULE_OF_OPTIMIZERS)
WorkerEntry = Callable[[str, bool], Verdict]


def forget_previous_end(folder: Path) -> None:
    """Remove the files that tell workers how an earlier run in this folder ended."""
    for name in (STOP_FILE, FAILURE_FILE, FULL_FILE):
        (folder / name).unlink(missing_ok=True)
    for file in (folder / PIDS_FOLDER).glob("*.pid"):
        file.unlink(missing_ok=True)


def load_ahead(entry: WorkerEntry) -> None:
    """Load what workers need in the process that they will be forked from, while this one has other work."""
    if sys.platform == "linux" and not under_launcher():
        _set_environment()
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

    `entry` must be a function of a module, because it is pickled for the workers. A
    failure of a worker is raised as an error.
    """
    _silence_torch()
    forget_previous_end(folder)
    EventLog(folder, resume)
    _set_environment()
    method = "spawn"
    if sys.platform == "linux":
        method = "forkserver"
        serve_forks([entry.__module__, *LOADED_MODULES])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOCALHOST}:0",
        local_addr=LOCALHOST,
        max_restarts=restarts,
        monitor_interval=CHECK_SECONDS,
        start_method=method,
        signals_to_handle="SIGQUIT",
    )
    with _tidying(folder), _stopping(folder / STOP_FILE, say):
        verdicts = _run_workers(config, entry, folder, resume)
    return _raise_worst(verdicts)


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
    _set_environment()
    serve_forks([entry.__module__, *LOADED_MODULES])

    def open_gate(store: Store) -> Gate:
        key = key_of(config, folder)
        keep_key(key)
        files = RunFiles(folder, config)
        ranks = plan.schedule.ranks
        listen = config.run.listen
        gate = Gate(listen, key, store, files, version, say_event, ranks)
        host, _, _ = config.run.listen.rpartition(":")
        say_event(f"others can join: penstock join {host}:{gate.port} --key {key}")
        return gate

    keeper = Keeper(
        entry,
        folder,
        plan,
        config.run,
        resume,
        say_event,
        open_gate if config.run.listen else None,
    )
    with _tidying(folder), _stopping(folder / STOP_FILE, say):
        try:
            verdict = keeper.run()
        except (EOFError, ConnectionError):
            raise _lost_server(folder) from None
        except RunError as error:
            raise RunError(f"{error}\n  {way_on(folder)}") from None
    return _raise_worst({0: verdict})


def _set_environment() -> None:
    """Set the variables that workers inherit."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    # Torch 2.13 keeps one store over all restarts, in which new ranks find the addresses
    # of dead ones. This gives every restart a new store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))


def _run_workers(
    config: LaunchConfig, entry: WorkerEntry, folder: Path, resume: bool
) -> dict[int, Verdict]:
    """Run the workers until they end; return their verdicts by rank."""
    verdicts: dict[int, Verdict]
    try:
        verdicts = elastic_launch(config, entry)(str(folder), resume)
    except ChildFailedError as error:
        failure = read_failure(folder)
        if failure is None:
            text = _story(error, config.max_restarts, folder)
            raise RunError(text) from None
        verdicts = {0: failure}
    except (EOFError, ConnectionError):
        raise _lost_server(folder) from None
    except SignalException as error:
        raise RunError(
            f"the run was ended by {error.sigval.name}\n  {way_on(folder)}"
        ) from None
    return verdicts


def _lost_server(folder: Path) -> RunError:
    """The error when multiprocessing has lost the process that it forks workers from."""
    return RunError(
        "the process that starts the workers is gone: "
        f"somebody or the system has killed it\n  {way_on(folder)}"
    )


def _raise_worst(verdicts: dict[int, Verdict]) -> Verdict:
    """Return the verdict of rank 0, or raise the error of a failed rank.

    A RunError often only follows from the error of another rank, so others come first.
    """
    failures = [verdict for verdict in verdicts.values() if verdict.error]
    if not failures:
        return verdicts[0]
    failures.sort(key=lambda verdict: verdict.error == "RunError")
    worst = failures[0]
    raise ERROR_TYPES.get(worst.error, RunError)(worst.text)


# ---------------------------------------------------------------- signals
@contextmanager
def _stopping(stop_file: Path, say: SayLine) -> Iterator[None]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP ask workers to stop, and the second end them."""

    def ask(number: int, frame: FrameType | None) -> None:
        if stop_file.exists():
            _kill_workers(stop_file.parent / PIDS_FOLDER)
            raise KeyboardInterrupt
        stop_file.touch()
        say("this step is finished and saved first; Ctrl-C ends all at once")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, ask) for number in _heard_signals(True)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop_file.unlink(missing_ok=True)


@contextmanager
def _tidying(folder: Path) -> Iterator[None]:
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

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in _heard_signals(False)}
    try:
        yield
    finally:
        for repeat in repeats:
            repeat.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _heard_signals(interrupt: bool) -> list[signal.Signals]:
    """The signals to handle: those that end a job, unless this process ignores them."""
    ignored = [n for n in ENDING_SIGNALS if signal.getsignal(n) is signal.SIG_IGN]
    heard = [number for number in ENDING_SIGNALS if number not in ignored]
    return [signal.SIGINT, *heard] if interrupt else heard


def _kill_workers(pids: Path) -> None:
    """Kill all workers, because they and the launcher would wait for each other."""
    for file in pids.glob("*.pid"):
        with suppress(OSError, ValueError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def _silence_torch() -> None:
    """Silence the log of torch's launcher; errors come back as exceptions."""
    for name in (
        "torch.distributed.elastic",
        "torch.multiprocessing",
        "torch.distributed.launcher",
    ):
        logging.getLogger(name).setLevel(logging.CRITICAL)


# ---------------------------------------------------------------- messages
def _story(error: ChildFailedError, restarts: int, folder: Path) -> str:
    """What happened to the first worker that failed, and how to continue."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        event = f"was killed by {failure.signal_name()}"
    else:
        event = f"failed: {_last_line(failure.message)}"
    attempts = f", {restarts} restarts did not help" if restarts else ""
    hint = HINTS.get(failure.exitcode, "")
    return f"rank {rank} {event}{attempts}\n  {way_on(folder)}{hint}"


def way_on(folder: Path) -> str:
    """SayLine how to continue a run that ended too early."""
    checkpoints = newest(folder / CHECKPOINTS_FOLDER)
    if not checkpoints:
        return "there is no checkpoint yet; start again with the same command"
    return (
        f"the last checkpoint is {checkpoints[0]}; "
        f"go on with: penstock train {folder} --resume"
    )


def _last_line(message: object) -> str:
    """The last line of what a worker left behind, which is its error without the trace."""
    text = str(message)
    if isinstance(message, dict):
        text = message.get("message", text)
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it did not say why"
