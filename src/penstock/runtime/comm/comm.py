"""The interface through which ranks exchange tensors and sum them over groups of ranks.

    send      starts a send; do not write to the tensor before `wait` returns (unless `reads_in_order`)
    receive   starts a receive; `wait` returns the tensor
    add       starts an in-place sum over a group of ranks; `wait` before reading the sum

All three return at once. Messages between two ranks arrive in the order in which they were
sent, so a lowered program needs no message tags. Only raw tensors travel; nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.ir.program import Program

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The backends of torch.distributed.
GLOO = "gloo"
NCCL = "nccl"
IPC = "penstock_ipc"  # our own, for ranks that share one GPU
ON_GPU = (NCCL, IPC)  # those that carry messages between GPUs


class Pending(Protocol):
    """A send or a sum that is still in progress."""

    def wait(self) -> None:
        """Block until it is done.

        Raises `StuckError` if it takes too long, and `PeerLostError` if it cannot finish
        because another rank is gone.
        """


class Arriving(Protocol):
    """A tensor that another rank is sending to this one."""

    def wait(self, into: Tensor | None = None) -> Tensor:
        """Block until the tensor has arrived, and return it.

        A `Comm` that can do so lets it arrive in `into`, a contiguous tensor of its shape and type, and
        returns that one.
        """


class Comm(Protocol):
    """One rank's connection to the other ranks. A connection may have nothing to set up."""

    rank: int  # the number of this rank
    ranks: int
    # Bytes of receives that may be posted earlier than the program has them. With 0, every receive is posted exactly
    # where the program has it.
    window: int = 0
    # Whether a send reads its tensor in the order of the stream that computes. Then work that is launched after `send`
    # may write to the tensor, before `wait` has returned.
    reads_in_order: bool = False
    # How many channels carry the messages of a rank in order; None if messages do not wait for each other.
    channels: int | None = None

    def send(self, tensor: Tensor, target: int) -> Pending:
        """Start sending a tensor to a rank."""

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int
    ) -> Arriving:
        """Start receiving the next tensor from a rank; its shape and type must match."""

    def prepare(self, groups: list[tuple[int, ...]]) -> None:
        """Set up the groups that `add` will use; all ranks pass the same list."""
        return

    def reserve(self, program: Program, sizes: Sequence[int]) -> None:
        """Make room for a program's messages; all ranks pass the same arguments.

        `sizes` has the bytes of the largest message for each unit of the program.
        """
        return

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> Pending:
        """Start summing a tensor over a group of ranks, in place.

        All ranks of the group must start their sums in the same order.
        """

    def second_connection(self) -> Comm:
        """A second connection to the same ranks, which another thread may use.

        Its messages are matched among themselves, whatever this connection carries meanwhile. All
        ranks must call this; every call returns the same connection. Raises RunError if the
        backend cannot have two.
        """

    def barrier(self) -> None:
        """Wait until all ranks have reached this point."""


def exchange(comm: Comm, fact: Any) -> list[Any]:
    """Return what each rank tells the others, by rank; all ranks must call it.

    A fact is what JSON can hold. It travels as raw bytes, and nothing is unpickled.
    """
    everyone = tuple(range(comm.ranks))
    import torch  # noqa: PLC0415  # the names of backends are known without it

    raw = json.dumps(fact).encode()
    sizes = torch.zeros(comm.ranks, dtype=torch.int64)
    sizes[comm.rank] = len(raw)
    comm.add(sizes, everyone).wait()
    ends = sizes.cumsum(0).tolist()
    # Every rank fills in its own text, and a sum with zeros joins them.
    joined = torch.zeros(ends[-1] + 1, dtype=torch.uint8)
    end = ends[comm.rank]
    joined[end - len(raw) : end] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    comm.add(joined, everyone).wait()
    content = joined.numpy().tobytes()
    return [
        json.loads(content[begin:end])
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
