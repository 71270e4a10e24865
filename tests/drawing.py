"""Weights that every rank draws alike, also if ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Drawn = TypeVar("Drawn")

_drawing = threading.Lock()


def drawn_from(
    seed: int,
) -> Callable[[Callable[Arguments, Drawn]], Callable[Arguments, Drawn]]:
    """Seed torch before each call of a function, and let one thread at a time draw: all of them share its generator."""

    def decorate(draw: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
        @wraps(draw)
        def seeded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Drawn:
            with _drawing:
                torch.manual_seed(seed)
                return draw(*args, **kwargs)

        return seeded

    return decorate
