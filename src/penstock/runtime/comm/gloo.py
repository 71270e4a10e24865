"""Connects processes over gloo for as long as all of them live; after a loss, the others connect again.

    generation 1   rank 0 ─ rank 1 ─ rank 2 ─ rank 3        store: g1/...
                             ✗
    generation 2   rank 0 ────────── rank 1 ─ rank 2        store: g2/...

The default process group of `torch.distributed` cannot lose a rank. These groups do not belong to it:
every generation has its own, which meet under their own prefix in a store that no rank keeps. A rank
that is connecting gives up as soon as the launcher says that the generation has lost a rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PeerLostError, RunError
from penstock.runtime.comm.process import TORCH_EXTRA_SECONDS, ProcessComm
from penstock.runtime.torch_internals import (
    AllreduceOptions,
    BarrierOptions,
    PrefixStore,
    Store,
    gloo_group,
)

LOOK_SECONDS = 0.05  # between two looks whether the generation still stands
Broken = Callable[[], bool]


class GlooComm(ProcessComm):
    """This process's connection to the ranks of one generation.

    `broken` says whether the generation has lost a rank. It is asked while this rank connects.
    """

    def __init__(
        self, store: Store, rank: int, ranks: int, patience: float, broken: Broken
    ) -> None:
        self.meeting = store
        self.broken = broken
        self.time_limit = timedelta(seconds=patience + TORCH_EXTRA_SECONDS)
        self.connect_end = time.monotonic() + self.time_limit.total_seconds()
        everyone = tuple(range(ranks))
        world = self.connect(everyone, rank)
        super().__init__(patience, torch.device("cpu"), world)
        self.store = store

    def uses_gpus(self) -> bool:
        """Gloo moves tensors through the CPU."""
        return False

    def connect(
        self, group: tuple[int, ...], rank: int, purpose: str = "group"
    ) -> dist.ProcessGroup:
        """Connect some ranks, of which this is one.

        Groups of the same ranks for different purposes do not meet each other.

        Torch cannot interrupt this, so it happens on a thread. If another rank is lost
        meanwhile, the thread is left to its own time limit.
        """
        name = f"{purpose} {' '.join(map(str, group))}"
        store = PrefixStore(name, self.meeting)
        made: list[dist.ProcessGroup] = []
        errors: list[str] = []

        def work() -> None:
            try:
                made.append(self.make_group(store, group, rank))
            except (RuntimeError, RunError) as error:
                errors.append(str(error))

        thread = threading.Thread(target=work, name="connects", daemon=True)
        thread.start()
        thread.join(LOOK_SECONDS)
        while thread.is_alive():
            if self.broken():
                raise PeerLostError(
                    f"rank {rank} connects to ranks {group}, but one of them is lost"
                )
            thread.join(LOOK_SECONDS)
        if errors:
            raise PeerLostError(f"rank {rank} cannot reach the others: {errors[0]}")
        return made[0]

    def make_group(
        self, store: Store, group: tuple[int, ...], rank: int
    ) -> dist.ProcessGroup:
        """Wait until these ranks are connected."""
        return gloo_group(store, group.index(rank), len(group), self.time_limit)

    def create_group(self, group: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Connect some ranks of this generation; None if this rank is not among them."""
        return self.connect(group, self.rank) if self.rank in group else None

    def create_second_group(self) -> dist.ProcessGroup:
        """Connect all ranks of this generation once more."""
        return self.connect(self.everyone, self.rank, "second group")

    def start_sum(self, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Start summing a tensor over a group."""
        return group.allreduce([tensor], AllreduceOptions())

    def start_barrier(self) -> dist.Work:
        """Start a barrier over all ranks."""
        return self.world.barrier(BarrierOptions())

    def abandon(self) -> None:
        """Cut all connections and drop the groups; nothing can be sent afterwards.

        A group waits for its work before it ends, so a thread drops them.
        """
        self.cut_connections()
        self.waiting = None
        dropped = [*self.groups.values(), *self.beside]
        self.groups = {}
        self.beside = []
        self.second = None
        del self.world
        threading.Thread(target=dropped.clear, name="drops groups", daemon=True).start()
