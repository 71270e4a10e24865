"""What the pages of the benchmarks share: Markdown tables, and the priority of the process."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence


def table(heads: str, rows: Iterable[Sequence[str]], words: Sequence[str] = ()) -> str:
    """A Markdown table. `heads` is written "rank | makespan". Columns are right-aligned unless `words` names them."""
    names = heads.split(" | ")
    rule = "|".join("---" if name in words else "--:" for name in names)
    return "\n".join([_line(names), f"|{rule}|", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def middle_and_range(values: Sequence[float], digits: str, unit: str = "") -> str:
    """The median of several values, with the smallest and the largest."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:{digits}}{unit} ({least:{digits}} to {most:{digits}})"


def priority() -> str:
    """The scheduling priority of this process, in words."""
    return (
        "real-time priority"
        if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
        else "ordinary priority"
    )
