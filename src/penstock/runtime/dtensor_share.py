"""What one process holds of a tensor that several share (a DTensor): numbers, and where they lie in the whole.

whole  ┌─────────┐        local    the numbers here, in the tensor's own memory
       │   ┌───┐ │        corner   (1, 4): where they begin
       │   └───┘ │
       └─────────┘        of a plain tensor: itself, and (0, 0)
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_share(tensor: Tensor) -> Tensor:
    """The numbers that are here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share_offset(tensor: Tensor) -> tuple[int, ...]:
    """Where they begin in the whole."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return tuple(
        compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )[1]
    )


def cut_share(whole: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor what this process holds of one like it."""
    sizes = local_share(like).shape
    return whole[
        tuple(
            slice(at, at + size)
            for at, size in zip(share_offset(like), sizes, strict=True)
        )
    ]
