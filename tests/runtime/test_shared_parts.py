"""Ranks that are threads and share modules, and the state of Python and torch, do not disturb one another."""

from __future__ import annotations

import gc
import threading
from time import sleep

import torch
from torch import Tensor, nn

from penstock import Pipeline, make
from penstock.models import shift_labels
from penstock.runtime import ThreadComm, run_threads
from penstock.runtime.collector import collector_paused

VOCAB, WIDTH = 11, 4
SECONDS = 60.0  # after which a test that hangs ends


def batch() -> tuple[Tensor, Tensor]:
    x = torch.arange(24).reshape(8, 3) % VOCAB
    return x, shift_labels(x)


class At(nn.Module):
    """Passes x on and counts its calls. Calls a function in the forward, and one in the backward."""

    def __init__(self, forward=lambda: None, backward=lambda: None) -> None:
        super().__init__()
        self.functions = (forward, backward)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.functions[0]()
        if x.requires_grad:
            x = x.clone()
            x.register_hook(lambda gradient: self.functions[1]())
        return x


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
