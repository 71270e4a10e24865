"""Measures the backend `penstock_ipc`: hops, small chunks through eight workers, and the cost of a waiting host.

    penstock testbed --workers 8 -- python benchmarks/gpu/transport.py --out transport.json

A chunk is a chain of matrix products. The ideal time of M chunks over P workers is M + P - 1 chunks, each as long as
on the slowest worker when all workers compute side by side without messages. Both are measured in turns.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from bench import DRY, REAL, Size, arguments, gathered, note, quartiles, write
from torch import Tensor

from penstock.measure.links import settle
from penstock.runtime import Comm, spawn

ROWS, CHUNKS, ROUNDS = 512, 200, 5
SIZES = (1 << 10, 1 << 20, 16 << 20)


def work(comm: Comm, size: Size, ranks: int) -> dict[str, Any]:
    """All of it, on one rank."""
    found: dict[str, Any] = {"ranks": ranks, "right": right(comm, size)}
    note(comm, "messages, sums and broadcasts are right")
    found["hops"] = hops(comm, size)
    note(comm, f"hops {found['hops']}")
    found["chunks"] = []
    for products in (2, 4, 8, 16, 64) if size.device == "cuda" else (1, 2):
        found["chunks"].append(chunks(comm, size, products))
        note(comm, f"chunks {found['chunks'][-1]}")
    found["waiting"] = waiting(comm, size)
    note(comm, f"waiting {found['waiting']}")
    return found


def right(comm: Comm, size: Size) -> bool:
    """Messages round the ring, sums, broadcasts, gathers: compared with what they must be."""
    rank, ranks = comm.rank, comm.ranks
    real = size.device == "cuda"
    for count in (1, 1000, 1 << 20, 5_000_001) if real else (1, 1000):
        x = torch.full((count,), float(rank), device=size.device)
        for turn in range(5):
            sent = comm.send(x + turn, (rank + 1) % ranks)
            came = comm.receive((count,), torch.float32, (rank - 1) % ranks).wait()
            sent.wait()
            assert bool((came == (rank - 1) % ranks + turn).all()), (rank, count, turn)
    for count in (1, 999, 3_000_001) if real else (1, 999):
        for dtype in (torch.float32, torch.float64, torch.int64):
            z = torch.full((count,), rank + 1, device=size.device, dtype=dtype)
            comm.add(z, tuple(range(ranks))).wait()
            assert bool((z == ranks * (ranks + 1) // 2).all()), (rank, count)
        b = torch.full((count,), float(rank), device=size.device)
        dist.broadcast(b, 1)
        assert bool((b == 1).all())
        out = [torch.empty(count, device=size.device) for _ in range(ranks)]
        dist.all_gather(out, torch.full((count,), float(rank), device=size.device))
        assert all(bool((one == n).all()) for n, one in enumerate(out))
    comm.barrier()
    return True


def hops(comm: Comm, size: Size) -> dict[int, float]:
    """Seconds of one way, by bytes: half of there and back."""
    found = {}
    for count in SIZES if size.device == "cuda" else SIZES[:1]:
        x = torch.zeros(count // 4, device=size.device)
        took = []
        for _ in range(3):
            settle(size.device)
            comm.barrier()
            begin = time.perf_counter()
            for _ in range(50):
                if comm.rank == 0:
                    comm.send(x, 1).wait()
                    comm.receive((count // 4,), torch.float32, 1).wait()
                elif comm.rank == 1:
                    came = comm.receive((count // 4,), torch.float32, 0).wait()
                    comm.send(came, 0).wait()
            settle(size.device)
            took.append((time.perf_counter() - begin) / 100)
        found[count] = min(took)
    return found


def chunk(x: Tensor, weight: Tensor, products: int) -> Tensor:
    for _ in range(products):
        x = x @ weight
    return x


def chunks(comm: Comm, size: Size, products: int) -> dict[str, Any]:
    """Chunks through all workers, against as many without messages."""
    kind = torch.bfloat16 if size.device == "cuda" else torch.float32
    width = size.config.width
    weight = torch.randn(width, width, device=size.device, dtype=kind) * 0.03
    x = torch.randn(ROWS, width, device=size.device, dtype=kind)
    count = CHUNKS if size.device == "cuda" else 5
    rank, ranks = comm.rank, comm.ranks
    chunk(x, weight, products)
    alone, through, share = [], [], []
    for _ in range(1 + ROUNDS):
        settle(size.device)
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            chunk(x, weight, products)
        settle(size.device)
        alone.append(max(gathered(comm, (time.perf_counter() - begin) / count, size)))
        comm.barrier()
        begin, used = time.perf_counter(), time.process_time()
        out = []
        for _ in range(count):
            came = comm.receive((ROWS, width), kind, rank - 1).wait() if rank else x
            y = chunk(came, weight, products)
            if rank < ranks - 1:
                out.append(comm.send(y, rank + 1))
                if len(out) > 16:
                    out.pop(0).wait()
        settle(size.device)
        took = time.perf_counter() - begin
        through.append(max(gathered(comm, took, size)))
        share.append(max(gathered(comm, (time.process_time() - used) / took, size)))
    ratios = [
        (count + ranks - 1) * a / t for a, t in zip(alone[1:], through[1:], strict=True)
    ]
    return {
        "seconds": quartiles(alone[1:])[0],
        "efficiency": quartiles(ratios)[0],
        "spread": quartiles(ratios)[1:],
        "host": quartiles(share[1:])[0],
    }


def waiting(comm: Comm, size: Size) -> float:
    """The share of a core that a rank takes while it waits a second for a message."""
    settle(size.device)
    comm.barrier()
    used, begin = time.process_time(), time.perf_counter()
    if comm.rank == 0:
        time.sleep(1.0)
        comm.send(torch.zeros(1, device=size.device), 1).wait()
    elif comm.rank == 1:
        comm.receive((1,), torch.float32, 0).wait()
    settle(size.device)
    share = (time.process_time() - used) / (time.perf_counter() - begin)
    return gathered(comm, share, size)[1]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    given = parser.parse_args()
    ranks, size = (2, DRY) if given.dry else (given.ranks, REAL)
    write(
        given.out,
        spawn(
            ranks,
            work,
            size,
            ranks,
            patience=60.0,
            backend="gloo" if given.dry else "penstock_ipc",
        )[0],
    )


if __name__ == "__main__":
    main()
