"""Where a process stands when a rank of the schedule is several processes (torch's DeviceMesh).

                 shard 0               shard 1           a pipeline is a column: 0 4, 1 5, 2 6, 3 7. Its processes send
              tensor 0  tensor 1    tensor 0  tensor 1   each other activations, as the schedule says
    rank 0       0         1           2         3
    rank 1       4         5           6         7       a row holds the weights of one rank between them

    tensor   processes with the same micro-batches: each has some heads and features of every layer (DTensor)
    shard    processes with micro-batches of their own: each keeps a part of the weights, of their gradients and of the
             optimizer between steps (FSDP2)

Copies of the pipeline that keep all weights are more ranks of the schedule (`schedule.copies`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from penstock.config import Config, MeshConfig
from penstock.errors import ConfigError, RunError
from penstock.models import GPTConfig, Part
from penstock.models.tensor import largest_share, share_layers
from penstock.runtime import Comm, ProcessComm, shard_layers
from penstock.train.weights import Sizes, blueprint

AXES = ("rank", "shard", "tensor")


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """One process among all."""

    world: Comm  # all processes
    pipeline: Comm  # those of its pipeline; its rank there is its rank in the schedule
    shard: int = 0
    tensor: int = 0
    mesh: DeviceMesh | None = None  # None: every rank is one process

    @property
    def speaks(self) -> bool:
        """Whether it tells the others what all of its pipeline know."""
        return self.pipeline.rank == 0 and self.tensor == 0

    def arrange(self, part: Part) -> None:
        """Leaves this process its share of a part."""
        if self.mesh is None:
            return
        if self.mesh["tensor"].size() > 1:
            share_layers(part, self.mesh["tensor"])
        if self.mesh["shard"].size() > 1:
            layers = [
                part.get_submodule(path)
                for path in part.anatomy.layers[part.begin : part.end]
            ]
            shard_layers(part, layers, self.mesh["shard"])

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether its share of a parameter is nobody else's: processes of one tensor row have equal norms, say."""
        if self.tensor == 0:
            return True
        if not isinstance(parameter, DTensor):
            return False
        axes = parameter.device_mesh.mesh_dim_names or ()
        placed = dict(zip(axes, parameter.placements, strict=True))
        return "tensor" in placed and not placed["tensor"].is_replicate()


def place_of(
    comm: Comm, mesh: MeshConfig, ranks: int, device: torch.device
) -> MeshPlace:
    """The place of this process, for a schedule of so many ranks. All processes call it."""
    if comm.ranks != ranks * mesh.size:
        raise ConfigError(
            f"the schedule has {mesh.over(ranks)}, but {comm.ranks} were launched"
        )
    if mesh.size == 1:
        return MeshPlace(comm, comm)
    if not isinstance(comm, ProcessComm):
        raise RunError(
            "mesh.shard and mesh.tensor need a process for each share; threads have none"
        )
    if device.type != comm.wire.type or dist.get_backend() not in ("gloo", "nccl"):
        raise RunError(
            f"mesh.shard and mesh.tensor need a GPU for each process; {comm.ranks} processes share too few\n"
            "  say run.device = cpu, or take fewer processes"
        )
    made = init_device_mesh(
        device.type, (ranks, mesh.shard, mesh.tensor), mesh_dim_names=AXES
    )
    shard, tensor = made.get_local_rank("shard"), made.get_local_rank("tensor")
    name = f"shard {shard}, tensor {tensor}"
    pipeline = ProcessComm(comm.patience, comm.device, made.get_group("rank"), name)
    pipeline.beside = [comm.world, made.get_group("shard"), made.get_group("tensor")]
    return MeshPlace(comm, pipeline, shard, tensor, made)


def check_gpus(config: Config, ranks: int) -> None:
    """Refuses fewer GPUs than processes: those of a rank talk GPU to GPU; other processes can go through the CPU."""
    gpus, mesh = torch.cuda.device_count(), config.mesh
    if config.run.device == "cuda" and mesh.size > 1 and gpus < ranks * mesh.size:
        raise ConfigError(
            f"{mesh.over(ranks)}, a GPU each, but there are {gpus}\n  take fewer, or run.device=cpu"
        )


# ---------------------------------------------------------------- how much that is
@dataclass(frozen=True, slots=True)
class Share:
    """Of an embedding, a layer or a head what one process has, 1 being all."""

    work: float  # seconds of a forward or a backward
    held: float  # activations
    numbers: float  # parameters between steps
    memory: float  # weights, gradients and optimizer at most


def shares_of(sizes: Sizes, mesh: MeshConfig) -> tuple[Share, Share, Share]:
    """Of embedding, layer and head, in the fullest process. Hidden states and logits are whole in each.

    A sharded parameter is one of `shard` shares of four numbers (itself, its gradient, two means) and, during a pass,
    the gathered weight and its gradient. While a piece is summed there is one copy more of its gradients: of embedding
    and head, which are one piece; one layer among many does not count.
    """
    model, tensor, shard = blueprint(sizes), mesh.tensor, mesh.shard
    paths, works = ("embed", "layers.0", "head"), (1.0, 1 / tensor, 1 / tensor)
    whole, cut = held_in_layer(sizes)
    helds = (1.0, (whole + cut / tensor) / (whole + cut), 1.0)
    found = []
    for path, work, held in zip(paths, works, helds, strict=True):
        piece = model.get_submodule(path)
        numbers = largest_share(piece, path, tensor) / sum(
            p.numel() for p in piece.parameters()
        )
        copies = 0 if shard == 1 else 2 if path == "layers.0" else 3
        found.append(
            Share(work, held, numbers / shard, numbers * (1 / shard + copies / 4))
        )
    return found[0], found[1], found[2]


def held_in_layer(sizes: Sizes) -> tuple[int, int]:
    """Numbers that a token leaves in a layer for its backward: of the hidden state, and of heads and features."""
    if isinstance(sizes, GPTConfig):
        return 4 * sizes.width, 4 * sizes.width + 2 * sizes.inner
    keys = sizes.kv_heads * sizes.head_width
    return 4 * sizes.width, 3 * sizes.width + 2 * keys + 4 * sizes.inner
