"""The command line: one short function a verb. Every room is imported inside the verb that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from penstock.cli.cost import (
    AcceptError,
    BackwardOption,
    CommOption,
    ForwardOption,
    Price,
    ProfileFile,
    TokensOption,
    measured_facts,
    measured_rows,
    own_price,
    price_of,
)
from penstock.cli.paths import add_paths_command as add_path_verbs
from penstock.cli.profile import add_profile_command as add_profile_verbs
from penstock.cli.tables import console, print_json, print_table, progress, write
from penstock.cli.testbed import add_testbed_command as add_testbed_verbs
from penstock.cli.train import add_train_commands as add_train_verbs
from penstock.errors import FileError, PenstockError, RunError, ShapeError

if TYPE_CHECKING:
    from penstock.cost import Cost
    from penstock.ir import Plan, Schedule, Timeline
    from penstock.plan import Portfolio

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Penstock: train language models through a pipeline of workers, with the schedule as data.",
)

Source = Annotated[
    str,
    typer.Argument(
        help="A schedule's name (`penstock list`), a plan.json, or a CSV of torch's."
    ),
]
Ranks = Annotated[
    Optional[int], typer.Option(help="Workers of the pipeline.")
]  # typer reads these
Microbatches = Annotated[Optional[int], typer.Option(help="Micro-batches of a step.")]
Waves = Annotated[Optional[int], typer.Option(help="Waves over the ranks (hanayo).")]
Chunks = Annotated[
    Optional[int], typer.Option(help="Chunks of the model on a rank (interleaved).")
]
Slices = Annotated[Optional[int], typer.Option(help="Token slices of a micro-batch.")]
Skips = Annotated[
    Optional[int], typer.Option(help="Parts each micro-batch leaves out (skip).")
]
Copies = Annotated[
    Optional[int],
    typer.Option(help="Copies of the pipeline side by side (data parallel)."),
]
Split = Annotated[
    bool,
    typer.Option("--split", help="Split each backward into input and weight gradient."),
]
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout.")
]
Output = Annotated[
    Optional[Path], typer.Option("-o", "--output", help="File to write.")
]


@app.command("list")
def list_command(json: JsonFlag = False) -> None:
    """Show every schedule with its shape, idle time, memory and paper.

    Example: penstock list
    """
    from penstock.schedules import shape_of
    from penstock.schedules.facts import FACTS

    rows = [
        (
            name,
            " ".join(shape_of(name)[2:]),
            facts.idle or "-",
            facts.peak,
            str(facts.weights),
            facts.paper,
        )
        for name, facts in FACTS.items()
    ]
    heads = ("name", "own shape", "idle", "peak", "weights", "paper")
    if json:
        print_json({"schedules": [dict(zip(heads, row, strict=True)) for row in rows]})
        return
    note = "P ranks, M micro-batches, v chunks, W waves, s slices; F = 1, B = 2. Idle time and peak memory of a rank"
    wide = console().width >= 120
    print_table(
        heads if wide else heads[:-1],
        rows if wide else [row[:-1] for row in rows],
        note,
    )


@app.command("draw")
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
    output: Output = None,
) -> None:
    """Draw a schedule: in the terminal, or to a file by its ending: .svg .html .json .csv .trace.json

    Example: penstock draw hanayo --ranks 4 --microbatches 4 --waves 2 -o hanayo.svg
    """
    plan = _plan(
        source, _shape(ranks, microbatches, waves, chunks, slices, skips, copies, split)
    )
    timeline = _simulated(plan.schedule, price_of(forward, backward, comm).cost)
    if output is None:
        from penstock.view import gantt

        screen = console()
        screen.print(
            gantt(timeline, screen.width, colours=screen.color_system is not None)
        )
        return
    write(output, _rendered(plan, timeline, output))


@app.command("simulate")
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
    profile: ProfileFile = None,
    tokens: TokensOption = None,
    accept_error: AcceptError = False,
    json: JsonFlag = False,
) -> None:
    """Predict what a schedule takes: makespan, bubble, memory, and the least any order of it could take.

    Example: penstock simulate hanayo --ranks 8 --microbatches 8 --waves 2 --comm 0.05
    """
    from penstock.plan import lower_bound

    plan = _plan(
        source, _shape(ranks, microbatches, waves, chunks, slices, skips, copies, split)
    )
    price = own_price(
        price_of(forward, backward, comm, profile, tokens, accept_error), plan
    )
    timeline = _simulated(plan.schedule, price.cost)
    facts = {
        "name": plan.name,
        "ranks": plan.schedule.ranks,
        "microbatches": len(plan.schedule.microbatches),
        "actions": plan.schedule.actions,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "lower_bound": lower_bound(plan.schedule, price.cost),
        "peak_activations": timeline.peak_activations.tolist(),
        "messages": int((timeline.schedule.table.target() >= 0).sum()),
        **measured_facts(price, plan, timeline),
    }
    if json:
        print_json(facts)
        return
    rows = {
        **facts,
        "makespan": price.ms(price.time(timeline.makespan)),
        "bubble": f"{timeline.bubble:.2%}",
        "lower_bound": price.ms(price.time(facts["lower_bound"])),
        "peak_activations": price.sizes(timeline.peak_activations),
        **measured_rows(price, timeline, facts),
    }
    print_table(
        ("", plan.name),
        [
            (key.replace("_", " "), str(value))
            for key, value in rows.items()
            if key != "name"
        ],
    )


@app.command("plan")
def plan_command(
    ranks: Annotated[int, typer.Option(help="Workers of the pipeline.")],
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")],
    memory: Annotated[
        Optional[float],
        typer.Option(
            help="Activations a rank may hold: micro-batches of its work, or MiB."
        ),
    ] = None,
    forward: ForwardOption = None,
    backward: BackwardOption = None,
    comm: CommOption = None,
    profile: ProfileFile = None,
    tokens: TokensOption = None,
    accept_error: AcceptError = False,
    stages: Annotated[
        int, typer.Option(help="The most stages on a rank: a model has so many layers.")
    ] = 16,
    slices: Annotated[
        int,
        typer.Option(help="The most token slices; 1 for models that cannot be sliced."),
    ] = 8,
    granularity: Annotated[
        Optional[int],
        typer.Option(
            help="With --profile: cuts are multiples of so many tokens; 16, or 128 if it is of a GPU."
        ),
    ] = None,
    weights: Annotated[
        int, typer.Option(help="The most copies of the weights; 2 admits chimera.")
    ] = 1,
    top: Annotated[int, typer.Option(help="Rows of the table.")] = 15,
    output: Output = None,
    json: JsonFlag = False,
) -> None:
    """Build and simulate every schedule that fits, rank them, and keep the best as plan.json.

    The bound and the gap of a row are those of its own placement and cuts: another order of the same stages could be
    faster by the gap at most. They say nothing of other placements or cuts.

    With a profile it also says whether to cut sequences into slices, where, and what that brings.

    Example: penstock plan --ranks 8 --microbatches 16 --comm 0.05 --memory 8 -o plan.json

    Example: penstock plan --ranks 4 --microbatches 2 --profile profile.json --tokens 8192
    """
    from penstock.cli.slices import show_slices, slice_candidates, slice_facts
    from penstock.formats import dump_plan
    from penstock.plan import candidate_plan, portfolio, title

    price = price_of(forward, backward, comm, profile, tokens, accept_error)
    with progress("planning") as status:
        watch = (
            (lambda name: None)
            if status is None
            else (lambda name: status.update(f"planning: {name}"))
        )
        found = portfolio(
            ranks,
            microbatches,
            price.cost,
            price.memory(memory),
            stages,
            slices,
            weights,
            watch,
            lambda size: price.mib(price.size(size)),
        )
        cut = slice_candidates(
            ranks, microbatches, price, granularity, memory, slices, watch
        )
    best = (
        found.best
        if cut is None
        else min(found.best, cut.best.candidate, key=lambda c: c.makespan)
    )
    rows = [
        {
            "name": c.name,
            "shape": dict(c.shape),
            "order": c.sort,
            "makespan": c.makespan,
            "bubble": c.bubble,
            "peak": c.peak,
            "weights": c.weights,
            "lower_bound": c.bound,
            "gap": c.gap,
            "noisy_makespan": c.noisy,
        }
        for c in found.candidates
    ]
    if output is not None:
        kept = candidate_plan(
            best, price.facts(profile, memory), price.partition(best.schedule)
        )
        write(output, dump_plan(kept), quiet=json)
    if json:
        more = (
            {}
            if cut is None
            else {
                "sliced": [slice_facts(row) for row in cut.rows],
                "verdict": cut.verdict,
            }
        )
        print_json(
            {
                "ranks": ranks,
                "microbatches": microbatches,
                "memory": memory,
                "schedules": rows,
                **more,
                "too_large": [
                    {"name": name, "peak": peak} for name, peak in found.too_large
                ],
            }
        )
        return
    heads = (
        "",
        "schedule",
        "order",
        "makespan",
        "bubble",
        "peak",
        "bound",
        "gap",
        "±10%",
    )
    table = [
        (
            str(place),
            title(c.name, c.shape),
            c.sort,
            price.time(c.makespan, 4),
            f"{c.bubble:.1%}",
            price.size(c.peak, 3),
            price.time(c.bound, 4),
            f"{c.gap:.1%}",
            price.time(c.noisy, 4),
        )
        for place, c in enumerate(found.candidates[:top], start=1)
    ]
    print_table(
        heads,
        table,
        _footnote(found, top, price, memory, weights),
        spare=("bound", "order", "±10%"),
    )
    if cut is not None:
        show_slices(cut, price, top)


@app.command("check")
def check_command(
    file: Annotated[Path, typer.Argument(help="A plan.json or a CSV of torch's.")],
    run: Annotated[
        bool,
        typer.Option(
            "--run", help="Also run a small model through it; compare gradients."
        ),
    ] = False,
    rule: Annotated[
        Optional[list[str]],
        typer.Option(
            help="NAME=VALUE: paths must keep to the rules of `penstock paths`."
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Check a schedule: is it whole, can it run, can its program deadlock? Exit code 2 if not.

    With --run a small Llama takes one step through it, on threads, and every gradient is compared with those of the
    model in one piece. Planned paths are held to the rules they were planned by, or to others by --rule: one that is
    broken is named, with the micro-batches at fault.

    Example: penstock check plan.json --run
    """
    from penstock.ir import lower, verify
    from penstock.plan.paths.planner import check_rules

    plan = _read(file)
    kept = check_rules(plan, rule or ())
    transfers = verify(lower(plan.schedule))
    schedule = plan.schedule
    tried = _tried(schedule) if run else {}
    if json:
        print_json(
            {
                "ok": True,
                "file": str(file),
                "ranks": schedule.ranks,
                "actions": schedule.actions,
                "microbatches": len(schedule.microbatches),
                "messages": len(transfers),
                **tried,
            }
        )
        return
    console().print(
        f"{file} is a schedule: {schedule.ranks} ranks, {len(schedule.microbatches)} micro-batches, {schedule.actions} "
        f"actions in an order that runs; {len(transfers)} messages, none of which can block another for ever.",
        markup=False,
    )
    if kept is not None:
        console().print("Its paths keep to the rules.")
    if tried:
        near = (
            f"within rounding of float64 (no difference reaches {tried['tolerance']:g})"
        )
        console().print(
            f"A small model went through it: {tried['gradients']} gradients and the loss, {tried['loss']:.4g}, are "
            f"those of the model in one piece, {near}."
        )


@app.command("compare")
def compare_command(
    first: Source,
    second: Source,
    output: Annotated[Path, typer.Option("-o", "--output", help="The page, an .html.")],
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
) -> None:
    """Lay two schedules over each other on one page. Shape options go to the names that have them.

    Example: penstock compare 1f1b hanayo --ranks 4 --microbatches 4 --waves 2 -o report.html
    """
    from penstock.view import page

    shape = _shape(ranks, microbatches, waves, chunks, slices, skips, copies, split)
    cost = price_of(forward, backward, comm).cost
    if output.suffix.lower() != ".html":
        raise FileError(
            f"a comparison is an .html page, not {output.suffix or 'a file without an ending'}"
        )
    sides = []
    for source in (first, second):
        plan = _plan(source, _own(source, shape))
        sides.append((plan.name, _simulated(plan.schedule, cost)))
    write(output, page(sides, f"{sides[0][0]} and {sides[1][0]}"))


def _tried(schedule: Schedule) -> dict[str, object]:
    """The outcome of a trial, or an error that says what differs."""
    try:
        from penstock.train.trial import TOLERANCE, trial
    except ModuleNotFoundError as error:
        raise RunError(
            f"--run needs {error.name}, which is not installed: pip install 'penstock[torch]'"
        ) from None
    found = trial(schedule)
    if not found.exact:
        raise RunError(
            f"the gradient of {found.name} differs from that of the model in one piece by {found.worst:.3g}; "
            f"the loss is {found.loss:.6g} against {found.whole_loss:.6g}\n"
            "  this is a fault of Penstock's: please report it with the file"
        )
    return {
        "gradients": found.gradients,
        "worst": found.worst,
        "worst_in": found.name,
        "tolerance": TOLERANCE,
        "loss": found.loss,
    }


# ---------------------------------------------------------------- from words to schedules
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
    given = {
        "ranks": ranks,
        "microbatches": microbatches,
        "waves": waves,
        "chunks": chunks,
        "slices": slices,
        "skips": skips,
        "copies": copies,
        "split": split or None,
    }
    return {word: value for word, value in given.items() if value is not None}


def _own(source: str, shape: dict[str, int]) -> dict[str, int]:
    """Of a shape for two schedules, the words that one of them has."""
    from penstock.schedules import FOR_ALL, REGISTRY, shape_of

    if source not in REGISTRY:
        return {}
    return {
        word: value
        for word, value in shape.items()
        if word in (*shape_of(source), *FOR_ALL)
    }


def _plan(source: str, shape: dict[str, int]) -> Plan:
    """A schedule by its name, or from a file."""
    from penstock.ir import Plan
    from penstock.schedules import REGISTRY, make

    if source not in REGISTRY and (Path(source).suffix or Path(source).exists()):
        if shape:
            raise ShapeError(
                f"{source} is a file and has its shape; leave out --{' --'.join(shape)}"
            )
        return _read(Path(source))
    schedule = make(source, **shape)
    extra = [
        f"{word}={value}"
        for word, value in shape.items()
        if word not in ("ranks", "microbatches", "split")
    ]
    return Plan(
        schedule, " ".join([source, *extra, *(["split"] if "split" in shape else [])])
    )


def _read(file: Path) -> Plan:
    from penstock.formats import read_plan, read_torch_csv
    from penstock.ir import Plan

    if file.suffix.lower() == ".csv":
        return Plan(read_torch_csv(file), file.stem)
    plan = read_plan(file)
    return (
        plan if plan.name else Plan(plan.schedule, file.stem, plan.partition, plan.why)
    )


def _simulated(schedule: Schedule, cost: Cost) -> Timeline:
    from penstock.sim import simulate

    return simulate(schedule, cost)


# ---------------------------------------------------------------- from schedules to files and screens
def _rendered(plan: Plan, timeline: Timeline, output: Path) -> str:
    from penstock.formats import dump_plan, dump_torch_csv
    from penstock.view import page, svg, trace

    if output.name.lower().endswith(".trace.json"):
        return trace(timeline)
    writers = {
        ".svg": lambda: svg(timeline, plan.name),
        ".html": lambda: page([(plan.name, timeline)], plan.name),
        ".json": lambda: dump_plan(plan),
        ".csv": lambda: dump_torch_csv(plan.schedule),
    }
    if output.suffix.lower() not in writers:
        raise FileError(
            f"cannot draw to {output}: its ending must be one of {' '.join(writers)} .trace.json"
        )
    return writers[output.suffix.lower()]()


def _footnote(
    found: Portfolio, top: int, price: Price, memory: float | None, weights: int
) -> str:
    notes = [
        "fixed: one order for any cost; split, listed: fit to this cost; ±10%: mean makespan with noise none has seen",
        "bound: no order of this placement and these cuts takes less, other placements may; gap: how far above it",
        "peak: the fullest rank's activations, in "
        + ("MiB; times in ms" if price.profile else "micro-batches"),
    ]
    if len(found.candidates) > top:
        notes.append(f"{len(found.candidates) - top} more fit (--top)")
    if found.too_large:
        notes.append(
            f"{len(found.too_large)} exceed the memory of {price.mib(f'{memory:g}')}, the least "
            f"{found.too_large[0][0]} ({price.size(found.too_large[0][1])})"
        )
    left = ["skip (it leaves out work)"] + (
        ["chimera (two copies of the weights: --weights 2)"] if weights < 2 else []
    )
    notes.append(f"not tried: {', '.join(left)}")
    return "\n".join(notes)


add_path_verbs(app)
add_profile_verbs(app)
add_testbed_verbs(app)
add_train_verbs(app)


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2."""
    try:
        app()
    except PenstockError as error:
        from rich.markup import escape

        from penstock.runtime.process.torchrun import prints_errors, tell_launcher

        text = f"[bold red]{type(error).__name__}[/]: {escape(str(error))}"
        if prints_errors():
            console(stderr=True).print(text, highlight=False, soft_wrap=True)
        tell_launcher(f"{type(error).__name__}: {error}")
        raise SystemExit(2) from None
    except SystemExit as end:  # typer turns KeyboardInterrupt into this exit code
        if end.code == 130:
            console(stderr=True).print("Interrupted.")
        raise
    except KeyboardInterrupt:
        console(stderr=True).print("Interrupted.")
        raise SystemExit(130) from None
