"""The figures of a run, written step by step: for people, for TensorBoard, for the report.

RUN/metrics.jsonl      a line per step, flushed at once, so that a crash loses none
RUN/timeline.json      the last step that was timed, every action with start and end; if some steps run all parts
                       and others leave out some, timeline-full.json has the last full one
RUN/tensorboard/       the same figures, if TensorBoard is installed
Weights & Biases       if it is installed and WANDB_MODE or WANDB_API_KEY is set; RUN/wandb.id has the run's id there
the screen             one live line on a terminal, plain lines in a log:

    step  40/200  loss 3.0137  norm 0.527  3,135 tokens/s  343 MiB  bubble 39.7%  ━━━━╸━━━━━ 0:00:41
"""

from __future__ import annotations

import json
import logging
import math
import os
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import FileError, RunError
from penstock.formats import read_plan
from penstock.formats.text import hide_secrets, put_in_place
from penstock.ir import Plan, Schedule
from penstock.ir.timeline import MEASURED_UNITS, Sum, Timeline
from penstock.view.numbers import write_size

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger(__name__)
# Files in the folder of a run.
METRICS = "metrics.jsonl"
END_BYTES = 1 << 14  # of the metrics, which hold many lines
TIMELINE = "timeline.json"
FULL_TIMELINE = "timeline-full.json"
PLAN_FILE = "plan.json"
WANDB = "wandb.id"
ROOM = (
    "make room, then go on from the last checkpoint with --resume; "
    "without a checkpoint, start again"
)


class Counts(NamedTuple):
    """What ranks add up in the sum that ends a step."""

    stop: int  # ranks that were asked to stop from outside
    enough: int  # ranks whose callbacks want to stop
    saved: int  # ranks that have saved their share of a checkpoint
    change: int  # ranks that know that the crew is about to change
    mirror_bytes: int  # that were sent to mirrors
    mirror_microseconds: int  # that mirrors have cost since the last step


class OwnNumbers(NamedTuple):
    """What each rank tells all others with the sum that ends a step."""

    memory: float  # bytes at its fullest moment so far
    worked: float  # seconds that it has computed in this step


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What all ranks know about a step once it is done."""

    loss: float
    norm: float
    memory: int  # bytes of the fullest rank
    seconds: float
    bubble: float | None
    stopping: bool  # whether a rank was asked to stop
    mirror_bytes: int = 0  # sent to mirrors by all ranks
    mirror_seconds: float = 0.0  # that mirrors cost a rank on average
    interrupted: bool = False  # whether that came from outside, not from a callback


@dataclass(frozen=True, slots=True)
class StepRow:
    """One optimizer step, counted from 1.

    `bubble` is known if the step was timed, `evaluation` if one followed, and `mfu` if the
    peak of the device is known: the share of its bf16 peak that the model's own
    operations make up. `layers` is known if the run leaves out parts: how many layers a
    micro-batch passed through on average. What mirrors cost is known if there are any: the
    bytes that all ranks have sent, and the seconds of a rank on average.
    """

    step: int
    loss: float
    norm: float  # of all gradients, before clipping
    rate: float
    seconds: float
    tokens: int  # of this step
    memory: int  # bytes of the fullest rank
    epoch: float
    bubble: float | None = None
    evaluation: float | None = None
    mfu: float | None = None
    layers: float | None = None
    mirror_bytes: int | None = None
    mirror_seconds: float | None = None

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


WatchRow = Callable[[StepRow], None]  # sees each row when its step is done


class Sink(NamedTuple):
    """A place outside the run's folder that takes the figures of each step, and is closed after the last."""

    put: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


class History:
    """The files of a run, written by rank 0. A run that resumes from step k drops later lines."""

    def __init__(self, folder: Path, begin: int, name: str = "") -> None:
        self.folder = folder
        self.rows: list[StepRow] = []
        if begin:
            self.rows = [row for row in read_rows(folder) if row.step <= begin]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            put_in_place(folder / METRICS, "".join(map(_line, self.rows)))
            self.file = (folder / METRICS).open("a", encoding="utf-8")
        except OSError as error:
            raise FileError(
                f"cannot write {folder / METRICS}: {error.strerror}"
            ) from None
        sinks = (_tensorboard(folder, begin), _wandb(folder, name))
        self.sinks = [sink for sink in sinks if sink is not None]

    def has(self, step: int) -> bool:
        """Whether a step is written down already."""
        return bool(self.rows) and self.rows[-1].step >= step

    def put(self, row: StepRow) -> None:
        """Write down a step."""
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
            "layers": row.layers,
        }
        known = {key: value for key, value in figures.items() if value is not None}
        for sink in self.sinks:
            sink.put(row.step, known)

    def close(self) -> None:
        """Close all files; no more steps will come."""
        self.file.close()
        for sink in self.sinks:
            sink.close()


def _line(row: StepRow) -> str:
    known = {key: value for key, value in asdict(row).items() if value is not None}
    return json.dumps(known) + "\n"


def last_step(folder: Path) -> int:
    """Return the last step of a run that is written down completely, or 0; reads only the end of the file."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(-min(file.seek(0, os.SEEK_END), END_BYTES), os.SEEK_END)
            lines = file.read().split(b"\n")[:-1]  # The last one is empty or cut off.
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def read_rows(folder: Path) -> list[StepRow]:
    """Read the steps of a run, without a last line that a crash has cut off."""
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
        except (ValueError, TypeError, AttributeError, RecursionError):
            if number < len(lines):
                raise FileError(
                    f"{folder / METRICS}:{number}: this line is not a step of a run"
                ) from None
    return rows


def _row(content: dict[str, Any]) -> StepRow:
    if not all(isinstance(value, int | float) for value in content.values()):
        raise TypeError("a figure must be a number")
    return StepRow(**content)


# ---------------------------------------------------------------- elsewhere
def _tensorboard(folder: Path, begin: int) -> Sink | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TensorBoard's own warnings
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # optional
    except ImportError:
        _log.info(
            "no event files for TensorBoard, which is not installed: "
            "pip install 'penstock[tensorboard]'"
        )
        return None
    purge_step = begin + 1 if begin else None
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

    def put(step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name.replace(" ", "_"), value, step)

    return Sink(put, writer.close)


def _wandb(folder: Path, name: str) -> Sink | None:
    """Log to Weights & Biases, but only if it is set up: else it would ask for a login.

    A resumed run stays one run there too. WANDB_PROJECT and its other variables apply. A
    failure there does not stop the training.
    """
    if not {"WANDB_API_KEY", "WANDB_MODE"} & set(os.environ):
        return None
    try:
        import wandb  # noqa: PLC0415  # optional
    except ImportError:
        _log.warning(
            "WANDB_MODE or WANDB_API_KEY is set, but wandb is not installed: "
            "pip install wandb"
        )
        return None
    id_file = folder / WANDB
    config_file = folder / "config.toml"
    try:
        config = None
        if config_file.is_file():
            text = config_file.read_text(encoding="utf-8")
            config = tomllib.loads(hide_secrets(text))
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "penstock"),
            name=name or folder.resolve().name,
            dir=str(folder),
            id=id_file.read_text().strip() if id_file.is_file() else None,
            resume="allow",
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
        )
        id_file.write_text(f"{run.id}\n")
    except Exception as error:  # It raises many types of its own.
        lines = str(error).strip().splitlines()
        _log.warning("no Weights & Biases: %s", lines[0] if lines else error)
        return None
    _log.info("Weights & Biases: %s", run.url or run.dir)
    return Sink(lambda step, figures: run.log(dict(figures), step=step), run.finish)


# ---------------------------------------------------------------- timelines
def write_timeline(
    folder: Path, step: int, timeline: Timeline, paths: int = 0, full: bool = False
) -> None:
    """Write a measured timeline: its columns as lists, unknown values as null.

    `paths` is the number of its schedule among those of the run, and `full` says whether the
    step ran all parts while others do not.
    """
    name = FULL_TIMELINE if full else TIMELINE
    content: dict[str, object] = {"step": step, "paths": paths}
    for item in fields(timeline):
        value = getattr(timeline, item.name)
        if isinstance(value, np.ndarray):
            numbers = value.tolist()
            known = [None if math.isnan(one) else one for one in numbers]
            content[item.name] = known
    content["sums"] = timeline.sums
    try:
        put_in_place(folder / name, json.dumps(content))
    except OSError as error:
        raise RunError(
            f"cannot write {folder / name}: {error.strerror}\n  {ROOM}"
        ) from None


def _read_sum(fields: Sequence[Any]) -> Sum:
    """A sum of gradients, as it was written."""
    name, ranks, *numbers, cause = fields
    start, end, size = map(float, numbers)
    return Sum(str(name), tuple(map(int, ranks)), start, end, size, int(cause))


def is_timeline(path: Path) -> bool:
    """Whether a path is the measured timeline in the folder of a run."""
    return path.name in (TIMELINE, FULL_TIMELINE)


def read_measured(file: Path) -> tuple[Plan, int, Timeline]:
    """Read the plan of a run, and the timed step in this file of its folder."""
    folder = file.parent
    if not file.is_file():
        raise FileError(
            f"cannot read {file}: there is no such file\n"
            "  a run writes it when it times a step"
        )
    plan = read_plan(folder / PLAN_FILE)
    full = file.name == FULL_TIMELINE
    found = read_timeline(folder, *plan.schedules, full=full)
    assert found is not None, "the file is there"
    return plan, *found


def read_timeline(
    folder: Path, *schedules: Schedule, full: bool = False
) -> tuple[int, Timeline] | None:
    """Read the measured timeline of a run and its step; None if no step was timed.

    `schedules` are those of the run. With `full`, read the timeline of a step that ran all
    parts while others do not.
    """
    file = folder / (FULL_TIMELINE if full else TIMELINE)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        step = int(content.pop("step"))
        schedule = schedules[int(content.pop("paths", 0))]
        sums = tuple(map(_read_sum, content.pop("sums", ())))
        columns = {}
        for name, values in content.items():
            numbers = [math.nan if value is None else float(value) for value in values]
            columns[name] = np.array(numbers)
        columns["cause"] = columns["cause"].astype(np.int32)
        for name in ("start", "end", "cause"):
            if len(columns[name]) != schedule.actions:
                raise ValueError(
                    f"the schedule has {schedule.actions} actions, "
                    f"the timeline {len(columns[name])}"
                )
        return step, Timeline(schedule, **columns, units=MEASURED_UNITS, sums=sums)
    except FileNotFoundError:
        return None
    except (
        OSError,
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise FileError(
            f"{file} is not a timeline of this run: {error}\n"
            "  delete it; the run writes another when it times its next step"
        ) from None


EVENTS = "events.jsonl"  # in the folder of a run


@dataclass(frozen=True, slots=True)
class Event:
    """A change of the crew."""

    step: int  # the last step before it
    event: str  # "lost", "joined", "pace" if one is slow or fast again, "retry" or "restart"
    seconds: float  # from the end of the last step to the beginning of the next one
    text: str
    members: tuple[int, ...]  # the workers that go on
    # Steps per second of their plan, compared with the plan for all workers, and what no plan for
    # them can exceed.
    speed: float = 1.0
    limit: float = 1.0
    back: int = 0  # steps that were done already and are done again


class EventLog:
    """The file of events. A run that does not resume begins with an empty one."""

    def __init__(self, folder: Path, resume: bool) -> None:
        self.file = folder / EVENTS
        if not resume:
            self.file.unlink(missing_ok=True)

    def put(self, event: Event) -> None:
        """Write down an event."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(event)) + "\n")


def read_events(folder: Path) -> list[Event]:
    """Read the events of a run; a run without any has no file."""
    try:
        lines = (folder / EVENTS).read_text(encoding="utf-8").splitlines()
        return [_event_of(json.loads(line)) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise FileError(f"{folder / EVENTS} is not a list of events: {error}") from None


def _event_of(fields: dict[str, Any]) -> Event:
    fields.pop("workers", None)  # Earlier versions wrote down how many members go on.
    event = Event(**fields)
    return replace(event, members=tuple(event.members))


# A terminal with fewer columns has no room for a bar; the remaining time comes first.
MIN_BAR_COLUMNS = 100
SayLine = Callable[[str], None]  # shows the user a line


class Screen:
    """Shows steps as they are done."""

    def __init__(self, steps: int, every: int, console: Console) -> None:
        self.steps = steps
        self.every = every
        self.console = console
        self.stop: Callable[[], None] = lambda: None
        # Changes the live line, if there is one.
        self.update: Callable[[str, int], None] | None = None
        self.bubble = ""

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            from rich.progress import (  # noqa: PLC0415
                BarColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            words = TextColumn("{task.description}")
            left = TimeRemainingColumn()
            columns = (
                (left, words)
                if self.console.width < MIN_BAR_COLUMNS
                else (words, BarColumn(bar_width=20), left)
            )
            live = Progress(*columns, console=self.console, transient=True)
            task = live.add_task("starting", total=self.steps)
            self.update = lambda words, step: live.update(
                task, description=words, completed=step
            )
            self.stop = live.stop
            live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def put(self, row: StepRow) -> None:
        """Show a step. A line with an evaluation stays on the screen."""
        if row.bubble is not None:
            self.bubble = f"  bubble {row.bubble:.1%}"
        mfu = f"  MFU {row.mfu:.1%}" if row.mfu is not None else ""
        digits = len(str(self.steps))
        words = (
            f"step {row.step:>{digits}}/{self.steps}  loss {row.loss:.4f}  "
            f"norm {row.norm:.3f}  {row.speed:,.0f} tokens/s  "
            f"{write_size(row.memory)}{self.bubble}{mfu}"
        )
        if self.update is not None:
            self.update(words, row.step)
        due = self.update is None and (row.step % self.every == 0 or row.step == 1)
        if due or row.evaluation is not None:
            held = (
                f"  held out {row.evaluation:.4f}" if row.evaluation is not None else ""
            )
            self.console.print(words + held, highlight=False, soft_wrap=True)


def log_to(console: Console, everything: bool) -> None:
    """Show the log of the package: everything, or only warnings and errors."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(
                record.getMessage(),
                style="dim",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    logger = logging.getLogger("penstock")
    logger.handlers[:] = [Lines()]
    logger.setLevel(logging.INFO if everything else logging.WARNING)
    logger.propagate = False
