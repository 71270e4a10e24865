"""The messages of one step: receives are posted ahead of time, and sends overlap with what follows them.

A receive that is posted early finds its buffer ready. Posting too many would cost memory, so the number
follows from the window of the `Comm` and the size of the largest message.

Messages may travel in another type than the stages compute with: under autocast hidden states are float32, and as
bfloat16 they are half as large. That rounds them to 8 bits, and their gradients too. As int8 they have a quarter of the
bytes (`penstock.runtime.quantized`).

Where stages pass several tensors, each is a message of its own, one right after the other in the same order on both
sides. `penstock.ir.verify` proves the order of results, and it stays proven if a result takes several messages: both
ends of the first one have reached it, so they go on to the next together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.cost.memory import MAX_SENDS_IN_FLIGHT
from penstock.errors import ShapeError
from penstock.ir.lane import LaneStep
from penstock.runtime.comm.comm import Arriving, Comm, Pending
from penstock.runtime.edges import TensorSpec
from penstock.runtime.passed_values import described, has_gradient
from penstock.runtime.quantized import Feedback, quantize, restore
from penstock.runtime.units import BatchUnits, StepValues

MIN_RECEIVES_AHEAD = 4

MAX_RECEIVES_AHEAD = 256


class Messages:
    """The messages of one rank in one step."""

    def __init__(
        self,
        comm: Comm,
        receives: Sequence[LaneStep],
        units: BatchUnits,
        values: StepValues,
        training: bool,
        autocast: bool,
        feedback: Feedback | None = None,
    ) -> None:
        self.comm = comm
        self.feedback = feedback
        self.receives = receives
        self.specs = units.edges.specs
        self.values = values
        self.arriving: dict[int, list[Arriving]] = {}  # by value
        self.training = training
        self.autocast = autocast
        self.sends: deque[Pending] = deque()
        self.posted = 0  # receives
        self.reached = 0  # receives
        largest_bytes = max(units.edges.unit_bytes, default=0)
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
        value, specs = self.values.held[step.value], self.specs[step.value]
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
            if received is place or converts or received.dtype is spec.dtype:
                value.append(received)
                if received is not place and self.training:
                    self.values.buffers.append(received)
            else:
                value.append(unpacked(received, spec))
                self.comm.give_back(received)
        self.values.held[source] = tuple(value)

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
