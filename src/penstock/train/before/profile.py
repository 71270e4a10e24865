"""The pieces of a model, ready to be measured in this process or in several ranks.

model of two layers ──split──► embedding | layer layer | head          the whole model need not fit
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain

import torch
from torch import nn

from penstock.config import Config, LoraConfig, OptimizerConfig, is_recording
from penstock.cost.profile import PROCESSORS, Profile, RowProfiles
from penstock.cost.sizes import chunk_in_use
from penstock.errors import RunError, ShapeError
from penstock.ir.plan import Facts
from penstock.measure.probe import MEASURED_RATE, Subject
from penstock.measure.profile import (
    PROFILE_ROUNDS,
    QUICK_ROUNDS,
    ProgressText,
    Setup,
    SlicePoint,
    Subjects,
    measure_rows,
)
from penstock.models import (
    BertConfig,
    DecoderConfig,
    GPTConfig,
    Part,
    document_starts,
    model_width,
    part_parameters,
    split,
)
from penstock.models.decoder import build_decoder, check_positions
from penstock.models.family import family_of, flops_per_token
from penstock.models.layer import recompute_inside
from penstock.models.split import find_layout
from penstock.runtime import Comm, CudaTape, compile_stage, spawn
from penstock.runtime.process.launch import run_on_ranks, under_launcher
from penstock.runtime.process.machine import (
    avoid_broken_amx,
    count_neighbours,
    look_at_machine,
    own_gpu,
    processes_at_once,
)
from penstock.train.compiling import COMPILER, chunk_of, is_compiling, loss_of
from penstock.train.job import model_sizes
from penstock.train.lora import adapt, is_adapter
from penstock.train.optimizer import Optimizer, frozen_names, layer_parameters
from penstock.train.placement import Placement, precision_on
from penstock.train.weights import Sizes

# Layers that are measured in a row, because they share work that is done once per part,
# such as positions and masks.
DEPTH = 2
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
# Seconds that a rank waits for another one that still measures.
PROFILE_PATIENCE = 3600.0
# The largest pass of a quick measurement, in operations.
MAX_QUICK_OPERATIONS = {"cpu": 1e10, "cuda": 1e13}
# Sequences that take more are shortened, but to no fewer tokens than this.
MIN_QUICK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to measure, and how."""

    model: Sizes
    tokens: int  # of a sequence
    rows: int = 1  # sequences of a micro-batch
    device: str = "cpu"
    dtype: str = "float32"
    autocast: str | None = None  # the type in which to compute
    threads: int | None = None  # of a rank; None keeps torch's own number
    links: bool = False  # also measure the link between every pair of ranks
    rounds: int = PROFILE_ROUNDS
    separate: bool = False  # rows hold two documents that do not see each other
    mean: bool = False  # the mean of all passes over a slice, instead of their median
    depth: int = DEPTH  # layers measured in a row
    graphs: bool = False  # record actions, as run.cuda_graphs does
    compiled: bool = False  # compile layers, head and loss, as run.compile does
    # Tokens whose logits are in memory at a time; 0 for all of them.
    loss_chunk: int = 0
    # Slices to measure, by tokens and prefix; if empty, about forty typical ones.
    where: tuple[SlicePoint, ...] = ()
    quick: bool = False  # about ten slices in a few seconds, and QUICK_ROUNDS rounds
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    # What is recomputed inside of layers, "attention" or "mlp", as run.recompute does.
    inside: tuple[str, ...] = ()


def measuring_rounds(quick: bool) -> int:
    """Return how often a measurement visits each point."""
    return QUICK_ROUNDS if quick else PROFILE_ROUNDS


def request_of(
    config: Config, placement: Placement, rows: int | None = None, quick: bool = False
) -> ProfileRequest:
    """Return the request to measure the model of a run as the run will compute it.

    `rows` is the number of rows of a micro-batch, by default as many as the config has,
    or 1 if the config leaves them open.
    """
    precision = precision_on(config, placement.device)
    if rows is None:
        rows = config.rows if config.passages else 1
    return ProfileRequest(
        model_sizes(config),
        config.data.seq_len,
        rows,
        placement.device,
        autocast=precision if precision != "float32" else None,
        threads=placement.threads,
        rounds=measuring_rounds(quick),
        separate=config.data.apart,
        graphs=is_recording(config, placement.device == "cuda"),
        compiled=is_compiling(config, _parse_device(placement.device)),
        loss_chunk=chunk_of(config),
        quick=quick,
        optimizer=config.optimizer,
        lora=config.lora,
        inside=config.run.recomputed_inside,
    )


def affordable(
    request: ProfileRequest,
    rows: Sequence[int],
    most: Mapping[str, float] = MAX_QUICK_OPERATIONS,
) -> tuple[ProfileRequest, list[int]]:
    """Leave out larger micro-batches, then a layer, then tokens, until a pass has at most so many operations.

    Slices become shorter with their sequence, so all their cuts must stay between two tokens.
    """
    sizes = request.model
    limit = most[_parse_device(request.device).type]

    def is_quick(request: ProfileRequest, count: int) -> bool:
        depth = min(request.depth, sizes.layers)
        flops = flops_per_token(sizes, request.tokens) / sizes.layers * depth
        return flops * count * request.tokens <= limit

    fewest = min(rows)
    if not is_quick(request, fewest):
        request = replace(request, depth=1)
    while (
        not is_quick(request, fewest)
        and all(number % 2 == 0 for number in chain((request.tokens,), *request.where))
        and request.tokens // 2 >= MIN_QUICK_TOKENS
    ):
        where = tuple((length // 2, prefix // 2) for length, prefix in request.where)
        request = replace(request, tokens=request.tokens // 2, where=where)
    counts = [count for count in rows if is_quick(request, count)]
    return request, counts or [fewest]


def profile_rows(
    request: ProfileRequest,
    rows: Sequence[int],
    ranks: int = 1,
    watch: ProgressText = lambda text: None,
) -> RowProfiles | None:
    """Measure the profiles of a model with these numbers of rows, instead of the request's.

    Under torchrun all of its ranks measure, and all but the first return None. Otherwise
    `ranks` new processes measure at the same time, or this process if `ranks` is 1.
    """
    counts = tuple(sorted(set(rows)))
    if not counts or counts[0] < 1:
        raise ShapeError(
            f"micro-batches must have at least 1 row to be measured, not {list(rows)}"
        )
    on_cpu = _parse_device(request.device).type == "cpu"
    if on_cpu and "bfloat16" in (request.dtype, request.autocast):
        avoid_broken_amx()
    if under_launcher():
        return run_on_ranks(
            measure_rows_of, request, counts, watch, patience=PROFILE_PATIENCE
        )
    if ranks == 1:
        return measure_rows_of(None, request, counts, watch)
    watch(f"{ranks} ranks measure at the same time")
    profiles = spawn(
        ranks,
        measure_rows_of,
        request,
        counts,
        _silent,
        patience=PROFILE_PATIENCE,
        backend="gloo" if on_cpu else None,
    )
    return profiles[0]


def _silent(text: str) -> None:
    """Show nothing, on all ranks but the first."""


def measure_request(
    comm: Comm | None, request: ProfileRequest, watch: ProgressText = _silent
) -> Profile:
    """Measure in this process, at the same time as all other ranks of `comm`."""
    return measure_rows_of(comm, request, (request.rows,), watch).measured[0]


def measure_rows_of(
    comm: Comm | None,
    request: ProfileRequest,
    rows: Sequence[int],
    watch: ProgressText = _silent,
) -> RowProfiles:
    """Measure several numbers of rows, in ascending order, as `measure_request` does."""
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    if comm is not None and comm.rank > 0:
        watch = _silent
    ranks = 1 if comm is None else comm.ranks
    subjects = subjects_by_rows(request, rows, comm)
    if request.graphs and subjects[0].layer.inputs.device.type != "cuda":
        raise RunError(
            "graphs record the launches of a GPU, but this profile is of a CPU; "
            "leave them out"
        )
    device = subjects[0].layer.inputs.device
    setup = Setup(
        comm,
        request.links,
        request.rounds,
        watch,
        request.where,
        statistics.fmean if request.mean else statistics.median,
        CudaTape() if request.graphs else None,
        request.quick,
        # Each GPU has a process of its own, or gives several a share.
        crowd=count_neighbours(ranks) / processors_at_once(device, ranks),
    )
    return measure_rows(subjects, setup)


def processors_at_once(device: torch.device, ranks: int) -> int:
    """Return how many of the processes that measure on this machine can compute at the same time."""
    neighbours = count_neighbours(ranks)
    if device.type != "cpu":
        return neighbours
    return min(neighbours, processes_at_once(torch.get_num_threads()))


# ---------------------------------------------------------------- the pieces of a model
def subjects_of(request: ProfileRequest, comm: Comm | None = None) -> Subjects:
    """Build the pieces of a model on their device, with random tokens and hidden states."""
    return subjects_by_rows(request, (request.rows,), comm)[0]


def subjects_by_rows(
    request: ProfileRequest, rows: Sequence[int], comm: Comm | None = None
) -> list[Subjects]:
    """Build the pieces of a model once, with inputs for each number of rows."""
    device = _device(request.device, comm)
    dtype = _dtype(request.dtype)
    torch.manual_seed(0)
    model, layers, vocab, facts = _shallow_model(request)
    model = model.to(device=device, dtype=dtype)
    depth = min(request.depth, layers)
    recompute_inside(model, request.inside)
    if request.lora.rank:
        _adapt(model, request)
    embed, middle, head = split(model, (0, depth, 0))
    if request.compiled:
        for part in (embed, middle, head):
            compile_stage(part, COMPILER)
    loss = loss_of(COMPILER if request.compiled else "", request.loss_chunk)
    autocast = None if request.autocast is None else _dtype(request.autocast)
    device_facts = _device_facts(device, request, 1 if comm is None else comm.ranks)
    optimizers = partial(optimizers_of, request=request)
    # Keys and values of earlier slices are only for slices, which must be compiled.
    is_whole = request.where == ((request.tokens, 0),)
    prefixes = not middle.unsliceable and not is_whole
    subjects = []
    for count in rows:
        shape = (count, request.tokens)
        words = torch.randint(0, vocab, shape, device=device)
        labels = torch.randint(0, vocab, shape, device=device)
        hidden = torch.randn(*shape, model_width(model), device=device, dtype=dtype)
        starts = None
        if request.separate:
            half = request.tokens // 2
            lengths = torch.tensor([half, request.tokens - half], device=device)
            starts = document_starts(lengths).expand(shape)
        subject = partial(Subject, autocast=autocast, optimizers=optimizers)
        chunk = chunk_in_use(request.loss_chunk, count * request.tokens, vocab)
        each = Subjects(
            subject(embed, words, starts=starts),
            subject(middle, hidden, depth, prefixes=prefixes, starts=starts),
            subject(head, hidden, loss=loss, labels=labels),
            layers,
            facts,
            (*device_facts, ("loss_chunk", chunk)),
        )
        subjects.append(each)
    return subjects


def _adapt(model: nn.Module, request: ProfileRequest) -> None:
    """Put adapters into the layers of a model.

    Embedding and head are timed as if they trained, because nothing could be timed of an
    embedding without gradients.
    """
    sizes = request.model
    adapt(model, sizes, request.lora, empty=False)
    layers = tuple(f"{path}." for path in find_layout(model).layers)
    for name, parameter in model.named_parameters():
        if not name.startswith(layers):
            parameter.requires_grad_()


def optimizers_of(
    module: nn.Module, request: ProfileRequest
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that train a piece of a model, with a rate that changes nothing."""
    assert isinstance(module, Part)
    parameters = part_parameters(module)
    trained = parameters.keys() - frozen_names(parameters, request.optimizer)
    if request.lora.rank:
        trained = set(filter(is_adapter, trained))
    matrices = layer_parameters([module])
    kinds = Optimizer(parameters, request.optimizer, trained, matrices).kinds
    for kind in kinds:
        for group in kind.param_groups:
            group["lr"] = MEASURED_RATE
    return kinds


def _shallow_model(request: ProfileRequest) -> tuple[nn.Module, int, int, Facts]:
    """The model with fewer layers, its real number of layers, its vocabulary, its facts."""
    sizes = request.model
    depth = min(request.depth, sizes.layers)
    facts: Facts
    if isinstance(sizes, DecoderConfig):
        check_positions(sizes, request.tokens)
        facts = (
            ("family", sizes.architecture),
            ("layers", sizes.layers),
            ("width", sizes.width),
            ("config", sizes.digest),
        )
        return build_decoder(sizes, depth), sizes.layers, sizes.vocab, facts
    if isinstance(sizes, GPTConfig | BertConfig) and request.tokens > sizes.positions:
        raise ShapeError(
            f"{request.tokens} tokens, but only {sizes.positions} positions\n"
            f"  measure sequences of at most {sizes.positions} tokens"
        )
    family = family_of(sizes)
    facts = (("family", family.name), *asdict(sizes).items())
    model = family.build(replace(sizes, layers=depth))
    return model, sizes.layers, sizes.vocab, facts


# ---------------------------------------------------------------- the device
def _parse_device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise ShapeError(
            f"there is no device {name!r}; use cpu, cuda or cuda:1, for example"
        ) from None


def _device(name: str, comm: Comm | None) -> torch.device:
    """The device of this process; processes of one machine take different GPUs."""
    device = _parse_device(name)
    if device.type != "cuda":
        return device
    gpus = look_at_machine().gpus
    if not gpus:
        raise RunError(
            "this machine has no GPU that torch can see\n"
            "  use --device cpu; `penstock doctor` says what is missing"
        )
    processes = count_neighbours(1 if comm is None else comm.ranks)
    if processes > gpus and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        raise RunError(
            f"{processes} ranks on {gpus} GPUs would slow each other while they measure; "
            f"--ranks {gpus}, or give each a share: "
            f"penstock lab testbed --workers {processes} -- ..."
        )
    if device.index is None:
        device = torch.device("cuda", own_gpu(0 if comm is None else comm.rank))
    torch.cuda.set_device(device)
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ShapeError(f"there is no type {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _device_facts(device: torch.device, request: ProfileRequest, ranks: int) -> Facts:
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return (
        ("device", device.type),
        ("name", name),
        ("torch", str(torch.__version__)),
        ("dtype", request.dtype),
        ("autocast", request.autocast),
        ("threads", torch.get_num_threads()),
        ("ranks", ranks),
        (PROCESSORS, processors_at_once(device, ranks)),
        ("compiled", request.compiled),
    )
