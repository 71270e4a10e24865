"""What a cost is: the seconds and bytes of everything that a schedule does.

Everything that can be simulated has a `Cost`. A cost may depend on the op, the stage
and the token range of an action, and on nothing else about it. The simulator relies on
that: it asks once for each such combination instead of once for each of a million
actions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from penstock.cost.allreduce import ring_seconds
from penstock.cost.buffers import BufferedMessage
from penstock.ir.action import Action
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import REAL_UNITS, Units


class Cost(ABC):
    """Seconds and bytes of a schedule.

    A subclass must say how long an action computes. Everything else has a default: no
    memory, no message bytes, and links that take no time.
    """

    __slots__ = ()

    @property
    def units(self) -> Units:
        """Whether this cost counts seconds and bytes or the units of the papers."""
        return REAL_UNITS

    @abstractmethod
    def seconds(self, schedule: Schedule, action: Action) -> float:
        """How long an action computes."""

    def pause(self, schedule: Schedule, action: Action) -> float:
        """How long the rank rests after an action. The action's message leaves before."""
        return 0.0

    @property
    def switch(self) -> float:
        """The share of its time that a forward takes longer if the action before it on its rank is a backward."""
        return 0.0

    def held(self, schedule: Schedule, action: Action) -> float:
        """Bytes that a forward leaves on its rank until its backward is done."""
        return 0.0

    def kept(self, schedule: Schedule, action: Action) -> float:
        """Bytes that an I leaves on its rank until its W is done."""
        return self.held(schedule, action)

    def rebuilt(self, schedule: Schedule, action: Action) -> float:
        """Bytes of activations that a backward recomputes, and holds while it runs."""
        return 0.0

    def message(self, schedule: Schedule, action: Action) -> float:
        """Bytes of an action's result, if it is sent to another rank."""
        return 0.0

    def weights(self, schedule: Schedule, stage: int) -> float:
        """Bytes of a stage's weights, gradients and optimizer state."""
        return 0.0

    def tied(self, schedule: Schedule) -> float:
        """Bytes of weights, with their gradients and optimizer state, that the first and the last part share.

        A rank that holds both parts holds them once.
        """
        return 0.0

    def updates(self, schedule: Schedule) -> list[float]:
        """Seconds of the optimizer on each rank, after the last action."""
        return [0.0] * schedule.ranks

    def working(self, schedule: Schedule, action: Action) -> float:
        """Bytes that exist only while an action runs, besides those that it recomputes."""
        return 0.0

    def carried(self, schedule: Schedule, action: Action) -> float:
        """Bytes of the keys and values of the tokens that an action works on. They are part of `held`."""
        return 0.0

    def gradients(self, schedule: Schedule, stage: int) -> float:
        """Bytes of a stage's gradients, without those of tied weights. Replicas sum them."""
        return 0.0

    def tied_gradients(self, schedule: Schedule) -> float:
        """Bytes of the gradients of weights that the first and the last part share."""
        return 0.0

    def sum_seconds(self, ranks: Sequence[int], size: float) -> float:
        """How long these ranks take to sum `size` bytes of gradients.

        The default is a ring over their links: 2 (n-1) steps, each with one n-th of the bytes.
        """
        if len(ranks) < 2 or size <= 0:
            return 0.0
        latency = np.array([[self._hop(a, b) for b in ranks] for a in ranks])
        byte = np.array([[self._byte(a, b) for b in ranks] for a in ranks])
        return ring_seconds(latency, byte, size)

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """When these ranks have summed `size` bytes of gradients, which each has `ready` at its own time.

        By default the sum begins when the last rank is ready.
        """
        return max(ready) + self.sum_seconds(ranks, size)

    def _hop(self, source: int, target: int) -> float:
        return 0.0 if source == target else self.latency(source, target)

    def _byte(self, source: int, target: int) -> float:
        return 0.0 if source == target else 1.0 / self.bandwidth(source, target)

    @property
    def serial(self) -> bool:
        """Whether a link carries one message at a time, or any number at full speed."""
        return False

    @property
    def channels(self) -> int | None:
        """How many channels the messages of a rank share; None if they do not wait for each other."""
        return None

    @property
    def buffers(self) -> tuple[BufferedMessage, ...]:
        """How long messages that share channels keep their ranks busy, by size; empty if until they have arrived."""
        return ()

    @property
    def handover(self) -> float:
        """Seconds that a shared processor loses when it goes from one rank to another."""
        return 0.0

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte of a message arrives."""
        return 0.0

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes per second; `math.inf` means that bytes take no time."""
        return math.inf
