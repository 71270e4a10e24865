"""Options as records: a command takes dataclasses, and each of their fields is an option with its help and its range.

    @dataclass(frozen=True, slots=True)
    class Times:
        forward: float | None = option(None, "Time of a forward.", above=0)

    def draw(source: Source, times: Times) -> None:      penstock draw SOURCE --forward 2

`flattened` gives typer a function with a parameter for each field, and the command its records. Options that several
commands share are here, and so is what a shell completes of their values: a function gets the letters that are already
there and returns the words that fit. If it returns none, the shell completes names of files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from penstock.errors import ShapeError

Value = TypeVar("Value")
# In help texts. Importing the presets themselves would delay every command.
PRESET_NAMES = "tiny, llama-150m, llama-1b, gpt2 or bert-base"
MAX_ACTION_TIME = 1e12  # sums of longer times would overflow


# ---------------------------------------------------------------- records
def option(
    default: Value,
    about: str,
    *names: str,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    **shown: Any,
) -> Value:
    """Declare a field that is an option: its default, its meaning, its range, and how typer shows it."""
    facts = {
        "typer": typer.Option(*names, help=about or None, **shown),
        "flag": next((name for name in names if name.startswith("--")), ""),
        "least": least,
        "above": above,
        "most": most,
    }
    value: Value = field(default=default, metadata=MappingProxyType(facts))
    return value


def given(options: object) -> dict[str, Any]:
    """The options of a record that differ from their defaults, by their names on the command line."""
    found = {}
    for item in fields(options):  # type: ignore[arg-type]
        value = getattr(options, item.name)
        if value != item.default:
            found[_flag(item)] = value
    return found


def refuse(options: Iterable[str], text: str) -> None:
    """Refuse the first of these options, if there is one; the text names it wherever it has `{option}`."""
    for name in options:
        raise ShapeError(text.format(option=name))


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: with a parameter for each field of its records."""
    records: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for one in inspect.signature(command).parameters.values():
        kind = hints[one.name]
        if is_dataclass(kind):
            records[one.name] = kind
            parameters += _parameters_of(kind)
        else:
            keyword = one.replace(kind=one.KEYWORD_ONLY, annotation=kind)
            parameters.append(keyword)

    def call(**values: Any) -> None:
        made = {}
        for name, kind in records.items():
            own = {item.name: values.pop(item.name) for item in fields(kind)}
            made[name] = kind(**own)
            _refuse_out_of_range(made[name])
        command(**values, **made)

    shape: Any = call
    shape.__signature__ = inspect.Signature(parameters)
    shape.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def _parameters_of(record: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(record)
    annotated: Any = Annotated
    for item in fields(record):
        kind = annotated[hints[item.name], item.metadata["typer"]]
        yield inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=item.default,
            annotation=kind,
        )


def _refuse_out_of_range(options: Any) -> None:
    """Refuse a number that is not in the range of its option."""
    for item in fields(options):
        value = getattr(options, item.name)
        limits = {
            words: item.metadata[key]
            for key, words in (
                ("least", "at least"),
                ("above", "above"),
                ("most", "at most"),
            )
            if item.metadata[key] is not None
        }
        if value is None or not limits or _is_inside(value, **item.metadata):
            continue
        wanted = " and ".join(f"{words} {one:g}" for words, one in limits.items())
        raise ShapeError(f"{_flag(item)} must be {wanted}, not {value:g}")


def _is_inside(
    value: float,
    least: float | None,
    above: float | None,
    most: float | None,
    **others: object,
) -> bool:
    """Whether a value is in a range; something that is no number never is."""
    return (
        (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
    )


def _flag(item: Any) -> str:
    return item.metadata["flag"] or f"--{item.name.replace('_', '-')}"


# ---------------------------------------------------------------- what a shell completes
def beginning(place: str) -> Callable[[str], list[str]]:
    """A completion of the names that a module has as `module:names`. It is imported when somebody presses Tab."""

    def complete(begin: str) -> list[str]:
        module, _, names = place.partition(":")
        known = getattr(import_module(f"penstock.{module}"), names)
        return [name for name in known if name.startswith(begin)]

    return complete


def complete_change(begin: str) -> list[str]:
    """Keys of a config, as section.key=."""
    config = import_module("penstock.config").Config()
    keys = [
        f"{section.name}.{item.name}="
        for section in fields(config)
        for item in fields(getattr(config, section.name))
    ]
    return [key for key in keys if key.startswith(begin)]


# ---------------------------------------------------------------- options that commands share
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout.")
]
OutputFile = Annotated[
    Path | None, typer.Option("-o", "--output", help="The file to write.")
]
ConfigChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change a value of the config: section.key=value. May be repeated.",
        autocompletion=complete_change,
    ),
]


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Times in the units of the papers."""

    forward: float | None = option(
        None,
        "Time of one micro-batch's forward on one rank. Default: 1.",
        above=0,
        most=MAX_ACTION_TIME,
    )
    backward: float | None = option(
        None,
        "Time of one micro-batch's backward on one rank. Default: 2.",
        above=0,
        most=MAX_ACTION_TIME,
    )
    comm: float | None = option(
        None,
        "Latency of a message between two ranks. Default: 0.",
        least=0,
        most=MAX_ACTION_TIME,
    )


@dataclass(frozen=True, slots=True)
class UnitTimesAndSums(UnitTimes):
    """Also the time of a sum of gradients."""

    sum_: float | None = option(
        None,
        "Time to send one rank's gradients to another rank, which copies do to sum them. Default: 0.",
        "--sum",
        least=0,
        most=MAX_ACTION_TIME,
    )


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A profile in a file."""

    profile: Path | None = option(
        None,
        "A profile.json that `penstock profile` wrote; gives real times and sizes.",
        "--profile",
    )
    accept_error: bool = option(
        False,
        "With --profile: use it even if its error is above 50%.",
        "--accept-error",
    )


@dataclass(frozen=True, slots=True)
class ProfileOptions(ProfileFile):
    """A profile, and how it is used."""

    tokens: int | None = option(
        None, "With --profile: the tokens in a sequence, which the cuts divide."
    )
