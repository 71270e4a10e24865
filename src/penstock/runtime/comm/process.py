"""Ranks as processes on torch.distributed: gloo between CPUs, NCCL between GPUs, under any launcher.

Messages carry no tags: between two ranks they arrive in the order in which they leave. On NCCL a receive that is posted
early would block what comes after it, so there they are posted where the lowered program has them (`ahead` 0).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PeerLostError, RunError, StuckError

Report = Callable[[int], str]  # what a rank is doing, as far as is known


class ProcessComm:
    """This process's connection to the others of the default process group."""

    def __init__(self, patience: float = 300.0, report: Report | None = None) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.patience, self.report = timedelta(seconds=patience), report or (lambda rank: "")
        self.on_gpu = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        world = dist.group.WORLD
        assert world is not None
        self.world = world  # asked directly: dist.isend and irecv look it up and check it anew each time
        self.groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(self._ranks)): world}

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._ranks

    @property
    def ahead(self) -> int:
        """How many receives may be posted before the program has them."""
        return 0 if self.on_gpu else 4

    def prepare(self, groups: list[tuple[int, ...]]) -> None:
        """Makes the groups that `add` will be asked for; all ranks call it with the same list."""
        for group in groups:
            if group not in self.groups:
                made = dist.new_group(list(group))
                assert isinstance(made, dist.ProcessGroup)
                self.groups[group] = made

    def send(self, tensor: Tensor, target: int) -> _Work:
        """Sends a tensor."""
        work = self.world.send([tensor.contiguous()], target, 0)
        return _Work(self, work, f"to send to rank {target}", target, tensor)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> _Landing:
        """Receives the next tensor of a rank."""
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        work = self.world.recv([buffer], source, 0)
        return _Landing(_Work(self, work, f"for a tensor from rank {source}", source, buffer))

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> _Work:
        """Sums a tensor over a group of ranks, in place."""
        work = dist.all_reduce(tensor, group=self.groups[group], async_op=True)
        assert work is not None
        return _Work(self, work, f"for the sum over ranks {' '.join(map(str, group))}", -1, tensor)

    def barrier(self) -> None:
        """Waits for all ranks."""
        dist.barrier()

    def trouble(self, what: str, peer: int, error: RuntimeError) -> RunError:
        """A failed wait in words."""
        doing = self.report(peer) if peer >= 0 else ""
        if "imed out" in str(error) or "timeout" in str(error):
            waited = f"rank {self._rank} waits {what} for more than {self.patience.total_seconds():g} s"
            return StuckError(f"{waited}{f'; {doing}' if doing else ''}")
        lost = f"rank {self._rank} waits {what}, but the connection is lost"
        return PeerLostError(f"{lost}{f'; {doing}' if doing else ''}")


class _Work:
    """A message or a sum on its way; keeps its tensor until then."""

    __slots__ = ("comm", "peer", "tensor", "what", "work")

    def __init__(self, comm: ProcessComm, work: dist.Work, what: str, peer: int, tensor: Tensor) -> None:
        self.comm, self.work, self.what, self.peer, self.tensor = comm, work, what, peer, tensor

    def wait(self) -> None:
        """Until it is over."""
        try:
            self.work.wait(self.comm.patience)
        except RuntimeError as error:
            raise self.comm.trouble(self.what, self.peer, error) from None

    def done(self) -> bool:
        """Whether it is."""
        return bool(self.work.is_completed())


class _Landing:
    """A tensor on its way into a buffer."""

    __slots__ = ("work",)

    def __init__(self, work: _Work) -> None:
        self.work = work

    def wait(self) -> Tensor:
        """Until it is there."""
        self.work.wait()
        return self.work.tensor
