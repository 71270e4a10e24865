"""`penstock doctor`, which looks at this machine, and what `penstock` alone prints."""

from __future__ import annotations

from dataclasses import asdict

from penstock.cli.options import JsonFlag
from penstock.cli.tables import print_json, print_plain

FIRST_STEPS = """\
Penstock trains language models through a pipeline of workers, with the schedule as data.

Look around, without torch:
  penstock draw 1f1b --ranks 4 --microbatches 8    draw a schedule
  penstock list                                    all schedules, with idle time and memory
  penstock plan --ranks 4 --microbatches 8         search for the fastest one

Train:
  penstock doctor                                  what this machine can do, and what is missing
  penstock train                                   a small Llama on four local workers, in a minute
  penstock init config.toml                        a config for a model and data of your own
  penstock plan config.toml --gpu h100             plan it for GPUs that you do not have

penstock --help lists all commands, penstock COMMAND --help explains one, and
penstock --install-completion lets your shell complete their words."""


def print_first_steps() -> None:
    """Print what a new user can do first."""
    print_plain(FIRST_STEPS)


def doctor_command(json: JsonFlag = False) -> None:
    """Say what this machine can do, what is missing, and what to do about it.

    It looks at torch, GPUs, NCCL, MPS, compilers, cores, memory and the optional packages.

    Example: penstock doctor
    """
    from penstock.train.doctor import examine

    diagnosis = examine()
    if json:
        print_json({**asdict(diagnosis), "verdict": diagnosis.verdict})
        return
    for one in diagnosis.findings:
        print_plain(f"{one.state:<9}{one.topic:<13}{one.found}")
        if one.advice:
            print_plain(f"{'':<22}{one.advice}")
    print_plain(f"\n{diagnosis.verdict}")
