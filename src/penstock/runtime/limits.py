"""Decides whether two ways to run a stage compute the same result, except for rounding.

Two ways that are equal on paper still differ by rounding, because they add numbers in another
order. All limits apply to the norm of a tensor's difference, since single numbers near zero
have no precision of their own:

- Every tensor may differ by `ALLOWED_ROUNDINGS` roundings of its norm. Buffers are compared by what the step has
  added to them, which may differ by as many roundings of the buffer as well. One rounding is the eps
  of the data type, or of matrix products, which a GPU may compute in TF32. The limit is at
  most `MAX_ROUNDING_SHARE`, because half precision would hide real faults otherwise.
- Under autocast, both ways are compared with the plain way in full precision. The planned way
  may be off by `AUTOCAST_FACTOR` times as much as the plain way under autocast.
- Only if that is not enough, the effect of rounding is measured: the plain way runs again with
  every layer's output changed by one rounding, up or down at random. `NOISE_FACTOR` times the
  observed change is allowed as well. Some gradients are zero on paper and noise in practice,
  such as that of the bias of keys in attention; this keeps them from raising a false alarm.

Real faults are far larger. A slice with wrong positions, or a dropout mask that is drawn again,
changes some gradients by hundreds of times as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isnan

import torch
from torch import Tensor

from penstock.runtime.bench import PROOF_SEED, Bench, Option, Options, Results
from penstock.runtime.passed_values import has_gradient

ALLOWED_ROUNDINGS = 32  # of a tensor's norm

MAX_ROUNDING_SHARE = 0.01  # of a tensor's norm, whatever the data type

NOISE_FACTOR = 16  # times the change that rounding was observed to make

AUTOCAST_FACTOR = 4  # times the error of the plain way under autocast

NOISE_RUNS = 2  # measurements of the effect of rounding

# The eps of products of float32 matrices, by torch.get_float32_matmul_precision().
PRODUCT_EPS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs by more than rounding, or the error of the planned way."""

    name: str
    gap: float = 0.0  # the norm of the difference
    allowed: float = 0.0
    norm: float = 0.0  # of the expected tensor
    raised: str = ""

    @property
    def share(self) -> float:
        """The difference as a share of the tensor's norm, if that is not zero."""
        return self.gap / (self.norm or 1.0)

    @property
    def title(self) -> str:
        """What differs, as text."""
        if self.name.startswith("the "):
            return self.name
        return f"the gradient of {self.name}"

    def __str__(self) -> str:
        unit = "of its norm" if self.norm else "from zero"
        allowed = self.allowed / (self.norm or 1.0)
        return (
            f"{self.title} differs by {self.share:.2g} {unit}; "
            f"rounding explains at most {allowed:.2g}"
        )


class DifferenceJudge:
    """Compares ways to run one stage with an expected result, with or without dropout.

    The expected result is that of the plain way, or that of the planned way with only the
    options `base`.
    """

    def __init__(self, bench: Bench, quiet: bool, base: Options | None = None) -> None:
        self.bench = bench
        self.quiet = quiet
        self.base = base
        if base is None:
            self.expected = bench.run_plain(quiet=quiet)
        else:
            self.expected = bench.run_planned(base, quiet)
        self.drew_random = bench.drew_random
        self.norms = {name: _norm(value) for name, value in self.expected.items()}
        self.worst = 0.0  # the largest difference, as a share of what is allowed
        # The first tensor that differs between two equal runs of the plain way.
        self.unstable = ""
        self.autocast_errors: dict[str, float] | None = None
        self.noise_limits: dict[bool, dict[str, float]] = {}

    @property
    def finite(self) -> bool:
        """Whether the expected result is finite, so that it can be compared."""
        return all(isfinite(norm) for norm in self.norms.values())

    def compare(self, options: Options) -> list[TensorDifference]:
        """Run the planned way with these options, and return what differs too much."""
        try:
            results = self.bench.run_planned(options, self.quiet)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a layer may raise anything
            first_line = str(error).strip().partition("\n")[0]
            return [
                TensorDifference("", raised=f"{type(error).__name__}: {first_line}")
            ]
        cast = Option.AUTOCAST in options
        gaps = _gaps(results, self.expected)
        limits = {name: self.limit(name, cast) for name in gaps}
        if any(gap > limits[name] for name, gap in gaps.items()):
            noise = self.noise_limit(cast)
            limits = {one: limit + noise.get(one, 0.0) for one, limit in limits.items()}
        differences = []
        for name, gap in gaps.items():
            limit = limits[name]
            if limit:
                self.worst = max(self.worst, gap / limit)
            if gap > limit:
                norm = self.norms.get(name, 0.0)
                differences.append(TensorDifference(name, gap, limit, norm))
        return differences

    def limit(self, name: str, cast: bool) -> float:
        """How much a tensor may differ, before the effect of rounding is measured."""
        against_plain = self.base is None
        eps = self.eps(cast and not against_plain)
        share = min(ALLOWED_ROUNDINGS * eps, MAX_ROUNDING_SHARE)
        limit = share * self.norms.get(name, 0.0)
        limit += ALLOWED_ROUNDINGS * self.bench.buffer_rounding.get(name, 0.0)
        if cast and against_plain:
            limit += AUTOCAST_FACTOR * self.autocast_error(name)
        return limit

    def eps(self, cast: bool) -> float:
        """The eps of the least precise data type in use."""
        executor = self.bench.executor
        types = {p.dtype for p in self.bench.module.parameters()}
        edges = [edge for edge in (self.bench.incoming, self.bench.outgoing) if edge]
        types.update(spec.dtype for edge in edges for spec in edge.tensors)
        if cast and executor.stages.autocast is not None:
            types.add(executor.stages.autocast)
        real = {kind.to_real() for kind in types if has_gradient(kind)}
        eps = max(torch.finfo(kind).eps for kind in real or {torch.float32})
        if torch.float32 in real:
            eps = max(eps, PRODUCT_EPS[torch.get_float32_matmul_precision()])
        return eps

    def autocast_error(self, name: str) -> float:
        """How far the plain way under autocast is from the one in full precision."""
        if self.autocast_errors is None:
            results = self.bench.run_plain(autocast=True, quiet=self.quiet)
            self.autocast_errors = _gaps(results, self.expected)
        return self.autocast_errors.get(name, 0.0)

    def noise_limit(self, cast: bool) -> dict[str, float]:
        """How much each tensor may differ because of rounding and of unstable kernels.

        That is how much changes when all outputs are rounded differently, plus how much
        changes when the same run is repeated.
        """
        if cast in self.noise_limits:
            return self.noise_limits[cast]
        plain = self.bench.run_plain(cast, self.quiet)
        change = dict.fromkeys(self.expected, 0.0)
        for seed in range(NOISE_RUNS):
            rounded = self.bench.run_plain(
                cast, self.quiet, noise=self.eps(cast), noise_seed=seed
            )
            for name in change:
                gap = _gap(rounded.get(name), plain.get(name))
                change[name] = max(change[name], gap)
        repeated = self.bench.run_plain(cast, self.quiet)
        for name in change:
            gap = _gap(repeated.get(name), plain.get(name))
            change[name] += gap
            stable = ALLOWED_ROUNDINGS * self.eps(cast) * self.norms[name]
            if gap > stable and not self.unstable:
                self.unstable = name
        limits = {name: NOISE_FACTOR * gap for name, gap in change.items()}
        self.noise_limits[cast] = limits
        return limits

    def depends_on_random(self, name: str) -> bool:
        """Whether other random numbers change a tensor."""
        other = self.bench.run_plain(quiet=self.quiet, seed=PROOF_SEED + 1)
        gap = _gap(other.get(name), self.expected.get(name))
        return self.drew_random and gap > self.limit(name, cast=False)


def _norm(value: Tensor | None) -> float:
    """The norm of a tensor; infinite if it has a NaN."""
    if value is None:
        return 0.0
    wide = torch.promote_types(value.dtype, torch.float32)
    norm = float(torch.linalg.vector_norm(value.to(wide)))
    return float("inf") if isnan(norm) else norm


def _gaps(results: Results, expected: Results) -> dict[str, float]:
    """The norm of the difference of each tensor; a buffer may have changed in one of the ways only."""
    names = dict.fromkeys([*expected, *results])
    return {name: _gap(results.get(name), expected.get(name)) for name in names}


def _gap(first: Tensor | None, second: Tensor | None) -> float:
    """The norm of the difference of two tensors; a missing one counts as zero."""
    if first is None:
        return _norm(second)
    if second is None:
        return _norm(first)
    if first.shape != second.shape:
        return float("inf")
    wide = torch.promote_types(first.dtype, second.dtype)
    wide = torch.promote_types(wide, torch.float32)
    return _norm(first.to(second.device, wide) - second.to(wide))
