"""A lost worker does not stop the others: whenever it is lost, the rest goes on as if started with the smaller plan."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from crews import Crew, Killed, MortalComm, let_die_in_handover
from penstock import Plan, make
from penstock.config import ElasticConfig
from penstock.crew import member as member_module
from penstock.crew.decision import Report, Situation, decide, load_decision, load_report
from penstock.crew.member import report_of
from penstock.errors import ConfigError, PeerLostError
from penstock.formats import write_plan
from penstock.ir.sums import SumKind, SumPlan
from penstock.plan.survivors import without_ranks
from penstock.runtime import run_threads
from penstock.runtime.process.machine import Machine
from penstock.schedules.skip import skipping_schedules
from penstock.schedules.transforms import replicate
from penstock.train import loop as loop_module
from penstock.train.after.report import list_events, render_report, summarize_run
from penstock.train.checkpoints.checkpoint import step_name
from penstock.train.elastic import is_elastic
from penstock.train.history import (
    Event,
    EventLog,
    StepFigures,
    last_step,
    read_events,
    read_rows,
)
from penstock.train.job import Job
from penstock.train.loop import Trainer
from penstock.train.placement import Placement
from penstock.train.rank_weights import pack_gradients, unpack_gradients
from trainings import SMALL, job_of, losses, train

STEPS = 4
FIGURES = StepFigures(2.5, 0.5, 100, 1.0, None, False)
TWO_COPIES = Plan(
    replicate(make("1f1b", ranks=2, microbatches=2), 2), "1f1b copies=2", (2, 2)
)


THREE_COPIES = Plan(
    replicate(make("1f1b", ranks=2, microbatches=2), 3),
    "1f1b copies=3",
    (2, 2),
    sums=(
        SumPlan((0,), SumKind.DIRECT, (0, 2, 4), (0.6, 0.3, 0.1)),
        SumPlan((1,), SumKind.TWO_LEVELS, (1, 3, 5), groups=((1, 3), (5,)), whole=True),
    ),
)
ALONE = Plan(make("1f1b", ranks=3, microbatches=4), "1f1b", (2, 1, 1))


def job_with(plan: Plan, folder: Path, *changes: str) -> Job:
    """Return a run with this plan, which saves every step."""
    settings = (
        f"run.steps={STEPS}",
        "run.save_every=1",
        "run.keep_checkpoints=99",
        "run.checks=forecast,memory",
    )
    job = job_of(folder, "1f1b", *settings, *changes)
    schedule = replace(
        job.config.schedule, microbatches=len(plan.schedule.microbatches)
    )
    return replace(job, config=replace(job.config, schedule=schedule), plan=plan)


def job_with_copies(folder: Path, *changes: str) -> Job:
    """Return a run with two copies of a pipeline of two ranks, which saves every step."""
    return job_with(TWO_COPIES, folder, *changes)


@pytest.fixture(scope="module")
def started_with(tmp_path_factory):
    """Return a function: the losses of an undisturbed run that has only some ranks from a step on."""

    @cache
    def whole_run(plan: Plan, changes: tuple[str, ...]) -> tuple[Job, list[float]]:
        whole = job_with(plan, tmp_path_factory.mktemp("whole"), *changes)
        return whole, losses(train(whole))

    @cache
    def losses_of(
        step: int, lost: tuple[int, ...], plan: Plan = TWO_COPIES, *changes: str
    ) -> list[float]:
        whole, before = whole_run(plan, changes)
        if not lost:
            return before
        workers = range(plan.schedule.ranks)
        reports = {n: Report(n) for n in workers if n not in lost}
        smaller = decide(Situation(plan, reports, 1, False)).plan
        other = tmp_path_factory.mktemp("smaller")
        job = replace(whole, plan=smaller, folder=other)
        if step:
            kept = whole.checkpoints / step_name(step)
            shutil.copytree(kept, job.checkpoints / kept.name)
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
    for number, victim in enumerate((0, 3)):
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


def test_planned_sums_are_planned_again_when_a_rank_is_lost(started_with, tmp_path):
    changes = ("data.global_batch=12", "run.accumulate=2")
    crew = Crew(job_with(THREE_COPIES, tmp_path, *changes))
    crew.run(
        crew.decide(), lambda comm: MortalComm(comm, 40 if comm.rank == 2 else None)
    )
    assert 2 not in crew.reports
    decision = crew.decide()
    assert 0 < decision.step < STEPS
    direct, groups = decision.plan.sums
    assert direct.ranks == (0, 3)
    assert direct.shares == pytest.approx((6 / 7, 1 / 7))
    assert groups.groups == ((1, 2), (4,))
    crew.run(decision)
    rows = losses(read_rows(tmp_path))
    assert rows == started_with(decision.step, (2,), THREE_COPIES, *changes)


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


def test_a_step_that_the_leader_could_not_write_down_is_written_by_the_next_leader(
    started_with, tmp_path
):
    def prepare(trainer):
        """Let rank 0 die in step 3, when the others have closed it."""
        close = trainer.close_step

        def end(history):
            if trainer.step == 3:
                raise Killed
            return close(history)

        if trainer.comm.rank == 0:
            trainer.close_step = end

    crew = Crew(job_with_copies(tmp_path, "run.save_every=0"))
    crew.run(crew.decide(), prepare=prepare)
    assert last_step(tmp_path) == 2
    assert all(report.step == 3 for report in crew.reports.values())
    assert all(report.closed for report in crew.reports.values())
    decision = crew.decide()
    assert decision.step == 3
    crew.run(decision)
    rows = read_rows(tmp_path)
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert losses(rows) == started_with(3, (0,))


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


# ---------------------------------------------------------------- parts with one holder
@pytest.mark.parametrize("committed", [False, True])
def test_a_part_that_is_lost_with_its_only_holder_comes_back_from_its_mirror(
    committed, started_with, tmp_path
):
    def prepare(trainer):
        """Let rank 1 die in step 3, before or after the sum over all ranks."""
        before_sum, after_sum = trainer.weights.mirrors.collect, trainer.commit

        def end_before_sum():
            before_sum()
            if not committed and trainer.step == 2:
                raise Killed

        def end_after_sum(*words):
            if committed and trainer.step == 2:
                raise Killed
            after_sum(*words)

        if trainer.comm.rank == 1:
            trainer.weights.mirrors.collect, trainer.commit = (
                end_before_sum,
                end_after_sum,
            )

    crew = Crew(job_with(ALONE, tmp_path, "run.save_every=0"))
    decision = crew.decide()
    assert decision.mirrors == ((0, 0, 1), (1, 1, 2), (2, 2, 0))
    crew.run(decision, prepare=prepare)
    decision = crew.decide()
    assert (decision.keep, decision.step) == (True, 3 if committed else 2)
    assert decision.transfers == ((0, 0, 1), (1, 1, 0))  # the new mirrors
    assert load_decision(decision.dump()) == decision
    crew.run(decision)
    rows = read_rows(tmp_path)
    # The same places, without mirrors, and from a checkpoint.
    expected = started_with(decision.step, (1,), ALONE)
    assert losses(rows) == expected
    assert rows[0].mirror_bytes > 4 * 1000
    assert rows[0].mirror_seconds > 0


def test_a_lost_part_alone_is_read_from_a_checkpoint_of_the_same_step(
    started_with, tmp_path
):
    crew = Crew(job_with(ALONE, tmp_path), mirror=False)
    crew.change_at = 2
    crew.run(crew.decide())
    del crew.reports[1]
    decision = crew.decide()
    (restore,) = decision.restores
    assert (decision.keep, decision.step, restore[1]) == (True, 2, 1)
    assert load_decision(decision.dump()) == decision
    crew.change_at = 0
    crew.run(decision)
    assert losses(read_rows(tmp_path)) == started_with(2, (1,), ALONE)
    damaged = next((crew.job.checkpoints / step_name(STEPS)).glob("*.safetensors"))
    damaged.write_bytes(b"")
    del crew.reports[0]
    assert not crew.decide().keep


# ---------------------------------------------------------------- a loss while others take over
def test_a_newcomer_makes_a_mirror_superfluous_only_once_it_has_the_part(tmp_path):
    # Part 1 has no layers, so that few messages carry it.
    plan = replace(TWO_COPIES, partition=(4, 0))
    quiet = losses(train(job_with(plan, tmp_path / "quiet", "run.save_every=0")))
    crew = Crew(job_with(plan, tmp_path / "run", "run.save_every=0"))
    crew.reports = {n: Report(n) for n in (0, 2, 3)}
    crew.change_at = 2
    crew.run(crew.decide())
    mirrors = {n: crew.reports[n].mirrors for n in (0, 2, 3)}
    assert mirrors == {0: (1,), 2: (), 3: ()}
    crew.reports[1] = Report(1, newcomer=True)
    decision = crew.decide()
    assert decision.transfers == ((1, 3, 1),)
    assert decision.mirrors == ()
    deaths = Counter()
    for worker, _ in let_die_in_handover(crew, decision):
        after = crew.decide()
        assert (after.keep, after.step) == (True, 2), (worker, deaths[worker])
        assert not after.restores
        deaths[worker] += 1
    # Worker 3 sends eight tensors, and worker 1 is asked before and after each.
    assert deaths[3] >= deaths[0] + 8
    assert deaths[1] >= deaths[0] + 16
    crew.change_at = 0
    crew.run(after)
    rows = read_rows(tmp_path / "run")
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert losses(rows) == pytest.approx(quiet, rel=1e-5)


def test_no_part_is_lost_in_a_handover_while_somebody_has_it(tmp_path):
    plan = replace(ALONE, partition=(0, 4, 0))
    quiet = losses(train(job_with(plan, tmp_path / "quiet", "run.save_every=0")))
    crew = Crew(job_with(plan, tmp_path / "run", "run.save_every=0"))
    crew.change_at = 2
    crew.run(crew.decide())
    del crew.reports[0]
    decision = crew.decide()
    # Worker 1 had the mirror of part 0. Now it holds it alone, as worker 2 holds part 2.
    assert decision.members == (1, 2)
    assert decision.transfers == ((0, 0, 1), (2, 1, 0))
    tensors = {
        1: 4,
        2: 8,
    }  # of these two parts: one and two parameters, with AdamW's state
    kept = None
    for worker, comm in let_die_in_handover(crew, decision):
        ends = {1: (0, 1), 2: (1, 0)}[worker]
        sent = comm.others.sent[ends]
        after = crew.decide()
        assert after.keep == (sent >= tensors[worker]), (worker, sent)
        if after.keep:
            assert after.step == 2
            kept = after
    assert kept is not None
    crew.change_at = 0
    crew.run(kept)
    rows = read_rows(tmp_path / "run")
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert losses(rows) == pytest.approx(quiet, rel=1e-5)


ROTATED = Plan(
    skipping_schedules(ranks=3, microbatches=4, skips=1, seed=1)[0],
    "skip",
    (2, 1, 1, 0),
    rotation=tuple(
        skipping_schedules(ranks=3, microbatches=4, skips=1, count=3, seed=1)[1:]
    ),
)


def test_a_run_with_rotating_paths_and_full_steps_survives_the_loss_of_two_parts(
    started_with, tmp_path
):
    victim = 0  # It holds the first part and the head.
    full = "schedule.name=skip:full=3"
    crew = Crew(job_with(ROTATED, tmp_path, "run.save_every=0", full))

    def prepare(trainer):
        """Let a rank die in the third step, which runs all parts."""
        measure = trainer.gradients.measure

        def end(*words):
            if trainer.comm.rank == victim and trainer.step == 2:
                raise Killed
            return measure(*words)

        trainer.gradients.measure = end

    crew.run(crew.decide(), prepare=prepare)
    decision = crew.decide()
    assert (decision.keep, decision.step) == (True, 2)
    stages = {one.stages for one in decision.plan.schedules}
    assert len(stages) == 1
    crew.run(decision)
    rows = read_rows(tmp_path)
    assert losses(rows) == started_with(2, (victim,), ROTATED, full)
    # Steps leave out parts of other micro-batches; the third one leaves out none.
    assert [row.layers for row in rows] == [3.0, 3.0, 4.0, 3.0]


# Workers 0 and 1 hold part 0; workers 2 and 3 hold the others alone.
UNEVEN = Plan(
    without_ranks(replicate(make("1f1b", ranks=3, microbatches=2), 2), [4, 5]),
    "uneven",
    (2, 1, 1),
)


def test_a_run_survives_ten_losses_at_random_moments_and_as_many_joins(tmp_path):
    steps = 12
    words = (f"run.steps={steps}", "run.save_every=0")
    quiet = losses(train(job_with(UNEVEN, tmp_path / "quiet", *words)))
    crew = Crew(job_with(UNEVEN, tmp_path / "run", *words))
    draw = random.Random(3)
    kills = 0
    while len(read_rows(tmp_path / "run")) < steps:
        for worker in {0, 1, 2, 3} - crew.reports.keys():
            if draw.random() < 0.7:
                crew.reports[worker] = Report(worker, newcomer=True)
        decision = crew.decide()
        victim = draw.choice(decision.members) if kills < 10 else -1
        end = draw.randint(1, 60)

        def mortal(comm, members=decision.members, victim=victim, end=end):
            dies = members[comm.rank] == victim
            return MortalComm(comm, end if dies else None)

        crew.run(decision, mortal)
        kills += victim >= 0 and victim not in crew.reports
    rows = read_rows(tmp_path / "run")
    assert [row.step for row in rows] == list(range(1, steps + 1))
    assert losses(rows) == pytest.approx(quiet, rel=1e-5)
    assert kills >= 10


def test_a_worker_moves_to_a_part_with_too_few_and_the_next_one_takes_its_seat(
    started_with, tmp_path
):
    # The first part has twice the work of the second one.
    plan = replace(TWO_COPIES, partition=(3, 1))
    crew = Crew(job_with(plan, tmp_path, "run.save_every=0"))
    crew.moving = True
    crew.change_at = 2
    crew.run(crew.decide())
    del crew.reports[0]
    decision = crew.decide()
    assert decision.seat_of == {1: 1, 2: 2, 3: 0}
    assert decision.transfers == ((0, 2, 0),)
    assert load_decision(decision.dump()) == decision
    crew.change_at = 3
    crew.run(decision)
    crew.reports[0] = Report(0, newcomer=True)
    decision = crew.decide()
    assert decision.seat_of == {0: 3, 1: 1, 2: 2, 3: 0}
    assert (decision.whole, decision.transfers) == (True, ((1, 1, 3),))
    crew.change_at = 0
    crew.run(decision)
    rows = read_rows(tmp_path)
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    # An empty second seat in the second copy is what a run without worker 3 has.
    assert losses(rows)[:3] == started_with(2, (3,), plan)[:3]
    assert losses(rows) == pytest.approx(started_with(STEPS, (), plan), rel=1e-5)


# ---------------------------------------------------------------- decisions
def test_a_step_that_nobody_has_committed_is_done_again():
    reports = {n: Report(n, 4, FIGURES, parts=(n % 2,)) for n in (0, 1, 2)}
    decision = decide(Situation(TWO_COPIES, reports, 2, False))
    assert (decision.step, decision.keep, decision.whole) == (4, True, False)
    assert decision.members == (0, 1, 2)
    assert decision.plan.name == "1f1b copies=2 without 3"
    assert decision.plan.schedule.ranks == 3


@pytest.mark.parametrize("saved", [-1, 3])
def test_a_part_that_is_lost_with_its_only_holder_sends_all_back_to_the_checkpoint(
    saved,
):
    reports = {n: Report(n, 4, FIGURES, parts=(0,)) for n in (0, 2)}
    decision = decide(Situation(TWO_COPIES, reports, 2, False, saved=lambda: saved))
    assert (decision.keep, decision.resume) == (False, True)
    assert decision.plan.schedule.parts == 2


def test_a_loss_before_the_first_step_starts_the_others_anew():
    reports = {0: Report(0, 0, parts=(0,)), 1: Report(1), 2: Report(2)}
    decision = decide(Situation(TWO_COPIES, reports, 2, resume=False))
    assert (decision.keep, decision.resume, decision.step) == (False, False, 0)


def test_a_loss_while_a_newcomer_is_taken_in_costs_no_step():
    reports = {n: Report(n, 4, FIGURES, parts=(n % 2,)) for n in (1, 2)}
    reports[3] = Report(3)  # It was taken in, but has not begun.
    decision = decide(Situation(TWO_COPIES, reports, 4, False))
    assert (decision.keep, decision.step) == (True, 4)
    assert decision.transfers == ((1, 0, 2),)


def test_an_interrupted_checkpoint_is_saved_again():
    reports = {
        n: Report(n, 4, FIGURES, saving=n == 2, parts=(n % 2,)) for n in range(3)
    }
    decision = decide(Situation(TWO_COPIES, reports, 2, False))
    assert (decision.save, decision.handover.figures) == (True, FIGURES)


@pytest.mark.parametrize("late", [None, 2])
def test_a_step_is_closed_again_if_one_worker_has_not_done_so(late):
    reports = {
        n: Report(n, 4, FIGURES, parts=(n % 2,), closed=n != late) for n in range(3)
    }
    decision = decide(Situation(TWO_COPIES, reports, 2, False))
    assert decision.close == (late is not None)


def test_reports_and_decisions_come_back_from_json_as_they_were():
    report = Report(3, 7, FIGURES, True, (0, 2), "rank 1 is lost")
    assert load_report(report.dump()) == report
    reports = {n: Report(n, 4, FIGURES, parts=(n % 2,)) for n in (0, 1, 3)}
    decision = decide(Situation(TWO_COPIES, reports, 9, False))
    assert load_decision(decision.dump()) == decision


def test_a_worker_reports_how_long_ago_its_last_step_was_done(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 70.0, perf_counter=time.perf_counter)
    monkeypatch.setattr(loop_module, "time", clock)

    def work(comm):
        trainer = Trainer(job_of(tmp_path, "1f1b", "run.steps=1"), comm)
        comm.barrier()
        clock.monotonic = lambda: 85.0
        trainer.run()
        return trainer

    trainer, _ = run_threads(2, work)
    now = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(member_module, "time", now)
    assert report_of(0, trainer).idle == 15.0


def test_a_mirror_has_no_gradient_where_its_part_has_none():
    ours, theirs = ([nn.Parameter(torch.ones(2)) for _ in range(2)] for _ in range(2))
    ours[1].grad = torch.full((2,), 3.0)
    unpack_gradients(pack_gradients(ours), theirs)
    assert theirs[0].grad is None
    assert torch.equal(theirs[1].grad, ours[1].grad)


# ---------------------------------------------------------------- who is elastic
def placement_on(device: str) -> Placement:
    return Placement(device, Machine(4, 0, 1), 4, 4, range(4), 1, "auto")


def test_a_run_is_elastic_by_itself_only_if_no_part_has_a_single_holder():
    alone = Plan(make("1f1b", ranks=2, microbatches=4), "1f1b")
    assert is_elastic(SMALL, TWO_COPIES, placement_on("cpu"))
    assert not is_elastic(SMALL, alone, placement_on("cpu"))
    assert not is_elastic(SMALL, TWO_COPIES, placement_on("cuda"))
    wanted = replace(SMALL, elastic=ElasticConfig(mode="on"))
    assert is_elastic(wanted, alone, placement_on("cpu"))
    with pytest.raises(ConfigError, match=r"elastic\.mode = on, but .* GPUs"):
        is_elastic(wanted, TWO_COPIES, placement_on("cuda"))
    testbed = replace(placement_on("cuda"), machine=Machine(4, 1, 4))
    with pytest.raises(ConfigError, match=r"elastic\.mode = on, but .* through MPS"):
        is_elastic(wanted, TWO_COPIES, testbed)
    joined = replace(SMALL, elastic=ElasticConfig(listen="10.0.0.1:29500"))
    assert is_elastic(joined, alone, placement_on("cpu"))
    with pytest.raises(
        ConfigError, match=r"elastic\.listen lets workers join, but .* GPUs"
    ):
        is_elastic(joined, TWO_COPIES, placement_on("cuda"))
    nowhere = replace(SMALL, elastic=ElasticConfig(listen=":29500"))
    with pytest.raises(
        ConfigError, match=r"elastic\.listen is ':29500', but it must be"
    ):
        is_elastic(nowhere, TWO_COPIES, placement_on("cpu"))


# ---------------------------------------------------------------- events
def test_the_report_shows_the_speed_around_each_event(tmp_path):
    train(job_of(tmp_path, "1f1b", "run.steps=4", "run.checks=forecast,memory"))
    plan = Plan(make("1f1b", ranks=2, microbatches=4), "1f1b", (2, 2))
    write_plan(plan, tmp_path / "plan.json")
    log = EventLog(tmp_path, resume=False)
    event = Event(
        2, "lost", 0.8, "worker 1 was killed by SIGKILL", (0, 2, 3), 0.5, 0.6, 7
    )
    log.put(event)
    assert read_events(tmp_path) == [event]
    (line,) = list_events(summarize_run(tmp_path))
    assert line.startswith(
        "after step 2: worker 1 was killed by SIGKILL; 3 workers went on after 800 ms, "
        "went back 7 steps, planned at 50% of the full speed (at most 60% is possible); "
    )
    assert line.endswith(" after")
    assert "tokens/s before" in line
    page = render_report(summarize_run(tmp_path), "A run")
    assert f"<li>1: {line}</li>" in page
    # Each of the four curves has a line between steps 2 and 3, with the story as its tip.
    assert page.count("<title>worker 1 was killed by SIGKILL</title>") == 4
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
        smaller = load_decision(decide(Situation(plan, reports, 2, False)).dump()).plan
        assert [one.ranks for one in smaller.schedules] == [8 - len(lost)] * 3
        assert len({one.stages for one in smaller.schedules}) == 1
