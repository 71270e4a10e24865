"""Ranks that share a GPU: a torch.distributed backend over memory that several processes see, `penstock_ipc`.

NCCL refuses two ranks on one GPU, and gloo sends no CUDA tensors. Here the memory is one, so a message is a copy into a
ring that the receiver owns and the sender has opened, and a copy out of it:

    sender     compute ─ wait for a free slot, copy y into it, tell the receiver ─ compute
                                                                │
    receiver   compute ─────────────────────────── wait to be told ─ copy x out of it, tell the sender ─ compute

All of it goes on the stream that computes. Streams of their own would let copies and computing overlap, but to go from
one stream to another and back costs the GPU 70 to 120 us, a copy of a megabyte 7.

Waits are the device's, so the host runs ahead, and sleeps when it waits at all. They have one danger: CUDA loads a
kernel when it is first used, and while any stream of the process waits, the load waits too. So a stream waits for a
message only where it is needed; what was launched before does not depend on what comes after.

Sums, broadcasts and gathers have rings and a stream of their own: all to all, piece by piece, added in the order of the
ranks, so that everybody has the same bits.
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
from penstock.runtime.comm.cuda import CudaDriver
from penstock.runtime.comm.ring import Due, Ring, ring_bytes
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

BACKEND_NAME = "penstock_ipc"
RING_SLOTS, RING_SLOT_BYTES = (
    16,
    2 << 20,
)  # of a ring for messages, and the bytes of one
SUM_SLOTS, SUM_SLOT = 2, 4 << 20  # of a ring for sums


class SharedState:
    """What all groups of a process share."""

    here: SharedState | None = None

    def __init__(self) -> None:
        self.driver = CudaDriver()
        self.driver.sleep_while_waiting(torch.cuda.current_device())
        torch.cuda.current_stream().synchronize()  # a context
        self.sums = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @classmethod
    def get(cls) -> SharedState:
        """Made when it is first needed."""
        if cls.here is None:
            cls.here = cls()
        return cls.here


class IpcGroup(ProcessGroup):
    """A group of ranks that share a GPU."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.store, self.mine, self.count = store, rank, size
        shared = SharedState.get()
        self.driver, self.sums = shared.driver, shared.sums
        self.watched = False  # whether somebody asks if a message is there
        self.others = [other for other in range(size) if other != rank]
        self.into = {
            source: self.own("ring", source, RING_SLOTS, RING_SLOT_BYTES)
            for source in range(size)
        }  # itself too, as in MPI
        self.sums_into = {
            source: self.own("sum", source, SUM_SLOTS, SUM_SLOT)
            for source in self.others
        }
        self.out: dict[int, Ring] = {}
        self.sums_out: dict[int, Ring] = {}
        self.open: deque[IpcWork] = deque()  # sums that nobody has waited for yet

    def shape(self, source: int, target: int) -> RingShape:
        """Of a ring for messages from this rank or to it; one that was not opened yet is as all are at first."""
        ring = self.into[source] if target == self.mine else self.out.get(target)
        return (
            RingShape(RING_SLOTS, RING_SLOT_BYTES)
            if ring is None
            else RingShape(ring.slots, ring.size)
        )

    def reserve(
        self, into: Mapping[int, RingShape], out: Mapping[int, RingShape]
    ) -> None:
        """New rings where larger ones are needed, between two steps: nothing is on its way. First this rank's own are
        there for the others, then those of the others are opened."""
        grown = [
            target
            for target, shape in out.items()
            if shape != self.shape(self.mine, target)
        ]
        for source, shape in into.items():
            if shape != self.shape(source, self.mine):
                self.into[source] = self.own(
                    f"ring {shape.slots} {shape.size}", source, *shape
                )
        for target in grown:
            shape = out[target]
            self.out.pop(target, None)
            self.other(self.out, f"ring {shape.slots} {shape.size}", target, *shape)

    @property
    def held(self) -> int:
        """Bytes that this rank's rings take of the GPU, which torch does not count; not those that grew."""
        return sum(
            ring_bytes(ring.slots, ring.size)
            for ring in (*self.into.values(), *self.sums_into.values())
        )

    def own(self, kind: str, source: int, slots: int, size: int) -> Ring:
        """A ring from a rank to this one."""
        base = self.driver.allocate(ring_bytes(slots, size))
        self.store.set(f"{kind} {source} {self.mine}", self.driver.handle(base).hex())
        return Ring(self.driver, base, slots, size)

    def other(
        self, rings: dict[int, Ring], kind: str, target: int, slots: int, size: int
    ) -> Ring:
        """A ring to a rank, which that rank owns."""
        if (
            target not in rings and target == self.mine
        ):  # a process cannot open what is its own
            rings[target] = Ring(self.driver, self.into[target].base, slots, size)
        elif target not in rings:
            handle = bytes.fromhex(
                self.store.get(f"{kind} {self.mine} {target}").decode()
            )
            rings[target] = Ring(self.driver, self.driver.open(handle), slots, size)
        return rings[target]

    def getBackendName(self) -> str:  # noqa: N802
        """Its name."""
        return BACKEND_NAME

    # ------------------------------------------------------------ messages
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> IpcMessage:
        """Sends one tensor: when the current stream comes to it."""
        x, stream = one_of(tensors), torch.cuda.current_stream()
        self.other(self.out, "ring", dst, RING_SLOTS, RING_SLOT_BYTES).put(
            x.data_ptr(), x.nbytes, stream.cuda_stream
        )
        return IpcMessage(
            self, None, event=stream.record_event() if self.watched else None
        )

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> IpcMessage:
        """Receives one tensor: when the stream that waits for it comes to that."""
        x, ring, line = (
            one_of(tensors),
            self.into[src],
            torch.cuda.current_stream().cuda_stream,
        )
        return IpcMessage(
            self, (ring, ring.ask(x.data_ptr(), x.nbytes, line, owner=x)), x
        )

    # ------------------------------------------------------------ all together
    def exchange(
        self, x: Tensor, use: Callable[[int, int, int], None]
    ) -> torch.cuda.Stream:
        """Everybody's bytes to everybody, piece by piece; `use(rank, begin, end)` with bytes that are there."""
        stream, line = self.sums, self.sums.cuda_stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for begin in range(0, x.nbytes, SUM_SLOT):
                size = min(SUM_SLOT, x.nbytes - begin)
                for target in self.others:
                    self.other(self.sums_out, "sum", target, SUM_SLOTS, SUM_SLOT).put(
                        x.data_ptr() + begin, size, line
                    )
                for rank in range(self.count):
                    use(rank, begin, size)
        return stream

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], opts: AllreduceOptions | None = None
    ) -> IpcWork:
        """A sum (or mean, max, min) in the order of the ranks."""
        x, op = one_of(tensors), ReduceOp.SUM if opts is None else opts.reduceOp
        flat, line = x.view(-1), self.sums.cuda_stream
        count = min(SUM_SLOT // x.itemsize, flat.numel())
        with torch.cuda.stream(self.sums):
            came = torch.empty(self.count, count, dtype=x.dtype, device=x.device)

        def use(rank: int, begin: int, size: int) -> None:
            first, numbers = begin // x.itemsize, size // x.itemsize
            if rank == self.mine:
                came[rank, :numbers].copy_(flat[first : first + numbers])
            else:
                self.sums_into[rank].take(came[rank].data_ptr(), size, line)
            if rank == self.count - 1:
                flat[first : first + numbers] = reduce_tensors(came[:, :numbers], op)

        return self.work(self.exchange(x, use), x)

    def work(self, stream: torch.cuda.Stream, *tensors: Tensor) -> IpcWork:
        """What was put on a stream until now; tensors are kept until somebody has waited for it, or it is over."""
        work = IpcWork(stream.record_event(), tensors)
        while self.open and (not self.open[0].tensors or self.open[0].is_completed()):
            self.open.popleft()
        self.open.append(work)
        return work

    def allgather(  # type: ignore[override]
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: object = None,
    ) -> IpcWork:
        """Everybody's tensor to everybody."""
        x, out, line = one_of(inputs), outputs[0], self.sums.cuda_stream

        def use(rank: int, begin: int, size: int) -> None:
            if rank == self.mine:
                self.driver.copy(
                    out[rank].data_ptr() + begin, x.data_ptr() + begin, size, line
                )
            else:
                self.sums_into[rank].take(
                    one_of([out[rank]]).data_ptr() + begin, size, line
                )

        return self.work(self.exchange(x, use), x, *out)

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions) -> IpcWork:  # type: ignore[override]
        """From one to all."""
        x, root, stream = one_of(tensors), opts.rootRank, self.sums
        stream.wait_stream(torch.cuda.current_stream())
        if self.mine != root:
            self.sums_into[root].take(x.data_ptr(), x.nbytes, stream.cuda_stream)
        else:
            for target in self.others:
                ring = self.other(self.sums_out, "sum", target, SUM_SLOTS, SUM_SLOT)
                ring.put(x.data_ptr(), x.nbytes, stream.cuda_stream)
        return self.work(stream, x)

    def barrier(self, opts: BarrierOptions | None = None) -> IpcWork:  # type: ignore[override]
        """A sum that the host waits for."""
        work = self.allreduce([torch.zeros(1, device="cuda")])
        work.host = True
        return work


class IpcMessage(Work):
    """A message on the stream that computes: sent already, or taken out of its ring when it is waited for.

    From then on it holds no tensor: memory is used again in the order of that stream, and the watchdog, which keeps
    messages to look at, would keep the tensors of several steps.
    """

    def __init__(
        self,
        group: IpcGroup,
        due: tuple[Ring, Due] | None,
        tensor: Tensor | None = None,
        event: torch.cuda.Event | None = None,
    ) -> None:
        super().__init__()
        self.group, self.due, self.tensor, self.event = group, due, tensor, event

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream goes on once it is there."""
        if self.due is not None:
            ring, due = self.due
            stream = torch.cuda.current_stream()
            ring.fetch(due, stream.cuda_stream)
            self.event = stream.record_event() if self.group.watched else None
            self.due = self.tensor = None
        return True

    def is_completed(self) -> bool:
        """Whether it is over, as far as anybody has asked to know."""
        return self.due is None and (self.event is None or bool(self.event.query()))  # type: ignore[no-untyped-call]

    def get_future(self) -> Any:
        """For torch's own collectives."""
        tensors = [] if self.tensor is None else [self.tensor]
        self.wait()
        return _future(tensors)


class IpcWork(Work):
    """Something on a stream of this process: waiting for it is the current stream's business, not the host's."""

    def __init__(self, event: torch.cuda.Event, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.event, self.tensors, self.host = event, tensors, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream goes on once it is over; the memory of the tensors may be used again after that."""
        if self.host:
            self.event.synchronize()
        else:
            torch.cuda.current_stream().wait_event(self.event)
        self.tensors = ()
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def get_future(self) -> Any:
        """For torch's own collectives: over already, as far as the host is concerned."""
        tensors = list(self.tensors)
        self.wait()
        return _future(tensors)


def _future(tensors: list[Tensor]) -> Any:
    future: Any = torch.futures.Future(
        devices=[torch.device("cuda", torch.cuda.current_device())]
    )
    future.set_result(tensors)
    return future


def one_of(tensors: Sequence[Tensor]) -> Tensor:
    """The only one, which must lie on the GPU in one piece."""
    (x,) = tensors
    if x.device.type != "cuda" or not x.is_contiguous():
        raise RunError(
            f"{BACKEND_NAME} sends contiguous CUDA tensors, not one of {x.device} with strides {x.stride()}"
        )
    return x


def reduce_tensors(stacked: Tensor, op: Any) -> Tensor:
    """Rows brought together."""
    if op == ReduceOp.SUM:
        return stacked.sum(0, dtype=stacked.dtype)
    if op == ReduceOp.AVG:
        return stacked.mean(0)
    if op == ReduceOp.MAX:
        return stacked.amax(0)
    if op == ReduceOp.MIN:
        return stacked.amin(0)
    raise RunError(
        f"{BACKEND_NAME} sums, and takes mean, max and min, but knows no {op}"
    )


def register() -> None:
    """Makes the backend known to torch.distributed, once."""
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, IpcGroup, devices=["cuda"])
