"""Runs one rank's lane of a program on real tensors, with the same code for every schedule.

An `Executor` is built once and then runs step after step.

    Executor          builds everything below once; checks what a user's modules and loss do in the first step
    Walk              one step: runs the actions of the lane and sends messages    `penstock.runtime.step`
    StageActions      what F, B, I and W do: computed, or played from recordings   `penstock.runtime.actions`
    StepGradients     sums over replicas and shards, and earlier gradients         `penstock.runtime.gradients`

Each rank sees only its own stages, so before the first step the ranks agree on what they can know only together
(`penstock.runtime.replicas`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.errors import PenstockError, ShapeError
from penstock.ir.lane import Lane, Turn, lane_turns, rest_frozen_stages
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.sums import SumPlan
from penstock.runtime.actions import (
    ComputedActions,
    FirstStepChecks,
    LaneStages,
    StageActions,
)
from penstock.runtime.backward import cast_weights, make_deferrable
from penstock.runtime.batch import (
    Batch,
    BatchEdges,
    NamedShapes,
    StepData,
    cut_units,
    edges_of_lane,
    joined,
    refuse_other_batches,
    refuse_whole,
)
from penstock.runtime.comm.comm import Comm
from penstock.runtime.edges import EdgeFinder, fail_together
from penstock.runtime.gradients import Mean, StepGradients, Visits
from penstock.runtime.loss import Loss, reduction_of
from penstock.runtime.passed_values import Edge, Feedback, described
from penstock.runtime.process.machine import keep_freed_memory
from penstock.runtime.recorder import Clock, Recorder
from penstock.runtime.replay import (
    PlayedActions,
    Recordings,
    Tape,
    refuse_other_ops,
    refuse_shares,
)
from penstock.runtime.replicas import (
    Agreement,
    Replicas,
    Shards,
    Tied,
    agree,
    groups_of,
    ties_of,
)
from penstock.runtime.step import Messages, Result, Walk
from penstock.torch_internals import original_module

__all__ = ["Executor", "Loss", "Result", "RunOptions"]

LengthCheck = Callable[[Sequence[int]], None]

# The shapes of all units' inputs, and of the named tensors.
BatchShape: TypeAlias = tuple[tuple[tuple[int, ...], ...], tuple[NamedShapes, ...]]

MAX_KNOWN_SHAPES = 16  # of batches whose edges are kept

COMPARED_STEPS = (
    100  # steps between two comparisons of batches, unless the user says otherwise
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run that few runs change: what its ranks share, sum and send."""

    # Parameters that several parts use; by default those that `penstock.models.split` has found.
    tied: Mapping[str, Tied] | None = None
    # The tokens over which a part's gradient is a mean: all, or those that visited it.
    mean: Mean = Mean.ALL
    # The type in which hidden states and their gradients travel between ranks, by default their own. torch.int8 rounds
    # each row to 8 bits with a scale of its own.
    messages: torch.dtype | None = None
    # How replicas sum their gradients; the backend sums what it does not have.
    sums: Sequence[SumPlan] = ()
    # The type in which these sums travel, by default that of the gradients; torch.bfloat16 or torch.int8.
    sum_messages: torch.dtype | None = None
    # Whether a run adds up gradients over steps. They always add up, but if recordings know it, they do so without a
    # second copy of the gradients.
    accumulates: bool = False
    # Steps between two comparisons of the batches that the ranks were given, besides the first step; 0 compares in the
    # first step only. All ranks have the same.
    compare: int = COMPARED_STEPS


USUAL_OPTIONS = RunOptions()


class Executor:
    """One rank's lane, ready to run step after step. All ranks build theirs at the same time.

    stages: the modules of this rank's stages. A stage returns what the next one takes: a tensor, a tuple of tensors, or
        a dict of tensors with names (`penstock.runtime.passed_values`).
    loss: takes what the last stage returns and labels. It returns the sum of the labels' losses, or their mean if
        `reduction` is "mean".
    recompute: stages that keep only their input, and compute their forward again in the backward.
    autocast: the type in which matrices are multiplied, if it is not that of the weights.
    tape: records the actions and plays them in every step; all ranks have one, or none.
    options: further ones, which few runs change (`RunOptions`).
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, nn.Module],
        comm: Comm,
        loss: Loss,
        recompute: frozenset[int] = frozenset(),
        autocast: torch.dtype | None = None,
        tape: Tape | None = None,
        reduction: str = "sum",
        options: RunOptions = USUAL_OPTIONS,
    ) -> None:
        schedule = program.schedule
        self.program = program
        self.comm = comm
        self.loss = loss
        self.reduction = reduction_of(reduction)
        # What rounding has lost of messages in int8; None forgets it.
        self.feedback: Feedback | None = Feedback()
        self.recompute = recompute
        self.autocast = autocast
        self.tape = tape
        self.options = options
        self.modules = stages_of_rank(schedule, stages, comm)
        self.stages = LaneStages(
            self.modules, loss, self.reduction, recompute, autocast
        )
        refuse_whole(schedule, self.modules)
        if tape is not None:
            refuse_other_ops(schedule)
            refuse_shares(self.modules)
        self.lane = Lane(lane_turns(program, comm.rank))
        self.finder = EdgeFinder(schedule, self.modules, comm, options.messages)
        self.known_edges: dict[BatchShape, BatchEdges] = {}

        tied = options.tied
        if tied is None:
            tied = ties_of(schedule, self.modules)
        self.tied = tied
        comm.prepare(groups_of(schedule, tied))
        self.shards = Shards(schedule, self.modules, comm.rank, tied)
        self.gradients = StepGradients(
            self.shards,
            Replicas(
                schedule,
                self.modules,
                comm,
                tied,
                options.sums,
                options.sum_messages,
            ),
            Visits(schedule, self.modules, options.mean, tied),
        )
        if not self.shards.parts:
            # Sharding saves memory, and keeping freed memory would spend it again.
            keep_freed_memory()

        self.recorder = Recorder(schedule, comm, options.sums)
        self.clock = Clock(self.modules.values())
        self.compared = False  # whether the ranks have compared a batch yet
        self.begun = 0  # steps
        self.agreement: Agreement | None = None  # None before the first step
        # Whether the first step warns about weight gradients that cannot wait for W.
        self.warns_of_deferrals = True
        # Found in the first step: the stages whose split backward leaves nothing to W.
        self.stages_without_weight_work: frozenset[int] = frozenset()
        self.recordings: Recordings | None = None  # for the shape of the first batch
        self.reserved_bytes: tuple[int, ...] = ()  # of messages, by unit
        # The time that the actions of the last step took. On a GPU, only their launch.
        self.work_seconds = 0.0
        self.named_parameters = _named_parameters(self.modules)
        self.trainable = [p.requires_grad for _, p in self.named_parameters]
        self.length_checks = _length_checks(self.modules.values())
        self.casts = cast_weights(self.modules.values(), autocast)
        splits = any(turn.step is not None and turn.step.split for turn in self.turns)
        if splits or self.casts is not None:
            for module in self.modules.values():
                make_deferrable(module)

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns of the lane."""
        return self.lane.turns

    @property
    def doing(self) -> str:
        """The action that runs now, or that waits for its input."""
        if not self.turns:
            return "the end of an empty lane"
        step = self.turns[self.lane.position].step
        return str(step.instruction) if step is not None else "the start"

    @property
    def recording_bytes(self) -> int:
        """GPU memory that only the recordings of the actions can use."""
        return 0 if self.recordings is None else self.recordings.reserved_bytes

    def edges(self, batch: Batch) -> Sequence[tuple[Edge, ...]]:
        """What goes between the stages on the path of each micro-batch. All ranks must call this."""
        return self.cut(batch).edges.edges

    def prepare_messages(self, batch: Batch) -> None:
        """Let the `Comm` make room for the messages of a step on this batch. All ranks must call this."""
        self.reserve(self.cut(batch))

    # ------------------------------------------------------------ steps
    def step(
        self,
        batch: Batch,
        timed: bool = False,
        outputs: bool = False,
        sums: bool = True,
    ) -> Result:
        """Run the forward and backward of every micro-batch once, and add to the gradients.

        With `outputs`, the result has what the last stages returned. Such a step is computed, even if there is a tape.
        With `sums=False`, replicas keep their gradients to themselves, and the next step without it sums them together
        with its own: several steps then cost one sum. Recorded steps always sum.
        """
        schedule = self.program.schedule
        every = self.options.compare
        if not self.begun or (every and self.begun % every == 0):
            self.compare_batches(batch)
        self.begun += 1
        self.check_lengths(batch)
        data = self.cut(batch, outputs=outputs)
        self.refuse_changed_parameters()
        checks = None
        if self.agreement is None:
            self.agreement = self.agree()
            copied = self.finder.copied_buffers()
            checks = FirstStepChecks(schedule, self.modules, self.loss, copied)
        self.reserve(data)
        if self.casts is not None:
            self.casts.refresh()
            self.stages.casts = self.casts
        recordings = None if outputs else self.recordings_for(data, checks)
        actions: StageActions = ComputedActions(self.stages, data, checks)
        if recordings is not None:
            actions = PlayedActions(recordings, data)
        clock = self.clock if timed else None
        result = self.walk(actions, data, recordings, clock, sums)
        if checks is not None:
            self.stages_without_weight_work = frozenset(checks.deferrals.without_work)
            if self.warns_of_deferrals:
                checks.deferrals.warn()
        return result

    def evaluate(self, batch: Batch) -> float:
        """The mean loss of a batch. Runs only the forwards of the same lanes."""
        return self.run_forwards(batch).loss

    def predict(self, batch: Batch) -> tuple[Any, ...]:
        """What the last stage returns for each micro-batch; None for one that ends on another rank.

        The batch needs no labels: `Batch(inputs, (), 1)`.
        """
        return self.run_forwards(batch, outputs=True).outputs

    def run_forwards(self, batch: Batch, outputs: bool = False) -> Result:
        """Run only the forwards of a step, without gradients."""
        self.check_lengths(batch)
        data = self.cut(batch, training=False, outputs=outputs)
        actions = ComputedActions(self.stages, data)
        return self.walk(actions, data)

    def walk(
        self,
        actions: StageActions,
        data: StepData,
        recordings: Recordings | None = None,
        clock: Clock | None = None,
        sums: bool = True,
    ) -> Result:
        """Walk the lane once."""
        walk = Walk(
            self.lane,
            actions,
            Messages(
                self.comm,
                self.lane.receives,
                data,
                self.autocast is not None,
                self.feedback,
            ),
            data,
            self.gradients,
            recordings,
            clock,
            sums,
        )
        result = walk.run(self.comm, self.recorder)
        result.outputs = self.outputs_of(data)
        if data.training:
            self.work_seconds = walk.work_seconds
        return result

    def outputs_of(self, data: StepData) -> tuple[Any, ...]:
        """What the last stages returned, by micro-batch, with the slices of each joined."""
        if data.outputs is None:
            return ()
        outputs = []
        unit = 0
        for microbatch in self.program.schedule.microbatches:
            units = range(unit, unit + microbatch.slices)
            outputs.append(joined([data.outputs.get(number) for number in units]))
            unit = units.stop
        return tuple(outputs)

    def cut(
        self, batch: Batch, training: bool = True, outputs: bool = False
    ) -> StepData:
        """A batch by unit, and what goes between the stages, for a step that may keep the outputs."""
        schedule = self.program.schedule
        data = cut_units(schedule, batch)
        unit_shapes = tuple(tuple(x.shape) for x in data.inputs)
        shape: BatchShape = (unit_shapes, batch.named_shapes)
        edges = self.known_edges.get(shape)
        if edges is None:
            if not self.compared:
                self.compare_batches(batch)
            found = self.finder.find(batch)
            edges = edges_of_lane(schedule, self.turns, found, data.tokens)
            while len(self.known_edges) >= MAX_KNOWN_SHAPES:
                self.known_edges.pop(next(iter(self.known_edges)))
            self.known_edges[shape] = edges
        data.edges = edges
        data.training = training
        data.outputs = {} if outputs else None
        return data

    def reserve(self, data: StepData) -> None:
        """Let the `Comm` make room for messages of these sizes."""
        sizes = data.edges.unit_bytes
        if sizes != self.reserved_bytes:
            self.comm.reserve(self.program, sizes)
            self.reserved_bytes = sizes

    def recordings_for(
        self, data: StepData, checks: FirstStepChecks | None
    ) -> Recordings | None:
        """The recordings to play in this step; None if its actions have to be computed."""
        if self.tape is None or data.batch.starts:
            return None
        if self.recordings is None:
            self.recordings = self.record(data, self.tape, checks)
        return self.recordings if self.recordings.fits(data.batch) else None

    def record(
        self, data: StepData, tape: Tape, checks: FirstStepChecks | None
    ) -> Recordings:
        """Record the actions of this rank. If one rank cannot record its own, no rank begins the step."""
        recordings: Recordings | None = None
        failure: PenstockError | None = None
        try:
            recordings = Recordings(
                self.stages,
                self.program.schedule,
                self.turns,
                data,
                tape,
                checks,
                self.options.accumulates,
                self.comm.reads_in_order,
            )
        except PenstockError as error:
            failure = error
        fail_together(self.comm, failure)
        assert recordings is not None
        if recordings.device.type == "cuda":
            # What was allocated while recording belongs to the recordings now, which count it.
            torch.cuda.reset_peak_memory_stats(recordings.device)
        return recordings

    # ------------------------------------------------------------ checks
    def compare_batches(self, batch: Batch) -> None:
        """Raise an error on all ranks if they were given different batches. All ranks must call this."""
        every = self.options.compare
        refuse_other_batches(self.comm, self.program.schedule, batch, every)
        self.compared = True

    def check_lengths(self, batch: Batch) -> None:
        """Let stages refuse a batch in which the length of one sequence would change the result of another.

        All ranks check all lengths, because a replica sees only some of the micro-batches.
        """
        if self.length_checks:
            lengths = batch.longest
            for check in self.length_checks:
                check(lengths)

    def refuse_changed_parameters(self) -> None:
        """Raise an error if parameters were frozen or unfrozen after construction."""
        pairs = zip(self.named_parameters, self.trainable, strict=True)
        names = [name for (name, p), before in pairs if p.requires_grad != before]
        if not names:
            return
        listed = ", ".join(names[:MAX_NAMES_SHOWN])
        if len(names) > MAX_NAMES_SHOWN:
            listed += f" and {len(names) - MAX_NAMES_SHOWN} more"
        raise ShapeError(
            f"requires_grad of {listed} has changed since the Executor was made, and the other ranks do not know\n"
            "  make a new Executor on every rank after freezing or unfreezing parameters"
        )

    def agree(self) -> Agreement:
        """Find out what only all ranks together know, and set up this rank accordingly."""
        schedule = self.program.schedule
        replicas = self.gradients.replicas
        agreement = agree(
            schedule,
            self.modules,
            self.comm,
            replicas.order,
            self.tied,
            self.recompute,
        )
        visited = {stage for m in schedule.microbatches for stage in m.path}
        if not any(agreement.trains[stage] for stage in visited):
            raise ShapeError(
                "no stage has a parameter that trains: requires_grad is False for all of them\n"
                "  unfreeze some and make a new Executor, or call evaluate instead of step"
            )
        common: set[int] = set()
        for shared in replicas.order:
            if shared.name in agreement.one_tensor:
                common.update(id(parameter) for parameter in shared.parameters)
        if common.intersection(map(id, self.gradients.visits.owners)):
            raise ShapeError(
                "ranks that are threads share the memory of a part that some micro-batches skip\n"
                "  for Mean.VISITS give each rank its own copy (copy.deepcopy of the model)"
            )
        replicas.leave_out(agreement.one_tensor)
        turns, rests = rest_frozen_stages(schedule, agreement.trains, self.turns)
        self.lane = Lane(turns)
        self.stages.rests = rests
        self.stages.common = frozenset(common)
        self.stages.takes_turns = agreement.recomputes
        return agreement


def _named_parameters(
    modules: Mapping[int, nn.Module],
) -> list[tuple[str, nn.Parameter]]:
    """All parameters with names that say which stage they belong to."""
    named = []
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            named.append((f"{name} of stage {stage}", parameter))
    return named


def _length_checks(modules: Iterable[nn.Module]) -> list[LengthCheck]:
    """The checks of stages in which the length of one sequence changes the result of another."""
    checks: list[LengthCheck] = []
    for module in modules:
        original: Any = original_module(module)
        if getattr(original, "remembers_lengths", False):
            checks.append(original.refuse_lengths)
    return checks


MAX_NAMES_SHOWN = 3


def stages_of_rank(
    schedule: Schedule, stages: Mapping[int, nn.Module], comm: Comm
) -> dict[int, nn.Module]:
    """The modules of this rank's stages. Raises an error if one is missing or is not a module."""
    if comm.ranks != schedule.ranks:
        raise ShapeError(
            f"the schedule is for {schedule.ranks} ranks, but there are {comm.ranks}\n"
            f"  start {schedule.ranks} processes (torchrun --nproc-per-node {schedule.ranks}), or make the schedule "
            f"with ranks={comm.ranks}"
        )
    due = [
        number
        for number, stage in enumerate(schedule.stages)
        if stage.rank == comm.rank
    ]
    unknown = [number for number in stages if number not in range(len(schedule.stages))]
    missing = [number for number in due if number not in stages]
    if unknown or missing:
        given = ", ".join(map(str, sorted(stages))) or "none"
        what = f"has no stage {unknown[0]}" if unknown else ""
        what = what or f"puts stage {missing[0]} on rank {comm.rank}"
        raise ShapeError(
            f"the schedule {what}, but the stages given to the Executor are: {given}\n"
            f"  rank {comm.rank} needs a module for each of: {', '.join(map(str, due)) or 'none'}; "
            "{n: parts[s.part] for n, s in enumerate(schedule.stages) if s.rank == comm.rank} has them"
        )
    for number in due:
        if not isinstance(stages[number], nn.Module):
            raise ShapeError(
                f"stage {number} is {described(stages[number])}, but a stage must be an nn.Module"
            )
    found = {number: stages[number] for number in due}
    refuse_unfit_weights(found)
    return found


def refuse_unfit_weights(stages: Mapping[int, nn.Module]) -> None:
    """Raise an error if weights have no shape yet, or will have gradients of another form than their own."""
    for stage, module in stages.items():
        for path, layer in module.named_modules():
            where = f"stage {stage} ({type(module).__name__})"
            layer_name = f"{path or 'itself'} ({type(layer).__name__})"
            own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
            if any(map(is_lazy, own)):
                raise ShapeError(
                    f"{where} has weights without a shape, in {layer_name}\n"
                    "  call the whole model once on a small batch, before it is cut into stages"
                )
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
                raise ShapeError(
                    f"{where} makes sparse gradients, in {layer_name}, which cannot be summed over ranks\n"
                    "  leave out sparse=True"
                )
