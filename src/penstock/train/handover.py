"""How the trainers of a new generation of workers get their weights: from this process, a peer, or a mirror.

    rank 0   part 0: kept                  ── part 0 ──►   rank 3, which has just come
    rank 1   part 1: kept                  ── part 1 ──►   rank 0, which will mirror it

Weights and optimizer state of a part travel as raw tensors, in the order of their names, between the ranks that the
launcher has named. No file is involved. Another rank may be lost at any moment of this. So nobody gives up what it
had before until all ranks have what they need: if the holder of a part is lost while a newcomer copies it, the mirror
that the newcomer would have made superfluous is still there.

A mirror is a copy of a part that only one rank trains, kept up to date in the memory of another rank:

    rank 1   part 1   backward ── gradients ──┐     sum of the step ─► update
                                              ▼           │
    rank 2   mirror of part 1            waits for them   └──────────► the same update

A mirror repeats the updates of its part. So gradients travel, and not weights with optimizer state, which have three
times their bytes with AdamW. The update of a parameter depends on that parameter alone, so part and mirror have the
same bits.

A rank sends its gradients as soon as they are complete. Most ranks then wait for the end of the pipeline, so this
costs them nothing. The rank with the mirror joins the sum that ends the step only when it has them. So whoever has
the result of a step knows that the mirrors can make the same step, even if the rank whose part they mirror is lost at
that moment.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.config import OptimizerConfig
from penstock.runtime import Comm
from penstock.runtime.comm.comm import Arriving, Pending
from penstock.runtime.gradients import scale_down
from penstock.train.history import StepFigures
from penstock.train.optimizer import Optimizer, is_unused


class PartTransfer(NamedTuple):
    """A part that one rank sends to another."""

    part: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PartState:
    """The weights of a part in the memory of this process, and the optimizer that has their state."""

    parameters: Mapping[str, nn.Parameter]  # by their names in the whole model
    optimizer: Optimizer

    def tensors(self) -> Iterator[Tensor]:
        """The weights and the optimizer state, by name; state that is missing is made."""
        for name in sorted(self.parameters):
            parameter = self.parameters[name]
            yield parameter.detach()
            if parameter.requires_grad:
                yield from state_tensors(self.optimizer, parameter)

    def copy_from(self, other: PartState) -> None:
        """Copy weights and optimizer state from another place in this process, unless it is the same."""
        if all(one is other.parameters[name] for name, one in self.parameters.items()):
            return
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)


@dataclass(frozen=True, slots=True)
class Transfers:
    """The transfers of a generation, which all ranks carry out together."""

    wanted: Sequence[PartTransfer]

    def run(
        self,
        comm: Comm,
        known: dict[int, PartState],
        targets: Mapping[int, PartState],
    ) -> None:
        """Send parts that this rank knows, and receive others into its targets; it knows them then."""
        sends = []
        for part, source, target in self.wanted:
            if comm.rank == source:
                tensors = list(known[part].tensors())
                sends += [comm.send(one.contiguous(), target) for one in tensors]
            elif comm.rank == target:
                for tensor in targets[part].tensors():
                    shape = tuple(tensor.shape)
                    arriving = comm.receive(shape, tensor.dtype, source)
                    tensor.copy_(arriving.wait())
                known[part] = targets[part]
        for send in sends:
            send.wait()


@dataclass(frozen=True, slots=True)
class Handover:
    """Where all ranks of a new generation go on (`penstock.crew`)."""

    step: int  # steps done
    seen: int  # sequences of those steps, and of earlier runs
    figures: StepFigures | None  # of the last step, if it is still to be closed
    transfers: Transfers
    save: bool = False  # whether a checkpoint was interrupted
    # Ranks that read a part from the checkpoint of this step, because its holder is lost.
    restores: tuple[tuple[int, int], ...] = ()


class CrewChange(Exception):  # noqa: N818  # It is not an error.
    """Raised on all ranks after a step, because workers have come."""


def state_tensors(optimizer: Optimizer, parameter: nn.Parameter) -> Iterator[Tensor]:
    """The optimizer state of a parameter, each tensor with at least one dimension.

    Each tensor is used before the next one is asked for. State that nobody has used yet is
    forgotten afterwards, so that the optimizer begins as it does for any new parameter.
    """
    values = dict(optimizer.filled_state(parameter))
    for slot, value in values.items():
        yield value.view(1) if slot.is_number else value
    state = {slot.name: value for slot, value in values.items()}
    if state and not is_unused(state):
        optimizer.load_state(parameter, state)


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
