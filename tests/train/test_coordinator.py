"""The launcher's side of a crew, with processes that do nothing but end, hang or report."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock import Plan, make
from penstock.config import Config, ElasticConfig, RunConfig
from penstock.crew import coordinator as coordinator_module
from penstock.crew.coordinator import Coordinator, Worker, describe_takeovers, find_stop
from penstock.crew.decision import (
    Report,
    Situation,
    decide,
    note_key,
)
from penstock.crew.member import Member, local_store
from penstock.errors import RunError
from penstock.schedules.transforms import replicate
from penstock.train.history import StepFigures, read_events
from penstock.train.job import Verdict

PLAN = Plan(replicate(make("1f1b", ranks=1, microbatches=2), 3), "1f1b", (2,))
FIGURES = StepFigures(2.5, 0.5, 100, 1.0, None, False)


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def play(worker, workers, host, port, folder, resume, newcomer) -> Verdict:
    """Take part in two generations; worker 1 leaves the first as the folder's name says."""
    member = Member(worker, local_store(host, port))
    if newcomer:
        decision = member.arrive()
        assert decision.members == (0, 1, 2)
        assert decision.transfers == ((0, 0, 1),)
        member.store.set(note_key("ready", decision.generation), "yes")
        return Verdict(10)
    member.report(Report(worker))
    decision = member.next_decision()
    assert decision.members == (0, 1, 2)
    if worker == 1:
        if "killed" in folder:
            os.kill(os.getpid(), signal.SIGKILL)
        if "stopped" in folder:
            os.kill(os.getpid(), signal.SIGSTOP)
        if "failed" in folder:
            raise ValueError("no good")
    if "retry" not in folder:
        wait_until(lambda: member.store.check([f"crew/broken/{member.generation}"]))
    while True:
        member.report(Report(worker, 7, FIGURES, parts=(0,), error="a link is cut"))
        decision = member.next_decision()
        if decision is None or "always" not in folder:
            break
    if decision is None:
        return Verdict(9)
    assert decision.step == 7
    member.store.set(note_key("ready", decision.generation), "yes")
    if "again" not in folder:
        return Verdict(8)
    wait_until(lambda: member.is_changing(decision))
    member.report(Report(worker, 9, FIGURES, parts=(0,)))
    member.next_decision()
    wait_until(
        lambda: member.store.check([note_key("finished")])
    )  # The newcomer ends the run.
    return Verdict(-1)


def test_the_launcher_tells_who_takes_over_a_part_from_its_mirror():
    plan = Plan(make("1f1b", ranks=3, microbatches=2), "1f1b", (1, 1, 1))
    reports = {n: Report(n) for n in range(3)}
    before = decide(Situation(plan, reports, 1, False, mirror=True))
    mirrors = {target: part for part, _, target in before.mirrors}
    left = {n: Report(n, 4, FIGURES, parts=(n,), mirrors=(mirrors[n],)) for n in (0, 2)}
    after = decide(Situation(plan, left, 2, False, mirror=True))
    said = describe_takeovers(before, after)
    assert said == "; worker 2 has part 1 from its mirror"
    without = {n: replace(left[n], mirrors=()) for n in left}
    after = decide(Situation(plan, without, 2, False, saved=lambda: 4))
    quiet = decide(Situation(plan, reports, 1, False))
    said = describe_takeovers(quiet, after)
    assert said == "; worker 0 has part 1 from the checkpoint"


def coordinator_of(tmp_path, name: str, restarts: int = 0) -> Coordinator:
    folder = tmp_path / name
    folder.mkdir()
    said = []
    settings = Config(
        run=RunConfig(timeout=12_000.0),
        elastic=ElasticConfig(restarts=restarts),
    )
    coordinator = Coordinator(play, folder, PLAN, settings, False, said.append)
    coordinator.said = said
    return coordinator


@pytest.mark.parametrize(
    ("name", "story"),
    [
        ("killed", "worker 1 was killed by SIGKILL"),
        ("stopped", "worker 1 was stopped (SIGSTOP), so it was ended"),
        ("failed", "worker 1 failed: ValueError: no good"),
    ],
)
def test_the_others_go_on_without_a_worker(name, story, tmp_path, capfd):
    coordinator = coordinator_of(tmp_path, name)
    assert coordinator.run() == Verdict(8)
    assert coordinator.said == [f"{story}; 2 workers go on after step 7"]
    assert coordinator.decision.members == (0, 2)
    (event,) = read_events(tmp_path / name)
    assert (event.step, event.event, event.members) == (7, "lost", (0, 2))
    assert event.speed <= event.limit < 1
    assert (event.text, event.seconds > 0) == (story, True)
    capfd.readouterr()


def test_a_lost_worker_is_replaced_and_the_new_one_joins_after_a_step(tmp_path, capfd):
    coordinator = coordinator_of(tmp_path, "killed-again", restarts=1)
    assert coordinator.run() == Verdict(10)
    assert coordinator.said == [
        "worker 1 was killed by SIGKILL; 2 workers go on after step 7",
        "worker 1 has joined; 3 workers go on after step 9",
    ]
    events = read_events(tmp_path / "killed-again")
    assert [event.event for event in events] == ["lost", "joined"]
    capfd.readouterr()


@pytest.mark.parametrize(
    ("restarts", "move"), [(0, "; worker 3 moves to part 0"), (1, "")]
)
def test_a_worker_moves_only_if_nobody_comes_for_the_place_of_a_lost_one(
    restarts, move, tmp_path
):
    coordinator = coordinator_of(tmp_path, "moves", restarts)
    two = replicate(make("1f1b", ranks=2, microbatches=2), 2)
    coordinator.plan = Plan(
        two, "1f1b copies=2", (3, 1)
    )  # The first part has most to do.
    coordinator.own_workers = 4
    coordinator.workers = {n: Worker(n, None) for n in range(4)}
    coordinator.reports = {n: Report(n) for n in range(4)}
    coordinator.broken_at = 0.0
    coordinator.begin_generation()
    del coordinator.workers[0]
    coordinator.losses = ["worker 0 was killed by SIGKILL"]
    coordinator.reports = {n: Report(n, 4, FIGURES, parts=(n % 2,)) for n in (1, 2, 3)}
    coordinator.broken_at = 0.0
    coordinator.begin_generation()
    assert coordinator.said == [
        f"worker 0 was killed by SIGKILL{move}; 3 workers go on after step 4"
    ]
    assert coordinator.decision.seat_of[3] == (0 if move else 3)


def test_an_event_counts_from_the_last_step_and_says_how_far_a_run_went_back(tmp_path):
    coordinator = coordinator_of(tmp_path, "back")
    alone = make("1f1b", ranks=2, microbatches=2)
    coordinator.plan = Plan(alone, "1f1b", (1, 1))
    coordinator.own_workers = 2
    coordinator.workers = {n: Worker(n, None) for n in range(2)}
    coordinator.reports = {n: Report(n) for n in range(2)}
    coordinator.break_generation("")
    coordinator.begin_generation()
    del coordinator.workers[0]
    coordinator.losses = ["worker 0 was killed by SIGKILL"]
    left = Report(1, 4, FIGURES, parts=(1,), error="its link was cut", idle=15.0)
    coordinator.store.set(note_key("report", 1, 1), left.dump())
    coordinator.break_generation("its link was cut")
    coordinator.read_reports()
    coordinator.begin_generation()
    assert "so 1 workers go back to step 0" in coordinator.said[0]
    coordinator.write_event()
    (event,) = read_events(coordinator.folder)
    assert event.seconds >= 15.0
    assert (event.step, event.back) == (0, 4)


def test_a_cut_link_connects_all_workers_again_but_not_for_ever(tmp_path, capfd):
    coordinator = coordinator_of(tmp_path, "retry", restarts=2)
    assert coordinator.run() == Verdict(8)
    assert coordinator.said == ["a link is cut; 3 workers go on after step 7"]
    coordinator = coordinator_of(tmp_path, "retry-always", restarts=2)
    with pytest.raises(RunError, match="connected again 2 times, which did not help"):
        coordinator.run()
    # They are written down although nobody has trained in between.
    assert len(read_events(tmp_path / "retry-always")) == 2
    capfd.readouterr()


def test_workers_that_leave_hear_of_one_that_is_lost_on_the_way_out(tmp_path):
    coordinator = coordinator_of(tmp_path, "leaving")
    coordinator.break_generation("")  # The first worker has left after its step.
    assert not coordinator.store.check([note_key("broken", 0)])
    coordinator.break_generation("worker 2 was killed by SIGKILL")
    assert (
        coordinator.store.get(note_key("broken", 0))
        == b"worker 2 was killed by SIGKILL"
    )


def test_a_worker_that_is_lost_after_its_report_is_in_no_further_generation(tmp_path):
    coordinator = coordinator_of(tmp_path, "reported")
    dead = SimpleNamespace(pid=0, kill=lambda: None, close=lambda: None)
    coordinator.workers = {n: Worker(n, dead) for n in range(3)}
    coordinator.reports = {n: Report(n) for n in range(2)}
    coordinator.break_generation("")
    coordinator.lose(coordinator.workers[1], "was killed by SIGKILL")
    assert list(coordinator.reports) == [0]


class Clock:
    """A clock for the launcher that shows what a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def watched_coordinator(
    tmp_path, monkeypatch
) -> tuple[Coordinator, Clock, list[tuple[int, str]]]:
    """Return a launcher with a worker 1, the clock that it reads, and whom it loses."""
    clock = Clock()
    monkeypatch.setattr(coordinator_module, "time", clock)
    coordinator = coordinator_of(tmp_path, "watched")
    coordinator.silence = 60.0
    coordinator.workers = {1: Worker(1, SimpleNamespace(pid=0))}
    lost = []

    def lose(worker: Worker, event: str) -> None:
        lost.append((worker.number, event))
        del coordinator.workers[worker.number]

    coordinator.lose = lose
    return coordinator, clock, lost


def test_a_worker_without_a_sign_of_life_is_lost(tmp_path, monkeypatch):
    coordinator, clock, lost = watched_coordinator(tmp_path, monkeypatch)
    for look in range(1, 1000):
        clock.now = look / 4
        if clock.now < 10:
            coordinator.store.add(note_key("alive", 1), 1)
        coordinator.check_signs_of_life()
        if lost:
            break
    assert lost == [(1, "has shown no life for 60 s and was ended")]
    assert 70 < clock.now < 72
    clock.now += 3600  # The machine was asleep, and with it all workers.
    coordinator.workers = {1: Worker(1, SimpleNamespace(pid=0))}
    coordinator.check_signs_of_life()
    assert len(lost) == 1


def test_only_a_stop_of_more_than_a_second_in_one_go_ends_a_worker(
    tmp_path, monkeypatch
):
    coordinator, clock, lost = watched_coordinator(tmp_path, monkeypatch)
    forever = 100.0  # From then on the worker stays stopped.

    def find_stop(pid: int) -> int | None:
        """The worker is stopped for 0.15 s again and again, and runs for 0.05 s in between."""
        turn = round(20 * min(clock.now, forever))
        return turn // 4 if turn % 4 < 3 else None

    monkeypatch.setattr(coordinator_module, "find_stop", find_stop)
    # Every look at these times finds it stopped.
    for look in range(500):
        clock.now = look / 5
        assert find_stop(0) is not None
        coordinator.check_signs_of_life()
    assert not lost
    clock.now = forever
    while not lost:
        coordinator.check_signs_of_life()
        clock.now += 0.25
    assert lost == [(1, "was stopped (SIGSTOP), so it was ended")]
    assert forever + 1.0 < clock.now <= forever + 1.75


def test_two_stops_of_a_process_are_told_apart():
    process = subprocess.Popen(["sleep", "600"])

    def stop() -> int | None:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        return find_stop(process.pid)

    try:
        assert find_stop(process.pid) is None
        first = stop()
        assert first is not None
        assert find_stop(process.pid) == first
        os.kill(process.pid, signal.SIGCONT)
        assert stop() not in (None, first)
    finally:
        process.kill()
        process.wait()
    assert find_stop(process.pid) is None
