"""What the pages of the benchmarks share: Markdown tables, and the priority of the process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence


def table(heads: str, rows: Iterable[Sequence[str]], words: Sequence[str] = ()) -> str:
    """A Markdown table. `heads` is written "rank | makespan". Columns are right-aligned unless `words` names them."""
    names = heads.split(" | ")
    rule = "|".join("---" if name in words else "--:" for name in names)
    return "\n".join([_line(names), f"|{rule}|", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def priority() -> str:
    """The scheduling priority of this process, in words."""
    return (
        "real-time priority"
        if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
        else "ordinary priority"
    )
