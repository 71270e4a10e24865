"""Shows what a search for a plan found: its progress, a table with notes, JSON, and a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise, product
from math import inf, isfinite, nan

from penstock.cli.terminal import bar, console, print_table, progress
from penstock.ir.timeline import REAL_UNITS, Timeline, Units
from penstock.layout import Layout, write_layout
from penstock.plan.baseline import step_parts
from penstock.plan.candidates import ORDER_KINDS, Candidate, title
from penstock.plan.overview import (
    NOT_TRIED,
    Map,
    MapFinding,
    MapPlace,
    Rival,
    best_by_placement,
    divisions,
    divisions_by_placement,
    fastest_fixed,
    front,
    plain_1f1b,
    rivals,
)
from penstock.plan.planner import unused_settings
from penstock.plan.pricing import Question
from penstock.plan.search import CANNOT_WIN, Landscape, SearchProgress, row_title
from penstock.plan.space import skipped_share
from penstock.plan.workload import Division
from penstock.schedules.coverage import visits_all_parts
from penstock.view.chart import Dot, Front
from penstock.view.numbers import (
    FORWARDS,
    MICROBATCHES,
    count_of,
    name_size,
    name_time,
    rate_scale,
    size_scale,
    time_scale,
    write_range,
)
from penstock.view.palette import (
    framed,
)
from penstock.view.report import (
    CSS,
    PAGE_CSS,
    HeatCell,
    HeatMap,
    front_section,
    heading,
    heat_section,
    list_of,
    paragraphs,
    soft,
    table,
    timeline_section,
    titled,
    within,
)

NO_PIPELINE = "no pipeline"
MAX_LENGTHS_SHOWN = 4  # a row shows the lengths of at most this many slices


@contextmanager
def planning(
    seconds: float | None = None, units: Units = REAL_UNITS
) -> Iterator[Callable[[SearchProgress], None]]:
    """Show the progress of a search for a plan, and end it with the best so far after this long."""
    end = inf if seconds is None else time.monotonic() + seconds
    with progress("planning") as show_text:

        def show(found: SearchProgress) -> None:
            has_plan = found.best < inf
            text = f"planning {bar(found.share)}: {found.doing}"
            if has_plan:
                gap = ""
                if found.bound:
                    gap = f", optimality gap at most {found.best / found.bound - 1:.1%}"
                text += f" (best so far {name_time(found.best, units)}{gap})"
            show_text(text)
            if has_plan and time.monotonic() > end:
                raise KeyboardInterrupt

        yield show


@dataclass(frozen=True, slots=True)
class Yardstick:
    """A layout that the best plan is compared with: the baseline of the user, or FSDP."""

    name: str
    schedule: str  # as a row shows it
    layout: Layout
    candidate: Candidate


# ---------------------------------------------------------------- JSON
def landscape_facts(
    landscape: Landscape, question: Question, yardsticks: Sequence[Yardstick] = ()
) -> dict[str, object]:
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
        "schedules": [_row_facts(row, question) for row in landscape.candidates],
        "compared_with": [
            {"name": one.name, **_row_facts(one.candidate, question)}
            for one in yardsticks
        ],
        "cells": [
            {
                **_division_facts(one.division),
                "recomputed": one.division.recomputed,
                "lower_bound": one.bound,
                "step": one.best.step if one.best else None,
                "reason": one.reason,
            }
            for one in landscape.divisions
        ],
        "too_large": [
            {"name": name, "peak": peak} for name, peak in landscape.too_large
        ],
    }


def _division_facts(division: Division) -> dict[str, int]:
    return {
        "dp_replicate": division.copies,
        "dp_shard": division.shard,
        "tp": division.tensor,
        "pp": division.ranks,
        "microbatches": division.microbatches,
        "rows": division.rows,
    }


def layout_of(candidate: Candidate) -> str:
    """Write the layout of a candidate, as --baseline takes it."""
    division = candidate.division
    recompute = {0.0: "none", 1.0: "full"}.get(division.recomputed, "some")
    name = title(candidate.name, candidate.shape)
    return write_layout(
        Layout(
            division.copies,
            division.shard,
            division.tensor,
            division.ranks,
            division.microbatches,
            recompute,
            name,
        )
    )


def _row_facts(candidate: Candidate, question: Question) -> dict[str, object]:
    return {
        "schedule": title(candidate.name, candidate.shape),
        "layout": layout_of(candidate),
        "order": ORDERS[candidate.order_kind],
        **_division_facts(candidate.division),
        "step": candidate.step,
        "range": question.range_of(candidate.step),
        "tokens_per_second_per_gpu": question.speed_of(candidate.step) or None,
        "mfu": question.mfu_of(candidate.step),
        "makespan": candidate.makespan,
        "bubble": candidate.bubble,
        "peak": candidate.peak,
        "weights": candidate.weights,
        "order_bound": candidate.bound,
        "noisy_step": finite_or_none(candidate.noisy),
        "cuts": candidate.schedule.microbatches[0].cuts,
        "partition": candidate.partition,
        "recompute": candidate.recompute,
        "skipped_share": skipped_share(candidate.schedule, candidate.partition),
    }


def finite_or_none(number: float) -> float | None:
    """Return a number as JSON can store it: null if it is infinite or was not computed."""
    return number if isfinite(number) else None


# ---------------------------------------------------------------- the table
class PlanTable:
    """The rows of a table of plans, with common units."""

    def __init__(
        self,
        landscape: Landscape,
        question: Question,
        top: int,
        yardsticks: Sequence[Yardstick] = (),
    ) -> None:
        best = landscape.best
        self.landscape = landscape
        self.question = question
        self.times = time_scale(best.step, question.units)
        self.sizes = size_scale(best.peak, question.units)
        self.rows = self.distinct(top)
        self.yardsticks = yardsticks
        shown = [*self.rows, *(one.candidate for one in yardsticks)]
        divisions = [one.division for one in shown]
        self.has_model = bool(question.speed_of(best.step))
        self.several = len(landscape.divisions) > 1 or self.has_model
        self.shards = any(one.shard > 1 for one in divisions)
        self.recomputes = any(one.recomputed for one in divisions)
        self.near = any(one.side_by_side for one in divisions)

    def distinct(self, top: int) -> list[Candidate]:
        """Return the best rows. Those that differ in nothing that is shown are one, under its published name."""
        found: dict[object, Candidate] = {}
        for row in self.landscape.candidates:
            division = replace(row.division, side_by_side=False)
            peak = self.sizes.number(row.peak, 3)
            shown = (division, self.times.number(row.step), peak)
            known = found.get(shown)
            if known is None and len(found) == top:
                break
            if known is None or _published(row) < _published(known):
                found[shown] = row
        return list(found.values())

    @property
    def heads(self) -> list[str]:
        """The heads of the columns."""
        heads = ["", "schedule"]
        if self.several:
            heads += ["dp", *["fsdp"] * self.shards, "pp", "tp", "mb"]
            heads += ["re"] * self.recomputes
        heads.append(f"step {self.times.unit or 'F'}")
        if self.has_model:
            heads += ["tok/s per GPU", *["MFU %"] * (self.question.peak_flops > 0)]
        else:
            heads.append("bubble %")
        return [*heads, f"{self.sizes.unit or 'mb'} per GPU", "gap %"]

    def lines(self) -> list[list[str]]:
        """The cells of all rows."""
        plans = [
            self.cells(str(place), _schedule_name(row), row)
            for place, row in enumerate(self.rows, start=1)
        ]
        others = [
            self.cells("-", one.schedule, one.candidate) for one in self.yardsticks
        ]
        return plans + others

    def cells(self, label: str, schedule: str, row: Candidate) -> list[str]:
        """A row of the table."""
        division, question = row.division, self.question
        cells = [label, schedule]
        if self.several:
            cells += [f"{division.copies}{'*' * division.side_by_side}"]
            cells += [str(division.shard)] * self.shards
            cells += [str(division.ranks), str(division.tensor)]
            cells.append(str(division.microbatches))
            again = f"{division.recomputed:.0%}" if division.recomputed else "-"
            cells += [again] * self.recomputes
        cells.append(self.times.number(row.step))
        if self.has_model:
            cells.append(f"{question.speed_of(row.step):,.0f}")
            mfu = question.mfu_of(row.step)
            cells += [] if mfu is None else [f"{100 * mfu:.1f}"]
        else:
            cells.append(f"{100 * row.bubble:.1f}")
        gap = row.step / self.landscape.bound - 1 if self.landscape.bound else nan
        return [
            *cells,
            self.sizes.number(row.peak, 3),
            f"{100 * gap:.1f}" if isfinite(gap) else "-",
        ]

    def column_notes(self) -> list[str]:
        """Explain the columns."""
        kinds = {row.order_kind for row in self.rows}
        notes = {
            "dp: dp_replicate; pp, tp: pipeline and tensor parallelism; mb: micro-batches of a step and "
            "pipeline": self.several,
            "fsdp: dp_shard, the devices that share the weights of a rank": self.shards,
            "re: share of the parts that are computed again in the backward": self.recomputes,
            "*: rank order with dp innermost; otherwise pp is innermost": self.near,
            "list-scheduled: ordered action by action for these costs; -o writes the order as "
            "plan.json": "listed" in kinds,
            "split: weight gradients are moved to where ranks would idle": "split"
            in kinds,
        }
        return [text for text, is_there in notes.items() if is_there]


def _schedule_name(candidate: Candidate) -> str:
    alone = candidate.division.ranks == 1 and len(candidate.schedule.stages) == 1
    return NO_PIPELINE if alone else title(candidate.name, candidate.shape)


def _published(candidate: Candidate) -> int:
    return ORDER_KINDS.index(candidate.order_kind)


def print_landscape(
    landscape: Landscape,
    question: Question,
    top: int,
    yardsticks: Sequence[Yardstick] = (),
    about: str = "",
) -> None:
    """Print the best rows of a search, what the columns mean, and how the best plan compares with a yardstick."""
    screen = console()
    for line in filter(None, (f"planned {question.basis}", about)):
        screen.print(line, highlight=False, markup=False)
    table = PlanTable(landscape, question, top, yardsticks)
    notes = [*table.column_notes(), *_notes(landscape, question, top)]
    print_table(
        table.heads,
        table.lines(),
        "\n".join(notes),
        spare=("gap %", "MFU %", table.heads[-4 + (not table.has_model)], "mb"),
    )
    print_comparison(landscape, question, yardsticks)


def print_comparison(
    landscape: Landscape, question: Question, yardsticks: Sequence[Yardstick]
) -> None:
    """Compare the best plan with the last of the yardsticks, if there is one."""
    for one in yardsticks[-1:]:
        text = compare_with(landscape.best, one, question)
        console().print(text, highlight=False, markup=False)


def compare_with(best: Candidate, other: Yardstick, question: Question) -> str:
    """Say by how much the best plan beats a layout, and which part of the step shrinks."""
    rival = other.candidate
    layout = f"{other.name} ({write_layout(other.layout)})"
    too_large = not question.pricing.evaluator(rival.division).fits(rival.peak)
    unfit = ""
    if too_large:
        needed = name_size(rival.peak, question.units, 3)
        unfit = f"; {other.name} does not fit: it needs {needed}"
    saved = 1 - best.step / rival.step
    if saved < SAME_TIME:
        how = (
            "takes as long as"
            if saved > -SAME_TIME
            else f"takes {-saved:.1%} longer than"
        )
        return f"plan 1 {how} {layout}{unfit}"
    what, before, now = step_parts(best, question).largest_saving(
        step_parts(rival, question)
    )
    units = question.units
    why = f"{what} takes {name_time(now, units, 3)} instead of {name_time(before, units, 3)}"
    return f"plan 1 takes {saved:.1%} less time than {layout}: {why}{unfit}"


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


def _notes(landscape: Landscape, question: Question, top: int) -> list[str]:
    """Return the explanations under the table."""
    bound = name_time(landscape.bound, question.units, digits=4)
    gap = ""
    if isfinite(landscape.gap):
        gap = f"; optimality gap of plan 1: {landscape.gap:.1%}"
    notes = [
        f"bound: no plan of this space takes less than {bound}{gap}",
        f"the bound ignores {question.ignored}",
        *([f"times: {question.source}"] if question.units.seconds else []),
        *describe_range(question, landscape.best.step),
    ]
    seconds = question.units.seconds
    if question.analytic:
        notes.append(
            "for measured times: penstock profile MODEL -o profile.json on one such GPU, then --cost profile.json"
        )
    noisy = landscape.best.noisy
    if isfinite(noisy) and noisy >= landscape.best.step:
        text = name_time(noisy, question.units, 4)
        notes.append(f"step of plan 1 with 10% noise: {text}")
    cuts = landscape.best.schedule.microbatches[0].cuts
    if len(cuts) > 2 and seconds:
        notes.append(f"tokens of the best plan's slices: {slice_lengths(cuts)}")
    hidden = len(landscape.candidates) - top
    if hidden > 0:
        fitting = count_of(hidden, "more candidate fits", "more candidates fit")
        notes.append(f"{fitting}; --top shows more rows")
    if landscape.too_large:
        name, peak = landscape.too_large[0]
        count = len(landscape.too_large)
        exceeding = count_of(count, "candidate exceeds", "candidates exceed")
        limit = name_size(question.workload.memory or 0.0, question.units, 4)
        notes.append(
            f"{exceeding} the memory of {limit}; "
            f"the smallest of them is {name} ({name_size(peak, question.units, 4)})"
        )
    if landscape.left_out:
        which = count_of(landscape.left_out, "layout", "layouts")
        they_were = "it was" if landscape.left_out == 1 else "they were"
        notes.append(
            f"{which} could have a faster plan, "
            f"but the search reached its limit before {they_were} tried"
        )
    if question.limits.skip:
        notes.append(
            f"skips: each micro-batch leaves out this many parts, at most {question.limits.skip:.0%} "
            "of the layers; this changes what is computed"
        )
        whole = [r for r in landscape.candidates if visits_all_parts(r.schedule)]
        if whole:
            step = name_time(whole[0].step, question.units, digits=4)
            notes.append(
                f"the best plan that leaves out nothing is {row_title(whole[0], landscape)}: {step}"
            )
    else:
        notes.append("not tried: skip (it leaves out work: --skip 0.25)")
    if question.limits.weights < 2:
        notes.append(
            "not tried: chimera (two copies of the weights: --limit weights=2)"
        )
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


# ---------------------------------------------------------------- the page
MAX_TABLE_ROWS = 20
MAX_ROOMY_RANKS = 10  # maps with more columns have cells of one line
MAX_COLOURED_TIME = 2.5  # times the best; slower plans all have the palest colour
SAME_TIME = 0.0005  # differences below this share count as none
# The groups of the figure of time over memory: kinds of orders.
ORDERS = {
    "listed": "list-scheduled",
    "split": "published order, split backward",
    "fixed": "published order",
}
ANALYTIC = (
    "The profile is analytic: a formula for the device gave the times and sizes, and "
    "nothing was measured. Measure the model on the device before you rely on small differences."
)


class LandscapePage:
    """The page of a search: its texts, with common units, and its HTML."""

    def __init__(self, landscape: Landscape, question: Question) -> None:
        best = landscape.best
        units = question.units
        workload = question.workload
        self.landscape = landscape
        self.question = question
        self.best = best
        self.has_bound = landscape.bound > 0 and isfinite(landscape.gap)
        # The tokens of a step; 0 if a step is not in seconds.
        self.tokens = workload.tokens * workload.batch * units.seconds
        # The units of all numbers in tables and figures.
        self.times = time_scale(best.step, units)
        self.sizes = size_scale(best.peak, units)
        self.rates = rate_scale(self.tokens / best.step)
        self.time_unit = self.times.unit or FORWARDS[1]
        self.size_unit = self.sizes.unit or MICROBATCHES[1]

    def html(self) -> str:
        """Return the text of the page, without its empty sections."""
        title = f"Plan: {self.title(self.landscape.best)}"
        warning = [ANALYTIC] if self.question.analytic else []
        hidden = len(self.landscape.candidates) - MAX_TABLE_ROWS
        more = f"{hidden:,} more plans fit" if hidden > 0 else ""
        grid = PlanTable(self.landscape, self.question, MAX_TABLE_ROWS)
        notes = ". ".join([*grid.column_notes(), more])
        best = table(grid.heads, grid.lines()) + soft(notes)
        heads = ("layout or schedule", "bound of a step", "reason")
        misfits = table(heads, list(self.misfits()))
        if misfits:
            summary = f"<summary>{escape(self.misfit_title())}</summary>"
            misfits = f'<details class="card" id="misfits">{summary}{misfits}</details>'
        body = [
            heading(title, self.facts()),
            within("div", paragraphs(warning), "warning"),
            within("div", paragraphs(self.sentences()), "card"),
            titled("Why it won", within("div", list_of(self.reasons()), "card")),
            *heat_section(self.heat_maps(), self.heat_sentence()),
            *front_section(self.front(), self.front_table()),
            *timeline_section(self.timelines()),
            titled("The best plans", within("div", best, "card best")),
            titled("What has no plan", misfits),
        ]
        return framed(title, CSS + PAGE_CSS, "\n".join(filter(None, body)))

    # ------------------------------------------------------------ numbers and names
    def time(self, seconds: float) -> str:
        """Write a time."""
        return name_time(seconds, self.question.units)

    def size(self, size: float) -> str:
        """Write a size; in the units of the papers, in micro-batches."""
        return name_size(size, self.question.units)

    def title(self, row: Candidate) -> str:
        """Name a plan, with its cell if there are several."""
        return row_title(row, self.landscape)

    # ------------------------------------------------------------ what won
    def facts(self) -> list[tuple[str, str]]:
        """Return the numbers at the top."""
        landscape = self.landscape
        speed = bound = gap = ""
        if self.tokens:
            speed = self.rates.quantity(self.tokens / self.best.step)
        if self.has_bound:
            bound = self.time(landscape.bound)
            gap = f"{landscape.gap:.1%}"
        divisions = len(landscape.divisions)
        return [
            ("step", self.time(self.best.step)),
            ("speed", speed),
            ("bubble", f"{self.best.bubble:.1%}"),
            ("peak memory per GPU", self.size(self.best.peak)),
            ("lower bound", bound),
            ("optimality gap", gap),
            ("plans compared", f"{len(landscape.candidates):,}"),
            ("layouts", f"{divisions:,}" if divisions > 1 else ""),
        ]

    def sentences(self) -> Iterator[str]:
        """Say what won, how good it is, and where the times come from."""
        best = self.best
        memory = self.question.workload.memory
        speed = ""
        if self.tokens:
            speed = f", {self.rates.quantity(self.tokens / best.step)}"
        limit = "" if memory is None else f", with a limit of {self.size(memory)}"
        yield (
            f"The fastest plan is {self.title(self.landscape.best)}. It was planned "
            f"{self.question.basis}. Its step is predicted to take "
            f"{self.time(best.step)}{speed}. Its ranks idle {best.bubble:.1%} of the "
            f"time, and the peak memory per GPU is {self.size(best.peak)}{limit}."
        )
        bound = self.time(self.landscape.bound)
        least = f"No plan of the whole space takes less than {bound}, "
        if not self.has_bound:
            yield "There is no bound for this space, so no gap is known."
        elif self.landscape.gap < SAME_TIME:
            yield f"{least}so this one is optimal."
        else:
            yield (
                f"{least}so the optimality gap is at most {self.landscape.gap:.1%}. "
                f"The bound ignores {self.question.ignored}, so the optimum may be closer."
            )
        cuts = best.schedule.microbatches[0].cuts
        if len(cuts) > 2 and self.tokens:
            yield f"Tokens of its slices: {slice_lengths(cuts)}."
        if best.partition:
            yield f"Layers of its parts: {' '.join(map(str, best.partition))}."
        skipped = skipped_share(best.schedule, best.partition)
        if skipped:
            yield (
                f"Each micro-batch leaves out up to {skipped:.1%} of the layers, which "
                "changes what is computed: gradients are those of shortened models."
            )
        if best.recompute:
            parts = " ".join(map(str, best.recompute))
            yield f"Parts that are computed again in the backward: {parts}."
        runtime = self.question.limits.runtime
        if runtime is not None:
            yield (
                f"The plan is for {runtime.name}: the search left out what it cannot run, and "
                "timed every plan as its runtime sends messages."
            )
        if self.question.source:
            yield f"Where the times come from: {self.question.source}."
        for line in describe_range(self.question, best.step):
            yield f"{line[0].upper()}{line[1:]}."
        if self.landscape.interrupted:
            yield "The search was stopped early. This is the best plan so far."

    def reasons(self) -> list[str]:
        """Compare the best plan with the best one of every other kind."""
        return [self.reason(rival) for rival in rivals(self.landscape)]

    def reason(self, rival: Rival) -> str:
        """Compare the best plan with the best one of another kind."""
        other = rival.candidate
        excess = rival.excess(self.landscape)
        verdict = "the same time"
        if abs(excess) >= SAME_TIME:
            verdict = f"{abs(excess):.1%} {'more' if excess > 0 else 'less'}"
        sentence = (
            f"The best plan {_join(rival.kinds)} is {self.title(rival.candidate)}: its step takes "
            f"{self.time(other.step)}, {verdict}, with a bubble of {other.bubble:.1%} "
            f"and a peak of {self.size(other.peak)} per GPU."
        )
        if excess < SAME_TIME and self.best.noisy < other.noisy:
            sentence += (
                f" If all times vary by a tenth, its step takes {self.time(other.noisy)}, "
                f"and that of the chosen plan {self.time(self.best.noisy)}."
            )
        return sentence

    # ------------------------------------------------------------ heat maps
    def heat_sentence(self) -> str:
        """Explain the numbers of the maps."""
        what = f"Time of a step of the best plan in each place, in {self.time_unit}."
        if self.tokens:
            what = f"Speed of the best plan in each place, in {self.rates.unit}."
        if len(self.landscape.divisions) > 1:
            what += " A second line in a cell: micro-batches x sequences of each."
        return what

    def heat_maps(self) -> list[HeatMap]:
        """Return the maps: over copies and ranks if there are several, and over placements."""
        everything = divisions(self.landscape, self.question.pricing)
        found = best_by_placement(self.landscape)
        rows = [
            *found.values(),
            *(one.candidate for one in everything.values() if one.candidate),
        ]
        slowest = max(row.step for row in rows)
        title = "Stages of a rank and slices of a sequence"
        if len(everything) == 1:
            return [self.placement_map(title, found, slowest)]
        cell = self.landscape.best.division
        title += f", dp={cell.copies} pp={cell.ranks}"
        maps = [
            self.division_map("The best of all placements", everything, slowest),
            self.placement_map(title, found, slowest),
        ]
        by_placement = divisions_by_placement(self.landscape, everything)
        for name, places in by_placement.items():
            shown = _without_empty_lines(places)
            small = self.division_map(f"{name} on each rank", shown, slowest)
            maps.append(replace(small, roomy=False))
        return maps

    def division_map(self, name: str, places: Map, slowest: float) -> HeatMap:
        """Return a map over copies and ranks."""
        drawn = {key: self.place(place, slowest) for key, place in places.items()}
        copies = {count: f"dp={count}" for count in sorted({key[0] for key in places})}
        ranks = {count: f"pp={count}" for count in sorted({key[1] for key in places})}
        is_roomy = len(ranks) <= MAX_ROOMY_RANKS
        return HeatMap(
            name,
            "data parallel (dp), pipeline parallel (pp)",
            drawn,
            copies,
            ranks,
            is_roomy,
        )

    def placement_map(
        self, name: str, found: dict[tuple[str, int], Candidate], slowest: float
    ) -> HeatMap:
        """Return a map over placements and slices of the chosen division."""
        placements = {placement: placement for placement, _ in found}
        counts = sorted({count for _, count in found})
        slices = {count: count_of(count, "slice", "slices") for count in counts}
        drawn = {}
        for key in product(placements, slices):
            row = found.get(key)
            finding = MapFinding.FOUND if row else MapFinding.OPEN
            place = MapPlace(finding, row, reason=NOT_TRIED)
            drawn[key] = self.place(place, slowest)
        return HeatMap(name, "stages of a rank, slices", drawn, placements, slices)

    def place(self, place: MapPlace, slowest: float) -> HeatCell:
        """Return a place as a map shows it; `slowest` is the step of the slowest plan of all maps."""
        if place.candidate is not None:
            candidate = place.candidate
            note = candidate.division.batch_text
            if len(self.landscape.divisions) == 1:
                note = f"bubble {candidate.bubble:.1%}"
            level = _colour_level(candidate.step, self.best.step, slowest)
            text = self.merit(candidate.step)
            tip = self.tip(candidate)
            chosen = candidate is self.best
            return HeatCell("value", text, note, tip, level, chosen)
        if place.finding is MapFinding.TOO_SLOW:
            tip = f"cannot win: no plan takes less than {self.time(place.bound)}"
            return HeatCell("slow", self.merit(place.bound), "at best", tip)
        if place.finding is MapFinding.TOO_LARGE:
            short = place.reason.split(" (")[0].split(":")[0]
            return HeatCell("large", "✕", short, place.reason)
        return HeatCell("open", "-", "", place.reason)

    def merit(self, step: float) -> str:
        """Write the speed of a step, or its time if the tokens are unknown."""
        if self.tokens:
            return self.rates.number(self.tokens / step)
        return self.times.number(step)

    def tip(self, row: Candidate) -> str:
        """Describe a plan in a tooltip."""
        candidate = row
        return (
            f"{title(candidate.name, candidate.shape)} ({ORDERS[candidate.order_kind]}) on "
            f"{row.division.name}: step {self.time(candidate.step)}, bubble "
            f"{candidate.bubble:.1%}, peak {self.size(candidate.peak)}"
        )

    # ------------------------------------------------------------ the front
    def front(self) -> Front:
        """Return the figure of time over memory."""
        on_front = front(self.landscape.candidates)
        places = {id(row): place for place, row in enumerate(on_front, start=1)}
        labels = {id(row): label for label, row in reversed(self.shown_rows())}
        groups = list(ORDERS)
        dots = [
            Dot(
                row.peak,
                row.step,
                self.tip(row),
                groups.index(row.order_kind),
                places.get(id(row), 0),
                labels.get(id(row), ""),
                row is self.landscape.best,
            )
            for row in self.landscape.candidates
        ]
        return Front(
            tuple(dots),
            tuple(ORDERS.values()),
            self.sizes,
            self.times,
            f"peak memory per GPU, in {self.size_unit}",
            f"step, in {self.time_unit}",
            self.question.workload.memory,
        )

    def front_table(self) -> str:
        """Return the table of the front, numbered as in the figure."""
        heads = ("", "plan", f"peak, {self.size_unit}", f"step, {self.time_unit}")
        rows = [
            (
                str(place),
                self.title(row),
                self.sizes.number(row.peak, 3),
                self.times.number(row.step),
            )
            for place, row in enumerate(front(self.landscape.candidates), start=1)
        ]
        note = "The front: no other plan is better in both. The numbers are those in the figure."
        return soft(note) + table(heads, rows)

    # ------------------------------------------------------------ timelines
    def shown_rows(self) -> list[tuple[str, Candidate]]:
        """Return the plans whose timelines are drawn, with their roles."""
        roles = [
            ("chosen", self.landscape.best),
            ("best published order", fastest_fixed(self.landscape)),
            ("1F1B", plain_1f1b(self.landscape)),
        ]
        shown: list[tuple[str, Candidate]] = []
        for role, row in roles:
            if row is not None and all(row is not other for _, other in shown):
                shown.append((role, row))
        return shown

    def timelines(self) -> list[tuple[str, Timeline]]:
        """Return the timelines of the chosen plan, the best published order and 1F1B."""
        drawn = []
        for role, row in self.shown_rows():
            evaluator = self.question.pricing.evaluator(row.division)
            timeline = evaluator.timeline(row.schedule)
            name = f"{role}: {self.title(row)}"
            copies = timeline.schedule.ranks // row.schedule.ranks
            if 1 < copies < row.division.copies:
                name += f"; {copies} of dp={row.division.copies} are drawn"
            drawn.append((name, timeline))
        return drawn

    # ------------------------------------------------------------ what does not fit
    def misfit_title(self) -> str:
        """Say how many cells and schedules do not fit."""
        reasons = [one.reason for one in self.landscape.divisions if one.reason]
        late = reasons.count(CANNOT_WIN)
        kinds = (
            (len(reasons) - late, "layout", "without a plan"),
            (late, "layout", "that cannot win"),
            (len(self.landscape.too_large), "schedule", "above the memory of a device"),
        )
        parts = [
            f"{count_of(f'{number:,}', noun, f'{noun}s')} {what}"
            for number, noun, what in kinds
            if number
        ]
        return _join(parts)

    def misfits(self) -> Iterator[tuple[str, str, str]]:
        """Yield the divisions and schedules that have no plan, with the reasons."""
        for one in self.landscape.divisions:
            if one.reason:
                bound = self.time(one.bound) if one.bound else ""
                yield one.division.name, bound, one.reason
        for name, peak in self.landscape.too_large:
            yield name, "", f"needs {self.size(peak)}"


def _colour_level(step: float, best: float, slowest: float) -> float:
    """Return 0 for the slowest and 1 for the fastest plans. Speeds, not times, are spaced evenly."""
    lowest_speed = 1 / min(slowest, MAX_COLOURED_TIME * best)
    speeds = 1 / best - lowest_speed
    if speeds <= 0:
        return 1.0
    return min(1.0, max(0.0, (1 / step - lowest_speed) / speeds))


def _without_empty_lines(places: Map) -> Map:
    """Leave out the copies and the ranks for which nothing was found."""
    found = [key for key, place in places.items() if place.candidate is not None]
    copies = {key[0] for key in found}
    ranks = {key[1] for key in found}
    return {
        key: place
        for key, place in places.items()
        if key[0] in copies and key[1] in ranks
    }


def _join(words: tuple[str, ...] | list[str]) -> str:
    """Join words in a sentence.

    >>> _join(["a", "b", "c"])
    'a, b and c'
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
