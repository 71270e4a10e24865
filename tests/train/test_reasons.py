"""A report says why a run has its plan: what was compared, what was chosen, what its bound is a bound of."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from penstock import Plan, UnitCost, make
from penstock.config import Config, ScheduleConfig
from penstock.formats import dump_plan, load_plan
from penstock.plan.planner import chosen_plan, plan_run
from penstock.plan.pricing import unit_question
from penstock.plan.search import search
from penstock.plan.space import Limits
from penstock.train.after.reasons import reasons_of
from penstock.train.after.report import StepKind, Summary, render_report
from penstock.train.history import StepRow

ROWS = tuple(StepRow(step, 1.0, 1.0, 0.1, 2.0, 10, 10, 0.1) for step in range(1, 4))


def plan_of(name: str) -> Plan:
    """The plan of a config, as its plan.json keeps it."""
    shape = ScheduleConfig(name, microbatches=8)
    _, plan = plan_run(replace(Config(), schedule=shape), 8)
    return load_plan(dump_plan(plan))


@pytest.fixture(scope="module")
def automatic() -> Plan:
    """The plan of a search in the units of the papers, as its plan.json keeps it."""
    cost = UnitCost(comm=0.05)
    question = unit_question(4, 8, cost, 4.0, Limits(stages=2, slices=1))
    landscape = search(question)
    return load_plan(dump_plan(chosen_plan(landscape, question.facts)))


def test_auto_says_what_it_compared_and_by_how_much_the_others_are_slower(automatic):
    found, facts = reasons_of(automatic, "auto"), dict(automatic.why)
    assert re.match(
        r"schedule\.name = auto compared \d\d plans with .* 4 ranks and 8 micro-batches",
        found.sentences[0],
    )
    assert found.rows[0][0] == f"{automatic.name} (chosen)"
    assert found.rows[0][1] == f"{facts['step']:.2f}"
    plain = next(row for row in found.rows if row[0] == "1f1b")
    share = facts["step of 1f1b"] / facts["step"] - 1
    assert plain[1:] == (
        f"{facts['step of 1f1b']:.2f}",
        f"{share:.1%} longer",
        "4 micro-batches",
    )
    times = [float(row[1]) for row in found.rows[1:]]
    assert times == sorted(times)
    assert len(times) >= 5


def test_the_bound_is_one_of_the_whole_space(automatic):
    found = " ".join(reasons_of(automatic, "auto").sentences)
    bound = dict(automatic.why)["lower_bound"]
    assert (
        f"No plan that the search could have returned takes less than {bound:.2f}"
        in found
    )
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
        ("step", 0.123456789),
        ("lower_bound", 0.12),
        ("gap", 0.028806575),
        ("peak", 12345678.0),
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


def test_planned_paths_are_explained_in_sentences_with_units():
    why = (
        ("makespan", 0.4712328533),
        ("lower_bound", 0.44),
        ("gap", 0.0709837),
        ("simulations", 300),
        ("skipped", 1),
        ("slices", 2),
        ("waves", False),
        ("turn", "oldest"),
        ("rules", "share=0.3333333333333333 behind=1 wait=inf"),
        ("slots", "4 4"),
        ("sums", "planned"),
        ("sum_messages", "int8"),
        ("passes", 1),
        ("full_makespan", 0.686439),
        ("own", 3),
    )
    schedule = make("1f1b", ranks=2, microbatches=2)
    found = reasons_of(Plan(schedule, "paths", (), why), "paths.json").sentences
    assert found[1:] == (
        "penstock lab paths planned it for a cluster, where a step takes 471.2 ms. No plan "
        "under the same rules takes less than 440 ms; this one is 7.1% above that.",
        "Each micro-batch leaves out 1 part. A step that runs all parts takes 686.4 ms there.",
        "Each micro-batch is cut into 2 token slices.",
        "The rules of its paths: share=0.333 behind=1 wait=inf.",
        "The nodes may hold 4 4 micro-batches with each part.",
        "Replicas sum their gradients: planned, in int8.",
        "own: 3",
    )


def test_no_number_of_a_report_has_more_digits_than_it_means(automatic):
    plan = replace(automatic, partition=(1,) * automatic.schedule.parts)
    text = render_report(
        Summary(ROWS, plan, (StepKind("step", ROWS),), "auto"), "a run"
    )
    body = re.sub(r"<svg.*?</svg>|<style>.*?</style>", "", text, flags=re.DOTALL)
    assert "<h2>Why this plan</h2>" in body
    assert "(chosen)</td>" in body
    assert not re.findall(r"\d\.\d{5,}|\de[+-]\d\d", body)
