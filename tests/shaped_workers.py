"""One of two ranks on a limited link; prints the time of two messages: `shaped_workers.py RANK ADDRESS CARD BYTES`."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from penstock.runtime import ProcessComm


def main() -> None:
    rank, address, card, size = (
        int(sys.argv[1]),
        sys.argv[2],
        sys.argv[3],
        int(sys.argv[4]),
    )
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR=address,
        MASTER_PORT="29571",
        GLOO_SOCKET_IFNAME=card,
    )
    dist.init_process_group("gloo")
    comm, x = ProcessComm(60), torch.zeros(size, dtype=torch.uint8)
    comm.barrier()
    begin = time.monotonic()
    if rank == 0:
        for one in [comm.send(x, 1), comm.send(x, 1)]:
            one.wait()
    else:
        for one in [comm.receive((size,), torch.uint8, 0) for _ in range(2)]:
            one.wait()
        sys.stdout.write(f"took {time.monotonic() - begin:.4f}\n")
        sys.stdout.flush()
    comm.barrier()


if __name__ == "__main__":
    main()
