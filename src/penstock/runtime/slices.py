"""A micro-batch of a batch, cut as the schedule says: which tokens, and what is carried from slice to slice.

schedule   tokens 8, cuts 0 4 6 8              as it was planned
batch      tokens 8: 0:4 4:6 6:8               the same
           tokens 1024: 0:512 512:768 768:1024 another length: the same shares
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import pairwise

from torch import nn

from penstock.carry import Carry, Slice
from penstock.errors import RunError, ShapeError
from penstock.ir.schedule import MicroBatch, Schedule, stretch
from penstock.runtime.batch import Batch
from penstock.runtime.lane import Step

TokenSpan = tuple[int, int]


def spans_of(microbatch: MicroBatch, tokens: int) -> list[TokenSpan]:
    """First token of each slice and the one after its last, for a sequence of so many tokens.

    >>> spans_of(MicroBatch((0,), tokens=8, cuts=(0, 4, 6, 8)), 1024)
    [(0, 512), (512, 768), (768, 1024)]
    """
    return list(pairwise(stretch(microbatch, tokens).cuts))


def refuse_whole(schedule: Schedule, modules: Mapping[int, nn.Module]) -> None:
    """Raises if a module of a sliced schedule cannot be run slice by slice."""
    if schedule.slices == 1:
        return
    for stage, module in modules.items():
        inner = getattr(module, "_orig_mod", module)  # compiled
        reason = getattr(inner, "unsliceable", "")
        if not reason and "piece" not in inspect.signature(inner.forward).parameters:
            reason = f"forward of {type(inner).__name__} takes no second argument `piece` (penstock.carry)"
        if reason:
            raise ShapeError(
                f"stage {stage} cannot be sliced: {reason}; make the schedule with slices=1"
            )


class Carries:
    """What the stages of a rank carry in one step, by stage and micro-batch."""

    def __init__(self, batch: Batch, spans: list[list[TokenSpan]]) -> None:
        self.batch = batch
        self.spans = [span for one in spans for span in one]
        self.held: dict[tuple[int, int], Carry] = {}

    def open(self, step: Step) -> Slice:
        """The slice that a forward runs on."""
        where, (begin, end) = (step.stage, step.microbatch), self.spans[step.unit]
        if begin == 0:
            starts = self.batch.starts[step.microbatch] if self.batch.starts else None
            self.held[where] = Carry(
                self.batch.inputs[step.microbatch].shape[1], starts
            )
        if where not in self.held:
            raise RunError(
                f"{step.instruction} comes before the first slice of its micro-batch"
            )
        return self.held[where].open(begin, end)

    def drop(self, step: Step) -> None:
        """A micro-batch is done with on this stage: its first slice came back or, in evaluation, its last one went."""
        del self.held[step.stage, step.microbatch]

    def check_empty(self) -> None:
        """Raises if anything is left: then a backward is missing, and so is a gradient."""
        for (stage, microbatch), carry in self.held.items():
            raise RunError(
                f"state is left over: on stage {stage} micro-batch {microbatch} went forward to token {carry.reached} "
                f"and came back to token {carry.left}, of {carry.tokens}"
            )
