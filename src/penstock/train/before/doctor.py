"""What this machine can do, what is missing, and what to do about it.

    packages    torch and the optional packages             works without any of them
    machine     cores, memory, GPUs, NCCL, MPS, compilers   asked of torch and of the operating system

Nothing is started and nothing is timed, so the answer takes as long as importing torch.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from penstock.runtime.process.machine import available_memory
from penstock.version import listed_packages
from penstock.view.numbers import write_size

INSTALL_TORCH = "pip install 'penstock[torch]'"
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
        from penstock.train.before import accelerators  # noqa: PLC0415  # needs torch
    except ModuleNotFoundError:
        advice = f"{INSTALL_TORCH}; `train`, `profile` and `check --run` need it"
        findings.append(Finding("torch", State.MISSING, "not installed", advice))
        return Diagnosis(tuple(findings), cores, memory, (), False)
    gpus = accelerators.gpu_names()
    findings += [
        _torch(),
        accelerators.find_gpus(gpus),
        accelerators.find_backends(len(gpus)),
        accelerators.find_sharing(len(gpus)),
        accelerators.find_compilers(bool(gpus)),
        _package("tensorboard", "the curves of a run in TensorBoard", INSTALL_TORCH),
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
