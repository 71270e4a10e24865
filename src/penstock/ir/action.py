"""An action is one thing that a rank does: an op on a stage, for a slice of a micro-batch.

2F0      forward of micro-batch 0 on stage 2
2B0.1    backward of its slice 1
2I0 2W0  the two halves of a split backward: input gradient, weight gradient
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from penstock.errors import FileError


class Op(StrEnum):
    """The kind of work. The letters are those of torch."""

    F = "F"  # forward
    B = "B"  # whole backward
    I = "I"  # noqa: E741  # backward, only the gradient of the input
    W = "W"  # backward, only the gradient of the weights


OPS = tuple(Op)
# The numbers of ops in tables: F 0, B 1, I 2, W 3.
OP_CODES = {op: code for code, op in enumerate(OPS)}

_TEXT = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})(?:\.([0-9]{1,9}))?")


class Action(NamedTuple):
    """`(op, stage, micro-batch, slice)`.

    It prints as `2F0`, or as `2F0.1` for a slice after the first, and parses back.
    """

    op: Op
    stage: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        tail = f".{self.slice}" if self.slice else ""
        return f"{self.stage}{self.op.value}{self.microbatch}{tail}"

    def __repr__(self) -> str:
        return f"<{self}>"


def parse_action(text: str) -> Action:
    """The action that prints as `text`.

    >>> parse_action("2F0.1")
    <2F0.1>
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise FileError(
            f"{text!r} is not an action: an action is stage, op F B I or W, "
            "micro-batch, as in 2F0, or 2F0.1 for a slice"
        )
    stage, op, microbatch, piece = match.groups()
    return Action(Op(op), int(stage), int(microbatch), int(piece or 0))
