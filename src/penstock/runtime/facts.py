"""Facts that every rank tells all others, as JSON that travels in the rows of a sum."""

from __future__ import annotations

import json
from typing import Any

import torch

from penstock.runtime.comm.comm import Comm


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
