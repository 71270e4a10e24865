"""Short texts that the ranks tell one another. They travel as raw bytes; nothing is unpickled."""

from __future__ import annotations

import torch

from penstock.runtime.comm.comm import Comm


def gather_texts(comm: Comm, text: str) -> list[str]:
    """Return the texts of all ranks, by rank; all ranks must call it."""
    everyone = tuple(range(comm.ranks))
    raw = text.encode()
    sizes = torch.zeros(comm.ranks, dtype=torch.int64)
    sizes[comm.rank] = len(raw)
    comm.add(sizes, everyone).wait()
    ends = sizes.cumsum(0).tolist()
    # Every rank fills in its own text, and a sum with zeros joins them.
    joined = torch.zeros(ends[-1] + 1, dtype=torch.uint8)
    if raw:
        end = ends[comm.rank]
        joined[end - len(raw) : end] = torch.frombuffer(
            bytearray(raw), dtype=torch.uint8
        )
    comm.add(joined, everyone).wait()
    content = joined.numpy().tobytes()
    return [
        content[begin:end].decode()
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
