"""What happens to gradients around a step: they are laid aside, summed over ranks, weighted and added back.

begin     lay earlier gradients aside          `penstock.runtime.gradients`
after     start the sums that are complete     `penstock.runtime.replicas`
finish    wait for the sums, weigh them        `penstock.runtime.gradients`
          add the earlier gradients back

A step that does not sum keeps the gradients of replicas in `local`, and the next step that does adds them to its own
before it sums them. So several steps have one sum, and `grad` never mixes summed gradients with others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import torch
from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.ir.schedule import Schedule
from penstock.runtime.backward import accumulate
from penstock.runtime.batch import Batch, counting
from penstock.runtime.replicas import Replicas, Shards, Tied
from penstock.torch_internals import multiply_all, zero_all


class StepGradients:
    """The gradients of one rank, from the beginning of a step to its end."""

    def __init__(self, shards: Shards, replicas: Replicas, visits: Visits) -> None:
        self.shards = shards
        self.replicas = replicas
        self.visits = visits
        self.earlier = EarlierGradients()
        # Gradients of earlier steps that are not summed over the replicas yet.
        self.local: dict[nn.Parameter, Tensor] = {}
        self.sums = True  # whether this step sums
        self.batch: Batch | None = None
        self.weighed: set[nn.Parameter] = set()
        replicas.complete_gradients = self.add_local

    @property
    def wait_for_actions(self) -> bool:
        """Whether any sum begins after an action, so that `after` must be called."""
        return bool(self.shards.parts or self.replicas.order)

    def begin(
        self, batch: Batch, fixed: FixedGradients | None, sums: bool = True
    ) -> None:
        """Prepare the gradients for a step. If it plays recordings, they are `fixed`, and the step always sums."""
        self.sums = sums or fixed is not None
        self.batch = batch
        self.weighed.clear()
        laid_aside = [*self.visits.owners, *self.replicas.parameters]
        if fixed is not None:
            if fixed.overwrites:
                laid_aside += fixed.parameters
            fixed.move_out(laid_aside)
        self.earlier.lay_aside(laid_aside)
        if self.sums:
            self.replicas.begin()
        if fixed is not None:
            fixed.begin()

    def after(self, action: int) -> None:
        """Start the sums to which this action was the last to contribute."""
        self.shards.after(action)
        if self.sums:
            self.replicas.after(action)

    def add_local(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add gradients of earlier steps, which are weighed already, to those of this step."""
        if not self.local:
            return
        assert self.batch is not None
        listed = list(parameters)
        self.visits.finish(self.batch, listed)
        self.weighed.update(listed)
        for parameter in listed:
            earlier = self.local.pop(parameter, None)
            if earlier is not None:
                accumulate(parameter, earlier)

    def keep_local(self) -> None:
        """Move the gradients of replicas out of the way, until a step sums them."""
        for parameter in dict.fromkeys(self.replicas.parameters):
            gradient = parameter.grad
            parameter.grad = None
            if gradient is None:
                continue
            earlier = self.local.get(parameter)
            if earlier is not None:
                gradient = earlier.add_(gradient)
            self.local[parameter] = gradient

    def abandon(self) -> None:
        """Forget a step that has failed."""
        self.replicas.abandon()
        self.local.clear()

    def finish(self, batch: Batch) -> None:
        """Wait for the sums, weigh them, and add the gradients of earlier steps."""
        if self.sums:
            self.replicas.finish()
        owners = self.visits.owners
        self.visits.finish(batch, [p for p in owners if p not in self.weighed])
        if not self.sums:
            self.keep_local()
        self.earlier.add_back()


# ---------------------------------------------------------------- earlier gradients
# Lays the gradients of earlier steps aside while a step computes its own, and adds them back afterwards.
#
#     before the step      lay_aside            the step                 add_back
#     grad = earlier       grad = None          grad = sum of this step  grad = sum + earlier
#
# A caller may accumulate gradients over several steps. A sum over ranks, or a scale for the parts that some
# micro-batches skip, must still apply to the gradients of one step only: those of earlier steps have been
# summed and scaled already.


class EarlierGradients:
    """The gradients that some parameters had before this step."""

    def __init__(self) -> None:
        self.laid: list[tuple[nn.Parameter, Tensor | None]] = []

    def lay_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember the gradients of these parameters and remove them."""
        for parameter in dict.fromkeys(parameters):
            self.laid.append((parameter, parameter.grad))
            parameter.grad = None

    def add_back(self) -> None:
        """Add the earlier gradients to those that the step has computed."""
        for parameter, earlier in self.laid:
            if earlier is not None:
                accumulate(parameter, earlier)
        self.laid.clear()

    def restore(self) -> None:
        """Put the earlier gradients back and forget what was computed in between."""
        for parameter, earlier in self.laid:
            parameter.grad = earlier
        self.laid.clear()


# ---------------------------------------------------------------- visits
# Chooses the micro-batches over which a part's gradient is a mean, when some micro-batches skip the part.
#
#     part            0     1     2          3 micro-batches of equal size, with the paths  0 1 / 0 2 / 0 2
#     visited by    a b c   a    b c
#
#     ALL           1/3    1/3   1/3         the weight of each visitor: a skipped part has a gradient of zero
#     VISITS        1/3     1    1/2         a skipped part has no gradient
#
# A pipeline divides every loss by the valid tokens of the whole step, so it computes ALL. VISITS is the same gradient
# times (all valid tokens) / (valid tokens that visited the part). If the coverage never changes, that is one constant
# per part. Adam divides the constant out again; only its epsilon and clipping by the norm of all gradients see a
# difference. The two differ with plain SGD, and where visitors change from step to step or some steps run the full
# model. With AdamW we saw no difference (docs/results/convergence.md), so the default is ALL, which needs no work.


class Mean(StrEnum):
    """The tokens over which a part's gradient is a mean."""

    ALL = "all"
    VISITS = "visits"


class Visits:
    """How much the gradients of one rank's parts count, by the micro-batches that visited them."""

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        mean: Mean,
        tied: Mapping[str, Tied] | None = None,
    ) -> None:
        self.parts = schedule.parts
        self.paths = [
            [schedule.stages[stage].part for stage in microbatch.path]
            for microbatch in schedule.microbatches
        ]
        self.owners: dict[nn.Parameter, int] = {}  # parameters to scale, and their part
        if mean is Mean.ALL:
            return
        skipped = _skipped_parts(self.parts, self.paths)
        _refuse_tied(tied or {}, skipped)
        for stage, module in modules.items():
            part = schedule.stages[stage].part
            if part in skipped:
                self.owners.update(dict.fromkeys(module.parameters(), part))

    def finish(self, batch: Batch, parameters: Iterable[nn.Parameter]) -> None:
        """Scale the gradients of these parameters in this step, without those of earlier steps."""
        if not self.owners:
            return
        counts: Sequence[int] = batch.counts
        if not counts:
            counts = [int(counting(labels).sum()) for labels in batch.labels]
        scales = visit_scales(self.parts, self.paths, counts)
        for parameter in parameters:
            part = self.owners.get(parameter)
            if part is not None and parameter.grad is not None:
                parameter.grad *= scales[part]


def _skipped_parts(parts: int, paths: Sequence[Sequence[int]]) -> set[int]:
    """The parts that at least one micro-batch skips."""
    skipped = set()
    for path in paths:
        skipped.update(set(range(parts)).difference(path))
    return skipped


def _refuse_tied(tied: Mapping[str, Tied], skipped: set[int]) -> None:
    """Raise an error if a parameter belongs to two parts that different micro-batches visit.

    It has no mean over visits.
    """
    for name, shared in tied.items():
        if len(shared.parts) > 1 and skipped.intersection(shared.parts):
            parts = " and ".join(map(str, shared.parts))
            raise ShapeError(
                f"{name} is in parts {parts}, of which some are skipped: take the mean over all tokens"
            )


def visit_scales(
    parts: int, paths: Sequence[Sequence[int]], tokens: Sequence[int]
) -> tuple[float, ...]:
    """The factors that turn each part's gradient into a mean over its visitors.

    `tokens` are the valid tokens of each micro-batch. A part on no path keeps its gradient: nobody visited it, or it is
    the head, where all paths end.

    >>> visit_scales(3, [(0, 1), (0, 2), (0, 2)], [8, 8, 8])
    (1.0, 3.0, 1.5)
    """
    if len(paths) != len(tokens):
        raise ShapeError(
            f"{len(paths)} paths have {len(tokens)} counts of tokens: give each micro-batch its own"
        )
    total = sum(tokens)
    scales = []
    for part in range(parts):
        visited = 0
        for path, count in zip(paths, tokens, strict=True):
            if part in path:
                visited += count
        scales.append(total / visited if visited else 1.0)
    return tuple(scales)


def scale_gradients(parts: Sequence[nn.Module], scales: Sequence[float]) -> None:
    """Multiply the gradients of each part by its scale, in place.

    Call it after all backwards and before any clipping.
    """
    scale_of: dict[int, float] = {}
    for number, (part, scale) in enumerate(zip(parts, scales, strict=True)):
        for parameter in part.parameters():
            if scale_of.setdefault(id(parameter), scale) != scale:
                raise ShapeError(
                    f"part {number} shares a parameter with a part that has another scale ({scale:g} and "
                    f"{scale_of[id(parameter)]:g}): tie only parts that all paths visit"
                )
    for part in parts:
        for parameter in part.parameters():
            if parameter.grad is not None and id(parameter) in scale_of:
                parameter.grad.mul_(scale_of.pop(id(parameter)))


# ---------------------------------------------------------------- clipping
# Scales gradients down to a norm, which the caller has summed over all ranks.

NORM_EPSILON = 1e-6  # added to a norm before dividing by it, as torch does


def square_norm(gradient: Tensor) -> Tensor:
    """The squared norm of a gradient in double precision. Both parts of a complex number count."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.double().square().sum()


def scale_down(gradients: Sequence[Tensor], norm: float, most: float) -> None:
    """Scale the gradients of a rank so that the norm of all ranks, now `norm`, is at most `most`."""
    if norm > most and gradients:  # A rank may have nothing to train.
        multiply_all(list(gradients), most / (norm + NORM_EPSILON))


# ---------------------------------------------------------------- recorded actions
class FixedGradients:
    """Gradients whose memory never moves, because recordings write to them there.

    The first action that contributes to a gradient either adds to it, so that it must be zero when a step begins, or
    it `overwrites` it, which saves two passes through the memory.
    """

    def __init__(self, modules: Iterable[nn.Module], overwrites: bool = False) -> None:
        trained: dict[nn.Parameter, None] = {}
        for module in modules:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    trained[parameter] = None
        self.parameters = list(trained)
        self.overwrites = overwrites
        self.places: list[Tensor | None] = []
        if not overwrites:
            self.places += [torch.zeros_like(parameter) for parameter in trained]

    def install(self) -> None:
        """Make the fixed memory the gradient of every parameter, or None where there is none."""
        places = self.places or [None] * len(self.parameters)
        for parameter, place in zip(self.parameters, places, strict=True):
            parameter.grad = place

    def adopt(self) -> None:
        """Keep the gradients that were made while recording as the fixed memory."""
        if self.overwrites:
            self.places = [parameter.grad for parameter in self.parameters]

    def move_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy gradients that are about to be laid aside out of the fixed memory.

        This step writes there, so the gradients of earlier steps cannot stay.
        """
        pairs = zip(self.parameters, self.places, strict=True)
        place_of = dict(pairs)
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient is place_of.get(parameter):
                parameter.grad = gradient.clone()

    def begin(self) -> None:
        """Begin a step, which adds to the gradients that parameters have now, or overwrites them."""
        if self.overwrites:
            self.install()
            return
        empty = []
        for parameter, place in zip(self.parameters, self.places, strict=True):
            assert place is not None
            if parameter.grad is None:
                empty.append(place)
            elif parameter.grad is not place:
                place.copy_(parameter.grad)
        if empty:
            zero_all(empty)
        self.install()
