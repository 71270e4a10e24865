"""What a worker and the launcher write to each other through the store: plain JSON, nothing pickled.

crew/alive/3        how often worker 3 has shown that it lives
crew/report/1/3     worker 3 has left generation 1: its last step, its parts, and what it saw
crew/left/1         somebody has left generation 1
crew/broken/1       generation 1 has lost a worker
crew/decision/2     who is in generation 2, with which plan, and from which step it goes on
crew/ready/2        generation 2 trains
crew/arrival/1      worker 1 has come and waits for a place
crew/change/2       all should leave generation 2 after their step, because somebody has come
crew/place/1        worker 1 is in generation 3
crew/worked/2/5     seconds that each rank of generation 2 has worked in its sixth window of steps
crew/finished       the run is over
crew/launch         a name that this launcher alone has
g2/...              the connections of generation 2
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.formats.plan_json import dump_plan, load_plan
from penstock.ir.plan import Plan
from penstock.train.crew.handover import Handover, PartTransfer, Transfers
from penstock.train.step_figures import StepFigures

FINISHED = "crew/finished"
LAUNCH = "crew/launch"


def alive_key(worker: int) -> str:
    """The key under which a worker shows that it lives."""
    return f"crew/alive/{worker}"


def report_key(generation: int, worker: int) -> str:
    """The key of a worker's report at the end of a generation."""
    return f"crew/report/{generation}/{worker}"


def left_key(generation: int) -> str:
    """The key that exists once a worker has left a generation, and reported."""
    return f"crew/left/{generation}"


def broken_key(generation: int) -> str:
    """The key that exists once a generation has lost a worker."""
    return f"crew/broken/{generation}"


def decision_key(generation: int) -> str:
    """The key of the decision that begins a generation."""
    return f"crew/decision/{generation}"


def ready_key(generation: int) -> str:
    """The key that exists once a generation trains."""
    return f"crew/ready/{generation}"


def arrival_key(worker: int) -> str:
    """The key under which a worker that comes during the run reports."""
    return f"crew/arrival/{worker}"


def change_key(generation: int) -> str:
    """The key that exists once a generation should end after its step."""
    return f"crew/change/{generation}"


def place_key(worker: int) -> str:
    """The key of the first generation of a worker that has come during the run."""
    return f"crew/place/{worker}"


def worked_key(generation: int, window: int) -> str:
    """The key of the seconds that ranks have worked in a window of steps."""
    return f"crew/worked/{generation}/{window}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker has when it leaves a generation, or when it comes."""

    worker: int
    step: int = -1  # the last step that it has done; -1 if it has no weights yet
    figures: StepFigures | None = None  # of that step
    saving: bool = False  # whether a checkpoint was being written
    parts: tuple[int, ...] = ()  # that it holds
    error: str = ""  # why it left the generation; empty if others have come
    seen: int = 0  # sequences of its steps, and of earlier runs
    closed: bool = True  # whether its last step was evaluated and written down
    newcomer: bool = False  # whether it has come during the run
    mirrors: tuple[int, ...] = ()  # other parts whose weights of that step it has
    idle: float = 0.0  # seconds since its last step was done

    @property
    def known_parts(self) -> tuple[int, ...]:
        """The parts whose weights of the last step it has."""
        return (*self.parts, *self.mirrors)

    def dump(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


def load_report(text: str | bytes) -> Report:
    """Read a report from JSON."""
    fields: dict[str, Any] = json.loads(text)
    report = Report(**fields)
    return replace(
        report,
        figures=_figures(fields["figures"]),
        parts=tuple(fields["parts"]),
        mirrors=tuple(fields["mirrors"]),
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """What a generation does; all its workers read the same."""

    generation: int
    members: tuple[int, ...]  # the worker of each rank
    plan: Plan
    step: int = 0  # steps done
    figures: StepFigures | None = None  # of the last of them
    keep: bool = True  # whether workers keep the weights that they have
    resume: bool = False  # if not: whether they read the newest checkpoint
    save: bool = False  # whether to save at once
    whole: bool = True  # whether the plan is the run's own
    seen: int = 0  # sequences of the steps that are done, and of earlier runs
    close: bool = False  # whether the last step must still be evaluated or written down
    transfers: tuple[PartTransfer, ...] = ()  # parts that ranks get from others
    # Parts with their rank and that of their mirror.
    mirrors: tuple[PartTransfer, ...] = ()
    # Ranks with a part that they read from the checkpoint of this step.
    restores: tuple[tuple[int, int], ...] = ()
    leader: int = 0  # the rank that writes the files of the run
    seats: tuple[int, ...] = ()  # the ranks of its members in the plan for all

    @property
    def seat_of(self) -> dict[int, int]:
        """The seat of each worker."""
        return dict(zip(self.members, self.seats, strict=True))

    @property
    def handover(self) -> Handover | None:
        """What the trainers of this generation go on with; None if they start from the beginning."""
        if not self.keep:
            return None
        figures = self.figures if self.close else None
        transfers = Transfers(self.transfers)
        return Handover(
            self.step, self.seen, figures, transfers, self.save, self.restores
        )

    def dump(self) -> str:
        """Return it as JSON."""
        shown = replace(self, plan=None)  # type: ignore[arg-type]
        return json.dumps({**asdict(shown), "plan": dump_plan(self.plan)})


def load_decision(text: str | bytes) -> Decision:
    """Read a decision from JSON."""
    fields: dict[str, Any] = json.loads(text)
    fields["plan"] = load_plan(fields["plan"])
    fields["members"] = tuple(fields["members"])
    fields["seats"] = tuple(fields["seats"])
    for name in ("transfers", "mirrors"):
        fields[name] = tuple(PartTransfer(*words) for words in fields[name])
    fields["restores"] = tuple((rank, part) for rank, part in fields["restores"])
    fields["figures"] = _figures(fields["figures"])
    return Decision(**fields)


def _figures(fields: dict[str, Any] | None) -> StepFigures | None:
    return None if fields is None else StepFigures(**fields)
