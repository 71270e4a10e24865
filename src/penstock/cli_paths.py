"""`penstock paths`: SkipPipe's paths, planned for the nodes and links of a cluster.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from penstock.cli_screen import print_json, print_table, progress, write


def paths(
    cluster: Annotated[Path, typer.Argument(help="Nodes and links: a cluster.toml.")],
    parts: Annotated[int, typer.Option(help="Parts of the model, the head not counted.")],
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step for each data node.")],
    forward: Annotated[float, typer.Option(help="Seconds of a part's forward on a node of speed 1.")],
    share: Annotated[float, typer.Option(help="Of the parts that each micro-batch leaves out.")] = 1 / 3,
    message: Annotated[float, typer.Option(help="Bytes of a micro-batch between two parts.")] = 0.0,
    gradients: Annotated[float, typer.Option(help="Bytes of a part's gradients, summed over its replicas.")] = 0.0,
    slices: Annotated[int, typer.Option(help="Token slices of a micro-batch: they overlap with slow links.")] = 1,
    waves: Annotated[bool, typer.Option("--waves", help="Pass every node twice, down and up.")] = False,
    seconds: Annotated[float, typer.Option(help="For the search.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    output: Annotated[Optional[Path], typer.Option("-o", "--output", help="plan.json to write.")] = None,  # noqa: UP045
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")] = False,
) -> None:
    """Plan which node holds which part and which parts each micro-batch visits, so that few wait for one another.

    Says how much better any plan could be at most, and what the pipeline takes that leaves out nothing.

    Example: penstock paths cluster.toml --parts 6 --microbatches 6 --forward 0.5 --message 16e6 -o plan.json
    """
    from penstock.cost import read_cluster
    from penstock.ir import dump_plan
    from penstock.plan import Rules, as_file, even_parts, plan_paths, rule_faults
    from penstock.plan.baselines import full

    tokens = max(slices, 1)
    costs = even_parts(parts, forward, tokens=tokens, message=message)
    with progress("planning"):
        found = plan_paths(
            read_cluster(cluster), costs, microbatches, Rules(share=share), tokens=tokens, slices=slices, waves=waves,
            gradients=gradients, seconds=seconds, seed=seed,
        )  # fmt: skip
        assert not rule_faults(found)
        whole = full(found, seconds, seed=seed) if not waves else None
    facts: dict[str, object] = {
        "makespan": found.makespan, "lower_bound": found.bound, "gap": found.gap, "search_seconds": found.seconds,
        "simulations": found.simulations, "full_pipeline": None if whole is None else whole.makespan,
        "nodes": [list(nodes) for nodes in found.partitions],
    }  # fmt: skip
    if output is not None:
        write(output, dump_plan(as_file(found)), quiet=json)
    if json:
        print_json(facts)
        return
    rows = [
        ("a step", f"{found.makespan:.4g} s"), ("no plan takes less than", f"{found.bound:.4g} s"),
        ("gap", f"{found.gap:.1%}"), ("search", f"{found.seconds:.1f} s, {found.simulations} simulations"),
    ]  # fmt: skip
    if whole is not None:
        less = 1 - found.makespan / whole.makespan
        rows.append(("all parts, nothing left out", f"{whole.makespan:.4g} s: planned paths take {less:.0%} less"))
    rows += [(f"part {part}", "nodes " + " ".join(map(str, nodes))) for part, nodes in enumerate(found.partitions)]
    print_table(("", "planned paths"), rows)


def add_verbs(app: typer.Typer) -> None:
    """Adds the verb above to a command line."""
    app.command()(paths)
