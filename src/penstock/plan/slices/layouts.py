"""How many pipelines side by side, of how many stages, each stage on how many devices: all ways, each cut at its best.

    devices = data * pipe * tensor      data    copies of the pipeline, each with its share of the batch
                                        pipe    stages of one
                                        tensor  devices that share the matrices of a stage

More copies leave fewer sequences to each, so that slices matter more; more devices a stage make its slices shorter but
not what a slice costs at least. Nothing of this has a formula: all ways are tried, and `best_batch` cuts each exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import ShapeError
from penstock.plan.slices.cuts import Slicing, best_batch
from penstock.plan.slices.slice_times import SliceTimes, whole_sequence_grid

ROW_COUNTS = (1, 2, 4, 8)  # sequences that may go through together


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to use the devices: its step's latency with the best slices, and with the best whole sequences."""

    data: int
    pipe: int
    tensor: int
    slicing: Slicing
    latency: float
    whole: float
    bytes: float  # on a device

    @property
    def speedup(self) -> float:
        """What slicing gains."""
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
    """Every layout of so many devices for a batch of sequences, the fastest first.

    `times_of(pipe, tensor, rows)` has the slices of a stage with so many rows at once; None: there is no such stage.
    `bytes_of(data, pipe, tensor)` is what a device holds, which must fit into `memory`; `step(data, pipe, tensor)`
    seconds that come on top of the pipeline, as summing gradients over the copies does. At most `most` devices share a
    stage.
    """
    if devices < 1 or batch < 1:
        raise ShapeError(
            f"{devices} devices for a batch of {batch}; the least is 1 of each"
        )
    found = []
    fewest = float("inf")
    for data, pipe, tensor in _ways(devices, batch, most):
        size = bytes_of(data, pipe, tensor)
        fewest = min(fewest, size)
        if memory is None or size <= memory:
            one = layout(
                data,
                pipe,
                tensor,
                batch // data,
                times_of,
                rows,
                size,
                step(data, pipe, tensor),
            )
            found += [] if one is None else [one]
    if not found and memory is not None and fewest > memory:
        raise ShapeError(
            f"no layout fits into a memory of {memory:g}; the least takes {fewest:g}"
        )
    if not found:
        raise ShapeError(
            f"no way to lay out {devices} devices for a batch of {batch} with stages on up to {most}"
        )
    return tuple(sorted(found, key=lambda each: each.latency))


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
    """One layout, with so many sequences for each pipeline; None: it has no stages."""
    offered = {
        count: times_of(pipe, tensor, count) for count in rows if count <= sequences
    }
    times = {count: each for count, each in offered.items() if each is not None}
    if not times:
        return None
    best = best_batch(times, sequences, pipe)
    whole = best_batch(
        {count: whole_sequence_grid(each) for count, each in times.items()},
        sequences,
        pipe,
    )
    return Layout(
        data, pipe, tensor, best, best.latency + step, whole.latency + step, size
    )


def _ways(devices: int, batch: int, most: int) -> Iterator[tuple[int, int, int]]:
    """data, pipe and tensor whose product is `devices`."""
    for data in (
        d
        for d in range(1, min(devices, batch) + 1)
        if devices % d == 0 and batch % d == 0
    ):
        each = devices // data
        yield from (
            (data, each // tensor, tensor)
            for tensor in range(1, most + 1)
            if each % tensor == 0
        )
