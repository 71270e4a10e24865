"""One step of one rank: walks its lane once, action after action, with the messages in between.

    turn    wait for the input ─► run the action ─► post receives, send ─► drop values that nobody needs

`penstock.runtime.actions` says what the actions do and `penstock.runtime.messages` how values travel.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.ir.lane import Do, Lane, LaneStep
from penstock.ir.timeline import Timeline
from penstock.runtime.actions import StageActions
from penstock.runtime.backward import record_in
from penstock.runtime.comm.comm import Comm, Pending
from penstock.runtime.gradients import StepGradients
from penstock.runtime.loss import adding_to
from penstock.runtime.messages import Messages
from penstock.runtime.recorder import (
    Clock,
    Moment,
    Recorder,
    Recording,
    collector_paused,
)
from penstock.runtime.replay import Recordings
from penstock.runtime.units import BatchUnits, StepValues
from penstock.torch_internals import sleep_until_done


class Walk:
    """One step of one rank under way.

    With `training=False` it runs only the forwards. A `clock` times every action. With `sums=False` the gradients of
    replicas wait for the sums of a later step.
    """

    def __init__(
        self,
        lane: Lane,
        actions: StageActions,
        messages: Messages,
        units: BatchUnits,
        values: StepValues,
        gradients: StepGradients,
        recordings: Recordings | None = None,
        training: bool = True,
        clock: Clock | None = None,
        sums: bool = True,
    ) -> None:
        self.lane = lane
        self.actions = actions
        self.messages = messages
        self.units = units
        self.values = values
        self.gradients = gradients
        self.recordings = recordings
        self.training = training
        self.clock = clock
        self.sums = sums
        self.start: list[Moment] = []
        self.end: list[Moment] = []
        self.forwards_kept: list[int] = []  # while each action runs
        self.work_seconds = 0.0  # of all actions, by the clock of the host

    def run(self, comm: Comm, recorder: Recorder) -> Result:
        """Walk the lane without pauses for the garbage collector, then sum the loss over the ranks."""
        try:
            with (
                collector_paused(),
                torch.set_grad_enabled(self.training),
                adding_to(self.values.added),
            ):
                self.walk()
        except BaseException:
            self.gradients.abandon()
            raise
        finally:
            record_in(None)
        loss = self.total_loss()
        pending = comm.add(loss, tuple(range(comm.ranks)))
        sleeps = comm.channels is not None  # NCCL needs the cores
        if self.clock is None:
            return Result(loss, pending, sleeps=sleeps)
        start = self.clock.seconds(self.start)
        end = self.clock.seconds(self.end)
        sums = self.gradients.replicas.times() if self.gradients.sums else {}
        recording = recorder.gather(start, end, self.forwards_kept, sums)
        return Result(loss, pending, recording, sleeps)

    def total_loss(self) -> Tensor:
        """The sum of the losses that were computed on this rank."""
        losses = self.values.losses
        device = losses[0].device if losses else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        for loss in losses:
            total += loss
        return total

    def walk(self) -> None:
        """Run the turns of the lane: the hot loop."""
        training = self.training
        held = self.values.held
        recordings = self.recordings
        lane = self.lane
        messages = self.messages
        gradients = self.gradients
        actions = self.actions
        act = (actions.forward, actions.backward, actions.weights)
        self.begin()
        tell_gradients = training and gradients.wait_for_actions
        for number, turn in enumerate(lane.turns):
            step = turn.step
            if step is not None and (training or step.do is Do.FORWARD):
                lane.position = number
                if step.source in messages.arriving:
                    places = recordings.places(step) if recordings else None
                    messages.wait_for(step.source, places)
                began = perf_counter()
                if self.clock is not None:
                    self.run_timed(self.clock, step, act[step.do])
                else:
                    act[step.do](step)
                self.work_seconds += perf_counter() - began
                if tell_gradients:
                    gradients.after(step.value)
            for message in turn.messages:
                if message.do is Do.RECEIVE:
                    messages.reach_receive()
                elif training or not message.goes_back:
                    messages.send(message)
            for freed in turn.frees:
                held.pop(freed, None)
        self.finish()

    def begin(self) -> None:
        """Start the clock, prepare the gradients and post the first receives."""
        if self.clock is not None:
            self.clock.begin()
        batch = self.units.batch
        fixed = None
        if self.recordings is not None:
            self.recordings.begin(batch.valid)
            fixed = self.recordings.gradients
        if self.training:
            self.gradients.begin(batch, fixed, self.sums)
        self.gradients.shards.begin()
        self.messages.begin()

    def finish(self) -> None:
        """Wait for sends and sums."""
        self.messages.finish()
        if self.units.carries is not None:
            self.units.carries.check_empty()
        self.gradients.shards.finish()
        if self.training:
            self.gradients.finish(self.units.batch)

    def run_timed(
        self, clock: Clock, step: LaneStep, act: Callable[[LaneStep], None]
    ) -> None:
        """Run an action, and note when it ran and how many forwards were kept meanwhile."""
        self.start.append(clock.now())
        act(step)
        self.end.append(clock.now())
        kept = self.actions.kept
        just_dropped = step.do is not Do.FORWARD and step.forward not in kept
        self.forwards_kept.append(len(kept) + just_dropped)


# ---------------------------------------------------------------- step result
# The result of a step: its loss and, on request, its timeline and the outputs of the last stages.


class Result:
    """The mean loss of a step over all valid tokens and, if it was timed, its timeline. All ranks get the same.

    Both are summed over the ranks while the caller goes on. Reading them waits for the sums. `outputs` has what the
    last stage returned for each micro-batch, without graphs, if the caller asked for it; None for a micro-batch that
    ends on another rank. With `sleeps`, the host sleeps until a GPU has the loss, instead of keeping a core busy.
    """

    __slots__ = ("_loss", "_recording", "_sleeps", "_sum", "outputs")

    def __init__(
        self,
        loss: Tensor,
        pending: Pending,
        recording: Recording | None = None,
        sleeps: bool = False,
    ) -> None:
        self._loss = loss
        self._sum = pending
        self._recording = recording
        self._sleeps = sleeps
        self.outputs: tuple[Any, ...] = ()

    def wait(self) -> None:
        """Wait until the loss is summed, without reading it: on a GPU, the host does not wait."""
        self._sum.wait()

    @property
    def loss(self) -> float:
        """The mean over all valid tokens of the step."""
        self._sum.wait()
        if self._sleeps and self._loss.is_cuda:
            sleep_until_done()
        return float(self._loss)

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the step; None if the step was not timed."""
        return None if self._recording is None else self._recording.timeline()
