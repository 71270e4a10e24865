"""Mirrors: copies of parts that only one rank trains, kept up to date in the memory of another rank.

    rank 1   part 1   backward ── gradients ──┐     sum of the step ─► update
                                              ▼           │
    rank 2   mirror of part 1            waits for them   └──────────► the same update

A mirror repeats the updates of its part. So gradients travel, and not weights with optimizer state,
which have three times their bytes with AdamW. The update of a parameter depends on that parameter
alone, so part and mirror have the same bits.

A rank sends its gradients as soon as they are complete. Most ranks then wait for the end of the
pipeline, so this costs them nothing. The rank with the mirror joins the sum that ends the step only
when it has them. So whoever has the result of a step knows that the mirrors can make the same step,
even if the rank whose part they mirror is lost at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.config import OptimizerConfig
from penstock.runtime import Comm
from penstock.runtime.comm.comm import Arriving, Pending
from penstock.runtime.gradients import scale_down
from penstock.train.crew.handover import PartState, PartTransfer
from penstock.train.optimizer import Optimizer


class Mirror:
    """A copy of a part's weights, with an optimizer of its own."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        matrices: Collection[str],
        settings: OptimizerConfig,
    ) -> None:
        self.parameters = parameters
        self.optimizer = Optimizer(parameters, settings, matrices=matrices)
        self.trained = trained_of(parameters)
        self.gradients: Tensor | None = None  # of a step that is not committed yet

    @property
    def state(self) -> PartState:
        """What another holder of the part gets."""
        return PartState(self.parameters, self.optimizer)

    def update(self, factor: float, norm: float, most: float) -> None:
        """Make the step whose gradients have arrived, just as the holder of the part does."""
        assert self.gradients is not None
        unpack_gradients(self.gradients, self.trained)
        gradients = [one.grad for one in self.trained if one.grad is not None]
        if most:
            scale_down(gradients, norm, most)
        self.optimizer.step(factor)


class Mirrors:
    """What one rank does for mirrors: sends the gradients of its parts, and keeps mirrors of others.

    `wanted` names each part that is mirrored, with its rank and the rank of its mirror.
    `sent_bytes` is what this rank has sent in the last step.
    """

    def __init__(
        self,
        wanted: Iterable[PartTransfer],
        comm: Comm,
        held: Mapping[int, Mapping[str, nn.Parameter]],
        kept: Mapping[int, Mirror],
    ) -> None:
        self.comm = comm
        self.kept = kept
        self.outgoing: list[tuple[Sequence[nn.Parameter], int]] = []
        self.incoming: list[tuple[Mirror, int]] = []
        for part, source, target in wanted:
            if source == comm.rank:
                self.outgoing.append((trained_of(held[part]), target))
            elif target == comm.rank:
                self.incoming.append((kept[part], source))
        for mirror in kept.values():
            mirror.gradients = None  # Nobody has committed that step.
        self.sends: list[Pending] = []
        self.arriving: list[Arriving] = []
        self.seconds = 0.0  # since they were taken
        self.sent_bytes = 0

    def take_microseconds(self) -> int:
        """Return what mirrors have cost this rank since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return round(1e6 * seconds)

    def start(self) -> None:
        """Send the gradients of this step, which are complete, and begin to receive others."""
        began = time.perf_counter()
        for send in self.sends:
            send.wait()
        self.sends.clear()
        self.sent_bytes = 0
        for parameters, target in self.outgoing:
            message = pack_gradients(parameters)
            self.sends.append(self.comm.send(message, target))
            self.sent_bytes += message.nbytes
        for mirror, source in self.incoming:
            size, dtype = message_of(mirror.trained)
            self.arriving.append(self.comm.receive((size,), dtype, source))
        self.seconds += time.perf_counter() - began

    def collect(self) -> None:
        """Wait until the gradients of all mirrors are here."""
        began = time.perf_counter()
        for (mirror, _), arriving in zip(self.incoming, self.arriving, strict=True):
            mirror.gradients = arriving.wait()
        self.arriving.clear()
        self.seconds += time.perf_counter() - began

    def update(self, factor: float, norm: float, most: float) -> None:
        """Make the step on all mirrors, with the rates and the norm of the whole model."""
        began = time.perf_counter()
        for mirror, _ in self.incoming:
            mirror.update(factor, norm, most)
            assert mirror.gradients is not None
            self.comm.give_back(mirror.gradients)
            mirror.gradients = None
        self.seconds += time.perf_counter() - began


# ---------------------------------------------------------------- messages
def trained_of(parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that are not frozen, by name; the others need no gradients."""
    return [parameters[n] for n in sorted(parameters) if parameters[n].requires_grad]


def message_of(parameters: Sequence[nn.Parameter]) -> tuple[int, torch.dtype]:
    """The size and the type of a message: whether there is a gradient, and all gradients."""
    size = len(parameters) + sum(parameter.numel() for parameter in parameters)
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    return size, dtype


def pack_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients as one message. Parameters that no path has visited have none."""
    size, dtype = message_of(parameters)
    message = torch.zeros(size, dtype=dtype)
    for place, (parameter, piece) in enumerate(_pieces(message, parameters)):
        if parameter.grad is not None:
            message[place] = 1.0
            piece.copy_(parameter.grad)
    return message


def unpack_gradients(message: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Give the parameters the gradients of a message, which they share its memory with."""
    present = message[: len(parameters)].tolist()
    for place, (parameter, piece) in enumerate(_pieces(message, parameters)):
        parameter.grad = piece.to(parameter.dtype) if present[place] else None


def _pieces(
    message: Tensor, parameters: Sequence[nn.Parameter]
) -> Iterable[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its numbers in a message."""
    begin = len(parameters)
    for parameter in parameters:
        end = begin + parameter.numel()
        yield parameter, message[begin:end].view(parameter.shape)
        begin = end
