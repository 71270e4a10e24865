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
    RESUME_AUTO,
    ShownInterrupt,
    console,
    flattened,
    print_plain,
)
from penstock.errors import NothingFitsError, PenstockError
from penstock.runtime.process.torchrun import prints_errors, tell_launcher
from penstock.version import missing_package, read_version

USER_ERROR = 2  # exit code
NOTHING_FITS = 3
# Where each command is, and the first paragraph of its help.
COMMANDS = {
    "plan": (
        "plan:plan_command",
        "Search for the fastest plan; with -o, write it as a plan.json that `penstock train` runs.",
    ),
    "explain": (
        "model:explain_command",
        "Say where the steps of a run spent their time, beside what was predicted.",
    ),
    "draw": (
        "draw:draw_command",
        "List all schedules; draw and time one; or compare several in one table.",
    ),
    "check": (
        "draw:check_command",
        "Check that a schedule is complete, can run, and cannot deadlock. The exit code is 2 if it fails.",
    ),
    "profile": (
        "profile:profile_command",
        "Measure a model on this device: one layer over about forty slices, embedding, head, optimizer and links.",
    ),
    "init": (
        "model:init_command",
        "Write a config with a comment on every value.",
    ),
    "train": (
        "model:train_command",
        "Train a model. Without a config: a small Llama on Python's own source, on four local workers, in a minute.",
    ),
    "join": (
        "machine:join_command",
        "Join a run of `penstock train` on another machine as one more worker.",
    ),
    "eval": (
        "model:eval_command",
        "Measure the perplexity of a trained model, with all parts and with some left out.",
    ),
    "generate": (
        "model:generate_command",
        "Let a trained model continue a text, with all layers or, to be faster, with some of them.",
    ),
    "export": (
        "model:export_command",
        "Write a trained model as a Hugging Face folder, which transformers loads: config.json and safetensors.",
    ),
    "doctor": (
        "machine:doctor_command",
        "Say what this machine can do, what is missing, and what to do about it.",
    ),
    "lab paths": (
        "paths:paths_command",
        "Plan which node holds which part, and which parts each micro-batch visits, so that micro-batches rarely wait.",
    ),
    "lab testbed": (
        "machine:run_testbed",
        "Run a command whose processes share one GPU, each with an equal part of it.",
    ),
}
LAB = "lab"  # the group of commands for experiments
UNLISTED = {"simulate": "draw"}  # names of which nothing is said any more
# What to write instead of commands and options that are gone, or that other programs have.
OLD_COMMANDS = {
    "help": "use penstock --help, penstock COMMAND --help",
    "completion": "use penstock --install-completion",
    "list": "use penstock draw, without a schedule",
    "compare": "use penstock draw 1f1b zb-v -o compare.html",
    "report": "use penstock explain RUN",
    "paths": "use penstock lab paths --cluster cluster.toml",
    "testbed": "use penstock lab testbed",
    "tokenizer": "use --set data.tokenizer=bpe:16000, which trains one",
}
SHAPE = "use the shape of a schedule, as in hanayo:waves=2,slices=2,split"
UNIT_COST = "use --cost F=1,B=2,comm=0.05,sum=1,channels=1"
SYNTHETIC = "use --cost F=0.5,message=8e6,held=1e6,weights=1e8,gradients=1e8"
OLD_OPTIONS = {
    "--ranks": "use --pp",
    **dict.fromkeys(
        ("--waves", "--chunks", "--slices", "--skips", "--copies", "--split"), SHAPE
    ),
    **dict.fromkeys(("--backward", "--comm", "--sum", "--channels"), UNIT_COST),
    "--forward": "use --cost F=1",
    **dict.fromkeys(("--message", "--held", "--gradients"), SYNTHETIC),
    "--weights": "use --limit weights=2",
    "--profile": "use --cost profile.json",
    "--accept-error": "a profile with a large error only warns",
    "--gpu": "use --cost h100",
    "--tokens": "use --seq-len, --max-tokens of `generate`, or --set data.seq_len=512",
    "--stages": "use --limit stages=2",
    "--parts": "use --stages",
    "--granularity": "it follows from the device",
    "--preset": "use the name of the preset in the place of the config, as in penstock train gpt2",
    "--resume-if-any": "use --resume=auto",
    "--sample": "a run in a terminal ends with a sample",
    "--exit-after": "use --omit with the layers after it",
    "--draws": "8 subsets are drawn",
    "--rounds": "use --quick for fewer",
    "--slots": "use slots in the cluster.toml",
    "--memory": "use memory in the cluster.toml",
    "--data-nodes": "use --stages 4:data_nodes=2",
    "--sum-messages": "use --sums planned:int8",
    "--slack": "use --rotate 0.1",
    "--share": "use --skip 0.25",
    "--accumulate": "use --set run.accumulate=2",
    "--rule": "a plan is checked by the rules that it was planned with",
    "--folder": "what a worker receives is removed at the end",
    **dict.fromkeys(
        ("--hf", "--width", "--layers", "--heads", "--kv-heads", "--inner", "--vocab"),
        "name the model, as in penstock profile llama-1b, and use --set model.layers=4",
    ),
    **dict.fromkeys(
        ("--device", "--dtype", "--autocast", "--graphs", "--threads"),
        "use --set, as in --set run.device=cuda",
    ),
}
FIRST_STEPS = """\
Penstock finds a fast way to split training over GPUs, and trains that way, with the schedule as data.

Look around, without torch:
  penstock draw                                    all schedules, with idle time and memory
  penstock draw 1f1b hanayo:waves=2                compare two of them
  penstock plan llama-1b --gpu h100 --devices 16   plan a model for GPUs that you do not have

Train:
  penstock doctor                                  what this machine can do, and what is missing
  penstock train                                   a small Llama on four local workers, in a minute
  penstock init config.toml                        a config for a model and data of your own

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

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """Refuse options that are gone, and let --resume have a value."""
        known = {word for one in self.params for word in one.opts}
        for number, word in enumerate(args):
            if word == "--":
                break
            option = word.partition("=")[0]
            if option in OLD_OPTIONS and option not in known:
                context.fail(f"{option} is gone: {OLD_OPTIONS[option]}")
            if word == "--resume=auto":
                args[number] = RESUME_AUTO
        return super().parse_args(context, args)


class Commands(TyperGroup):
    """The commands. Says what to write instead of those that are gone."""

    prefix = ""

    def get_params(self, context: Any) -> list[Any]:
        """List the options of the program for the help."""
        return _without_values(super().get_params(context))

    def resolve_command(self, context: Any, words: list[str]) -> Any:
        """Load the command that the first word names."""
        name = UNLISTED.get(words[0], words[0])
        instead = {} if self.prefix else OLD_COMMANDS
        if name in instead and not context.resilient_parsing:
            context.fail(f"{name!r} is no command here: {instead[name]}")
        if self.prefix + name in COMMANDS:
            self.commands[name] = load(self.prefix + name)
        return super().resolve_command(context, [name, *words[1:]])


class LabCommands(Commands):
    """The commands for experiments."""

    prefix = f"{LAB} "


def load(name: str) -> Any:
    """Import a command, whose docstring is its help.

    Typer keeps the line breaks of a docstring, so each paragraph becomes one line here and wraps as the terminal needs.
    """
    module, _, function = COMMANDS[name][0].partition(":")
    command = getattr(import_module(f"penstock.cli.{module}"), function)
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    help_text = "\n\n".join(" ".join(text.split()) for text in paragraphs)
    alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
    word = name.rpartition(" ")[2]
    alone.command(word, cls=Command, help=help_text)(flattened(command))
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Penstock: plan how to split training over GPUs, and train language models through a pipeline of workers.",
)
lab = typer.Typer(cls=LabCommands, rich_markup_mode="rich")


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
    group = lab if command_name.startswith(f"{LAB} ") else app
    group.command(command_name.removeprefix(f"{LAB} "), help=about)(_not_loaded)
app.add_typer(
    lab, name=LAB, help="Experiments: partial paths, and several workers on one GPU."
)


def main() -> None:
    """Run the command line; a user's mistake is one message and exit code 2."""
    try:
        app(prog_name="penstock")  # also under python -m and torchrun
    except PenstockError as error:
        _print_error(error)
        fits = not isinstance(error, NothingFitsError)
        raise SystemExit(USER_ERROR if fits else NOTHING_FITS) from None
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
