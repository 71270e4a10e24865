"""Decides whether a run compiles its stages, which needs a compiler on the machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import partial

import torch

from penstock.config import (
    AUTO,
    LOSS_CHUNK,
    Config,
    RunConfig,
    reasons_against_compiling,
)
from penstock.errors import RunError
from penstock.models import smoothed_loss, token_loss
from penstock.runtime import ChunkedLoss, CompiledLoss
from penstock.runtime.loss import Loss
from penstock.train.user_code import own_function

# Ranks compile at the same time, but not equally long: those that are done wait for the others.
COMPILER_SECONDS = 900.0
COMPILER = "inductor"  # of the backends of torch.compile
CXX_COMPILERS = ("g++", "clang++", "c++")
C_COMPILERS = ("gcc", "clang", "cc")


def is_compiling(config: Config, device: torch.device) -> bool:
    """Whether a run on this device compiles its stages.

    `auto` compiles on GPUs, where it was measured to help, if nothing is in its way. Raises an error if the user asked
    for it and there is no compiler.
    """
    wanted = config.run.compile
    if wanted == "false" or (wanted == AUTO and device.type != "cuda"):
        return False
    missing = missing_compiler(device)
    if wanted == AUTO:
        return not missing and not reasons_against_compiling(config)
    if missing:
        raise RunError(
            f"run.compile = true needs {missing}, which is not installed here\n"
            "  install it, or leave run.compile at auto"
        )
    return True


def loss_of(compiler: str, chunk: int, run: RunConfig | None = None) -> Loss:
    """Return the loss of a run: compiled if a compiler is named, and in chunks of tokens unless `chunk` is 0.

    Other losses than the plain cross entropy are called as they are.
    """
    loss: Loss = token_loss
    if run is not None and run.own_loss:
        return own_function(run.own_loss, "run.loss")
    shape = {} if run is None else run.cross_entropy
    if any(shape.values()):
        smoothing, z_loss = (shape.get(key, 0.0) for key in ("smoothing", "z"))
        return partial(smoothed_loss, smoothing=smoothing, z_loss=z_loss)
    if compiler:
        loss = CompiledLoss(loss, compiler)
    return ChunkedLoss(loss, chunk, compiler) if chunk else loss


def chunk_of(config: Config) -> int:
    """Return the tokens whose logits a run has in memory at a time; 0 if it has all of them.

    The processes of a mesh share the logits, so that they compute all of them at once. Chunks are
    for the plain cross entropy.
    """
    run = config.run
    plain = not run.own_loss and not any(run.cross_entropy.values())
    return LOSS_CHUNK if config.parallel.size == 1 and plain else 0


def missing_compiler(device: torch.device) -> str:
    """What torch.compile lacks on this machine for kernels of a device; empty if nothing."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "triton"
        return _missing("CC", C_COMPILERS, "a C compiler such as gcc")
    return _missing("CXX", CXX_COMPILERS, "a C++ compiler such as g++")


def _missing(variable: str, programs: tuple[str, ...], description: str) -> str:
    """The description, unless the variable or one of the programs names an executable file."""
    names = (os.environ.get(variable, ""), *programs)
    return "" if any(name and shutil.which(name) for name in names) else description


def starting_patience(config: Config, device: torch.device) -> float:
    """How long a rank may wait for another one until all stages are compiled, in seconds."""
    extra = COMPILER_SECONDS if is_compiling(config, device) else 0.0
    return config.run.timeout + extra
