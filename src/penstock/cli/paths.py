"""`penstock paths`: plans SkipPipe's paths for the nodes and links of a cluster.toml."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from penstock.cli.options import JsonFlag
from penstock.cli.tables import print_json, print_table, progress, write
from penstock.errors import ShapeError

if TYPE_CHECKING:
    from penstock.cost import Cluster
    from penstock.plan.paths import PathPlan

INTERRUPTED = 130  # exit code after Ctrl-C
ITERATIONS = 25_500  # equals penstock.plan.paths.staged_search.ITERATIONS, which is imported only when it is needed


class SearchInterrupted(SystemExit):
    """The exit after Ctrl-C ended a search and its best plan was shown."""


def paths_command(
    cluster: Annotated[
        Path, typer.Argument(help="The nodes and their links: a cluster.toml.")
    ],
    parts: Annotated[
        int, typer.Option(help="Parts of the model, not counting the head.")
    ],
    microbatches: Annotated[
        int, typer.Option(help="Micro-batches in a step for each data node.")
    ],
    forward: Annotated[
        float,
        typer.Option(help="Seconds that a part's forward takes on a node of speed 1."),
    ],
    share: Annotated[
        float, typer.Option(help="The share of the parts that each micro-batch skips.")
    ] = 1 / 3,
    rule: Annotated[
        Optional[list[str]],
        typer.Option(
            help="NAME=VALUE; may be repeated. Names: behind, distance, swaps, ahead, "
            "uneven, full, wait, share."
        ),
    ] = None,
    message: Annotated[
        float, typer.Option(help="Bytes that a micro-batch sends from part to part.")
    ] = 0.0,
    held: Annotated[
        float,
        typer.Option(
            help="Bytes that a part holds of a micro-batch, for nodes with a memory."
        ),
    ] = 0.0,
    gradients: Annotated[
        float,
        typer.Option(help="Bytes of a part's gradients, summed over its replicas."),
    ] = 0.0,
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

    Shows how much better any plan under the same rules could be at most. For comparison, the same search with the same
    work also plans a full pipeline, which skips nothing. The rules are SkipPipe's unless --rule changes them: a step
    goes at most 4 parts ahead of the highest part so far and 1 behind it, a path has at most 2 steps back, over 2 parts
    together, and every 10th step visits all parts.

    A seed gives the same plan on every machine, and more --iterations never give a worse plan. A time limit (--seconds)
    or Ctrl-C ends the search early; the command then shows the best plan so far and says that the search was cut short.
    After Ctrl-C the exit code is 130.

    Example: penstock paths cluster.toml --parts 6 --microbatches 6 --forward 0.5 --message 16e6 -o plan.json

    Example: penstock paths cluster.toml --parts 12 --microbatches 4 --forward 0.1 --rule share=1/2 --rule swaps=0
    """
    from penstock.formats import dump_plan, read_cluster
    from penstock.plan.paths import even_parts, paths_plan, plan_paths, rule_faults
    from penstock.plan.paths.baselines import full_pipeline
    from penstock.plan.paths.rules import raise_rule_faults, rules_from

    _check_positive(forward=forward, seconds=seconds)
    _check_not_negative(message=message, held=held, gradients=gradients)
    _check_iterations(iterations)
    tokens = max(slices, 1)
    rules = rules_from([f"share={share!r}", *(rule or ())])
    costs = even_parts(parts, forward, tokens=tokens, message=message, held=held)
    nodes = _with_slots(read_cluster(cluster), slots)
    full = None
    with (
        progress("planning; Ctrl-C shows the best plan so far"),
        _interruptible() as interrupt,
    ):
        plan = plan_paths(
            nodes,
            costs,
            microbatches,
            rules,
            data_nodes=data_nodes,
            tokens=tokens,
            slices=slices,
            waves=waves,
            gradients=gradients,
            iterations=iterations,
            seconds=seconds,
            seed=seed,
            stop=interrupt,
        )
        raise_rule_faults(rule_faults(plan))
        if not interrupt.stopped:
            full = full_pipeline(plan, iterations, seconds, seed, stop=interrupt)
    if output is not None:
        write(output, dump_plan(paths_plan(plan)), quiet=json)
    if json:
        print_json({**_facts(plan, full), "stopped": interrupt.stopped})
    else:
        note = "interrupted: this is the best plan so far" if interrupt.stopped else ""
        print_table(("", "planned paths"), _rows(plan, full), note)
    if interrupt.stopped:
        raise SearchInterrupted(INTERRUPTED)


# ---------------------------------------------------------------- options
def _check_iterations(iterations: int) -> None:
    if iterations < 1:
        raise ShapeError(f"--iterations must be at least 1, not {iterations}")


def _check_positive(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ShapeError(f"--{name} must be above 0, not {value:g}")


def _check_not_negative(**options: float) -> None:
    for name, value in options.items():
        if not value >= 0:
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
def _facts(plan: PathPlan, full: PathPlan | None) -> dict[str, object]:
    """Return the results as JSON has them."""
    return {
        "makespan": plan.makespan,
        "lower_bound": plan.bound,
        "gap": plan.gap,
        "search_seconds": plan.seconds,
        "simulations": plan.simulations,
        "cut_short": plan.cut_short,
        "full_pipeline": None if full is None else full.makespan,
        "full_pipeline_cut_short": None if full is None else full.cut_short,
        "nodes": [list(nodes) for nodes in plan.partitions],
    }


def _rows(plan: PathPlan, full: PathPlan | None) -> list[tuple[str, str]]:
    """Return the results as the table shows them."""
    from penstock.view.numbers import write_time

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
    if full is not None and period:
        mean = ((period - 1) * plan.makespan + full.makespan) / period
        name = f"with all parts every {period} steps"
        rows.append((name, f"{write_time(mean)} per step on average"))
    for part, nodes in enumerate(plan.partitions):
        rows.append((f"part {part}", "nodes " + " ".join(map(str, nodes))))
    return rows


def _search(plan: PathPlan) -> str:
    """Describe the work of a search, and whether it was cut short."""
    from penstock.view.numbers import write_time

    work = f"{plan.simulations:,} moves in {write_time(plan.seconds, digits=2)}"
    return f"{work}, cut short" if plan.cut_short else work
