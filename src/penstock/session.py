"""What needs several rooms at once: from a config to its plan and forecast, from a run's folder to its report.

    Config ──► planned ──► Plan ──► forecast      cost of the pieces, timed here; simulated
                             │
                             ▼ trained elsewhere
    RUN/metrics.jsonl, timeline.json ──► report   predicted (from the times of its own actions) over measured
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from penstock.cost import ModelCost, PartCost, Seconds, UnitCost
from penstock.errors import ConfigError, FileError
from penstock.ir import Op, Plan, Timeline, load_torch_csv, read_plan
from penstock.ir.fields import read_text
from penstock.plan import as_plan, portfolio, title
from penstock.schedules import make
from penstock.schedules.transforms import replicate
from penstock.sim import simulate
from penstock.train.config import AUTO, Config, check
from penstock.train.history import Row, read_rows, read_timeline
from penstock.view import Chart, report

if TYPE_CHECKING:
    from penstock.train.probe import Piece, Pieces

HOP = 0.05  # of a micro-batch's forward on a rank: the latency that schedules are compared with
STATE = 4  # float32 numbers for each parameter: itself, its gradient, two means
GATHERED = 2  # for each parameter that several processes share between steps: itself, its gradient
SHAPE = ("ranks", "microbatches", "waves", "chunks", "slices", "skips")


# ---------------------------------------------------------------- from a config to a plan
def planned(config: Config, layers: int) -> tuple[Config, Plan]:
    """The schedule that a config asks for, for so many layers; a file brings its own ranks and micro-batches."""
    shape = config.schedule
    if Path(shape.name).suffix in (".json", ".csv"):
        plan = _from_file(Path(shape.name))
        counted = replace(shape, ranks=plan.schedule.ranks, microbatches=len(plan.schedule.microbatches), copies=1)
        config = check(replace(config, schedule=counted))
    elif shape.name == AUTO:
        plan = _best(config, layers)
    else:
        given = {word: getattr(shape, word) for word in SHAPE if getattr(shape, word)}
        known = {**given, "split": 1} if shape.split else given
        plan = Plan(make(shape.name, **known), _title(shape.name, given))
    if shape.copies > 1 and Path(shape.name).suffix not in (".json", ".csv"):
        plan = Plan(replicate(plan.schedule, shape.copies), f"{plan.name} copies={shape.copies}", (), plan.why)
    return config, _cut(plan, config, layers)


def _title(name: str, given: Mapping[str, int]) -> str:
    return " ".join([name, *(f"{word}={value}" for word, value in given.items() if word not in SHAPE[:2])])


def _from_file(file: Path) -> Plan:
    return Plan(load_torch_csv(read_text(file), str(file)), file.stem) if file.suffix == ".csv" else read_plan(file)


def _best(config: Config, layers: int) -> Plan:
    """The fastest known one that holds no more activations than 1F1B does."""
    shape = config.schedule
    if layers < shape.ranks:
        raise ConfigError(f"{layers} layers cannot fill {shape.ranks} ranks: at most {layers} in schedule.ranks")
    if shape.ranks == 1:
        return Plan(make("1f1b", ranks=1, microbatches=shape.microbatches), "1f1b")
    found = portfolio(
        shape.ranks, shape.microbatches, UnitCost(comm=HOP), float(shape.ranks), stages=layers // shape.ranks, slices=1
    )
    best = next(one for one in found.candidates if one.schedule.parts <= layers)
    return replace(as_plan(best), name=title(best.name, best.shape))


def _cut(plan: Plan, config: Config, layers: int) -> Plan:
    """The same plan with the layers of each part."""
    parts, given = plan.schedule.parts, config.schedule.partition or plan.partition
    if given and (len(given) != parts or sum(given) != layers):
        raise ConfigError(f"the partition {list(given)} is for {len(given)} parts and {sum(given)} layers, but there "
                          f"are {parts} parts and {layers} layers")  # fmt: skip
    if parts > layers:
        raise ConfigError(
            f"{plan.name} on {plan.schedule.ranks} ranks has {parts} parts, but the model has only {layers} layers: "
            f"set model.layers={parts}, or fewer schedule.ranks, waves or chunks"
        )
    from penstock.models import even_partition  # noqa: PLC0415  # torch

    return replace(plan, partition=tuple(given) or even_partition(layers, parts))


# ---------------------------------------------------------------- forecasts
@dataclass(frozen=True, slots=True)
class Forecast:
    """What a step will take: seconds, tokens a second, bubble; of each rank bytes of weights and of activations."""

    timeline: Timeline
    speed: float

    @property
    def weights(self) -> list[float]:
        """Bytes of weights, gradients and optimizer, by rank."""
        return [float(value) for value in self.timeline.weights]

    @property
    def activations(self) -> list[float]:
        """Bytes at the fullest moment, by rank."""
        return [float(value) for value in self.timeline.peak_activations]


def forecast(config: Config, plan: Plan, pieces: Pieces, slowdown: float = 1.0) -> Forecast:
    """Simulates a step; `slowdown`, if ranks share a processor."""
    timeline = simulate(plan.schedule, model_cost(config, plan, pieces, slowdown))
    tokens = config.data.batch * config.data.tokens
    seconds = timeline.makespan * config.run.accumulate
    return Forecast(timeline, tokens / seconds if seconds else 0.0)


def model_cost(config: Config, plan: Plan, pieces: Pieces, slowdown: float = 1.0) -> ModelCost:
    """Costs of the parts out of those of the pieces."""
    tokens = config.rows * config.data.tokens
    unit = plan.schedule.microbatches[0].tokens  # what the schedule counts a micro-batch as
    last = len(plan.partition) - 1
    parts = []
    for number, layers in enumerate(plan.partition):
        held: list[tuple[int, Piece]] = [(layers, pieces.layer)]
        held += [(1, pieces.embed)] if number == 0 else []
        held += [(1, pieces.head)] if number == last else []
        forward, backward = (slowdown * sum(count * getattr(piece, way) for count, piece in held) / unit
                             for way in ("forward", "backward"))  # fmt: skip
        parts.append(PartCost(
            Seconds(token=forward), Seconds(token=backward / 2), Seconds(token=backward / 2),
            held=sum(count * piece.held for count, piece in held) * tokens / unit,
            message=4.0 * pieces.embed.held / 4 * tokens / unit,
            weights=sum(count * piece.parameters for count, piece in held) * _state_bytes(config.mesh.shard),
            recompute=config.run.recompute,
        ))  # fmt: skip
    return ModelCost(tuple(parts))


def _state_bytes(shard: int) -> float:
    """Of a parameter in a process: its share of the state and, during a step, the gathered weight and its gradient."""
    return 4.0 * STATE if shard == 1 else 4.0 * (STATE / shard + GATHERED)


def from_own_times(timeline: Timeline) -> Timeline:
    """What a measured step would have taken if all actions of one op and part took the same, and messages nothing."""
    own = simulate(timeline.schedule, own_cost(timeline))
    return replace(own, activations=timeline.activations)


def own_cost(timeline: Timeline, middle: Callable[[list[float]], float] = median) -> ModelCost:
    """Every action takes what those of its op and part took: the middle of them."""
    schedule = timeline.schedule
    lasted: dict[tuple[int, Op], list[float]] = {}
    for _, action, start, end in timeline.spans():
        lasted.setdefault((schedule.stages[action.stage].part, action.op), []).append(end - start)

    def seconds(part: int, op: Op) -> Seconds:
        found = lasted.get((part, op))
        return Seconds(token=middle(found) / schedule.microbatches[0].tokens) if found else Seconds()

    parts = tuple(
        PartCost(seconds(part, Op.F), seconds(part, Op.I), seconds(part, Op.W),
                 seconds(part, Op.B) if (part, Op.B) in lasted else None, held=1.0)
        for part in range(schedule.parts)
    )  # fmt: skip
    return ModelCost(parts)


# ---------------------------------------------------------------- reports
@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures."""

    rows: tuple[Row, ...]
    name: str  # of the schedule
    step: int = 0  # that was timed; 0: none
    predicted: Timeline | None = None
    measured: Timeline | None = None

    @property
    def evaluation(self) -> float | None:
        """The last loss on what is held out."""
        return next((row.evaluation for row in reversed(self.rows) if row.evaluation is not None), None)

    @property
    def speed(self) -> float:
        """Tokens a second, of the step in the middle."""
        return median(row.speed for row in self.rows)


def summary(folder: Path) -> Summary:
    """What a run's folder holds."""
    rows = read_rows(folder)
    if not rows:
        raise FileError(f"{folder} has no steps of a run\n  name the folder of one, runs/tiny say")
    plan = read_plan(folder / "plan.json")
    found = read_timeline(folder, plan.schedule)
    if found is None:
        return Summary(tuple(rows), plan.name)
    step, timeline = found
    return Summary(tuple(rows), plan.name, step, from_own_times(timeline), timeline)


def report_of(found: Summary, title: str, sample: str = "") -> str:
    """The page of a run."""
    rows = found.rows
    facts = [("steps", str(rows[-1].step)), ("schedule", found.name), ("loss", f"{rows[-1].loss:.4f}"),
             ("tokens a second", f"{found.speed:,.0f}"), ("tokens", f"{sum(row.tokens for row in rows):,}"),
             ("epochs", f"{rows[-1].epoch:.3g}"),
             ("memory of the fullest rank", f"{rows[-1].memory / 1e6:,.0f} MB")]  # fmt: skip
    if found.evaluation is not None:
        facts.append(("held out", f"{found.evaluation:.4f}"))
    timelines = []
    if found.predicted is not None and found.measured is not None:
        facts.append(("bubble", f"{found.measured.bubble:.1%}, predicted {found.predicted.bubble:.1%}"))
        timelines = [("predicted", found.predicted), (f"measured, step {found.step}", found.measured)]
    held = [(row.step, row.evaluation) for row in rows if row.evaluation is not None]
    charts = [
        Chart("loss", (("train", [(row.step, row.loss) for row in rows]), *([("held out", held)] if held else []))),
        Chart("norm of the gradients", (("before clipping", [(row.step, row.norm) for row in rows]),)),
        Chart("tokens a second", (("speed", [(row.step, row.speed) for row in rows]),)),
        Chart("learning rate", (("rate", [(row.step, row.rate) for row in rows]),)),
    ]
    return report(title, facts, charts, timelines, sample)
