"""A layout: how the devices of a step are divided, and which schedule they follow, in one line.

    dp_replicate=4,dp_shard=8,tp=2,pp=2,microbatches=8,recompute=none,schedule=hanayo:waves=2,split

`schedule=` comes last and takes the rest. What is left out is 1, no recomputation, 1F1B, and any number of
micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from penstock.errors import ShapeError
from penstock.shaped import read_shape, write_shape

RECOMPUTE = {"none": 0.0, "full": 1.0}  # the share of the parts that are computed again
# Other ways to divide a model, which nobody plans yet.
RESERVED = ("cp", "ep", "zero")
SCHEDULE = "schedule="


@dataclass(frozen=True, slots=True)
class Layout:
    """How the devices of a step are divided; 0 micro-batches leave their number open."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    microbatches: int = 0
    recompute: str = "none"
    schedule: str = "1f1b"

    @property
    def devices(self) -> int:
        """The devices that it uses."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp


KINDS: Mapping[str, type[int] | type[str]] = {
    one.name: str if one.name == "recompute" else int
    for one in fields(Layout)
    if one.name != "schedule"
}


def read_layout(text: str) -> Layout:
    """Read a layout.

    >>> read_layout("dp_shard=8,pp=2,schedule=hanayo:waves=2,split").schedule
    'hanayo:waves=2,split'
    """
    before, mark, schedule = text.partition(SCHEDULE)
    for word in RESERVED:
        if any(item.strip().startswith(f"{word}=") for item in before.split(",")):
            raise ShapeError(f"{word} is not planned yet; leave {word} out of {text}")
    shape = read_shape("layout", before.strip().rstrip(","), KINDS)
    for key, value in shape.items():
        if key != "recompute" and value < 1:
            raise ShapeError(f"{key} must be at least 1, not {value}")
    if mark:
        shape["schedule"] = schedule.strip()
    layout = Layout(**shape)
    if layout.recompute not in RECOMPUTE:
        raise ShapeError(
            f"recompute is {' or '.join(RECOMPUTE)}, not {layout.recompute!r}"
        )
    return layout


def write_layout(layout: Layout) -> str:
    """Write a layout as `read_layout` reads it, without what is as usual.

    >>> write_layout(Layout(dp_shard=8, pp=2, microbatches=4))
    'dp_shard=8,pp=2,microbatches=4,schedule=1f1b'
    """
    usual = Layout()
    given = {
        one.name: getattr(layout, one.name)
        for one in fields(Layout)
        if getattr(layout, one.name) != getattr(usual, one.name)
    }
    if layout.pp > 1:
        given["schedule"] = layout.schedule  # the last one
    return write_shape("", given).removeprefix(":") or "dp_replicate=1"
