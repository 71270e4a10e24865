"""The summary and the report page of a run, from the files in its folder.

RUN/metrics.jsonl   ──► curves of loss, speed and rate
RUN/profile.json    ──► the predicted step  ┐
RUN/timeline.json   ──► the measured step   ┴─► drawn one above the other, with the largest differences
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from penstock.errors import FileError
from penstock.formats import read_plan
from penstock.formats.config_toml import read_config
from penstock.ir import Plan, Timeline
from penstock.ir.compare import compare
from penstock.sim.own_times import simulate_own_times
from penstock.train.after.reasons import reasons_of
from penstock.train.crew.events import Event, read_events
from penstock.train.forecast import Forecast, known_forecast
from penstock.train.history import StepRow, read_rows, read_timeline
from penstock.view import Series, report_page, time_rows_of
from penstock.view.numbers import write_size, write_time

ROWS_AROUND_EVENT = 10  # steps whose median speed is shown before and after an event
WARM_UP_STEPS = 3  # The first steps are slower because caches are cold.


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run."""

    rows: tuple[StepRow, ...]
    plan: Plan
    forecast: Forecast | None = None  # made before the run
    step: int = 0  # the step that was measured; 0 if none was
    measured: Timeline | None = None
    named: str = ""  # schedule.name in the run's config
    events: tuple[Event, ...] = ()  # changes of the crew

    @property
    def predicted(self) -> Timeline | None:
        """The predicted timeline of the measured step.

        It is the forecast if there is one; otherwise a simulation with the measured
        step's own times. A run does not measure memory in bytes, so the prediction
        takes over the measured counts of activations.
        """
        measured = self.measured
        if measured is None:
            return None
        if self.forecast is None:
            return simulate_own_times(measured)
        return replace(
            self.forecast.timeline,
            activations=measured.activations,
            weights=measured.weights,
            units=measured.units,
        )

    @property
    def seconds(self) -> float:
        """The median time of a step, after the warm-up."""
        warm = self.rows[WARM_UP_STEPS:] or self.rows
        return median(row.seconds for row in warm)

    @property
    def evaluation(self) -> float | None:
        """The last loss on held-out text."""
        for row in reversed(self.rows):
            if row.evaluation is not None:
                return row.evaluation
        return None

    @property
    def speed(self) -> float:
        """The median speed of the steps, in tokens per second."""
        return median(row.speed for row in self.rows)


def summarize_run(folder: Path) -> Summary:
    """Read the summary of a run from its folder."""
    rows = tuple(read_rows(folder))
    if not rows:
        raise FileError(
            f"{folder} has no steps of a run\n  name the folder of a run, such as runs/tiny"
        )
    plan = read_plan(folder / "plan.json")
    step, measured = read_timeline(folder, plan.schedule) or (0, None)
    events = tuple(read_events(folder))
    if not (folder / "config.toml").is_file():
        return Summary(rows, plan, None, step, measured, events=events)
    config = read_config(folder / "config.toml")
    forecast = known_forecast(folder, config, plan)
    named = config.schedule.name
    return Summary(rows, plan, forecast, step, measured, named, events)


def render_report(summary: Summary, title: str, sample: str = "") -> str:
    """Return the HTML page of a run."""
    reasons = reasons_of(summary.plan, summary.named)
    lists = [
        ("Events", list_events(summary)),
        ("Largest differences", _list_differences(summary)),
        ("Ranks", _list_ranks(summary)),
    ]
    return report_page(
        title,
        _list_facts(summary),
        _draw_curves(summary.rows),
        _list_timelines(summary),
        sample,
        lists,
        (reasons.sentences, reasons.heads, reasons.rows),
        _list_idle_times(summary),
    )


def list_events(summary: Summary) -> list[str]:
    """Return a line for each change of the crew, with the speed before and after it."""
    lines = []
    for event in summary.events:
        before = [row.speed for row in summary.rows if row.step <= event.step]
        after = [row.speed for row in summary.rows if row.step > event.step]
        line = (
            f"after step {event.step}: {event.text}; {event.workers} workers went on "
            f"after {write_time(event.seconds)}"
        )
        if before and after:
            earlier = median(before[-ROWS_AROUND_EVENT:])
            later = median(after[:ROWS_AROUND_EVENT])
            line += f"; {earlier:,.0f} tokens/s before, {later:,.0f} after"
        lines.append(line)
    return lines


def _list_facts(summary: Summary) -> list[tuple[str, str]]:
    last = summary.rows[-1]
    facts = [
        ("steps", str(last.step)),
        ("schedule", summary.plan.name),
        ("loss", f"{last.loss:.4f}"),
        ("tokens per second", f"{summary.speed:,.0f}"),
        ("tokens", f"{sum(row.tokens for row in summary.rows):,}"),
        ("epochs", f"{last.epoch:.3g}"),
        ("memory of the fullest rank", write_size(last.memory)),
    ]
    if summary.evaluation is not None:
        facts.append(("held out", f"{summary.evaluation:.4f}"))
    predicted = summary.predicted
    if predicted is not None and summary.measured is not None:
        bubbles = f"{summary.measured.bubble:.1%}, predicted {predicted.bubble:.1%}"
        facts.append(("bubble", bubbles))
    return facts


def _list_timelines(summary: Summary) -> list[tuple[str, Timeline]]:
    predicted = summary.predicted
    if predicted is None or summary.measured is None:
        return []
    return [
        ("predicted", predicted),
        (f"measured, step {summary.step}", summary.measured),
    ]


def _list_idle_times(summary: Summary) -> list[list[str]]:
    """Where the time of each rank went in the measured step."""
    predicted = summary.predicted
    if predicted is None or summary.measured is None:
        return []
    return time_rows_of(predicted, summary.measured)


def _draw_curves(rows: Sequence[StepRow]) -> list[tuple[str, tuple[Series, ...]]]:
    train_loss = curve("train", rows, lambda row: row.loss)
    held_out_loss = curve("held out", rows, lambda row: row.evaluation)
    norm = curve("before clipping", rows, lambda row: row.norm)
    speed = curve("speed", rows, lambda row: row.speed)
    rate = curve("rate", rows, lambda row: row.rate)
    return [
        ("loss, nats per token", (train_loss, held_out_loss)),
        ("norm of the gradients", (norm,)),
        ("tokens per second", (speed,)),
        ("learning rate", (rate,)),
    ]


def curve(
    name: str, rows: Sequence[StepRow], value: Callable[[StepRow], float | None]
) -> Series:
    """Return one figure of every step that has it."""
    steps = []
    values = []
    for row in rows:
        point = value(row)
        if point is not None:
            steps.append(row.step)
            values.append(point)
    return Series(name, tuple(steps), tuple(values))


def _list_differences(summary: Summary) -> list[str]:
    """The actions whose time was furthest from the prediction."""
    predicted = summary.predicted
    if predicted is None or summary.measured is None:
        return []
    lines = []
    for one in compare(predicted, summary.measured).largest:
        expected = write_time(one.expected)
        actual = write_time(one.actual)
        lines.append(
            f"{one.action} on rank {one.rank}: predicted {expected}, took {actual}"
        )
    return lines


def _list_ranks(summary: Summary) -> list[str]:
    """The layers of each rank, and the memory that the forecast gave it."""
    schedule = summary.plan.schedule
    lines = []
    for rank in range(schedule.ranks):
        parts = sorted({stage.part for stage in schedule.stages if stage.rank == rank})
        numbers = " ".join(str(part) for part in parts)
        layers = " + ".join(str(summary.plan.partition[part]) for part in parts)
        line = f"rank {rank}: parts {numbers}, layers {layers}"
        if summary.forecast is not None:
            weights = write_size(summary.forecast.weights[rank])
            activations = write_size(summary.forecast.activations[rank])
            line += (
                f"; predicted {weights} of weights and optimizer, "
                f"{activations} of activations"
            )
        lines.append(line)
    return lines
