"""`penstock testbed`: lets several workers share one GPU."""

from __future__ import annotations

from typing import Annotated

import typer


def run_testbed(
    command: Annotated[list[str], typer.Argument(help="The command to run, after --")],
    workers: Annotated[
        int,
        typer.Option(help="How many processes share the GPU, each with an equal part."),
    ] = 8,
    backend: Annotated[
        str,
        typer.Option(
            help="How the processes talk: penstock_ipc (through the GPU's memory), or nccl "
            "(through sockets, as between machines)."
        ),
    ] = "penstock_ipc",
) -> None:
    """Run a command whose processes share one GPU, each with an equal part of it.

    NVIDIA's MPS is started before the command and stopped after it. With --backend nccl the processes exchange
    messages and sums as processes of different machines do, which a single GPU usually refuses.

    Example: penstock testbed --workers 8 -- penstock train --set schedule.ranks=8 --set run.device=cuda
    """
    from penstock.runtime.process.mps import run_in_testbed

    raise typer.Exit(run_in_testbed(workers, command, backend))
