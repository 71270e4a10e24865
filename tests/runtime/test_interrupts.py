"""Ctrl-C ends a command at once, with exit code 130, no traceback and no process left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from commands import ended, environment
from forked import Command
from penstock.cost.cluster import Cluster, Node
from penstock.formats import dump_cluster


@pytest.fixture
def cluster(tmp_path):
    apart = tuple(tuple(0.0 if a == b else 0.01 for b in range(8)) for a in range(8))
    wide = tuple((1e8,) * 8 for _ in range(8))
    nodes = tuple(Node("here", slots=3) for _ in range(8))
    (tmp_path / "cluster.toml").write_text(dump_cluster(Cluster(nodes, apart, wide)))


@pytest.mark.parametrize(
    "line",
    [
        "plan --pp 32 --microbatches 512 --cost comm=0.05",
        "profile llama-150m --rows 1 -o p.json",
        "lab paths --cluster cluster.toml --stages 4 --microbatches 6 --iterations 1000000000 "
        "--cost F=0.05,message=4e6",
    ],
    ids=["plan", "profile", "paths"],
)
def test_ctrl_c_ends_a_command_silently(line, cluster, tmp_path):
    code, err = ended(tmp_path, line, 0.7)
    # A quick machine has found some plan by then, which is a result.
    has_plan = line.startswith("plan") and "this is the best plan so far" in err
    assert code == (0 if has_plan else 130)
    assert "Traceback" not in err
    assert not (tmp_path / "p.json").exists()


def members(group: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("line", ["profile llama-150m --rows 1 --ranks 2 -o p.json"])
def test_ctrl_c_in_a_terminal_ends_all_ranks(line, tmp_path):
    process = Command(tmp_path, line.split(), environment(), session=True)
    late = time.monotonic() + 600
    while (
        len(members(process.pid)) < 4 and time.monotonic() < late
    ):  # it, its fork server, two ranks
        time.sleep(0.1)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    late = time.monotonic() + 120
    while members(process.pid) and time.monotonic() < late:
        time.sleep(0.1)
    assert not members(process.pid)
