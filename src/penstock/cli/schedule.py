"""Commands that look at a schedule: `list`, `draw`, `simulate`, `check` and `compare`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal import (
    JsonFlag,
    OutputFile,
    ProfileOptions,
    UnitTimes,
    UnitTimesAndSums,
    beginning,
    console,
    given,
    option,
    print_json,
    print_table,
    refuse,
    write,
)
from penstock.cost import ProfileCost
from penstock.cost.cost import UnitCost
from penstock.cost.profile import refuse_error
from penstock.errors import FileError, RunError, ShapeError, refuse_first
from penstock.formats import (
    dump_plan,
    dump_torch_comms,
    dump_torch_csv,
    read_cluster,
    read_plan,
    read_row_profiles,
    read_torch_csv,
)
from penstock.ir import Plan, Schedule, Timeline, lower, verify
from penstock.ir.verify_sums import verify_sums
from penstock.plan import lower_bound
from penstock.plan.paths.planner import check_rules
from penstock.plan.pricing import Price, StepFacts, step_facts
from penstock.schedules import COMMON_SHAPE_WORDS, REGISTRY, make, shape_of
from penstock.schedules.facts import FACTS
from penstock.sim import simulate, simulate_in_order
from penstock.sim.simulate import simulate_own_times
from penstock.train.after.report import in_measured_units, predict_like_run
from penstock.train.before.forecast import PROFILE
from penstock.train.history import PLAN_FILE, TIMELINE, is_timeline, read_measured
from penstock.view import gantt, page, svg, trace
from penstock.view.numbers import (
    MICROBATCHES,
    RANKS,
    count_of,
    name_time,
    short,
    write_sizes,
    write_time,
)

WIDE_TERMINAL = 120  # columns; from here on `list` also shows the papers
UNIT_COSTS = {"--forward": "F", "--backward": "B", "--comm": "comm", "--sum": "sum"}

Source = Annotated[
    str,
    typer.Argument(
        help="The name of a schedule (see `penstock list`), a plan.json, a CSV file "
        "from torch, or the timeline.json of a run.",
        autocompletion=beginning("schedules:REGISTRY"),
    ),
]


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """The shape of a schedule, by the words that schedules know."""

    ranks: int | None = option(None, "Workers in the pipeline.")
    microbatches: int | None = option(None, "Micro-batches in a step.")
    waves: int | None = option(None, "Waves over the ranks (hanayo).")
    chunks: int | None = option(None, "Chunks of the model on each rank (interleaved).")
    slices: int | None = option(None, "Token slices of each micro-batch.")
    skips: int | None = option(None, "Parts that each micro-batch skips (skip).")
    copies: int | None = option(
        None, "Copies of the pipeline side by side (data parallelism)."
    )
    split: bool = option(
        False,
        "Split each backward into input gradient and weight gradient.",
        "--split",
    )

    def words(self) -> dict[str, int]:
        """The words that were given."""
        return {flag.removeprefix("--"): value for flag, value in given(self).items()}


def list_command(json: JsonFlag = False) -> None:
    """Show every schedule with its shape, idle time, memory and paper.

    Example: penstock list
    """
    heads = ("name", "own shape", "idle", "peak", "weights", "paper")
    rows = []
    for name, facts in FACTS.items():
        own_shape = " ".join(shape_of(name)[2:])
        idle = facts.idle or "-"
        weights = str(facts.weights)
        rows.append((name, own_shape, idle, facts.peak, weights, facts.paper))
    if json:
        print_json({"schedules": [dict(zip(heads, row, strict=True)) for row in rows]})
        return
    note = (
        "P ranks, M micro-batches, v chunks, W waves, s slices; F = 1, B = 2. "
        "Idle time and peak memory are those of one rank."
    )
    shown = len(heads) if console().width >= WIDE_TERMINAL else -1
    print_table(heads[:shown], [row[:shown] for row in rows], note)


def draw_command(
    source: Source,
    shape: ShapeOptions,
    times: UnitTimesAndSums,
    profile: ProfileOptions,
    output: OutputFile = None,
) -> None:
    """Draw a schedule in the terminal, or write it to a file.

    The ending of the file decides the format: .svg .html .json .csv .comms.csv .trace.json. A CSV is for
    torch.distributed.pipelining; .comms.csv contains the messages too.

    The timeline.json in the folder of a run is drawn as it was measured.

    Example: penstock draw hanayo --ranks 4 --microbatches 4 --waves 2 -o hanayo.svg

    Example: penstock draw runs/tiny/timeline.json -o step.trace.json
    """
    price = price_of(times, profile)
    plan, timeline = _timeline(source, shape.words(), price)
    if output is not None:
        write(output, _render(plan, timeline, output))
        return
    screen = console()
    colours = screen.color_system is not None
    screen.print(gantt(timeline, screen.width, colours=colours))


def simulate_command(
    source: Source,
    shape: ShapeOptions,
    times: UnitTimesAndSums,
    profile: ProfileOptions,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="With --profile: a cluster.toml with the speeds and links of the ranks."
        ),
    ] = None,
    channels: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2,
            help="Let the messages of a rank wait for each other, as over NCCL: 1 if all of them share a "
            "channel, 2 if each direction has its own. Default: what the profile says; otherwise no message waits.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Predict the time, idle time and memory of a schedule.

    Also shows a lower bound: the least time that any order of the same actions could take.

    Example: penstock simulate hanayo --ranks 8 --microbatches 8 --waves 2 --comm 0.05
    """
    plan = _plan(source, shape.words())
    options = price_of(times, profile)
    nodes = None
    if cluster is not None:
        if profile.profile is None:
            raise ShapeError(
                "--cluster needs the times of a model: add --profile profile.json"
            )
        nodes = read_cluster(cluster)
    price = options.for_plan(plan, nodes)
    if channels is None:
        timeline = simulate(plan.schedule, price.cost)
    else:
        timeline = simulate_in_order(plan.schedule, price.cost, channels)
    bound = lower_bound(plan.schedule, price.cost)
    step = step_facts(price, plan, timeline)
    if json:
        print_json(_simulation_facts(plan, timeline, bound, step))
    else:
        rows = _simulation_rows(price, timeline, bound, step)
        print_table(("", plan.name), rows)


def check_command(
    source: Annotated[
        str,
        typer.Argument(
            help="A plan.json, a CSV file from torch, or the name of a schedule (see `penstock list`).",
            autocompletion=beginning("schedules:REGISTRY"),
        ),
    ],
    shape: ShapeOptions,
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Also train a small model for one step and compare its gradients.",
        ),
    ] = False,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE: a rule of `penstock paths` that the paths must follow."
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Check that a schedule is complete, can run, and cannot deadlock. The exit code is 2 if it fails.

    With --run a small Llama takes one step through the schedule, on threads, and every gradient is compared with that
    of the unsplit model. Planned paths must follow the rules that they were planned with, or those given with --rule.
    An error names the broken rule and its micro-batches.

    Example: penstock check plan.json --run

    Example: penstock check hanayo --ranks 4 --microbatches 8 --waves 2
    """
    plan = _plan(source, shape.words())
    schedule = plan.schedule
    rules = check_rules(plan, rule or ())
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
            f"A small model took one step through it: the loss, {trial['loss']:.4g}, "
            f"and {trial['gradients']} gradients equal those of the unsplit model "
            "within the rounding of float64 "
            f"(all differences are below {trial['tolerance']:g})."
        )


def compare_command(
    first: Source,
    second: Source,
    shape: ShapeOptions,
    times: UnitTimesAndSums,
    profile: ProfileOptions,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The .html page to write.")
    ] = Path("compare.html"),
) -> None:
    """Show two schedules one above the other on one page.

    Each schedule takes the shape options that it knows. The timeline.json in the folder of a run is shown as it was
    measured. The other schedule is then predicted with the profile of that run, or simulated with the times of the
    measured actions if the run has no profile.

    Example: penstock compare 1f1b hanayo --ranks 4 --microbatches 4 --waves 2
    """
    if output.suffix.lower() != ".html":
        raise FileError(
            f"cannot write the comparison to {output}: its name must end in .html"
        )
    sources = (first, second)
    price = price_of(times, profile)
    steps = [Path(source) for source in sources if is_timeline(Path(source))]
    if len(steps) == 1:
        in_forwards = given(times)
        if in_forwards:
            raise ShapeError(
                f"times in forwards cannot be compared with {steps[0]}, which was measured in seconds\n"
                f"  leave out {' and '.join(in_forwards)}, or give --profile profile.json instead"
            )
        chosen = None if profile.profile is None else (profile.profile, price)
        title, timelines = _beside_measured(sources, shape, steps[0], chosen)
    else:
        shown = [_timeline(one, _own_shape(one, shape), price) for one in sources]
        timelines = [(plan.name, timeline) for plan, timeline in shown]
        title = " and ".join(name for name, _ in timelines)
    write(output, page(timelines, title))


# ---------------------------------------------------------------- from options to a schedule
def price_of(times: UnitTimes, options: ProfileOptions) -> Price:
    """Return the price that the options ask for.

    Refuses a profile whose error is too large, unless `accept_error` is set.
    """
    if options.profile is None:
        refuse(
            given(options),
            "{option} needs a profile; add --profile, or leave {option} out",
        )
        units = {UNIT_COSTS[flag]: value for flag, value in given(times).items()}
        return Price(UnitCost(**units))
    in_forwards = given(times)
    tokens = options.tokens
    refuse_first(
        ShapeError,
        (
            in_forwards,
            "--profile already contains the times; it cannot be combined with "
            + " and ".join(in_forwards),
        ),
        (
            tokens is not None and tokens < 1,
            f"--tokens must be at least 1, not {tokens}",
        ),
    )
    profiles = read_row_profiles(options.profile)
    profile = profiles.measured[0]
    if not options.accept_error:
        refuse_error(profile, str(options.profile))
    length = profile.tokens if tokens is None else tokens
    return Price(ProfileCost(profile, tokens), profile, length, profiles)


def _own_shape(source: str, shape: ShapeOptions) -> dict[str, int]:
    """Return those of the shape options that a schedule knows; a file knows none."""
    if source not in REGISTRY:
        return {}
    known = {*shape_of(source), *COMMON_SHAPE_WORDS}
    return {word: value for word, value in shape.words().items() if word in known}


def _plan(source: str, shape: dict[str, int]) -> Plan:
    """Make the schedule of this name, or read the file."""
    path = Path(source)
    if source not in REGISTRY and (path.suffix or path.exists()):
        _refuse_shape(source, shape)
        return _read(path)
    schedule = make(source, **shape)
    title = [
        f"{name}={value}"
        for name, value in shape.items()
        if name not in ("ranks", "microbatches", "split")
    ]
    if "split" in shape:
        title.append("split")
    return Plan(schedule, " ".join([source, *title]))


def _refuse_shape(source: str, shape: dict[str, int]) -> None:
    """Refuse a shape for a file."""
    if shape:
        options = " ".join(f"--{name}" for name in shape)
        raise ShapeError(f"the file {source} has its own shape; leave out {options}")


def _timeline(
    source: str, shape: dict[str, int], price: Price
) -> tuple[Plan, Timeline]:
    """Return a plan and its timeline: simulated, or measured if the source is the timeline of a run."""
    path = Path(source)
    if not is_timeline(path):
        plan = _plan(source, shape)
        return plan, simulate(plan.schedule, price.for_plan(plan).cost)
    _refuse_shape(source, shape)
    plan, step, timeline = read_measured(path)
    return replace(plan, name=f"{plan.name}, measured, step {step}"), timeline


def _beside_measured(
    sources: tuple[str, str],
    shape: ShapeOptions,
    file: Path,
    chosen: tuple[Path, Price] | None,
) -> tuple[str, list[tuple[str, Timeline]]]:
    """Return the title and the timelines of a page that shows the measured step in `file` and another schedule."""
    run, step, measured = read_measured(file)
    place = int(Path(sources[0]) == file)  # of the other schedule
    other = sources[place]
    plan = _plan(other, _own_shape(other, shape))
    name, timeline = _predict_beside(plan, file, measured, chosen)
    if plan.schedule != measured.schedule:
        name = f"{plan.name}, {name}"
    timelines = [(f"measured, step {step}", measured)]
    timelines.insert(place, (name, timeline))
    return f"{run.name}, measured and {name}", timelines


def _predict_beside(
    plan: Plan, file: Path, measured: Timeline, chosen: tuple[Path, Price] | None
) -> tuple[str, Timeline]:
    """Predict a plan for a page with the measured step in `file`, and say from what.

    The times come from the given profile, from that of the run, or from the measured actions.
    """
    own = file.with_name(PROFILE)
    if chosen is None and own.is_file():
        chosen = own, price_of(UnitTimes(), ProfileOptions(own, accept_error=True))
    if chosen is not None:
        profile, price = chosen
        if own.is_file() and profile.samefile(own):
            timeline = predict_like_run(file.parent, plan, price)
        else:
            timeline = simulate(plan.schedule, price.for_plan(plan).cost)
        return "predicted", in_measured_units(timeline)
    if plan.schedule != measured.schedule:
        raise ShapeError(
            f"{file} was measured in seconds, but there are no times for {plan.name}\n"
            "  `penstock profile config.toml` measures them: add --profile profile.json"
        )
    return "simulated from measured times", simulate_own_times(measured)


def _read(file: Path) -> Plan:
    """Read a plan.json or a CSV file from torch; without a name it takes the file's."""
    refuse_first(
        FileError,
        (
            is_timeline(file),
            f"{file} holds the times of a measured step, not a plan\n"
            f"  draw or compare it, or name {file.parent / PLAN_FILE}",
        ),
        (
            (file / PLAN_FILE).is_file(),
            f"{file} is the folder of a run\n  name {file / PLAN_FILE}, or {file / TIMELINE} "
            "to draw or compare the step that was measured",
        ),
        (
            file.suffix.lower() == ".toml",
            f"{file} is a config or a cluster, not a plan\n"
            f"  `penstock plan {file} -o plan.json` makes a plan of a config",
        ),
    )
    if file.suffix.lower() == ".csv":
        return Plan(read_torch_csv(file), file.stem)
    plan = read_plan(file)
    return plan if plan.name else replace(plan, name=file.stem)


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


# ---------------------------------------------------------------- from a schedule to the screen or a file
def _render(plan: Plan, timeline: Timeline, output: Path) -> str:
    """Return the content of the file, in the format of its ending."""
    writers = {
        ".svg": lambda: svg(timeline, plan.name),
        ".html": lambda: page([(plan.name, timeline)], plan.name),
        ".json": lambda: dump_plan(plan),
        ".csv": lambda: dump_torch_csv(plan.schedule),
        ".trace.json": lambda: trace(timeline),
        ".comms.csv": lambda: dump_torch_comms(lower(plan.schedule)),
    }
    for ending in reversed(writers):  # those of two words first
        if output.name.lower().endswith(ending):
            return writers[ending]()
    raise FileError(
        f"cannot draw to {output}: its name must end in one of {' '.join(writers)}"
    )


def _simulation_facts(
    plan: Plan, timeline: Timeline, bound: float, step: StepFacts | None
) -> dict[str, object]:
    """Return the results of a simulation as JSON has them."""
    schedule = plan.schedule
    facts: dict[str, object] = {
        "name": plan.name,
        "ranks": schedule.ranks,
        "microbatches": len(schedule.microbatches),
        "actions": schedule.actions,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "lower_bound": bound,
        "peak_activations": timeline.peak_activations.tolist(),
        "messages": _message_count(timeline),
    }
    if timeline.sums:
        keys = ("name", "ranks", "start", "end", "bytes")
        facts["sums"] = [
            {key: getattr(one, key) for key in keys} for one in timeline.sums
        ]
    return facts if step is None else facts | asdict(step)


def _simulation_rows(
    price: Price, timeline: Timeline, bound: float, step: StepFacts | None
) -> list[tuple[str, str]]:
    """Return the results of a simulation as the table shows them."""
    units = timeline.units
    schedule = timeline.schedule
    rows = [
        ("ranks", str(schedule.ranks)),
        ("micro-batches", str(len(schedule.microbatches))),
        ("actions", str(schedule.actions)),
        ("makespan", name_time(timeline.makespan, units, 6)),
        ("bubble", f"{timeline.bubble:.2%}"),
        ("lower bound", name_time(bound, units, 6)),
        ("peak activations", write_sizes(timeline.peak_activations.tolist(), units)),
        ("messages", str(_message_count(timeline))),
    ]
    if timeline.sums:
        rows.append(("sums of gradients", _describe_sums(timeline)))
    if step is None or price.profile is None:
        return rows
    if step.gather:
        rows.append(("gathered weights", write_time(step.gather, units)))
    tokens = str(step.tokens)
    if step.tokens > price.profile.tokens:
        tokens += f" (measured up to {price.profile.tokens})"
    return [
        *rows,
        ("tokens", tokens),
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
