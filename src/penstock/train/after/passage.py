"""Sends micro-batches through the parts of one model, each along its own path, in one process.

    paths            0 1 . 3      0 . 2 3      0 2 1 .            one per micro-batch
    calls, in turn   part 0: a b c   part 1: a   part 2: b c   part 1: c   part 3: a b   head: a b c

Micro-batches that wait for the same part go through it together, so that a call has as many
rows as possible, and there are no more calls than parts, except for swaps. Rows do not see
each other, so the result is that of a pipeline with these paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.models.slice import Carry


def run_along_paths(
    parts: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    paths: Sequence[Sequence[int]],
    starts: Sequence[Tensor] = (),
    named: Sequence[Mapping[str, Tensor]] = (),
) -> list[Tensor]:
    """Return the logits of each micro-batch.

    Paths name parts. The last part, which has the head, ends them all and is not named. If
    rows are packed with documents, `starts` has the start of each token's document. The first part gets the `named`
    tensors of each micro-batch, such as the types of a Bert's segments.
    """
    if len(inputs) != len(paths):
        raise ShapeError(
            f"{len(inputs)} micro-batches cannot go along {len(paths)} paths: give each its own"
        )
    for number, path in enumerate(paths):
        if (
            not path
            or path[0] != 0
            or not all(0 <= part < len(parts) - 1 for part in path)
        ):
            raise ShapeError(
                f"micro-batch {number} cannot go along {tuple(path)}: a path begins with part 0 and names parts "
                f"up to {len(parts) - 2}; part {len(parts) - 1} has the head and comes by itself"
            )
    states = list(inputs)
    left = [list(path) for path in paths]
    while any(left):
        part = min(path[0] for path in left if path)
        here = [number for number, path in enumerate(left) if path and path[0] == part]
        _run_together(parts[part], states, here, starts, () if part else named)
        for number in here:
            left[number].pop(0)
    _run_together(parts[-1], states, list(range(len(states))), starts)
    return states


def _run_together(
    part: nn.Module,
    states: list[Tensor],
    numbers: Sequence[int],
    starts: Sequence[Tensor],
    named: Sequence[Mapping[str, Tensor]] = (),
) -> None:
    """Run micro-batches through a part; those of equal length share a call."""
    for length in dict.fromkeys(states[number].shape[1] for number in numbers):
        same = [number for number in numbers if states[number].shape[1] == length]
        first = torch.cat([starts[number] for number in same]) if starts else None
        piece = () if first is None else (Carry(length, first).open(0, length),)
        rows = [len(states[number]) for number in same]
        joined = {
            name: torch.cat([named[number][name] for number in same])
            for name in (named[0] if named else ())
        }
        inputs = torch.cat([states[number] for number in same])
        outputs = part(inputs, *piece, **joined)
        for number, state in zip(same, outputs.split(rows), strict=True):
            states[number] = state
