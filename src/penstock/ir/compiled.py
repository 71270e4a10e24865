"""Loops over arrays that run as plain Python on small input and compiled on large input.

Both come from the same source. So a small schedule never waits for a compiler, nor for its
import, and a large one runs as machine code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Plain Python takes about as long for this many actions as loading the compiled loop.
MIN_COMPILED_SIZE = 20_000


@cache
def _compile(loop: Callable[P, R]) -> Callable[P, R]:
    import numba  # noqa: PLC0415  # takes half a second to import

    compiled: Callable[P, R] = numba.njit(cache=True)(loop)
    return compiled


def compile_if_large(loop: Callable[P, R], size: int) -> Callable[P, R]:
    """The loop itself for small input, or its compiled version for large input."""
    return _compile(loop) if size >= MIN_COMPILED_SIZE else loop
