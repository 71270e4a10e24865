"""One step of one rank: walks its lane once, action after action, with the messages in between.

    turn    wait for the input ─► run the action ─► post receives, send ─► drop values that nobody needs

`penstock.runtime.actions` says what the actions do and the section on messages how values travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.cost.memory import MAX_SENDS_IN_FLIGHT
from penstock.errors import ShapeError
from penstock.ir.action import FORWARD, METHODS
from penstock.ir.lane import RECEIVE, Lane, LaneStep
from penstock.ir.timeline import Timeline
from penstock.runtime.actions import StageActions
from penstock.runtime.backward import record_in
from penstock.runtime.batch import StepData
from penstock.runtime.comm.comm import Arriving, Comm, Pending
from penstock.runtime.gradients import StepGradients
from penstock.runtime.loss import adding_to
from penstock.runtime.passed_values import (
    Feedback,
    TensorSpec,
    described,
    has_gradient,
    quantize,
    restore,
)
from penstock.runtime.recorder import (
    Clock,
    Moment,
    Recorder,
    Recording,
    collector_paused,
)
from penstock.runtime.replay import Recordings
from penstock.torch_internals import sleep_until_done


@dataclass(eq=False, slots=True, weakref_slot=True)
class Walk:
    """One step of one rank under way.

    A `clock` times every action. With `sums=False` the gradients of replicas wait for the sums of a later step.
    """

    lane: Lane
    actions: StageActions
    messages: Messages
    data: StepData
    gradients: StepGradients
    recordings: Recordings | None = None
    clock: Clock | None = None
    sums: bool = True
    start: list[Moment] = field(default_factory=list, init=False)
    end: list[Moment] = field(default_factory=list, init=False)
    # While each action runs.
    forwards_kept: list[int] = field(default_factory=list, init=False)
    # Of all actions, by the clock of the host.
    work_seconds: float = field(default=0.0, init=False)

    def run(self, comm: Comm, recorder: Recorder) -> Result:
        """Walk the lane without pauses for the garbage collector, then sum the loss over the ranks."""
        try:
            with (
                collector_paused(),
                torch.set_grad_enabled(self.data.training),
                adding_to(self.data.added),
            ):
                self.walk()
        except BaseException:
            self.gradients.abandon()
            raise
        finally:
            record_in(None)
        loss = self.data.total_loss()
        pending = comm.add(loss, tuple(range(comm.ranks)))
        sleeps = comm.channels is not None  # NCCL needs the cores
        if self.clock is None:
            return Result(loss, pending, None, sleeps)
        start = self.clock.seconds(self.start)
        end = self.clock.seconds(self.end)
        sums = self.gradients.replicas.times() if self.gradients.sums else {}
        recording = recorder.gather(start, end, self.forwards_kept, sums)
        return Result(loss, pending, recording, sleeps)

    def walk(self) -> None:
        """Run the turns of the lane: the hot loop."""
        training = self.data.training
        held = self.data.held
        recordings = self.recordings
        lane = self.lane
        messages = self.messages
        gradients = self.gradients
        actions = self.actions
        # Recorded actions have no O and R, and the executor refuses them.
        act: list[Any] = [getattr(actions, method, None) for method in METHODS]
        self.begin()
        tell_gradients = training and gradients.wait_for_actions
        for number, turn in enumerate(lane.turns):
            step = turn.step
            if step is not None and (training or step.do == FORWARD):
                lane.position = number
                if step.source in messages.arriving:
                    places = recordings.action(step).inputs if recordings else None
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
                if message.do == RECEIVE:
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
        batch = self.data.batch
        fixed = None
        if self.recordings is not None:
            self.recordings.begin(batch.valid)
            fixed = self.recordings.gradients
        if self.data.training:
            self.gradients.begin(batch, fixed, self.sums)
        self.gradients.shards.begin()
        self.messages.begin()

    def finish(self) -> None:
        """Wait for sends and sums."""
        self.messages.finish()
        if self.data.carries is not None:
            self.data.carries.check_empty()
        self.gradients.shards.finish()
        if self.data.training:
            self.gradients.finish(self.data.batch)

    def run_timed(
        self, clock: Clock, step: LaneStep, act: Callable[[LaneStep], None]
    ) -> None:
        """Run an action, and note when it ran and how many forwards were kept meanwhile."""
        self.start.append(clock.now())
        act(step)
        self.end.append(clock.now())
        kept = self.actions.kept
        just_dropped = step.do != FORWARD and step.forward not in kept
        self.forwards_kept.append(len(kept) + just_dropped)


# ---------------------------------------------------------------- step result
# The result of a step: its loss and, on request, its timeline and the outputs of the last stages.


@dataclass(eq=False, repr=False, slots=True)
class Result:
    """The mean loss of a step over all valid tokens and, if it was timed, its timeline. All ranks get the same.

    Both are summed over the ranks while the caller goes on. Reading them waits for the sums. `outputs` has what the
    last stage returned for each micro-batch, without graphs, if the caller asked for it; None for a micro-batch that
    ends on another rank. With `sleeps`, the host sleeps until a GPU has the loss, instead of keeping a core busy.
    """

    _loss: Tensor
    _sum: Pending
    _recording: Recording | None = None
    _sleeps: bool = False
    outputs: tuple[Any, ...] = ()

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


# ---------------------------------------------------------------- messages
# The messages of one step: receives are posted ahead of time, and sends overlap with what follows them.
#
# A receive that is posted early finds its buffer ready. Posting too many would cost memory, so the number
# follows from the window of the `Comm` and the size of the largest message.
#
# Messages may travel in another type than the stages compute with: under autocast hidden states are float32, and as
# bfloat16 they are half as large. That rounds them to 8 bits, and their gradients too. As int8 they have a quarter of
# the bytes (`penstock.runtime.passed_values`).
#
# Where stages pass several tensors, each is a message of its own, one right after the other in the same order on both
# sides. `penstock.ir.verify` proves the order of results, and it stays proven if a result takes several messages: both
# ends of the first one have reached it, so they go on to the next together.

MIN_RECEIVES_AHEAD = 4

MAX_RECEIVES_AHEAD = 256


class Messages:
    """The messages of one rank in one step."""

    def __init__(
        self,
        comm: Comm,
        receives: Sequence[LaneStep],
        data: StepData,
        autocast: bool,
        feedback: Feedback | None = None,
    ) -> None:
        self.comm = comm
        self.feedback = feedback if data.training else None
        self.receives = receives
        self.specs = data.edges.specs
        self.data = data
        self.arriving: dict[int, list[Arriving]] = {}  # by value
        self.training = data.training
        self.autocast = autocast
        self.sends: deque[Pending] = deque()
        self.posted = 0  # receives
        self.reached = 0  # receives
        largest_bytes = max(data.edges.unit_bytes, default=0)
        self.ahead = receives_ahead(comm.window, largest_bytes)

    def begin(self) -> None:
        """Post the first receives."""
        self.post(self.ahead)

    def reach_receive(self) -> None:
        """The lane has come to a receive: post it and, if the window is half empty, refill it."""
        self.reached += 1
        if self.posted < self.reached + self.ahead // 2:
            self.post(self.reached + self.ahead)

    def post(self, count: int) -> None:
        """Post receives until `count` of them are posted."""
        last = min(count, len(self.receives))
        while self.posted < last:
            step = self.receives[self.posted]
            self.posted += 1
            if self.training or not step.goes_back:
                self.arriving[step.value] = [
                    self.comm.receive(spec.sent_shape, spec.sent_as, step.peer)
                    for spec in self.specs[step.value]
                ]

    def send(self, step: LaneStep) -> None:
        """Send a value without waiting."""
        value, specs = self.data.held[step.value], self.specs[step.value]
        for place, (x, spec) in enumerate(zip(value, specs, strict=True)):
            self.send_tensor(step, x, spec, place)

    def send_tensor(
        self, step: LaneStep, x: Tensor, spec: TensorSpec, place: int
    ) -> None:
        """Send a tensor; if too many sends are in flight, wait for the oldest first."""
        if len(self.sends) >= MAX_SENDS_IN_FLIGHT:
            self.sends.popleft().wait()
        shape, dtype, _ = spec
        if x.dtype is not dtype or x.shape != shape:
            error = unfit_message(step, x, shape, dtype, self.autocast)
            if error is not None:
                raise error
        packed = self.packed(x.detach(), step, spec, place)
        self.sends.append(self.comm.send(packed, step.peer))

    def packed(self, x: Tensor, step: LaneStep, spec: TensorSpec, place: int) -> Tensor:
        """A tensor in the type in which it travels; `place` is its place among those of a value."""
        if not spec.quantized:
            return x.to(spec.sent_as)
        feedback = self.feedback
        if feedback is None or not (step.goes_back or feedback.states):
            return quantize(x)
        return feedback.quantize(x, (step.value, place))

    def wait_for(self, source: int, places: Sequence[Tensor] | None) -> None:
        """Wait for a value that another rank sends, and give it the type that the stages compute with.

        An action that is played from a recording reads its input at certain `places`. The value arrives there if the
        `Comm` can do that. Otherwise the action copies it, and converts it then.
        """
        value = []
        tensors = zip(self.arriving.pop(source), self.specs[source], strict=True)
        for number, (one, spec) in enumerate(tensors):
            place = None
            if places is not None and spec.travels_as_it_is:
                place = places[number]
            received = one.wait(place)
            converts = places is not None and not spec.quantized
            if not converts and received.dtype is not spec.dtype:
                received = unpacked(received, spec)
            value.append(received)
        self.data.held[source] = tuple(value)

    def finish(self) -> None:
        """Wait for all sends."""
        while self.sends:
            self.sends.popleft().wait()


def unpacked(received: Tensor, spec: TensorSpec) -> Tensor:
    """A tensor that has arrived, in the type that the stages compute with."""
    if spec.quantized:
        return restore(received, spec.dtype)
    return received.to(spec.dtype)


def receives_ahead(window_bytes: int, message_bytes: int) -> int:
    """How many receives to post before the lane reaches them: what the window holds, within limits.

    Without a window no receive is posted early.
    """
    if not window_bytes:
        return 0
    fitting = window_bytes // max(message_bytes, 1)
    return min(max(fitting, MIN_RECEIVES_AHEAD), MAX_RECEIVES_AHEAD)


def unfit_message(
    step: LaneStep,
    x: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    autocast: bool,
) -> ShapeError | None:
    """The error for a result that the next rank does not expect; None if a cast without loss is enough."""
    action = step.instruction.action
    what = "gave the gradient" if step.goes_back else "returned"
    found = f"stage {action.stage} {what} {described(x)} in {action}"
    tried = (
        "\n  that is what it returned when it was tried before the first step; shapes and types must follow from those "
        "of the input, and not from its numbers"
    )
    if tuple(x.shape) != tuple(shape):
        expected = f"rank {step.peer} expects the shape {tuple(shape)}"
        return ShapeError(f"{found}, but {expected}{tried}")
    promoted = torch.promote_types(x.dtype, dtype)
    casts = has_gradient(x.dtype) and has_gradient(dtype)
    casts = casts and (dtype.is_complex or not x.is_complex())
    if not casts or (not autocast and promoted is not dtype):
        name = str(dtype).removeprefix("torch.")
        return ShapeError(f"{found}, but rank {step.peer} expects {name}{tried}")
    return None
