"""Weights that every rank draws alike, also if ranks are threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import TypeVar

import torch

Drawn = TypeVar("Drawn")

# Proofs on other threads draw from torch's generator too, so weights are drawn once and then copied.
_drawing = threading.RLock()  # reentrant, because one drawing may call another


def drawn_from(seed: int) -> Callable[[Callable[[], Drawn]], Callable[[], Drawn]]:
    """Draw with torch's generator seeded the first time that a function is called, and give each caller a copy."""

    def decorate(draw: Callable[[], Drawn]) -> Callable[[], Drawn]:
        @cache
        def drawn() -> Drawn:
            torch.manual_seed(seed)
            return draw()

        @wraps(draw)
        def copied() -> Drawn:
            with _drawing:
                return copy.deepcopy(drawn())

        return copied

    return decorate
