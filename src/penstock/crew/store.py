"""The launcher's store, used from another machine.

    worker ── RemoteStore ══ TLS ══ the listener of the launcher ── TCPStore, which only this machine can reach

torch's TCPStore believes everyone who reaches its port. So that port is bound to the loopback interface, and a worker
from another machine asks for each entry over an encrypted connection.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.crew.tls import MAX_PLAN_BYTES, hang_up, receive_frame, send_frame
from penstock.errors import PeerLostError
from penstock.torch_internals import Store

Dial = Callable[[], ssl.SSLSocket]
OPERATIONS = ("set", "get", "add", "check", "compare_set", "delete_key", "wait")


class RemoteStore(Store):
    """A store that asks the launcher over one connection; threads take turns."""

    def __init__(self, dial: Dial) -> None:
        super().__init__()
        self.dial = dial
        self.lock = threading.Lock()
        try:
            self.connection = dial()
        except PeerLostError as error:
            raise dist.DistNetworkError(str(error)) from None
        # torch keeps only its own half of a clone.
        self.clones: list[RemoteStore] = []
        self.closed = False

    def ask(self, operation: str, *words: Any) -> Any:
        """Let the launcher's store do something, and return what it answers."""
        try:
            with self.lock:
                send_frame(self.connection, {"do": operation, "with": words})
                answer = receive_frame(self.connection, MAX_PLAN_BYTES)
        except (PeerLostError, OSError, ValueError) as error:
            raise dist.DistNetworkError(
                f"the store of the launcher cannot be reached: {error}"
            ) from None
        if "error" in answer:
            raise dist.DistStoreError(str(answer["error"]))
        return answer["is"]

    def clone(self) -> RemoteStore:
        """Another connection, which no wait on this one can block."""
        self.clones = [one for one in self.clones if not one.closed]
        self.clones.append(RemoteStore(self.dial))
        return self.clones[-1]

    def close(self) -> None:
        """End this connection and those of its clones, also under threads that wait for an answer."""
        self.closed = True
        hang_up(self.connection)
        with self.lock:
            self.connection.close()
        for clone in self.clones:
            clone.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Write an entry."""
        self.ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """Wait for an entry, and read it."""
        return _raw(self.ask("get", key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its value."""
        return int(self.ask("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all of these entries exist."""
        return bool(self.ask("check", keys))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Write an entry if it has the expected value; return the value that it has then."""
        return _raw(self.ask("compare_set", key, _text(expected), _text(value)))

    def delete_key(self, key: str) -> bool:
        """Delete an entry."""
        return bool(self.ask("delete_key", key))

    # torch calls it by this name through a PrefixStore.
    deleteKey = delete_key  # noqa: N815

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these entries exist."""
        self.ask("wait", keys)


def serve_store(connection: ssl.SSLSocket, store: Store) -> None:
    """Do what a RemoteStore asks for, until its connection ends."""
    while True:
        request = receive_frame(connection)
        operation, words = request.get("do"), request.get("with")
        try:
            if operation not in OPERATIONS or not isinstance(words, list):
                raise ValueError(f"a store cannot do {operation!r}")
            if operation in ("set", "compare_set"):
                words[1:] = map(_raw, words[1:])
            answer: Any = getattr(store, operation)(*words)
        except (RuntimeError, TypeError, ValueError) as error:
            send_frame(connection, {"error": str(error)})
            continue
        if isinstance(answer, bytes):
            answer = _text(answer)
        send_frame(connection, {"is": answer})


def _text(value: str | bytes) -> str:
    """Bytes as a text of the same length, which JSON can hold."""
    raw = value.encode() if isinstance(value, str) else bytes(value)
    return raw.decode("latin-1")


def _raw(text: Any) -> bytes:
    return str(text).encode("latin-1")
