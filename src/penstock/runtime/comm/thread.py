"""Runs every rank as a thread of one process, for tests, notebooks and `penstock check --run`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from penstock.errors import PeerLostError, StuckError
from penstock.runtime.comm.comm import Comm

Returned = TypeVar("Returned")
LOOK_SECONDS = 0.1  # how often a waiting thread looks whether another rank has failed


@dataclass(slots=True)
class _Sum:
    """A sum that collects its parts; the last rank adds them in the order of the ranks."""

    parts: dict[int, Tensor] = field(default_factory=dict)
    total: Future[Tensor] = field(default_factory=Future)


class Hub:
    """The state that all threads of a pipeline share."""

    def __init__(self, ranks: int, patience: float = 60.0) -> None:
        self.ranks = ranks
        self.patience = patience
        self.lock = threading.Lock()
        # Messages of which one end has come so far, by connection, source, target and number.
        self.messages: dict[Hashable, Future[Tensor]] = {}
        # Unfinished sums, by group and by number within the group.
        self.sums: dict[tuple[tuple[int, ...], int], _Sum] = {}
        self.gate = threading.Barrier(ranks)
        self.failed: int | None = None  # the first rank that has failed

    def meet(self, message: Hashable) -> Future[Tensor]:
        """Where the two ends of a message meet, whichever comes first."""
        with self.lock:
            known = self.messages.pop(message, None)
            if known is None:
                known = self.messages[message] = Future()
        return known


class ThreadComm(Comm):
    """One thread's connection to the other threads of a `Hub`.

    It has nothing to set up. A receive gets the sender's tensor itself, whose memory stays the sender's.
    """

    def __init__(self, hub: Hub, rank: int, connection: int = 1) -> None:
        self.hub = hub
        self.rank = rank
        self.ranks = hub.ranks
        self.connection = connection
        self.second: ThreadComm | None = None
        self.started: Counter[Hashable] = Counter()  # by link of messages, or by group

    def send(self, tensor: Tensor, target: int) -> _ThreadSend:
        """Hand the tensor itself to the target."""
        self._next_message(self.rank, target).set_result(tensor)
        return _ThreadSend()

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> _ThreadReceive:
        """Start receiving the next tensor from a rank."""
        message = self._next_message(source, self.rank)
        return _ThreadReceive(self, source, message, shape)

    def _next_message(self, source: int, target: int) -> Future[Tensor]:
        """The next message of a link, in the order in which its sends and its receives are started."""
        link = (self.connection, source, target)
        self.started[link] += 1
        return self.hub.meet((link, self.started[link]))

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> _ThreadSum:
        """Start a sum over a group, in the order of the ranks, so it is reproducible."""
        self.started[group] += 1
        number = self.started[group]
        with self.hub.lock:
            whole = self.hub.sums.setdefault((group, number), _Sum())
            whole.parts[self.rank] = tensor
            if len(whole.parts) == len(group):
                total = torch.stack([whole.parts[rank] for rank in group]).sum(0)
                for part in whole.parts.values():
                    part.copy_(total)
                del self.hub.sums[group, number]
                whole.total.set_result(total)
        return _ThreadSum(self, whole.total)

    def second_connection(self) -> ThreadComm:
        """A second connection, whose messages have numbers of their own."""
        if self.second is None:
            self.second = ThreadComm(self.hub, self.rank, self.connection + 1)
        return self.second

    def wait_for(self, awaited: Future[Tensor], what: str) -> Tensor:
        """Block until a tensor is there, or another rank has failed."""
        remaining = self.hub.patience
        while True:
            try:
                return awaited.result(min(LOOK_SECONDS, remaining))
            except TimeoutError:
                remaining -= LOOK_SECONDS
                if remaining <= 0 or self.hub.failed is not None:
                    raise self.failed_wait(what) from None

    def barrier(self) -> None:
        """Wait until all threads have reached this point."""
        try:
            self.hub.gate.wait(self.hub.patience)
        except threading.BrokenBarrierError:
            raise self.failed_wait("a barrier") from None

    def failed_wait(self, what: str) -> PeerLostError | StuckError:
        """The error to raise when waiting for something has failed."""
        waits = f"rank {self.rank} waits for {what}"
        if self.hub.failed is not None:
            return PeerLostError(f"{waits}, but rank {self.hub.failed} has failed")
        return StuckError(f"{waits} for more than {self.hub.patience:g} s")


class _ThreadSend:
    """A send between threads, which is over at once."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class _ThreadReceive:
    """A receive of one message."""

    comm: ThreadComm
    source: int
    message: Future[Tensor]
    shape: tuple[int, ...]

    def wait(self, into: Tensor | None = None) -> Tensor:
        """Block until the tensor is there, or its sender has failed."""
        tensor = self.comm.wait_for(self.message, f"a tensor from rank {self.source}")
        shape = tuple(tensor.shape)
        assert shape == self.shape, f"{shape} came where {self.shape} was expected"
        return tensor


@dataclass(frozen=True, slots=True)
class _ThreadSum:
    """A sum that is ready once the last rank of its group has joined."""

    comm: ThreadComm
    total: Future[Tensor]

    def wait(self) -> None:
        """Block until the sum is ready, or a rank has failed."""
        self.comm.wait_for(self.total, "a sum over replicas")


def run_threads(
    ranks: int, work: Callable[[ThreadComm], Returned], patience: float = 60.0
) -> list[Returned]:
    """Run `work` on one thread per rank, each with its `Comm`; return the results by rank.

    If any rank fails, its error is raised instead.

    >>> run_threads(3, lambda comm: comm.rank)
    [0, 1, 2]
    """
    hub = Hub(ranks, patience)
    results: dict[int, Returned] = {}
    errors: list[BaseException] = []

    def run_rank(rank: int) -> None:
        try:
            results[rank] = work(ThreadComm(hub, rank))
        except BaseException as error:
            with hub.lock:
                errors.append(error)
                if hub.failed is None:
                    hub.failed = rank
            hub.gate.abort()

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}")
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # The first one that is not merely a reaction to another rank's failure.
        own = (error for error in errors if not isinstance(error, PeerLostError))
        raise next(own, errors[0])
    return [results[rank] for rank in range(ranks)]
