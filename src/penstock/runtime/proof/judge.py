"""Says whether two ways to run a stage compute the same, but for rounding.

How much may differ. Two ways that are equal on paper differ by rounding: sums are made in another order. All limits are
for the norm of a tensor's difference, since single numbers near zero have no precision of their own:

- `HEADROOM` roundings (eps of the data type, or of matrix products, which a GPU may make in TF32) of the tensor's
  norm are always allowed, but never more than `MOST`: half precision would hide faults otherwise.
- Under autocast both ways are compared with the plain one in full precision. The planned way may be off by
  `CAST_FACTOR` times as much as the plain way under autocast is.
- Only if that is not enough, rounding is measured: the plain way runs again with every layer's output changed by one
  rounding, up or down by chance. What that moves, rounding can move; `FACTOR` times as much is allowed as well. So a
  gradient that is zero on paper (of the bias of keys in attention), and noise in fact, is no false alarm.

Faults are far larger: a slice that has wrong positions, or a dropout mask that is drawn anew, changes some
gradients by hundreds of times as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from penstock.runtime.proof.ways import SEED, Bench, Option, Options

HEADROOM = 32  # roundings of a tensor's norm that are always allowed
MOST = 0.01  # of a tensor's norm, whatever the data type
FACTOR = 16  # times what rounding is seen to change
CAST_FACTOR = 4  # times the error of the plain way under autocast
TRIES = 2  # measurements of what rounding does
PRODUCTS = {
    "highest": 0.0,
    "high": 2.0**-10,
    "medium": 2.0**-7,
}  # eps of products of float32 matrices


@dataclass(frozen=True, slots=True)
class Difference:
    """What is not the same: by how much, how much is allowed, and of what norm; or how the planned way failed."""

    name: str
    gap: float = 0.0
    allowed: float = 0.0
    norm: float = 0.0
    raised: str = ""

    @property
    def share(self) -> float:
        """By how much it differs, of its norm if that is not zero."""
        return self.gap / (self.norm or 1.0)

    @property
    def what(self) -> str:
        """In words."""
        return (
            self.name
            if self.name.startswith("the ")
            else f"the gradient of {self.name}"
        )

    def __str__(self) -> str:
        unit = "of its norm" if self.norm else "from zero"
        allowed = self.allowed / (self.norm or 1.0)
        return f"{self.what} differs by {self.share:.2g} {unit}; rounding explains at most {allowed:.2g}"


class Judge:
    """Compares ways of one stage with an expected one, in one round: with dropout or without."""

    def __init__(self, bench: Bench, quiet: bool, base: Options | None = None) -> None:
        self.bench, self.quiet, self.base = bench, quiet, base
        self.expected = (
            bench.whole(quiet=quiet) if base is None else bench.planned(base, quiet)
        )
        self.drew = bench.drew
        self.norms = {name: _norm(value) for name, value in self.expected.items()}
        self.worst = 0.0
        self.unstable = (
            ""  # of what the plain way itself makes something else each time
        )
        self.own: dict[str, float] | None = (
            None  # errors of the plain way under autocast
        )
        self.slacks: dict[bool, dict[str, float]] = {}

    @property
    def finite(self) -> bool:
        """Whether there is anything to compare with."""
        return all(norm < float("inf") for norm in self.norms.values())

    def compare(self, options: Options) -> list[Difference]:
        """All that differ by more than rounding."""
        try:
            found = self.bench.planned(options, self.quiet)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a layer may raise anything
            return [
                Difference(
                    "",
                    raised=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                )
            ]
        cast = Option.AUTOCAST in options
        gaps = {
            name: _gap(found.get(name), value) for name, value in self.expected.items()
        }
        limits = {name: self.limit(name, cast) for name in gaps}
        if any(gap > limits[name] for name, gap in gaps.items()):
            slack = self.slack(cast)
            limits = {name: limit + slack[name] for name, limit in limits.items()}
        self.worst = max(
            [
                self.worst,
                *(gap / limits[name] for name, gap in gaps.items() if limits[name]),
            ]
        )
        return [
            Difference(name, gap, limits[name], self.norms[name])
            for name, gap in gaps.items()
            if gap > limits[name]
        ]

    def limit(self, name: str, cast: bool) -> float:
        """What is allowed without a look at what rounding does."""
        rounding = (
            min(HEADROOM * self.eps(cast and self.base is not None), MOST)
            * self.norms[name]
        )
        return rounding + (
            CAST_FACTOR * self.own_error(name) if cast and self.base is None else 0.0
        )

    def eps(self, cast: bool) -> float:
        """Of the least precise type that takes part."""
        kind = self.bench.executor.autocast if cast else None
        types = {
            self.bench.executor.dtype,
            *(p.dtype for p in self.bench.module.parameters()),
        }
        types |= {kind} if kind is not None else set()
        found = max(torch.finfo(one).eps for one in types if one.is_floating_point)
        return max(
            found,
            PRODUCTS[torch.get_float32_matmul_precision()]
            if torch.float32 in types
            else 0.0,
        )

    def own_error(self, name: str) -> float:
        """How far the plain way under autocast is from the one in full precision."""
        if self.own is None:
            found = self.bench.whole(autocast=True, quiet=self.quiet)
            self.own = {
                key: _gap(found.get(key), value) for key, value in self.expected.items()
            }
        return self.own[name]

    def slack(self, cast: bool) -> dict[str, float]:
        """What roundings change, and what changes by itself when the same is done again."""
        if cast in self.slacks:
            return self.slacks[cast]
        plain = self.bench.whole(cast, self.quiet)
        noise = dict.fromkeys(self.expected, 0.0)
        for turn in range(TRIES):
            other = self.bench.whole(
                cast, self.quiet, noise=self.eps(cast), noise_seed=turn
            )
            noise = {
                name: max(most, _gap(other.get(name), plain.get(name)))
                for name, most in noise.items()
            }
        again = self.bench.whole(cast, self.quiet)
        for name in noise:
            repeated = _gap(again.get(name), plain.get(name))
            noise[name] += repeated
            if (
                repeated > HEADROOM * self.eps(cast) * self.norms[name]
                and not self.unstable
            ):
                self.unstable = name
        self.slacks[cast] = {name: FACTOR * most for name, most in noise.items()}
        return self.slacks[cast]

    def drawn_anew(self, name: str) -> bool:
        """Whether other random numbers change it."""
        other = self.bench.whole(quiet=self.quiet, seed=SEED + 1)
        gap = _gap(other.get(name), self.expected[name]) if name else float("inf")
        return self.drew and gap > self.limit(name, cast=False)


def _norm(value: Tensor | None) -> float:
    """NaN counts as infinite."""
    if value is None:
        return 0.0
    found = float(
        torch.linalg.vector_norm(
            value, dtype=torch.promote_types(value.dtype, torch.float32)
        )
    )
    return float("inf") if isnan(found) else found


def _gap(ours: Tensor | None, theirs: Tensor | None) -> float:
    """The norm of their difference; one that is missing is zero."""
    if ours is None or theirs is None:
        return _norm(theirs if ours is None else ours)
    if ours.shape != theirs.shape:
        return float("inf")
    wide = torch.promote_types(
        torch.promote_types(ours.dtype, theirs.dtype), torch.float32
    )
    return _norm(ours.to(theirs.device, wide) - theirs.to(wide))
