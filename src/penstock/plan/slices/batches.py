"""Which rows of a batch go through a pipeline together, and how their sequences are cut: both decided at once.

    8 rows     1 1 1 1 1 1 1 1      many small micro-batches fill the pipeline, but each pays for its launches
               2   2   2   2        fewer micro-batches with slices inside: `cut_batch_alike`, one choice for each
               4       4            number of rows that divides the batch
               3     3     2        any rows, each group with its own cuts: `cut_batch_freely`

A row profile says what a layer takes with each number of rows, and `best_cuts` and `best_batch` find the least latency
of all forwards and then all backwards through stages that take the mean time. A search simulates the choices in other
orders and with the stages as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cost.row_profiles import RowProfiles
from penstock.errors import ShapeError
from penstock.partition import even_partition
from penstock.plan.slices.cuts import Slicing, best_batch, best_cuts
from penstock.plan.slices.slice_times import SliceTimes
from penstock.plan.slices.stage_times import (
    Pipeline,
    even_times,
    mean_pipeline,
    pipeline_of,
)
from penstock.schedules.orders import loop_placement

# The most passes of one search for cuts.
MAX_BATCH_PASSES = 2_000


@dataclass(frozen=True, slots=True)
class CutRows:
    """A micro-batch of several rows, all cut at the same tokens."""

    rows: int
    cuts: tuple[int, ...]

    @property
    def slices(self) -> int:
        """The slices of each row."""
        return len(self.cuts) - 1


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The micro-batches of one step, and the latency of all forwards, then all backwards."""

    microbatches: tuple[CutRows, ...]
    latency: float
    bound: (
        float  # of the latency, for the same rows; below it only if the search stopped
    )

    @property
    def rows(self) -> int:
        """The rows of the largest micro-batch; of all of them if they are alike."""
        return max(microbatch.rows for microbatch in self.microbatches)

    @property
    def slices(self) -> int:
        """The slices of the micro-batch that has most."""
        return max(microbatch.slices for microbatch in self.microbatches)

    @property
    def alike(self) -> bool:
        """Whether all micro-batches have the same rows and cuts."""
        return len(set(self.microbatches)) == 1


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline that a batch goes through."""

    ranks: int
    tokens: int  # of a sequence
    profiles: RowProfiles
    partition: tuple[int, ...] = ()  # layers of each part; empty: as equal as possible
    granularity: int = 8  # tokens that all cuts are multiples of
    recompute: bool = False

    def pipeline(self, rows: int) -> Pipeline:
        """Return equal stages that take the mean time of these, with this many rows."""
        partition = self.partition or even_partition(self.profiles.layers, self.ranks)
        if len(partition) != self.ranks:
            raise ShapeError(
                f"the partition {partition} has {len(partition)} parts, "
                f"but there are {self.ranks} ranks; give each rank one part"
            )
        profile = self.profiles.at(rows)
        cost = profile.cost(partition, None, self.recompute, self.tokens)
        stages = loop_placement(self.ranks)
        pipeline = pipeline_of(stages, cost, self.tokens, self.granularity)
        return pipeline if pipeline.even else mean_pipeline(pipeline)


def cut_batch_alike(
    stages: Stages,
    batch: int,
    rows: Sequence[int] = (),
    limit: int | None = None,
) -> tuple[BatchChoice, ...]:
    """Return the best cuts for each number of rows that divides the batch, the fastest first.

    All micro-batches of a choice have the same rows and cuts, so that any schedule can run
    them. By default all numbers of rows are tried that divide the batch and are not more
    than twice the most that was measured. No sequence has more than `limit` slices.
    """
    _check_batch(batch, limit)
    choices = []
    for count in rows or _divisors(stages, batch):
        if batch % count:
            raise ShapeError(
                f"{batch} rows cannot be dealt out to micro-batches of {count} rows"
            )
        microbatches = batch // count
        pipeline = stages.pipeline(count)
        times = even_times(pipeline, microbatches)
        slicing = _best_within(times, stages.ranks, limit)
        group = CutRows(count, _in_tokens(slicing.lengths, pipeline.grain))
        choice = BatchChoice((group,) * microbatches, slicing.latency, slicing.bound)
        choices.append(choice)
    return tuple(sorted(choices, key=lambda choice: choice.latency))


def cut_batch_freely(
    stages: Stages, batch: int, rows: Sequence[int] = ()
) -> BatchChoice:
    """Return the best micro-batches of any rows and cuts, which need not be alike.

    By default the numbers of rows are those that were measured.
    """
    _check_batch(batch, None)
    counts = [count for count in rows or stages.profiles.rows if count <= batch]
    if not counts:
        raise ShapeError(
            f"a batch of {batch} rows has no micro-batches of {list(rows)} rows"
        )
    pipelines = {count: stages.pipeline(count) for count in counts}
    times = {count: even_times(pipeline) for count, pipeline in pipelines.items()}
    slicing = best_batch(times, batch, stages.ranks, MAX_BATCH_PASSES)
    groups = []
    for group in slicing.groups:
        cuts = _in_tokens(group.lengths, pipelines[group.rows].grain)
        groups.append(CutRows(group.rows, cuts))
    groups.sort(key=lambda group: -group.rows)
    return BatchChoice(tuple(groups), slicing.latency, slicing.bound)


def _check_batch(batch: int, limit: int | None) -> None:
    if batch < 1 or (limit is not None and limit < 1):
        raise ShapeError(
            f"a batch of {batch} rows in at most {limit} slices is empty; "
            "the least is 1 of each"
        )


def _divisors(stages: Stages, batch: int) -> list[int]:
    most = 2 * max(stages.profiles.rows)
    return [count for count in range(1, min(batch, most) + 1) if batch % count == 0]


def _best_within(times: SliceTimes, ranks: int, limit: int | None) -> Slicing:
    """Return the best cuts into at most `limit` slices."""
    best = best_cuts(times, ranks, patience=MAX_BATCH_PASSES)
    if limit is None or len(best.lengths) <= limit:
        return best
    counts = range(1, min(limit, times.points) + 1)
    found = [best_cuts(times, ranks, count, MAX_BATCH_PASSES) for count in counts]
    return min(found, key=lambda slicing: slicing.latency)


def _in_tokens(lengths: Sequence[int], grain: int) -> tuple[int, ...]:
    cuts = [0]
    for length in lengths:
        cuts.append(cuts[-1] + length * grain)
    return tuple(cuts)
