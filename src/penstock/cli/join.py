"""`penstock join`, with which a worker of this machine joins a run of another one."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Optional

import typer

from penstock.cli.tables import tell
from penstock.errors import ConfigError, RunError


def join_command(
    address: Annotated[
        str,
        typer.Argument(metavar="HOST:PORT", help="Where the run listens (run.listen)."),
    ],
    key: Annotated[
        Path,
        typer.Option(
            help="The key of the run: a copy of key.pem from the folder of the run."
        ),
    ] = Path("key.pem"),
    folder: Annotated[
        Optional[Path],
        typer.Option(
            help="Where to keep the tokens and the config of the run, so that joining again is quicker. "
            "Default: a folder that is removed at the end."
        ),
    ] = None,
    listen: Annotated[
        Optional[str],
        typer.Option(
            metavar="HOST:PORT",
            help="Where other workers reach this one. Default: any port of the address from which this machine "
            "reaches the run.",
        ),
    ] = None,
    behind_nat: Annotated[
        bool,
        typer.Option(
            "--behind-nat",
            help="Other machines cannot connect to this one: it connects to all of them.",
        ),
    ] = False,
) -> None:
    """Join a run of `penstock train` on another machine as one more worker.

    It takes a rank without a worker after the next step, or waits as a spare until a worker is lost. It needs the key
    of the run and no other files: config, plan, tokens and weights come over encrypted connections.

    Example: penstock join 10.0.0.1:29500 --key key.pem
    """
    from rich.console import Console

    from penstock.crew.admission import Joining
    from penstock.train.launch import ended_by_signals
    from penstock.train.screen import log_to
    from penstock.version import read_version

    if behind_nat and listen is not None:
        raise ConfigError(
            "--listen says where other machines reach this one, --behind-nat that they cannot: give one of them"
        )
    log_to(Console(stderr=True), everything=False)
    with ended_by_signals(partial(tell, "ended")), ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="penstock-")))
        joining = Joining(address, key, folder, tell)
        joining.clean_up = stack.close
        verdict = joining.run("" if behind_nat else listen, read_version())
    if verdict.error:
        raise RunError(verdict.text)
    ending = "the run has ended without this spare"
    if verdict.step:
        ending = f"the run has done {verdict.step} steps"
    tell("over", ending)
