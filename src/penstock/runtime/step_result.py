"""The result of a step: its loss and, on request, its timeline and the outputs of the last stages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.ir.timeline import Timeline
from penstock.runtime.blocking_wait import sleep_until_done
from penstock.runtime.comm.comm import Pending
from penstock.runtime.recorder import Recording


class Result:
    """The mean loss of a step over all valid tokens and, if it was timed, its timeline. All ranks get the same.

    Both are summed over the ranks while the caller goes on. Reading them waits for the sums. `outputs` has what the
    last stage returned for each micro-batch, without graphs, if the caller asked for it; None for a micro-batch that
    ends on another rank. With `sleeps`, the host sleeps until a GPU has the loss, instead of keeping a core busy.
    """

    __slots__ = ("_loss", "_recording", "_sleeps", "_sum", "outputs")

    def __init__(
        self,
        loss: Tensor,
        pending: Pending,
        recording: Recording | None = None,
        sleeps: bool = False,
    ) -> None:
        self._loss = loss
        self._sum = pending
        self._recording = recording
        self._sleeps = sleeps
        self.outputs: tuple[Any, ...] = ()

    def wait(self) -> None:
        """Wait until the loss is summed, without reading it: on a GPU, the host does not wait."""
        self._sum.wait()

    @property
    def loss(self) -> float:
        """The mean over all valid tokens of the step."""
        self._sum.wait()
        if self._sleeps and self._loss.is_cuda:
            sleep_until_done()
        return float(self._loss)

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the step; None if the step was not timed."""
        return None if self._recording is None else self._recording.timeline()
