"""The program `penstock`: its commands, and what happens to their errors.

Each command imports the rooms that it needs when it runs, so `penstock --help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.doctor import doctor_command, print_first_steps
from penstock.cli.interrupt import INTERRUPTED, ShownInterrupt
from penstock.cli.join import join_command
from penstock.cli.paths import paths_command
from penstock.cli.plan import plan_command
from penstock.cli.profile import profile_command
from penstock.cli.schedule import (
    check_command,
    compare_command,
    draw_command,
    list_command,
    simulate_command,
)
from penstock.cli.tables import console, print_plain
from penstock.cli.testbed import run_testbed
from penstock.cli.tokenizer import tokenizer_command
from penstock.cli.train import init_command, train_command
from penstock.cli.trained_model import (
    eval_command,
    export_command,
    generate_command,
    report_command,
)
from penstock.errors import PenstockError

USER_ERROR = 2  # exit code
# Commands of other programs that are options here.
OPTIONS_INSTEAD = {
    "help": "penstock --help, penstock COMMAND --help",
    "completion": "penstock --install-completion",
}


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
        """Find the command that the first word names."""
        name = words[0]
        if name in OPTIONS_INSTEAD and not context.resilient_parsing:
            context.fail(f"{name!r} is an option here: {OPTIONS_INSTEAD[name]}")
        return super().resolve_command(context, words)


app = typer.Typer(
    cls=Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Penstock: train language models through a pipeline of workers, with the schedule as data.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from penstock.version import read_version

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
        print_first_steps()


def _add(name: str, command: Callable[..., None]) -> None:
    """Add a command, whose docstring is its help.

    Typer keeps the line breaks of a docstring, so each paragraph becomes one line here and wraps as the terminal needs.
    """
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    help_text = "\n\n".join(" ".join(text.split()) for text in paragraphs)
    app.command(name, cls=Command, help=help_text)(command)


_add("list", list_command)
_add("draw", draw_command)
_add("simulate", simulate_command)
_add("plan", plan_command)
_add("check", check_command)
_add("compare", compare_command)
_add("paths", paths_command)
_add("profile", profile_command)
_add("testbed", run_testbed)
_add("train", train_command)
_add("join", join_command)
_add("init", init_command)
_add("export", export_command)
_add("generate", generate_command)
_add("report", report_command)
_add("eval", eval_command)
_add("tokenizer", tokenizer_command)
_add("doctor", doctor_command)


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2."""
    try:
        app(prog_name="penstock")  # also under python -m and torchrun
    except PenstockError as error:
        _print_error(error)
        raise SystemExit(USER_ERROR) from None
    except ModuleNotFoundError as error:
        from penstock.version import missing_package

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
    from rich.markup import escape

    from penstock.runtime.process.torchrun import prints_errors, tell_launcher

    kind = type(error).__name__
    if prints_errors():
        text = f"[bold red]{kind}[/]: {escape(str(error))}"
        console(stderr=True).print(text, highlight=False, soft_wrap=True)
    tell_launcher(f"{kind}: {error}")
