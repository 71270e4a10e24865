"""plan.json: a schedule with its partition and the reasons for choosing it.

People and programs read, edit and keep these files.

    {
      "penstock": "plan",
      "version": 1,
      "name": "1f1b",
      "partition": [8, 8, 8],                                   layers of each part
      "recompute": [0, 1],                                      parts that keep only their input; may be left out
      "tensor": 2,                                              processes of a rank; without both the config decides
      "shard": 1,
      "why": {
        "makespan": 33.0                                        facts: text, numbers, true, false, null
      },
      "stages": [
        {"rank": 0, "part": 0},                                 one line per stage
        ...
      ],
      "microbatches": [
        {"path": [0, 1, 2], "tokens": 1024, "count": 4},        one line per run of equal micro-batches
        {"path": [0, 2], "tokens": 1024, "cuts": [0, 512, 1024]}
      ],
      "lanes": [
        "0F0 0F1 0F2 0B0 ...",                                  one line per lane
        ...
      ],
      "rotation": [                                             further paths that steps take in turn; may be left out
        {
          "microbatches": [...],                                as above, for the same stages
          "lanes": [...]
        }
      ],
      "full": {"microbatches": [...], "lanes": [...]},          steps that leave out no part; may be left out
      "sums": [                                                 how replicas sum gradients; may be left out
        {"parts": [0], "kind": "ring", "ranks": [0, 4, 2]},
        {"parts": [1], "kind": "direct", "ranks": [1, 3], "shares": [0.3, 0.7]},
        {"parts": [2], "kind": "two levels", "groups": [[5, 6], [7]], "whole": true}
      ]
    }
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.errors import FileError, ScheduleError, ShapeError
from penstock.formats.fields import (
    HEADER,
    Field,
    facts,
    flag,
    items,
    made,
    number,
    read_page,
    record,
    storable,
    string,
    whole,
)
from penstock.formats.json_text import JsonPage, Lines, parse_json, value_text
from penstock.formats.text import (
    SHOWN_CHARACTERS,
    Page,
    Steps,
    Value,
    fail,
    read_text,
    write_text,
)
from penstock.ir.action import Action, parse_action
from penstock.ir.plan import Plan
from penstock.ir.schedule import MicroBatch, Schedule, Stage
from penstock.ir.sums import SumKind, SumPlan

PLAN_VERSION = 1


# ---------------------------------------------------------------- writing
def dump_plan(plan: Plan) -> str:
    """The text of a plan, from which `load_plan` builds an equal plan."""
    choices = {
        "partition": plan.partition,
        "recompute": plan.recompute,
        "tensor": plan.tensor,
        "shard": plan.shard,
        "why": plan.why and Lines(storable(plan.why)),
    }
    others = {
        "rotation": plan.rotation
        and Lines([Lines(_orders(one)) for one in plan.rotation]),
        "full": plan.full and Lines(_orders(plan.full)),
        "sums": plan.sums and Lines([*map(_sum_entry, plan.sums)]),
    }
    entries = {
        "penstock": "plan",
        "version": PLAN_VERSION,
        "name": plan.name,
        **{key: value for key, value in choices.items() if value},
        "stages": Lines([asdict(one) for one in plan.schedule.stages]),
        **_orders(plan.schedule),
        **{key: value for key, value in others.items() if value},
    }
    return value_text(Lines(entries)) + "\n"


def _orders(schedule: Schedule) -> dict[str, Lines]:
    """What differs between the schedules of a plan: the paths and the lanes."""
    runs = groupby(schedule.microbatches)
    microbatches = [_run_entry(one, len(list(run))) for one, run in runs]
    lanes = [" ".join(map(str, lane)) for lane in schedule.lanes]
    return {"microbatches": Lines(microbatches), "lanes": Lines(lanes)}


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file."""
    write_text(path, dump_plan(plan))


def _run_entry(microbatch: MicroBatch, count: int) -> dict[str, object]:
    entry: dict[str, object] = {"path": microbatch.path, "tokens": microbatch.tokens}
    if microbatch.cuts != (0, microbatch.tokens):
        entry["cuts"] = microbatch.cuts
    if count > 1:
        entry["count"] = count
    return entry


def _sum_entry(plan: SumPlan) -> dict[str, object]:
    entry: dict[str, object] = {"parts": plan.parts, "kind": plan.kind.value}
    if plan.kind is SumKind.TWO_LEVELS:
        entry |= {"groups": plan.groups, "whole": plan.whole}
    else:
        entry["ranks"] = plan.ranks
    if plan.kind is SumKind.DIRECT:
        entry["shares"] = plan.shares
    return entry


# ---------------------------------------------------------------- reading
def _run(
    path: tuple[int, ...], tokens: int, cuts: tuple[int, ...], count: int
) -> tuple[MicroBatch, int]:
    """A micro-batch, and how many times it follows itself."""
    return MicroBatch(path, tokens, cuts), count


def _lane(page: Page, steps: Steps, value: Value) -> tuple[Action, ...]:
    actions = []
    for place, word in enumerate(string(page, steps, value).split()):
        try:
            actions.append(parse_action(word))
        except FileError:
            shown = word[:SHOWN_CHARACTERS]
            what = f"word {place} of lane {steps[-1]}, {shown!r}, is not an action"
            advice = (
                "an action is stage, op F B I or W, micro-batch: 2F0, or sliced 2F0.1"
            )
            fail(page, steps, what, advice, place)
    return tuple(actions)


def _sum_kind(page: Page, steps: Steps, value: Value) -> SumKind:
    kind = string(page, steps, value)
    kinds = [one.value for one in SumKind]
    if kind not in kinds:
        what = f"there is no kind of sum called {kind[:SHOWN_CHARACTERS]!r}"
        fail(page, steps, what, f"the kinds are {', '.join(kinds)}")
    return SumKind(kind)


def _sum_plan(groups: tuple[tuple[int, ...], ...], **values: Any) -> SumPlan:
    """How the replicas of a part sum their gradients; groups say which ranks there are."""
    if groups:
        values["ranks"] = tuple(rank for group in groups for rank in group)
    return SumPlan(groups=groups, **values)


NUMBERS = items(whole())
ORDERS = {
    "microbatches": Field(
        items(
            record(
                _run,
                {
                    "path": Field(NUMBERS),
                    "tokens": Field(whole()),
                    "cuts": Field(NUMBERS, ()),
                    "count": Field(whole(1), 1),
                },
            )
        )
    ),
    "lanes": Field(items(_lane)),
}
PLAN = {
    **HEADER,
    "stages": Field(
        items(record(Stage, dict.fromkeys(("rank", "part"), Field(whole()))))
    ),
    **ORDERS,
    "name": Field(string, ""),
    "partition": Field(NUMBERS, ()),
    "recompute": Field(NUMBERS, ()),
    "tensor": Field(whole(1), 0),  # 0: the config decides
    "shard": Field(whole(1), 0),
    "why": Field(facts, ()),
    "rotation": Field(items(record(dict, ORDERS)), ()),
    "full": Field(record(dict, ORDERS), None),
    "sums": Field(
        items(
            record(
                _sum_plan,
                {
                    "parts": Field(NUMBERS),
                    "kind": Field(_sum_kind),
                    "ranks": Field(NUMBERS, ()),
                    "shares": Field(items(number()), ()),
                    "groups": Field(items(NUMBERS), ()),
                    "whole": Field(flag, False),
                },
                "plan the paths again, or correct the entry",
            )
        ),
        (),
    ),
}


def read_plan(path: str | Path) -> Plan:
    """The plan in a file."""
    return load_plan(read_text(path, "plan"), str(path))


def load_plan(text: str, source: str = "plan.json") -> Plan:
    """The plan in a text; errors call the file `source`."""
    page = JsonPage(text, source, "plan")
    top = read_page(page, parse_json(page), PLAN_VERSION, PLAN)
    stages = top["stages"]
    schedule = _schedule(page, (), top, stages)
    rotation = tuple(
        _schedule(page, ("rotation", place), one, stages)
        for place, one in enumerate(top["rotation"])
    )
    full = top["full"] and _schedule(page, ("full",), top["full"], stages)
    last = max(top["recompute"], default=-1)
    if last >= schedule.parts:
        what = f"there is no part {last}; the parts are 0 to {schedule.parts - 1}"
        fail(page, ("recompute",), what, "name only parts that exist")
    is_meshed = top["tensor"] or top["shard"]
    advice = "give the number of layers of every part, in the order of the parts"
    plan = made(
        *(page, ("partition",), advice, Plan),
        schedule=schedule,
        name=top["name"],
        partition=top["partition"],
        why=top["why"],
        recompute=top["recompute"],
        tensor=is_meshed and (top["tensor"] or 1),
        shard=is_meshed and (top["shard"] or 1),
    )
    try:
        plan = replace(plan, rotation=rotation, full=full)
    except ShapeError as error:
        key = "rotation" if str(error).startswith("rotation") else "full"
        fail(page, (key,), str(error), "plan the paths again, all at once")
    advice = "every rank that holds a part sums it"
    return made(page, ("sums",), advice, partial(replace, plan), sums=top["sums"])


def _schedule(
    page: Page, steps: Steps, orders: dict[str, Any], stages: tuple[Stage, ...]
) -> Schedule:
    """A schedule over these stages, with the micro-batches and the lanes of `orders`."""
    runs, lanes = orders["microbatches"], orders["lanes"]
    actions = sum(map(len, lanes))
    _check_counts(page, (*steps, "microbatches"), runs, actions)
    microbatches: list[MicroBatch] = []
    for microbatch, count in runs:
        microbatches += [microbatch] * count
    try:
        return Schedule(stages, tuple(microbatches), lanes)
    except ScheduleError as error:
        where = ".".join(map(str, (page.source, *steps)))
        first, *others = error.faults
        raise ScheduleError((f"{where}: {first}", *others)) from None


def _check_counts(
    page: Page, steps: Steps, runs: Iterable[tuple[MicroBatch, int]], actions: int
) -> None:
    """Reject a mistyped count before it fills the memory.

    The checker reports smaller gaps, and draws them.
    """
    least = 0
    for microbatch, count in runs:
        least += 2 * len(microbatch.path) * microbatch.slices * count
    is_far_off = least > 100 * actions + 10_000
    is_empty = least > 0 and actions == 0
    if is_far_off or is_empty:
        what = (
            f"the micro-batches need at least {least} actions, "
            f"but the lanes hold {actions}"
        )
        advice = "is a count too large, or are lanes missing?"
        fail(page, steps, what, advice)
