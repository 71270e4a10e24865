"""A schedule is three tables: where each stage lives, which stages a micro-batch visits, in what order a rank acts.

    stages          microbatches              lanes
    stage  rank part   mb  path   tokens cuts    rank
      0     0    0      0  0 1 2  1024  0 512 1024   0 | 0F0 0F0.1 0F1 ...
      1     1    1      1  0 2    1024  0 1024       1 | 1F0 ...
      2     2    2                                   2 | 2F0 ...

Waves and interleaving are several parts on a rank; replicas (data parallelism, Chimera's two directions) several stages
of one part; skipping is a path that leaves out parts; token slices are cuts. Nothing else is stored: idle time is an
output of the simulator, sends and receives are added by `lower`. Dependencies: `penstock.ir.needs`; legality:
`penstock.ir.check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.errors import ShapeError
from penstock.ir.action import Action
from penstock.ir.check import check
from penstock.ir.table import Table


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the model on a rank."""

    rank: int
    part: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The stages it visits, first to last, and the token boundaries of its slices. No cuts: one slice."""

    path: tuple[int, ...]
    tokens: int = 1
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", self.cuts or (0, self.tokens))

    @property
    def slices(self) -> int:
        """How many slices it is cut into."""
        return max(len(self.cuts) - 1, 1)

    def span(self, piece: int) -> tuple[int, int]:
        """First token of a slice and the one after its last."""
        return self.cuts[piece], self.cuts[piece + 1]


def stretch(microbatch: MicroBatch, tokens: int) -> MicroBatch:
    """The same micro-batch for a sequence of so many tokens: its cuts are shares.

    >>> stretch(MicroBatch((0,), tokens=8, cuts=(0, 4, 6, 8)), 1024).cuts
    (0, 512, 768, 1024)
    """
    if tokens == microbatch.tokens:
        return microbatch
    cuts = tuple(
        (cut * tokens + microbatch.tokens // 2) // microbatch.tokens
        for cut in microbatch.cuts
    )
    if tokens < microbatch.slices:
        raise ShapeError(
            f"{tokens} tokens cannot be cut into {microbatch.slices} slices; the most is {tokens}"
        )
    if any(begin >= end for begin, end in pairwise(cuts)):
        raise ShapeError(
            f"a sequence of {tokens} tokens leaves a slice empty when cut in the shares of {microbatch.cuts}; "
            f"{microbatch.tokens} tokens or a multiple would do"
        )
    return MicroBatch(microbatch.path, tokens, cuts)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The three tables, frozen and checked: a `Schedule` that exists can run.

    >>> from penstock.ir import MicroBatch, Schedule, Stage, parse_action
    >>> lane = tuple(parse_action(text) for text in "0F0 0B0".split())
    >>> Schedule((Stage(0, 0),), (MicroBatch((0,)),), (lane,)).ranks
    1
    """

    stages: tuple[Stage, ...]
    microbatches: tuple[MicroBatch, ...]
    lanes: tuple[tuple[Action, ...], ...]
    table: Table = field(
        init=False, repr=False, compare=False
    )  # the same, as columns of numbers

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", check(self))

    @property
    def ranks(self) -> int:
        """How many workers."""
        return len(self.lanes)

    @property
    def parts(self) -> int:
        """How many pieces the model is cut into."""
        return 1 + max(stage.part for stage in self.stages)

    @property
    def actions(self) -> int:
        """How many things are done in all."""
        return len(self.table)

    @property
    def slices(self) -> int:
        """The most slices a micro-batch has."""
        return max(microbatch.slices for microbatch in self.microbatches)

    def rank_of(self, action: Action) -> int:
        """The rank that runs an action."""
        return self.stages[action.stage].rank

    def span(self, action: Action) -> tuple[int, int]:
        """The tokens an action works on: the first, and the one after the last."""
        return self.microbatches[action.microbatch].span(action.slice)


def schedule_of(
    stages: Sequence[Stage],
    microbatches: Sequence[MicroBatch],
    lanes: Sequence[Sequence[Action]],
) -> Schedule:
    """A schedule from lists."""
    return Schedule(tuple(stages), tuple(microbatches), tuple(map(tuple, lanes)))
