"""The CSV in which torch.distributed.pipelining keeps its schedules: a row a rank, a cell an action.

    0F0,0F1,,,0B0,,0B1                      an empty cell is a bubble
    ,1F0,1B0,1F1,1B1                        2F0 2B0 2I0 2W0: as here; stage, op, micro-batch
    2UNSHARD,2RECV_F0,2F0,2SEND_B0          communication and sharding: passed over, `lower` derives it
    (0F8;7B2)OVERLAP_F_B                    two actions at once: read one after the other

A stage lives on the rank whose row runs it; every micro-batch visits all stages in order, and there are as many as
stage 0 runs forwards. What such a CSV cannot hold (token slices, replicas, paths that skip or reorder) is not written.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from penstock.errors import FileError, ScheduleError
from penstock.ir.action import Action, Op, parse_action
from penstock.ir.schedule import MicroBatch, Schedule, Stage, schedule_of

_COMPUTES = re.compile(r"[0-9]{1,9}[FBIW][0-9]{1,9}")
_DERIVED = re.compile(
    r"[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*"
)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class _Cell(NamedTuple):
    """An action, and where the file has it."""

    action: Action
    rank: int
    column: int  # counted from 1, as a table's reader counts


# ---------------------------------------------------------------- reading
def load_torch_csv(text: str, source: str = "schedule.csv") -> Schedule:
    """The schedule of a CSV of torch's, with or without its communication."""
    rows = _rows(text, source)
    cells = [
        cell for rank, row in enumerate(rows) for cell in _cells(row, rank, source)
    ]
    homes = _homes(cells, source)
    stages = [Stage(homes[stage], stage) for stage in range(len(homes))]
    starts = {
        cell.action.microbatch
        for cell in cells
        if cell.action.op is Op.F and cell.action.stage == 0
    }
    if not starts:
        raise FileError(
            f"{source}: stage 0 runs no forward\n  its forwards say how many micro-batches there are"
        )
    lanes: list[list[Action]] = [[] for _ in rows]
    for cell in cells:
        lanes[cell.rank].append(cell.action)
    try:
        return schedule_of(
            stages, [MicroBatch(tuple(range(len(stages))))] * len(starts), lanes
        )
    except ScheduleError as error:
        raise ScheduleError(
            (f"{source}: {error.faults[0]}", *error.faults[1:])
        ) from None


def _rows(text: str, source: str) -> list[list[str]]:
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise FileError(
            f"{source} is not a CSV: {error}\n  a schedule is a row a rank, a cell an action"
        ) from None
    while rows and not rows[-1]:
        rows.pop()  # blank lines at the end
    return rows


def _cells(row: Sequence[str], rank: int, source: str) -> Iterator[_Cell]:
    for column, text in enumerate(row, start=1):
        overlap = _OVERLAP.fullmatch(text.strip())
        for word in overlap[1].split(";") if overlap else [text]:
            if _COMPUTES.fullmatch(word.strip()):
                yield _Cell(parse_action(word.strip()), rank, column)
            elif word.strip() and not _DERIVED.fullmatch(word.strip()):
                raise FileError(
                    f"{source}: row {rank + 1}, column {column}: {word.strip()[:60]!r} is not an action of torch's\n\n"
                    f"{_draw(row, rank, column)}\n"
                    "  actions are 2F0 2B0 2I0 2W0, 2SEND_F0 and the like, 2UNSHARD and the like, (2F1;3B0)OVERLAP_F_B"
                )


def _draw(row: Sequence[str], rank: int, column: int, around: int = 4) -> str:
    """A row around one of its cells, with a caret under it."""
    begin = max(column - 1 - around, 0)
    before = "".join(
        f"{cell}," for cell in [*(["..."] if begin else []), *row[begin : column - 1]]
    )
    head = f"  row {rank + 1} | {before}"
    cell = row[column - 1][:60]
    return f"{head}{cell}{',...' if column < len(row) else ''}\n{' ' * len(head)}{'^' * len(cell)}"


def _homes(cells: Iterable[_Cell], source: str) -> dict[int, int]:
    """The rank of each stage."""
    first: dict[int, _Cell] = {}
    for cell in cells:
        home = first.setdefault(cell.action.stage, cell)
        if home.rank != cell.rank:
            raise FileError(
                f"{source}: stage {cell.action.stage} is on two ranks: {home.action} in row {home.rank + 1}, column "
                f"{home.column}, and {cell.action} in row {cell.rank + 1}, column {cell.column}\n"
                "  a stage lives on one rank; in torch's CSV there are no replicas"
            )
    absent = [stage for stage in range(len(first)) if stage not in first]
    if absent or not first:
        has = (
            f"stages up to {max(first)}, but nothing of stage {absent[0]}"
            if absent
            else "no action"
        )
        raise FileError(
            f"{source} has {has}\n  stages are counted from 0, and every one runs"
        )
    return {stage: cell.rank for stage, cell in first.items()}


# ---------------------------------------------------------------- writing
def dump_torch_csv(schedule: Schedule) -> str:
    """The schedule as torch's CSV of computation alone; parts become torch's stages. Tokens are not kept."""
    _refuse_what_torch_cannot(schedule)
    part = [stage.part for stage in schedule.stages]
    text = io.StringIO(newline="")
    rows = [
        [str(action._replace(stage=part[action.stage])) for action in lane]
        for lane in schedule.lanes
    ]
    csv.writer(text).writerows(row or [""] for row in rows)  # an idle rank: one bubble
    return text.getvalue()


def _refuse_what_torch_cannot(schedule: Schedule) -> None:
    of_part: dict[int, int] = {}
    for number, stage in enumerate(schedule.stages):
        other = of_part.setdefault(stage.part, number)
        if other != number:
            _refuse(
                f"stages {other} and {number} are replicas of part {stage.part}",
                "each part lives on one rank",
            )
    for number, microbatch in enumerate(schedule.microbatches):
        if microbatch.slices > 1:
            _refuse(
                f"micro-batch {number} is cut into {microbatch.slices} token slices",
                "micro-batches are whole",
            )
        parts = [schedule.stages[stage].part for stage in microbatch.path]
        if parts != list(range(len(schedule.stages))):
            visits = " ".join(map(str, parts))
            what = (
                f"micro-batch {number} visits parts {visits} of {len(schedule.stages)}"
            )
            _refuse(what, "every micro-batch visits all parts, 0 first, in order")


def _refuse(what: str, rule: str) -> None:
    raise FileError(
        f"torch's CSV cannot hold this schedule: {what}\n  there, {rule}; plan.json holds everything"
    )
