"""What the ranks tell one another before the first step, as each sees only its own stages.

    which stages train             so that no gradient is computed or sent that nobody needs (`penstock.runtime.frozen_stages`)
    whether any stage recomputes   so that ranks that are threads take turns at drawing random numbers
    which weights are really one   ranks that are threads may hold the same tensor: its gradient is not summed twice
    whether copies are equal       weights that are to be one, but were drawn with different seeds, never would be

All ranks see the same numbers, so that all of them refuse what does not fit, and none waits for the others.
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
from penstock.runtime.comm.comm import Comm
from penstock.runtime.dtensor_share import local_share
from penstock.runtime.gradients import SharedParameters, Tied, ranks_of

_PROCESS = secrets.randbits(60)  # tells the memory of this process from that of others
_BITS = (1 << 62) - 1
_CODES = 100_003  # so that sums of squares stay exact


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know."""

    trains: tuple[
        bool, ...
    ]  # by stage: whether any of its parameters does; also one that has no parameters
    recomputes: bool  # some stage of some rank
    one_tensor: frozenset[
        str
    ]  # sums (by name) over ranks that hold one and the same tensor


def agree(
    schedule: Schedule,
    modules: Mapping[int, nn.Module],
    comm: Comm,
    sums: Sequence[SharedParameters],
    tied: Mapping[str, Tied],
    recompute: Collection[int],
) -> Agreement:
    """All ranks call it at the same time."""
    groups = {
        f"part {part}": ranks_of(schedule, (part,)) for part in range(schedule.parts)
    }
    groups |= {
        f"tied {name}": ranks_of(schedule, one.parts) for name, one in tied.items()
    }
    groups = {name: group for name, group in groups.items() if len(group) > 1}
    _refuse_other_ties(comm, sorted(groups), sorted(tied))
    stages = torch.zeros(3, len(schedule.stages), dtype=torch.int64)
    for stage, module in modules.items():
        parameters = list(module.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        stages[:, stage] = torch.tensor(
            [trained, not parameters or trained > 0, stage in recompute]
        )
    marks = torch.zeros(2, len(groups), comm.ranks, dtype=torch.int64)
    mine = {one.name: one.parameters for one in sums}
    for row, name in enumerate(sorted(groups)):
        if name in mine:
            marks[:, row, comm.rank] = torch.tensor(
                [memory_mark(mine[name][0], comm.rank), checksum(mine[name])]
            )
    everything = torch.cat([stages.flatten(), marks.flatten()])
    comm.add(everything, tuple(range(comm.ranks))).wait()
    stages, marks = (
        everything[: stages.numel()].view_as(stages),
        everything[stages.numel() :].view_as(marks),
    )
    _refuse_unequal_parts(schedule, stages[0].tolist())
    one = frozenset(
        name
        for row, name in enumerate(sorted(groups))
        if _is_one(name, groups[name], marks[0, row].tolist(), marks[1, row].tolist())
    )
    return Agreement(tuple(map(bool, stages[1].tolist())), bool(stages[2].any()), one)


def memory_mark(parameter: Tensor, rank: int) -> int:
    """A number that only the same memory of the same process has; not 0."""
    place = (
        local_share(parameter).data_ptr() or -1 - rank
    )  # an empty share lies nowhere
    return (hash((_PROCESS, os.getpid(), place)) & _BITS) or 1


def checksum(parameters: Sequence[Tensor]) -> int:
    """A number that equal parameters have on any machine, whatever the order in which it adds."""
    sums = [
        _bits(local_share(parameter).detach()).sum(dtype=torch.int64)
        for parameter in parameters
    ]
    total = sum(
        (place + 1) * number
        for place, number in enumerate(torch.stack([s.cpu() for s in sums]).tolist())
    )
    return int(total) & _BITS


def _bits(x: Tensor) -> Tensor:
    whole = {1: torch.int8, 2: torch.int16}.get(x.element_size(), torch.int32)
    return x.contiguous().reshape(-1).view(whole)


def _refuse_other_ties(comm: Comm, groups: list[str], tied: list[str]) -> None:
    """All ranks must name the same tied parameters: n Σc² = (Σc)² only if all codes c are alike."""
    code = zlib.crc32("\n".join([*groups, "", *tied]).encode()) % _CODES
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


def _is_one(
    name: str, group: tuple[int, ...], marks: list[int], sums: list[int]
) -> bool:
    """Whether all ranks of a group hold one tensor; raises if only some do, or if their copies differ."""
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
