"""The launcher's door, at which workers from other machines join a run.

    penstock join ── TLS, with the run's key ──► gate ─┬─ place     a vacant rank, or a spare's wait for one
                                                       ├─ files     config, plan, tokens, checkpoints
                                                       ├─ store     where workers meet
                                                       └─ verdict   how the worker ended

A connection asks for one of these. The one that asks for a place stays open: when it ends, the worker is lost.
There is a limit for the workers and for the connections of each, so that a broken one cannot exhaust this machine.
"""

from __future__ import annotations

import pickle
import secrets
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from penstock.errors import PeerLostError
from penstock.runtime.torch_internals import Store
from penstock.runtime.wire.door import Door, hang_up, split_address
from penstock.runtime.wire.frames import receive_frame, send_frame
from penstock.runtime.wire.store import serve_store
from penstock.train.crew.depot import RunFiles, serve_files
from penstock.train.screen import SayLine
from penstock.train.worker import Verdict

# A worker that waits for a place hears after this time that it still waits.
ANSWER_SECONDS = 1.0
MAX_SPARES = 16  # workers beyond those that the run has places for
# To store and files, at a time; a worker has at most five.
MAX_CONNECTIONS = 12


class Guest:
    """A worker from another machine, with the methods of a process that the keeper uses."""

    pid = None
    exitcode = None

    def __init__(self, name: str, connection: ssl.SSLSocket) -> None:
        self.name = name
        self.token = secrets.token_hex(16)
        self.connection = connection
        self.pipe, self.writer = Pipe(duplex=False)  # what the keeper hears of it
        self.place: dict[str, Any] = {}
        self.seated = threading.Event()
        self.waits = False  # whether it is ready for a place
        self.told = False  # whether the user knows that it waits
        self.gone = threading.Event()
        self.lock = threading.Lock()
        self.others: set[ssl.SSLSocket] = set()  # its connections to store and files

    def seat(self, **place: Any) -> None:
        """Give the worker a place in the crew."""
        self.place = place
        self.seated.set()

    def attend(self) -> None:
        """Answer until its connection ends; runs on the thread of the connection."""
        try:
            while True:
                receive_frame(self.connection)
                self.waits = True
                self.seated.wait(ANSWER_SECONDS)
                answer = {**self.place, "token": self.token} if self.place else {}
                send_frame(self.connection, answer)
        finally:
            self.end(None)

    def end(self, verdict: Verdict | None) -> None:
        """Tell the keeper that it has ended, and how."""
        with self.lock:
            if self.writer.closed:
                return
            if verdict is not None:
                with suppress(OSError):
                    self.writer.send_bytes(pickle.dumps(verdict))
            self.writer.close()
            self.gone.set()

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

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended; a machine that does not answer cannot be waited for."""
        self.gone.wait(timeout if timeout is not None else ANSWER_SECONDS)


class Gate:
    """Takes in workers from other machines. The keeper asks it who waits for a place."""

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
        self.most_guests = ranks + MAX_SPARES
        self.store = store
        self.files = files
        self.version = version
        self.say = say
        self.lock = threading.Lock()
        self.guests: dict[str, Guest] = {}  # by their tokens
        self.refused = 0
        host, port = split_address(listen, "run.listen")
        # Each also has the connection over which it asked for a place, and one for its verdict.
        most = self.most_guests * (MAX_CONNECTIONS + 2)
        self.door = Door(host, port, key, self.serve, self.refuse, most)

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return self.door.address[1]

    def waiting(self) -> list[Guest]:
        """The workers that are ready and have no place yet, in the order in which they came."""
        with self.lock:
            for token, guest in list(self.guests.items()):
                if guest.gone.is_set():
                    del self.guests[token]
                    if not guest.seated.is_set():
                        guest.pipe.close()
            guests = list(self.guests.values())
        return [one for one in guests if one.waits and not one.seated.is_set()]

    def find(self, request: dict[str, Any]) -> Guest:
        """The worker that a connection belongs to; raise an error if it has ended."""
        with self.lock:
            guest = self.guests.get(str(request.get("token")))
        if guest is None:
            raise PeerLostError("a connection of a worker that nobody knows")
        return guest

    def serve(self, connection: ssl.SSLSocket) -> bool:
        """Do what a connection asks for; runs on a thread of its own."""
        request = receive_frame(connection)
        wanted = request.get("want")
        if wanted == "store":
            self.find(request).serve(connection, self.serve_store)
        elif wanted == "files":
            self.find(request).serve(connection, self.serve_files)
        elif wanted == "place":
            self.welcome(connection, request)
        elif wanted == "verdict":
            self.hear(request)
            send_frame(connection, {})
        return False

    def serve_store(self, connection: ssl.SSLSocket) -> None:
        """Let a worker use the store where all meet."""
        serve_store(connection, self.store.clone())  # type: ignore[attr-defined]

    def serve_files(self, connection: ssl.SSLSocket) -> None:
        """Give a worker files of the run, and take its checkpoints."""
        serve_files(connection, self.files)

    def welcome(self, connection: ssl.SSLSocket, request: dict[str, Any]) -> None:
        """Let a worker wait for a place, if it runs the same Penstock."""
        theirs = request.get("version")
        if theirs != self.version:
            text = f"it is Penstock {self.version}, and this one {theirs}: install the same"
            send_frame(connection, {"refused": text})
            return
        name = "".join(one for one in str(request.get("name")) if one.isprintable())
        guest = Guest(name[:64] or "a machine without a name", connection)
        with self.lock:
            here = [one for one in self.guests.values() if not one.gone.is_set()]
            full = len(here) >= self.most_guests
            if not full:
                self.guests[guest.token] = guest
        if full:
            text = f"it has {len(here)} workers and spares of other machines already"
            send_frame(connection, {"refused": text})
            return
        send_frame(connection, {"token": guest.token})
        guest.attend()

    def hear(self, request: dict[str, Any]) -> None:
        """Hear how a worker ended."""
        guest = self.find(request)
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
        guest.end(verdict)

    def refuse(self, address: str) -> None:
        """Tell the user about strangers, but not about each of a thousand."""
        self.refused += 1
        if self.refused in (1, 10, 100) or self.refused % 1000 == 0:
            count = f"{self.refused:,} connections" if self.refused > 1 else "one"
            self.say(f"refused {count} without the run's key, last from {address}")

    def close(self) -> None:
        """Tell those who still wait that the run is over, and close all connections."""
        for guest in self.waiting():
            guest.seat(over=True)
        with self.lock:
            guests = list(self.guests.values())
        for guest in guests:
            if guest.place.get("over"):
                guest.gone.wait(ANSWER_SECONDS)
        self.door.close()


def tell_verdict(connection: ssl.SSLSocket, token: str, verdict: Verdict) -> None:
    """Tell the launcher how this worker has ended."""
    request = {"want": "verdict", "token": token, "verdict": asdict(verdict)}
    send_frame(connection, request)
    receive_frame(connection)
