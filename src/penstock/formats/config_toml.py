"""Configs as TOML: read, changed by `--set`, written with a comment on every line.

    config.toml ──► values ──┬── --set model.layers=24 ──► Config ──► check
    preset "tiny" ───────────┘

An unknown key or section is an error that names the nearest known one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from penstock.config import (
    AUTO,
    CHOICES,
    DEFAULT_PRESET,
    PRESETS,
    SECTIONS,
    SWITCH,
    Config,
    MixtureSource,
    Options,
    OptionValue,
    ParameterGroup,
    advise,
    advise_section,
    check_config,
    find_settings,
    is_plan_file,
)
from penstock.errors import ConfigError, FileError, UnknownNameError
from penstock.formats.text import (
    Page,
    Steps,
    draw_fault,
    read_text,
    suggest_name,
)
from penstock.formats.toml_text import TomlPage, parse_toml, table_text, value_text

Refuse: TypeAlias = Callable[[Steps, str, str], NoReturn]  # key, fault, advice

CONFIG_FILE = "config.toml"  # in the folder of a run
TABLES = (("optimizer", "options"),)
# Records of which a list may consist, each with an example.
RECORDS: dict[str, tuple[type[Any], str]] = {
    "MixtureSource": (MixtureSource, '{files = ["web"], weight = 3}'),
    "ParameterGroup": (ParameterGroup, '{match = "*.bias", frozen = true}'),
}
# What a plan file says in place of a config.
REPLACED_BY_PLAN = (
    *("schedule.name", "schedule.microbatches", "schedule.partition"),
    *("parallel.devices", "parallel.pp", "parallel.dp_replicate"),
)
# What `penstock init` writes.
SIZES = ("model.family", "model.layers", "model.hidden_size", "model.heads")
FROM_FOLDER = ("model.path", "lora.rank")
FIRST_SETTINGS = (
    *("data.sources", "data.tokenizer", "data.seq_len", "data.global_batch"),
    *("data.validation", "parallel.devices", "schedule.name"),
    *("optimizer.lr", "optimizer.warmup_steps", "optimizer.weight_decay"),
    *("run.folder", "run.steps", "run.precision", "run.eval_every", "run.save_every"),
)
KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
}
ENTRY_KINDS = {**KINDS, "str": "text"}
LISTED = {"int": "whole numbers", "float": "numbers", "str": "strings"}
AUTO_RATE = ("optimizer", "lr")  # 0 in here, auto in a file


def preset(name: str) -> Config:
    """One of the presets."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return PRESETS[name]


def start_from(source: str) -> Config:
    """The config of a preset, or one that fine-tunes the model in a Hugging Face folder."""
    if source in PRESETS or not Path(source).exists():
        return preset(source)
    return apply_changes(preset(DEFAULT_PRESET), [f"model.path={source}"])


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
            refuse((name,), what, advise_section(name, [*keys]))
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
            return {*REPLACED_BY_PLAN}
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
            refuse((section,), what, advise_section(section, [key]))
        value = _parse_value(text.strip())
        key, inner, entry = key.partition(".")
        if inner and (section, key) in TABLES:
            value = {**dict(getattr(getattr(config, section), key)), entry: value}
        elif inner:
            refuse((section, key), f"{section}.{key} has no keys inside", "")
        config = _with_values(config, section, {key: value}, refuse)
    return config


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
    section = getattr(config, name)
    kinds = {item.name: str(item.type) for item in fields(section)}
    values = {}
    for key, value in given.items():
        if key not in kinds:
            what = f"[{name}] has no key {key!r}"
            refuse((name, key), what, advise(name, key))
        values[key] = _convert((name, key), f"{name}.{key}", kinds[key], value, refuse)
    return replace(config, **{name: replace(section, **values)})


def _convert(steps: Steps, name: str, kind: str, value: object, refuse: Refuse) -> Any:
    """A value of the kind that a field declares, such as `float | None` or `tuple[str, ...]`."""
    if steps in TABLES:
        return _convert_table(steps, name, value, refuse)
    if kind.startswith("float | tuple["):  # a share, or files
        kind = "float" if _is_number(value) else kind.removeprefix("float | ")
    if kind.startswith("tuple["):
        item = kind.removeprefix("tuple[").partition(",")[0]
        return _convert_list(steps, name, item, value, refuse)
    kind = kind.partition(" ")[0]
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if steps == AUTO_RATE and value == AUTO:
        return 0.0
    if kind == "float" and is_whole:
        assert isinstance(value, int)
        return float(value) if abs(value) < 1 << 1000 else inf
    if isinstance(value, bool) and CHOICES.get(name) == SWITCH:
        return str(value).lower()
    if type(value).__name__ != kind:
        kinds = KINDS if _is_setting(steps) else ENTRY_KINDS
        refuse(steps, f"{name} must be {kinds[kind]}, not {value!r}", "")
    return _expand_home(value)


def _convert_list(
    steps: Steps, name: str, kind: str, value: object, refuse: Refuse
) -> tuple[Any, ...]:
    """A list; a single item needs no brackets, and `--set data.sources=` means no items."""
    items = value if isinstance(value, list) else [value]
    if value == "":
        items = []
    text, _, record = kind.partition(" | ")
    if record and not any(isinstance(one, Mapping) for one in items):
        kind = text
    elif record:
        return tuple(
            one
            if isinstance(one, str)
            else _convert_record((*steps, number), name, record, one, refuse)
            for number, one in enumerate(items)
        )
    if kind in RECORDS:
        return tuple(
            _convert_record((*steps, number), name, kind, table, refuse)
            for number, table in enumerate(items)
        )
    if kind == "float":
        items = [float(one) if isinstance(one, int) else one for one in items]
    if any(type(item).__name__ != kind for item in items):
        written = ", in [ ]" if _is_setting(steps) else ""
        refuse(steps, f"{name} must be a list of {LISTED[kind]}{written}", "")
    return tuple(map(_expand_home, items))


def _convert_record(
    place: Steps, name: str, kind: str, table: object, refuse: Refuse
) -> Any:
    """A table of a list, as a record."""
    make, example = RECORDS[kind]
    kinds = {item.name: str(item.type) for item in fields(make)}
    if not isinstance(table, Mapping):
        refuse(place, f"{name} must be a list of tables, such as [{example}]", "")
    values = {}
    for key, item in table.items():
        if key not in kinds:
            what = f"{name} has no key {key!r}"
            refuse((*place, key), what, suggest_name(key, kinds))
        owner = f"{key} of {name}"
        values[key] = _convert((*place, key), owner, kinds[key], item, refuse)
    if make is ParameterGroup and "match" not in values:
        what = f"{name} needs a match, such as '*.bias', in every group"
        refuse(place, what, "")
    return make(**values)


def _convert_table(steps: Steps, name: str, value: object, refuse: Refuse) -> Options:
    """A table of plain values, sorted by their names."""
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


def _is_setting(steps: Steps) -> bool:
    """Whether a value is that of a section's key; if not, it is in a table of a list."""
    return len(steps) == 2


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _expand_home(value: Any) -> Any:
    """A path with ~/ replaced, because a shell does not expand it after an `=`."""
    if isinstance(value, str) and value.startswith("~/"):
        return str(Path(value).expanduser())
    return value


# ---------------------------------------------------------------- writing
def with_absolute_paths(config: Config) -> Config:
    """A config whose files and folders can be found from any working directory.

    A run may be resumed from another one.
    """
    found: dict[str, Any] = {}
    for section in SECTIONS:
        values = getattr(config, section)
        placed = {
            item.name: _absolute(getattr(values, item.name), item.metadata["file"])
            for item in fields(values)
            if item.metadata["file"]
        }
        found[section] = replace(values, **placed)
    return replace(config, **found)


def _absolute(value: Any, file_of: Callable[[str], str]) -> Any:
    """A value in which files have their whole path; code of the user that is no file is found by Python."""
    if isinstance(value, tuple):
        return tuple(_absolute(one, file_of) for one in value)
    if isinstance(value, MixtureSource):
        return replace(value, files=_absolute(value.files, file_of))
    file = file_of(value) if isinstance(value, str) else ""
    if not file:
        return value
    return str(Path(file).expanduser().absolute()) + value.removeprefix(file)


def dump_config(
    config: Config,
    title: str = "A Penstock run: penstock train config.toml",
    short: bool = False,
) -> str:
    """A config as commented TOML, from which `load_config` builds an equal config.

    A short one has the settings that most runs change, and those that differ from the preset.
    """
    start = f"preset = {value_text(config.preset)}"
    lines = [f"# {title}", f"{start:<32} # where values come from that are not in here"]
    for name in SECTIONS:
        section = getattr(config, name)
        usual = getattr(PRESETS[config.preset], name)
        written = [
            _written(name, item, getattr(section, item.name))
            for item in fields(section)
            if not short
            or f"{name}.{item.name}" in first_settings(config)
            or getattr(section, item.name) != getattr(usual, item.name)
        ]
        lines += ["", f"[{name}]", *written] if written else []
    return "\n".join(lines) + "\n"


def first_settings(config: Config) -> tuple[str, ...]:
    """The settings that most runs change; a model that is in a folder has its own sizes."""
    model = FROM_FOLDER if config.model.path else SIZES
    return (*model, *FIRST_SETTINGS)


def _written(section: str, item: Field[Any], held: Any) -> str:
    """The line of a setting, with its meaning."""
    is_table = (section, item.name) in TABLES
    value = table_text(held) if is_table else value_text(held)
    if (section, item.name) == AUTO_RATE and not held:
        value = value_text(AUTO)
    assignment = f"{item.name} = {value}"
    return f"{assignment:<32} # {item.metadata['about']}"
