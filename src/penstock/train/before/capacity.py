"""Checks from its sizes alone whether a run fits into the memory of this machine.

    sizes, schedule ──► bytes of each rank: weights, gradients, optimizer state; activations at the fullest moment
                                  │
    this machine ──► bytes of its RAM, or of each GPU ──► fits, or an error with both figures and what would fit

Nothing is timed or built, so the answer takes no longer for a million layers than for one.
`penstock.cost.memory` counts the bytes. The estimate leaves out what Python and torch need
themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from penstock.config import Config, ParallelConfig, is_recording
from penstock.cost import ModelCost, PartCost, Seconds
from penstock.cost.memory import device_memory
from penstock.cost.profile import sent_bytes
from penstock.cost.sizes import (
    FLOAT32_BYTES,
    chunk_in_use,
    inner_numbers,
    key_width,
    part_moments,
)
from penstock.errors import ConfigError, ShapeError
from penstock.ir import Plan
from penstock.ir.action import BACKWARD
from penstock.ir.table import Floats
from penstock.models import even_partition
from penstock.models.family import count_parameters
from penstock.runtime.process.machine import available_memory
from penstock.schedules.coverage import hold_every_part
from penstock.train.compiling import chunk_of
from penstock.train.elastic import choose_mirrors, first_plan, is_elastic
from penstock.train.optimizer import (
    ParameterNumbers,
    parameter_numbers,
)
from penstock.train.own_models import config_of
from penstock.train.placement import Placement, precision_on, uses_gpus
from penstock.train.step_paths import step_paths
from penstock.train.weights import NUMBERS_PER_PARAMETER, Sizes, held_in_layer
from penstock.view.numbers import write_size

RANKS_SHOWN = 4
# What a model calls sizes that a config calls by the words of transformers.
SIZES = {"hidden_size": "width", "intermediate_size": "inner", "vocab_size": "vocab"}
# The share of a memory that suggested sizes may fill. Some stays free, because the
# available memory changes all the time.
SUGGESTED_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class MemoryLoad:
    """Everything that the memory of a run depends on."""

    config: Config
    plan: Plan
    sizes: Sizes
    half: bool  # most activations have two bytes instead of four
    recorded: bool  # actions are recorded (run.cuda_graphs)
    numbers: ParameterNumbers
    # Parts of which a rank has a mirror (in-memory replicas), and that rank.
    mirrors: tuple[tuple[int, int], ...] = ()

    @property
    def item(self) -> float:
        """The bytes of a number of most activations."""
        return FLOAT32_BYTES / 2 if self.half else FLOAT32_BYTES

    @property
    def slice_tokens(self) -> int:
        """The tokens of a slice of a micro-batch, in all of its rows."""
        config = self.config
        return config.rows * -(-config.data.seq_len // self.plan.schedule.slices)

    @property
    def chunk(self) -> int:
        """The tokens of a chunk of the loss; 0 if all logits exist at a time."""
        return chunk_in_use(chunk_of(self.config), self.slice_tokens, self.sizes.vocab)


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that one process of a rank holds."""

    rank: int
    weights: float  # with gradients and optimizer state
    activations: float
    # Messages, recordings, and what exists only while an action runs.
    moments: float = 0.0

    @property
    def total(self) -> float:
        """All bytes of the process."""
        return self.weights + self.activations + self.moments


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """A memory, and the ranks of the processes that share it."""

    name: str
    bytes: float
    ranks: tuple[int, ...]


def load_of(config: Config, plan: Plan, sizes: Sizes) -> MemoryLoad:
    """Return what a config and its plan ask for."""
    on_gpu = uses_gpus(config)
    return MemoryLoad(
        config,
        plan,
        sizes,
        precision_on(config, "cuda" if on_gpu else "cpu") == "bfloat16",
        is_recording(config, on_gpu),
        parameter_numbers(config.optimizer, sizes, config.lora),
    )


def check_memory(
    config: Config, plan: Plan, sizes: Sizes, placement: Placement
) -> None:
    """Raise ConfigError if a run needs more memory than this machine has.

    run.checks = forecast,gradients switches this off.
    """
    if not config.run.asks("memory"):
        return
    refusal = why_too_large(config, plan, sizes, placement)
    if refusal:
        raise ConfigError(
            f"{refusal}\n  --set run.checks=forecast,gradients starts the run anyway"
        )


def why_too_large(
    config: Config, plan: Plan, sizes: Sizes, placement: Placement
) -> str:
    """Say why a run does not fit into this machine, and what would; empty if it fits.

    If steps take different schedules, the run must fit with each of them. If others are to
    join from other machines, the workers of this one must be able to begin alone.
    """
    pools = memory_pools(placement, config.parallel.size)
    mirrored = is_elastic(config, plan, placement)
    plan = first_plan(plan, config.elastic.workers)
    for schedule in step_paths(plan, config.paths).schedules:
        alone = replace(plan, schedule=schedule, rotation=(), full=None)
        load = load_of(config, alone, sizes)
        if mirrored:
            nothing: tuple[tuple[int, ...], ...] = ((),) * schedule.ranks
            mirrors = choose_mirrors(hold_every_part(schedule), nothing)
            pairs = [(part, target) for part, _, target in mirrors]
            load = replace(load, mirrors=tuple(pairs))
        refusal = too_large(load, pools)
        if refusal:
            return refusal
    return ""


def check_timing(config: Config, sizes: Sizes, placement: Placement) -> None:
    """Raise ConfigError if this machine cannot even time one layer, embedding and head."""
    if not config.run.asks("memory"):
        return
    counts = count_parameters(sizes)
    parameters = counts.embed + counts.layer + counts.head
    each = NUMBERS_PER_PARAMETER * FLOAT32_BYTES * parameters
    need = each * placement.measurers
    room = sum(pool.bytes for pool in memory_pools(placement, config.parallel.size))
    if need > room:
        raise ConfigError(
            "timing one layer, the embedding and the head takes "
            f"{write_size(need)} of memory, and this machine has {write_size(room)}\n"
            "  take a smaller model.hidden_size, model.intermediate_size or model.vocab_size; "
            "--set run.checks=forecast,gradients tries it anyway"
        )


# ---------------------------------------------------------------- what a run needs
def needs_of(load: MemoryLoad) -> list[Need]:
    """Return the need of one process of each rank."""
    schedule = load.plan.schedule
    partition = load.plan.partition
    parts = [_cost_of_part(load, number) for number in range(len(partition))]
    cost = ModelCost(tuple(parts), tokens=load.config.data.seq_len)
    use = device_memory(schedule, cost, load.recorded)
    weights = use.weights.copy()
    for part, rank in load.mirrors:
        weights[rank] += parts[part].weights
    moments = use.total - use.weights - use.activations
    if load.config.run.comm_dtype == "int8":
        moments += _feedback_bytes(load, cost)
    columns = (weights.tolist(), use.activations.tolist(), moments.tolist())
    rows = zip(*columns, strict=True)
    return [Need(rank, *row) for rank, row in enumerate(rows)]


def _feedback_bytes(load: MemoryLoad, cost: ModelCost) -> Floats:
    """The bytes of each rank for what rounding takes from the gradients that it sends as int8."""
    schedule = load.plan.schedule
    table = schedule.table
    actions = itertools.chain.from_iterable(schedule.lanes)
    tokens = np.array([cost.length(schedule, action) for action in actions])
    tokens[(table.kind != BACKWARD) | (table.target() < 0)] = 0
    sizes = np.bincount(table.rank, tokens, schedule.ranks).astype(np.float64)
    return load.config.rows * load.sizes.width * FLOAT32_BYTES * sizes


def _cost_of_part(load: MemoryLoad, number: int) -> PartCost:
    """The bytes of one part; time does not matter here."""
    run, mesh = load.config.run, load.config.parallel
    rows, width = load.config.rows, load.sizes.width
    counts = count_parameters(load.sizes)
    numbers = load.numbers
    layers = load.plan.partition[number]
    first = number == 0
    last = number == len(load.plan.partition) - 1
    ends = counts.embed * first + counts.head * last
    # Parameters, the numbers held for each, the share that trains, and full copies of sharded ones during a pass.
    pieces = (
        (layers * counts.layer, numbers.layers, numbers.layers_trained, 2),
        (ends, numbers.ends, numbers.ends_trained, 3),
    )
    message = rows * width * FLOAT32_BYTES
    held = layers * _bytes_held_by_layer(load)
    if last:
        # The logits, and what the final norm keeps.
        held += rows * FLOAT32_BYTES * 2 * width
        held += rows * _bytes_of_logits(load)
    else:
        held += message
    weights = gradients = 0.0
    for parameters, own, trained, gathered in pieces:
        weights += FLOAT32_BYTES * parameters * _numbers_held(mesh, own, gathered)
        gradients += FLOAT32_BYTES * parameters * trained / mesh.size
    if load.half and mesh.size == 1:
        # Copies of all matrices in half precision (`penstock.runtime.backward`).
        weights += FLOAT32_BYTES / 2 * (layers * counts.layer + counts.head * last)
    tied = 0.0
    if load.sizes.tied and mesh.dp_shard == 1:
        # Embedding and head share a matrix on a rank that has both. Sharded parts each keep their own copy.
        shared = load.sizes.vocab * width * _numbers_held(mesh, numbers.ends, 3)
        tied = FLOAT32_BYTES * shared
    if first and last:
        weights -= tied
    tied_gradients = tied / numbers.ends * numbers.ends_trained
    if first or last:
        gradients -= tied_gradients
    moments = part_moments(
        asdict(config_of(load.sizes)),
        layers,
        first,
        last,
        rows,
        load.half,
        mesh.tp,
        load.chunk,
    )
    if run.recomputed_inside and layers:
        # One layer at a time has the inner features of its MLP, or what its attention keeps.
        most = max(_bytes_inside(load, block) for block in run.recomputed_inside)
        moments = moments._replace(working=moments.working + most)
    return PartCost(
        *(Seconds(),) * 3,
        held=held,
        message=message,
        sent=sent_bytes(message, rows, run.comm_dtype),
        weights=weights,
        tied=tied,
        recompute=run.recompute == "full" or number in load.plan.recompute,
        gradients=gradients,
        tied_gradients=tied_gradients,
        **moments._asdict(),
    )


def _bytes_of_logits(load: MemoryLoad) -> float:
    """Bytes that the loss keeps for each token: its logits or, if it has chunks, their gradients.

    A backward that is not split keeps the gradients of the hidden state and of the weight
    instead, if these are smaller.
    """
    sizes = load.sizes
    if not load.chunk:
        return float(FLOAT32_BYTES * sizes.vocab)
    kept = load.item * sizes.vocab
    if load.plan.schedule.is_split:
        return kept
    matrix = FLOAT32_BYTES * sizes.vocab * sizes.width
    return min(kept, 2 * load.item * sizes.width + matrix / load.slice_tokens)


def _bytes_held_by_layer(load: MemoryLoad) -> float:
    """Bytes that a layer keeps for each token position of a micro-batch."""
    config = load.config
    whole, cut = held_in_layer(load.sizes)
    held = whole * FLOAT32_BYTES + cut * load.item / config.parallel.tp
    inside = [_bytes_inside(load, block) for block in config.run.recomputed_inside]
    return config.rows * held - sum(inside)


def _bytes_inside(load: MemoryLoad, block: str) -> float:
    """Bytes that the MLP or the attention of a layer keeps for each token position of a micro-batch."""
    sizes = config_of(load.sizes)
    if block == "mlp":
        numbers = inner_numbers(sizes.family, load.sizes.inner)
    else:
        # Slices carry keys and values on, so these stay.
        keys = 0 if load.plan.schedule.slices > 1 else 2 * key_width(sizes)
        numbers = 2 * sizes.hidden_size + keys
    return load.config.rows * numbers * load.item / load.config.parallel.tp


def _numbers_held(mesh: ParallelConfig, own: float, gathered: int) -> float:
    """Numbers that a process holds for each parameter of its rank, if one process would hold `own`.

    `gathered` counts the full copies during a pass. Of a sharded parameter a process holds one
    of `shard` shares, and during a pass the gathered weight and its gradient. While the
    gradients of an embedding or a head are summed, one more copy of them exists.
    """
    copies = gathered if mesh.dp_shard > 1 else 0
    return (own / mesh.dp_shard + copies) / mesh.tp


# ---------------------------------------------------------------- what this machine has
def memory_pools(placement: Placement, processes_per_rank: int = 1) -> list[MemoryPool]:
    """Return the memories of this machine, with the ranks of the processes in each.

    Other machines check their own.
    """
    import torch  # noqa: PLC0415

    ranks = [process // processes_per_rank for process in placement.local]
    if placement.device == "cpu":
        return [MemoryPool("this machine", available_memory(), tuple(ranks))]
    gpus = placement.machine.gpus
    places = []
    for gpu in range(min(gpus, len(ranks))):
        size = float(torch.cuda.get_device_properties(gpu).total_memory)
        places.append(MemoryPool(f"GPU {gpu}", size, tuple(ranks[gpu::gpus])))
    return places


# ---------------------------------------------------------------- the two together
def too_large(load: MemoryLoad, places: list[MemoryPool]) -> str:
    """Say why a load does not fit into these places, and what would; empty if it fits."""
    needs = needs_of(load)
    full = [place for place in places if _taken(needs, place) > place.bytes]
    if not full:
        return ""
    worst = max(full, key=lambda place: _taken(needs, place) / max(place.bytes, 1.0))
    lines = [
        f"this run needs about {write_size(_taken(needs, worst))} of memory, "
        f"but {worst.name} has {write_size(worst.bytes)} available"
    ]
    ranks = sorted(set(worst.ranks), key=lambda rank: -needs[rank].total)
    shown = ranks[:RANKS_SHOWN]
    each = " each" if load.config.parallel.size > 1 else ""
    for rank in sorted(shown):
        weights = write_size(needs[rank].weights)
        activations = write_size(needs[rank].activations)
        lines.append(
            f"  rank {rank}: {weights} of weights, gradients and optimizer state, "
            f"{activations} of activations, {write_size(needs[rank].moments)} for "
            f"messages and passing results{each}"
        )
    if len(ranks) > len(shown):
        lines.append(f"  and {len(ranks) - len(shown)} more ranks, which need less")
    remedies = list(_smaller_settings(load, places))
    if remedies:
        lines.append(f"  any one of these would fit: {', '.join(remedies)}")
    else:
        lines.append(
            "  no single size can be made small enough; `penstock init --preset tiny` "
            "writes a config that fits most machines"
        )
    return "\n".join(lines)


def _taken(needs: list[Need], place: MemoryPool) -> float:
    return sum(needs[rank].total for rank in place.ranks)


def _fits(load: MemoryLoad, places: list[MemoryPool]) -> bool:
    needs = needs_of(load)
    return all(
        _taken(needs, place) <= SUGGESTED_SHARE * place.bytes for place in places
    )


def _smaller_settings(load: MemoryLoad, places: list[MemoryPool]) -> Iterator[str]:
    """The settings that would make a run fit, each by itself."""
    config, sizes, schedule = load.config, load.sizes, load.plan.schedule
    again = replace(config, run=replace(config.run, recompute="full"))
    if config.run.recompute != "full" and _fits(replace(load, config=again), places):
        yield "run.recompute=full"
    slices = max(microbatch.slices for microbatch in schedule.microbatches)
    settings = [  # with their values, and numbers of which they must stay multiples
        ("model.layers", sizes.layers, schedule.parts),
        ("model.hidden_size", sizes.width, 2 * sizes.heads),
        ("model.intermediate_size", sizes.inner, config.parallel.tp),
        ("model.vocab_size", sizes.vocab if config.model.vocab_size else 0, 1),
        ("data.seq_len", config.data.seq_len, slices),
        ("data.global_batch", config.data.global_batch, config.passages),
    ]
    for name, value, step in settings:
        if name.startswith("model.") and config.model.folder:
            continue
        count = _largest_fitting(load, places, name, value, step)
        if count and (name, count) != ("data.seq_len", 1):
            yield f"{name}={count * step}"


def _resized(load: MemoryLoad, name: str, value: int) -> MemoryLoad:
    """The load of a run with another value of a setting."""
    section, _, key = name.partition(".")
    change: dict[str, Any] = {SIZES.get(key, key): value}
    if section == "data":
        data = replace(load.config.data, **change)
        return replace(load, config=replace(load.config, data=data))
    plan = load.plan
    if key == "layers":
        partition = even_partition(value, plan.schedule.parts)
        plan = replace(plan, partition=partition)
    return replace(load, plan=plan, sizes=replace(load.sizes, **change))


def _largest_fitting(
    load: MemoryLoad, places: list[MemoryPool], name: str, value: int, step: int
) -> int:
    """The largest smaller value of a setting that fits, in steps, rounded down; 0 if none does.

    If a value fits, so does every smaller one, so we search by halves.
    """
    low = 0
    high = value // step - 1
    while low < high:
        middle = (low + high + 1) // 2
        try:
            good = _fits(_resized(load, name, middle * step), places)
        except ShapeError:
            good = False
        if good:
            low = middle
        else:
            high = middle - 1
    return _rounded(low)


def _rounded(count: int) -> int:
    """Round down to two digits.

    >>> _rounded(15820646), _rounded(99)
    (15000000, 99)
    """
    unit: int = 10 ** max(0, len(str(count)) - 2)
    return count // unit * unit
