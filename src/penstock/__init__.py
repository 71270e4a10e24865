"""Penstock trains language models through a pipeline of workers, and treats the schedule as data.

Names are loaded when they are first used. So `import penstock` takes no time, and the command
line can handle Ctrl-C before it imports anything else.
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
    from penstock.pipeline import Pipeline
    from penstock.plan import lower_bound, portfolio
    from penstock.schedules import REGISTRY, make
    from penstock.sim import simulate
    from penstock.training import fit

    __version__: str

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
    "Pipeline",
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
    "fit",
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


_NEED_TORCH = {"Pipeline": "penstock.pipeline", "fit": "penstock.training"}
_ROOMS = ("cost", "formats", "ir", "plan", "schedules", "sim", "errors", "partition")


def __getattr__(name: str) -> object:
    """Load a public name, or one of the packages that do not need torch, on first use."""
    from importlib import import_module  # noqa: PLC0415

    if name == "__version__":
        return import_module("penstock.version").read_version()
    if name in _NEED_TORCH:
        try:
            return getattr(import_module(_NEED_TORCH[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            text = f"penstock.{name} needs torch, which is not installed: pip install 'penstock[torch]'"
            raise ModuleNotFoundError(text, name="torch") from None
    if name in _ROOMS:
        return import_module(f"penstock.{name}")
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f"penstock.{room}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, including those that are not loaded yet."""
    return sorted({*globals(), *__all__, "__version__"})
