"""Tables of the benchmarks' pages, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: str, rows: Iterable[Sequence[str]], words: Sequence[str] = ()) -> str:
    """Heads are written "rank | makespan"; columns of words are named, all others hold numbers, which end alike."""
    names = heads.split(" | ")
    rule = "|".join("---" if name in words else "--:" for name in names)
    return "\n".join([_line(names), f"|{rule}|", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
