"""Says what another framework must be told to run the best plan of a search for it.

limits of the framework ─► search, which times plans as its runtime sends messages ─► the best one ─► options and files

Frameworks name an order instead of listing its actions. A schedule has a name only if its lanes are exactly those of
the name, whatever a planner called it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from penstock.errors import UnknownNameError
from penstock.formats import dump_torch_csv
from penstock.integrations.torchtitan.options import modules_of
from penstock.ir.schedule import Schedule, Stage
from penstock.plan.candidates import Candidate, Runtime
from penstock.plan.space import Limits
from penstock.plan.workload import Division, Workload
from penstock.schedules import make
from penstock.schedules.orders import loop_placement, wave_placement

OPTION_BREAK = " \\\n"  # between two options of a command line


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
    def recomputes(self) -> bool:
        """Whether every part is computed again in the backward."""
        return len(self.recompute) == self.schedule.parts


def no_pipeline(shard: int) -> str:
    """What a layout with a single rank is called.

    >>> no_pipeline(8), no_pipeline(1)
    ('FSDP only (dp_shard=8)', 'no pipeline')
    """
    return f"FSDP only (dp_shard={shard})" if shard > 1 else "no pipeline"


def pipeline_terms(candidate: Candidate, workload: Workload) -> PipelineTerms:
    """The pipeline of a candidate."""
    division = candidate.division
    return PipelineTerms(
        candidate.schedule,
        candidate.partition,
        division.rows,
        workload.passes,
        division.copies,
        division.tensor,
        division.shard,
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


# ---------------------------------------------------------------- frameworks
class Framework(Runtime):
    """Another framework: what it can run, and what it must be told."""

    name = ""
    ending = ""  # of the file with its options
    takes_lists = False

    def narrow(self, limits: Limits) -> Limits:
        """The limits of a search for plans that it can run: whole sequences and one copy of the weights."""
        return replace(limits, slices=1, weights=1, runtime=self)

    def adapt(self, workload: Workload) -> Workload:
        """The workload as the framework divides it into passes."""
        return workload

    def refuse_division(self, division: Division, tied: bool | None) -> str:
        """Refuse divisions that recompute some parts and keep others."""
        if 0.0 < division.recomputed < 1.0:
            return f"it recomputes {division.recomputed:.0%} of its parts; {self.name} recomputes all or none"
        return ""

    def refuse_stages(self, stages: Sequence[Stage]) -> str:
        """Refuse several stages on a single rank, which no framework but ours runs."""
        if len(stages) > 1 and all(stage.rank == 0 for stage in stages):
            return "it cuts the model of a single rank into several stages"
        return ""

    def refuse_order(self, schedule: Schedule) -> str:
        """Refuse what no framework but ours runs: token slices, replicas and partial paths."""
        if schedule.slices > 1:
            return "it cuts sequences into token slices"
        if len(schedule.stages) != schedule.parts:
            return "it holds parts of the model more than once"
        whole = tuple(range(schedule.parts))
        for microbatch in set(schedule.microbatches):
            if tuple(schedule.stages[stage].part for stage in microbatch.path) != whole:
                return "its micro-batches do not visit all parts in order"
        return self.refuse_stages(schedule.stages)

    def advise(self, pipeline: PipelineTerms, stem: Path) -> Advice:
        """What to tell it; further files have names that begin with `stem`."""
        raise NotImplementedError


# ---------------------------------------------------------------- names of placements and orders
LOOP = "loop"  # stage s on rank s modulo the number of ranks
V = "v"  # once there and once back
WAVES = "waves"  # there and back several times


def placement_kind(placed: Sequence[Stage]) -> str:
    """How stages lie on their ranks: in a loop, a V or waves; empty if in none of them."""
    stages = list(placed)
    ranks = 1 + max(stage.rank for stage in stages)
    per_rank, rest = divmod(len(stages), ranks)
    if not rest and stages == loop_placement(ranks, per_rank):
        return LOOP
    if not rest and stages == wave_placement(ranks, per_rank // 2):
        return V if per_rank == 2 else WAVES
    return ""


def order_of(schedule: Schedule) -> str:
    """The name of a schedule's order in `penstock draw`; empty if it has none of these names.

    >>> order_of(make("interleaved", ranks=2, microbatches=4, chunks=3))
    'interleaved'
    """
    ranks = schedule.ranks
    microbatches = len(schedule.microbatches)
    per_rank = len(schedule.stages) // ranks
    if schedule.slices > 1:
        return ""
    names = {"1f1b": 0, "gpipe": 0}
    if per_rank > 1:
        names = {"interleaved": per_rank, "interleaved-zb": per_rank, "zb-v": 0}
    for name, chunks in names.items():
        known = _known(name, ranks, microbatches, chunks)
        if known.stages == schedule.stages and known.lanes == schedule.lanes:
            return name
    return ""


@lru_cache(maxsize=16)  # A search asks again and again for the same few.
def _known(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    shape = {"chunks": chunks} if chunks else {}
    return make(name, ranks=ranks, microbatches=microbatches, **shape)


# ---------------------------------------------------------------- Megatron-LM
# megatron-core 0.16: options of its command line, with a layout of the layers.
#
#     --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*3|t*4|t*4|t*3L'
#
# In the layout E is the embedding, t a layer, L the head with the loss, and | the border of a stage. Stages lie in a
# loop.


class Megatron(Framework):
    """Megatron-LM, which runs 1F1B and interleaved 1F1B."""

    name = "megatron"
    ending = "megatron.sh"

    def narrow(self, limits: Limits) -> Limits:
        """Look for whole backwards, too."""
        return replace(super().narrow(limits), split=False)

    def adapt(self, workload: Workload) -> Workload:
        """Put all micro-batches of a step into one pass, as Megatron does."""
        return workload.in_one_pass()

    def refuse_stages(self, stages: Sequence[Stage]) -> str:
        """Refuse every placement but a loop."""
        if placement_kind(stages) != LOOP:
            return "megatron places stages in a loop only"
        return super().refuse_stages(stages)

    def refuse_order(self, schedule: Schedule) -> str:
        """Refuse every order but 1F1B and interleaved 1F1B."""
        reason = super().refuse_order(schedule)
        if reason:
            return reason
        order = order_of(schedule)
        if order not in ("1f1b", "interleaved"):
            return "megatron runs 1F1B and interleaved 1F1B only"
        microbatches = len(schedule.microbatches)
        if order == "interleaved" and microbatches % schedule.ranks:
            return (
                f"megatron interleaves only if the {schedule.ranks} ranks divide the "
                f"micro-batches, of which there are {microbatches}"
            )
        return ""

    def waits(self, schedule: Schedule) -> bool:
        """1F1B waits for its messages; interleaved 1F1B sends in the background."""
        return schedule.ranks > 1 and len(schedule.stages) == schedule.ranks

    def advise(self, pipeline: PipelineTerms, stem: Path) -> Advice:
        """Return options of the command line."""
        options = [
            f"--micro-batch-size {pipeline.rows}",
            f"--global-batch-size {pipeline.global_batch}",
            f"--tensor-model-parallel-size {pipeline.tensor}",
            f"--pipeline-model-parallel-size {pipeline.ranks}",
        ]
        if pipeline.tokens:
            options.insert(0, f"--seq-length {pipeline.tokens}")
        if pipeline.partition:
            options.insert(0, f"--num-layers {sum(pipeline.partition)}")
            if pipeline.ranks > 1:
                layout = layout_text(pipeline.partition)
                options.append(f"--pipeline-model-parallel-layout '{layout}'")
        if pipeline.tied is False:
            options.append("--untie-embeddings-and-output-weights")
        if pipeline.shard > 1:
            options.append("--use-distributed-optimizer")
        if pipeline.recomputes:
            options.append(
                "--recompute-granularity full --recompute-method uniform "
                "--recompute-num-layers 1"
            )
        name = "as interleaved 1F1B" if pipeline.stages_per_rank > 1 else "as 1F1B"
        if pipeline.ranks == 1:
            name = no_pipeline(pipeline.shard)
        text = OPTION_BREAK.join(options)
        return Advice(name, f"{text}\n", {}, self._notes(pipeline))

    def _notes(self, pipeline: PipelineTerms) -> tuple[str, ...]:
        notes = [
            f"Megatron computes the number of micro-batches of a step, {pipeline.microbatches} in "
            f"{pipeline.replicas} data-parallel group{'s' * (pipeline.replicas > 1)}, from the "
            "batch sizes and the number of devices."
        ]
        if pipeline.stages_per_rank > 1 and not pipeline.partition:
            notes.append(
                "The layers of the model are not known, so there is no layout: set "
                "--num-virtual-stages-per-pipeline-rank to "
                f"{pipeline.stages_per_rank}."
            )
        if pipeline.shard > 1:
            notes.append(
                f"The plan shards weights over {pipeline.shard} devices; the distributed "
                "optimizer shards what the optimizer keeps. The expected memory is enough "
                "for that: it counts whole weights and gradients, which a step gathers."
            )
        return tuple(notes)


def layout_text(partition: tuple[int, ...]) -> str:
    """The layout of parts with these numbers of layers.

    >>> layout_text((3, 4, 1))
    'Et*3|t*4|tL'
    """
    stages = ["t" * count if count < 2 else f"t*{count}" for count in partition]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)


# ---------------------------------------------------------------- torchtitan
# torchtitan 0.3: options of its command line, and a CSV for an order that has no name.
#
#     torchrun ... --module llama3 --config llama3_8b \
#         --parallelism.pipeline_parallel_degree 4 \
#         --parallelism.module_fqns_per_model_part tok_embeddings,layers.0 layers.1,layers.2 ... \
#         ...
#
# torchtitan builds on torch.distributed.pipelining and places stages by the name of a schedule: in a loop, or in one V.
# The order comes from a name or from a CSV file:
#
#     placement   order has a name     any other order
#     loop        Interleaved1F1B      PipelineScheduleMulti and a CSV
#     V           ZBVZeroBubble        ZBVZeroBubble, for its placement, and a CSV
#
# torch knows some names only for some numbers of micro-batches: its 1F1B refuses fewer micro-batches than ranks, and
# its interleaved schedules refuse or reorder micro-batches that do not fill their rounds. Such orders come as a CSV,
# too.

NAMES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
}
# Names whose own order is replaced by a CSV, and that only place the stages.
PLACING_NAMES = {
    LOOP: "PipelineScheduleMulti",
    V: "ZBVZeroBubble",
}


class Torchtitan(Framework):
    """torchtitan, whose runtime is torch's own."""

    name = "torchtitan"
    ending = "torchtitan.sh"
    takes_lists = True

    def refuse_division(self, division: Division, tied: bool | None) -> str:
        """Refuse tied weights over several ranks, and recomputation of some parts."""
        if tied and division.ranks > 1:
            return (
                "the model ties its embedding to its head, which torchtitan refuses in a "
                "pipeline (--set model.tie_embeddings=false unties them)"
            )
        return super().refuse_division(division, tied)

    def refuse_stages(self, stages: Sequence[Stage]) -> str:
        """Refuse waves, and whatever is neither a loop nor a V."""
        placement = placement_kind(stages)
        if placement == WAVES:
            return (
                "its stages lie in several waves; torchtitan places them in a loop "
                "or in one V"
            )
        if placement not in PLACING_NAMES:
            return (
                "its stages lie neither in a loop nor in a V, and torchtitan knows no other "
                "placement"
            )
        return super().refuse_stages(stages)

    def waits(self, schedule: Schedule) -> bool:
        """Whether ranks wait for their messages: torch's own 1F1B does, its other schedules do not."""
        return schedule.ranks > 1 and torch_name(schedule)[0] == "1F1B"

    def advise(self, pipeline: PipelineTerms, stem: Path) -> Advice:
        """Return options of the command line."""
        csv_file = stem.with_name(f"{stem.name}.csv")
        schedule, has_csv = torch_name(pipeline.schedule)
        options = [
            ("training.local_batch_size", str(pipeline.accumulated_batch)),
            ("training.global_batch_size", str(pipeline.global_batch)),
            ("parallelism.data_parallel_replicate_degree", str(pipeline.copies)),
            ("parallelism.data_parallel_shard_degree", str(pipeline.shard)),
            ("parallelism.tensor_parallel_degree", str(pipeline.tensor)),
            ("parallelism.pipeline_parallel_degree", str(pipeline.ranks)),
        ]
        if pipeline.tokens:
            options.insert(0, ("training.seq_len", str(pipeline.tokens)))
        files = {}
        if pipeline.ranks > 1:
            options += [
                ("parallelism.pipeline_parallel_schedule", schedule),
                ("parallelism.pipeline_parallel_microbatch_size", str(pipeline.rows)),
            ]
            if has_csv:
                file = str(csv_file)
                options.append(("parallelism.pipeline_parallel_schedule_csv", file))
                # Without messages: torch adds them.
                files[csv_file.name] = dump_torch_csv(pipeline.schedule)
            if pipeline.partition:
                names = " ".join(map(",".join, modules_of(pipeline.partition)))
                options.append(("parallelism.module_fqns_per_model_part", names))
        words = [f"--{name} {value}" for name, value in options]
        # A choice between classes of configs is a word of its own, after all options.
        policy = "full" if pipeline.recomputes else "none"
        text = OPTION_BREAK.join([*words, f"activation-checkpoint:{policy}"])
        name = f"as {schedule}" if pipeline.ranks > 1 else no_pipeline(pipeline.shard)
        return Advice(name, f"{text}\n", files, _notes(pipeline))


def torch_name(schedule: Schedule) -> tuple[str, bool]:
    """The name of a schedule in torch, and whether it needs a CSV for its order."""
    order = order_of(schedule)
    left = len(schedule.microbatches) % schedule.ranks
    has_order = {
        "1f1b": len(schedule.microbatches) >= schedule.ranks,
        "interleaved": left == 0,
        "interleaved-zb": left == 0,
        "zb-v": True,
    }
    if has_order.get(order, False):
        return NAMES[order], False
    return PLACING_NAMES[placement_kind(schedule.stages)], True


def _notes(pipeline: PipelineTerms) -> tuple[str, ...]:
    """What one should know about the schedule and the modules."""
    notes = []
    name, has_csv = torch_name(pipeline.schedule)
    if has_csv:
        notes.append(
            f"The order comes from the CSV; {name} only says which rank holds which stage."
        )
    if pipeline.partition and pipeline.ranks > 1:
        notes.append(
            "The modules have the names of torchtitan 0.3's decoders; before 0.3, lm_head "
            "is called output."
        )
    return tuple(notes)


# ---------------------------------------------------------------- their names
FRAMEWORKS: dict[str, Framework] = {
    "torchtitan": Torchtitan(),
    "megatron": Megatron(),
}


def framework_of(name: str) -> Framework:
    """The framework with this name."""
    if name not in FRAMEWORKS:
        raise UnknownNameError("framework", name, FRAMEWORKS)
    return FRAMEWORKS[name]
