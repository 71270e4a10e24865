"""The errors that a user's mistakes can cause, as one tree.

    PenstockError
    ├── ScheduleError      tables that are not a schedule, with every fault drawn
    ├── ProgramError       a program that could deadlock, lose a message or use a freed result
    ├── ShapeError         a size that does not fit, with the nearest one that does
    │   └── NothingFitsError   no plan fits into the memory or the devices
    ├── UnknownNameError   an unknown name, with the nearest known one
    ├── FileError          a file that cannot be read or written, with the place
    ├── ConfigError        an unknown or out-of-range value of a config
    └── RunError           a run that cannot continue
        ├── ProofError     a plan that changes what a stage computes
        ├── StuckError     a rank that has waited too long
        └── PeerLostError  a rank that waits for another one that has died

Our own mistakes are `assert`s. The command line shows a `PenstockError` as one message,
without a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable


class PenstockError(Exception):
    """A mistake of the user. The message says what is wrong, where, and what to do."""


class ScheduleError(PenstockError):
    """Three tables that are not a schedule. `faults` holds a drawn text for every fault."""

    def __init__(self, faults: Iterable[str], shown: int = 8) -> None:
        self.faults = tuple(faults)
        hidden = len(self.faults) - shown
        texts = list(self.faults[:shown])
        if hidden > 0:
            texts.append(f"and {hidden} more faults")
        super().__init__("\n\n".join(texts))


class ProgramError(PenstockError):
    """A lowered program that is not safe to run."""


class ShapeError(PenstockError):
    """A number of ranks, micro-batches, waves, ... that does not fit."""


class NothingFitsError(ShapeError):
    """No plan fits into the memory or the devices. The exit code is 3, so that a script can ask for more of them."""


class UnknownNameError(PenstockError):
    """A name that is not in a list of known names. `meant` is the right one, if it is known."""

    def __init__(
        self, kind: str, name: str, known: Iterable[str], meant: str = ""
    ) -> None:
        names = sorted(known)
        near = meant or nearest_name(name, names)
        hint = f"; did you mean {near!r}?" if near else ""
        super().__init__(
            f"there is no {kind} {name!r}{hint}\nknown: {', '.join(names)}"
        )


class FileError(PenstockError):
    """A file that is cut off, too new, broken by hand, or not what it claims to be."""


class ConfigError(PenstockError):
    """A config that cannot be run, with the names of all wrong values and their ranges."""


class RunError(PenstockError):
    """A run that cannot continue: what a rank was doing, and why it stopped."""


class ProofError(RunError):
    """A plan that changes what a stage computes.

    The message says which gradient differs, by how much, and which option causes it.
    """


class StuckError(RunError):
    """A rank that has waited longer than its patience.

    The message says for what it waits, from which rank, and what that rank is doing.
    """


class PeerLostError(RunError):
    """A rank that waits for another one that has died or closed its connection."""


def refuse_first(kind: type[PenstockError], *faults: tuple[object, str]) -> None:
    """Raise the first of these faults that is there: what is true or not empty then, and the text for it."""
    for is_there, text in faults:
        if is_there:
            raise kind(text)


# ---------------------------------------------------------------- names that were meant
def nearest_name(name: str, known: Collection[str], letters: int = 3) -> str:
    """The known name that was probably meant; empty if none is near.

    A name is near if at most one in `letters` letters differs, or if it is one of the words
    of the other. A far-fetched suggestion would be worse than none.

    >>> nearest_name("hanyo", ["hanayo", "chimera"]), nearest_name("num_layers", ["layers"])
    ('hanayo', 'layers')
    >>> nearest_name("lora", ["vocab", "layers"])
    ''
    """
    given = name.casefold()
    words = _words(given)
    contained = [one for one in known if _words(one) and _words(one) <= words]
    if contained:
        return max(contained, key=len)
    distances = {one: _typing_distance(given, one.casefold()) for one in known}
    best = min(distances, key=distances.__getitem__, default="")
    if best and distances[best] <= max(len(given), len(best)) // letters:
        return best
    containing = [one for one in known if words and words <= _words(one)]
    return min(containing, key=len, default="")


def _words(name: str) -> set[str]:
    """The words of a name; single letters say too little."""
    return {word for word in re.split(r"[\W_]+", name.casefold()) if len(word) > 1}


def _typing_distance(given: str, known: str) -> int:
    """The number of letters to add, leave out, replace or swap with their neighbours.

    >>> _typing_distance("ahaed", "ahead"), _typing_distance("slot", "slots")
    (1, 1)
    """
    before: list[int] = []
    row = list(range(len(known) + 1))
    for i, sign in enumerate(given, start=1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(known, start=1):
            cost = min(before[j] + 1, row[-1] + 1, before[j - 1] + (sign != other))
            is_swap = i > 1 and j > 1 and given[i - 2 : i] == other + known[j - 2]
            row.append(min(cost, earlier[j - 2] + 1) if is_swap else cost)
    return row[-1]
