"""The share of a tensor that one process holds when several processes shard it (a DTensor), and where it lies.

whole  ┌─────────┐        local    the numbers here, in the tensor's own memory
       │   ┌───┐ │        offset   (1, 4): where they begin
       │   └───┘ │
       └─────────┘        for a plain tensor: itself, and (0, 0)
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.runtime.torch_internals import share_offset

__all__ = ["cut_share", "is_distributed", "local_share", "share_offset"]


def local_share(tensor: Tensor) -> Tensor:
    """The numbers that this process holds; all of them for a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_distributed(tensor: Tensor) -> bool:
    """Whether several processes hold a tensor together. FSDP makes a DTensor even where there is one process."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1


def cut_share(whole: Tensor, like: Tensor) -> Tensor:
    """The share of a whole tensor that this process holds of a sharded tensor `like` it."""
    starts = share_offset(like)
    sizes = local_share(like).shape
    index = tuple(
        slice(start, start + size) for start, size in zip(starts, sizes, strict=True)
    )
    return whole[index]
