"""A lost worker does not stop the others: whenever it is lost, the rest goes on as if started with the smaller plan."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from crews import Crew, Killed, MortalComm
from penstock import Plan, make
from penstock.config import ScheduleConfig
from penstock.errors import ConfigError, PeerLostError
from penstock.formats import write_plan
from penstock.runtime.process.machine import Machine
from penstock.schedules.transforms import replicate
from penstock.train.after.report import list_events, summarize_run
from penstock.train.crew.choice import is_elastic
from penstock.train.crew.events import Event, EventLog, read_events
from penstock.train.crew.notes import Report, load_decision, load_report
from penstock.train.crew.succession import decide, parts_without_replica
from penstock.train.history import read_rows
from penstock.train.loop import Job, StepFigures
from penstock.train.placement import Placement
from trainings import SMALL, job_of, losses, train

STEPS = 4
FIGURES = StepFigures(2.5, 0.5, 100, 1.0, None, False)
TWO_COPIES = Plan(
    replicate(make("1f1b", ranks=2, microbatches=2), 2), "1f1b copies=2", (2, 2)
)


def job_with_copies(folder: Path, *changes: str) -> Job:
    """Return a run with two copies of a pipeline of two ranks, which saves every step."""
    settings = (f"run.steps={STEPS}", "run.save=1", "run.keep=99", "run.prove=false")
    job = job_of(folder, "1f1b", *settings, *changes)
    schedule = ScheduleConfig(name="1f1b", ranks=2, copies=2, microbatches=2)
    config = replace(job.config, schedule=schedule)
    return replace(job, config=config, plan=TWO_COPIES)


@pytest.fixture(scope="module")
def started_with(tmp_path_factory):
    """Return a function: the losses of an undisturbed run that has only some ranks from a step on."""
    folder = tmp_path_factory.mktemp("whole")
    whole = job_with_copies(folder)
    before = losses(train(whole))

    @cache
    def losses_of(step: int, lost: tuple[int, ...]) -> list[float]:
        reports = {n: Report(n) for n in range(4) if n not in lost}
        smaller = decide(whole.plan, reports, 1, False).plan
        other = tmp_path_factory.mktemp("smaller")
        job = replace(whole, plan=smaller, folder=other)
        if step:
            name = f"step-{step:08d}"
            kept = folder / "checkpoints" / name
            shutil.copytree(kept, other / "checkpoints" / name)
            job = replace(job, resume=True)
        return before[:step] + losses(train(job))[-STEPS + step or STEPS :]

    return losses_of


def test_whenever_a_rank_dies_the_others_go_on_like_a_run_started_without_it(
    started_with, tmp_path
):
    counts = {}

    def counting(comm):
        counts[comm.rank] = MortalComm(comm)
        return counts[comm.rank]

    crew = Crew(job_with_copies(tmp_path / "count"))
    crew.run(crew.decide(), counting)
    assert losses(read_rows(tmp_path / "count")) == started_with(STEPS, ())
    draw = random.Random(1)
    for number, victim in enumerate((0, 1, 2, 3)):
        # A checkpoint may take two barriers more or less, so the last calls may not come.
        end = draw.randint(1, counts[victim].count * 3 // 4)

        def mortal(comm, victim=victim, end=end):
            return MortalComm(comm, end if comm.rank == victim else None)

        folder = tmp_path / str(number)
        crew = Crew(job_with_copies(folder))
        crew.run(crew.decide(), mortal)
        assert victim not in crew.reports
        decision = crew.decide()
        crew.run(decision)
        rows = read_rows(folder)
        assert [row.step for row in rows] == list(range(1, STEPS + 1))
        expected = started_with(decision.step, (victim,))
        assert losses(rows) == expected, (victim, end, decision.step)
        last = folder / "checkpoints" / f"step-{STEPS:08d}" / "checkpoint.json"
        assert last.is_file()


def test_a_rank_that_missed_the_sum_of_a_step_commits_it_with_the_figures_of_the_others(
    started_with, tmp_path
):
    def prepare(trainer):
        """Let rank 0 miss the sum of step 2, and rank 3 die after it."""
        ends = {0: PeerLostError("the connection is lost"), 3: Killed()}
        measure = trainer.gradients.measure

        def measure_and_end(*words):
            sums = measure(*words)
            if trainer.step == 1 and trainer.comm.rank in ends:
                raise ends[trainer.comm.rank]
            return sums

        trainer.gradients.measure = measure_and_end

    crew = Crew(job_with_copies(tmp_path / "run"))
    crew.run(crew.decide(), prepare=prepare)
    steps = {worker: report.step for worker, report in crew.reports.items()}
    assert steps == {0: 1, 1: 2, 2: 2}
    decision = crew.decide()
    assert decision.step == 2
    crew.run(decision)
    rows = read_rows(tmp_path / "run")
    assert losses(rows) == started_with(2, (3,))


def test_a_worker_that_comes_gets_its_part_from_a_peer_and_all_go_on_with_the_whole_plan(
    started_with, tmp_path
):
    crew = Crew(job_with_copies(tmp_path))
    crew.reports = {n: Report(n) for n in (0, 2, 3)}
    crew.change_at = 2
    crew.run(crew.decide())
    assert {report.step for report in crew.reports.values()} == {2}
    shutil.rmtree(tmp_path / "checkpoints")  # Nothing is read from disk.
    crew.reports[1] = Report(1, newcomer=True)
    decision = crew.decide()
    assert decision.transfers == ((1, 3, 1),)
    assert (decision.whole, decision.close) == (True, False)
    assert load_decision(decision.dump()) == decision
    crew.run(decision)
    rows = read_rows(tmp_path)
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    before = started_with(0, (1,))[:2]
    other = tmp_path / "other"
    alone = Crew(job_with_copies(other))
    alone.reports = {n: Report(n) for n in (0, 2, 3)}
    alone.change_at = 2
    alone.run(alone.decide())
    job = replace(job_with_copies(other), resume=True)
    assert losses(rows) == before + losses(train(job))[2:]


# ---------------------------------------------------------------- decisions
def test_a_step_that_nobody_has_committed_is_done_again():
    reports = {n: Report(n, 4, FIGURES, parts=(n % 2,)) for n in (0, 1, 2)}
    decision = decide(TWO_COPIES, reports, 2, False)
    assert (decision.step, decision.keep, decision.whole) == (4, True, False)
    assert decision.members == (0, 1, 2)
    assert decision.plan.name == "1f1b copies=2 without 3"
    assert decision.plan.schedule.ranks == 3


def test_a_part_that_is_lost_with_its_only_holder_sends_all_back_to_the_checkpoint():
    reports = {n: Report(n, 4, FIGURES, parts=(0,)) for n in (0, 2)}
    decision = decide(TWO_COPIES, reports, 2, False)
    assert (decision.keep, decision.resume) == (False, True)
    assert decision.plan.schedule.parts == 2


def test_a_loss_before_the_first_step_starts_the_others_anew():
    reports = {0: Report(0, 0, parts=(0,)), 1: Report(1), 2: Report(2)}
    decision = decide(TWO_COPIES, reports, 2, resume=False)
    assert (decision.keep, decision.resume, decision.step) == (False, False, 0)


def test_an_interrupted_checkpoint_is_saved_again():
    reports = {
        n: Report(n, 4, FIGURES, saving=n == 2, parts=(n % 2,)) for n in range(3)
    }
    assert decide(TWO_COPIES, reports, 2, False).save


def test_reports_and_decisions_come_back_from_json_as_they_were():
    report = Report(3, 7, FIGURES, True, (0, 2), "rank 1 is lost")
    assert load_report(report.dump()) == report
    reports = {n: Report(n, 4, FIGURES, parts=(n % 2,)) for n in (0, 1, 3)}
    decision = decide(TWO_COPIES, reports, 9, False)
    assert load_decision(decision.dump()) == decision


# ---------------------------------------------------------------- who is elastic
def placement_on(device: str) -> Placement:
    return Placement(device, Machine(4, 0, 1), 4, 4, range(4), 1, "auto")


def test_a_run_is_elastic_by_itself_only_if_no_part_has_a_single_holder():
    alone = Plan(make("1f1b", ranks=2, microbatches=4), "1f1b")
    assert parts_without_replica(alone) == [0, 1]
    assert parts_without_replica(TWO_COPIES) == []
    assert is_elastic(SMALL, TWO_COPIES, placement_on("cpu"))
    assert not is_elastic(SMALL, alone, placement_on("cpu"))
    assert not is_elastic(SMALL, TWO_COPIES, placement_on("cuda"))
    wanted = replace(SMALL, run=replace(SMALL.run, elastic="true"))
    assert is_elastic(wanted, alone, placement_on("cpu"))
    with pytest.raises(ConfigError, match=r"run\.elastic = true, but .* GPUs"):
        is_elastic(wanted, TWO_COPIES, placement_on("cuda"))
    joined = replace(SMALL, run=replace(SMALL.run, listen="10.0.0.1:29500"))
    assert is_elastic(joined, alone, placement_on("cpu"))
    with pytest.raises(
        ConfigError, match=r"run\.listen lets workers join, but .* GPUs"
    ):
        is_elastic(joined, TWO_COPIES, placement_on("cuda"))
    nowhere = replace(SMALL, run=replace(SMALL.run, listen=":29500"))
    with pytest.raises(ConfigError, match=r"run\.listen is ':29500', but it must be"):
        is_elastic(nowhere, TWO_COPIES, placement_on("cpu"))


# ---------------------------------------------------------------- events
def test_the_report_shows_the_speed_around_each_event(tmp_path):
    train(job_of(tmp_path, "1f1b", "run.steps=4", "run.prove=false"))
    write_plan(
        Plan(make("1f1b", ranks=2, microbatches=4), "1f1b"), tmp_path / "plan.json"
    )
    log = EventLog(tmp_path, resume=False)
    log.put(Event(2, "lost", 3, 0.8, "worker 1 was killed by SIGKILL"))
    assert read_events(tmp_path)[0].workers == 3
    (line,) = list_events(summarize_run(tmp_path))
    assert line.startswith(
        "after step 2: worker 1 was killed by SIGKILL; 3 workers went on after 800 ms; "
    )
    assert line.endswith(" after")
    assert "tokens/s before" in line
    EventLog(tmp_path, resume=True)
    assert read_events(tmp_path)
    EventLog(tmp_path, resume=False)
    assert read_events(tmp_path) == []


def test_all_schedules_of_a_plan_lose_the_same_rank_and_keep_the_same_stages():
    skipping = make("skip", ranks=4, microbatches=6)
    rotated = replicate(skipping, 2)
    plan = Plan(
        rotated, "skip", (1,) * rotated.parts, rotation=(rotated,), full=rotated
    )
    for lost in ([1], [1, 5]):
        reports = {n: Report(n) for n in range(8) if n not in lost}
        smaller = load_decision(decide(plan, reports, 2, False).dump()).plan
        assert [one.ranks for one in smaller.schedules] == [8 - len(lost)] * 3
        assert len({one.stages for one in smaller.schedules}) == 1
