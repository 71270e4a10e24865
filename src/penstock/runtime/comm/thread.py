"""All ranks in one process, each a thread: a real `Comm`, for tests, notebooks and `penstock check --run`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from penstock.errors import PeerLostError, StuckError
from penstock.ir.program import Program

Returned = TypeVar("Returned")


@dataclass(slots=True)
class _Sum:
    """A sum that waits for its parts; the last to come adds them in the order of the ranks."""

    parts: dict[int, Tensor] = field(default_factory=dict)
    ready: threading.Event = field(default_factory=threading.Event)


class Hub:
    """What the threads of one pipeline share."""

    def __init__(self, ranks: int, patience: float = 60.0) -> None:
        self.ranks, self.patience = ranks, patience
        self.lock = threading.Lock()
        self.mail = {
            (s, t): queue.SimpleQueue[Tensor]()
            for s in range(ranks)
            for t in range(ranks)
            if s != t
        }
        self.sums: dict[tuple[tuple[int, ...], int], _Sum] = {}
        self.gate = threading.Barrier(ranks)
        self.lost: int | None = None  # a rank that has died


class ThreadComm:
    """One thread's end of a `Hub`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self._rank = hub, rank
        self.turns: dict[tuple[int, ...], int] = {}  # sums so far, by group
        self.asked = [
            0
        ] * hub.ranks  # receives so far, by source: messages go to them in this order
        self.taken = [0] * hub.ranks
        self.here: dict[tuple[int, int], Tensor] = {}  # taken, not yet asked for

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.hub.ranks

    @property
    def window(self) -> int:
        """Nothing to gain: a thread's receive is a look into a box."""
        return 0

    def send(self, tensor: Tensor, target: int) -> _Done:
        """Hands the tensor over."""
        self.hub.mail[self._rank, target].put(tensor)
        return _Done()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> _Mail:
        """The next tensor of that rank."""
        self.asked[source] += 1
        return _Mail(self, source, self.asked[source], shape)

    def prepare(self, groups: list[tuple[int, ...]]) -> None:
        """Nothing to do."""

    def reserve(
        self, program: Program, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        """Nothing to do: boxes hold all that comes."""

    def give_back(self, tensor: Tensor) -> None:
        """Nothing to do: the memory is the sender's."""

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> _Summing:
        """Sums over the group, in the order of the ranks: the same bits every time."""
        turn = self.turns[group] = self.turns.get(group, -1) + 1
        with self.hub.lock:
            whole = self.hub.sums.setdefault((group, turn), _Sum())
            whole.parts[self._rank] = tensor
            if len(whole.parts) == len(group):
                total = torch.stack([whole.parts[rank] for rank in group]).sum(0)
                for part in whole.parts.values():
                    part.copy_(total)
                del self.hub.sums[group, turn]
                whole.ready.set()
        return _Summing(self, whole.ready)

    def barrier(self) -> None:
        """Waits for all threads."""
        try:
            self.hub.gate.wait(self.hub.patience)
        except threading.BrokenBarrierError:
            raise self.trouble("a barrier") from None

    def trouble(self, what: str) -> PeerLostError | StuckError:
        """Why a wait did not end."""
        if self.hub.lost is not None:
            return PeerLostError(
                f"rank {self._rank} waits for {what}, but rank {self.hub.lost} has failed"
            )
        return StuckError(
            f"rank {self._rank} waits for {what} for more than {self.hub.patience:g} s"
        )


class _Done:
    """A send to a thread is over at once."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True, slots=True)
class _Mail:
    comm: ThreadComm
    source: int
    turn: int
    shape: tuple[int, ...]

    def wait(self) -> Tensor:
        """The tensor; a look every tenth of a second whether its sender still lives."""
        comm = self.comm
        left = comm.hub.patience
        while (self.source, self.turn) not in comm.here:
            try:
                tensor = comm.hub.mail[self.source, comm.rank].get(
                    timeout=min(0.1, left)
                )
            except queue.Empty:
                left = left - 0.1 if comm.hub.lost is None else 0.0
                if left <= 0:
                    raise comm.trouble(f"a tensor from rank {self.source}") from None
                continue
            comm.taken[self.source] += 1
            comm.here[self.source, comm.taken[self.source]] = tensor
        tensor = comm.here.pop((self.source, self.turn))
        assert tuple(tensor.shape) == self.shape, (
            f"{tuple(tensor.shape)} came where {self.shape} was due"
        )
        return tensor


@dataclass(frozen=True, slots=True)
class _Summing:
    comm: ThreadComm
    ready: threading.Event

    def wait(self) -> None:
        """Until the last of the group has come."""
        left = self.comm.hub.patience
        while not self.ready.wait(min(0.1, left)):
            left = left - 0.1 if self.comm.hub.lost is None else 0.0
            if left <= 0:
                raise self.comm.trouble("a sum over replicas")


def run_threads(
    ranks: int, work: Callable[[ThreadComm], Returned], patience: float = 60.0
) -> list[Returned]:
    """Runs `work` on so many threads, each with its `Comm`; their results by rank, or the first error.

    >>> run_threads(3, lambda comm: comm.rank)
    [0, 1, 2]
    """
    hub = Hub(ranks, patience)
    results: dict[int, Returned] = {}
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadComm(hub, rank))
        except BaseException as error:
            with hub.lock:
                errors.append(error)
                hub.lost = rank if hub.lost is None else hub.lost
            hub.gate.abort()

    threads = [
        threading.Thread(target=one, args=(rank,), name=f"rank {rank}")
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerLostError)), errors[0])
    return [results[rank] for rank in range(ranks)]
