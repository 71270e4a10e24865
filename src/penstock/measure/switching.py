"""Measures how much longer a forward takes right after a backward than after another forward.

    in a row    F0 F1 F2 F3 F4 B0 B1 B2 B3 B4     each action follows one of its own kind
    by turns    F0 F1 B0 F2 B1 F3 B2 F4 B3 B4     most actions follow one of the other kind

The likely reason is that an action finds in the caches what the one before it has left there.

Other measurements run actions of one kind in a row. So the difference is what a schedule pays besides if its ranks
often change between forwards and backwards, as in 1F1B. With small actions it decides between 1F1B and GPipe.
The speed of a machine changes from second to second, so both are compared within each round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.measure.probe import Probe

SEQUENCES = 5  # in flight
LEAD = 2  # sequences that have gone forward before backwards and forwards take turns
MAX_SWITCH_ROUNDS = 16
SWITCH_SECONDS = 0.6  # for all rounds, unless one round takes longer


def switch_share(probe: Probe, seconds: float, ready: Callable[[], None]) -> float:
    """Return how much longer a forward takes after a backward, as a share of its time.

    `seconds` is about how long a forward and its backward take; all ranks must pass the
    same number. `ready` is called before each flight.
    """
    rounds = int(SWITCH_SECONDS / max(2 * SEQUENCES * seconds, 1e-9))
    rounds = min(max(rounds, 1), MAX_SWITCH_ROUNDS)
    shares = []
    for _ in range(rounds):
        in_a_row = PairTimes()
        by_turns = PairTimes()
        for lead, times in ((SEQUENCES, in_a_row), (LEAD, by_turns)):
            ready()
            times.add(*probe.times_of_turns(SEQUENCES, lead))
        longer = by_turns.seconds - in_a_row.seconds
        shares.append(longer / statistics.median(in_a_row.forwards))
    return max(0.0, statistics.median(shares))


@dataclass(slots=True)
class PairTimes:
    """Times of forwards and backwards that follow an action of the other kind if actions take turns."""

    forwards: list[float] = field(default_factory=list)
    backwards: list[float] = field(default_factory=list)

    def add(self, forwards: Sequence[float], backwards: Sequence[float]) -> None:
        """Add the times of a flight, without those at its ends, which are the same in all flights."""
        self.forwards += forwards[LEAD:]
        self.backwards += backwards[1 : SEQUENCES - LEAD + 1]

    @property
    def seconds(self) -> float:
        """The median time of a forward and of a backward, added up."""
        return statistics.median(self.forwards) + statistics.median(self.backwards)
