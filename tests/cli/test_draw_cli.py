"""Drawings of what was measured: a step of a run, and schedules with the times of a profile."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import Plan, UnitCost, make, simulate, write_plan
from penstock.config import ModelConfig
from penstock.cost.gpus import analytic_profile
from penstock.cost.network import BufferedMessage, Network
from penstock.formats import read_profile, write_profile
from penstock.ir.timeline import MEASURED_UNITS
from penstock.train.history import write_timeline

MEASURED = "runs/x/timeline.json"


@pytest.fixture
def measured(run):
    """The folder of a run whose step 7 took milliseconds; return its timeline."""
    Path("runs/x").mkdir(parents=True)
    schedule = make("hanayo", ranks=2, microbatches=4, waves=1)
    step = replace(
        simulate(schedule, UnitCost(F=0.002, B=0.004, comm=1e-4)), units=MEASURED_UNITS
    )
    write_plan(Plan(schedule, "hanayo waves=1"), "runs/x/plan.json")
    write_timeline(Path("runs/x"), 7, step)
    return step


def test_a_measured_step_becomes_a_trace_for_perfetto(run, measured):
    code, _, err = run(f"draw {MEASURED} -o t.trace.json")
    assert (code, err) == (0, "wrote t.trace.json\n")
    events = json.loads(Path("t.trace.json").read_text())["traceEvents"]
    actions = [event for event in events if event["ph"] == "X"]
    spans = list(measured.spans())
    assert [event["name"] for event in actions] == [str(span.action) for span in spans]
    assert [event["ts"] for event in actions] == pytest.approx(
        [span.start * 1e6 for span in spans]
    )


def test_a_measured_step_is_drawn_in_its_own_units(run, measured):
    code, out, _ = run(f"draw {MEASURED}")
    assert code == 0
    assert f"makespan {1000 * measured.makespan:.4g} ms" in out
    assert run(f"draw {MEASURED} -o step.svg")[0] == 0
    assert "hanayo waves=1, measured, step 7" in Path("step.svg").read_text()


def test_a_plan_is_compared_with_its_measured_step(run, measured):
    assert run(f"draw runs/x/plan.json {MEASURED} -o both.html")[0] == 0
    page = Path("both.html").read_text()
    assert "simulated from measured times" in page
    assert "measured, step 7" in page
    assert (page.count('"seconds":true'), page.count('"seconds":false')) == (2, 0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"draw {MEASURED} --pp 4", "has its own shape; leave out --pp"),
        (f"check {MEASURED}", "draw it, or name runs/x/plan.json"),
        ("draw runs/x", "name runs/x/plan.json, or runs/x/timeline.json"),
        ("draw runs/y/timeline.json", "a run writes it when it times a step"),
        (
            f"draw 1f1b {MEASURED} --pp 2 --microbatches 2 -o x.html",
            "there are no times for 1f1b `penstock profile config.toml` measures them",
        ),
        (
            f"draw runs/x/plan.json {MEASURED} --cost comm=0.1 -o x.html",
            "leave out --cost comm=0.1, or give --cost profile.json",
        ),
    ],
)
def test_a_mistake_with_a_measured_step_says_what_to_do(run, measured, line, words):
    code, _, err = run(line)
    assert code == 2
    assert words in " ".join(err.split())


# ---------------------------------------------------------------- profiles
@pytest.fixture
def profile(run):
    write_profile(
        analytic_profile(ModelConfig(layers=8, vocab_size=512), 512, ranks=4),
        "profile.json",
    )


def test_draw_and_compare_take_a_profile(run, profile):
    shape = "--pp 4 --microbatches 4"
    code, out, _ = run(f"draw 1f1b {shape} --cost profile.json --json")
    makespan = json.loads(out)["makespan"]
    code, out, _ = run(f"draw 1f1b {shape} --cost profile.json")
    assert code == 0
    shown, unit = re.search(r"makespan ([\d.]+) (ms|µs)", out).groups()
    assert float(shown) == pytest.approx(
        makespan * {"ms": 1e3, "µs": 1e6}[unit], rel=1e-3
    )
    code, _, _ = run(f"draw 1f1b gpipe {shape} --cost profile.json -o both.html")
    assert code == 0
    assert '"seconds":true,"inBytes":true' in Path("both.html").read_text()


def test_a_profile_of_nccl_lets_messages_wait_in_simulations_and_plans(run, profile):
    """The best plan for links that carry everything at once is not the best one for NCCL."""
    shape = "--pp 4 --microbatches 8"
    measured = read_profile("profile.json")
    network = Network(1e-3, 1e9, serial=True)
    for name, channels in (("free", None), ("nccl", 1)):
        one = replace(measured, network=replace(network, channels=channels))
        write_profile(one, f"{name}.json")
        assert read_profile(f"{name}.json") == one
        line = f"plan {shape} --cost {name}.json --limit slices=1 -o {name}.plan.json"
        assert run(line)[0] == 0

    def seconds(plan: str, options: str) -> float:
        code, out, _ = run(f"draw {plan} {options} --json")
        assert code == 0
        return json.loads(out)["makespan"]

    mine = seconds("nccl.plan.json", "--cost nccl.json")
    assert mine == seconds("nccl.plan.json", "--cost free.json:channels=1")
    assert mine > seconds("nccl.plan.json", "--cost free.json")
    assert mine < seconds("free.plan.json", "--cost nccl.json")
    buffers = (BufferedMessage(1e9, send=1e-4, receive=1e-4),)
    buffered = replace(network, channels=1, buffers=buffers)
    write_profile(replace(measured, network=buffered), "buffered.json")
    assert seconds("nccl.plan.json", "--cost buffered.json") < mine
    broken = Path("nccl.json").read_text().replace('"channels": 1', '"channels": 3')
    Path("nccl.json").write_text(broken)
    code, _, err = run(f"draw 1f1b {shape} --cost nccl.json")
    assert code == 2
    assert "write a number from 1 to 2" in err


def test_a_schedule_is_compared_with_a_measured_step_by_the_profile_of_the_run(
    run, measured, profile
):
    Path("profile.json").rename("runs/x/profile.json")
    line = f"draw 1f1b {MEASURED} --pp 2 --microbatches 2 -o both.html"
    assert run(line)[0] == 0
    page = Path("both.html").read_text()
    assert (page.count('"seconds":true'), page.count('"seconds":false')) == (2, 0)
    # Memory counts micro-batches in both, because a run does not measure bytes.
    assert (page.count('"inBytes":true'), page.count('"inBytes":false')) == (0, 2)
    assert "1f1b, predicted and measured, step 7" in page


def test_a_profile_that_does_not_fit_the_options_is_refused(run, profile):
    shape = "--pp 4 --microbatches 4"
    code, _, err = run(f"draw 1f1b {shape} --cost profile.json:comm=1")
    assert code == 2
    assert "profile.json has no 'comm'" in err
    code, _, err = run(f"draw 1f1b gpipe {shape} --seq-len 64 -o x.html")
    assert code == 2
    assert "--seq-len needs the times of a model" in err
