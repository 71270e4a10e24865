"""`penstock paths`: SkipPipe's paths, planned for the nodes and links of a cluster.toml."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from penstock.cli.tables import print_json, print_table, progress, write
from penstock.errors import ShapeError

if TYPE_CHECKING:
    from penstock.cost import Cluster
    from penstock.plan.paths import PathPlan

# As in penstock.plan.paths.staged_search, which is imported only when it is needed.
ITERATIONS = 25_500


def paths_command(
    cluster: Annotated[Path, typer.Argument(help="Nodes and links: a cluster.toml.")],
    parts: Annotated[
        int, typer.Option(help="Parts of the model, the head not counted.")
    ],
    microbatches: Annotated[
        int, typer.Option(help="Micro-batches of a step for each data node.")
    ],
    forward: Annotated[
        float, typer.Option(help="Seconds of a part's forward on a node of speed 1.")
    ],
    share: Annotated[
        float, typer.Option(help="Of the parts that each micro-batch leaves out.")
    ] = 1 / 3,
    rule: Annotated[
        Optional[list[str]],
        typer.Option(
            help="NAME=VALUE, often: behind, distance, swaps, ahead, uneven, full, wait, share."
        ),
    ] = None,
    message: Annotated[
        float, typer.Option(help="Bytes of a micro-batch between two parts.")
    ] = 0.0,
    held: Annotated[
        float,
        typer.Option(
            help="Bytes a part holds of a micro-batch, for nodes that have memory."
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
            help="Token slices of a micro-batch: they overlap with slow links."
        ),
    ] = 1,
    waves: Annotated[
        bool, typer.Option("--waves", help="Pass every node twice, down and up.")
    ] = False,
    iterations: Annotated[
        int, typer.Option(help="Work of the search: moves that it tries.")
    ] = ITERATIONS,
    seconds: Annotated[
        Optional[float],
        typer.Option(
            help="Time limit of each search, in seconds. By default there is none."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the search.")] = 0,
    output: Annotated[
        Optional[Path], typer.Option("-o", "--output", help="plan.json to write.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to stdout.")
    ] = False,
) -> None:
    """Plan which node holds which part and which parts each micro-batch visits, so that few wait for one another.

    Says how much better any plan under the same rules could be at most, and what a full pipeline takes that leaves out
    nothing and is planned by the same search with the same work. The rules are SkipPipe's unless --rule says otherwise:
    a step goes at most 4 parts ahead of the highest part so far and 1 behind it, 2 steps back on a path, over 2 parts
    together, every 10th step all parts.

    A seed gives the same plan on every machine, and more --iterations never give a worse one. A time limit (--seconds)
    or Ctrl-C ends the search early: the best plan so far is shown, and the output says that it was cut short. After
    Ctrl-C the exit code is 130.

    Example: penstock paths cluster.toml --parts 6 --microbatches 6 --forward 0.5 --message 16e6 -o plan.json

    Example: penstock paths cluster.toml --parts 12 --microbatches 4 --forward 0.1 --rule share=1/2 --rule swaps=0
    """
    from penstock.formats import dump_plan, read_cluster
    from penstock.plan.paths import even_parts, paths_plan, plan_paths, rule_faults
    from penstock.plan.paths.baselines import full_pipeline
    from penstock.plan.paths.rules import raise_rule_faults, rules_from

    _refuse_numbers(
        forward=forward,
        message=message,
        held=held,
        gradients=gradients,
        seconds=seconds,
    )
    _refuse_iterations(iterations)
    tokens = max(slices, 1)
    rules = rules_from([f"share={share!r}", *(rule or ())])
    costs = even_parts(parts, forward, tokens=tokens, message=message, held=held)
    nodes = _with_slots(read_cluster(cluster), slots)
    with (
        progress("planning: Ctrl-C for the best so far"),
        _interruptible() as interrupt,
    ):
        found = plan_paths(
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
        raise_rule_faults(rule_faults(found))
        whole = (
            None
            if interrupt.stopped
            else full_pipeline(found, iterations, seconds, seed, stop=interrupt)
        )
    if output is not None:
        write(output, dump_plan(paths_plan(found)), quiet=json)
    if json:
        print_json({**_facts(found, whole), "stopped": interrupt.stopped})
    else:
        title = "stopped: the best so far" if interrupt.stopped else ""
        print_table(("", "planned paths"), _rows(found, whole), title)
    if interrupt.stopped:
        raise SystemExit(130)


def add_paths_command(app: typer.Typer) -> None:
    """Adds the verb above to a command line."""
    app.command("paths")(paths_command)


# ---------------------------------------------------------------- what is given
def _refuse_iterations(iterations: int) -> None:
    if iterations < 1:
        raise ShapeError(f"--iterations {iterations} is too little; give 1 or more")


def _refuse_numbers(**given: float | None) -> None:
    for word, value in given.items():
        if value is None:
            continue
        more = word in ("forward", "seconds")
        if not value >= 0 or (more and value == 0):
            raise ShapeError(
                f"--{word} {value:g} is too little; give {'more than 0' if more else '0 or more'}"
            )


def _with_slots(cluster: Cluster, slots: int | None) -> Cluster:
    if slots is None:
        return cluster
    return replace(
        cluster, nodes=tuple(replace(node, slots=slots) for node in cluster.nodes)
    )


@dataclass(slots=True)
class _Interrupt:
    """Tells a search whether to stop: after the first Ctrl-C."""

    stopped: bool = False

    def __call__(self) -> bool:
        return self.stopped


@contextmanager
def _interruptible() -> Iterator[_Interrupt]:
    """The first Ctrl-C ends the search; a second one ends the command."""
    interrupt = _Interrupt()

    def stop(signum: int, frame: object) -> None:
        interrupt.stopped = True
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    if (
        before is not signal.SIG_IGN
    ):  # as in the background of a script: there nobody presses Ctrl-C
        signal.signal(signal.SIGINT, stop)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


# ---------------------------------------------------------------- what is told
def _facts(found: PathPlan, whole: PathPlan | None) -> dict[str, object]:
    return {
        "makespan": found.makespan,
        "lower_bound": found.bound,
        "gap": found.gap,
        "search_seconds": found.seconds,
        "simulations": found.simulations,
        "cut_short": found.cut_short,
        "full_pipeline": None if whole is None else whole.makespan,
        "full_pipeline_cut_short": None if whole is None else whole.cut_short,
        "nodes": [list(nodes) for nodes in found.partitions],
    }


def _rows(found: PathPlan, whole: PathPlan | None) -> list[tuple[str, str]]:
    every = found.problem.rules.full
    rows = [
        ("a step", f"{found.makespan:.4g} s"),
        ("no plan takes less than", f"{found.bound:.4g} s"),
        ("gap", f"{found.gap:.1%}"),
        ("search", _work(found)),
    ]
    if whole is not None:
        less = 1 - found.makespan / whole.makespan
        rows.append(
            (
                "all parts, nothing left out",
                f"{whole.makespan:.4g} s: planned paths take {less:.1%} less",
            )
        )
        rows.append(("search for all parts", _work(whole)))
    if whole is not None and every:
        mean = ((every - 1) * found.makespan + whole.makespan) / every
        rows.append(
            (f"with all parts every {every} steps", f"{mean:.4g} s a step on average")
        )
    return rows + [
        (f"part {n}", "nodes " + " ".join(map(str, nodes)))
        for n, nodes in enumerate(found.partitions)
    ]


def _work(plan: PathPlan) -> str:
    """What a search took, and whether it was cut short."""
    return f"{plan.simulations:,} moves, {plan.seconds:.1f} s" + (
        ", cut short" if plan.cut_short else ""
    )
