"""Finds a share of the GPU on which matrix products are complete.

    python -m penstock.runtime.process.gpu_share 16      prints 13 on an H200: the highest good share up to 16%

On some shares, kernels of cuBLAS leave blocks of their result unwritten, and no error tells of it. All kernels that
were seen to do so work in groups of four multiprocessors. On an H200 (torch 2.11, CUDA 13.0) it happened with 18, 20,
22, 26 and 42 of its 132 multiprocessors, so with equal shares for 3, 5, 6 or 7 workers. With 8 to 16, 30, 32, 66 and
132 all products were complete.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context

import torch

from penstock.runtime.process.mps import SHARE_VARIABLE

INCOMPLETE_EXIT_CODE = 3
# Rows of x, and the columns of x and y, in products such as those of a linear layer y = x W^T.
CHECKED_ROWS = (64, 512, 1024)
CHECKED_COLUMNS = (
    (256, 256),
    (384, 256),
    (384, 384),
    (384, 1056),
    (1056, 384),
    (512, 512),
    (768, 768),
    (1024, 1024),
    (1024, 2816),
    (2816, 1024),
    (2048, 2048),
)


def highest_good_share(highest: int, is_good: Callable[[int], bool]) -> int:
    """The highest good share up to `highest`, in percent.

    >>> highest_good_share(16, lambda share: share in (10, 13))
    13
    """
    for share in range(highest, 0, -1):
        if is_good(share):
            return share
    raise SystemExit(f"the check found them incomplete on every share up to {highest}%")


def products_are_complete(
    device: str,
    rows: Sequence[int] = CHECKED_ROWS,
    columns: Sequence[tuple[int, int]] = CHECKED_COLUMNS,
) -> bool:
    """Whether products in bfloat16 write all of their result: y = x W^T, and the gradients of x and W."""
    for tokens in rows:
        for inner, outer in columns:
            x = torch.ones(tokens, inner, device=device, dtype=torch.bfloat16)
            weight = torch.ones(outer, inner, device=device, dtype=torch.bfloat16)
            y = torch.ones(tokens, outer, device=device, dtype=torch.bfloat16)
            for a, b in ((x, weight.t()), (y, weight), (y.t(), x)):
                result = torch.full_like(a[:, :1] * b[:1], torch.nan)
                torch.mm(a, b, out=result)
                if not bool(result.isfinite().all()):
                    return False
    return True


def _is_good(share: int) -> bool:
    """Check a share in a process of its own, because a process cannot change its share."""
    os.environ[SHARE_VARIABLE] = str(share)
    child = get_context("fork").Process(target=_check)
    child.start()
    child.join()
    if child.exitcode not in (0, INCOMPLETE_EXIT_CODE):
        raise SystemExit(f"the check of {share}% ended with code {child.exitcode}")
    return child.exitcode == 0


def _check() -> None:
    if torch.cuda.is_available() and not products_are_complete("cuda"):
        raise SystemExit(INCOMPLETE_EXIT_CODE)


if __name__ == "__main__":
    sys.stdout.write(f"{highest_good_share(int(sys.argv[1]), _is_good)}\n")
