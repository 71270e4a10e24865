"""Makes glibc keep freed memory, so that activations of the same size do not cost page faults again.

glibc returns large freed blocks to the system at once. The next activation of the same size
then costs one page fault per 4 KiB. A pipeline frees and allocates the same sizes all the
time. A split backward, which keeps its gradients until W, pays most: the faults took 7% of the
backward of a Llama layer when we measured it, and nothing once glibc kept the memory.

Memory that is used only once a step is better returned. Examples are the weights of a whole
layer on their way between processes, and gloo's own copies of them. Kept, they would leave
holes between longer-lived blocks, separately in each thread's heap, that little else fits.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# Parameters of glibc's mallopt.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
# The free memory that the heap keeps at its end, and the largest block that it keeps.
KEPT_BYTES = 1 << 30
# The largest block that is kept where weights are sharded: for layers that compute,
SHARDED_KEPT_BYTES = 8 << 20
# and for weights that are gathered and gradients that are summed.
TRANSIENT_KEPT_BYTES = 1 << 20


def keep_freed_memory(max_block: int = KEPT_BYTES) -> bool:
    """Make glibc keep freed blocks smaller than `max_block`; return whether it accepted.

    This applies to blocks that are allocated from now on.
    """
    libc = _glibc()
    if libc is None:
        return False
    if not libc.mallopt(TRIM_THRESHOLD, KEPT_BYTES):
        return False
    return bool(libc.mallopt(MMAP_THRESHOLD, max_block))


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Large blocks allocated in this context are returned to the system once freed."""
    keep_freed_memory(TRANSIENT_KEPT_BYTES)
    try:
        yield
    finally:
        keep_freed_memory(SHARDED_KEPT_BYTES)


@cache
def _glibc() -> ctypes.CDLL | None:
    library, _ = platform.libc_ver()
    return ctypes.CDLL(None) if library == "glibc" else None
