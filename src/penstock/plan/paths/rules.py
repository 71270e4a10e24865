"""What a planned schedule must keep to, as data. The values are SkipPipe's (Blagoev et al., 2025).

For the model to converge:

    path of parts    0 2 1 4        the first part always runs, and first
    frontier         0 2 2 4        the highest part so far: a step goes at most `ahead` beyond it, or `behind` below
    back             0 0 1 0        in all at most `swaps` steps back, over `distance` parts together

Every path leaves out the same `share` of the parts; all parts but the first are met equally often; every `full`-th
step runs all parts in order. For it to be fast: no node holds more micro-batches than it has slots, and none waits
for another for longer than `wait`. The last part of a schedule is the head, on the node that has the data; in waves
every part is passed twice, down and up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from itertools import combinations, permutations

from penstock.errors import ScheduleError, ShapeError, UnknownNameError
from penstock.ir.action import Op
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline

TIME_ROUNDING = 1e-9  # seconds
MAX_NAMED_MICROBATCHES = 6  # micro-batches that a fault names
MAX_ORDERED_PARTS = 7  # parts of which not all orders are tried


@dataclass(frozen=True, slots=True)
class Rules:
    """The numbers of the rules above."""

    share: float = 1 / 3  # of the parts, left out by every path
    behind: int = 1  # parts a step back may go below the frontier
    distance: int = 2  # parts all steps back go together
    swaps: int = 2  # steps back
    ahead: int = 4  # parts a step may go beyond the frontier
    uneven: int = 1  # micro-batches by which the parts' shares of the work may differ, where they do not divide
    full: int = 10  # every so many steps the whole model; 0: never
    wait: float = math.inf  # seconds a micro-batch may wait on a node for another; 0: no two need a node at once

    def __post_init__(self) -> None:
        if not 0.0 <= self.share < 1.0:
            raise ShapeError(
                f"a share of {self.share:g} of the parts cannot be left out; give one from 0 to below 1"
            )
        for word in ("behind", "distance", "swaps", "uneven", "full"):
            if getattr(self, word) < 0:
                raise ShapeError(f"{word} is {getattr(self, word)}; the least is 0")
        if self.ahead < 1:
            raise ShapeError(
                f"ahead is {self.ahead}: no path could go on; the least is 1"
            )
        if not self.wait >= 0:
            raise ShapeError(f"wait is {self.wait} seconds; the least is 0")

    def hops(self, parts: int) -> int:
        """Parts on a path, beside the first."""
        kept = round(parts * (1.0 - self.share))
        if not 1 <= kept <= parts:
            raise ShapeError(
                f"a path over {kept} of {parts} parts; leave out less, or give more parts"
            )
        return kept - 1

    def at(self, step: int) -> Rules:
        """The rules of one step of the training: every so many, all parts in order."""
        if self.full and step % self.full == self.full - 1:
            return replace(self, share=0.0, behind=0, distance=0, swaps=0)
        return self


def rules_from(texts: Iterable[str]) -> Rules:
    """Rules as text gives them, the others as published; a later text over an earlier one.

    >>> rules_from(["share=1/4", "ahead=3"]) == Rules(share=0.25, ahead=3)
    True
    """
    given: dict[str, float] = {}
    whole = {field.name: field.type == "int" for field in fields(Rules)}
    for text in texts:
        name, equals, value = (piece.strip() for piece in text.partition("="))
        if not equals:
            raise ShapeError(
                f"a rule is NAME=VALUE, like ahead=4; not {text!r}\n  known: {', '.join(whole)}"
            )
        if name not in whole:
            raise UnknownNameError("rule", name, whole)
        try:
            number = float(Fraction(value)) if "/" in value else float(value)
        except (ValueError, ZeroDivisionError):
            raise ShapeError(f"the rule {name} is {value!r}, not a number") from None
        if whole[name] and not number.is_integer():
            raise ShapeError(f"the rule {name} is {value}, not a whole number")
        given[name] = int(number) if whole[name] else number
    return replace(Rules(), **given)  # type: ignore[arg-type]  # ints where ints are due


def rules_text(rules: Rules) -> str:
    """All of them, for `rules_from` to read when it is split again."""
    return " ".join(
        f"{field.name}={getattr(rules, field.name)!r}" for field in fields(rules)
    )


@dataclass(frozen=True, slots=True)
class RuleFault:
    """A rule that is broken, the micro-batches at fault, and what is false."""

    rule: str
    microbatches: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        named = ", ".join(map(str, self.microbatches[:MAX_NAMED_MICROBATCHES]))
        more = (
            f" and {len(self.microbatches) - MAX_NAMED_MICROBATCHES} more"
            if len(self.microbatches) > MAX_NAMED_MICROBATCHES
            else ""
        )
        return f"{self.rule}: {self.what}\n  micro-batches: {named}{more}"


# ---------------------------------------------------------------- one path
def order_fault(path: Sequence[int], rules: Rules) -> str:
    """What is wrong with the order of the parts on a path; "" if nothing.

    >>> order_fault((0, 2, 1, 4), Rules())
    ''
    >>> order_fault((0, 3, 1), Rules())
    'part 1 comes 2 parts behind part 3; at most 1'
    """
    if not path or path[0] != 0:
        return f"it begins with part {path[0]}" if path else "it is empty"
    frontier = back = swaps = 0
    for part in path[1:]:
        if part == 0:
            return "part 0 comes again"
        if part - frontier > rules.ahead:
            return f"part {part} comes {part - frontier} parts ahead of part {frontier}; at most {rules.ahead}"
        if part < frontier:
            if frontier - part > rules.behind:
                return f"part {part} comes {frontier - part} parts behind part {frontier}; at most {rules.behind}"
            back, swaps = back + frontier - part, swaps + 1
        frontier = max(frontier, part)
    if back > rules.distance:
        return f"its steps back go over {back} parts; at most {rules.distance}"
    return (
        f"it has {swaps} steps back; at most {rules.swaps}"
        if swaps > rules.swaps
        else ""
    )


@cache
def part_orders(parts: frozenset[int], rules: Rules) -> tuple[tuple[int, ...], ...]:
    """The orders in which these parts, all but the first, may follow it; rising first."""
    if (
        len(parts) > MAX_ORDERED_PARTS
    ):  # too many to try them all: rising, and single swaps of neighbours
        rising = sorted(parts)
        tried = [tuple(rising)]
        tried += [
            (*rising[:i], rising[i + 1], rising[i], *rising[i + 2 :])
            for i in range(len(rising) - 1)
        ]
    else:
        tried = list(permutations(sorted(parts)))
    return tuple(order for order in tried if not order_fault((0, *order), rules))


def part_subsets(parts: Sequence[int], hops: int) -> list[frozenset[int]]:
    """The sets of parts a path may meet beside the first."""
    return [frozenset(chosen) for chosen in combinations(sorted(parts), hops)]


def spread_parts(parts: Sequence[int], hops: int, turn: int) -> tuple[int, ...]:
    """Of these parts so many, rising; those left out lie apart, and move on by one each turn.

    Any number of turns in a row leaves out all parts equally often, or some once more: the gaps between those left
    out are as even as they can be, so that as many of them lie in every stretch of one length, give or take one.

    >>> [spread_parts((1, 2, 3, 4, 5), 3, turn) for turn in range(3)]
    [(2, 4, 5), (1, 3, 5), (1, 2, 4)]
    """
    count, skips = len(parts), len(parts) - hops
    left_out = (
        {(turn + number * count // skips) % count for number in range(skips)}
        if skips
        else set()
    )
    return tuple(part for place, part in enumerate(parts) if place not in left_out)


# ---------------------------------------------------------------- a whole schedule
def find_rule_faults(
    schedule: Schedule,
    parts: int,
    rules: Rules,
    slots: Sequence[int] | None = None,
    timeline: Timeline | None = None,
    lost: Sequence[int] = (),
) -> tuple[RuleFault, ...]:
    """Every rule that the schedule of a model of so many `parts` (the head not counted) breaks.

    slots: micro-batches each rank may hold; timeline: to see who waits for whom; lost: parts nobody holds any more.
    """
    found = [
        *_path_faults(schedule, parts, rules, set(lost)),
        *_coverage(schedule, parts, rules, set(lost)),
    ]
    if slots is not None:
        found += _crowds(schedule, slots)
    if timeline is not None and rules.wait < math.inf:
        found += _waits(timeline, rules.wait)
    return tuple(found)


def check_schedule_rules(
    schedule: Schedule,
    parts: int,
    rules: Rules,
    slots: Sequence[int] | None = None,
    lost: Sequence[int] = (),
) -> None:
    """Refuses a schedule that breaks a rule, with all that it breaks."""
    raise_rule_faults(find_rule_faults(schedule, parts, rules, slots, lost=lost))


def raise_rule_faults(found: Sequence[RuleFault]) -> None:
    """Raises, if there are any faults."""
    if found:
        raise ScheduleError([str(fault) for fault in found])


def parts_on_the_way_down(
    schedule: Schedule, number: int, parts: int
) -> tuple[int, ...]:
    """The parts a micro-batch meets on its way down: all but the head, in waves all but the way up."""
    path = schedule.microbatches[number].path
    return tuple(
        part for part in (schedule.stages[stage].part for stage in path) if part < parts
    )


def _path_faults(
    schedule: Schedule, parts: int, rules: Rules, lost: set[int]
) -> Iterator[RuleFault]:
    wanted = min(rules.hops(parts), parts - 1 - len(lost - {0})) + 1
    wrong: dict[tuple[str, str], list[int]] = {}
    for number, microbatch in enumerate(schedule.microbatches):
        path = parts_on_the_way_down(schedule, number, parts)
        broken = order_fault(path, rules)
        if broken:
            rule = "first part" if not path or path[0] or path.count(0) > 1 else "order"
            wrong.setdefault(
                (rule, f"the path over parts {_shown(path)}: {broken}"), []
            ).append(number)
        if len(path) != wanted:
            what = f"the path over parts {_shown(path)} meets {len(path)} of {parts} parts, not {wanted}"
            wrong.setdefault(("share", what), []).append(number)
        ends = {schedule.stages[microbatch.path[i]].rank for i in (0, -1)}
        last = schedule.stages[microbatch.path[-1]].part
        if len(ends) > 1 or last != schedule.parts - 1:
            what = f"it ends with part {last} on another rank than it began, or without the head"
            wrong.setdefault(("head", what), []).append(number)
    yield from (
        RuleFault(rule, tuple(guilty), what) for (rule, what), guilty in wrong.items()
    )


def _shown(path: Sequence[int]) -> str:
    return " ".join(map(str, path)) or "none"


def _coverage(
    schedule: Schedule, parts: int, rules: Rules, lost: set[int]
) -> Iterator[RuleFault]:
    met: dict[int, list[int]] = {
        part: [] for part in range(1, parts) if part not in lost
    }
    for number in range(len(schedule.microbatches)):
        for part in parts_on_the_way_down(schedule, number, parts):
            met.setdefault(part, []).append(number) if part else None
    if not met:
        return
    most, least = (
        max(met, key=lambda part: len(met[part])),
        min(met, key=lambda part: len(met[part])),
    )
    even = sum(map(len, met.values())) % len(met) == 0
    allowed = 0 if even else rules.uneven
    if len(met[most]) - len(met[least]) > allowed:
        counts = f"{len(met[most])} micro-batches, part {least} {len(met[least])}"
        what = f"part {most} meets {counts}; at most {allowed} more"
        yield RuleFault(
            "coverage", tuple(sorted(set(met[most]) - set(met[least]))), what
        )


def _crowds(schedule: Schedule, slots: Sequence[int]) -> Iterator[RuleFault]:
    """A rank holds a micro-batch from its first forward there to its last backward; the head holds nothing."""
    if len(slots) != schedule.ranks:
        raise ShapeError(
            f"there are slots for {len(slots)} ranks, but the schedule has {schedule.ranks}"
        )
    for rank, lane in enumerate(schedule.lanes):
        left: dict[int, int] = {}
        for action in lane:
            if action.op is not Op.F and action.op is not Op.W:
                left[action.microbatch] = left.get(action.microbatch, 0) + 1
        held: list[int] = []
        for action in lane:
            if action.op is Op.F and action.microbatch not in held:
                held.append(action.microbatch)
                if len(held) > slots[rank]:
                    room = f"it has {slots[rank]} slots"
                    what = f"rank {rank} holds {len(held)} micro-batches when {action} starts; {room}"
                    yield RuleFault("slots", tuple(held), what)
                    break
            elif action.op is not Op.F and action.op is not Op.W:
                left[action.microbatch] -= 1
                if not left[action.microbatch]:
                    held.remove(action.microbatch)


def _waits(timeline: Timeline, longest: float) -> Iterator[RuleFault]:
    table = timeline.schedule.table
    for number in range(len(table)):
        before = number - 1
        if (
            number in table.first
            or table.microbatch[before] == table.microbatch[number]
        ):
            continue
        ready = 0.0
        for needed in table.needs[number]:
            if needed >= 0:
                abroad = table.rank[needed] != table.rank[number]
                ready = max(
                    ready,
                    float(timeline.arrived[needed] if abroad else timeline.end[needed]),
                )
        waited = float(timeline.start[number]) - ready
        if waited > longest + TIME_ROUNDING:
            mine, other = int(table.microbatch[number]), int(table.microbatch[before])
            what = f"{table.action(number)} waits {waited:.3g} s on rank {table.rank[number]}; at most {longest:g}"
            yield RuleFault("collision", (mine, other), what)
