"""This machine as a run sees it: its cores, its GPUs, and the processes of the run that are on it.

A launcher such as torchrun describes each process in its environment:

    RANK=5  WORLD_SIZE=8              process 5 of 8, over all machines
    LOCAL_RANK=1  LOCAL_WORLD_SIZE=4  process 1 of 4 on its own machine
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.runtime.comm.comm import NCCL
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
    import torch  # noqa: PLC0415  # `doctor` asks for the memory of machines without torch

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
    import torch  # noqa: PLC0415

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
    import torch  # noqa: PLC0415

    return int(os.environ.get("LOCAL_RANK", default)) % torch.cuda.device_count()


CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> float:
    """Return the bytes of RAM that new processes can have, within a container's limit."""
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = [line for line in lines if line.startswith("MemAvailable:")]
        limits += [1024.0 * int(line.split()[1]) for line in free]
    except (OSError, ValueError):
        pass  # This is not Linux.
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = (CGROUP / "memory.current").read_text(encoding="ascii")
        if limit != "max":
            limits.append(max(0.0, float(limit) - float(used)))
    except (OSError, ValueError):
        pass  # This is not a container, or one with an older interface.
    return min(limits)


# Parameters of glibc's mallopt.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
# The free memory that the heap keeps at its end, and the largest block that it keeps.
KEPT_BYTES = 1 << 30
# The largest block that is kept where weights are sharded: for layers that compute,
SHARDED_KEPT_BYTES = 8 << 20
# and for weights that are gathered and gradients that are summed.
TRANSIENT_KEPT_BYTES = 1 << 20


def keep_freed_memory(max_block: int = KEPT_BYTES) -> bool:
    """Make glibc keep freed blocks smaller than `max_block`; return whether it accepted.

    This applies to blocks that are allocated from now on.
    """
    libc = _glibc()
    if libc is None:
        return False
    if not libc.mallopt(TRIM_THRESHOLD, KEPT_BYTES):
        return False
    return bool(libc.mallopt(MMAP_THRESHOLD, max_block))


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Large blocks allocated in this context are returned to the system once freed."""
    keep_freed_memory(TRANSIENT_KEPT_BYTES)
    try:
        yield
    finally:
        keep_freed_memory(SHARDED_KEPT_BYTES)


@cache
def _glibc() -> ctypes.CDLL | None:
    library, _ = platform.libc_ver()
    return ctypes.CDLL(None) if library == "glibc" else None


ISA_LIMIT_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_WITHOUT_AMX = "AVX512_CORE_BF16"
AMX_TRIAL = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
_log = logging.getLogger(__name__)


def avoid_broken_amx(advertised: bool | None = None) -> bool:
    """Disable AMX in oneDNN if it does not work here, and return whether it was disabled.

    Call this before the first matrix product of the process; child processes inherit the
    setting. `advertised` replaces what the CPU says, for tests.
    """
    if ISA_LIMIT_VARIABLE in os.environ:
        return False
    if advertised is None:
        from penstock.torch_internals import supports_amx  # noqa: PLC0415

        advertised = supports_amx()
    if not advertised:
        return False
    trial = subprocess.run(
        [sys.executable, "-c", AMX_TRIAL], capture_output=True, check=False
    )
    killed = trial.returncode < 0
    if not killed:
        return False
    os.environ[ISA_LIMIT_VARIABLE] = ISA_WITHOUT_AMX
    _log.warning(
        "this machine advertises AMX but cannot run it, so %s=%s is now set",
        ISA_LIMIT_VARIABLE,
        ISA_WITHOUT_AMX,
    )
    return True
