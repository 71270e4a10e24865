"""Finds the user's own functions and classes, which a config names as module:name or file.py:name, and tries a loss.

    optimizer.lr_schedule = "rates:sawtooth"          the module rates, in the working directory or installed
    optimizer.lr_schedule = "code/rates.py:sawtooth"  a file; the config of a run keeps its whole path

A config that names code runs that code, as if you had imported it. A loss is tried on a few random logits before any
worker starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from penstock.config import RunConfig
from penstock.errors import ConfigError, ShapeError
from penstock.runtime.loss import Reduction, refuse_other_loss


def own_function(name: str, key: str) -> Callable[..., Any]:
    """Return the function or class that the config's `key` names."""
    source, _, inner = name.rpartition(":")
    try:
        if source.endswith(".py"):
            module = _load_file(str(Path(source).expanduser().absolute()))
        else:
            here = str(Path.cwd())  # It counts, as it does for `python -m`.
            if here not in sys.path and "" not in sys.path:
                sys.path.append(here)
            module = importlib.import_module(source)
    except (ImportError, OSError, SyntaxError) as error:
        missing = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{key} = {name} cannot be imported: {missing}\n"
            "  write module:name, with a module in the working directory or in PYTHONPATH, or file.py:name"
        ) from None
    found = getattr(module, inner, None)
    if found is None:
        raise ConfigError(
            f"{key} = {name}: {source} has no {inner!r}\n"
            "  name a function or class at the top level of the file"
        )
    if not callable(found):
        raise ConfigError(f"{key} = {name} is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


@lru_cache(maxsize=64)
def _load_file(path: str) -> ModuleType:
    """Run a file as a module, once."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROWS = 2
TRIED_TOKENS = 8


def probe_loss(run: RunConfig, vocab: int, sliced: bool = False) -> Reduction:
    """Return whether run.loss is a sum over labels or their mean; raise ConfigError if it is neither, or fails."""
    loss = own_function(run.loss, "run.loss")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, TRIED_TOKENS, vocab, generator=generator)
    labels = torch.randint(0, vocab, (ROWS, TRIED_TOKENS), generator=generator)
    reasons = []
    for reduction in (Reduction.SUM, Reduction.MEAN):
        try:
            refuse_other_loss(loss, logits, labels, reduction, 0, sliced)
            return reduction
        except ShapeError as error:
            reasons.append(str(error).splitlines()[0])
        except Exception as error:
            raise ConfigError(
                f"run.loss = {run.loss} failed: {type(error).__name__}: {error}\n"
                f"  it is called with logits of shape (rows, tokens, {vocab}) and labels of shape (rows, tokens)"
            ) from error
    raise ConfigError(
        f"run.loss = {run.loss}: {reasons[0]}\n"
        "  return one number: the sum over the labels that are not -100, or their mean"
    )
