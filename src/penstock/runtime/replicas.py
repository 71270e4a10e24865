"""Sums the gradients of parameters that live on several ranks, or in several processes that shard them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from penstock.cost.network import sums_wait
from penstock.errors import RunError, ShapeError
from penstock.ir.schedule import Schedule
from penstock.ir.sums import SumPlan, completion, ranks_of, weight_actions
from penstock.runtime.backward import accumulate
from penstock.runtime.batch import checksum
from penstock.runtime.comm.comm import Comm, Pending, exchange
from penstock.runtime.planned_sums import CellFormat, PlannedSum, SumThread
from penstock.runtime.process.machine import (
    SHARDED_KEPT_BYTES,
    TRANSIENT_KEPT_BYTES,
    keep_freed_memory,
    return_freed_memory,
)
from penstock.runtime.recorder import SumTimes
from penstock.torch_internals import (
    finish_sharded_backward,
    ignore_fsdp_view_warning,
    local_share,
    sums_in_other_type,
    widen_sharded_gradients,
)

# ---------------------------------------------------------------- replicas and tied parameters
# Sums the gradients of parameters that live on several ranks: replicas of a part, and tied parameters.
#
# A sum begins as soon as this rank's last contribution is complete, and runs while the rank goes on:
#
#     rank 0 | 0F0 4F1 ... 4B1 0B0 [sum of part 0 ......]
#     rank 1 | 1F0 5F1 ... 1B0 5B1        [sum of part 1]      both are awaited at the end of the step
#
# If the messages of a rank share one channel, it begins its sums after its last action instead, because they would slow
# its messages down (`penstock.cost.network.sums_wait`).
#
# All ranks of a group must begin their sums in the same order, although each may finish its parts in another order.
# They use the order in which the parts are complete on all ranks, by the clock of the schedule.
#
# The backend sums, unless a plan says how (`penstock.runtime.planned_sums`). Several steps can be summed at once: the
# gradients of all but the last one stay on their ranks (`StepGradients`).


@dataclass(frozen=True, slots=True)
class SharedParameters:
    """Parameters that several ranks own, whose gradients are summed over them."""

    name: str
    parts: tuple[int, ...]
    group: tuple[int, ...]
    last: int  # this rank's last contributing action; -1: it contributes nothing
    ready: int  # the tick at which the contributions of all ranks are complete
    parameters: tuple[nn.Parameter, ...]

    def local_gradients(self) -> list[Tensor]:
        """The numbers of the gradients that this process holds; a complex number counts as two."""
        gradients = [parameter.grad for parameter in self.parameters]
        return [_real(local_share(grad)) for grad in gradients if grad is not None]


class Replicas:
    """The sums of one rank, which begin and end in every step.

    `plans` says how some of them are summed, and `messages` in which type their numbers travel, by default their own.
    """

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        comm: Comm,
        tied: Mapping[str, Tied] | None = None,
        plans: Sequence[SumPlan] = (),
        messages: torch.dtype | None = None,
    ) -> None:
        self.comm = comm
        self.wait = sums_wait(comm.channels)
        shared = _shared_parameters(schedule, modules, comm.rank, tied or {})
        self.order = sorted(shared, key=lambda sum_: (sum_.ready, sum_.name))
        self.next = 0
        self.complete: set[int] = set()
        self.sums: list[tuple[Pending, Tensor, SharedParameters]] = []
        # Called before the gradients of parameters are summed, to add those of earlier steps.
        self.complete_gradients: Callable[[Iterable[nn.Parameter]], None] = (
            lambda parameters: None
        )
        self.planned: dict[str, PlannedSum] = {}
        self.second = comm.second_connection() if plans else None
        self.thread: SumThread | None = None
        for sum_ in self.order:
            plan = _plan_of(sum_, plans)
            if plan is not None:
                shares = [_real(local_share(p.detach())) for p in sum_.parameters]
                numbers = sum(share.numel() for share in shares)
                how = CellFormat(shares[0].dtype, messages)
                self.planned[sum_.name] = PlannedSum(plan, comm.rank, numbers, how)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters whose gradients are summed."""
        return [parameter for shared in self.order for parameter in shared.parameters]

    def leave_out(self, names: Collection[str]) -> None:
        """Skip the sums with these names.

        Their ranks are threads that share one tensor, so its gradient is the sum already.
        """
        self.order = [shared for shared in self.order if shared.name not in names]

    def begin(self) -> None:
        """Begin a step. The gradients of earlier steps, which are summed already, must be laid aside."""
        self.next = 0
        self.complete.clear()
        planned = [self.planned[s.name] for s in self.order if s.name in self.planned]
        if planned:
            assert self.second is not None
            self.thread = SumThread(self.second, planned)
        self.after(-1)

    def abandon(self) -> None:
        """Forget the sums of a step that has failed."""
        if self.thread is not None:
            self.thread.abandon()
        self.sums.clear()

    def after(self, action: int) -> None:
        """Note that an action is done, and begin the sums that are due, in their order."""
        self.complete.add(action)
        if not self.wait:
            self.start_complete()

    def start_complete(self) -> None:
        """Begin the sums that are complete on this rank, in their order."""
        while self.next < len(self.order):
            shared = self.order[self.next]
            if shared.last not in self.complete:
                return
            self.start(shared)
            self.next += 1

    def start(self, shared: SharedParameters) -> None:
        """Begin to sum all gradients of one group as one flat tensor."""
        self.complete_gradients(shared.parameters)
        for parameter in shared.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_conj():
                parameter.grad = parameter.grad.resolve_conj()
        gradients = shared.local_gradients()
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        pending: Pending
        if shared.name in self.planned:
            assert self.thread is not None
            pending = self.thread.put(flat)
        else:
            pending = self.comm.add(flat, shared.group)
        self.sums.append((pending, flat, shared))

    def times(self) -> dict[tuple[int, ...], SumTimes]:
        """When this rank began and ended its planned sums in the last step, by their parts."""
        return {
            one.plan.parts: SumTimes(one.begin, one.end, one.bytes)
            for one in self.planned.values()
        }

    def finish(self) -> None:
        """Wait for the sums and make them the gradients."""
        self.start_complete()
        assert self.next == len(self.order), "a sum was never begun"
        for pending, flat, shared in self.sums:
            pending.wait()
            gradients = shared.local_gradients()
            pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
        self.sums.clear()


def _real(x: Tensor) -> Tensor:
    """The same memory as real numbers."""
    return torch.view_as_real(x) if x.is_complex() else x


def _plan_of(shared: SharedParameters, plans: Sequence[SumPlan]) -> SumPlan | None:
    """The plan for a sum, if there is one."""
    for plan in plans:
        if set(plan.parts) == set(shared.parts):
            if set(plan.ranks) != set(shared.group):
                raise ShapeError(
                    f"the plan sums {shared.name} over ranks {sorted(plan.ranks)}, "
                    f"but it is on ranks {list(shared.group)}\n  plan its sums again, or leave them out"
                )
            return plan
    return None


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that several parts use.

    `parameter` is this rank's copy, if it has one. `twins` are further copies on this rank, where its parts cannot
    share one (`penstock.runtime.replicas`).
    """

    parts: tuple[int, ...]
    parameter: nn.Parameter | None
    twins: tuple[nn.Parameter, ...] = ()


@runtime_checkable
class Cut(Protocol):
    """A part that `penstock.models.split` made. It knows which of its parameters other parts hold too."""

    shared: Mapping[str, tuple[int, ...]]

    def whole_names(self) -> Mapping[str, nn.Parameter]:
        """Its parameters by their names in the whole model."""
        ...


def ties_of(schedule: Schedule, modules: Mapping[int, nn.Module]) -> dict[str, Tied]:
    """The tied parameters that this rank's parts know of, with this rank's copies.

    A process that builds the whole model and keeps only its own parts has its own copy of a tied parameter. Nothing in
    the module shows that another rank has a copy too, but the part remembers it from `split`.
    """
    cuts = []
    owners_of: dict[str, tuple[int, ...]] = {}
    for stage, module in modules.items():
        for cut in _cuts(module):
            cuts.append((stage, cut))
            owners_of.update(cut.shared)
    return {
        name: _tie(schedule, name, owners, cuts)
        for name, owners in sorted(owners_of.items())
    }


def _cuts(module: nn.Module) -> Iterator[Cut]:
    """The parts inside a stage's module, which may be compiled or wrapped."""
    for layer in module.modules():
        if isinstance(layer, Cut) and isinstance(layer.shared, Mapping):
            yield layer


def _tie(
    schedule: Schedule,
    name: str,
    owners: tuple[int, ...],
    cuts: Sequence[tuple[int, Cut]],
) -> Tied:
    copies: dict[int, nn.Parameter] = {}
    sharded = False
    for stage, cut in cuts:
        parameter = cut.whole_names().get(name)
        part = schedule.stages[stage].part
        if (parameter is not None) != (part in owners):
            listed = " and ".join(map(str, owners))
            holds = "holds it" if parameter is not None else "does not hold it"
            raise ShapeError(
                f"stage {stage} is part {part} of the schedule, but by `split` the parts {listed} hold {name}, and "
                f"this module {holds}\n"
                "  give the stage of part n the n-th part, all from one call of `split`, or name the owners yourself: "
                "RunOptions(tied={...})"
            )
        if parameter is not None:
            copies[id(parameter)] = parameter
            sharded |= isinstance(cut, FSDPModule)
    if not copies:
        return Tied(owners, None)
    first, *twins = copies.values()
    if twins and not sharded:
        raise ShapeError(
            f"the stages of this rank hold {len(copies)} separate copies of {name}, which the model has once\n"
            "  take all parts of a rank from one call of `split`, and do not copy them one by one"
        )
    return Tied(owners, first, tuple(twins))


def sharing_ranks(
    schedule: Schedule, tied: Mapping[str, Tied]
) -> dict[str, tuple[int, ...]]:
    """The ranks that share each part and each tied parameter, by name, in an order that is the same on all ranks."""
    parts: dict[str, tuple[int, ...]]
    parts = {f"part {part}": (part,) for part in range(schedule.parts)}
    parts |= {f"tied {name}": tied[name].parts for name in sorted(tied)}
    groups = {name: ranks_of(schedule, held) for name, held in parts.items()}
    return {name: group for name, group in groups.items() if len(group) > 1}


def groups_of(
    schedule: Schedule, tied: Mapping[str, Tied] | None = None
) -> list[tuple[int, ...]]:
    """Every group of ranks that will sum, in an order that is the same on all ranks."""
    return sorted(set(sharing_ranks(schedule, tied or {}).values()))


def _shared_parameters(
    schedule: Schedule,
    modules: Mapping[int, nn.Module],
    rank: int,
    tied: Mapping[str, Tied],
) -> list[SharedParameters]:
    """What this rank trains and other ranks hold too: its parts without tied parameters, and these."""
    tied_ids: set[int] = set()
    owned: dict[str, tuple[tuple[int, ...], list[nn.Parameter | None]]] = {}
    for name, tie in tied.items():
        tied_ids.update(id(copy) for copy in (tie.parameter, *tie.twins))
        owned[f"tied {name}"] = tie.parts, [tie.parameter]
    for stage, module in modules.items():
        part = schedule.stages[stage].part
        _, own = owned.setdefault(f"part {part}", ((part,), []))
        own += [p for p in module.parameters() if id(p) not in tied_ids]
    sums = []
    for name, group in sharing_ranks(schedule, tied).items():
        if rank not in group:
            continue
        parts, parameters = owned[name]
        held = {p: None for p in parameters if p is not None}
        if not held and parameters:
            raise ShapeError(
                f"rank {rank} holds a part that uses {name.removeprefix('tied ')}: "
                "give RunOptions(tied=...) its copy of it"
            )
        trained = tuple(p for p in held if p.requires_grad)
        if trained:
            last, ready = completion(schedule, parts, rank)
            sums.append(SharedParameters(name, parts, group, last, ready, trained))
    return sums


# ---------------------------------------------------------------- shards
# Weights that several processes shard between steps with torch's FSDP2: gathered and summed once per step.
#
#     rank 1, shard 0 │ ▄   F0 gathers │ ▄▀  F1 B0 B1  sum │ ▄           each runs the whole lane of the rank, on
#     rank 1, shard 1 │  ▀  F2         │ ▄▀  F3 B2 B3      │  ▀          its own micro-batches
#
# FSDP would gather and sum around every forward and backward. A pipeline has many of them, and a split backward adds to
# the gradients outside of autograd. Here a part is therefore summed once, when its last action on this rank is done.
# Gathers and sums need memory for whole layers once per step, which is given back (`penstock.runtime.process.machine`).


def shard_layers(part: nn.Module, layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Leave this process its share of each layer of a part, and of the rest of the part."""
    ignore_fsdp_view_warning()
    for module in (*layers, part):
        sharded: FSDPModule = fully_shard(
            module, mesh=mesh, reshard_after_forward=False
        )
        # A sum, not a mean: losses are divided by the valid tokens of all processes already.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # One hook runs before FSDP's own, which gathers, and one after it.
        module.register_forward_pre_hook(_before_gather, prepend=True)
        module.register_forward_pre_hook(_after_gather)


def _before_gather(*_: object) -> None:
    keep_freed_memory(TRANSIENT_KEPT_BYTES)


def _after_gather(*_: object) -> None:
    keep_freed_memory(SHARDED_KEPT_BYTES)


class Shards:
    """The sharded parts of one rank. Without any, every method does nothing."""

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        rank: int,
        tied: Mapping[str, Tied] | None = None,
    ) -> None:
        self.parts: dict[int, FSDPModule] = {}  # by their last action on this rank
        self.all: list[FSDPModule] = []  # parts and their layers
        # Parts that compute in a narrow type and sum in a wide one, by each W of theirs.
        self.narrow: dict[int, FSDPModule] = {}
        first_modules: dict[int, nn.Module] = {}  # by part
        for stage, module in modules.items():
            first_modules.setdefault(schedule.stages[stage].part, module)
        for part, module in sorted(first_modules.items()):
            if isinstance(module, FSDPModule):
                last, _ = completion(schedule, (part,), rank)
                self.parts[last] = module
                if sums_in_other_type(module):
                    for action in weight_actions(schedule, part, rank):
                        self.narrow[action] = module
                self.all += [m for m in module.modules() if isinstance(m, FSDPModule)]
        self.twins: list[tuple[nn.Parameter, nn.Parameter]] = []
        for tie in (tied or {}).values():
            if tie.parameter is not None:
                self.twins += [(tie.parameter, twin) for twin in tie.twins]

    def begin(self) -> None:
        """Begin a step. The first forward of each layer will gather its weights, which then stay."""
        with torch.no_grad():
            for first, twin in self.twins:
                local_share(twin).copy_(local_share(first))
        for part in self.parts.values():
            _set_last_backward(part, False)

    def after(self, action: int) -> None:
        """If an action was the last of a part, sum the part's gradients and drop the gathered weights.

        FSDP widens gradients in its hooks of autograd, which see nothing of a W.
        """
        narrow = self.narrow.get(action)
        if narrow is not None:
            widen_sharded_gradients(narrow)
        part = self.parts.get(action)
        if part is None:
            return
        _set_last_backward(part, True)
        with return_freed_memory():
            finish_sharded_backward(part)
        for first, twin in self.twins:
            if twin.grad is not None:
                accumulate(first, twin.grad)
                twin.grad = None

    def finish(self) -> None:
        """Drop all weights that are still gathered: after an evaluation, all of them."""
        for module in self.all:
            module.reshard()


def _set_last_backward(part: FSDPModule, last: bool) -> None:
    part.set_is_last_backward(last)
    part.set_requires_gradient_sync(last)
    part.set_reshard_after_backward(last)


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
    groups = sharing_ranks(schedule, tied)
    own_stages = []
    for stage, module in modules.items():
        parameters = list(module.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        trains = not parameters or trained > 0
        own_stages.append((stage, trained, trains, stage in recompute))
    marks = {}
    for shared in sums:
        mark = memory_mark(shared.parameters[0], comm.rank)
        marks[shared.name] = (mark, checksum(shared.parameters))
    own = {"ties": [list(groups), sorted(tied)], "stages": own_stages, "marks": marks}
    told = exchange(comm, own)
    if any(facts["ties"] != told[0]["ties"] for facts in told):
        raise RunError(
            f"the ranks know of different tied parameters; rank {comm.rank} of {', '.join(sorted(tied)) or 'none'}\n"
            "  give every rank parts of `split` of the same model, or the same names in RunOptions(tied={...})"
        )
    stages = sorted(stage for facts in told for stage in facts["stages"])
    _, trained_numbers, all_train, recomputes = zip(*stages, strict=True)
    _refuse_unequal_parts(schedule, trained_numbers)
    one_tensor = set()
    for name, group in groups.items():
        found = [told[rank]["marks"].get(name) for rank in group]
        if _is_one_tensor(name, group, found):
            one_tensor.add(name)
    return Agreement(all_train, any(recomputes), frozenset(one_tensor))


def memory_mark(parameter: Tensor, rank: int) -> int:
    """A number other than 0 that only the same memory of the same process has."""
    # An empty share has no address.
    place = local_share(parameter).data_ptr() or -1 - rank
    mark = hash((_PROCESS_ID, os.getpid(), place)) & _INT64_MASK
    return mark or 1


def _refuse_unequal_parts(schedule: Schedule, trained: Sequence[int]) -> None:
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
    name: str, group: tuple[int, ...], found: Sequence[Sequence[int] | None]
) -> bool:
    """Whether all ranks of a group share one tensor. Raises an error if only some do, or if their copies differ.

    `found` has the memory mark and the checksum of each rank's copy, or None where it does not train.
    """
    what = name.removeprefix("tied ")
    ranks = " and ".join(map(str, group))
    marks = [one for one in found if one is not None]
    if not marks:
        return False
    if None in found:
        raise ShapeError(
            f"{what} is frozen on rank {group[found.index(None)]}, but not on all of the ranks {ranks}, which share it"
        )
    different_tensors = len({mark for mark, _ in marks})
    if 1 < different_tensors < len(group):
        raise ShapeError(
            f"of the ranks {ranks}, which share {what}, some hold the same tensor and some a copy\n"
            "  give each rank a copy of its own (copy.deepcopy of the model), or all of them the same"
        )
    if len({numbers for _, numbers in marks}) > 1:
        raise ShapeError(
            f"{what} is to be the same on the ranks {ranks}, but its numbers differ\n"
            "  build the model with the same seed on every rank (torch.manual_seed), or load the same weights"
        )
    return different_tensors == 1
