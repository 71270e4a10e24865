"""The bytes of planned sums of gradients, by the type in which gradients travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.cost.model import PartCost
from penstock.cost.profile import SCALE_BYTES

SUM_ROW = 256  # numbers that share a scale in int8
# The bytes of a message, compared with those of gradients in float32.
SUM_SHARES = {
    "float32": 1.0,
    "bfloat16": 0.5,
    "int8": (1 + SCALE_BYTES / SUM_ROW) / 4,
}


def sum_as(parts: Sequence[PartCost], messages: str) -> tuple[PartCost, ...]:
    """The parts with gradients that are summed in messages of this type."""
    share = SUM_SHARES[messages]
    return tuple(
        replace(
            part,
            gradients=part.gradients * share,
            tied_gradients=part.tied_gradients * share,
        )
        for part in parts
    )
