"""Simulated annealing: random moves, of which bad ones are undone, more and more strictly.

    move ──► simulate ──► no worse: keep it
      ▲                   worse: keep it by chance, less likely the worse it is and the later it comes
      └── undo ◄───────── otherwise

A subclass knows what a move changes and how long the step then takes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import Generic, NamedTuple, TypeVar

from penstock.plan.paths.budget import Budget
from penstock.plan.paths.solution import Solution

HOT = 0.004  # first temperature, as a share of the makespan
WARM = 0.002  # first temperature of a search that starts from a good solution
SUM_WEIGHT = 0.25  # how much the mean end of the parts' sums counts besides
Details = TypeVar("Details")


class Trial(NamedTuple, Generic[Details]):
    """What a simulation of the current state gives."""

    value: float  # to minimize
    end: float  # of the step
    details: Details


class Found(NamedTuple):
    """The best solution that moves have led to."""

    solution: Solution
    end: float
    value: float
    is_complete: bool  # whether all moves were tried before the budget ended


class MoveSearch(ABC, Generic[Details]):
    """A state that random moves change."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.undo: list[Callable[[], None]] = []  # how to take the last move back
        self.value = math.inf
        self.end = math.inf

    @abstractmethod
    def solution(self) -> Solution:
        """Return the current solution."""

    @abstractmethod
    def _move(self) -> bool:
        """Make a random move. Return False if it turned out to be impossible or without effect."""

    @abstractmethod
    def _simulate(self) -> Trial[Details]:
        """Return how good the current state is."""

    @abstractmethod
    def _note(self, details: Details) -> None:
        """Remember what the next moves need to know about the current state."""

    def keep(self, trial: Trial[Details]) -> None:
        """Take the simulated state as the current one."""
        self.value = trial.value
        self.end = trial.end
        self._note(trial.details)

    def anneal(
        self, budget: Budget, steps: int, scale: float, hot: float, cold: float
    ) -> Found:
        """Try `steps` moves while the temperature falls from `hot` to `cold`, as shares of `scale`.

        The temperature depends on `steps` only, so a larger budget continues where a smaller one
        stopped.
        """
        best = self.solution()
        least = (self.end, self.value)
        done = 0
        while done < steps and not budget.spent:
            heat = scale * temperature(hot, cold, done / steps)
            done += 1
            budget.used += 1
            self.undo.clear()
            if not self._move():
                self._undo_move()
                continue
            trial = self._simulate()
            if not self._accepts(trial.value, heat):
                self._undo_move()
                continue
            self.keep(trial)
            if (trial.end, trial.value) < least:
                best = self.solution()
                least = (trial.end, trial.value)
        return Found(best, *least, done == steps)

    def _accepts(self, value: float, heat: float) -> bool:
        """Whether a move is kept: always if it is no worse, otherwise by chance."""
        if value <= self.value:
            return True
        return self.random.random() < math.exp(-(value - self.value) / heat)

    def _undo_move(self) -> None:
        while self.undo:
            self.undo.pop()()


def temperature(hot: float, cold: float, done: float) -> float:
    """Return the temperature when this share of the moves is done: it falls from `hot` to `cold`."""
    return cold + (hot - cold) * (1.0 - done) ** 2
