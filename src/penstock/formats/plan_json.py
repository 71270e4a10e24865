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

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from penstock.errors import FileError, ScheduleError, ShapeError
from penstock.formats.fields import (
    check_kind,
    fact_text,
    read_entry,
    read_facts_field,
    read_flag,
    read_list,
    read_number,
    read_string,
    read_whole,
)
from penstock.formats.json_text import JsonPage, parse_json
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
from penstock.ir.sum_plan import SumKind, SumPlan

PLAN_VERSION = 1


# ---------------------------------------------------------------- writing
def dump_plan(plan: Plan) -> str:
    """The text of a plan, from which `load_plan` builds an equal plan."""
    schedule = plan.schedule
    entries = {
        "penstock": '"plan"',
        "version": str(PLAN_VERSION),
        "name": json.dumps(plan.name),
    }
    if plan.partition:
        entries["partition"] = json.dumps(plan.partition)
    if plan.recompute:
        entries["recompute"] = json.dumps(plan.recompute)
    if plan.tensor:
        entries["tensor"] = str(plan.tensor)
        entries["shard"] = str(plan.shard)
    if plan.why:
        facts = [f"{json.dumps(key)}: {fact_text(key, fact)}" for key, fact in plan.why]
        entries["why"] = _block("{}", facts)
    entries["stages"] = _block("[]", map(_stage_text, schedule.stages))
    entries.update(_orders(schedule))
    if plan.rotation:
        others = [_object(_orders(other, 4), 2) for other in plan.rotation]
        entries["rotation"] = _block("[]", others)
    if plan.full is not None:
        entries["full"] = _object(_orders(plan.full, 2), 1)
    if plan.sums:
        entries["sums"] = _block("[]", map(_sum_text, plan.sums))
    return _object(entries) + "\n"


def _orders(schedule: Schedule, indent: int = 0) -> dict[str, str]:
    """What differs between the schedules of a plan: the paths and the lanes."""
    microbatches = []
    for microbatch, run in groupby(schedule.microbatches):
        microbatches.append(_microbatch_text(microbatch, len(list(run))))
    lanes = map(_lane_text, schedule.lanes)
    return {
        "microbatches": _block("[]", microbatches, indent),
        "lanes": _block("[]", lanes, indent),
    }


def _object(entries: Mapping[str, str], depth: int = 0) -> str:
    """A JSON object with one key a line."""
    margin = "  " * depth
    lines = [f'{margin}  "{key}": {text}' for key, text in entries.items()]
    return "{\n" + ",\n".join(lines) + f"\n{margin}}}"


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file."""
    write_text(path, dump_plan(plan))


def _block(brackets: str, lines: Iterable[str], indent: int = 0) -> str:
    """One line per item, indented by `indent` more than usual."""
    margin = " " * (4 + indent)
    end = " " * (2 + indent) + brackets[1]
    return f"{brackets[0]}\n{margin}" + f",\n{margin}".join(lines) + f"\n{end}"


def _stage_text(stage: Stage) -> str:
    return json.dumps({"rank": stage.rank, "part": stage.part})


def _microbatch_text(microbatch: MicroBatch, count: int) -> str:
    entry: dict[str, int | tuple[int, ...]] = {
        "path": microbatch.path,
        "tokens": microbatch.tokens,
    }
    if microbatch.cuts != (0, microbatch.tokens):
        entry["cuts"] = microbatch.cuts
    if count > 1:
        entry["count"] = count
    return json.dumps(entry)


def _sum_text(plan: SumPlan) -> str:
    entry: dict[str, object] = {"parts": plan.parts, "kind": plan.kind.value}
    if plan.kind is SumKind.TWO_LEVELS:
        entry |= {"groups": plan.groups, "whole": plan.whole}
    else:
        entry["ranks"] = plan.ranks
    if plan.kind is SumKind.DIRECT:
        entry["shares"] = plan.shares
    return json.dumps(entry)


def _lane_text(lane: Iterable[Action]) -> str:
    actions = " ".join(map(str, lane))
    return f'"{actions}"'


# ---------------------------------------------------------------- reading
def read_plan(path: str | Path) -> Plan:
    """The plan in a file."""
    return load_plan(read_text(path, "plan"), str(path))


def load_plan(text: str, source: str = "plan.json") -> Plan:
    """The plan in a text; errors call the file `source`."""
    page = JsonPage(text, source, "plan")
    top = check_kind(page, parse_json(page), PLAN_VERSION)
    read_entry(
        page,
        (),
        top,
        ("penstock", "version", "stages", "microbatches", "lanes"),
        (
            "name",
            "partition",
            "recompute",
            "tensor",
            "shard",
            "why",
            "rotation",
            "full",
            "sums",
        ),
    )
    stages = read_list(page, ("stages",), top["stages"], _stage)
    schedule = _schedule(page, (), top, stages)

    def read_orders(page: Page, steps: Steps, value: Value) -> Schedule:
        entry = read_entry(page, steps, value, ("microbatches", "lanes"), ())
        return _schedule(page, steps, entry, stages)

    given = top.get("rotation", [])
    rotation = read_list(page, ("rotation",), given, read_orders)
    full = None
    if "full" in top:
        full = read_orders(page, ("full",), top["full"])
    partition = read_list(page, ("partition",), top.get("partition", []), read_whole)
    recompute = read_list(page, ("recompute",), top.get("recompute", []), read_whole)
    tensor = shard = 0  # The config decides.
    if "tensor" in top or "shard" in top:
        tensor = read_whole(page, ("tensor",), top.get("tensor", 1), least=1)
        shard = read_whole(page, ("shard",), top.get("shard", 1), least=1)
    why = read_facts_field(page, ("why",), top.get("why", {}))
    name = read_string(page, ("name",), top.get("name", ""))
    if max(recompute, default=-1) >= schedule.parts:
        what = f"there is no part {max(recompute)}; the parts are 0 to {schedule.parts - 1}"
        fail(page, ("recompute",), what, "name only parts that exist")
    try:
        plan = Plan(schedule, name, partition, why, recompute, tensor, shard)
    except ShapeError as error:
        advice = "give the number of layers of every part, in the order of the parts"
        fail(page, ("partition",), str(error), advice)
    try:
        plan = replace(plan, rotation=rotation, full=full)
    except ShapeError as error:
        key = "rotation" if str(error).startswith("rotation") else "full"
        fail(page, (key,), str(error), "plan the paths again, all at once")
    sums = read_list(page, ("sums",), top.get("sums", []), _sum)
    try:
        return replace(plan, sums=sums)
    except ShapeError as error:
        fail(page, ("sums",), str(error), "every rank that holds a part sums it")


def _schedule(
    page: Page, steps: Steps, entry: Mapping[str, Value], stages: tuple[Stage, ...]
) -> Schedule:
    """A schedule over these stages, from an entry with its micro-batches and lanes."""
    runs = read_list(page, (*steps, "microbatches"), entry["microbatches"], _run)
    lanes = read_list(page, (*steps, "lanes"), entry["lanes"], _lane)
    _check_counts(page, (*steps, "microbatches"), runs, sum(map(len, lanes)))
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
    page: Page, steps: Steps, runs: Sequence[tuple[MicroBatch, int]], actions: int
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


def _stage(page: Page, steps: Steps, value: Value) -> Stage:
    entry = read_entry(page, steps, value, ("rank", "part"), ())
    rank = read_whole(page, (*steps, "rank"), entry["rank"])
    part = read_whole(page, (*steps, "part"), entry["part"])
    return Stage(rank, part)


def _sum(page: Page, steps: Steps, value: Value) -> SumPlan:
    """How the replicas of a part sum their gradients."""
    entry = read_entry(
        page, steps, value, ("parts", "kind"), ("ranks", "shares", "groups", "whole")
    )
    kind = read_string(page, (*steps, "kind"), entry["kind"])
    kinds = [one.value for one in SumKind]
    if kind not in kinds:
        what = f"there is no kind of sum called {kind[:SHOWN_CHARACTERS]!r}"
        fail(page, (*steps, "kind"), what, f"the kinds are {', '.join(kinds)}")

    def read_group(page: Page, steps: Steps, value: Value) -> tuple[int, ...]:
        return read_list(page, steps, value, read_whole)

    parts = read_list(page, (*steps, "parts"), entry["parts"], read_whole)
    ranks = read_list(page, (*steps, "ranks"), entry.get("ranks", []), read_whole)
    shares = read_list(page, (*steps, "shares"), entry.get("shares", []), read_number)
    groups = read_list(page, (*steps, "groups"), entry.get("groups", []), read_group)
    whole = read_flag(page, (*steps, "whole"), entry.get("whole", False))
    if groups:
        ranks = tuple(rank for group in groups for rank in group)
    try:
        return SumPlan(parts, SumKind(kind), ranks, shares, groups, whole)
    except ShapeError as error:
        fail(page, steps, str(error), "plan the paths again, or correct the entry")


def _run(page: Page, steps: Steps, value: Value) -> tuple[MicroBatch, int]:
    """A micro-batch, and how many times it follows itself."""
    entry = read_entry(page, steps, value, ("path", "tokens"), ("cuts", "count"))
    path = read_list(page, (*steps, "path"), entry["path"], read_whole)
    tokens = read_whole(page, (*steps, "tokens"), entry["tokens"])
    cuts = read_list(page, (*steps, "cuts"), entry.get("cuts", []), read_whole)
    count = read_whole(page, (*steps, "count"), entry.get("count", 1), least=1)
    return MicroBatch(path, tokens, cuts), count


def _lane(page: Page, steps: Steps, value: Value) -> tuple[Action, ...]:
    actions = []
    for number, word in enumerate(read_string(page, steps, value).split()):
        actions.append(_action(page, steps, number, word))
    return tuple(actions)


def _action(page: Page, steps: Steps, number: int, word: str) -> Action:
    try:
        return parse_action(word)
    except FileError:
        shown = word[:SHOWN_CHARACTERS]
        what = f"word {number} of lane {steps[-1]}, {shown!r}, is not an action"
        advice = "an action is stage, op F B I or W, micro-batch: 2F0, or sliced 2F0.1"
        fail(page, steps, what, advice, number)
