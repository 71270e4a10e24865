"""Workers from other machines: how the launcher admits them, and how they join a run with nothing but its key.

    penstock join ── TLS, with the run's key ──► admission ─┬─ place     a vacant rank, or a spare's wait for one
                                                            ├─ files     config, plan, tokens, checkpoints
                                                            ├─ store     where workers meet
                                                            └─ verdict   how the worker ended

    dial ─► copy config, plan and tokens ─► wait for a place ─► train like any other worker
                                                └─ a spare waits until a worker is lost

A connection asks for one of these. The one that asks for a place stays open: when it ends, the worker is lost. There
is a limit for the workers and for the connections of each, so that a broken one cannot exhaust this machine.
"""

from __future__ import annotations

import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock.crew.files import TOKENS_SUFFIX, LauncherFiles, RunFiles, serve_files
from penstock.crew.links import Exchange
from penstock.crew.member import (
    STORE_SECONDS,
    Member,
    Site,
    set_environment,
    work_in_crew,
)
from penstock.crew.store import RemoteStore, serve_store
from penstock.crew.tls import (
    Listener,
    context_of,
    dial,
    hang_up,
    receive_frame,
    send_frame,
    write_address,
)
from penstock.errors import FileError, PeerLostError, PenstockError, RunError
from penstock.formats.plan_json import read_plan
from penstock.runtime.process.launch import KILLED, WorkerOutcome
from penstock.torch_internals import Store
from penstock.train.elastic import split_address
from penstock.train.history import PLAN_FILE, SayLine, WatchRow
from penstock.train.job import Verdict
from penstock.train.launch import FAILURE_FILE

# A worker that waits for a place hears after this time that it still waits.
ANSWER_SECONDS = 1.0
MAX_SPARES = 16  # workers beyond those that the run has places for
# To store and files, at a time; a worker has at most five.
MAX_CONNECTIONS = 12


class RemoteWorker:
    """A worker from another machine, with the methods of a process that the coordinator uses."""

    pid = None

    def __init__(self, name: str, connection: ssl.SSLSocket) -> None:
        self.name = name
        self.token = secrets.token_hex(16)
        self.connection = connection
        # The coordinator waits for the end of this pipe, and then asks for the outcome.
        self.pipe, self.writer = Pipe(duplex=False)
        self.verdict: Verdict | None = None
        self.place: dict[str, Any] = {}
        self.placed = threading.Event()
        self.waits = False  # whether it is ready for a place
        self.told = False  # whether the user knows that it waits
        self.gone = threading.Event()
        self.lock = threading.Lock()
        self.others: set[ssl.SSLSocket] = set()  # its connections to store and files

    def give_place(self, **place: Any) -> None:
        """Give the worker a place in the crew."""
        self.place = place
        self.placed.set()

    def attend(self) -> None:
        """Answer until its connection ends; runs on the thread of the connection."""
        try:
            while True:
                receive_frame(self.connection)
                self.waits = True
                self.placed.wait(ANSWER_SECONDS)
                answer = {**self.place, "token": self.token} if self.place else {}
                send_frame(self.connection, answer)
        finally:
            self.end(None)

    def end(self, verdict: Verdict | None) -> None:
        """Tell the coordinator that it has ended, and how."""
        with self.lock:
            if self.writer.closed:
                return
            self.verdict = verdict
            self.writer.close()
            self.gone.set()

    def outcome(self) -> WorkerOutcome[Verdict]:
        """How it ended, as the coordinator has to know it."""
        if self.verdict is not None:
            return WorkerOutcome(0, None, self.verdict)
        text = f"on {self.name} has ended, or cannot be reached any more"
        return WorkerOutcome(0, None, error=KILLED, text=text)

    def close(self) -> None:
        """Hear no more of it."""
        self.pipe.close()

    def kill(self) -> None:
        """End its connections. It ends itself then, and nobody listens to it any more."""
        with self.lock:
            connections = [self.connection, *self.others]
            self.others.clear()
        self.gone.set()
        for connection in connections:
            hang_up(connection)

    def serve(
        self, connection: ssl.SSLSocket, work: Callable[[ssl.SSLSocket], None]
    ) -> None:
        """Serve another connection of it, unless it has ended or has too many."""
        with self.lock:
            if self.gone.is_set() or len(self.others) >= MAX_CONNECTIONS:
                return
            self.others.add(connection)
        try:
            work(connection)
        finally:
            with self.lock:
                self.others.discard(connection)

    def join(self, seconds: float) -> None:
        """Wait until it has ended, but not for longer."""
        self.gone.wait(seconds)


class Admission:
    """Takes in workers from other machines. The coordinator asks it who waits for a place."""

    def __init__(
        self,
        listen: str,
        key: Path,
        store: Store,
        files: RunFiles,
        version: str,
        say: SayLine,
        ranks: int,
    ) -> None:
        self.most_workers = ranks + MAX_SPARES
        self.store = store
        self.files = files
        self.version = version
        self.say = say
        self.lock = threading.Lock()
        self.remotes: dict[str, RemoteWorker] = {}  # by their tokens
        self.refused = 0
        host, port = split_address(listen, "elastic.listen")
        # Each also has the connection over which it asked for a place, and one for its verdict.
        most = self.most_workers * (MAX_CONNECTIONS + 2)
        self.listener = Listener(host, port, key, self.serve, self.refuse, most)

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return self.listener.address[1]

    def waiting(self) -> list[RemoteWorker]:
        """The workers that are ready and have no place yet, in the order in which they came."""
        with self.lock:
            for token, remote in list(self.remotes.items()):
                if remote.gone.is_set():
                    del self.remotes[token]
                    if not remote.placed.is_set():
                        remote.close()
            remotes = list(self.remotes.values())
        return [one for one in remotes if one.waits and not one.placed.is_set()]

    def find(self, request: dict[str, Any]) -> RemoteWorker:
        """The worker that a connection belongs to; raise an error if it has ended."""
        with self.lock:
            remote = self.remotes.get(str(request.get("token")))
        if remote is None:
            raise PeerLostError("a connection of a worker that nobody knows")
        return remote

    def serve(self, connection: ssl.SSLSocket) -> bool:
        """Do what a connection asks for; runs on a thread of its own."""
        request = receive_frame(connection)
        wanted = request.get("want")
        if wanted == "store":
            self.find(request).serve(
                connection,
                lambda one: serve_store(one, self.store.clone()),  # type: ignore[attr-defined]
            )
        elif wanted == "files":
            work = partial(serve_files, files=self.files)
            self.find(request).serve(connection, work)
        elif wanted == "place":
            self.welcome(connection, request)
        elif wanted == "verdict":
            self.hear(request)
            send_frame(connection, {})
        return False

    def welcome(self, connection: ssl.SSLSocket, request: dict[str, Any]) -> None:
        """Let a worker wait for a place, if it runs the same Penstock."""
        theirs = request.get("version")
        if theirs != self.version:
            text = f"it is Penstock {self.version}, and this one {theirs}: install the same"
            send_frame(connection, {"refused": text})
            return
        name = "".join(one for one in str(request.get("name")) if one.isprintable())
        remote = RemoteWorker(name[:64] or "a machine without a name", connection)
        with self.lock:
            here = [one for one in self.remotes.values() if not one.gone.is_set()]
            full = len(here) >= self.most_workers
            if not full:
                self.remotes[remote.token] = remote
        if full:
            text = f"it has {len(here)} workers and spares of other machines already"
            send_frame(connection, {"refused": text})
            return
        send_frame(connection, {"token": remote.token})
        remote.attend()

    def hear(self, request: dict[str, Any]) -> None:
        """Hear how a worker ended."""
        remote = self.find(request)
        told = request.get("verdict")
        names = {field.name for field in fields(Verdict)}
        if not isinstance(told, dict) or set(told) != names:
            raise PeerLostError("a verdict of another form")
        verdict = Verdict(
            int(told["step"]),
            bool(told["stopped"]),
            str(told["error"]),
            str(told["text"]),
        )
        remote.end(verdict)

    def refuse(self, address: str) -> None:
        """Tell the user about strangers, but not about each of a thousand."""
        self.refused += 1
        if self.refused in (1, 10, 100) or self.refused % 1000 == 0:
            count = f"{self.refused:,} connections" if self.refused > 1 else "one"
            self.say(f"refused {count} without the run's key, last from {address}")

    def close(self) -> None:
        """Tell those who still wait that the run is over, and close all connections."""
        for remote in self.waiting():
            remote.give_place(over=True)
        with self.lock:
            remotes = list(self.remotes.values())
        for remote in remotes:
            if remote.place.get("over"):
                remote.gone.wait(ANSWER_SECONDS)
        self.listener.close()


SayTopic = Callable[[str, str], None]  # a topic and a line


class Joining:
    """One attempt to join a run."""

    def __init__(self, address: str, key: Path, folder: Path, say: SayTopic) -> None:
        self.address = split_address(address)
        self.context = context_of(key, server=False)
        self.key = key
        self.folder = folder
        self.say = say
        self.token = ""
        self.over = False
        # Called before the process ends itself because the launcher has ended.
        self.clean_up: Callable[[], None] = lambda: None

    def ask(self, want: str, **more: Any) -> ssl.SSLSocket:
        """Open a connection to the launcher that asks for one thing."""
        connection = dial(self.address, self.context)
        send_frame(connection, {"want": want, **more})
        return connection

    def run(self, listen: str | None, version: str) -> Verdict:
        """Join, and train until the run is over; a spare that was not needed has done no step.

        `listen` is where other workers can reach this one; None for the address from which this
        machine reaches the launcher, empty if nobody can.
        """
        try:
            control = self.ask("place", version=version, name=socket.gethostname())
        except PeerLostError as error:
            raise RunError(
                f"{error}\n  `penstock train` shows the line to join with, "
                "if elastic.listen is set"
            ) from None
        with control:
            return self.take_part(control, listen)

    def take_part(self, control: ssl.SSLSocket, listen: str | None) -> Verdict:
        """Prepare, wait for a place, and train."""
        try:
            answer = receive_frame(control)
            if "refused" in answer:
                raise RunError(
                    f"the run does not take this worker: {answer['refused']}"
                )
            self.token = str(answer["token"])
            self.bring_files()
            if listen is None:
                listen = write_address(control.getsockname()[0], 0)
            ranks = read_plan(self.folder / PLAN_FILE).schedule.ranks
            exchange = Exchange(listen, self.key, ranks)
            place = self.wait_for_place(control)
        except (PeerLostError, OSError) as error:
            raise RunError(f"the launcher is gone: {error}") from None
        try:
            if not place:
                return Verdict()
            leash = partial(self.end_with_launcher, control)
            threading.Thread(target=leash, name="leash", daemon=True).start()
            return self.work(Site(self.folder, exchange, self.launcher_files()), place)
        finally:
            self.over = True
            exchange.close()

    # ------------------------------------------------------------ before there is a place
    def launcher_files(self) -> LauncherFiles:
        """The launcher's files."""
        return LauncherFiles(partial(self.ask, "files", token=self.token))

    def bring_files(self) -> None:
        """Copy the files of the run into this worker's folder."""

        def watch(name: str, size: int) -> None:
            if name.endswith(TOKENS_SUFFIX) or size > 1 << 24:
                self.say("copying", f"{name}, {size / 1e6:,.1f} MB")

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / FAILURE_FILE).unlink(missing_ok=True)
            self.launcher_files().bring_inputs(self.folder, watch)
        except OSError as error:
            raise FileError(
                f"cannot copy the files of the run to {self.folder}: "
                f"{error.strerror or error}"
            ) from None

    def wait_for_place(self, control: ssl.SSLSocket) -> dict[str, Any]:
        """Wait until the run has a place for this worker; return nothing if it is over."""
        told = False
        while True:
            send_frame(control, {"waits": True})
            place = receive_frame(control)
            if "worker" in place:
                return place
            if place.get("over"):
                return {}
            if not told:
                self.say(
                    "waiting",
                    "for a place; without a vacant rank, this worker is a spare and takes "
                    "the place of the next worker that is lost",
                )
                told = True

    # ------------------------------------------------------------ with a place
    def work(self, site: Site, place: dict[str, Any]) -> Verdict:
        """Train as one of the workers of the run."""
        worker = int(place["worker"])
        set_environment(worker, int(place["workers"]), neighbours=1)
        self.say("joined", f"as worker {worker}")
        try:
            member = Member(worker, RemoteStore(self.dial_store))
            verdict = work_in_crew(
                member, site, bool(place["resume"]), True, _no_screen
            )
            self.over = True  # The launcher may end the connection now.
            with suppress(PenstockError, OSError):
                self.tell_verdict(verdict)
        except dist.DistError as error:
            raise RunError(
                f"worker {worker} has lost the launcher: {error}\n"
                "  join again with the same command"
            ) from None
        return verdict

    def dial_store(self) -> ssl.SSLSocket:
        """Open a connection to the launcher's store."""
        connection = self.ask("store", token=self.token)
        connection.settimeout(STORE_SECONDS)
        return connection

    def tell_verdict(self, verdict: Verdict) -> None:
        """Tell the launcher how this worker has ended."""
        told = asdict(verdict)
        with self.ask("verdict", token=self.token, verdict=told) as connection:
            receive_frame(connection)

    def end_with_launcher(self, control: ssl.SSLSocket) -> None:
        """End this process when the launcher ends, or goes on without it."""
        with suppress(PeerLostError):
            receive_frame(control)
        if not self.over:
            self.say("ended", "the launcher has ended the connection")
            self.clean_up()
            os._exit(1)


def _no_screen() -> WatchRow:
    raise AssertionError("a worker from another machine does not lead")
