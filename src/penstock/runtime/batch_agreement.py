"""Compares the batches that the ranks of a pipeline were given, because each rank reads only a share of its own.

    rank 0   x, y  ──►  the first layer reads x      Other rows on rank 1 would train on the inputs of one batch
    rank 1   x, y  ──►  the loss reads y             and the labels of another. Other shapes would never arrive.

A comparison costs one message around and, on a GPU, a wait. So the ranks compare in the first step and in every k-th.
A tensor without numbers of its own (one number, expanded to a shape) says that a rank was given none; it is left out.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from torch import Tensor

from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule
from penstock.runtime.batch import Batch
from penstock.runtime.checksum import checksum
from penstock.runtime.comm.comm import Comm
from penstock.runtime.facts import share_facts

WAY_OUT = (
    "give all ranks of a pipeline the same batch: shuffle with the same seed on each of them, and do not deal rows out "
    "to them (DistributedSampler)"
)


def refuse_other_batches(
    comm: Comm, schedule: Schedule, batch: Batch, every: int = 0
) -> None:
    """Raise an error on all ranks if they were given different batches. All ranks call it at the same time.

    `every` is the number of steps between two comparisons.
    """
    if comm.ranks == 1:
        return
    own = {
        "every": every,
        "said": _said(batch),
        "sums": _sums(schedule, comm.rank, batch),
    }
    told = share_facts(comm, own)
    _refuse_other_intervals([facts["every"] for facts in told])
    for kind in ("said", "sums"):
        for name in dict.fromkeys(name for facts in told for name in facts[kind]):
            found = {n: of[kind][name] for n, of in enumerate(told) if name in of[kind]}
            odd, usual = _odd_one(found)
            if odd != usual:
                what = f"other numbers in {name}"
                if kind == "said":
                    what = f"{name}: {found[odd]} instead of {found[usual]}"
                raise _other_batch_error(odd, usual, what)


def _said(batch: Batch) -> dict[str, str | int]:
    """What the ranks must know alike of a batch, even those that have none of its numbers."""
    names = sorted({name for named in batch.named for name in named})
    said: dict[str, str | int] = {"the shapes of the inputs": _shapes(batch.inputs)}
    said["the names of further tensors"] = ", ".join(names) or "none"
    for name in names:
        tensors = [named[name] for named in batch.named if name in named]
        said[f"the shapes of {name}"] = _shapes(tensors)
    if batch.labels:
        said["the shapes of the labels"] = _shapes(batch.labels)
    if any(not is_blank(labels) for labels in batch.labels):
        said["the number of labels that count"] = batch.valid
    return said


def _sums(schedule: Schedule, rank: int, batch: Batch) -> dict[str, int]:
    """The checksums of what a rank was given for the micro-batches that visit it."""
    sums: dict[str, int] = {}
    if batch.cuts:
        sums["the cuts"] = zlib.crc32(repr(batch.cuts).encode())
    known = zip(schedule.microbatches, batch.inputs, strict=False)
    for number, (microbatch, inputs) in enumerate(known):
        if all(schedule.stages[stage].rank != rank for stage in microbatch.path):
            continue
        given = {"the inputs": inputs}
        if batch.labels:
            given["the labels"] = batch.labels[number]
        if batch.starts:
            given["the starts"] = batch.starts[number]
        if batch.named:
            given |= batch.named[number]
        ends = [microbatch.path[0], microbatch.path[-1]]
        reads = [schedule.stages[stage].rank == rank for stage in ends]
        needed = dict(zip(("the inputs", "the labels"), reads, strict=True))
        for name, tensor in given.items():
            if needed.get(name) or not is_blank(tensor):
                sums[f"{name} of micro-batch {number}"] = checksum([tensor])
    return sums


def is_blank(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no numbers of its own: one number, expanded."""
    return tensor.dim() > 0 and not any(tensor.stride())


def _shapes(tensors: Sequence[Tensor]) -> str:
    """The shapes of some tensors, such as `2 x (3, 8), 1 x (2, 8)`."""
    runs = groupby(tuple(tensor.shape) for tensor in tensors)
    return ", ".join(f"{len(list(run))} x {shape}" for shape, run in runs)


def _odd_one(found: Mapping[int, object]) -> tuple[int, int]:
    """A rank with another value than most, and one that has what most have; twice the same rank if all agree."""
    most = Counter(found.values()).most_common(1)[0][0]
    usual = next(rank for rank, value in found.items() if value == most)
    odd = next((rank for rank, value in found.items() if value != most), usual)
    return odd, usual


def _refuse_other_intervals(intervals: Sequence[int]) -> None:
    odd, usual = _odd_one(dict(enumerate(intervals)))
    if odd != usual:
        raise ShapeError(
            f"rank {odd} compares batches every {intervals[odd]} steps, but rank {usual} every {intervals[usual]}\n"
            "  give all ranks the same number (compare)"
        )


def _other_batch_error(odd: int, usual: int, what: str) -> ShapeError:
    return ShapeError(
        f"rank {odd} was given another batch than rank {usual}: {what}\n  {WAY_OUT}\n"
        "  a rank that reads no data may pass tensors without numbers (device='meta') of the same shapes"
    )
