"""Starts ranks as processes: under torchrun or a similar launcher, or as children of this process.

    torchrun --nproc-per-node 4 train.py       in train.py:   comm = init() ... finish()
    spawn(4, work, 1, "a")                     calls          work(comm, 1, "a")   in each of four new processes

`spawn` keeps the store at which the ranks meet, on a port that the system picks, so two runs
never want the same port. The workers return their results through pipes from our own
children. No worker outlives the call or this process.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.errors import PeerLostError, RunError
from penstock.runtime.comm import ipc
from penstock.runtime.comm.comm import GLOO, IPC, NCCL, ON_GPU
from penstock.runtime.comm.process import (
    TORCH_EXTRA_SECONDS,
    ProcessComm,
    barrier_devices,
)
from penstock.runtime.process.machine import own_gpu, use_threads
from penstock.runtime.process.mps import be_own_host, shared_gpu_backend
from penstock.runtime.process.watchdog import ERRORS
from penstock.torch_internals import (
    PrefixStore,
    Store,
    TCPStore,
    default_store,
)

Returned = TypeVar("Returned")
LOCALHOST = "127.0.0.1"
# How long the other workers may take to report, once one has failed.
SECONDS_TO_REPORT = 12.0
MAX_WAIT_SECONDS = 3600.0  # a wait on pipes does not accept an infinite limit
SECONDS_TO_LEAVE = 5.0  # how long the end of a program waits for the threads of gloo
PREPARE_POLL_SECONDS = 0.1
KILLED = "(killed)"
ENDED = "(ended)"
# The signals that end all processes of a job or of a terminal.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# torch reads these when it makes a process group of NCCL.
NCCL_SETTINGS = {
    # When a connection breaks, torch would end the process with a stack trace, before our
    # watchdog could find out what happened.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Other ranks wait for messages, so they come before other work.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # The messages of a group keep their order on purpose.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
# How long a testbed may refuse new processes after it has lost one that was computing.
SECONDS_TO_GET_GPU = 30.0
GPU_POLL_SECONDS = 0.5
MEETING_HINT = (
    "\n  start all ranks within a few minutes; MASTER_ADDR must name the machine of rank 0, which the others can "
    "reach, and MASTER_PORT a port that is free there"
)
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# ---------------------------------------------------------------- under a launcher
class Meeting(NamedTuple):
    """The store at which the ranks of a launcher meet, before and after they are connected."""

    store: Store
    rank: int
    ranks: int


def meet(patience: float = 300.0) -> Meeting:
    """Go to the store of the launcher's ranks; call it once, before `init`."""
    if dist.is_initialized():
        return Meeting(default_store(), dist.get_rank(), dist.get_world_size())
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise RunError(
            f"the environment does not set {', '.join(missing)}; start the program "
            "with torchrun --nproc-per-node RANKS ..."
        )
    limit = timedelta(seconds=patience + TORCH_EXTRA_SECONDS)
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    place = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
    what = f"rank {rank} of {ranks} cannot meet the others at {place}"
    with _lacking_others(what, MEETING_HINT):
        return Meeting(*next(rendezvous("env://", timeout=limit)))


@contextmanager
def _lacking_others(what: str, hint: str = "") -> Iterator[None]:
    """Turn an error of torch, which ends with a stack of its own code, into one that says what is wrong."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise PeerLostError(f"{what}: {reason}{hint}") from None


def init(
    backend: str | None = None,
    patience: float = 300.0,
    device: torch.device | str | None = None,
    meeting: Meeting | None = None,
) -> ProcessComm:
    """Join the ranks that torchrun has started.

    Unless `backend` says otherwise, this uses NCCL if every rank has its own GPU, the backend
    of the testbed (our own by default) if the ranks of one machine share GPUs, and gloo if not.

    A wait longer than `patience` seconds raises a `StuckError`. `device` is where received
    tensors land; by default the rank's own GPU under NCCL, and the CPU under gloo. Ranks that
    have met already pass their `meeting`.
    """
    if not dist.is_initialized():
        limit = timedelta(seconds=patience + TORCH_EXTRA_SECONDS)
        store, rank, ranks = meeting or meet(patience)
        backend = backend or _choose_backend(store, rank, ranks)
        _join(backend, store, rank, ranks, limit)
        comm = ProcessComm(patience, device)
        if backend == GLOO:
            _leave_at_exit(comm)
        return comm
    return ProcessComm(patience, device)


def _leave_at_exit(comm: ProcessComm) -> None:
    """Leave a process group of gloo before Python ends.

    The threads of gloo drop the tensors of a sum a little after the sum is done. That needs Python, and a process whose
    Python has already ended is aborted there. A thread waits for them, because one of them may hang after an error;
    it is started now, because a Python that ends starts no threads.
    """
    ending, left = threading.Event(), threading.Event()

    def leave_when_asked() -> None:
        ending.wait()
        try:
            _leave(comm)
        finally:
            left.set()

    def leave() -> None:
        if not hasattr(sys, "last_value"):  # no error has ended the program
            ending.set()
            left.wait(SECONDS_TO_LEAVE)

    threading.Thread(target=leave_when_asked, name="leaves", daemon=True).start()
    atexit.register(leave)


def _leave(comm: ProcessComm) -> None:
    comm.leave()
    if dist.is_initialized():
        dist.destroy_process_group()


def under_launcher() -> bool:
    """Whether torchrun, or a launcher with the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_on_ranks(
    work: Callable[..., Returned], *args: Any, patience: float = 300.0
) -> Returned | None:
    """Run `work(comm, *args)` on torchrun's ranks, of which this process is one.

    Returns the result on rank 0, and None on the others.
    """
    comm = init(patience=patience)
    result = work(comm, *args)
    finish()
    return result if comm.rank == 0 else None


def after_first(comm: ProcessComm, work: Callable[[], None]) -> None:
    """Run `work` on rank 0, while the others wait for it without a time limit.

    They do stop waiting if rank 0 dies.
    """
    meeting = Meeting(default_store(), comm.rank, comm.ranks)

    def work_and_tell() -> str:
        work()
        return "done"

    hear_first(meeting, "prepared", work_and_tell)
    comm.barrier()


def hear_first(meeting: Meeting, name: str, tell: Callable[[], str]) -> str:
    """Return what `tell` returns on rank 0; the others wait for it without a time limit.

    They do stop waiting if rank 0 dies.
    """
    store = PrefixStore("penstock/first", meeting.store)
    if meeting.rank == 0:
        store.set(name, tell())
    try:
        while not store.check([name]):
            time.sleep(PREPARE_POLL_SECONDS)
        return store.get(name).decode()
    except RuntimeError:  # the connection to the store is broken
        raise PeerLostError(
            f"rank {meeting.rank} waits for rank 0 to prepare the run, but rank 0 is gone"
        ) from None


def _join(backend: str, store: Store, rank: int, ranks: int, limit: timedelta) -> None:
    """Create the default process group.

    It gets no device: torch would ask our own backend for options that it does not have.
    """
    if backend in ON_GPU:
        _take_gpu()
    if backend == IPC:
        ipc.register()
    if backend == NCCL:
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        if shared_gpu_backend() == NCCL:
            be_own_host(rank)
    with _lacking_others(f"rank {rank} of {ranks} cannot reach the others"):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=ranks, timeout=limit
        )


def _take_gpu() -> None:
    """Make the GPU of this process its current one, as soon as there is room for it.

    A testbed that has lost a process in the middle of its work starts a new server, and turns
    others away meanwhile.
    """
    end = time.monotonic() + SECONDS_TO_GET_GPU
    while True:
        try:
            torch.cuda.set_device(own_gpu())
            torch.cuda.synchronize()
        except RuntimeError as error:
            busy = "busy or unavailable" in str(error)
            if not busy or time.monotonic() > end:
                raise
            time.sleep(GPU_POLL_SECONDS)
        else:
            return


def _choose_backend(store: Store, rank: int, ranks: int) -> str:
    """Compare the GPUs of all ranks, and choose the same backend on all of them."""
    mine = ""
    if torch.cuda.is_available():
        uuid = torch.cuda.get_device_properties(own_gpu()).uuid
        mine = f"{socket.gethostname()} {uuid}"
    keys = [f"penstock/gpu/{other}" for other in range(ranks)]
    with _lacking_others(f"rank {rank} of {ranks} waits for the others"):
        store.set(keys[rank], mine)
        store.wait(keys)
    gpus = {store.get(key).decode() for key in keys}
    if "" in gpus:
        return GLOO
    if len(gpus) == ranks and dist.is_nccl_available():
        return NCCL
    hosts = {gpu.split()[0] for gpu in gpus}
    return shared_gpu_backend() if len(hosts) == 1 else GLOO


def finish() -> None:
    """Wait for the other ranks, then leave the process group.

    Call this only after success; a rank that fails simply ends.
    """
    if not dist.is_initialized():
        return
    try:
        dist.barrier(device_ids=barrier_devices())
    except RuntimeError:
        raise PeerLostError(
            "a rank died or left before all ranks had finished"
        ) from None
    dist.destroy_process_group()


# ---------------------------------------------------------------- on this machine
@dataclass(frozen=True, slots=True)
class WorkerOutcome(Generic[Returned]):
    """How a worker ended: with a result, or with an error.

    `error` is the name of the error's class, or `KILLED` or `ENDED`.
    """

    rank: int
    code: int | None  # the exit code; a negative one is the signal that killed it
    result: Returned | None = None
    error: str = ""
    text: str = ""
    trace: str = ""

    def __str__(self) -> str:
        if self.error in ERRORS:
            return self.text
        if self.error in (KILLED, ENDED):
            return f"rank {self.rank} {self.text}"
        head = f"rank {self.rank} has failed: {self.error}: {self.text}"
        return f"{head}\n\n{self.trace}".strip()

    @property
    def blame(self) -> int:
        """How likely this worker was the first to fail; the highest number is the likeliest.

        An error of its own counts most. Then come a worker that was killed, one that noticed
        another's end, and one that we ended.
        """
        return {"PeerLostError": 2, KILLED: 3, ENDED: 1, "": 0}.get(self.error, 4)


def spawn(
    ranks: int,
    work: Callable[..., Returned],
    *args: Any,
    patience: float = 300.0,
    backend: str | None = GLOO,
) -> list[Returned]:
    """Run `work(comm, *args)` in one new process per rank; return the results by rank.

    With `backend=None`, the backend is chosen to fit the GPUs, as in `init`.

    `work` and its arguments are pickled for our own children, so `work` must be a function
    of a module. If a worker fails, the others are ended, and a `RunError` with the text of
    its error is raised here.
    """
    outcomes = worker_outcomes(ranks, work, *args, patience=patience, backend=backend)
    worst = max(outcomes, key=lambda outcome: outcome.blame)
    if worst.error == KILLED:
        # A killed worker says nothing, so add what another one saw.
        witnesses = [str(other) for other in outcomes if other.error in ERRORS]
        raise PeerLostError("\n\n".join([str(worst), *witnesses[:1]]))
    if worst.error:
        error_class = ERRORS.get(worst.error, RunError)
        raise error_class(str(worst))
    return [outcome.result for outcome in outcomes]  # type: ignore[misc]


def worker_outcomes(
    ranks: int,
    work: Callable[..., Returned],
    *args: Any,
    patience: float = 300.0,
    backend: str | None = GLOO,
) -> list[WorkerOutcome[Returned]]:
    """Like `spawn`, but return how every worker ended, by rank."""
    interactive = not hasattr(sys.modules["__main__"], "__file__")
    if work.__module__ == "__main__" and interactive:
        raise RunError(
            f"other processes cannot import {work.__qualname__}: put it into a file, and "
            "import it from there"
        )

    def words_of(rank: int, port: int) -> tuple[object, ...]:
        return rank, ranks, port, patience, backend, work, args

    try:
        return run_workers(ranks, _work_as_rank, words_of)
    except (EOFError, ConnectionError):
        raise RunError(
            "the process that starts the workers is gone: somebody or the system has killed it\n"
            "  start again with the same command"
        ) from None


def run_workers(
    ranks: int,
    entry: Callable[..., Returned],
    words_of: Callable[[int, int], tuple[object, ...]],
) -> list[WorkerOutcome[Returned]]:
    """Run `entry` in a new process for each rank until all have ended; return how, by rank.

    `words_of` gives the arguments of a rank, which can meet the others at a store on the port that it is told.
    """
    store = keep_store()
    workers: list[WorkerProcess] = []
    try:
        for rank in range(ranks):
            words = words_of(rank, store.port)
            workers.append(WorkerProcess(rank, f"rank {rank}", entry, words))
        return _collect(workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.close()


class WorkerProcess:
    """A new process that runs a function, and the pipe over which it reports how it ended.

    The function and its arguments are pickled for our own child, which returns its result in the same way. With
    `ends_at_once`, the process prints its own error, and a success does not wait for threads that torch has left.
    """

    def __init__(
        self,
        number: int,
        name: str,
        entry: Callable[..., object],
        words: tuple[object, ...],
        ends_at_once: bool = False,
    ) -> None:
        self.number = number
        context = process_context()
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_run_entry,
            args=(entry, words, theirs, dict(os.environ), ends_at_once),
            name=name,
        )
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        """The number of the process in the system."""
        return self.process.pid

    def outcome(self) -> WorkerOutcome[Any]:
        """What the worker reported before it ended, or its exit code if it could not report."""
        try:
            success = self.pipe.recv_bytes()
            raw = self.pipe.recv_bytes()
        except (EOFError, OSError):  # OSError: in the middle of a message
            self.join(SECONDS_TO_REPORT)
            code = self.process.exitcode
            text = f"ended with exit code {code} before it could say why"
            if code is not None and code < 0:
                text = f"was killed by {signal.Signals(-code).name}"
            return WorkerOutcome(self.number, code, error=KILLED, text=text)
        self.join(SECONDS_TO_REPORT)
        code = self.process.exitcode
        if success == b"1":
            return WorkerOutcome(self.number, code, pickle.loads(raw))
        return WorkerOutcome(self.number, code, **json.loads(raw))

    def join(self, seconds: float) -> None:
        """Wait until the process has ended, but not for longer."""
        self.process.join(seconds)

    def kill(self) -> None:
        """End the process for certain."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Give back what an ended process has left."""
        self.process.close()
        self.pipe.close()


def keep_store() -> TCPStore:
    """Return the store at which workers meet, at a port that only this machine can reach.

    Left to itself, torch's store listens on all networks, and it believes everyone.
    """
    listener = socket.create_server((LOCALHOST, 0))
    return TCPStore(
        LOCALHOST,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def process_context() -> BaseContext:
    """How to start processes; on Linux as forks of one that has torch loaded already."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    serve_forks([__name__])
    return multiprocessing.get_context("forkserver")


def serve_forks(modules: list[str]) -> None:
    """Start the server process that workers are forked from, with these modules loaded.

    Forking saves seconds per start, and again at every restart.

    Ctrl-C reaches all processes of a terminal, but the server must ignore it, even while it
    loads: only the process that started all others decides which ones end. The same goes for
    SIGTERM and SIGHUP, which a batch system or a closed terminal sends to every process of a
    run. Workers inherit this until they call `hear_signals`. Nor does the server print
    torch's messages about sockets.
    """
    multiprocessing.set_forkserver_preload(modules)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it when loaded
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    # A Ctrl-C that comes meanwhile is kept for this process.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handlers = {}
    for number in (signal.SIGINT, *ENDING_SIGNALS):
        handlers[number] = signal.signal(number, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def hear_signals() -> None:
    """Let SIGTERM end this worker again."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _collect(workers: list[WorkerProcess]) -> list[WorkerOutcome[Any]]:
    """Wait for the workers' outcomes; once one has failed, the others have a time limit."""
    outcomes: dict[int, WorkerOutcome[Any]] = {}
    end = float("inf")
    while len(outcomes) < len(workers) and time.monotonic() < end:
        ranks: dict[Any, int] = {
            one.pipe: rank for rank, one in enumerate(workers) if rank not in outcomes
        }
        remaining = end - time.monotonic()
        for ready in wait(list(ranks), timeout=min(remaining, MAX_WAIT_SECONDS)):
            rank = ranks[ready]
            outcomes[rank] = workers[rank].outcome()
            if outcomes[rank].error:
                end = min(end, time.monotonic() + SECONDS_TO_REPORT)
    for rank in range(len(workers)):
        if rank not in outcomes:
            text = "had to be ended"
            outcomes[rank] = WorkerOutcome(rank, None, error=ENDED, text=text)
    return [outcomes[rank] for rank in sorted(outcomes)]


# ---------------------------------------------------------------- in a worker
def _run_entry(
    entry: Callable[..., object],
    words: tuple[object, ...],
    pipe: Connection,
    environment: dict[str, str],
    ends_at_once: bool,
) -> None:
    """Run the function of a worker, and report how it went.

    A worker that failed ends at once, because torch might wait for threads that hang.
    """
    os.environ.update(environment)
    try:
        result = pickle.dumps(entry(*words))
        _send_outcome(pipe, b"1", result)
        if not ends_at_once:
            return
        code = 0
    except BaseException as error:
        report = {
            "error": type(error).__name__,
            "text": str(error),
            "trace": traceback.format_exc(),
        }
        if ends_at_once:
            traceback.print_exc()
        _send_outcome(pipe, b"0", json.dumps(report).encode())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _send_outcome(pipe: Connection, success: bytes, raw: bytes) -> None:
    pipe.send_bytes(success)
    pipe.send_bytes(raw)
    pipe.close()


def _work_as_rank(
    rank: int,
    ranks: int,
    port: int,
    patience: float,
    backend: str | None,
    work: Callable[..., Returned],
    args: tuple[Any, ...],
) -> Returned:
    """Join the other ranks, work, and leave them."""
    hear_signals()
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["LOCAL_RANK"] = str(rank)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    use_threads(max(1, (os.cpu_count() or 1) // ranks))
    limit = timedelta(seconds=patience + TORCH_EXTRA_SECONDS)
    store = TCPStore(LOCALHOST, port, is_master=False, timeout=limit)
    backend = backend or _choose_backend(store, rank, ranks)
    _join(backend, store, rank, ranks, limit)
    result = work(ProcessComm(patience), *args)
    finish()
    return result


def end_with_parent() -> None:
    """End this worker when its parent is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
