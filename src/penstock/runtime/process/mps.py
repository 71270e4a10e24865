"""One GPU as several workers: NVIDIA's multi-process service (MPS) around a command, and gone after it.

    run_in_testbed(8, command)    132 multiprocessors:  16 │ 16 │ 16 │ 16 │ 16 │ 16 │ 16 │ 16    a share each
                                  a daemon in a folder of its own, ended with the command whatever happens

Without MPS processes take turns on a GPU, and a pipeline of them is no pipeline. The daemon is this command's own: the
card's settings, and other people's daemons, are left alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from penstock.errors import RunError, ShapeError

MPS_CONTROL = "nvidia-cuda-mps-control"
GPU_QUEUES = 8  # of a process to the GPU; eight processes with 16 each are refused as "device busy"
SECONDS_TO_END = 10.0  # seconds for the command to end once it is asked to


def run_in_testbed(workers: int, command: Sequence[str]) -> int:
    """Runs a command, and the processes it starts, each with a share of the GPU; its exit code."""
    if not 1 <= workers <= 48:
        raise ShapeError(f"{workers} workers: MPS serves 1 to 48")
    if not command:
        raise ShapeError(
            "there is no command\n  penstock testbed --workers 8 -- penstock train"
        )
    if shutil.which(command[0]) is None:
        raise RunError(f"there is no command {command[0]}")
    with service() as folder:
        return _run(command, {**os.environ, **environment(workers, folder)})


def environment(workers: int, folder: Path) -> dict[str, str]:
    """What a worker of a testbed has in its environment.

    >>> environment(8, Path("mps"))["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
    '12'
    """
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // workers),
        "CUDA_DEVICE_MAX_CONNECTIONS": str(GPU_QUEUES),
    }


def workers_of_a_gpu() -> int:
    """How many processes a GPU serves at once here: in a testbed its workers, else one."""
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
    return 100 // int(share) if share.isdigit() and 0 < int(share) <= 100 else 1


@contextmanager
def service() -> Iterator[Path]:
    """A daemon of our own in a new folder, which goes with it."""
    if shutil.which(MPS_CONTROL) is None:
        raise RunError(f"there is no {MPS_CONTROL} here: it comes with NVIDIA's driver")
    folder = Path(tempfile.mkdtemp(prefix="penstock-mps-"))
    for name in ("pipe", "log"):
        (folder / name).mkdir()
    own = {**os.environ, **environment(1, folder)}
    try:
        begun = subprocess.run(
            [MPS_CONTROL, "-d"], env=own, capture_output=True, text=True, check=False
        )
        if begun.returncode:
            raise RunError(
                f"{MPS_CONTROL} -d failed: {(begun.stderr or begun.stdout).strip() or begun.returncode}"
            )
        yield folder
    finally:
        subprocess.run(
            [MPS_CONTROL],
            input="quit\n",
            env=own,
            capture_output=True,
            text=True,
            check=False,
        )
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """The command in a process group of its own, so that nothing of it stays behind on the GPU."""
    child = subprocess.Popen(command, env=environment, start_new_session=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        _tell(child.pid, number)

    before = {
        number: signal.signal(number, pass_on)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        code = child.wait()
        return 128 - code if code < 0 else code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if child.poll() is None:
            _tell(child.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(SECONDS_TO_END)
        _tell(child.pid, signal.SIGKILL)


def _tell(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
