"""Runs schedules on real tensors: executors, communication between ranks, and split backwards.

Names are loaded when they are first used. So a command can use what needs no torch, such as the
testbed or the report of an error, without loading torch, which takes seconds.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from penstock.runtime.backward import Ledger, current_ledger, defer, make_deferrable
    from penstock.runtime.batch import Batch, batch_of, cut_batch
    from penstock.runtime.comm.comm import Comm
    from penstock.runtime.comm.process import ProcessComm
    from penstock.runtime.comm.thread import ThreadComm, run_threads
    from penstock.runtime.compiled import CompiledLoss, compile_stage
    from penstock.runtime.executor import Executor
    from penstock.runtime.gradients import Mean
    from penstock.runtime.loss import ChunkedLoss, add_loss, collected_losses
    from penstock.runtime.process.launch import finish, init, spawn
    from penstock.runtime.process.watchdog import watching
    from penstock.runtime.proof import Proof, prove
    from penstock.runtime.replay import CudaTape, Tape
    from penstock.runtime.replicas import Tied, shard_layers
    from penstock.runtime.step import Result
    from penstock.torch_internals import cut_share, local_share, share_offset

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
    "runtime.backward": ("Ledger", "current_ledger", "defer", "make_deferrable"),
    "runtime.batch": ("Batch", "batch_of", "cut_batch"),
    "runtime.comm.comm": ("Comm",),
    "runtime.comm.process": ("ProcessComm",),
    "runtime.comm.thread": ("ThreadComm", "run_threads"),
    "runtime.compiled": ("CompiledLoss", "compile_stage"),
    "runtime.executor": ("Executor", "Result"),
    "runtime.gradients": ("Mean",),
    "runtime.loss": ("ChunkedLoss", "add_loss", "collected_losses"),
    "runtime.process.launch": ("finish", "init", "spawn"),
    "runtime.process.watchdog": ("watching",),
    "runtime.proof": ("Proof", "prove"),
    "runtime.replicas": ("Tied", "shard_layers"),
    "runtime.replay": ("CudaTape", "Tape"),
    "torch_internals": ("cut_share", "local_share", "share_offset"),
}


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    from importlib import import_module  # noqa: PLC0415

    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"penstock.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, including those that are not loaded yet."""
    return sorted({*globals(), *__all__})
