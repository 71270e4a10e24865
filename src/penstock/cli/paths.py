"""`penstock lab paths`: plans SkipPipe's paths for the nodes and links of a cluster.toml.

--cluster cluster.toml --stages 4 --cost F=0.5      options describe a model of equal parts, as in the paper
--cluster cluster.toml --stages 4 config.toml       a model, which is measured unless its profile is given
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.plan import profiles_of
from penstock.cli.sources import (
    PIPELINE_SETTINGS,
    config_file,
    read_costs,
    read_model,
)
from penstock.cli.terminal import (
    INTERRUPTED,
    MODEL_HELP,
    ConfigChanges,
    ShownInterrupt,
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
from penstock.cost.cluster import with_memory
from penstock.cost.gpus import GPUS, analytic_profile, gpu_of
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
from penstock.plan.workload import USABLE_SHARE, Fixed, Workload
from penstock.shaped import read_shape, split_name
from penstock.train.own_models import config_of
from penstock.train.placement import decide_placement
from penstock.view.numbers import write_time

if TYPE_CHECKING:
    from penstock.train.weights import Sizes  # loads torch

SYNTHETIC_KINDS = {
    "F": float,
    "message": float,
    "held": float,
    "weights": float,
    "gradients": float,
}
STAGES_KINDS = {"slices": int, "waves": bool, "data_nodes": int, "accumulate": int}
SUMS_KINDS = {"messages": str}
PLANNED, RING = "planned", "ring"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The nodes, and what a step does on them."""

    cluster: Path | None = option(
        None, "A cluster.toml with the nodes and the links between them. Required."
    )
    stages: str | None = option(
        None,
        "Parts of the model, not counting the head; also with token slices, with waves, which pass through every node "
        "twice, with the number of nodes that hold the first part, and without a model with gradient accumulation "
        "steps: 4:slices=2,waves,data_nodes=2,accumulate=2.",
    )
    microbatches: int | None = option(
        None, "Micro-batches in a step for each data node."
    )
    cost: str | None = option(
        None,
        "Without a model, what a stage costs: F=0.5 (seconds of a forward on a node of speed 1), and the bytes "
        "message=8e6,held=1e6,weights=1e8,gradients=1e8. With a model: a profile.json or a GPU; otherwise it is "
        "measured.",
    )
    sums: str | None = option(
        None,
        "All-reduces of gradients: planned, the quickest of ring, direct exchange and two levels, which "
        "`penstock train` then does, or planned:bfloat16 or planned:int8, the type in which they travel; or ring, as "
        "gloo and NCCL do (the default for GPUs).",
    )

    @property
    def shape(self) -> StageShape:
        """The stages of a model, and how a step passes through them."""
        if self.stages is None:
            raise ShapeError(
                "--stages is missing: into how many parts is the model divided?\n"
                "  every part is on several nodes, so give fewer parts than the cluster has nodes"
            )
        count, words = split_name(self.stages)
        shape = read_shape(count, words, STAGES_KINDS)
        if not count.isdecimal():
            raise ShapeError(f"--stages must be a number, such as 4, not {count!r}")
        return StageShape(int(count), **shape)

    @property
    def all_reduce(self) -> tuple[str | None, str]:
        """How gradients are summed, and the type in which they travel."""
        if self.sums is None:
            return None, "float32"
        kind, shape = split_name(self.sums)
        if shape and "=" not in shape:
            shape = f"messages={shape}"
        messages = read_shape(kind, shape, SUMS_KINDS).get("messages", "float32")
        known = ", ".join(SUM_SHARES)
        refuse_first(
            ShapeError,
            (
                kind not in (RING, PLANNED),
                f"--sums is ring or planned, not {kind!r}",
            ),
            (
                messages not in SUM_SHARES,
                f"--sums: gradients travel as one of {known}, not {messages!r}",
            ),
            (
                kind == RING and messages != "float32",
                f"--sums ring sums in float32, as gloo and NCCL do; write planned:{messages}",
            ),
        )
        return kind, messages


@dataclass(frozen=True, slots=True)
class StageShape:
    """How many parts a model has, and how a step passes through them."""

    parts: int
    slices: int = 1
    waves: bool = False
    data_nodes: int | None = None
    accumulate: int = 1  # passes of a step, without a model


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """Which paths are allowed, and which are planned besides."""

    skip: float = option(
        1 / 3,
        "The share of the parts that each micro-batch leaves out.",
        show_default="1/3",
    )
    rule: list[str] | None = option(
        None,
        "NAME=VALUE; may be repeated. Names: behind, distance, swaps, ahead, uneven, full, wait, share.",
    )
    rotate: float | None = option(
        None,
        "Plan further sets of paths, which training takes in turn, until some path meets every set of parts; a step "
        "with them may take this share longer than the first, such as 0.",
        least=0,
        metavar="SHARE",
    )
    lost: list[int] | None = option(
        None,
        "A node that is gone. The others keep the parts that the same command gives them without --lost, and "
        "paths go around it. May be repeated.",
    )

    @property
    def rules(self) -> Rules:
        """The rules of all paths."""
        return rules_from([f"share={self.skip!r}", *(self.rule or ())])


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
    step: StepOptions,
    ruled: RuleOptions,
    search: SearchOptions,
    result: ResultOptions,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help=f"{MODEL_HELP} Without one, --cost describes a model of equal parts.",
        ),
    ] = None,
    changes: ConfigChanges = None,
) -> None:
    """Plan which node holds which part, and which parts each micro-batch visits, so that micro-batches rarely wait.

    A model is measured, as `penstock plan` does, or its profile is read. The memory of a node then holds its weights,
    gradients and optimizer state, and the plan says how many layers each part has. Without a model, --cost describes
    equal parts, as in the paper. All-reduces of gradients count in both cases.

    Shows how much better any plan under the same rules could be at most. For comparison, the same search with the same
    work also plans a full pipeline, which skips nothing. The rules are SkipPipe's unless --rule changes them: a step
    goes at most 4 parts ahead of the highest part so far and 1 behind it, a path has at most 2 steps back, over 2 parts
    together, and every 10th step visits all parts. That step is planned too, with the weights where the paths need
    them, and `penstock train` runs it: the nodes get the parts with which the mean over all steps is the least.

    A seed gives the same plan on every machine, and more --iterations never give a worse plan. A time limit (--seconds)
    or Ctrl-C ends the search early; the command then shows the best plan so far and says that the search was cut short.
    After Ctrl-C the exit code is 130.

    Example: penstock lab paths config.toml --cluster cluster.toml --stages 6 --microbatches 6 -o plan.json

    Example: penstock lab paths --cluster cluster.toml --stages 6 --microbatches 6 --cost F=0.5,message=16e6

    Example: penstock lab paths --cluster cluster.toml --stages 12 --microbatches 4 --cost F=0.1 --skip 0.5 --lost 7
    """
    sums, messages = step.all_reduce
    rules = ruled.rules
    if source is None:
        refuse(["--set"] * bool(changes), "{option} changes a config; name a model")
        question = question_from_options(step)
    else:
        question = question_from_model(source, tuple(changes or ()), step, rules)
    cluster = question.cluster
    rotation = None
    stages: list[PathPlan] = []
    with (
        progress("planning; Ctrl-C shows the best plan so far"),
        interruptible() as interrupt,
    ):
        problem = Problem(
            cluster,
            sum_as(question.parts, messages),
            question.microbatches,
            rules,
            data_nodes=question.data_nodes,
            tokens=question.tokens,
            slices=step.shape.slices,
            waves=step.shape.waves,
            planned_sums=sums == PLANNED if sums else not question.on_gpu,
            passes=question.passes,
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
        if not interrupt.is_set() and ruled.rotate is not None:
            budget = search.budget(interrupt)
            rotation = rotate(plan, budget, ruled.rotate, search.seed)
    others = () if rotation is None else rotation.plans[1:]
    if result.output is not None:
        written = paths_plan(plan, question.model, others, full_step, messages)
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
def question_from_options(step: StepOptions) -> PathQuestion:
    """Ask for paths through a model of equal parts, which options describe."""
    cluster = _cluster_of(step)
    shape = step.shape
    if step.microbatches is None:
        raise ShapeError("--microbatches is missing")
    sizes = read_shape("--cost", step.cost or "", SYNTHETIC_KINDS)
    if "F" not in sizes:
        raise ShapeError(
            "--cost F=0.5 is missing: the seconds of a stage's forward on a node of speed 1\n"
            "  or name a model: penstock lab paths config.toml --cluster cluster.toml"
        )
    for name, value in sizes.items():
        if not (value > 0 if name == "F" else value >= 0) or value == inf:
            wanted = "above 0" if name == "F" else "at least 0"
            raise ShapeError(f"--cost: {name} must be {wanted}, not {value:g}")
    tokens = max(shape.slices, 1)
    return PathQuestion(
        cluster,
        even_parts(shape.parts, sizes.pop("F"), tokens=tokens, **sizes),
        step.microbatches,
        shape.data_nodes,
        tokens,
        passes=shape.accumulate,
    )


def _cluster_of(step: StepOptions) -> Cluster:
    if step.cluster is None:
        raise ShapeError(
            "--cluster is missing: which nodes are there?\n"
            "  `penstock profile --links` measures them and writes a cluster.toml"
        )
    return read_cluster(step.cluster)


def question_from_model(
    source: Path, changes: tuple[str, ...], step: StepOptions, rules: Rules
) -> PathQuestion:
    """Ask for paths through a model, on the nodes of a cluster."""
    config, sizes = read_model(source, changes)
    cluster = _cluster_of(step)
    shape = step.shape
    microbatches = step.microbatches
    written = written_keys(config_file(source), changes)
    if microbatches is None and PIPELINE_SETTINGS["microbatches"] in written:
        microbatches = config.schedule.microbatches
    if not microbatches:
        raise ShapeError(
            "--microbatches is missing, and the config does not give their number"
        )
    wanted = replica_counts(
        len(cluster.nodes), shape.parts, rules.hops(shape.parts), shape.data_nodes
    )
    batch = config.data.global_batch // config.run.accumulate  # of a pass
    data = choose_data_nodes(
        batch, microbatches, wanted[0], shape.data_nodes is not None
    )
    rows = batch // (data * microbatches)
    gpu = step.cost if step.cost and step.cost.casefold() in GPUS else None
    profile, origin = _profile_of(gpu, step.cost, config, sizes, rows)
    model = model_parts(
        profile,
        shape.parts,
        config.data.seq_len,
        config.run.recompute == "full",
        origin,
    )
    if gpu is not None:
        cluster = with_memory(cluster, USABLE_SHARE * gpu_of(gpu).memory)
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
    cost: str | None,
    config: Config,
    sizes: Sizes,
    rows: int,
) -> tuple[Profile, str]:
    """Return the profile of a config's model for micro-batches of `rows` rows, and where it comes from."""
    if gpu_name is not None:
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
    file = None
    if cost is not None:
        file = read_costs(cost).file
        if file is None:
            raise ShapeError(
                f"--cost {cost} describes a model of equal parts, but a model is named\n"
                "  give a profile.json or a GPU, or leave --cost out to measure the model"
            )
    profiles, origin = profiles_of(file, workload, decide_placement(config, 1))
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
        rows.append(("all-reduces of gradients", _describe_sums(plan)))
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
