"""The verb that makes several workers of one GPU: `penstock testbed`, added to those of `penstock.cli.app`."""

from __future__ import annotations

from typing import Annotated

import typer


def run_testbed(
    command: Annotated[list[str], typer.Argument(help="What to run, after --")],
    workers: Annotated[
        int,
        typer.Option(
            help="Processes that will share the GPU, each with an equal part of it."
        ),
    ] = 8,
) -> None:
    """Run a command whose processes share one GPU, each with a part of it: NVIDIA's MPS is started around it and ended.

    Example: penstock testbed --workers 8 -- penstock train --set schedule.ranks=8 --set run.device=cuda
    """
    from penstock.runtime.process.mps import run_in_testbed

    raise typer.Exit(run_in_testbed(workers, command))


def add_testbed_command(app: typer.Typer) -> None:
    """Adds the verb above to a command line."""
    app.command("testbed")(run_testbed)
