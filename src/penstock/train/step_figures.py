"""The figures of a step: what ranks tell each other about it, in one sum over all of them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.runtime import Executor

# The counts that ranks exchange with every step: how many were asked to stop from outside, how
# many by a callback, how many have saved their share of a checkpoint, how many know that the
# crew is about to change, and what mirrors cost: bytes that were sent, and microseconds since
# the last step.
STOP_COUNT = 0
ENOUGH_COUNT = 1
SAVED_COUNT = 2
CHANGE_COUNT = 3
MIRROR_BYTES = 4
MIRROR_MICROSECONDS = 5
COUNTS = 6
# The numbers of each rank that all others get with every step: its memory in bytes, and the
# seconds that it has worked.
MEMORY_NUMBER = 0
WORK_NUMBER = 1
OWN_NUMBERS = 2


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What all ranks know about a step once it is done."""

    loss: float
    norm: float
    memory: int  # bytes of the fullest rank
    seconds: float
    bubble: float | None
    stopping: bool  # whether a rank was asked to stop
    mirror_bytes: int = 0  # sent to mirrors by all ranks
    mirror_seconds: float = 0.0  # that mirrors cost a rank on average
    interrupted: bool = False  # whether that came from outside, not from a callback


def figures_of(
    loss: float,
    norm: float,
    numbers: Sequence[Sequence[float]],
    counts: Sequence[int],
    bubble: float | None,
) -> StepFigures:
    """Return the figures of a step from the numbers of every rank and the sums of their counts.

    The time of the step is not known yet.
    """
    return StepFigures(
        loss,
        norm,
        memory=int(max(own[MEMORY_NUMBER] for own in numbers)),
        seconds=0.0,
        bubble=bubble,
        stopping=counts[STOP_COUNT] + counts[ENOUGH_COUNT] > 0,
        mirror_bytes=counts[MIRROR_BYTES],
        mirror_seconds=counts[MIRROR_MICROSECONDS] * 1e-6 / len(numbers),
        interrupted=counts[STOP_COUNT] > 0,
    )


def peak_memory(device: torch.device, executor: Executor) -> int:
    """The peak memory of this rank in bytes, of its GPU or of its process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) + executor.recording_bytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
