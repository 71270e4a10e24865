"""The names of the backends of torch.distributed."""

from __future__ import annotations

GLOO = "gloo"
NCCL = "nccl"
IPC = "penstock_ipc"  # our own, for ranks that share one GPU
ON_GPU = (NCCL, IPC)  # those that carry messages between GPUs
