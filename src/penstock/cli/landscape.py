"""Shows what a search for a plan found: its progress, a table with notes, and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import pairwise

from rich.status import Status

from penstock.cli.tables import console, print_table
from penstock.plan.candidates import title
from penstock.plan.planner import unused_settings
from penstock.plan.pricing import Question
from penstock.plan.search import Landscape, Row, SearchProgress, row_title
from penstock.plan.space import skipped_share
from penstock.plan.workload import Cell
from penstock.schedules.coverage import visits_all_parts
from penstock.view.numbers import (
    name_size,
    name_time,
    size_scale,
    time_scale,
    write_range,
)

MAX_LENGTHS_SHOWN = 4  # a row shows the lengths of at most this many slices


def show_progress(status: Status | None) -> Callable[[SearchProgress], None]:
    """Return a function that shows the progress of a search in a terminal."""

    def show(progress: SearchProgress) -> None:
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
def landscape_facts(landscape: Landscape, question: Question) -> dict[str, object]:
    """Return everything that a search found, as JSON shows it."""
    workload = question.workload
    return {
        "devices": workload.devices,
        "memory": workload.memory,
        "basis": question.basis,
        "lower_bound": landscape.bound,
        "gap": finite_or_none(landscape.gap),
        "interrupted": landscape.interrupted,
        "left_out": landscape.left_out,
        "schedules": [_row_facts(row, question) for row in landscape.rows],
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


def _row_facts(row: Row, question: Question) -> dict[str, object]:
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
        "range": question.range_of(candidate.step),
        "makespan": candidate.makespan,
        "bubble": candidate.bubble,
        "peak": candidate.peak,
        "weights": candidate.weights,
        "order_bound": candidate.bound,
        "noisy_step": finite_or_none(candidate.noisy),
        "cuts": list(candidate.schedule.microbatches[0].cuts),
        "partition": list(candidate.partition),
        "recompute": list(candidate.recompute),
        "skipped_share": skipped_share(candidate.schedule, candidate.partition),
    }


def finite_or_none(number: float) -> float | None:
    """Return a number as JSON can store it: null if it is infinite or was not computed."""
    return number if math.isfinite(number) else None


# ---------------------------------------------------------------- the table
def print_landscape(landscape: Landscape, question: Question, top: int) -> None:
    """Print the best rows of a search, and what the columns mean."""
    console().print(f"planned {question.basis}", highlight=False, markup=False)
    best = landscape.best.candidate
    times = time_scale(best.step, question.units)
    sizes = size_scale(best.peak, question.units)
    several = len(landscape.cells) > 1
    heads = ["", "schedule", "order", "step", "bubble", "peak", "±10%"]
    if several:
        heads[1:1] = ["copies x ranks", "batch"]
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
            "-" if math.isnan(candidate.noisy) else times.number(candidate.noisy),
        ]
        if several:
            cells[1:1] = [row.cell.devices_text, row.cell.batch_text]
        rows.append(cells)
    notes = _notes(landscape, question, top, times.unit, sizes.unit)
    if several:
        shown = {row.cell for row in landscape.rows[:top]}
        notes[:0] = _cell_notes(shown)
    print_table(heads, rows, "\n".join(notes), spare=("±10%", "order", "bubble"))


def _cell_notes(cells: Collection[Cell]) -> list[str]:
    """Explain the words with which the cells of a table are written."""
    notes = ["batch: micro-batches x sequences of each, for one copy"]
    if any(cell.tensor > 1 or cell.shard > 1 for cell in cells):
        notes.append(
            "t2 divides each layer between two devices (tensor), s2 its weights (shard)"
        )
    if any(cell.recomputed for cell in cells):
        notes.append("re50%: half of the parts are computed again in the backward")
    if any(cell.side_by_side for cell in cells):
        notes.append(
            "near: the copies of a rank are neighbours, not the ranks of a copy"
        )
    return notes


def note_unused(question: Question) -> list[str]:
    """Return a note if the config names a schedule or a shape, which a search does not use."""
    config = question.workload.config
    unused = [] if config is None else unused_settings(config.schedule)
    if not unused:
        return []
    return [
        f"not used: {', '.join(unused)}; this command searches among all schedules, and "
        "`penstock train --dry-run` predicts a step of the one that a config names"
    ]


def _notes(
    landscape: Landscape, question: Question, top: int, seconds: str, sizes: str
) -> list[str]:
    """Return the explanations under the table."""

    def visits_all(row: Row) -> bool:
        return visits_all_parts(row.candidate.schedule)

    bound = name_time(landscape.bound, question.units, digits=4)
    gap = ""
    if math.isfinite(landscape.gap):
        gap = f"; the best one is {landscape.gap:.1%} above it"
    notes = [
        f"bound: no plan of this space takes less than {bound}{gap}",
        f"the bound ignores {question.ignored}",
        f"times: {question.source}",
        *describe_range(question, landscape.best.candidate.step),
        "order: fixed is the same for any cost; split and listed ones are adapted to this cost",
        "±10%: mean step of the best rows under random noise that no candidate was adapted to",
    ]
    if seconds:
        notes.append(
            f"times are in {seconds}; peak: what the fullest device holds, in {sizes}"
        )
    else:
        notes.append(
            "times are in forwards of a micro-batch on a rank; peak: the activations of the "
            "fullest rank, in micro-batches"
        )
    cuts = landscape.best.candidate.schedule.microbatches[0].cuts
    if len(cuts) > 2 and seconds:
        notes.append(f"tokens of the best plan's slices: {slice_lengths(cuts)}")
    hidden = len(landscape.rows) - top
    if hidden > 0:
        fitting = "candidate fits" if hidden == 1 else "candidates fit"
        notes.append(f"{hidden} more {fitting}; --top shows more rows")
    if landscape.too_large:
        name, peak = landscape.too_large[0]
        count = len(landscape.too_large)
        exceeding = (
            "1 candidate exceeds" if count == 1 else f"{count} candidates exceed"
        )
        limit = name_size(question.workload.memory or 0.0, question.units, 4)
        notes.append(
            f"{exceeding} the memory of {limit}; "
            f"the smallest of them is {name} ({name_size(peak, question.units, 4)})"
        )
    if landscape.left_out:
        count = landscape.left_out
        which = "1 division" if count == 1 else f"{count} divisions"
        notes.append(
            f"{which} of the devices and the batch could have a faster plan, "
            f"but the search reached its limit before {'it was' if count == 1 else 'they were'} tried"
        )
    untried = []
    if question.limits.skip:
        notes.append(
            f"skips: each micro-batch leaves out this many parts, at most {question.limits.skip:.0%} "
            "of the layers; this changes what is computed"
        )
        whole = next((r for r in landscape.rows if visits_all(r)), None)
        if whole is not None:
            step = name_time(whole.candidate.step, question.units, digits=4)
            notes.append(
                f"the best plan that leaves out nothing is {row_title(whole, landscape)}: {step}"
            )
    else:
        untried.append("skip (it leaves out work: --skip 0.25)")
    if question.limits.weights < 2:
        untried.append("chimera (it needs two copies of the weights: --weights 2)")
    if untried:
        notes.append(f"not tried: {', '.join(untried)}")
    return [*notes, *note_unused(question)]


def describe_range(question: Question, step: float) -> list[str]:
    """Return a line with the times between which a step may lie, and why; no line in units of the papers."""
    between = question.range_of(step)
    if question.spread is None or between is None:
        return []
    low, high = (f"{share - 1:+z.0%}" for share in question.spread)
    reason = "measured times vary from"
    if question.analytic:
        reason = "measured times differ from this formula by"
    return [f"{reason} {low} to {high}, so the step takes {write_range(*between)}"]


def slice_lengths(cuts: tuple[int, ...]) -> str:
    """Write the tokens of each slice; of many slices, only the first and the last.

    >>> slice_lengths((0, 384, 512)), slice_lengths(tuple(range(0, 90, 10)))
    ('384 128', '10 ... 10')
    """
    lengths = [str(end - begin) for begin, end in pairwise(cuts)]
    if len(lengths) > MAX_LENGTHS_SHOWN:
        lengths = [lengths[0], "...", lengths[-1]]
    return " ".join(lengths)
