"""Commands that look at a schedule: `list`, `draw`, `simulate`, `check` and `compare`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from penstock.cli.completion import complete_schedule
from penstock.cli.cost import price_of
from penstock.cli.options import (
    AcceptError,
    BackwardOption,
    CommOption,
    ForwardOption,
    JsonFlag,
    OutputFile,
    ProfileFile,
    SumOption,
    TokensOption,
)
from penstock.cli.tables import console, print_json, print_table, write
from penstock.errors import FileError, RunError, ShapeError

if TYPE_CHECKING:
    from penstock.cost.cluster import Cluster
    from penstock.ir import Plan, Schedule, Sum, Timeline
    from penstock.plan.price import Price, StepFacts

WIDE_TERMINAL = 120  # columns; from here on `list` also shows the papers

Source = Annotated[
    str,
    typer.Argument(
        help="The name of a schedule (see `penstock list`), a plan.json, a CSV file "
        "from torch, or the timeline.json of a run.",
        autocompletion=complete_schedule,
    ),
]
Ranks = Annotated[Optional[int], typer.Option(help="Workers in the pipeline.")]
Microbatches = Annotated[Optional[int], typer.Option(help="Micro-batches in a step.")]
Waves = Annotated[Optional[int], typer.Option(help="Waves over the ranks (hanayo).")]
Chunks = Annotated[
    Optional[int], typer.Option(help="Chunks of the model on each rank (interleaved).")
]
Slices = Annotated[
    Optional[int], typer.Option(help="Token slices of each micro-batch.")
]
Skips = Annotated[
    Optional[int], typer.Option(help="Parts that each micro-batch skips (skip).")
]
Copies = Annotated[
    Optional[int],
    typer.Option(help="Copies of the pipeline side by side (data parallelism)."),
]
Split = Annotated[
    bool,
    typer.Option(
        "--split", help="Split each backward into input gradient and weight gradient."
    ),
]


def list_command(json: JsonFlag = False) -> None:
    """Show every schedule with its shape, idle time, memory and paper.

    Example: penstock list
    """
    from penstock.schedules import shape_of
    from penstock.schedules.facts import FACTS

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
    if console().width >= WIDE_TERMINAL:
        print_table(heads, rows, note)
    else:
        print_table(heads[:-1], [row[:-1] for row in rows], note)


def draw_command(
    source: Source,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    waves: Waves = None,
    chunks: Chunks = None,
    slices: Slices = None,
    skips: Skips = None,
    copies: Copies = None,
    split: Split = False,
    forward: ForwardOption = None,
    backward: BackwardOption = None,
    comm: CommOption = None,
    sum_: SumOption = None,
    profile: ProfileFile = None,
    tokens: TokensOption = None,
    accept_error: AcceptError = False,
    output: OutputFile = None,
) -> None:
    """Draw a schedule in the terminal, or write it to a file.

    The ending of the file decides the format: .svg .html .json .csv .comms.csv .trace.json. A CSV is for
    torch.distributed.pipelining; .comms.csv contains the messages too.

    The timeline.json in the folder of a run is drawn as it was measured.

    Example: penstock draw hanayo --ranks 4 --microbatches 4 --waves 2 -o hanayo.svg

    Example: penstock draw runs/tiny/timeline.json -o step.trace.json
    """
    shape = _shape(ranks, microbatches, waves, chunks, slices, skips, copies, split)
    price = price_of(forward, backward, comm, profile, tokens, accept_error, sum_)
    plan, timeline = _timeline(source, shape, price)
    if output is None:
        _draw_in_terminal(timeline)
    else:
        write(output, _render(plan, timeline, output))


def simulate_command(
    source: Source,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    waves: Waves = None,
    chunks: Chunks = None,
    slices: Slices = None,
    skips: Skips = None,
    copies: Copies = None,
    split: Split = False,
    forward: ForwardOption = None,
    backward: BackwardOption = None,
    comm: CommOption = None,
    sum_: SumOption = None,
    profile: ProfileFile = None,
    tokens: TokensOption = None,
    accept_error: AcceptError = False,
    cluster: Annotated[
        Optional[Path],
        typer.Option(
            help="With --profile: a cluster.toml with the speeds and links of the ranks."
        ),
    ] = None,
    channels: Annotated[
        Optional[int],
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
    from penstock.plan import lower_bound
    from penstock.plan.price import step_facts
    from penstock.sim import simulate, simulate_in_order

    shape = _shape(ranks, microbatches, waves, chunks, slices, skips, copies, split)
    plan = _plan(source, shape)
    options = price_of(forward, backward, comm, profile, tokens, accept_error, sum_)
    price = options.for_plan(plan, _cluster(cluster, profile))
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
            autocompletion=complete_schedule,
        ),
    ],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    waves: Waves = None,
    chunks: Chunks = None,
    slices: Slices = None,
    skips: Skips = None,
    copies: Copies = None,
    split: Split = False,
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Also train a small model for one step and compare its gradients.",
        ),
    ] = False,
    rule: Annotated[
        Optional[list[str]],
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
    from penstock.ir import lower, verify
    from penstock.ir.verify_sums import verify_sums
    from penstock.plan.paths.planner import check_rules
    from penstock.view.numbers import MICROBATCHES, RANKS, count_of

    shape = _shape(ranks, microbatches, waves, chunks, slices, skips, copies, split)
    plan = _plan(source, shape)
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
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The .html page to write.")
    ] = Path("compare.html"),
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    waves: Waves = None,
    chunks: Chunks = None,
    slices: Slices = None,
    skips: Skips = None,
    copies: Copies = None,
    split: Split = False,
    forward: ForwardOption = None,
    backward: BackwardOption = None,
    comm: CommOption = None,
    sum_: SumOption = None,
    profile: ProfileFile = None,
    tokens: TokensOption = None,
    accept_error: AcceptError = False,
) -> None:
    """Show two schedules one above the other on one page.

    Each schedule takes the shape options that it knows. The timeline.json in the folder of a run is shown as it was
    measured. The other schedule is then predicted with the profile of that run, or simulated with the times of the
    measured actions if the run has no profile.

    Example: penstock compare 1f1b hanayo --ranks 4 --microbatches 4 --waves 2
    """
    from penstock.train.history import is_timeline
    from penstock.view import page

    shape = _shape(ranks, microbatches, waves, chunks, slices, skips, copies, split)
    if output.suffix.lower() != ".html":
        raise FileError(
            f"cannot write the comparison to {output}: its name must end in .html"
        )
    sources = (first, second)
    price = price_of(forward, backward, comm, profile, tokens, accept_error, sum_)
    steps = [Path(source) for source in sources if is_timeline(Path(source))]
    if len(steps) == 1:
        units = {"forward": forward, "backward": backward, "comm": comm, "sum": sum_}
        _refuse_forwards(steps[0], units)
        given = None if profile is None else (profile, price)
        title, timelines = _beside_measured(sources, shape, steps[0], given)
    else:
        timelines = [_titled(source, shape, price) for source in sources]
        title = " and ".join(name for name, _ in timelines)
    write(output, page(timelines, title))


# ---------------------------------------------------------------- from options to a schedule
def _shape(
    ranks: int | None,
    microbatches: int | None,
    waves: int | None,
    chunks: int | None,
    slices: int | None,
    skips: int | None,
    copies: int | None,
    split: bool,
) -> dict[str, int]:
    """Return the shape options that were given, by name."""
    options = {
        "ranks": ranks,
        "microbatches": microbatches,
        "waves": waves,
        "chunks": chunks,
        "slices": slices,
        "skips": skips,
        "copies": copies,
        "split": split or None,
    }
    return {name: value for name, value in options.items() if value is not None}


def _own_shape(source: str, shape: dict[str, int]) -> dict[str, int]:
    """Return those of the shape options that a schedule knows; a file knows none."""
    from penstock.schedules import COMMON_SHAPE_WORDS, REGISTRY, shape_of

    if source not in REGISTRY:
        return {}
    known = {*shape_of(source), *COMMON_SHAPE_WORDS}
    return {name: value for name, value in shape.items() if name in known}


def _plan(source: str, shape: dict[str, int]) -> Plan:
    """Make the schedule of this name, or read the file."""
    from penstock.ir import Plan
    from penstock.schedules import REGISTRY, make

    path = Path(source)
    is_file = source not in REGISTRY and (path.suffix or path.exists())
    if is_file and shape:
        raise _own_shape_error(source, shape)
    if is_file:
        return _read(path)
    schedule = make(source, **shape)
    title = [source]
    for name, value in shape.items():
        if name not in ("ranks", "microbatches", "split"):
            title.append(f"{name}={value}")
    if "split" in shape:
        title.append("split")
    return Plan(schedule, " ".join(title))


def _timeline(
    source: str, shape: dict[str, int], price: Price
) -> tuple[Plan, Timeline]:
    """Return a plan and its timeline: simulated, or measured if the source is the timeline of a run."""
    from dataclasses import replace

    from penstock.sim import simulate
    from penstock.train.history import is_timeline, read_measured

    path = Path(source)
    if not is_timeline(path):
        plan = _plan(source, shape)
        return plan, simulate(plan.schedule, price.for_plan(plan).cost)
    if shape:
        raise _own_shape_error(source, shape)
    plan, step, timeline = read_measured(path)
    return replace(plan, name=f"{plan.name}, measured, step {step}"), timeline


def _titled(source: str, shape: dict[str, int], price: Price) -> tuple[str, Timeline]:
    """Return the name of a plan and its timeline, with the shape options that it knows."""
    plan, timeline = _timeline(source, _own_shape(source, shape), price)
    return plan.name, timeline


def _refuse_forwards(file: Path, units: dict[str, float | None]) -> None:
    """Refuse times in forwards beside a measured step."""
    in_forwards = [f"--{name}" for name, value in units.items() if value is not None]
    if in_forwards:
        raise ShapeError(
            f"times in forwards cannot be compared with {file}, which was measured in seconds\n"
            f"  leave out {' and '.join(in_forwards)}, or give --profile profile.json instead"
        )


def _beside_measured(
    sources: tuple[str, str],
    shape: dict[str, int],
    file: Path,
    given: tuple[Path, Price] | None,
) -> tuple[str, list[tuple[str, Timeline]]]:
    """Return the title and the timelines of a page that shows the measured step in `file` and another schedule."""
    from penstock.train.history import read_measured

    run, step, measured = read_measured(file)
    timelines = []
    title = ""
    for source in sources:
        if Path(source) == file:
            timelines.append((f"measured, step {step}", measured))
            continue
        plan = _plan(source, _own_shape(source, shape))
        is_own = plan.schedule == measured.schedule
        name, timeline = _predict_beside(plan, file, measured, given)
        name = name if is_own else f"{plan.name}, {name}"
        title = f"{run.name}, measured and {name}"
        timelines.append((name, timeline))
    return title, timelines


def _predict_beside(
    plan: Plan, file: Path, measured: Timeline, given: tuple[Path, Price] | None
) -> tuple[str, Timeline]:
    """Predict a plan for a page with the measured step in `file`, and say from what.

    The times come from the given profile, from that of the run, or from the measured actions.
    """
    from penstock.sim import simulate
    from penstock.sim.own_times import simulate_own_times
    from penstock.train.after.comparison import in_measured_units, predict_like_run
    from penstock.train.forecast import PROFILE

    own = file.with_name(PROFILE)
    if given is None and own.is_file():
        given = own, price_of(None, None, None, own, accept_error=True)
    if given is not None:
        profile, price = given
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


def _own_shape_error(source: str, shape: dict[str, int]) -> ShapeError:
    options = " ".join(f"--{name}" for name in shape)
    return ShapeError(f"the file {source} has its own shape; leave out {options}")


def _cluster(file: Path | None, profile: Path | None) -> Cluster | None:
    from penstock.formats import read_cluster

    if file is None:
        return None
    if profile is None:
        raise ShapeError(
            "--cluster needs the times of a model: add --profile profile.json"
        )
    return read_cluster(file)


def _read(file: Path) -> Plan:
    """Read a plan.json or a CSV file from torch; without a name it takes the file's."""
    from dataclasses import replace

    from penstock.formats import read_plan, read_torch_csv
    from penstock.ir import Plan
    from penstock.train.history import PLAN_FILE, TIMELINE, is_timeline

    if is_timeline(file):
        raise FileError(
            f"{file} holds the times of a measured step, not a plan\n"
            f"  draw or compare it, or name {file.with_name(PLAN_FILE)}"
        )
    if (file / PLAN_FILE).is_file():
        raise FileError(
            f"{file} is the folder of a run\n  name {file / PLAN_FILE}, or {file / TIMELINE} "
            "to draw or compare the step that was measured"
        )
    if file.suffix.lower() == ".toml":
        raise FileError(
            f"{file} is a config or a cluster, not a plan\n"
            f"  `penstock plan {file} -o plan.json` makes a plan of a config"
        )
    if file.suffix.lower() == ".csv":
        return Plan(read_torch_csv(file), file.stem)
    plan = read_plan(file)
    return plan if plan.name else replace(plan, name=file.stem)


def _try(schedule: Schedule) -> dict[str, object]:
    """Run a small model through a schedule; raise an error if a gradient differs."""
    from penstock.train.trial import GRADIENT_TOLERANCE, trial

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
def _draw_in_terminal(timeline: Timeline) -> None:
    from penstock.view import gantt

    screen = console()
    colours = screen.color_system is not None
    screen.print(gantt(timeline, screen.width, colours=colours))


def _render(plan: Plan, timeline: Timeline, output: Path) -> str:
    """Return the content of the file, in the format of its ending."""
    from penstock.formats import dump_plan, dump_torch_comms, dump_torch_csv
    from penstock.ir import lower
    from penstock.view import page, svg, trace

    if output.name.lower().endswith(".trace.json"):
        return trace(timeline)
    if output.name.lower().endswith(".comms.csv"):
        return dump_torch_comms(lower(plan.schedule))
    writers = {
        ".svg": lambda: svg(timeline, plan.name),
        ".html": lambda: page([(plan.name, timeline)], plan.name),
        ".json": lambda: dump_plan(plan),
        ".csv": lambda: dump_torch_csv(plan.schedule),
    }
    ending = output.suffix.lower()
    if ending not in writers:
        endings = " ".join([*writers, ".trace.json", ".comms.csv"])
        raise FileError(
            f"cannot draw to {output}: its name must end in one of {endings}"
        )
    return writers[ending]()


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
        facts["sums"] = [_sum_facts(one) for one in timeline.sums]
    return facts if step is None else facts | asdict(step)


def _simulation_rows(
    price: Price, timeline: Timeline, bound: float, step: StepFacts | None
) -> list[tuple[str, str]]:
    """Return the results of a simulation as the table shows them."""
    from penstock.view.numbers import name_time, short, write_sizes, write_time

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


def _sum_facts(one: Sum) -> dict[str, object]:
    return {
        "name": one.name,
        "ranks": list(one.ranks),
        "start": one.start,
        "end": one.end,
        "bytes": one.bytes,
    }


def _describe_sums(timeline: Timeline) -> str:
    """Return the number of sums, and how much of the makespan lies after the last action because of them."""
    from penstock.view.numbers import name_time

    wait = timeline.makespan - float(timeline.end.max())
    waited = name_time(wait, timeline.units, 3)
    return f"{len(timeline.sums)}; the last ends {waited} after the last action"


def _message_count(timeline: Timeline) -> int:
    return int((timeline.schedule.table.target() >= 0).sum())
