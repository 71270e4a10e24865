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
from penstock.runtime.comm.comm import Comm
from penstock.runtime.dtensor_share import local_share
from penstock.runtime.gradients import SharedParameters, Tied

_PROCESS_ID = secrets.randbits(60)  # distinguishes the memory of processes
_INT64_MASK = (1 << 62) - 1
_MAX_CODE = 100_003  # small enough that sums of squares stay exact


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know."""

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
    facts = torch.zeros(3, len(schedule.stages), dtype=torch.int64)
    for stage, module in modules.items():
        parameters = list(module.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        trains = not parameters or trained > 0
        facts[:, stage] = torch.tensor([trained, trains, stage in recompute])
    marks = torch.zeros(2, len(groups), comm.ranks, dtype=torch.int64)
    own = {shared.name: shared.parameters for shared in sums}
    for row, name in enumerate(names):
        if name in own:
            memory = memory_mark(own[name][0], comm.rank)
            marks[:, row, comm.rank] = torch.tensor([memory, checksum(own[name])])
    everything = torch.cat([facts.flatten(), marks.flatten()])
    comm.add(everything, tuple(range(comm.ranks))).wait()
    facts = everything[: facts.numel()].view_as(facts)
    marks = everything[facts.numel() :].view_as(marks)
    _refuse_unequal_parts(schedule, facts[0].tolist())
    one_tensor = set()
    for row, name in enumerate(names):
        memory_marks = marks[0, row].tolist()
        checksums = marks[1, row].tolist()
        if _is_one_tensor(name, groups[name], memory_marks, checksums):
            one_tensor.add(name)
    trains_by_stage = tuple(map(bool, facts[1].tolist()))
    return Agreement(trains_by_stage, bool(facts[2].any()), frozenset(one_tensor))


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
    return (hash((_PROCESS_ID, os.getpid(), place)) & _INT64_MASK) or 1


def checksum(parameters: Sequence[Tensor]) -> int:
    """A number that is the same for equal parameters on any machine, whatever the order of its additions."""
    sums = [
        _bits(local_share(parameter).detach()).sum(dtype=torch.int64)
        for parameter in parameters
    ]
    total = sum(
        (place + 1) * number
        for place, number in enumerate(torch.stack([s.cpu() for s in sums]).tolist())
    )
    return int(total) & _INT64_MASK


def _bits(x: Tensor) -> Tensor:
    whole = {1: torch.int8, 2: torch.int16}.get(x.element_size(), torch.int32)
    return x.contiguous().reshape(-1).view(whole)


def _refuse_other_ties(comm: Comm, groups: list[str], tied: list[str]) -> None:
    """Raise an error unless all ranks name the same tied parameters: n Σc² = (Σc)² only if all codes c are equal."""
    code = zlib.crc32("\n".join([*groups, "", *tied]).encode()) % _MAX_CODE
    sums = torch.tensor([code, code * code], dtype=torch.int64)
    comm.add(sums, tuple(range(comm.ranks))).wait()
    if int(sums[1]) * comm.ranks != int(sums[0]) ** 2:
        raise RunError(
            f"the ranks know of different tied parameters; rank {comm.rank} of {', '.join(tied) or 'none'}\n"
            "  give every rank parts of `split` of the same model, or the same names in Executor(tied={...})"
        )


def _refuse_unequal_parts(schedule: Schedule, trained: list[int]) -> None:
    first: dict[int, int] = {}
    for stage, (_, part) in enumerate((s.rank, s.part) for s in schedule.stages):
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
    found = [marks[rank] for rank in group]
    what, ranks = name.removeprefix("tied "), " and ".join(map(str, group))
    if not any(found):
        return False
    if not all(found):
        frozen = next(rank for rank in group if not marks[rank])
        raise ShapeError(
            f"{what} is frozen on rank {frozen}, but not on all of the ranks {ranks}, which share it"
        )
    if 1 < len(set(found)) < len(group):
        raise ShapeError(
            f"of the ranks {ranks}, which share {what}, some hold the same tensor and some a copy\n"
            "  give each rank a copy of its own (copy.deepcopy of the model), or all of them the same"
        )
    if len({sums[rank] for rank in group}) > 1:
        raise ShapeError(
            f"{what} is to be the same on the ranks {ranks}, but its numbers differ\n"
            "  build the model with the same seed on every rank (torch.manual_seed), or load the same weights"
        )
    return len(set(found)) == 1
