"""Loops over arrays that run as plain Python when small and compiled when large.

One source, two speeds: a small schedule never waits for a compiler (nor imports one), a large one runs as machine code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

COMPILE_FROM = 20_000  # actions; plain Python takes about as long for these as loading the compiled loop does


@cache
def _compile(loop: Callable[P, R]) -> Callable[P, R]:
    import numba  # noqa: PLC0415  # half a second to import: only when it pays

    compiled: Callable[P, R] = numba.njit(cache=True)(loop)
    return compiled


def at_speed(loop: Callable[P, R], size: int) -> Callable[P, R]:
    """`loop` itself for a small `size`, its compiled twin for a large one."""
    return _compile(loop) if size >= COMPILE_FROM else loop
