"""The program `penstock`: its commands, and what happens to their errors.

Only the module of the command that runs is imported, so `penstock --help` is quick and modules import at their top.
"""

from __future__ import annotations

from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from penstock.cli.terminal import (
    INTERRUPTED,
    ShownInterrupt,
    console,
    flattened,
    print_plain,
)
from penstock.errors import PenstockError
from penstock.runtime.process.torchrun import prints_errors, tell_launcher
from penstock.version import missing_package, read_version

USER_ERROR = 2  # exit code
# Commands of other programs that are options here.
OPTIONS_INSTEAD = {
    "help": "penstock --help, penstock COMMAND --help",
    "completion": "penstock --install-completion",
}
# Where each command is, and the first paragraph of its help.
COMMANDS = {
    "list": (
        "schedule:list_command",
        "Show every schedule with its shape, idle time, memory and paper.",
    ),
    "draw": (
        "schedule:draw_command",
        "Draw a schedule in the terminal, or write it to a file.",
    ),
    "simulate": (
        "schedule:simulate_command",
        "Predict the time, idle time and memory of a schedule.",
    ),
    "plan": (
        "plan:plan_command",
        "Search for the fastest plan; with -o, write it as a plan.json that `penstock train` runs.",
    ),
    "check": (
        "schedule:check_command",
        "Check that a schedule is complete, can run, and cannot deadlock. The exit code is 2 if it fails.",
    ),
    "compare": (
        "schedule:compare_command",
        "Show two schedules one above the other on one page.",
    ),
    "paths": (
        "paths:paths_command",
        "Plan which node holds which part, and which parts each micro-batch visits, so that micro-batches rarely wait.",
    ),
    "profile": (
        "profile:profile_command",
        "Measure a model on this device: one layer over about forty slices, embedding, head, optimizer, links and "
        "sums.",
    ),
    "testbed": (
        "machine:run_testbed",
        "Run a command whose processes share one GPU, each with an equal part of it.",
    ),
    "train": (
        "model:train_command",
        "Train a model. Without a config: a small Llama on Python's own source, on four local workers, in a minute.",
    ),
    "join": (
        "machine:join_command",
        "Join a run of `penstock train` on another machine as one more worker.",
    ),
    "init": (
        "model:init_command",
        "Write a config with a comment on every value.",
    ),
    "export": (
        "model:export_command",
        "Write a trained model as a Hugging Face folder, which transformers loads: config.json and safetensors.",
    ),
    "generate": (
        "model:generate_command",
        "Let a trained model continue a text, with all layers or, to be faster, with some of them.",
    ),
    "report": (
        "model:report_command",
        "Write the page of a run: its curves, and the predicted timeline of a step above the measured one.",
    ),
    "eval": (
        "model:eval_command",
        "Measure the perplexity of a trained model, with all parts and with some left out.",
    ),
    "tokenizer": (
        "model:tokenizer_command",
        "Train a tokenizer (byte pairs) on the text of a config, for data.tokenizer.",
    ),
    "doctor": (
        "machine:doctor_command",
        "Say what this machine can do, what is missing, and what to do about it.",
    ),
}
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


def _without_values(parameters: list[Any]) -> list[Any]:
    """Leave out the types of flags, which newer versions of typer print as if a flag took a value."""
    for one in parameters:
        if getattr(one, "is_flag", False):
            one.metavar = ""
    return parameters


class Command(TyperCommand):
    """One command."""

    def get_params(self, context: Any) -> list[Any]:
        """List the options and arguments for the help."""
        return _without_values(super().get_params(context))


class Commands(TyperGroup):
    """The commands. Says what to write instead of those that are options here."""

    def get_params(self, context: Any) -> list[Any]:
        """List the options of the program for the help."""
        return _without_values(super().get_params(context))

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        """Load the command that the first word names."""
        name = words[0]
        if name in OPTIONS_INSTEAD and not context.resilient_parsing:
            context.fail(f"{name!r} is an option here: {OPTIONS_INSTEAD[name]}")
        if name in COMMANDS:
            self.commands[name] = load(name)
        return super().resolve_command(context, words)


def load(name: str) -> Any:
    """Import a command, whose docstring is its help.

    Typer keeps the line breaks of a docstring, so each paragraph becomes one line here and wraps as the terminal needs.
    """
    module, _, function = COMMANDS[name][0].partition(":")
    command = getattr(import_module(f"penstock.cli.{module}"), function)
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    help_text = "\n\n".join(" ".join(text.split()) for text in paragraphs)
    alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
    alone.command(name, cls=Command, help=help_text)(flattened(command))
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Penstock: train language models through a pipeline of workers, with the schedule as data.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_plain(f"penstock {read_version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def begin(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Print what to do first if no command is given."""
    if context.invoked_subcommand is None:
        print_plain(FIRST_STEPS)


def _not_loaded() -> None:
    """Stand for a command in the list of all."""


for command_name, (_, about) in COMMANDS.items():
    app.command(command_name, help=about)(_not_loaded)


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2."""
    try:
        app(prog_name="penstock")  # also under python -m and torchrun
    except PenstockError as error:
        _print_error(error)
        raise SystemExit(USER_ERROR) from None
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        _print_error(missing)
        raise SystemExit(USER_ERROR) from None
    except ShownInterrupt:
        raise
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer turns a KeyboardInterrupt into it
            console(stderr=True).print("Interrupted.")
        raise
    except KeyboardInterrupt:
        console(stderr=True).print("Interrupted.")
        raise SystemExit(INTERRUPTED) from None


def _print_error(error: PenstockError) -> None:
    """Print an error, and report it to the launcher if there is one."""
    kind = type(error).__name__
    if prints_errors():
        text = f"[bold red]{kind}[/]: {escape(str(error))}"
        console(stderr=True).print(text, highlight=False, soft_wrap=True)
    tell_launcher(f"{kind}: {error}")
