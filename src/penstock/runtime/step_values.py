"""The values that one rank holds during a step: hidden states, gradients between stages, and losses.

Values have the number of the action that makes them. A value that another rank makes is `Arriving` until
the first action that needs it waits for it.
"""

from __future__ import annotations

from torch import Tensor

from penstock.runtime.comm.comm import Arriving
from penstock.runtime.lane import LaneStep


class StepValues:
    """Values by the number of the action that makes them."""

    __slots__ = ("held", "losses", "received")

    def __init__(self) -> None:
        self.held: dict[int, Tensor | Arriving] = {}
        self.losses: list[Tensor] = []
        self.received = (
            False  # whether the next action's input lies in a receive buffer
        )

    def tensor(self, value: int) -> Tensor:
        """A value that has arrived."""
        tensor = self.held[value]
        assert isinstance(tensor, Tensor)
        return tensor

    def publish(self, step: LaneStep, y: Tensor) -> None:
        """Keep the output of a forward for the next stage, or as a share of the loss."""
        if step.last:
            self.losses.append(y.detach())
        else:
            self.held[step.value] = y

    def take_buffers(self, step: LaneStep) -> list[Tensor]:
        """The buffer that holds this action's input, if the input was received.

        The action that takes the buffer has to give it back.
        """
        received = self.received
        self.received = False
        return [self.tensor(step.source)] if received else []
