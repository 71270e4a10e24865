"""What a shell completes: names of schedules, presets and GPUs, and the keys of a config.

Each function gets the letters that are already there and returns the words that fit. If it
returns none, the shell completes names of files.
"""

from __future__ import annotations


def complete_schedule(begin: str) -> list[str]:
    """Names of schedules."""
    from penstock.schedules import REGISTRY

    return [name for name in REGISTRY if name.startswith(begin)]


def complete_preset(begin: str) -> list[str]:
    """Names of presets."""
    from penstock.config import PRESETS

    return [name for name in PRESETS if name.startswith(begin)]


def complete_gpu(begin: str) -> list[str]:
    """Names of GPUs whose times are known."""
    from penstock.cost.gpus import GPUS

    return [name for name in GPUS if name.startswith(begin)]


def complete_framework(begin: str) -> list[str]:
    """Names of other frameworks that a plan can be for."""
    from penstock.integrations.advice import FRAMEWORKS

    return [name for name in FRAMEWORKS if name.startswith(begin)]


def complete_change(begin: str) -> list[str]:
    """Keys of a config, as section.key=."""
    from dataclasses import fields

    from penstock.formats.config_toml import SECTIONS, preset

    config = preset("tiny")
    keys = [
        f"{section}.{item.name}="
        for section in SECTIONS
        for item in fields(getattr(config, section))
    ]
    return [key for key in keys if key.startswith(begin)]
