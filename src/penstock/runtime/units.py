"""The data of one step: micro-batches cut into units, and the values that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RunError, ShapeError
from penstock.ir.lane import LaneStep
from penstock.ir.schedule import MicroBatch, Schedule, stretch
from penstock.models.slice import Carry, Slice
from penstock.runtime.batch import Batch
from penstock.runtime.edges import NO_EDGES, BatchEdges, UnitTokens
from penstock.runtime.passed_values import Value, takes_slices
from penstock.torch_internals import original_module

# ---------------------------------------------------------------- units
# Cuts the micro-batches of a batch into slices of tokens, as the schedule says, and holds what slices carry on.
#
# schedule   tokens 8, cuts 0 4 6 8              as planned
# batch      tokens 8: 0:4 4:6 6:8               the same
#            tokens 1024: 0:512 512:768 768:1024 another length in the same proportions
#
# A batch may bring cuts of its own, with as many slices as the schedule has, because documents differ from step to
# step. A unit is one slice of a micro-batch, or all of it if it is not cut. Units are numbered one micro-batch after
# the other.


TokenSpan = tuple[int, int]  # the first token, and the one after the last


@dataclass(slots=True)
class BatchUnits:
    """The data of one step, by unit."""

    batch: Batch
    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    carries: Carries | None  # None: every unit is one document in one piece
    # The tokens of each unit's sequence, and of the unit itself; None if no micro-batch is cut.
    tokens: list[UnitTokens] | None = None
    edges: BatchEdges = NO_EDGES  # what goes between stages, once it is known

    def named(self, step: LaneStep) -> Mapping[str, Tensor]:
        """The named tensors of an action's micro-batch; of the whole sequence, if that is cut."""
        return self.batch.named[step.microbatch] if self.batch.named else {}

    def share(self, unit: int) -> float:
        """The share of a unit in all labels of the step, whether they count or not."""
        total = sum(labels.shape[:2].numel() for labels in self.batch.labels)
        labels = self.labels[unit] if self.labels else None
        return 0.0 if labels is None else labels.shape[:2].numel() / total

    @property
    def sliced(self) -> bool:
        """Whether any micro-batch is cut."""
        return len(self.inputs) > len(self.batch.inputs)


def cut_units(schedule: Schedule, batch: Batch) -> BatchUnits:
    """Cut a batch as the schedule says."""
    due = len(schedule.microbatches)
    if len(batch.inputs) != due:
        raise ShapeError(
            f"the batch has {len(batch.inputs)} micro-batches, but the schedule has {due}\n"
            f"  cut it into {due}: cut_batch(inputs, labels, {due})"
        )
    if schedule.slices == 1 and not batch.starts:
        return BatchUnits(batch, batch.inputs, batch.labels, None)
    spans = []
    inputs = []
    labels = []
    unit_tokens = []
    for number, microbatch in enumerate(schedule.microbatches):
        _refuse_other_labels(batch, number)
        tokens = batch.inputs[number].shape[1]
        for begin, end in _spans_in(batch, number, microbatch, tokens):
            spans.append((begin, end))
            inputs.append(batch.inputs[number][:, begin:end])
            labels.append(batch.labels[number][:, begin:end])
            unit_tokens.append((tokens, end - begin))
    units = BatchUnits(batch, tuple(inputs), tuple(labels), Carries(batch, spans))
    if schedule.slices > 1:
        units.tokens = unit_tokens
    return units


def _refuse_other_labels(batch: Batch, number: int) -> None:
    """Raise an error unless a micro-batch that is cut has a label for each token."""
    x = tuple(batch.inputs[number].shape)
    y = tuple(batch.labels[number].shape)
    if len(x) < 2 or x[:2] != y[:2]:
        raise ShapeError(
            f"micro-batch {number} has an input of shape {x} and labels of shape {y}, but token slices need a label "
            "for each token: (rows, tokens)\n  make the schedule with slices=1"
        )


def _spans_in(
    batch: Batch, number: int, microbatch: MicroBatch, tokens: int
) -> list[TokenSpan]:
    """The token spans of a micro-batch's slices: the batch's own ones, or those of the schedule."""
    if not batch.cuts:
        return spans_of(microbatch, tokens)
    cuts = batch.cuts[number]
    spans = list(pairwise(cuts))
    is_whole = cuts[:1] == (0,) and cuts[-1:] == (tokens,)
    if not is_whole or any(begin >= end for begin, end in spans):
        raise ShapeError(
            f"the batch cuts micro-batch {number} at {list(cuts)}, but it has {tokens} tokens\n"
            f"  give ascending cuts from 0 to {tokens}"
        )
    if len(spans) != microbatch.slices:
        raise ShapeError(
            f"the batch cuts micro-batch {number} into {len(spans)} slices, "
            f"but the schedule has {microbatch.slices}"
        )
    return spans


def spans_of(microbatch: MicroBatch, tokens: int) -> list[TokenSpan]:
    """The token spans of a micro-batch's slices, for a sequence of this many tokens.

    >>> spans_of(MicroBatch((0,), tokens=8, cuts=(0, 4, 6, 8)), 1024)
    [(0, 512), (512, 768), (768, 1024)]
    """
    return list(pairwise(stretch(microbatch, tokens).cuts))


def refuse_whole(schedule: Schedule, modules: Mapping[int, nn.Module]) -> None:
    """Raise an error if the schedule is sliced and a module cannot run slice by slice."""
    if schedule.slices == 1:
        return
    for stage, module in modules.items():
        reason = _why_unsliceable(original_module(module))
        if reason:
            raise ShapeError(
                f"stage {stage} cannot be sliced: {reason}\n  or make the schedule with slices=1"
            )


def _why_unsliceable(module: nn.Module) -> str:
    """Why a module cannot run slice by slice; empty if it can."""
    reason = str(getattr(module, "unsliceable", ""))
    if reason or takes_slices(module):
        return reason
    name = type(module).__name__
    return f"the forward of {name} has no parameter `piece` (penstock.models.slice)"


class Carries:
    """What the stages of a rank carry from slice to slice in one step, by stage and micro-batch."""

    def __init__(self, batch: Batch, spans: Sequence[TokenSpan]) -> None:
        self.batch = batch
        self.spans = spans  # by unit
        self.held: dict[tuple[int, int], Carry] = {}

    def open(self, step: LaneStep) -> Slice:
        """The slice that a forward runs on."""
        visit = step.stage, step.microbatch
        begin, end = self.spans[step.unit]
        if begin == 0:
            self.held[visit] = self._new_carry(step.microbatch)
        if visit not in self.held:
            raise RunError(
                f"{step.instruction} comes before the first slice of its micro-batch"
            )
        return self.held[visit].open(begin, end)

    def _new_carry(self, microbatch: int) -> Carry:
        starts = self.batch.starts[microbatch] if self.batch.starts else None
        return Carry(self.batch.inputs[microbatch].shape[1], starts)

    def drop(self, step: LaneStep) -> None:
        """Forget a micro-batch that is finished on a stage.

        In training its first slice has come back; in evaluation its last slice has gone forward.
        """
        del self.held[step.stage, step.microbatch]

    def check_empty(self) -> None:
        """Raise an error if anything is left: then a backward is missing, and so is a gradient."""
        for (stage, microbatch), carry in self.held.items():
            raise RunError(
                f"the step left state behind: on stage {stage}, micro-batch {microbatch} went forward to token "
                f"{carry.reached} of {carry.tokens}, but came back only to token {carry.left}"
            )


# ---------------------------------------------------------------- step values
# The values that one rank holds during a step: hidden states, gradients between stages, losses and outputs.
#
# Values have the number of the action that makes them.


class StepValues:
    """Values by the number of the action that makes them.

    With `keeps_outputs`, what the last stages of the paths return is kept too, by unit and without its graph.
    """

    __slots__ = ("added", "buffers", "held", "losses", "outputs")

    def __init__(self, keeps_outputs: bool = False) -> None:
        self.held: dict[int, Value] = {}
        self.losses: list[Tensor] = []
        self.added: list[Tensor] = []  # by layers, in the forward that runs now
        self.outputs: dict[int, object] | None = {} if keeps_outputs else None
        self.buffers: list[Tensor] = []  # in which the next action's input lies

    def publish(self, step: LaneStep, y: Value) -> None:
        """Keep the output of a forward for the next stage, or as a share of the loss."""
        if step.last:
            self.losses.append(y[0].detach())
        else:
            self.held[step.value] = y

    def take_buffers(self) -> list[Tensor]:
        """The receive buffers that hold this action's input. The action that takes them has to give them back."""
        buffers = self.buffers
        self.buffers = []
        return buffers


def detached(output: object) -> object:
    """What a stage returned, without its graph."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {name: detached(value) for name, value in output.items()}
    if isinstance(output, tuple | list):
        return tuple(detached(value) for value in output)
    return output


def joined(pieces: Sequence[Any]) -> Any:
    """The outputs of the slices of a micro-batch as one, joined along the tokens; None if they are not here."""
    first = pieces[0]
    if len(pieces) == 1 or first is None:
        return first
    if isinstance(first, Mapping):
        return {name: joined([piece[name] for piece in pieces]) for name in first}
    if isinstance(first, tuple):
        return tuple(joined(parts) for parts in zip(*pieces, strict=True))
    return torch.cat(list(pieces), dim=1)
