"""`penstock paths`: plans SkipPipe's paths for the nodes and links of a cluster.toml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from penstock.cli.interrupt import (
    INTERRUPTED,
    Interrupt,
    ShownInterrupt,
    interruptible,
)
from penstock.cli.options import AcceptError, ConfigChanges, JsonFlag, ProfileFile
from penstock.cli.path_question import (
    ConfigOptions,
    question_from_config,
    question_from_options,
)
from penstock.cli.path_results import PathResults, json_facts, table_rows
from penstock.cli.tables import (
    print_json,
    print_plain,
    print_table,
    progress,
    write,
)
from penstock.errors import ShapeError

if TYPE_CHECKING:
    from penstock.cost import Cluster
    from penstock.plan.paths import PathPlan

MODEL_PANEL = "A model and its nodes"
ITERATIONS = 25_500  # equals `staged_search.DEFAULT_SEARCH_MOVES`, which is imported only when it is needed


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
            help="How replicas sum gradients: planned, the quickest of ring, direct exchange and two levels, "
            "which `penstock train` then does; or ring, as gloo and NCCL do (the default for GPUs)."
        ),
    ] = None,
    sum_messages: Annotated[
        str,
        typer.Option(
            help="Type in which planned sums of gradients travel: float32, bfloat16 or int8."
        ),
    ] = "float32",
    accumulate: Annotated[
        Optional[int],
        typer.Option(
            help="Passes of a step, by default run.accumulate of the config, or 1. Replicas sum gradients once "
            "a step, in its last pass, and all times are means of a pass.",
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
    them, and `penstock train` runs it: the nodes get the parts with which the mean over all steps is the least.

    A seed gives the same plan on every machine, and more --iterations never give a worse plan. A time limit (--seconds)
    or Ctrl-C ends the search early; the command then shows the best plan so far and says that the search was cut short.
    After Ctrl-C the exit code is 130.

    Example: penstock paths config.toml --cluster cluster.toml --parts 6 --microbatches 6 -o plan.json

    Example: penstock paths cluster.toml --parts 6 --microbatches 6 --forward 0.5 --message 16e6 -o plan.json

    Example: penstock paths cluster.toml --parts 12 --microbatches 4 --forward 0.1 --rule share=1/2 --rule swaps=0

    Example: penstock paths cluster.toml --parts 6 --microbatches 6 --forward 0.5 --lost 7 -o without-7.json
    """
    from penstock.cost.sum_bytes import sum_as
    from penstock.formats import dump_plan
    from penstock.plan.paths import (
        full_steps,
        paths_plan,
        plan_paths,
        rule_faults,
    )
    from penstock.plan.paths import rotate as rotate_paths
    from penstock.plan.paths.rotation import DEFAULT_RECOVERY_MOVES, replan
    from penstock.plan.paths.rules import raise_rule_faults, rules_from

    _check_positive(forward=forward, seconds=seconds)
    _check_not_negative(
        message=message, held=held, weights=weights, gradients=gradients, slack=slack
    )
    _check_iterations(iterations)
    _check_sums(sums, sum_messages)
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
        question = question_from_options(
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
        question = question_from_config(options, rules)
    nodes = _completed(question.cluster, memory_bytes, slots)
    planned_sums = sums == "planned" if sums else not question.on_gpu
    passes = question.passes if accumulate is None else accumulate
    rotation = None
    stages: list[PathPlan] = []
    with (
        progress("planning; Ctrl-C shows the best plan so far"),
        interruptible() as interrupt,
    ):
        plan = plan_paths(
            nodes,
            sum_as(question.parts, sum_messages),
            question.microbatches,
            rules,
            data_nodes=question.data_nodes,
            tokens=question.tokens,
            slices=slices,
            waves=waves,
            planned_sums=planned_sums,
            passes=passes,
            gap=question.gap,
            first_gap=question.gap,
            iterations=iterations,
            seconds=seconds,
            seed=seed,
            stop=interrupt,
            stages=stages,
        )
        plan, full, full_step = _with_full_steps(
            plan, stages, iterations, seconds, seed, interrupt
        )
        if lost:
            moves = min(iterations, DEFAULT_RECOVERY_MOVES)
            plan = replan(plan, lost, (), moves, seconds, seed, stop=interrupt)
            full = full_step = None
            if not interrupt.stopped and rules.full and all(plan.partitions):
                full_step = full_steps(plan, iterations, seconds, seed, stop=interrupt)
        raise_rule_faults(rule_faults(plan))
        if not interrupt.stopped and rotate:
            rotation = rotate_paths(
                plan, slack, iterations, seconds, seed, stop=interrupt
            )
    others = () if rotation is None else rotation.plans[1:]
    if output is not None:
        written = paths_plan(plan, question.model, others, full_step, sum_messages)
        write(output, dump_plan(written), quiet=json)
    found = PathResults(plan, full, full_step, rotation)
    if question.basis and not json:
        print_plain(f"planned {question.basis}")
    _show(found, interrupt.stopped, json)
    if interrupt.stopped:
        raise ShownInterrupt(INTERRUPTED)


def _with_full_steps(
    plan: PathPlan,
    stages: list[PathPlan],
    iterations: int,
    seconds: float | None,
    seed: int,
    interrupt: Interrupt,
) -> tuple[PathPlan, PathPlan | None, PathPlan | None]:
    """Return the plan, a full pipeline to compare it with, and full steps on the plan's arrangement.

    `stages` are the plans of the search's complete stages. If some steps run all parts, that plan is
    chosen whose mean over partial and full steps is the least.
    """
    from penstock.plan.paths import best_pair
    from penstock.plan.paths.rotation import full_pipeline
    from penstock.plan.paths.search import Budget

    if interrupt.stopped:
        return plan, None, None
    others: list[PathPlan] = []
    full = full_pipeline(plan, iterations, seconds, seed, stop=interrupt, stages=others)
    if interrupt.stopped or not plan.problem.rules.full:
        return plan, full, None
    # A short search has no complete stage.
    proposed = [plan] if plan.cut_short or not stages else stages
    limit = Budget(2 * iterations, seconds, stop=interrupt)
    pair = best_pair(proposed, others, limit, seed)
    # The moves of the whole search led to it, not only those of its own stage.
    chosen = replace(pair.paths, seconds=plan.seconds, simulations=plan.simulations)
    return chosen, full, pair.full


def _show(found: PathResults, stopped: bool, json: bool) -> None:
    """Print the results as JSON or as a table; `stopped` says that Ctrl-C ended the search."""
    if json:
        print_json({**json_facts(found), "stopped": stopped})
    else:
        note = "interrupted: this is the best plan so far" if stopped else ""
        print_table(("", "planned paths"), table_rows(found), note)


def _completed(cluster: Cluster, memory: float | None, slots: int | None) -> Cluster:
    """Return the cluster with what the options --memory and --slots say about its nodes."""
    from penstock.cost.cluster import with_memory, with_slots

    if memory is not None:
        cluster = with_memory(cluster, memory)
    if slots is not None:
        cluster = with_slots(cluster, slots)
    return cluster


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


def _check_sums(sums: str | None, messages: str) -> None:
    from penstock.cost.sum_bytes import SUM_SHARES

    if sums not in (None, "ring", "planned"):
        raise ShapeError(f"--sums is ring or planned, not {sums!r}")
    if messages not in SUM_SHARES:
        known = ", ".join(SUM_SHARES)
        raise ShapeError(f"--sum-messages is one of {known}, not {messages!r}")
    if sums == "ring" and messages != "float32":
        raise ShapeError(
            f"--sum-messages {messages} is for planned sums; gloo and NCCL sum in float32\n"
            "  leave out --sums ring, or --sum-messages"
        )


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
