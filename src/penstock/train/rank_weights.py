"""The weights and the optimizer state of a rank: where they come from, and which of them it saves.

drawn from the seed ──┐
model.weights ────────┤                                ┌─► tensors()    this rank's share of a checkpoint
a checkpoint ─────────┼─► parts that it trains ────────┤
the rank before ──────┘   mirrors of other ranks' parts └─► part_states  what a peer may ask for
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.models import Part, part_parameters, split
from penstock.runtime import Comm, local_share, share_offset
from penstock.train.checkpoint import load, missing_tensors, step_name
from penstock.train.handover import Handover, Mirror, Mirrors, PartState
from penstock.train.job import Job
from penstock.train.lora import (
    adapted_blueprint,
    base_parameters,
    draw_adapters,
    is_adapter,
)
from penstock.train.optimizer import (
    Optimizer,
    frozen_names,
    is_unused,
    layer_parameters,
)
from penstock.train.weights import (
    Holding,
    blank_parameters,
    copy_weights,
    draw_parameters,
)

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
    def filled_mirrors(self) -> dict[int, Mirror]:
        """The mirrors, without those that a broken handover has not filled."""
        kept = {}
        for number, mirror in self.mirrors.kept.items():
            state = self.known.get(number)
            if state is not None and state.optimizer is mirror.optimizer:
                kept[number] = mirror
        return kept

    @property
    def part_states(self) -> dict[int, PartState]:
        """The parts that this process is to know: those that it trains, and its mirrors."""
        states = {}
        for number, mirror in self.mirrors.kept.items():
            states[number] = mirror.state
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
            model = adapted_blueprint(job.sizes, job.config.lora)
            part = split(model, job.partition)[number]
            frozen = frozen_names(part_parameters(part), job.config.optimizer)
            blank = blank_parameters(part, frozen, device)
            matrices = layer_parameters([part])
            kept[number] = Mirror(blank, matrices, job.config.optimizer)
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
        """Fill the weights of this rank from model.weights."""
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
        handover.transfers.run(self.comm, self.known, targets)

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
            if not self._saves(name):
                continue
            tensors[name] = parameter.detach()
            for slot, value in self.optimizer.filled_state(parameter):
                if slot.is_number and any(share_offset(parameter)):
                    # The process with the first number of a parameter counts its steps.
                    continue
                tensor = value.reshape(1) if slot.is_number else value
                tensors[f"{STATE_PREFIX}{slot.name}.{name}"] = tensor
        return tensors

    def _saves(self, name: str) -> bool:
        """Whether this process saves a parameter: it owns it and has numbers of it."""
        if name not in self.holding.owned:
            return False
        return local_share(self.holding.parameters[name]).numel() > 0
