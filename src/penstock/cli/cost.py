"""Costs on the command line: units of a forward, or a measured profile; and how times and bytes are then shown."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from penstock.cost.unit import UnitCost
from penstock.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.cost import Cost, Profile
    from penstock.ir import Plan, Schedule, Timeline
    from penstock.ir.plan import Facts

ForwardOption = Annotated[
    Optional[float],
    typer.Option(help="Time of a micro-batch's forward on one rank; 1."),
]
BackwardOption = Annotated[
    Optional[float], typer.Option(help="Time of its backward; 2.")
]
CommOption = Annotated[
    Optional[float], typer.Option(help="Latency of a message between two ranks; 0.")
]
ProfileFile = Annotated[
    Optional[Path],
    typer.Option(
        "--profile",
        help="A profile.json (`penstock profile`): times in ms, bytes in MiB.",
    ),
]
TokensOption = Annotated[
    Optional[int],
    typer.Option(
        help="With --profile: tokens of a sequence, of which cuts are shares."
    ),
]
AcceptError = Annotated[
    bool,
    typer.Option(
        "--accept-error",
        help="With --profile: use it even if it is off by more than 50%.",
    ),
]
MIB = 2.0**20
MAX_ACTION_TIME = 1e12  # time of one action: sums of more are no numbers
FINE = 16  # tokens that cuts are multiples of, if kernels do not ask for more


@dataclass(frozen=True, slots=True)
class Price:
    """A cost, and the profile it is from, if it is from one."""

    cost: Cost
    profile: Profile | None = None
    tokens: int = 0  # of a sequence, by the profile

    def time(self, value: float, digits: int = 6) -> str:
        """A time as a number: in forwards of a micro-batch on a rank, or ms."""
        return f"{value if self.profile is None else 1e3 * value:.{digits}g}"

    def size(self, value: float, digits: int = 4) -> str:
        """A size as a number: in micro-batches of a rank's work, or MiB."""
        return f"{value if self.profile is None else value / MIB:.{digits}g}"

    def sizes(self, values: Iterable[float]) -> str:
        """Of all ranks; of many, the first and the last."""
        each = [self.size(value) for value in values]
        return self.mib(
            " ".join(each if len(each) <= 16 else [*each[:6], "...", *each[-6:]])
        )

    def grain(self, wanted: int | None) -> int:
        """Tokens that cuts are multiples of: as wanted, else what sequence and kernels have in common."""
        from penstock.measure.points import tile_of

        device = (
            "" if self.profile is None else str(dict(self.profile.device).get("device"))
        )
        return (
            gcd(max(FINE, tile_of(device)), self.tokens)
            if wanted is None
            else min(wanted, self.tokens)
        )

    def ms(self, number: str) -> str:
        """With its unit, if it has one."""
        return number if self.profile is None else f"{number} ms"

    def mib(self, number: str) -> str:
        """With its unit, if it has one."""
        return number if self.profile is None else f"{number} MiB"

    def memory(self, given: float | None) -> float | None:
        """A memory that was given, as the cost counts it."""
        if given is not None and not given > 0:
            raise ShapeError(
                f"--memory {given:g} is no memory; it must be a number above 0"
            )
        return given if self.profile is None or given is None else given * MIB

    def facts(self, file: Path | None, memory: float | None) -> Facts:
        """What a plan was made with."""
        if isinstance(self.cost, UnitCost):
            cost = self.cost
            return (
                ("memory", memory),
                ("forward", cost.F),
                ("backward", cost.B),
                ("comm", cost.comm),
            )
        return ("memory_mib", memory), ("profile", str(file)), ("tokens", self.tokens)

    def partition(self, schedule: Schedule) -> tuple[int, ...]:
        """Layers of each part, if there is a model."""
        from penstock.partition import even_partition

        return (
            ()
            if self.profile is None
            else even_partition(self.profile.layers, schedule.parts)
        )


def price_of(
    forward: float | None,
    backward: float | None,
    comm: float | None,
    profile: Path | None = None,
    tokens: int | None = None,
    accept_error: bool = False,
) -> Price:
    """The cost that the options ask for. A profile that is too far off is refused unless `accept_error`."""
    from penstock.cost import ProfileCost
    from penstock.cost.profile import refuse_error
    from penstock.formats import read_profile

    units = {"forward": forward, "backward": backward, "comm": comm}
    given = {word: value for word, value in units.items() if value is not None}
    if profile is None:
        if tokens is not None:
            raise ShapeError(
                "--tokens is for costs of a profile; give one with --profile, or leave it out"
            )
        if accept_error:
            raise ShapeError(
                "--accept-error is for costs of a profile; give one with --profile, or leave it out"
            )
        return Price(
            UnitCost(
                **{
                    word: _time(f"--{name}", value)
                    for word, name, value in (
                        ("F", "forward", given.get("forward", 1.0)),
                        ("B", "backward", given.get("backward", 2.0)),
                        ("comm", "comm", given.get("comm", 0.0)),
                    )
                }
            )
        )
    if given:
        words = " and ".join(f"--{word}" for word in given)
        raise ShapeError(
            f"--profile has the times already: it does not go together with {words}"
        )
    if tokens is not None and tokens < 1:
        raise ShapeError(
            f"--tokens {tokens} is no length of a sequence; the least is 1"
        )
    found = read_profile(profile)
    if not accept_error:
        refuse_error(found, str(profile))
    return Price(
        ProfileCost(found, tokens), found, found.tokens if tokens is None else tokens
    )


def _time(option: str, value: float) -> float:
    if not 0 <= value <= MAX_ACTION_TIME or (value == 0 and option != "--comm"):
        least = "0 or more" if option == "--comm" else "more than 0"
        raise ShapeError(
            f"{option} {value:g} is no time; it must be {least}, and at most {MAX_ACTION_TIME:g}"
        )
    return value


def own_price(price: Price, plan: Plan) -> Price:
    """For one schedule: its links are there, and if its plan says how many layers each part has, so it is."""
    if price.profile is None:
        return price
    partition = plan.partition or price.partition(plan.schedule)
    return Price(
        price.profile.cost(partition, plan.schedule.ranks, tokens=price.tokens),
        price.profile,
        price.tokens,
    )


def measured_facts(price: Price, plan: Plan, timeline: Timeline) -> dict[str, object]:
    """What only a profile knows of a step: sequence, weights, optimizer, speed. In bytes and seconds."""
    profile = price.profile
    if profile is None:
        return {}
    stages = plan.schedule.stages
    update = profile.update(plan.partition or price.partition(plan.schedule))
    ranks = range(plan.schedule.ranks)
    slowest = max(
        sum(update[stage.part] for stage in stages if stage.rank == rank)
        for rank in ranks
    )
    tokens = price.tokens * profile.rows * len(plan.schedule.microbatches)
    return {
        "tokens": price.tokens,
        "weights": timeline.weights.tolist(),
        "optimizer": slowest,
        "tokens_per_second": tokens / (timeline.makespan + slowest),
    }


def measured_rows(
    price: Price, timeline: Timeline, facts: Mapping[str, Any]
) -> dict[str, str]:
    """The same, as a table shows them."""
    profile = price.profile
    if profile is None:
        return {}
    beyond = (
        f" (measured up to {profile.tokens})" if price.tokens > profile.tokens else ""
    )
    return {
        "tokens": f"{price.tokens}{beyond}",
        "weights": price.sizes(timeline.weights),
        "optimizer": f"{1e3 * facts['optimizer']:.4g} ms",
        "tokens_per_second": f"{facts['tokens_per_second']:.4g}",
    }
