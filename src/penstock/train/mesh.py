"""Where a process stands when a rank of the schedule is several processes (torch's DeviceMesh).

                 shard 0               shard 1           A column is a pipeline: 0 4, 1 5, 2 6, 3 7. Its processes
              tensor 0  tensor 1    tensor 0  tensor 1   send each other activations, as the schedule says.
    rank 0       0         1           2         3
    rank 1       4         5           6         7       A row shares the weights of one rank.

    tensor   processes with the same micro-batches; each has some heads and features of every layer (DTensor)
    shard    processes with different micro-batches; each keeps a share of the weights, their gradients and the
             optimizer state between steps (FSDP2)

Copies of the pipeline that keep all weights are more ranks of the schedule (`schedule.copies`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from penstock.config import MeshConfig
from penstock.cost.sizes import held_numbers
from penstock.errors import ConfigError, RunError
from penstock.models import BertConfig, GPTConfig, Part
from penstock.models.tensor import share_layers
from penstock.runtime import Comm, ProcessComm, shard_layers
from penstock.train.weights import Sizes

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
        """Reduce a part to the share of this process."""
        if self.mesh is None:
            return
        if self.mesh["tensor"].size() > 1:
            share_layers(part, self.mesh["tensor"])
        if self.mesh["shard"].size() > 1:
            paths = part.anatomy.layers[part.begin : part.end]
            layers = [part.get_submodule(path) for path in paths]
            shard_layers(part, layers, self.mesh["shard"])

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


def check_launched(mesh: MeshConfig, ranks: int, processes: int) -> None:
    """Refuse another number of processes than a schedule with this many ranks has."""
    needed = ranks * mesh.size
    if processes != needed:
        raise ConfigError(
            f"the schedule has {mesh.over(ranks)}, but {processes} were launched\n"
            f"  launch {needed} (in Ray, num_workers of the ScalingConfig), or set schedule.ranks, schedule.copies and "
            "the mesh to what was launched"
        )


def place_of(
    comm: Comm, mesh: MeshConfig, ranks: int, device: torch.device
) -> MeshPlace:
    """Return the place of this process, for a schedule with `ranks` ranks.

    All processes must call it.
    """
    check_launched(mesh, ranks, comm.ranks)
    if mesh.size == 1:
        return MeshPlace(comm, comm)
    if not isinstance(comm, ProcessComm):
        raise RunError(
            "mesh.shard and mesh.tensor need a process for each share; threads will not do\n"
            "  start processes with `penstock train`, torchrun or penstock.runtime.spawn"
        )
    if device.type != comm.wire.type or dist.get_backend() not in ("gloo", "nccl"):
        raise RunError(
            "mesh.shard and mesh.tensor need a GPU for each process, "
            f"but {comm.ranks} processes share fewer GPUs\n"
            "  set run.device = cpu, or use fewer processes"
        )
    shape = (ranks, mesh.shard, mesh.tensor)
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
