"""A number that tells tensors apart: the same for equal numbers in the same places, on any machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.runtime.dtensor_share import local_share

_MASK = (1 << 62) - 1
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, with bits all over; as a signed number
_CHUNK = 1 << 20  # numbers at a time, so that a checksum needs little memory


def checksum(tensors: Sequence[Tensor]) -> int:
    """The checksum of some tensors, in this order. The order of additions does not matter, as they are exact."""
    sums = [_sum_of_places(_bits(local_share(tensor).detach())) for tensor in tensors]
    total = 0
    if sums:
        # Only one wait for a GPU.
        device = sums[0].device
        for number in torch.stack([one.to(device) for one in sums]).tolist():
            total = total * _FACTOR + number
    return total & _MASK


def _sum_of_places(bits: Tensor) -> Tensor:
    """The sum of whole numbers, each times a factor of its own; it wraps around."""
    places = torch.arange(min(len(bits), _CHUNK), device=bits.device) + 1
    factors = places * _FACTOR
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in torch.split(bits, _CHUNK):
        total = total * _FACTOR + (piece * factors[: len(piece)]).sum()
    return total


def _bits(x: Tensor) -> Tensor:
    """The bits of a tensor as whole numbers."""
    whole = {1: torch.int8, 2: torch.int16}.get(x.element_size(), torch.int32)
    return x.contiguous().reshape(-1).view(whole)
