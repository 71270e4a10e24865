"""Actions that are recorded once and then played: on a GPU one launch replaces hundreds (CUDA graphs).

Before the first step, the actions of a stage with one micro-batch are recorded in their order, on tensors whose
memory never moves. To play an action, its inputs are copied there first.

One set of such recordings is a take (`penstock.runtime.takes`). It has memory for one micro-batch: x and y of every
slice, what the backward keeps, and the gradients. Memory that one of its actions has freed can serve only later
actions of the same take, because nothing is known about how the actions of two takes will interleave. Recorded
stages therefore need more memory than others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from penstock.errors import RunError, ShapeError
from penstock.ir.schedule import Schedule
from penstock.runtime.backward import record_in
from penstock.runtime.batch import Batch
from penstock.runtime.dtensor_share import local_share
from penstock.runtime.earlier_gradients import EarlierGradients
from penstock.runtime.frozen_stages import StageVisit
from penstock.runtime.lane import Do, LaneStep, Turn
from penstock.runtime.randomness import (
    DRAWING_LOCK,
    Drawn,
    drawing_again,
    drawn_since,
    states,
)
from penstock.runtime.slices import BatchUnits, cut_units
from penstock.runtime.stage_actions import (
    ComputedActions,
    FirstStepChecks,
    GiveBack,
    LaneStages,
)
from penstock.runtime.step_values import StepValues
from penstock.runtime.takes import (
    Kind,
    TakeMoment,
    assign_takes,
    stage_visits,
    take_moment,
)
from penstock.runtime.tape import Tape
from penstock.runtime.torch_internals import recording_bytes, zero_all


# ---------------------------------------------------------------- playing
class PlayedActions:
    """The actions of one step, played from recordings."""

    def __init__(
        self,
        recordings: Recordings,
        units: BatchUnits,
        values: StepValues,
        give_back: GiveBack,
    ) -> None:
        self.recordings = recordings
        self.units = units
        self.values = values
        self.give_back = give_back
        self.kept: set[int] = set()
        self.drawn: dict[int, Drawn] = {}  # random numbers, by forward

    def forward(self, step: LaneStep) -> None:
        """Play a forward. The loss is copied, because the next micro-batch of the take overwrites it."""
        inputs = self.inputs_of(step)
        if self.recordings.draws_again(step):
            y = self.play_and_remember_randomness(step, inputs)
        else:
            y = self.recordings.play(step, *inputs)
        assert y is not None
        self.kept.add(step.value)
        self.values.publish(step, y.clone() if step.last else y)
        self.give_back_input(step)

    def inputs_of(self, step: LaneStep) -> list[Tensor]:
        """The inputs of a forward: tokens or a hidden state and, on the last stage, labels."""
        inputs = []
        if step.source >= 0:
            inputs.append(self.values.tensor(step.source))
        else:
            inputs.append(self.units.inputs[step.unit])
        if step.last:
            inputs.append(self.units.labels[step.unit])
        return inputs

    def play_and_remember_randomness(
        self, step: LaneStep, inputs: Sequence[Tensor]
    ) -> Tensor | None:
        """Play a forward that draws random numbers, which its backward will draw again.

        A CUDA graph draws from the generator's state at the time it is played, so setting back that state is enough.
        """
        device = inputs[0].device
        with DRAWING_LOCK:
            before = states(device)
            y = self.recordings.play(step, *inputs)
            drawn = drawn_since(before, device)
        if drawn is not None:
            self.drawn[step.value] = drawn
        return y

    def backward(self, step: LaneStep) -> None:
        """Play a backward. Its result is copied: it may still be in flight when the take is played again."""
        if step.value not in self.recordings.stages.rests.idle:
            inputs = [] if step.last else [self.values.tensor(step.source)]
            with self.first_randomness(step):
                gradient = self.recordings.play(step, *inputs)
            if gradient is not None:
                self.values.held[step.value] = gradient.clone()
        if not step.split:
            self.kept.remove(step.forward)
        self.give_back_input(step)

    def first_randomness(self, step: LaneStep) -> AbstractContextManager[None]:
        """A context that draws the random numbers of the forward again, if it drew any."""
        drawn = self.drawn.pop(step.forward, None)
        if drawn is None:
            return nullcontext()
        return drawing_again(drawn, self.recordings.device, step.instruction)

    def weights(self, step: LaneStep) -> None:
        """Play the weight gradients that the I has left."""
        self.recordings.play(step)
        self.kept.remove(step.forward)

    def give_back_input(self, step: LaneStep) -> None:
        """Give back the receive buffer of an input, which has been copied."""
        for buffer in self.values.take_buffers(step):
            self.give_back(buffer)


@dataclass(slots=True)
class RecordedAction:
    """One action of a take."""

    inputs: tuple[Tensor, ...]  # where the recording reads its inputs
    result: Tensor | None  # where it leaves its result
    play: Callable[[], None]

    def __call__(self, *inputs: Tensor) -> Tensor | None:
        """Play the recording on these inputs."""
        for target, source in zip(self.inputs, inputs, strict=True):
            target.copy_(source)
        self.play()
        return self.result


Take = Mapping[TakeMoment, RecordedAction]


class Recordings:
    """The recorded actions of one rank, for batches of one shape."""

    def __init__(
        self,
        stages: LaneStages,
        schedule: Schedule,
        turns: Sequence[Turn],
        units: BatchUnits,
        tape: Tape,
        checks: FirstStepChecks | None = None,
    ) -> None:
        self.stages = stages
        self.shapes = units.batch.shapes
        self.device = units.batch.inputs[0].device
        self.valid = torch.ones((), device=self.device)
        visits = stage_visits(turns)
        modules = [stages.modules[stage] for stage in {stage for stage, _ in visits}]
        self.gradients = FixedGradients(modules)
        earlier = EarlierGradients()
        earlier.lay_aside(self.gradients.parameters)
        self.gradients.install()
        session = RecordingSession(stages, schedule, units, self.valid, tape, checks)
        session.record_visits(visits)
        earlier.restore()
        self.takes = session.takes
        self.drawing = session.drawing

    @cached_property
    def reserved_bytes(self) -> int:
        """GPU memory that only recordings can use. Computed once, because a look at all of the memory is slow."""
        return recording_bytes() if self.device.type == "cuda" else 0

    def fits(self, batch: Batch) -> bool:
        """Whether a batch has the shape that was recorded."""
        return batch.shapes == self.shapes and not batch.starts

    def begin(self, valid: int) -> None:
        """Begin a step with this number of valid tokens."""
        self.valid.fill_(valid)
        self.gradients.begin()

    def draws_again(self, step: LaneStep) -> bool:
        """Whether the backward draws the random numbers of this forward again."""
        return (step.stage, step.microbatch) in self.drawing

    def play(self, step: LaneStep, *inputs: Tensor) -> Tensor | None:
        """Play the recording of a step."""
        return self.takes[step.stage, step.microbatch][take_moment(step)](*inputs)


# ---------------------------------------------------------------- recording
class RecordingSession:
    """Records the takes of one rank.

    `valid` is a tensor that stands for the number of valid tokens, which changes from step to step.
    """

    def __init__(
        self,
        stages: LaneStages,
        schedule: Schedule,
        units: BatchUnits,
        valid: Tensor,
        tape: Tape,
        checks: FirstStepChecks | None,
    ) -> None:
        self.stages = stages
        self.schedule = schedule
        self.units = units
        self.valid = valid
        self.tape = tape
        self.checks = checks
        self.takes: dict[StageVisit, Take] = {}
        self.drawing: set[StageVisit] = set()  # their backward draws the numbers again

    def record_visits(self, visits: Mapping[StageVisit, Sequence[LaneStep]]) -> None:
        """Record one take for all visits that can share it."""
        shapes = []
        for number, shape in enumerate(self.units.batch.shapes):
            shapes.append((*shape, *self.schedule.microbatches[number].cuts))
        assigned = assign_takes(visits, shapes, self.stages.rests)
        takes: dict[tuple[Kind, int], Take] = {}
        drawing: set[Kind] = set()
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

    def stand_in(self, steps: Sequence[LaneStep]) -> ComputedActions:
        """Actions for one micro-batch, on tensors whose memory never moves."""
        valid: int = self.valid  # type: ignore[assignment]
        batch = replace(self.units.batch, valid=valid)
        units = cut_units(self.schedule, batch, self.units.width, self.units.dtype)
        own = {step.unit for step in steps}
        units.inputs = _clone_some(self.units.inputs, own)
        units.labels = _clone_some(self.units.labels, own)
        values = StepValues()
        shapes = units.shapes
        for step in steps:
            if step.source >= 0:
                shape = shapes[step.unit]
                device = units.inputs[step.unit].device
                zeros = torch.zeros(shape, dtype=units.dtype, device=device)
                values.held[step.source] = zeros
        return ComputedActions(
            self.stages, units, values, _nothing_to_give, restores_randomness=False
        )

    def record_take(self, steps: Sequence[LaneStep]) -> Take:
        """Record all actions of one micro-batch on one stage."""
        self.tape.begin()
        actions = self.stand_in(steps)
        take: dict[TakeMoment, RecordedAction] = {}
        for step in steps:
            take[take_moment(step)] = self.record_action(actions, step)
        _drop_graphs(actions)
        return take

    def record_action(self, actions: ComputedActions, step: LaneStep) -> RecordedAction:
        """Record one action."""
        if _does_nothing(actions, step):
            # An empty graph cannot be recorded, but the slices must be marked as done.
            _run(actions, step)
            return RecordedAction((), None, _play_nothing)
        try:
            result, play = self.tape.record(partial(_run, actions, step))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RunError(
                f"{step.instruction} cannot be recorded: {reason}\n"
                "  without recordings it may run: run.graphs = false, or no tape"
            ) from error
        return RecordedAction(_inputs_of(actions, step), result, play)


class FixedGradients:
    """Gradients whose memory never moves, because recordings add to them there."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        trained: dict[nn.Parameter, None] = {}
        for module in modules:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    trained[parameter] = None
        self.parameters = list(trained)
        self.places = [torch.zeros_like(parameter) for parameter in trained]

    def install(self) -> None:
        """Make the fixed memory the gradient of every parameter."""
        for parameter, place in zip(self.parameters, self.places, strict=True):
            parameter.grad = place

    def move_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy gradients that are about to be laid aside out of the fixed memory.

        This step writes there, so the gradients of earlier steps cannot stay.
        """
        pairs = zip(self.parameters, self.places, strict=True)
        place_of = dict(pairs)
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient is place_of.get(parameter):
                parameter.grad = gradient.clone()

    def begin(self) -> None:
        """Begin a step, which adds to the gradients that parameters have now."""
        empty = []
        for parameter, place in zip(self.parameters, self.places, strict=True):
            if parameter.grad is None:
                empty.append(place)
            elif parameter.grad is not place:
                place.copy_(parameter.grad)
        if empty:
            zero_all(empty)
        self.install()


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


def _run(actions: ComputedActions, step: LaneStep) -> Tensor | None:
    """Run one action and return its result."""
    act = (actions.forward, actions.backward, actions.weights)[step.do]
    with torch.enable_grad():
        act(step)
    record_in(None)
    if step.last and step.do is Do.FORWARD:
        return actions.values.losses.pop()
    if step.do is Do.WEIGHTS:
        return None
    result = actions.values.held.get(step.value)
    return result.detach() if isinstance(result, Tensor) else None


def _does_nothing(actions: ComputedActions, step: LaneStep) -> bool:
    """Whether nothing trains up to this backward, or its I has left nothing for this W."""
    if step.do is Do.FORWARD:
        return False
    if step.value in actions.stages.rests.idle:
        return True
    if step.do is not Do.WEIGHTS:
        return False
    kept = actions.kept.get(step.forward)
    return kept is None or kept.ledger is None or not kept.ledger.due


def _drop_graphs(actions: ComputedActions) -> None:
    """Detach all values: their autograd nodes belong to the stream of the recording and must not live on."""
    held = actions.values.held
    for number, value in held.items():
        if isinstance(value, Tensor):
            held[number] = value.detach()


def _inputs_of(actions: ComputedActions, step: LaneStep) -> tuple[Tensor, ...]:
    """The tensors that an action reads its inputs from."""
    if step.do is Do.WEIGHTS:
        return ()
    inputs = []
    if step.source >= 0:
        inputs.append(actions.values.tensor(step.source))
    elif step.do is Do.FORWARD:
        inputs.append(actions.units.inputs[step.unit])
    if step.do is Do.FORWARD and step.last:
        inputs.append(actions.units.labels[step.unit])
    return tuple(inputs)


def _clone_some(tensors: Sequence[Tensor], own: set[int]) -> tuple[Tensor, ...]:
    clones = []
    for unit, tensor in enumerate(tensors):
        clones.append(tensor.clone() if unit in own else tensor)
    return tuple(clones)


def _play_nothing() -> None:
    """Play an action that does nothing."""


def _nothing_to_give(buffer: Tensor) -> None:
    """A recording receives no messages, so it has no receive buffer to give back."""
