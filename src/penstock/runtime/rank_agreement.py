"""What the ranks tell one another before the first step, because each sees only its own stages.

    which stages train             no gradient is computed or sent that nobody needs (`penstock.runtime.frozen_stages`)
    whether any stage recomputes   then ranks that are threads take turns at drawing random numbers
    which weights are one tensor   ranks that are threads may share it, and its gradient must not be summed twice
    whether copies are equal       weights that start from different seeds would never become equal

All ranks see the same numbers, so all of them refuse what does not fit, and no rank waits for the others.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import RunError, ShapeError
from penstock.ir.schedule import Schedule
from penstock.ir.sums import ranks_of
from penstock.runtime.checksum import checksum
from penstock.runtime.comm.comm import Comm
from penstock.runtime.dtensor_share import local_share
from penstock.runtime.gradients import SharedParameters, Tied

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
