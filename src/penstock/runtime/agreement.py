"""What ranks tell one another, because each sees only its own stages and reads only a share of its batch.

facts       any facts, as JSON                 `share_facts`, `fail_together`
weights     which stages train and recompute, which weights are one tensor, whether copies are equal    `agree`
batches     whether all were given the same                                            `refuse_other_batches`
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PeerLostError, PenstockError, RunError, ShapeError
from penstock.ir.schedule import Schedule
from penstock.ir.sums import ranks_of
from penstock.runtime.batch import Batch
from penstock.runtime.comm.comm import Comm
from penstock.runtime.replicas import SharedParameters, Tied
from penstock.torch_internals import local_share

# ---------------------------------------------------------------- facts
# Facts that every rank tells all others, as JSON that travels in the rows of a sum.


# Facts of a rank that has failed: the error in words, and whether it is a `ShapeError`, which all ranks then raise.
FAILURE, MISFIT = "failure", "misfit"


def share_facts(comm: Comm, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of all ranks, by rank. All ranks must call this.

    They travel as numbers in the rows of a sum, since a `Comm` can only add.
    """
    everyone = tuple(range(comm.ranks))
    raw = json.dumps(facts).encode()
    sizes = torch.zeros(comm.ranks, dtype=torch.int64)
    sizes[comm.rank] = len(raw)
    comm.add(sizes, everyone).wait()
    letters = torch.zeros(comm.ranks, int(sizes.max()), dtype=torch.int64)
    letters[comm.rank, : len(raw)] = torch.tensor(list(raw))
    comm.add(letters, everyone).wait()
    shared = []
    for row, size in zip(letters, sizes.tolist(), strict=True):
        shared.append(json.loads(bytes(row[:size].tolist())))
    return shared


def fail_together(comm: Comm, failure: PenstockError | None) -> None:
    """Raise an error on all ranks if one of them has failed, so that no other goes on. All ranks must call this."""
    told: dict[str, Any] = {}
    if failure is not None:
        told = {FAILURE: str(failure), MISFIT: isinstance(failure, ShapeError)}
    shared = share_facts(comm, told)
    if failure is not None:
        raise failure
    for facts in shared:
        if facts:
            raise_failure(facts[FAILURE], facts[MISFIT])


def raise_failure(text: str, misfit: bool, own: Exception | None = None) -> None:
    """Raise the error of a stage: as it is on its own rank, in words on the others."""
    if misfit:
        raise ShapeError(text)
    raise own or PeerLostError(text)


# ---------------------------------------------------------------- rank agreement
# What the ranks tell one another before the first step, because each sees only its own stages.
#
#     which stages train             no gradient is computed or sent that nobody needs (`penstock.ir.lane`)
#     whether any stage recomputes   then ranks that are threads take turns at drawing random numbers
#     which weights are one tensor   ranks that are threads may share it, and its gradient must not be summed twice
#     whether copies are equal       weights that start from different seeds would never become equal
#
# All ranks see the same numbers, so all of them refuse what does not fit, and no rank waits for the others.

_PROCESS_ID = secrets.randbits(60)  # distinguishes the memory of processes

_INT64_MASK = (1 << 62) - 1

_MAX_CODE = 100_003  # small enough that sums of squares stay exact


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know about all stages, once they have told one another."""

    trains: tuple[bool, ...]  # by stage; a stage without parameters counts as trained
    recomputes: bool  # some stage of some rank
    one_tensor: frozenset[str]  # names of sums whose ranks share one tensor


def agree(
    schedule: Schedule,
    modules: Mapping[int, nn.Module],
    comm: Comm,
    sums: Sequence[SharedParameters],
    tied: Mapping[str, Tied],
    recompute: Collection[int],
) -> Agreement:
    """Agree with the other ranks. All ranks call it at the same time."""
    groups = _sharing_groups(schedule, tied)
    names = sorted(groups)
    _refuse_other_ties(comm, names, sorted(tied))
    facts = _own_facts(len(schedule.stages), modules, recompute)
    marks = _own_marks(names, comm, sums)
    everything = torch.cat([facts.flatten(), marks.flatten()])
    comm.add(everything, tuple(range(comm.ranks))).wait()
    facts = everything[: facts.numel()].view_as(facts)
    marks = everything[facts.numel() :].view_as(marks)
    trained_numbers, trains, recomputes = facts
    memory_marks, checksums = marks
    _refuse_unequal_parts(schedule, trained_numbers.tolist())
    one_tensor = set()
    for row, name in enumerate(names):
        own_marks = memory_marks[row].tolist()
        own_checksums = checksums[row].tolist()
        if _is_one_tensor(name, groups[name], own_marks, own_checksums):
            one_tensor.add(name)
    return Agreement(
        tuple(map(bool, trains.tolist())),
        bool(recomputes.any()),
        frozenset(one_tensor),
    )


def _own_facts(
    stages: int, modules: Mapping[int, nn.Module], recompute: Collection[int]
) -> Tensor:
    """Three rows with a column per stage: its trained numbers, whether it trains, whether it recomputes.

    The columns of stages on other ranks are zero.
    """
    facts = torch.zeros(3, stages, dtype=torch.int64)
    for stage, module in modules.items():
        parameters = list(module.parameters())
        trained_numbers = sum(p.numel() for p in parameters if p.requires_grad)
        trains = not parameters or trained_numbers > 0
        recomputes = stage in recompute
        facts[:, stage] = torch.tensor([trained_numbers, trains, recomputes])
    return facts


def _own_marks(
    names: Sequence[str], comm: Comm, sums: Sequence[SharedParameters]
) -> Tensor:
    """The memory mark and the checksum of each shared name, in this rank's column; the others are zero."""
    marks = torch.zeros(2, len(names), comm.ranks, dtype=torch.int64)
    own = {shared.name: shared.parameters for shared in sums}
    for row, name in enumerate(names):
        if name not in own:
            continue
        parameters = own[name]
        mark = memory_mark(parameters[0], comm.rank)
        marks[:, row, comm.rank] = torch.tensor([mark, checksum(parameters)])
    return marks


def _sharing_groups(
    schedule: Schedule, tied: Mapping[str, Tied]
) -> dict[str, tuple[int, ...]]:
    """The ranks that share each part and each tied parameter, by name."""
    groups = {}
    for part in range(schedule.parts):
        groups[f"part {part}"] = ranks_of(schedule, (part,))
    for name, tie in tied.items():
        groups[f"tied {name}"] = ranks_of(schedule, tie.parts)
    return {name: group for name, group in groups.items() if len(group) > 1}


def memory_mark(parameter: Tensor, rank: int) -> int:
    """A number other than 0 that only the same memory of the same process has."""
    # An empty share has no address.
    place = local_share(parameter).data_ptr() or -1 - rank
    mark = hash((_PROCESS_ID, os.getpid(), place)) & _INT64_MASK
    return mark or 1


def _refuse_other_ties(comm: Comm, groups: list[str], tied: list[str]) -> None:
    """Raise an error unless all ranks name the same tied parameters: n Σc² = (Σc)² only if all codes c are equal."""
    text = "\n".join([*groups, "", *tied])
    code = zlib.crc32(text.encode()) % _MAX_CODE
    sums = torch.tensor([code, code * code], dtype=torch.int64)
    comm.add(sums, tuple(range(comm.ranks))).wait()
    sum_of_codes, sum_of_squares = sums.tolist()
    if sum_of_squares * comm.ranks != sum_of_codes**2:
        known = ", ".join(tied) or "none"
        raise RunError(
            f"the ranks know of different tied parameters; rank {comm.rank} of {known}\n"
            "  give every rank parts of `split` of the same model, or the same names in Executor(tied={...})"
        )


def _refuse_unequal_parts(schedule: Schedule, trained: list[int]) -> None:
    """Raise an error unless all copies of a part train equally many numbers."""
    first: dict[int, int] = {}  # the first stage of each part
    for stage, copy in enumerate(schedule.stages):
        part = copy.part
        other = first.setdefault(part, stage)
        if trained[stage] != trained[other]:
            raise ShapeError(
                f"stages {other} and {stage} are copies of part {part}, but stage {other} trains {trained[other]} "
                f"numbers and stage {stage} {trained[stage]}\n  give both the same modules, and freeze the same "
                "parameters in both"
            )


def _is_one_tensor(
    name: str, group: tuple[int, ...], marks: list[int], sums: list[int]
) -> bool:
    """Whether all ranks of a group share one tensor. Raises an error if only some do, or if their copies differ."""
    group_marks = [marks[rank] for rank in group]
    group_sums = [sums[rank] for rank in group]
    different_tensors = len(set(group_marks))
    what = name.removeprefix("tied ")
    ranks = " and ".join(map(str, group))
    if not any(group_marks):
        return False
    if not all(group_marks):
        frozen = next(rank for rank in group if not marks[rank])
        raise ShapeError(
            f"{what} is frozen on rank {frozen}, but not on all of the ranks {ranks}, which share it"
        )
    if 1 < different_tensors < len(group):
        raise ShapeError(
            f"of the ranks {ranks}, which share {what}, some hold the same tensor and some a copy\n"
            "  give each rank a copy of its own (copy.deepcopy of the model), or all of them the same"
        )
    if len(set(group_sums)) > 1:
        raise ShapeError(
            f"{what} is to be the same on the ranks {ranks}, but its numbers differ\n"
            "  build the model with the same seed on every rank (torch.manual_seed), or load the same weights"
        )
    return different_tensors == 1


# ---------------------------------------------------------------- batch agreement
# Compares the batches that the ranks of a pipeline were given, because each rank reads only a share of its own.
#
#     rank 0   x, y  ──►  the first layer reads x      Other rows on rank 1 would train on the inputs of one batch
#     rank 1   x, y  ──►  the loss reads y             and the labels of another. Other shapes would never arrive.
#
# A comparison costs one message around and, on a GPU, a wait. So the ranks compare in the first step and in every k-th.
# A tensor without numbers of its own (one number, expanded to a shape) says that a rank was given none; it is left out.

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


# ---------------------------------------------------------------- checksum
# A number that tells tensors apart: the same for equal numbers in the same places, on any machine.

_MASK = (1 << 62) - 1

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, with bits all over; as a signed number

_CHUNK = 1 << 20  # numbers at a time, so that a checksum needs little memory


def checksum(tensors: Sequence[Tensor]) -> int:
    """The checksum of some tensors, in this order. The order of additions does not matter, as they are exact."""
    sums = [_sum_of_places(_bits(local_share(tensor).detach())) for tensor in tensors]
    total = 0
    if sums:
        # Only one wait for a GPU.
        device = sums[0].device
        for number in torch.stack([one.to(device) for one in sums]).tolist():
            total = total * _FACTOR + number
    return total & _MASK


def _sum_of_places(bits: Tensor) -> Tensor:
    """The sum of whole numbers, each times a factor of its own; it wraps around."""
    places = torch.arange(min(len(bits), _CHUNK), device=bits.device) + 1
    factors = places * _FACTOR
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in torch.split(bits, _CHUNK):
        total = total * _FACTOR + (piece * factors[: len(piece)]).sum()
    return total


def _bits(x: Tensor) -> Tensor:
    """The bits of a tensor as whole numbers."""
    whole = {1: torch.int8, 2: torch.int16}.get(x.element_size(), torch.int32)
    return x.contiguous().reshape(-1).view(whole)
