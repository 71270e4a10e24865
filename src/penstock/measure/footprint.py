"""Bytes of a module: what autograd saves from F to B, what a ledger keeps from I to W, weights with all that is theirs.

Tensors that share their memory count once; weights are no activations.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.measure.probe import Probe
from penstock.runtime.backward import DeferredWork, Ledger

TIMED_UPDATES = 5  # steps of the optimizer that are timed
CACHE_SCRUB_BYTES = 64 << 20  # bytes that are written to empty the caches


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a subject with its whole sequence; seconds of an AdamW step over its weights."""

    held: float  # from F to the end of the backward
    kept: float  # from I to the end of W
    message: float  # its result
    weights: float  # and their gradients, and AdamW's state
    update: float


def footprint(probe: Probe) -> Footprint:
    """Runs the whole sequence once, with open eyes."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    piece, ledger = probe.open(probe.subject.tokens, 0), Ledger()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        probe.forward(piece, ledger)
    own = _storages(probe.subject.module.parameters())
    held, message = _bytes(saved, own), probe.made[piece].nbytes
    saved.clear()
    ledger.open = True
    probe.backward(piece, probe.gradient(piece))
    kept = _bytes((x for work in ledger.due for x in _caught(work)), own)
    ledger.settle()
    return Footprint(held, kept, message, *_update(probe))


def _caught(work: DeferredWork) -> Iterator[Tensor]:
    """Tensors that a deferred piece of work holds."""
    for cell in getattr(work, "__closure__", None) or ():
        if isinstance(cell.cell_contents, Tensor):
            yield cell.cell_contents


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors
    }


def _bytes(tensors: Iterable[Tensor], own: dict[int, int]) -> float:
    return float(
        sum(size for place, size in _storages(tensors).items() if place not in own)
    )


def _update(probe: Probe) -> tuple[float, float]:
    """Bytes of weights, gradients and AdamW's state, and the seconds of a step: the median, without the first, which
    makes the state. Caches are emptied before each: in training a whole step lies between two of them."""
    module: nn.Module = probe.subject.module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-9)
    took = []
    for _ in range(1 + TIMED_UPDATES):
        torch.zeros(CACHE_SCRUB_BYTES, dtype=torch.uint8, device=probe.device)
        took.append(probe.clock(optimizer.step))
    states = [
        x
        for state in optimizer.state.values()
        for x in state.values()
        if isinstance(x, Tensor)
    ]
    tensors = [
        *module.parameters(),
        *(p.grad for p in module.parameters() if p.grad is not None),
        *states,
    ]
    return float(sum(_storages(tensors).values())), statistics.median(took[1:])
