"""Connects ranks that are processes, over torch.distributed: gloo, NCCL, or our backend for one shared GPU.

Messages between two ranks arrive in the order in which they were sent. gloo does not compare
an arriving tensor with the one that is expected: a larger tensor crashes the process, and a
smaller one leaves garbage. So each message carries a tag computed from its number and its
shape. A message of the wrong shape then never meets its receive, and the watchdog compares
the two and reports it:

    rank 0   3rd to rank 1: (2, 5, 8) ── tag a ──►    .. ── tag b ──   3rd from rank 0: (2, 4, 8)   rank 1

NCCL and our own backend have no tags, and with them a receive that is posted early would
block what comes after it. Receives are therefore posted exactly where the lowered program has
them (`window` is 0).

NCCL runs all messages of one communicator in the order in which they were started, so a receive
that waits holds up the sends behind it. Messages to higher ranks and messages to lower ranks
therefore have a communicator each, apart from sums, so that activations do not wait for gradients.
But the threads and kernels of a communicator wait by spinning. With fewer than
`CORES_TO_SEPARATE` cores for a rank that costs more than it saves (docs/results/nccl.md), and all
messages share one. `penstock.ir.verify` says why neither can deadlock.

Only raw tensors travel; nothing that arrives is unpickled.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PeerLostError, RunError, StuckError
from penstock.ir.lane import lane_turns
from penstock.ir.program import Program, links_of
from penstock.runtime.comm.comm import NCCL, ON_GPU, Comm, exchange
from penstock.runtime.comm.ipc import IpcGroup, RingShape, fit_ring
from penstock.torch_internals import Store, sleep_until_done

TAG_TURNS = 0xFFF  # messages are numbered modulo this mask, so the tags are reused
TAG_STRIDE = 0x7FFFF  # distance between the tags of two consecutive messages; a prime
UNUSED_TAG = 0x7FFFFFFE  # nobody sends under this tag; all others are smaller
SHAPES_KEPT = 8  # messages per target whose shapes the watchdog can look up
# torch's own time limits are this much longer than ours, so that our errors come first.
TORCH_EXTRA_SECONDS = 30.0
RECEIVE_WINDOW_BYTES = 64 << 20  # receives posted ahead of the program
# From this many cores for each rank on, NCCL gets a second communicator for messages.
CORES_TO_SEPARATE = 4

BufferKind: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # shape, type
SentMessage: TypeAlias = tuple[int, tuple[int, ...], torch.dtype]  # number, shape, type


class PendingMessage(NamedTuple):
    """A description of a message or sum in progress, for error messages."""

    kind: str  # "receive", "send", "sum" or "barrier"
    peers: tuple[int, ...]  # the other rank, or the whole group
    turn: int = 0  # its number among the messages of its kind
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def tensor(self) -> str:
        """The tensor's type and shape as text."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(self.shape)}"

    def __str__(self) -> str:
        if self.kind == "receive":
            return f"for {self.tensor} from rank {self.peers[0]}"
        if self.kind == "send":
            return f"to send {self.tensor} to rank {self.peers[0]}"
        ranks = " ".join(map(str, self.peers))
        return f"for the {self.kind} over ranks {ranks}"


class Guard(Protocol):
    """Something that knows why a wait failed better than the connection: the watchdog."""

    def explain(self, message: PendingMessage, late: bool, cause: str) -> RunError:
        """The error to raise for a failed wait.

        `late` says that the wait took too long; otherwise the connection broke. `cause` is
        torch's own error message.
        """
        ...


class ProcessComm(Comm):
    """This process's connection to the ranks of a process group, by default all ranks.

    Received tensors land on `device`: by default this rank's GPU under NCCL, else the CPU.
    gloo can serve a GPU through the CPU. `name` tells several groups apart in errors.
    """

    def __init__(
        self,
        patience: float = 300.0,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        name: str = "",
    ) -> None:
        world = group or dist.group.WORLD
        assert world is not None
        self.rank = world.rank()
        self.ranks = world.size()
        self.name = name
        self.patience = patience
        self.on_gpu = self.uses_gpus()
        self.window = 0 if self.on_gpu else RECEIVE_WINDOW_BYTES
        # The copies of our own backend are on the stream that computes.
        self.reads_in_order = isinstance(world, IpcGroup)
        self.wire = torch.device("cpu")
        if self.on_gpu:
            self.wire = torch.device("cuda", torch.cuda.current_device())
        self.device = self.wire if device is None else torch.device(device)
        # Called directly, because dist.isend and dist.irecv look the group up and check
        # it for every message.
        self.world = world
        self.everyone = tuple(range(self.ranks))
        self.is_subgroup = group is not None
        # Under NCCL: the groups of the messages to higher and to lower ranks, apart from sums.
        self.upward: dist.ProcessGroup | None = None
        self.downward: dist.ProcessGroup | None = None
        self.on_nccl = self.on_gpu and dist.get_backend() == NCCL
        if self.on_nccl and self.ranks > 1:
            self.channels = 1
            self.upward = self.create_group(self.everyone, device=self.wire)
            self.downward = self.upward
            if self._least_cores() >= CORES_TO_SEPARATE:
                self.channels = 2
                self.downward = self.create_group(self.everyone, device=self.wire)
        self.opened: set[tuple[int, int]] = set()  # links that were used, under NCCL
        # The store through which the ranks tell each other about errors, if it is not the
        # one of the default process group. Nobody but the launcher keeps it then.
        self.store: Store | None = None
        # Other groups in which this rank may wait without using this object.
        self.beside: list[dist.ProcessGroup] = []
        self.second: ProcessComm | None = None  # made by `second_connection`
        # The groups that this rank belongs to, and all groups that exist.
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {self.everyone: world}
        self.prepared = {self.everyone}
        # The number of the last message, by target and by source, and of the last sum.
        self.sent = [0] * self.ranks
        self.requested = [0] * self.ranks
        self.sums = 0
        # The tag of a shape, to which the number of the message is added.
        self.tags: dict[BufferKind, int] = {}
        # The last messages sent, by target.
        self.recent: list[deque[SentMessage]] = [
            deque(maxlen=SHAPES_KEPT) for _ in self.everyone
        ]
        # Work that was handed to the GPU; `pending` drops it once it is done.
        self.launched: deque[tuple[dist.Work, PendingMessage]] = deque()
        self.waiting: _Work | None = None  # what this rank waits for now
        self.set_guard(None)

    def set_guard(self, guard: Guard | None, extra_seconds: float = 0.0) -> None:
        """Ask this guard when a wait fails, or nobody if it is None.

        A wait may last `extra_seconds` longer than the patience, so that the guard has the
        time to end it first.
        """
        self.guard = guard
        self.extra_seconds = extra_seconds
        self.launched.clear()
        if isinstance(self.world, IpcGroup):
            self.world.watched = guard is not None
        self.set_patience(self.patience)

    def set_patience(self, seconds: float) -> None:
        """Let every later wait last at most this long, but not longer than the process group allows."""
        self.patience = seconds
        # Under NCCL the GPU does the waiting; a limit would make the CPU wait instead.
        limit = 0.0 if self.on_gpu else seconds + self.extra_seconds
        self.limit = timedelta(seconds=limit)
        if self.second is not None:
            self.second.set_patience(seconds)

    def prepare(self, groups: list[tuple[int, ...]]) -> None:
        """Create the groups that `add` will use; all ranks pass the same list."""
        missing = [group for group in groups if group not in self.prepared]
        self._check_same_groups(missing)
        for group in missing:
            created = self.create_group(group)
            if created is not None:
                self.groups[group] = created
            self.prepared.add(group)

    def uses_gpus(self) -> bool:
        """Whether tensors travel from GPU to GPU."""
        return dist.get_backend() in ON_GPU

    def create_group(
        self,
        group: tuple[int, ...],
        purpose: str = "group",
        device: torch.device | None = None,
    ) -> dist.ProcessGroup | None:
        """Connect some ranks of this group; None if this rank is not among them.

        Groups of the same ranks for different purposes do not meet each other. With a `device`, they have one
        communicator of NCCL; otherwise every pair would get its own for messages.
        """
        # The rank in the default group of each rank of this group.
        numbers = dist.get_process_group_ranks(self.world)
        created = dist.new_group(
            [numbers[rank] for rank in group],
            use_local_synchronization=self.is_subgroup,
            device_id=device,
        )
        return created if isinstance(created, dist.ProcessGroup) else None

    def start_sum(self, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Start summing a tensor over a process group."""
        work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        return work

    def start_barrier(self) -> dist.Work:
        """Start a barrier over all ranks."""
        work: dist.Work | None = dist.barrier(
            self.world, async_op=True, device_ids=barrier_devices()
        )
        assert work is not None
        return work

    def _check_same_groups(self, groups: list[tuple[int, ...]]) -> None:
        """Raise an error if ranks pass different groups: `new_group` would wait forever."""
        told = exchange(self, groups)
        if any(groups_of_rank != told[0] for groups_of_rank in told):
            raise RunError(
                f"the ranks prepare different groups; rank {self.rank} prepares {groups}"
            )

    def reserve(self, program: Program, sizes: Sequence[int]) -> None:
        """Make the rings of our own backend large enough, and open NCCL's connections."""
        group = self.world
        if self.on_nccl:
            self._open_links(program)
        if not isinstance(group, IpcGroup):
            return
        lanes = [lane_turns(program, rank) for rank in self.everyone]
        into: dict[int, RingShape] = {}
        out: dict[int, RingShape] = {}
        for peer in self.everyone:
            current = group.shape(peer, self.rank)
            into[peer] = fit_ring(lanes[self.rank], peer, sizes, current)
            current = group.shape(self.rank, peer)
            out[peer] = fit_ring(lanes[peer], self.rank, sizes, current)
        group.reserve(into, out)

    def _least_cores(self) -> int:
        """The cores for each rank, on the machine of this group that has the fewest."""
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        cores = (os.cpu_count() or 1) // neighbours
        least = torch.tensor([cores], device=self.wire)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.world)
        return int(least)

    def _open_links(self, program: Program) -> None:
        """Send one number over each link of a program that was not used yet.

        NCCL connects two ranks when the first message goes between them. That takes long, and
        both ranks wait for it. All ranks go through the links in the same order, so no circle
        of ranks can wait for each other.
        """
        for source, target in links_of(program):
            if (source, target) in self.opened:
                continue
            self.opened.add((source, target))
            if self.rank not in (source, target):
                continue
            number = torch.ones(1, device=self.wire)
            group = self.channel(source, target)
            if self.rank == source:
                group.send([number], target, 0).wait()
            else:
                group.recv([number], source, 0).wait()
            torch.cuda.synchronize()

    def channel(self, source: int, target: int) -> dist.ProcessGroup:
        """The process group of the messages from one rank to another."""
        return (self.upward if source < target else self.downward) or self.world

    def send(self, tensor: Tensor, target: int) -> _Work:
        """Start sending a tensor to a rank."""
        turn = (self.sent[target] + 1) & TAG_TURNS
        self.sent[target] = turn
        raw = tensor.to(self.wire).contiguous()
        shape = raw.shape
        dtype = raw.dtype
        self.recent[target].append((turn, shape, dtype))
        try:
            channel = self.channel(self.rank, target)
            work = channel.send([raw], target, self.tag(turn, shape, dtype))
        except RuntimeError as error:
            message = PendingMessage("send", (target,), turn, shape, dtype)
            raise self.failed_wait(message, error) from None
        return _Work(self, work, "send", (target,), turn, raw)

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> _ReceiveWork | _RingReceive:
        """Start receiving the next tensor from a rank."""
        turn = (self.requested[source] + 1) & TAG_TURNS
        self.requested[source] = turn
        if isinstance(self.world, IpcGroup):
            message = PendingMessage("receive", (source,), turn, shape, dtype)
            return _RingReceive(self, self.world, message)
        buffer = self.buffer(shape, dtype)
        try:
            channel = self.channel(source, self.rank)
            work = channel.recv([buffer], source, self.tag(turn, shape, dtype))
        except RuntimeError as error:
            message = PendingMessage("receive", (source,), turn, shape, dtype)
            raise self.failed_wait(message, error) from None
        return _ReceiveWork(_Work(self, work, "receive", (source,), turn, buffer))

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer to receive into."""
        return torch.empty(shape, dtype=dtype, device=self.wire)

    def tag(self, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The tag of a message: a hash of its number, its shape and its item size."""
        tag = self.tags.get((shape, dtype))
        if tag is None:
            tag = fold(dtype.itemsize, shape)
            self.tags[shape, dtype] = tag
        return (tag + turn * TAG_STRIDE) % UNUSED_TAG

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> _Work:
        """Start summing a tensor over a group of ranks, in place."""
        if group not in self.groups:
            raise RunError(
                f"the group of ranks {group} does not exist yet: all ranks must first call "
                "comm.prepare(groups_of(schedule))"
            )
        self.sums += 1
        raw = tensor.to(self.wire).contiguous()
        try:
            work = self.start_sum(raw, self.groups[group])
        except RuntimeError as error:
            message = PendingMessage("sum", group, self.sums)
            raise self.failed_wait(message, error) from None
        home = None if raw is tensor else tensor
        return _Work(self, work, "sum", group, self.sums, raw, home)

    def second_connection(self) -> ProcessComm:
        """A second connection over gloo, whose waits end when those of this one are ended."""
        if self.on_gpu:
            raise RunError(
                "gradients cannot be summed as this plan says: GPUs that send to each other have one "
                "connection, and planned sums need a second one\n"
                "  plan with `penstock lab paths --sums ring`, remove `sums` from the plan, or use run.device=cpu"
            )
        if self.second is None:
            group = self.create_group(self.everyone, "second group")
            assert group is not None
            self.beside.append(group)
            self.second = SecondComm(self.patience, self.wire, group, self.name)
        return self.second

    def barrier(self) -> None:
        """Wait until all ranks have reached this point."""
        self.sums += 1
        try:
            work = self.start_barrier()
        except RuntimeError as error:
            message = PendingMessage("barrier", self.everyone, self.sums)
            raise self.failed_wait(message, error) from None
        _Work(self, work, "barrier", self.everyone, self.sums, torch.empty(0)).wait()

    def pending(self) -> PendingMessage | None:
        """What this rank waits for, if anything.

        On gloo that is the call in which it waits, on a GPU the oldest unfinished work.
        """
        waiting = self.waiting
        if waiting is not None:
            return waiting.message
        while True:
            try:
                work, message = self.launched[0]
                if not work.is_completed():
                    return message
                self.launched.popleft()
            except IndexError:  # all work is done
                return None

    def leave(self) -> None:
        """Drop all groups, and wait until their threads have ended; nothing can be sent afterwards."""
        if self.second is not None:
            self.second.leave()
            self.second = None
        self.upward = self.downward = None
        self.groups = {}
        self.beside = []
        if hasattr(self, "world"):
            del self.world

    def cut_connections(self) -> None:
        """Break this rank's connections, so that every wait on them ends on all ranks.

        gloo has no call for this, but breaks a connection when a receive times out. NCCL's
        connections break when the process ends.
        """
        if self.on_gpu:
            return
        for group in (*self.groups.values(), *self.beside):
            for peer in range(group.size()):
                if peer == group.rank():
                    continue
                # A receive from a peer that is gone fails at once and breaks nothing else;
                # the first one that times out breaks the connections to all.
                with suppress(RuntimeError):
                    work = group.recv([torch.empty(1)], peer, UNUSED_TAG)
                    work.wait(timedelta(milliseconds=1))

    def failed_wait(self, message: PendingMessage, error: RuntimeError) -> RunError:
        """The error to raise when waiting for a message has failed."""
        cause = str(error)
        late = "Timed out waiting" in cause or "Operation timed out" in cause
        if self.guard is not None:
            return self.guard.explain(message, late, cause)
        waits = f"rank {self.rank} waits {message}"
        if late:
            return StuckError(f"{waits} for more than {self.patience:g} s")
        return PeerLostError(f"{waits}, but the connection is lost\n\n{cause}")


class SecondComm(ProcessComm):
    """The second connection of a rank, for messages alone."""

    def uses_gpus(self) -> bool:
        """It moves tensors through the CPU."""
        return False


def barrier_devices() -> list[int] | None:
    """The device of a barrier: NCCL wants to know it, and others accept none."""
    on_nccl = dist.get_backend() == NCCL
    return [torch.cuda.current_device()] if on_nccl else None


def fold(number: int, sizes: Iterable[int]) -> int:
    """Hash a list of numbers into one, with the same result on every machine."""
    for size in sizes:
        number = (number * 1_000_003 + size + 1) % UNUSED_TAG
    return number


class _Work:
    """A message or a sum in progress, which keeps its tensor alive until it is done.

    `home` is the tensor that a sum is copied back to, if `tensor` is only a copy of it.
    """

    __slots__ = ("comm", "home", "kind", "peers", "tensor", "turn", "work")

    def __init__(
        self,
        comm: ProcessComm,
        work: dist.Work,
        kind: str,
        peers: tuple[int, ...],
        turn: int,
        tensor: Tensor,
        home: Tensor | None = None,
    ) -> None:
        self.comm = comm
        self.work = work
        self.kind = kind
        self.peers = peers
        self.turn = turn
        self.tensor = tensor
        self.home = home
        if comm.on_gpu and comm.guard is not None:
            comm.launched.append((work, self.message))

    @property
    def message(self) -> PendingMessage:
        """Its description, which only errors and the watchdog need."""
        shape = tuple(self.tensor.shape)
        return PendingMessage(
            self.kind, self.peers, self.turn, shape, self.tensor.dtype
        )

    def wait(self) -> None:
        """Block until it is done."""
        comm = self.comm
        comm.waiting = self
        try:
            self.work.wait(comm.limit)
        except RuntimeError as error:
            raise comm.failed_wait(self.message, error) from None
        comm.waiting = None
        if self.home is not None:
            if comm.on_nccl:
                sleep_until_done()
            self.home.copy_(self.tensor)
            self.home = None


class _ReceiveWork:
    """A tensor that is being received into a buffer."""

    __slots__ = ("work",)

    def __init__(self, work: _Work) -> None:
        self.work = work

    def wait(self, into: Tensor | None = None) -> Tensor:
        """Block until the tensor has arrived, and return it."""
        self.work.wait()
        return self.work.tensor.to(self.work.comm.device)


class _RingReceive:
    """A tensor that stays in a ring of our own backend until it is needed, and then goes where it is needed."""

    __slots__ = ("arriving", "comm", "message")

    def __init__(
        self, comm: ProcessComm, group: IpcGroup, message: PendingMessage
    ) -> None:
        self.comm = comm
        self.message = message
        assert message.dtype is not None
        size = math.prod(message.shape) * message.dtype.itemsize
        try:
            self.arriving = group.recv_later(size, message.peers[0], self.buffer)
        except RuntimeError as error:
            raise comm.failed_wait(message, error) from None
        if comm.guard is not None:
            comm.launched.append((self.arriving, message))

    def buffer(self) -> Tensor:
        """A buffer for the tensor."""
        assert self.message.dtype is not None
        return self.comm.buffer(self.message.shape, self.message.dtype)

    def wait(self, into: Tensor | None = None) -> Tensor:
        """Make the stream that computes wait for the tensor, and return it; the host does not wait."""
        try:
            received = self.arriving.take(into)
        except RuntimeError as error:
            raise self.comm.failed_wait(self.message, error) from None
        return received.to(self.comm.device)
