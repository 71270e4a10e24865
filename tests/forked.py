"""Runs command lines in processes that are forked from one that has everything loaded.

    pytest ──► fork server: torch and penstock, loaded once
                 ├─fork─► penstock train ...      its own folder, environment, output and signals
                 │          └─fork─► a second server, for the workers of this run
                 └─fork─► penstock eval ...

Loading torch takes seconds, and most tests of the command line are not about loading. Those
that are start a real interpreter.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import active_children, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from runpy import run_module, run_path

import torch

import penstock
from penstock.runtime.process.launch import ENDING_SIGNALS, serve_forks
from suite import trace_without_a_gpu

# What workers and commands load. The command line is not among it, because workers go without.
LOADED = (
    "branching_workers",
    "forked",
    "mesh_workers",
    "process_workers",
    "savings",
    "suite",
    "numba",
    "penstock.measure",
    "penstock.plan.paths",
    "penstock.plan.planner",
    "penstock.train.after.generate",
    "penstock.train.launch",
    "penstock.train.before.forecast",
    "penstock.train.launch",
    "penstock.train.before.start",
    "penstock.view",
    "torch._dynamo",  # by the first optimizer
    "torch.utils.tensorboard",
)
CLONE_NEWNET = 0x40000000  # of Linux: a namespace of networks
CLONE_NEWNS = 0x00020000  # a namespace of mounts
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
SIGNALS = (signal.SIGINT, *ENDING_SIGNALS)


def _repair_thread_pool() -> None:
    """Make torch's pool of threads anew in a fork, before several threads want it at once.

    torch itself does so when the pool is first used, and is not safe against a race there.
    """
    torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_repair_thread_pool)
trace_without_a_gpu()


def start_server() -> None:
    """Start the process that commands and workers are forked from, if it does not run."""
    folders = [Path(__file__).parent, Path(penstock.__file__).parents[1]]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    try:
        serve_forks(list(LOADED))
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def end_commands() -> None:
    """Kill the commands that tests have left behind, because pytest would wait for them."""
    for process in active_children():
        process.kill()


@dataclass(frozen=True, slots=True)
class Setting:
    """What a shell gives to a command, apart from its words and its output."""

    folder: Path
    environment: dict[str, str]
    strict: bool
    session: bool
    script: Path | None
    network: str
    disk: tuple[Path, Path] | None


class Command:
    """A running command line, `penstock` not included. It has the methods of `Popen`.

    `strict` turns warnings into errors. `session` gives it a process group of its own.
    `script` is run instead of `penstock`, with `words` as its arguments. `network` is the
    name of the network namespace to run in. `shown` sends the output to where this process
    prints, instead of keeping it. `disk` are two folders: the command finds the content of the
    first where the second is, as on a machine with a disk of its own.
    """

    def __init__(
        self,
        folder: Path,
        words: list[str],
        environment: Mapping[str, str],
        strict: bool = False,
        session: bool = False,
        script: Path | None = None,
        network: str = "",
        shown: bool = False,
        disk: tuple[Path, Path] | None = None,
    ) -> None:
        start_server()
        context = ForkServerContext()
        pipes = [context.Pipe(duplex=False) for _ in range(2 * (not shown))]
        theirs = [writer for _, writer in pipes]
        if shown:
            theirs = [Connection(os.dup(number), readable=False) for number in (1, 2)]
        setting = Setting(
            folder, dict(environment), strict, session, script, network, disk
        )
        self.process = context.Process(target=_run, args=(words, setting, *theirs))
        self.process.start()
        self.chunks: list[list[bytes]] = [[], []]
        self.readers = []
        for writer in theirs:
            writer.close()
        for (reader, _), chunks in zip(pipes, self.chunks, strict=False):
            thread = threading.Thread(target=_read, args=(reader, chunks), daemon=True)
            thread.start()
            self.readers.append(thread)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("penstock", timeout or 0.0)
        return self.process.exitcode

    def communicate(self, timeout: float = 600.0) -> tuple[str, str]:
        """Wait until the command and all who share its output have ended; return the output."""
        end = time.monotonic() + timeout
        self.wait(timeout)
        for thread in self.readers:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired("penstock", timeout)
        out, err = (b"".join(chunks).decode() for chunks in self.chunks)
        return out, err


def _read(pipe: Connection, chunks: list[bytes]) -> None:
    with pipe:
        while chunk := os.read(pipe.fileno(), 1 << 16):
            chunks.append(chunk)


# ---------------------------------------------------------------- in the forked process
def _run(words: list[str], setting: Setting, out: Connection, err: Connection) -> None:
    """Become a command: as if a shell had started it."""
    if setting.session:
        os.setsid()
    if setting.network:
        _enter(setting.network)
    if setting.disk is not None:
        _mount(*setting.disk)
    os.chdir(setting.folder)
    _set_environment(setting.environment)
    for pipe, number in ((out, 1), (err, 2)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The server blocks it (`serve_forks`); a shell does not.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if setting.strict:
        warnings.simplefilter("error")
    sys.argv = [str(setting.script or "penstock"), *words]
    fork_server_from_here()
    if setting.script is None:
        run_module("penstock", run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(setting.script.parent))
        run_path(str(setting.script), run_name="__main__")


def _enter(network: str) -> None:
    """Move this process into a network namespace, as `ip netns exec` does."""
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{network}") as file:
        if library.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _mount(source: Path, target: Path) -> None:
    """Let this process and its children find the content of one folder where another one is."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a namespace of mounts")
    for words, flags in (
        ((b"none", b"/"), MS_REC | MS_PRIVATE),
        ((bytes(source), bytes(target)), MS_BIND),
    ):
        if library.mount(*words, None, flags, None) != 0:
            raise OSError(ctypes.get_errno(), "cannot mount a folder")


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def fork_server_from_here() -> None:
    """Let this process's own fork server be a fork, too, instead of a new interpreter.

    The fork happens now, before this process starts threads, and waits until someone
    asks for a fork server. Then it takes over what a new process would have: the
    environment, the ignored signals and the file descriptors.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _wait_and_serve(theirs)
    theirs.close()
    start_process = util.spawnv_passfds

    def start(path: bytes, words: list[str], descriptors: list[int]) -> int:
        if "multiprocessing.forkserver" not in words[-1] or ours.fileno() < 0:
            return start_process(path, words, descriptors)
        ignored = [n for n in SIGNALS if signal.getsignal(n) is signal.SIG_IGN]
        request = [words[-1], dict(os.environ), ignored, list(descriptors)]
        data = json.dumps(request).encode()
        socket.send_fds(ours, [len(data).to_bytes(4, "big")], descriptors)
        ours.sendall(data)
        ours.close()
        return pid

    util.spawnv_passfds = start


def _wait_and_serve(request_socket: socket.socket) -> None:
    """Wait for the request of the command, and run its fork server; never return."""
    code = 1
    try:
        _forget_pytest()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        size, received, _, _ = socket.recv_fds(request_socket, 4, 8)
        if not size:  # the command ended without a fork server
            os._exit(0)
        with request_socket.makefile("rb") as stream:
            data = stream.read(int.from_bytes(size, "big"))
        request_socket.close()
        script, environment, ignored, wanted = json.loads(data)
        _set_environment(environment)
        _renumber(received, wanted)
        for number in set(SIGNALS) - set(ignored):
            signal.signal(number, signal.SIG_DFL)
        exec(script, {"__name__": "__main__"})
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


def _forget_pytest() -> None:
    """Show warnings and log messages as Python does without pytest."""
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


def _renumber(received: list[int], wanted: list[int]) -> None:
    """Give file descriptors the numbers that the script knows them by."""
    high = max([*received, *wanted]) + 1
    for place, descriptor in enumerate(received):
        os.dup2(descriptor, high + place)
        os.close(descriptor)
    for place, number in enumerate(wanted):
        os.dup2(high + place, number, inheritable=False)
        os.close(high + place)
