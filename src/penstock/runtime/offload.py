"""Moves what autograd has saved in a forward to the memory of the host, and back before its backward.

    F   autograd saves tensors; several may be views of one storage      device  [a a a|b b]    host
    O   each storage is copied to the host once, and freed on the device device                 host  [a a a|b b]
    R   the storages come back; saved tensors are views of them again    device  [a a a|b b]    host
    B   autograd asks for the tensors

What others hold as well stays where it is, because moving it would free nothing: weights and buffers of the stage, its
input, and the keys and values that the next slices read.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor


class SavedView(NamedTuple):
    """A saved tensor as a view of a storage; `storage` is a key of `SavedTensors.storages`."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class SavedTensors:
    """What autograd has saved in one forward, on the device or on the host."""

    def __init__(self, staying: Iterable[Tensor]) -> None:
        self.staying = {_address(x) for x in staying}
        self.storages: dict[int, Tensor] = {}  # as bytes, by where they were first
        self.away: list[int] = []  # the keys of those that are on the host

    def saving(self) -> AbstractContextManager[None]:
        """While a forward runs: keep here what autograd saves."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, x: Tensor) -> Tensor | SavedView:
        """What autograd keeps in place of a tensor."""
        is_plain = type(x) is Tensor and x.layout is torch.strided
        if not is_plain or _address(x) in self.staying:
            return x
        address = _address(x)
        if address not in self.storages:
            whole = torch.empty(0, dtype=torch.uint8, device=x.device)
            self.storages[address] = whole.set_(x.untyped_storage())
        offset = int(x.storage_offset())
        return SavedView(address, x.dtype, offset, x.shape, x.stride())

    def unpack(self, saved: Tensor | SavedView) -> Tensor:
        """The tensor again."""
        if isinstance(saved, Tensor):
            return saved
        storage = self.storages[saved.storage].untyped_storage()
        empty = torch.empty(0, dtype=saved.dtype, device=storage.device)
        return empty.set_(storage, saved.offset, saved.shape, saved.stride)

    def leave(self, staying: Iterable[Tensor]) -> None:
        """Copy the storages to the host, and free those of the device."""
        kept = {_address(x) for x in staying}
        self.away = [address for address in self.storages if address not in kept]
        for address in self.away:
            there = self.storages[address]
            host = torch.empty_like(there, device="cpu", pin_memory=there.is_cuda)
            self.storages[address] = host.copy_(there)

    def come_back(self, device: torch.device) -> None:
        """Copy them back to the device."""
        for address in self.away:
            host = self.storages[address]
            self.storages[address] = torch.empty_like(host, device=device).copy_(host)
        self.away = []


def _address(x: Tensor) -> int:
    """Where the storage of a tensor begins."""
    return x.untyped_storage().data_ptr()
