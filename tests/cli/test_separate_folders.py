"""torchrun on two machines without a shared disk: a namespace of mounts gives each its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import environment, free_port, torchrun, wait_for, write_text_run
from penstock.train.checkpoints.checkpoint import faults, newest
from penstock.train.checkpoints.place import RemoteCheckpoints
from penstock.train.history import read_rows

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounting needs Linux and root"
)
TEXT = "".join(f"the {n % 7} cats sat on {n % 5} mats\n" for n in range(999))


def run_both(
    root: Path,
    disks: list[Path],
    line: str,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[tuple[int, str, str]]:
    """Run a command line under torchrun, on machines that have these disks at the same path."""
    port = free_port()
    started = []
    for number, disk in enumerate(disks):
        words = (
            f"--nnodes {len(disks)} --node-rank {number} --nproc-per-node 1 --master-addr 127.0.0.1 "
            f"--master-port {port} --local-addr 127.0.0.1 -m penstock {line}"
        )
        env = environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        mounted = (disk, root / "disk")
        started.append(torchrun(root / "disk", words.split(), env, disk=mounted))
    try:
        meanwhile()
        said = [one.communicate() for one in started]
    finally:
        for one in started:
            one.kill()
    return [(one.returncode, *told) for one, told in zip(started, said, strict=True)]


def test_machines_without_a_shared_disk_train_and_others_resume(tmp_path):
    disk = tmp_path / "disk"
    a, b, new = machines = [tmp_path / name for name in ("a", "b", "new")]
    for folder in (disk, *machines):
        folder.mkdir()
    write_text_run(a, TEXT)
    line = (
        "train config.toml --set run.folder=run --set run.checks=forecast,memory "
        f"--set run.checkpoint_url=file://{tmp_path}/bucket"
    )
    first, second = run_both(tmp_path, [a, b], f"{line} --set run.steps=2")
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert f"2 separate ones: rank 0 {disk}/run on" in first[2]
    # The text is on the first disk alone, so its tokens were sent to the second machine.
    tokens = b / "run" / "tokens.bin"
    assert (tokens.stat().st_size, tokens.is_symlink()) == (2 * len(TEXT) + 2, False)
    assert not faults(newest(a / "run" / "checkpoints")[0], quick=True)
    assert faults(newest(b / "run" / "checkpoints")[0], quick=True)
    # The first machine is lost with its disk, and the file of the second one is damaged. The storage has both.
    (damaged,) = newest(b / "run" / "checkpoints")[0].glob("*.safetensors")
    damaged.write_bytes(bytes(damaged.stat().st_size))

    def stop_new_machine() -> None:
        wait_for(b / "run", 1)
        (new / "run" / "stop").touch()

    line = "train run --resume --set run.steps=3000 --set run.save_every=0"
    first, second = run_both(tmp_path, [b, new], line, stop_new_machine)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "fetched step-00000002" in first[2]
    assert f"{damaged.name} does not have its checksum; the copy from" in first[2]
    assert "stopped after" in first[1]
    rows = read_rows(b / "run")
    assert rows[0].step == 3
    remote = RemoteCheckpoints(f"file://{tmp_path}/bucket", keep=2)
    assert remote.steps() == [rows[-1].step, 2]
