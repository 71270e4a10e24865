"""Scales gradients down to a norm, which the caller has summed over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.runtime.torch_internals import multiply_all

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
