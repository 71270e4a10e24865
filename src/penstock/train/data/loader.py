"""Batches from a corpus: shuffled, dealt out to micro-batches, and resumed exactly where they stopped.

    position   0   1   2   3   4   5   6   7 │ 8 …          one count over all epochs, which is the whole state
    sequence   7   2   9   4   0   5   1   8 │ …            `shuffled`
               └ mb 0 ┘└ mb 1 ┘└ mb 2 ┘└ mb 3 ┘             a step: rows x micro-batches x copies x passes
               └── copy 0 ────┘└── copy 1 ────┘             every copy and every shard has its own sequences

The order does not depend on how a step is divided: with other ranks, micro-batches or copies,
a step sees the same sequences. Labels are shifted before anything is cut. Where documents
are kept apart, the last word of a document has nothing to predict. Of a conversation only the
answers are labels. Every step is cut for its documents into slices that take the same time.
The work is counted in integers, so that every rank finds the same cuts without asking another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import RunError
from penstock.ir.schedule import Schedule
from penstock.models import shift_labels
from penstock.plan.slices import equal_work_cuts
from penstock.runtime import Batch
from penstock.runtime.batch import IGNORED_LABEL
from penstock.train.data.chat import BEGINS, LEARNED, SECOND
from penstock.train.data.corpus import Corpus, SequenceRef
from penstock.train.data.masking import Masking

LoaderState: TypeAlias = dict[str, int | str]
FILLER = SequenceRef(-1)  # a row that does not count


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How a step is divided: `passes` through a pipeline of `microbatches` of `rows` rows each."""

    rows: int
    microbatches: int  # of the schedule, over all copies
    passes: int = 1
    # The micro-batches whose tokens this rank reads; None means all.
    wanted: frozenset[int] | None = None
    shards: int = 1  # pipelines that run at the same time, each with its own sequences
    shard: int = 0  # the number of this pipeline among the shards

    @property
    def each(self) -> int:
        """Sequences per pass of this shard."""
        return self.rows * self.microbatches

    @property
    def sequences(self) -> int:
        """Sequences per step, over all shards."""
        return self.each * self.shards * self.passes

    def first_row(self, turn: int) -> int:
        """Return the first row of this shard in a pass, counted over all rows of the step."""
        return (turn * self.shards + self.shard) * self.each


def wanted_by(schedule: Schedule, rank: int, separate: bool = False) -> frozenset[int]:
    """Return the micro-batches whose tokens a rank reads.

    These are the ones that begin or end on the rank. With `separate`, every stage must know
    where documents begin, so they are all that visit the rank.
    """
    wanted = set()
    for number, microbatch in enumerate(schedule.microbatches):
        path = microbatch.path
        readers = path if separate else (path[0], path[-1])
        if any(schedule.stages[stage].rank == rank for stage in readers):
            wanted.add(number)
    return frozenset(wanted)


def starts_in(tokens: Tensor, end: int) -> Tensor:
    """Return the start of each token's document in packed rows; `end` ends a document.

    >>> starts_in(torch.tensor([[5, 0, 6, 7, 0, 8]]), end=0).tolist()
    [[0, 0, 2, 2, 2, 5]]
    """
    after = (tokens == end) * torch.arange(1, tokens.shape[1] + 1)
    return torch.nn.functional.pad(after[:, :-1], (1, 0)).cummax(1).values


class Rows(NamedTuple):
    """Sequences as columns, each (rows, tokens): what a model reads, and what it has to say."""

    tokens: Tensor
    labels: Tensor
    starts: Tensor | None  # of each token's document, if documents are kept apart
    types: Tensor | None  # of the segments; None if all are of type 0

    @property
    def counted(self) -> int:
        """How many labels count."""
        return int((self.labels != IGNORED_LABEL).sum())


def read_rows(corpus: Corpus, sequences: Sequence[SequenceRef], seed: int) -> Rows:
    """Read sequences. A filler has the tokens of the first one held out, and no labels that count.

    A sequence has one more token than it uses: the label of its last one.
    """
    fillers = [one == FILLER for one in sequences]
    numbers = [corpus.trained if one == FILLER else one.sequence for one in sequences]
    tokens = _stack(corpus.sequence, numbers, corpus.length)
    learned = starts = types = None
    if corpus.end is not None:
        starts = starts_in(tokens, corpus.end)
    if corpus.marks is not None:
        marks = _stack(corpus.sequence_marks, numbers, corpus.length)
        learned = (marks & int(LEARNED)) > 0
        if corpus.separate:
            begins = (marks & int(BEGINS)) > 0
            starts = (begins * torch.arange(begins.shape[1])).cummax(1).values
        if corpus.typed:
            types = ((marks & int(SECOND)) > 0).long()
    labels = shift_labels(tokens, starts)
    if corpus.masking is not None:
        tokens, labels = _mask(corpus.masking, tokens, sequences, seed)
    elif learned is not None:
        labels[:, :-1].masked_fill_(~learned[:, 1:], IGNORED_LABEL)
    labels[fillers] = IGNORED_LABEL
    return Rows(
        tokens[:, :-1],
        labels[:, :-1],
        None if starts is None else starts[:, :-1],
        None if types is None else types[:, :-1],
    )


def _stack(
    read: Callable[[int], NDArray[Any]], numbers: Sequence[int], length: int
) -> Tensor:
    """Some sequences with the token after each."""
    rows = np.array([read(number) for number in numbers], dtype=np.int64)
    return torch.from_numpy(rows.reshape(-1, length + 1))


def _mask(
    masking: Masking, tokens: Tensor, sequences: Sequence[SequenceRef], seed: int
) -> tuple[Tensor, Tensor]:
    """Sequences as a model sees them, and as labels the words that it has to guess."""
    seen = tokens.clone()
    labels = torch.full_like(tokens, IGNORED_LABEL)
    for row, one in enumerate(sequences):
        if one != FILLER:
            words = tokens[row, :-1]
            masked, chosen = masking.mask(words.numpy(), seed, *one)
            seen[row, :-1] = torch.from_numpy(masked)
            labels[row, :-1] = words.where(torch.from_numpy(chosen), IGNORED_LABEL)
    return seen, labels


@dataclass(frozen=True, slots=True)
class DocumentCutter:
    """Cuts the micro-batches of each step so that their slices take the same time, for the documents they hold."""

    slices: tuple[int, ...]  # of each micro-batch, as the schedule has them
    token_work: int  # the work of a token, counted in keys that it attends to
    step: int = 1  # tokens that cuts are multiples of

    def cut(self, microbatch: int, starts: Tensor) -> tuple[int, ...]:
        """Return the cuts of a micro-batch, given the start of each token's document."""
        slices = self.slices[microbatch]
        return equal_work_cuts(starts.numpy(), slices, self.token_work, self.step)


class Loader:
    """Reads a corpus step by step; it can stop and resume anywhere."""

    def __init__(
        self,
        corpus: Corpus,
        shape: BatchShape,
        seed: int,
        device: torch.device | None = None,
        cutter: DocumentCutter | None = None,
    ) -> None:
        self.corpus = corpus
        self.shape = shape
        self.cutter = cutter
        self.seed = seed
        self.device = device or torch.device("cpu")
        self.seen = 0  # sequences read so far
        # Batches that were read ahead, and how many sequences come before them.
        self.prepared: tuple[int, list[Batch]] | None = None

    @property
    def epoch(self) -> float:
        """How often the whole corpus was read."""
        return self.seen / self.corpus.trained

    def step(self) -> list[Batch]:
        """Return the batches of the next step, one per pass; the loss is a mean over all."""
        self.prepare()
        assert self.prepared is not None
        _, batches = self.prepared
        self.prepared = None
        self.seen += self.shape.sequences
        return batches

    def prepare(self) -> None:
        """Read the batches of the next step already, while a GPU still computes another one."""
        if self.prepared is not None and self.prepared[0] == self.seen:
            return
        places = range(self.seen, self.seen + self.shape.sequences)
        sequences = [self.corpus.sequence_at(place, self.seed) for place in places]
        self.prepared = (self.seen, self._batches(sequences))

    def evaluation(self, batches: int) -> list[Batch]:
        """Return passes over held-out sequences, as many as `batches` steps have, or all.

        They are the same every time, and each sequence appears at most once. Rows whose
        labels do not count fill up the last pass. The losses of all passes add up to the
        mean over all sequences. Without held-out sequences there are no passes.
        """
        first = self.corpus.trained
        numbers = range(first, first + self.examined(batches))
        return self._batches([SequenceRef(number) for number in numbers])

    def examined(self, batches: int) -> int:
        """Count the held-out sequences that an evaluation of `batches` batches reads."""
        return min(batches * self.shape.sequences, self.corpus.held_out)

    def _batches(self, sequences: list[SequenceRef]) -> list[Batch]:
        """Batches of these sequences, one per pass; a loss is divided by the labels of all of them, on all shards."""
        labels = len(sequences) * self.corpus.length
        each = self.shape.each
        every = each * self.shape.shards
        sequences = sequences + [FILLER] * (-len(sequences) % every)
        first = self.shape.shard * each
        batches = [
            self._batch(sequences[begin : begin + each])
            for begin in range(first, len(sequences), every)
        ]
        if not self.corpus.even:
            labels = sum(sum(batch.counts) for batch in batches)
            for place, one in enumerate(sequences):
                if place // each % self.shape.shards != self.shape.shard:
                    labels += read_rows(self.corpus, [one], self.seed).counted
        return [replace(batch, valid=max(labels, 1)) for batch in batches]

    def _batch(self, sequences: list[SequenceRef]) -> Batch:
        """One pass of this shard. Micro-batches that this rank does not read have only a shape."""
        rows = self.shape.rows
        numbers = range(self.shape.microbatches)
        wanted = numbers if self.shape.wanted is None else sorted(self.shape.wanted)
        places = [number * rows + row for number in wanted for row in range(rows)]
        if self.corpus.even:
            sequences = [sequences[place] for place in places]
            places = list(range(len(sequences)))
        read = read_rows(self.corpus, sequences, self.seed)
        columns = torch.stack([one for one in read[:3] if one is not None])
        moved = self._move(columns[:, places])
        found = zip(*(torch.split(column, rows) for column in moved), strict=True)
        zero = torch.zeros((), dtype=torch.long, device=self.device)
        blank = (zero.expand(rows, self.corpus.length),) * len(columns)
        dealt = [next(found) if number in wanted else blank for number in numbers]
        inputs, labels, *starts = zip(*dealt, strict=True)
        if self.corpus.even:
            return Batch(inputs, labels, 0)
        counted = (read.labels != IGNORED_LABEL).sum(1).view(-1, rows).sum(1)
        counts = tuple(counted.tolist())
        batch = replace(Batch(inputs, labels, 0, *starts), counts=counts)
        if self.cutter is not None and read.starts is not None:
            cuts = map(self.cutter.cut, numbers, torch.split(read.starts, rows))
            batch = replace(batch, cuts=tuple(cuts))
        if read.types is not None:
            types = torch.split(self._move(read.types), rows)
            batch = replace(batch, named=tuple({"types": own} for own in types))
        return batch

    def _move(self, rows: Tensor) -> Tensor:
        """Rows on the loader's device. The host does not wait for a GPU, which may still update the weights."""
        rows = rows.contiguous()
        if self.device.type == "cuda":
            rows = rows.pin_memory()
        return rows.to(self.device, non_blocking=True)

    # ------------------------------------------------------------ stopping and going on
    def state(self) -> LoaderState:
        """Return everything that is needed to resume."""
        return {
            "seen": self.seen,
            "seed": self.seed,
            "length": self.corpus.length,
            "digest": self.corpus.digest,
        }

    def resume(self, state: LoaderState) -> None:
        """Continue where another loader stopped, with the same data, seed and lengths."""
        check_same_data(state, self.corpus, self.seed)
        self.seen = int(state["seen"])


def check_same_data(state: LoaderState, corpus: Corpus, seed: int) -> None:
    """Raise RunError if a loader with this state read other sequences or another order."""
    for key, ours in (
        ("digest", corpus.digest),
        ("seed", seed),
        ("length", corpus.length),
    ):
        if state.get(key) != ours:
            raise RunError(
                f"the checkpoint was trained on other data: its {key} is "
                f"{state.get(key)}, here it is {ours}\n"
                "  give the same text, run.seed and data.seq_len; to train these weights on "
                "other text, export them and start from them with model.path"
            )
