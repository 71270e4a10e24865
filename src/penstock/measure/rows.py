"""Tables of what all ranks have measured, one row for each rank."""

from __future__ import annotations

from torch import Tensor

from penstock.runtime.comm.comm import Comm


def gather_rows(comm: Comm, rows: Tensor) -> Tensor:
    """Collect the rows of all ranks; each fills its own and leaves the others zero."""
    comm.add(rows, tuple(range(comm.ranks))).wait()
    return rows
