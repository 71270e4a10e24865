"""How times and sizes are written for people, with their units.

    write_time(0.0315)                 31.5 ms       seconds
    write_size(1_234_567)              1.18 MiB      bytes
    write_time(33.0, PAPER_UNITS)      33            forwards of a micro-batch, as in the papers

Every command, figure and report writes its numbers with these functions. The columns of
a table and the numbers of a list share one unit, a `Scale`, so that they can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from penstock.ir.timeline import REAL_UNITS, Units

# The units of the papers, for one and for several.
FORWARDS = ("forward", "forwards")
MICROBATCHES = ("micro-batch", "micro-batches")
RANKS = ("rank", "ranks")
STEPS = ("step", "steps")
MAX_SIZES_SHOWN = 16
SIZES_SHOWN_AT_EACH_END = 6


class Scale(NamedTuple):
    """A unit, and how many seconds or bytes it has."""

    unit: str
    factor: float

    def number(self, value: float, digits: int = 4) -> str:
        """Write a value in this unit, without the unit's name."""
        text = short(value / self.factor, digits)
        whole, dot, fraction = text.partition(".")
        if not whole.lstrip("-").isdigit():
            return text
        return f"{int(whole):,}{dot}{fraction}" if abs(int(whole)) >= 1000 else text

    def quantity(self, value: float, digits: int = 4) -> str:
        """Write a value in this unit, followed by the unit's name."""
        return f"{self.number(value, digits)} {self.unit}".rstrip()


COUNT = Scale("", 1.0)
TIME_SCALES = (Scale("s", 1.0), Scale("ms", 1e-3), Scale("µs", 1e-6))
SIZE_SCALES = (
    Scale("TiB", 2.0**40),
    Scale("GiB", 2.0**30),
    Scale("MiB", 2.0**20),
    Scale("KiB", 2.0**10),
    Scale("B", 1.0),
)
RATE_SCALES = (
    Scale("million tokens/s", 1e6),
    Scale("thousand tokens/s", 1e3),
    Scale("tokens/s", 1.0),
)


def time_scale(largest: float, units: Units = REAL_UNITS) -> Scale:
    """Return the unit that suits times up to `largest`."""
    return _suitable(TIME_SCALES, largest) if units.seconds else COUNT


def size_scale(largest: float, units: Units = REAL_UNITS) -> Scale:
    """Return the unit that suits sizes up to `largest`."""
    return _suitable(SIZE_SCALES, largest) if units.bytes else COUNT


def rate_scale(largest: float) -> Scale:
    """Return the unit that suits speeds up to `largest` tokens a second.

    >>> rate_scale(3135).quantity(3135), rate_scale(12_345).quantity(12_345)
    ('3,135 tokens/s', '12.35 thousand tokens/s')
    """
    return _suitable(RATE_SCALES, largest / 10)


def write_time(value: float, units: Units = REAL_UNITS, digits: int = 4) -> str:
    """Write a time: a plain number in the units of the papers, otherwise seconds.

    >>> write_time(1.5), write_time(0.0315), write_time(167_000)
    ('1.5 s', '31.5 ms', '167,000 s')
    """
    return time_scale(value, units).quantity(value, digits)


def write_range(low: float, high: float, units: Units = REAL_UNITS) -> str:
    """Write the times between which a predicted one may lie.

    >>> write_range(0.0315, 0.0402), write_range(0.9, 1.2)
    ('31.5 ms to 40.2 ms', '900 ms to 1.2 s')
    """
    return f"{write_time(low, units, 3)} to {write_time(high, units, 3)}"


def write_size(value: float, units: Units = REAL_UNITS, digits: int = 3) -> str:
    """Write a size: a plain number in the units of the papers, otherwise bytes.

    >>> write_size(1_234_567_890), write_size(12_345_678), write_size(4.56e15)
    ('1.15 GiB', '11.8 MiB', '4,147 TiB')
    """
    return size_scale(value, units).quantity(value, digits)


def name_time(value: float, units: Units = REAL_UNITS, digits: int = 4) -> str:
    """Write a time with its unit, also in the units of the papers.

    >>> from penstock.ir.timeline import PAPER_UNITS
    >>> name_time(0.0315), name_time(33.0, PAPER_UNITS), name_time(1.0, PAPER_UNITS)
    ('31.5 ms', '33 forwards', '1 forward')
    """
    text = write_time(value, units, digits)
    return text if units.seconds else count_of(text, *FORWARDS)


def name_size(value: float, units: Units = REAL_UNITS, digits: int = 3) -> str:
    """Write a size with its unit, also in the units of the papers.

    >>> from penstock.ir.timeline import PAPER_UNITS
    >>> name_size(12_345_678), name_size(3.5, PAPER_UNITS)
    ('11.8 MiB', '3.5 micro-batches')
    """
    text = write_size(value, units, digits)
    return text if units.bytes else count_of(text, *MICROBATCHES)


def count_of(number: int | str, one: str, several: str) -> str:
    """Write a number of things.

    >>> count_of(1, "process", "processes"), count_of(4, "process", "processes")
    ('1 process', '4 processes')
    """
    return f"{number} {one if str(number) == '1' else several}"


def write_sizes(
    values: Iterable[float], units: Units = REAL_UNITS, digits: int = 4
) -> str:
    """Write the sizes of all ranks in one unit; of many ranks the first and the last.

    >>> from penstock.ir.timeline import PAPER_UNITS
    >>> write_sizes([2**20, 2**21, 2**19]), write_sizes([2.0, 1.0], PAPER_UNITS)
    ('1 2 0.5 MiB', '2 1 micro-batches')
    """
    sizes = list(values)
    scale = size_scale(max(sizes, default=0.0), units)
    numbers = [scale.number(size, digits) for size in sizes]
    if len(numbers) > MAX_SIZES_SHOWN:
        first = numbers[:SIZES_SHOWN_AT_EACH_END]
        last = numbers[-SIZES_SHOWN_AT_EACH_END:]
        numbers = [*first, "...", *last]
    unit = scale.unit if units.bytes else MICROBATCHES[numbers != ["1"]]
    return f"{' '.join(numbers)} {unit}"


def short(value: float, digits: int = 4) -> str:
    """Write a number with a few significant digits and without an exponent.

    >>> short(33.0), short(0.012345)
    ('33', '0.01235')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _suitable(scales: tuple[Scale, ...], largest: float) -> Scale:
    """Return the first scale, from large to small, that makes a number of at least 1."""
    fitting = (scale for scale in scales if abs(largest) >= scale.factor)
    return next(fitting, scales[-1])
