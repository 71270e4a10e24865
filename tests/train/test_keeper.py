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
from penstock.config import RunConfig
from penstock.errors import RunError
from penstock.schedules.transforms import replicate
from penstock.train.crew import keeper as keeper_module
from penstock.train.crew.events import read_events
from penstock.train.crew.keeper import (
    Keeper,
    Worker,
    describe_takeovers,
    find_stop,
)
from penstock.train.crew.member import Member, local_store
from penstock.train.crew.notes import (
    FINISHED,
    Report,
    alive_key,
    broken_key,
    ready_key,
    report_key,
)
from penstock.train.crew.succession import decide
from penstock.train.step_figures import StepFigures
from penstock.train.worker import Verdict

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
        member.store.set(ready_key(decision.generation), "yes")
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
    member.store.set(ready_key(decision.generation), "yes")
    if "again" not in folder:
        return Verdict(8)
    wait_until(lambda: member.is_changing(decision))
    member.report(Report(worker, 9, FIGURES, parts=(0,)))
    member.next_decision()
    wait_until(lambda: member.store.check([FINISHED]))  # The newcomer ends the run.
    return Verdict(-1)


def test_the_launcher_tells_who_takes_over_a_part_from_its_mirror():
    plan = Plan(make("1f1b", ranks=3, microbatches=2), "1f1b", (1, 1, 1))
    reports = {n: Report(n) for n in range(3)}
    before = decide(plan, reports, 1, False, mirror=True)
    mirrors = {target: part for part, _, target in before.mirrors}
    left = {n: Report(n, 4, FIGURES, parts=(n,), mirrors=(mirrors[n],)) for n in (0, 2)}
    after = decide(plan, left, 2, False, mirror=True)
    said = describe_takeovers(before, after)
    assert said == "; worker 2 has part 1 from its mirror"
    without = {n: replace(left[n], mirrors=()) for n in left}
    after = decide(plan, without, 2, False, saved=lambda: 4)
    quiet = decide(plan, reports, 1, False)
    said = describe_takeovers(quiet, after)
    assert said == "; worker 0 has part 1 from the checkpoint"


def keeper_of(tmp_path, name: str, restarts: int = 0) -> Keeper:
    folder = tmp_path / name
    folder.mkdir()
    said = []
    settings = RunConfig(silence=600.0, patience=600.0, restarts=restarts)
    keeper = Keeper(play, folder, PLAN, settings, False, said.append)
    keeper.said = said
    return keeper


@pytest.mark.parametrize(
    ("name", "story"),
    [
        ("killed", "worker 1 was killed by SIGKILL"),
        ("stopped", "worker 1 was stopped (SIGSTOP), so it was ended"),
        ("failed", "worker 1 failed: ValueError: no good"),
    ],
)
def test_the_others_go_on_without_a_worker(name, story, tmp_path, capfd):
    keeper = keeper_of(tmp_path, name)
    assert keeper.run() == Verdict(8)
    assert keeper.said == [f"{story}; 2 workers go on after step 7"]
    assert keeper.decision.members == (0, 2)
    (event,) = read_events(tmp_path / name)
    assert (event.step, event.event, event.members) == (7, "lost", (0, 2))
    assert event.speed <= event.limit < 1
    assert (event.text, event.seconds > 0) == (story, True)
    capfd.readouterr()


def test_a_lost_worker_is_replaced_and_the_new_one_joins_after_a_step(tmp_path, capfd):
    keeper = keeper_of(tmp_path, "killed-again", restarts=1)
    assert keeper.run() == Verdict(10)
    assert keeper.said == [
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
    keeper = keeper_of(tmp_path, "moves", restarts)
    two = replicate(make("1f1b", ranks=2, microbatches=2), 2)
    keeper.plan = Plan(two, "1f1b copies=2", (3, 1))  # The first part has most to do.
    keeper.own_workers = 4
    keeper.workers = {n: Worker(n, None, None) for n in range(4)}
    keeper.reports = {n: Report(n) for n in range(4)}
    keeper.broken_at = 0.0
    keeper.begin_generation()
    del keeper.workers[0]
    keeper.losses = ["worker 0 was killed by SIGKILL"]
    keeper.reports = {n: Report(n, 4, FIGURES, parts=(n % 2,)) for n in (1, 2, 3)}
    keeper.broken_at = 0.0
    keeper.begin_generation()
    assert keeper.said == [
        f"worker 0 was killed by SIGKILL{move}; 3 workers go on after step 4"
    ]
    assert keeper.decision.seat_of[3] == (0 if move else 3)


def test_an_event_counts_from_the_last_step_and_says_how_far_a_run_went_back(tmp_path):
    keeper = keeper_of(tmp_path, "back")
    alone = make("1f1b", ranks=2, microbatches=2)
    keeper.plan = Plan(alone, "1f1b", (1, 1))
    keeper.settings = replace(keeper.settings, mirror="false")
    keeper.own_workers = 2
    keeper.workers = {n: Worker(n, None, None) for n in range(2)}
    keeper.reports = {n: Report(n) for n in range(2)}
    keeper.break_generation("")
    keeper.begin_generation()
    del keeper.workers[0]
    keeper.losses = ["worker 0 was killed by SIGKILL"]
    left = Report(1, 4, FIGURES, parts=(1,), error="its link was cut", idle=15.0)
    keeper.store.set(report_key(1, 1), left.dump())
    keeper.break_generation("its link was cut")
    keeper.read_reports()
    keeper.begin_generation()
    assert "so 1 workers go back to step 0" in keeper.said[0]
    keeper.write_event()
    (event,) = read_events(keeper.folder)
    assert event.seconds >= 15.0
    assert (event.step, event.back) == (0, 4)


def test_a_cut_link_connects_all_workers_again_but_not_for_ever(tmp_path, capfd):
    keeper = keeper_of(tmp_path, "retry", restarts=2)
    assert keeper.run() == Verdict(8)
    assert keeper.said == ["a link is cut; 3 workers go on after step 7"]
    keeper = keeper_of(tmp_path, "retry-always", restarts=2)
    with pytest.raises(RunError, match="connected again 2 times, which did not help"):
        keeper.run()
    # They are written down although nobody has trained in between.
    assert len(read_events(tmp_path / "retry-always")) == 2
    capfd.readouterr()


def test_workers_that_leave_hear_of_one_that_is_lost_on_the_way_out(tmp_path):
    keeper = keeper_of(tmp_path, "leaving")
    keeper.break_generation("")  # The first worker has left after its step.
    assert not keeper.store.check([broken_key(0)])
    keeper.break_generation("worker 2 was killed by SIGKILL")
    assert keeper.store.get(broken_key(0)) == b"worker 2 was killed by SIGKILL"


class Clock:
    """A clock for the launcher that shows what a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def watched_keeper(
    tmp_path, monkeypatch
) -> tuple[Keeper, Clock, list[tuple[int, str]]]:
    """Return a launcher with a worker 1, the clock that it reads, and whom it loses."""
    clock = Clock()
    monkeypatch.setattr(keeper_module, "time", clock)
    keeper = keeper_of(tmp_path, "watched")
    keeper.settings = replace(keeper.settings, silence=60.0)
    keeper.workers = {1: Worker(1, SimpleNamespace(pid=0), None)}
    lost = []

    def lose(worker: Worker, event: str) -> None:
        lost.append((worker.number, event))
        del keeper.workers[worker.number]

    keeper.lose = lose
    return keeper, clock, lost


def test_a_worker_without_a_sign_of_life_is_lost(tmp_path, monkeypatch):
    keeper, clock, lost = watched_keeper(tmp_path, monkeypatch)
    for look in range(1, 1000):
        clock.now = look / 4
        if clock.now < 10:
            keeper.store.add(alive_key(1), 1)
        keeper.check_signs_of_life()
        if lost:
            break
    assert lost == [(1, "has shown no life for 60 s and was ended")]
    assert 70 < clock.now < 72
    clock.now += 3600  # The machine was asleep, and with it all workers.
    keeper.workers = {1: Worker(1, SimpleNamespace(pid=0), None)}
    keeper.check_signs_of_life()
    assert len(lost) == 1


def test_only_a_stop_of_more_than_a_second_in_one_go_ends_a_worker(
    tmp_path, monkeypatch
):
    keeper, clock, lost = watched_keeper(tmp_path, monkeypatch)
    forever = 100.0  # From then on the worker stays stopped.

    def find_stop(pid: int) -> int | None:
        """The worker is stopped for 0.15 s again and again, and runs for 0.05 s in between."""
        turn = round(20 * min(clock.now, forever))
        return turn // 4 if turn % 4 < 3 else None

    monkeypatch.setattr(keeper_module, "find_stop", find_stop)
    # Every look at these times finds it stopped.
    for look in range(500):
        clock.now = look / 5
        assert find_stop(0) is not None
        keeper.check_signs_of_life()
    assert not lost
    clock.now = forever
    while not lost:
        keeper.check_signs_of_life()
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
