"""Configs as TOML: read, changed by `--set`, written with a comment on every line.

    config.toml ──► values ──┬── --set model.layers=24 ──► Config ──► check
    preset "tiny" ───────────┘

A key or a section that nobody knows is refused with the nearest one that somebody does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import TypeAlias

from penstock.config import (
    PRESETS,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    check_config,
    names_a_file,
)
from penstock.errors import ConfigError, FileError, UnknownNameError

Value: TypeAlias = "str | int | float | bool | tuple[str, ...] | tuple[int, ...]"
Section: TypeAlias = (
    ModelConfig | DataConfig | ScheduleConfig | MeshConfig | OptimizerConfig | RunConfig
)
SECTIONS = tuple(section.name for section in fields(Config))


def preset(name: str) -> Config:
    """One of the configs that come along."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return PRESETS[name]


def read_config(path: str | Path, changes: Iterable[str] = ()) -> Config:
    """The config in a file, changed by `section.key=value` each."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not text: byte {error.start} is no UTF-8\n  a config is a TOML text"
        ) from None
    except OSError as error:
        raise FileError(
            f"cannot read {path}: {error.strerror}\n  write one with `penstock init`"
        ) from None
    return load_config(text, str(path), changes)


def load_config(
    text: str, source: str = "config.toml", changes: Iterable[str] = ()
) -> Config:
    """The config that a text holds; what it leaves out is as in the preset "tiny", or in `preset = "..."`."""
    try:
        values = tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of too many digits, brackets in brackets
        raise FileError(f"{source} is no TOML: {error}") from None
    base = preset(_word(source, values.pop("preset", "tiny")))
    for name, section in values.items():
        if name not in SECTIONS:
            raise ConfigError(
                f"{source}: {UnknownNameError('section', name, SECTIONS)}"
            )
        if not isinstance(section, dict):
            raise ConfigError(
                f"{source}: {name} is a section; write [{name}] above its keys"
            )
        base = _with(base, name, section, source)
    return check_config(apply_changes(base, changes))


def written_keys(source: Path | None, changes: Iterable[str]) -> frozenset[str]:
    """The values that somebody has written, as section.key: with --set, or in a config. A run's folder has a config
    that the run wrote itself, so what is in it does not count."""
    keys = {change.partition("=")[0].strip() for change in changes}
    if source is not None and source.is_file():
        values = tomllib.loads(source.read_bytes().decode("utf-8-sig"))
        keys |= {
            f"{name}.{key}"
            for name, section in values.items()
            if isinstance(section, dict)
            for key in section
        }
    return frozenset(keys)


def _word(source: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f'{source}: preset must be a name in quotes, preset = "tiny"')
    return value


def apply_changes(config: Config, changes: Iterable[str]) -> Config:
    """A config with changes `section.key=value`; a value is TOML, or a text without quotes."""
    for change in changes:
        name, equals, text = change.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot:
            raise ConfigError(
                f"--set {change} is not section.key=value, as in --set model.layers=24"
            )
        if section not in SECTIONS:
            raise ConfigError(
                f"--set {change}: {UnknownNameError('section', section, SECTIONS)}"
            )
        config = _with(config, section, {key: _value(text.strip())}, f"--set {change}")
    return config


def _value(text: str) -> object:
    """A value as TOML has it; quotes, which a shell takes away, may be missing, also in a list.

    >>> _value("24"), _value("notes"), _value("[notes, b.txt]")
    (24, 'notes', ['notes', 'b.txt'])
    """
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        inside = text[1:-1].split(",") if text[:1] == "[" and text[-1:] == "]" else None
        return (
            text if inside is None else [one.strip() for one in inside if one.strip()]
        )


def _with(
    config: Config, name: str, given: Mapping[str, object], source: str
) -> Config:
    """A config with some values of one section."""
    section: Section = getattr(config, name)
    known = {item.name: getattr(section, item.name) for item in fields(section)}
    values: dict[str, Value] = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"{source}: {UnknownNameError(f'key in [{name}]', key, known)}"
            )
        values[key] = _typed(f"{name}.{key}", value, known[key], source)
    return replace(config, **{name: replace(section, **values)})  # type: ignore[arg-type]


def _typed(name: str, value: object, default: Value, source: str) -> Value:
    """A value of the kind of its default."""
    if isinstance(default, tuple):
        listed = (
            [value]
            if isinstance(value, str | int) and not isinstance(value, bool)
            else value
        )
        listed = [] if listed == [""] and value == "" else listed  # --set data.sources=
        kind: type[str] | type[int] = int if name.endswith("partition") else str
        if isinstance(listed, list) and all(type(one) is kind for one in listed):
            return tuple(map(_from_home, listed)) if kind is str else tuple(listed)
        raise ConfigError(
            f"{source}: {name} must be a list of {'whole numbers' if kind is int else 'texts'}, in [ ]"
        )
    if (
        isinstance(default, float)
        and isinstance(value, int)
        and not isinstance(value, bool)
    ):
        return float(value) if abs(value) < 1 << 1000 else inf
    if type(value) is type(default):
        return _from_home(value) if isinstance(value, str) else value
    kinds = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
    }
    raise ConfigError(f"{source}: {name} must be {kinds[type(default)]}, not {value!r}")


def _from_home(text: str) -> str:
    """A path that begins at home, as a shell has it: what stands after an `=` a shell leaves as it is."""
    return str(Path(text).expanduser()) if text.startswith("~/") else text


# ---------------------------------------------------------------- writing
def with_absolute_paths(config: Config) -> Config:
    """The same, with every file and folder it names as it is found from anywhere: a run may go on from elsewhere."""

    def found(name: str) -> str:
        return str(Path(name).expanduser().absolute())

    model, data, schedule = config.model, config.data, config.schedule
    return replace(
        config,
        model=replace(model, weights=model.weights and found(model.weights)),
        data=replace(
            data,
            sources=tuple(map(found, data.sources)),
            tokenizer=found(data.tokenizer)
            if names_a_file(data.tokenizer)
            else data.tokenizer,
        ),
        schedule=replace(
            schedule,
            name=found(schedule.name) if Path(schedule.name).suffix else schedule.name,
        ),
    )


def dump_config(
    config: Config, title: str = "A run of Penstock's: penstock train config.toml"
) -> str:
    """A config as commented TOML; `load_config` makes an equal one of it."""
    lines = [f"# {title}"]
    for name in SECTIONS:
        section = getattr(config, name)
        lines += ["", f"[{name}]"]
        for item in fields(section):
            lines.append(
                f"{f'{item.name} = {_text(getattr(section, item.name))}':<32} # {item.metadata['about']}"
            )
    return "\n".join(lines) + "\n"


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, str):
        return '"' + "".join(_escape(sign) for sign in value) + '"'
    return repr(value)


def _escape(sign: str) -> str:
    if sign in '"\\':
        return "\\" + sign
    return sign if sign.isprintable() else f"\\U{ord(sign):08x}"
