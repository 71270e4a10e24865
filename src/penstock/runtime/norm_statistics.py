"""Lets the norms of a stage gather their statistics once, although the stage is computed twice.

A batch norm updates its running mean and variance in every forward. The second forward of a recomputed stage sees the
same numbers again, so it must not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from penstock.runtime.randomness import DRAWING_LOCK

Norm: TypeAlias = _NormBase  # batch norms and instance norms


def gathering_norms(module: nn.Module) -> list[Norm]:
    """The norms inside a module that gather statistics."""
    norms = [one for one in module.modules() if isinstance(one, Norm)]
    return [norm for norm in norms if norm.track_running_stats]


@contextmanager
def statistics_kept(norms: Sequence[Norm]) -> Iterator[None]:
    """Let norms that train compute the same without changing their statistics.

    A batch norm leaves its statistics alone if it is told not to track them; an instance norm only if it has none.
    Ranks that are threads may share the norms, so no other forward may run meanwhile.
    """
    training = [norm for norm in norms if norm.training]
    if not training:
        yield
        return
    with DRAWING_LOCK, _untracked(training):
        yield


@contextmanager
def _untracked(training: Sequence[Norm]) -> Iterator[None]:
    statistics = [(norm.running_mean, norm.running_var) for norm in training]
    for norm in training:
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = None
    try:
        yield
    finally:
        for norm, (mean, variance) in zip(training, statistics, strict=True):
            norm.track_running_stats = True
            norm.running_mean = mean
            norm.running_var = variance
