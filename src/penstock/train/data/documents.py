"""Cuts every step for the packed documents that it holds, where documents are kept apart.

The work is counted in integers, so that every rank of a run finds the same cuts without asking another.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.plan.slices import equal_work_cuts


@dataclass(frozen=True, slots=True)
class DocumentCutter:
    """Cuts the micro-batches of each step so that their slices take the same time, for the documents they hold."""

    slices: tuple[int, ...]  # of each micro-batch, as the schedule has them
    token_work: int  # the work of a token, counted in keys that it attends to
    step: int = 1  # tokens that cuts are multiples of

    def cut(self, microbatch: int, starts: Tensor) -> tuple[int, ...]:
        """Return the cuts of a micro-batch, given the start of each token's document."""
        slices = self.slices[microbatch]
        return equal_work_cuts(starts.numpy(), slices, self.token_work, self.step)
