"""Lays the gradients of earlier steps aside while a step computes its own, and adds them back afterwards.

    before the step      lay_aside            the step                 add_back
    grad = earlier       grad = None          grad = sum of this step  grad = sum + earlier

A caller may accumulate gradients over several steps. A sum over ranks, or a scale for the parts that some
micro-batches skip, must still apply to the gradients of one step only: those of earlier steps have been
summed and scaled already.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


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
            if earlier is None:
                continue
            if parameter.grad is None:
                parameter.grad = earlier
            else:
                parameter.grad += earlier
        self.laid.clear()

    def restore(self) -> None:
        """Put the earlier gradients back and forget what was computed in between."""
        for parameter, earlier in self.laid:
            parameter.grad = earlier
        self.laid.clear()
