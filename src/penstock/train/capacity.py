"""Does a run fit into the memory of this machine? Answered from its sizes alone, before anything starts.

    sizes, schedule ──► bytes of each rank: weights, gradients, optimizer state; activations at the fullest moment
                                  │
    this machine ──► bytes of its RAM, or of each GPU ──► fits, or an error with both figures and what would fit

Nothing is timed or built, so the answer takes no longer for a million layers than for one. Left out is what a step
needs for a moment only, and what Python and torch themselves take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config import Config, MeshConfig
from penstock.cost import ModelCost, PartCost, Seconds
from penstock.cost.columns import columns, levels
from penstock.errors import ConfigError, ShapeError
from penstock.ir import Plan, Schedule
from penstock.models import even_partition
from penstock.models.count import parameters_of
from penstock.train.forecast import machine_of
from penstock.train.mesh import held_in_layer
from penstock.train.weights import Sizes
from penstock.view.numbers import write_size

FLOAT = 4  # bytes
COPIES = 4  # of each parameter: itself, its gradient, and two means of AdamW
RANKS_SHOWN = 4
SPARE = 0.95  # share of a memory that suggested sizes may fill: what is available changes all the time
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Load:
    """All that the memory of a run depends on."""

    sizes: Sizes
    schedule: Schedule
    partition: tuple[int, ...]
    rows: int  # sequences of a micro-batch
    tokens: int
    mesh: MeshConfig
    recompute: bool
    half: bool  # most activations have two bytes instead of four


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one process of a rank holds."""

    rank: int
    weights: float  # with gradients and optimizer state
    activations: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.activations


@dataclass(frozen=True, slots=True)
class Place:
    """A memory, and the ranks of the processes that share it."""

    name: str
    bytes: float
    ranks: tuple[int, ...]


def load_of(config: Config, plan: Plan, sizes: Sizes) -> Load:
    """What a config and its plan ask for."""
    run = config.run
    return Load(
        sizes,
        plan.schedule,
        plan.partition,
        config.rows,
        config.data.tokens,
        config.mesh,
        run.recompute,
        run.precision == "bfloat16",
    )


def check_memory(config: Config, plan: Plan, sizes: Sizes) -> None:
    """Raises if the processes of this machine need more memory than it has, unless run.check_memory is false."""
    refusal = why_too_large(config, plan, sizes) if config.run.check_memory else ""
    if refusal:
        raise ConfigError(
            f"{refusal}\n  --set run.check_memory=false starts the run all the same"
        )


def why_too_large(config: Config, plan: Plan, sizes: Sizes) -> str:
    """Why a run does not fit into this machine, and what would; empty if it fits."""
    return too_large(
        load_of(config, plan, sizes), places_of(config, plan.schedule.ranks), config
    )


def check_timing(config: Config, plan: Plan, sizes: Sizes) -> None:
    """Raises if not even the processes that time one layer, the embedding and the head fit into this machine."""
    if config.run.check_memory:
        counts, machine = parameters_of(sizes), machine_of(config, plan.schedule.ranks)
        need = (
            COPIES
            * FLOAT
            * (counts.embed + counts.layer + counts.head)
            * machine.processors
        )
        room = sum(place.bytes for place in places_of(config, plan.schedule.ranks))
        if need > room:
            raise ConfigError(
                f"to time one layer, the embedding and the head takes {write_size(need)} of memory, and "
                f"this machine has {write_size(room)}\n  take a smaller model.width, model.inner or "
                "model.vocab; --set run.check_memory=false tries it all the same"
            )


# ---------------------------------------------------------------- what a run needs
def needs_of(load: Load) -> list[Need]:
    """The need of one process of each rank."""
    cost = ModelCost(
        tuple(_part(load, number) for number in range(len(load.partition))),
        tokens=load.tokens,
    )
    schedule, first = load.schedule, load.schedule.table.first
    held = levels(schedule, columns(schedule, cost))
    weights = [0.0] * schedule.ranks
    for number, stage in enumerate(schedule.stages):
        weights[stage.rank] += cost.weights(schedule, number)
    return [
        Need(
            rank,
            weights[rank],
            float(max(held[first[rank] : first[rank + 1]], default=0.0)),
        )
        for rank in range(schedule.ranks)
    ]


def _part(load: Load, number: int) -> PartCost:
    """The bytes of one part; it takes no time here."""
    counts, layers, last = (
        parameters_of(load.sizes),
        load.partition[number],
        len(load.partition) - 1,
    )
    ends = (counts.embed if number == 0 else 0) + (counts.head if number == last else 0)
    held, message = layers * _held_by_layer(load), load.rows * load.sizes.width * FLOAT
    if number == last:
        held += (
            load.rows * FLOAT * (load.sizes.vocab + 2 * load.sizes.width)
        )  # logits, and what the norm keeps
    else:
        held += message
    nothing = Seconds()
    weights = FLOAT * (
        layers * counts.layer * _copies(load.mesh, 2) + ends * _copies(load.mesh, 3)
    )
    return PartCost(
        nothing,
        nothing,
        nothing,
        held=held,
        message=message,
        weights=weights,
        recompute=load.recompute,
    )


def _held_by_layer(load: Load) -> float:
    """Bytes that a layer keeps of each token of a micro-batch."""
    whole, cut = held_in_layer(load.sizes)
    return load.rows * (
        whole * FLOAT + cut * (FLOAT / 2 if load.half else FLOAT) / load.mesh.tensor
    )


def _copies(mesh: MeshConfig, gathered: int) -> float:
    """How many numbers a process holds for each parameter of its rank: see `penstock.train.mesh.shares_of`."""
    whole = gathered if mesh.shard > 1 else 0
    return (COPIES / mesh.shard + whole) / mesh.tensor


# ---------------------------------------------------------------- what this machine has
def places_of(config: Config, ranks: int) -> list[Place]:
    """The memories of this machine, with the ranks of the processes in each. Other machines look after their own."""
    import torch  # noqa: PLC0415

    local = [
        process // config.mesh.size
        for process in _local_processes(ranks * config.mesh.size)
    ]
    if machine_of(config, ranks).device == "cpu":
        return [Place("this machine", available_memory(), tuple(local))]
    gpus = torch.cuda.device_count()
    sizes = [
        float(torch.cuda.get_device_properties(gpu).total_memory) for gpu in range(gpus)
    ]
    return [
        Place(f"GPU {gpu}", sizes[gpu], tuple(local[gpu::gpus]))
        for gpu in range(min(gpus, len(local)))
    ]


def _local_processes(all_: int) -> range:
    """Those of this machine: all of them, or under a launcher those that it says; if it does not, only this one."""
    if "RANK" not in os.environ:
        return range(all_)
    rank, beside = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return range(min(rank, all_), min(rank + 1, all_))
    return range(
        min(rank - beside, all_),
        min(rank - beside + int(os.environ["LOCAL_WORLD_SIZE"]), all_),
    )


def available_memory() -> float:
    """Bytes of RAM that new processes can have; limits of a container count."""
    found = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [
            1024.0 * int(line.split()[1])
            for line in lines
            if line.startswith("MemAvailable:")
        ]
    except (OSError, ValueError):
        pass  # not on Linux
    try:
        limit, used = (
            (CGROUP / name).read_text(encoding="ascii")
            for name in ("memory.max", "memory.current")
        )
        found += (
            [max(0.0, float(limit) - float(used))] if limit.strip() != "max" else []
        )
    except (OSError, ValueError):
        pass  # no container, or one of the older kind
    return min(found)


# ---------------------------------------------------------------- the two together
def too_large(load: Load, places: list[Place], config: Config) -> str:
    """Why a load does not fit into these places, and what would; empty if it does."""
    needs = needs_of(load)
    full = [place for place in places if _taken(needs, place) > place.bytes]
    if not full:
        return ""
    worst = max(full, key=lambda place: _taken(needs, place) / max(place.bytes, 1.0))
    lines = [
        f"this run needs about {write_size(_taken(needs, worst))} of memory, but {worst.name} has "
        f"{write_size(worst.bytes)} available"
    ]
    shown = sorted(set(worst.ranks), key=lambda rank: -needs[rank].total)[:RANKS_SHOWN]
    each = " each" if load.mesh.size > 1 else ""
    lines += [
        f"  rank {rank}: {write_size(needs[rank].weights)} of weights, gradients and optimizer state, "
        f"{write_size(needs[rank].activations)} of activations{each}"
        for rank in sorted(shown)
    ]
    if len(set(worst.ranks)) > len(shown):
        lines.append(
            f"  and {len(set(worst.ranks)) - len(shown)} more ranks, which need less"
        )
    found = list(_smaller(load, lambda other: _fits(other, places), config))
    lines.append(
        f"  any one of these would fit: {', '.join(found)}"
        if found
        else "  no single size can be made small enough; `penstock init --preset tiny` writes a config that "
        "fits most machines"
    )
    return "\n".join(lines)


def _taken(needs: list[Need], place: Place) -> float:
    return sum(needs[rank].total for rank in place.ranks)


def _fits(load: Load, places: list[Place]) -> bool:
    needs = needs_of(load)
    return all(_taken(needs, place) <= SPARE * place.bytes for place in places)


def _smaller(load: Load, fits: Callable[[Load], bool], config: Config) -> Iterator[str]:
    """Settings that would make a run fit, each by itself."""
    sizes, parts = load.sizes, load.schedule.parts

    def resized(**change: int) -> Load:
        return replace(load, sizes=replace(sizes, **change))  # type: ignore[arg-type]

    def deep(layers: int) -> Load:
        return replace(resized(layers=layers), partition=even_partition(layers, parts))

    knobs: list[
        tuple[str, int, int, Callable[[int], Load]]
    ] = [  # the largest value, what it must be a multiple of
        (
            "data.tokens",
            load.tokens,
            max(m.slices for m in load.schedule.microbatches),
            lambda n: replace(load, tokens=n),
        ),
        (
            "data.batch",
            config.data.batch,
            config.passages,
            lambda n: replace(load, rows=n // config.passages),
        ),
    ]
    if not config.model.weights:
        knobs = [
            ("model.layers", sizes.layers, parts, deep),
            ("model.width", sizes.width, 2 * sizes.heads, lambda n: resized(width=n)),
            ("model.inner", sizes.inner, load.mesh.tensor, lambda n: resized(inner=n)),
            *(
                [("model.vocab", sizes.vocab, 1, lambda n: resized(vocab=n))]
                if config.model.vocab
                else []
            ),
            *knobs,
        ]
    if not load.recompute and fits(replace(load, recompute=True)):
        yield "run.recompute=true"
    for name, most, step, make in knobs:
        count = _rounded(_largest(most // step - 1, _fitting(fits, make, step)))
        if count and (name, count) != ("data.tokens", 1):
            yield f"{name}={count * step}"


def _fitting(
    fits: Callable[[Load], bool], make: Callable[[int], Load], step: int
) -> Callable[[int], bool]:
    return lambda count: fits(make(count * step))


def _rounded(count: int) -> int:
    """Two digits, rounded down.

    >>> _rounded(15820646), _rounded(99)
    (15000000, 99)
    """
    unit: int = 10 ** max(0, len(str(count)) - 2)
    return count // unit * unit


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits; 0 if none does. What fits, fits with less too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        try:
            good = fits(middle)
        except ShapeError:
            good = False
        low, high = (middle, high) if good else (low, middle - 1)
    return low
