"""A plan in the terms that all frameworks share, and the advice that a framework gives for it.

Frameworks name an order instead of listing its actions. A schedule has a name only if its lanes are exactly those of
the name, whatever a planner called it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from penstock.ir.schedule import Schedule, Stage
from penstock.plan.candidates import Runtime
from penstock.plan.search import Row
from penstock.plan.space import Limits
from penstock.plan.workload import Cell, Workload
from penstock.schedules import make
from penstock.schedules.orders import loop_placement, wave_placement


@dataclass(frozen=True, slots=True)
class PipelineTerms:
    """One copy of a pipeline, the layers of its parts, and how devices and batch are divided.

    partition: the layers of each part; empty if the layers of the model are not known.
    rows: sequences of a micro-batch. passes: through the pipeline in a step.
    """

    schedule: Schedule
    partition: tuple[int, ...]
    rows: int
    passes: int
    copies: int
    tensor: int
    shard: int
    recompute: tuple[int, ...]
    tokens: int  # of a sequence; 0 if it is not known
    tied: bool | None = None  # None if the model is not known

    @property
    def ranks(self) -> int:
        """The ranks of the pipeline."""
        return self.schedule.ranks

    @property
    def parts(self) -> int:
        """The stages of the pipeline."""
        return self.schedule.parts

    @property
    def stages_per_rank(self) -> int:
        """The stages on each rank."""
        return len(self.schedule.stages) // self.ranks

    @property
    def microbatches(self) -> int:
        """The micro-batches of a pass."""
        return len(self.schedule.microbatches)

    @property
    def local_batch(self) -> int:
        """The sequences of a pass, of one copy."""
        return self.rows * self.microbatches

    @property
    def accumulated_batch(self) -> int:
        """The sequences that go through the model before the next ones may follow.

        A single rank has no pipeline to fill, so it accumulates gradients micro-batch by
        micro-batch.
        """
        return self.rows if self.ranks == 1 else self.local_batch

    @property
    def replicas(self) -> int:
        """The groups of devices that work on sequences of their own."""
        return self.copies * self.shard

    @property
    def global_batch(self) -> int:
        """The sequences of a step."""
        return self.local_batch * self.passes * self.replicas

    @property
    def layers(self) -> list[range]:
        """The layers of each part, by number."""
        found = []
        begin = 0
        for count in self.partition:
            found.append(range(begin, begin + count))
            begin += count
        return found

    @property
    def recomputes(self) -> bool:
        """Whether every part is computed again in the backward."""
        return len(self.recompute) == self.parts


def pipeline_terms(row: Row, workload: Workload) -> PipelineTerms:
    """The pipeline of a candidate."""
    cell, candidate = row.cell, row.candidate
    return PipelineTerms(
        candidate.schedule,
        candidate.partition,
        cell.rows,
        workload.passes,
        cell.copies,
        cell.tensor,
        cell.shard,
        candidate.recompute,
        workload.tokens if candidate.partition else 0,
        workload.tied,
    )


@dataclass(frozen=True, slots=True)
class Advice:
    """What a framework must be told.

    schedule: its name there, for people.
    text: its options or its config, to be copied.
    files: more files that it reads, by name.
    notes: what one should know before using it, a sentence each.
    """

    schedule: str
    text: str
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


OPTION_BREAK = " \\\n"  # between two options of a command line
NO_PIPELINE = "without a pipeline"  # the schedule of a single rank


class Framework(Runtime, Protocol):
    """Another framework: what it can run, and what it must be told."""

    @property
    def ending(self) -> str:
        """How the file with its options ends."""

    def narrow(self, limits: Limits) -> Limits:
        """The limits of a search for plans that it can run."""

    def adapt(self, workload: Workload) -> Workload:
        """The workload as the framework divides it into passes."""

    def advise(self, pipeline: PipelineTerms, stem: Path) -> Advice:
        """What to tell it; further files have names that begin with `stem`."""


# ---------------------------------------------------------------- reasons that several frameworks share
def refuse_mixed_recomputation(cell: Cell, framework: str) -> str:
    """Refuse cells that recompute some parts and keep others."""
    if 0.0 < cell.recomputed < 1.0:
        return f"it recomputes {cell.recomputed:.0%} of its parts; {framework} recomputes all or none"
    return ""


def refuse_lone_stages(stages: Sequence[Stage]) -> str:
    """Refuse several stages on a single rank, which no framework but ours runs."""
    if len(stages) > 1 and all(stage.rank == 0 for stage in stages):
        return "it cuts the model of a single rank into several stages"
    return ""


def refuse_idle_order(schedule: Schedule) -> str:
    """Refuse what no framework but ours runs: token slices, replicas and partial paths."""
    if schedule.slices > 1:
        return "it cuts sequences into token slices"
    if len(schedule.stages) != schedule.parts:
        return "it holds parts of the model more than once"
    whole = tuple(range(schedule.parts))
    for microbatch in set(schedule.microbatches):
        if tuple(schedule.stages[stage].part for stage in microbatch.path) != whole:
            return "its micro-batches do not visit all parts in order"
    return refuse_lone_stages(schedule.stages)


# ---------------------------------------------------------------- names of placements and orders
class PlacementKind(StrEnum):
    """How stages lie on ranks."""

    LOOP = "loop"  # stage s on rank s modulo the number of ranks
    V = "v"  # once there and once back
    WAVES = "waves"  # there and back several times
    OTHER = "other"


def placement_kind(placed: Sequence[Stage]) -> PlacementKind:
    """How stages lie on their ranks."""
    stages = list(placed)
    ranks = 1 + max(stage.rank for stage in stages)
    per_rank, rest = divmod(len(stages), ranks)
    if rest:
        return PlacementKind.OTHER
    if stages == loop_placement(ranks, per_rank):
        return PlacementKind.LOOP
    if per_rank % 2 == 0 and stages == wave_placement(ranks, per_rank // 2):
        return PlacementKind.V if per_rank == 2 else PlacementKind.WAVES
    return PlacementKind.OTHER


def order_of(schedule: Schedule) -> str:
    """The name of a schedule's order in `penstock list`; empty if it has none of these names.

    >>> order_of(make("interleaved", ranks=2, microbatches=4, chunks=3))
    'interleaved'
    """
    ranks = schedule.ranks
    microbatches = len(schedule.microbatches)
    per_rank = len(schedule.stages) // ranks
    if schedule.slices > 1:
        return ""
    names: dict[str, dict[str, int]] = {"1f1b": {}, "gpipe": {}}
    if per_rank > 1:
        chunks = {"chunks": per_rank}
        names = {"interleaved": chunks, "interleaved-zb": chunks, "zb-v": {}}
    for name, shape in names.items():
        known = _known(name, ranks, microbatches, shape.get("chunks", 0))
        if known.stages == schedule.stages and known.lanes == schedule.lanes:
            return name
    return ""


@lru_cache(maxsize=16)  # A search asks again and again for the same few.
def _known(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    shape = {"chunks": chunks} if chunks else {}
    return make(name, ranks=ranks, microbatches=microbatches, **shape)
