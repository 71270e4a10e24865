"""Penstock trains language models through a pipeline of workers, and treats the schedule as data.

The names below are loaded when they are first used. So `import penstock` takes no time, and the command line can take
care of Ctrl-C before anything else is imported.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from penstock.cost import (
        Cost,
        ModelCost,
        Network,
        PartCost,
        Profile,
        ProfileCost,
        Seconds,
        UnitCost,
    )
    from penstock.errors import PenstockError
    from penstock.formats import read_plan, read_profile, write_plan
    from penstock.ir import (
        Action,
        MicroBatch,
        Op,
        Plan,
        Program,
        Schedule,
        Span,
        Stage,
        Timeline,
        check,
        lower,
        needs,
        verify,
    )
    from penstock.plan import lower_bound, portfolio
    from penstock.schedules import REGISTRY, make
    from penstock.sim import simulate

__all__ = [
    "REGISTRY",
    "Action",
    "Cost",
    "MicroBatch",
    "ModelCost",
    "Network",
    "Op",
    "PartCost",
    "PenstockError",
    "Plan",
    "Profile",
    "ProfileCost",
    "Program",
    "Schedule",
    "Seconds",
    "Span",
    "Stage",
    "Timeline",
    "UnitCost",
    "check",
    "lower",
    "lower_bound",
    "make",
    "needs",
    "portfolio",
    "read_plan",
    "read_profile",
    "simulate",
    "verify",
    "write_plan",
]


_ROOMS = ("cost", "formats", "ir", "plan", "schedules", "sim", "errors", "partition")


def __getattr__(name: str) -> object:
    """Loads a public name, or one of the rooms that need no torch, when it is first used."""
    from importlib import import_module  # noqa: PLC0415

    if name in _ROOMS:
        return import_module(f"penstock.{name}")
    if name in __all__:
        for room in _ROOMS:
            found = import_module(f"penstock.{room}")
            if hasattr(found, name):
                globals()[name] = getattr(found, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, also those not yet loaded."""
    return sorted({*globals(), *__all__})
