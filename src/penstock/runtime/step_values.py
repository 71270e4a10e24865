"""The values that one rank holds during a step: hidden states, gradients between stages, losses and outputs.

Values have the number of the action that makes them. A value that another rank makes is `Arriving` until
the first action that needs it waits for it. A value of several tensors is a `Bundle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.runtime.bundle import ArrivingBundle, Bundle
from penstock.runtime.comm.comm import Arriving
from penstock.runtime.lane import LaneStep

Held: TypeAlias = Tensor | Arriving | Bundle | ArrivingBundle


class StepValues:
    """Values by the number of the action that makes them.

    With `keeps_outputs`, what the last stages of the paths return is kept too, by unit and without its graph.
    """

    __slots__ = ("added", "buffers", "held", "losses", "outputs", "received")

    def __init__(self, keeps_outputs: bool = False) -> None:
        self.held: dict[int, Held] = {}
        self.losses: list[Tensor] = []
        self.added: list[Tensor] = []  # by layers, in the forward that runs now
        self.outputs: dict[int, object] | None = {} if keeps_outputs else None
        # Whether the next action's input lies in a receive buffer, or the buffers if it has several tensors.
        self.received = False
        self.buffers: list[Tensor] = []

    def tensor(self, value: int) -> Tensor:
        """A value of one tensor that has arrived."""
        tensor = self.held[value]
        assert isinstance(tensor, Tensor)
        return tensor

    def bundle(self, value: int) -> Bundle:
        """A value of several tensors that has arrived."""
        bundle = self.held[value]
        assert isinstance(bundle, Bundle)
        return bundle

    def tensors(self, value: int) -> tuple[Tensor, ...]:
        """The tensors of a value that has arrived, however many it has."""
        held = self.held[value]
        return (held,) if isinstance(held, Tensor) else self.bundle(value).tensors

    def publish(self, step: LaneStep, y: Tensor | Bundle) -> None:
        """Keep the output of a forward for the next stage, or as a share of the loss."""
        if step.last:
            assert isinstance(y, Tensor)
            self.losses.append(y.detach())
        else:
            self.held[step.value] = y

    def take_buffers(self, step: LaneStep) -> list[Tensor]:
        """The buffers that hold this action's input, if the input was received.

        The action that takes the buffers has to give them back.
        """
        if self.buffers:
            buffers = self.buffers
            self.buffers = []
            return buffers
        received = self.received
        self.received = False
        return [self.tensor(step.source)] if received else []


def detached(output: object) -> object:
    """What a stage returned, without its graph."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {name: detached(value) for name, value in output.items()}
    if isinstance(output, tuple | list):
        return tuple(detached(value) for value in output)
    return output


def joined(pieces: Sequence[Any]) -> Any:
    """The outputs of the slices of a micro-batch as one, joined along the tokens; None if they are not here."""
    first = pieces[0]
    if len(pieces) == 1 or first is None:
        return first
    if isinstance(first, Mapping):
        return {name: joined([piece[name] for piece in pieces]) for name in first}
    if isinstance(first, tuple):
        return tuple(joined(parts) for parts in zip(*pieces, strict=True))
    return torch.cat(list(pieces), dim=1)
