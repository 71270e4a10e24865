"""The rules that planned paths must keep, as data. The default values are SkipPipe's (Blagoev et al., 2025).

Rules for convergence:

    path of parts    0 2 1 4        the first part always runs, and runs first
    frontier         0 2 2 4        the highest part so far: a step goes at most `ahead` beyond it or `behind` below it
    steps back       0 0 1 0        at most `swaps` of them, over at most `distance` parts together

Every path leaves out the same `share` of the parts. All parts but the first are visited equally
often. Every `full`-th step runs all parts in order.

Rules for speed: no node holds more micro-batches than it has slots, and no micro-batch waits on a
node for another one for longer than `wait` seconds.

The last part of a schedule is the head, which is on the data node. In waves, a path visits every
part twice, on its way down and on its way up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from itertools import combinations, permutations

from penstock.errors import ScheduleError, ShapeError, UnknownNameError
from penstock.ir.action import BACKWARD, FORWARD, Action
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline

WAIT_ROUNDING = 1e-9  # seconds
MAX_NAMED_MICROBATCHES = 6  # micro-batches that a fault names
MAX_ORDERED_PARTS = 7  # parts up to which all orders are tried


@dataclass(frozen=True, slots=True)
class Rules:
    """The numbers in the rules above."""

    share: float = 1 / 3  # share of the parts that every path leaves out
    behind: int = 1  # parts that a step back may go below the frontier
    distance: int = 2  # parts that all steps back may go together
    swaps: int = 2  # number of steps back
    ahead: int = 4  # parts that a step may go beyond the frontier
    # The number of visits by which parts may differ if the visits do not divide evenly.
    uneven: int = 1
    full: int = 10  # every how many steps the whole model runs; 0: never
    # Seconds that a micro-batch may wait on a node for another one.
    wait: float = math.inf

    def __post_init__(self) -> None:
        if not 0.0 <= self.share < 1.0:
            raise ShapeError(
                f"a path cannot leave out a share of {self.share:g} of the parts; "
                "give a share from 0 to below 1"
            )
        for name in ("behind", "distance", "swaps", "uneven", "full"):
            value = getattr(self, name)
            if value < 0:
                raise ShapeError(f"{name} must be at least 0, not {value}")
        if self.ahead < 1:
            raise ShapeError(
                f"ahead must be at least 1, not {self.ahead}: no path could go on"
            )
        if not self.wait >= 0:
            raise ShapeError(f"wait must be at least 0 seconds, not {self.wait}")

    def hops(self, parts: int) -> int:
        """Return the number of parts on a path, without the first one."""
        length = round(parts * (1.0 - self.share))
        if not 1 <= length <= parts:
            raise ShapeError(
                f"this share leaves a path over {length} of {parts} parts; "
                "leave out fewer parts, or give more parts"
            )
        return length - 1

    def at(self, step: int) -> Rules:
        """Return the rules of one training step: every `full`-th step runs the whole model."""
        if self.full and step % self.full == self.full - 1:
            return self.full_model()
        return self

    def full_model(self) -> Rules:
        """Return the rules under which every micro-batch visits all parts in order."""
        return replace(self, share=0.0, behind=0, distance=0, swaps=0)


def rules_from(texts: Iterable[str]) -> Rules:
    """Read rules from texts. Rules that no text gives are the published ones; the last text wins.

    >>> rules_from(["share=1/4", "ahead=3"]) == Rules(share=0.25, ahead=3)
    True
    """
    given: dict[str, float] = {}
    is_whole = {field.name: field.type == "int" for field in fields(Rules)}
    for text in texts:
        name, equals, value = (piece.strip() for piece in text.partition("="))
        if not equals:
            raise ShapeError(
                f"a rule is NAME=VALUE, like ahead=4; not {text!r}\n"
                f"  known: {', '.join(is_whole)}"
            )
        if name not in is_whole:
            raise UnknownNameError("rule", name, is_whole)
        given[name] = _rule_value(name, value, is_whole[name])
    return replace(Rules(), **given)  # type: ignore[arg-type]  # ints where ints are due


def _rule_value(name: str, text: str, whole: bool) -> float:
    """Read one number; it may be a fraction such as 1/3."""
    try:
        number = float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        raise ShapeError(f"the rule {name} is {text!r}, not a number") from None
    if not whole:
        return number
    if not number.is_integer():
        raise ShapeError(f"the rule {name} is {text}, not a whole number")
    return int(number)


def rules_text(rules: Rules) -> str:
    """Write all rules as words that `rules_from` reads again."""
    words = [f"{field.name}={getattr(rules, field.name)!r}" for field in fields(rules)]
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class RuleFault:
    """A broken rule, the micro-batches at fault, and what is wrong."""

    rule: str
    microbatches: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        named = ", ".join(map(str, self.microbatches[:MAX_NAMED_MICROBATCHES]))
        unnamed = len(self.microbatches) - MAX_NAMED_MICROBATCHES
        if unnamed > 0:
            named += f" and {unnamed} more"
        return f"{self.rule}: {self.what}\n  micro-batches: {named}"


# ---------------------------------------------------------------- one path
def order_fault(path: Sequence[int], rules: Rules) -> str:
    """Return what is wrong with the order of the parts on a path, or "".

    >>> order_fault((0, 2, 1, 4), Rules())
    ''
    >>> order_fault((0, 3, 1), Rules())
    'part 1 comes 2 parts behind part 3; at most 1'
    """
    if not path:
        return "it is empty"
    if path[0] != 0:
        return f"it begins with part {path[0]}"
    frontier = 0
    distance = 0
    swaps = 0
    for part in path[1:]:
        fault = _step_fault(part, frontier, rules)
        if fault:
            return fault
        if part < frontier:
            distance += frontier - part
            swaps += 1
        frontier = max(frontier, part)
    if distance > rules.distance:
        return f"its steps back go over {distance} parts; at most {rules.distance}"
    if swaps > rules.swaps:
        return f"it has {swaps} steps back; at most {rules.swaps}"
    return ""


def _step_fault(part: int, frontier: int, rules: Rules) -> str:
    """Return what is wrong with a step to `part`, or ""."""
    if part == 0:
        return "part 0 comes again"
    step = part - frontier
    if step > rules.ahead:
        return f"part {part} comes {step} parts ahead of part {frontier}; at most {rules.ahead}"
    if -step > rules.behind:
        return f"part {part} comes {-step} parts behind part {frontier}; at most {rules.behind}"
    return ""


@cache
def part_orders(parts: frozenset[int], rules: Rules) -> tuple[tuple[int, ...], ...]:
    """Return the orders in which these parts may follow the first part, the rising order first.

    If there are too many orders to try, only the rising order and those with one swap of neighbors
    are considered.
    """
    rising = tuple(sorted(parts))
    if len(parts) <= MAX_ORDERED_PARTS:
        orders = list(permutations(rising))
    else:
        orders = [rising]
        for i in range(len(rising) - 1):
            swapped = (rising[i + 1], rising[i])
            orders.append((*rising[:i], *swapped, *rising[i + 2 :]))
    return tuple(order for order in orders if not order_fault((0, *order), rules))


def part_subsets(parts: Sequence[int], hops: int) -> list[frozenset[int]]:
    """Return the sets of parts that a path may visit after the first part."""
    return [frozenset(chosen) for chosen in combinations(sorted(parts), hops)]


def spread_parts(parts: Sequence[int], hops: int, turn: int) -> tuple[int, ...]:
    """Choose `hops` of these parts, rising; the parts left out move on by one in each turn.

    Over any number of successive turns all parts are left out equally often, or some once more
    than others. This is because the gaps between the parts left out are as even as possible, so
    that all stretches of the same length contain equally many of them, give or take one.

    >>> [spread_parts((1, 2, 3, 4, 5), 3, turn) for turn in range(3)]
    [(2, 4, 5), (1, 3, 5), (1, 2, 4)]
    """
    count = len(parts)
    skips = count - hops
    left_out = {(turn + number * count // skips) % count for number in range(skips)}
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
    """Return every rule that the schedule breaks.

    parts: the number of parts of the model, without the head.
    slots: the number of micro-batches that each rank may hold.
    timeline: shows which micro-batches wait for each other.
    lost: parts that no node holds any more.
    """
    faults = list(_path_faults(schedule, parts, rules, set(lost)))
    faults += _coverage_faults(schedule, parts, rules, set(lost))
    if slots is not None:
        faults += _slot_faults(schedule, slots)
    if timeline is not None and rules.wait < math.inf:
        faults += _collision_faults(timeline, rules.wait)
    return tuple(faults)


def check_schedule_rules(
    schedule: Schedule,
    parts: int,
    rules: Rules,
    slots: Sequence[int] | None = None,
    lost: Sequence[int] = (),
) -> None:
    """Raise a `ScheduleError` that lists every rule the schedule breaks."""
    raise_rule_faults(find_rule_faults(schedule, parts, rules, slots, lost=lost))


def raise_rule_faults(faults: Sequence[RuleFault]) -> None:
    """Raise a `ScheduleError` if there are any faults."""
    if faults:
        raise ScheduleError([str(fault) for fault in faults])


def parts_on_the_way_down(
    schedule: Schedule, number: int, parts: int
) -> tuple[int, ...]:
    """Return the parts of a micro-batch's path, without the head or, in waves, without the way up."""
    path = schedule.microbatches[number].path
    visited = [schedule.stages[stage].part for stage in path]
    return tuple(part for part in visited if part < parts)


def _path_faults(
    schedule: Schedule, parts: int, rules: Rules, lost: set[int]
) -> Iterator[RuleFault]:
    """Find faults of single paths; micro-batches with the same fault are named together."""
    alive = parts - 1 - len(lost - {0})
    length = 1 + min(rules.hops(parts), alive)
    guilty: dict[tuple[str, str], list[int]] = {}
    for number, microbatch in enumerate(schedule.microbatches):
        path = parts_on_the_way_down(schedule, number, parts)
        path_text = f"the path over parts {_path_text(path)}"
        broken = order_fault(path, rules)
        if broken:
            bad_first_part = not path or path[0] != 0 or path.count(0) > 1
            rule = "first part" if bad_first_part else "order"
            fault = (rule, f"{path_text}: {broken}")
            guilty.setdefault(fault, []).append(number)
        if len(path) != length:
            what = f"{path_text} meets {len(path)} of {parts} parts, not {length}"
            guilty.setdefault(("share", what), []).append(number)
        first = schedule.stages[microbatch.path[0]]
        last = schedule.stages[microbatch.path[-1]]
        if first.rank != last.rank or last.part != schedule.parts - 1:
            what = (
                f"it ends with part {last.part} on another rank than it began, "
                "or without the head"
            )
            guilty.setdefault(("head", what), []).append(number)
    for (rule, what), microbatches in guilty.items():
        yield RuleFault(rule, tuple(microbatches), what)


def _path_text(path: Sequence[int]) -> str:
    return " ".join(map(str, path)) or "none"


def _coverage_faults(
    schedule: Schedule, parts: int, rules: Rules, lost: set[int]
) -> Iterator[RuleFault]:
    """Find parts that are not visited equally often."""
    visitors: dict[int, list[int]] = {}
    for part in range(1, parts):
        if part not in lost:
            visitors[part] = []
    for number in range(len(schedule.microbatches)):
        for part in parts_on_the_way_down(schedule, number, parts):
            if part > 0:
                visitors.setdefault(part, []).append(number)
    if not visitors:
        return
    most = max(visitors, key=lambda part: len(visitors[part]))
    least = min(visitors, key=lambda part: len(visitors[part]))
    visits = sum(map(len, visitors.values()))
    allowed = 0 if visits % len(visitors) == 0 else rules.uneven
    most_visits = len(visitors[most])
    least_visits = len(visitors[least])
    if most_visits - least_visits > allowed:
        what = (
            f"part {most} meets {most_visits} micro-batches, "
            f"part {least} {least_visits}; at most {allowed} more"
        )
        guilty = sorted(set(visitors[most]) - set(visitors[least]))
        yield RuleFault("coverage", tuple(guilty), what)


def _slot_faults(schedule: Schedule, slots: Sequence[int]) -> Iterator[RuleFault]:
    """Find ranks that hold too many micro-batches at once.

    A rank holds a micro-batch from its first forward there to its last backward. The head holds
    nothing.
    """
    if len(slots) != schedule.ranks:
        raise ShapeError(
            f"there are slots for {len(slots)} ranks, but the schedule has {schedule.ranks}"
        )
    for rank, lane in enumerate(schedule.lanes):
        overflow = _first_overflow(lane, slots[rank])
        if overflow is not None:
            action, held = overflow
            what = (
                f"rank {rank} holds {len(held)} micro-batches when {action} starts; "
                f"it has {slots[rank]} slots"
            )
            yield RuleFault("slots", held, what)


def _first_overflow(
    lane: Sequence[Action], slots: int
) -> tuple[Action, tuple[int, ...]] | None:
    """Return the first forward for which a rank has no slot, and the micro-batches that it holds then."""
    backwards_left = Counter(
        action.microbatch for action in lane if action.op.kind == BACKWARD
    )
    held: list[int] = []
    for action in lane:
        number = action.microbatch
        if action.op.kind == FORWARD and number not in held:
            held.append(number)
            if len(held) > slots:
                return action, tuple(held)
        elif action.op.kind == BACKWARD:
            backwards_left[number] -= 1
            if backwards_left[number] == 0:
                held.remove(number)
    return None


def _collision_faults(timeline: Timeline, longest: float) -> Iterator[RuleFault]:
    """Find actions that wait too long for another micro-batch on the same rank."""
    table = timeline.schedule.table
    for number in range(len(table)):
        before = number - 1
        if number in table.first:
            continue  # nothing comes before it on its rank
        if table.microbatch[before] == table.microbatch[number]:
            continue
        if (table.needs[number] < 0).all():
            continue  # A micro-batch that has not begun waits for nobody.
        ready = 0.0
        for needed in table.needs[number]:
            if needed >= 0:
                same_rank = table.rank[needed] == table.rank[number]
                times = timeline.end if same_rank else timeline.arrived
                ready = max(ready, float(times[needed]))
        waited = float(timeline.start[number]) - ready
        if waited > longest + WAIT_ROUNDING:
            what = (
                f"{table.action(number)} waits {waited:.3g} s on rank {table.rank[number]}; "
                f"at most {longest:g}"
            )
            pair = (int(table.microbatch[number]), int(table.microbatch[before]))
            yield RuleFault("collision", pair, what)
