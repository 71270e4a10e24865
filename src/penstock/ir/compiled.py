"""Loops over arrays that run as plain Python on small input and compiled on large input.

Both come from the same source. So a small schedule never waits for a compiler, nor for its
import, and a large one runs as machine code. A search that looks at many small schedules
says so with `many_schedules`, and gets compiled loops for these too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Plain Python takes about as long for this many actions as loading the compiled loop.
MIN_COMPILED_SIZE = 20_000
_is_search = ContextVar("_is_search", default=False)


@cache
def _compile(loop: Callable[P, R]) -> Callable[P, R]:
    import numba  # noqa: PLC0415  # takes half a second to import

    compiled: Callable[P, R] = numba.njit(cache=True)(loop)
    return compiled


def compile_if_large(loop: Callable[P, R], size: int) -> Callable[P, R]:
    """The loop itself for small input, or its compiled version for large input."""
    if size >= MIN_COMPILED_SIZE or _is_search.get():
        return _compile(loop)
    return loop


@contextmanager
def many_schedules() -> Iterator[None]:
    """Use compiled loops for schedules of any size, as long as the `with` block runs."""
    token = _is_search.set(True)
    try:
        yield
    finally:
        _is_search.reset(token)
