"""Finds workers that have become slow, from the time that each of them worked in the last steps.

    seconds for the same work, compared with what the worker used to take
    worker 0   1.0  1.1  0.9  1.0  1.0  1.0  1.0
    worker 1   1.0  3.2  1.0  3.1  3.0  3.3  3.1      three windows in a row above the limit: it is slow
    worker 2   1.1  1.0  1.0  0.9  1.1  1.0  1.0

The numbers of a window are medians over several steps. If all workers take longer, because other
programs use their machine, nobody is slow: what counts is how much more a worker has slowed down
than the others. A worker is fast again when it has been far below the limit for as many windows, so
a worker near the limit does not change its plan again and again. A worker that is so slow that it
got no work at all gets a new chance after a while, and each time that it wastes the chance the next
one comes twice as late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import median, median_low

WINDOW_STEPS = 4  # steps of which a window has the medians
WINDOWS_TO_LEARN = 3  # from which the usual time of a worker is known
WINDOWS_TO_JUDGE = 3  # in a row, before a worker is called slow or fast again
WINDOWS_TO_RETRY = 12  # without any work, before a slow worker gets some again


class PaceWatch:
    """Watches the pace of the workers of a run. `limit` is the `slow` of elastic.mode; 0 finds nobody slow."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        # By worker: how many times as long it takes for its work. All others have pace 1.
        self.paces: dict[int, float] = {}
        self.first: dict[int, list[float]] = {}  # seconds per work in the first windows
        self.usual: dict[int, float] = {}  # seconds per work, from then on
        self.recent: dict[int, list[float]] = {}  # ratios of the last windows
        self.idle: dict[int, int] = {}  # windows in which a slow worker had no work
        self.retries: dict[int, int] = {}  # how often it got a new chance

    def hear(
        self, seconds: Mapping[int, float], work: Mapping[int, float]
    ) -> dict[int, str]:
        """Take the seconds and the work of each worker in a window; say whose pace has changed."""
        if not self.limit:
            return {}
        changes = {}
        for worker, ratio in self.compare(seconds, work).items():
            recent = [*self.recent.get(worker, []), ratio][-WINDOWS_TO_JUDGE:]
            self.recent[worker] = recent
            if len(recent) == WINDOWS_TO_JUDGE:
                changes[worker] = self.judge(worker, recent)
        for worker in list(self.paces):
            if not work.get(worker):
                changes[worker] = self.wait(worker)
        found = {worker: change for worker, change in changes.items() if change}
        if found:
            self.recent.clear()  # Everybody's work changes.
        return found

    def compare(
        self, seconds: Mapping[int, float], work: Mapping[int, float]
    ) -> dict[int, float]:
        """Return how much more each worker has slowed down than the others."""
        changes = {}
        for worker, spent in seconds.items():
            if not work.get(worker) or spent <= 0:
                continue
            rate = spent / work[worker]
            if worker in self.usual:
                changes[worker] = rate / self.usual[worker]
                continue
            first = self.first.setdefault(worker, [])
            first.append(rate)
            if len(first) == WINDOWS_TO_LEARN:
                self.usual[worker] = median(first)
        if not changes:
            return {}
        common = median_low(changes.values())
        return {worker: change / common for worker, change in changes.items()}

    def judge(self, worker: int, recent: list[float]) -> str:
        """Decide whether a worker is slow; return what is new, or nothing."""
        pace = median(recent)
        known = self.paces.get(worker)
        is_slow = known is None and min(recent) >= self.limit
        if known is not None:
            if max(recent) < math.sqrt(self.limit):
                del self.paces[worker]
                return f"worker {worker} is as fast as before again"
            is_slow = max(pace / known, known / pace) >= self.limit
        if not is_slow:
            return ""
        self.paces[worker] = max(pace, math.sqrt(self.limit))
        return f"worker {worker} takes {pace:.1f} times as long for its work as before"

    def wait(self, worker: int) -> str:
        """Count a window in which a slow worker had nothing to do; say if it gets work again."""
        self.idle[worker] = self.idle.get(worker, 0) + 1
        retries = self.retries.get(worker, 0)
        if self.idle[worker] < WINDOWS_TO_RETRY * 2**retries:
            return ""
        self.retries[worker] = retries + 1
        self.idle[worker] = 0
        del self.paces[worker]
        return f"worker {worker} was slow and gets work again, as a trial"

    def forget(self, worker: int) -> None:
        """Forget a worker that is lost; another one may get its number."""
        for known in (self.first, self.recent):
            known.pop(worker, None)
        for number in (self.paces, self.usual):
            number.pop(worker, None)
        self.idle.pop(worker, None)


class WorkWindow:
    """Collects the seconds that all ranks have worked, step after step, and tells their medians."""

    def __init__(self, tell: Callable[[list[float]], None]) -> None:
        self.tell = tell
        self.steps: list[list[float]] = []

    def put(self, seconds: list[float]) -> None:
        """Take the seconds of each rank in one step."""
        self.steps.append(seconds)
        if len(self.steps) == WINDOW_STEPS:
            self.tell([median(column) for column in zip(*self.steps, strict=True)])
            self.steps = []
