"""Configs as TOML: read, changed by `--set`, written with a comment on every line.

    config.toml ──► values ──┬── --set model.layers=24 ──► Config ──► check
    preset "tiny" ───────────┘

An unknown key or section is an error that names the nearest known one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

from penstock.config import (
    CHOICES,
    PRESETS,
    SWITCH,
    Config,
    DataConfig,
    LoraConfig,
    MeshConfig,
    MixtureSource,
    ModelConfig,
    OptimizerConfig,
    Options,
    OptionValue,
    ParameterGroup,
    PathsConfig,
    RunConfig,
    ScheduleConfig,
    check_config,
    find_settings,
    is_plan_file,
)
from penstock.errors import ConfigError, FileError, UnknownNameError, nearest_name
from penstock.formats.text import (
    Page,
    Steps,
    draw_fault,
    read_text,
    suggest,
    suggest_name,
)
from penstock.formats.toml_text import TomlPage, parse_toml, string_text

Setting: TypeAlias = (
    "str | int | float | bool | tuple[str, ...] | tuple[int, ...] | Options "
    "| tuple[ParameterGroup, ...] | tuple[MixtureSource, ...]"
)
Section: TypeAlias = (
    ModelConfig
    | DataConfig
    | ScheduleConfig
    | PathsConfig
    | MeshConfig
    | OptimizerConfig
    | LoraConfig
    | RunConfig
)
Item = TypeVar("Item")
Refuse: TypeAlias = Callable[[Steps, str, str], NoReturn]  # key, fault, advice

SECTIONS = tuple(section.name for section in fields(Config))
DEFAULT_PRESET = "tiny"
CONFIG_FILE = "config.toml"  # in the folder of a run
NUMBER_LISTS = (("schedule", "partition"), ("paths", "keep"))
TABLES = (("optimizer", "options"),)
# Lists of tables: the record of each table, and an example.
RECORDS: dict[tuple[str, str], tuple[type[Any], str]] = {
    ("data", "mixture"): (MixtureSource, '{sources = ["web"], weight = 3}'),
    ("optimizer", "groups"): (ParameterGroup, '{match = "*.bias", frozen = true}'),
}
ENTRY_NAMES = {"str": "text", "bool": "true or false", "float": "a number"}
TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
}


def preset(name: str) -> Config:
    """One of the presets."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return PRESETS[name]


# ---------------------------------------------------------------- reading
def read_config(path: str | Path, changes: Iterable[str] = ()) -> Config:
    """The config in a file, with changes `section.key=value`."""
    text = read_text(path, "config", "write one with `penstock init`")
    return load_config(text, str(path), changes)


def load_config(
    text: str, source: str = "config.toml", changes: Iterable[str] = ()
) -> Config:
    """The config in a text; errors call the file `source`.

    Values that the text leaves out come from its `preset = "..."`, or from "tiny".
    """
    page = TomlPage(text, source, "config")
    values = parse_toml(page)
    refuse = _refuse_in_file(page)
    name = values.pop("preset", DEFAULT_PRESET)
    if not isinstance(name, str):
        what = 'preset must be a name in quotes, preset = "tiny"'
        refuse(("preset",), what, "")
    config = preset(name)
    for name, section in values.items():
        if name not in SECTIONS:
            what = f"a config has no section {name!r}"
            keys = section if isinstance(section, dict) else [name]
            refuse((name,), what, _suggest_section(name, keys))
        if not isinstance(section, dict):
            what = f"{name} is a section; write [{name}] above its keys"
            refuse((name,), what, "")
        config = _with_values(config, name, section, refuse)
    return check_config(apply_changes(config, changes))


def read_source(
    source: Path | None, preset_name: str | None, changes: Iterable[str]
) -> Config:
    """Return the config of a source: a config, the folder of a run, or None for a preset."""
    if source is None:
        config = preset(preset_name or DEFAULT_PRESET)
        return check_config(apply_changes(config, changes))
    if preset_name:
        raise ConfigError(
            f"--preset {preset_name} is for a run without a config, but {source} was "
            "given\n"
            f"  write preset = {preset_name!r} at the top of the config, or leave one "
            "of the two out"
        )
    if not is_folder(source):
        return read_config(source, changes)
    file = source / CONFIG_FILE
    if not file.is_file():
        raise FileError(
            f"{source} is not the folder of a run: it has no {CONFIG_FILE}\n"
            "  name the folder of a run, or a config; `penstock init` writes one"
        )
    return read_config(file, changes)


def is_folder(source: Path | None) -> bool:
    """Whether a source is a folder, and so that of a run."""
    return source is not None and source.is_dir()


def written_keys(source: Path | None, changes: Iterable[str]) -> frozenset[str]:
    """The values that a person has written, as section.key: with --set or in a config.

    `source` is not a file if it is the folder of a run. The run wrote the config in there,
    so its values do not count. Neither does the [schedule] of a config if --set names a
    plan file, which replaces it.
    """
    changes = list(changes)
    keys = {change.partition("=")[0].strip() for change in changes}
    if source is not None and source.is_file():
        replaced = _replaced_keys(changes)
        page = TomlPage(read_text(source, "config"), str(source), "config")
        for name, section in parse_toml(page).items():
            if isinstance(section, dict):
                keys |= {f"{name}.{key}" for key in section} - replaced
    return frozenset(keys)


def _replaced_keys(changes: Iterable[str]) -> set[str]:
    """The keys of a config that changes replace without naming them."""
    for change in changes:
        name, _, value = change.partition("=")
        if name.strip() == "schedule.name" and is_plan_file(value.strip().strip("'\"")):
            return {f"schedule.{item.name}" for item in fields(ScheduleConfig)}
    return set()


def apply_changes(config: Config, changes: Iterable[str]) -> Config:
    """A config with changes `section.key=value`, where a value is TOML or bare text."""
    for change in changes:
        refuse = _refuse_in_change(change)
        name, equals, text = change.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot:
            meant = find_settings("", name.strip()) if equals else ()
            examples = [f"--set {setting}={text.strip()}" for setting in meant]
            example = " or ".join(examples) or "--set model.layers=24"
            raise ConfigError(
                f"--set {change} is not section.key=value, as in {example}"
            )
        if section not in SECTIONS:
            what = f"a config has no section {section!r}"
            refuse((section,), what, _suggest_section(section, [key]))
        value = _parse_value(text.strip())
        key, inner, entry = key.partition(".")
        if inner and (section, key) in TABLES:
            value = {**dict(getattr(getattr(config, section), key)), entry: value}
        elif inner:
            refuse((section, key), f"{section}.{key} has no keys inside", "")
        config = _with_values(config, section, {key: value}, refuse)
    return config


def _suggest_section(name: str, keys: Iterable[str]) -> str:
    """Advice for an unknown section: the one that was meant, or where its keys are."""
    near = nearest_name(name, SECTIONS)
    if near:
        return suggest([near], SECTIONS)
    meant = next(filter(None, (find_settings("", key) for key in keys)), ())
    return suggest(meant, SECTIONS)


def _refuse_in_file(page: Page) -> Refuse:
    """How to reject a value of a file: with its line drawn."""

    def refuse(steps: Steps, what: str, advice: str) -> NoReturn:
        raise ConfigError(draw_fault(page, page.find_key(steps), what, advice))

    return refuse


def _refuse_in_change(change: str) -> Refuse:
    """How to reject a value of --set."""

    def refuse(steps: Steps, what: str, advice: str) -> NoReturn:
        ending = f"\n  {advice}" if advice else ""
        raise ConfigError(f"--set {change}: {what}{ending}")

    return refuse


def _parse_value(text: str) -> object:
    """A TOML value, in which quotes may be missing because a shell removes them.

    >>> _parse_value("24"), _parse_value("notes"), _parse_value("[notes, b.txt]")
    (24, 'notes', ['notes', 'b.txt'])
    """
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        pass
    is_list = text.startswith("[") and text.endswith("]")
    if not is_list:
        return text
    items = [item.strip() for item in text[1:-1].split(",")]
    return [item for item in items if item]


def _with_values(
    config: Config, name: str, given: Mapping[str, object], refuse: Refuse
) -> Config:
    """A config with other values in one section."""
    section: Section = getattr(config, name)
    defaults = {item.name: getattr(section, item.name) for item in fields(section)}
    values: dict[str, Setting] = {}
    for key, value in given.items():
        if key not in defaults:
            what = f"[{name}] has no key {key!r}"
            refuse((name, key), what, suggest(find_settings(name, key), defaults))
        values[key] = _convert((name, key), value, defaults[key], refuse)
    return replace(config, **{name: replace(section, **values)})  # type: ignore[arg-type]


def _convert(
    steps: tuple[str, str], value: object, default: Setting, refuse: Refuse
) -> Setting:
    """A value of the same type as its default."""
    if isinstance(default, tuple):
        convert = CONVERTERS.get(steps, _convert_list)
        return convert(steps, value, refuse)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(default, float) and is_whole:
        assert isinstance(value, int)
        return float(value) if abs(value) < 1 << 1000 else inf
    name = ".".join(steps)
    if isinstance(value, bool) and CHOICES.get(name) == SWITCH:
        return str(value).lower()
    if type(value) is not type(default):
        what = f"{name} must be {TYPE_NAMES[type(default)]}, not {value!r}"
        refuse(steps, what, "")
    if isinstance(value, str):
        return _expand_home(value)
    assert isinstance(value, int | float)
    return value


def _convert_list(steps: tuple[str, str], value: object, refuse: Refuse) -> Setting:
    """A list of strings or whole numbers; a single one needs no brackets."""
    items = _items(value)
    kinds = "whole numbers" if steps in NUMBER_LISTS else "strings"
    kind = "int" if steps in NUMBER_LISTS else "str"
    if any(type(item).__name__ != kind for item in items):
        refuse(steps, f"{'.'.join(steps)} must be a list of {kinds}, in [ ]", "")
    return tuple(_expand_home(item) for item in items)


def _items(value: object) -> list[Any]:
    """The items of a list; a single one needs no brackets, and `--set data.sources=` means no items."""
    if isinstance(value, list):
        return value
    return [] if value == "" else [value]


def _convert_table(steps: tuple[str, str], value: object, refuse: Refuse) -> Options:
    """A table of plain values, sorted by their names."""
    name = ".".join(steps)
    if value == "":  # --set optimizer.options= means an empty table
        value = {}
    if not isinstance(value, Mapping):
        refuse(steps, f"{name} must be a table, such as {{momentum = 0.9}}", "")
    found: list[tuple[str, OptionValue]] = []
    for key, item in sorted(value.items()):
        is_list = isinstance(item, list | tuple) and all(map(_is_number, item))
        if not is_list and not isinstance(item, str | int | float):
            what = f"{name}.{key} must be text, a number, true, false or a list of numbers, not {item!r}"
            refuse((*steps, key), what, "")
        found.append((key, tuple(item) if is_list else item))
    return tuple(found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _convert_records(
    steps: tuple[str, str], value: object, refuse: Refuse
) -> tuple[Any, ...]:
    """A list of tables, each of which becomes a record; a single table is a list of one."""
    make, example = RECORDS[steps]
    name = ".".join(steps)
    kinds = {item.name: str(item.type) for item in fields(make)}
    found = []
    for number, table in enumerate(_items(value)):
        place = (*steps, number)
        if not isinstance(table, Mapping):
            refuse(place, f"{name} must be a list of tables, such as [{example}]", "")
        for key in table:
            if key not in kinds:
                what = f"{name} has no key {key!r}"
                refuse((*place, key), what, suggest_name(key, kinds))
        values = {
            key: _convert_entry(place, key, kinds[key], item, refuse)
            for key, item in table.items()
        }
        if make is ParameterGroup and "match" not in values:
            what = f"{name} needs a match, such as '*.bias', in every group"
            refuse(place, what, "")
        found.append(make(**values))
    return tuple(found)


def _convert_entry(
    place: Steps, key: str, kind: str, value: object, refuse: Refuse
) -> object:
    """A value of the kind that a record declares."""
    of = f"{key} of {place[0]}.{place[1]}"
    if kind.startswith("tuple"):
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or any(type(one) is not str for one in texts):
            refuse(place, f"{of} must be a list of strings", "")
        return tuple(map(_expand_home, texts))
    if kind.startswith("float") and _is_number(value):
        return float(value)  # type: ignore[arg-type]
    if type(value).__name__ != kind:
        wanted = ENTRY_NAMES[kind.partition(" ")[0]]
        refuse((*place, key), f"{of} must be {wanted}, not {value!r}", "")
    return value


Converter: TypeAlias = Callable[[tuple[str, str], object, Refuse], Setting]
CONVERTERS: dict[tuple[str, str], Converter] = {
    **dict.fromkeys(TABLES, _convert_table),
    **dict.fromkeys(RECORDS, _convert_records),
}


def _expand_home(text: Item) -> Item:
    """A path with ~/ replaced, because a shell does not expand it after an `=`."""
    if isinstance(text, str) and text.startswith("~/"):
        return str(Path(text).expanduser())  # type: ignore[return-value]
    return text


# ---------------------------------------------------------------- writing
def with_absolute_paths(config: Config) -> Config:
    """A config whose files and folders can be found from any working directory.

    A run may be resumed from another one.
    """
    found: dict[str, Any] = {}
    for section in fields(config):
        values = getattr(config, section.name)
        placed = {
            item.name: _absolute(getattr(values, item.name), item.metadata["file"])
            for item in fields(values)
            if item.metadata["file"]
        }
        found[section.name] = replace(values, **placed)
    return replace(config, **found)


def _absolute(value: Any, file_of: Callable[[str], str]) -> Any:
    """A value in which files have their whole path; code of the user that is no file is found by Python."""
    if isinstance(value, tuple):
        return tuple(_absolute(one, file_of) for one in value)
    if isinstance(value, MixtureSource):
        return replace(value, sources=_absolute(value.sources, file_of))
    file = file_of(value)
    if not file:
        return value
    return str(Path(file).expanduser().absolute()) + value.removeprefix(file)


def dump_config(
    config: Config, title: str = "A Penstock run: penstock train config.toml"
) -> str:
    """A config as commented TOML, from which `load_config` builds an equal config."""
    lines = [f"# {title}"]
    for name in SECTIONS:
        section = getattr(config, name)
        lines += ["", f"[{name}]"]
        for item in fields(section):
            held = getattr(section, item.name)
            is_table = (name, item.name) in TABLES
            value = _table_text(held) if is_table else _value_text(held)
            assignment = f"{item.name} = {value}"
            lines.append(f"{assignment:<32} # {item.metadata['about']}")
    return "\n".join(lines) + "\n"


def _table_text(values: Iterable[tuple[str, object]]) -> str:
    items = [f"{_key_text(key)} = {_value_text(value)}" for key, value in values]
    return f"{{{', '.join(items)}}}"


def _key_text(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else _value_text(key)


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, ParameterGroup | MixtureSource):
        given = [(item.name, getattr(value, item.name)) for item in fields(value)]
        # A group has what was written; zeros count as written, too.
        return _table_text(
            (key, one) for key, one in given if one is not None and one is not False
        )
    if isinstance(value, tuple):
        items = ", ".join(map(_value_text, value))
        return f"[{items}]"
    if isinstance(value, str):
        return string_text(value)
    return repr(value)
