"""plan.json: a schedule with its partition and the reasons for it, for people and programs to read, edit and keep.

    {
      "penstock": "plan",
      "version": 1,
      "name": "1f1b",
      "partition": [8, 8, 8],                                   layers of each part
      "why": {
        "makespan": 33.0                                        facts: text, numbers, true, false, null
      },
      "stages": [
        {"rank": 0, "part": 0},                                 one line a stage
        ...
      ],
      "microbatches": [
        {"path": [0, 1, 2], "tokens": 1024, "count": 4},        one line a run of equal micro-batches
        {"path": [0, 2], "tokens": 1024, "cuts": [0, 512, 1024]}
      ],
      "lanes": [
        "0F0 0F1 0F2 0B0 ...",                                  one line a lane
        ...
      ]
    }

Every error names the file, the line and the column, draws the line with a caret, and says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain, groupby
from pathlib import Path

from penstock.errors import FileError, ScheduleError, ShapeError
from penstock.formats.fields import (
    fact_text,
    read_entry,
    read_facts_field,
    read_list,
    read_string,
    read_text,
    read_top,
    read_whole,
    write_text,
)
from penstock.formats.text import SHOWN_CHARACTERS, Json, Page, Steps, fail
from penstock.ir.action import Action, parse_action
from penstock.ir.plan import Plan
from penstock.ir.schedule import MicroBatch, Schedule, Stage

PLAN_VERSION = 1


# ---------------------------------------------------------------- writing
def dump_plan(plan: Plan) -> str:
    """The text of a plan; `load_plan` makes an equal plan of it."""
    schedule = plan.schedule
    entries = {
        "penstock": '"plan"',
        "version": str(PLAN_VERSION),
        "name": json.dumps(plan.name),
    }
    if plan.partition:
        entries["partition"] = json.dumps(plan.partition)
    if plan.why:
        entries["why"] = _block(
            "{}",
            (f"{json.dumps(key)}: {fact_text(key, fact)}" for key, fact in plan.why),
        )
    entries["stages"] = _block(
        "[]", (json.dumps({"rank": s.rank, "part": s.part}) for s in schedule.stages)
    )
    runs = (
        (microbatch, len(list(run)))
        for microbatch, run in groupby(schedule.microbatches)
    )
    entries["microbatches"] = _block(
        "[]", (_microbatch_text(microbatch, count) for microbatch, count in runs)
    )
    entries["lanes"] = _block(
        "[]", (f'"{" ".join(map(str, lane))}"' for lane in schedule.lanes)
    )
    return (
        "{\n"
        + ",\n".join(f'  "{key}": {text}' for key, text in entries.items())
        + "\n}\n"
    )


def write_plan(plan: Plan, path: str | Path) -> None:
    """Writes a plan's text to a file."""
    write_text(path, dump_plan(plan))


def _block(brackets: str, lines: Iterable[str]) -> str:
    return f"{brackets[0]}\n    " + ",\n    ".join(lines) + f"\n  {brackets[1]}"


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


# ---------------------------------------------------------------- reading
def read_plan(path: str | Path) -> Plan:
    """The plan in a file."""
    return load_plan(read_text(path), str(path))


def load_plan(text: str, source: str = "plan.json") -> Plan:
    """The plan that a text holds; `source` is the name of the file in errors."""
    page = Page(text, source)
    top = read_top(page, PLAN_VERSION)
    read_entry(
        page,
        (),
        top,
        ("penstock", "version", "stages", "microbatches", "lanes"),
        ("name", "partition", "why"),
    )
    stages = read_list(page, ("stages",), top["stages"], _stage)
    runs = read_list(page, ("microbatches",), top["microbatches"], _microbatches)
    lanes = read_list(page, ("lanes",), top["lanes"], _lane)
    _enough_actions(page, runs, sum(map(len, lanes)))
    try:
        schedule = Schedule(
            stages, tuple(chain.from_iterable([m] * count for m, count in runs)), lanes
        )
    except ScheduleError as error:
        raise ScheduleError(
            (f"{source}: {error.faults[0]}", *error.faults[1:])
        ) from None
    partition = read_list(page, ("partition",), top.get("partition", []), read_whole)
    try:
        why = read_facts_field(page, ("why",), top.get("why", {}))
        return Plan(
            schedule, read_string(page, ("name",), top.get("name", "")), partition, why
        )
    except ShapeError as error:
        fail(
            page,
            ("partition",),
            str(error),
            "give the layers of every part, from part 0 on",
        )


def _enough_actions(
    page: Page, runs: tuple[tuple[MicroBatch, int], ...], actions: int
) -> None:
    """Keeps a count that was mistyped from filling the memory; smaller gaps are the checker's to draw."""
    least = 2 * sum(len(m.path) * m.slices * count for m, count in runs)
    if least > 100 * actions + 10_000 or (least and not actions):
        what = f"the micro-batches ask for {least} actions at least, but the lanes hold {actions}"
        fail(
            page, ("microbatches",), what, "is a count too large, or are lanes missing?"
        )


# ---------------------------------------------------------------- one value each
def _stage(page: Page, steps: Steps, value: Json) -> Stage:
    entry = read_entry(page, steps, value, ("rank", "part"), ())
    return Stage(
        read_whole(page, (*steps, "rank"), entry["rank"]),
        read_whole(page, (*steps, "part"), entry["part"]),
    )


def _microbatches(page: Page, steps: Steps, value: Json) -> tuple[MicroBatch, int]:
    entry = read_entry(page, steps, value, ("path", "tokens"), ("cuts", "count"))
    path = read_list(page, (*steps, "path"), entry["path"], read_whole)
    tokens = read_whole(page, (*steps, "tokens"), entry["tokens"])
    cuts = read_list(page, (*steps, "cuts"), entry.get("cuts", []), read_whole)
    return MicroBatch(path, tokens, cuts), read_whole(
        page, (*steps, "count"), entry.get("count", 1), least=1
    )


def _lane(page: Page, steps: Steps, value: Json) -> tuple[Action, ...]:
    words = read_string(page, steps, value).split()
    return tuple(_action(page, steps, words, number) for number in range(len(words)))


def _action(page: Page, steps: Steps, words: list[str], number: int) -> Action:
    word = words[number]
    try:
        return parse_action(word)
    except FileError:
        what = f"word {number} of lane {steps[-1]}, {word[:SHOWN_CHARACTERS]!r}, is not an action"
        fail(
            page,
            steps,
            what,
            "an action is stage, op F B I or W, micro-batch: 2F0, or sliced 2F0.1",
            number,
        )
