"""Gradients of what lives on several ranks: replicas of a part (data parallelism, Chimera), and tied parameters.

A sum is begun as soon as the last contribution of this rank is in, and runs while the rank goes on:

    rank 0 | 0F0 4F1 ... 4B1 0B0 [sum of part 0 ......]
    rank 1 | 1F0 5F1 ... 1B0 5B1        [sum of part 1]      waited for at the end of the step

Ranks must begin the sums of one group in one order, though each may finish its parts in another: the order is that in
which the parts are complete on all ranks, by the clock of the schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from penstock.errors import ShapeError
from penstock.ir.needs import FORWARD
from penstock.ir.schedule import Schedule
from penstock.runtime.comm.comm import Comm, Pending
from penstock.runtime.dtensor_share import local_share


@dataclass(frozen=True, slots=True)
class SharedParameters:
    """Parameters that several ranks own, whose gradients are summed over them."""

    name: str
    group: tuple[int, ...]
    last: int  # the action of this rank after which its contribution is complete; -1: it has none
    ready: int  # the tick at which all contributions are
    parameters: tuple[nn.Parameter, ...]

    def local_gradients(self) -> list[Tensor]:
        """The numbers of the gradients that this process holds."""
        gradients = []
        for parameter in self.parameters:
            if parameter.grad is not None:
                gradients.append(local_share(parameter.grad))
        return gradients


class Replicas:
    """The sums of one rank, begun and awaited step after step."""

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        comm: Comm,
        tied: Mapping[str, Tied] | None = None,
    ) -> None:
        self.comm = comm
        shared = [
            *_parts(schedule, modules, comm.rank, tied or {}),
            *_tied(schedule, comm.rank, tied or {}),
        ]
        self.order = sorted(shared, key=lambda s: (s.ready, s.name))
        self.next = 0
        self.complete: set[int] = set()
        self.sums: list[
            tuple[Pending, Tensor, SharedParameters]
        ] = []  # in the same order

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that are summed."""
        return [parameter for one in self.order for parameter in one.parameters]

    def leave_out(self, names: Collection[str]) -> None:
        """These are one tensor for all of their ranks, which are threads: its gradient is the sum already."""
        self.order = [one for one in self.order if one.name not in names]

    def begin(self) -> None:
        """Begin a step. The gradients of earlier ones, which are summed already, must be laid aside."""
        self.next = 0
        self.complete.clear()
        self.after(-1)

    def after(self, number: int) -> None:
        """An action is done: begins the sums that are due, in their order."""
        self.complete.add(number)
        while (
            self.next < len(self.order) and self.order[self.next].last in self.complete
        ):
            self.start(self.order[self.next])
            self.next += 1

    def start(self, shared: SharedParameters) -> None:
        """Sums one flat tensor of all its gradients."""
        for parameter in shared.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = shared.local_gradients()
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.sums.append((self.comm.add(flat, shared.group), flat, shared))

    def finish(self) -> None:
        """Wait for the sums and make them the gradients."""
        assert self.next == len(self.order), "a sum was never begun"
        for pending, flat, shared in self.sums:
            pending.wait()
            gradients = shared.local_gradients()
            pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
        self.sums.clear()


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that several parts use; `parameter` is this rank's copy, if it has one.

    `twins` are further copies of it on this rank, where one for all of its parts cannot be (`penstock.runtime.shards`).
    """

    parts: tuple[int, ...]
    parameter: nn.Parameter | None
    twins: tuple[nn.Parameter, ...] = ()


@runtime_checkable
class Cut(Protocol):
    """A part that `penstock.models.split` made: it knows which parameters other parts hold too."""

    shared: Mapping[str, tuple[int, ...]]

    def whole_names(self) -> Mapping[str, nn.Parameter]:
        """Its parameters under their names in the whole model."""
        ...


def ties_of(schedule: Schedule, modules: Mapping[int, nn.Module]) -> dict[str, Tied]:
    """The tied parameters that this rank's parts know of, with the copy that this rank has.

    A process that builds the whole model and keeps only its own parts has its own copy of a tied parameter. Nothing in
    the module shows that another rank has one too; the part remembers it from `split`.
    """
    cuts = [(stage, cut) for stage, module in modules.items() for cut in _cuts(module)]
    names = {name: owners for _, cut in cuts for name, owners in cut.shared.items()}
    return {
        name: _tie(schedule, name, owners, cuts)
        for name, owners in sorted(names.items())
    }


def _cuts(module: nn.Module) -> Iterator[Cut]:
    """The parts inside a stage's module, which may be compiled or wrapped."""
    return (
        inner
        for inner in module.modules()
        if isinstance(inner, Cut) and isinstance(inner.shared, Mapping)
    )


def _tie(
    schedule: Schedule,
    name: str,
    owners: tuple[int, ...],
    cuts: Sequence[tuple[int, Cut]],
) -> Tied:
    found: dict[int, nn.Parameter] = {}
    sharded = False
    for stage, cut in cuts:
        held, part = cut.whole_names().get(name), schedule.stages[stage].part
        if (held is not None) != (part in owners):
            raise ShapeError(
                f"stage {stage} is part {part} of the schedule, but by `split` the parts {_listed(owners)} hold {name}"
                f", and this module does {'' if held is not None else 'not '}hold it\n  give the stage of part n the "
                "n-th part, all from one call of `split`, or name the owners yourself: Executor(tied={...})"
            )
        if held is not None:
            found[id(held)] = held
            sharded |= isinstance(cut, FSDPModule)
    first, *others = found.values() or [None]
    if others and not sharded:
        raise ShapeError(
            f"the stages of this rank hold {len(found)} separate copies of {name}, which the model has once\n"
            "  take all parts of a rank from one call of `split`, and do not copy them one by one"
        )
    return Tied(owners, first, tuple(one for one in others if one is not None))


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def groups_of(
    schedule: Schedule, tied: Mapping[str, Tied] | None = None
) -> list[tuple[int, ...]]:
    """Every group of ranks that will sum, in an order that is the same on all ranks."""
    groups = [ranks_of(schedule, (part,)) for part in range(schedule.parts)]
    groups += [ranks_of(schedule, shared.parts) for shared in (tied or {}).values()]
    return sorted({group for group in groups if len(group) > 1})


def ranks_of(schedule: Schedule, parts: Sequence[int]) -> tuple[int, ...]:
    """The ranks that hold a stage of these parts; one that no micro-batch visits gets the sum all the same."""
    return tuple(
        sorted({stage.rank for stage in schedule.stages if stage.part in parts})
    )


def _parts(
    schedule: Schedule,
    modules: Mapping[int, nn.Module],
    rank: int,
    tied: Mapping[str, Tied],
) -> list[SharedParameters]:
    elsewhere = {
        id(one) for shared in tied.values() for one in (shared.parameter, *shared.twins)
    }
    found = []
    for part in range(schedule.parts):
        group = ranks_of(schedule, (part,))
        if len(group) > 1 and rank in group:
            mine = [
                m for stage, m in modules.items() if schedule.stages[stage].part == part
            ]
            parameters = {
                id(p): p
                for m in mine
                for p in m.parameters()
                if p.requires_grad and id(p) not in elsewhere
            }
            if parameters:
                last, ready = completion(schedule, (part,), rank)
                found.append(
                    SharedParameters(
                        f"part {part}", group, last, ready, tuple(parameters.values())
                    )
                )
    return found


def _tied(
    schedule: Schedule, rank: int, tied: Mapping[str, Tied]
) -> list[SharedParameters]:
    found = []
    for name, shared in tied.items():
        group = ranks_of(schedule, shared.parts)
        if len(group) > 1 and rank in group:
            if shared.parameter is None:
                raise ShapeError(
                    f"rank {rank} holds a part that uses {name}: give Executor(tied=...) its copy of it"
                )
            if not shared.parameter.requires_grad:
                continue
            last, ready = completion(schedule, shared.parts, rank)
            found.append(
                SharedParameters(
                    f"tied {name}", group, last, ready, (shared.parameter,)
                )
            )
    return found


def completion(schedule: Schedule, parts: Sequence[int], rank: int) -> tuple[int, int]:
    """The last backward of these parts on a rank, and the tick of the last on any."""
    table = schedule.table
    part = np.array([stage.part for stage in schedule.stages])[table.stage]
    adds = np.flatnonzero(np.isin(part, parts) & (table.kind != FORWARD))
    mine = adds[table.rank[adds] == rank]
    return int(mine.max(initial=-1)), int(table.tick[adds].max(initial=0))
