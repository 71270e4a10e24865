"""The CSV format in which torch.distributed.pipelining keeps its schedules.

It has a row per rank and a cell per action:

    0F0,0F1,,,0B0,,0B1                      an empty cell is a bubble
    ,1F0,1B0,1F1,1B1                        2F0 2B0 2I0 2W0 mean the same as here: stage, op, micro-batch
    2UNSHARD,2RECV_F0,2F0,2WAIT_SEND_F0     communication and sharding are skipped: `lower` derives them
    (0F8;7B2)OVERLAP_F_B                    two actions at once are read one after the other

A stage lives on the rank whose row runs it. Every micro-batch visits all stages in order,
and the forwards of stage 0 give the number of micro-batches. A schedule that this format
cannot express (token slices, replicas, paths that skip or reorder) is refused.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.errors import FileError, ScheduleError
from penstock.formats.text import Page, Steps, Stretch, fail, read_text
from penstock.ir.action import FORWARD, Action, parse_action
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
_CELL = re.compile(r'"(?:[^"]|"")*"[^,\r\n]*|[^,\r\n]*')
_LINE_END = re.compile(r"\r\n|\r|\n")


class CsvPage(Page):
    """A CSV text; the steps to a cell are its row and its column, counted from 0."""

    __slots__ = ()

    def find_value(self, steps: Steps) -> Stretch:
        """Where a cell stands."""
        row = 0
        column = 0
        here = 0
        while True:
            cell = _CELL.match(self.text, here)
            assert cell is not None, "this expression also matches nothing"
            if (row, column) == steps:
                return Stretch(*cell.span())
            here = cell.end()
            line_end = _LINE_END.match(self.text, here)
            if line_end is not None:
                here = line_end.end()
                row += 1
                column = 0
            elif here < len(self.text):
                here += 1  # the comma
                column += 1
            else:
                return Stretch(0, 1)

    def find_key(self, steps: Steps) -> Stretch:
        """Where a cell stands: a CSV has no keys."""
        return self.find_value(steps)

    def opening(self, version: int) -> str:
        """The first words of a schedule."""
        return "0F0"


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
    for stage in range(len(first)):
        if stage not in first:
            last = max(first)
            raise _incomplete(page, f"stages up to {last}, but not stage {stage}")
    return {stage: cell.rank for stage, cell in first.items()}


def _incomplete(page: Page, content: str) -> FileError:
    return FileError(
        f"{page.source} has {content}\n"
        "  stages are numbered from 0, and each of them must run"
    )


def _count_microbatches(page: Page, cells: Iterable[_Cell]) -> int:
    microbatches = set()
    for cell in cells:
        if cell.action.op.kind == FORWARD and cell.action.stage == 0:
            microbatches.add(cell.action.microbatch)
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
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    for lane in schedule.lanes:
        row = []
        for action in lane:
            part = schedule.stages[action.stage].part
            row.append(str(action._replace(stage=part)))
        writer.writerow(row or [""])  # an idle rank: one bubble
    return text.getvalue()


def check_expressible(schedule: Schedule) -> None:
    """Refuse a schedule that torch's CSV cannot express."""
    stage_of_part: dict[int, int] = {}
    for number, stage in enumerate(schedule.stages):
        other = stage_of_part.setdefault(stage.part, number)
        if other != number:
            what = f"stages {other} and {number} are replicas of part {stage.part}"
            raise _inexpressible(what, "each part lives on one rank")
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
