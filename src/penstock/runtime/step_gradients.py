"""What happens to gradients around a step: they are laid aside, summed over ranks, weighted and added back.

begin     lay earlier gradients aside          `penstock.runtime.earlier_gradients`
after     start the sums that are complete     `penstock.runtime.shards`, `penstock.runtime.gradients`
finish    wait for the sums, weigh them        `penstock.runtime.visits`
          add the earlier gradients back

A step that does not sum keeps the gradients of replicas in `local`, and the next step that does adds them to its own
before it sums them. So several steps have one sum, and `grad` never mixes summed gradients with others.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from penstock.runtime.batch import Batch
from penstock.runtime.earlier_gradients import EarlierGradients
from penstock.runtime.gradients import Replicas
from penstock.runtime.replay import Recordings
from penstock.runtime.shards import Shards
from penstock.runtime.visits import Visits


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
        self, batch: Batch, recordings: Recordings | None, sums: bool = True
    ) -> None:
        """Prepare the gradients for a step that may play recordings. Those steps always sum."""
        self.sums = sums or recordings is not None
        self.batch = batch
        self.weighed.clear()
        laid_aside = [*self.visits.owners, *self.replicas.parameters]
        if recordings is not None:
            if recordings.gradients.overwrites:
                laid_aside += recordings.gradients.parameters
            recordings.gradients.move_out(laid_aside)
        self.earlier.lay_aside(laid_aside)
        if self.sums:
            self.replicas.begin()
        if recordings is not None:
            recordings.begin(batch.valid)

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
            if earlier is None:
                continue
            if parameter.grad is None:
                parameter.grad = earlier
            else:
                parameter.grad += earlier

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
