"""`penstock plan`: searches for the fastest plan, and says how far from the optimum it can be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from penstock.cli.options import (
    AcceptError,
    BackwardOption,
    CommOption,
    ForwardOption,
    JsonFlag,
    OutputFile,
    ProfileFile,
    TokensOption,
)
from penstock.cli.tables import print_json, print_table, progress, tell, write

if TYPE_CHECKING:
    from rich.status import Status

    from penstock.plan.question import Question
    from penstock.plan.search import Landscape, Progress, Row

MAX_LENGTHS_SHOWN = 4  # a row shows the lengths of at most this many slices
CONFIG_PANEL = "A model and its devices"
UNIT_PANEL = "Ranks in units of the papers"


def plan_command(
    source: Annotated[
        Optional[Path],
        typer.Argument(
            metavar="[CONFIG]",
            help="A config.toml, whose model is measured here unless --profile or --gpu is given.",
        ),
    ] = None,
    changes: Annotated[
        Optional[list[str]],
        typer.Option(
            "--set", help="Change a value of the config: section.key=value. May repeat."
        ),
    ] = None,
    devices: Annotated[
        Optional[int],
        typer.Option(
            help="Divide this many devices into copies, ranks and meshes. "
            "Default: as many as the config has.",
            rich_help_panel=CONFIG_PANEL,
        ),
    ] = None,
    memory: Annotated[
        Optional[str],
        typer.Option(
            help="Memory of a device, such as 80GiB. Without a model: micro-batches that "
            "a rank may hold; with --profile alone a bare number means MiB."
        ),
    ] = None,
    gpu: Annotated[
        Optional[str],
        typer.Option(
            help="Plan for a known GPU without having one: v100, a100-40, a100-80, h100 "
            "or h200. Its times come from a formula.",
            rich_help_panel=CONFIG_PANEL,
        ),
    ] = None,
    cluster: Annotated[
        Optional[Path],
        typer.Option(
            help="A cluster.toml with the speeds of the devices and the links between them.",
            rich_help_panel=CONFIG_PANEL,
        ),
    ] = None,
    profile: ProfileFile = None,
    tokens: TokensOption = None,
    accept_error: AcceptError = False,
    ranks: Annotated[
        Optional[int], typer.Option(help="Ranks of the pipeline.")
    ] = None,
    microbatches: Annotated[
        Optional[int], typer.Option(help="Micro-batches in a step.")
    ] = None,
    forward: ForwardOption = None,
    backward: BackwardOption = None,
    comm: CommOption = None,
    stages: Annotated[
        int,
        typer.Option(
            help="The most stages on a rank. A model cannot have more than its layers."
        ),
    ] = 16,
    slices: Annotated[
        int,
        typer.Option(
            help="The most token slices of a sequence; 1 for models that cannot be sliced."
        ),
    ] = 8,
    granularity: Annotated[
        Optional[int],
        typer.Option(
            help="Cuts are multiples of this number of tokens. "
            "Default: 16, or 128 for a GPU."
        ),
    ] = None,
    weights: Annotated[
        int, typer.Option(help="The most copies of the weights; 2 admits chimera.")
    ] = 1,
    top: Annotated[int, typer.Option(help="The number of rows to show.")] = 15,
    output: OutputFile = None,
    page: Annotated[
        Optional[Path],
        typer.Option(help="Write a page that shows all that was compared, as HTML."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Search for the fastest plan; with -o, write it as a plan.json that `penstock train` runs.

    It divides the devices into copies, ranks and meshes, the batch into micro-batches and token slices, and the layers
    into parts, and orders what every rank does. The bound under the table holds for every plan of that space.

    Example: penstock plan config.toml --devices 32 --memory 80GiB --gpu h100 -o plan.json --page plan.html

    Example: penstock plan --ranks 8 --microbatches 16 --comm 0.05 --memory 8 -o plan.json

    Example: penstock plan --ranks 4 --microbatches 2 --profile profile.json --tokens 8192
    """
    from penstock.formats import dump_plan
    from penstock.plan.planner import chosen_plan
    from penstock.plan.question import Options, question_of
    from penstock.plan.search import search
    from penstock.view.numbers import write_size

    options = Options(
        source=source,
        changes=tuple(changes or ()),
        devices=devices,
        memory=memory,
        gpu=gpu,
        cluster=cluster,
        profile=profile,
        tokens=tokens,
        accept_error=accept_error,
        ranks=ranks,
        microbatches=microbatches,
        forward=forward,
        backward=backward,
        comm=comm,
        stages=stages,
        slices=slices,
        granularity=granularity,
        weights=weights,
    )
    question = question_of(options, _measure_here)
    with progress("planning") as status:
        landscape = search(
            question.workload,
            question.pricing,
            question.limits,
            show_progress(status),
            lambda size: write_size(size, question.units, digits=4),
        )
    if landscape.interrupted:
        tell("stopped", "this is the best plan so far, not the end of the search")
    if output is not None:
        plan = chosen_plan(landscape, question.facts)
        write(output, dump_plan(plan), quiet=json)
    if page is not None:
        from penstock.view.landscape import render_landscape

        write(page, render_landscape(landscape, question), quiet=json)
    if json:
        print_json(_landscape_facts(landscape, question))
        return
    _print_landscape(landscape, question, top)


def _measure_here(source: Path | None, changes: tuple[str, ...]):  # noqa: ANN202
    raise NotImplementedError


def show_progress(status: Status | None) -> Callable[[Progress], None]:
    """Return a function that shows the progress of a search in a terminal."""

    def show(progress: Progress) -> None:
        if status is None:
            return
        text = f"planning: {progress.doing}"
        if progress.best < float("inf"):
            gap = ""
            if progress.bound:
                gap = f", at most {progress.best / progress.bound - 1:.1%} above the optimum"
            text += f" (best so far {progress.best:.4g}{gap})"
        status.update(text)

    return show


# ---------------------------------------------------------------- JSON
def _landscape_facts(landscape: Landscape, question: Question) -> dict[str, object]:
    workload = question.workload
    return {
        "devices": workload.devices,
        "memory": workload.memory,
        "lower_bound": landscape.bound,
        "gap": landscape.gap,
        "interrupted": landscape.interrupted,
        "schedules": [_row_facts(row) for row in landscape.rows],
        "cells": [
            {
                "copies": one.cell.copies,
                "ranks": one.cell.ranks,
                "tensor": one.cell.tensor,
                "shard": one.cell.shard,
                "microbatches": one.cell.microbatches,
                "rows": one.cell.rows,
                "recomputed": one.cell.recomputed,
                "lower_bound": one.bound,
                "step": one.best.step if one.best else None,
                "reason": one.reason,
            }
            for one in landscape.cells
        ],
        "too_large": [
            {"name": name, "peak": peak} for name, peak in landscape.too_large
        ],
    }


def _row_facts(row: Row) -> dict[str, object]:
    candidate = row.candidate
    cell = row.cell
    return {
        "name": candidate.name,
        "shape": dict(candidate.shape),
        "order": candidate.sort,
        "copies": cell.copies,
        "ranks": cell.ranks,
        "tensor": cell.tensor,
        "shard": cell.shard,
        "microbatches": cell.microbatches,
        "rows": cell.rows,
        "step": candidate.step,
        "makespan": candidate.makespan,
        "bubble": candidate.bubble,
        "peak": candidate.peak,
        "weights": candidate.weights,
        "order_bound": candidate.bound,
        "noisy_makespan": candidate.noisy,
        "cuts": list(candidate.schedule.microbatches[0].cuts),
        "partition": list(candidate.partition),
        "recompute": list(candidate.recompute),
    }


# ---------------------------------------------------------------- the table
def _print_landscape(landscape: Landscape, question: Question, top: int) -> None:
    from penstock.plan.candidates import title
    from penstock.view.numbers import size_scale, time_scale

    best = landscape.best.candidate
    times = time_scale(best.step, question.units)
    sizes = size_scale(best.peak, question.units)
    several = len({row.cell for row in landscape.rows}) > 1
    heads = ["", "schedule", "order", "step", "bubble", "peak", "±10%"]
    if several:
        heads.insert(1, "copies x ranks, micro-batches")
    rows = []
    for place, row in enumerate(landscape.rows[:top], start=1):
        candidate = row.candidate
        cells = [
            str(place),
            title(candidate.name, candidate.shape),
            candidate.sort,
            times.number(candidate.step),
            f"{candidate.bubble:.1%}",
            sizes.number(candidate.peak, 3),
            times.number(candidate.noisy),
        ]
        if several:
            cells.insert(1, row.cell.name)
        rows.append(cells)
    notes = _notes(landscape, question, top, times.unit, sizes.unit)
    print_table(heads, rows, "\n".join(notes), spare=("order", "±10%"))


def _notes(
    landscape: Landscape, question: Question, top: int, seconds: str, sizes: str
) -> list[str]:
    """Return the explanations under the table."""
    from penstock.view.numbers import write_size, write_time

    bound = write_time(landscape.bound, question.units, digits=4)
    notes = [
        f"bound: no plan of this space takes less than {bound}; "
        f"the best one is {landscape.gap:.1%} above it",
        f"the bound ignores {question.ignored}",
        "order: fixed is the same for any cost; split, listed and improved are adapted to this cost",
        "±10%: mean makespan of the best rows under random noise that no candidate was adapted to",
    ]
    if seconds:
        notes.append(
            f"times are in {seconds}; peak: what the fullest device holds, in {sizes}"
        )
    else:
        notes.append("peak: the activations of the fullest rank, in micro-batches")
    cuts = landscape.best.candidate.schedule.microbatches[0].cuts
    if len(cuts) > 2 and seconds:
        notes.append(f"tokens of the best plan's slices: {slice_lengths(cuts)}")
    hidden = len(landscape.rows) - top
    if hidden > 0:
        notes.append(f"{hidden} more candidates fit; --top shows more rows")
    if landscape.too_large:
        name, peak = landscape.too_large[0]
        limit = write_size(question.workload.memory or 0.0, question.units, 4)
        notes.append(
            f"{len(landscape.too_large)} candidates exceed the memory of {limit}; "
            f"the smallest of them is {name} ({write_size(peak, question.units, 4)})"
        )
    untried = ["skip (it leaves out work)"]
    if question.limits.weights < 2:
        untried.append("chimera (it needs two copies of the weights: --weights 2)")
    notes.append(f"not tried: {', '.join(untried)}")
    return notes


def slice_lengths(cuts: tuple[int, ...]) -> str:
    """Write the tokens of each slice; of many slices, only the first and the last.

    >>> slice_lengths((0, 384, 512)), slice_lengths(tuple(range(0, 90, 10)))
    ('384 128', '10 ... 10')
    """
    lengths = [str(end - begin) for begin, end in pairwise(cuts)]
    if len(lengths) > MAX_LENGTHS_SHOWN:
        lengths = [lengths[0], "...", lengths[-1]]
    return " ".join(lengths)
