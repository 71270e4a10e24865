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
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, groupby
from math import isfinite
from pathlib import Path
from typing import TypeAlias, TypeVar

from penstock.errors import FileError, ScheduleError, ShapeError
from penstock.ir.action import Action, parse_action
from penstock.ir.page import LONGEST, Json, Page, Steps, fail, fail_at, key_at, kind_of, name_of, parse_json
from penstock.ir.schedule import MicroBatch, Schedule, Stage

VERSION = 1
LARGEST = 2**31 - 1  # of the numbers of a schedule
FACTS_ARE = "facts are text, finite numbers, true, false and null"

Fact: TypeAlias = str | float | int | bool | None
Facts: TypeAlias = tuple[tuple[str, Fact], ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, the layers of each part ((): not said), and why it was chosen, as plain facts."""

    schedule: Schedule
    name: str = ""
    partition: tuple[int, ...] = ()
    why: Facts = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "why", tuple(dict(self.why).items()))  # the last of two facts of one name
        parts, given = self.schedule.parts, len(self.partition)
        if self.partition and given != parts:
            raise ShapeError(f"the partition is for {given} parts, but the schedule has {parts}")
        if min(self.partition, default=0) < 0:
            raise ShapeError(f"a part has {min(self.partition)} layers; the least is 0")

    @property
    def facts(self) -> dict[str, Fact]:
        """Why, by name."""
        return dict(self.why)


# ---------------------------------------------------------------- writing
def dump_plan(plan: Plan) -> str:
    """The text of a plan; `load_plan` makes an equal plan of it."""
    schedule = plan.schedule
    entries = {"penstock": '"plan"', "version": str(VERSION), "name": json.dumps(plan.name)}
    if plan.partition:
        entries["partition"] = json.dumps(plan.partition)
    if plan.why:
        entries["why"] = _block("{}", (f"{json.dumps(key)}: {_fact_text(key, fact)}" for key, fact in plan.why))
    entries["stages"] = _block("[]", (json.dumps({"rank": s.rank, "part": s.part}) for s in schedule.stages))
    runs = ((microbatch, len(list(run))) for microbatch, run in groupby(schedule.microbatches))
    entries["microbatches"] = _block("[]", (_microbatch_text(microbatch, count) for microbatch, count in runs))
    entries["lanes"] = _block("[]", (f'"{" ".join(map(str, lane))}"' for lane in schedule.lanes))
    return "{\n" + ",\n".join(f'  "{key}": {text}' for key, text in entries.items()) + "\n}\n"


def write_plan(plan: Plan, path: str | Path) -> None:
    """Writes a plan's text to a file."""
    text = dump_plan(plan)
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:
        raise FileError(f"cannot write {path}: {_reason(error)}\n  name a file in a folder that exists") from None


def _block(brackets: str, lines: Iterable[str]) -> str:
    return f"{brackets[0]}\n    " + ",\n    ".join(lines) + f"\n  {brackets[1]}"


def _microbatch_text(microbatch: MicroBatch, count: int) -> str:
    entry: dict[str, int | tuple[int, ...]] = {"path": microbatch.path, "tokens": microbatch.tokens}
    if microbatch.cuts != (0, microbatch.tokens):
        entry["cuts"] = microbatch.cuts
    if count > 1:
        entry["count"] = count
    return json.dumps(entry)


def _fact_text(key: str, fact: Fact) -> str:
    try:
        if isinstance(fact, str | float | int | bool | None):
            return json.dumps(fact, allow_nan=False)
    except ValueError:  # not finite, or of too many digits
        pass
    raise FileError(f"a plan cannot hold the fact {key!r}, a {type(fact).__name__}\n  {FACTS_ARE}")


# ---------------------------------------------------------------- reading
def read_plan(path: str | Path) -> Plan:
    """The plan in a file."""
    return load_plan(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """The text of a file, or a `FileError` that says why there is none."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not text: byte {error.start} is no UTF-8\n  is it the right file? a plan is a text, plan.json"
        ) from None
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {path}: {_reason(error)}\n  name a plan.json that exists") from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def load_plan(text: str, source: str = "plan.json") -> Plan:
    """The plan that a text holds; `source` is the name of the file in errors."""
    page = Page(text, source)
    top = _plan_of_this_version(page)
    _keys(page, (), top, ("penstock", "version", "stages", "microbatches", "lanes"), ("name", "partition", "why"))
    stages = _each(page, ("stages",), top["stages"], _stage)
    runs = _each(page, ("microbatches",), top["microbatches"], _microbatches)
    lanes = _each(page, ("lanes",), top["lanes"], _lane)
    _enough_actions(page, runs, sum(map(len, lanes)))
    try:
        schedule = Schedule(stages, tuple(chain.from_iterable([m] * count for m, count in runs)), lanes)
    except ScheduleError as error:
        raise ScheduleError((f"{source}: {error.faults[0]}", *error.faults[1:])) from None
    partition = _each(page, ("partition",), top.get("partition", []), _whole)
    try:
        return Plan(schedule, _text(page, ("name",), top.get("name", "")), partition, _why(page, top.get("why", {})))
    except ShapeError as error:
        fail(page, ("partition",), str(error), "give the layers of every part, from part 0 on")


def _plan_of_this_version(page: Page) -> dict[str, Json]:
    top = parse_json(page)
    if not isinstance(top, dict) or "penstock" not in top:
        fail(page, (), "this is not a plan of Penstock's", 'a plan begins with {"penstock": "plan", "version": 1')
    if top["penstock"] != "plan":
        what = f"this is a file of Penstock's, but its kind is {kind_of(top['penstock'])}, not \"plan\""
        fail(page, ("penstock",), what, "give a plan.json")
    version = _whole(page, ("version",), top["version"], least=1) if "version" in top else VERSION
    if version > VERSION:
        what = f"this plan is of version {version}, and this Penstock reads versions up to {VERSION}"
        fail(page, ("version",), what, "upgrade Penstock")
    return top


def _enough_actions(page: Page, runs: tuple[tuple[MicroBatch, int], ...], actions: int) -> None:
    """Keeps a count that was mistyped from filling the memory; smaller gaps are the checker's to draw."""
    least = 2 * sum(len(m.path) * m.slices * count for m, count in runs)
    if least > 100 * actions + 10_000 or (least and not actions):
        what = f"the micro-batches ask for {least} actions at least, but the lanes hold {actions}"
        fail(page, ("microbatches",), what, "is a count too large, or are lanes missing?")


# ---------------------------------------------------------------- one value each
def _stage(page: Page, steps: Steps, value: Json) -> Stage:
    entry = _keys(page, steps, value, ("rank", "part"), ())
    return Stage(_whole(page, (*steps, "rank"), entry["rank"]), _whole(page, (*steps, "part"), entry["part"]))


def _microbatches(page: Page, steps: Steps, value: Json) -> tuple[MicroBatch, int]:
    entry = _keys(page, steps, value, ("path", "tokens"), ("cuts", "count"))
    path = _each(page, (*steps, "path"), entry["path"], _whole)
    tokens = _whole(page, (*steps, "tokens"), entry["tokens"])
    cuts = _each(page, (*steps, "cuts"), entry.get("cuts", []), _whole)
    return MicroBatch(path, tokens, cuts), _whole(page, (*steps, "count"), entry.get("count", 1), least=1)


def _lane(page: Page, steps: Steps, value: Json) -> tuple[Action, ...]:
    words = _text(page, steps, value).split()
    return tuple(_action(page, steps, words, number) for number in range(len(words)))


def _action(page: Page, steps: Steps, words: list[str], number: int) -> Action:
    word = words[number]
    try:
        return parse_action(word)
    except FileError:
        what = f"word {number} of lane {steps[-1]}, {word[:LONGEST]!r}, is not an action"
        fail(page, steps, what, "an action is stage, op F B I or W, micro-batch: 2F0, or sliced 2F0.1", number)


def _why(page: Page, value: Json) -> Facts:
    facts = []
    for key, fact in _dict(page, ("why",), value).items():
        if isinstance(fact, (dict, list)) or (isinstance(fact, float) and not isfinite(fact)):
            what = f"the fact {key!r} is {kind_of(fact)}"
            fail(page, ("why", key), what, FACTS_ARE)
        facts.append((key, fact))
    return tuple(facts)


def _each(page: Page, steps: Steps, value: Json, read: Callable[[Page, Steps, Json], T]) -> tuple[T, ...]:
    if not isinstance(value, list):
        fail(page, steps, f"{name_of(steps)} is {kind_of(value)}, not a list", "write it in [ and ]")
    return tuple(read(page, (*steps, number), item) for number, item in enumerate(value))


def _dict(page: Page, steps: Steps, value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        fail(page, steps, f"{name_of(steps)} is {kind_of(value)}, not an object", "write it in { and }")
    return value


def _keys(
    page: Page, steps: Steps, value: Json, required: Collection[str], optional: Collection[str]
) -> dict[str, Json]:
    entry = _dict(page, steps, value)
    known = (*required, *optional)
    for key in entry:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            at, what = key_at(page.text, steps, key), f"{name_of(steps)} has no key {key!r}"
            fail_at(page, at, what, f"{hint}known: {', '.join(known)}", len(json.dumps(key)))
    for key in required:
        if key not in entry:
            fail(page, steps, f"{name_of(steps)} lacks the key {key!r}", f"it needs {', '.join(required)}")
    return entry


def _whole(page: Page, steps: Steps, value: Json, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        what = f"{name_of(steps)} is {kind_of(value)}, not a whole number"
        fail(page, steps, what, f"write a number from {least} on")
    if not least <= value <= LARGEST:
        fail(page, steps, f"{name_of(steps)} is out of range", f"write a number from {least} to {LARGEST}")
    return value


def _text(page: Page, steps: Steps, value: Json) -> str:
    if not isinstance(value, str):
        fail(page, steps, f"{name_of(steps)} is {kind_of(value)}, not a text", 'write it in " and "')
    return value
