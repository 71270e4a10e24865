"""Every schedule by its name."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

from penstock.errors import ShapeError, UnknownNameError
from penstock.ir.schedule import Schedule
from penstock.schedules.chimera import chimera
from penstock.schedules.controllable import v_half, v_min
from penstock.schedules.dualpipe import dualpipe_v
from penstock.schedules.gpipe import gpipe
from penstock.schedules.hanayo import hanayo
from penstock.schedules.interleaved import interleaved
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.schedules.size import count_actions, refuse_size
from penstock.schedules.skip_paths import skip
from penstock.schedules.token_sliced import seq1f1b, terapipe
from penstock.schedules.transforms import (
    even_cuts,
    replicate,
    slice_tokens,
    split_backward,
)
from penstock.schedules.zero_bubble import interleaved_zb, zb_h1, zb_v

REGISTRY: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "chimera": chimera,
    "hanayo": hanayo,
    "zb-h1": zb_h1,
    "interleaved-zb": interleaved_zb,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
    "terapipe": terapipe,
    "seq1f1b": seq1f1b,
    "skip": skip,
}


def shape_of(name: str) -> tuple[str, ...]:
    """The words of a schedule's own shape: `ranks`, `microbatches`, ..."""
    if name not in REGISTRY:
        raise UnknownNameError("schedule", name, REGISTRY)
    return tuple(signature(REGISTRY[name]).parameters)


FOR_ALL = (
    "slices",
    "split",
    "copies",
)  # words of shape that any schedule takes: see `make`


def most_actions(name: str, **shape: int) -> int:
    """The most actions that `make` would build for this name and shape; 0 if a number is not positive.

    >>> most_actions("seq1f1b", ranks=2, microbatches=3, slices=4)
    48
    """
    words = signature(REGISTRY[name]).parameters.values()
    usual = {word.name: word.default for word in words if isinstance(word.default, int)}
    return count_actions(name, {**usual, **shape})


def make(name: str, **shape: int) -> Schedule:
    """The schedule of that name and shape.

    Any schedule also takes `slices` (where that is not part of its own shape, each micro-batch is cut into so many
    equal slices), `split=True` (its backwards are split), and `copies` (so many of it side by side, each with its own
    micro-batches).

    >>> make("1f1b", ranks=4, microbatches=8).actions
    64
    >>> make("hanayo", ranks=4, microbatches=4, waves=2, slices=2, split=True, copies=2).ranks
    8
    """
    own = shape_of(name)
    for word in shape:
        if word not in (*own, *FOR_ALL):
            raise ShapeError(
                f"{name} has no {word}; its shape is {', '.join(own)}, and for all: {', '.join(FOR_ALL)}"
            )
    missing = [word for word in ("ranks", "microbatches") if word not in shape]
    if missing:
        raise ShapeError(f"{name} needs {' and '.join(missing)}")
    refuse_size(
        most_actions(name, **shape),
        " ".join([name, *(f"{word}={value}" for word, value in shape.items())]),
    )
    schedule = REGISTRY[name](
        **{word: value for word, value in shape.items() if word in own}
    )
    if "slices" in shape and "slices" not in own:
        schedule = slice_tokens(schedule, even_cuts(shape["slices"]))
    if shape.get("split"):
        schedule = split_backward(schedule)
    return replicate(schedule, shape["copies"]) if "copies" in shape else schedule
