"""A group of ranks over encrypted links, with the methods of torch's process groups that Penstock uses.

A sum goes in two steps. Each rank adds up its own piece of the tensor, which the others send to it, and then
sends the result to all of them:

    rank 0   a0 b0 c0      a0+a1+a2 ──► all        Every rank sends and receives as many bytes as in a ring,
    rank 1   a1 b1 c1      b0+b1+b2 ──► all        but waits for two messages in a row and not for 2 (ranks - 1),
    rank 2   a2 b2 c2      c0+c1+c2 ──► all        which matters over long distances.

A short tensor goes whole to every rank in one step. Either way the numbers are added in the order of the ranks, so all
ranks get the same bits, whatever comes first.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.runtime.wire.links import MESSAGES, Address, Links, TensorTransfer

SHORT_BYTES = 1 << 14  # Tensors up to this size go whole to every rank.


class SumInProgress(TensorTransfer):
    """A sum in progress."""

    __slots__ = ("number", "tensor")

    def __init__(self, tensor: Tensor, number: int) -> None:
        super().__init__(memoryview(b""))
        self.tensor = tensor
        self.number = number


class WireGroup:
    """Some ranks of a generation; `members` are their numbers in it, and `messages` is their channel."""

    def __init__(
        self, links: Links, members: tuple[int, ...], messages: int = MESSAGES
    ) -> None:
        self.links = links
        self.messages = messages
        self.members = members
        self.place = members.index(links.rank)
        digest = hashlib.sha256(repr(members).encode()).digest()
        self.channel = int.from_bytes(digest[:7], "big") + 1
        self.sums = 0
        self.waiting: queue.SimpleQueue[SumInProgress] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def rank(self) -> int:
        """The number of this rank in the group."""
        return self.place

    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> TensorTransfer:
        """Start sending a tensor."""
        peer = self.members[target]
        return self.links.send(tensors[0], peer, Address(self.messages, tag))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> TensorTransfer:
        """Start receiving a tensor."""
        peer = self.members[source]
        return self.links.receive(tensors[0], peer, Address(self.messages, tag))

    def add(self, tensor: Tensor) -> TensorTransfer:
        """Start summing a tensor over the group, in place; sums run one after the other."""
        self.sums += 1
        sum_ = SumInProgress(tensor, self.sums)
        if self.thread is None:
            name = f"sums of ranks {' '.join(map(str, self.members))}"
            self.thread = threading.Thread(target=self._run, name=name, daemon=True)
            self.thread.start()
        self.waiting.put(sum_)
        return sum_

    def barrier(self) -> TensorTransfer:
        """Start a barrier."""
        return self.add(torch.zeros(1))

    def _run(self) -> None:
        while True:
            sum_ = self.waiting.get()
            try:
                self._add_up(sum_.tensor, 2 * sum_.number)
                sum_.finish()
            except RuntimeError as error:
                # Later sums fail in the same way: the links are broken.
                sum_.finish(f"a sum has lost its connection: {error}")

    def _add_up(self, tensor: Tensor, tag: int) -> None:
        flat = tensor.view(-1)
        if flat.numel() * flat.element_size() <= SHORT_BYTES:
            own = flat.clone()  # The sum goes where the others still read from.
            self._total([own] * self.size(), flat, tag)
            return
        pieces = list(torch.tensor_split(flat, self.size()))
        mine = pieces[self.place]
        self._total([piece.clone() for piece in pieces], mine, tag)
        others = self._others()
        sends = [self._send(mine, n, tag + 1) for n in others]
        receives = [self._receive(pieces[n], n, tag + 1) for n in others]
        for transfer in (*sends, *receives):
            transfer.wait()

    def _total(self, parts: list[Tensor], total: Tensor, tag: int) -> None:
        """Send everyone its part, and sum this rank's part over all ranks."""
        others = self._others()
        rooms = {n: torch.empty_like(total) for n in others}
        receives = [self._receive(rooms[n], n, tag) for n in others]
        sends = [self._send(parts[n], n, tag) for n in others]
        for transfer in (*receives, *sends):
            transfer.wait()
        rooms[self.place] = parts[self.place]
        total.copy_(rooms[0])
        for n in range(1, self.size()):
            total.add_(rooms[n])

    def _others(self) -> list[int]:
        return [n for n in range(self.size()) if n != self.place]

    def _send(self, tensor: Tensor, target: int, tag: int) -> TensorTransfer:
        address = Address(self.channel, tag)
        return self.links.send(tensor, self.members[target], address)

    def _receive(self, tensor: Tensor, source: int, tag: int) -> TensorTransfer:
        address = Address(self.channel, tag)
        return self.links.receive(tensor, self.members[source], address)
