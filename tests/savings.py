"""Saves the tests time that no claim needs. Importing this module is enough.

- numba keeps what it compiled in a folder that all processes share, but processes that start
  together on a fresh checkout would each compile everything. They take turns instead: whoever
  comes second finds the loop in the cache.
- Timing a model takes seconds, so that the numbers are good. Here it stops after the first few
  passes: the machine may be busy, so that no test can rely on good numbers anyway.
"""

from __future__ import annotations

import fcntl
from functools import wraps
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from penstock.measure import profile

_compile = Dispatcher.compile


@wraps(_compile)
def _compile_in_turn(self: Dispatcher, sig: Any) -> Any:
    path = self._cache.cache_path
    if path is None:  # this function is not cached
        return _compile(self, sig)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{self.py_func.__module__}.{self.py_func.__qualname__}.lock"
    # Threads of this process wait at numba's own lock, which must come first: a thread that
    # compiles one function may have to compile another one.
    with global_compiler_lock, (folder / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return _compile(self, sig)


Dispatcher.compile = _compile_in_turn
profile.QUICK_SECONDS /= 10
profile.SECONDS_PER_POINT /= 10
