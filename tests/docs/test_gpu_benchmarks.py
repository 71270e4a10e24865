"""The benchmarks for a GPU, tried without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from commands import environment
from forked import Command

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


def run(line: str) -> None:
    script, *words = line.split()
    done = Command(FOLDER, words, environment(), script=FOLDER / script)
    _, err = done.communicate()
    assert done.returncode == 0, err


def test_both_runtimes_run_the_same_schedules_and_find_the_same_loss(tmp_path):
    run(
        f"schedules.py --dry --rounds 1 --microbatches 2 --only 1f1b,zb-v --out {tmp_path}/found.json"
    )
    one, v = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert one["name"] == "1f1b"
    assert one["torch"] > 0
    assert v["loss"]["torch"] == pytest.approx(v["loss"]["ours"], rel=1e-5)
    for row in (one, v):
        parts = [
            sum(row["idle"][cause]) for cause in ("schedule", "hop", "host", "end")
        ]
        assert sum(parts) + sum(row["work"]) == pytest.approx(
            2 * row["makespan"], rel=1e-6
        )


def test_transports_are_compared_with_what_the_simulator_says(tmp_path):
    run(
        f"transports.py --dry --rounds 1 --only 1f1b,chimera --out {tmp_path}/found.json"
    )
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    whole, half, *replicas = rows
    assert (whole["messages"], half["messages"]) == ("float32", "bfloat16")
    assert half["message_bytes"] == whole["message_bytes"] / 2
    assert half["loss"] == pytest.approx(whole["loss"], rel=1e-3)
    for row in rows:
        assert row["free"] <= row["simulated"]
    for row in (whole, half):
        assert row["sums"] == 0
        assert row["in_order_with_sums"] == row["in_order"]
    for row in replicas:
        assert row["name"] == "chimera"
        assert row["sums"] == len(row["gradient_bytes"]) == 2
        assert row["in_order_with_sums"] > row["in_order"]


def test_profiles_come_with_how_far_their_fits_are_off(tmp_path):
    run(f"profiles.py --dry --rounds 1 --out {tmp_path}/found.json")
    (first,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert set(first["worst"]) == set("FBIW")
    assert any(
        "held_out" in point for point in first["profile"]["blocks"]["layer"]["points"]
    )


@pytest.fixture
def forked_trainings(tmp_path, monkeypatch):
    """Runs of the trainer are forked, because a new process would load torch again."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import trained  # noqa: PLC0415

    def run_forked(command: list[str], **_: object) -> CompletedProcess[str]:
        assert command[1:4] == ["-m", "penstock", "train"]
        run = Command(tmp_path, command[3:], environment())
        out, err = run.communicate()
        assert run.returncode is not None
        return CompletedProcess(command, run.returncode, out, err)

    monkeypatch.setattr(trained, "subprocess", SimpleNamespace(run=run_forked))


def test_workers_are_compared_with_one_process(tmp_path, monkeypatch, forked_trainings):
    import workers  # noqa: PLC0415

    found, plans = tmp_path / "found.json", tmp_path / "plans"
    words = ["workers.py", "--dry", "--steps", "6", "--out", str(found)]
    monkeypatch.setattr(sys, "argv", [*words, "--plans", str(plans)])
    workers.main()
    one, two = json.loads(found.read_text())["rows"]
    assert [row["ranks"] for row in (one, two)] == [1, 2]
    assert [row["microbatches"] for row in (one, two)] == [2, 4]
    for row in (one, two):
        assert row["speed"] == pytest.approx(row["tokens"] / row["seconds"])
    (plan,) = plans.glob("*-2.json")
    words = workers.settings_of("layers=4", 2, plan, dry=True)
    assert f"--set schedule.name={plan}" in words
    assert "schedule.microbatches" not in words


def test_runs_of_the_trainer_come_with_what_they_forecast(
    tmp_path, monkeypatch, forked_trainings
):
    import training  # noqa: PLC0415

    words = ["training.py", "--dry", "--steps", "6", "--out", f"{tmp_path}/found.json"]
    monkeypatch.setattr(sys, "argv", words)
    training.main()
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert 0 < row["predicted"] < 10
    assert row["spread"][0] <= row["seconds"] <= row["spread"][1]
    assert row["memory"] >= row["memory_early"] > 0
