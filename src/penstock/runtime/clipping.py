"""Scales gradients down to a norm, which the caller has summed over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.runtime.torch_internals import multiply_all

NORM_EPSILON = 1e-6  # added to a norm before dividing by it, as torch does


def scale_down(gradients: Sequence[Tensor], norm: float, most: float) -> None:
    """Scale the gradients of a rank so that the norm of all ranks, now `norm`, is at most `most`."""
    if norm > most and gradients:  # A rank may have nothing to train.
        multiply_all(list(gradients), most / (norm + NORM_EPSILON))
