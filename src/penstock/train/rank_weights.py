"""The weights and the optimizer state of a rank: where they come from, who has copies, and which of them it saves.

drawn from the seed ──┐
model.path ───────────┤                                ┌─► tensors()    this rank's share of a checkpoint
a checkpoint ─────────┼─► parts that it trains ────────┤
the rank before ──────┘   mirrors of other ranks' parts └─► part_states  what a peer may ask for

The trainers of a new generation of workers get their weights from this process, a peer, or a mirror:

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.models import Part, part_parameters, split
from penstock.runtime import Comm, local_share, share_offset
from penstock.runtime.comm.comm import Arriving, Pending
from penstock.runtime.gradients import scale_down
from penstock.train.checkpoints.checkpoint import load, missing_tensors, step_name
from penstock.train.elastic import PartTransfer
from penstock.train.history import StepFigures
from penstock.train.job import Job
from penstock.train.lora import (
    base_parameters,
    draw_adapters,
    is_adapter,
)
from penstock.train.optimizer import (
    Optimizer,
    is_unused,
    layer_parameters,
)
from penstock.train.weights import (
    Holding,
    blank_parameters,
    blueprint,
    copy_weights,
    draw_parameters,
)


@dataclass(slots=True, eq=False)
class PartState:
    """The weights of a part in the memory of this process, and the optimizer that has their state."""

    parameters: Mapping[str, nn.Parameter]  # by their names in the whole model
    optimizer: Optimizer
    # Of a mirror: what it has received for a step that is not committed yet.
    gradients: Tensor | None = None

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


def transfer(
    wanted: Iterable[PartTransfer],
    comm: Comm,
    known: dict[int, PartState],
    targets: Mapping[int, PartState],
) -> None:
    """Send parts that this rank knows, and receive others into its targets; it knows them then.

    All ranks carry out the transfers of a generation together.
    """
    sends = []
    for part, source, target in wanted:
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
    transfers: tuple[PartTransfer, ...]  # parts that ranks get from others
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
        kept: Mapping[int, PartState],
    ) -> None:
        self.comm = comm
        self.kept = kept
        self.outgoing: list[tuple[Sequence[nn.Parameter], int]] = []
        self.incoming: list[tuple[PartState, int]] = []
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
            size, dtype = message_of(trained_of(mirror.parameters))
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
        """Make the step on all mirrors, just as the holders of the parts do, with the norm of the whole model."""
        began = time.perf_counter()
        for mirror, _ in self.incoming:
            trained = trained_of(mirror.parameters)
            assert mirror.gradients is not None
            unpack_gradients(mirror.gradients, trained)
            if most:
                present = [one.grad for one in trained if one.grad is not None]
                scale_down(present, norm, most)
            mirror.optimizer.step(factor)
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


STATE_PREFIX = "optimizer."  # of the names of optimizer state in a checkpoint


class RankWeights:
    """The parts that a process trains and those that it mirrors, with their optimizer state."""

    def __init__(
        self,
        job: Job,
        comm: Comm,
        device: torch.device,
        holding: Holding,
        before: RankWeights | None,
    ) -> None:
        self.job = job
        self.comm = comm
        self.holding = holding
        self.optimizer = Optimizer(
            holding.parameters,
            job.config.optimizer,
            holding.trained,
            layer_parameters(holding.stages.values()),
        )
        self.mirrors = self.make_mirrors(before, device)
        # The parts whose weights of the last step are in the memory of this process, wherever
        # they are. They stay until a handover is over, so that a loss in it takes none of them.
        self.known: dict[int, PartState] = {} if before is None else dict(before.known)

    @property
    def parts(self) -> dict[int, Part]:
        """The parts that this process trains, by number."""
        stages = self.job.plan.schedule.stages
        return {stages[n].part: part for n, part in self.holding.stages.items()}

    @property
    def filled_parts(self) -> dict[int, Part]:
        """The parts that it trains, without those that a broken handover has not filled."""
        known = {n for n, one in self.known.items() if one.optimizer is self.optimizer}
        return {number: part for number, part in self.parts.items() if number in known}

    @property
    def filled_mirrors(self) -> dict[int, PartState]:
        """The mirrors, without those that a broken handover has not filled."""
        kept = self.mirrors.kept.items()
        return {number: one for number, one in kept if self.known.get(number) is one}

    @property
    def part_states(self) -> dict[int, PartState]:
        """The parts that this process is to know: those that it trains, and its mirrors."""
        states = dict(self.mirrors.kept)
        for number, part in self.parts.items():
            states[number] = PartState(part_parameters(part), self.optimizer)
        return states

    @property
    def saved_names(self) -> tuple[str, ...]:
        """The parameters that the checkpoints of the run hold.

        A run that trains adapters does not save the model beside them.
        """
        names = self.holding.names
        return tuple(filter(is_adapter, names)) if self.job.adapts else names

    def make_mirrors(self, before: RankWeights | None, device: torch.device) -> Mirrors:
        """Return this rank's mirrors of other parts, with those that it has already."""
        job = self.job
        held = {number: part_parameters(part) for number, part in self.parts.items()}
        kept = {}
        old = {} if before is None else before.filled_mirrors
        for number, _, target in job.mirrors:
            if target != self.comm.rank:
                continue
            if number in old:
                kept[number] = old[number]
                continue
            model = blueprint(job.sizes)
            job.adapt(model)
            part = split(model, job.partition)[number]
            blank = blank_parameters(part, device)
            matrices = layer_parameters([part])
            optimizer = Optimizer(blank, job.config.optimizer, matrices=matrices)
            kept[number] = PartState(blank, optimizer)
        return Mirrors(job.mirrors, self.comm, held, kept)

    # ------------------------------------------------------------ filling
    def initialize(self, resumes: bool) -> None:
        """Fill the weights from a folder or at random, except those that a checkpoint will fill."""
        seed = self.job.config.run.seed
        if self.job.adapts:
            self.read_base()
            draw_adapters(self.holding, seed)
        elif resumes:
            return
        elif self.job.config.model.weights:
            self.read_base()
        else:
            draw_parameters(self.holding, seed)

    def read_base(self) -> None:
        """Fill the weights of this rank from the folder in model.path."""
        from penstock.train.hub import read_weights  # noqa: PLC0415  # safetensors, only where it is needed

        folder = Path(self.job.config.model.weights)
        names = base_parameters(self.holding)
        tensors = read_weights(folder, names, self.job.sizes)
        copy_weights(self.holding, ((names[name], one) for name, one in tensors))

    def read_checkpoint(self, path: Path) -> None:
        """Fill the weights and the optimizer state of all parts that this process trains."""
        self.read_part(path, PartState(self.holding.parameters, self.optimizer))

    def read_part(self, path: Path, target: PartState) -> None:
        """Fill weights and optimizer state from a checkpoint."""
        optimizer = target.optimizer
        tensors: dict[str, Tensor] = {}
        for name, parameter in target.parameters.items():
            if self.job.adapts and not is_adapter(name):
                continue
            tensors[name] = parameter.detach()
            for slot in optimizer.slots_of(parameter):
                blank = slot.blank(parameter)
                shaped = blank.reshape(1) if slot.is_number else blank.detach()
                tensors[f"{STATE_PREFIX}{slot.name}.{name}"] = shaped
        # A parameter that was frozen until now begins with new state.
        for name in missing_tensors(path, tensors):
            if name.startswith(STATE_PREFIX):
                del tensors[name]
        load(path, tensors)
        for name, parameter in target.parameters.items():
            state = {}
            for slot in optimizer.slots_of(parameter):
                found = tensors.get(f"{STATE_PREFIX}{slot.name}.{name}")
                if found is not None:
                    state[slot.name] = found.view(()) if slot.is_number else found
            if state and not is_unused(state):
                optimizer.load_state(parameter, state)

    def take_over(self, before: RankWeights | None, handover: Handover) -> None:
        """Take the weights of the generation before, from this process, a peer or a checkpoint.

        Gradients of a step in flight are dropped. If a peer is lost meanwhile, this process still
        knows every part that it knew, and those that have arrived.
        """
        for name, parameter in self.holding.parameters.items():
            parameter.grad = None
            if before is None or parameter is not before.holding.parameters.get(name):
                continue
            if parameter.requires_grad:
                state = before.optimizer.state_of(parameter)
                self.optimizer.load_state(parameter, state)
        targets = self.part_states
        for number in targets.keys() & self.known.keys():
            targets[number].copy_from(self.known[number])
            self.known[number] = targets[number]
        mine = [part for rank, part in handover.restores if rank == self.comm.rank]
        if mine and self.job.remote_files is not None:
            self.job.remote_files.fetch(self.job.checkpoints)
        if mine and self.job.adapts:
            self.read_base()  # Checkpoints have only the adapters.
        for number in mine:
            path = self.job.checkpoints / step_name(handover.step)
            self.read_part(path, targets[number])
            self.known[number] = targets[number]
        transfer(handover.transfers, self.comm, self.known, targets)

    def settle(self) -> None:
        """Know only the parts of this generation, which must be filled."""
        self.known = self.part_states

    # ------------------------------------------------------------ saving
    def tensors(self) -> dict[str, Tensor]:
        """Return the weights and the optimizer state that this process saves, by name."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.holding.parameters.items():
            if self.job.adapts and not is_adapter(name):
                continue
            if name not in self.holding.owned or not local_share(parameter).numel():
                continue
            tensors[name] = parameter.detach()
            for slot, value in self.optimizer.filled_state(parameter):
                if slot.is_number and any(share_offset(parameter)):
                    # The process with the first number of a parameter counts its steps.
                    continue
                tensor = value.reshape(1) if slot.is_number else value
                tensors[f"{STATE_PREFIX}{slot.name}.{name}"] = tensor
        return tensors
