"""Connects processes with a GPU each over NCCL for as long as all of them live; after a loss, the others connect anew.

    rank 0   main     launches a step │ waits for its GPU ......................... │ sees the mark, and raises
             GPU                      │ waits for rank 1 .......... │ goes on with garbage
             watch                                   the launcher says that rank 1 is lost: marks, then aborts

With gloo, connections break when a process ends, and every wait on them fails. Under NCCL the GPU waits, and nothing
but an abort ends that. The GPU then goes on, with whatever its memory held. So this connection is marked as cut before
the abort, and every sum over all ranks looks at the mark when the host has waited for it. Such a sum decides about each
step. If the mark is missing, no abort had begun when the sum was complete.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.comm.comm import Pending
from penstock.runtime.comm.gloo import LOOK_SECONDS, Broken, GlooComm
from penstock.runtime.comm.process import PendingMessage
from penstock.runtime.torch_internals import (
    BarrierOptions,
    Store,
    abort_group,
    leave_group,
    nccl_group,
)

CUT = "the connections were cut, because a rank is lost"


class NcclComm(GlooComm):
    """This process's connection to the ranks of one generation, from GPU to GPU.

    `broken` says whether the generation has lost a rank. A thread asks it all the time.
    """

    def __init__(
        self, store: Store, rank: int, ranks: int, patience: float, broken: Broken
    ) -> None:
        self.on_gpu = True
        self.gpu = self.wire_device()
        self.is_cut = False
        self.cut_lock = threading.Lock()
        self.over = threading.Event()
        self.message_groups = 0
        super().__init__(store, rank, ranks, patience, broken)
        threading.Thread(target=self.watch, name="watches NCCL", daemon=True).start()

    def uses_gpus(self) -> bool:
        """NCCL moves tensors from GPU to GPU."""
        return True

    def uses_nccl(self) -> bool:
        """Messages and sums have communicators of their own."""
        return True

    def make_group(
        self, store: Store, group: tuple[int, ...], rank: int
    ) -> dist.ProcessGroup:
        """Wait until these ranks are connected, all over one communicator."""
        return nccl_group(
            store, group.index(rank), len(group), self.time_limit, self.gpu
        )

    def create_message_group(self) -> dist.ProcessGroup:
        """Connect all ranks once more, for messages."""
        self.message_groups += 1
        return self.connect(self.everyone, self.rank, f"messages {self.message_groups}")

    def least_cores(self) -> int:
        """The cores for each rank. All workers of a crew with GPUs are on one machine."""
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        return (os.cpu_count() or 1) // neighbours

    # ------------------------------------------------------------ losses
    def watch(self) -> None:
        """Abort all waits on the GPU as soon as the generation has lost a rank."""
        while not self.over.wait(LOOK_SECONDS):
            # If the launcher is gone, this process ends anyway.
            with suppress(dist.DistError):
                if self.broken():
                    return self.cut_connections()
        return None

    def cut_connections(self) -> None:
        """Abort everything that the GPU waits for; its results mean nothing from now on."""
        with self.cut_lock:
            if self.is_cut:
                return
            self.is_cut = True
        for group in self.all_groups():
            with suppress(RuntimeError):
                abort_group(group)

    def all_groups(self) -> list[dist.ProcessGroup]:
        """The groups of sums and of messages, each once."""
        groups = {id(group): group for group in self.groups.values()}
        for group in (self.upward, self.downward):
            if group is not None:
                groups[id(group)] = group
        return list(groups.values())

    def check_whole(self, message: PendingMessage) -> None:
        """Raise an error if the connections were cut, because a result may be garbage then."""
        if self.is_cut:
            raise self.failed_wait(message, RuntimeError(CUT))

    def abandon(self) -> None:
        """Drop the groups: at once after a loss, else when their last messages have arrived."""
        self.over.set()
        if self.broken():
            self.cut_connections()
        was_cut = self.is_cut
        self.is_cut = True
        groups = self.all_groups()
        self.groups = {}
        self.upward = self.downward = self.waiting = None
        del self.world
        self.launched.clear()

        def drop() -> None:
            while groups:
                with suppress(RuntimeError):
                    if not was_cut:
                        leave_group(groups[-1])
                groups.pop()

        threading.Thread(target=drop, name="drops groups", daemon=True).start()

    # ------------------------------------------------------------ messages and sums
    def channel(self, source: int, target: int) -> dist.ProcessGroup:
        """The group of the messages from one rank to another; raise if there is none any more."""
        if self.is_cut:
            raise RuntimeError(CUT)
        return super().channel(source, target)

    def start_sum(self, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Start summing a tensor over a group."""
        if self.is_cut:
            raise RuntimeError(CUT)
        return super().start_sum(tensor, group)

    def start_barrier(self) -> dist.Work:
        """Start a barrier over all ranks, which the host waits for."""
        if self.is_cut:
            raise RuntimeError(CUT)
        options = BarrierOptions()
        if self.gpu.type == "cuda":
            options.device_ids = [self.gpu.index]
        return self.world.barrier(options)

    def barrier(self) -> None:
        """Wait until all ranks have reached this point."""
        super().barrier()
        self.check_whole(PendingMessage("barrier", self.everyone, self.sums))

    def add(self, tensor: Tensor, group: tuple[int, ...]) -> Pending:
        """Start summing a tensor over a group of ranks; the host waits for sums over all ranks."""
        work = super().add(tensor, group)
        return CheckedSum(self, work) if group == self.everyone else work


class CheckedSum:
    """A sum over all ranks: the host waits for it, and then knows whether it is one."""

    __slots__ = ("comm", "work")

    def __init__(self, comm: NcclComm, work: Pending) -> None:
        self.comm = comm
        self.work = work

    def wait(self) -> None:
        """Block the host until the sum is done; raise an error if it was aborted."""
        self.work.wait()
        if self.comm.gpu.type == "cuda":
            torch.cuda.current_stream(self.comm.gpu).synchronize()
        message = PendingMessage("sum", self.comm.everyone, self.comm.sums)
        self.comm.check_whole(message)
