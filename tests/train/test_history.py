"""What a run leaves elsewhere: TensorBoard and Weights & Biases get every figure of every step."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from pathlib import Path

import pytest

from penstock import make
from penstock.errors import FileError
from penstock.train.history import WANDB, History, StepRow, read_rows, read_timeline

REAL = importlib.util.find_spec("wandb") is not None


def row(step: int, **more: float) -> StepRow:
    return StepRow(step, 3.0 / step, 1.0, 0.1, 0.5, 100, 1000, 0.1, **more)


def write(folder: Path, begin: int, *rows: StepRow) -> None:
    history = History(folder, begin)
    for one in rows:
        history.put(one)
    history.close()


class StandIn(types.ModuleType):
    """What we use of wandb."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("wandb")
        self.error, self.runs = error, []

    def Settings(self, **settings):
        return settings

    def init(self, **asked):
        if self.error is not None:
            raise self.error
        run = types.SimpleNamespace(
            id=asked["id"] or "new",
            url=None,
            dir="here",
            asked=asked,
            logged=[],
            ended=False,
        )
        run.log = lambda figures, step: run.logged.append((step, figures))
        run.finish = lambda: setattr(run, "ended", True)
        self.runs.append(run)
        return run


@pytest.fixture
def wandb(monkeypatch):
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_weights_and_biases_get_every_figure_and_a_run_that_goes_on_is_the_same_run(
    wandb, tmp_path
):
    url = "sftp://me:secret@host/run?key=hidden"
    (tmp_path / "config.toml").write_text(
        f'[run]\ncheckpoint_url = "{url}"\nsteps = 5\n'
    )
    write(tmp_path, 0, row(1), row(2, bubble=0.25, evaluation=2.5, mfu=0.4))
    write(tmp_path, 2, row(3))
    first, second = wandb.runs
    shown = "sftp://me:***@host/run?***"
    assert first.asked["config"] == {"run": {"checkpoint_url": shown, "steps": 5}}
    assert (first.asked["project"], first.asked["name"], first.asked["id"]) == (
        "penstock",
        tmp_path.name,
        None,
    )
    assert second.asked["id"] == "new"
    assert [step for step, _ in first.logged] == [1, 2]
    assert first.logged[1][1] == {
        "loss": 1.5,
        "gradient norm": 1.0,
        "rate": 0.1,
        "tokens a second": 200.0,
        "memory": 1000,
        "bubble": 0.25,
        "evaluation": 2.5,
        "MFU": 0.4,
    }
    assert second.logged[0][0] == 3
    assert first.ended
    assert second.ended


def test_without_being_asked_for_it_is_left_alone(wandb, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    write(tmp_path, 0, row(1))
    assert not wandb.runs


def test_what_goes_wrong_there_stops_no_training(wandb, tmp_path, caplog):
    wandb.error = RuntimeError("no such key\n  at all")
    with caplog.at_level(logging.WARNING, logger="penstock"):
        write(tmp_path, 0, row(1))
    assert "no Weights & Biases: no such key" in caplog.text
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_asked_for_but_not_installed_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with caplog.at_level(logging.WARNING, logger="penstock"):
        write(tmp_path, 0, row(1))
    assert "pip install wandb" in caplog.text


@pytest.mark.skipif(not REAL, reason="wandb is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_real_one_takes_it_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path, 0, row(1), row(2, bubble=0.25))
    name = (tmp_path / WANDB).read_text().strip()
    write(tmp_path, 2, row(3))
    assert (tmp_path / WANDB).read_text().strip() == name
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # waits for the process that writes its files
    kept = list((tmp_path / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    assert kept
    assert all(file.stat().st_size > 200 for file in kept)


def test_tensorboard_gets_every_figure(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    write(tmp_path, 0, row(1), row(2, evaluation=2.5))
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [event.value for event in found.Scalars("loss")] == [3.0, 1.5]
    assert [event.step for event in found.Scalars("evaluation")] == [2]


def test_without_tensorboard_one_line_says_that_there_are_no_event_files(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with caplog.at_level("INFO", "penstock"):
        write(tmp_path, 0, row(1), row(2))
    (line,) = caplog.messages
    assert line.startswith("no event files for TensorBoard")
    assert "penstock[tensorboard]" in line
    assert [one.step for one in read_rows(tmp_path)] == [1, 2]
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("line", ['{"step": "1"}', '{"loss": [1]}', "[]", "3"])
def test_a_line_that_is_no_step_is_named(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n" * 2)
    with pytest.raises(FileError, match="1: this line is not a step of a run"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "[]",
        "{}",
        '{"step": 1, "start": [1], "end": [2], "cause": [0]}',
        '{"step": 1, "start": ["a"]}',
    ],
)
def test_a_timeline_that_is_none_is_said_so(text, tmp_path):
    (tmp_path / "timeline.json").write_text(text)
    with pytest.raises(FileError, match="is not a timeline of this run"):
        read_timeline(tmp_path, make("1f1b", ranks=2, microbatches=2))
