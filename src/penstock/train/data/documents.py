"""Plans every step for the packed documents that it holds, where documents are kept apart.

    documents of a step ─► DocumentDealer ─► a pack for each micro-batch ─► DocumentCutter ─► slices of each pack
                           equal work of micro-batches                      equal work of slices

Both count in integers, so that every rank of a run finds the same packs and the same cuts without asking another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.models import document_starts
from penstock.plan.slices.documents import equal_work_cuts
from penstock.plan.slices.packs import DocumentWork, Pack, StepClock, deal_documents


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


@dataclass(frozen=True, slots=True)
class DocumentDealer:
    """Deals the documents of each pass out to micro-batches so that these take the same time."""

    clock: StepClock
    work: DocumentWork
    least_tokens: int = 1  # of a micro-batch

    def deal(self, starts: Tensor) -> tuple[Pack, ...] | None:
        """Return the pack of each micro-batch; None to keep the rows as they were read.

        `starts` has the start of each token's document, for all rows of a pass.
        """
        ends = document_ends(starts).tolist()
        tokens = starts.shape[1]
        rows: list[list[int]] = [[] for _ in starts]
        begin = 0
        for end in ends:
            rows[begin // tokens].append(end - begin)
            begin = end
        return deal_documents(rows, self.clock, self.work, self.least_tokens)


def document_ends(starts: Tensor) -> Tensor:
    """Return where each document ends if all rows are laid out one after the other.

    >>> document_ends(torch.tensor([[0, 0, 2, 2], [0, 0, 0, 0]])).tolist()
    [2, 4, 8]
    """
    places = torch.arange(starts.shape[1])
    begins = (starts == places).flatten().nonzero().flatten()
    return torch.cat([begins[1:], torch.tensor([starts.numel()])])


def starts_in_pack(pack: Pack, ends: Tensor) -> Tensor:
    """Return the start of each token's document in a pack: (1, tokens)."""
    numbers = torch.tensor(pack.documents)
    lengths = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype))
    return document_starts(lengths[numbers])[None]


def pack_tokens(pack: Pack, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the tokens, or the labels, of a pack's documents in one row: (1, tokens)."""
    flat = rows.flatten()
    bounds = [0, *ends.tolist()]
    parts = [flat[bounds[number] : bounds[number + 1]] for number in pack.documents]
    return torch.cat(parts)[None]
