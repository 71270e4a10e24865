"""The messages of one step: receives are posted ahead of time, and sends overlap with what follows them.

A receive that is posted early finds its buffer ready. Posting too many would cost memory, so the number
follows from the window of the `Comm` and the size of the largest message.

Messages may travel in another type than the stages compute with: under autocast hidden states are float32, and as
bfloat16 they are half as large. That rounds them to 8 bits, and their gradients too. As int8 they have a quarter of the
bytes (`penstock.runtime.quantized`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from penstock.runtime.comm.comm import Arriving, Comm, Pending
from penstock.runtime.lane import LaneStep
from penstock.runtime.quantized import Feedback, quantize, quantized_shape, restore
from penstock.runtime.slices import BatchUnits
from penstock.runtime.stage_checks import unfit_message
from penstock.runtime.step_values import StepValues

MAX_SENDS_IN_FLIGHT = 16
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
        sent_as: torch.dtype | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        self.comm = comm
        self.feedback = feedback
        self.receives = receives
        self.shapes = units.shapes
        self.dtype = units.dtype  # of hidden states and their gradients on a rank
        self.sent_as = sent_as or units.dtype  # between ranks
        self.values = values
        self.training = training
        self.autocast = autocast
        self.sends: deque[Pending] = deque()
        self.posted = 0  # receives
        self.reached = 0  # receives
        self.quantized = self.sent_as is torch.int8
        self.sent_shapes = sent_shapes(self.shapes, self.sent_as)
        largest_bytes = max(map(prod, self.sent_shapes)) * self.sent_as.itemsize
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
                shape = self.sent_shapes[step.unit]
                arriving = self.comm.receive(shape, self.sent_as, step.peer)
                self.values.held[step.value] = arriving

    def send(self, step: LaneStep) -> None:
        """Send without waiting; if too many sends are in flight, wait for the oldest first."""
        if len(self.sends) >= MAX_SENDS_IN_FLIGHT:
            self.sends.popleft().wait()
        x = self.values.tensor(step.value).detach()
        shape = self.shapes[step.unit]
        if x.dtype is not self.dtype or x.shape != shape:
            error = unfit_message(step, x, shape, self.dtype, self.autocast)
            if error is not None:
                raise error
        self.sends.append(self.comm.send(self.packed(x, step), step.peer))

    def packed(self, x: Tensor, step: LaneStep) -> Tensor:
        """A value in the type in which it travels."""
        if not self.quantized:
            return x.to(self.sent_as)
        feedback = self.feedback
        if feedback is None or not (step.goes_back or feedback.states):
            return quantize(x)
        return feedback.quantize(x, step.value)

    def arrived(self, arriving: Arriving, played: bool) -> Tensor:
        """Wait for a value, and give it the type that the stages compute with.

        An action that is played from a recording copies its input anyway, and converts it then.
        """
        received = arriving.wait()
        if self.quantized:
            value = restore(received, self.dtype)
            self.comm.give_back(received)
            return value
        if played or received.dtype is self.dtype:
            self.values.received = self.training
            return received
        value = received.to(self.dtype)
        self.comm.give_back(received)
        return value

    def finish(self) -> None:
        """Wait for all sends."""
        while self.sends:
            self.sends.popleft().wait()


def sent_shapes(
    shapes: Sequence[tuple[int, ...]], sent_as: torch.dtype
) -> Sequence[tuple[int, ...]]:
    """The shapes that messages have on their way."""
    if sent_as is not torch.int8:
        return shapes
    return [quantized_shape(shape) for shape in shapes]


def receives_ahead(window_bytes: int, message_bytes: int) -> int:
    """How many receives to post before the lane reaches them: what the window holds, within limits.

    Without a window no receive is posted early.
    """
    if not window_bytes:
        return 0
    fitting = window_bytes // max(message_bytes, 1)
    return min(max(fitting, MIN_RECEIVES_AHEAD), MAX_RECEIVES_AHEAD)
