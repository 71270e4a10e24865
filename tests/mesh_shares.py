"""The share of a model that one process of a mesh has, as the runtime divides it: the judge of `penstock.cost.mesh`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import ParallelConfig
from penstock.models.tensor import largest_share
from penstock.train.weights import (
    NUMBERS_PER_PARAMETER,
    Sizes,
    blueprint,
    held_in_layer,
)


@dataclass(frozen=True, slots=True)
class Share:
    """The share of an embedding, a layer or a head that one process has; 1 is all of it."""

    work: float  # seconds of a forward or a backward
    held: float  # activations
    numbers: float  # parameters between steps
    memory: float  # peak of weights, gradients and optimizer state


def shares_of(sizes: Sizes, mesh: ParallelConfig) -> tuple[Share, Share, Share]:
    """Return the shares of embedding, layer and head in the fullest process.

    Every process has whole hidden states and logits. Of a sharded parameter it holds one
    of `shard` shares of four numbers (the parameter, its gradient and two means), and
    during a pass the gathered weight and its gradient. While the gradients of a module
    are summed, one more copy of them exists. That counts for embedding and head, each of
    which is one module, but not for one layer among many.
    """
    model = blueprint(sizes)
    whole, cut = held_in_layer(sizes)
    layer_held = (whole + cut / mesh.tp) / (whole + cut)
    rows = (
        ("embed", 1.0, 1.0, 3),
        ("layers.0", 1 / mesh.tp, layer_held, 2),
        ("head", 1 / mesh.tp, 1.0, 3),
    )
    shares = []
    for path, work, held, copies in rows:
        module = model.get_submodule(path)
        total = sum(parameter.numel() for parameter in module.parameters())
        numbers = largest_share(module, path, mesh.tp) / total
        gathered = copies / NUMBERS_PER_PARAMETER if mesh.dp_shard > 1 else 0.0
        memory = numbers * (1 / mesh.dp_shard + gathered)
        shares.append(Share(work, held, numbers / mesh.dp_shard, memory))
    embed, layer, head = shares
    return embed, layer, head
