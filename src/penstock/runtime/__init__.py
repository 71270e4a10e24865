"""Runs schedules on real tensors: executors, communication between ranks, and split backwards.

Names are loaded when they are first used. So a command can use what needs no torch, such as the
testbed or the report of an error, without loading torch, which takes seconds.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from penstock.runtime.backward import Ledger, current_ledger, defer, make_deferrable
    from penstock.runtime.batch import Batch, batch_of, cut_batch
    from penstock.runtime.comm import (
        Comm,
        ProcessComm,
        ShapedComm,
        ThreadComm,
        run_threads,
    )
    from penstock.runtime.compiled import CompiledLoss, compile_stage
    from penstock.runtime.executor import Executor, Result
    from penstock.runtime.gradients import Mean
    from penstock.runtime.loss import ChunkedLoss, add_loss, collected_losses
    from penstock.runtime.process.launch import finish, init, spawn
    from penstock.runtime.process.watchdog import watching
    from penstock.runtime.proof.prove import Proof, prove
    from penstock.runtime.replicas import Tied, shard_layers
    from penstock.runtime.tape import CudaTape, Tape
    from penstock.runtime.torch_internals import cut_share, local_share, share_offset

__all__ = [
    "Batch",
    "ChunkedLoss",
    "Comm",
    "CompiledLoss",
    "CudaTape",
    "Executor",
    "Ledger",
    "Mean",
    "ProcessComm",
    "Proof",
    "Result",
    "ShapedComm",
    "Tape",
    "ThreadComm",
    "Tied",
    "add_loss",
    "batch_of",
    "collected_losses",
    "compile_stage",
    "current_ledger",
    "cut_batch",
    "cut_share",
    "defer",
    "finish",
    "init",
    "local_share",
    "make_deferrable",
    "prove",
    "run_threads",
    "shard_layers",
    "share_offset",
    "spawn",
    "watching",
]

# The public names of each module.
_MODULES = {
    "backward": ("Ledger", "current_ledger", "defer", "make_deferrable"),
    "batch": ("Batch", "batch_of", "cut_batch"),
    "comm": ("Comm", "ProcessComm", "ShapedComm", "ThreadComm", "run_threads"),
    "compiled": ("CompiledLoss", "compile_stage"),
    "executor": ("Executor", "Result"),
    "gradients": ("Mean",),
    "loss": ("ChunkedLoss", "add_loss", "collected_losses"),
    "process.launch": ("finish", "init", "spawn"),
    "process.watchdog": ("watching",),
    "proof.prove": ("Proof", "prove"),
    "replicas": ("Tied", "shard_layers"),
    "tape": ("CudaTape", "Tape"),
    "torch_internals": ("cut_share", "local_share", "share_offset"),
}


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    from importlib import import_module  # noqa: PLC0415

    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"penstock.runtime.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, including those that are not loaded yet."""
    return sorted({*globals(), *__all__})
