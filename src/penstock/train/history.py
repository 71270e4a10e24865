"""What a run leaves behind, line by line: for people, for TensorBoard, for the report.

RUN/metrics.jsonl      a line a step, written at once: a crash loses none
RUN/timeline.json      the last step that was timed, every action with start and end
RUN/tensorboard/       the same figures, if TensorBoard is there
Weights & Biases       if it is installed and WANDB_MODE or WANDB_API_KEY say so; RUN/wandb.id is its name there
"""

from __future__ import annotations

import json
import logging
import math
import os
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.errors import FileError, RunError
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import MEASURED_UNITS, Timeline

_log = logging.getLogger(__name__)
METRICS, TIMELINE, WANDB = "metrics.jsonl", "timeline.json", "wandb.id"
ROOM = "make room, then go on from the last checkpoint with --resume, or without one start again"


@dataclass(frozen=True, slots=True)
class StepRow:
    """One optimizer step, counted from 1.

    `bubble` where the step was timed, `evaluation` where one followed, `mfu` where the device is known: the share of
    its peak in bf16 that the model's own operations make up.
    """

    step: int
    loss: float
    norm: float  # of all gradients, before clipping
    rate: float
    seconds: float
    tokens: int  # trained on in this step
    memory: int  # bytes of the fullest rank
    epoch: float
    bubble: float | None = None
    evaluation: float | None = None
    mfu: float | None = None

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Sink(Protocol):
    """Takes figures."""

    def put(self, step: int, figures: Mapping[str, float]) -> None:
        """Those of one step."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class History:
    """The files of a run, kept by rank 0. A run that goes on from step k drops the lines after k."""

    def __init__(self, folder: Path, begin: int, name: str = "") -> None:
        self.folder = folder
        self.rows = (
            [row for row in read_rows(folder) if row.step <= begin] if begin else []
        )
        part = folder / f"{METRICS}.part"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            part.write_text("".join(map(_line, self.rows)), encoding="utf-8")
            part.replace(folder / METRICS)
            self.file = (folder / METRICS).open("a", encoding="utf-8")
        except OSError as error:
            raise FileError(
                f"cannot write {folder / METRICS}: {error.strerror}"
            ) from None
        self.sinks = [
            sink
            for sink in (_tensorboard(folder, begin), _wandb(folder, name))
            if sink is not None
        ]

    def put(self, row: StepRow) -> None:
        """A step is done."""
        self.rows.append(row)
        try:
            self.file.write(_line(row))
            self.file.flush()
        except OSError as error:
            raise RunError(
                f"cannot write {self.folder / METRICS}: {error.strerror}\n  {ROOM}"
            ) from None
        figures = {
            "loss": row.loss,
            "gradient norm": row.norm,
            "rate": row.rate,
            "tokens a second": row.speed,
            "memory": row.memory,
            "bubble": row.bubble,
            "evaluation": row.evaluation,
            "MFU": row.mfu,
        }
        for sink in self.sinks:
            sink.put(
                row.step,
                {key: value for key, value in figures.items() if value is not None},
            )

    def close(self) -> None:
        """No more will come."""
        self.file.close()
        for sink in self.sinks:
            sink.close()


def _line(row: StepRow) -> str:
    return (
        json.dumps(
            {key: value for key, value in asdict(row).items() if value is not None}
        )
        + "\n"
    )


def read_rows(folder: Path) -> list[StepRow]:
    """The steps that a run has written down; a last line that a crash has cut off is left out."""
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {folder / METRICS}: {error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, TypeError, RecursionError):
            if number < len(lines):
                raise FileError(
                    f"{folder / METRICS}:{number}: this line is no step of a run"
                ) from None
    return rows


def _row(said: object) -> StepRow:
    if not isinstance(said, dict) or not all(
        isinstance(value, int | float) for value in said.values()
    ):
        raise TypeError("a figure is no number")
    return StepRow(**said)


# ---------------------------------------------------------------- elsewhere
class _Board:
    def __init__(self, writer: object) -> None:
        self.writer = writer

    def put(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name.replace(" ", "_"), value, step)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.writer.close()  # type: ignore[attr-defined]


def _tensorboard(folder: Path, begin: int) -> Sink | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own affairs
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # optional
    except ImportError:
        _log.info("no TensorBoard here: pip install tensorboard")
        return None
    return _Board(
        SummaryWriter(
            str(folder / "tensorboard"), purge_step=begin + 1 if begin else None
        )
    )


class _Wandb:
    def __init__(self, run: object) -> None:
        self.run = run

    def put(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=step)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.run.finish()  # type: ignore[attr-defined]


def _wandb(folder: Path, name: str) -> Sink | None:
    """Only for somebody who has set it up: it would ask for a login otherwise. A run that goes on is one run there too.

    The project, and all else, is as WANDB_PROJECT and its sisters say. What goes wrong there stops no training.
    """
    if not {"WANDB_API_KEY", "WANDB_MODE"} & set(os.environ):
        return None
    try:
        import wandb  # noqa: PLC0415  # optional
    except ImportError:
        _log.warning(
            "WANDB_MODE or WANDB_API_KEY is set, but wandb is not installed: pip install wandb"
        )
        return None
    known, told = folder / WANDB, folder / "config.toml"
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "penstock"),
            name=name or folder.resolve().name,
            dir=str(folder),
            id=known.read_text().strip() if known.is_file() else None,
            resume="allow",
            config=tomllib.loads(told.read_text(encoding="utf-8"))
            if told.is_file()
            else None,
            settings=wandb.Settings(silent=True, console="off"),
        )
        known.write_text(f"{run.id}\n")
    except Exception as error:  # it has many of its own
        _log.warning(
            "no Weights & Biases: %s",
            str(error).strip().splitlines()[0] if str(error).strip() else error,
        )
        return None
    _log.info("Weights & Biases: %s", run.url or run.dir)
    return _Wandb(run)


# ---------------------------------------------------------------- timelines
def write_timeline(folder: Path, step: int, timeline: Timeline) -> None:
    """Keeps a measured timeline: its columns as lists, what is not known as null."""
    columns = {
        item.name: _listed(getattr(timeline, item.name))
        for item in fields(timeline)
        if item.name not in ("schedule", "units")
    }
    part = folder / f"{TIMELINE}.part"
    try:
        part.write_text(json.dumps({"step": step, **columns}), encoding="utf-8")
        part.replace(folder / TIMELINE)
    except OSError as error:
        raise RunError(
            f"cannot write {folder / TIMELINE}: {error.strerror}\n  {ROOM}"
        ) from None


def _listed(
    column: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> list[float | None]:
    return [
        None if isinstance(value, float) and math.isnan(value) else value
        for value in column.tolist()
    ]


def read_timeline(folder: Path, schedule: Schedule) -> tuple[int, Timeline] | None:
    """The measured timeline of a run, and of which step it is; None if no step was timed."""
    try:
        columns = json.loads((folder / TIMELINE).read_text(encoding="utf-8"))
        step = int(columns.pop("step"))
        made = {
            name: np.array([math.nan if v is None else float(v) for v in column])
            for name, column in columns.items()
        }
        made["cause"] = made["cause"].astype(np.int32)
        if (
            len(
                {len(made[name]) for name in ("start", "end", "cause")}
                | {schedule.actions}
            )
            > 1
        ):
            raise ValueError(
                f"the schedule has {schedule.actions} actions, the timeline {len(made['start'])}"
            )
        return step, Timeline(schedule, **made, units=MEASURED_UNITS)
    except FileNotFoundError:
        return None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise FileError(
            f"{folder / TIMELINE} is no timeline of this run: {error}"
        ) from None
