"""Connects the workers of one generation for as long as all of them live; after a loss, the others connect again.

    generation 1   rank 0 ─ rank 1 ─ rank 2 ─ rank 3        store: g1/...
                             ✗
    generation 2   rank 0 ────────── rank 1 ─ rank 2        store: g2/...

The default process group of `torch.distributed` cannot lose a rank. These groups do not belong to it: every
generation has its own, which meet under their own prefix in a store that no rank keeps. A rank that is connecting
gives up as soon as the launcher says that the generation has lost a rank.

On one machine gloo connects the ranks (`GlooComm`). gloo sends plain bytes and believes everyone who reaches its
port, so between machines tensors travel over encrypted connections of our own (`WireComm`). A worker listens for its
whole life:

    rank 1 dials rank 0 twice:   {"meeting": "7c…/g3", "source": 1, "target": 0}    tensors from 1 to 0
                                 {"meeting": "7c…/g3", "source": 0, "target": 1}    tensors from 0 to 1

Every connection says to which meeting it belongs; those to earlier meetings are dropped. Every pair has one
connection for each direction, because two threads must not share one. Of two workers the one that cannot be reached
from outside dials, and else the one with the higher rank.

A thread for each connection sends what is queued, or receives whatever comes. A tensor that nobody waits for yet is
kept until somebody does. Every message has the number of its channel (messages, or the sums of one group) and a tag.
A message is matched by both, as gloo matches tags. The size of a message is only what the other end says. A tensor
that somebody waits for must have the size that is expected. Memory for an early one grows as it comes, and a peer
that sends more of them than `most_early` allows is cut off.

A sum goes in two steps. Each rank adds up its own piece of the tensor, which the others send to it, and then sends
the result to all of them:

    rank 0   a0 b0 c0      a0+a1+a2 ──► all        Every rank sends and receives as many bytes as in a ring,
    rank 1   a1 b1 c1      b0+b1+b2 ──► all        but waits for two messages in a row and not for 2 (ranks - 1),
    rank 2   a2 b2 c2      c0+c1+c2 ──► all        which matters over long distances.

A short tensor goes whole to every rank in one step. Either way the numbers are added in the order of the ranks, so
all ranks get the same bits, whatever comes first.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import ssl
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.crew.tls import (
    FIRST_BYTES,
    MAX_SERVED,
    Listener,
    context_of,
    dial,
    fill,
    hang_up,
    receive_bytes,
    receive_frame,
    send_frame,
    write_address,
)
from penstock.errors import PeerLostError, RunError
from penstock.runtime.comm.process import TORCH_EXTRA_SECONDS, ProcessComm
from penstock.torch_internals import (
    AllreduceOptions,
    BarrierOptions,
    PrefixStore,
    Store,
    gloo_group,
)
from penstock.train.elastic import split_address

LOOK_SECONDS = 0.05  # between two looks whether the generation still stands
Broken = Callable[[], bool]


class GlooComm(ProcessComm):
    """This process's connection to the ranks of one generation.

    `broken` says whether the generation has lost a rank. It is asked while this rank connects.
    """

    def __init__(
        self, store: Store, rank: int, ranks: int, patience: float, broken: Broken
    ) -> None:
        self.meeting = store
        self.broken = broken
        self.time_limit = timedelta(seconds=patience + TORCH_EXTRA_SECONDS)
        self.connect_end = time.monotonic() + self.time_limit.total_seconds()
        everyone = tuple(range(ranks))
        world = self.connect(everyone, rank)
        super().__init__(patience, torch.device("cpu"), world)
        self.store = store

    def uses_gpus(self) -> bool:
        """Gloo moves tensors through the CPU."""
        return False

    def connect(
        self, group: tuple[int, ...], rank: int, purpose: str = "group"
    ) -> dist.ProcessGroup:
        """Connect some ranks, of which this is one.

        Groups of the same ranks for different purposes do not meet each other.

        Torch cannot interrupt this, so it happens on a thread. If another rank is lost
        meanwhile, the thread is left to its own time limit.
        """
        name = f"{purpose} {' '.join(map(str, group))}"
        store = PrefixStore(name, self.meeting)
        made: Future[dist.ProcessGroup] = Future()

        def work() -> None:
            try:
                made.set_result(self.make_group(store, group, rank))
            except Exception as error:  # It belongs to the thread that waits.
                made.set_exception(error)

        threading.Thread(target=work, name="connects", daemon=True).start()
        while not wait_for([made], LOOK_SECONDS).done:
            if self.broken():
                raise PeerLostError(
                    f"rank {rank} connects to ranks {group}, but one of them is lost"
                )
        try:
            return made.result()
        except (RuntimeError, RunError) as error:
            reason = f"rank {rank} cannot reach the others: {error}"
            raise PeerLostError(reason) from None

    def make_group(
        self, store: Store, group: tuple[int, ...], rank: int
    ) -> dist.ProcessGroup:
        """Wait until these ranks are connected."""
        return gloo_group(store, group.index(rank), len(group), self.time_limit)

    def create_group(
        self,
        group: tuple[int, ...],
        purpose: str = "group",
        device: torch.device | None = None,
    ) -> dist.ProcessGroup | None:
        """Connect some ranks of this generation; None if this rank is not among them."""
        return self.connect(group, self.rank, purpose) if self.rank in group else None

    def start_sum(self, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Start summing a tensor over a group."""
        return group.allreduce([tensor], AllreduceOptions())

    def start_barrier(self) -> dist.Work:
        """Start a barrier over all ranks."""
        return self.world.barrier(BarrierOptions())

    def abandon(self) -> None:
        """Cut all connections and drop the groups; nothing can be sent afterwards.

        A group waits for its work before it ends, so a thread drops them.
        """
        self.cut_connections()
        self.waiting = None
        dropped = [*self.groups.values(), *self.beside]
        self.groups = {}
        self.beside = []
        self.second = None
        del self.world
        threading.Thread(target=dropped.clear, name="drops groups", daemon=True).start()


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
        if self._ends_now(self.unreachable, peer, reason):
            hang_up(self.outgoing[peer])
            self.outboxes[peer].put(None)

    def _end_receiving(self, peer: int, reason: str) -> None:
        if self._ends_now(self.silent, peer, reason):
            hang_up(self.incoming[peer])
            self.inboxes[peer].fail(reason)

    def _ends_now(self, ended: dict[int, str], peer: int, reason: str) -> bool:
        """Note why a direction ends, unless it has ended already."""
        with self.lock:
            if peer in ended:
                return False
            ended[peer] = reason
        return True

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


SHORT_BYTES = 1 << 14  # Tensors up to this size go whole to every rank.


class WireGroup:
    """Some ranks of a generation; `members` are their numbers in it, and `messages` is their channel."""

    def __init__(
        self, links: Links, members: tuple[int, ...], messages: int = MESSAGES
    ) -> None:
        self.links = links
        self.messages = messages
        self.members = members
        self.place = members.index(links.rank)
        digest = hashlib.sha256(repr(members).encode()).digest()
        self.channel = int.from_bytes(digest[:7], "big") + 1
        # Tensors to sum, each with the transfer that ends when it is summed.
        self.waiting: queue.SimpleQueue[tuple[Tensor, TensorTransfer]]
        self.waiting = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def rank(self) -> int:
        """The number of this rank in the group."""
        return self.place

    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> TensorTransfer:
        """Start sending a tensor."""
        peer = self.members[target]
        return self.links.send(tensors[0], peer, Address(self.messages, tag))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> TensorTransfer:
        """Start receiving a tensor."""
        peer = self.members[source]
        return self.links.receive(tensors[0], peer, Address(self.messages, tag))

    def add(self, tensor: Tensor) -> TensorTransfer:
        """Start summing a tensor over the group, in place; sums run one after the other."""
        transfer = TensorTransfer(memoryview(b""))
        if self.thread is None:
            name = f"sums of ranks {' '.join(map(str, self.members))}"
            self.thread = threading.Thread(target=self._run, name=name, daemon=True)
            self.thread.start()
        self.waiting.put((tensor, transfer))
        return transfer

    def barrier(self) -> TensorTransfer:
        """Start a barrier."""
        return self.add(torch.zeros(1))

    def _run(self) -> None:
        for number in itertools.count(1):
            tensor, transfer = self.waiting.get()
            try:
                self._add_up(tensor, 2 * number)
                transfer.finish()
            except RuntimeError as error:
                # Later sums fail in the same way: the links are broken.
                transfer.finish(f"a sum has lost its connection: {error}")

    def _add_up(self, tensor: Tensor, tag: int) -> None:
        flat = tensor.view(-1)
        if flat.numel() * flat.element_size() <= SHORT_BYTES:
            own = flat.clone()  # The sum goes where the others still read from.
            self._total([own] * self.size(), flat, tag)
            return
        pieces = list(torch.tensor_split(flat, self.size()))
        mine = pieces[self.place]
        self._total([piece.clone() for piece in pieces], mine, tag)
        self._swap([mine] * self.size(), pieces, tag + 1)

    def _total(self, parts: list[Tensor], total: Tensor, tag: int) -> None:
        """Send everyone its part, and sum this rank's part over all ranks."""
        rooms = [torch.empty_like(total) for _ in parts]
        self._swap(parts, rooms, tag)
        rooms[self.place] = parts[self.place]
        total.copy_(rooms[0])
        for room in rooms[1:]:
            total.add_(room)

    def _swap(self, parts: list[Tensor], rooms: list[Tensor], tag: int) -> None:
        """Send each of the other ranks its part, and receive one from each; wait for all."""
        address = Address(self.channel, tag)
        transfers = []
        for number, peer in enumerate(self.members):
            if number != self.place:
                transfers.append(self.links.receive(rooms[number], peer, address))
                transfers.append(self.links.send(parts[number], peer, address))
        for transfer in transfers:
            transfer.wait()


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
        self.listener: Listener | None = None
        self.address = ""
        if listen:
            host, port = split_address(listen)
            most = max(self.most_waiting, MAX_SERVED)
            self.listener = Listener(host, port, key, self._take, most=most)
            self.address = write_address(host, self.listener.address[1])

    def begin(self, meeting: str) -> None:
        """Take part in a new meeting, and forget earlier ones."""
        with self.changed:
            for flow in list(self.waiting):
                # The others may have begun a later one.
                is_earlier = _number(flow.meeting) <= _number(meeting)
                if flow.meeting != meeting and is_earlier:
                    self.waiting.pop(flow).close()

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
        if self.listener is not None:
            self.listener.close()
        with self.changed:
            for connection in self.waiting.values():
                connection.close()
            self.waiting.clear()


def _number(meeting: str) -> int:
    """The number at the end of a meeting's name; -1 if it has none."""
    digits = meeting.rpartition("/g")[2]
    return int(digits) if digits.isdigit() else -1


class WireComm(GlooComm):
    """This process's connection to the ranks of one generation, encrypted.

    `meeting` is the name of the generation, which no other run or generation has. `most_early` is
    how many bytes another rank may send before this one waits for them.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        patience: float,
        broken: Broken,
        exchange: Exchange,
        meeting: str,
        most_early: int = MOST_EARLY_BYTES,
    ) -> None:
        self.exchange = exchange
        self.most_early = most_early
        self.meeting_name = meeting
        self.links: Links | None = None
        super().__init__(store, rank, ranks, patience, broken)

    def make_group(
        self, store: Store, group: tuple[int, ...], rank: int
    ) -> dist.ProcessGroup:
        """Connect to all ranks."""
        self.links = self.make_links(store, len(group), rank)
        made: Any = WireGroup(self.links, group)
        return cast(dist.ProcessGroup, made)  # It has the methods that are used.

    def make_links(self, store: Store, ranks: int, rank: int) -> Links:
        """Connect to every other rank, in both directions."""
        exchange = self.exchange
        exchange.begin(self.meeting_name)
        store.set(f"address/{rank}", exchange.address)
        outgoing = {}
        incoming = {}
        flows = {}
        for peer in range(ranks):
            if peer == rank:
                continue
            address = self.address_of(store, peer)
            there = Flow(self.meeting_name, rank, peer)
            back = Flow(self.meeting_name, peer, rank)
            if _dials(rank, exchange.address, peer, address):
                outgoing[peer] = exchange.reach(address, there)
                incoming[peer] = exchange.reach(address, back)
            else:
                flows[peer] = (there, back)
        for peer, (there, back) in flows.items():
            outgoing[peer] = exchange.accept(there, self.gives_up)
            incoming[peer] = exchange.accept(back, self.gives_up)
        return Links(rank, outgoing, incoming, self.most_early)

    def address_of(self, store: Store, peer: int) -> str:
        """The address of another rank, as soon as it is known."""
        key = f"address/{peer}"
        while not store.check([key]):
            if self.gives_up():
                raise PeerLostError(f"rank {peer} does not say where it is")
            time.sleep(LOOK_SECONDS)
        return store.get(key).decode()

    def gives_up(self) -> bool:
        """Whether to stop waiting for other ranks."""
        return self.broken() or time.monotonic() > self.connect_end

    def create_group(
        self,
        group: tuple[int, ...],
        purpose: str = "group",
        device: torch.device | None = None,
    ) -> dist.ProcessGroup | None:
        """Use the same connections; messages of the second group are matched among themselves."""
        if self.rank not in group:
            return None
        assert self.links is not None
        messages = MESSAGES if purpose == "group" else SECOND_MESSAGES
        made: Any = WireGroup(self.links, group, messages)
        return cast(dist.ProcessGroup, made)

    def start_sum(self, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Start summing a tensor over a group."""
        wire: Any = group
        return cast(dist.Work, wire.add(tensor))

    def start_barrier(self) -> dist.Work:
        """Start a barrier over all ranks."""
        wire: Any = self.world
        return cast(dist.Work, wire.barrier())

    def cut_connections(self) -> None:
        """Break this rank's connections, so that every wait on them ends on all ranks."""
        if self.links is not None:
            self.links.cut("this worker has cut its connections")


def _dials(rank: int, address: str, peer: int, peer_address: str) -> bool:
    """Whether this rank connects to another one, and not the other way round."""
    if bool(address) != bool(peer_address):
        return bool(peer_address)
    return rank > peer
