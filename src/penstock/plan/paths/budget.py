"""How long a search may go on.

A budget counts moves, not seconds, so that a seed gives the same plan on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.errors import ShapeError

TimeSource = Callable[[], float]


def never_stop() -> bool:
    """The default of `stop`: nobody asks the search to end."""
    return False


@dataclass(slots=True)
class Budget:
    """Ends a search after `iterations` moves.

    The search ends earlier if `seconds` pass on the `clock`, or once `stop` returns True.
    `cut_short` then becomes True.
    """

    iterations: int
    seconds: float | None = None
    clock: TimeSource = time.perf_counter
    stop: Callable[[], bool] = never_stop
    used: int = 0
    cut_short: bool = False
    begin: float = field(init=False)

    def __post_init__(self) -> None:
        if self.iterations < 0:
            raise ShapeError(
                f"a search cannot try {self.iterations} moves; give 0 or more"
            )
        self.begin = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.begin

    @property
    def spent(self) -> bool:
        """Whether the search has to end."""
        if self.used >= self.iterations or self.cut_short:
            return True
        if self.stop():
            self.cut_short = True
        elif self.seconds is not None:
            self.cut_short = self.elapsed >= self.seconds
        return self.cut_short

    def part(self, iterations: int) -> Budget:
        """Return a budget for a part of the search, of at most `iterations` moves."""
        left = max(self.iterations - self.used, 0)
        seconds = None
        if self.seconds is not None:
            seconds = max(self.seconds - self.elapsed, 0.0)
        return Budget(min(iterations, left), seconds, self.clock, self.stop)

    def count(self, part: Budget) -> None:
        """Count what a part of the search has used."""
        self.used += part.used
        self.cut_short = self.cut_short or part.cut_short
