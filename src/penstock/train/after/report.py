"""The summary and the report page of a run, from the files in its folder.

RUN/metrics.jsonl   ──► curves of loss, speed and rate
RUN/profile.json    ──► the predicted step  ┐
RUN/timeline.json   ──► the measured step   ┴─► drawn one above the other, with the largest differences

If some steps leave out parts and others run all of them, both kinds are compared.

Where a step is predicted to be compared with a measured one, both count the same: seconds of the same machine, on which
ranks may share processors, and memory in micro-batches, because a run counts the forwards that it keeps and not their
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from penstock.config import Config, PathsConfig
from penstock.cost import UnitCost
from penstock.errors import FileError
from penstock.formats import read_plan
from penstock.formats.config_toml import CONFIG_FILE, read_config
from penstock.ir import Plan, Timeline
from penstock.ir.timeline import MEASURED_UNITS, largest_differences
from penstock.plan.candidates import Evaluator
from penstock.plan.pricing import Price
from penstock.sim import simulate
from penstock.sim.simulate import simulate_own_times
from penstock.train.after.reasons import reasons_of
from penstock.train.before.forecast import Forecast, known_forecast
from penstock.train.data.corpus import SourceUse, describe_use, read_use
from penstock.train.history import Event, StepRow, read_events, read_rows, read_timeline
from penstock.train.step_paths import step_paths
from penstock.view import Series, report_page, time_rows_of
from penstock.view.numbers import (
    STEPS,
    count_of,
    short,
    write_range,
    write_size,
    write_time,
)

ROWS_AROUND_EVENT = 10  # steps whose median speed is shown before and after an event
LOSS = "loss, nats per token"
WARM_UP_STEPS = 3  # The first steps are slower because caches are cold.


@dataclass(frozen=True, slots=True)
class StepKind:
    """The predicted and the measured time of one kind of step: partial ones, full ones, or all."""

    name: str  # "step", "partial step" or "full step"
    rows: tuple[StepRow, ...]
    forecast: Forecast | None = None  # made before the run
    planned: float | None = None  # seconds by the plan of a cluster, if there is one
    step: int = 0  # the step that was measured; 0 if none was
    measured: Timeline | None = None
    planned_sums: float | None = (
        None  # seconds from the last backward to the end, by the plan
    )

    @property
    def timelines(self) -> list[tuple[Timeline, Timeline]]:
        """The predicted and the measured timeline of the measured step; empty if none was.

        The prediction is the forecast if there is one; otherwise a simulation with the
        measured step's own times. A run does not measure memory in bytes, so the
        prediction takes over the measured counts of activations.
        """
        measured = self.measured
        if measured is None:
            return []
        if self.forecast is None:
            return [(simulate_own_times(measured), measured)]
        predicted = replace(
            self.forecast.timeline,
            activations=measured.activations,
            weights=measured.weights,
            units=measured.units,
        )
        return [(predicted, measured)]

    @property
    def seconds(self) -> float:
        """The median time of a step, after the warm-up."""
        warm = [row for row in self.rows if row.step > WARM_UP_STEPS] or self.rows
        return median(row.seconds for row in warm)

    @property
    def text(self) -> str:
        """Compare the time that steps took with what was predicted; empty without a prediction."""
        expected = ""
        if self.forecast is not None:
            predicted = write_time(self.forecast.seconds, digits=3)
            between = write_range(*self.forecast.range)
            expected = f", predicted {predicted} ({between})"
        expected += _planned_text(self.planned)
        if not expected or not self.rows:
            return ""
        return f"a {self.name} took {write_time(self.seconds, digits=3)}{expected}"

    @property
    def sums_text(self) -> str:
        """Compare the time for which a step waited for its sums with what was predicted; empty without planned sums."""
        measured = self.measured
        if measured is None or not measured.sums:
            return ""
        took = write_time(tail_of_sums(measured), digits=3)
        text = f"the sums of gradients of a {self.name} ended {took} after its last backward"
        if self.forecast is not None:
            seconds = write_time(tail_of_sums(self.forecast.timeline), digits=3)
            text += f", predicted {seconds}"
        return text + _planned_text(self.planned_sums)


def _planned_text(seconds: float | None) -> str:
    return (
        ""
        if seconds is None
        else f", planned for the cluster {write_time(seconds, digits=3)}"
    )


def tail_of_sums(timeline: Timeline) -> float:
    """Return the seconds from the last backward to the end of the last sum of gradients."""
    return timeline.makespan - float(timeline.end.max())


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run."""

    rows: tuple[StepRow, ...]
    plan: Plan
    kinds: tuple[StepKind, ...]  # partial steps before full ones
    named: str = ""  # schedule.name in the run's config
    events: tuple[Event, ...] = ()  # changes of the crew
    sources: tuple[SourceUse, ...] = ()  # of a mixture, up to the last checkpoint

    @property
    def main(self) -> StepKind:
        """The most common kind of step."""
        return self.kinds[0]

    @property
    def evaluation(self) -> float | None:
        """The last loss on held-out text."""
        evaluations = [row.evaluation for row in self.rows]
        return next((one for one in reversed(evaluations) if one is not None), None)

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
    config = None
    if (folder / CONFIG_FILE).is_file():
        config = read_config(folder / CONFIG_FILE)
    named = "" if config is None else config.schedule.name
    kinds = tuple(_kinds(folder, rows, plan, config))
    sources = tuple(read_use(folder)) if config and config.data.mixture else ()
    return Summary(rows, plan, kinds, named, tuple(read_events(folder)), sources)


def _kinds(
    folder: Path, rows: tuple[StepRow, ...], plan: Plan, config: Config | None
) -> Iterator[StepKind]:
    """The kinds of steps that a run has made, each with its own prediction."""
    paths = step_paths(plan, PathsConfig() if config is None else config.paths)
    full_rows = tuple(row for row in rows if _is_full(row, plan))
    partial_rows = tuple(row for row in rows if not _is_full(row, plan))
    both = paths.full is not None
    for full, own in ((False, partial_rows), (True, full_rows)):
        if full and not both:
            return
        name = ("full step" if full else "partial step") if both else "step"
        found = read_timeline(folder, *paths.schedules, full=full)
        step, measured = found or (0, None)
        schedule = paths.schedules[-1 if full else 0]
        if measured is not None:
            schedule = measured.schedule
        expected = None
        if config is not None:
            alone = replace(plan, schedule=schedule, rotation=(), full=None)
            expected = known_forecast(folder, config, alone)
        passes = 1 if config is None else config.run.accumulate
        planned, tail = planned_seconds(plan, full, passes)
        own_rows = own if both else rows
        yield StepKind(name, own_rows, expected, planned, step, measured, tail)


def _is_full(row: StepRow, plan: Plan) -> bool:
    """Whether a step ran all layers."""
    return row.layers is None or row.layers >= sum(plan.partition)


def planned_seconds(
    plan: Plan, full: bool, passes: int = 1
) -> tuple[float | None, float | None]:
    """Return what `penstock lab paths` planned for a step on its cluster: its seconds, and those of its sums.

    The sums count from the last backward. Both are None for other plans, and the second for plans without sums.
    """
    facts = plan.facts
    prefix = "full_" if full else ""
    mean = facts.get(f"{prefix}makespan")
    if "rules" not in facts or not isinstance(mean, int | float):
        return None, None
    last = facts.get(f"{prefix}last_backward")
    planned_for = facts.get("passes", 1)
    if not isinstance(last, int | float) or not isinstance(planned_for, int):
        return passes * float(mean), None
    tail = planned_for * (float(mean) - float(last))
    return passes * float(last) + tail, tail


def render_report(summary: Summary, title: str, sample: str = "") -> str:
    """Return the HTML page of a run."""
    reasons = reasons_of(summary.plan, summary.named)
    # Numbered as in the curves.
    events = [f"{n}: {line}" for n, line in enumerate(list_events(summary), start=1)]
    lists = [
        ("Events", events),
        ("Text by source", describe_use(summary.sources)),
        ("Predicted and measured", list_comparisons(summary)),
        ("Largest differences", _list_differences(summary.main)),
        ("Ranks", _list_ranks(summary)),
    ]
    timelines = []
    for kind in summary.kinds:
        suffix = "" if kind.name == "step" else f", {kind.name}"
        for predicted, measured in kind.timelines:
            timelines.append((f"predicted{suffix}", predicted))
            timelines.append((f"measured{suffix}, step {kind.step}", measured))
    idle = [time_rows_of(*both) for both in summary.main.timelines]
    return report_page(
        title,
        _list_facts(summary),
        _draw_curves(summary.rows),
        timelines,
        sample,
        lists,
        (reasons.sentences, reasons.heads, reasons.rows),
        idle[0] if idle else [],
        # A line between the last step before an event and the first one after it.
        [(event.step + 0.5, event.text) for event in summary.events],
    )


def chosen_step(summary: Summary, step: int | None) -> Summary:
    """Return the summary with the kind of step that was measured at this number, or with all of them."""
    if step is None:
        return summary
    kinds = tuple(kind for kind in summary.kinds if kind.step == step)
    if not kinds:
        known = " and ".join(str(kind.step) for kind in summary.kinds if kind.step)
        raise FileError(
            f"step {step} was not measured; measured: {known or 'none'}\n"
            "  a run keeps the times of the last step of each kind that it timed"
        )
    return replace(summary, kinds=kinds)


def explaining_lines(summary: Summary) -> list[str]:
    """Return what took the time of the measured steps, and what was expected."""
    lines = list_comparisons(summary)
    for kind in summary.kinds:
        for predicted, measured in kind.timelines:
            lines.append(
                f"step {kind.step}: idle {measured.bubble:.1%} of the time, predicted {predicted.bubble:.1%}"
            )
        lines += _list_differences(kind)
    return [*lines, *list_events(summary)]


def summary_facts(summary: Summary) -> dict[str, object]:
    """Return the figures of a run as JSON has them."""
    kinds = []
    for kind in summary.kinds:
        facts: dict[str, object] = {
            "name": kind.name,
            "step": kind.step or None,
            "seconds": kind.seconds if kind.rows else None,
            "predicted": None if kind.forecast is None else kind.forecast.seconds,
        }
        for predicted, measured in kind.timelines:
            facts["bubble"] = measured.bubble
            facts["predicted_bubble"] = predicted.bubble
        kinds.append(facts)
    last = summary.rows[-1]
    return {
        "steps": last.step,
        "schedule": summary.plan.name,
        "loss": last.loss,
        "evaluation": summary.evaluation,
        "tokens_per_second": summary.speed,
        "kinds": kinds,
        "events": list_events(summary),
    }


def list_comparisons(summary: Summary) -> list[str]:
    """Return a line for each figure that was predicted or planned, and measured."""
    lines = []
    for kind in summary.kinds:
        lines += [text for text in (kind.text, kind.sums_text) if text]
    return lines


def list_events(summary: Summary) -> list[str]:
    """Return a line for each change of the crew, with the speed before and after it."""
    lines = []
    for event in summary.events:
        before = [row.speed for row in summary.rows if row.step <= event.step]
        after = [row.speed for row in summary.rows if row.step > event.step]
        line = (
            f"after step {event.step}: {event.text}; {len(event.members)} workers went on "
            f"after {write_time(event.seconds)}"
        )
        if event.back:
            line += f", went back {count_of(event.back, *STEPS)}"
        if event.speed != 1:
            line += f", planned at {event.speed:.0%} of the full speed"
            if event.limit < 1:
                line += f" (at most {event.limit:.0%} is possible)"
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
        (LOSS, f"{last.loss:.4f}"),
        ("tokens per second", f"{summary.speed:,.0f}"),
        ("tokens", f"{sum(row.tokens for row in summary.rows):,}"),
        ("epochs", short(last.epoch, 3)),
        ("memory of the fullest rank", write_size(last.memory)),
    ]
    mirrored = [row for row in summary.rows if row.mirror_bytes is not None]
    if mirrored:
        facts.append(("in-memory replicas", describe_mirrors(mirrored)))
    if summary.evaluation is not None:
        facts.append((f"held-out {LOSS}", f"{summary.evaluation:.4f}"))
    for kind in summary.kinds:
        name = "bubble" if len(summary.kinds) == 1 else f"bubble of a {kind.name}"
        for predicted, measured in kind.timelines:
            bubbles = f"{measured.bubble:.1%}, predicted {predicted.bubble:.1%}"
            facts.append((name, bubbles))
    return facts


def describe_mirrors(rows: Sequence[StepRow]) -> str:
    """Say what mirrors cost in these steps, which had some."""
    sent = median(row.mirror_bytes or 0 for row in rows)
    seconds = median(row.mirror_seconds or 0.0 for row in rows)
    share = median((row.mirror_seconds or 0.0) / row.seconds for row in rows)
    return f"{write_size(sent)} per step, {write_time(seconds)} of each worker ({share:.1%})"


def _draw_curves(rows: Sequence[StepRow]) -> list[tuple[str, tuple[Series, ...]]]:
    def curve(name: str, value: Callable[[StepRow], float | None]) -> Series:
        """One figure of every step that has it."""
        points = [(row.step, value(row)) for row in rows]
        known = [(step, point) for step, point in points if point is not None]
        steps, values = zip(*known, strict=True) if known else ((), ())
        return Series(name, steps, values)

    losses = (
        curve("train", lambda row: row.loss),
        curve("held out", lambda row: row.evaluation),
    )
    return [
        (LOSS, losses),
        ("norm of the gradients", (curve("before clipping", lambda row: row.norm),)),
        ("tokens per second", (curve("speed", lambda row: row.speed),)),
        ("learning rate", (curve("rate", lambda row: row.rate),)),
    ]


def _list_differences(kind: StepKind) -> list[str]:
    """The actions whose time was furthest from the prediction."""
    lines = []
    for predicted, measured in kind.timelines:
        for one in largest_differences(predicted, measured):
            times = (
                f"predicted {write_time(one.expected)}, took {write_time(one.actual)}"
            )
            lines.append(f"{one.action} on rank {one.rank}: {times}")
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
        forecast = summary.main.forecast
        if forecast is not None:
            weights = write_size(forecast.weights[rank])
            activations = write_size(forecast.activations[rank])
            line += (
                f"; predicted {weights} of weights and optimizer, "
                f"{activations} of activations"
            )
        lines.append(line)
    return lines


# ---------------------------------------------------------------- predicted like a run
def predict_like_run(folder: Path, plan: Plan, price: Price) -> Timeline:
    """Predict a pass of a plan on the machine of a run and with its batch, by the price of the run's own profile.

    The run's own plan gets the prediction that its report shows.
    """
    alone = replace(plan, rotation=(), full=None)
    if (folder / CONFIG_FILE).is_file():
        config = read_config(folder / CONFIG_FILE)
        known = known_forecast(folder, config, alone)
        if known is not None:
            return known.timeline
        alone = _with_rows(alone, config)
    processors = price.profile.processors if price.profile is not None else None
    evaluator = Evaluator(price.for_plan(alone).cost, processors=processors)
    return evaluator.timeline(plan.schedule)


def _with_rows(plan: Plan, config: Config) -> Plan:
    """Divide the batch of a run among the micro-batches of a plan that does not say how many rows they have."""
    microbatches = len(plan.schedule.microbatches)
    passages = microbatches * config.parallel.dp_shard * config.run.accumulate
    if "rows" in plan.facts or config.data.global_batch % passages:
        return plan
    rows = config.data.global_batch // passages
    return replace(plan, why=(*plan.why, ("rows", rows)))


def in_measured_units(timeline: Timeline) -> Timeline:
    """Return a timeline in seconds whose memory counts micro-batches, as a measured one does."""
    counted = simulate(timeline.schedule, UnitCost())
    return replace(
        timeline,
        activations=counted.activations,
        weights=counted.weights,
        units=MEASURED_UNITS,
    )
