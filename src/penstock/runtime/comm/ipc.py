"""The torch.distributed backend `penstock_ipc`, for ranks that share one GPU.

NCCL refuses two ranks of one host on one GPU, and gloo does not send CUDA tensors. But ranks that share
a GPU can also share its memory, so a message is two copies: the sender copies it into a ring
that the receiver owns and the sender has opened, and the receiver copies it out again:

    sender     compute ─ wait for a free slot, copy y into it, tell the receiver ─ compute
                                                                │
    receiver   compute ─────────────────────────── wait to be told ─ copy x out of it, tell the sender ─ compute

There is no third copy: a recorded action sends its result from where it lies, and finds its input where
it reads it.

All of this happens on the stream that computes. Separate streams would let copies overlap
with computation, but switching to another stream and back costs the GPU 70 to 120 us, while
copying a megabyte takes 7.

The device does the waiting, so the host runs ahead, and sleeps when it does wait. This has
one danger: CUDA loads a kernel when it is first used, and the load waits while any stream of
the process waits. So a stream waits for a message only where the message is needed; nothing
launched before that point depends on what comes after it.

Sums, broadcasts and gathers have their own rings and their own stream. Every rank sends its
bytes to every other rank, piece by piece, and all add them in the order of the ranks, so
that all ranks get the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError
from penstock.runtime.backends import IPC
from penstock.runtime.comm.cuda import CudaDriver
from penstock.runtime.comm.ring import Ring, Room, SlotRequest, ring_bytes
from penstock.runtime.comm.room import RingShape
from penstock.runtime.torch_internals import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroup,
    ReduceOp,
    Store,
    Work,
)

BACKEND_NAME = IPC
# The rings for messages, at first; `IpcGroup.reserve` makes them larger.
RING_SLOTS = 16
RING_SLOT_BYTES = 2 << 20
# The rings for sums, broadcasts and gathers.
SUM_SLOTS = 2
SUM_SLOT_BYTES = 4 << 20


class SharedState:
    """The CUDA driver and the stream for sums, which all groups of a process share."""

    instance: SharedState | None = None

    def __init__(self) -> None:
        self.driver = CudaDriver()
        self.driver.sleep_while_waiting(torch.cuda.current_device())
        torch.cuda.current_stream().synchronize()  # creates the CUDA context
        self.sums = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @classmethod
    def get(cls) -> SharedState:
        """The instance of this process, created when it is first needed."""
        if cls.instance is None:
            cls.instance = cls()
        return cls.instance


class IpcGroup(ProcessGroup):
    """A group of ranks that share a GPU."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.store = store
        self.mine = rank
        self.count = size
        shared = SharedState.get()
        self.driver = shared.driver
        self.sums = shared.sums
        self.watched = False  # whether a watchdog asks which messages are done
        self.others = [other for other in range(size) if other != rank]
        # As in MPI, a rank can also send to itself.
        self.into = {
            source: self.own("ring", source, RING_SLOTS, RING_SLOT_BYTES)
            for source in range(size)
        }
        self.sums_into = {
            source: self.own("sum", source, SUM_SLOTS, SUM_SLOT_BYTES)
            for source in self.others
        }
        self.out: dict[int, Ring] = {}
        self.sums_out: dict[int, Ring] = {}
        self.unfinished: deque[IpcWork] = deque()  # keeps the tensors of sums alive

    def shape(self, source: int, target: int) -> RingShape:
        """The shape of a message ring to or from this rank.

        A ring that was not opened yet has the initial shape.
        """
        ring = self.into[source] if target == self.mine else self.out.get(target)
        if ring is None:
            return RingShape(RING_SLOTS, RING_SLOT_BYTES)
        return RingShape(ring.slots, ring.size)

    def reserve(
        self, into: Mapping[int, RingShape], out: Mapping[int, RingShape]
    ) -> None:
        """Replace rings by larger ones where needed.

        Call this between two steps, when no message is on its way. The rank first
        publishes its own rings, then opens those of the others.
        """
        grown = [
            target
            for target, shape in out.items()
            if shape != self.shape(self.mine, target)
        ]
        for source, shape in into.items():
            if shape != self.shape(source, self.mine):
                self.into[source] = self.own(_ring_key(shape), source, *shape)
        for target in grown:
            shape = out[target]
            self.out.pop(target, None)
            self.open_ring(self.out, _ring_key(shape), target, *shape)

    @property
    def held(self) -> int:
        """Bytes of GPU memory in this rank's current rings, which torch does not count.

        Smaller rings that were replaced are not included.
        """
        rings = [*self.into.values(), *self.sums_into.values()]
        return sum(ring_bytes(ring.slots, ring.size) for ring in rings)

    def own(self, kind: str, source: int, slots: int, size: int) -> Ring:
        """Allocate and publish a ring from `source` to this rank."""
        base = self.driver.allocate(ring_bytes(slots, size))
        handle = self.driver.handle(base)
        self.store.set(f"{kind} {source} {self.mine}", handle.hex())
        return Ring(self.driver, base, slots, size)

    def open_ring(
        self, rings: dict[int, Ring], kind: str, target: int, slots: int, size: int
    ) -> Ring:
        """The ring to `target`, which that rank owns; opened on first use."""
        if target not in rings:
            if target == self.mine:  # a process cannot open its own memory
                base = self.into[target].base
            else:
                published = self.store.get(f"{kind} {self.mine} {target}").decode()
                base = self.driver.open(bytes.fromhex(published))
            rings[target] = Ring(self.driver, base, slots, size)
        return rings[target]

    def ring_to(self, target: int) -> Ring:
        """The ring for messages to `target`."""
        return self.open_ring(self.out, "ring", target, RING_SLOTS, RING_SLOT_BYTES)

    def sum_ring_to(self, target: int) -> Ring:
        """The ring for sums, broadcasts and gathers to `target`."""
        return self.open_ring(self.sums_out, "sum", target, SUM_SLOTS, SUM_SLOT_BYTES)

    def getBackendName(self) -> str:  # noqa: N802
        """The name under which torch.distributed knows this backend."""
        return BACKEND_NAME

    # ------------------------------------------------------------ messages
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> IpcMessage:
        """Send one tensor, once the current stream gets there."""
        x = only_tensor(tensors)
        stream = torch.cuda.current_stream()
        self.ring_to(dst).put(x.data_ptr(), x.nbytes, stream.cuda_stream)
        event = stream.record_event() if self.watched else None
        return IpcMessage(self, None, event)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> IpcMessage:
        """Receive one tensor, once the stream that waits for it gets there."""
        x = only_tensor(tensors)
        return self.request(src, SlotRequest(x.nbytes, room_of(x)))

    def recv_later(
        self, size: int, src: int, make_buffer: Callable[[], Tensor]
    ) -> IpcMessage:
        """Receive a tensor of `size` bytes, to a place that `IpcMessage.take` chooses.

        If it has to leave the ring before that, it goes to a buffer.
        """
        request = SlotRequest(size, make_room=lambda: room_of(make_buffer()))
        return self.request(src, request)

    def request(self, src: int, request: SlotRequest) -> IpcMessage:
        """Ask for the next message of a rank."""
        ring = self.into[src]
        stream = torch.cuda.current_stream().cuda_stream
        return IpcMessage(self, (ring, ring.request(request, stream)))

    # ------------------------------------------------------------ collectives
    def exchange(
        self, x: Tensor, use: Callable[[int, int, int], None]
    ) -> torch.cuda.Stream:
        """Send every rank's bytes to every other rank, piece by piece.

        Calls `use(rank, begin, size)` for each piece of each rank, in the order of the
        ranks, when it may be taken out of that rank's ring.
        """
        stream = self.sums
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for begin in range(0, x.nbytes, SUM_SLOT_BYTES):
                size = min(SUM_SLOT_BYTES, x.nbytes - begin)
                address = x.data_ptr() + begin
                for target in self.others:
                    self.sum_ring_to(target).put(address, size, stream.cuda_stream)
                for rank in range(self.count):
                    use(rank, begin, size)
        return stream

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], opts: AllreduceOptions | None = None
    ) -> IpcWork:
        """Sum a tensor (or take the mean, max or min) in the order of the ranks."""
        x = only_tensor(tensors)
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        flat = x.view(-1)
        stream = self.sums.cuda_stream
        width = min(SUM_SLOT_BYTES // x.itemsize, flat.numel())
        with torch.cuda.stream(self.sums):
            rows = torch.empty(self.count, width, dtype=x.dtype, device=x.device)

        def use(rank: int, begin: int, size: int) -> None:
            first = begin // x.itemsize
            count = size // x.itemsize
            piece = slice(first, first + count)
            if rank == self.mine:
                rows[rank, :count].copy_(flat[piece])
            else:
                self.sums_into[rank].take(rows[rank].data_ptr(), size, stream)
            if rank == self.count - 1:
                flat[piece] = reduce_rows(rows[:, :count], op)

        return self.work(self.exchange(x, use), x)

    def work(self, stream: torch.cuda.Stream, *tensors: Tensor) -> IpcWork:
        """The work launched on a stream so far.

        The group keeps the tensors alive until somebody has waited for the work, or it is
        done.
        """
        work = IpcWork(stream.record_event(), tensors)
        unfinished = self.unfinished
        while unfinished and unfinished[0].may_be_dropped():
            unfinished.popleft()
        unfinished.append(work)
        return work

    def allgather(  # type: ignore[override]
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: object = None,
    ) -> IpcWork:
        """Give every rank the tensors of all ranks."""
        x = only_tensor(inputs)
        out = outputs[0]
        stream = self.sums.cuda_stream

        def use(rank: int, begin: int, size: int) -> None:
            if rank == self.mine:
                target = out[rank].data_ptr() + begin
                self.driver.copy(target, x.data_ptr() + begin, size, stream)
            else:
                target = only_tensor([out[rank]]).data_ptr() + begin
                self.sums_into[rank].take(target, size, stream)

        return self.work(self.exchange(x, use), x, *out)

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions) -> IpcWork:  # type: ignore[override]
        """Give every rank the tensor of one rank."""
        x = only_tensor(tensors)
        root = opts.rootRank
        stream = self.sums
        stream.wait_stream(torch.cuda.current_stream())
        if self.mine != root:
            self.sums_into[root].take(x.data_ptr(), x.nbytes, stream.cuda_stream)
        else:
            for target in self.others:
                ring = self.sum_ring_to(target)
                ring.put(x.data_ptr(), x.nbytes, stream.cuda_stream)
        return self.work(stream, x)

    def barrier(self, opts: BarrierOptions | None = None) -> IpcWork:  # type: ignore[override]
        """Start a sum that the host waits for."""
        work = self.allreduce([torch.zeros(1, device="cuda")])
        work.host = True
        return work


def _ring_key(shape: RingShape) -> str:
    """The name under which a ring of this shape is published in the store."""
    return f"ring {shape.slots} {shape.size}"


class IpcMessage(Work):
    """A message on the stream that computes: sent already, or received when waited for.

    After that it holds no tensor. It does not need to, since memory is reused in the order
    of that stream; and the watchdog, which keeps messages to look at, would otherwise keep
    the tensors of several steps alive.
    """

    def __init__(
        self,
        group: IpcGroup,
        request: tuple[Ring, SlotRequest] | None,
        event: torch.cuda.Event | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.request = request
        self.event = event

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the message; the host does not wait."""
        if self.request is not None:
            self.take()
        return True

    def take(self, place: Tensor | None = None) -> Tensor:
        """Make the current stream wait for a received message, and return the tensor that it is in.

        That is `place`, unless the message has another room already or `place` is None.
        """
        assert self.request is not None
        ring, request = self.request
        if request.room is None and place is not None:
            request.room = room_of(place)
        stream = torch.cuda.current_stream()
        ring.fetch(request, stream.cuda_stream)
        self.event = stream.record_event() if self.group.watched else None
        self.request = None
        assert request.room is not None
        _, tensor = request.room
        assert isinstance(tensor, Tensor)
        return tensor

    def is_completed(self) -> bool:
        """Whether the message is through; only known exactly while a watchdog asks."""
        if self.request is not None:
            return False
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def get_future(self) -> Any:
        """A finished future, which torch's own collectives ask for."""
        tensors = [] if self.request is None else [self.take()]
        return _finished_future(tensors)


class IpcWork(Work):
    """Work on a stream of this process; the current stream waits for it, not the host."""

    def __init__(self, event: torch.cuda.Event, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.event = event
        self.tensors = tensors
        self.host = False  # whether the host waits too

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; after that the tensors' memory may be reused."""
        if self.host:
            self.event.synchronize()
        else:
            torch.cuda.current_stream().wait_event(self.event)
        self.tensors = ()
        return True

    def is_completed(self) -> bool:
        """Whether the GPU has finished the work."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def may_be_dropped(self) -> bool:
        """Whether nobody needs this object to keep tensors alive any more."""
        return not self.tensors or self.is_completed()

    def get_future(self) -> Any:
        """A future for torch's own collectives; for the host, it is finished already."""
        tensors = list(self.tensors)
        self.wait()
        return _finished_future(tensors)


def _finished_future(tensors: list[Tensor]) -> Any:
    device = torch.device("cuda", torch.cuda.current_device())
    future: Any = torch.futures.Future(devices=[device])
    future.set_result(tensors)
    return future


def room_of(tensor: Tensor) -> Room:
    """The memory of a tensor, for a message."""
    return tensor.data_ptr(), tensor


def only_tensor(tensors: Sequence[Tensor]) -> Tensor:
    """The only tensor of a list; it must be contiguous and on the GPU."""
    (x,) = tensors
    if x.device.type != "cuda" or not x.is_contiguous():
        raise RunError(
            f"{BACKEND_NAME} can only send contiguous CUDA tensors; this tensor is on "
            f"{x.device} and has the strides {x.stride()}"
        )
    return x


def reduce_rows(rows: Tensor, op: Any) -> Tensor:
    """Combine the rows of a tensor into one, with a torch.distributed operation."""
    if op == ReduceOp.SUM:
        return rows.sum(0, dtype=rows.dtype)
    if op == ReduceOp.AVG:
        return rows.mean(0)
    if op == ReduceOp.MAX:
        return rows.amax(0)
    if op == ReduceOp.MIN:
        return rows.amin(0)
    raise RunError(
        f"{BACKEND_NAME} supports SUM, AVG, MAX and MIN, but not {op}\n"
        "  use one of these, or a process group with another backend for this call"
    )


def register() -> None:
    """Register the backend with torch.distributed, unless it is registered already."""
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, IpcGroup, devices=["cuda"])
