"""Ranks that share a GPU: a torch.distributed backend over memory that several processes see, `penstock_ipc`.

NCCL refuses two ranks on one GPU, and gloo sends no CUDA tensors. Here the memory is one, so a message is a copy into a
ring that the receiver owns and the sender has opened, and a copy out of it. Nobody polls: streams wait on the device.

    sender's stream    wait tail > n - slots │ copy x ──► slot n % slots │ head = n + 1
                                                              │
    receiver's stream                   wait head > n │ copy slot ──► y  │ tail = n + 1

A message longer than a slot takes several, one after the other. Each direction of each pair has its own ring, and its
own stream on both sides, so that no message waits behind one of another pair. Sums go all to all and are added in the
order of the ranks: the same bits everywhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroup,
    ReduceOp,
    Store,
    Work,
)

from penstock.errors import RunError

NAME = "penstock_ipc"
SLOTS, SLOT = 4, 4 << 20  # of a ring, and the bytes of one
FLAG = 256  # bytes between the two flags, which lie behind the slots
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: a cyclic comparison
HANDLE = 64  # bytes of a CUDA IPC handle


# ---------------------------------------------------------------- the driver
class Driver(Protocol):
    """What a ring needs: copies, and waits and writes of a number, all in the order of a stream."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Bytes from one place to another."""
        ...

    def wait(self, place: int, value: int, stream: int) -> None:
        """Until that place has at least that value."""
        ...

    def write(self, place: int, value: int, stream: int) -> None:
        """A value, after all before it is done and visible."""
        ...


class CudaDriver:
    """The few calls of the CUDA driver that torch does not offer."""

    def __init__(self) -> None:
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RunError(f"{NAME} needs the CUDA driver: {error}") from None

    def call(self, name: str, *arguments: object) -> None:
        """Calls it, or says what is wrong."""
        code = getattr(self.cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RunError(f"{name}: {text.value.decode() if text.value else code}")

    def allocate(self, size: int) -> int:
        """Memory that can be opened by others (torch's own may share a block with something else)."""
        place = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
        self.call("cuMemsetD8_v2", place, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        return place.value

    def handle(self, place: int) -> bytes:
        """What others open it with."""
        raw = (ctypes.c_char * HANDLE)()
        self.call("cuIpcGetMemHandle", raw, ctypes.c_uint64(place))
        return bytes(raw)

    def open(self, handle: bytes) -> int:
        """Memory of another process."""
        place, raw = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(raw), handle, HANDLE)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(place), raw, ctypes.c_uint(1))
        return place.value

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Inside the device, on a stream."""
        line = ctypes.c_void_p(stream)
        self.call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), line)

    def wait(self, place: int, value: int, stream: int) -> None:
        """The stream waits until that place has at least that value."""
        rest = (ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.c_uint(AT_LEAST))
        self.call("cuStreamWaitValue32_v2", ctypes.c_void_p(stream), ctypes.c_uint64(place), *rest)

    def write(self, place: int, value: int, stream: int) -> None:
        """The stream writes a value there, after all before it is done and visible."""
        rest = (ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.c_uint(0))
        self.call("cuStreamWriteValue32_v2", ctypes.c_void_p(stream), ctypes.c_uint64(place), *rest)


class _Handle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_char * HANDLE),)


# ---------------------------------------------------------------- rings
class Ring:
    """One end of one direction between two ranks."""

    __slots__ = ("base", "driver", "stream", "turn")

    def __init__(self, driver: Driver, base: int, stream: int) -> None:
        self.driver, self.base, self.stream = driver, base, stream
        self.turn = 0  # slots used so far

    @property
    def head(self) -> int:
        """Where the sender writes how many slots it has filled."""
        return self.base + SLOTS * SLOT

    @property
    def tail(self) -> int:
        """Where the receiver writes how many it has emptied."""
        return self.head + FLAG

    def put(self, place: int, size: int) -> None:
        """Fills slots from there."""
        driver, stream = self.driver, self.stream
        for begin, length in pieces(size):
            if self.turn >= SLOTS:
                driver.wait(self.tail, self.turn - SLOTS + 1, stream)
            driver.copy(self.base + self.turn % SLOTS * SLOT, place + begin, length, stream)
            self.turn += 1
            driver.write(self.head, self.turn, stream)

    def take(self, place: int, size: int) -> None:
        """Empties slots to there."""
        driver, stream = self.driver, self.stream
        for begin, length in pieces(size):
            driver.wait(self.head, self.turn + 1, stream)
            driver.copy(place + begin, self.base + self.turn % SLOTS * SLOT, length, stream)
            self.turn += 1
            driver.write(self.tail, self.turn, stream)


def pieces(size: int) -> list[tuple[int, int]]:
    """A message cut into slots: where each piece begins, and its bytes.

    >>> pieces(SLOT + 3)
    [(0, 4194304), (4194304, 3)]
    """
    return [(begin, min(SLOT, size - begin)) for begin in range(0, size, SLOT)]


# ---------------------------------------------------------------- the backend
class Line:
    """An end of a ring with the stream it is used on."""

    __slots__ = ("ring", "stream")

    def __init__(self, driver: Driver, base: int) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.ring = Ring(driver, base, self.stream.cuda_stream)


class IpcGroup(ProcessGroup):
    """A group of ranks that share a GPU."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.store, self.mine, self.count, self.limit = store, rank, size, timeout
        self.driver = CudaDriver()
        torch.cuda.current_stream().synchronize()  # a context
        self.into: dict[int, Line] = {}  # by source
        self.out: dict[int, Line] = {}  # by target
        for source in range(size):
            if source != rank:
                base = self.driver.allocate(SLOTS * SLOT + 2 * FLAG)
                self.into[source] = Line(self.driver, base)
                store.set(f"ring {source} {rank}", self.driver.handle(base).hex())

    def getBackendName(self) -> str:  # noqa: N802
        """Its name."""
        return NAME

    def line_to(self, target: int) -> Line:
        """The ring to a rank, which that rank owns."""
        if target not in self.out:
            handle = bytes.fromhex(self.store.get(f"ring {self.mine} {target}").decode())
            self.out[target] = Line(self.driver, self.driver.open(handle))
        return self.out[target]

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work:
        """Sends one tensor."""
        return self.sent(_one(tensors), dst)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        """Receives one tensor."""
        return self.received(_one(tensors), src)

    def sent(self, x: Tensor, target: int) -> IpcWork:
        """On the stream of its ring, once the current stream has made it."""
        line = self.line_to(target)
        line.stream.wait_stream(torch.cuda.current_stream())
        x.record_stream(line.stream)
        line.ring.put(x.data_ptr(), x.nbytes)
        return IpcWork([line.stream.record_event()], [x])

    def received(self, x: Tensor, source: int) -> IpcWork:
        """On the stream of its ring, once the current stream is done with what was there."""
        line = self.into[source]
        line.stream.wait_stream(torch.cuda.current_stream())
        x.record_stream(line.stream)
        line.ring.take(x.data_ptr(), x.nbytes)
        return IpcWork([line.stream.record_event()], [x])

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], opts: AllreduceOptions | None = None
    ) -> Work:
        """All to all, then a sum (or max, min) in the order of the ranks."""
        x, op = _one(tensors), ReduceOp.SUM if opts is None else opts.reduceOp
        others = [other for other in range(self.count) if other != self.mine]
        came = {other: torch.empty_like(x) for other in others}
        works = [self.sent(x, other) for other in others]
        works += [self.received(came[other], other) for other in others]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        for work in works:
            for event in work.events:
                side.wait_event(event)
        with torch.cuda.stream(side):
            came[self.mine] = x.clone()
            x.copy_(_reduced([came[rank] for rank in range(self.count)], op))
            for one in (*came.values(), x):
                one.record_stream(side)
        return IpcWork([side.record_event()], [x])

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions) -> Work:  # type: ignore[override]
        """From one to all."""
        x, root = _one(tensors), opts.rootRank
        if self.mine != root:
            return self.received(x, root)
        works = [self.sent(x, other) for other in range(self.count) if other != root]
        return IpcWork([event for work in works for event in work.events], [x])

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: object = None
    ) -> Work:
        """Everybody's tensor to everybody."""
        x, out = _one(inputs), outputs[0]
        others = [other for other in range(self.count) if other != self.mine]
        works = [self.sent(x, other) for other in others]
        works += [self.received(out[other], other) for other in others]
        out[self.mine].copy_(x)
        return IpcWork([event for work in works for event in work.events], [x, *out])

    def barrier(self, opts: BarrierOptions | None = None) -> Work:  # type: ignore[override]
        """A sum that the host waits for."""
        work = self.allreduce([torch.zeros(1, device="cuda")])
        assert isinstance(work, IpcWork)
        return IpcWork(work.events, work.tensors, host=True)


class IpcWork(Work):
    """Something on streams of this process: waiting for it is the current stream's business, not the host's."""

    def __init__(self, events: list[torch.cuda.Event], tensors: list[Tensor], host: bool = False) -> None:
        super().__init__()
        self.events, self.tensors, self.host = events, tensors, host

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream goes on once it is over."""
        stream = torch.cuda.current_stream()
        for event in self.events:
            if self.host:
                event.synchronize()
            else:
                stream.wait_event(event)
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return all(event.query() for event in self.events)  # type: ignore[no-untyped-call]

    def get_future(self) -> Any:
        """For torch's own collectives: over already, as far as the host is concerned."""
        self.wait()
        future: Any = torch.futures.Future(devices=[torch.device("cuda", torch.cuda.current_device())])
        future.set_result(self.tensors)
        return future


def _one(tensors: Sequence[Tensor]) -> Tensor:
    (x,) = tensors
    if x.device.type != "cuda" or not x.is_contiguous():
        raise RunError(f"{NAME} sends contiguous CUDA tensors, not one of {x.device} with strides {x.stride()}")
    return x


def _reduced(parts: list[Tensor], op: Any) -> Tensor:
    stacked = torch.stack(parts)
    if op == ReduceOp.SUM:
        return stacked.sum(0)
    if op == ReduceOp.AVG:
        return stacked.mean(0)
    if op == ReduceOp.MAX:
        return stacked.amax(0)
    if op == ReduceOp.MIN:
        return stacked.amin(0)
    raise RunError(f"{NAME} sums, and takes max and min, but knows no {op}")


def _make(store: Store, rank: int, size: int, timeout: timedelta) -> IpcGroup:
    return IpcGroup(store, rank, size, timeout)


def register() -> None:
    """Makes the backend known to torch.distributed, once."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, devices=["cuda"])
