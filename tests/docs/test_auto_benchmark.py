"""The benchmark of `auto` against fixed schedules, tried on threads."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

import penstock.measure.overhead
import penstock.measure.profile
from penstock.runtime import run_threads

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def auto(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import auto  # noqa: PLC0415

    yield auto
    for name in ("auto", "tables", "gpu", "gpu.bench"):
        sys.modules.pop(name, None)


def test_the_plan_of_auto_and_its_rivals_compute_the_same_loss(auto, monkeypatch):
    monkeypatch.setattr(penstock.measure.profile, "QUICK_SECONDS", 0.01)
    monkeypatch.setattr(penstock.measure.overhead, "OVERHEAD_STEPS", 6)
    monkeypatch.setattr(auto, "measuring_rounds", lambda quick: 1)
    case = auto.Case("small", auto.llama(16, 4, 31, 2), 16, 2, 2, 2, 0.9)
    run = auto.Run(rounds=2)
    profiles = run_threads(2, partial(auto.profile_cases, cases=[case], run=run))[0]
    contest = auto.plan_case(case, profiles[0], run)
    work = partial(auto.run_contests, contests=[contest], run=run, before=[])
    (row,) = run_threads(2, work)[0]
    contenders = row["contenders"]
    assert next(iter(contenders)) == "auto"
    assert {"1f1b", "hanayo waves=1", "zb-v"} <= set(contenders) | set(row["missing"])
    for one in contenders.values():
        assert one["loss"] == pytest.approx(contenders["auto"]["loss"], rel=1e-5)
        assert one["predicted_peak"] <= row["memory"]
    others = [one["predicted"] for one in contenders.values()]
    assert contenders["auto"]["predicted"] <= min(others) * 1.003
    assert auto.results_table({"rows": [row]}).count("\n") == 2


def test_candidates_that_do_not_fit_together_run_in_groups_with_auto(auto):
    needed = 0.4 * auto.GPU_BYTES
    contenders = tuple(auto.Contender(name, None, None, needed) for name in "abcd")
    case = auto.Case("wide", auto.llama(16, 2, 31, 2), 16, 2, 2)
    contest = auto.Contest(case, None, contenders, (), 0.0, 0.0)
    groups = auto.groups_of(contest, auto.Run("cuda"))
    assert ["".join(one.label for one in group) for group in groups] == [
        "ab",
        "ac",
        "ad",
    ]
