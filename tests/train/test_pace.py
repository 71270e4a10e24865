"""Workers that become slow get less work, and their share again once they are fast."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from penstock import Plan, make
from penstock.config import check_config
from penstock.crew.decision import Report, Situation, decide
from penstock.crew.pace import WINDOWS_TO_JUDGE, WINDOWS_TO_RETRY, PaceWatch
from penstock.errors import ConfigError
from penstock.formats.config_toml import apply_changes
from penstock.schedules.transforms import replicate
from penstock.train.elastic import rank_work, shares_a_part
from trainings import SMALL

FOUR = Plan(replicate(make("1f1b", ranks=2, microbatches=4), 2), "1f1b", (2, 2))
WORK = {0: 4.0, 1: 4.0, 2: 4.0}
USUAL = {0: 1.0, 1: 2.0, 2: 1.0}  # The profile of worker 1 is slower.


def watch_of(windows: Iterable[dict[int, float]]) -> tuple[PaceWatch, list[str]]:
    """Return a watch that has learned the usual times and heard these windows, and what it said."""
    watch = PaceWatch(2.0)
    said = []
    for window in [USUAL] * 3 + list(windows):
        said += watch.hear(window, WORK).values()
    return watch, said


def test_a_worker_is_slow_after_several_slow_windows_in_a_row_and_fast_after_several_fast_ones():
    slow = {**USUAL, 1: 6.0}
    watch, said = watch_of([slow, slow, USUAL, slow, slow])
    assert said == []
    said = list(watch.hear(slow, WORK).values())
    assert said == ["worker 1 takes 3.0 times as long for its work as before"]
    assert watch.paces == {1: 3.0}
    for _ in range(WINDOWS_TO_JUDGE):
        assert watch.paces
        said = list(watch.hear(USUAL, WORK).values())
    assert (said, watch.paces) == (["worker 1 is as fast as before again"], {})


def test_a_busy_machine_and_a_worker_near_the_limit_change_nothing():
    busy = {worker: 5 * seconds for worker, seconds in USUAL.items()}
    assert watch_of([busy] * 9)[1] == []
    near = [{**USUAL, 1: 2.0 * ratio} for ratio in (1.9, 2.2, 1.9, 2.1, 2.1, 1.9)]
    assert watch_of(near * 3)[1] == []
    # Once it is slow, a little less does not make it fast.
    slow = [{**USUAL, 1: 5.0}] * 3
    watch, said = watch_of([*slow, *near, *near])
    assert (len(said), watch.paces) == (1, {1: 2.5})


def test_a_worker_without_work_gets_a_trial_later_and_later():
    watch, _ = watch_of([{**USUAL, 1: 40.0}] * 3)
    idle = ({0: 1.0, 2: 1.0, 1: 0.0}, {**WORK, 1: 0.0})
    waited = []
    for _ in range(2):
        count = 1
        while not watch.hear(*idle):
            count += 1
        waited.append(count)
        for _ in range(WINDOWS_TO_JUDGE):
            watch.hear({**USUAL, 1: 40.0}, WORK)
        assert watch.paces
    assert waited == [WINDOWS_TO_RETRY, 2 * WINDOWS_TO_RETRY]


def test_a_slow_worker_gets_less_work_and_nobody_else_holds_a_part_more():
    reports = {n: Report(n) for n in range(4)}
    decision = decide(Situation(FOUR, reports, 2, False, paces={3: 3.0}))
    work = rank_work(decision.plan)
    assert rank_work(FOUR) == [8.0] * 4
    assert work[3] < 8.0 < work[1]
    assert sum(work) == 32.0
    assert (decision.whole, decision.plan.name) == (False, "1f1b, slow 3")
    assert decision.plan.schedule.stages == FOUR.schedule.stages
    assert shares_a_part(FOUR.schedule, 3)
    alone = make("1f1b", ranks=2, microbatches=4)
    assert not shares_a_part(alone, 1)
    # A loss and a slow worker at the same time.
    del reports[0]
    both = decide(Situation(FOUR, reports, 2, False, paces={3: 3.0}))
    assert rank_work(both.plan)[2] < 16.0


def test_a_limit_that_would_call_everybody_slow_is_refused():
    with pytest.raises(
        ConfigError, match=r"elastic\.mode = on:slow=0\.5 would call every worker"
    ):
        check_config(apply_changes(SMALL, ("elastic.mode=on:slow=0.5",)))
