"""Turns the cost options of a command line into a `Price`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ShapeError

if TYPE_CHECKING:
    from penstock.plan.price import Price

MAX_ACTION_TIME = 1e12  # sums of longer times would overflow


def price_of(
    forward: float | None,
    backward: float | None,
    comm: float | None,
    profile: Path | None = None,
    tokens: int | None = None,
    accept_error: bool = False,
    sum_: float | None = None,
) -> Price:
    """Return the price that the options ask for.

    Refuses a profile whose error is too large, unless `accept_error` is set.
    """
    if profile is None:
        _refuse_profile_options(tokens, accept_error)
        return _unit_price(forward, backward, comm, sum_)
    _refuse_unit_options(forward=forward, backward=backward, comm=comm, sum=sum_)
    return _profile_price(profile, tokens, accept_error)


def _unit_price(
    forward: float | None,
    backward: float | None,
    comm: float | None,
    sum_: float | None,
) -> Price:
    from penstock.cost.unit import UnitCost
    from penstock.plan.price import Price

    F = _time("--forward", 1.0 if forward is None else forward)  # noqa: N806
    B = _time("--backward", 2.0 if backward is None else backward)  # noqa: N806
    latency = _time("--comm", 0.0 if comm is None else comm)
    gradients = _time("--sum", 0.0 if sum_ is None else sum_)
    return Price(UnitCost(F=F, B=B, comm=latency, sum=gradients))


def _profile_price(file: Path, tokens: int | None, accept_error: bool) -> Price:
    from penstock.cost import ProfileCost
    from penstock.cost.profile import refuse_error
    from penstock.formats import read_row_profiles
    from penstock.plan.price import Price

    if tokens is not None and tokens < 1:
        raise ShapeError(f"--tokens must be at least 1, not {tokens}")
    profiles = read_row_profiles(file)
    profile = profiles.measured[0]
    if not accept_error:
        refuse_error(profile, str(file))
    length = profile.tokens if tokens is None else tokens
    return Price(ProfileCost(profile, tokens), profile, length, profiles)


def _refuse_profile_options(tokens: int | None, accept_error: bool) -> None:
    """Refuse the options that only make sense with a profile."""
    for option, given in (
        ("--tokens", tokens is not None),
        ("--accept-error", accept_error),
    ):
        if given:
            raise ShapeError(
                f"{option} needs a profile; add --profile, or leave {option} out"
            )


def _refuse_unit_options(**times: float | None) -> None:
    """Refuse the times that a profile already contains."""
    given = [f"--{name}" for name, value in times.items() if value is not None]
    if given:
        raise ShapeError(
            "--profile already contains the times; it cannot be combined with "
            + " and ".join(given)
        )


def _time(option: str, value: float) -> float:
    """Refuse a value that is not a time; only messages and sums may take no time at all."""
    may_be_zero = option in ("--comm", "--sum")
    if not 0 <= value <= MAX_ACTION_TIME or (value == 0 and not may_be_zero):
        least = "at least 0" if may_be_zero else "above 0"
        raise ShapeError(
            f"{option} must be {least} and at most {MAX_ACTION_TIME:g}, not {value:g}"
        )
    return value
