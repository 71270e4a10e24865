"""What a step gives back."""

from __future__ import annotations

from torch import Tensor

from penstock.ir.timeline import Timeline
from penstock.runtime.comm.comm import Pending
from penstock.runtime.recorder import Recording


class Result:
    """Of one step: the mean loss over all valid tokens and, if timed, when everything ran; alike on all ranks.

    Both are brought together over the ranks while the caller goes on, and waited for when they are read.
    """

    __slots__ = ("_loss", "_recording", "_sum")

    def __init__(
        self, loss: Tensor, summed: Pending, recording: Recording | None = None
    ) -> None:
        self._loss, self._sum, self._recording = loss, summed, recording

    @property
    def loss(self) -> float:
        """The mean over all valid tokens of the step."""
        self._sum.wait()
        return float(self._loss)

    @property
    def timeline(self) -> Timeline | None:
        """When everything ran; None if the step was not timed."""
        return None if self._recording is None else self._recording.timeline()
