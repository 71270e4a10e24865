"""Ranks as processes on torch.distributed: gloo between CPUs, NCCL between GPUs, ours on one GPU, under any launcher.

Between two ranks messages arrive in the order in which they leave. gloo does not compare what comes with what is due: a
larger tensor ends the process, a smaller one leaves rubbish. So a message goes under a tag made of its turn and its
shape, and one that does not fit never meets its receive; the watchdog compares the two and says so:

    rank 0   3rd to rank 1: (2, 5, 8) ── tag a ──►    .. ── tag b ──   3rd from rank 0: (2, 4, 8)   rank 1

NCCL and our own backend know no tags, and there a receive that is posted early would block what comes after it: they
are posted where the lowered program has them (`window` 0). Raw tensors travel; nothing that arrives is unpickled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PeerLostError, RunError, StuckError
from penstock.ir.program import Program
from penstock.runtime.comm.ipc import BACKEND_NAME, IpcGroup
from penstock.runtime.comm.room import fit_ring
from penstock.runtime.lane import lane_turns

TAG_TURNS = (
    0xFFF  # turns are counted round and round, so that there are only so many tags
)
TAG_STRIDE = 0x7FFFF  # between the tags of two turns; a prime number
UNUSED_TAG = 0x7FFFFFFE  # a tag under which nobody sends; the others are below
SHAPES_KEPT = 8  # messages to each rank whose shape is kept for the watchdog

RECEIVE_WINDOW_BYTES = 64 << 20  # bytes of receives posted ahead


Sent: TypeAlias = tuple[int, tuple[int, ...], torch.dtype]  # turn, shape, type


class PendingMessage(NamedTuple):
    """What is on its way, for the words of an error."""

    kind: str  # "receive", "send", "sum" or "barrier"
    peers: tuple[int, ...]  # the other one, or the whole group
    turn: int = 0  # the how-manieth of its kind
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def tensor(self) -> str:
        """The tensor in words."""
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)}"

    def __str__(self) -> str:
        if self.kind == "receive":
            return f"for {self.tensor} from rank {self.peers[0]}"
        if self.kind == "send":
            return f"to send {self.tensor} to rank {self.peers[0]}"
        return f"for the {self.kind} over ranks {' '.join(map(str, self.peers))}"


class Guard(Protocol):
    """Knows more about the other ranks than a broken connection tells: the watchdog."""

    def explain(self, message: PendingMessage, late: bool, cause: str) -> RunError:
        """Why a wait has failed: `late`, it took too long; else the connection broke; in torch's words, `cause`."""
        ...


class ProcessComm:
    """This process's connection to the others of the default process group, or of another `group`.

    `device` is where tensors land: this rank's GPU under NCCL, else the CPU; gloo can serve a GPU through the CPU.
    `name` says which of several such groups it is, in errors.
    """

    def __init__(
        self,
        patience: float = 300.0,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        name: str = "",
    ) -> None:
        self._rank, self._ranks, self.name = (
            dist.get_rank(group),
            dist.get_world_size(group),
            name,
        )
        self.patience, self.on_gpu = (
            patience,
            dist.get_backend() in ("nccl", BACKEND_NAME),
        )
        self.wire = (
            torch.device("cuda", torch.cuda.current_device())
            if self.on_gpu
            else torch.device("cpu")
        )
        self.device = self.wire if device is None else torch.device(device)
        world = group or dist.group.WORLD
        assert world is not None
        self.world = world  # asked directly: dist.isend and irecv look it up and check it anew each time
        self.everyone = tuple(range(self._ranks))
        self.members = dist.get_process_group_ranks(
            world
        )  # of the default group, by rank of this one
        self.part = group is not None
        self.beside: list[
            dist.ProcessGroup
        ] = []  # others that this rank may wait in, with no word to us
        self.groups: dict[tuple[int, ...], dist.ProcessGroup] = {
            self.everyone: world
        }  # those this rank is in
        self.prepared = {self.everyone}  # all
        self.sent, self.asked = (
            [0] * self._ranks,
            [0] * self._ranks,
        )  # turns so far, by rank
        self.sums = 0
        self.tags: dict[
            tuple[tuple[int, ...], torch.dtype], int
        ] = {}  # of a shape, to which the turn is added
        self.recent: list[deque[Sent]] = [
            deque(maxlen=SHAPES_KEPT) for _ in self.everyone
        ]  # by rank
        self.flying: deque[tuple[dist.Work, PendingMessage]] = (
            deque()
        )  # NCCL: given to the GPU; the watchdog takes them out
        self.spare: dict[
            tuple[tuple[int, ...], torch.dtype], list[Tensor]
        ] = {}  # buffers to receive into again
        self.waiting: _Work | None = None  # what this rank waits for now
        self.listen_to(None)

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._ranks

    @property
    def window(self) -> int:
        """Bytes of receives that may be posted before the program has them."""
        return 0 if self.on_gpu else RECEIVE_WINDOW_BYTES

    def listen_to(self, guard: Guard | None, spare: float = 0.0) -> None:
        """Asks that guard when a wait fails. It has so many seconds more than the patience to end a wait itself."""
        self.guard = guard
        self.flying.clear()
        if isinstance(self.world, IpcGroup):
            self.world.watched = guard is not None
        # NCCL's waits are for the GPU to do; one with a limit would make the CPU wait instead
        self.limit = timedelta(seconds=0.0 if self.on_gpu else self.patience + spare)

    def prepare(self, groups: list[tuple[int, ...]]) -> None:
        """Makes the groups that `add` will be asked for; all ranks call it with the same list."""
        due = [group for group in groups if group not in self.prepared]
        self._agree(due)
        for group in due:
            made = dist.new_group(
                [self.members[rank] for rank in group],
                use_local_synchronization=self.part,
            )
            if isinstance(made, dist.ProcessGroup):  # else this rank is not in it
                self.groups[group] = made
            self.prepared.add(group)

    def _agree(self, groups: list[tuple[int, ...]]) -> None:
        """All ranks must make the same groups, else `new_group` waits for ever: n Σc² = (Σc)² if all c are alike."""
        code = fold(0, [n for group in groups for n in (len(group), *group)]) % 100_003
        sums = torch.tensor([code, code * code], dtype=torch.int64)
        self.add(sums, self.everyone).wait()
        if int(sums[1]) * self._ranks != int(sums[0]) ** 2:
            raise RunError(
                f"the ranks prepare different groups; rank {self._rank} prepares {groups}"
            )

    def reserve(
        self, program: Program, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        """Rings of our own backend, as large as a program needs them; others make room themselves."""
        group = self.world
        if not isinstance(group, IpcGroup):
            return
        sizes = [prod(shape) * dtype.itemsize for shape in shapes]
        lanes = [lane_turns(program, rank) for rank in self.everyone]
        into = {
            source: fit_ring(
                lanes[self._rank], source, sizes, group.shape(source, self._rank)
            )
            for source in self.everyone
        }
        out = {
            target: fit_ring(
                lanes[target], self._rank, sizes, group.shape(self._rank, target)
            )
            for target in self.everyone
        }
        group.reserve(into, out)

    def send(self, tensor: Tensor, target: int) -> _Work:
        """Sends a tensor."""
        turn = self.sent[target] = (self.sent[target] + 1) & TAG_TURNS
        raw = tensor.to(self.wire).contiguous()
        shape, dtype = raw.shape, raw.dtype
        self.recent[target].append((turn, shape, dtype))
        try:
            work = self.world.send([raw], target, self.tag(turn, shape, dtype))
        except RuntimeError as error:
            raise self.trouble(
                PendingMessage("send", (target,), turn, shape, dtype), error
            ) from None
        return _Work(self, work, "send", (target,), turn, raw)

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> _Landing:
        """Receives the next tensor of a rank."""
        turn = self.asked[source] = (self.asked[source] + 1) & TAG_TURNS
        spare = self.spare.get((shape, dtype))
        buffer = (
            spare.pop() if spare else torch.empty(shape, dtype=dtype, device=self.wire)
        )
        try:
            work = self.world.recv([buffer], source, self.tag(turn, shape, dtype))
        except RuntimeError as error:
            raise self.trouble(
                PendingMessage("receive", (source,), turn, shape, dtype), error
            ) from None
        return _Landing(_Work(self, work, "receive", (source,), turn, buffer))

    def tag(self, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Of a message: its turn, its shape and the size of its numbers, in one number."""
        tag = self.tags.get((shape, dtype))
        if tag is None:
            tag = self.tags[shape, dtype] = fold(dtype.itemsize, shape)
        return (tag + turn * TAG_STRIDE) % UNUSED_TAG

    def give_back(self, tensor: Tensor) -> None:
        """A received tensor that nobody looks at any more: its memory takes the next one of its shape."""
        if tensor.device == self.wire:
            self.spare.setdefault((tuple(tensor.shape), tensor.dtype), []).append(
                tensor
            )

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> _Work:
        """Sums a tensor over a group of ranks, in place."""
        if group not in self.groups:
            raise RunError(
                f"no group of ranks {group} yet: all ranks first call comm.prepare(groups_of(schedule))"
            )
        self.sums += 1
        raw = tensor.to(self.wire).contiguous()
        try:
            work = dist.all_reduce(raw, group=self.groups[group], async_op=True)
        except RuntimeError as error:
            raise self.trouble(PendingMessage("sum", group, self.sums), error) from None
        assert work is not None
        return _Work(
            self, work, "sum", group, self.sums, raw, None if raw is tensor else tensor
        )

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.sums += 1
        try:
            work = dist.barrier(self.world, async_op=True)
        except RuntimeError as error:
            raise self.trouble(
                PendingMessage("barrier", self.everyone, self.sums), error
            ) from None
        assert work is not None
        _Work(self, work, "barrier", self.everyone, self.sums, torch.empty(0)).wait()

    def pending(self) -> PendingMessage | None:
        """What this rank waits for: on gloo in a call, on NCCL the oldest that the GPU has not done."""
        waiting = self.waiting
        if waiting is not None:
            return waiting.message
        while True:
            try:
                work, message = self.flying[0]
                if not work.is_completed():
                    return message
                self.flying.popleft()
            except IndexError:  # all done
                return None

    def cut(self) -> None:
        """Breaks this rank's connections, so that every wait on them ends, here and on the others.

        gloo has no call for it, but does so when a receive is late. NCCL is left to the end of the process.
        """
        for made in (*self.groups.values(), *self.beside):
            if made.size() > 1 and not self.on_gpu:
                someone = 1 if made.rank() == 0 else 0
                try:
                    made.recv([torch.empty(1)], someone, UNUSED_TAG).wait(
                        timedelta(milliseconds=1)
                    )
                except RuntimeError:
                    continue

    def trouble(self, message: PendingMessage, error: RuntimeError) -> RunError:
        """A failed wait in words."""
        cause = str(error)
        late = "Timed out waiting" in cause or "Operation timed out" in cause
        if self.guard is not None:
            return self.guard.explain(message, late, cause)
        if late:
            return StuckError(
                f"rank {self._rank} waits {message} for more than {self.patience:g} s"
            )
        return PeerLostError(
            f"rank {self._rank} waits {message}, but the connection is lost\n\n{cause}"
        )


def fold(number: int, sizes: Iterable[int]) -> int:
    """One number of many: alike for alike ones on every machine, different for almost all others."""
    for size in sizes:
        number = (number * 1_000_003 + size + 1) % UNUSED_TAG
    return number


class _Work:
    """A message or a sum on its way; keeps its tensor until then."""

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
        self.comm, self.work, self.kind, self.peers, self.turn = (
            comm,
            work,
            kind,
            peers,
            turn,
        )
        self.tensor, self.home = tensor, home
        if comm.on_gpu and comm.guard is not None:
            comm.flying.append((work, self.message))

    @property
    def message(self) -> PendingMessage:
        """In words, which only an error needs."""
        return PendingMessage(
            self.kind,
            self.peers,
            self.turn,
            tuple(self.tensor.shape),
            self.tensor.dtype,
        )

    def wait(self) -> None:
        """Until it is over."""
        comm = self.comm
        comm.waiting = self
        try:
            self.work.wait(comm.limit)
        except RuntimeError as error:
            raise comm.trouble(self.message, error) from None
        comm.waiting = None
        if self.home is not None:
            self.home.copy_(self.tensor)
            self.home = None


class _Landing:
    """A tensor on its way into a buffer."""

    __slots__ = ("work",)

    def __init__(self, work: _Work) -> None:
        self.work = work

    def wait(self) -> Tensor:
        """Until it is there."""
        self.work.wait()
        return self.work.tensor.to(self.work.comm.device)
