"""One of two ranks on a limited link: `shaped_workers.py RANK ADDRESS CARD BYTES` prints how long two messages take."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from penstock.runtime import ProcessComm

TRIES = 3


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[4])
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR=sys.argv[2],
        MASTER_PORT="29571",
        GLOO_SOCKET_IFNAME=sys.argv[3],
    )
    dist.init_process_group("gloo")
    comm = ProcessComm(60)
    for _ in range(TRIES):
        took = seconds_of_two_messages(comm, size)
        if rank == 1:
            sys.stdout.write(f"took {took:.4f}\n")


def seconds_of_two_messages(comm: ProcessComm, size: int) -> float:
    """How long the second rank waits for them; 0 on the first."""
    x = torch.zeros(size, dtype=torch.uint8)
    comm.barrier()
    begin = time.monotonic()
    comm.barrier()  # The first rank sends no earlier than the second one looks at its clock.
    if comm.rank == 0:
        for one in [comm.send(x, 1), comm.send(x, 1)]:
            one.wait()
        return 0.0
    for one in [comm.receive((size,), torch.uint8, 0) for _ in range(2)]:
        one.wait()
    return time.monotonic() - begin


if __name__ == "__main__":
    main()
