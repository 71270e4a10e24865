"""What a command asks the planner: a workload, its prices, and the limits of the search.

--ranks --microbatches --comm ...     units of the papers
--profile profile.json --ranks ...    a profile, without a config
config.toml                           a config; its model is measured, or its profile is given
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import gcd

from penstock.config import ModelConfig, is_recording, precision_of
from penstock.cost.cluster import Cluster
from penstock.cost.gpus import Gpu, analytic_profile
from penstock.cost.profile import Profile, tile_of
from penstock.cost.row_profiles import RowProfiles
from penstock.cost.unit import UnitCost
from penstock.errors import ShapeError
from penstock.ir.plan import Facts
from penstock.ir.timeline import PAPER_UNITS, REAL_UNITS, Units
from penstock.plan.pricing import ProfilePricing, UnitPricing
from penstock.plan.recipes import Limits
from penstock.plan.search import Pricing
from penstock.plan.topology import Machines, machines_of
from penstock.plan.workload import MIN_GRANULARITY, Fixed, Workload, cells_of

ANY_NUMBER_OF_LAYERS = 1 << 30
UNITS_OF_PAPERS = "units of the papers: a forward of a micro-batch on a rank takes 1"
IGNORED_IN_UNITS = "that micro-batches and messages delay each other"
IGNORED = (
    "that micro-batches and messages delay each other, that some links are slower than "
    "the fastest one, and memory that is needed for a moment only"
)


@dataclass(frozen=True, slots=True)
class Question:
    """A workload, what its plans cost, and what they must keep to."""

    workload: Workload
    pricing: Pricing
    limits: Limits
    units: Units = REAL_UNITS
    facts: Facts = ()  # what a plan.json says about the assumptions
    ignored: str = IGNORED  # what the bound leaves out
    source: str = ""  # where the times come from, for people
    analytic: bool = False  # whether a formula gave the times, and nothing was measured
    basis: str = ""  # the precision, and data sheet or measurement: the first line
    # The shares of a predicted time between which steps may lie (`Profile.spread`); None in units of the papers.
    spread: tuple[float, float] | None = None

    def range_of(self, step: float) -> tuple[float, float] | None:
        """The times between which a step may lie that is predicted to take `step`; None in units of the papers."""
        if self.spread is None:
            return None
        low, high = self.spread
        return low * step, high * step


def basis_of(profile: Profile) -> str:
    """Name the precision of a profile, and say whether its times were measured."""
    device = dict(profile.device)
    origin = "measured times"
    if device.get("analytic"):
        origin = f"times from the data sheet of the {device.get('name')}"
    return f"in {precision_in(profile)}, with {origin}"


def precision_in(profile: Profile) -> str:
    """Return the type in which the model of a profile computes."""
    device = dict(profile.device)
    return str(device.get("autocast") or device.get("dtype") or "an unknown precision")


def unit_question(
    ranks: int, microbatches: int, cost: UnitCost, memory: float | None, limits: Limits
) -> Question:
    """Ask for a pipeline of some ranks in the units of the papers."""
    fixed = Fixed(
        ranks=ranks,
        microbatches=microbatches,
        copies=1,
        tensor=1,
        shard=1,
        recompute=False,
    )
    workload = Workload(
        layers=ANY_NUMBER_OF_LAYERS,
        tokens=1,
        batch=microbatches,
        devices=ranks,
        memory=memory,
        fixed=fixed,
    )
    facts: Facts = (
        ("memory", memory),
        ("forward", cost.F),
        ("backward", cost.B),
        ("comm", cost.comm),
    )
    return Question(
        workload,
        UnitPricing(cost, memory, limits),
        limits,
        PAPER_UNITS,
        facts,
        IGNORED_IN_UNITS,
        UNITS_OF_PAPERS,
        basis=f"in {UNITS_OF_PAPERS}",
    )


def profile_question(
    workload: Workload,
    profile_at: Callable[[int], Profile],
    limits: Limits,
    source: str,
    machines: Machines | None = None,
    cluster: Cluster | None = None,
) -> Question:
    """Ask for the best plan of a workload by profiles of its model.

    `profile_at` returns the profile for a number of rows; `source` says where it comes from.
    """
    first_cell = next(cells_of(workload))
    profile = profile_at(first_cell.rows)
    facts: Facts = (
        ("memory_bytes", workload.memory),
        ("profile", source),
        ("precision", precision_in(profile)),
        ("tokens", workload.tokens),
    )
    pricing = ProfilePricing(workload, profile_at, limits, machines, cluster)
    return Question(
        workload,
        pricing,
        limits,
        facts=facts,
        source=source,
        analytic=bool(dict(profile.device).get("analytic")),
        basis=basis_of(profile),
        spread=profile.spread,
    )


def gpu_question(
    workload: Workload, model: ModelConfig, gpu: Gpu, limits: Limits
) -> Question:
    """Ask for the best plan on known GPUs, whose times come from a formula."""
    config = workload.config
    assert config is not None
    precision = precision_of(config, on_gpu="bfloat16" in gpu.peak)
    recorded = is_recording(config, on_gpu=True)

    @cache
    def profile_at(rows: int) -> Profile:
        return analytic_profile(
            model,
            workload.tokens,
            rows,
            gpu,
            precision,
            recorded=recorded,
            loss_chunk=config.run.loss_chunk,
        )

    launched = "recorded once and replayed" if recorded else "launched one by one"
    source = (
        f"analytic profile of the {gpu.name}, by formula and not measured: "
        f"kernels {launched}, layers and loss not compiled"
    )
    return profile_question(workload, profile_at, limits, source, machines_of(gpu))


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
BARE_UNIT = 2.0**20  # a bare number of bytes means MiB


def parse_bytes(text: str) -> float:
    """Return the bytes of a size such as 80GiB or 80GB; a bare number means MiB.

    >>> parse_bytes("1.5 GiB") == 1.5 * 2**30, parse_bytes("172") == 172 * 2**20
    (True, True)
    >>> parse_bytes("80GB")
    80000000000.0
    """
    cleaned = text.strip().upper()
    factor = BARE_UNIT
    for unit, unit_bytes in SIZE_UNITS.items():
        if cleaned.endswith(unit):
            cleaned = cleaned.removesuffix(unit)
            factor = unit_bytes
            break
    size = _number(cleaned) * factor
    if not 0 < size < float("inf"):
        raise ShapeError(
            f"--memory must be a size above 0, such as 80GiB, not {text.strip() or repr(text)}"
        )
    return size


def microbatches_of(text: str) -> float:
    """Return a memory in micro-batches, such as 1.5, as the units of the papers count it."""
    number = _number(text)
    if not 0 < number < float("inf"):
        raise ShapeError(
            "without a model, --memory is a number of micro-batches above 0, such as 4, "
            f"not {text.strip() or repr(text)}\n"
            "  sizes such as 80GiB need a config.toml or --profile"
        )
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
