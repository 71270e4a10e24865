"""A worker that joins a run from another machine: it brings only the run's key.

dial the gate ─► copy config, plan and tokens ─► wait for a place ─► train like any other worker
                                                      └─ a spare waits until a worker is lost
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock.errors import FileError, PeerLostError, PenstockError, RunError
from penstock.formats.plan_json import read_plan
from penstock.runtime.wire.door import dial, split_address
from penstock.runtime.wire.exchange import Exchange
from penstock.runtime.wire.frames import receive_frame, send_frame
from penstock.runtime.wire.key import context_of
from penstock.runtime.wire.store import RemoteStore
from penstock.train.crew.depot import TOKENS_SUFFIX, RemoteDepot
from penstock.train.crew.gate import tell_verdict
from penstock.train.crew.member import (
    STORE_SECONDS,
    Member,
    set_environment,
    work_in_crew,
)
from penstock.train.crew.site import Site
from penstock.train.history import PLAN_FILE, WatchRow
from penstock.train.worker import FAILURE_FILE, Verdict

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
                "if run.listen is set"
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
                host = control.getsockname()[0]
                listen = f"[{host}]:0" if ":" in host else f"{host}:0"
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
            return self.work(Site(self.folder, exchange, self.depot()), place)
        finally:
            self.over = True
            exchange.close()

    # ------------------------------------------------------------ before there is a place
    def depot(self) -> RemoteDepot:
        """The launcher's files."""
        return RemoteDepot(partial(self.ask, "files", token=self.token))

    def bring_files(self) -> None:
        """Copy the files of the run into this worker's folder."""

        def watch(name: str, size: int) -> None:
            if name.endswith(TOKENS_SUFFIX) or size > 1 << 24:
                self.say("copying", f"{name}, {size / 1e6:,.1f} MB")

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / FAILURE_FILE).unlink(missing_ok=True)
            self.depot().bring_inputs(self.folder, watch)
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
            with suppress(PenstockError, OSError), self.ask_verdict() as connection:
                tell_verdict(connection, self.token, verdict)
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

    def ask_verdict(self) -> ssl.SSLSocket:
        """Open a connection over which this worker says how it ended."""
        return dial(self.address, self.context)

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
