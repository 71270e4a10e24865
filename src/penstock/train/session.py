"""What needs several rooms at once: from a config to its plan and forecast, from a run's folder to its report.

Config ──► planned ──► Plan ──► forecast
                         │
                         ▼ trained elsewhere
RUN/metrics.jsonl, timeline.json ──► report   predicted over measured
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from penstock.config import AUTO, Config, ScheduleConfig, check_config, is_plan_file
from penstock.cost import ModelCost, PartCost, Seconds, UnitCost
from penstock.errors import ConfigError, FileError
from penstock.formats import read_plan, read_torch_csv
from penstock.formats.config_toml import read_config
from penstock.ir import Op, Plan, Timeline
from penstock.ir.compare import compare
from penstock.ir.schedule import stretch
from penstock.plan import candidate_plan, portfolio, rivals, title
from penstock.schedules import make
from penstock.schedules.transforms import replicate
from penstock.sim import simulate
from penstock.train.after.reasons import reasons_of
from penstock.train.coverage import count_pipelines, hold_every_part
from penstock.train.forecast import Forecast, known_forecast
from penstock.train.history import StepRow, read_rows, read_timeline
from penstock.view import Series, report_page, time_rows_of
from penstock.view.numbers import write_size, write_time

UNIT_HOP = 0.05  # of a micro-batch's forward on a rank: the latency that schedules are compared with
WARM_UP_STEPS = 3  # steps
SHAPE_WORDS = ("ranks", "microbatches", "waves", "chunks", "slices", "skips")


# ---------------------------------------------------------------- from a config to a plan
def plan_run(
    config: Config, layers: int, given: Collection[str] | None = None
) -> tuple[Config, Plan]:
    """The schedule that a config asks for, for so many layers. A file brings its own ranks, micro-batches and all else.

    `given` are the values that somebody has written, as "schedule.ranks": one that contradicts a file is an error.
    Without it, all that are not as by default.
    """
    shape = config.schedule
    if is_plan_file(shape.name):
        plan = _from_file(Path(shape.name))
        config = check_config(
            replace(config, schedule=_taken_from(plan, shape, given)), counted=True
        )
    elif shape.name == AUTO:
        _refuse_unused(shape)
        plan = _best(config, layers)
    else:
        words = {
            word: getattr(shape, word) for word in SHAPE_WORDS if getattr(shape, word)
        }
        known = {**words, "split": 1} if shape.split else words
        plan = Plan(make(shape.name, **known), _title(shape.name, words))
    copies = config.schedule.copies
    if copies > 1:
        plan = Plan(
            replicate(plan.schedule, copies),
            f"{plan.name} copies={copies}",
            (),
            plan.why,
        )
    plan = replace(plan, schedule=hold_every_part(plan.schedule))
    for microbatch in set(plan.schedule.microbatches):
        stretch(microbatch, config.data.tokens)  # refuses more slices than tokens
    return config, _cut(plan, config, layers)


def _refuse_unused(shape: ScheduleConfig) -> None:
    """A word that would change nothing is a mistake: `auto` picks the shape."""
    given = [
        f"schedule.{word}"
        for word in (*SHAPE_WORDS[2:], "split")
        if getattr(shape, word)
    ]
    if given:
        raise ConfigError(
            f"auto picks the shape, so {' and '.join(given)} would change nothing\n  name a schedule in "
            "schedule.name (`penstock list`), or leave the rest out"
        )


def _taken_from(
    plan: Plan, shape: ScheduleConfig, given: Collection[str] | None
) -> ScheduleConfig:
    """The shape of a plan file. What was given must agree with it; 0 and an empty list say nothing."""
    words = [item.name for item in fields(shape) if item.name != "name"]
    if given is None:
        given = {
            f"schedule.{word}"
            for word in words
            if getattr(shape, word) != getattr(ScheduleConfig(), word)
        }
    told = {
        word: getattr(shape, word)
        for word in words
        if f"schedule.{word}" in given and getattr(shape, word)
    }
    found, copies = _shape_of(plan), told.get("copies", 1)
    faults = []
    for word, value in told.items():
        whole = value * copies if word in ("ranks", "microbatches") else value
        if found[word] not in ((), whole) and (word, value) != ("copies", 1):
            times = f" x schedule.copies = {copies}" if whole != value else ""
            faults.append(
                f"schedule.{word} = {_plain(value)}{times}, but {shape.name} has {_plain(found[word])}"
            )
    if faults:
        faults.append(
            "  a plan file has a shape of its own: leave these values out, or name another plan"
        )
        raise ConfigError("\n".join(faults))
    return ScheduleConfig(
        shape.name,
        plan.schedule.ranks,
        len(plan.schedule.microbatches),
        partition=() if plan.partition else told.get("partition", ()),
    )


def _shape_of(plan: Plan) -> dict[str, object]:
    """What a plan has of each value of a shape, all copies together; in words where its ranks or micro-batches differ.
    An empty partition is not said."""
    schedule = plan.schedule
    stages = {
        sum(stage.rank == rank for stage in schedule.stages)
        for rank in range(schedule.ranks)
    }
    return {
        "ranks": schedule.ranks,
        "microbatches": len(schedule.microbatches),
        "copies": count_pipelines(schedule),
        "waves": _only(
            {count // 2 if count % 2 == 0 else count / 2 for count in stages}
        ),
        "chunks": _only(stages),
        "slices": _only({microbatch.slices for microbatch in schedule.microbatches}),
        "skips": _only(
            {
                schedule.parts - len(microbatch.path)
                for microbatch in schedule.microbatches
            }
        ),
        "split": any(action.op is Op.W for lane in schedule.lanes for action in lane),
        "partition": plan.partition,
    }


def _only(values: Collection[float]) -> object:
    return (
        next(iter(values))
        if len(values) == 1
        else " or ".join(f"{value:g}" for value in sorted(values))
    )


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value).lower()


def _title(name: str, given: Mapping[str, int]) -> str:
    return " ".join(
        [
            name,
            *(
                f"{word}={value}"
                for word, value in given.items()
                if word not in SHAPE_WORDS[:2]
            ),
        ]
    )


def _from_file(file: Path) -> Plan:
    return (
        Plan(read_torch_csv(file), file.stem)
        if file.suffix == ".csv"
        else read_plan(file)
    )


def _best(config: Config, layers: int) -> Plan:
    """The fastest known one that holds no more activations than 1F1B does."""
    shape = config.schedule
    if layers < shape.ranks:
        raise ConfigError(
            f"{layers} layers cannot fill {shape.ranks} ranks: at most {layers} in schedule.ranks"
        )
    if shape.ranks == 1:
        return Plan(make("1f1b", ranks=1, microbatches=shape.microbatches), "1f1b")
    found = portfolio(
        shape.ranks,
        shape.microbatches,
        UnitCost(comm=UNIT_HOP),
        float(shape.ranks),
        stages=layers // shape.ranks,
        slices=1,
    )
    fitting = [one for one in found.candidates if one.schedule.parts <= layers]
    given = (
        ("memory", float(shape.ranks)),
        ("forward", 1.0),
        ("backward", 2.0),
        ("comm", UNIT_HOP),
    )
    chosen = candidate_plan(
        fitting[0], (*given, *rivals(fitting, fitting[0], len(found.too_large)))
    )
    return replace(chosen, name=title(fitting[0].name, fitting[0].shape))


def _cut(plan: Plan, config: Config, layers: int) -> Plan:
    """The same plan with the layers of each part."""
    parts, given = plan.schedule.parts, config.schedule.partition or plan.partition
    if given and (len(given) != parts or sum(given) != layers):
        raise ConfigError(
            f"the partition {list(given)} is for {len(given)} parts and {sum(given)} layers, but there "
            f"are {parts} parts and {layers} layers"
        )
    if parts > layers:
        raise ConfigError(
            f"{plan.name} on {plan.schedule.ranks} ranks has {parts} parts, but the model has only {layers} layers: "
            f"set model.layers={parts}, or fewer schedule.ranks, waves or chunks"
        )
    from penstock.models import even_partition  # noqa: PLC0415  # torch

    return replace(plan, partition=tuple(given) or even_partition(layers, parts))


# ---------------------------------------------------------------- a measured step once more, without its noise
def simulate_own_times(timeline: Timeline) -> Timeline:
    """What a measured step would have taken if all actions of one op and part took the same, and messages nothing."""
    own = simulate(timeline.schedule, own_cost(timeline))
    return replace(own, activations=timeline.activations, units=timeline.units)


def own_cost(
    timeline: Timeline, middle: Callable[[list[float]], float] = median
) -> ModelCost:
    """Every action takes what those of its op and part took: the middle of them."""
    schedule = timeline.schedule
    lasted: dict[tuple[int, Op], list[float]] = {}
    for _, action, start, end in timeline.spans():
        lasted.setdefault((schedule.stages[action.stage].part, action.op), []).append(
            end - start
        )

    def seconds(part: int, op: Op) -> Seconds:
        found = lasted.get((part, op))
        return Seconds(base=middle(found)) if found else Seconds()

    parts = tuple(
        PartCost(
            seconds(part, Op.F),
            seconds(part, Op.I),
            seconds(part, Op.W),
            seconds(part, Op.B) if (part, Op.B) in lasted else None,
            held=1.0,
        )
        for part in range(schedule.parts)
    )
    return ModelCost(parts)


# ---------------------------------------------------------------- reports
@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures."""

    rows: tuple[StepRow, ...]
    plan: Plan
    forecast: Forecast | None = None  # made before the run
    step: int = 0  # that was timed; 0: none
    measured: Timeline | None = None
    named: str = ""  # schedule.name of the run's config

    @property
    def predicted(self) -> Timeline | None:
        """The forecast; without one, what the measured step's own times make of it. Memory is not measured in
        bytes, so both have the same count of activations, and no weights."""
        if self.measured is None or self.forecast is None:
            return None if self.measured is None else simulate_own_times(self.measured)
        found, measured = self.forecast.timeline, self.measured
        return replace(
            found,
            activations=measured.activations,
            weights=measured.weights,
            units=measured.units,
        )

    @property
    def seconds(self) -> float:
        """Of the step in the middle, the first ones left out: they find everything cold."""
        return median(row.seconds for row in self.rows[WARM_UP_STEPS:] or self.rows)

    @property
    def evaluation(self) -> float | None:
        """The last loss on what is held out."""
        return next(
            (
                row.evaluation
                for row in reversed(self.rows)
                if row.evaluation is not None
            ),
            None,
        )

    @property
    def speed(self) -> float:
        """Tokens a second, of the step in the middle."""
        return median(row.speed for row in self.rows)


def summarize_run(folder: Path) -> Summary:
    """What a run's folder holds."""
    rows = read_rows(folder)
    if not rows:
        raise FileError(
            f"{folder} has no steps of a run\n  name the folder of one, runs/tiny say"
        )
    plan = read_plan(folder / "plan.json")
    told = folder / "config.toml"
    config = read_config(told) if told.is_file() else None
    made = known_forecast(folder, config, plan) if config is not None else None
    step, timeline = read_timeline(folder, plan.schedule) or (0, None)
    return Summary(
        tuple(rows),
        plan,
        made,
        step,
        timeline,
        config.schedule.name if config is not None else "",
    )


def render_report(found: Summary, title: str, sample: str = "") -> str:
    """The page of a run."""
    rows = found.rows
    facts = [
        ("steps", str(rows[-1].step)),
        ("schedule", found.plan.name),
        ("loss", f"{rows[-1].loss:.4f}"),
        ("tokens a second", f"{found.speed:,.0f}"),
        ("tokens", f"{sum(row.tokens for row in rows):,}"),
        ("epochs", f"{rows[-1].epoch:.3g}"),
        ("memory of the fullest rank", write_size(rows[-1].memory)),
    ]
    if found.evaluation is not None:
        facts.append(("held out", f"{found.evaluation:.4f}"))
    timelines = []
    time_rows: list[list[str]] = []
    if found.predicted is not None and found.measured is not None:
        facts.append(
            (
                "bubble",
                f"{found.measured.bubble:.1%}, predicted {found.predicted.bubble:.1%}",
            )
        )
        timelines = [
            ("predicted", found.predicted),
            (f"measured, step {found.step}", found.measured),
        ]
        time_rows = time_rows_of(found.predicted, found.measured)
    figures = [
        (
            "loss",
            (
                curve("train", rows, lambda row: row.loss),
                curve("held out", rows, lambda row: row.evaluation),
            ),
        ),
        (
            "norm of the gradients",
            (curve("before clipping", rows, lambda row: row.norm),),
        ),
        ("tokens a second", (curve("speed", rows, lambda row: row.speed),)),
        ("learning rate", (curve("rate", rows, lambda row: row.rate),)),
    ]
    lists = [("Largest differences", _differences(found)), ("Ranks", _ranks(found))]
    why = reasons_of(found.plan, found.named)
    return report_page(
        title,
        facts,
        figures,
        timelines,
        sample,
        lists,
        (why.sentences, why.heads, why.rows),
        time_rows,
    )


def curve(
    name: str, rows: Sequence[StepRow], value: Callable[[StepRow], float | None]
) -> Series:
    """A figure of every step that has it."""
    found = [(row.step, value(row)) for row in rows]
    points = [(step, one) for step, one in found if one is not None]
    return Series(
        name, tuple(step for step, _ in points), tuple(one for _, one in points)
    )


def _differences(found: Summary) -> list[str]:
    """Actions whose time was furthest from the predicted one."""
    if found.predicted is None or found.measured is None:
        return []
    return [
        f"{one.action} on rank {one.rank}: predicted {write_time(one.expected)}, took {write_time(one.actual)}"
        for one in compare(found.predicted, found.measured).largest
    ]


def _ranks(found: Summary) -> list[str]:
    """Layers of each rank, and what it was said to hold."""
    schedule, lines = found.plan.schedule, []
    for rank in range(schedule.ranks):
        parts = sorted({stage.part for stage in schedule.stages if stage.rank == rank})
        words = f"rank {rank}: parts {' '.join(map(str, parts))}, "
        words += (
            f"layers {' + '.join(str(found.plan.partition[part]) for part in parts)}"
        )
        if found.forecast is not None:
            own, held = found.forecast.weights[rank], found.forecast.activations[rank]
            words += f"; predicted {write_size(own)} of weights and optimizer, {write_size(held)} of activations"
        lines.append(words)
    return lines
