"""Facts that every rank tells all others, as JSON that travels in the rows of a sum."""

from __future__ import annotations

import json
from typing import Any

import torch

from penstock.errors import PeerLostError, PenstockError, ShapeError
from penstock.runtime.comm.comm import Comm

# Facts of a rank that has failed: the error in words, and whether it is a `ShapeError`, which all ranks then raise.
FAILURE, MISFIT = "failure", "misfit"


def share_facts(comm: Comm, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of all ranks, by rank. All ranks must call this.

    They travel as numbers in the rows of a sum, since a `Comm` can only add.
    """
    everyone = tuple(range(comm.ranks))
    raw = json.dumps(facts).encode()
    sizes = torch.zeros(comm.ranks, dtype=torch.int64)
    sizes[comm.rank] = len(raw)
    comm.add(sizes, everyone).wait()
    letters = torch.zeros(comm.ranks, int(sizes.max()), dtype=torch.int64)
    letters[comm.rank, : len(raw)] = torch.tensor(list(raw))
    comm.add(letters, everyone).wait()
    shared = []
    for row, size in zip(letters, sizes.tolist(), strict=True):
        shared.append(json.loads(bytes(row[:size].tolist())))
    return shared


def fail_together(comm: Comm, failure: PenstockError | None) -> None:
    """Raise an error on all ranks if one of them has failed, so that no other goes on. All ranks must call this."""
    told: dict[str, Any] = {}
    if failure is not None:
        told = {FAILURE: str(failure), MISFIT: isinstance(failure, ShapeError)}
    shared = share_facts(comm, told)
    if failure is not None:
        raise failure
    for facts in shared:
        if facts:
            raise_failure(facts[FAILURE], facts[MISFIT])


def raise_failure(text: str, misfit: bool, own: Exception | None = None) -> None:
    """Raise the error of a stage: as it is on its own rank, in words on the others."""
    if misfit:
        raise ShapeError(text)
    raise own or PeerLostError(text)
