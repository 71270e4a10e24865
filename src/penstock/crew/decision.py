"""Decides how a run goes on with the workers that are left, from what each of them reports through the store.

    worker 0   step 41                      It has the sums of step 41, so everybody's gradients were
    worker 2   step 40, gradients of 41     complete: worker 2 commits step 41 with worker 0's figures.
    worker 3   step 41
               ─► all go on from step 41; step 42 was in flight, and is done again

    worker 0   step 40                      Nobody has the sums of step 41, so nobody has changed its
    worker 2   step 40                      weights: step 41 is done again.

Ranks can never be further apart than that, because every step ends with one sum over all of them.

What a worker and the launcher write to each other is plain JSON; nothing is pickled:

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from penstock.formats.plan_json import dump_plan, load_plan
from penstock.ir.plan import Plan
from penstock.plan.survivors import (
    LEAST_SAVED_BY_A_MOVE,
    moves_to_empty_ranks,
    orphans,
)
from penstock.schedules.coverage import hold_every_part
from penstock.torch_internals import Store
from penstock.train.elastic import (
    PartTransfer,
    choose_mirrors,
    plan_without,
    step_length,
)
from penstock.train.history import StepFigures
from penstock.train.rank_weights import Handover

NoteKind = Literal[
    "alive",
    "report",
    "left",
    "broken",
    "decision",
    "ready",
    "arrival",
    "change",
    "place",
    "worked",
    "finished",
    "launch",
]


def note_key(kind: NoteKind, *numbers: int) -> str:
    """Return the key of an entry of the store, such as crew/report/1/3; this file's docstring lists them."""
    return "/".join(["crew", kind, *map(str, numbers)])


def has_note(store: Store, kind: NoteKind, *numbers: int) -> bool:
    """Whether an entry of the store has been written."""
    return bool(store.check([note_key(kind, *numbers)]))


def read_note(store: Store, kind: NoteKind, *numbers: int) -> str:
    """Read an entry of the store."""
    return store.get(note_key(kind, *numbers)).decode()


def write_note(store: Store, text: str, kind: NoteKind, *numbers: int) -> None:
    """Write an entry of the store."""
    store.set(note_key(kind, *numbers), text)


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
    for name in ("parts", "mirrors"):
        fields[name] = tuple(fields[name])
    fields["figures"] = _figures(fields["figures"])
    return Report(**fields)


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
        return Handover(
            self.step, self.seen, figures, self.transfers, self.save, self.restores
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


@dataclass(frozen=True, slots=True)
class Situation:
    """What the launcher knows when a generation has ended, by the reports of the workers that are left."""

    plan: Plan  # for all ranks
    reports: Mapping[int, Report]
    generation: int  # that begins
    resume: bool = False  # whether the run was started from a checkpoint
    # Whether parts that only one rank holds have a mirror on another one.
    mirror: bool = False
    # The step of the newest checkpoint without damage, or -1.
    saved: Callable[[], int] = lambda: -1
    # Workers that are slow, and how many times as long as before they take.
    paces: Mapping[int, float] = field(default_factory=dict)
    # The last step that is written down. A worker that is lost right after its step may have been the one to do so.
    written: Callable[[], int] | None = None
    # The seats of workers in the generation before.
    seats: Mapping[int, int] = field(default_factory=dict)
    # Whether workers may change their seats, because nobody comes for those that are empty.
    moving: bool = False

    def seated(self) -> dict[int, int]:
        """The worker on each seat that is taken, in the order of the seats.

        A worker keeps its seat. Newcomers get the seats with their numbers, or others if these are taken.
        """
        seats = self.seats
        workers = sorted(self.reports)
        seated = {seats[worker]: worker for worker in workers if worker in seats}
        for worker in workers:
            if worker not in seats:
                free = [n for n in range(self.plan.schedule.ranks) if n not in seated]
                seated[worker if worker in free else free[0]] = worker
        return dict(sorted(seated.items()))

    def moved(self, seated: Mapping[int, int]) -> dict[int, int]:
        """The worker on each seat after the moves that promise to pay."""
        moved = dict(seated)
        empty = [n for n in range(self.plan.schedule.ranks) if n not in seated]
        for seat, goal in moves_to_empty_ranks(self.plan, empty).items():
            moved[goal] = moved.pop(seat)
        return dict(sorted(moved.items()))

    def plan_for(self, seated: Mapping[int, int]) -> Plan:
        """The plan for the seats that are taken."""
        lost = tuple(n for n in range(self.plan.schedule.ranks) if n not in seated)
        paces = self.paces
        slow = {seat: paces[one] for seat, one in seated.items() if one in paces}
        return plan_without(self.plan, lost, self._homes(lost, seated), slow)

    def _homes(
        self, lost: tuple[int, ...], seated: Mapping[int, int]
    ) -> dict[int, int]:
        """The seats of workers that have orphaned parts already: adopted before, or as a mirror."""
        homes = {}
        seats = {worker: seat for seat, worker in seated.items()}
        reports = [self.reports[worker] for worker in seats]
        for part in orphans(self.plan.schedule, lost):
            holders = holders_among(reports, part)
            if holders:
                homes[part] = seats[holders[0]]
        return homes

    def length(self, plan: Plan, seated: Mapping[int, int]) -> float:
        """How long a step of a plan takes with these workers."""
        paces = [self.paces.get(worker, 1.0) for worker in seated.values()]
        return step_length(plan, paces)


def decide(now: Situation) -> Decision:
    """Return how the workers that have reported go on."""
    reports = now.reports
    seated = now.seated()
    smaller = now.plan_for(seated)
    moved = now.moved(seated) if now.moving else seated
    if moved != seated:
        other = now.plan_for(moved)
        least = (1 - LEAST_SAVED_BY_A_MOVE) * now.length(smaller, seated)
        if now.length(other, moved) <= least:
            seated, smaller = moved, other
    members = tuple(seated.values())
    schedule = hold_every_part(smaller.schedule)
    # Newcomers have no weights, and neither have those that were taken in by a generation
    # that ended before it had begun.
    veterans = [reports[n] for n in members if reports[n].step >= 0]
    known = [reports[worker].known_parts for worker in members]
    mirrors = choose_mirrors(schedule, known) if now.mirror else ()
    plain = Decision(
        now.generation,
        members,
        smaller,
        keep=False,
        resume=now.resume,
        whole=smaller is now.plan,
        mirrors=mirrors,
        seats=tuple(seated),
    )
    if max((report.step for report in veterans), default=0) == 0:
        return plain  # Nobody has done a step.
    ahead = max(veterans, key=lambda report: report.step)
    steps = {report.step for report in veterans}
    assert steps <= {ahead.step, ahead.step - 1}, f"ranks are at steps {sorted(steps)}"
    restores: dict[int, int] = {}  # from a part to the rank that reads it
    transfers = []
    # Parts for which a rank has no weights: first those to train, then mirrors.
    held = sorted({(stage.rank, stage.part) for stage in schedule.stages})
    mirrored = [(target, part) for part, _, target in mirrors]
    for rank, part in [*held, *mirrored]:
        if part in known[rank]:
            continue
        holders = holders_among(veterans, part)
        if not holders:
            restores.setdefault(part, rank)
        source = members.index(holders[0]) if holders else restores[part]
        if source != rank:
            transfers.append(PartTransfer(part, source, rank))
    if restores and now.saved() != ahead.step:
        return replace(plain, resume=True)
    save = any(report.saving for report in veterans)
    closed = len(steps) == 1 and all(report.closed for report in veterans)
    if now.written is not None and now.written() < ahead.step:
        closed = False
    return replace(
        plain,
        step=ahead.step,
        figures=ahead.figures,
        keep=True,
        save=save,
        seen=ahead.seen,
        close=save or not closed,
        transfers=tuple(transfers),
        restores=tuple((rank, part) for part, rank in sorted(restores.items())),
    )


def holders_among(reports: Sequence[Report], part: int) -> list[int]:
    """The workers that have a part, and after them those that have only its mirror."""
    holders = [one.worker for one in reports if part in one.parts]
    return holders + [one.worker for one in reports if part in one.mirrors]
