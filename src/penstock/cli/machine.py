"""Commands about this machine: `doctor` looks at it, `testbed` divides its GPU, `join` lends it to a run elsewhere."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from penstock.cli.terminal import (
    JsonFlag,
    console,
    print_json,
    print_plain,
    tell,
)
from penstock.errors import ConfigError, RunError
from penstock.runtime.process.mps import run_in_testbed
from penstock.train.before.doctor import examine
from penstock.version import read_version


def doctor_command(json: JsonFlag = False) -> None:
    """Say what this machine can do, what is missing, and what to do about it.

    It looks at torch, GPUs, NCCL, MPS, compilers, cores, memory and the optional packages.

    Example: penstock doctor
    """
    diagnosis = examine()
    if json:
        print_json({**asdict(diagnosis), "verdict": diagnosis.verdict})
        return
    for one in diagnosis.findings:
        print_plain(f"{one.state:<9}{one.topic:<13}{one.found}")
        if one.advice:
            print_plain(f"{'':<22}{one.advice}")
    print_plain(f"\n{diagnosis.verdict}")


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

    Example: penstock lab testbed --workers 8 -- penstock train --set parallel.pp=8 --set run.device=cuda
    """
    raise typer.Exit(run_in_testbed(workers, command, backend))


def join_command(
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="Where the run listens (elastic.listen)."
        ),
    ],
    key: Annotated[
        Path,
        typer.Option(
            help="The key of the run: a copy of key.pem from the folder of the run."
        ),
    ] = Path("key.pem"),
    listen: Annotated[
        str | None,
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
    # These load torch.
    from penstock.crew.admission import Joining
    from penstock.train.history import log_to
    from penstock.train.launch import ended_by_signals

    if behind_nat and listen is not None:
        raise ConfigError(
            "--listen says where other machines reach this one, --behind-nat that they cannot: give one of them"
        )
    log_to(console(stderr=True), everything=False)
    with ended_by_signals(partial(tell, "ended")), ExitStack() as stack:
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
