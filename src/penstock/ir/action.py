"""An action is one thing that a rank does: an op on a stage, for a slice of a micro-batch.

2F0      forward of micro-batch 0 on stage 2
2B0.1    backward of its slice 1
2I0 2W0  the two halves of a split backward: input gradient, weight gradient
2O0 2R0  what its forward keeps goes to the memory of the host, and comes back
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from penstock.errors import FileError

FORWARD, BACKWARD, WEIGHTS, OFFLOAD, RELOAD = range(5)  # the kinds of action
KINDS = 5


class OpRow(NamedTuple):
    """What there is to know of an op.

    A stage runs at most one action of each kind for a slice of a micro-batch. `then` is the kind that must follow, -1
    if none must. `method` is the method of the executor's actions that runs it. `shades` are the lightest, middle and
    darkest colour in figures.
    """

    kind: int
    then: int
    label: str
    method: str
    shades: tuple[str, str, str]


class Op(StrEnum):
    """The kind of work. The letters are those of torch."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"
    O = "O"  # noqa: E741
    R = "R"

    @property
    def row(self) -> OpRow:
        """What there is to know of it."""
        return OP_TABLE[self]

    @property
    def kind(self) -> int:
        """FORWARD, BACKWARD, WEIGHTS, OFFLOAD or RELOAD."""
        return OP_TABLE[self].kind


OP_TABLE = {
    Op.F: OpRow(
        FORWARD, BACKWARD, "forward", "forward", ("#d5e4fc", "#6d9ff0", "#1c4fae")
    ),
    Op.B: OpRow(
        BACKWARD, -1, "backward", "backward", ("#cdebc7", "#69b86c", "#1d6630")
    ),
    Op.I: OpRow(
        BACKWARD,
        WEIGHTS,
        "input gradient",
        "backward",
        ("#c3efea", "#3fbdb2", "#0b6e69"),
    ),
    Op.W: OpRow(
        WEIGHTS, -1, "weight gradient", "weights", ("#fde3be", "#f2a33c", "#a85005")
    ),
    Op.O: OpRow(
        OFFLOAD, RELOAD, "offload", "offload", ("#e6dcf5", "#a988d8", "#5b35a0")
    ),
    Op.R: OpRow(RELOAD, -1, "reload", "reload", ("#f5dcec", "#d888b8", "#a0356f")),
}
OPS = tuple(Op)
# The ops that compute, whose times are measured.
COMPUTING_OPS = (Op.F, Op.B, Op.I, Op.W)
# What a stage computes for a slice, if the backward is one piece, and if it is split.
WHOLE_OPS = (Op.F, Op.B)
SPLIT_OPS = (Op.F, Op.I, Op.W)
# The numbers of ops in tables: F 0, B 1, I 2, W 3, O 4, R 5.
OP_CODES = {op: code for code, op in enumerate(OPS)}
# The method of the executor's actions for each kind.
METHODS = tuple(
    next(row.method for row in OP_TABLE.values() if row.kind == kind)
    for kind in range(KINDS)
)

_LETTERS = "".join(OPS)
_TEXT = re.compile(rf"([0-9]{{1,9}})([{_LETTERS}])([0-9]{{1,9}})(?:\.([0-9]{{1,9}}))?")


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


def forward(stage: int, microbatch: int, piece: int = 0) -> Action:
    """The F of a slice on a stage."""
    return Action(Op.F, stage, microbatch, piece)


def backward(stage: int, microbatch: int, piece: int = 0) -> Action:
    """The B of a slice on a stage: its backward in one piece."""
    return Action(Op.B, stage, microbatch, piece)


def halves(action: Action) -> tuple[Action, Action]:
    """The I and the W into which the backward of an action is split.

    >>> halves(backward(2, 0))
    (<2I0>, <2W0>)
    """
    return action._replace(op=Op.I), action._replace(op=Op.W)


def parse_action(text: str) -> Action:
    """The action that prints as `text`.

    >>> parse_action("2F0.1")
    <2F0.1>
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise FileError(
            f"{text!r} is not an action: an action is stage, op ({' '.join(OPS)}), "
            "micro-batch, as in 2F0, or 2F0.1 for a slice"
        )
    stage, op, microbatch, piece = match.groups()
    return Action(Op(op), int(stage), int(microbatch), int(piece or 0))
