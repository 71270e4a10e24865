"""Deals the packed documents of a step out to micro-batches, so that all of them take about the same time.

    as read    mb 0 | aaaaaaaa bbbbbbbb      two documents of 8 tokens: 72 pairs of a query and a key
               mb 1 | c d e f g h i ... r    sixteen documents of 1 token: 16 pairs
    dealt      mb 0 | aaaaaaaa c d e ...     documents move whole, so that all micro-batches have
               mb 1 | bbbbbbbb j k l ...     the same work, not the same number of tokens

A token of a long document attends to more keys than one of a short document, so rows of equal length take different
times. A pipeline then waits for its slowest micro-batch once on every rank, and copies wait for the slowest copy.

Each document, the longest first, goes to the micro-batch with the least work. Then each micro-batch, the longest first,
goes to the copy with the least work. In a copy the short ones come first and last, where the other ranks wait for them,
or they are in ascending order. The rows may also stay together and only change places. A small simulation of the
schedule decides, and the rows as they were read are one of its choices, so no step gets slower in it. All work is
counted in integers, so that every rank finds the same packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from penstock.ir.action import OP_CODES, Op
from penstock.ir.schedule import Schedule
from penstock.schedules.coverage import microbatches_by_pipeline

# A pack has at most this many times the tokens of a micro-batch as read, because its
# activations need memory.
MAX_TOKENS_RATIO = 1.25

# A step with more actions would take too long to simulate before it runs.
MAX_SIMULATED_ACTIONS = 50_000
OP_WORK = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}

DocumentRows = Sequence[Sequence[int]]  # the tokens of each document, row by row


@dataclass(frozen=True, slots=True)
class DocumentWork:
    """The time of packed documents, counted in pairs of a query and a key."""

    token: int  # pairs that take as long as a token's matrices
    call: int  # pairs that take as long as attention's call for one document

    def of_document(self, tokens: int) -> int:
        """Return the work of one document whose attention runs by itself."""
        return tokens * self.token + tokens * (tokens + 1) // 2 + self.call

    def of_rows(self, rows: DocumentRows) -> int:
        """Return the work of a micro-batch of packed rows.

        Attention runs document by document, or with a mask over whole rows if that is quicker.
        """
        tokens = sum(rows[0])
        documents = [length for row in rows for length in row]
        one_by_one = sum(self.of_document(length) for length in documents)
        if all(row == rows[0] for row in rows):  # One call for all rows.
            one_by_one -= self.call * (len(documents) - len(rows[0]))
        masked = len(rows) * tokens * (self.token + tokens)
        return min(masked, one_by_one)


@dataclass(frozen=True, slots=True)
class Pack:
    """A micro-batch: the numbers of its documents in the order in which they are packed, and its work."""

    documents: tuple[int, ...]
    tokens: int
    work: int


@dataclass(frozen=True, slots=True)
class StepClock:
    """Times the steps of one schedule, for micro-batches of different work."""

    pipelines: tuple[tuple[int, ...], ...]  # the micro-batches of each copy
    ranks: tuple[int, ...]  # of each action, in an order in which all can run
    needs: tuple[tuple[int, ...], ...]  # earlier actions that each one waits for
    microbatches: tuple[int, ...]  # of each action
    shares: tuple[int, ...]  # of a micro-batch's work that each action does

    def time(self, works: Sequence[int]) -> int:
        """Return the time of a step whose micro-batches have this work. Messages take no time."""
        ends = [0] * len(self.ranks)
        free = [0] * (max(self.ranks) + 1)
        rows = zip(self.ranks, self.needs, self.microbatches, self.shares, strict=True)
        for number, (rank, needs, microbatch, share) in enumerate(rows):
            start = free[rank]
            for needed in needs:
                start = max(start, ends[needed])
            free[rank] = ends[number] = start + share * works[microbatch]
        return max(free)


def step_clock(
    schedule: Schedule, partition: Sequence[int], shards: int = 1
) -> StepClock | None:
    """Return a clock for the steps of a schedule; None if it is too large to be simulated in every step.

    partition: the layers of each part. A part without layers counts as one.
    shards: schedules that run at the same time, each with its own micro-batches.
    """
    table = schedule.table
    if len(table) * shards > MAX_SIMULATED_ACTIONS:
        return None
    order = table.order.tolist()
    place = {number: index for index, number in enumerate(order)}
    op_work = {code: OP_WORK[op] for op, code in OP_CODES.items()}
    most_slices = schedule.slices
    ranks: list[int] = []
    needs: list[tuple[int, ...]] = []
    microbatches: list[int] = []
    shares: list[int] = []
    for shard in range(shards):
        first = shard * len(order)
        for number in order:
            stage = schedule.stages[int(table.stage[number])]
            microbatch = int(table.microbatch[number])
            slices = schedule.microbatches[microbatch].slices
            layers = max(1, partition[stage.part])
            ranks.append(shard * schedule.ranks + stage.rank)
            earlier = [one for one in table.needs[number].tolist() if one >= 0]
            needs.append(tuple(first + place[one] for one in earlier))
            microbatches.append(shard * len(schedule.microbatches) + microbatch)
            work = op_work[int(table.op[number])] * layers
            shares.append(work * most_slices // slices)
    pipelines = [
        tuple(shard * len(schedule.microbatches) + number for number in own)
        for shard in range(shards)
        for own in microbatches_by_pipeline(schedule)
    ]
    return StepClock(
        tuple(pipelines), tuple(ranks), tuple(needs), tuple(microbatches), tuple(shares)
    )


def deal_documents(
    rows: DocumentRows, clock: StepClock, work: DocumentWork, least_tokens: int = 1
) -> tuple[Pack, ...] | None:
    """Return the documents of each micro-batch, or None if the rows should stay as they are.

    rows: the lengths of all documents of a pass, row by row. Documents are numbered in this order.
    clock: times the steps of the schedule.
    least_tokens: the least tokens of a micro-batch, because it is cut into slices.
    """
    count = sum(len(pipeline) for pipeline in clock.pipelines)
    as_read = works_of_rows(rows, count, work)
    lengths = [length for row in rows for length in row]
    most_tokens = int(MAX_TOKENS_RATIO * sum(lengths) / count)
    best = None
    least = clock.time(as_read)
    for packs in (
        _make_packs(lengths, count, work, most_tokens),
        _packs_of_rows(rows, count, work),
    ):
        if packs is None or min(one.tokens for one in packs) < least_tokens:
            continue
        for placed in _placed_packs(packs, clock.pipelines):
            time = clock.time([pack.work for pack in placed])
            if time < least:
                best = placed
                least = time
    return best


def works_of_rows(rows: DocumentRows, count: int, work: DocumentWork) -> list[int]:
    """Return the work of each of `count` micro-batches with the rows as they were read."""
    each = len(rows) // count
    return [
        work.of_rows(rows[place * each : (place + 1) * each]) for place in range(count)
    ]


def _packs_of_rows(rows: DocumentRows, count: int, work: DocumentWork) -> list[Pack]:
    """Return a pack for each micro-batch as it was read."""
    ends = list(accumulate(len(row) for row in rows))
    each = len(rows) // count
    packs = []
    first = 0
    for place in range(count):
        own = rows[place * each : (place + 1) * each]
        end = ends[(place + 1) * each - 1]
        lengths = [length for row in own for length in row]
        packs.append(
            Pack(tuple(range(first, end)), sum(lengths), work.of_rows([lengths]))
        )
        first = end
    return packs


def _make_packs(
    lengths: Sequence[int], count: int, work: DocumentWork, most_tokens: int
) -> list[Pack] | None:
    """Put each document, the longest first, into the pack with the least work that has room for it.

    Returns None if no pack has room for a document.
    """
    members: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    works = [0] * count
    by_work = [(0, place) for place in range(count)]
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        length = lengths[number]
        passed_over = []
        place = heappop(by_work)[1]
        while tokens[place] + length > most_tokens:
            if not by_work:
                return None
            passed_over.append((works[place], place))
            place = heappop(by_work)[1]
        members[place].append(number)
        tokens[place] += length
        works[place] += work.of_document(length)
        for entry in (*passed_over, (works[place], place)):
            heappush(by_work, entry)
    packs = []
    for own in members:
        own.sort()  # In a pack the documents keep the order in which they were read.
        own_lengths = [lengths[number] for number in own]
        total = work.of_rows([own_lengths])
        packs.append(Pack(tuple(own), sum(own_lengths), total))
    return packs


def _placed_packs(
    packs: Sequence[Pack], pipelines: Sequence[Sequence[int]]
) -> Iterator[tuple[Pack, ...]]:
    """Yield the packs in the order of their micro-batches: copies get equal work.

    In a copy the short packs run first and last, or all are in ascending order.
    """
    own: list[list[Pack]] = [[] for _ in pipelines]
    totals = [(0, copy) for copy in range(len(pipelines))]
    for pack in sorted(packs, key=lambda one: -one.work):
        total, copy = heappop(totals)
        own[copy].append(pack)
        if len(own[copy]) < len(pipelines[copy]):
            heappush(totals, (total + pack.work, copy))
    for short_ones_last in (True, False):
        placed: dict[int, Pack] = {}
        for pipeline, members in zip(pipelines, own, strict=True):
            order = sorted(members, key=lambda one: one.work)
            if short_ones_last:
                order = [*order[::2], *order[1::2][::-1]]
            placed.update(zip(pipeline, order, strict=True))
        yield tuple(placed[place] for place in sorted(placed))
