"""A report says why a run has its plan: what was compared, what was chosen, what its bound is a bound of."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from penstock import Plan, make
from penstock.config import Config, ScheduleConfig
from penstock.formats import dump_plan, load_plan
from penstock.plan.planner import plan_run
from penstock.train.after.reasons import reasons_of
from penstock.train.after.report import Summary, render_report
from penstock.train.history import StepRow

ROWS = tuple(StepRow(step, 1.0, 1.0, 0.1, 2.0, 10, 10, 0.1) for step in range(1, 4))


def plan_of(name: str, ranks: int = 4) -> Plan:
    """The plan of a config, as its plan.json keeps it."""
    _, plan = plan_run(
        replace(Config(), schedule=ScheduleConfig(name, ranks=ranks, microbatches=8)), 8
    )
    return load_plan(dump_plan(plan))


@pytest.fixture(scope="module")
def automatic() -> Plan:
    return plan_of("auto")


def test_auto_says_what_it_compared_and_by_how_much_the_others_are_slower(automatic):
    found, facts = reasons_of(automatic, "auto"), dict(automatic.why)
    assert re.match(
        r"schedule\.name = auto compared \d\d schedules for 4 ranks", found.sentences[0]
    )
    assert found.rows[0][0] == f"{automatic.name} (chosen)"
    assert found.rows[0][1] == f"{facts['makespan']:.2f}"
    plain = next(row for row in found.rows if row[0] == "1f1b")
    share = facts["makespan of 1f1b"] / facts["makespan"] - 1
    assert plain[1:] == (
        f"{facts['makespan of 1f1b']:.2f}",
        f"{share:.1%} longer",
        "4 micro-batches",
    )
    times = [float(row[1]) for row in found.rows]
    assert times == sorted(times)
    assert len(times) >= 5


def test_the_bound_is_one_of_this_placement_and_these_cuts(automatic):
    found = " ".join(reasons_of(automatic, "auto").sentences)
    assert f"no order takes less than {dict(automatic.why)['lower_bound']:.2f}" in found
    assert "The bound says nothing about other placements or other cuts." in found
    assert "A backward pass counts 2, a message between ranks 0.05." in found


@pytest.mark.parametrize(
    ("plan", "named", "words"),
    [
        (
            lambda: plan_of("hanayo"),
            "hanayo",
            "schedule.name = hanayo names this schedule, for 4 ranks and 8",
        ),
        (
            lambda: plan_of("auto", ranks=1),
            "auto",
            "had nothing to compare: a single rank",
        ),
        (
            lambda: Plan(make("1f1b", ranks=2, microbatches=2), "mine"),
            "runs/a/plan.json",
            "was read from a file",
        ),
    ],
)
def test_a_plan_that_was_not_compared_says_so(plan, named, words):
    found = reasons_of(plan(), named)
    assert words in found.sentences[0]
    assert not found.rows


def test_a_plan_of_measured_times_has_its_units():
    why = (
        ("makespan", 0.123456789),
        ("lower_bound", 0.12),
        ("gap", 0.028806575),
        ("peak_activations", 12345678.0),
        ("profile", "p.json"),
        ("seconds", 1.23456789),
        ("stopped", False),
    )
    found = reasons_of(
        Plan(make("1f1b", ranks=2, microbatches=2), "1f1b", (), why), "plan.json"
    )
    assert found.rows == (("1f1b (chosen)", "123.5 ms", "", "11.8 MiB"),)
    assert "this one is 2.9% above that" in " ".join(found.sentences)
    assert found.sentences[-2:] == ("seconds: 1.235", "stopped: no")


def test_no_number_of_a_report_has_more_digits_than_it_means(automatic):
    plan = replace(automatic, partition=(1,) * automatic.schedule.parts)
    text = render_report(Summary(ROWS, plan, named="auto"), "a run")
    body = re.sub(r"<svg.*?</svg>|<style>.*?</style>", "", text, flags=re.DOTALL)
    assert "<h2>Why this plan</h2>" in body
    assert "(chosen)</td>" in body
    assert not re.findall(r"\d\.\d{5,}|\de[+-]\d\d", body)
