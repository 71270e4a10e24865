"""Messages over a connection: their length in four bytes, then JSON or raw bytes. Nothing is pickled.

A length is only what the other end says. So no message takes more memory than twice what has come of
it, whatever it announces, and none is longer than the reader expects.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from penstock.errors import PeerLostError

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
