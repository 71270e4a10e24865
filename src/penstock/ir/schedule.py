"""A schedule is three tables: where each stage lives, which stages each
micro-batch visits, and in what order each rank acts.

    stages          microbatches              lanes
    stage  rank part   mb  path   tokens cuts    rank
      0     0    0      0  0 1 2  1024  0 512 1024   0 | 0F0 0F0.1 0F1 ...
      1     1    1      1  0 2    1024  0 1024       1 | 1F0 ...
      2     2    2                                   2 | 2F0 ...

Waves and interleaving put several parts on a rank. Replicas (data parallelism, Chimera's two
directions) are several stages of one part. A path may skip parts, and cuts make token slices.
Nothing else is stored: the simulator computes the idle time, and `lower` adds the sends and
receives. `penstock.ir.needs` has the dependencies, and `penstock.ir.check` decides which
tables are legal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.errors import ShapeError
from penstock.ir.action import WEIGHTS, Action
from penstock.ir.check import check
from penstock.ir.table import Table


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the model on a rank."""

    rank: int
    part: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The stages that a micro-batch visits, in order, and the token boundaries of its slices.

    Without cuts, it is a single slice.
    """

    path: tuple[int, ...]
    tokens: int = 1
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", self.cuts or (0, self.tokens))

    @property
    def slices(self) -> int:
        """The number of slices."""
        return max(len(self.cuts) - 1, 1)

    def span(self, piece: int) -> tuple[int, int]:
        """The first token of a slice, and the token after its last."""
        return self.cuts[piece], self.cuts[piece + 1]


def stretch(microbatch: MicroBatch, tokens: int) -> MicroBatch:
    """The same micro-batch for a sequence of `tokens` tokens, cut in the same proportions.

    >>> stretch(MicroBatch((0,), tokens=8, cuts=(0, 4, 6, 8)), 1024).cuts
    (0, 512, 768, 1024)
    """
    if tokens == microbatch.tokens:
        return microbatch
    if tokens < microbatch.slices:
        raise ShapeError(
            f"{tokens} tokens cannot be cut into {microbatch.slices} slices; "
            f"give at most {tokens}"
        )
    half = microbatch.tokens // 2
    cuts = [(cut * tokens + half) // microbatch.tokens for cut in microbatch.cuts]
    if any(begin >= end for begin, end in pairwise(cuts)):
        raise ShapeError(
            f"a sequence of {tokens} tokens has an empty slice when it is cut in the "
            f"proportions of {microbatch.cuts}; "
            f"{microbatch.tokens} tokens or a multiple would do"
        )
    return MicroBatch(microbatch.path, tokens, tuple(cuts))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The three tables, frozen and checked. Every `Schedule` object can run.

    >>> from penstock.ir import MicroBatch, Schedule, Stage, parse_action
    >>> lane = tuple(parse_action(text) for text in "0F0 0B0".split())
    >>> Schedule((Stage(0, 0),), (MicroBatch((0,)),), (lane,)).ranks
    1
    """

    stages: tuple[Stage, ...]
    microbatches: tuple[MicroBatch, ...]
    lanes: tuple[tuple[Action, ...], ...]
    # The actions as columns of numbers.
    table: Table = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", check(self))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.lanes)

    @property
    def parts(self) -> int:
        """The number of parts of the model."""
        return 1 + max(stage.part for stage in self.stages)

    @property
    def actions(self) -> int:
        """The number of actions."""
        return len(self.table)

    @property
    def slices(self) -> int:
        """The largest number of slices of a micro-batch."""
        return max(microbatch.slices for microbatch in self.microbatches)

    @property
    def is_split(self) -> bool:
        """Whether some backward is split into I and W."""
        return bool((self.table.kind == WEIGHTS).any())

    def rank_of(self, action: Action) -> int:
        """The rank that runs an action."""
        return self.stages[action.stage].rank

    def span(self, action: Action) -> tuple[int, int]:
        """The first token that an action works on, and the token after its last."""
        return self.microbatches[action.microbatch].span(action.slice)


def schedule_of(
    stages: Sequence[Stage],
    microbatches: Sequence[MicroBatch],
    lanes: Sequence[Sequence[Action]],
) -> Schedule:
    """Build a schedule from lists."""
    return Schedule(tuple(stages), tuple(microbatches), tuple(map(tuple, lanes)))
