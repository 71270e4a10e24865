"""Ways for ranks to talk: threads of one process, or processes on torch.distributed; and a slow network, emulated."""

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
