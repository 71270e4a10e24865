"""How the trainers of a new generation get their weights: from this process, or from a peer over the network.

    rank 0   part 0: kept                  ── part 0 ──►   rank 3, which has just come
    rank 1   part 1: kept

Weights and optimizer state of a part travel as raw tensors, in the order of their names, between the
ranks that the launcher has named. No file is involved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from penstock.models import Part, part_parameters
from penstock.runtime import Comm
from penstock.train.optimizer import Optimizer
from penstock.train.optimizer_state import is_unused


class Transfer(NamedTuple):
    """A part that one rank sends to another."""

    part: int
    source: int
    target: int


class Holder(Protocol):
    """The part of a trainer that has weights and optimizer state."""

    comm: Comm
    optimizer: Optimizer

    @property
    def parts(self) -> dict[int, Part]:
        """Its parts by number."""
        ...


@dataclass(frozen=True, slots=True)
class Transfers:
    """The transfers of a generation, which all ranks carry out together."""

    wanted: Sequence[Transfer]

    def run(self, holder: Holder) -> None:
        """Send and receive what concerns this rank; the state of all parts must have memory."""
        rank = holder.comm.rank
        sends = []
        for part, source, target in self.wanted:
            if rank == source:
                tensors = list(_tensors(holder, part))
                sends += [holder.comm.send(one.contiguous(), target) for one in tensors]
            elif rank == target:
                for tensor in _tensors(holder, part):
                    shape = tuple(tensor.shape)
                    arriving = holder.comm.receive(shape, tensor.dtype, source)
                    tensor.copy_(arriving.wait())
        for send in sends:
            send.wait()


def _tensors(holder: Holder, part: int) -> Iterator[Tensor]:
    """The weights and the optimizer state of a part; state that is missing is made."""
    parameters = part_parameters(holder.parts[part])
    for name in sorted(parameters):
        parameter = parameters[name]
        yield parameter.detach()
        if parameter.requires_grad:
            yield from state_tensors(holder.optimizer, parameter)


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
