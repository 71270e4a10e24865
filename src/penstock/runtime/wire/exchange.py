"""A worker's own door, at which the others of its generation connect to it.

A worker keeps its door for its whole life. Every connection says to which meeting it belongs and between which ranks it
goes; connections to earlier meetings are dropped.

    rank 1 dials rank 0 twice:   {"meeting": "7c…/g3", "source": 1, "target": 0}    tensors from 1 to 0
                                 {"meeting": "7c…/g3", "source": 0, "target": 1}    tensors from 0 to 1

Of two workers the one that cannot be reached from outside dials, and else the one with the higher rank.
"""

from __future__ import annotations

import ssl
import threading
from pathlib import Path
from typing import NamedTuple

from penstock.errors import PeerLostError, RunError
from penstock.runtime.comm.gloo import Broken
from penstock.runtime.wire.door import MAX_SERVED, Door, dial, split_address
from penstock.runtime.wire.frames import FIRST_BYTES, receive_frame, send_frame
from penstock.runtime.wire.key import context_of

LOOK_SECONDS = 0.05  # between two looks whether the meeting still stands


class Flow(NamedTuple):
    """One direction between two ranks of a meeting."""

    meeting: str
    source: int
    target: int


class Exchange:
    """Connects this worker to others, one meeting after the other.

    `listen` is where it can be reached; empty if it cannot, so that it must dial all others. Of
    `ranks` ranks, each may have a connection for each direction, to this meeting and to the next.
    """

    def __init__(self, listen: str, key: Path, ranks: int) -> None:
        self.context = context_of(key, server=False)
        self.changed = threading.Condition()
        self.waiting: dict[Flow, ssl.SSLSocket] = {}
        self.most_waiting = 4 * ranks
        self.meeting = ""
        self.door: Door | None = None
        self.address = ""
        if listen:
            host, port = split_address(listen)
            most = max(self.most_waiting, MAX_SERVED)
            self.door = Door(host, port, key, self._take, most=most)
            shown = f"[{host}]" if ":" in host else host
            self.address = f"{shown}:{self.door.address[1]}"

    def begin(self, meeting: str) -> None:
        """Take part in a new meeting, and forget earlier ones."""
        with self.changed:
            self.meeting = meeting
            for flow in list(self.waiting):
                if flow.meeting != meeting and self._is_earlier(flow.meeting):
                    self.waiting.pop(flow).close()

    def _is_earlier(self, meeting: str) -> bool:
        """Whether a meeting came before this one; the others may have begun a later one."""
        return _number(meeting) <= _number(self.meeting)

    def _take(self, connection: ssl.SSLSocket) -> bool:
        """Keep a connection until this worker needs it."""
        fields = receive_frame(connection, FIRST_BYTES)
        flow = Flow(
            str(fields.get("meeting")),
            int(fields.get("source", -1)),
            int(fields.get("target", -1)),
        )
        with self.changed:
            old = self.waiting.pop(flow, None)
            if old is not None:
                old.close()
            if len(self.waiting) >= self.most_waiting:
                return False
            self.waiting[flow] = connection
            self.changed.notify_all()
        return True

    def accept(self, flow: Flow, broken: Broken) -> ssl.SSLSocket:
        """Wait for a connection that another worker makes."""
        with self.changed:
            while flow not in self.waiting:
                if broken():
                    raise PeerLostError(f"{flow} does not come, since a worker is lost")
                self.changed.wait(LOOK_SECONDS)
            return self.waiting.pop(flow)

    def reach(self, address: str, flow: Flow) -> ssl.SSLSocket:
        """Connect to another worker."""
        if not address:
            raise RunError(
                f"ranks {flow.source} and {flow.target} cannot connect: "
                "neither can be reached from outside\n"
                "  start one of the two with `penstock join --listen HOST:PORT`"
            )
        connection = dial(split_address(address), self.context)
        send_frame(connection, flow._asdict())
        return connection

    def close(self) -> None:
        """Stop listening."""
        if self.door is not None:
            self.door.close()
        with self.changed:
            for connection in self.waiting.values():
                connection.close()
            self.waiting.clear()


def _number(meeting: str) -> int:
    """The number at the end of a meeting's name; -1 if it has none."""
    digits = meeting.rpartition("/g")[2]
    return int(digits) if digits.isdigit() else -1
