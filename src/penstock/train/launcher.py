"""Workers on this machine, by torch's elastic launcher: when one dies, all start again from the last checkpoint.

    launch ──► rank 0 ─ rank 1 ─ rank 2 ─ rank 3
                         ✗ killed              the others are ended
           ──► rank 0 ─ rank 1 ─ rank 2 ─ rank 3      each resumes; at most `restarts` times
    Ctrl-C ──► RUN/stop ──► all finish their step, save, leave
    a failure that would repeat ──► RUN/failure.json ──► no restart

On several machines: `torchrun --nnodes … -m penstock train config.toml` on each; that is the same launcher.
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

from penstock.errors import (
    ConfigError,
    FileError,
    PenstockError,
    ProofError,
    RunError,
    ShapeError,
)
from penstock.runtime.process.amx import avoid_broken_amx
from penstock.runtime.process.launch import (
    ENDING,
    after_first,
    serve_forks,
    under_launcher,
)
from penstock.train.checkpoint import newest
from penstock.train.worker import (
    FAILURE_FILE,
    FULL_FILE,
    PIDS_FOLDER,
    STOP_FILE,
    Verdict,
    read_failure,
)

__all__ = [
    "after_first",
    "avoid_broken_amx",
    "ended_by_signals",
    "launch",
    "restarted",
    "under_launcher",
    "way_on",
]

LOCALHOST = "127.0.0.1"
SECONDS_TO_SAVE = 60  # seconds for workers to save, once asked
ERRORS = (ConfigError, FileError, ProofError, ShapeError)
KINDS: dict[str, type[PenstockError]] = {kind.__name__: kind for kind in ERRORS}
HINTS = {  # by what a worker was killed with
    -signal.SIGKILL: "\n  often the system, out of memory: fewer data.tokens or a smaller batch; run.recompute=true",
    -signal.SIGILL: "\n  an instruction that this processor does not have: run.precision=float32 may do without it",
}
WorkerEntry = Callable[[str, bool], Verdict]
Say = Callable[[str], None]  # shows the user a line


def restarted() -> bool:
    """Whether the launcher has started this process in the place of one that died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def forget_previous_end(folder: Path) -> None:
    """What an earlier run has left for its workers is not for those of this one."""
    for left in (
        folder / STOP_FILE,
        folder / FAILURE_FILE,
        folder / FULL_FILE,
        *(folder / PIDS_FOLDER).glob("*.pid"),
    ):
        left.unlink(missing_ok=True)


def launch(
    entry: WorkerEntry,
    folder: Path,
    ranks: int,
    restarts: int,
    resume: bool,
    say: Say = lambda words: None,
) -> Verdict:
    """Runs `entry(folder, resume)` in so many processes; how rank 0 ended, or an error in words.

    `entry` is a function of a module; it is pickled for our own children.
    """
    _quiet()
    forget_previous_end(folder)
    os.environ.setdefault(
        "GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"
    )
    # torch 2.13 keeps one store over all restarts, and new ranks find the addresses of dead ones in it: a new one each
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))
    linux = sys.platform == "linux"
    if linux:
        serve_forks([entry.__module__, "penstock.train.worker"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOCALHOST}:0",
        local_addr=LOCALHOST,
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="forkserver" if linux else "spawn",
        signals_to_handle="SIGQUIT",
    )
    with _stopping(folder / STOP_FILE, say):
        try:
            verdicts: dict[int, Verdict] = elastic_launch(config, entry)(
                str(folder), resume
            )
        except ChildFailedError as error:
            said = read_failure(folder)
            if said is None:
                raise RunError(_story(error, restarts, folder)) from None
            verdicts = {0: said}
        except (EOFError, ConnectionError):  # multiprocessing has lost its server
            raise RunError(
                "the process that starts the workers is gone: somebody or the system has killed it\n"
                f"  {way_on(folder)}"
            ) from None
        except SignalException as error:
            raise RunError(
                f"the run was ended by {error.sigval.name}\n  {way_on(folder)}"
            ) from None
    worst = next(
        (one for one in verdicts.values() if one.error and one.error != "RunError"),
        None,
    )
    found = worst or next((one for one in verdicts.values() if one.error), verdicts[0])
    if found.error:
        raise KINDS.get(found.error, RunError)(found.text)
    return found


@contextmanager
def _stopping(stop: Path, say: Say) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP asks the workers to stop; the second ends them."""

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.exists():
            _end(stop.parent / PIDS_FOLDER)
            raise KeyboardInterrupt
        stop.touch()
        say("this step is finished and saved first; Ctrl-C ends all at once")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [
        signal.SIGINT,
        *(
            number
            for number in ENDING
            if signal.getsignal(number) is not signal.SIG_IGN
        ),
    ]
    before = {number: signal.signal(number, ask) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.unlink(missing_ok=True)


@contextmanager
def ended_by_signals(say: Say) -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that what was begun is cleaned up. `launch` has its own way with them."""

    def end(number: int, frame: FrameType | None) -> None:
        say(f"by {signal.Signals(number).name}")
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [
        number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(pids: Path) -> None:
    """Ends all workers at once: they would wait for a launcher that waits for them."""
    for file in pids.glob("*.pid"):
        with suppress(OSError, ValueError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def _quiet() -> None:
    """Torch's launcher says much on its way; what matters comes back from it."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)


def _story(error: ChildFailedError, restarts: int, folder: Path) -> str:
    rank, failure = error.get_first_failure()
    what = (
        f"was killed by {failure.signal_name()}"
        if failure.exitcode < 0
        else f"failed: {_said(failure.message)}"
    )
    tried = f", {restarts} restarts did not help" if restarts else ""
    return f"rank {rank} {what}{tried}\n  {way_on(folder)}{HINTS.get(failure.exitcode, '')}"


def way_on(folder: Path) -> str:
    """How to continue a run that has ended too early."""
    good = newest(folder / "checkpoints")
    if not good:
        return "there is no checkpoint yet; start again with the same command"
    return f"the last checkpoint is {good[0]}; go on with: penstock train {folder} --resume"


def _said(message: object) -> str:
    """Of what a worker has left behind, the words: its last line, without the trace."""
    text = (
        message.get("message", str(message))
        if isinstance(message, dict)
        else str(message)
    )
    return text.strip().splitlines()[-1] if text.strip() else "it did not say why"
