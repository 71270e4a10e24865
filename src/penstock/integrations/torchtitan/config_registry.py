"""All configs of torchtitan's own models, with Penstock's pipelining.

torchtitan loads this file through `--module penstock.integrations.torchtitan`.

`--config llama3_8b` is torchtitan's `llama3_8b` with a section `penstock`. The functions are looked up by name, so that
every config that the installed torchtitan has can be named.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from penstock.integrations.torchtitan import require_torchtitan

require_torchtitan()  # It explains why what is imported next is missing.

from torchtitan.models import _supported_models as torchtitan_models  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from penstock.integrations.torchtitan.trainer import PenstockTrainer, with_penstock  # noqa: E402


def __getattr__(name: str) -> Callable[[], PenstockTrainer.Config]:
    """Return the function that makes a config of torchtitan with Penstock's pipelining."""
    make_config = None if name.startswith("_") else _own_config(name)
    if make_config is None:
        raise AttributeError(f"torchtitan has no config function {name}")

    def make() -> PenstockTrainer.Config:
        return with_penstock(make_config())

    return make


def _own_config(name: str) -> Callable[[], Trainer.Config] | None:
    """The function of this name among the configs of torchtitan's models."""
    # A config is named after its model, so its module is the first to be loaded.
    models = sorted(torchtitan_models, key=lambda model: not name.startswith(model))
    for model in models:
        try:
            registry = import_module(f"torchtitan.models.{model}.config_registry")
        except ImportError:
            # Some models need packages that torchtitan does not install.
            if name.startswith(model):
                raise
            continue
        found: Callable[[], Trainer.Config] | None = getattr(registry, name, None)
        if found is not None:
            return found
    return None
