"""What torch can use on this machine: GPUs, backends between ranks, compilers."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from penstock.runtime.process.mps import MPS_CONTROL
from penstock.train.before.doctor import Finding, State
from penstock.train.compiling import missing_compiler
from penstock.view.numbers import write_size

NVIDIA_DEVICE = Path("/dev/nvidia0")


def gpu_names() -> tuple[str, ...]:
    """The GPUs that torch can use."""
    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    return tuple(torch.cuda.get_device_name(number) for number in range(count))


def find_gpus(gpus: tuple[str, ...]) -> Finding:
    """The GPUs that torch can use, and the reason if it cannot use one that is there."""
    if gpus:
        sizes = [
            torch.cuda.get_device_properties(number).total_memory
            for number in range(len(gpus))
        ]
        each = ", ".join(
            f"{name} ({write_size(size)})"
            for name, size in zip(gpus, sizes, strict=True)
        )
        return Finding("GPUs", State.OK, f"{each}; CUDA {torch.version.cuda}")
    if NVIDIA_DEVICE.exists() or shutil.which("nvidia-smi"):
        if torch.version.cuda is None:
            advice = (
                "this torch is built without CUDA: install another build of torch "
                "(https://pytorch.org/get-started/locally)"
            )
        else:
            advice = (
                "torch cannot use it: compare the driver that nvidia-smi shows with CUDA "
                f"{torch.version.cuda}, and look at CUDA_VISIBLE_DEVICES"
            )
        return Finding("GPUs", State.OPTIONAL, "an NVIDIA GPU is not usable", advice)
    if torch.backends.mps.is_available():
        advice = "Penstock does not use Apple's GPU; it trains on CPU workers here"
        return Finding("GPUs", State.OPTIONAL, "Apple's GPU", advice)
    advice = "runs use CPU workers; `penstock plan --gpu h100` plans for GPUs elsewhere"
    return Finding("GPUs", State.OPTIONAL, "none", advice)


def find_backends(gpus: int) -> Finding:
    """The backends over which ranks can exchange tensors."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        advice = "this torch is built without gloo, which CPU workers need: install another build"
        return Finding("backends", State.MISSING, "no gloo", advice)
    if distributed.is_nccl_available():
        nccl = "no GPU uses it"
        if gpus:
            numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            nccl = ".".join(map(str, numbers))
        return Finding("backends", State.OK, f"gloo, NCCL ({nccl})")
    advice = ""
    if gpus:
        advice = "GPUs exchange tensors over NCCL: install a build of torch that has it"
    return Finding("backends", State.OPTIONAL if gpus else State.OK, "gloo", advice)


def find_sharing(gpus: int) -> Finding:
    """Whether several workers can share one GPU, with NVIDIA's multi-process service."""
    if shutil.which(MPS_CONTROL):
        return Finding("NVIDIA MPS", State.OK, "`penstock testbed` can share a GPU")
    advice = "`penstock testbed` needs a GPU"
    if gpus:
        advice = (
            f"`penstock testbed` needs {MPS_CONTROL}, which comes with NVIDIA's driver; "
            "in a container, let the host's be mounted"
        )
    return Finding("NVIDIA MPS", State.OPTIONAL, "not installed", advice)


def find_compilers(has_gpu: bool) -> Finding:
    """Whether torch.compile has the compilers that it calls."""
    missing = missing_compiler(torch.device("cuda" if has_gpu else "cpu"))
    if not missing:
        return Finding("compilers", State.OK, "torch.compile has what it needs")
    advice = f"install {missing}; only run.compile needs it"
    return Finding("compilers", State.OPTIONAL, f"{missing} is missing", advice)
