"""How ranks exchange tensors: between threads, between processes, or over an emulated slow network."""

from penstock.runtime.comm.comm import Arriving, Comm, Pending
from penstock.runtime.comm.process import ProcessComm
from penstock.runtime.comm.shaped import ShapedComm
from penstock.runtime.comm.thread import Hub, ThreadComm, run_threads

__all__ = [
    "Arriving",
    "Comm",
    "Hub",
    "Pending",
    "ProcessComm",
    "ShapedComm",
    "ThreadComm",
    "run_threads",
]
