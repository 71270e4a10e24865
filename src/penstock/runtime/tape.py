"""A tape records work once and plays it many times. On a GPU it is a CUDA graph: one launch replaces hundreds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Results: TypeAlias = tuple[Tensor, ...]
RecordedWork: TypeAlias = Callable[[], Results | None]


def _nothing() -> None:
    """Prepare nothing."""


class Tape(Protocol):
    """Records work. Playing it computes the same results again, in the same memory."""

    @property
    def replays_memory(self) -> bool:
        """Whether playing repeats every write to memory, and no call of Python.

        Then a gradient that was made while recording is overwritten when it is played, and memory that is freed
        between two recordings stays with the tape, which gives it to later ones.
        """
        ...

    def begin(self) -> None:
        """Begin with new memory. What is recorded until the next call is played in the same order, over and over."""
        ...

    def rehearse(self, work: RecordedWork) -> None:
        """Do work without recording it, on the stream where it will be recorded."""
        ...

    def record(
        self, work: RecordedWork, prepare: Callable[[], None] = _nothing
    ) -> tuple[Results, Callable[[], None]]:
        """Record work; return its results and a function that plays it.

        The results may hold no valid numbers before the first time it is played. `prepare` fills the inputs for that,
        if the tape plays the work at once.
        """
        ...


class CudaTape:
    """Records CUDA graphs, in a memory pool that is new after each `begin`."""

    replays_memory = True

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def begin(self) -> None:
        """Begin with a new memory pool, and free what the allocator has kept for other work."""
        torch.cuda.empty_cache()
        self.pool = torch.cuda.graph_pool_handle()

    def rehearse(self, work: RecordedWork) -> None:
        """Do work once, so that kernels are loaded and libraries have allocated their memory."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream().wait_stream(self.stream)

    def record(
        self, work: RecordedWork, prepare: Callable[[], None] = _nothing
    ) -> tuple[Results, Callable[[], None]]:
        """Record one graph.

        It is played at once: the first launch uploads it to the GPU, and that must not happen later, while a
        stream waits for another rank.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                results = work() or ()
            except BaseException:
                # Ending a broken capture raises an error of its own, which says less.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            with warnings.catch_warnings():
                # An action that only passes a tensor on has nothing to record.
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                graph.capture_end()
        prepare()
        graph.replay()
        return results, graph.replay
