"""Schedules on real tensors: executors, ways to talk, split backwards."""

from penstock.runtime.backward import Ledger, current_ledger, defer, make_deferrable
from penstock.runtime.batch import Batch, batch_of, cut_batch
from penstock.runtime.comm import Comm, ProcessComm, ShapedComm, ThreadComm, run_threads
from penstock.runtime.executor import Executor, Result, execute
from penstock.runtime.launch import finish, init, spawn
from penstock.runtime.prove import Proof, prove
from penstock.runtime.replay import CudaTape, Tape
from penstock.runtime.replicas import Tied
from penstock.runtime.shards import shard_layers
from penstock.runtime.share import corner, cut, local
from penstock.runtime.sleeping import Sleeping
from penstock.runtime.visits import Mean
from penstock.runtime.watchdog import watching

__all__ = [
    "Batch",
    "Comm",
    "CudaTape",
    "Executor",
    "Ledger",
    "Mean",
    "ProcessComm",
    "Proof",
    "Result",
    "ShapedComm",
    "Sleeping",
    "Tape",
    "ThreadComm",
    "Tied",
    "batch_of",
    "corner",
    "current_ledger",
    "cut",
    "cut_batch",
    "defer",
    "execute",
    "finish",
    "init",
    "local",
    "make_deferrable",
    "prove",
    "run_threads",
    "shard_layers",
    "spawn",
    "watching",
]
