"""Every schedule by its name."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

from penstock.errors import ShapeError, UnknownNameError
from penstock.ir.schedule import Schedule
from penstock.schedules.gpipe import gpipe
from penstock.schedules.one_f_one_b import one_f_one_b

REGISTRY: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


def make(name: str, **shape: int) -> Schedule:
    """The schedule of that name and shape.

    >>> make("1f1b", ranks=4, microbatches=8).actions
    64
    """
    if name not in REGISTRY:
        raise UnknownNameError("schedule", name, REGISTRY)
    known = signature(REGISTRY[name]).parameters
    for word in shape:
        if word not in known:
            raise ShapeError(f"{name} has no {word}; its shape is {', '.join(known)}")
    return REGISTRY[name](**shape)
