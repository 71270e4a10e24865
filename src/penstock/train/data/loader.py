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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
from penstock.train.data.corpus import Corpus, Ticket

LoaderState: TypeAlias = dict[str, int | str]
FILLER = Ticket(-1)  # a row that does not count


@dataclass(frozen=True, slots=True)
class Deal:
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
        deal: Deal,
        seed: int,
        device: torch.device | None = None,
        cutter: DocumentCutter | None = None,
    ) -> None:
        self.corpus = corpus
        self.deal = deal
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
        self.seen += self.deal.sequences
        return batches

    def prepare(self) -> None:
        """Read the batches of the next step already, while a GPU still computes another one."""
        if self.prepared is not None and self.prepared[0] == self.seen:
            return
        passes = [self._numbers(turn) for turn in range(self.deal.passes)]
        valid = self._valid(number for numbers in passes for number in numbers)
        batches = [self._batch(self._own(numbers), valid) for numbers in passes]
        self.prepared = (self.seen, batches)

    def _own(self, numbers: list[Ticket]) -> list[Ticket]:
        """The sequences of a pass that belong to this shard."""
        each = self.deal.each
        return numbers[self.deal.shard * each : (self.deal.shard + 1) * each]

    def _numbers(self, turn: int) -> list[Ticket]:
        each = self.deal.each * self.deal.shards
        first = self.seen + turn * each
        return [
            self.corpus.ticket(place, self.seed) for place in range(first, first + each)
        ]

    def evaluation(self, batches: int) -> list[Batch]:
        """Return passes over held-out sequences, as many as `batches` steps have, or all.

        They are the same every time, and each sequence appears at most once. Rows whose
        labels do not count fill up the last pass. The losses of all passes add up to the
        mean over all sequences. Without held-out sequences there are no passes.
        """
        each = self.deal.each * self.deal.shards
        count = self.examined(batches)
        if not count:
            return []
        first = self.corpus.trained
        numbers = [Ticket(number) for number in range(first, first + count)]
        valid = self._valid(numbers)
        passes = [numbers[begin : begin + each] for begin in range(0, count, each)]
        passes[-1] += [FILLER] * (each - len(passes[-1]))
        return [self._batch(self._own(members), valid) for members in passes]

    def batch_of(self, sequences: Iterable[int]) -> Batch:
        """Return a batch of these sequences, one pass of this shard."""
        tickets = [Ticket(number) for number in sequences]
        return self._batch(tickets, self._valid(tickets))

    def examined(self, batches: int) -> int:
        """Count the held-out sequences that an evaluation of `batches` batches reads."""
        return min(batches * self.deal.sequences, self.corpus.held_out)

    def _batch(self, numbers: list[Ticket], valid: int) -> Batch:
        """One pass. Micro-batches that this rank does not read have only a shape."""
        rows = self.deal.rows
        microbatches = range(self.deal.microbatches)
        wanted = microbatches if self.deal.wanted is None else self.deal.wanted
        zero = torch.zeros((), dtype=torch.long, device=self.device)
        blank = (zero.expand(rows, self.corpus.length),) * 3
        read: list[Ticket] = []
        for number in sorted(wanted):
            read += numbers[number * rows : (number + 1) * rows]
        columns = self._rows(read) if read else ()
        split = (torch.split(column, rows) for column in columns)
        found = iter(zip(*split, strict=True))
        dealt = [next(found) if number in wanted else blank for number in microbatches]
        inputs, labels, starts = zip(*dealt, strict=True)
        if not self.corpus.apart:
            even = self.corpus.marks is None and self.corpus.masking is None
            counts = () if even else self._counts(numbers)
            return Batch(inputs, labels, valid, counts=counts)
        cuts = self._cuts(numbers)
        counts = self._counts(numbers)
        named = self._named(numbers)
        return Batch(inputs, labels, valid, starts, cuts, counts, named)

    def _named(self, numbers: list[Ticket]) -> tuple[dict[str, Tensor], ...]:
        """The types of the segments in each micro-batch of a pass; empty if all are of type 0."""
        if not self.corpus.typed:
            return ()
        types = self._used(((self._marks(numbers) & int(SECOND)) > 0).long())
        return tuple({"types": own} for own in torch.split(types, self.deal.rows))

    def _counts(self, numbers: list[Ticket]) -> tuple[int, ...]:
        """The labels that count in each micro-batch of a pass, also in those that this rank does not read."""
        rows = self.deal.rows
        counts = []
        for number in range(self.deal.microbatches):
            own = numbers[number * rows : (number + 1) * rows]
            counts.append(self._labels(one for one in own if one != FILLER))
        return tuple(counts)

    def _cuts(self, numbers: list[Ticket]) -> tuple[tuple[int, ...], ...]:
        """The cuts of all micro-batches of a pass, which every rank must know; empty without a cutter."""
        if self.cutter is None:
            return ()
        rows = self.deal.rows
        cuts = []
        for number in range(self.deal.microbatches):
            own = numbers[number * rows : (number + 1) * rows]
            cuts.append(self.cutter.cut(number, self._starts(own)))
        return tuple(cuts)

    def _starts(self, numbers: Sequence[Ticket]) -> Tensor:
        """The start of each token's document in some sequences."""
        starts = self._all_starts(numbers, self._tokens(numbers))
        assert starts is not None
        return starts[:, :-1]

    def _all_starts(self, numbers: Sequence[Ticket], tokens: Tensor) -> Tensor | None:
        """The start of each stored token's document in some sequences; None if documents are not kept apart."""
        if not self.corpus.apart:
            return None
        if self.corpus.end is not None:
            return starts_in(tokens, self.corpus.end)
        begins = (self._marks(numbers) & int(BEGINS)) > 0
        return (begins * torch.arange(begins.shape[1])).cummax(1).values

    def _valid(self, numbers: Iterable[Ticket]) -> int:
        """Count the labels by whose number a loss is divided."""
        return max(self._labels(numbers), 1)

    def _labels(self, numbers: Iterable[Ticket]) -> int:
        """Count the labels of these sequences, without the last word of each document."""
        end = self.corpus.end
        labels = 0
        for ticket in numbers:
            if self.corpus.masking is not None:
                labels += int(self._chosen(ticket).sum())
                continue
            if self.corpus.marks is not None:  # answers
                marks = self.corpus.sequence_marks(ticket.sequence)
                labels += int((marks[1:] & LEARNED).sum())
                continue
            labels += self.corpus.length
            if end is not None:
                words = self.corpus.sequence(ticket.sequence)[:-1]
                labels -= int((words == end).sum())
        return labels

    def _rows(self, numbers: Sequence[Ticket]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, labels and document starts of some sequences.

        A sequence has one more token than it uses: the label of its last one.
        """
        tokens = self._tokens(numbers)
        starts = self._all_starts(numbers, tokens)
        if self.corpus.masking is not None:
            tokens, labels = self._masked(numbers, tokens)
        else:
            labels = shift_labels(tokens, starts)
        if self.corpus.marks is not None and not self.corpus.has_segments:
            learned = (self._marks(numbers)[:, 1:] & int(LEARNED)) > 0
            labels[:, :-1].masked_fill_(~learned, IGNORED_LABEL)
        labels[[number == FILLER for number in numbers]] = IGNORED_LABEL
        columns = [tokens, labels] if starts is None else [tokens, labels, starts]
        used = self._used(torch.stack(columns))
        return used[0], used[1], used[0] if starts is None else used[2]

    def _chosen(self, ticket: Ticket) -> NDArray[np.bool_]:
        """Which words of a sequence a model has to guess."""
        assert self.corpus.masking is not None
        words = self.corpus.sequence(ticket.sequence)[:-1].astype(np.int64)
        return self.corpus.masking.chosen(words, self.seed, *ticket)

    def _masked(
        self, numbers: Sequence[Ticket], tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Some sequences as a model sees them, and as labels the words that it has to guess."""
        masking = self.corpus.masking
        assert masking is not None
        seen = tokens.clone()
        labels = torch.full_like(tokens, IGNORED_LABEL)
        for row, ticket in enumerate(numbers):
            if ticket == FILLER:
                continue
            words = self.corpus.sequence(ticket.sequence)[:-1].astype(np.int64)
            chosen = torch.from_numpy(self._chosen(ticket))
            labels[row, :-1] = tokens[row, :-1].where(chosen, IGNORED_LABEL)
            masked = masking.masked(words, self.seed, *ticket)
            seen[row, :-1] = torch.from_numpy(masked)
        return seen, labels

    def _tokens(self, numbers: Sequence[Ticket]) -> Tensor:
        """The stored tokens of some sequences; a filler has those of the first one held out."""
        sequences = [self.corpus.sequence(one) for one in self._stored(numbers)]
        return torch.from_numpy(np.stack(sequences).astype(np.int64))

    def _marks(self, numbers: Sequence[Ticket]) -> Tensor:
        """The marks of the stored tokens of some sequences."""
        marks = [self.corpus.sequence_marks(one) for one in self._stored(numbers)]
        return torch.from_numpy(np.stack(marks))

    def _stored(self, numbers: Sequence[Ticket]) -> list[int]:
        """The sequences to read; a filler reads the first one held out."""
        return [
            self.corpus.trained if one == FILLER else one.sequence for one in numbers
        ]

    def _used(self, rows: Tensor) -> Tensor:
        """Rows without their last column, on the loader's device.

        The host does not wait for a GPU, which may still update the weights.
        """
        used = rows[..., :-1].contiguous()
        if self.device.type == "cuda":
            used = used.pin_memory()
        return used.to(self.device, non_blocking=True)

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
                "  give the same text, run.seed and data.tokens; to train these weights on "
                "other text, export them and start from them with model.weights"
            )
