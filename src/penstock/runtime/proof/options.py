"""The options of a plan that a proof can switch off, one by one."""

from __future__ import annotations

from enum import StrEnum


class Option(StrEnum):
    """What a plan can do with a stage that a plain call does not."""

    SLICES = "slices"
    SPLIT = "split"
    RECOMPUTE = "recompute"
    AUTOCAST = "autocast"
    RECORDED = "recorded"
    COMPILED = "compiled"
    INTERLEAVED = "interleaved"  # the stage holds several micro-batches at a time


Options = frozenset[Option]
# With these options a stage draws other random numbers than in a plain call.
REDRAWS = frozenset({Option.SLICES, Option.COMPILED, Option.RECORDED})
