"""The two CSV formats in which torch.distributed.pipelining keeps its schedules.

The first has a row per rank and a cell per action:

    0F0,0F1,,,0B0,,0B1                      an empty cell is a bubble
    ,1F0,1B0,1F1,1B1                        2F0 2B0 2I0 2W0 mean the same as here: stage, op, micro-batch
    2UNSHARD,2RECV_F0,2F0,2WAIT_SEND_F0     communication and sharding are skipped: `lower` derives them
    (0F8;7B2)OVERLAP_F_B                    two actions at once are read one after the other

A stage lives on the rank whose row runs it. Every micro-batch visits all stages in order,
and the forwards of stage 0 give the number of micro-batches. A schedule that this format
cannot express (token slices, replicas, paths that skip or reorder) is refused.

The second, `compute_comms`, has the messages too, in the order that `verify` proves. torch's runtime runs these rows as
they stand, without a lowering of its own:

    0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,...,0REDUCE_GRAD,0RESHARD
    1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,...

There a message has the number of the stage that sends or receives it: 0SEND_F0 and 1RECV_F0 are the two ends of one
message. UNSHARD, REDUCE_GRAD and RESHARD are for stages under FSDP, whose weights are gathered once and whose
gradients are summed once in a step; REDUCE_GRAD also scales gradients.

torch 2.15 wants a wait for every SEND and REDUCE_GRAD, such as 0WAIT_SEND_F0, which older versions cannot read.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from penstock.errors import FileError, ScheduleError
from penstock.formats.text import Page, Steps, Stretch, fail, read_text
from penstock.ir.action import FORWARD, WEIGHTS, Action, parse_action
from penstock.ir.program import (
    Free,
    InstructionLane,
    Program,
    Receive,
    RunAction,
    Send,
)
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of

SHOWN_CELL_CHARACTERS = 60
ACTIONS_TEXT = (
    "actions are 2F0 2B0 2I0 2W0, 2SEND_F0 and the like, 2UNSHARD and the like, "
    "(2F1;3B0)OVERLAP_F_B"
)

_COMPUTE = re.compile(r"[0-9]{1,9}[FBIW][0-9]{1,9}")
_DERIVED = re.compile(
    r"[0-9]+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD|WAIT_SEND_[FB]|WAIT_REDUCE_GRAD)[0-9]*"
)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_CELL = re.compile(
    r'(?P<content>"(?:[^"]|"")*"[^,\r\n]*|[^,\r\n]*)(?P<end>,|\r\n|\r|\n|\Z)'
)
_TORCH_WITH_WAITS = (2, 15)
_VERSION = re.compile(r"(\d+)\.(\d+)")
_INPUT_BACKWARD = re.compile(r"(\d+)[BI](\d+)")


class CsvPage(Page):
    """A CSV text; the steps to a cell are its row and its column, counted from 0."""

    __slots__ = ()

    def find_value(self, steps: Steps) -> Stretch:
        """Where a cell stands."""
        row = 0
        column = 0
        for cell in _CELL.finditer(self.text):
            if (row, column) == steps:
                return Stretch(*cell.span("content"))
            column += 1
            if cell["end"] != ",":
                row += 1
                column = 0
        return Stretch(0, 1)


class _Cell(NamedTuple):
    """An action, and its row and column in the file."""

    action: Action
    rank: int
    column: int


# ---------------------------------------------------------------- reading
def read_torch_csv(path: str | Path) -> Schedule:
    """The schedule in a CSV file of torch."""
    return load_torch_csv(read_text(path, "schedule"), str(path))


def load_torch_csv(text: str, source: str = "schedule.csv") -> Schedule:
    """The schedule in a CSV of torch, with or without its communication."""
    page = CsvPage(text, source, "schedule")
    rows = _rows(page)
    cells: list[_Cell] = []
    for rank, row in enumerate(rows):
        for column, content in enumerate(row):
            cells += _actions(page, rank, column, content)
    homes = _homes(page, cells)
    stages = [Stage(homes[stage], stage) for stage in range(len(homes))]
    count = _count_microbatches(page, cells)
    lanes: list[list[Action]] = [[] for _ in rows]
    for cell in cells:
        lanes[cell.rank].append(cell.action)
    path = tuple(range(len(stages)))
    try:
        return schedule_of(stages, [MicroBatch(path)] * count, lanes)
    except ScheduleError as error:
        first, *others = error.faults
        raise ScheduleError((f"{source}: {first}", *others)) from None


def _rows(page: Page) -> list[list[str]]:
    try:
        rows = list(csv.reader(io.StringIO(page.text, newline="")))
    except csv.Error as error:
        raise FileError(
            f"{page.source} is not a CSV: {error}\n"
            "  a schedule has a row per rank and a cell per action"
        ) from None
    while rows and not rows[-1]:
        rows.pop()  # blank lines at the end
    return rows


def _actions(page: Page, rank: int, column: int, text: str) -> Iterator[_Cell]:
    overlap = _OVERLAP.fullmatch(text.strip())
    words = overlap[1].split(";") if overlap else [text]
    for word in map(str.strip, words):
        if _COMPUTE.fullmatch(word):
            yield _Cell(parse_action(word), rank, column)
        elif word and not _DERIVED.fullmatch(word):
            shown = word[:SHOWN_CELL_CHARACTERS]
            what = f"{shown!r} is not one of torch's actions"
            fail(page, (rank, column), what, ACTIONS_TEXT)


def _homes(page: Page, cells: Iterable[_Cell]) -> dict[int, int]:
    """The rank of each stage."""
    first: dict[int, _Cell] = {}
    for cell in cells:
        home = first.setdefault(cell.action.stage, cell)
        if home.rank != cell.rank:
            what = (
                f"stage {cell.action.stage} is on two ranks: "
                f"{home.action} in row {home.rank + 1}, column {home.column + 1}, "
                f"and {cell.action} in row {cell.rank + 1}, column {cell.column + 1}"
            )
            advice = "a stage lives on one rank; torch's CSV has no replicas"
            fail(page, (cell.rank, cell.column), what, advice)
    if not first:
        raise _incomplete(page, "no action")
    missing = set(range(len(first))) - set(first)
    if missing:
        content = f"stages up to {max(first)}, but not stage {min(missing)}"
        raise _incomplete(page, content)
    return {stage: cell.rank for stage, cell in first.items()}


def _incomplete(page: Page, content: str) -> FileError:
    return FileError(
        f"{page.source} has {content}\n"
        "  stages are numbered from 0, and each of them must run"
    )


def _count_microbatches(page: Page, cells: Iterable[_Cell]) -> int:
    microbatches = {
        action.microbatch
        for action, _, _ in cells
        if action.op.kind == FORWARD and action.stage == 0
    }
    if not microbatches:
        raise FileError(
            f"{page.source}: stage 0 runs no forward\n"
            "  its forwards give the number of micro-batches"
        )
    return len(microbatches)


# ---------------------------------------------------------------- writing
def dump_torch_csv(schedule: Schedule) -> str:
    """The schedule as a torch CSV without communication; parts become torch's stages.

    The numbers of tokens are lost.
    """
    check_expressible(schedule)
    rows = []
    for lane in schedule.lanes:
        row = [str(_on_part(schedule, action)) for action in lane]
        rows.append(row or [""])  # an idle rank: one bubble
    return _csv_text(rows)


def _on_part(schedule: Schedule, action: Action) -> Action:
    """The action as torch has it, whose stages are our parts."""
    return action._replace(stage=schedule.stages[action.stage].part)


def _csv_text(rows: list[list[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


def check_expressible(schedule: Schedule) -> None:
    """Refuse a schedule that torch's CSV cannot express."""
    stage_of_part: dict[int, int] = {}
    for number, stage in enumerate(schedule.stages):
        other = stage_of_part.setdefault(stage.part, number)
        if other != number:
            what = f"stages {other} and {number} are replicas of part {stage.part}"
            raise _inexpressible(what, "each part lives on one rank")
    for action in chain.from_iterable(schedule.lanes):
        if action.op.kind > WEIGHTS:
            what = f"{action} has the op {action.op.row.label}"
            raise _inexpressible(what, "actions are F, B, I and W")
    for number, microbatch in enumerate(schedule.microbatches):
        if microbatch.slices > 1:
            what = f"micro-batch {number} is cut into {microbatch.slices} token slices"
            raise _inexpressible(what, "micro-batches are whole")
        parts = [schedule.stages[stage].part for stage in microbatch.path]
        if parts != list(range(len(schedule.stages))):
            visits = " ".join(map(str, parts))
            total = len(schedule.stages)
            what = f"micro-batch {number} visits parts {visits} of {total}"
            rule = "every micro-batch visits all parts in order, from part 0 on"
            raise _inexpressible(what, rule)


def _inexpressible(what: str, rule: str) -> FileError:
    return FileError(
        f"torch's CSV cannot hold this schedule: {what}\n"
        f"  there, {rule}; plan.json holds everything"
    )


# ---------------------------------------------------------------- messages
def dump_torch_comms(program: Program) -> str:
    """The program as a torch CSV with communication; parts become torch's stages.

    It is written for the torch that is installed, or for the newest one.
    """
    return _csv_text(torch_rows(program, installed_torch_waits()))


def installed_torch_waits() -> bool:
    """Whether the installed torch wants a wait for every send and sum, as torch 2.15 does; True without torch."""
    try:
        numbers = _VERSION.match(version("torch"))
    except PackageNotFoundError:
        return True
    return not numbers or tuple(map(int, numbers.groups())) >= _TORCH_WITH_WAITS


def torch_rows(program: Program, waits: bool) -> list[list[str]]:
    """The words of each rank's row.

    >>> from penstock import lower, make
    >>> program = lower(make("1f1b", ranks=2, microbatches=1))
    >>> torch_rows(program, waits=False)[1]
    ['1UNSHARD', '1RECV_F0', '1F0', '1B0', '1SEND_B0', '1REDUCE_GRAD', '1RESHARD']
    >>> torch_rows(program, waits=True)[1][4:]
    ['1SEND_B0', '1REDUCE_GRAD', '1WAIT_REDUCE_GRAD', '1RESHARD', '1WAIT_SEND_B0']
    """
    check_expressible(program.schedule)
    rows = [_row(program.schedule, lane) for lane in program.lanes]
    return [list(_with_waits(row)) for row in rows] if waits else rows


def _with_waits(row: list[str]) -> Iterator[str]:
    """Add a wait for every send and sum, in the places where torch's own lowering has them.

    A forward's message has certainly arrived when its gradient has come back, so that the wait takes no time. Other
    messages may still be on their way and are waited for at the end.
    """
    sent: list[str] = []
    for word in row:
        yield word
        if "SEND" in word:
            sent.append(word)
        elif word.endswith("REDUCE_GRAD"):
            yield _wait_of(word)
        elif backward := _INPUT_BACKWARD.fullmatch(word):
            stage, microbatch = backward.groups()
            arrived = f"{stage}SEND_F{microbatch}"
            if arrived in sent:
                sent.remove(arrived)
                yield _wait_of(arrived)
    yield from map(_wait_of, sent)


def _wait_of(word: str) -> str:
    """0SEND_F1 becomes 0WAIT_SEND_F1."""
    return re.sub("[A-Z]", r"WAIT_\g<0>", word, count=1)


def _row(schedule: Schedule, lane: InstructionLane) -> list[str]:
    runs = [one.action for one in lane if isinstance(one, RunAction)]
    last = {action.stage: action for action in runs}  # completes its gradients
    row: list[str] = []
    gathered: set[int] = set()
    ending: list[str] = []  # what follows once the last message of a stage is sent
    for instruction in lane:
        action = _on_part(schedule, instruction.action)
        part = action.stage
        # F for a forward's result, B for that of a whole or an input gradient.
        is_forward = action.op.kind == FORWARD
        result = f"{'F' if is_forward else 'B'}{action.microbatch}"
        if isinstance(instruction, Free):
            continue
        if isinstance(instruction, Send):
            row.append(f"{part}SEND_{result}")
            continue
        row += ending
        ending = []
        word = str(action)
        if isinstance(instruction, Receive):
            part += 1 if is_forward else -1
            word = f"{part}RECV_{result}"
        elif last[instruction.action.stage] == instruction.action:
            ending = [f"{part}REDUCE_GRAD", f"{part}RESHARD"]
        if part not in gathered:
            gathered.add(part)
            row.append(f"{part}UNSHARD")
        row.append(word)
    return row + ending
