"""A clock on which nothing takes time but sleep, for ranks that run as threads: no test on it depends on the machine.

Every thread has a clock of its own, which starts at zero. A message of a `ShapedComm` carries the time of its arrival
and the receiver sleeps until then, so that the clocks agree wherever one rank waits for another:

    rank 0   ── 0.0 ── sleep(2) ── 2.0 ── send ─┐
    rank 1   ── 0.0 ── wait ────────────────────┴─ arrives at 2.5: its clock shows 2.5
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.measure import links
from penstock.runtime import recorder

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import shaped
import sleeping

ShapedComm = shaped.ShapedComm


class VirtualTime(threading.local):
    """What the module `time` offers, with one clock a thread."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        """Put the clock of this thread forward."""
        assert seconds >= 0
        self.now += seconds

    def monotonic(self) -> float:
        """The clock of this thread."""
        return self.now

    perf_counter = monotonic


def run_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Let links, sleeping stages and measured timelines use virtual time; return the clock to read."""
    time = VirtualTime()
    for module in (links, recorder, shaped, sleeping):
        monkeypatch.setattr(module, "time", time)
    # All clocks began at zero together. Pings would ask what they show now, when some ranks are done before others.
    monkeypatch.setattr(recorder, "clock_offset", lambda comm: 0.0)
    return time.monotonic
