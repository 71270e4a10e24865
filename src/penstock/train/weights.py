"""A rank's own parts of the model, with weights that do not depend on who holds them.

    blueprint     the whole model without memory (on torch's meta device)
       │ split
       ▼
    part 0 │ part 1 │ part 2 │ part 3        a rank gives memory to its own, and nothing to the others'
              │
              └── layers.2.mlp.up.weight     drawn from the seed and this name, or read from a Hugging Face folder

So rank 3 of 8 has the same numbers in a layer as a single process has, and a model that fits no single machine is never
in one place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from penstock.config import ModelConfig
from penstock.errors import ConfigError, ShapeError
from penstock.ir.schedule import Schedule
from penstock.models import (
    GPT,
    GPTConfig,
    Llama,
    LlamaConfig,
    Part,
    Stack,
    part_parameters,
    shared_names,
    split,
)
from penstock.runtime import Tied, cut_share, local_share
from penstock.schedules.coverage import visited_parts

Sizes = LlamaConfig | GPTConfig
STD = 0.02  # of drawn matrices


class Sharing(Protocol):
    """Who shares a rank's parameters: `penstock.train.mesh.Place`."""

    def arrange(self, part: Part) -> None:
        """Leaves this process its share of a part that has no memory yet."""
        ...

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether its share of a parameter is nobody else's."""
        ...


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds: a module for each of its stages, and its parameters under their names in the model."""

    stages: Mapping[int, Part]
    parameters: Mapping[str, nn.Parameter]
    tied: Mapping[str, Tied]
    owned: frozenset[
        str
    ]  # of its parameters, those that it counts and saves; replicas elsewhere do not
    names: tuple[str, ...]  # of all parameters of the model, in one order on all ranks
    width: int
    trained: Mapping[
        str, nn.Parameter
    ]  # of its parameters, those of parts that some path visits


def sizes_of(model: ModelConfig, vocab: int, tokens: int) -> Sizes:
    """The sizes that a config asks for, with what the tokenizer and the data decide."""
    words = model.vocab or vocab
    if words < vocab:
        raise ConfigError(
            f"model.vocab = {words} is less than the tokenizer's {vocab} words; 0 takes as many"
        )
    if model.family == "gpt":
        return GPTConfig(
            words,
            model.width,
            model.layers,
            model.heads,
            model.inner,
            model.positions or tokens,
            tied=model.tied,
        )
    return LlamaConfig(
        words,
        model.width,
        model.layers,
        model.heads,
        model.kv_heads,
        model.inner,
        theta=model.theta,
        tied=model.tied,
    )


def blueprint(sizes: Sizes) -> Stack:
    """The whole model, without memory."""
    with torch.device("meta"):
        return GPT(sizes) if isinstance(sizes, GPTConfig) else Llama(sizes)


# ---------------------------------------------------------------- a rank's share
def hold(
    sizes: Sizes,
    schedule: Schedule,
    partition: Sequence[int],
    rank: int,
    device: torch.device | None = None,
    place: Sharing | None = None,
) -> Holding:
    """The parts of a rank, or this process's share of them, with memory for their weights, not yet filled."""
    model = blueprint(sizes)
    names = tuple(
        name for name, _ in model.named_parameters()
    )  # now, while tied ones are still one
    if len(partition) != schedule.parts:
        raise ShapeError(
            f"the partition is for {len(partition)} parts, but the schedule has {schedule.parts}"
        )
    parts = split(model, partition)
    mine = sorted({stage.part for stage in schedule.stages if stage.rank == rank})
    shared = shared_names(parts)
    for number in mine:
        if place is not None:
            place.arrange(parts[number])
        parts[number].to_empty(device=device or torch.device("cpu"))
    held: dict[str, nn.Parameter] = {}
    twins: dict[str, tuple[nn.Parameter, ...]] = {}
    for number in mine:
        _tie(parts[number], held, twins)
    tied = {
        name: Tied(where, held.get(name), twins.get(name, ()))
        for name, where in shared.items()
    }
    stages = {
        n: parts[stage.part]
        for n, stage in enumerate(schedule.stages)
        if stage.rank == rank
    }
    owners = _owners(schedule, parts)
    owned = frozenset(
        name
        for name, one in held.items()
        if owners[name] == rank and (place is None or place.counts(one))
    )
    moved = {
        name
        for part in visited_parts(schedule)
        for name in part_parameters(parts[part])
    }
    trained = {name: one for name, one in held.items() if name in moved}
    return Holding(stages, held, tied, owned, names, model.width, trained)


def hold_whole(sizes: Sizes, device: torch.device | None = None) -> Holding:
    """The model in one piece, as a rank that holds everything."""
    from penstock.ir.action import Action, Op  # noqa: PLC0415
    from penstock.ir.schedule import MicroBatch, Stage, schedule_of  # noqa: PLC0415

    lane = (Action(Op.F, 0, 0), Action(Op.B, 0, 0))
    alone = schedule_of([Stage(0, 0)], [MicroBatch((0,))], [lane])
    return hold(sizes, alone, (sizes.layers,), 0, device)


def _tie(
    part: Part,
    held: dict[str, nn.Parameter],
    twins: dict[str, tuple[nn.Parameter, ...]],
) -> None:
    """Notes a part's parameters; one that another part of this rank has too becomes the same one.

    Not so where FSDP looks after the part: it has its own idea of which parameters are its. Then they are twins.
    """
    if isinstance(part, FSDPModule):
        for name, parameter in part_parameters(part).items():
            if held.setdefault(name, parameter) is not parameter:
                twins[name] = (*twins.get(name, ()), parameter)
        return
    names = {
        name: part.tied.get(name, name)
        for name, _ in part.named_parameters(remove_duplicate=False)
    }
    for name, first in names.items():
        path, _, leaf = name.rpartition(".")
        module = part.get_submodule(path)
        setattr(module, leaf, held.setdefault(first, getattr(module, leaf)))


def _owners(schedule: Schedule, parts: Sequence[Part]) -> dict[str, int]:
    """Of every parameter the first rank that holds it."""
    owners: dict[str, int] = {}
    for stage in sorted(schedule.stages, key=lambda stage: stage.rank):
        for name in part_parameters(parts[stage.part]):
            owners.setdefault(name, stage.rank)
    return owners


# ---------------------------------------------------------------- numbers
def draw_parameters(holding: Holding, seed: int) -> None:
    """Fills a rank's weights: normal matrices, zero biases, norms that are the identity."""
    drawn: set[str] = set()
    for part in holding.stages.values():
        for path, module in part.named_modules():
            here = {
                f"{path}.{leaf}": leaf
                for leaf, _ in module.named_parameters(recurse=False)
            }
            if isinstance(module, nn.Linear | nn.Embedding):
                for name, leaf in here.items():
                    _fill(
                        getattr(module, leaf),
                        part.tied.get(name, name),
                        seed,
                        leaf == "weight",
                    )
            elif here:
                module.reset_parameters()  # norms have nothing to draw
            drawn |= {part.tied.get(name, name) for name in here}
    assert drawn == set(holding.parameters), drawn ^ set(holding.parameters)


def _fill(parameter: nn.Parameter, name: str, seed: int, matrix: bool) -> None:
    with torch.no_grad():
        if matrix:
            numbers = torch.Generator().manual_seed(_seed_of(seed, name))
            local_share(parameter).copy_(
                cut_share(
                    torch.normal(0.0, STD, parameter.shape, generator=numbers),
                    parameter,
                )
            )
        else:
            parameter.zero_()


def _seed_of(seed: int, name: str) -> int:
    return (
        int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big")
        >> 1
    )


def copy_weights(holding: Holding, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copies weights into a rank's parameters."""
    with torch.no_grad():
        for name, tensor in tensors:
            parameter = holding.parameters[name]
            if parameter.shape != tensor.shape:
                raise ShapeError(
                    f"{name} is {tuple(tensor.shape)}, but the model has {tuple(parameter.shape)}"
                )
            local_share(parameter).copy_(cut_share(tensor, parameter))
