"""`penstock paths`: plans SkipPipe's paths for the nodes and links of a cluster.toml.

cluster.toml --parts --forward ...       options describe a model of equal parts, as in the paper
config.toml --cluster cluster.toml       the model of a config; it is measured, or its profile is given
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.plan import profiles_of
from penstock.cli.terminal import (
    INTERRUPTED,
    ConfigChanges,
    ProfileFile,
    ShownInterrupt,
    given,
    interruptible,
    option,
    print_json,
    print_plain,
    print_table,
    progress,
    refuse,
    write,
)
from penstock.config import Config, is_recording, precision_of
from penstock.cost import Cluster, PartCost, Profile
from penstock.cost.cluster import with_memory, with_slots
from penstock.cost.gpus import analytic_profile, gpu_of
from penstock.cost.profile import SUM_SHARES, sum_as
from penstock.errors import ShapeError, refuse_first
from penstock.formats import dump_plan, read_cluster
from penstock.formats.config_toml import written_keys
from penstock.plan.paths import (
    PathPlan,
    Rotation,
    Rules,
    StepPair,
    best_pair,
    even_parts,
    full_steps,
    paths_plan,
    plan_paths,
    rotate,
    rule_faults,
)
from penstock.plan.paths.planner import planned_sums_of
from penstock.plan.paths.problem import (
    ModelParts,
    Problem,
    choose_data_nodes,
    model_parts,
)
from penstock.plan.paths.rotation import DEFAULT_RECOVERY_MOVES, full_pipeline, replan
from penstock.plan.paths.rules import raise_rule_faults, rules_from
from penstock.plan.paths.search import DEFAULT_SEARCH_MOVES, Budget
from penstock.plan.paths.starts import replica_counts
from penstock.plan.pricing import basis_of
from penstock.plan.workload import USABLE_SHARE, Fixed, Workload, parse_bytes
from penstock.train.own_models import config_of
from penstock.train.placement import decide_placement
from penstock.view.numbers import write_time

if TYPE_CHECKING:
    from penstock.train.weights import Sizes  # loads torch

MODEL_PANEL = "A model and its nodes"
NEEDS_A_CONFIG = (
    "{option} needs a config and a cluster: "
    "penstock paths config.toml --cluster cluster.toml {option} ..."
)
FOR_A_DESCRIPTION = (
    "{option} describes a model without a config; a profile gives it here\n"
    "  leave {option} out"
)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The nodes, beside those of a cluster.toml."""

    cluster: Path | None = option(
        None, "The nodes and their links, for a config.", rich_help_panel=MODEL_PANEL
    )
    gpu: str | None = option(
        None,
        "Nodes are GPUs of a known kind: v100, a100-40, a100, h100 or h200. "
        "Times come from a formula.",
        rich_help_panel=MODEL_PANEL,
    )
    memory: str | None = option(
        None,
        "Memory of nodes that have neither slots nor memory in the cluster.toml, such as 16GiB.",
        rich_help_panel=MODEL_PANEL,
    )
    slots: int | None = option(None, "Micro-batches that each node may hold.")
    data_nodes: int | None = option(None, "Nodes that hold the first part.")


@dataclass(frozen=True, slots=True)
class PartOptions:
    """A model of equal parts, as in the paper."""

    forward: float | None = option(
        None, "Seconds that a part's forward takes on a node of speed 1.", above=0
    )
    message: float | None = option(
        None, "Bytes that a micro-batch sends from part to part.", least=0
    )
    held: float | None = option(
        None,
        "Bytes that a part holds of a micro-batch, for nodes with a memory.",
        least=0,
    )
    weights: float | None = option(
        None,
        "Bytes of a part's weights, gradients and optimizer state, for nodes with a memory.",
        least=0,
    )
    gradients: float | None = option(
        None, "Bytes of a part's gradients, summed over its replicas.", least=0
    )


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What a step does."""

    parts: int | None = option(None, "Parts of the model, not counting the head.")
    microbatches: int | None = option(
        None, "Micro-batches in a step for each data node."
    )
    slices: int = option(
        1, "Token slices of a micro-batch; they overlap work and slow messages."
    )
    waves: bool = option(
        False, "Pass through every node twice, down and up.", "--waves"
    )
    sums: str | None = option(
        None,
        "How replicas sum gradients: planned, the quickest of ring, direct exchange and two levels, "
        "which `penstock train` then does; or ring, as gloo and NCCL do (the default for GPUs).",
    )
    sum_messages: str = option(
        "float32",
        "Type in which planned sums of gradients travel: float32, bfloat16 or int8.",
    )
    accumulate: int | None = option(
        None,
        "Passes of a step, by default run.accumulate of the config, or 1. Replicas sum gradients once "
        "a step, in its last pass, and all times are means of a pass.",
    )


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """Which paths are allowed, and which are planned besides."""

    share: float = option(
        1 / 3, "The share of the parts that each micro-batch skips.", show_default="1/3"
    )
    rule: list[str] | None = option(
        None,
        "NAME=VALUE; may be repeated. Names: behind, distance, swaps, ahead, uneven, full, wait, share.",
    )
    rotate: bool = option(
        False,
        "Plan further sets of paths, which training takes in turn, until some path meets every set of parts.",
        "--rotate",
    )
    slack: float = option(
        0.0,
        "The share by which a step with further paths may take longer than the first (with --rotate).",
        least=0,
    )
    lost: list[int] | None = option(
        None,
        "A node that is gone. The others keep the parts that the same command gives them without --lost, and "
        "paths go around it. May be repeated.",
    )

    @property
    def rules(self) -> Rules:
        """The rules of all paths."""
        return rules_from([f"share={self.share!r}", *(self.rule or ())])


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How long each search takes."""

    iterations: int = option(
        DEFAULT_SEARCH_MOVES,
        "The number of moves that the search tries.",
        least=1,
    )
    seconds: float | None = option(
        None, "Time limit of each search, in seconds. Default: no limit.", above=0
    )
    seed: int = option(0, "Random seed of the search.")

    def budget(self, interrupt: Event, most: int | None = None) -> Budget:
        """The work of one search, of `most` moves if that is less."""
        moves = self.iterations if most is None else min(self.iterations, most)
        return Budget(moves, self.seconds, stop=interrupt.is_set)


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """What is done with the plan."""

    output: Path | None = option(None, "The plan.json to write.", "-o", "--output")
    json: bool = option(False, "Print one JSON object to stdout.", "--json")


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
    passes: int = 1  # of a step
    on_gpu: bool = False  # whether the times are those of a GPU
    basis: str = ""  # the precision of a model, and where its times come from


def paths_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="A config.toml, whose model is measured here unless --profile or --gpu is given. "
            "Without --cluster: the cluster.toml, for a model that the options describe.",
        ),
    ],
    nodes: NodeOptions,
    profile: ProfileFile,
    described: PartOptions,
    step: StepOptions,
    ruled: RuleOptions,
    search: SearchOptions,
    result: ResultOptions,
    changes: ConfigChanges = None,
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
    them, and `penstock train` runs it: the nodes get the parts with which the mean over all steps is the least.

    A seed gives the same plan on every machine, and more --iterations never give a worse plan. A time limit (--seconds)
    or Ctrl-C ends the search early; the command then shows the best plan so far and says that the search was cut short.
    After Ctrl-C the exit code is 130.

    Example: penstock paths config.toml --cluster cluster.toml --parts 6 --microbatches 6 -o plan.json

    Example: penstock paths cluster.toml --parts 6 --microbatches 6 --forward 0.5 --message 16e6 -o plan.json

    Example: penstock paths cluster.toml --parts 12 --microbatches 4 --forward 0.1 --rule share=1/2 --rule swaps=0

    Example: penstock paths cluster.toml --parts 6 --microbatches 6 --forward 0.5 --lost 7 -o without-7.json
    """
    _check_sums(step.sums, step.sum_messages)
    memory = None if nodes.memory is None else parse_bytes(nodes.memory)
    rules = ruled.rules
    if nodes.cluster is None:
        needing = {"--profile": profile.profile, "--gpu": nodes.gpu, "--set": changes}
        refuse((name for name, value in needing.items() if value), NEEDS_A_CONFIG)
        question = question_from_options(source, nodes, step, described)
    else:
        refuse(given(described), FOR_A_DESCRIPTION)
        question = question_from_config(
            source, tuple(changes or ()), nodes, profile, step, rules
        )
    cluster = question.cluster
    if memory is not None:
        cluster = with_memory(cluster, memory)
    if nodes.slots is not None:
        cluster = with_slots(cluster, nodes.slots)
    rotation = None
    stages: list[PathPlan] = []
    with (
        progress("planning; Ctrl-C shows the best plan so far"),
        interruptible() as interrupt,
    ):
        problem = Problem(
            cluster,
            sum_as(question.parts, step.sum_messages),
            question.microbatches,
            rules,
            data_nodes=question.data_nodes,
            tokens=question.tokens,
            slices=step.slices,
            waves=step.waves,
            planned_sums=step.sums == "planned" if step.sums else not question.on_gpu,
            passes=question.passes if step.accumulate is None else step.accumulate,
            gap=question.gap,
            first_gap=question.gap,
        )
        plan = plan_paths(problem, search.budget(interrupt), search.seed, stages)
        plan, full, full_step = _with_full_steps(plan, stages, search, interrupt)
        if ruled.lost:
            budget = search.budget(interrupt, DEFAULT_RECOVERY_MOVES)
            plan = replan(plan, budget, ruled.lost, seed=search.seed)
            full = full_step = None
            if not interrupt.is_set() and rules.full and all(plan.partitions):
                full_step = full_steps(plan, search.budget(interrupt), search.seed)
        raise_rule_faults(rule_faults(plan))
        if not interrupt.is_set() and ruled.rotate:
            budget = search.budget(interrupt)
            rotation = rotate(plan, budget, ruled.slack, search.seed)
    others = () if rotation is None else rotation.plans[1:]
    if result.output is not None:
        written = paths_plan(plan, question.model, others, full_step, step.sum_messages)
        write(result.output, dump_plan(written), quiet=result.json)
    found = (plan, full, full_step, rotation)
    if result.json:
        print_json({**_json_facts(*found), "stopped": interrupt.is_set()})
    else:
        if question.basis:
            print_plain(f"planned {question.basis}")
        note = "interrupted: this is the best plan so far" * interrupt.is_set()
        print_table(("", "planned paths"), _table_rows(*found), note)
    if interrupt.is_set():
        raise ShownInterrupt(INTERRUPTED)


def _check_sums(sums: str | None, messages: str) -> None:
    """Refuse kinds and types of sums that do not exist or do not go together."""
    known = ", ".join(SUM_SHARES)
    refuse_first(
        ShapeError,
        (
            sums not in (None, "ring", "planned"),
            f"--sums is ring or planned, not {sums!r}",
        ),
        (
            messages not in SUM_SHARES,
            f"--sum-messages is one of {known}, not {messages!r}",
        ),
        (
            sums == "ring" and messages != "float32",
            f"--sum-messages {messages} is for planned sums; gloo and NCCL sum in float32\n"
            "  leave out --sums ring, or --sum-messages",
        ),
    )


def _with_full_steps(
    plan: PathPlan,
    stages: list[PathPlan],
    search: SearchOptions,
    interrupt: Event,
) -> tuple[PathPlan, PathPlan | None, PathPlan | None]:
    """Return the plan, a full pipeline to compare it with, and full steps on the plan's arrangement.

    `stages` are the plans of the search's complete stages. If some steps run all parts, that plan is
    chosen whose mean over partial and full steps is the least.
    """
    if interrupt.is_set():
        return plan, None, None
    others: list[PathPlan] = []
    full = full_pipeline(plan, search.budget(interrupt), search.seed, others)
    if interrupt.is_set() or not plan.problem.rules.full:
        return plan, full, None
    # A short search has no complete stage.
    proposed = [plan] if plan.cut_short or not stages else stages
    limit = Budget(2 * search.iterations, search.seconds, stop=interrupt.is_set)
    pair = best_pair(proposed, others, limit, search.seed)
    # The moves of the whole search led to it, not only those of its own stage.
    chosen = replace(pair.paths, seconds=plan.seconds, simulations=plan.simulations)
    return chosen, full, pair.full


# ---------------------------------------------------------------- questions
def question_from_options(
    cluster: Path, nodes: NodeOptions, step: StepOptions, described: PartOptions
) -> PathQuestion:
    """Ask for paths through a model of equal parts, which options describe."""
    needed = {
        "parts": step.parts,
        "microbatches": step.microbatches,
        "forward": described.forward,
    }
    for name, value in needed.items():
        if value is None:
            raise ShapeError(
                f"--{name} is missing\n"
                "  give --parts, --microbatches and --forward, "
                "or a config: penstock paths config.toml --cluster cluster.toml"
            )
    assert step.parts is not None
    assert step.microbatches is not None
    tokens = max(step.slices, 1)
    sizes = {name: value or 0.0 for name, value in asdict(described).items()}
    return PathQuestion(
        read_cluster(cluster),
        even_parts(step.parts, tokens=tokens, **sizes),
        step.microbatches,
        nodes.data_nodes,
        tokens,
    )


def question_from_config(
    source: Path,
    changes: tuple[str, ...],
    nodes: NodeOptions,
    given_profile: ProfileFile,
    step: StepOptions,
    rules: Rules,
) -> PathQuestion:
    """Ask for paths through the model of a config, on the nodes of a cluster."""
    # These load torch.
    from penstock.train.before.start import find_run
    from penstock.train.job import model_sizes

    if step.parts is None:
        raise ShapeError(
            "--parts is missing: into how many parts is the model divided?\n"
            "  every part is on several nodes, so give fewer parts than the cluster has nodes"
        )
    config, _ = find_run(source, None, changes, exists=True)
    microbatches = step.microbatches
    if microbatches is None and "schedule.microbatches" in written_keys(
        source, changes
    ):
        microbatches = config.schedule.microbatches
    if not microbatches:
        raise ShapeError(
            "--microbatches is missing, and the config has no schedule.microbatches"
        )
    sizes = model_sizes(config)
    assert nodes.cluster is not None
    cluster = read_cluster(nodes.cluster)
    wanted = replica_counts(
        len(cluster.nodes), step.parts, rules.hops(step.parts), nodes.data_nodes
    )
    batch = config.data.global_batch // config.run.accumulate  # of a pass
    data = choose_data_nodes(
        batch, microbatches, wanted[0], nodes.data_nodes is not None
    )
    rows = batch // (data * microbatches)
    profile, origin = _profile_of(nodes.gpu, given_profile, config, sizes, rows)
    model = model_parts(
        profile, step.parts, config.data.seq_len, config.run.recompute == "full", origin
    )
    if nodes.gpu is not None:
        cluster = with_memory(cluster, USABLE_SHARE * gpu_of(nodes.gpu).memory)
    return PathQuestion(
        cluster,
        model.costs,
        microbatches,
        data,
        config.data.seq_len,
        model.turn,
        model,
        config.run.accumulate,
        dict(profile.device).get("device") == "cuda",
        basis_of(profile),
    )


def _profile_of(
    gpu_name: str | None,
    given_profile: ProfileFile,
    config: Config,
    sizes: Sizes,
    rows: int,
) -> tuple[Profile, str]:
    """Return the profile of a config's model for micro-batches of `rows` rows, and where it comes from."""
    if gpu_name is not None:
        if given_profile.profile is not None:
            raise ShapeError("--gpu cannot be combined with --profile")
        gpu = gpu_of(gpu_name)
        profile = analytic_profile(
            config_of(sizes),
            config.data.seq_len,
            rows,
            gpu,
            precision_of(config, on_gpu="bfloat16" in gpu.peak),
            recorded=is_recording(config, on_gpu=True),
        )
        return (
            profile,
            f"analytic profile of the {gpu.name}, by formula and not measured",
        )
    workload = Workload(
        sizes.layers,
        config.data.seq_len,
        batch=rows,
        devices=1,
        fixed=Fixed(ranks=1, microbatches=1, copies=1, tensor=1, shard=1),
        config=config,
    )
    profiles, origin = profiles_of(given_profile, workload, decide_placement(config, 1))
    return profiles.at(rows), origin


# ---------------------------------------------------------------- what was found
def _json_facts(
    plan: PathPlan,
    full: PathPlan | None,
    full_step: PathPlan | None,
    rotation: Rotation | None,
) -> dict[str, object]:
    """Return the results as JSON has them; None stands for a search that was not made.

    `full` has an arrangement of its own, to compare with; `full_step` is on that of the plan.
    """
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
        "mean_step": None if full_step is None else StepPair(plan, full_step).mean,
        "full_step_cut_short": None if full_step is None else full_step.cut_short,
        "rotation": [] if rotation is None else [p.makespan for p in rotation.plans],
        "nodes": [list(nodes) for nodes in plan.partitions],
    }


def _table_rows(
    plan: PathPlan,
    full: PathPlan | None,
    full_step: PathPlan | None,
    rotation: Rotation | None,
) -> list[tuple[str, str]]:
    """Return the results as the table shows them."""
    passes = plan.problem.passes
    timed = "a step" if passes == 1 else f"a pass, of {passes} in a step"
    rows = [
        (timed, write_time(plan.makespan)),
        ("no plan takes less than", write_time(plan.bound)),
        ("gap", f"{plan.gap:.1%}"),
        ("search", _describe_search(plan)),
    ]
    if full is not None:
        saved = 1 - plan.makespan / full.makespan
        comparison = f"{write_time(full.makespan)}: planned paths take {saved:.1%} less"
        rows.append(("a step that skips nothing", comparison))
        rows.append(("search for it", _describe_search(full)))
    period = plan.problem.rules.full
    if full_step is not None:
        mean = StepPair(plan, full_step).mean
        step = f"{write_time(full_step.makespan)} with these nodes for the parts"
        if full_step.cut_short:
            step += ", cut short"
        rows.append(("a step with all parts", step))
        name = f"with all parts every {period} steps"
        rows.append((name, f"{write_time(mean)} per step on average"))
    if rotation is not None:
        rows.append(("paths in turn", _describe_rotation(rotation)))
    if plan.problem.has_sums:
        rows.append(("sums of gradients", _describe_sums(plan)))
    for part, nodes in enumerate(plan.partitions):
        held = "nodes " + " ".join(map(str, nodes)) if nodes else "on no node: skipped"
        rows.append((f"part {part}", held))
    return rows


def _describe_sums(plan: PathPlan) -> str:
    """Describe how gradients are summed, and how long a step waits for that."""
    timeline = plan.timeline
    waited = timeline.makespan - float(timeline.end.max())
    kinds = [sum_.kind.value for sum_ in planned_sums_of(plan)]
    how = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    return f"{how or 'rings'}; they end {write_time(waited)} after the last backward"


def _describe_rotation(rotation: Rotation) -> str:
    """Describe how many sets of paths there are, and what they leave out."""
    count = len(rotation.plans)
    text = f"{count} sets, the slowest {write_time(rotation.makespan)}"
    if count == 1:
        text = "a single set, so nothing changes from step to step"
        if not rotation.left_out:
            text += ": it meets all sets of parts"
        elif not rotation.cut_short:
            text += ": no further set is as fast (--slack allows slower ones)"
    if rotation.left_out:
        text += f"; {len(rotation.left_out)} sets of parts are on no path"
    return f"{text}, cut short" if rotation.cut_short else text


def _describe_search(plan: PathPlan) -> str:
    """Describe the work of a search, and whether it was cut short."""
    work = f"{plan.simulations:,} moves in {write_time(plan.seconds, digits=2)}"
    return f"{work}, cut short" if plan.cut_short else work
