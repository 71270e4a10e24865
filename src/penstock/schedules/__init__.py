"""The library of schedules, each found by its name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import signature
from numbers import Integral

from penstock.errors import ShapeError, UnknownNameError, nearest_name
from penstock.ir.schedule import Schedule
from penstock.schedules.chimera import chimera
from penstock.schedules.controllable import v_half, v_min
from penstock.schedules.dualpipe import dualpipe_v
from penstock.schedules.facts import count_actions, refuse_if_too_large
from penstock.schedules.gpipe import gpipe
from penstock.schedules.hanayo import hanayo
from penstock.schedules.interleaved import interleaved
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.schedules.skip import skip
from penstock.schedules.token_sliced import seq1f1b, terapipe
from penstock.schedules.transforms import (
    even_cuts,
    offload,
    replicate,
    slice_tokens,
    split_backward,
)
from penstock.schedules.zero_bubble import interleaved_zb, zb_h1, zb_v
from penstock.shaped import Shape, read_shape, split_name, write_shape

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

# What torch and the papers call some of them, in small letters.
OTHER_NAMES = {
    "interleaved1f1b": "interleaved",
    "vpp": "interleaved",
    "interleavedzerobubble": "interleaved-zb",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
    "zero-bubble": "zb-h1",
    "zerobubble": "zb-h1",
    "zb": "zb-h1",
    "wave": "hanayo",
    "waves": "hanayo",
    "bidirectional": "chimera",
    "skippipe": "skip",
}

# The shape words that every schedule accepts beside its own; see `make`.
COMMON_SHAPE_WORDS = ("slices", "split", "offload", "copies")


def shape_of(name: str) -> tuple[str, ...]:
    """Return the words of a schedule's own shape, such as `ranks` and `microbatches`."""
    if name not in REGISTRY:
        meant = nearest_name(name.casefold(), REGISTRY)
        raise UnknownNameError("schedule", name, REGISTRY, meant)
    return tuple(signature(REGISTRY[name]).parameters)


def read_name(text: str) -> tuple[str, Shape]:
    """Read a schedule's name with its shape, as tables print it.

    >>> read_name("hanayo:waves=2,split"), read_name("ZBVZeroBubble")
    (('hanayo', {'waves': 2, 'split': True}), ('zb-v', {}))
    """
    name, shape = split_name(text)
    name = published_name(name)
    words = (*shape_of(name)[2:], *COMMON_SHAPE_WORDS)
    kinds = {word: bool if word == "split" else int for word in words}
    return name, read_shape(name, shape, kinds)


def published_name(name: str) -> str:
    """The name under which the schedule is listed here, for one that torch or a paper uses."""
    if name in REGISTRY:
        return name
    bare = name.casefold().removeprefix("schedule")
    return bare if bare in REGISTRY else OTHER_NAMES.get(bare, name)


def max_actions(name: str, **shape: int) -> int:
    """Return an upper bound on the actions that `make` builds for this name and shape.

    The result is 0 if a number of the shape is not positive.

    >>> max_actions("seq1f1b", ranks=2, microbatches=3, slices=4)
    48
    """
    whole_shape = {}
    for parameter in signature(REGISTRY[name]).parameters.values():
        if isinstance(parameter.default, int):
            whole_shape[parameter.name] = parameter.default
    whole_shape.update(shape)
    return count_actions(name, whole_shape)


def make(name: str, **shape: int) -> Schedule:
    """Build the schedule with this name and shape, such as `hanayo:waves=2`.

    Beside the words of its own shape, every schedule accepts four more. `slices` cuts
    each micro-batch into this many equal slices (some schedules have `slices` in their
    own shape). `split=True` splits the backwards. `offload` moves what forwards keep to the
    host, and back this many actions before their backwards. `copies` puts this many copies of
    the schedule side by side, each with its own micro-batches.

    >>> make("1f1b", ranks=4, microbatches=8).actions
    64
    >>> make("hanayo:waves=2,slices=2,split", ranks=4, microbatches=4, copies=2).ranks
    8
    """
    name, written = read_name(name)
    shape = {**written, **shape}
    own_words = shape_of(name)
    _check_words(name, own_words, shape)
    title = write_shape(name, shape)
    refuse_if_too_large(max_actions(name, **shape), title)

    own_shape = {word: value for word, value in shape.items() if word in own_words}
    return transform(REGISTRY[name](**own_shape), own_words, shape)


def transform(
    schedule: Schedule, own_words: Collection[str], shape: Mapping[str, int]
) -> Schedule:
    """Cut, split and copy a schedule as its shape says, unless its own words do so already."""
    if "slices" in shape and "slices" not in own_words:
        schedule = slice_tokens(schedule, even_cuts(shape["slices"]))
    if shape.get("split"):
        schedule = split_backward(schedule)
    if "offload" in shape:
        schedule = offload(schedule, shape["offload"])
    if "copies" in shape:
        schedule = replicate(schedule, shape["copies"])
    return schedule


def _check_words(name: str, own_words: tuple[str, ...], shape: dict[str, int]) -> None:
    """Refuse unknown words of a shape, other values than whole numbers, and missing words."""
    for word in shape:
        if word not in own_words and word not in COMMON_SHAPE_WORDS:
            raise ShapeError(
                f"{name} has no {word}; its shape is {', '.join(own_words)}, "
                f"and every schedule takes {', '.join(COMMON_SHAPE_WORDS)}"
            )
    for word, value in shape.items():
        if not isinstance(value, Integral):
            raise ShapeError(f"{word} must be a whole number, not {value!r}")
    missing = [word for word in ("ranks", "microbatches") if word not in shape]
    if missing:
        sizes = ", ".join(f"{word}=4" for word in missing)
        raise ShapeError(f"{name} needs {' and '.join(missing)}\n  for example {sizes}")
