"""Ranks of a test as threads, each of which makes its own connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def on_ranks(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work` on a thread per rank; return results or errors."""
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
