"""Calls of the CUDA driver that torch lacks: memory shared between processes, and streams that wait on it."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError
from penstock.ir.lane import RECEIVE, LaneStep, Turn
from penstock.runtime.comm.comm import IPC
from penstock.torch_internals import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroup,
    ReduceOp,
    Store,
    Work,
)

WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, which compares modulo 2**32
IPC_HANDLE_BYTES = 64
SLEEP_ON_WAIT_FLAG = 4  # CU_CTX_SCHED_BLOCKING_SYNC
LOW_32_BITS = 0xFFFFFFFF


class CudaDriver:
    """The CUDA driver, as seen from this process's current GPU."""

    def __init__(self) -> None:
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RunError(
                f"ranks that share a GPU need the CUDA driver: {error}"
            ) from None
        address = ctypes.c_uint64
        value = ctypes.c_uint32
        flags = ctypes.c_uint32
        size = ctypes.c_size_t
        stream = ctypes.c_void_p
        self.raw_copy = _declare(
            self.cuda.cuMemcpyDtoDAsync_v2, address, address, size, stream
        )
        self.raw_wait = _declare(
            self.cuda.cuStreamWaitValue32_v2, stream, address, value, flags
        )
        self.raw_write = _declare(
            self.cuda.cuStreamWriteValue32_v2, stream, address, value, flags
        )

    def call(self, name: str, *arguments: object) -> None:
        """Call a driver function by name; raise a `RunError` if it fails."""
        function = getattr(self.cuda, name)
        self.check(function(*arguments), name)

    def check(self, code: int, name: str) -> None:
        """Raise a `RunError` with the driver's explanation if `code` is not zero."""
        if code == 0:
            return
        text = ctypes.c_char_p()
        self.cuda.cuGetErrorString(code, ctypes.byref(text))
        explanation = text.value.decode() if text.value else code
        raise RunError(f"{name}: {explanation}")

    def sleep_while_waiting(self, device: int) -> None:
        """Make the host sleep, not spin, while it waits for the GPU.

        This only works before the process uses the GPU for the first time.
        """
        self.cuda.cuDevicePrimaryCtxSetFlags_v2(
            ctypes.c_int(device), ctypes.c_uint(SLEEP_ON_WAIT_FLAG)
        )

    def allocate(self, size: int) -> int:
        """Allocate zeroed memory that other processes can open, and return its address.

        Memory from torch's allocator is unsuitable: one block may hold unrelated tensors.
        """
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        # The memset returns early; without a wait, others could write before it runs.
        self.call("cuStreamSynchronize", ctypes.c_void_p(None))
        return address.value

    def handle(self, address: int) -> bytes:
        """The handle with which another process can open this memory."""
        raw = (ctypes.c_char * IPC_HANDLE_BYTES)()
        self.call("cuIpcGetMemHandle", raw, ctypes.c_uint64(address))
        return bytes(raw)

    def open(self, handle: bytes) -> int:
        """Open another process's memory, and return its address here."""
        address = ctypes.c_uint64()
        raw = _Handle()
        ctypes.memmove(ctypes.byref(raw), handle, IPC_HANDLE_BYTES)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), raw, ctypes.c_uint(1))
        return address.value

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy bytes within the GPU, in the order of a stream."""
        code = self.raw_copy(target, source, size, stream)
        self.check(code, "cuMemcpyDtoDAsync")

    def wait(self, address: int, value: int, stream: int) -> None:
        """Make a stream wait until the number at `address` is at least `value`."""
        code = self.raw_wait(stream, address, value & LOW_32_BITS, WAIT_UNTIL_AT_LEAST)
        self.check(code, "cuStreamWaitValue32")

    def write(self, address: int, value: int, stream: int) -> None:
        """Make a stream write a number, once its earlier work is done and visible."""
        code = self.raw_write(stream, address, value & LOW_32_BITS, 0)
        self.check(code, "cuStreamWriteValue32")


class _Handle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_char * IPC_HANDLE_BYTES),)


def _declare(function: Any, *argument_types: Any) -> Callable[..., int]:
    """Declare the argument types of a driver function, so it accepts plain numbers.

    This is much faster than wrapping each argument in a ctypes object.
    """
    function.argtypes = argument_types
    function.restype = ctypes.c_int
    declared: Callable[..., int] = function
    return declared


FLAG_BYTES = 256  # distance between the two counters, which lie behind the slots

# Memory that a message can be copied to: its address, and the object that owns it.
Room: TypeAlias = tuple[int, object]


class Driver(Protocol):
    """The operations a ring needs, each executed in the order of a stream."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy bytes from one address to another."""
        ...

    def wait(self, address: int, value: int, stream: int) -> None:
        """Make a stream wait until the number at `address` is at least `value`."""
        ...

    def write(self, address: int, value: int, stream: int) -> None:
        """Make a stream write a number, once its earlier work is done and visible."""
        ...


@dataclass(slots=True)
class SlotRequest:
    """A message that the receiver has asked for, and the room that it will be copied to.

    Without room, the message stays in the ring until somebody has chosen one. If it has to
    leave the ring earlier, `make_room` provides it. The request keeps the owner alive.
    """

    size: int
    room: Room | None = None
    make_room: Callable[[], Room] | None = None
    taken: bool = False


class Ring:
    """One end of a ring of `slots` slots of `size` bytes each."""

    __slots__ = (
        "base",
        "driver",
        "head",
        "requests",
        "size",
        "slots",
        "slots_used",
        "tail",
    )

    def __init__(self, driver: Driver, base: int, slots: int, size: int) -> None:
        self.driver = driver
        self.base = base
        self.slots = slots
        self.size = size
        # The sender writes to `head` how many slots it has filled,
        # and the receiver to `tail` how many it has emptied.
        self.head = base + slots * size
        self.tail = self.head + FLAG_BYTES
        self.slots_used = 0  # since the start, by this end
        self.requests: deque[SlotRequest] = deque()  # oldest first

    def put(self, address: int, size: int, stream: int) -> None:
        """Copy a message into the ring."""
        for begin, length in cut(size, self._run_bytes):
            filled = self.slots_used + count_slots(length, self.size)
            if filled > self.slots:
                self.driver.wait(self.tail, filled - self.slots, stream)
            for offset, slot, piece in self._pieces(length):
                self.driver.copy(slot, address + begin + offset, piece, stream)
            self.slots_used = filled
            self.driver.write(self.head, filled, stream)

    def take(self, address: int, size: int, stream: int) -> None:
        """Copy the next message out of the ring."""
        for begin, length in cut(size, self._run_bytes):
            emptied = self.slots_used + count_slots(length, self.size)
            self.driver.wait(self.head, emptied, stream)
            for offset, slot, piece in self._pieces(length):
                self.driver.copy(address + begin + offset, slot, piece, stream)
            self.slots_used = emptied
            self.driver.write(self.tail, emptied, stream)

    def request(self, request: SlotRequest, stream: int) -> SlotRequest:
        """Ask for the next message, to be copied later."""
        self.requests.append(request)
        while self._requested_slots() > self.slots // 2:
            self.take_oldest(stream)
        return request

    def fetch(self, request: SlotRequest, stream: int) -> None:
        """Take out a requested message, and all requested before it."""
        while not request.taken:
            self.take_oldest(stream)

    def take_oldest(self, stream: int) -> None:
        """Take out the message that was requested first."""
        request = self.requests.popleft()
        if request.room is None:
            assert request.make_room is not None
            request.room = request.make_room()
        address, _ = request.room
        self.take(address, request.size, stream)
        request.taken = True

    @property
    def _run_bytes(self) -> int:
        """The most bytes that go at once: half of the ring, which a requested message always finds free."""
        return max(self.slots // 2, 1) * self.size

    def _pieces(self, length: int) -> list[tuple[int, int, int]]:
        """Where the next bytes lie in the ring: their offset, the address, and how many; two pieces at its end."""
        first = self.slots_used % self.slots
        until_end = (self.slots - first) * self.size
        pieces = [(0, self.base + first * self.size, min(length, until_end))]
        if length > until_end:
            pieces.append((until_end, self.base, length - until_end))
        return pieces

    def _requested_slots(self) -> int:
        """Slots that the outstanding requests will take."""
        return sum(count_slots(request.size, self.size) for request in self.requests)


def ring_bytes(slots: int, size: int) -> int:
    """The memory of a ring: its slots and its two counters."""
    return slots * size + 2 * FLAG_BYTES


def count_slots(size: int, slot_size: int) -> int:
    """The number of slots that a message takes."""
    return -(-size // slot_size)


def cut(size: int, most: int) -> list[tuple[int, int]]:
    """Cut a message into pieces of at most so many bytes: where each begins, and its bytes.

    >>> cut(11, 4)
    [(0, 4), (4, 4), (8, 3)]
    """
    return [(begin, min(most, size - begin)) for begin in range(0, size, most)]


SLOT_ALIGNMENT = 4096  # a slot's bytes are a multiple of this
MAX_RING_BYTES = 1 << 30  # a program that needs more still runs, but waits for room


class RingShape(NamedTuple):
    """The number of slots of a ring, and the bytes of each."""

    slots: int
    size: int


def fit_ring(
    turns: Sequence[Turn], source: int, sizes: Sequence[int], current: RingShape
) -> RingShape:
    """The shape that the ring from `source` to the rank with these turns needs.

    That is its current shape if it is large enough. `sizes` has the message bytes of each
    unit. Both ends compute the shape, and get the same answer. The number of slots is a
    power of two, so that a ring seldom has to grow.
    """
    if 2 * peak_slots(turns, source, sizes, current.size) <= current.slots:
        return current
    largest = 0
    for turn in turns:
        for step in _receives(turn, source):
            largest = max(largest, sizes[step.unit])
    aligned = count_slots(largest, SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    size = min(current.size, aligned)
    needed = 2 * peak_slots(turns, source, sizes, size)
    slots = 1 << (needed - 1).bit_length()
    max_slots = max(MAX_RING_BYTES // size, current.slots)
    return RingShape(min(slots, max_slots), size)


def peak_slots(
    turns: Sequence[Turn], source: int, sizes: Sequence[int], slot_size: int
) -> int:
    """The most slots that hold requested but not yet used messages at any moment."""
    requested: deque[tuple[int, int]] = deque()  # a value and its slots, oldest first
    level = 0
    peak = 0
    for turn in turns:
        if turn.step is not None:
            level -= _drop_used(requested, turn.step.source)
        for step in _receives(turn, source):
            slots = count_slots(sizes[step.unit], slot_size)
            requested.append((step.value, slots))
            level += slots
            peak = max(peak, level)
    return peak


def _drop_used(requested: deque[tuple[int, int]], used: int) -> int:
    """Drop a used value and all before it, if it was requested; return their slots."""
    if all(value != used for value, _ in requested):
        return 0
    freed = 0
    while True:
        value, slots = requested.popleft()
        freed += slots
        if value == used:
            return freed


def _receives(turn: Turn, source: int) -> Iterator[LaneStep]:
    """The receives of a turn that come from one rank."""
    for step in turn.messages:
        if step.do == RECEIVE and step.peer == source:
            yield step


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
