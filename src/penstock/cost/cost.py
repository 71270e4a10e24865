"""What things take: seconds, bytes, links. Everything that can be simulated has a `Cost`.

A cost may depend on an action's op, stage and tokens (first, last), and on nothing else of it: the simulator asks once
for each such combination, not once for each of a million actions.
"""

from __future__ import annotations

from typing import Protocol

from penstock.ir.action import Action
from penstock.ir.schedule import Schedule


class Cost(Protocol):
    """Seconds and bytes of everything a schedule does."""

    @property
    def serial(self) -> bool:
        """Whether a link carries one message at a time (else all at once, each at full speed)."""
        ...

    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes."""
        ...

    def held(self, schedule: Schedule, action: Action) -> float:
        """Bytes a forward leaves on its rank until its backward is done."""
        ...

    def kept(self, schedule: Schedule, action: Action) -> float:
        """Of these, bytes an I leaves there until its W is done."""
        ...

    def message(self, schedule: Schedule, action: Action) -> float:
        """Bytes of an action's result, if it is sent to another rank."""
        ...

    def weights(self, schedule: Schedule, stage: int) -> float:
        """Bytes of a stage's weights, gradients and optimizer state."""
        ...

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte is there."""
        ...

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes a second, `math.inf` for as many as you like."""
        ...
