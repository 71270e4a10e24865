"""Where a run computes: decided once, by `decide_placement`, and passed on to everyone who asks.

    config      run.device, mesh, OMP_NUM_THREADS  ─┐
    schedule    number of processes             ├─► Placement ─► forecast, memory check, workers,
    machine     cores, GPUs, testbed            │                the line that `penstock train` shows
    launcher    processes on this machine      ─┘

The rules:

- A run uses GPUs if torch sees one, unless run.device is cpu.
- The processes of one rank (parallel.dp_shard x parallel.tp) talk over NCCL, so they cannot share
  a GPU, except in a testbed with `--backend nccl`. With too few GPUs, run.device = auto falls
  back to the CPU and cuda is an error.
- Other processes may share GPUs. They compute at the same time only in a testbed
  (`penstock.runtime.process.mps`) and take turns otherwise.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from penstock.config import AUTO, Config, precision_of
from penstock.errors import ConfigError, RunError
from penstock.runtime.process.machine import (
    Machine,
    avoid_broken_amx,
    count_launched,
    count_neighbours,
    local_processes,
    look_at_machine,
)

CPU_BACKEND = "gloo"
MAX_CROWD = 4  # processes for each processor while the pieces of a model are timed


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the processes of a run compute, as seen from one machine."""

    device: str  # "cpu" or "cuda"
    machine: Machine
    processes: int  # of the whole run
    neighbours: int  # processes that share the cores and GPUs of this machine
    local: range  # processes that are known to be on this machine
    threads: int  # CPU threads of each process
    wanted: str  # run.device

    @property
    def backend(self) -> str | None:
        """The torch backend between the processes; None if they must agree on one.

        On GPUs it depends on all machines, so the processes compare their GPUs when
        they meet (`penstock.runtime.process.launch.init`).
        """
        if self.wanted == "cpu":
            return CPU_BACKEND
        too_few_gpus = self.device == "cpu" and self.machine.gpus > 0
        return CPU_BACKEND if too_few_gpus else None

    @property
    def shares_gpus(self) -> bool:
        """Whether several processes use the same GPU."""
        return self.device == "cuda" and self.machine.gpus < self.neighbours

    @property
    def processors(self) -> int:
        """The number of processes on this machine that can compute at the same time."""
        if self.device == "cuda":
            slots = self.machine.gpus * self.machine.workers_per_gpu
        else:
            slots = max(1, self.machine.cores // self.threads)
        return min(slots, self.neighbours)

    @property
    def measurers(self) -> int:
        """How many processes time the pieces of a model: all that will run on these cores.

        Processes that take turns find their caches as the others have left them. With `MAX_CROWD` of them for
        each processor they find nothing, and more would only take longer. On a GPU as many measure as compute at
        the same time.
        """
        if self.device == "cuda":
            return self.processors
        return min(self.neighbours, MAX_CROWD * self.processors)


def decide_placement(config: Config, processes: int) -> Placement:
    """Decide where the processes of a run compute."""
    machine = look_at_machine()
    neighbours = count_neighbours(processes)
    if config.elastic.workers:  # The others join from other machines.
        neighbours = min(neighbours, config.elastic.workers)
    wanted = config.run.device
    device = "cuda" if machine.gpus and wanted != "cpu" else "cpu"
    if wanted == AUTO and config.parallel.size > 1 and machine.nccl_places < neighbours:
        device = "cpu"
    threads = threads_for(machine.cores // neighbours)
    local = local_processes(processes)
    if config.elastic.workers:
        local = local[: config.elastic.workers]
    return Placement(device, machine, processes, neighbours, local, threads, wanted)


def threads_for(share: int) -> int:
    """Return the threads of a worker: its share of the cores, or OMP_NUM_THREADS."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else max(1, share)


def launched_placement(config: Config) -> Placement:
    """The placement of a run whose processes a launcher has already started."""
    return decide_placement(config, count_launched())


def uses_gpus(config: Config) -> bool:
    """Whether a run may use GPUs: there is one, and the config allows it."""
    return config.run.device != "cpu" and look_at_machine().gpus > 0


def precision_on(config: Config, device: str) -> str:
    """Return the type in which a run computes on a device of this machine, such as cuda."""
    import torch  # noqa: PLC0415

    # Older GPUs only emulate bfloat16, which is slow.
    half = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision_of(config, half)


def prepare_cpu(config: Config) -> None:
    """Disable AMX if a run computes in bfloat16 on a CPU that advertises it but cannot run it."""
    if config.run.precision == "bfloat16" and not uses_gpus(config):
        avoid_broken_amx()


def check_gpu_exists(config: Config) -> None:
    """Raise RunError if a config needs a GPU and torch sees none."""
    if look_at_machine().gpus:
        return
    if config.run.device == "cuda":
        raise RunError(
            "run.device = cuda, but torch sees no GPU here\n"
            "  set run.device to auto or cpu; `penstock doctor` says what is missing"
        )
    if config.run.cuda_graphs == "true":
        raise RunError(
            "run.cuda_graphs = true records launches of a GPU, but torch sees none here\n"
            "  leave run.cuda_graphs at auto"
        )


def check_gpus_suffice(config: Config, placement: Placement) -> None:
    """Raise ConfigError if the processes of a rank would have to share GPUs."""
    mesh = config.parallel
    gpus = placement.machine.gpus
    too_few = placement.machine.nccl_places < placement.neighbours
    if placement.wanted == "cuda" and mesh.size > 1 and too_few:
        ranks = placement.processes // mesh.size
        raise ConfigError(
            f"{mesh.over(ranks)} need a GPU each, but there are {gpus}\n"
            "  use fewer processes, set run.device=cpu, or try it on one GPU: "
            "penstock lab testbed --backend nccl"
        )
