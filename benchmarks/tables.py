"""What the benchmarks' pages share: tables in Markdown, and with what priority they were run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence


def table(heads: str, rows: Iterable[Sequence[str]], words: Sequence[str] = ()) -> str:
    """Heads are written "rank | makespan"; columns of words are named, all others hold numbers, which end alike."""
    names = heads.split(" | ")
    rule = "|".join("---" if name in words else "--:" for name in names)
    return "\n".join([_line(names), f"|{rule}|", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def priority() -> str:
    """Of this process, in words."""
    return (
        "real-time priority"
        if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
        else "ordinary priority"
    )
