"""All layouts of devices into copies of a pipeline, stages and devices per stage, each with its best slices.

    devices = data * pipe * tensor      data    copies of the pipeline, each with its share of the batch
                                        pipe    stages of one pipeline
                                        tensor  devices that share the matrices of a stage

More copies leave fewer sequences for each, so slices matter more. More devices per stage make its slices faster, but
not the fixed cost of a slice. No formula covers all this, so every layout is tried, and `best_batch` cuts each exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import ShapeError
from penstock.plan.slices.cuts import Slicing, best_batch
from penstock.plan.slices.slice_times import SliceTimes, whole_sequence_times

ROW_COUNTS = (1, 2, 4, 8)  # numbers of sequences that may go through together


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to use the devices: the latency of its step with the best slices, and with whole sequences."""

    data: int
    pipe: int
    tensor: int
    slicing: Slicing
    latency: float
    whole: float
    bytes: float  # per device

    @property
    def speedup(self) -> float:
        """The latency with whole sequences over the latency with slices."""
        return self.whole / self.latency


def layouts(
    devices: int,
    batch: int,
    times_of: Callable[[int, int, int], SliceTimes | None],
    rows: Sequence[int] = ROW_COUNTS,
    memory: float | None = None,
    bytes_of: Callable[[int, int, int], float] = lambda data, pipe, tensor: 0.0,
    step: Callable[[int, int, int], float] = lambda data, pipe, tensor: 0.0,
    most: int = 8,
) -> tuple[Layout, ...]:
    """Return every layout of the devices for a batch of sequences, the fastest first.

    `times_of(pipe, tensor, rows)` returns the times of a stage's slices with this many
    rows at once, or None if such a stage does not exist. `bytes_of(data, pipe, tensor)`
    is what a device holds, which must fit into `memory`. `step(data, pipe, tensor)` is
    the time that a step takes on top of the pipeline, for example to sum gradients over
    the copies. At most `most` devices share a stage.
    """
    if devices < 1 or batch < 1:
        raise ShapeError(
            f"there must be at least 1 device and 1 sequence, not {devices} devices "
            f"for a batch of {batch} sequences"
        )
    feasible = []
    least_bytes = math.inf
    for data, pipe, tensor in _factorizations(devices, batch, most):
        size = bytes_of(data, pipe, tensor)
        least_bytes = min(least_bytes, size)
        if memory is not None and size > memory:
            continue
        extra = step(data, pipe, tensor)
        sequences = batch // data
        candidate = layout(data, pipe, tensor, sequences, times_of, rows, size, extra)
        if candidate is not None:
            feasible.append(candidate)
    if not feasible and memory is not None and least_bytes > memory:
        raise ShapeError(
            f"no layout fits into a memory of {memory:g}; "
            f"the smallest takes {least_bytes:g}"
        )
    if not feasible:
        raise ShapeError(
            f"{devices} devices cannot be laid out for a batch of {batch} "
            f"with up to {most} devices per stage"
        )
    return tuple(sorted(feasible, key=lambda each: each.latency))


def layout(
    data: int,
    pipe: int,
    tensor: int,
    sequences: int,
    times_of: Callable[[int, int, int], SliceTimes | None],
    rows: Sequence[int] = ROW_COUNTS,
    size: float = 0.0,
    step: float = 0.0,
) -> Layout | None:
    """Return one layout with `sequences` sequences per pipeline, or None if its stages do not exist."""
    times = {}
    for count in rows:
        if count <= sequences:
            row_times = times_of(pipe, tensor, count)
            if row_times is not None:
                times[count] = row_times
    if not times:
        return None
    whole_times = {count: whole_sequence_times(each) for count, each in times.items()}
    sliced = best_batch(times, sequences, pipe)
    whole = best_batch(whole_times, sequences, pipe)
    return Layout(
        data,
        pipe,
        tensor,
        slicing=sliced,
        latency=sliced.latency + step,
        whole=whole.latency + step,
        bytes=size,
    )


def _factorizations(
    devices: int, batch: int, most: int
) -> Iterator[tuple[int, int, int]]:
    """Yield data, pipe and tensor whose product is `devices`; data also divides the batch."""
    for data in range(1, min(devices, batch) + 1):
        if devices % data or batch % data:
            continue
        per_copy = devices // data
        for tensor in range(1, most + 1):
            if per_copy % tensor == 0:
                yield data, per_copy // tensor, tensor
