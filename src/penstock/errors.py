"""Everything that can go wrong by a user's hand, as one tree.

    PenstockError
    ├── ScheduleError      tables that are no schedule: every fault, drawn
    ├── ProgramError       a program that could deadlock, lose a message or read what is freed
    ├── ShapeError         a size that a schedule does not have; says the nearest one that works
    ├── UnknownNameError   a name nobody knows; says the nearest one
    ├── FileError          a file that cannot be read, with the place
    ├── ConfigError        a value of a config that nobody knows, or that is out of its range
    └── RunError           a run that cannot go on
        ├── ProofError     a plan that changes what a stage computes
        ├── StuckError     a rank that waits for longer than it should
        └── PeerLostError  a rank that waits for one that has died

Our own mistakes are `assert`s. A `PenstockError` reaches a CLI user as one message, never as a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PenstockError(Exception):
    """A mistake of the user's: the message says what is false, where, and what to do."""


class ScheduleError(PenstockError):
    """Three tables that are no schedule. `faults` holds every fault, one drawn text each."""

    def __init__(self, faults: Iterable[str], shown: int = 8) -> None:
        self.faults = tuple(faults)
        hidden = len(self.faults) - shown
        rest = [f"and {hidden} more faults"] if hidden > 0 else []
        super().__init__("\n\n".join([*self.faults[:shown], *rest]))


class ProgramError(PenstockError):
    """A lowered program that is not safe to run."""


class ShapeError(PenstockError):
    """A number of ranks, micro-batches, waves, ... that does not make sense for a schedule."""


class UnknownNameError(PenstockError):
    """A name that is not in a list of names."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        super().__init__(
            f"there is no {kind} {name!r}{hint}\nknown: {', '.join(names)}"
        )


class FileError(PenstockError):
    """A file that is cut off, too new, broken by hand, or not what it claims to be."""


class ConfigError(PenstockError):
    """A config that cannot be run: every value that is wrong, by its name, with the range or the nearest name."""


class RunError(PenstockError):
    """A run that cannot go on: what a rank was doing, and why it stopped."""


class ProofError(RunError):
    """A plan that changes what a stage computes: which gradient differs, by how much, and which option causes it."""


class StuckError(RunError):
    """A rank that has waited longer than its patience: for what, from whom, and what that one is doing."""


class PeerLostError(RunError):
    """A rank that waits for one that has died or closed its connection."""
