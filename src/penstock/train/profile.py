"""A model's pieces, ready to be measured, on this process or on as many ranks as are asked for.

model of two layers ──split──► embedding | layer layer | head          the whole one need not fit
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.cost.profile import Profile
from penstock.errors import FileError, RunError, ShapeError
from penstock.formats import config_toml as config_file
from penstock.ir.plan import Facts
from penstock.measure.points import Where
from penstock.measure.probe import Subject
from penstock.measure.profile import PROFILE_ROUNDS, ProgressText, Subjects, measure
from penstock.models import (
    GPT,
    GPTConfig,
    Llama,
    LlamaConfig,
    document_starts,
    model_width,
    split,
    token_loss,
)
from penstock.runtime import Comm, CudaTape, spawn
from penstock.runtime.process.amx import avoid_broken_amx
from penstock.runtime.process.launch import run_on_ranks, under_launcher
from penstock.train import weights
from penstock.train.data.tokenizer import ByteTokenizer
from penstock.train.weights import Sizes

DEPTH = 2  # layers that are measured in a row: what is done once a part (positions, masks) is shared by them
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
PROFILE_PATIENCE = (
    3600.0  # seconds that a rank waits for another one that still measures
)


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure, and how. `model`: sizes of ours, or the folder of a Hugging Face model, for its config."""

    model: LlamaConfig | GPTConfig | Path
    tokens: int
    rows: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    autocast: str | None = None  # compute in this type
    threads: int | None = None  # of a rank; None: as torch has it
    links: bool = False  # every pair of ranks
    rounds: int = PROFILE_ROUNDS
    separate: bool = False  # rows of two documents each, that do not see each other
    mean: bool = False  # of all passes over a slice; else their median
    depth: int = DEPTH  # layers measured in a row
    graphs: bool = False  # recorded actions, as in a run with run.graphs
    where: tuple[
        Where, ...
    ] = ()  # slices, by tokens and prefix; none: some forty that say most of all others


def preset_sizes(preset: str, tokens: int, changes: Mapping[str, int]) -> Sizes:
    """A preset of the trainer's, with some sizes changed; a GPT has positions for at least so many tokens."""
    model = config_file.preset(preset).model
    if model.family == "gpt" and "kv_heads" in changes:
        raise ShapeError(
            f"{preset} has no kv_heads: every head has keys and values of its own"
        )
    model = replace(model, **changes, positions=max(model.positions, tokens))  # type: ignore[arg-type]
    return weights.sizes_of(model, 0 if model.vocab else ByteTokenizer.vocab, tokens)


def profile_model(
    request: Request, ranks: int = 1, watch: ProgressText = lambda text: None
) -> Profile | None:
    """The profile of a model: in this process, under torchrun in all of its, or in so many new ones on this machine.

    None on the other ranks of torchrun.
    """
    if (
        "bfloat16" in (request.dtype, request.autocast)
        and torch.device(request.device).type == "cpu"
    ):
        avoid_broken_amx()
    if under_launcher():
        return run_on_ranks(measure_request, request, watch, patience=PROFILE_PATIENCE)
    if ranks > 1:
        watch(f"{ranks} ranks measure at the same time")
        backend = "gloo" if torch.device(request.device).type == "cpu" else None
        return spawn(
            ranks,
            measure_request,
            request,
            _silent,
            patience=PROFILE_PATIENCE,
            backend=backend,
        )[0]
    return measure_request(None, request, watch)


def _silent(text: str) -> None:
    """The other ranks say nothing."""


def measure_request(
    comm: Comm | None, request: Request, watch: ProgressText = _silent
) -> Profile:
    """What this process measures, at the same time as all others of the `comm`."""
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    watch = watch if comm is None or comm.rank == 0 else _silent
    middle = statistics.fmean if request.mean else statistics.median
    subjects = subjects_of(request, comm)
    if request.graphs and subjects.layer.inputs.device.type != "cuda":
        raise RunError(
            "graphs record the launches of a GPU, and this profile is of a CPU; leave them out"
        )
    tape = CudaTape() if request.graphs else None
    return measure(
        subjects,
        comm,
        request.links,
        request.rounds,
        watch,
        request.where,
        middle,
        tape,
    )


def subjects_of(request: Request, comm: Comm | None = None) -> Subjects:
    """The pieces of the model, on their device, with random tokens and hidden states."""
    device, dtype = _device(request.device, comm), _dtype(request.dtype)
    torch.manual_seed(0)
    model, layers, vocab, facts = _small(request)
    model = model.to(device=device, dtype=dtype)
    depth = min(request.depth, layers)
    embed, middle, head = split(model, (0, depth, 0))
    shape = (request.rows, request.tokens)
    words, labels = (torch.randint(0, vocab, shape, device=device) for _ in range(2))
    hidden = torch.randn(*shape, model_width(model), device=device, dtype=dtype)
    cast = None if request.autocast is None else _dtype(request.autocast)
    halves = torch.tensor(
        [request.tokens // 2, request.tokens - request.tokens // 2], device=device
    )
    starts = document_starts(halves).expand(shape) if request.separate else None
    return Subjects(
        Subject(embed, words, autocast=cast, starts=starts),
        Subject(
            middle,
            hidden,
            depth,
            prefixes=not middle.unsliceable,
            autocast=cast,
            starts=starts,
        ),
        Subject(head, hidden, loss=token_loss, labels=labels, autocast=cast),
        layers,
        facts,
        _facts(device, request, 1 if comm is None else comm.ranks),
    )


def _small(request: Request) -> tuple[nn.Module, int, int, Facts]:
    """The model with fewer layers, the number it really has, its words, and what it is."""
    given = request.model
    if isinstance(given, Path):
        return _hugging_face(given, request)
    make: Callable[[Any], nn.Module] = Llama if isinstance(given, LlamaConfig) else GPT
    if isinstance(given, GPTConfig) and request.tokens > given.positions:
        raise ShapeError(
            f"{request.tokens} tokens, but only {given.positions} positions"
        )
    facts = (
        ("family", type(given).__name__.removesuffix("Config").lower()),
        *asdict(given).items(),
    )
    return (
        make(replace(given, layers=min(request.depth, given.layers))),
        given.layers,
        given.vocab,
        facts,
    )


def _hugging_face(folder: Path, request: Request) -> tuple[nn.Module, int, int, Facts]:
    tokens = request.tokens
    try:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # an optional extra
    except ModuleNotFoundError:
        raise RunError(
            "--hf needs transformers, which is not installed: pip install transformers"
        ) from None
    if not (folder / "config.json").is_file():
        raise FileError(
            f"there is no config.json in {folder}\n  name the folder of a Hugging Face model"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        layers, longest = (
            int(config.num_hidden_layers),
            int(getattr(config, "max_position_embeddings", tokens)),
        )
        if tokens > longest:
            raise ShapeError(f"{tokens} tokens, but {folder} is for {longest} at most")
        config.num_hidden_layers = min(request.depth, layers)
        config.use_cache = False
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, AttributeError) as error:
        raise FileError(
            f"cannot make a model of {folder}: {str(error).splitlines()[0]}"
        ) from None
    facts = (
        ("family", str(type(model).__name__)),
        ("layers", layers),
        ("width", int(config.hidden_size)),
    )
    return model, layers, int(config.vocab_size), facts


# ---------------------------------------------------------------- where
def _device(name: str, comm: Comm | None) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ShapeError(
            f"there is no device {name!r}; cpu, cuda or cuda:1 are some"
        ) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RunError("this machine has no GPU that torch can see; --device cpu")
        gpus = torch.cuda.device_count()
        here = int(
            os.environ.get("LOCAL_WORLD_SIZE", 1 if comm is None else comm.ranks)
        )
        if here > gpus and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
            raise RunError(
                f"{here} ranks on {gpus} GPUs would slow each other while they measure; --ranks {gpus}, or "
                f"give each a share: penstock testbed --workers {here} -- ..."
            )
        if device.index is None:
            mine = int(os.environ.get("LOCAL_RANK", 0 if comm is None else comm.rank))
            device = torch.device("cuda", mine % gpus)
        torch.cuda.set_device(device)
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ShapeError(f"there is no type {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _facts(device: torch.device, request: Request, ranks: int) -> Facts:
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    return (
        ("device", device.type),
        ("name", name),
        ("torch", str(torch.__version__)),
        ("dtype", request.dtype),
        ("autocast", request.autocast),
        ("threads", torch.get_num_threads()),
        ("ranks", ranks),
    )
