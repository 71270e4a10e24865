"""Batches out of a corpus: shuffled, dealt out to micro-batches, and going on exactly where they stopped.

    position   0   1   2   3   4   5   6   7 │ 8 …          one count over all epochs, and that is the whole state
    sequence   7   2   9   4   0   5   1   8 │ …            `shuffled`
               └ mb 0 ┘└ mb 1 ┘└ mb 2 ┘└ mb 3 ┘             a step: rows x micro-batches x copies x passes
               └── copy 0 ────┘└── copy 1 ────┘             so every copy has its own sequences, and every shard

The order does not depend on how a step is cut: other ranks, micro-batches or copies see the same steps. Labels are
shifted before anything is cut; where documents are told apart, the last word of one has nothing to guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.ir.schedule import Schedule
from penstock.models import shift_labels
from penstock.runtime import Batch
from penstock.runtime.batch import IGNORED_LABEL
from penstock.train.data.corpus import Corpus
from penstock.train.data.order import shuffled

LoaderState: TypeAlias = dict[str, int | str]
FILLER = -1  # in the place of a sequence: a row that does not count


@dataclass(frozen=True, slots=True)
class Deal:
    """How a step is cut: `passes` through a pipeline of `microbatches`, each of so many rows."""

    rows: int
    microbatches: int  # of the schedule, all copies together
    passes: int = 1
    wanted: frozenset[int] | None = (
        None  # micro-batches whose tokens this rank looks at; None: all
    )
    shards: int = (
        1  # pipelines that do the same at the same time, each with sequences of its own
    )
    shard: int = 0  # which of them this is

    @property
    def each(self) -> int:
        """Sequences of a pass of this shard."""
        return self.rows * self.microbatches

    @property
    def sequences(self) -> int:
        """Of a step, of all shards."""
        return self.each * self.shards * self.passes


def wanted_by(schedule: Schedule, rank: int, separate: bool = False) -> frozenset[int]:
    """Micro-batches that begin or end on a rank, the others need no data there; or, where all that come by must know
    their documents, those that come by."""
    looked = (
        (n, m.path if separate else (m.path[0], m.path[-1]))
        for n, m in enumerate(schedule.microbatches)
    )
    return frozenset(
        number
        for number, stages in looked
        if any(schedule.stages[s].rank == rank for s in stages)
    )


def starts_in(tokens: Tensor, end: int) -> Tensor:
    """Of each token of packed rows the first one of its document; `end` is the last one of each.

    >>> starts_in(torch.tensor([[5, 0, 6, 7, 0, 8]]), end=0).tolist()
    [[0, 0, 2, 2, 2, 5]]
    """
    after = (tokens == end) * torch.arange(1, tokens.shape[1] + 1)
    return torch.nn.functional.pad(after[:, :-1], (1, 0)).cummax(1).values


class Loader:
    """Step after step of a corpus; it can be stopped and taken up anywhere."""

    def __init__(
        self, corpus: Corpus, deal: Deal, seed: int, device: torch.device | None = None
    ) -> None:
        self.corpus, self.deal, self.seed = corpus, deal, seed
        self.device = device or torch.device("cpu")
        self.seen = 0  # sequences

    @property
    def epoch(self) -> float:
        """How often everything was seen."""
        return self.seen / self.corpus.trained

    def step(self) -> list[Batch]:
        """The batches of the next optimizer step, a pass each; the loss is a mean over all of them."""
        passes = [self._numbers(turn) for turn in range(self.deal.passes)]
        valid = self._valid(number for numbers in passes for number in numbers)
        self.seen += self.deal.sequences
        return [self._batch(self._own(numbers), valid) for numbers in passes]

    def _own(self, numbers: list[int]) -> list[int]:
        """Of the sequences of a pass those of this shard."""
        each = self.deal.each
        return numbers[self.deal.shard * each : (self.deal.shard + 1) * each]

    def _numbers(self, turn: int) -> list[int]:
        each = self.deal.each * self.deal.shards
        first = self.seen + turn * each
        return [
            shuffled(place, self.corpus.trained, self.seed)
            for place in range(first, first + each)
        ]

    def evaluation(self, batches: int) -> list[Batch]:
        """Held-out sequences, the same every time and each at most once: as many as so many steps have, or all.

        They come in passes as a step does. Where they do not fill the last pass, rows whose labels do not count do. The
        losses of all passes add up to the mean over all sequences. Without held-out sequences there is no pass.
        """
        each = self.deal.each * self.deal.shards
        count = self.examined(batches)
        if not count:
            return []
        numbers = list(range(self.corpus.trained, self.corpus.trained + count))
        valid = self._valid(numbers)
        passes = [numbers[begin : begin + each] for begin in range(0, count, each)]
        passes[-1] += [FILLER] * (each - len(passes[-1]))
        return [self._batch(self._own(some), valid) for some in passes]

    def examined(self, batches: int) -> int:
        """How many held-out sequences an evaluation of so many batches sees."""
        return min(batches * self.deal.sequences, self.corpus.held_out)

    def _batch(self, numbers: list[int], valid: int) -> Batch:
        """A pass: the sequences of each micro-batch, or of those that others look after only the shape."""
        rows, length = self.deal.rows, self.corpus.length
        dealt = []
        for number in range(self.deal.microbatches):
            if self.deal.wanted is None or number in self.deal.wanted:
                dealt.append(self._rows(numbers[number * rows : (number + 1) * rows]))
            else:
                blank = torch.zeros((), dtype=torch.long, device=self.device).expand(
                    rows, length
                )
                dealt.append((blank, blank, blank))
        inputs, labels, starts = zip(*dealt, strict=True)
        return Batch(inputs, labels, valid, () if self.corpus.end is None else starts)

    def _valid(self, numbers: Iterable[int]) -> int:
        """Labels that count in these sequences: all, but for the last word of a document, where that is known."""
        end, sequences = self.corpus.end, list(numbers)
        ends = (
            0
            if end is None
            else sum(
                int((self.corpus.sequence(one)[:-1] == end).sum()) for one in sequences
            )
        )
        return max(len(sequences) * self.corpus.length - ends, 1)

    def _rows(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, labels, where documents start: a sequence has one token more than it uses, the label of its last."""
        found = [
            self.corpus.sequence(self.corpus.trained if number == FILLER else number)
            for number in numbers
        ]
        whole = torch.from_numpy(np.stack(found).astype(np.int64))
        starts = None if self.corpus.end is None else starts_in(whole, self.corpus.end)
        targets = shift_labels(whole, starts)
        targets[[number == FILLER for number in numbers]] = IGNORED_LABEL
        made = (whole, targets, whole if starts is None else starts)
        inputs, labels, first = (
            one[:, :-1].contiguous().to(self.device) for one in made
        )
        return inputs, labels, first

    # ------------------------------------------------------------ stopping and going on
    def state(self) -> LoaderState:
        """All there is to know."""
        return {
            "seen": self.seen,
            "seed": self.seed,
            "length": self.corpus.length,
            "digest": self.corpus.digest,
        }

    def resume(self, state: LoaderState) -> None:
        """Goes on where another stopped; other data, another seed or other lengths would be another order."""
        check_same_data(state, self.corpus, self.seed)
        self.seen = int(state["seen"])


def check_same_data(state: LoaderState, corpus: Corpus, seed: int) -> None:
    """Raises if a loader with this state has seen other sequences, or in another order."""
    for key, ours in (
        ("digest", corpus.digest),
        ("seed", seed),
        ("length", corpus.length),
    ):
        if state.get(key) != ours:
            raise RunError(
                f"the checkpoint was trained on other data: its {key} is {state.get(key)}, here it is {ours}\n"
                "  give the same text, run.seed and data.tokens; to train these weights on other text, export them "
                "and start from them with model.weights"
            )
