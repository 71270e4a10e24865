"""Lets every forward count once in the statistics of a norm.

A batch norm updates its running mean and variance in every forward. That goes wrong in two cases:

- A recomputed stage sees the same numbers again in its second forward, which must not count (`statistics_kept`).
- Ranks that are threads may share a norm. If both read its mean and then both write theirs, the first update is lost.
  So a norm belongs to one forward at a time (`statistics_locks`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from penstock.runtime.randomness import DRAWING_LOCK

Norm: TypeAlias = _NormBase  # batch norms and instance norms

# Not attributes of the norms: a module that holds a lock can be neither copied nor pickled.
_LOCKS: WeakKeyDictionary[Norm, threading.Lock] = WeakKeyDictionary()


def gathering_norms(module: nn.Module) -> list[Norm]:
    """The norms inside a module that gather statistics."""
    norms = [one for one in module.modules() if isinstance(one, Norm)]
    return [norm for norm in norms if norm.track_running_stats]


def statistics_locks(norms: Sequence[Norm]) -> list[threading.Lock]:
    """The locks that a forward through these norms holds.

    Their order is the same for all threads, so that two of them cannot wait for each other.
    """
    ordered = sorted(norms, key=id)
    return [_LOCKS.setdefault(norm, threading.Lock()) for norm in ordered]


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
