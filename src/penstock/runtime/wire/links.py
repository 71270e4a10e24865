"""Encrypted connections between all workers of a generation, and the tensors that travel over them.

    rank 0 ══ TLS, tensors to rank 1 ══► rank 1        every pair has one connection for each direction,
    rank 0 ◄══ TLS, tensors to rank 0 ══ rank 1        because two threads must not share one

A thread for each connection sends what is queued, or receives whatever comes. A tensor that nobody waits for yet is
kept until somebody does. Every message has the number of its channel (messages, or the sums of one group) and a tag.
A message is matched by both, as gloo matches tags.

The size of a message is only what the other end says. A tensor that somebody waits for must have the size that is
expected. Memory for an early one grows as it comes, and a peer that sends more of them than `most_early` allows is cut
off.
"""

from __future__ import annotations

import queue
import ssl
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import PeerLostError
from penstock.runtime.wire.door import hang_up
from penstock.runtime.wire.frames import fill, receive_bytes

HEADER = struct.Struct(">QQQ")  # channel, tag, bytes
MAX_JOINED_BYTES = 1 << 14  # Up to this size a tensor is sent together with its header.
MOST_EARLY_BYTES = 1 << 30  # from one rank, unless the owner of the links knows better
EARLY_BYTES = 256  # that an early tensor takes beside its content
MESSAGES = 0  # the channel of messages between two ranks
SECOND_MESSAGES = 1 << 60  # the channel of a second connection; those of sums have less
Ends = Mapping[int, ssl.SSLSocket]  # connections by the rank at the other end


class Address(NamedTuple):
    """What tells messages from one rank apart."""

    channel: int
    tag: int


class TensorTransfer:
    """A tensor on its way; it has the methods of torch's `Work` that are used here."""

    __slots__ = ("error", "finished", "room")

    def __init__(self, room: memoryview) -> None:
        self.room = room
        self.finished = threading.Event()
        self.error = ""

    def finish(self, error: str = "") -> None:
        """Say that the tensor has gone or come, or why it never will."""
        self.error = self.error or error
        self.finished.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done; raise RuntimeError as torch does if it fails."""
        seconds = timeout.total_seconds() if timeout is not None else None
        if not self.finished.wait(seconds):
            raise RuntimeError(f"Timed out waiting {seconds} s for a connection")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self.finished.is_set()


class Inbox:
    """What has come from one rank, and what is expected from it."""

    def __init__(self, most_early: int = MOST_EARLY_BYTES) -> None:
        self.lock = threading.Lock()
        self.most_early = most_early
        self.early_bytes = 0  # of tensors that have come early, or are coming
        self.expected: dict[Address, deque[TensorTransfer]] = defaultdict(deque)
        self.arrived: dict[Address, deque[bytearray]] = defaultdict(deque)

    def expect(self, address: Address, transfer: TensorTransfer) -> None:
        """Fill this transfer with the next tensor of an address, which may have come already."""
        with self.lock:
            early = self.arrived.get(address)
            if not early:
                self.expected[address].append(transfer)
                return
            content = early.popleft()
            self._release(len(content))
            if not early:
                del self.arrived[address]
        if len(content) != len(transfer.room):
            transfer.finish(_wrong_size(len(content), len(transfer.room)))
            return
        transfer.room[:] = content
        transfer.finish()

    def take(self, address: Address) -> TensorTransfer | None:
        """The transfer that waits for this address, if there is one."""
        with self.lock:
            waiting = self.expected.get(address)
            if not waiting:
                return None
            transfer = waiting.popleft()
            if not waiting:
                del self.expected[address]
            return transfer

    def admit(self, size: int) -> None:
        """Admit a tensor that nobody waits for yet, unless there are too many of them."""
        with self.lock:
            self.early_bytes += size + EARLY_BYTES
            if self.early_bytes > self.most_early:
                raise PeerLostError(
                    f"it sends a tensor of {size:,} bytes that nobody waits for, and with "
                    f"others like it that is more than {self.most_early:,} bytes"
                )

    def keep(self, address: Address, content: bytearray) -> TensorTransfer | None:
        """Keep a tensor for later; return the transfer that has begun to wait for it meanwhile."""
        with self.lock:
            if not self.expected.get(address):
                self.arrived[address].append(content)
                return None
            self._release(len(content))
        return self.take(address)

    def _release(self, size: int) -> None:
        """Note that an early tensor is where it belongs."""
        self.early_bytes -= size + EARLY_BYTES

    def fail(self, error: str) -> None:
        """End all waits."""
        with self.lock:
            waiting = [one for line in self.expected.values() for one in line]
            self.expected.clear()
        for transfer in waiting:
            transfer.finish(error)


class Links:
    """All connections of one worker in one generation.

    A connection that ends fails only what goes over it: when all have finished, a rank may leave
    while its last messages are still on their way to the others.
    """

    def __init__(
        self,
        rank: int,
        outgoing: Ends,
        incoming: Ends,
        most_early: int = MOST_EARLY_BYTES,
    ) -> None:
        self.rank = rank
        self.outgoing = outgoing
        self.incoming = incoming
        self.lock = threading.Lock()
        # The ranks to which and from which nothing can be sent any more, and why.
        self.unreachable: dict[int, str] = {}
        self.silent: dict[int, str] = {}
        self.inboxes = {peer: Inbox(most_early) for peer in incoming}
        self.outboxes: dict[
            int, queue.SimpleQueue[tuple[Address, TensorTransfer] | None]
        ]
        self.outboxes = {peer: queue.SimpleQueue() for peer in outgoing}
        for peer in outgoing:
            self._start(self._send_all, peer)
        for peer in incoming:
            self._start(self._receive_all, peer)

    def _start(self, work: Callable[[int], None], peer: int) -> None:
        name = f"link of ranks {self.rank} and {peer}"
        threading.Thread(target=work, args=(peer,), name=name, daemon=True).start()

    def send(self, tensor: Tensor, peer: int, address: Address) -> TensorTransfer:
        """Start sending a tensor; it must not change before the transfer is done."""
        transfer = TensorTransfer(memory_of(tensor))
        self.outboxes[peer].put((address, transfer))
        if peer in self.unreachable:
            transfer.finish(self.unreachable[peer])
        return transfer

    def receive(self, tensor: Tensor, peer: int, address: Address) -> TensorTransfer:
        """Start receiving into a tensor."""
        transfer = TensorTransfer(memory_of(tensor))
        self.inboxes[peer].expect(address, transfer)
        if peer in self.silent:
            self.inboxes[peer].fail(self.silent[peer])
        return transfer

    def cut(self, reason: str) -> None:
        """Break all connections, so that every wait on them ends on all ranks."""
        for peer in self.outgoing:
            self._end_sending(peer, reason)
            self._end_receiving(peer, reason)

    def _end_sending(self, peer: int, reason: str) -> None:
        with self.lock:
            if peer in self.unreachable:
                return
            self.unreachable[peer] = reason
        hang_up(self.outgoing[peer])
        self.outboxes[peer].put(None)

    def _end_receiving(self, peer: int, reason: str) -> None:
        with self.lock:
            if peer in self.silent:
                return
            self.silent[peer] = reason
        hang_up(self.incoming[peer])
        self.inboxes[peer].fail(reason)

    # ------------------------------------------------------------ on threads
    def _send_all(self, peer: int) -> None:
        connection = self.outgoing[peer]
        outbox = self.outboxes[peer]
        with connection:
            while True:
                entry = outbox.get()
                if entry is None:
                    break
                address, transfer = entry
                try:
                    _send(connection, address, transfer.room)
                except (OSError, ValueError) as error:
                    reason = f"the connection to rank {peer} is lost: {error}"
                    self._end_sending(peer, reason)
                    transfer.finish(reason)
                transfer.finish()
        while not outbox.empty():
            entry = outbox.get()
            if entry is not None:
                entry[1].finish(self.unreachable[peer])

    def _receive_all(self, peer: int) -> None:
        connection = self.incoming[peer]
        inbox = self.inboxes[peer]
        header = bytearray(HEADER.size)
        with connection:
            try:
                while True:
                    fill(connection, memoryview(header))
                    channel, tag, size = HEADER.unpack(header)
                    self._receive_one(connection, inbox, Address(channel, tag), size)
            except (PeerLostError, MemoryError) as error:
                reason = f"the connection from rank {peer} is lost: {error}"
                self._end_receiving(peer, reason)

    def _receive_one(
        self, connection: ssl.SSLSocket, inbox: Inbox, address: Address, size: int
    ) -> None:
        """Receive one tensor, into its place or into memory of its own."""
        transfer = inbox.take(address)
        if transfer is None:
            inbox.admit(size)
            content = receive_bytes(connection, size)
            transfer = inbox.keep(address, content)
            if transfer is not None and len(transfer.room) == size:
                transfer.room[:] = content
        elif len(transfer.room) == size:
            try:
                fill(connection, transfer.room)
            except PeerLostError as error:
                transfer.finish(f"the connection is lost: {error}")
                raise
        if transfer is None:
            return
        if len(transfer.room) != size:
            reason = _wrong_size(size, len(transfer.room))
            transfer.finish(reason)
            raise PeerLostError(reason)
        transfer.finish()


def _send(connection: ssl.SSLSocket, address: Address, room: memoryview) -> None:
    header = HEADER.pack(address.channel, address.tag, len(room))
    if len(room) <= MAX_JOINED_BYTES:
        connection.sendall(header + bytes(room))
        return
    connection.sendall(header)
    connection.sendall(room)


def _wrong_size(come: int, expected: int) -> str:
    return (
        f"a connection brought a tensor of {come} bytes, but {expected} were expected"
    )


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return memoryview(bytearray())
    return flat.view(torch.uint8).numpy().data
