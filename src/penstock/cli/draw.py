"""`penstock draw` lists, draws, times and compares schedules; `penstock check` verifies one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.sources import (
    COST_HELP,
    SCHEDULE_HELP,
    Costs,
    PipelineOptions,
    complete_schedule,
    is_file,
    read_costs,
    read_schedule,
)
from penstock.cli.terminal import (
    JsonFlag,
    OutputFile,
    console,
    option,
    print_json,
    print_table,
    write,
)
from penstock.cost import Cluster
from penstock.errors import FileError, RunError, ShapeError
from penstock.formats import dump_plan, dump_torch_comms, dump_torch_csv, read_cluster
from penstock.ir import Plan, Schedule, Timeline, lower, verify
from penstock.ir.verify_sums import verify_sums
from penstock.plan import lower_bound
from penstock.plan.paths.planner import check_rules
from penstock.plan.pricing import StepFacts, step_facts
from penstock.schedules import shape_of
from penstock.schedules.facts import FACTS
from penstock.sim import simulate, simulate_in_order
from penstock.sim.simulate import simulate_own_times
from penstock.train.after.report import in_measured_units, predict_like_run
from penstock.train.before.forecast import PROFILE
from penstock.train.history import is_timeline, read_measured
from penstock.view import gantt, page, svg, trace
from penstock.view.numbers import (
    FORWARDS,
    MICROBATCHES,
    RANKS,
    count_of,
    name_time,
    short,
    size_scale,
    time_scale,
    write_sizes,
    write_time,
)

WIDE_TERMINAL = 120  # columns; from here on the list also shows the papers


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What the actions of a schedule cost."""

    cost: str | None = option(None, COST_HELP, metavar="COST")
    cluster: Path | None = option(
        None,
        "With a profile: a cluster.toml with the speeds and links of the ranks.",
    )
    seq_len: int | None = option(
        None, "With a profile: the tokens of a sequence. Default: those of the profile."
    )

    def read(self) -> tuple[Costs, Cluster | None]:
        """The costs, and the nodes on which ranks run."""
        costs = read_costs(self.cost, self.seq_len)
        if self.cluster is None:
            return costs, None
        if costs.file is None:
            raise ShapeError(
                "--cluster needs the times of a model: add --cost profile.json"
            )
        return costs, read_cluster(self.cluster)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A schedule with its times. A measured step has neither a bound nor facts of a model."""

    plan: Plan
    timeline: Timeline
    bound: float | None = None
    step: StepFacts | None = None
    measured_tokens: int = (
        0  # the most tokens of a sequence that the profile has measured
    )
    title: str = ""  # on a page with several; empty for the name of the plan


def draw_command(
    pipeline: PipelineOptions,
    costs: CostOptions,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCHEDULE",
            help=SCHEDULE_HELP,
            autocompletion=complete_schedule,
        ),
    ] = None,
    output: OutputFile = None,
    json: JsonFlag = False,
) -> None:
    """List all schedules; draw and time one; or compare several in one table.

    The ending of -o decides the format: .svg .html .json .csv .comms.csv .trace.json; for several schedules .html. A
    CSV is for torch.distributed.pipelining; .comms.csv contains the messages too. The lower bound is the least time
    that any order of the same actions could take.

    The timeline.json in the folder of a run is drawn as it was measured. Schedules beside it are predicted with the
    profile of that run, or with the times of the measured actions if the run has no profile.

    Example: penstock draw hanayo:waves=2 --pp 4 --microbatches 8 --cost comm=0.05

    Example: penstock draw 1f1b zb-v mine.py:eager -o compare.html
    """
    if not sources:
        _list_schedules(json)
        return
    drawings = _drawings(sources, pipeline, costs)
    if output is not None:
        write(output, _render(drawings, output), quiet=json)
    if json:
        facts = [_facts(one) for one in drawings]
        print_json(facts[0] if len(facts) == 1 else {"schedules": facts})
    elif len(drawings) > 1:
        _print_comparison(drawings)
    elif output is None:
        _print_one(drawings[0])


def _list_schedules(json: bool) -> None:
    """Show every schedule with its shape, idle time, memory and paper."""
    heads = ("name", "own shape", "idle", "peak", "weights", "paper")
    rows = []
    for name, facts in FACTS.items():
        own_shape = ",".join(f"{word}=2" for word in shape_of(name)[2:])
        idle = facts.idle or "-"
        weights = str(facts.weights)
        rows.append((name, own_shape, idle, facts.peak, weights, facts.paper))
    if json:
        print_json({"schedules": [dict(zip(heads, row, strict=True)) for row in rows]})
        return
    note = (
        "P ranks, M micro-batches, v chunks, W waves, s slices; F = 1, B = 2. "
        "Idle time and peak memory are those of one rank.\n"
        "A shape follows a colon, as in hanayo:waves=2. Every schedule also takes slices=2, split, copies=2 and "
        "offload=1."
    )
    shown = len(heads) if console().width >= WIDE_TERMINAL else -1
    print_table(heads[:shown], [row[:shown] for row in rows], note)


# ---------------------------------------------------------------- from words to timelines
def _drawings(
    sources: Sequence[str], pipeline: PipelineOptions, options: CostOptions
) -> list[Drawing]:
    """Return all schedules with their times; those by name take the size of a file beside them."""
    measured = [Path(one) for one in sources if is_timeline(Path(one))]
    files = [one for one in sources if is_file(one)]
    if len(files) == len(sources):
        pipeline.refuse_for(files[0])
    beside = _file_schedule(files[0]) if files else None
    sizes = pipeline.sizes(beside)
    if len(sources) > 1 and len(measured) == 1:
        return _beside_measured(sources, sizes, measured[0], options)
    costs, nodes = options.read()
    return [_drawing(one, sizes, costs, nodes) for one in sources]


def _file_schedule(source: str) -> Schedule:
    if is_timeline(Path(source)):
        return read_measured(Path(source))[2].schedule
    return read_schedule(source, {}).schedule


def _drawing(
    source: str, sizes: dict[str, int], costs: Costs, nodes: Cluster | None
) -> Drawing:
    """Return a schedule with its times: simulated, or measured if the source is the timeline of a run."""
    path = Path(source)
    if is_timeline(path):
        plan, step, timeline = read_measured(path)
        return Drawing(
            replace(plan, name=f"{plan.name}, measured, step {step}"), timeline
        )
    plan = read_schedule(source, sizes)
    price = costs.price.for_plan(plan, nodes)
    if costs.channels is None:
        timeline = simulate(plan.schedule, price.cost)
    else:
        timeline = simulate_in_order(plan.schedule, price.cost, costs.channels)
    bound = lower_bound(plan.schedule, price.cost)
    profile = costs.price.profile
    tokens = 0 if profile is None else profile.tokens
    return Drawing(plan, timeline, bound, step_facts(price, plan, timeline), tokens)


def _beside_measured(
    sources: Sequence[str], sizes: dict[str, int], file: Path, options: CostOptions
) -> list[Drawing]:
    """Return the measured step in `file`, and schedules that are predicted to be compared with it."""
    if options.cost and read_costs(options.cost).file is None:
        raise ShapeError(
            f"times in forwards cannot be compared with {file}, which was measured in seconds\n"
            f"  leave out --cost {options.cost}, or give --cost profile.json instead"
        )
    run, step, measured = read_measured(file)
    found = []
    for source in sources:
        if Path(source) == file:
            plan = replace(run, name=f"measured, step {step}")
            found.append(Drawing(plan, measured))
            continue
        plan = read_schedule(source, sizes)
        how, timeline = _predict_beside(plan, file, measured, options)
        title = how if plan.schedule == measured.schedule else f"{plan.name}, {how}"
        found.append(Drawing(plan, timeline, title=title))
    return found


def _predict_beside(
    plan: Plan, file: Path, measured: Timeline, options: CostOptions
) -> tuple[str, Timeline]:
    """Predict a plan for a page with the measured step in `file`, and say from what.

    The times come from the given profile, from that of the run, or from the measured actions.
    """
    own = file.with_name(PROFILE)
    if options.cost is None and own.is_file():
        options = replace(options, cost=str(own))
    if options.cost is not None:
        costs, nodes = options.read()
        if costs.file is not None and own.is_file() and costs.file.samefile(own):
            timeline = predict_like_run(file.parent, plan, costs.price)
        else:
            timeline = simulate(plan.schedule, costs.price.for_plan(plan, nodes).cost)
        return "predicted", in_measured_units(timeline)
    if plan.schedule != measured.schedule:
        raise ShapeError(
            f"{file} was measured in seconds, but there are no times for {plan.name}\n"
            "  `penstock profile config.toml` measures them: add --cost profile.json"
        )
    return "simulated from measured times", simulate_own_times(measured)


# ---------------------------------------------------------------- to the screen or a file
def _print_one(drawing: Drawing) -> None:
    """Draw a schedule, and print its numbers."""
    screen = console()
    colours = screen.color_system is not None
    screen.print(gantt(drawing.timeline, screen.width, colours=colours))
    print_table(("", drawing.plan.name), _number_rows(drawing))


def _print_comparison(drawings: Sequence[Drawing]) -> None:
    """Print one table with a row for each schedule, and how much longer than the first it takes."""
    first = drawings[0].timeline
    units = first.units
    times = time_scale(first.makespan, units)
    peaks = [float(max(one.timeline.peak_activations.tolist())) for one in drawings]
    sizes = size_scale(max(peaks), units)
    heads = (
        "schedule",
        f"makespan, {times.unit or FORWARDS[1]}",
        "against the first",
        "bubble",
        "lower bound",
        f"peak, {sizes.unit or MICROBATCHES[1]}",
        "messages",
    )
    rows = []
    for one, peak in zip(drawings, peaks, strict=True):
        makespan = one.timeline.makespan
        change = (
            f"{makespan / first.makespan - 1:+.1%}" if one is not drawings[0] else ""
        )
        rows.append(
            (
                one.title or one.plan.name,
                times.number(makespan),
                change,
                f"{one.timeline.bubble:.1%}",
                "-" if one.bound is None else times.number(one.bound),
                sizes.number(peak, 3),
                str(_message_count(one.timeline)),
            )
        )
    print_table(heads, rows, spare=("messages", "lower bound"))


def _render(drawings: Sequence[Drawing], output: Path) -> str:
    """Return the content of the file, in the format of its ending."""
    plan, timeline = drawings[0].plan, drawings[0].timeline
    named = [(one.title or one.plan.name, one.timeline) for one in drawings]
    writers = {
        ".html": lambda: page(named, " and ".join(name for name, _ in named)),
        ".svg": lambda: svg(timeline, plan.name),
        ".json": lambda: dump_plan(plan),
        ".csv": lambda: dump_torch_csv(plan.schedule),
        ".trace.json": lambda: trace(timeline),
        ".comms.csv": lambda: dump_torch_comms(lower(plan.schedule)),
    }
    fitting = [".html"] if len(drawings) > 1 else [*writers]
    for ending in reversed(writers):  # those of two words first
        if output.name.lower().endswith(ending):
            if len(drawings) > 1 and ending != ".html":
                break
            return writers[ending]()
    raise FileError(
        f"cannot draw {count_of(len(drawings), 'schedule', 'schedules')} to {output}: "
        f"its name must end in one of {' '.join(fitting)}"
    )


def _facts(drawing: Drawing) -> dict[str, object]:
    """Return the numbers of a schedule as JSON has them."""
    schedule, timeline = drawing.plan.schedule, drawing.timeline
    facts: dict[str, object] = {
        "name": drawing.plan.name,
        "ranks": schedule.ranks,
        "microbatches": len(schedule.microbatches),
        "actions": schedule.actions,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "lower_bound": drawing.bound,
        "peak_activations": timeline.peak_activations.tolist(),
        "messages": _message_count(timeline),
    }
    if timeline.sums:
        keys = ("name", "ranks", "start", "end", "bytes")
        facts["sums"] = [
            {key: getattr(one, key) for key in keys} for one in timeline.sums
        ]
    return facts if drawing.step is None else facts | asdict(drawing.step)


def _number_rows(drawing: Drawing) -> list[tuple[str, str]]:
    """Return the numbers of a schedule that its drawing does not say."""
    timeline, step = drawing.timeline, drawing.step
    units = timeline.units
    schedule = timeline.schedule
    rows = [
        ("actions", str(schedule.actions)),
        ("makespan", name_time(timeline.makespan, units, 6)),
        ("bubble", f"{timeline.bubble:.2%}"),
    ]
    if drawing.bound is not None:
        rows.append(("lower bound", name_time(drawing.bound, units, 6)))
    rows += [
        ("peak activations", write_sizes(timeline.peak_activations.tolist(), units)),
        ("messages", str(_message_count(timeline))),
    ]
    if timeline.sums:
        rows.append(("gradient all-reduces", _describe_sums(timeline)))
    if step is None:
        return rows
    if step.gather:
        rows.append(("weight all-gather", write_time(step.gather, units)))
    tokens = str(step.tokens)
    if step.tokens > drawing.measured_tokens:
        tokens += f" (measured up to {drawing.measured_tokens})"
    return [
        *rows,
        ("tokens of a sequence", tokens),
        ("weights", write_sizes(step.weights, units)),
        ("optimizer", write_time(step.optimizer, units)),
        ("tokens per second", short(step.tokens_per_second)),
    ]


def _describe_sums(timeline: Timeline) -> str:
    """Return the number of sums, and how much of the makespan lies after the last action because of them."""
    wait = timeline.makespan - float(timeline.end.max())
    waited = name_time(wait, timeline.units, 3)
    return f"{len(timeline.sums)}; the last ends {waited} after the last action"


def _message_count(timeline: Timeline) -> int:
    return int((timeline.schedule.table.target() >= 0).sum())


# ---------------------------------------------------------------- check
def check_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCHEDULE", help=SCHEDULE_HELP, autocompletion=complete_schedule
        ),
    ],
    pipeline: PipelineOptions,
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Also train a small model for one step and compare its gradients.",
        ),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Check that a schedule is complete, can run, and cannot deadlock. The exit code is 2 if it fails.

    With --run a small Llama takes one step through the schedule, on threads, and every gradient is compared with that
    of the unsplit model. Planned paths must follow the rules that they were planned with. An error names the broken
    rule and its micro-batches.

    Example: penstock check plan.json --run

    Example: penstock check hanayo:waves=2 --pp 4 --microbatches 8
    """
    if is_file(source):
        pipeline.refuse_for(source)
    plan = read_schedule(source, pipeline.sizes())
    schedule = plan.schedule
    rules = check_rules(plan)
    transfers = verify(lower(schedule))
    sum_messages = verify_sums(schedule, plan.sums)
    for other in plan.schedules[1:]:
        verify(lower(other))
        verify_sums(other, plan.sums)
    trial = _try(schedule) if run else {}
    count = len(schedule.microbatches)
    if json:
        facts = {
            "ok": True,
            "file": source,
            "ranks": schedule.ranks,
            "actions": schedule.actions,
            "microbatches": count,
            "messages": len(transfers),
            "sum_messages": sum_messages,
        }
        print_json({**facts, **trial})
        return
    messages = "Its ranks send each other no activations."
    if transfers:
        messages = f"Its {len(transfers)} messages cannot deadlock."
    console().print(
        f"{source} is a valid schedule: {count_of(schedule.ranks, *RANKS)}, "
        f"{count_of(count, *MICROBATCHES)} and {schedule.actions} actions, in an order that can run. "
        f"{messages}",
        markup=False,
    )
    if sum_messages:
        console().print(
            f"The {sum_messages} messages that sum gradients cannot deadlock, and every replica gets the same sum."
        )
    if rules is not None:
        console().print("Its paths follow the rules.")
    if trial:
        console().print(
            f"Gradient check passed: a small model took one step through it; the loss, {trial['loss']:.4g}, "
            f"and {trial['gradients']} gradients equal those of the unsplit model "
            "within the rounding of float64 "
            f"(all differences are below {trial['tolerance']:g})."
        )


def _try(schedule: Schedule) -> dict[str, object]:
    """Run a small model through a schedule; raise an error if a gradient differs."""
    from penstock.train.before.trial import GRADIENT_TOLERANCE, trial  # loads torch

    outcome = trial(schedule)
    if not outcome.exact:
        raise RunError(
            f"the gradient of {outcome.name} differs from that of the unsplit model "
            f"by {outcome.worst:.3g}; the loss is {outcome.loss:.6g}, that of the "
            f"unsplit model {outcome.whole_loss:.6g}\n"
            "  this is a bug in Penstock: please report it and attach the file"
        )
    return {
        "gradients": outcome.gradients,
        "worst": outcome.worst,
        "worst_in": outcome.name,
        "tolerance": GRADIENT_TOLERANCE,
        "loss": outcome.loss,
    }
