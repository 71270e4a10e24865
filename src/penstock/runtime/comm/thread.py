"""Runs every rank as a thread of one process, for tests, notebooks and `penstock check --run`."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from penstock.errors import PeerLostError, StuckError
from penstock.ir.program import Program

Returned = TypeVar("Returned")
Mailboxes: TypeAlias = dict[tuple[int, int], queue.SimpleQueue[Tensor]]
LOOK_SECONDS = 0.1  # how often a waiting thread looks whether another rank has failed


@dataclass(slots=True)
class _Sum:
    """A sum that collects its parts; the last rank adds them in the order of the ranks."""

    parts: dict[int, Tensor] = field(default_factory=dict)
    ready: threading.Event = field(default_factory=threading.Event)


class Hub:
    """The state that all threads of a pipeline share."""

    def __init__(self, ranks: int, patience: float = 60.0) -> None:
        self.ranks = ranks
        self.patience = patience
        self.lock = threading.Lock()
        # A mailbox for each pair of source and target, and another set for a second connection.
        self.mail = _mailboxes(ranks)
        self.mail_apart = _mailboxes(ranks)
        # Unfinished sums, by group and by number within the group.
        self.sums: dict[tuple[tuple[int, ...], int], _Sum] = {}
        self.gate = threading.Barrier(ranks)
        self.failed: int | None = None  # the first rank that has failed


def _mailboxes(ranks: int) -> Mailboxes:
    """A mailbox for each pair of source and target."""
    pairs = itertools.permutations(range(ranks), 2)
    return {pair: queue.SimpleQueue() for pair in pairs}


class ThreadComm:
    """One thread's connection to the other threads of a `Hub`."""

    def __init__(self, hub: Hub, rank: int, mail: Mailboxes | None = None) -> None:
        self.hub = hub
        self._rank = rank
        self.mail = hub.mail if mail is None else mail
        self.second: ThreadComm | None = None
        self.sums_started: dict[tuple[int, ...], int] = {}  # by group
        # Messages from a source go to the receives in the order in which those were
        # started, whatever the order in which they are waited for.
        self.receives_started = [0] * hub.ranks  # by source
        self.messages_taken = [0] * hub.ranks  # by source
        self.early: dict[tuple[int, int], Tensor] = {}  # taken for a later receive

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._rank

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hub.ranks

    @property
    def window(self) -> int:
        """Zero: posting a receive early gains nothing between threads."""
        return 0

    @property
    def reads_in_order(self) -> bool:
        """False: the other thread reads the tensor itself, at any time."""
        return False

    @property
    def channels(self) -> int | None:
        """None: messages do not wait for each other."""
        return None

    def send(self, tensor: Tensor, target: int) -> _ThreadSend:
        """Put the tensor itself into the target's mailbox."""
        self.mail[self._rank, target].put(tensor)
        return _ThreadSend()

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> _ThreadReceive:
        """Start receiving the next tensor from a rank."""
        self.receives_started[source] += 1
        return _ThreadReceive(self, source, self.receives_started[source], shape)

    def prepare(self, groups: list[tuple[int, ...]]) -> None:
        """Do nothing: groups need no setup."""

    def reserve(self, program: Program, sizes: Sequence[int]) -> None:
        """Do nothing: mailboxes have no size limit."""

    def give_back(self, tensor: Tensor) -> None:
        """Do nothing: the memory belongs to the sender."""

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> _ThreadSum:
        """Start a sum over a group, in the order of the ranks, so it is reproducible."""
        number = self.sums_started.get(group, 0)
        self.sums_started[group] = number + 1
        with self.hub.lock:
            whole = self.hub.sums.setdefault((group, number), _Sum())
            whole.parts[self._rank] = tensor
            if len(whole.parts) == len(group):
                total = torch.stack([whole.parts[rank] for rank in group]).sum(0)
                for part in whole.parts.values():
                    part.copy_(total)
                del self.hub.sums[group, number]
                whole.ready.set()
        return _ThreadSum(self, whole.ready)

    def second_connection(self) -> ThreadComm:
        """A second connection, with mailboxes of its own."""
        if self.second is None:
            self.second = ThreadComm(self.hub, self._rank, self.hub.mail_apart)
        return self.second

    def barrier(self) -> None:
        """Wait until all threads have reached this point."""
        try:
            self.hub.gate.wait(self.hub.patience)
        except threading.BrokenBarrierError:
            raise self.failed_wait("a barrier") from None

    def failed_wait(self, what: str) -> PeerLostError | StuckError:
        """The error to raise when waiting for something has failed."""
        waits = f"rank {self._rank} waits for {what}"
        if self.hub.failed is not None:
            return PeerLostError(f"{waits}, but rank {self.hub.failed} has failed")
        return StuckError(f"{waits} for more than {self.hub.patience:g} s")


class _ThreadSend:
    """A send between threads, which is over at once."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class _ThreadReceive:
    """A receive of one message, which has a number among those of its source."""

    comm: ThreadComm
    source: int
    number: int
    shape: tuple[int, ...]

    def wait(self, into: Tensor | None = None) -> Tensor:
        """Block until the tensor is there, or its sender has failed."""
        comm = self.comm
        remaining = comm.hub.patience
        mailbox = comm.mail[self.source, comm.rank]
        while (self.source, self.number) not in comm.early:
            try:
                tensor = mailbox.get(timeout=min(LOOK_SECONDS, remaining))
            except queue.Empty:
                remaining -= LOOK_SECONDS
                if remaining <= 0 or comm.hub.failed is not None:
                    what = f"a tensor from rank {self.source}"
                    raise comm.failed_wait(what) from None
                continue
            comm.messages_taken[self.source] += 1
            comm.early[self.source, comm.messages_taken[self.source]] = tensor
        tensor = comm.early.pop((self.source, self.number))
        shape = tuple(tensor.shape)
        assert shape == self.shape, f"{shape} came where {self.shape} was expected"
        return tensor


@dataclass(frozen=True, slots=True)
class _ThreadSum:
    """A sum that is ready once the last rank of its group has joined."""

    comm: ThreadComm
    ready: threading.Event

    def wait(self) -> None:
        """Block until the sum is ready, or a rank has failed."""
        remaining = self.comm.hub.patience
        while not self.ready.wait(min(LOOK_SECONDS, remaining)):
            remaining -= LOOK_SECONDS
            if remaining <= 0 or self.comm.hub.failed is not None:
                raise self.comm.failed_wait("a sum over replicas")


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
        raise _root_cause(errors)
    return [results[rank] for rank in range(ranks)]


def _root_cause(errors: list[BaseException]) -> BaseException:
    """The first error that is not merely a reaction to another rank's failure."""
    for error in errors:
        if not isinstance(error, PeerLostError):
            return error
    return errors[0]
