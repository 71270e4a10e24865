"""What happens to gradients around a step: they are laid aside, summed over ranks, weighted and added back.

begin     lay earlier gradients aside          `penstock.runtime.earlier_gradients`
after     start the sums that are complete     `penstock.runtime.shards`, `penstock.runtime.gradients`
finish    wait for the sums, weigh them        `penstock.runtime.visits`
          add the earlier gradients back
"""

from __future__ import annotations

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

    @property
    def wait_for_actions(self) -> bool:
        """Whether any sum begins after an action, so that `after` must be called."""
        return bool(self.shards.parts or self.replicas.order)

    def begin(self, batch: Batch, recordings: Recordings | None) -> None:
        """Prepare the gradients for a step that may play recordings."""
        laid_aside = [*self.visits.owners, *self.replicas.parameters]
        if recordings is not None:
            if recordings.gradients.overwrites:
                laid_aside += recordings.gradients.parameters
            recordings.gradients.move_out(laid_aside)
        self.earlier.lay_aside(laid_aside)
        self.replicas.begin()
        if recordings is not None:
            recordings.begin(batch.valid)

    def after(self, action: int) -> None:
        """Start the sums to which this action was the last to contribute."""
        self.shards.after(action)
        self.replicas.after(action)

    def finish(self, batch: Batch) -> None:
        """Wait for the sums, weigh them, and add the gradients of earlier steps."""
        self.replicas.finish()
        self.visits.finish(batch)
        self.earlier.add_back()
