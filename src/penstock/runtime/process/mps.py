"""Divides one GPU among several workers while a command runs, with NVIDIA's multi-process service (MPS).

    run_in_testbed(8, command)    132 multiprocessors:  16 │ 16 │ 16 │ 16 │ 16 │ 16 │ 16 │ 16    a share each
                                  an MPS daemon in its own folder, which always ends with the command

Without MPS, processes take turns on a GPU, so their stages never run at the same time. The
daemon serves only this command: the settings of the card and other people's daemons are left
alone.

The workers talk through the memory of the GPU (`penstock_ipc`) or, if the testbed says so, over
NCCL. NCCL refuses two ranks of one host on one GPU, so each worker pretends to be a host of its
own (`NCCL_HOSTID`). Their messages then take sockets, as between machines.

On some shares of a GPU, matrix products are silently incomplete. A share is therefore checked
first, and lowered until they are complete (`penstock.runtime.process.mps`).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

from penstock.errors import RunError, ShapeError, UnknownNameError
from penstock.runtime.comm.comm import IPC, NCCL

_log = logging.getLogger(__name__)
MPS_CONTROL = "nvidia-cuda-mps-control"
MAX_MPS_WORKERS = 48
# Hardware queues per process; eight processes with 16 each fail with "device busy".
GPU_QUEUES = 8
SECONDS_TO_END = 10.0  # how long the command may take to end once it is asked to
SHARE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
WORKERS_VARIABLE = "PENSTOCK_TESTBED_WORKERS"
BACKEND_VARIABLE = "PENSTOCK_TESTBED_BACKEND"
BACKENDS = (IPC, NCCL)
GPU_LISTER = "nvidia-smi"  # comes with the driver; without it there is no GPU to check
SHARE_CHECK = "penstock.runtime.process.mps"
NCCL_VARIABLES = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_in_testbed(workers: int, command: Sequence[str], backend: str = IPC) -> int:
    """Run a command whose processes each get a share of the GPU; return its exit code."""
    if backend not in BACKENDS:
        raise UnknownNameError("--backend", backend, BACKENDS)
    if not 1 <= workers <= MAX_MPS_WORKERS:
        raise ShapeError(
            f"--workers is {workers}, but MPS serves 1 to {MAX_MPS_WORKERS} workers"
        )
    if not command:
        raise ShapeError(
            "the command to run is missing\n"
            "  for example: penstock lab testbed --workers 8 -- penstock train"
        )
    if shutil.which(command[0]) is None:
        raise RunError(f"the command {command[0]} does not exist")
    with mps_daemon() as folder:
        variables = {**os.environ, **environment(workers, folder, backend)}
        if workers > 1 and shutil.which(GPU_LISTER) is not None:
            variables[SHARE_VARIABLE] = _good_share(variables)
        return _run(command, variables)


def environment(workers: int, folder: Path, backend: str = IPC) -> dict[str, str]:
    """The environment variables of a testbed's processes.

    >>> environment(8, Path("mps"))["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
    '12'
    """
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        SHARE_VARIABLE: str(100 // workers),
        WORKERS_VARIABLE: str(workers),
        "CUDA_DEVICE_MAX_CONNECTIONS": str(GPU_QUEUES),
        BACKEND_VARIABLE: backend,
    }


def shared_gpu_backend() -> str:
    """The backend between processes that share a GPU: what the testbed says, or our own."""
    return os.environ.get(BACKEND_VARIABLE, IPC)


def be_own_host(rank: int) -> None:
    """Let NCCL take this process for a host of its own, which it reaches through sockets.

    Call this before NCCL starts in this process.
    """
    os.environ["NCCL_HOSTID"] = f"testbed-{rank}"
    for name, value in NCCL_VARIABLES.items():
        os.environ.setdefault(name, value)


def workers_of_a_gpu() -> int:
    """The number of processes that a GPU serves at the same time.

    That is the number of workers in a testbed. Elsewhere it is as many as their share of a GPU under MPS allows, or
    one without MPS.
    """
    workers = os.environ.get(WORKERS_VARIABLE, "")
    if workers.isdigit():
        return max(1, int(workers))
    share = os.environ.get(SHARE_VARIABLE, "")
    if not share.isdigit() or not 0 < int(share) <= 100:
        return 1
    return 100 // int(share)


def _good_share(variables: dict[str, str]) -> str:
    """The share of each worker, lowered to one on which matrix products are complete."""
    highest = variables[SHARE_VARIABLE]
    line = [sys.executable, "-m", SHARE_CHECK, highest]
    check = subprocess.run(
        line, env=variables, capture_output=True, text=True, check=False
    )
    share = check.stdout.strip()
    if check.returncode or not share.isdigit():
        last_line = (check.stderr.strip().splitlines() or ["it said nothing"])[-1]
        _log.warning(
            "each worker gets %s%% of the GPU, where matrix products may be incomplete: %s",
            highest,
            last_line,
        )
        return highest
    if share != highest:
        _log.warning(
            "each worker gets %s%% of the GPU, because cuBLAS leaves some products incomplete on %s%%",
            share,
            highest,
        )
    return share


@contextmanager
def mps_daemon() -> Iterator[Path]:
    """Run an MPS daemon in a new folder; stop it and delete the folder afterwards."""
    if shutil.which(MPS_CONTROL) is None:
        raise RunError(
            f"{MPS_CONTROL} is not installed here; it comes with NVIDIA's driver\n"
            "  install it, or run the command without `penstock lab testbed`: its processes then "
            "take turns on the GPU"
        )
    folder = Path(tempfile.mkdtemp(prefix="penstock-mps-"))
    for name in ("pipe", "log"):
        (folder / name).mkdir()
    variables = {**os.environ, **environment(1, folder)}
    try:
        start = subprocess.run(
            [MPS_CONTROL, "-d"],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if start.returncode:
            output = (start.stderr or start.stdout).strip()
            raise RunError(f"{MPS_CONTROL} -d failed: {output or start.returncode}")
        yield folder
    finally:
        subprocess.run(
            [MPS_CONTROL],
            input="quit\n",
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: Sequence[str], variables: dict[str, str]) -> int:
    """Run the command in its own process group, so that none of it stays on the GPU."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that came before there was a command

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            _signal_group(child.pid, number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED_SIGNALS}
    try:
        child = subprocess.Popen(command, env=variables, start_new_session=True)
        for number in early:
            _signal_group(child.pid, number)
        code = child.wait()
        return 128 - code if code < 0 else code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if child is not None:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End what is left of the command."""
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(SECONDS_TO_END)
    _signal_group(child.pid, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


INCOMPLETE_EXIT_CODE = 3
# Rows of x, and the columns of x and y, in products such as those of a linear layer y = x W^T.
CHECKED_ROWS = (64, 512, 1024)
CHECKED_COLUMNS = (
    (256, 256),
    (384, 256),
    (384, 384),
    (384, 1056),
    (1056, 384),
    (512, 512),
    (768, 768),
    (1024, 1024),
    (1024, 2816),
    (2816, 1024),
    (2048, 2048),
)


def highest_good_share(highest: int, is_good: Callable[[int], bool]) -> int:
    """The highest good share up to `highest`, in percent.

    >>> highest_good_share(16, lambda share: share in (10, 13))
    13
    """
    for share in range(highest, 0, -1):
        if is_good(share):
            return share
    raise SystemExit(f"the check found them incomplete on every share up to {highest}%")


def products_are_complete(
    device: str,
    rows: Sequence[int] = CHECKED_ROWS,
    columns: Sequence[tuple[int, int]] = CHECKED_COLUMNS,
) -> bool:
    """Whether products in bfloat16 write all of their result: y = x W^T, and the gradients of x and W."""
    import torch  # noqa: PLC0415  # a mistake in a command is reported without torch, too

    for tokens in rows:
        for inner, outer in columns:
            x = torch.ones(tokens, inner, device=device, dtype=torch.bfloat16)
            weight = torch.ones(outer, inner, device=device, dtype=torch.bfloat16)
            y = torch.ones(tokens, outer, device=device, dtype=torch.bfloat16)
            for a, b in ((x, weight.t()), (y, weight), (y.t(), x)):
                result = torch.full_like(a[:, :1] * b[:1], torch.nan)
                torch.mm(a, b, out=result)
                if not bool(result.isfinite().all()):
                    return False
    return True


def _is_good(share: int) -> bool:
    """Check a share in a process of its own, because a process cannot change its share."""
    os.environ[SHARE_VARIABLE] = str(share)
    child = get_context("fork").Process(target=_check)
    child.start()
    child.join()
    if child.exitcode not in (0, INCOMPLETE_EXIT_CODE):
        raise SystemExit(f"the check of {share}% ended with code {child.exitcode}")
    return child.exitcode == 0


def _check() -> None:
    import torch  # noqa: PLC0415

    if torch.cuda.is_available() and not products_are_complete("cuda"):
        raise SystemExit(INCOMPLETE_EXIT_CODE)


if __name__ == "__main__":
    sys.stdout.write(f"{highest_good_share(int(sys.argv[1]), _is_good)}\n")
