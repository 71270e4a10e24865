"""A workload: everything that measuring, planning and training must agree on.

    config.toml ──┐
                  ├─► Workload ──► measure ──► profiles ──► plan ──► Plan ──► train
    options ──────┘

It says how much work a step has, what there is to do it with, and which choices are already made. Everything that is
still open is the planner's choice.

What a command asks the planner: a workload, its prices, and the limits of the search.

--pp --microbatches --cost comm=...    unit costs (F = 1)
--cost profile.json --pp ...           a profile, without a config
MODEL                                  a model, which is measured unless its profile or a GPU is given
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from math import gcd, isqrt, prod

from penstock.config import (
    Config,
    ModelConfig,
    allows_meshes,
    is_recording,
)
from penstock.cost.profile import RowProfiles, tile_of
from penstock.errors import ConfigError, ShapeError

# The most processes of a rank that divide each layer: a machine rarely has more GPUs.
MAX_TENSOR = 8
MAX_DEVICES = 100_000  # more would take too long to divide in every way
# The share of a memory that a plan may fill; activations of a moment need the rest.
USABLE_SHARE = 0.9
MIN_GRANULARITY = 16  # tokens; cuts are multiples of at least this many


@dataclass(frozen=True, slots=True)
class Fixed:
    """The choices that are already made; 0, None or () leaves a choice to the planner."""

    ranks: int = 0
    microbatches: int = 0
    copies: int = 0
    tensor: int = 0
    shard: int = 0
    recompute: bool | None = None
    partition: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """A step of training, the devices for it, and the choices that are already made."""

    layers: int
    tokens: int  # of a sequence
    batch: int  # sequences of a step
    devices: int  # the most processes to use
    heads: int = 1  # tensor parallelism must divide them
    kv_heads: int = 1
    inner: int = 1  # features of an MLP, which it must divide too
    tied: bool | None = None  # whether embedding and head share weights, if it is known
    memory: float | None = None  # bytes of a device
    processors: int | None = None  # that the processes share; None for one each
    passes: int = 1  # through the pipeline in a step
    granularity: int = MIN_GRANULARITY  # tokens that cuts are multiples of
    recorded: bool = False  # whether actions are recorded as CUDA graphs
    exact: bool = False  # all devices must be used, because they already run
    # Some links are faster than others, so it matters who is near whom.
    uneven: bool = False
    fixed: Fixed = field(default_factory=Fixed)
    config: Config | None = None  # of the run; None if it was made from options

    def in_one_pass(self) -> Workload:
        """Return the workload with the micro-batches of all passes in one."""
        microbatches = self.passes * self.fixed.microbatches
        return replace(
            self, passes=1, fixed=replace(self.fixed, microbatches=microbatches)
        )


@dataclass(frozen=True, slots=True)
class Division:
    """How the devices and the batch are divided: the coarse part of a plan.

    copies x ranks x tensor x shard    processes
    copies x shard x passes x microbatches x rows    sequences of a step
    """

    copies: int
    ranks: int
    tensor: int
    shard: int
    microbatches: int
    rows: int  # sequences of a micro-batch
    recomputed: float  # share of the parts that keep only their input
    # Copies of a rank are neighbours, instead of ranks of a copy.
    side_by_side: bool = False

    @property
    def processes(self) -> int:
        """The devices that are used."""
        return self.copies * self.ranks * self.tensor * self.shard

    @property
    def batch_text(self) -> str:
        """How the sequences of a copy are divided: micro-batches x rows."""
        return f"{self.microbatches} x {self.rows}"

    @property
    def name(self) -> str:
        """The layout in words.

        >>> Division(2, 4, 1, 2, 8, 1, 0.5).name
        'dp_replicate=2, pp=4, dp_shard=2, 8 micro-batches of 1, half recomputed'
        """
        words = f"dp_replicate={self.copies}, pp={self.ranks}"
        if self.tensor > 1:
            words += f", tp={self.tensor}"
        if self.shard > 1:
            words += f", dp_shard={self.shard}"
        plural = "" if self.microbatches == 1 else "es"
        words += f", {self.microbatches} micro-batch{plural} of {self.rows}"
        if self.recomputed:
            share = {0.5: "half ", 1.0: ""}.get(self.recomputed)
            amount = f"{self.recomputed:.0%} " if share is None else share
            words += f", {amount}recomputed"
        if self.side_by_side:
            words += ", dp innermost"
        return words


RECOMPUTED_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def divisions_of(workload: Workload) -> Iterator[Division]:
    """Yield every way to divide the devices and the batch. Some devices may stay unused."""
    fixed = workload.fixed
    for tensor, shard in _meshes(workload):
        pipelines = workload.devices // (tensor * shard)
        most_ranks = min(pipelines, workload.layers)
        shares = divisors(workload.batch // (shard * workload.passes))
        for ranks in _choices(fixed.ranks, range(1, most_ranks + 1)):
            if ranks > most_ranks:
                continue
            for copies in _choices(fixed.copies, shares):
                used = copies * ranks * tensor * shard
                if used > workload.devices or (
                    workload.exact and used < workload.devices
                ):
                    continue
                yield from _batch_divisions(workload, copies, ranks, tensor, shard)


def _batch_divisions(
    workload: Workload, copies: int, ranks: int, tensor: int, shard: int
) -> Iterator[Division]:
    share, left = divmod(workload.batch, copies * shard * workload.passes)
    if left or not share:
        return
    for microbatches in _choices(workload.fixed.microbatches, divisors(share)):
        if share % microbatches:
            continue
        rows = share // microbatches
        for recomputed in _recomputed_shares(workload):
            division = Division(
                copies, ranks, tensor, shard, microbatches, rows, recomputed
            )
            yield division
            if workload.uneven and copies > 1 and ranks > 1:
                yield replace(division, side_by_side=True)


def _meshes(workload: Workload) -> Iterator[tuple[int, int]]:
    fixed = workload.fixed
    powers = [1 << power for power in range(workload.devices.bit_length())]
    for tensor in _choices(fixed.tensor, powers):
        counts = (workload.heads, workload.kv_heads, workload.inner)
        divides = gcd(*counts) % tensor == 0
        if not fixed.tensor and (tensor > MAX_TENSOR or not divides):
            continue
        for shard in _choices(fixed.shard, powers):
            if tensor * shard <= workload.devices:
                yield tensor, shard


def _recomputed_shares(workload: Workload) -> tuple[float, ...]:
    fixed = workload.fixed.recompute
    if fixed is not None:
        return (1.0,) if fixed else (0.0,)
    if workload.memory is None:
        return (0.0,)  # Recomputing takes time and saves only memory.
    return RECOMPUTED_SHARES


def _choices(fixed: int, free: range | list[int]) -> range | list[int]:
    return [fixed] if fixed else free


def check_devices(devices: int) -> None:
    """Refuse a number of devices that makes no sense."""
    if not 1 <= devices <= MAX_DEVICES:
        raise ShapeError(
            f"there must be from 1 to {MAX_DEVICES:,} devices, not {devices:,}"
        )


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, the smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


# ---------------------------------------------------------------- from a config
@dataclass(frozen=True, slots=True)
class Hardware:
    """What there is to run a config on, as far as it is known."""

    devices: int = 0  # 0: as many as the config says
    memory: float | None = None  # bytes of a device
    processors: int | None = None  # that the processes share; None for one each
    exact: bool = False  # all devices must be used, because they already run
    uneven: bool = False  # Some links are faster than others.
    on_gpu: bool = False  # Actions are recorded there unless the config says otherwise.


def workload_of(
    config: Config,
    layers: int,
    given: Collection[str] | None = None,
    hardware: Hardware = Hardware(),
    granularity: int = MIN_GRANULARITY,
    open_mesh: bool = False,
    model: ModelConfig | None = None,
) -> Workload:
    """Return the workload of a config for a model with `layers` layers.

    `given` names the values that the user wrote, such as "parallel.pp". Micro-batches
    that nobody wrote are the planner's choice. So are ranks and copies if the number of
    devices is known, from `hardware` or from the config. A value of 0 is always open. Without
    `given`, every value that is not 0 counts as written.

    The mesh is that of the config. With `open_mesh` and a number of devices, the planner
    chooses what nobody wrote of it, unless the run has options that go with no mesh. `model`
    has the sizes of the model, if they are not those of the config.
    """
    schedule = config.schedule
    parallel = config.parallel
    model = model or config.model

    def left_open(key: str, section: str = "parallel") -> bool:
        return given is not None and f"{section}.{key}" not in given

    devices = hardware.devices or parallel.devices
    is_known = devices > 0
    if is_known:
        check_devices(devices)
    else:
        devices = max(1, parallel.pp) * max(1, parallel.dp_replicate) * parallel.size
    open_mesh = open_mesh and is_known and allows_meshes(config)
    fixed = Fixed(
        ranks=0 if is_known and left_open("pp") else parallel.pp,
        microbatches=0
        if left_open("microbatches", "schedule")
        else schedule.microbatches,
        copies=0 if is_known and left_open("dp_replicate") else parallel.dp_replicate,
        tensor=0 if open_mesh and left_open("tp") else parallel.tp,
        shard=0 if open_mesh and left_open("dp_shard") else parallel.dp_shard,
        recompute=True if config.run.recompute == "full" else None,
        partition=schedule.partition,
    )
    workload = Workload(
        layers,
        config.data.seq_len,
        config.data.global_batch,
        devices,
        model.heads,
        model.heads if model.family in ("gpt", "bert") else model.kv_heads,
        model.intermediate_size,
        model.tie_embeddings,
        hardware.memory,
        hardware.processors,
        config.run.accumulate,
        granularity=gcd(granularity, config.data.seq_len),
        recorded=is_recording(config, hardware.on_gpu),
        exact=hardware.exact,
        uneven=hardware.uneven,
        fixed=fixed,
        config=config,
    )
    if next(divisions_of(workload), None) is None:
        raise ConfigError(_no_division(workload))
    return workload


def _no_division(workload: Workload) -> str:
    """Say why no division of the devices and the batch is possible."""
    fixed = workload.fixed
    if fixed.ranks > workload.layers:
        return (
            f"{workload.layers} layers cannot fill {fixed.ranks} ranks: "
            f"set parallel.pp to {workload.layers} or less"
        )
    factors = (fixed.ranks, fixed.copies, fixed.tensor, fixed.shard)
    processes = prod(max(1, factor) for factor in factors)
    if processes > workload.devices:
        return (
            f"dp_replicate x pp x tp x dp_shard = {processes} processes, but there are only "
            f"{workload.devices} devices: set parallel.devices to {processes}, or a smaller "
            "dp_replicate, pp or tp; 0 leaves pp and dp_replicate to the planner"
        )
    passages = max(1, fixed.copies) * max(1, fixed.shard) * workload.passes
    passages *= max(1, fixed.microbatches)
    fitting = -(-workload.batch // passages) * passages
    return (
        f"data.global_batch = {workload.batch} is not divisible by {passages}: schedule.microbatches "
        f"{max(1, fixed.microbatches)} x parallel.dp_replicate {max(1, fixed.copies)} x parallel.dp_shard "
        f"{max(1, fixed.shard)} x run.accumulate {workload.passes}; {fitting} is"
    )


# ---------------------------------------------------------------- questions


def profile_workload(
    profiles: RowProfiles,
    ranks: int,
    microbatches: int,
    tokens: int,
    memory: float | None,
    granularity: int | None,
) -> Workload:
    """Return the workload of a pipeline whose micro-batches have the rows of a profile."""
    if ranks > profiles.layers:
        raise ShapeError(f"{profiles.layers} layers cannot fill {ranks} parts")
    rows = profiles.rows[0]
    fixed = Fixed(ranks=ranks, microbatches=microbatches, copies=1, tensor=1, shard=1)
    return Workload(
        layers=profiles.layers,
        tokens=tokens,
        batch=microbatches * rows,
        devices=ranks,
        memory=memory,
        granularity=granularity_of(profiles, tokens, granularity),
        fixed=fixed,
    )


def granularity_of(profiles: RowProfiles, tokens: int, wanted: int | None) -> int:
    """Return the number of tokens that all cuts are multiples of.

    Without a wish it is the largest number that suits both the kernels of the device and
    the length of the sequence.
    """
    if wanted is not None:
        return min(wanted, tokens)
    device = str(dict(profiles.measured[0].device).get("device"))
    return gcd(max(MIN_GRANULARITY, tile_of(device)), tokens)


# ---------------------------------------------------------------- sizes
SIZE_UNITS = {
    "KIB": 2.0**10,
    "MIB": 2.0**20,
    "GIB": 2.0**30,
    "TIB": 2.0**40,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
}
MICROBATCHES_UNIT = "mb"  # in small letters, unlike MB


def parse_memory(text: str, in_microbatches: bool = False) -> float:
    """Return the bytes of a size such as 80GiB; without a model, the number of micro-batches in 4mb.

    >>> parse_memory("1.5 GiB") == 1.5 * 2**30, parse_memory("4mb", in_microbatches=True)
    (True, 4.0)
    """
    cleaned = text.strip()
    factor = 0.0
    if cleaned.endswith(MICROBATCHES_UNIT):
        cleaned = cleaned.removesuffix(MICROBATCHES_UNIT)
        factor = float(in_microbatches)
    elif not in_microbatches:
        cleaned = cleaned.upper()
        unit = next((unit for unit in SIZE_UNITS if cleaned.endswith(unit)), "")
        cleaned = cleaned.removesuffix(unit)
        factor = SIZE_UNITS.get(unit, 0.0)
    try:
        size = float(cleaned) * factor
    except ValueError:
        size = -1.0
    if 0 < size < float("inf"):
        return size
    given = text.strip() or repr(text)
    if in_microbatches:
        raise ShapeError(
            f"without a model, --memory is a number of micro-batches above 0, such as 4mb, not {given}\n"
            "  sizes such as 80GiB need a model, or --cost profile.json"
        )
    raise ShapeError(
        f"--memory is a size above 0 with its unit, such as 80GiB, not {given}"
    )
