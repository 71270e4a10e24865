"""The memory of this machine that new processes can have."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> float:
    """Return the bytes of RAM that new processes can have, within a container's limit."""
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = [line for line in lines if line.startswith("MemAvailable:")]
        limits += [1024.0 * int(line.split()[1]) for line in free]
    except (OSError, ValueError):
        pass  # This is not Linux.
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = (CGROUP / "memory.current").read_text(encoding="ascii")
        if limit != "max":
            limits.append(max(0.0, float(limit) - float(used)))
    except (OSError, ValueError):
        pass  # This is not a container, or one with an older interface.
    return min(limits)
