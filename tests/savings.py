"""Saves the tests time that no claim needs. Importing this module is enough.

- numba keeps what it compiled in a folder that all processes share, but processes that start
  together on a fresh checkout would each compile everything. They take turns instead: whoever
  comes second finds the loop in the cache.
- Measuring a model takes seconds, so that the numbers are good. Here everything
  is timed once or twice: the machine may be busy, so that no test can rely on good numbers
  anyway.
"""

from __future__ import annotations

import fcntl
from functools import wraps
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from penstock.measure import overhead, probe
from penstock.measure import profile as measured
from penstock.train.before import forecast, profile

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
measured.QUICK_SECONDS = 0.0
measured.SECONDS_PER_POINT = 0.0
profile.QUICK_ROUNDS = 1
forecast.FEW_ROUNDS = 2
forecast.MANY_ROUNDS = 2
probe.TIMED_UPDATES = 2
probe.CACHE_SCRUB_BYTES = 1 << 20
overhead.OVERHEAD_STEPS = 3
overhead.OVERHEAD_WARM_UP = 1
