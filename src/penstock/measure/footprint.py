"""Measures the memory of a module: activations from F to B, gradients kept from I to W, and weights.

Tensors that share memory count once. Weights do not count as activations.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from penstock.measure.probe import Probe
from penstock.runtime.backward import DeferredWork
from penstock.runtime.chunked_loss import tensors_held
from penstock.runtime.torch_internals import multiply_all, norms_of_all

TIMED_UPDATES = 5  # steps of the optimizer
CACHE_SCRUB_BYTES = 64 << 20  # written to empty the caches


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of a module on a whole sequence, and the seconds of its optimizer's step."""

    held: float  # from F to the end of the backward
    kept: float  # from I to the end of W
    message: float  # the module's output
    weights: float  # with gradients and optimizer state of those that train
    update: float  # seconds


def footprint(probe: Probe, same_weights: Footprint | None = None) -> Footprint:
    """Run a probe's whole sequence once, and measure what it stores.

    If the same weights were measured before, they are not measured again.
    """
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    piece = probe.open(probe.subject.tokens, 0)
    ledger = probe.ledger(splits=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        probe.forward(piece, ledger)
    weights = _storages(probe.subject.module.parameters())
    if probe.casts is not None:
        weights |= _storages(probe.casts.copies.values())
    saved += tensors_held(probe.outputs[piece])
    held = _activation_bytes(saved, weights)
    message = probe.outputs[piece].nbytes
    saved.clear()
    ledger.begin_backward()
    probe.backward(piece, probe.gradient(piece))
    deferred: list[Tensor] = []
    for work in ledger.due:
        deferred += _held_tensors(work)
    kept = _activation_bytes(deferred, weights)
    deferred.clear()
    ledger.settle()
    if same_weights is not None:
        return replace(same_weights, held=held, kept=kept, message=message)
    return Footprint(held, kept, message, *_measure_update(probe))


def _held_tensors(work: DeferredWork) -> Iterator[Tensor]:
    """The tensors that a deferred piece of work keeps alive."""
    for cell in getattr(work, "__closure__", None) or ():
        content = cell.cell_contents
        several = content if isinstance(content, list | tuple) else (content,)
        yield from (one for one in several if isinstance(one, Tensor))


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the tensors' memory, by address."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def _activation_bytes(tensors: Iterable[Tensor], weights: dict[int, int]) -> float:
    """The memory of tensors, without that of weights."""
    total = 0.0
    for address, size in _storages(tensors).items():
        if address not in weights:
            total += size
    return total


def _measure_update(probe: Probe) -> tuple[float, float]:
    """The bytes of weights, gradients and optimizer state, and the seconds of an update.

    An update begins with the norm of the gradients and their clipping. The next step casts the
    weights again, which counts as part of the update. The seconds are a median without the first
    step, which creates the state. The caches are emptied before each step, because in training a
    whole step lies between two updates.
    """
    module: nn.Module = probe.subject.module
    optimizers = probe.subject.optimizers(module)

    def update() -> None:
        gradients = [one.grad for one in module.parameters() if one.grad is not None]
        norms_of_all(gradients)
        multiply_all(gradients, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if probe.casts is not None:
            probe.casts.refresh()

    seconds = []
    for _ in range(1 + TIMED_UPDATES):
        torch.zeros(CACHE_SCRUB_BYTES, dtype=torch.uint8, device=probe.device)
        seconds.append(probe.clock(update) * probe.load)
    tensors: list[Tensor] = list(module.parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            gradients = [parameter.grad for parameter in group["params"]]
            tensors += [grad for grad in gradients if grad is not None]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    total = sum(_storages(tensors).values())
    return float(total), statistics.median(seconds[1:])
