"""Configs as TOML: read, changed by `--set`, written with a comment on every line.

    config.toml ──► values ──┬── --set model.layers=24 ──► Config ──► check
    preset "tiny" ───────────┘

An unknown key or section is an error that names the nearest known one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from penstock.config import (
    PRESETS,
    SWITCH_KEYS,
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
    names_a_file,
    own_code_file,
)
from penstock.errors import ConfigError, UnknownNameError, nearest_name
from penstock.formats.text import (
    Page,
    Steps,
    draw_fault,
    read_text,
    suggest,
    suggest_name,
)
from penstock.formats.toml_text import TomlPage, parse_toml

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
Refuse: TypeAlias = Callable[[Steps, str, str], NoReturn]  # key, fault, advice

SECTIONS = tuple(section.name for section in fields(Config))
DEFAULT_PRESET = "tiny"
NUMBER_LISTS = (("schedule", "partition"), ("paths", "keep"))
TABLES = (("optimizer", "options"),)
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
    if isinstance(value, bool) and name in SWITCH_KEYS:
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
    items: list[object] = []
    if isinstance(value, list):
        items = value
    elif value != "":  # --set data.sources= means an empty list
        items = [value]
    if steps in NUMBER_LISTS:
        numbers = [item for item in items if type(item) is int]
        if len(numbers) == len(items):
            return tuple(numbers)
        item_type = "whole numbers"
    else:
        texts = [item for item in items if isinstance(item, str)]
        if len(texts) == len(items):
            return tuple(map(_expand_home, texts))
        item_type = "strings"
    what = f"{'.'.join(steps)} must be a list of {item_type}, in [ ]"
    refuse(steps, what, "")


def _convert_table(steps: tuple[str, str], value: object, refuse: Refuse) -> Options:
    """A table of plain values, sorted by their names."""
    name = ".".join(steps)
    if value == "":  # --set optimizer.options= means an empty table
        value = {}
    if not isinstance(value, Mapping):
        refuse(steps, f"{name} must be a table, such as {{momentum = 0.9}}", "")
    found: list[tuple[str, OptionValue]] = []
    for key, item in sorted(value.items()):
        if isinstance(item, str | int | float):
            found.append((key, item))
        elif isinstance(item, list | tuple) and all(map(_is_number, item)):
            found.append((key, tuple(item)))
        else:
            what = f"{name}.{key} must be text, a number, true, false or a list of numbers, not {item!r}"
            refuse((*steps, key), what, "")
    return tuple(found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _convert_groups(
    steps: tuple[str, str], value: object, refuse: Refuse
) -> tuple[ParameterGroup, ...]:
    """A list of tables, each a group of parameters."""
    name = ".".join(steps)
    known = [item.name for item in fields(ParameterGroup)]
    tables = _tables(steps, value, known, '{match = "*.bias", frozen = true}', refuse)
    return tuple(_convert_group(name, place, table, refuse) for place, table in tables)


def _tables(
    steps: tuple[str, str],
    value: object,
    known: list[str],
    example: str,
    refuse: Refuse,
) -> Iterator[tuple[Steps, Mapping[str, Any]]]:
    """Yield the tables of a list, each with its place; a single table is a list of one. They have only known keys."""
    name = ".".join(steps)
    if value == "":  # --set optimizer.groups= means an empty list
        value = []
    for number, table in enumerate(value if isinstance(value, list) else [value]):
        place = (*steps, number)
        if not isinstance(table, Mapping):
            refuse(place, f"{name} must be a list of tables, such as [{example}]", "")
        for key in table:
            if key not in known:
                what = f"{name} has no key {key!r}"
                refuse((*place, key), what, suggest_name(key, known))
        yield place, table


def _convert_group(
    name: str, steps: Steps, table: Mapping[str, Any], refuse: Refuse
) -> ParameterGroup:
    values: dict[str, str | float | bool] = {}
    for key, item in table.items():
        is_text = key == "match" and isinstance(item, str)
        is_switch = key == "frozen" and isinstance(item, bool)
        if is_text or is_switch:
            values[key] = item
        elif key in ("rate", "decay") and _is_number(item):
            values[key] = float(item)
        else:
            kind = {"match": "text", "frozen": "true or false"}.get(key, "a number")
            refuse((*steps, key), f"{key} of {name} must be {kind}, not {item!r}", "")
    if "match" not in values:
        refuse(steps, f"{name} needs a match, such as '*.bias', in every group", "")
    return ParameterGroup(**values)  # type: ignore[arg-type]


def _convert_mixture(
    steps: tuple[str, str], value: object, refuse: Refuse
) -> tuple[MixtureSource, ...]:
    """A list of tables, each with sources and their weight."""
    name = ".".join(steps)
    known = [item.name for item in fields(MixtureSource)]
    example = '{sources = ["web"], weight = 3}'
    found = []
    for place, table in _tables(steps, value, known, example, refuse):
        sources = table.get("sources", [])
        sources = [sources] if isinstance(sources, str) else sources
        if not isinstance(sources, list) or not all(
            isinstance(one, str) for one in sources
        ):
            refuse(place, f"sources of {name} must be a list of strings", "")
        weight = table.get("weight", 1.0)
        if not _is_number(weight):
            refuse(
                (*place, "weight"),
                f"weight of {name} must be a number, not {weight!r}",
                "",
            )
        label = table.get("name", "")
        if not isinstance(label, str):
            refuse((*place, "name"), f"name of {name} must be text, not {label!r}", "")
        paths = tuple(map(_expand_home, sources))
        found.append(MixtureSource(paths, float(weight), label))
    return tuple(found)


Converter: TypeAlias = Callable[[tuple[str, str], object, Refuse], Setting]
CONVERTERS: dict[tuple[str, str], Converter] = {
    ("data", "mixture"): _convert_mixture,
    ("optimizer", "options"): _convert_table,
    ("optimizer", "groups"): _convert_groups,
}


def _expand_home(text: str) -> str:
    """A path with ~/ replaced, because a shell does not expand it after an `=`."""
    return str(Path(text).expanduser()) if text.startswith("~/") else text


# ---------------------------------------------------------------- writing
def with_absolute_paths(config: Config) -> Config:
    """A config whose files and folders can be found from any working directory.

    A run may be resumed from another one.
    """
    model = config.model
    if model.weights:
        model = replace(model, weights=_absolute(model.weights))
    if model.config:
        model = replace(model, config=_absolute(model.config))
    data = config.data
    mixture = tuple(
        replace(one, sources=tuple(map(_absolute, one.sources))) for one in data.mixture
    )
    sources = tuple(map(_absolute, data.sources))
    validation = tuple(map(_absolute, data.validation))
    data = replace(data, sources=sources, mixture=mixture, validation=validation)
    if names_a_file(data.tokenizer):
        data = replace(data, tokenizer=_absolute(data.tokenizer))
    if data.template:
        data = replace(data, template=_absolute(data.template))
    schedule = config.schedule
    if Path(schedule.name).suffix:
        schedule = replace(schedule, name=_absolute(schedule.name))
    optimizer = config.optimizer
    optimizer = replace(optimizer, schedule=_absolute_code(optimizer.schedule))
    run = replace(
        config.run,
        loss=_absolute_code(config.run.loss),
        callbacks=tuple(map(_absolute_code, config.run.callbacks)),
    )
    if run.key:
        run = replace(run, key=_absolute(run.key))
    return replace(
        config, model=model, data=data, schedule=schedule, optimizer=optimizer, run=run
    )


def _absolute_code(name: str) -> str:
    """The name of the user's own code; a file keeps its place, a module is found by Python."""
    file = own_code_file(name)
    return _absolute(file) + name.removeprefix(file) if file else name


def _absolute(name: str) -> str:
    return str(Path(name).expanduser().absolute())


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
    if isinstance(value, ParameterGroup):
        given = [(item.name, getattr(value, item.name)) for item in fields(value)]
        # A group has what was written; zeros count as written, too.
        return _table_text(
            (key, one) for key, one in given if one is not None and one is not False
        )
    if isinstance(value, MixtureSource):
        return _table_text(
            (item.name, getattr(value, item.name)) for item in fields(value)
        )
    if isinstance(value, tuple):
        items = ", ".join(map(_value_text, value))
        return f"[{items}]"
    if isinstance(value, str):
        escaped = "".join(map(_escape_sign, value))
        return f'"{escaped}"'
    return repr(value)


def _escape_sign(sign: str) -> str:
    if sign in '"\\':
        return "\\" + sign
    return sign if sign.isprintable() else f"\\U{ord(sign):08x}"
