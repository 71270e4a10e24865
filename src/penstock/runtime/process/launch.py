"""How ranks come to be: under torchrun or any launcher that sets its environment, or as processes of this machine.

    torchrun --nproc-per-node 4 train.py       in train.py:   comm = init() ... finish()
    spawn(4, work, 1, "a")                     calls          work(comm, 1, "a")   in each of four new processes

`spawn` keeps the store that the ranks meet at, on a port that the system picks: no two runs can want the same one. What
the workers return comes back through pipes to our own children. None of them outlives the call, nor this process.
"""

from __future__ import annotations

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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from penstock.errors import PeerLostError, RunError
from penstock.runtime.comm import ipc
from penstock.runtime.comm.process import ProcessComm
from penstock.runtime.process.machine import own_gpu
from penstock.runtime.process.status import ERRORS

Returned = TypeVar("Returned")
Worker: TypeAlias = tuple[BaseProcess, Connection]  # and what it says
LOCALHOST = "127.0.0.1"
TORCH_EXTRA_SECONDS = 30.0  # seconds by which torch's own limits are longer than ours, so that ours speak first
SECONDS_TO_REPORT = (
    12.0  # for the other workers to say what they have seen, once one has failed
)
KILLED, ENDED = "(killed)", "(ended)"
ENDING = (
    signal.SIGTERM,
    signal.SIGHUP,
)  # what ends all processes of a job or of a terminal
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# ---------------------------------------------------------------- under a launcher
def init(
    backend: str | None = None,
    patience: float = 300.0,
    device: torch.device | str | None = None,
) -> ProcessComm:
    """Joins the ranks that torchrun has started. NCCL if every rank has a GPU of its own, our own backend if ranks of
    one machine share GPUs, else gloo; or as you say.

    `patience`: after how many seconds a wait is a `StuckError`. `device`: where tensors land, if not on the own GPU
    (NCCL) or the CPU (gloo).
    """
    if not dist.is_initialized():
        missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
        if missing:
            raise RunError(
                f"no {' '.join(missing)} in the environment: start with torchrun --nproc-per-node RANKS ..."
            )
        limit = timedelta(seconds=patience + TORCH_EXTRA_SECONDS)
        store, rank, ranks = next(rendezvous("env://", timeout=limit))
        _join(backend or _backend(store, rank, ranks), store, rank, ranks, limit)
    return ProcessComm(patience, device)


def under_launcher() -> bool:
    """Whether torchrun, or one that sets the same environment, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_on_ranks(
    work: Callable[..., Returned], *args: Any, patience: float = 300.0
) -> Returned | None:
    """Runs `work(comm, *args)` on the ranks of torchrun, of which this is one; None on all but the first."""
    comm = init(patience=patience)
    found = work(comm, *args)
    finish()
    return found if comm.rank == 0 else None


def after_first(comm: ProcessComm, work: Callable[[], None]) -> None:
    """Rank 0 does some work, however long it takes; the others wait for it without a limit, but not for a dead one."""
    store = PrefixStore("penstock/first", _get_default_store())
    if comm.rank == 0:
        work()
        store.set("done", "yes")
    try:
        while not store.check(["done"]):
            time.sleep(0.1)
    except RuntimeError:  # of its connection
        raise PeerLostError(
            f"rank {comm.rank} waits for rank 0 to prepare the run, but rank 0 is gone"
        ) from None
    comm.barrier()


def _join(backend: str, store: Store, rank: int, ranks: int, limit: timedelta) -> None:
    gpu = None
    if backend in ("nccl", ipc.BACKEND_NAME):
        gpu = torch.device("cuda", own_gpu())
        torch.cuda.set_device(gpu)
    if backend == ipc.BACKEND_NAME:
        ipc.register()
        gpu = None  # torch would want to know the backend's options
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=limit,
            device_id=gpu,
        )
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {rank} of {ranks} cannot reach the others: {error}"
        ) from None


def _backend(store: Store, rank: int, ranks: int) -> str:
    """The same answer on all ranks: they compare their GPUs."""
    mine = (
        str(torch.cuda.get_device_properties(own_gpu()).uuid)
        if torch.cuda.is_available()
        else ""
    )
    store.set(f"penstock/gpu/{rank}", f"{socket.gethostname()} {mine}" if mine else "")
    keys = [f"penstock/gpu/{other}" for other in range(ranks)]
    store.wait(keys)
    gpus = {store.get(key).decode() for key in keys}
    if "" in gpus:
        return "gloo"
    if len(gpus) == ranks and dist.is_nccl_available():
        return "nccl"
    return ipc.BACKEND_NAME if len({name.split()[0] for name in gpus}) == 1 else "gloo"


def finish() -> None:
    """Waits for the others, then leaves. Only after success: a rank that fails just ends."""
    if not dist.is_initialized():
        return
    try:
        dist.barrier()
    except RuntimeError:
        raise PeerLostError("a rank has died or left before all had finished") from None
    dist.destroy_process_group()


# ---------------------------------------------------------------- on this machine
@dataclass(frozen=True, slots=True)
class WorkerOutcome(Generic[Returned]):
    """What became of a worker: a result, or the name of an error (or `KILLED`, `ENDED`) and its text."""

    rank: int
    code: int | None  # it exited with; below 0: killed by that signal
    result: Returned | None = None
    error: str = ""
    text: str = ""
    trace: str = ""

    def __str__(self) -> str:
        if self.error in ERRORS:
            return self.text
        if self.error in (KILLED, ENDED):
            return f"rank {self.rank} {self.text}"
        return f"rank {self.rank} has failed: {self.error}: {self.text}\n\n{self.trace}".strip()

    @property
    def guilt(self) -> int:
        """How likely it began the end of a run: an error of its own, killed, hurt by another's end, ended by us."""
        return {"PeerLostError": 2, KILLED: 3, ENDED: 1, "": 0}.get(self.error, 4)


def spawn(
    ranks: int,
    work: Callable[..., Returned],
    *args: Any,
    patience: float = 300.0,
    backend: str | None = "gloo",
) -> list[Returned]:
    """Runs `work(comm, *args)` in so many processes, with gloo between them, or as you say; their results by rank.

    `backend` None: what fits the GPUs at hand, as in `init`.

    `work` and its arguments are pickled for our own children, so `work` is a function of a module. If a worker fails,
    the others are ended, and its error is raised here: a `RunError` with its text.
    """
    found = worker_outcomes(ranks, work, *args, patience=patience, backend=backend)
    worst = max(found, key=lambda outcome: outcome.guilt)
    if worst.error == KILLED:
        witness = [str(other) for other in found if other.error in ERRORS]
        raise PeerLostError("\n\n".join([str(worst), *witness[:1]]))
    if worst.error:
        raise ERRORS.get(worst.error, RunError)(str(worst))
    return [outcome.result for outcome in found]  # type: ignore[misc]


def worker_outcomes(
    ranks: int,
    work: Callable[..., Returned],
    *args: Any,
    patience: float = 300.0,
    backend: str | None = "gloo",
) -> list[WorkerOutcome[Returned]]:
    """Like `spawn`, but tells of every worker, by rank, how it ended."""
    if work.__module__ == "__main__" and not hasattr(
        sys.modules["__main__"], "__file__"
    ):
        raise RunError(
            f"other processes cannot import {work.__qualname__}: put it into a file and import it from there"
        )
    store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    context = _context()
    workers: list[Worker] = []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            given = (
                rank,
                ranks,
                store.port,
                patience,
                backend,
                theirs,
                dict(os.environ),
                work,
                args,
            )
            process = context.Process(target=_worker, args=given, name=f"rank {rank}")  # type: ignore[attr-defined]
            workers.append((process, ours))
            process.start()
            theirs.close()
        return _collect(workers)
    except (EOFError, ConnectionError):
        raise RunError(
            "the process that starts the workers is gone: somebody or the system has killed it\n"
            "  start again with the same command"
        ) from None
    finally:
        _bury(workers)


def _context() -> BaseContext:
    """New processes, or on Linux forks of one new process that has torch loaded: seconds faster."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    serve_forks([__name__])
    return multiprocessing.get_context("forkserver")


def serve_forks(modules: list[str]) -> None:
    """Starts the process that workers are forks of, with these modules loaded: seconds faster, also at a restart.

    Ctrl-C goes to all processes of a terminal. This one does not hear it, not even while it loads: who is to end is
    for the process that has started them all to say. Nor does torch write there what befell its sockets.

    The same goes for SIGTERM and SIGHUP, which a batch system or a closed terminal sends to every process of a run.
    Workers inherit that they are ignored, until they call `hear_signals`.
    """
    multiprocessing.set_forkserver_preload(modules)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is loaded
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # a Ctrl-C that comes now is kept for us
    before = {
        number: signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGINT, *ENDING)
    }
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def hear_signals() -> None:
    """In a worker: SIGTERM ends it again."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _collect(workers: list[Worker]) -> list[WorkerOutcome[Any]]:
    """What the workers say; once one has failed, the others have a moment left."""
    found: dict[int, WorkerOutcome[Any]] = {}
    end = float("inf")
    while len(found) < len(workers) and time.monotonic() < end:
        open_ = {
            pipe: rank for rank, (_, pipe) in enumerate(workers) if rank not in found
        }
        for pipe in wait(list(open_), timeout=min(end - time.monotonic(), 3600.0)):
            rank = open_[pipe]  # type: ignore[index]
            found[rank] = _outcome(rank, *workers[rank])
            if found[rank].error:
                end = min(end, time.monotonic() + SECONDS_TO_REPORT)
    for rank in set(range(len(workers))) - set(found):
        found[rank] = WorkerOutcome(rank, None, error=ENDED, text="had to be ended")
    return [found[rank] for rank in sorted(found)]


def _outcome(rank: int, process: BaseProcess, pipe: Connection) -> WorkerOutcome[Any]:
    """What one worker has said before it ended; a word from outside if it could not."""
    try:
        good, raw = pipe.recv_bytes(), pipe.recv_bytes()
    except EOFError:
        process.join(SECONDS_TO_REPORT)
        code = process.exitcode
        if code is not None and code < 0:
            return WorkerOutcome(
                rank,
                code,
                error=KILLED,
                text=f"was killed by {signal.Signals(-code).name}",
            )
        return WorkerOutcome(
            rank,
            code,
            error=KILLED,
            text=f"ended with exit code {code} before it could say why",
        )
    process.join(SECONDS_TO_REPORT)
    if good == b"1":
        return WorkerOutcome(rank, process.exitcode, pickle.loads(raw))
    return WorkerOutcome(rank, process.exitcode, **json.loads(raw))


def _bury(workers: list[Worker]) -> None:
    """Ends what still runs."""
    for process, pipe in workers:
        if process.pid is not None:
            process.kill()
            process.join()
            process.close()
        pipe.close()


# ---------------------------------------------------------------- in a worker
def _worker(
    rank: int,
    ranks: int,
    port: int,
    patience: float,
    backend: str | None,
    pipe: Connection,
    environment: dict[str, str],
    work: Callable[..., Returned],
    args: tuple[Any, ...],
) -> None:
    """Runs the work and says how it went. A failed worker ends at once: torch might wait for threads that hang."""
    hear_signals()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment, LOCAL_RANK=str(rank))
    os.environ.setdefault(
        "GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    limit = timedelta(seconds=patience + TORCH_EXTRA_SECONDS)
    try:
        store = TCPStore(LOCALHOST, port, is_master=False, timeout=limit)
        _join(backend or _backend(store, rank, ranks), store, rank, ranks, limit)
        result = work(ProcessComm(patience), *args)
        finish()
        _say(pipe, b"1", pickle.dumps(result))
    except BaseException as error:
        said = {
            "error": type(error).__name__,
            "text": str(error),
            "trace": traceback.format_exc(),
        }
        _say(pipe, b"0", json.dumps(said).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _say(pipe: Connection, good: bytes, raw: bytes) -> None:
    pipe.send_bytes(good)
    pipe.send_bytes(raw)
    pipe.close()


def _end_with_parent() -> None:
    """A worker whose parent is gone ends too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
