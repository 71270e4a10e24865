"""Runs schedules on real tensors: executors, communication between ranks, and split backwards."""

from penstock.runtime.backward import Ledger, current_ledger, defer, make_deferrable
from penstock.runtime.batch import Batch, batch_of, cut_batch
from penstock.runtime.chunked_loss import ChunkedLoss
from penstock.runtime.comm import Comm, ProcessComm, ShapedComm, ThreadComm, run_threads
from penstock.runtime.compiled_stages import CompiledLoss, compile_stage
from penstock.runtime.dtensor_share import cut_share, local_share, share_offset
from penstock.runtime.executor import Executor, Result
from penstock.runtime.gradients import Tied
from penstock.runtime.process.launch import finish, init, spawn
from penstock.runtime.process.watchdog import watching
from penstock.runtime.proof.prove import Proof, prove
from penstock.runtime.shards import shard_layers
from penstock.runtime.tape import CudaTape, Tape
from penstock.runtime.visits import Mean

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
    "batch_of",
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
