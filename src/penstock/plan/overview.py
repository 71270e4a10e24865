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
from functools import partial

from penstock.ir.schedule import Schedule
from penstock.plan.candidates import ROUNDING, Candidate
from penstock.plan.pricing import Pricing
from penstock.plan.search import CANNOT_WIN, DivisionResult, Landscape
from penstock.plan.workload import Division
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
    candidate: Candidate

    def excess(self, landscape: Landscape) -> float:
        """How much longer its step takes than that of the chosen plan, as a fraction."""
        return self.candidate.step / landscape.best.step - 1.0


def rivals(landscape: Landscape) -> tuple[Rival, ...]:
    """Return the best plan of every other kind, in the order in which a reader would ask for them."""
    found: dict[int, tuple[Candidate, list[str]]] = {}
    for kind, belongs in _other_kinds(landscape.best):
        fastest = next(filter(belongs, landscape.candidates), None)
        if fastest is not None:
            found.setdefault(id(fastest), (fastest, []))[1].append(kind)
    return tuple(Rival(tuple(kinds), row) for row, kinds in found.values())


_Kind = tuple[str, Callable[[Candidate], bool]]


def _kind_of_placement(candidate: Candidate) -> str:
    name = placement_name(candidate.schedule)
    return next((kind for kind in ("wave", "chunk") if kind in name), "")


# What schedules differ in. For values of the best one: the value of its rivals, and what they are called.
SCHEDULE_KINDS: tuple[
    tuple[Callable[[Candidate], object], dict[object, tuple[object, str]]], ...
] = (
    (
        lambda one: visits_all_parts(one.schedule),
        {False: (True, "that leaves out no layers")},
    ),
    (lambda one: one.name == "1f1b", {False: (True, "with plain 1F1B")}),
    (
        lambda one: one.order_kind == "fixed",
        {False: (True, "with an order that is the same for any cost")},
    ),
    (
        lambda one: one.slices > 1,
        {True: (False, "without token slices"), False: (True, "with token slices")},
    ),
    (
        lambda one: one.schedule.is_split,
        {True: (False, "with whole backwards"), False: (True, "with split backwards")},
    ),
    (
        lambda one: stages_of_a_rank(one.schedule) > 1,
        {
            True: (False, "with one stage on each rank"),
            False: (True, "with several stages on each rank"),
        },
    ),
    (
        _kind_of_placement,
        {
            "wave": ("chunk", "with chunks instead of waves"),
            "chunk": ("wave", "with waves instead of chunks"),
        },
    ),
)


def _other_kinds(best: Candidate) -> Iterator[_Kind]:
    """Yield the kinds of plans that the best one is compared with."""
    for value_of, rival_kinds in SCHEDULE_KINDS:
        mine = value_of(best)
        if mine in rival_kinds:
            value, words = rival_kinds[mine]
            yield words, partial(_has_value, value_of, value)
    division = best.division
    size = _size_of(division)
    mesh = division.tensor, division.shard
    yield (
        "with another number of copies",
        lambda one: one.division.copies != division.copies,
    )
    yield (
        "with another number of ranks",
        lambda one: one.division.ranks != division.ranks,
    )
    yield (
        "with another mesh",
        lambda one: (one.division.tensor, one.division.shard) != mesh,
    )
    yield (
        "with the same ranks and copies, but other micro-batches",
        lambda one: (
            _size_of(one.division) == size
            and one.division.microbatches != division.microbatches
        ),
    )
    if division.recomputed:
        yield "without recomputation", lambda one: not one.division.recomputed


def _has_value(
    value_of: Callable[[Candidate], object], value: object, candidate: Candidate
) -> bool:
    return value_of(candidate) == value


def _size_of(division: Division) -> tuple[int, int]:
    return division.copies, division.ranks


def _placement(row: Candidate) -> str:
    return placement_name(row.schedule)


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
    candidate: Candidate | None = None
    bound: float = 0.0  # of a step; known if it is too slow
    reason: str = ""


Map = dict[tuple[int, int], MapPlace]  # by copies and ranks
NOT_TRIED = "not tried, or too large"


def divisions(landscape: Landscape, pricing: Pricing) -> Map:
    """Return the best plan for each number of copies and ranks."""
    best = _best_rows(landscape.candidates)
    results: dict[tuple[int, int], list[DivisionResult]] = {}
    for result in landscape.divisions:
        results.setdefault(_size_of(result.division), []).append(result)
    return {
        key: _place(best.get(key), here, pricing)
        for key, here in sorted(results.items())
    }


def divisions_by_placement(landscape: Landscape, everything: Map) -> dict[str, Map]:
    """Return `divisions` for each placement on its own, from few stages to many.

    `everything` is the map of all placements. Where it has no plan, no placement has one.
    """
    rows: dict[str, list[Candidate]] = {}
    for row in landscape.candidates:
        rows.setdefault(_placement(row), []).append(row)

    def order(name: str) -> tuple[float, str]:
        return stages_of_a_rank(rows[name][0].schedule), name

    maps = {}
    for name in sorted(rows, key=order):
        best = _best_rows(rows[name])
        maps[name] = {
            key: place if place.candidate is None else _place_of_row(best.get(key))
            for key, place in everything.items()
        }
    return maps


def _best_rows(rows: Iterable[Candidate]) -> dict[tuple[int, int], Candidate]:
    best: dict[tuple[int, int], Candidate] = {}
    for row in rows:
        best.setdefault(_size_of(row.division), row)
    return best


def _place_of_row(row: Candidate | None) -> MapPlace:
    if row is None:
        return MapPlace(MapFinding.OPEN, reason=NOT_TRIED)
    return MapPlace(MapFinding.FOUND, row)


def _place(
    row: Candidate | None, results: list[DivisionResult], pricing: Pricing
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


def best_by_placement(landscape: Landscape) -> dict[tuple[str, int], Candidate]:
    """Return the best plan of the chosen division for each placement and number of slices.

    The placements come from few stages to many.
    """
    size = _size_of(landscape.best.division)
    found: dict[tuple[str, int], Candidate] = {}
    for row in landscape.candidates:
        if _size_of(row.division) == size:
            found.setdefault((_placement(row), row.slices), row)

    def order(key: tuple[str, int]) -> tuple[float, str, int]:
        return stages_of_a_rank(found[key].schedule), *key

    return {key: found[key] for key in sorted(found, key=order)}


# ---------------------------------------------------------------- time and memory
def front(rows: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return the rows that no other row beats in both time and memory, the smallest first."""
    fastest = math.inf
    found: list[Candidate] = []
    for row in sorted(rows, key=lambda row: (row.peak, row.step)):
        if row.step < fastest * (1 - ROUNDING):
            found.append(row)
            fastest = row.step
    return tuple(found)


def fastest_fixed(landscape: Landscape) -> Candidate | None:
    """Return the fastest plan whose order is the same for any cost."""
    fixed = (row for row in landscape.candidates if row.order_kind == "fixed")
    return next(fixed, None)


def plain_1f1b(landscape: Landscape) -> Candidate | None:
    """Return the fastest plan with plain 1F1B."""
    plain = (row for row in landscape.candidates if row.name == "1f1b")
    return next(plain, None)
