"""What the actions F, B, I, W, O and R of a stage do with tensors.

    F   x (tokens, or the output of the stage before)  ──module──►   y       keeps (x, y) for the backward
    B   gradient of y (or the loss itself)             ──autograd──►  x.grad  adds to the gradients of the weights
    I   the same walk, but linear layers leave their weight gradients to W
    O   what autograd has saved in F  ──►  the memory of the host;  R  ──►  back (`SavedTensors`)

x and y are tuples of tensors, because stages may pass several. A sliced micro-batch has one x per slice.
`penstock.models.slice` says what a stage carries from slice to slice, and how the gradient of that comes back.
`penstock.runtime.replay` is the second implementation: it plays recordings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import RunError, ShapeError
from penstock.ir.lane import LaneStep, Rests
from penstock.ir.schedule import Schedule
from penstock.models.layer import place_at
from penstock.models.slice import Slice
from penstock.runtime.backward import CastWeights, DeferralReport, Ledger, record_in
from penstock.runtime.batch import StepData, detached
from penstock.runtime.loss import (
    ChunkedLoss,
    Loss,
    Reduction,
    as_sum,
    is_known_sum,
    plain_loss,
    refuse_other_loss,
    take_sum,
)
from penstock.runtime.module_state import (
    DRAWING_LOCK,
    Buffers,
    Drawn,
    buffers_as_before,
    buffers_of,
    copied,
    drawing_again,
    drawn_since,
    refuse_changed_copies,
    states,
    statistics_locks,
    whole_buffers,
)
from penstock.runtime.passed_values import (
    PIECE,
    ForwardParameters,
    Passed,
    Value,
    backward_roots,
    described,
    forward_parameters,
    leaves,
    named_arguments,
    passed_by,
    take_gradients,
)
from penstock.torch_internals import changes, walk_back


class StageActions(Protocol):
    """The actions of one rank in one step."""

    @property
    def kept(self) -> Collection[int]:
        """The forwards whose backward is not finished."""
        ...

    def forward(self, step: LaneStep) -> None:
        """Run an F."""
        ...

    def backward(self, step: LaneStep) -> None:
        """Run a B or an I."""
        ...

    def weights(self, step: LaneStep) -> None:
        """Run a W."""
        ...


@dataclass(slots=True)
class LaneStages:
    """The stages of one rank and how they compute.

    The second group of fields is known once the ranks have agreed (`penstock.runtime.replicas`).
    """

    modules: Mapping[int, nn.Module]
    loss: Loss
    reduction: Reduction
    recompute: frozenset[int]  # stages that compute their forward again
    autocast: torch.dtype | None
    casts: CastWeights | None = None  # weights in the type of autocast

    rests: Rests = field(default_factory=Rests)
    common: frozenset[int] = frozenset()  # ids of parameters that threads share
    takes_turns: bool = False  # whether ranks that are threads run forwards one by one

    # What the forward of each stage asks for by name.
    parameters: dict[int, ForwardParameters] = field(init=False)
    # The buffers of each stage, which a second forward must not change again.
    buffers: dict[int, list[Buffers]] = field(init=False)
    # What a forward of each stage holds, because other threads may have the same norms.
    locks: dict[int, list[Lock]] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = {n: forward_parameters(m) for n, m in self.modules.items()}
        self.buffers = {n: buffers_of(m) for n, m in self.modules.items()}
        self.locks = {n: statistics_locks(m) for n, m in self.modules.items()}


class FirstStepChecks:
    """Checks of a user's modules and loss, which run only in the first step."""

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        loss: Loss,
        copied: Mapping[int, Mapping[str, Sequence[int]]],
    ) -> None:
        self.schedule = schedule
        self.modules = modules
        self.deferrals = DeferralReport(modules)
        self.loss_is_checked = is_known_sum(loss)
        # By stage, the buffers of which other ranks hold copies, and all ranks that hold one.
        self.copied = copied

    def copied_buffers(self, stage: int) -> dict[str, Tensor]:
        """The buffers of a stage of which other ranks hold copies."""
        names = self.copied.get(stage)
        if not names:
            return {}
        part = self.schedule.stages[stage].part
        held = whole_buffers(part, self.modules[stage])
        return {name: x for name, x in held.items() if name in names}


# ---------------------------------------------------------------- saved tensors
# Moves what autograd has saved in a forward to the memory of the host, and back before its backward.
#
#     F   autograd saves tensors; several may be views of one storage      device  [a a a|b b]    host
#     O   each storage is copied to the host once; the first is freed      device                 host  [a a a|b b]
#     R   the storages come back; saved tensors are views of them again    device  [a a a|b b]    host
#     B   autograd asks for the tensors
#
# What others hold as well stays where it is, because moving it would free nothing: weights and buffers of the stage,
# its input and output, and the keys and values that the next slices read.


class SavedView(NamedTuple):
    """A saved tensor as a view of a storage; `storage` is a key of `SavedTensors.storages`."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class SavedTensors:
    """What autograd has saved in one forward, on the device or on the host."""

    def __init__(self, staying: Iterable[Tensor]) -> None:
        self.staying = {_address(x) for x in staying}
        self.storages: dict[int, Tensor] = {}  # as bytes, by where they were first
        self.away: list[int] = []  # the keys of those that are on the host

    def saving(self) -> AbstractContextManager[None]:
        """While a forward runs: keep here what autograd saves."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> Tensor | SavedView:
        """What autograd keeps in place of a tensor."""
        is_plain = type(x) is Tensor and x.layout is torch.strided
        if not is_plain or _address(x) in self.staying:
            return x
        address = _address(x)
        if address not in self.storages:
            whole = torch.empty(0, dtype=torch.uint8, device=x.device)
            self.storages[address] = whole.set_(x.untyped_storage())
        offset = int(x.storage_offset())
        return SavedView(address, x.dtype, offset, x.shape, x.stride())

    def unpack(self, saved: Tensor | SavedView) -> Tensor:
        """The tensor again."""
        if isinstance(saved, Tensor):
            return saved
        storage = self.storages[saved.storage].untyped_storage()
        empty = torch.empty(0, dtype=saved.dtype, device=storage.device)
        return empty.set_(storage, saved.offset, saved.shape, saved.stride)

    def leave(self, staying: Iterable[Tensor]) -> None:
        """Copy the storages to the host, and free those of the device."""
        kept = {_address(x) for x in staying}
        self.away = [address for address in self.storages if address not in kept]
        for address in self.away:
            there = self.storages[address]
            host = torch.empty_like(there, device="cpu", pin_memory=there.is_cuda)
            self.storages[address] = host.copy_(there)

    def come_back(self, device: torch.device) -> None:
        """Copy them back to the device."""
        for address in self.away:
            host = self.storages[address]
            self.storages[address] = torch.empty_like(host, device=device).copy_(host)
        self.away = []


def _address(x: Tensor) -> int:
    """Where the storage of a tensor begins."""
    return x.untyped_storage().data_ptr()


# ---------------------------------------------------------------- computed actions
@dataclass(slots=True)
class KeptForward:
    """What a forward keeps for its backward."""

    x: Value
    piece: Slice | None = None
    y: Value | None = None  # None: the backward computes it again
    ledger: Ledger | None = None
    drawn: Drawn | None = None  # random numbers that the backward has to draw again
    # The module's buffers before this forward, if the backward computes it again.
    before: Sequence[Buffers] = ()
    added: Tensor | None = None  # a loss that a layer has added
    saved: SavedTensors | None = None  # what autograd has saved, if it goes to the host


@dataclass(eq=False, slots=True, weakref_slot=True)
class ComputedActions:
    """The actions of one step, computed by the modules of the stages.

    `restores_randomness=False` leaves the generators of random numbers alone when a forward runs again. That is
    for recordings, where the player of the recording sets them back.
    """

    stages: LaneStages
    data: StepData
    checks: FirstStepChecks | None = None
    restores_randomness: bool = True
    kept: dict[int, KeptForward] = field(default_factory=dict, init=False)

    # ------------------------------------------------------------ F
    def forward(self, step: LaneStep) -> None:
        """Run the stage and keep what its backward needs."""
        if self.checks is None or step.stage not in self.checks.copied:
            self.run_forward(step)
            return
        held = self.checks.copied_buffers(step.stage)
        before = {name: x.detach().clone() for name, x in held.items()}
        self.run_forward(step)
        refuse_changed_copies(
            step.stage,
            self.stages.modules[step.stage],
            self.checks.copied_buffers(step.stage),
            before,
            self.checks.copied[step.stage],
        )

    def run_forward(self, step: LaneStep) -> None:
        """The same without a look at copies of buffers."""
        carries = self.data.carries
        piece = None if carries is None else carries.open(step)
        x = self.stage_input(step)
        kept = KeptForward(x, piece)
        # A derivative that a forward itself asks for must not find the ledger of the action before.
        record_in(None)
        if not self.data.training:
            y = self.apply(step, x, piece)
        elif step.value in self.stages.rests.idle:
            # Nothing trains up to here, so the backward has nothing to do.
            with torch.no_grad():
                y = self.apply(step, x, piece)
        elif step.stage in self.stages.recompute:
            y = self.forward_to_recompute(step, kept)
        else:
            kept.ledger = self.new_ledger(step)
            record_in(kept.ledger)
            if step.offloaded:
                kept.saved = SavedTensors(self.staying_tensors(step, x))
                with kept.saved.saving():
                    y = kept.y = self.apply(step, x, piece)
            else:
                y = kept.y = self.apply(step, x, piece)
        self.data.publish(step, y)
        if self.data.added:
            kept.added = self.count_added(step)
        if self.data.training:
            self.kept[step.value] = kept
        elif carries is not None and piece is not None and piece.end == piece.tokens:
            carries.drop(step)

    def stage_input(self, step: LaneStep) -> Value:
        """The tokens, or what the stage before has passed on."""
        if step.source < 0:
            return (self.data.inputs[step.unit],)
        trains = self.data.training and step.value not in self.stages.rests.closed
        return leaves(self.data.held[step.source], trains)

    def count_added(self, step: LaneStep) -> Tensor:
        """The losses that layers have added in a forward, by their share in the step."""
        added = self.added_share(step)
        self.data.losses.append(added.detach())
        return added

    def added_share(self, step: LaneStep) -> Tensor:
        """The sum of the added losses, times the share of this unit in all labels."""
        return take_sum(self.data.added) * self.data.share(step.unit)

    def forward_to_recompute(self, step: LaneStep, kept: KeptForward) -> Value:
        """Run a forward that keeps only its input, the random numbers it drew, and the buffers it began with."""
        with DRAWING_LOCK:
            kept.before = copied(self.stages.buffers[step.stage])
            y, kept.drawn = self.apply_once(step, kept.x, kept.piece)
        kept.ledger = self.new_ledger(step)
        return y

    def apply_once(
        self, step: LaneStep, x: Value, piece: Slice | None
    ) -> tuple[Value, Drawn | None]:
        """The output without a graph, and the random numbers that were drawn for it."""
        with torch.no_grad():
            if not self.restores_randomness:
                return self.apply(step, x, piece), None
            with DRAWING_LOCK:
                before = states(x[0].device)
                y = self.apply(step, x, piece)
                return y, drawn_since(before, x[0].device)

    def new_ledger(self, step: LaneStep) -> Ledger | None:
        """A ledger for the weight gradients of a backward; None if autograd adds them up."""
        casts = self.stages.casts
        if not step.split and casts is None:
            return None
        return Ledger(self.stages.common, step.split, casts)

    def apply(self, step: LaneStep, x: Value, piece: Slice | None) -> Value:
        """The output of a stage.

        On the last stage that is the micro-batch's share of the loss: of the mean over all valid tokens.
        """
        if self.stages.takes_turns:
            with DRAWING_LOCK:
                return self.apply_autocast(step, x, piece)
        locks = self.stages.locks[step.stage]
        if not locks:
            return self.apply_autocast(step, x, piece)
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            return self.apply_autocast(step, x, piece)

    def apply_autocast(self, step: LaneStep, x: Value, piece: Slice | None) -> Value:
        """The same under autocast, if the user asked for it."""
        if self.stages.autocast is None:
            return self.compute(step, x, piece)
        with torch.autocast(x[0].device.type, self.stages.autocast):
            return self.compute(step, x, piece)

    def compute(self, step: LaneStep, x: Value, piece: Slice | None) -> Value:
        """Call the module and, on the last stage, the loss."""
        rows = len(self.data.batch.inputs[step.microbatch])
        place_at(step.microbatch * rows, 0 if piece is None else piece.begin)
        stages = self.stages
        module = stages.modules[step.stage]
        edges = self.data.edges
        travelling: dict[str, Tensor] = {}
        before = edges.incoming.get(step.forward)
        if before is not None:
            x, travelling = before.arguments(x)
        given = self.data.named(step)
        arguments: dict[str, Any] = {}
        if travelling or given:
            parameters = stages.parameters[step.stage]
            arguments |= named_arguments(parameters, len(x), travelling, given)
        if step.last and isinstance(stages.loss, ChunkedLoss) and not arguments:
            share = self.chunked_share(step, module, x, piece, stages.loss)
            if share is not None:
                return (share,)
        if piece is not None:
            arguments[PIECE] = piece
        returned = call_stage(module, x, arguments, step.stage, str(step.instruction))
        if step.last:
            return (self.loss_share(step, returned),)
        y = edges.outgoing[step.forward].value_of(returned, travelling)
        if y is None:
            raise not_tensors_error(step, module, returned)
        return y

    def chunked_share(
        self,
        step: LaneStep,
        module: nn.Module,
        x: Value,
        piece: Slice | None,
        loss: ChunkedLoss,
    ) -> Tensor | None:
        """The share of the loss without all logits in memory; None if they are needed."""
        if len(x) > 1 or self.data.outputs is not None:
            return None
        labels, valid = self.data.labels[step.unit], self.data.batch.valid
        return loss.share(module, x[0], piece, labels, valid)

    def loss_share(self, step: LaneStep, y: Any) -> Tensor:
        """The loss of one unit, divided by the number of valid tokens of the whole step."""
        stages = self.stages
        if isinstance(y, Passed):
            y = y.returned
        if self.data.outputs is not None:
            self.data.outputs[step.unit] = detached(y)
            if not self.data.labels:
                return torch.zeros(())
        if not isinstance(y, Tensor) and passed_by(y) is None:
            raise not_tensors_error(step, stages.modules[step.stage], y)
        labels = self.data.labels[step.unit]
        if self.checks is not None and not self.checks.loss_is_checked:
            self.checks.loss_is_checked = refuse_other_loss(
                plain_loss(stages.loss),
                y,
                labels,
                stages.reduction,
                step.stage,
                self.data.sliced,
            )
        loss = stages.loss(y, labels)
        if stages.reduction is Reduction.MEAN:
            loss = as_sum(loss, labels)
        return loss.reshape(()) / self.data.batch.valid

    # ------------------------------------------------------------ B and I
    def backward(self, step: LaneStep) -> None:
        """Compute the gradient of x from that of y. A split backward leaves the linear weights to W."""
        kept = self.kept[step.forward] if step.split else self.kept.pop(step.forward)
        if step.value in self.stages.rests.idle:
            self.skip_backward(step, kept)
            return
        if kept.y is None:
            kept.y = self.apply_again(step, kept)
        if kept.ledger is not None:
            kept.ledger.begin_backward()
        roots, gradients = self.output_gradients(step, kept, kept.y)
        if not roots:
            self.refuse_detached(step, kept)
            self.skip_backward(step, kept)
            return
        self.walk_graph(step, kept, roots, gradients)
        if step.forward not in self.stages.rests.closed:
            self.data.held[step.value] = take_gradients(kept.x)

    def output_gradients(
        self, step: LaneStep, kept: KeptForward, y: Value
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that the backward begins from, and their gradients: 1 for a loss."""
        if step.last:
            given: Value = (torch.ones_like(y[0]),)
        else:
            given = self.data.held[step.source]
        roots, gradients = backward_roots(y, given)
        if kept.added is not None and kept.added.requires_grad:
            roots.append(kept.added)
            gradients.append(torch.ones_like(kept.added))
            kept.added = None
        return roots, gradients

    def walk_graph(
        self,
        step: LaneStep,
        kept: KeptForward,
        roots: list[Tensor],
        gradients: list[Tensor],
    ) -> None:
        """Walk autograd's graph of one forward, which is freed afterwards."""
        deferrals = None
        if self.checks is not None and step.split:
            deferrals = self.checks.deferrals
            deferrals.begin(step.stage)
        # Activation checkpointing inside a stage runs forwards during this walk.
        record_in(kept.ledger)
        if kept.piece is None:
            walk_back(roots, gradients)
        else:
            states, state_gradients = kept.piece.carry.back(kept.piece)
            walk_back((*roots, *states), (*gradients, *state_gradients))
            self.close_slice(step, kept.piece)
        if deferrals is not None:
            deferrals.end(step.stage)
        kept.y = kept.saved = None
        if self.data.added:
            self.data.added.clear()  # by a layer that computed its forward again

    def apply_again(self, step: LaneStep, kept: KeptForward) -> Value:
        """Run the forward again to get its graph, with the random numbers and buffers of the first time."""
        record_in(kept.ledger)
        if kept.piece is not None:
            kept.piece.again = True
        with (
            drawing_again(kept.drawn, kept.x[0].device, step.instruction),
            buffers_as_before(self.stages.buffers[step.stage], kept.before),
        ):
            y = self.apply(step, kept.x, kept.piece)
        kept.before = ()
        if self.data.added:
            kept.added = self.added_share(step)
        return y

    def refuse_detached(self, step: LaneStep, kept: KeptForward) -> None:
        """Raise an error if the output should depend on something that trains, but does not."""
        module = self.stages.modules[step.stage]
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if trains or any(x.requires_grad for x in kept.x):
            raise RunError(
                f"{step.instruction} has no gradient to compute: what stage {step.stage} ({type(module).__name__}) "
                "returned does not depend on its input or its parameters\n"
                "  look for detach(), no_grad() or argmax() in its forward or in the loss; to freeze a stage on "
                "purpose, call requires_grad_(False) on its parameters"
            )

    def skip_backward(self, step: LaneStep, kept: KeptForward) -> None:
        """Finish a backward that has nothing to compute."""
        kept.y = kept.saved = None
        if kept.piece is not None:
            kept.piece.carry.back(kept.piece)
            self.close_slice(step, kept.piece)

    def close_slice(self, step: LaneStep, piece: Slice) -> None:
        """Hand the gradients of a slice to the slice before it; the first slice ends the micro-batch."""
        piece.carry.close(piece)
        if piece.begin == 0:
            assert self.data.carries is not None
            self.data.carries.drop(step)

    # ------------------------------------------------------------ W
    def weights(self, step: LaneStep) -> None:
        """Compute the weight gradients that the I has left."""
        kept = self.kept.pop(step.forward)
        if kept.ledger is not None:  # None: nothing trains here
            kept.ledger.settle()

    # ------------------------------------------------------------ O and R
    def staying_tensors(self, step: LaneStep, x: Value) -> list[Tensor]:
        """What a forward uses and others hold as well, so that moving it would free nothing."""
        module = self.stages.modules[step.stage]
        copies = [] if self.stages.casts is None else self.stages.casts.copies.values()
        return [*module.parameters(), *module.buffers(), *copies, *x]

    def offload(self, step: LaneStep) -> None:
        """Move what autograd has saved in the forward to the host. A recomputed stage has nothing to move."""
        kept = self.kept[step.forward]
        if kept.saved is None:
            return
        assert kept.y is not None
        carried: list[Tensor] = []
        if kept.piece is not None:
            carry = kept.piece.carry
            carried = [*carry.rows.values(), *carry.states.values()]
        kept.saved.leave([*kept.y, *carried])

    def reload(self, step: LaneStep) -> None:
        """Move it back."""
        kept = self.kept[step.forward]
        if kept.saved is not None:
            kept.saved.come_back(kept.x[0].device)


# ---------------------------------------------------------------- stage checks
# Checks of a user's own stages, with errors that say which stage is wrong, what is expected and what to do.


def not_tensors_error(step: LaneStep, module: nn.Module, y: object) -> ShapeError:
    """The error for a stage that did not return tensors, or other ones than when it was tried."""
    want = (
        "tensors, for the loss" if step.last else "what it returned when it was tried"
    )
    return ShapeError(
        f"stage {step.stage} ({type(module).__name__}) returned {described(y)} in {step.instruction}, but it must "
        f"return {want}\n  a stage returns a tensor, a tuple of tensors, or a dict of tensors with names, and the "
        "same ones in every call"
    )


def call_stage(
    module: nn.Module,
    values: Sequence[Tensor],
    arguments: Mapping[str, Any],
    stage: int,
    doing: str,
) -> Any:
    """Call a module, and refuse one that changes its input in place, which a backward needs as it was."""
    named = [value for value in arguments.values() if isinstance(value, Tensor)]
    given = [*values, *named]
    before = _versions(given)
    try:
        y = module(*values, **arguments)
    except RuntimeError as error:
        changes_a_leaf = "leaf Variable that requires grad" in str(error)
        if changes_a_leaf and any(x.requires_grad for x in given):
            raise _changed_input_error(stage, module, doing) from error
        if not torch.is_grad_enabled() and needs_gradients(error):
            raise without_gradients_error(stage, module, doing, error) from error
        raise
    if _versions(given) != before:
        raise _changed_input_error(stage, module, doing)
    return y


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers that grow when somebody changes a tensor."""
    return [0 if one.is_inference() else changes(one) for one in tensors]


def needs_gradients(error: Exception) -> bool:
    """Whether torch says that something needs a tensor with a gradient, such as a hook on it or `autograd.grad`."""
    text = str(error)
    return "require grad" in text or "requires_grad" in text


def without_gradients_error(
    stage: int, module: nn.Module, doing: str, error: RuntimeError
) -> RunError:
    """The error for a forward that needs gradients where it runs without them."""
    reason = str(error).strip().partition("\n")[0]
    return RunError(
        f"stage {stage} ({type(module).__name__}) cannot run {doing} without gradients: {reason}\n"
        "  a recomputed stage computes its first forward without them, and so do evaluation and frozen stages: write "
        "`if y.requires_grad:` before y.register_hook() or y.retain_grad(), or train without `recompute`"
    )


def _changed_input_error(stage: int, module: nn.Module, doing: str) -> ShapeError:
    return ShapeError(
        f"stage {stage} ({type(module).__name__}) changes its input in place in {doing}, but the "
        "backward needs the input as it was\n"
        "  let its first layer make a new tensor: nn.ReLU(inplace=False), x * 2 instead of x.mul_(2), or x.clone()"
    )
