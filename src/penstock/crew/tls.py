"""Connections between owners of the run's key, and the messages that go over them.

    stranger ── garbage, or no key ──► ✗ closed before anything it sends is read
    worker ──── TLS, both sides show the key ──► serve(connection) ──► length in four bytes, then JSON or raw bytes

The key is a file with a private key and the certificate that belongs to it. Both ends of a connection show that they
have the private key and accept nobody without it (mutual TLS 1.3), so a stranger can neither read nor send anything.

The port of a listener is open to everyone, so everyone may try to exhaust it. Only a few connections can be without a
key at a time: another one closes the oldest of them. A worker needs some milliseconds to show its key, so a flood of
silent connections does not keep it out. After `HANDSHAKE_SECONDS` the listener closes a connection in any case.
Owners of the key are trusted, but one of them may be broken. So there is a limit for them, too: one more connection
with the key is told that there are too many.

Nothing is unpickled. The length of a message is only what the other end says. So no message takes more memory than
twice what has come of it, whatever it announces, and none is longer than the reader expects.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, FileError, PeerLostError

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 20  # what workers report; their states are the longest of it
MAX_PLAN_BYTES = 1 << 28  # a plan for thousands of ranks has some millions
FIRST_BYTES = 1 << 16  # memory for a message before anything has come of it


def send_frame(connection: socket.socket, fields: dict[str, Any]) -> None:
    """Send a JSON object."""
    content = json.dumps(fields).encode()
    connection.sendall(LENGTH.pack(len(content)) + content)


def receive_frame(
    connection: socket.socket, most: int = MAX_FRAME_BYTES
) -> dict[str, Any]:
    """Receive a JSON object; raise PeerLostError if the connection ends or carries something else."""
    (length,) = LENGTH.unpack(receive_bytes(connection, LENGTH.size))
    if length > most:
        raise PeerLostError(
            f"a message of {length:,} bytes is too long: at most {most:,} are expected"
        )
    try:
        fields = json.loads(receive_bytes(connection, length))
    except (ValueError, RecursionError):
        raise PeerLostError("a message is not JSON") from None
    if not isinstance(fields, dict):
        raise PeerLostError("a message is not a JSON object")
    return fields


def receive_bytes(connection: socket.socket, length: int) -> bytearray:
    """Receive exactly this many bytes, into memory that grows as they come."""
    content = bytearray()
    while len(content) < length:
        begin = len(content)
        more = min(length - begin, max(begin, FIRST_BYTES))
        content.extend(bytes(more))
        fill(connection, memoryview(content)[begin:])
    return content


def fill(connection: socket.socket, room: memoryview) -> None:
    """Receive bytes until this memory is full; raise PeerLostError if the connection ends."""
    while room:
        try:
            count = connection.recv_into(room)
        except (OSError, ValueError) as error:
            raise PeerLostError(f"the connection broke: {error}") from None
        if not count:
            raise PeerLostError("the connection was closed")
        room = room[count:]


KEY_FILE = "key.pem"  # in the folder of a run
CERTIFICATE_NAME = "penstock run"
# Machines may disagree about the time, and the key of a run does not expire by itself.
FIRST_DAY = datetime(2020, 1, 1)
LAST_DAY = datetime(9999, 12, 31, 23, 59, 59)


def keep_key(file: Path) -> None:
    """Make a key in a file that only its owner can read, unless the file exists."""
    text = make_key()
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise FileError(f"cannot write the key {file}: {error.strerror}") from None
    with os.fdopen(handle, "w", encoding="ascii") as opened:
        opened.write(text)


def make_key() -> str:
    """Return a new private key, and a certificate for it that it has signed itself, in PEM."""
    # Only the launcher makes a key, and every worker would pay for loading this.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
        Ed25519PrivateKey,
    )
    from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = Ed25519PrivateKey.generate()
    kind = x509.NameOID.COMMON_NAME
    owner = x509.Name([x509.NameAttribute(kind, CERTIFICATE_NAME)])
    vouches_for_itself = x509.BasicConstraints(ca=True, path_length=None)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(owner)
        .issuer_name(owner)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(FIRST_DAY)
        .not_valid_after(LAST_DAY)
        .add_extension(vouches_for_itself, critical=True)
        .sign(key, algorithm=None)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return (private + certificate.public_bytes(Encoding.PEM)).decode()


def context_of(file: Path, server: bool) -> ssl.SSLContext:
    """Return the settings of connections between owners of a key."""
    side = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate is that of the run, on whatever machine it is shown.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # No connection is resumed.
    try:
        context.load_cert_chain(file)
        context.load_verify_locations(file)
    except (ssl.SSLError, OSError) as error:
        reason = "it is not a key"
        if not isinstance(error, ssl.SSLError):
            reason = error.strerror or str(error)
        raise FileError(
            f"cannot use the key {file}: {reason}\n"
            f"  copy {KEY_FILE} out of the folder of the run, on the machine of `penstock train`"
        ) from None
    return context


MAX_STRANGERS = 64  # connections that have not shown the key yet
MAX_SERVED = (
    256  # connections with the key, unless the owner of a listener says otherwise
)
HANDSHAKE_SECONDS = 10.0
LOOK_SECONDS = 0.5  # between two looks for connections that take too long
BACKLOG = 128
CONNECT_SECONDS = 20.0
WRONG_KEY = "it does not have this key, or it is not a run that waits for workers"
TOO_MANY = "as many connections with this key as it serves are open already"
WELCOME = {"welcome": "penstock"}  # the first message to whoever has the key
FULL = {"full": "penstock"}  # the same, if too many have it
Serve = Callable[[ssl.SSLSocket], bool]  # returns whether it keeps the connection
Refuse = Callable[[str], None]  # hears the address of a stranger


class Listener:
    """Listens at an address, and serves each connection with the key on a thread of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        key: Path,
        serve: Serve,
        refuse: Refuse = lambda address: None,
        most: int = MAX_SERVED,
    ) -> None:
        self.context = context_of(key, server=True)
        try:
            self.listener = socket.create_server((host, port), backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {host}:{port}: {error.strerror}\n"
                "  name an address of this machine and a port that is free"
            ) from None
        self.listener.settimeout(LOOK_SECONDS)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.serve = serve
        self.refuse = refuse
        self.most = most
        self.lock = threading.Lock()
        self.strangers: dict[ssl.SSLSocket, float] = {}  # and when each has come
        self.served: set[ssl.SSLSocket] = set()
        self.closed = False
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def _accept(self) -> None:
        while not self.closed:
            try:
                raw, _ = self.listener.accept()
            except TimeoutError:
                raw = None
            except OSError:
                if self.closed:
                    return
                time.sleep(LOOK_SECONDS)  # There are too many open files.
                continue
            if raw is not None:
                self._receive(raw)
            now = time.monotonic()
            with self.lock:
                for stranger, since in list(self.strangers.items()):
                    if now - since > HANDSHAKE_SECONDS:
                        hang_up(stranger)

    def _receive(self, raw: socket.socket) -> None:
        """Take a connection whose other end has not shown its key yet."""
        raw.settimeout(HANDSHAKE_SECONDS)
        try:
            connection = self.context.wrap_socket(
                raw, server_side=True, do_handshake_on_connect=False
            )
        except OSError:  # It has gone already.
            raw.close()
            return
        with self.lock:
            while len(self.strangers) >= MAX_STRANGERS:
                oldest = next(iter(self.strangers))
                del self.strangers[oldest]
                hang_up(oldest)
            self.strangers[connection] = time.monotonic()
        thread = threading.Thread(
            target=self._meet, args=(connection,), name="stranger", daemon=True
        )
        thread.start()

    def _meet(self, connection: ssl.SSLSocket) -> None:
        """Ask for the key, and serve whoever has it."""
        known = False
        address = "an address that has gone"
        with suppress(OSError, ValueError):
            address = connection.getpeername()[0]
            connection.do_handshake()
            known = True
        with self.lock:
            known = self.strangers.pop(connection, None) is not None and known
            full = len(self.served) >= self.most
            if known and not full:
                self.served.add(connection)
        kept = False
        if not known:
            self.refuse(address)
        elif full:
            with suppress(OSError, ValueError):
                send_frame(connection, FULL)
        else:
            with suppress(OSError, ValueError, TypeError, PeerLostError):
                connection.settimeout(None)
                set_options(connection)
                send_frame(connection, WELCOME)
                kept = self.serve(connection)
        with self.lock:
            self.served.discard(connection)
        if not kept:
            connection.close()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self.closed = True
        self.listener.close()
        with self.lock:
            connections = [*self.strangers, *self.served]
        for connection in connections:
            hang_up(connection)


def write_address(host: str, port: int) -> str:
    """Return an address as `split_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dial(address: tuple[str, int], context: ssl.SSLContext) -> ssl.SSLSocket:
    """Connect to a listener; raise PeerLostError if nobody with the key answers."""
    host, port = address
    where = f"{host}:{port}"
    try:
        raw = socket.create_connection(address, CONNECT_SECONDS)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PeerLostError(f"cannot reach {where}: {reason}") from None
    try:
        connection = context.wrap_socket(raw)
    except (OSError, ValueError) as error:
        raw.close()
        raise _no_welcome(where, error) from None
    try:
        # Only this message shows that the other end has accepted our key.
        answer = receive_frame(connection)
    except PeerLostError as error:
        connection.close()
        raise _no_welcome(where, error) from None
    if answer != WELCOME:
        connection.close()
        reason = TOO_MANY if answer == FULL else WRONG_KEY
        raise PeerLostError(f"{where} does not let us in: {reason}")
    connection.settimeout(None)
    set_options(connection)
    return connection


def _no_welcome(where: str, error: Exception) -> PeerLostError:
    reason = WRONG_KEY
    if "timed out" in str(error):
        reason = f"it said nothing for {CONNECT_SECONDS:g} s"
    return PeerLostError(f"{where} does not let us in: {reason}")


def set_options(connection: socket.socket) -> None:
    """Send small messages at once, and notice a machine that has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def hang_up(connection: socket.socket) -> None:
    """End a connection, also under a thread that waits for it."""
    with suppress(OSError):
        # Not the method of SSLSocket: it would drop what the other thread uses.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
