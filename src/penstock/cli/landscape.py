"""Shows what a search for a plan found: its progress, a table with notes, JSON, and a page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from itertools import pairwise, product
from math import isfinite, isnan

from penstock.cli.terminal import (
    console,
    print_table,
    progress,
)
from penstock.ir.timeline import Timeline
from penstock.plan.candidates import Candidate, title
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

MAX_LENGTHS_SHOWN = 4  # a row shows the lengths of at most this many slices


@contextmanager
def planning() -> Iterator[Callable[[SearchProgress], None]]:
    """Show the progress of a search for a plan."""
    with progress("planning") as show_text:

        def show(found: SearchProgress) -> None:
            text = f"planning: {found.doing}"
            if found.best < float("inf"):
                gap = ""
                if found.bound:
                    gap = f", at most {found.best / found.bound - 1:.1%} above the optimum"
                text += f" (best so far {found.best:.4g}{gap})"
            show_text(text)

        yield show


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
        "schedules": [_row_facts(row, question) for row in landscape.candidates],
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
    words = ("copies", "ranks", "tensor", "shard", "microbatches", "rows")
    return {word: getattr(division, word) for word in words}


def _row_facts(candidate: Candidate, question: Question) -> dict[str, object]:
    return {
        "name": candidate.name,
        "shape": dict(candidate.shape),
        "order": candidate.order_kind,
        **_division_facts(candidate.division),
        "step": candidate.step,
        "range": question.range_of(candidate.step),
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
def print_landscape(landscape: Landscape, question: Question, top: int) -> None:
    """Print the best rows of a search, and what the columns mean."""
    console().print(f"planned {question.basis}", highlight=False, markup=False)
    best = landscape.best
    times = time_scale(best.step, question.units)
    sizes = size_scale(best.peak, question.units)
    several = len(landscape.divisions) > 1
    heads = ["", "schedule", "order", "step", "bubble", "peak", "±10%"]
    if several:
        heads[1:1] = ["copies x ranks", "batch"]
    rows = []
    for place, row in enumerate(landscape.candidates[:top], start=1):
        candidate = row
        cells = [
            str(place),
            title(candidate.name, candidate.shape),
            candidate.order_kind,
            times.number(candidate.step),
            f"{candidate.bubble:.1%}",
            sizes.number(candidate.peak, 3),
            "-" if isnan(candidate.noisy) else times.number(candidate.noisy),
        ]
        if several:
            cells[1:1] = [row.division.devices_text, row.division.batch_text]
        rows.append(cells)
    notes = _notes(landscape, question, top, times.unit, sizes.unit)
    if several:
        shown = {row.division for row in landscape.candidates[:top]}
        notes[:0] = _cell_notes(shown)
    print_table(heads, rows, "\n".join(notes), spare=("±10%", "order", "bubble"))


def _cell_notes(cells: Collection[Division]) -> list[str]:
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
    bound = name_time(landscape.bound, question.units, digits=4)
    gap = ""
    if isfinite(landscape.gap):
        gap = f"; the best one is {landscape.gap:.1%} above it"
    notes = [
        f"bound: no plan of this space takes less than {bound}{gap}",
        f"the bound ignores {question.ignored}",
        f"times: {question.source}",
        *describe_range(question, landscape.best.step),
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
        which = count_of(landscape.left_out, "division", "divisions")
        they_were = "it was" if landscape.left_out == 1 else "they were"
        notes.append(
            f"{which} of the devices and the batch could have a faster plan, "
            f"but the search reached its limit before {they_were} tried"
        )
    untried = []
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


# ---------------------------------------------------------------- the page
MAX_TABLE_ROWS = 20
MAX_ROOMY_RANKS = 10  # maps with more columns have cells of one line
MAX_COLOURED_TIME = 2.5  # times the best; slower plans all have the palest colour
SAME_TIME = 0.0005  # differences below this share count as none
# The groups of the figure of time over memory: kinds of orders.
ORDERS = {
    "listed": "order made for this cost",
    "split": "fixed order with split backwards",
    "fixed": "fixed order",
}
ANALYTIC = (
    "The profile is analytic: a formula for the device gave the times and sizes, and "
    "nothing was measured. Measure the model on the device before you rely on small differences."
)
ROWS_NOTE = (
    "Order: fixed is the same for any cost; split and listed orders are made "
    "for this cost. Gap: how far the makespan is above a bound for all orders of the same placement "
    "and slices. ±10%: the mean step if all times vary by a tenth."
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
        more = f" {hidden:,} more plans fit." if hidden > 0 else ""
        best = table(*self.best_plans()) + soft(ROWS_NOTE + more)
        heads = ("division or schedule", "bound of a step", "reason")
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
            ("fullest device", self.size(self.best.peak)),
            ("bound of the space", bound),
            ("gap to the bound", gap),
            ("plans compared", f"{len(landscape.candidates):,}"),
            ("divisions", f"{divisions:,}" if divisions > 1 else ""),
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
            f"time, and the fullest device holds {self.size(best.peak)}{limit}."
        )
        bound = self.time(self.landscape.bound)
        least = f"No plan of the whole space takes less than {bound}, "
        if not self.has_bound:
            yield "There is no bound for this space, so no gap is known."
        elif self.landscape.gap < SAME_TIME:
            yield f"{least}so this one is optimal."
        else:
            yield (
                f"{least}so this one is at most {self.landscape.gap:.1%} above the optimum. "
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
            f"and {self.size(other.peak)} on the fullest device."
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
        title += f", D={cell.copies} P={cell.ranks}"
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
        copies = {count: f"D={count}" for count in sorted({key[0] for key in places})}
        ranks = {count: f"P={count}" for count in sorted({key[1] for key in places})}
        is_roomy = len(ranks) <= MAX_ROOMY_RANKS
        return HeatMap(name, "copies D, ranks P", drawn, copies, ranks, is_roomy)

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
            f"{title(candidate.name, candidate.shape)} ({candidate.order_kind}) on "
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
            f"memory of the fullest device, in {self.size_unit}",
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
            ("best fixed order", fastest_fixed(self.landscape)),
            ("1F1B", plain_1f1b(self.landscape)),
        ]
        shown: list[tuple[str, Candidate]] = []
        for role, row in roles:
            if row is not None and all(row is not other for _, other in shown):
                shown.append((role, row))
        return shown

    def timelines(self) -> list[tuple[str, Timeline]]:
        """Return the timelines of the chosen plan, the best fixed order and 1F1B."""
        drawn = []
        for role, row in self.shown_rows():
            evaluator = self.question.pricing.evaluator(row.division)
            timeline = evaluator.timeline(row.schedule)
            name = f"{role}: {self.title(row)}"
            copies = timeline.schedule.ranks // row.schedule.ranks
            if 1 < copies < row.division.copies:
                name += f"; {copies} of {row.division.copies} copies are drawn"
            drawn.append((name, timeline))
        return drawn

    # ------------------------------------------------------------ tables
    def best_plans(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads and the rows of the table of the best plans."""
        heads = ["", "plan", "order", f"step, {self.time_unit}"]
        if self.tokens:
            heads.append(self.rates.unit)
        heads += ["bubble", f"peak, {self.size_unit}", "gap of its order"]
        heads.append(f"step ±10%, {self.time_unit}")
        best = self.landscape.candidates[:MAX_TABLE_ROWS]
        return heads, [self.cells(place, row) for place, row in enumerate(best, 1)]

    def cells(self, place: int, row: Candidate) -> list[str]:
        """Return a row of the table."""
        candidate = row
        step = self.times.number(candidate.step)
        cells = [str(place), self.title(row), candidate.order_kind, step]
        if self.tokens:
            cells.append(self.rates.number(self.tokens / candidate.step))
        noisy = candidate.noisy
        return [
            *cells,
            f"{candidate.bubble:.1%}",
            self.sizes.number(candidate.peak, 3),
            f"{candidate.gap:.1%}" if candidate.bound else "",
            self.times.number(noisy) if isfinite(noisy) else "",
        ]

    def misfit_title(self) -> str:
        """Say how many cells and schedules do not fit."""
        reasons = [one.reason for one in self.landscape.divisions if one.reason]
        late = reasons.count(CANNOT_WIN)
        kinds = (
            (len(reasons) - late, "division", "without a plan"),
            (late, "division", "that cannot win"),
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
