"""Where a run is described: in a config.toml, in the folder of an earlier run, or by a preset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.config import Config, check_config
from penstock.errors import ConfigError, FileError
from penstock.formats.config_toml import (
    DEFAULT_PRESET,
    apply_changes,
    preset,
    read_config,
)

CONFIG_FILE = "config.toml"  # in the folder of a run


def read_source(
    source: Path | None, preset_name: str | None, changes: Sequence[str]
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
