"""What this machine can do, what is missing, and what to do about it.

    packages    torch and the optional packages             works without any of them
    machine     cores, memory, GPUs, NCCL, MPS, compilers   asked of torch and of the operating system

Nothing is started and nothing is timed, so the answer takes as long as importing torch.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from penstock.runtime.process.machine import available_memory
from penstock.runtime.process.mps import MPS_CONTROL
from penstock.version import listed_packages
from penstock.view.numbers import write_size

INSTALL_TORCH = "pip install 'penstock[torch]'"
NVIDIA_DEVICE = Path("/dev/nvidia0")
INSTALL_HF = "pip install 'penstock[hf]'"


class State(StrEnum):
    """Whether a thing is there, and whether its absence stops anything."""

    OK = "ok"
    OPTIONAL = "optional"  # missing, and only some options need it
    MISSING = "missing"  # missing, and commands fail without it


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for, what was found, and what to do if it is not enough."""

    topic: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, and what they mean together."""

    findings: tuple[Finding, ...]
    cores: int
    memory: float  # bytes that new processes can have
    gpus: tuple[str, ...]
    can_train: bool

    @property
    def verdict(self) -> str:
        """What to do on this machine."""
        if not self.can_train:
            return (
                f"This machine can plan, simulate and draw. To train: {INSTALL_TORCH}"
            )
        if not self.gpus:
            return "This machine can plan, simulate, draw and train, on CPU workers."
        return (
            "This machine can plan, simulate, draw and train, on CPU workers or on "
            f"{len(self.gpus)} GPU{'s' * (len(self.gpus) > 1)}."
        )


def examine() -> Diagnosis:
    """Look at this machine and at the installed packages."""
    cores = _usable_cores()
    memory = available_memory()
    findings = [
        Finding("python", State.OK, platform.python_version()),
        Finding("processor", State.OK, f"{cores} core{'s' * (cores > 1)} to use"),
        Finding("memory", State.OK, f"{write_size(memory)} free"),
    ]
    try:
        import torch  # noqa: PLC0415  # It may be missing.
    except ModuleNotFoundError:
        advice = f"{INSTALL_TORCH}; `train`, `profile` and `check --run` need it"
        findings.append(Finding("torch", State.MISSING, "not installed", advice))
        return Diagnosis(tuple(findings), cores, memory, (), False)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = tuple(torch.cuda.get_device_name(number) for number in range(count))
    findings += [
        _torch(),
        _gpus(torch, gpus),
        _backends(torch, count),
        _sharing(count),
        _compilers(torch, bool(gpus)),
        _package(
            "tensorboard",
            "the curves of a run in TensorBoard",
            "pip install 'penstock[tensorboard]'",
        ),
        _package("safetensors", "checkpoints and exported models", INSTALL_TORCH, True),
        _package("tokenizers", "text as tokens of a tokenizer.json", INSTALL_HF),
        _package("transformers", "models from Hugging Face folders", INSTALL_HF),
        _package("pyarrow", "text in .parquet, .arrow and .feather tables", INSTALL_HF),
        _package("peft", "adapters (LoRA)", "pip install 'penstock[lora]'"),
        _package("ray", "training in Ray Train", "pip install 'penstock[ray]'"),
    ]
    can_train = not any(one.state is State.MISSING for one in findings)
    return Diagnosis(tuple(findings), cores, memory, gpus, can_train)


# ---------------------------------------------------------------- the machine
def _usable_cores() -> int:
    """The cores that this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---------------------------------------------------------------- what torch can use
def _gpus(torch: ModuleType, gpus: tuple[str, ...]) -> Finding:
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


def _backends(torch: ModuleType, gpus: int) -> Finding:
    """The backends over which ranks can exchange tensors."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        advice = "this torch is built without gloo, which CPU workers need: install another build"
        return Finding("backends", State.MISSING, "no gloo", advice)
    if distributed.is_nccl_available():
        nccl = "no GPU uses it"
        if gpus:
            numbers = torch.cuda.nccl.version()
            nccl = ".".join(map(str, numbers))
        return Finding("backends", State.OK, f"gloo, NCCL ({nccl})")
    advice = ""
    if gpus:
        advice = "GPUs exchange tensors over NCCL: install a build of torch that has it"
    return Finding("backends", State.OPTIONAL if gpus else State.OK, "gloo", advice)


def _sharing(gpus: int) -> Finding:
    """Whether several workers can share one GPU, with NVIDIA's multi-process service."""
    if shutil.which(MPS_CONTROL):
        return Finding("NVIDIA MPS", State.OK, "`penstock lab testbed` can share a GPU")
    advice = "`penstock lab testbed` needs a GPU"
    if gpus:
        advice = (
            f"`penstock lab testbed` needs {MPS_CONTROL}, which comes with NVIDIA's driver; "
            "in a container, let the host's be mounted"
        )
    return Finding("NVIDIA MPS", State.OPTIONAL, "not installed", advice)


def _compilers(torch: ModuleType, has_gpu: bool) -> Finding:
    """Whether torch.compile has the compilers that it calls."""
    from penstock.train.compiling import missing_compiler  # noqa: PLC0415  # torch

    missing = missing_compiler(torch.device("cuda" if has_gpu else "cpu"))
    if not missing:
        return Finding("compilers", State.OK, "torch.compile has what it needs")
    advice = f"install {missing}; only run.compile needs it"
    return Finding("compilers", State.OPTIONAL, f"{missing} is missing", advice)


# ---------------------------------------------------------------- packages
def _torch() -> Finding:
    """Whether this version of torch is one that the package was tested with."""
    found = version("torch")
    least, below = torch_range()
    number = _number(found)
    if least <= number < below:
        return Finding("torch", State.OK, found)
    wanted = f">={_dotted(least)},<{_dotted(below)}"
    advice = f"Penstock is tested with torch {wanted}: pip install 'torch{wanted}'"
    return Finding("torch", State.OPTIONAL, f"{found}, which was never tried", advice)


def torch_range() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first version of torch that the package accepts, and the first that it does not."""
    listed = listed_packages()
    wanted = next((one for one in listed if re.match(r"torch\b[^-]", one)), "")
    least = re.search(r">=\s*([\d.]+)", wanted)
    below = re.search(r"<\s*([\d.]+)", wanted)
    return (
        _number(least[1]) if least else (0,),
        _number(below[1]) if below else (1 << 30,),
    )


def _number(text: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    >>> _number("2.13.1+cpu")
    (2, 13)
    """
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _dotted(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))


def _package(name: str, use: str, install: str, needed: bool = False) -> Finding:
    """Whether a package is installed that some commands need."""
    if find_spec(name) is None:
        state = State.MISSING if needed else State.OPTIONAL
        return Finding(name, state, "not installed", f"{install}, for {use}")
    try:
        return Finding(name, State.OK, version(name))
    except PackageNotFoundError:
        return Finding(name, State.OK, "installed")
