"""This machine as a run sees it: its cores, its GPUs, and the processes of the run that are on it.

A launcher such as torchrun describes each process in its environment:

    RANK=5  WORLD_SIZE=8              process 5 of 8, over all machines
    LOCAL_RANK=1  LOCAL_WORLD_SIZE=4  process 1 of 4 on its own machine
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from penstock.runtime.backends import NCCL
from penstock.runtime.process.mps import shared_gpu_backend, workers_of_a_gpu


@dataclass(frozen=True, slots=True)
class Machine:
    """The processors of a machine."""

    cores: int
    gpus: int  # that torch can use
    workers_per_gpu: int  # processes that one GPU serves at the same time
    # Whether processes that share a GPU talk over NCCL, as if each had its own.
    nccl_shares_gpus: bool = False

    @property
    def nccl_places(self) -> int:
        """How many processes can talk over NCCL: one for each GPU, more in a testbed."""
        return self.gpus * (self.workers_per_gpu if self.nccl_shares_gpus else 1)


def look_at_machine() -> Machine:
    """Return what this machine has."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_nccl = shared_gpu_backend() == NCCL
    return Machine(os.cpu_count() or 1, gpus, workers_of_a_gpu(), on_nccl)


def processes_at_once(threads: int) -> int:
    """How many processes with so many threads the cores of this machine can run at the same time."""
    return max(1, look_at_machine().cores // threads)


def use_threads(count: int) -> None:
    """Let this process compute and compile with `count` threads.

    Otherwise the compiler of torch starts a process for each core in every rank, and the
    ranks of a machine wait for one another's processes. Call it before anything is compiled.
    """
    torch.set_num_threads(count)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(count))


def count_launched() -> int:
    """Count the processes that the launcher started on all machines; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def count_neighbours(processes: int) -> int:
    """Count the processes of a run that share this machine's cores and GPUs.

    Without a launcher all processes are here. Some launchers do not say how many are on
    this machine; then we assume all of them, so that nothing is used twice.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes))


def local_processes(processes: int) -> range:
    """The processes of a run that are known to be on this machine.

    Under a launcher that does not say how many there are, only this one is known.
    """
    if "RANK" not in os.environ:
        return range(processes)
    first = int(os.environ["RANK"])
    count = 1
    if "LOCAL_WORLD_SIZE" in os.environ:
        first -= int(os.environ.get("LOCAL_RANK", "0"))
        count = int(os.environ["LOCAL_WORLD_SIZE"])
    return range(min(first, processes), min(first + count, processes))


def own_gpu(default: int = 0) -> int:
    """The number of the GPU that this process uses; neighbours take turns.

    `default` is the number of this process on its machine if no launcher gives it.
    """
    return int(os.environ.get("LOCAL_RANK", default)) % torch.cuda.device_count()
