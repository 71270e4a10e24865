"""How the trainers of a new generation get their weights: from this process, or from a peer over the network.

    rank 0   part 0: kept                  ── part 0 ──►   rank 3, which has just come
    rank 1   part 1: kept                  ── part 1 ──►   rank 0, which will mirror it

Weights and optimizer state of a part travel as raw tensors, in the order of their names, between the
ranks that the launcher has named. No file is involved.

Another rank may be lost at any moment of this. So nobody gives up what it had before until all ranks have
what they need: if the holder of a part is lost while a newcomer copies it, the mirror that the newcomer
would have made superfluous is still there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from penstock.runtime import Comm
from penstock.train.optimizer import Optimizer
from penstock.train.optimizer_state import is_unused
from penstock.train.step_figures import StepFigures


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
    """Where all ranks of a new generation go on (`penstock.train.crew`)."""

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
