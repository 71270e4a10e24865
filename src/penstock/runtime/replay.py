"""Actions that are recorded once and then played: on a GPU one launch replaces hundreds (CUDA graphs).

Before the first step, the actions of a rank are recorded in the order of its lane, on tensors whose memory never
moves. To play an action, what has arrived from other ranks is copied there first. All recordings share one memory: they
are played in the order in which they were recorded, so an action may use what an earlier one has freed. Recorded
actions need about as much memory as others.

    lane       F0   F1   B0   F2   B1  ...        each action has its own recording
    memory     a    b    a    a    b              F2 takes what B0 has freed

A lane with very many actions would need very many recordings. There, micro-batches that are not in flight at the same
time share a set of recordings, a take (`penstock.runtime.replay`). A take has memory for one micro-batch: x and y of
every slice, and what the backward keeps. Memory that one of its actions has freed can serve only later actions of the
same take, because nothing is known about how the actions of two takes will interleave. That needs more memory.
"""

from __future__ import annotations

import warnings
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import RunError, ShapeError
from penstock.ir.action import FORWARD, WEIGHTS
from penstock.ir.lane import SEND, LaneStep, Rests, StageVisit, Turn
from penstock.ir.program import MAX_RECORDED_ACTIONS
from penstock.ir.schedule import Schedule
from penstock.runtime.actions import (
    ComputedActions,
    FirstStepChecks,
    LaneStages,
)
from penstock.runtime.backward import record_in
from penstock.runtime.batch import Batch, StepData, cut_units
from penstock.runtime.gradients import EarlierGradients, FixedGradients
from penstock.runtime.loss import adding_to
from penstock.runtime.module_state import (
    DRAWING_LOCK,
    Drawn,
    buffers_restored,
    drawing_again,
    drawn_since,
    states,
)
from penstock.torch_internals import (
    local_share,
    recording_bytes,
    view_without_owning,
)


def _nothing(*_: object) -> None:
    """Do nothing: in place of a recording without work and of what prepares one."""


# ---------------------------------------------------------------- playing
@dataclass(eq=False, slots=True)
class PlayedActions:
    """The actions of one step, played from recordings."""

    recordings: Recordings
    data: StepData
    kept: set[int] = field(default_factory=set, init=False)
    # Random numbers, by forward.
    drawn: dict[int, Drawn] = field(default_factory=dict, init=False)

    def forward(self, step: LaneStep) -> None:
        """Play a forward. Losses are copied, because the next micro-batch overwrites them."""
        inputs = self.inputs_of(step)
        if (step.stage, step.microbatch) in self.recordings.drawing:
            results = self.play_and_remember_randomness(step, inputs)
        else:
            results = self.recordings.action(step)(*inputs)
        self.kept.add(step.value)
        passed = 0 if step.last else len(self.data.edges.specs[step.value])
        if passed:
            self.keep_result(step, results[:passed])
        for loss in results[passed:]:
            self.data.losses.append(loss.clone())

    def keep_result(self, step: LaneStep, tensors: Sequence[Tensor]) -> None:
        """Keep the result of an action for others: where it is, or as a copy."""
        if self.recordings.copies_result(step):
            tensors = [x.clone() for x in tensors]
        self.data.held[step.value] = tuple(tensors)

    def inputs_of(self, step: LaneStep) -> list[Tensor]:
        """The inputs that a forward needs copied.

        They are tokens or what the stage before has passed on, on the last stage labels, and tensors of the batch
        that stages ask for by name.
        """
        inputs = []
        if step.source < 0:
            inputs.append(self.data.inputs[step.unit])
        elif step.source not in self.recordings.in_place:
            inputs += self.data.held[step.source]
        if step.last:
            inputs.append(self.data.labels[step.unit])
        named = self.data.named(step)
        inputs += [named[name] for name in self.recordings.action(step).names]
        return inputs

    def play_and_remember_randomness(
        self, step: LaneStep, inputs: Sequence[Tensor]
    ) -> Results:
        """Play a forward that draws random numbers, which its backward will draw again.

        A CUDA graph draws from the generator's state at the time it is played, so setting back that state is enough.
        """
        device = self.recordings.device
        with DRAWING_LOCK:
            before = states(device)
            results = self.recordings.action(step)(*inputs)
            drawn = drawn_since(before, device)
        if drawn is not None:
            self.drawn[step.value] = drawn
        return results

    def backward(self, step: LaneStep) -> None:
        """Play a backward."""
        if step.value not in self.recordings.stages.rests.idle:
            arrives = not step.last and step.source not in self.recordings.in_place
            inputs = self.data.held[step.source] if arrives else ()
            with self.first_randomness(step):
                gradients = self.recordings.action(step)(*inputs)
            if gradients:
                self.keep_result(step, gradients)
        if not step.split:
            self.kept.remove(step.forward)

    def first_randomness(self, step: LaneStep) -> AbstractContextManager[None]:
        """A context that draws the random numbers of the forward again, if it drew any."""
        drawn = self.drawn.pop(step.forward, None)
        if drawn is None:
            return nullcontext()
        return drawing_again(drawn, self.recordings.device, step.instruction)

    def weights(self, step: LaneStep) -> None:
        """Play the weight gradients that the I has left."""
        self.recordings.action(step)()
        self.kept.remove(step.forward)


@dataclass(slots=True)
class RecordedAction:
    """One action of a take."""

    # Where the recording reads its inputs: what other ranks send to it, and the batch after that.
    inputs: tuple[Tensor, ...]
    results: Results  # where it leaves its results; those of a forward end with losses
    play: Callable[[], None]
    names: tuple[str, ...] = ()  # of the last inputs, which are tensors of the batch

    def __call__(self, *inputs: Tensor) -> Results:
        """Play the recording on these inputs. What has arrived where the recording reads it is not copied."""
        for target, source in zip(self.inputs, inputs, strict=True):
            if target is not source:
                target.copy_(source)
        self.play()
        return self.results


class Recordings:
    """The recorded actions of one rank, for batches of one shape.

    `in_place` has the values that an action of this rank makes and another one reads where they are. `leaving` has the
    results that leave the rank, which are copied because their memory is soon used again. If sends read in the order
    of the stream (`reads_in_order`), a result that leaves right after its action needs no copy.
    """

    def __init__(
        self,
        stages: LaneStages,
        schedule: Schedule,
        turns: Sequence[Turn],
        data: StepData,
        tape: Tape,
        checks: FirstStepChecks | None = None,
        accumulates: bool = False,
        reads_in_order: bool = False,
    ) -> None:
        self.stages = stages
        self.shapes = data.batch.shapes
        self.named_shapes = data.batch.named_shapes
        self.device = data.batch.inputs[0].device
        self.valid = torch.ones((), device=self.device)
        visits = stage_visits(turns)
        modules = [stages.modules[stage] for stage in {stage for stage, _ in visits}]
        by_lane = sum(map(len, visits.values())) <= MAX_RECORDED_ACTIONS
        self.by_lane = by_lane
        self.in_place: frozenset[int] = frozenset()
        self.leaving: frozenset[int] = frozenset()
        overwrites = by_lane and tape.replays_memory and not accumulates
        self.gradients = FixedGradients(modules, overwrites)
        earlier = EarlierGradients()
        earlier.lay_aside(self.gradients.parameters)
        self.gradients.install()
        session = RecordingSession(stages, schedule, data, self.valid, tape, checks)
        try:
            with buffers_restored(stages.modules, in_place=tape.replays_memory):
                if by_lane:
                    self.in_place = frozenset(
                        s.value for steps in visits.values() for s in steps
                    )
                    self.leaving = frozenset(sent_values(turns, reads_in_order))
                    session.rehearse_visits(visits)
                    self.gradients.install()
                    session.record_lane(turns, visits, self.in_place)
                else:
                    session.record_visits(visits)
            self.gradients.adopt()
        finally:
            earlier.restore()
        self.takes = session.takes
        # The visits whose backward draws the random numbers of the forward again.
        self.drawing = session.drawing

    @cached_property
    def reserved_bytes(self) -> int:
        """GPU memory that only recordings can use. Computed once, because a look at all of the memory is slow."""
        return recording_bytes() if self.device.type == "cuda" else 0

    def fits(self, batch: Batch) -> bool:
        """Whether a batch has the shape that was recorded."""
        same = batch.shapes == self.shapes and batch.named_shapes == self.named_shapes
        return same and not batch.starts

    def begin(self, valid: int) -> None:
        """Begin a step with this number of valid tokens."""
        self.valid.fill_(valid)

    def action(self, step: LaneStep) -> RecordedAction:
        """The recording of a step."""
        return self.takes[step.stage, step.microbatch][take_moment(step)]

    def copies_result(self, step: LaneStep) -> bool:
        """Whether the result of an action must be copied, because its memory is used again before all have read it.

        In a take, the outputs of forwards have memory of their own.
        """
        if self.by_lane:
            return step.value in self.leaving
        return step.do != FORWARD


# ---------------------------------------------------------------- recording
@dataclass(eq=False, slots=True)
class RecordingSession:
    """Records the takes of one rank.

    `valid` is a tensor that stands for the number of valid tokens, which changes from step to step.
    """

    stages: LaneStages
    schedule: Schedule
    data: StepData
    valid: Tensor
    tape: Tape
    checks: FirstStepChecks | None
    takes: dict[StageVisit, Take] = field(default_factory=dict, init=False)
    # The visits whose backward draws the numbers again.
    drawing: set[StageVisit] = field(default_factory=set, init=False)

    def record_lane(
        self,
        turns: Sequence[Turn],
        visits: Mapping[StageVisit, Sequence[LaneStep]],
        own: frozenset[int],
    ) -> None:
        """Record all actions of a lane in its order, in one memory. `own` has the values that the rank makes."""
        self.tape.begin()
        steps = [step for each in visits.values() for step in each]
        actions = self.stand_in(steps, inputs=False)
        takes: dict[StageVisit, dict[TakeMoment, RecordedAction]] = {}
        copiers = first_forwards(steps)
        for turn in turns:
            step = turn.step
            if step is not None:
                take = takes.setdefault((step.stage, step.microbatch), {})
                action = self.record_in_lane(actions, step, own, copiers)
                take[take_moment(step)] = action
            for freed in turn.frees:
                actions.data.held.pop(freed, None)
        _drop_graphs(actions)
        self.takes.update(takes)

    def rehearse_visits(self, visits: Mapping[StageVisit, Sequence[LaneStep]]) -> None:
        """Rehearse one visit of each kind, and note which visits draw random numbers twice."""
        drawing: dict[TakeKind, bool] = {}
        for visit, (kind, _) in self.assign(visits).items():
            if kind not in drawing:
                drawing[kind] = self.rehearse(visits[visit])
            if drawing[kind] and kind.stage in self.stages.recompute:
                self.drawing.add(visit)

    def record_in_lane(
        self,
        actions: ComputedActions,
        step: LaneStep,
        own: frozenset[int],
        copiers: Collection[int],
    ) -> RecordedAction:
        """Record one action of a lane, with a place for each tensor of its input if that comes from another rank.

        The places are part of the memory that the recordings share, from this action on until nobody needs them.
        """
        places: list[Tensor] = []
        has_source = step.do != WEIGHTS and step.source >= 0
        arrives = has_source and step.source not in own

        def work() -> Results:
            if arrives:
                if not places:
                    places.extend(self.empty_value(step.source))
                actions.data.held[step.source] = tuple(places)
            return _run(actions, step)

        def prepare() -> None:
            for x in places:
                view_without_owning(x).zero_()  # autograd must not see this as a change

        if _does_nothing(actions, step):
            _run(actions, step)
            return RecordedAction((), (), _nothing)
        results, play = self.record_work(work, step, prepare)
        inputs = list(places)
        if self.tape.replays_memory:
            # Later actions use this memory, once this one and those that need it are over.
            inputs = [view_without_owning(x) for x in places]
            results = tuple(view_without_owning(x) for x in results)
        return _with_batch(actions, step, inputs, results, play, copiers)

    def empty_value(self, value: int) -> list[Tensor]:
        """Memory for the tensors of a value."""
        specs = self.data.edges.specs[value]
        device = self.valid.device
        return [torch.empty(s.shape, dtype=s.dtype, device=device) for s in specs]

    def assign(
        self, visits: Mapping[StageVisit, Sequence[LaneStep]]
    ) -> dict[StageVisit, tuple[TakeKind, int]]:
        """The kind of each visit, and the number of the take that it would use."""
        shapes: dict[StageVisit, VisitShape] = {}
        edges = self.data.edges
        batch = self.data.batch
        for (stage, number), steps in visits.items():
            first = steps[0].value
            shapes[stage, number] = (
                batch.shapes[number],
                self.schedule.microbatches[number].cuts,
                batch.named_shapes[number] if batch.named else (),
                edges.incoming.get(first),
                edges.outgoing.get(first),
            )
        return assign_takes(visits, shapes, self.stages.rests)

    def record_visits(self, visits: Mapping[StageVisit, Sequence[LaneStep]]) -> None:
        """Record one take for all visits that can share it."""
        assigned = self.assign(visits)
        takes: dict[tuple[TakeKind, int], Take] = {}
        drawing: set[TakeKind] = set()
        for visit, (kind, number) in assigned.items():
            if (kind, number) not in takes:
                steps = visits[visit]
                if number == 0 and self.rehearse(steps):
                    drawing.add(kind)
                takes[kind, number] = self.record_take(steps)
            self.takes[visit] = takes[kind, number]
            if kind in drawing and kind.stage in self.stages.recompute:
                self.drawing.add(visit)

    def rehearse(self, steps: Sequence[LaneStep]) -> bool:
        """Run the steps once without recording; return whether they drew random numbers."""
        before = states(self.valid.device)
        actions = self.stand_in(steps)
        actions.checks = self.checks
        self.tape.rehearse(partial(_run_all, actions, steps))
        return drawn_since(before, self.valid.device) is not None

    def stand_in(
        self, steps: Sequence[LaneStep], inputs: bool = True
    ) -> ComputedActions:
        """Actions on tensors whose memory never moves; with `inputs`, what they need from other stages is zero."""
        valid: int = self.valid  # type: ignore[assignment]
        visitors = {step.microbatch for step in steps}
        named = self.clone_named(visitors)
        batch = replace(self.data.batch, valid=valid, named=named)
        data = cut_units(self.schedule, batch)
        data.edges = self.data.edges
        own = {step.unit for step in steps}
        data.inputs = _clone_some(self.data.inputs, own)
        data.labels = _clone_some(self.data.labels, own)
        for step in steps if inputs else ():
            if step.source >= 0:
                zeros = [x.zero_() for x in self.empty_value(step.source)]
                data.held[step.source] = tuple(zeros)
        return ComputedActions(self.stages, data, restores_randomness=False)

    def clone_named(self, microbatches: set[int]) -> tuple[Mapping[str, Tensor], ...]:
        """The named tensors of the batch that stages of this rank may ask for, with copies for some micro-batches."""
        asked: set[str] = set()
        for parameters in self.stages.parameters.values():
            asked.update(parameters.after(0))
        named = []
        for number, tensors in enumerate(self.data.batch.named):
            mine = {name: x for name, x in tensors.items() if name in asked}
            if number in microbatches:
                mine = {name: x.clone() for name, x in mine.items()}
            named.append(mine)
        return tuple(named)

    def record_take(self, steps: Sequence[LaneStep]) -> Take:
        """Record all actions of one micro-batch on one stage."""
        self.tape.begin()
        actions = self.stand_in(steps)
        copiers = first_forwards(steps)
        take: dict[TakeMoment, RecordedAction] = {}
        for step in steps:
            take[take_moment(step)] = self.record_action(actions, step, copiers)
        _drop_graphs(actions)
        return take

    def record_action(
        self, actions: ComputedActions, step: LaneStep, copiers: Collection[int]
    ) -> RecordedAction:
        """Record one action of a take."""
        if _does_nothing(actions, step):
            # An empty graph cannot be recorded, but the slices must be marked as done.
            _run(actions, step)
            return RecordedAction((), (), _nothing)
        results, play = self.record_work(partial(_run, actions, step), step)
        inputs: list[Tensor] = []
        if step.do != WEIGHTS and step.source >= 0:
            inputs += actions.data.held[step.source]
        return _with_batch(actions, step, inputs, results, play, copiers)

    def record_work(
        self,
        work: RecordedWork,
        step: LaneStep,
        prepare: Callable[[], None] = _nothing,
    ) -> tuple[Results, Callable[[], None]]:
        """Record the work of a step; raise a `RunError` if that is impossible."""
        try:
            return self.tape.record(work, prepare)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RunError(
                f"{step.instruction} cannot be recorded: {reason}\n"
                "  without recordings it may run: run.cuda_graphs = false, or no tape"
            ) from error


def sent_values(turns: Sequence[Turn], only_later: bool = False) -> Iterator[int]:
    """The values that a lane sends to other ranks; with `only_later` those that it does not send in their own turn."""
    for turn in turns:
        made = turn.step.value if turn.step is not None and only_later else -1
        for message in turn.messages:
            if message.do == SEND and message.value != made:
                yield message.value


def refuse_other_ops(schedule: Schedule) -> None:
    """Raise an error if a schedule does more than compute: recordings keep their tensors where they are."""
    other = next(
        (a for lane in schedule.lanes for a in lane if a.op.kind > WEIGHTS), None
    )
    if other is not None:
        raise ShapeError(
            f"{other} cannot be recorded: recorded actions keep their tensors where they are\n"
            "  train without a tape (run.cuda_graphs = false), or take a schedule without it"
        )


def refuse_shares(modules: Mapping[int, nn.Module]) -> None:
    """Raise an error if the weights of a stage are shared by processes.

    The processes communicate within an action, which cannot be recorded.
    """
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if local_share(parameter) is not parameter:
                raise ShapeError(
                    f"stage {stage} cannot be recorded: {name} is sharded over several "
                    "processes\n  train without a mesh, or without a tape"
                )


# ---------------------------------------------------------------- computed actions, on tensors that never move
def _run_all(actions: ComputedActions, steps: Sequence[LaneStep]) -> None:
    for step in steps:
        _run(actions, step)
    _drop_graphs(actions)


def _run(actions: ComputedActions, step: LaneStep) -> Results:
    """Run one action and return its results: what it passes on, and the losses of a forward."""
    act = (actions.forward, actions.backward, actions.weights)[step.do]
    values = actions.data
    with torch.enable_grad(), adding_to(values.added):
        act(step)
    record_in(None)
    results: list[Tensor] = []
    if step.do != WEIGHTS and step.value in values.held:
        results += [x.detach() for x in values.held[step.value]]
    results += values.losses
    values.losses.clear()
    return tuple(results)


def _does_nothing(actions: ComputedActions, step: LaneStep) -> bool:
    """Whether nothing trains up to this backward, or its I has left nothing for this W."""
    if step.do == FORWARD:
        return False
    if step.value in actions.stages.rests.idle:
        return True
    if step.do != WEIGHTS:
        return False
    kept = actions.kept.get(step.forward)
    return kept is None or kept.ledger is None or not kept.ledger.due


def _drop_graphs(actions: ComputedActions) -> None:
    """Detach all values: their autograd nodes belong to the stream of the recording and must not live on."""
    held = actions.data.held
    for number, value in held.items():
        held[number] = tuple(x.detach() for x in value)


def _with_batch(
    actions: ComputedActions,
    step: LaneStep,
    inputs: list[Tensor],
    results: Results,
    play: Callable[[], None],
    copiers: Collection[int],
) -> RecordedAction:
    """A recorded action with all its inputs: what other stages pass to it, then the tensors of the batch.

    The `copiers` are the forwards that copy the named tensors of their micro-batch for all that come after them.
    """
    names: tuple[str, ...] = ()
    if step.do == FORWARD:
        if step.source < 0:
            inputs.append(actions.data.inputs[step.unit])
        if step.last:
            inputs.append(actions.data.labels[step.unit])
        if step.value in copiers:
            named = actions.data.named(step)
            names = tuple(named)
            inputs += named.values()
    return RecordedAction(tuple(inputs), results, play, names)


def first_forwards(steps: Iterable[LaneStep]) -> set[int]:
    """The first forward of each micro-batch."""
    first: dict[int, int] = {}
    for step in steps:
        if step.do == FORWARD:
            earliest = first.get(step.microbatch, step.value)
            first[step.microbatch] = min(earliest, step.value)
    return set(first.values())


def _clone_some(tensors: Sequence[Tensor], own: set[int]) -> tuple[Tensor, ...]:
    return tuple(x.clone() if unit in own else x for unit, x in enumerate(tensors))


# ---------------------------------------------------------------- takes
# Assigns each micro-batch on a stage to a take: a set of recordings for one micro-batch at a time.
#
# A take is busy from the first action of a micro-batch to its last, so a stage needs as many takes as it has
# micro-batches in flight:
#
#     stage 1    F0  F1  F2  B0  F3  B1  F4  B2 ...
#     take        a   b   c   a   a   b   b   c

# The shapes of a micro-batch, its cuts, and what the stage gets and passes on.
VisitShape: TypeAlias = tuple[Hashable, ...]

TakeMoment = tuple[int, int]  # an action within a take: what it does, on which slice
Take = Mapping[TakeMoment, RecordedAction]


class TakeKind(NamedTuple):
    """What two micro-batches must have in common to use the same take of a stage, one after the other."""

    stage: int
    shape: VisitShape
    steps: tuple[tuple[int, int, bool, bool], ...]  # action, slice, split, last
    idle: bool = False  # nothing trains up to here: the backward has nothing to do
    closed: bool = False  # nothing trains before it: its input needs no gradient


def stage_visits(turns: Sequence[Turn]) -> dict[StageVisit, list[LaneStep]]:
    """The steps of each stage with each micro-batch, in the order of the lane."""
    visits: dict[StageVisit, list[LaneStep]] = {}
    for turn in turns:
        step = turn.step
        if step is not None:
            visit = step.stage, step.microbatch
            visits.setdefault(visit, []).append(step)
    return visits


def assign_takes(
    visits: Mapping[StageVisit, Sequence[LaneStep]],
    shapes: Mapping[StageVisit, VisitShape],
    rests: Rests | None = None,
) -> dict[StageVisit, tuple[TakeKind, int]]:
    """The kind of each visit, and the number of the first take of that kind which is free."""
    rests = rests or Rests()
    assigned: dict[StageVisit, tuple[TakeKind, int]] = {}
    busy_until: dict[TakeKind, list[int]] = {}  # last action of each take's visitor
    for visit, steps in visits.items():
        kind = recording_kind(steps, shapes[visit], rests)
        first = steps[0].value
        last = steps[-1].value
        takes = busy_until.setdefault(kind, [])
        free = (n for n, until in enumerate(takes) if until < first)
        number = next(free, len(takes))
        if number == len(takes):
            takes.append(last)
        else:
            takes[number] = last
        assigned[visit] = kind, number
    return assigned


def recording_kind(
    steps: Sequence[LaneStep], shape: VisitShape, rests: Rests
) -> TakeKind:
    """The kind of a visit."""
    actions = tuple((*take_moment(step), step.split, step.last) for step in steps)
    first = steps[0].value
    return TakeKind(
        steps[0].stage,
        shape,
        actions,
        idle=first in rests.idle,
        closed=first in rests.closed,
    )


def take_moment(step: LaneStep) -> TakeMoment:
    """The key of a step within its take."""
    return step.do, step.instruction.action.slice


# ---------------------------------------------------------------- tape
# A tape records work once and plays it many times. On a GPU it is a CUDA graph: one launch replaces hundreds.

Results: TypeAlias = tuple[Tensor, ...]
RecordedWork: TypeAlias = Callable[[], Results | None]


class Tape(Protocol):
    """Records work. Playing it computes the same results again, in the same memory."""

    @property
    def replays_memory(self) -> bool:
        """Whether playing repeats every write to memory, and no call of Python.

        Then a gradient that was made while recording is overwritten when it is played, and memory that is freed
        between two recordings stays with the tape, which gives it to later ones.
        """
        ...

    def begin(self) -> None:
        """Begin with new memory. What is recorded until the next call is played in the same order, over and over."""
        ...

    def rehearse(self, work: RecordedWork) -> None:
        """Do work without recording it, on the stream where it will be recorded."""
        ...

    def record(
        self, work: RecordedWork, prepare: Callable[[], None] = _nothing
    ) -> tuple[Results, Callable[[], None]]:
        """Record work; return its results and a function that plays it.

        The results may hold no valid numbers before the first time it is played. `prepare` fills the inputs for that,
        if the tape plays the work at once.
        """
        ...


class CudaTape:
    """Records CUDA graphs, in a memory pool that is new after each `begin`."""

    replays_memory = True

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def begin(self) -> None:
        """Begin with a new memory pool, and free what the allocator has kept for other work."""
        torch.cuda.empty_cache()
        self.pool = torch.cuda.graph_pool_handle()

    def rehearse(self, work: RecordedWork) -> None:
        """Do work once, so that kernels are loaded and libraries have allocated their memory."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream().wait_stream(self.stream)

    def record(
        self, work: RecordedWork, prepare: Callable[[], None] = _nothing
    ) -> tuple[Results, Callable[[], None]]:
        """Record one graph.

        It is played at once: the first launch uploads it to the GPU, and that must not happen later, while a
        stream waits for another rank.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                results = work() or ()
            except BaseException:
                # Ending a broken capture raises an error of its own, which says less.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            with warnings.catch_warnings():
                # An action that only passes a tensor on has nothing to record.
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                graph.capture_end()
        prepare()
        graph.replay()
        return results, graph.replay
