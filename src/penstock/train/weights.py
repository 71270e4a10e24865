"""A rank's own parts of the model, and its place in the mesh; the initial weights do not depend on who holds them.

    blueprint     the whole model without memory (on torch's meta device)
       │ split
       ▼
    part 0 │ part 1 │ part 2 │ part 3        a rank allocates memory only for its own parts
              │
              └── layers.2.mlp.up.weight     drawn from the seed and this name, or read from a Hugging Face folder

So rank 3 of 8 has the same numbers in a layer as a single process has, and a model that fits
no single machine never exists in one place.

A rank of the schedule may be several processes (torch's DeviceMesh):

                 shard 0               shard 1           A column is a pipeline: 0 4, 1 5, 2 6, 3 7. Its processes
              tensor 0  tensor 1    tensor 0  tensor 1   send each other activations, as the schedule says.
    rank 0       0         1           2         3
    rank 1       4         5           6         7       A row shares the weights of one rank.

    tensor   processes with the same micro-batches; each has some heads and features of every layer (DTensor)
    shard    processes with different micro-batches; each keeps a share of the weights, their gradients and the
             optimizer state between steps (FSDP2)

Copies of the pipeline that keep all weights are more ranks of the schedule (`parallel.dp_replicate`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from penstock.config import ParallelConfig
from penstock.cost.sizes import held_numbers
from penstock.errors import ConfigError, RunError, ShapeError
from penstock.ir.action import backward, forward
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of
from penstock.ir.sums import first_holders
from penstock.models import (
    BertConfig,
    DecoderConfig,
    EncoderConfig,
    GPTConfig,
    Part,
    any_layer,
    decoder_blueprint,
    give_memory,
    initial_constants,
    padding_rows,
    part_parameters,
    shared_names,
    split,
)
from penstock.models.decoder import INITIAL_STD
from penstock.models.family import AnyModelConfig, family_of
from penstock.models.tensor import share_layers
from penstock.runtime import (
    Comm,
    ProcessComm,
    Tied,
    cut_share,
    local_share,
    shard_layers,
)
from penstock.schedules.coverage import visited_parts
from penstock.train.own_models import config_of
from penstock.train.own_models import sizes_of as sizes_of  # noqa: PLC0414  # for those who hold weights

Sizes = AnyModelConfig  # the sizes of the model that a run trains


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds: a module per stage, and its parameters by their names in the model."""

    stages: Mapping[int, Part]
    parameters: Mapping[str, nn.Parameter]
    tied: Mapping[str, Tied]
    # Parameters that this process, and no replica, counts and saves.
    owned: frozenset[str]
    # All parameters of the model, in the same order on all ranks.
    names: tuple[str, ...]
    sizes: Sizes
    # Parameters of parts that some path visits, without frozen ones.
    trained: Mapping[str, nn.Parameter]

    @property
    def width(self) -> int:
        """The features of the hidden state."""
        return self.sizes.width


def model_name(sizes: Sizes) -> str:
    """The name of a family of models, or the class of a model of transformers."""
    if isinstance(sizes, DecoderConfig):
        return sizes.architecture
    return config_of(sizes).family


def blueprint(sizes: Sizes) -> nn.Module:
    """Build the whole model without memory for its weights."""
    if isinstance(sizes, DecoderConfig):
        return decoder_blueprint(sizes)
    with torch.device("meta"):
        return family_of(sizes).build(sizes)


# ---------------------------------------------------------------- a rank's share
def hold(
    sizes: Sizes,
    schedule: Schedule,
    partition: Sequence[int],
    rank: int,
    device: torch.device | None = None,
    place: MeshPlace | None = None,
    trained_parts: frozenset[int] | None = None,
    kept: Mapping[int, Part] = MappingProxyType({}),
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> Holding:
    """Return the parts of a rank, or this process's share of them.

    They have memory for their weights, but the weights are not filled yet. The parts that
    will be trained are those that the schedule visits, unless they are given. Parts that this
    process has `kept` from an earlier plan are taken as they are, with their weights. `prepare`
    changes the model before it is split: it adds adapters and freezes parameters.
    """
    if len(partition) != schedule.parts:
        raise ShapeError(
            f"the partition is for {len(partition)} parts, "
            f"but the schedule has {schedule.parts}"
        )
    model = blueprint(sizes)
    prepare(model)
    # List the names before the split, while tied parameters are still one.
    names = tuple(name for name, _ in model.named_parameters())
    parts = split(model, partition)
    mine = sorted({stage.part for stage in schedule.stages if stage.rank == rank})
    shared = shared_names(parts)
    for number in mine:
        if number in kept:
            parts[number] = kept[number]
            continue
        # What `prepare` has added is tried while there are no numbers: those of empty memory would tell nothing.
        parts[number].try_own_modules()
        if place is not None:
            place.arrange(parts[number])
        give_memory(parts[number], device or torch.device("cpu"))
    held: dict[str, nn.Parameter] = {}
    twins: dict[str, tuple[nn.Parameter, ...]] = {}
    for number in mine:
        _tie(parts[number], held, twins)
    tied = {}
    for name, where in shared.items():
        tied[name] = Tied(where, held.get(name), twins.get(name, ()))
    stages = {}
    for number, stage in enumerate(schedule.stages):
        if stage.rank == rank:
            stages[number] = parts[stage.part]
    owners = first_holders(schedule, [part_parameters(part) for part in parts])
    owned = {
        name
        for name, parameter in held.items()
        if owners[name] == rank and (place is None or place.counts(parameter))
    }
    visited: set[str] = set()
    if trained_parts is None:
        trained_parts = visited_parts(schedule)
    for part in trained_parts:
        visited |= part_parameters(parts[part]).keys()
    trained = {
        name: one for name, one in held.items() if name in visited and one.requires_grad
    }
    return Holding(stages, held, tied, frozenset(owned), names, sizes, trained)


def blank_parameters(part: Part, device: torch.device) -> dict[str, nn.Parameter]:
    """Return parameters like those of a part that has no memory; they are not filled yet."""
    blank = {}
    for name, one in part_parameters(part).items():
        empty = torch.empty(one.shape, dtype=one.dtype, device=device)
        blank[name] = nn.Parameter(empty, requires_grad=one.requires_grad)
    return blank


def drop_unvisited_gradients(holding: Holding, schedule: Schedule) -> None:
    """Leave parts alone that no micro-batch has visited in a step with this schedule.

    The sum over the replicas of such a part has left zeros as its gradients, and most
    optimizers would still move and decay its weights.
    """
    visited = visited_parts(schedule)
    used: set[str] = set()
    for name, tie in holding.tied.items():
        if visited.intersection(tie.parts):
            used.add(name)
    for stage, module in holding.stages.items():
        if schedule.stages[stage].part in visited:
            used |= part_parameters(module).keys()
    for name, parameter in holding.parameters.items():
        if name not in used:
            parameter.grad = None


def attach_parameters(holding: Holding) -> None:
    """Let the modules of a holding have its own parameters, which a later one may have replaced."""
    for part in holding.stages.values():
        _tie(part, dict(holding.parameters), {})


def hold_whole(sizes: Sizes, device: torch.device | None = None) -> Holding:
    """Return the model in one piece, as a rank that holds everything."""
    lane = (forward(0, 0), backward(0, 0))
    alone = schedule_of([Stage(0, 0)], [MicroBatch((0,))], [lane])
    return hold(sizes, alone, (sizes.layers,), 0, device)


def _tie(
    part: Part,
    held: dict[str, nn.Parameter],
    twins: dict[str, tuple[nn.Parameter, ...]],
) -> None:
    """Add the parameters of a part to `held`.

    If another part of this rank has the same parameter, both parts then share one. FSDP
    manages its own parameters and cannot share them, so there they become twins.
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


# ---------------------------------------------------------------- numbers
def draw_parameters(holding: Holding, seed: int) -> None:
    """Fill a rank's weights: normal matrices, zero biases, and norms that do nothing.

    What begins as another constant in a model of transformers does so here. The vector of padding begins at zero in an
    encoder, as it does there, also where a head is tied to it.
    """
    sizes = holding.sizes
    std = INITIAL_STD
    constants: Mapping[str, float] = {}
    zero_rows: Mapping[str, int] = {}
    if isinstance(sizes, DecoderConfig):
        std = sizes.std
        constants = initial_constants(sizes)
    if isinstance(sizes, EncoderConfig):
        zero_rows = padding_rows(sizes)
    elif isinstance(sizes, BertConfig) and sizes.padding is not None:
        zero_rows = {"embed.tokens.weight": sizes.padding}
    for part in holding.stages.values():
        for name, parameter in part_parameters(part).items():
            constant = _own_constant(name, parameter)
            if isinstance(sizes, DecoderConfig):
                constant = constants.get(any_layer(name))
            if constant is None:
                _draw(parameter, name, seed, std, zero_rows.get(name))
            else:
                nn.init.constant_(parameter, constant)


def _own_constant(name: str, parameter: Tensor) -> float | None:
    """What a parameter of our own models begins with: only norms have vectors of weights. None: it is drawn."""
    if name.endswith("bias"):
        return 0.0
    return 1.0 if parameter.dim() == 1 else None


def _draw(
    parameter: nn.Parameter,
    name: str,
    seed: int,
    std: float,
    zero_row: int | None = None,
) -> None:
    generator = generator_of(seed, name)
    numbers = torch.normal(0.0, std, parameter.shape, generator=generator)
    if zero_row is not None:
        numbers[zero_row] = 0.0
    with torch.no_grad():
        local_share(parameter).copy_(cut_share(numbers, parameter))


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the random numbers of one parameter, which do not depend on who holds it."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    own_seed = int.from_bytes(digest[:8], "big") >> 1  # 63 bits
    return torch.Generator().manual_seed(own_seed)


def copy_weights(holding: Holding, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into a rank's parameters."""
    with torch.no_grad():
        for name, tensor in tensors:
            parameter = holding.parameters[name]
            if parameter.shape != tensor.shape:
                raise ShapeError(
                    f"{name} is {tuple(tensor.shape)} in the files, but {tuple(parameter.shape)} in the model of this "
                    "config\n  is config.json that of these weights?"
                )
            local_share(parameter).copy_(cut_share(tensor, parameter))


AXES = ("rank", "shard", "tensor")
NUMBERS_PER_PARAMETER = 4  # itself, its gradient, and two means of AdamW


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """The place of one process in the mesh."""

    world: Comm  # all processes
    pipeline: Comm  # its pipeline; its rank there is its rank in the schedule
    shard: int = 0
    tensor: int = 0
    mesh: DeviceMesh | None = None  # None if every rank is one process

    @property
    def speaks(self) -> bool:
        """Whether this process reports what every process of its pipeline knows."""
        return self.pipeline.rank == 0 and self.tensor == 0

    def arrange(self, part: Part) -> None:
        """Reduce a part to the share of this process; what is frozen stays so in new parameters."""
        if self.mesh is None:
            return
        whole = part_parameters(part)
        frozen = [name for name, one in whole.items() if not one.requires_grad]
        if self.mesh["tensor"].size() > 1:
            share_layers(part, self.mesh["tensor"])
        if self.mesh["shard"].size() > 1:
            paths = part.layout.layers[part.begin : part.end]
            layers = [part.get_submodule(path) for path in paths]
            shard_layers(part, layers, self.mesh["shard"])
        shares = part_parameters(part)
        for name in frozen:
            shares[name].requires_grad_(False)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether no other process counts and saves the same numbers of a parameter.

        The processes of a tensor row all hold a copy of each norm; only the first counts
        it.
        """
        if self.tensor == 0:
            return True
        if not isinstance(parameter, DTensor):
            return False
        axes = parameter.device_mesh.mesh_dim_names or ()
        placements = dict(zip(axes, parameter.placements, strict=True))
        return "tensor" in placements and not placements["tensor"].is_replicate()


def check_launched(mesh: ParallelConfig, ranks: int, processes: int) -> None:
    """Refuse another number of processes than a schedule with this many ranks has."""
    needed = ranks * mesh.size
    if processes != needed:
        raise ConfigError(
            f"the schedule has {mesh.over(ranks)}, but {processes} were launched\n"
            f"  launch {needed} (in Ray, num_workers of the ScalingConfig), or set parallel.pp, "
            "parallel.dp_replicate, parallel.dp_shard and parallel.tp to what was launched"
        )


def place_of(
    comm: Comm, mesh: ParallelConfig, ranks: int, device: torch.device
) -> MeshPlace:
    """Return the place of this process, for a schedule with `ranks` ranks.

    All processes must call it.
    """
    check_launched(mesh, ranks, comm.ranks)
    if mesh.size == 1:
        return MeshPlace(comm, comm)
    if not isinstance(comm, ProcessComm):
        raise RunError(
            "parallel.dp_shard and parallel.tp need a process for each share; threads will not do\n"
            "  start processes with `penstock train`, torchrun or penstock.runtime.spawn"
        )
    if device.type != comm.wire.type or dist.get_backend() not in ("gloo", "nccl"):
        raise RunError(
            "parallel.dp_shard and parallel.tp need a GPU for each process, "
            f"but {comm.ranks} processes share fewer GPUs\n"
            "  set run.device = cpu, or use fewer processes"
        )
    shape = (ranks, mesh.dp_shard, mesh.tp)
    device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
    shard = device_mesh.get_local_rank("shard")
    tensor = device_mesh.get_local_rank("tensor")
    pipeline = ProcessComm(
        comm.patience,
        comm.device,
        device_mesh.get_group("rank"),
        f"shard {shard}, tensor {tensor}",
    )
    pipeline.beside = [
        comm.world,
        device_mesh.get_group("shard"),
        device_mesh.get_group("tensor"),
    ]
    return MeshPlace(comm, pipeline, shard, tensor, device_mesh)


def held_in_layer(sizes: Sizes) -> tuple[int, int]:
    """Return how many numbers a token leaves in a layer for the backward.

    The first number counts the hidden state, which every process holds whole; the second
    counts heads and features, which tensor parallelism divides.
    """
    if isinstance(sizes, GPTConfig | BertConfig):
        return held_numbers("gpt", sizes.width, sizes.width, sizes.inner)
    keys = sizes.kv_heads * sizes.head_width  # also about right for other decoders
    return held_numbers("llama", sizes.width, keys, sizes.inner)
