"""Penstock inside torchtitan: our planner and executor take the place of its pipelining.

    torchrun ... -m torchtitan.train --module penstock.titan --config llama3_8b \\
        --parallelism.pipeline_parallel_degree 4 --penstock.schedule hanayo --penstock.waves 2

torchtitan loads this package through its option `--module` and is not changed. Its data, FSDP, checkpoints, metrics and
config stay. A model of your own gets the same with `penstock.titan.trainer.with_penstock(config)`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from penstock.errors import RunError

TESTED_VERSION = "0.3"  # of torchtitan


def refuse_other_version(found: str) -> None:
    """Raise an error if this torchtitan is not one whose trainer asks a `ModelSpec` for its pipelining.

    >>> refuse_other_version("0.3.1")
    """
    if found.split(".")[:2] != TESTED_VERSION.split("."):
        raise RunError(
            f"penstock.titan works with torchtitan {TESTED_VERSION}, but {found} is installed: "
            "pip install 'torchtitan==0.3.0'\n"
            "  earlier ones have another config; later ones call model.pipeline(), which "
            "penstock.titan.model_method.pipeline_with returns"
        )


def refuse_installed_version() -> None:
    """Raise an error if another torchtitan is installed; if there is none, importing it will say so."""
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        return
    refuse_other_version(found)
