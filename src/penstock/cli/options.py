"""Options that several commands share. Typer reads them from the annotations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from penstock.cli.completion import complete_change

# In help texts. Importing the presets themselves would delay every command.
PRESET_NAMES = "tiny, llama-150m, llama-1b, gpt2 or bert-base"

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout.")
]
OutputFile = Annotated[
    Optional[Path], typer.Option("-o", "--output", help="The file to write.")
]
ConfigChanges = Annotated[
    Optional[list[str]],
    typer.Option(
        "--set",
        help="Change a value of the config: section.key=value. May be repeated.",
        autocompletion=complete_change,
    ),
]
ForwardOption = Annotated[
    Optional[float],
    typer.Option(help="Time of one micro-batch's forward on one rank. Default: 1."),
]
BackwardOption = Annotated[
    Optional[float],
    typer.Option(help="Time of one micro-batch's backward on one rank. Default: 2."),
]
CommOption = Annotated[
    Optional[float],
    typer.Option(help="Latency of a message between two ranks. Default: 0."),
]
SumOption = Annotated[
    Optional[float],
    typer.Option(
        "--sum",
        help="Time to send one rank's gradients to another rank, which copies do to sum them. "
        "Default: 0.",
    ),
]
ProfileFile = Annotated[
    Optional[Path],
    typer.Option(
        "--profile",
        help="A profile.json that `penstock profile` wrote; gives real times and sizes.",
    ),
]
TokensOption = Annotated[
    Optional[int],
    typer.Option(
        help="With --profile: the tokens in a sequence, which the cuts divide."
    ),
]
AcceptError = Annotated[
    bool,
    typer.Option(
        "--accept-error",
        help="With --profile: use it even if its error is above 50%.",
    ),
]
