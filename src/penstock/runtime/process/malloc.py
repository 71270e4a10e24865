"""Memory that was freed stays with the process, on CPUs.

glibc gives large freed blocks back to the system at once, and the next activation of the same size costs a page fault
for every 4 KiB. A pipeline frees and takes the same sizes all the time; a split backward, which keeps its gradients
until W, pays most: 7% of a Llama layer's backward here, 0% with this.

What is used once a step is better given back: the weights of a whole layer on their way between processes, and gloo's
own copies of them, leave holes between what stays, each thread's in a heap of its own, that little else fits into.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT_BYTES = (
    1 << 30
)  # bytes of free memory at the end of the heap before any is given back; and the largest block kept so
USED, ONCE = (
    8 << 20,
    1 << 20,
)  # the same where weights are shared: of layers that compute, that are gathered or summed


def keep_freed_memory(most: int = KEPT_BYTES) -> bool:
    """Tells glibc to keep what is freed of blocks taken from now on, if less than so much; whether it could be told."""
    libc = _glibc()
    return (
        libc is not None
        and bool(libc.mallopt(TRIM_THRESHOLD, KEPT_BYTES))
        and bool(libc.mallopt(MMAP_THRESHOLD, most))
    )


@contextmanager
def taken_once() -> Iterator[None]:
    """Large blocks that are taken here go back to the system when they are freed, whenever that is."""
    keep_freed_memory(ONCE)
    try:
        yield
    finally:
        keep_freed_memory(USED)


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
