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

import torch
from torch import Tensor, nn

from penstock.models import Part, part_parameters
from penstock.runtime import Comm

OPTIMIZER_SLOTS = ("exp_avg", "exp_avg_sq", "step")  # AdamW's state of each parameter


class Transfer(NamedTuple):
    """A part that one rank sends to another."""

    part: int
    source: int
    target: int


class Holder(Protocol):
    """The part of a trainer that has weights and optimizer state."""

    comm: Comm
    optimizer: torch.optim.AdamW

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
                tensors = _tensors(holder, part)
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
        yield from state_of(holder.optimizer, parameter)


def state_of(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> Iterator[Tensor]:
    """The optimizer state of a parameter, each tensor with at least one dimension."""
    state = optimizer.state[parameter]
    for slot in OPTIMIZER_SLOTS:
        if slot not in state:
            counter = slot == "step"
            blank = torch.zeros((), device=parameter.device)
            state[slot] = blank if counter else torch.zeros_like(parameter)
        yield state[slot].view(1) if slot == "step" else state[slot]
