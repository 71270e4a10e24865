"""Ranks that are threads and share modules, and the state of Python and torch, do not disturb one another."""

from __future__ import annotations

import gc
import threading
from time import sleep
from types import TracebackType

import torch
from torch import Tensor, nn

from penstock import Pipeline, make
from penstock.models import shift_labels
from penstock.runtime import ThreadComm, bench, run_threads
from penstock.runtime.recorder import collector_paused

VOCAB, WIDTH = 11, 4
SECONDS = 60.0  # after which a test that hangs ends


def batch() -> tuple[Tensor, Tensor]:
    x = torch.arange(24).reshape(8, 3) % VOCAB
    return x, shift_labels(x)


def rank_here() -> int:
    """The rank that this thread runs."""
    return int(threading.current_thread().name.removeprefix("rank "))


class At(nn.Module):
    """Passes x on. Calls a function in the forward, and one in the backward."""

    def __init__(self, forward=lambda: None, backward=lambda: None) -> None:
        super().__init__()
        self.functions = (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        self.functions[0]()
        if x.requires_grad:
            x = x.clone()
            x.register_hook(lambda gradient: self.functions[1]())
        return x


class Counted(At):
    """The same, and it counts its calls."""

    def __init__(self, backward) -> None:
        super().__init__(backward=backward)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_the_collector_stays_off_until_the_last_rank_has_walked_and_is_on_then():
    first, second = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
    warm, ended = threading.Event(), threading.Event()
    seen = []

    def last_backward() -> None:  # of rank 0, whose micro-batch rank 1 has finished
        if warm.is_set():
            assert ended.wait(SECONDS)
            seen.append(gc.isenabled())

    layers = [first, At(backward=last_backward), second]
    schedule = make("1f1b", ranks=2, microbatches=1)

    def work(comm) -> None:
        pipeline = Pipeline(layers, schedule, comm=comm, partition=(2, 1))
        pipeline.step(*batch())
        comm.barrier()
        warm.set()
        while comm.rank == 0 and gc.isenabled():
            sleep(0.001)  # until rank 1 walks
        pipeline.step(*batch())
        if comm.rank == 1:
            ended.set()

    assert gc.isenabled()
    run_threads(2, work)
    assert seen == [False]
    assert gc.isenabled()


def test_a_collector_that_the_user_has_switched_off_stays_off():
    gc.disable()
    try:
        with collector_paused(), collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_shared_layers_drop_nothing_until_all_ranks_have_predicted_and_train_then():
    """Rank 1 begins when rank 0 has begun, and computes after rank 0 has ended, unless they wait for one another."""
    first, last = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
    dropout = nn.Dropout(0.5)
    begun, came, ended = (threading.Event() for _ in range(3))
    modes = []

    def wait_for(event: threading.Event, comm: ThreadComm) -> None:
        while not event.is_set() and comm.hub.gate.n_waiting == 0:
            sleep(0.001)

    def work(comm: ThreadComm) -> None:
        def meet() -> None:
            if dropout.training:
                return
            if comm.rank == 0:
                begun.set()
                assert came.wait(SECONDS)
            else:
                came.set()
                wait_for(ended, comm)
                modes.append(dropout.training)

        layers = [first, dropout, At(meet), last]
        pipeline = Pipeline(layers, schedule, comm=comm)
        x, y = batch()
        pipeline.step(x, y)
        comm.barrier()
        if comm.rank == 1:
            wait_for(begun, comm)
        pipeline.predict(x)
        if comm.rank == 0:
            ended.set()

    schedule = make("gpipe", ranks=1, microbatches=1, copies=2)
    run_threads(2, work)
    assert modes == [False]
    assert dropout.training


class WatchedLock:
    """The lock of proofs. `entering` is called before, and `leaving` when it is about to be released."""

    def __init__(self, entering, leaving) -> None:
        self.lock = threading.Lock()
        self.entering, self.leaving = entering, leaving
        self.holder = -1

    def __enter__(self) -> None:
        self.entering()
        assert self.lock.acquire(timeout=SECONDS)
        self.holder = rank_here()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leaving()
        self.holder = -1
        self.lock.release()


def test_a_proof_leaves_no_trace_in_a_part_that_another_rank_proves_meanwhile(
    monkeypatch,
):
    """Rank 1 looks at the part while a trial of rank 0 has changed its buffer and its gradients."""
    torch.manual_seed(0)
    changed, came = threading.Event(), threading.Event()
    traces = []

    def entering() -> None:
        if rank_here() == 1:
            came.set()

    def leaving() -> None:
        if rank_here() == 1:
            traces.append((int(counter.calls), head.weight.grad is None))

    lock = WatchedLock(entering, leaving)
    monkeypatch.setattr(bench, "ONE_AT_A_TIME", lock)

    class Memory(bench.ModuleMemory):
        def __init__(self, module: nn.Module) -> None:
            if rank_here() == 1 and lock.holder != 1:
                assert changed.wait(SECONDS)
            super().__init__(module)

    monkeypatch.setattr(bench, "ModuleMemory", Memory)

    def wait_for_rank_1() -> None:
        if rank_here() == 0 and head.weight.grad is not None:
            changed.set()
            assert came.wait(SECONDS)

    counter, head = Counted(wait_for_rank_1), nn.Linear(WIDTH, VOCAB)
    layers = [nn.Embedding(VOCAB, WIDTH), counter, head]
    schedule = make("1f1b", ranks=1, microbatches=2, copies=2)

    def work(comm) -> int:
        return Pipeline(layers, schedule, comm=comm).prove(*batch()).stages

    assert run_threads(2, work) == [2, 2]
    assert changed.is_set()
    assert set(traces) == {(0, True)}
    assert (int(counter.calls), head.weight.grad) == (0, None)
