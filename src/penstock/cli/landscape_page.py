"""Says in words and numbers what the page of a search shows; `penstock.view.landscape` draws it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from penstock.cli.landscape import describe_range, slice_lengths
from penstock.ir.timeline import Timeline
from penstock.plan.candidates import title
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
from penstock.plan.pricing import Question
from penstock.plan.search import CANNOT_WIN, Landscape, Row, row_title
from penstock.plan.space import skipped_share
from penstock.view.front import Dot, Front
from penstock.view.landscape import (
    HeatCell,
    HeatMap,
    LandscapePage,
    Mark,
)
from penstock.view.numbers import (
    FORWARDS,
    MICROBATCHES,
    Scale,
    name_size,
    name_time,
    rate_scale,
    size_scale,
    time_scale,
)

MAX_TABLE_ROWS = 20
MAX_ROOMY_RANKS = 10  # maps with more columns have cells of one line
MAX_COLOURED_TIME = 2.5  # times the best; slower plans all have the palest colour
SAME_TIME = 0.0005  # differences below this share count as none
ORDER_GROUPS = {"listed": 0, "split": 1, "fixed": 2}
GROUP_NAMES = (
    "order made for this cost",
    "fixed order with split backwards",
    "fixed order",
)
MARKS = {
    MapFinding.FOUND: Mark.VALUE,
    MapFinding.TOO_LARGE: Mark.TOO_LARGE,
    MapFinding.TOO_SLOW: Mark.TOO_SLOW,
    MapFinding.OPEN: Mark.OPEN,
}


def landscape_page(landscape: Landscape, question: Question) -> LandscapePage:
    """Return everything that the page of a search shows."""
    words = _Words(landscape, question)
    front_rows = front(landscape.rows)
    misfits = list(words.misfits())
    return LandscapePage(
        title=f"Plan: {words.name(landscape.best)}",
        facts=words.facts(),
        sentences=words.sentences(),
        warning=words.warning(),
        reasons=[words.reason(rival) for rival in rivals(landscape)],
        heat_sentences=words.heat_sentences(),
        heat_maps=words.heat_maps(),
        front=words.front(front_rows),
        front_heads=("", "plan", words.size_head(), words.time_head()),
        front_rows=words.front_table(front_rows),
        timelines=words.timelines(),
        heads=words.heads(),
        rows=[words.cells(place, row) for place, row in words.best_rows()],
        rows_note=words.rows_note(),
        misfit_title=words.misfit_title(len(misfits)),
        misfit_heads=("division or schedule", "bound of a step", "reason"),
        misfits=misfits,
    )


class _Colours:
    """How strong the colour of a time is in a heat map. Speeds, not times, are spaced evenly."""

    def __init__(self, best: float, rows: Sequence[Row]) -> None:
        slowest = max(row.candidate.step for row in rows)
        self.lowest_speed = 1 / min(slowest, MAX_COLOURED_TIME * best)
        self.range = 1 / best - self.lowest_speed

    def level(self, step: float) -> float:
        """Return 0 for the slowest and 1 for the fastest plans."""
        if self.range <= 0:
            return 1.0
        return min(1.0, max(0.0, (1 / step - self.lowest_speed) / self.range))


@dataclass(frozen=True, slots=True)
class _Words:
    """The texts of one page, with common units."""

    landscape: Landscape
    question: Question

    # ------------------------------------------------------------ units
    @property
    def times(self) -> Scale:
        """The unit of all times in tables and figures."""
        best = self.landscape.best.candidate
        return time_scale(best.step, self.question.units)

    @property
    def sizes(self) -> Scale:
        """The unit of all sizes in tables and figures."""
        best = self.landscape.best.candidate
        return size_scale(best.peak, self.question.units)

    @property
    def rates(self) -> Scale:
        """The unit of all speeds."""
        return rate_scale(self.tokens / self.landscape.best.candidate.step)

    @property
    def tokens(self) -> int:
        """The tokens of a step; 0 if a step is not in seconds."""
        if not self.question.units.seconds:
            return 0
        return self.question.workload.tokens * self.question.workload.batch

    def time(self, seconds: float) -> str:
        """Write a time."""
        return name_time(seconds, self.question.units)

    def size(self, size: float) -> str:
        """Write a size; in the units of the papers, in micro-batches."""
        return name_size(size, self.question.units)

    def size_head(self) -> str:
        """The head of a column of sizes."""
        return f"peak, {self.sizes.unit or MICROBATCHES[1]}"

    def time_head(self) -> str:
        """The head of a column of times."""
        return f"step, {self.times.unit or FORWARDS[1]}"

    def name(self, row: Row) -> str:
        """Name a plan, with its cell if there are several."""
        return row_title(row, self.landscape)

    # ------------------------------------------------------------ what won
    def facts(self) -> list[tuple[str, str]]:
        """Return the numbers at the top."""
        best = self.landscape.best.candidate
        facts = [("step", self.time(best.step))]
        if self.tokens:
            facts.append(("speed", self.rates.quantity(self.tokens / best.step)))
        facts.append(("bubble", f"{best.bubble:.1%}"))
        facts.append(("fullest device", self.size(best.peak)))
        if self.has_bound:
            facts.append(("bound of the space", self.time(self.landscape.bound)))
            facts.append(("gap to the bound", f"{self.landscape.gap:.1%}"))
        facts.append(("plans compared", f"{len(self.landscape.rows):,}"))
        if len(self.landscape.cells) > 1:
            facts.append(("divisions", f"{len(self.landscape.cells):,}"))
        return facts

    @property
    def has_bound(self) -> bool:
        """Whether the bound says anything."""
        return self.landscape.bound > 0 and isfinite(self.landscape.gap)

    def sentences(self) -> list[str]:
        """Say what won, how good it is, and where the times come from."""
        best = self.landscape.best.candidate
        memory = self.question.workload.memory
        speed = ""
        if self.tokens:
            speed = f", {self.rates.quantity(self.tokens / best.step)}"
        limit = "" if memory is None else f", with a limit of {self.size(memory)}"
        sentences = [
            f"The fastest plan is {self.name(self.landscape.best)}. It was planned "
            f"{self.question.basis}. Its step is predicted to take "
            f"{self.time(best.step)}{speed}. Its ranks idle {best.bubble:.1%} of the "
            f"time, and the fullest device holds {self.size(best.peak)}{limit}."
        ]
        if self.has_bound:
            least = (
                "No plan of the whole space takes less than "
                f"{self.time(self.landscape.bound)}, "
            )
            if self.landscape.gap < SAME_TIME:
                sentences.append(f"{least}so this one is optimal.")
            else:
                sentences.append(
                    f"{least}so this one is at most {self.landscape.gap:.1%} above the optimum. "
                    f"The bound ignores {self.question.ignored}, so the optimum may be closer."
                )
        else:
            sentences.append("There is no bound for this space, so no gap is known.")
        sentences += self.details()
        runtime = self.question.limits.runtime
        if runtime is not None:
            sentences.append(
                f"The plan is for {runtime.name}: the search left out what it cannot run, and "
                "timed every plan as its runtime sends messages."
            )
        if self.question.source:
            sentences.append(f"Where the times come from: {self.question.source}.")
        for line in describe_range(self.question, best.step):
            sentences.append(f"{line[0].upper()}{line[1:]}.")
        if self.landscape.interrupted:
            sentences.append(
                "The search was stopped early. This is the best plan so far."
            )
        return sentences

    def details(self) -> Iterator[str]:
        """Yield the cuts and the partition of the best plan."""
        best = self.landscape.best.candidate
        cuts = best.schedule.microbatches[0].cuts
        if len(cuts) > 2 and self.tokens:
            yield f"Tokens of its slices: {slice_lengths(cuts)}."
        if best.partition:
            layers = " ".join(str(count) for count in best.partition)
            yield f"Layers of its parts: {layers}."
        skipped = skipped_share(best.schedule, best.partition)
        if skipped:
            yield (
                f"Each micro-batch leaves out up to {skipped:.1%} of the layers, which "
                "changes what is computed: gradients are those of shortened models."
            )
        if best.recompute:
            parts = " ".join(str(part) for part in best.recompute)
            yield f"Parts that are computed again in the backward: {parts}."

    def warning(self) -> str:
        """Say that a profile is analytic; empty if it was measured."""
        if not self.question.analytic:
            return ""
        return (
            "The profile is analytic: a formula for the device gave the times and sizes, and "
            "nothing was measured. Measure the model on the device before you rely on small differences."
        )

    def reason(self, rival: Rival) -> str:
        """Compare the best plan with the best one of another kind."""
        other = rival.row.candidate
        excess = rival.excess(self.landscape)
        kinds = _join(rival.kinds)
        if abs(excess) < SAME_TIME:
            verdict = "the same time"
        else:
            verdict = f"{abs(excess):.1%} {'more' if excess > 0 else 'less'}"
        sentence = (
            f"The best plan {kinds} is {self.name(rival.row)}: its step takes "
            f"{self.time(other.step)}, {verdict}, with a bubble of {other.bubble:.1%} "
            f"and {self.size(other.peak)} on the fullest device."
        )
        best = self.landscape.best.candidate
        if excess < SAME_TIME and best.noisy < other.noisy:
            sentence += (
                f" If all times vary by a tenth, its step takes {self.time(other.noisy)}, "
                f"and that of the chosen plan {self.time(best.noisy)}."
            )
        return sentence

    # ------------------------------------------------------------ heat maps
    def heat_sentences(self) -> list[str]:
        """Explain the numbers of the maps."""
        if self.tokens:
            what = f"Speed of the best plan in each place, in {self.rates.unit}."
        else:
            unit = self.times.unit or FORWARDS[1]
            what = f"Time of a step of the best plan in each place, in {unit}."
        if len(self.landscape.cells) == 1:
            return [what]
        return [f"{what} A second line in a cell: micro-batches x sequences of each."]

    def heat_maps(self) -> list[HeatMap]:
        """Return the maps: over copies and ranks if there are several, and over placements."""
        everything = divisions(self.landscape, self.question.pricing)
        found = best_by_placement(self.landscape)
        rows = [*found.values(), *(one.row for one in everything.values() if one.row)]
        colours = _Colours(self.landscape.best.candidate.step, rows)
        title = "Stages of a rank and slices of a sequence"
        if len(everything) == 1:
            return [self.placement_map(title, found, colours)]
        cell = self.landscape.best.cell
        title += f", D={cell.copies} P={cell.ranks}"
        maps = [
            self.division_map("The best of all placements", everything, colours),
            self.placement_map(title, found, colours),
        ]
        by_placement = divisions_by_placement(self.landscape, everything)
        for name, places in by_placement.items():
            shown = _without_empty_lines(places)
            small = self.division_map(f"{name} on each rank", shown, colours)
            maps.append(replace(small, roomy=False))
        return maps

    def division_map(self, name: str, places: Map, colours: _Colours) -> HeatMap:
        """Return a map over copies and ranks."""
        copies = sorted({key[0] for key in places})
        ranks = sorted({key[1] for key in places})
        rows = []
        for count in copies:
            cells = [places.get((count, column)) for column in ranks]
            drawn = [None if one is None else self.place(one, colours) for one in cells]
            rows.append((f"D={count}", tuple(drawn)))
        return HeatMap(
            name,
            "copies D, ranks P",
            tuple(f"P={count}" for count in ranks),
            tuple(rows),
            len(ranks) <= MAX_ROOMY_RANKS,
        )

    def placement_map(
        self, name: str, found: dict[tuple[str, int], Row], colours: _Colours
    ) -> HeatMap:
        """Return a map over placements and slices of the chosen division."""
        slices = sorted({count for _, count in found})
        rows = []
        for placement in dict.fromkeys(placement for placement, _ in found):
            cells = []
            for count in slices:
                row = found.get((placement, count))
                finding = MapFinding.FOUND if row else MapFinding.OPEN
                place = MapPlace(finding, row, reason=NOT_TRIED)
                cells.append(self.place(place, colours))
            rows.append((placement, tuple(cells)))
        return HeatMap(
            name,
            "stages of a rank, slices",
            tuple(_count(count, "slice") for count in slices),
            tuple(rows),
        )

    def place(self, place: MapPlace, colours: _Colours) -> HeatCell:
        """Return a place as a map shows it."""
        mark = MARKS[place.finding]
        if place.row is not None:
            return self.value(place.row, colours)
        if place.finding is MapFinding.TOO_SLOW:
            tip = f"cannot win: no plan takes less than {self.time(place.bound)}"
            return HeatCell(mark, self.merit(place.bound), "at best", tip)
        if place.finding is MapFinding.TOO_LARGE:
            short = place.reason.split(" (")[0].split(":")[0]
            return HeatCell(mark, "✕", short, place.reason)
        return HeatCell(mark, "-", "", place.reason)

    def value(self, row: Row, colours: _Colours) -> HeatCell:
        """Return the cell of a plan."""
        candidate = row.candidate
        cell = row.cell
        note = f"{cell.microbatches} x {cell.rows}"
        if len(self.landscape.cells) == 1:
            note = f"bubble {candidate.bubble:.1%}"
        return HeatCell(
            Mark.VALUE,
            self.merit(candidate.step),
            note,
            self.tip(row),
            colours.level(candidate.step),
            row.candidate is self.landscape.best.candidate,
        )

    def merit(self, step: float) -> str:
        """Write the speed of a step, or its time if the tokens are unknown."""
        if self.tokens:
            return self.rates.number(self.tokens / step)
        return self.times.number(step)

    def tip(self, row: Row) -> str:
        """Describe a plan in a tooltip."""
        candidate = row.candidate
        return (
            f"{title(candidate.name, candidate.shape)} ({candidate.sort}) on "
            f"{row.cell.name}: step {self.time(candidate.step)}, bubble "
            f"{candidate.bubble:.1%}, peak {self.size(candidate.peak)}"
        )

    # ------------------------------------------------------------ the front
    def front(self, on_front: tuple[Row, ...]) -> Front:
        """Return the figure of time over memory."""
        places = {id(row): place for place, row in enumerate(on_front, start=1)}
        labels = {id(row): label for label, row in reversed(self.shown_rows())}
        dots = [
            Dot(
                row.candidate.peak,
                row.candidate.step,
                self.tip(row),
                ORDER_GROUPS.get(row.candidate.sort, 0),
                places.get(id(row), 0),
                labels.get(id(row), ""),
                row is self.landscape.best,
            )
            for row in self.landscape.rows
        ]
        size_unit = self.sizes.unit or MICROBATCHES[1]
        time_unit = f", in {self.times.unit or FORWARDS[1]}"
        return Front(
            tuple(dots),
            GROUP_NAMES,
            self.sizes,
            self.times,
            f"memory of the fullest device, in {size_unit}",
            f"step{time_unit}",
            self.question.workload.memory,
        )

    def front_table(self, on_front: tuple[Row, ...]) -> list[tuple[str, ...]]:
        """Return the rows of the front, numbered as in the figure."""
        return [
            (
                str(place),
                self.name(row),
                self.sizes.number(row.candidate.peak, 3),
                self.times.number(row.candidate.step),
            )
            for place, row in enumerate(on_front, start=1)
        ]

    # ------------------------------------------------------------ timelines
    def shown_rows(self) -> list[tuple[str, Row]]:
        """Return the plans whose timelines are drawn, with their roles."""
        roles = [
            ("chosen", self.landscape.best),
            ("best fixed order", fastest_fixed(self.landscape)),
            ("1F1B", plain_1f1b(self.landscape)),
        ]
        shown: list[tuple[str, Row]] = []
        for role, row in roles:
            if row is not None and all(row is not other for _, other in shown):
                shown.append((role, row))
        return shown

    def timelines(self) -> list[tuple[str, Timeline]]:
        """Return the timelines of the chosen plan, the best fixed order and 1F1B."""
        drawn = []
        for role, row in self.shown_rows():
            judge = self.question.pricing.judge(row.cell)
            timeline = judge.timeline(row.candidate.schedule)
            name = f"{role}: {self.name(row)}"
            copies = timeline.schedule.ranks // row.candidate.schedule.ranks
            if 1 < copies < row.cell.copies:
                name += f"; {copies} of {row.cell.copies} copies are drawn"
            drawn.append((name, timeline))
        return drawn

    # ------------------------------------------------------------ tables
    def best_rows(self) -> Iterator[tuple[int, Row]]:
        """Yield the best rows with their places."""
        yield from enumerate(self.landscape.rows[:MAX_TABLE_ROWS], start=1)

    def heads(self) -> list[str]:
        """Return the heads of the table."""
        heads = ["", "plan", "order", self.time_head()]
        if self.tokens:
            heads.append(self.rates.unit)
        heads += ["bubble", self.size_head(), "gap of its order"]
        unit = f", {self.times.unit or FORWARDS[1]}"
        return [*heads, f"step ±10%{unit}"]

    def cells(self, place: int, row: Row) -> list[str]:
        """Return a row of the table."""
        candidate = row.candidate
        cells = [
            str(place),
            self.name(row),
            candidate.sort,
            self.times.number(candidate.step),
        ]
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

    def rows_note(self) -> str:
        """Explain the columns, and say how many rows are left out."""
        note = (
            "Order: fixed is the same for any cost; split and listed orders are made "
            "for this cost. Gap: how far the makespan is above a bound for all orders of the same placement "
            "and slices. ±10%: the mean step if all times vary by a tenth."
        )
        hidden = len(self.landscape.rows) - MAX_TABLE_ROWS
        return f"{note} {hidden:,} more plans fit." if hidden > 0 else note

    def misfit_title(self, count: int) -> str:
        """Say how many cells and schedules do not fit."""
        cells = [one for one in self.landscape.cells if one.reason]
        late = sum(one.reason == CANNOT_WIN for one in cells)
        parts = []
        if len(cells) - late:
            parts.append(f"{_count(len(cells) - late, 'division')} without a plan")
        if late:
            parts.append(f"{_count(late, 'division')} that cannot win")
        if self.landscape.too_large:
            large = _count(len(self.landscape.too_large), "schedule")
            parts.append(f"{large} above the memory of a device")
        return _join(parts) if count else ""

    def misfits(self) -> Iterator[tuple[str, str, str]]:
        """Yield the divisions and schedules that have no plan, with the reasons."""
        for one in self.landscape.cells:
            if one.reason:
                bound = self.time(one.bound) if one.bound else ""
                yield one.cell.name, bound, one.reason
        for name, peak in self.landscape.too_large:
            yield name, "", f"needs {self.size(peak)}"


def _without_empty_lines(places: Map) -> Map:
    """Leave out the copies and the ranks for which nothing was found."""
    found = [key for key, place in places.items() if place.row is not None]
    copies = {key[0] for key in found}
    ranks = {key[1] for key in found}
    return {
        key: place
        for key, place in places.items()
        if key[0] in copies and key[1] in ranks
    }


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number:,} {noun}s"


def _join(words: tuple[str, ...] | list[str]) -> str:
    """Join words in a sentence.

    >>> _join(["a", "b", "c"])
    'a, b and c'
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
