"""The names of the backends of torch.distributed that carry messages between GPUs."""

from __future__ import annotations

NCCL = "nccl"
IPC = "penstock_ipc"  # our own, for ranks that share one GPU
ON_GPU = (NCCL, IPC)
