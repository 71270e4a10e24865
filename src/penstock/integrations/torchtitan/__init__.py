"""Penstock inside torchtitan: our planner and executor take the place of its pipelining.

    torchrun ... -m torchtitan.train --module penstock.integrations.torchtitan --config llama3_8b \\
        --parallelism.pipeline_parallel_degree 4 --penstock.schedule hanayo --penstock.waves 2

torchtitan loads this package through its option `--module` and is not changed. Its data, FSDP, checkpoints, metrics and
config stay. A model of your own gets the same with `penstock.integrations.torchtitan.trainer.with_penstock(config)`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from penstock.errors import RunError

TESTED_VERSION = "0.3"  # of torchtitan
TESTED_TORCH = "2.13"  # what torchtitan imports is missing in torch 2.11
INSTALL = "pip install 'penstock[titan]'"


def require_torchtitan() -> None:
    """Raise an error that says what to install, unless torchtitan's trainer can be imported and is one that we know."""
    found = installed_version("torchtitan")
    if found is None:
        raise ImportError(
            f"penstock.integrations.torchtitan needs torchtitan, which is not installed: {INSTALL}"
        )
    refuse_other_version(found)
    try:
        import_module("torchtitan.trainer")
    except ImportError as error:
        torch = installed_version("torch") or "none"
        # Not an ImportError: torchtitan, which imports us, would leave its text out.
        raise RunError(
            f"torchtitan's trainer cannot be imported: {error}\n"
            f"  penstock.integrations.torchtitan works with torchtitan {TESTED_VERSION} and torch {TESTED_TORCH}; "
            f"installed are torchtitan {found} and torch {torch}: {INSTALL}"
        ) from error


def refuse_other_version(found: str) -> None:
    """Raise an error if this torchtitan is not one whose trainer asks a `ModelSpec` for its pipelining.

    >>> refuse_other_version("0.3.1")
    """
    if found.split(".")[:2] != TESTED_VERSION.split("."):
        raise RunError(
            f"penstock.integrations.torchtitan works with torchtitan {TESTED_VERSION}, "
            f"but {found} is installed: {INSTALL}\n"
            "  earlier ones have another config; later ones call model.pipeline(), which "
            "penstock.integrations.torchtitan.model_method.pipeline_with returns"
        )


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
