"""Reads the landscape of a search: why its best plan won, what each division achieves, the front of time and memory.

    rivals       the best plan of every other kind: whole backwards, no slices, another number of copies, ...
    divisions    copies x ranks -> the best plan there, or why there is none
    placements   stages of a rank x slices -> the best plan there
    front        plans that no other plan beats in both time and memory

The rows of a landscape are sorted by time, so the first one of a kind is its best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from penstock.ir.schedule import Schedule
from penstock.plan.candidates import ROUNDING
from penstock.plan.pricing import Pricing
from penstock.plan.search import (
    CANNOT_WIN,
    DivisionResult,
    Landscape,
    Row,
)
from penstock.schedules.coverage import visits_all_parts
from penstock.schedules.orders import loop_placement, wave_placement


# ---------------------------------------------------------------- kinds of plans
def placement_name(schedule: Schedule) -> str:
    """Name the way in which the stages of a schedule lie on its ranks.

    >>> from penstock import make
    >>> placement_name(make("1f1b", ranks=4, microbatches=4))
    '1 stage'
    >>> placement_name(make("interleaved", ranks=4, microbatches=4, chunks=2))
    '2 chunks'
    >>> placement_name(make("zb-v", ranks=4, microbatches=4))
    '1 wave'
    >>> placement_name(make("chimera", ranks=4, microbatches=4))
    '2 stages, not in a line'

    On one rank, waves and chunks are the same:

    >>> placement_name(make("hanayo", ranks=1, microbatches=4, waves=2))
    '4 stages'
    """
    count, left = divmod(len(schedule.stages), schedule.ranks)
    if schedule.ranks == 1 and count > 1:
        return f"{count} stages"
    stages = list(schedule.stages)
    if not left and stages == loop_placement(schedule.ranks, count):
        return "1 stage" if count == 1 else f"{count} chunks"
    if not left and count % 2 == 0:
        waves = count // 2
        if stages == wave_placement(schedule.ranks, waves):
            return "1 wave" if waves == 1 else f"{waves} waves"
    return f"{count} stages, not in a line"


def stages_of_a_rank(schedule: Schedule) -> float:
    """Return the mean number of stages on a rank."""
    return len(schedule.stages) / schedule.ranks


# ---------------------------------------------------------------- rivals
@dataclass(frozen=True, slots=True)
class Rival:
    """The best plan of a kind, or of several kinds, that the chosen plan does not belong to."""

    kinds: tuple[str, ...]  # each completes "the best plan ..."
    row: Row

    def excess(self, landscape: Landscape) -> float:
        """How much longer its step takes than that of the chosen plan, as a fraction."""
        return self.row.candidate.step / landscape.best.candidate.step - 1.0


def rivals(landscape: Landscape) -> tuple[Rival, ...]:
    """Return the best plan of every other kind, in the order in which a reader would ask for them."""
    found: dict[int, tuple[Row, list[str]]] = {}
    for kind, belongs in _other_kinds(landscape.best):
        fastest = next(filter(belongs, landscape.rows), None)
        if fastest is not None:
            found.setdefault(id(fastest), (fastest, []))[1].append(kind)
    return tuple(Rival(tuple(kinds), row) for row, kinds in found.values())


_Kind = tuple[str, Callable[[Row], bool]]


def _other_kinds(best: Row) -> Iterator[_Kind]:
    """Yield the kinds of plans that the best one is compared with."""
    candidate = best.candidate
    if not visits_all_parts(candidate.schedule):
        yield (
            "that leaves out no layers",
            lambda row: visits_all_parts(row.candidate.schedule),
        )
    if candidate.name != "1f1b":
        yield "with plain 1F1B", lambda row: row.candidate.name == "1f1b"
    if candidate.order_kind != "fixed":
        yield (
            "with an order that is the same for any cost",
            lambda row: row.candidate.order_kind == "fixed",
        )
    yield from _other_schedules(best)
    yield from _other_divisions(best)


def _other_schedules(best: Row) -> Iterator[_Kind]:
    schedule = best.candidate.schedule
    if schedule.slices > 1:
        yield "without token slices", lambda row: row.candidate.slices == 1
    else:
        yield "with token slices", lambda row: row.candidate.slices > 1
    if schedule.is_split:
        yield (
            "with whole backwards",
            lambda row: not row.candidate.schedule.is_split,
        )
    else:
        yield (
            "with split backwards",
            lambda row: row.candidate.schedule.is_split,
        )
    if stages_of_a_rank(schedule) > 1:
        yield (
            "with one stage on each rank",
            lambda row: stages_of_a_rank(row.candidate.schedule) == 1,
        )
    else:
        yield (
            "with several stages on each rank",
            lambda row: stages_of_a_rank(row.candidate.schedule) > 1,
        )
    placement = placement_name(schedule)
    if "wave" in placement:
        yield "with chunks instead of waves", lambda row: "chunk" in _placement(row)
    elif "chunk" in placement:
        yield "with waves instead of chunks", lambda row: "wave" in _placement(row)


def _other_divisions(best: Row) -> Iterator[_Kind]:
    division = best.division
    yield (
        "with another number of copies",
        lambda row: row.division.copies != division.copies,
    )
    yield (
        "with another number of ranks",
        lambda row: row.division.ranks != division.ranks,
    )
    yield (
        "with another mesh",
        lambda row: (
            (row.division.tensor, row.division.shard)
            != (division.tensor, division.shard)
        ),
    )
    yield (
        "with the same ranks and copies, but other micro-batches",
        lambda row: (
            (row.division.copies, row.division.ranks)
            == (division.copies, division.ranks)
            and row.division.microbatches != division.microbatches
        ),
    )
    if division.recomputed:
        yield "without recomputation", lambda row: not row.division.recomputed


def _placement(row: Row) -> str:
    return placement_name(row.candidate.schedule)


# ---------------------------------------------------------------- the map of the space
class MapFinding(StrEnum):
    """What a search knows about a place of the map."""

    FOUND = "found"
    TOO_LARGE = "too large"  # or impossible to build; the reason says which
    TOO_SLOW = "too slow"  # its bound is above the best plan
    OPEN = "open"  # not tried


@dataclass(frozen=True, slots=True)
class MapPlace:
    """A place of the map: its best plan, or why there is none."""

    finding: MapFinding
    row: Row | None = None
    bound: float = 0.0  # of a step; known if it is too slow
    reason: str = ""


Map = dict[tuple[int, int], MapPlace]  # by copies and ranks
NOT_TRIED = "not tried, or too large"


def divisions(landscape: Landscape, pricing: Pricing) -> Map:
    """Return the best plan for each number of copies and ranks."""
    best = _best_rows(landscape.rows)
    results: dict[tuple[int, int], list[DivisionResult]] = {}
    for result in landscape.divisions:
        key = (result.division.copies, result.division.ranks)
        results.setdefault(key, []).append(result)
    return {
        key: _place(best.get(key), here, pricing)
        for key, here in sorted(results.items())
    }


def divisions_by_placement(landscape: Landscape, everything: Map) -> dict[str, Map]:
    """Return `divisions` for each placement on its own, from few stages to many.

    `everything` is the map of all placements. Where it has no plan, no placement has one.
    """
    rows: dict[str, list[Row]] = {}
    for row in landscape.rows:
        rows.setdefault(_placement(row), []).append(row)

    def order(name: str) -> tuple[float, str]:
        return stages_of_a_rank(rows[name][0].candidate.schedule), name

    maps = {}
    for name in sorted(rows, key=order):
        best = _best_rows(rows[name])
        maps[name] = {
            key: place if place.row is None else _place_of_row(best.get(key))
            for key, place in everything.items()
        }
    return maps


def _best_rows(rows: Iterable[Row]) -> dict[tuple[int, int], Row]:
    best: dict[tuple[int, int], Row] = {}
    for row in rows:
        best.setdefault((row.division.copies, row.division.ranks), row)
    return best


def _place_of_row(row: Row | None) -> MapPlace:
    if row is None:
        return MapPlace(MapFinding.OPEN, reason=NOT_TRIED)
    return MapPlace(MapFinding.FOUND, row)


def _place(
    row: Row | None, results: list[DivisionResult], pricing: Pricing
) -> MapPlace:
    late = [result for result in results if result.reason == CANNOT_WIN]
    if row is None and late:
        bound = min(result.bound for result in late)
        return MapPlace(MapFinding.TOO_SLOW, None, bound, CANNOT_WIN)
    if row is None and all(result.reason for result in results):
        # With other micro-batches or less recomputation it may need more; this is the least.
        smallest = min(results, key=lambda result: pricing.least_bytes(result.division))
        return MapPlace(MapFinding.TOO_LARGE, None, 0.0, smallest.reason)
    return _place_of_row(row)


def best_by_placement(landscape: Landscape) -> dict[tuple[str, int], Row]:
    """Return the best plan of the chosen division for each placement and number of slices.

    The placements come from few stages to many.
    """
    division = landscape.best.division
    found: dict[tuple[str, int], Row] = {}
    for row in landscape.rows:
        if (row.division.copies, row.division.ranks) == (
            division.copies,
            division.ranks,
        ):
            found.setdefault((_placement(row), row.candidate.slices), row)

    def order(key: tuple[str, int]) -> tuple[float, str, int]:
        return stages_of_a_rank(found[key].candidate.schedule), *key

    return {key: found[key] for key in sorted(found, key=order)}


# ---------------------------------------------------------------- time and memory
def front(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows that no other row beats in both time and memory, the smallest first."""
    fastest = math.inf
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.candidate.peak, row.candidate.step)):
        if row.candidate.step < fastest * (1 - ROUNDING):
            found.append(row)
            fastest = row.candidate.step
    return tuple(found)


def fastest_fixed(landscape: Landscape) -> Row | None:
    """Return the fastest plan whose order is the same for any cost."""
    fixed = (row for row in landscape.rows if row.candidate.order_kind == "fixed")
    return next(fixed, None)


def plain_1f1b(landscape: Landscape) -> Row | None:
    """Return the fastest plan with plain 1F1B."""
    plain = (row for row in landscape.rows if row.candidate.name == "1f1b")
    return next(plain, None)
