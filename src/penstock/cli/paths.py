"""`penstock paths`: plans SkipPipe's paths for the nodes and links of a cluster.toml."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from penstock.cli.options import AcceptError, ConfigChanges, JsonFlag, ProfileFile
from penstock.cli.tables import print_json, print_table, progress, write
from penstock.errors import ShapeError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.cost import Cluster, PartCost, Profile
    from penstock.plan.paths import PathPlan, Rotation, Rules
    from penstock.plan.paths.model_parts import ModelParts
    from penstock.train.weights import Sizes

MODEL_PANEL = "A model and its nodes"

INTERRUPTED = 130  # exit code after Ctrl-C
ITERATIONS = 25_500  # equals `staged_search.DEFAULT_SEARCH_MOVES`, which is imported only when it is needed


class SearchInterrupted(SystemExit):
    """The exit after Ctrl-C ended a search and its best plan was shown."""


def paths_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="A config.toml, whose model is measured here unless --profile or --gpu is given. "
            "Without --cluster: the cluster.toml, for a model that the options describe.",
        ),
    ],
    changes: ConfigChanges = None,
    cluster: Annotated[
        Optional[Path],
        typer.Option(
            help="The nodes and their links, for a config.", rich_help_panel=MODEL_PANEL
        ),
    ] = None,
    profile: ProfileFile = None,
    accept_error: AcceptError = False,
    gpu: Annotated[
        Optional[str],
        typer.Option(
            help="Nodes are GPUs of a known kind: v100, a100-40, a100, h100 or h200. "
            "Times come from a formula.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    memory: Annotated[
        Optional[str],
        typer.Option(
            help="Memory of nodes that have neither slots nor memory in the cluster.toml, "
            "such as 16GiB.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    parts: Annotated[
        Optional[int], typer.Option(help="Parts of the model, not counting the head.")
    ] = None,
    microbatches: Annotated[
        Optional[int], typer.Option(help="Micro-batches in a step for each data node.")
    ] = None,
    forward: Annotated[
        Optional[float],
        typer.Option(help="Seconds that a part's forward takes on a node of speed 1."),
    ] = None,
    share: Annotated[
        float,
        typer.Option(
            help="The share of the parts that each micro-batch skips.",
            show_default="1/3",
        ),
    ] = 1 / 3,
    rule: Annotated[
        Optional[list[str]],
        typer.Option(
            help="NAME=VALUE; may be repeated. Names: behind, distance, swaps, ahead, "
            "uneven, full, wait, share."
        ),
    ] = None,
    message: Annotated[
        Optional[float],
        typer.Option(help="Bytes that a micro-batch sends from part to part."),
    ] = None,
    held: Annotated[
        Optional[float],
        typer.Option(
            help="Bytes that a part holds of a micro-batch, for nodes with a memory."
        ),
    ] = None,
    weights: Annotated[
        Optional[float],
        typer.Option(
            help="Bytes of a part's weights, gradients and optimizer state, for nodes with a memory."
        ),
    ] = None,
    gradients: Annotated[
        Optional[float],
        typer.Option(help="Bytes of a part's gradients, summed over its replicas."),
    ] = None,
    sums: Annotated[
        Optional[str],
        typer.Option(
            help="How replicas sum gradients: ring, as gloo and NCCL do (the default for a config), "
            "or planned: the quickest of ring, direct exchange and two levels."
        ),
    ] = None,
    slots: Annotated[
        Optional[int], typer.Option(help="Micro-batches that each node may hold.")
    ] = None,
    data_nodes: Annotated[
        Optional[int], typer.Option(help="Nodes that hold the first part.")
    ] = None,
    slices: Annotated[
        int,
        typer.Option(
            help="Token slices of a micro-batch; they overlap work and slow messages."
        ),
    ] = 1,
    waves: Annotated[
        bool,
        typer.Option("--waves", help="Pass through every node twice, down and up."),
    ] = False,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate",
            help="Plan further sets of paths, which training takes in turn, until some path meets every set of parts.",
        ),
    ] = False,
    slack: Annotated[
        float,
        typer.Option(
            help="The share by which a step with further paths may take longer than the first (with --rotate)."
        ),
    ] = 0.0,
    lost: Annotated[
        Optional[list[int]],
        typer.Option(
            help="A node that is gone. The others keep the parts that the same command gives them without --lost, and "
            "paths go around it. May be repeated."
        ),
    ] = None,
    iterations: Annotated[
        int, typer.Option(help="The number of moves that the search tries.")
    ] = ITERATIONS,
    seconds: Annotated[
        Optional[float],
        typer.Option(help="Time limit of each search, in seconds. Default: no limit."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the search.")] = 0,
    output: Annotated[
        Optional[Path], typer.Option("-o", "--output", help="The plan.json to write.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Plan which node holds which part, and which parts each micro-batch visits, so that micro-batches rarely wait.

    With a config and --cluster, the model of the config is measured, as `penstock plan` does, or its profile is read.
    The memory of a node then holds its weights, gradients and optimizer state, and the plan says how many layers each
    part has. Without --cluster, the options describe a model of equal parts, as in the paper. Sums of gradients count
    in both cases.

    Shows how much better any plan under the same rules could be at most. For comparison, the same search with the same
    work also plans a full pipeline, which skips nothing. The rules are SkipPipe's unless --rule changes them: a step
    goes at most 4 parts ahead of the highest part so far and 1 behind it, a path has at most 2 steps back, over 2 parts
    together, and every 10th step visits all parts. That step is planned too, with the weights where the paths need
    them, and `penstock train` runs it.

    A seed gives the same plan on every machine, and more --iterations never give a worse plan. A time limit (--seconds)
    or Ctrl-C ends the search early; the command then shows the best plan so far and says that the search was cut short.
    After Ctrl-C the exit code is 130.

    Example: penstock paths config.toml --cluster cluster.toml --parts 6 --microbatches 6 -o plan.json

    Example: penstock paths cluster.toml --parts 6 --microbatches 6 --forward 0.5 --message 16e6 -o plan.json

    Example: penstock paths cluster.toml --parts 12 --microbatches 4 --forward 0.1 --rule share=1/2 --rule swaps=0

    Example: penstock paths cluster.toml --parts 6 --microbatches 6 --forward 0.5 --lost 7 -o without-7.json
    """
    from penstock.formats import dump_plan
    from penstock.plan.paths import full_steps, paths_plan, plan_paths, rule_faults
    from penstock.plan.paths import rotate as rotate_paths
    from penstock.plan.paths.baselines import full_pipeline
    from penstock.plan.paths.recovery import DEFAULT_RECOVERY_MOVES, replan
    from penstock.plan.paths.rules import raise_rule_faults, rules_from

    _check_positive(forward=forward, seconds=seconds)
    _check_not_negative(
        message=message, held=held, weights=weights, gradients=gradients, slack=slack
    )
    _check_iterations(iterations)
    _check_sums(sums)
    memory_bytes = None if memory is None else _bytes_in(memory)
    rules = rules_from([f"share={share!r}", *(rule or ())])
    described = {
        "forward": forward,
        "message": message,
        "held": held,
        "weights": weights,
        "gradients": gradients,
    }
    if cluster is None:
        _refuse_without_cluster(profile=profile, gpu=gpu, set=changes or None)
        question = _described_question(
            source, parts, microbatches, data_nodes, slices, described
        )
    else:
        _refuse_beside_config(described)
        options = ConfigOptions(
            source,
            tuple(changes or ()),
            cluster,
            profile,
            accept_error,
            gpu,
            parts,
            microbatches,
            data_nodes,
        )
        question = _config_question(options, rules)
    nodes = _with_slots(_with_memory(question.cluster, memory_bytes), slots)
    planned_sums = sums == "planned" if sums else cluster is None
    full = None
    full_step = None
    rotation = None
    with (
        progress("planning; Ctrl-C shows the best plan so far"),
        _interruptible() as interrupt,
    ):
        plan = plan_paths(
            nodes,
            question.parts,
            question.microbatches,
            rules,
            data_nodes=question.data_nodes,
            tokens=question.tokens,
            slices=slices,
            waves=waves,
            planned_sums=planned_sums,
            gap=question.gap,
            first_gap=question.gap,
            iterations=iterations,
            seconds=seconds,
            seed=seed,
            stop=interrupt,
        )
        if lost:
            moves = min(iterations, DEFAULT_RECOVERY_MOVES)
            plan = replan(plan, lost, (), moves, seconds, seed, stop=interrupt)
        raise_rule_faults(rule_faults(plan))
        if not interrupt.stopped and not lost:
            full = full_pipeline(plan, iterations, seconds, seed, stop=interrupt)
        if not interrupt.stopped and rules.full and all(plan.partitions):
            full_step = full_steps(plan, iterations, seconds, seed, stop=interrupt)
        if not interrupt.stopped and rotate:
            rotation = rotate_paths(
                plan, slack, iterations, seconds, seed, stop=interrupt
            )
    others = () if rotation is None else rotation.plans[1:]
    if output is not None:
        written = paths_plan(plan, question.model, others, full_step)
        write(output, dump_plan(written), quiet=json)
    found = PathResults(plan, full, full_step, rotation)
    if json:
        print_json({**_facts(found), "stopped": interrupt.stopped})
    else:
        note = "interrupted: this is the best plan so far" if interrupt.stopped else ""
        print_table(("", "planned paths"), _rows(found), note)
    if interrupt.stopped:
        raise SearchInterrupted(INTERRUPTED)


# ---------------------------------------------------------------- questions
@dataclass(frozen=True, slots=True)
class PathQuestion:
    """What to plan: the nodes, and the costs of a model's parts."""

    cluster: Cluster
    parts: tuple[PartCost, ...]
    microbatches: int
    data_nodes: int | None
    tokens: int
    gap: float = 0.0
    model: ModelParts | None = None


@dataclass(frozen=True, slots=True)
class ConfigOptions:
    """The options of paths for the model of a config."""

    source: Path
    changes: tuple[str, ...]
    cluster: Path
    profile: Path | None
    accept_error: bool
    gpu: str | None
    parts: int | None
    microbatches: int | None
    data_nodes: int | None


def _described_question(
    cluster: Path,
    parts: int | None,
    microbatches: int | None,
    data_nodes: int | None,
    slices: int,
    described: dict[str, float | None],
) -> PathQuestion:
    """Ask for paths through a model of equal parts, which options describe."""
    from penstock.formats import read_cluster
    from penstock.plan.paths import even_parts

    numbers = {"parts": parts, "microbatches": microbatches, **described}
    for name in ("parts", "microbatches", "forward"):
        if numbers[name] is None:
            raise ShapeError(
                f"--{name} is missing\n"
                "  give --parts, --microbatches and --forward, "
                "or a config: penstock paths config.toml --cluster cluster.toml"
            )
    assert parts is not None
    assert microbatches is not None
    tokens = max(slices, 1)
    sizes = {name: value or 0.0 for name, value in described.items()}
    costs = even_parts(parts, tokens=tokens, **sizes)
    return PathQuestion(read_cluster(cluster), costs, microbatches, data_nodes, tokens)


def _config_question(options: ConfigOptions, rules: Rules) -> PathQuestion:
    """Ask for paths through the model of a config, on the nodes of a cluster."""
    from penstock.formats import read_cluster
    from penstock.formats.config_toml import written_keys
    from penstock.plan.paths.arrangement import replica_counts
    from penstock.plan.paths.model_parts import choose_data_nodes, model_parts
    from penstock.train.start import find_run
    from penstock.train.worker import model_sizes

    if options.parts is None:
        raise ShapeError(
            "--parts is missing: into how many parts is the model divided?\n"
            "  every part is on several nodes, so give fewer parts than the cluster has nodes"
        )
    config, _ = find_run(options.source, None, options.changes, exists=True)
    written = written_keys(options.source, options.changes)
    microbatches = options.microbatches
    if microbatches is None and "schedule.microbatches" in written:
        microbatches = config.schedule.microbatches
    if not microbatches:
        raise ShapeError(
            "--microbatches is missing, and the config has no schedule.microbatches"
        )
    sizes = model_sizes(config)
    nodes = read_cluster(options.cluster)
    hops = rules.hops(options.parts)
    wanted = replica_counts(len(nodes.nodes), options.parts, hops, options.data_nodes)
    given = options.data_nodes is not None
    data = choose_data_nodes(config.data.batch, microbatches, wanted[0], given)
    rows = config.data.batch // (data * microbatches)
    profile, origin = _profile_of(options, config, sizes, rows)
    model = model_parts(
        profile, options.parts, config.data.tokens, config.run.recompute, origin
    )
    if options.gpu is not None:
        nodes = _with_memory(nodes, _memory_of_gpu(options.gpu))
    return PathQuestion(
        nodes,
        model.costs,
        microbatches,
        data,
        config.data.tokens,
        model.turn,
        model,
    )


def _profile_of(
    options: ConfigOptions, config: Config, sizes: Sizes, rows: int
) -> tuple[Profile, str]:
    """Return the profile of a config's model for micro-batches of `rows` rows, and where it comes from."""
    from penstock.cli.plan import profiles_of
    from penstock.config import is_recording
    from penstock.cost.gpus import analytic_profile, gpu_of
    from penstock.plan.workload import Fixed, Workload
    from penstock.train.placement import decide_placement
    from penstock.train.weights import config_of

    if options.gpu is not None:
        if options.profile is not None:
            raise ShapeError("--gpu cannot be combined with --profile")
        gpu = gpu_of(options.gpu)
        profile = analytic_profile(
            config_of(sizes),
            config.data.tokens,
            rows,
            gpu,
            config.run.precision,
            recorded=is_recording(config, on_gpu=True),
        )
        return (
            profile,
            f"analytic profile of the {gpu.name}, by formula and not measured",
        )
    workload = Workload(
        sizes.layers,
        config.data.tokens,
        batch=rows,
        devices=1,
        fixed=Fixed(ranks=1, microbatches=1, copies=1, tensor=1, shard=1),
        config=config,
    )
    profiles, origin = profiles_of(
        options.profile, options.accept_error, workload, decide_placement(config, 1)
    )
    return profiles.at(rows), origin


def _memory_of_gpu(name: str) -> float:
    from penstock.cost.gpus import gpu_of
    from penstock.train.auto import USABLE_SHARE

    return USABLE_SHARE * gpu_of(name).memory


# ---------------------------------------------------------------- options
def _bytes_in(text: str) -> float:
    """Return the bytes of a size such as 16GiB."""
    from penstock.plan.question import parse_bytes

    return parse_bytes(text)


def _refuse_without_cluster(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise ShapeError(
                f"--{name} needs a config and a cluster: "
                f"penstock paths config.toml --cluster cluster.toml --{name} ..."
            )


def _refuse_beside_config(options: dict[str, float | None]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ShapeError(
                f"--{name} describes a model without a config; a profile gives it here\n"
                f"  leave --{name} out"
            )


def _check_sums(sums: str | None) -> None:
    if sums not in (None, "ring", "planned"):
        raise ShapeError(f"--sums is ring or planned, not {sums!r}")


def _with_memory(cluster: Cluster, memory: float | None) -> Cluster:
    """Give this memory to every node that has neither slots nor memory."""
    if memory is None:
        return cluster
    nodes = []
    for node in cluster.nodes:
        unknown = node.slots is None and node.memory is None
        nodes.append(replace(node, memory=memory) if unknown else node)
    return replace(cluster, nodes=tuple(nodes))


def _check_iterations(iterations: int) -> None:
    if iterations < 1:
        raise ShapeError(f"--iterations must be at least 1, not {iterations}")


def _check_positive(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ShapeError(f"--{name} must be above 0, not {value:g}")


def _check_not_negative(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not value >= 0:
            raise ShapeError(f"--{name} must be at least 0, not {value:g}")


def _with_slots(cluster: Cluster, slots: int | None) -> Cluster:
    """Give every node this number of slots, if one was given."""
    if slots is None:
        return cluster
    nodes = tuple(replace(node, slots=slots) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


@dataclass(slots=True)
class _Interrupt:
    """Tells a search to stop once Ctrl-C was pressed."""

    stopped: bool = False

    def __call__(self) -> bool:
        return self.stopped


@contextmanager
def _interruptible() -> Iterator[_Interrupt]:
    """Let the first Ctrl-C end the search, and a second one the command.

    A script in the background ignores SIGINT, and continues to.
    """
    interrupt = _Interrupt()
    before = signal.getsignal(signal.SIGINT)

    def stop(signum: int, frame: object) -> None:
        interrupt.stopped = True
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


# ---------------------------------------------------------------- results
@dataclass(frozen=True, slots=True)
class PathResults:
    """What the searches have found; None stands for a search that was not made."""

    plan: PathPlan
    full: PathPlan | None  # with an arrangement of its own, to compare with
    full_step: PathPlan | None  # on the arrangement of the plan
    rotation: Rotation | None


def _facts(found: PathResults) -> dict[str, object]:
    """Return the results as JSON has them."""
    plan, full, full_step = found.plan, found.full, found.full_step
    rotation = found.rotation
    return {
        "makespan": plan.makespan,
        "lower_bound": plan.bound,
        "gap": plan.gap,
        "search_seconds": plan.seconds,
        "simulations": plan.simulations,
        "cut_short": plan.cut_short,
        "full_pipeline": None if full is None else full.makespan,
        "full_pipeline_cut_short": None if full is None else full.cut_short,
        "full_step": None if full_step is None else full_step.makespan,
        "full_step_cut_short": None if full_step is None else full_step.cut_short,
        "rotation": [] if rotation is None else [p.makespan for p in rotation.plans],
        "nodes": [list(nodes) for nodes in plan.partitions],
    }


def _rows(found: PathResults) -> list[tuple[str, str]]:
    """Return the results as the table shows them."""
    from penstock.view.numbers import write_time

    plan, full, full_step = found.plan, found.full, found.full_step
    rows = [
        ("a step", write_time(plan.makespan)),
        ("no plan takes less than", write_time(plan.bound)),
        ("gap", f"{plan.gap:.1%}"),
        ("search", _search(plan)),
    ]
    if full is not None:
        saved = 1 - plan.makespan / full.makespan
        comparison = f"{write_time(full.makespan)}: planned paths take {saved:.1%} less"
        rows.append(("a step that skips nothing", comparison))
        rows.append(("search for it", _search(full)))
    period = plan.problem.rules.full
    if full_step is not None:
        mean = ((period - 1) * plan.makespan + full_step.makespan) / period
        step = f"{write_time(full_step.makespan)} with these nodes for the parts"
        if full_step.cut_short:
            step += ", cut short"
        rows.append(("a step with all parts", step))
        name = f"with all parts every {period} steps"
        rows.append((name, f"{write_time(mean)} per step on average"))
    if found.rotation is not None:
        rows.append(("paths in turn", _describe_rotation(found.rotation)))
    for part, nodes in enumerate(plan.partitions):
        held = "nodes " + " ".join(map(str, nodes)) if nodes else "on no node: skipped"
        rows.append((f"part {part}", held))
    return rows


def _describe_rotation(rotation: Rotation) -> str:
    """Describe how many sets of paths there are, and what they leave out."""
    from penstock.view.numbers import write_time

    count = len(rotation.plans)
    sets = "1 set" if count == 1 else f"{count} sets"
    text = f"{sets}, the slowest {write_time(rotation.makespan)}"
    if rotation.left_out:
        text += f"; {len(rotation.left_out)} sets of parts are on no path"
    return f"{text}, cut short" if rotation.cut_short else text


def _search(plan: PathPlan) -> str:
    """Describe the work of a search, and whether it was cut short."""
    from penstock.view.numbers import write_time

    work = f"{plan.simulations:,} moves in {write_time(plan.seconds, digits=2)}"
    return f"{work}, cut short" if plan.cut_short else work
