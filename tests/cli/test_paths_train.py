"""`penstock train` runs planned paths as they are: their layers, nodes and full steps, in real processes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from commands import SMALL_CONFIG, environment
from forked import Command
from penstock.cost import Cluster
from penstock.formats import read_plan, write_plan
from penstock.formats.config_toml import read_config
from penstock.plan.paths import (
    Budget,
    Policy,
    Problem,
    even_parts,
    paths_plan,
    plan_paths,
    replan,
)
from penstock.plan.paths.problem import QueueOrder
from penstock.plan.paths.rotation import full_steps
from penstock.plan.paths.rules import Rules
from penstock.train.history import read_measured, read_rows
from penstock.train.step_paths import step_paths
from trainings import losses

TRAIN = "train config.toml --set schedule.name=paths.json"
RULES = Rules(share=1 / 3, full=3)


@pytest.fixture
def text(tmp_path):
    """Return a folder with some text and a config."""
    lines = [f"the {n % 7} cats sat on {n % 5} mats\n" for n in range(2000)]
    (tmp_path / "text.txt").write_text("".join(lines))
    config = SMALL_CONFIG.replace("[data]", '[data]\nsources = ["text.txt"]')
    config = config.replace("layers = 4", "layers = 8").replace(
        "steps = 12", "steps = 6"
    )
    (tmp_path / "config.toml").write_text(config)
    return tmp_path


@pytest.fixture(scope="module")
def planned():
    """Paths for six nodes and four parts, with further paths and full steps on the same nodes."""
    nodes = Cluster.even(6, 0.01, 1e8, slots=4)
    parts = even_parts(4, 0.1)
    problem = Problem(nodes, parts, 2, RULES, gradients=2e7)
    plan = plan_paths(problem, Budget(100))
    policy = Policy((QueueOrder.ARRIVAL,))
    changed = replace(problem, policy=policy, arrangement=plan.partitions)
    other = plan_paths(changed, Budget(0))
    assert other.schedule != plan.schedule
    return plan, (other,), full_steps(plan, Budget(100))


def run(folder: Path, line: str) -> tuple[str, str]:
    process = Command(folder, line.split(), environment(), strict=True)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


def test_planned_paths_are_trained_as_they_are_and_compared_with_the_plan(
    text, planned
):
    plan, others, full = planned
    write_plan(paths_plan(plan, None, others, full), text / "paths.json")
    changes = "--set data.global_batch=8 --set run.checks=forecast,gradients,memory"
    out, err = run(text, f"{TRAIN} {changes}")
    assert "layers 2 2 2 2 0" in err
    words = "6 of 8 layers per micro-batch, 2 sets of paths in turn, all parts every 3"
    assert f"paths     {words} steps" in err
    assert "; a step that runs all parts " in err
    folder = text / "runs" / "config"
    rows = read_rows(folder)
    assert [row.layers == 8 for row in rows] == [False, False, True] * 2
    assert min(row.layers for row in rows) == 6
    for kind, made in (("partial", plan), ("full", full)):
        expected = f"a {kind} step took .*, predicted .*, planned for the cluster {made.makespan:.3g}"
        assert re.search(expected, out), out
        assert re.search(f"step \\d, a {kind} step, had a bubble", out)
        tail = made.timeline.makespan - made.timeline.end.max()
        expected = (
            f"the sums of gradients of a {kind} step ended .* after its last backward, "
            f"predicted .*, planned for the cluster {1000 * tail:.3g} ms"
        )
        assert re.search(expected, out), out
    page = (folder / "report.html").read_text()
    assert "Predicted and measured" in page
    assert "a full step took" in page
    kept = read_plan(folder / "plan.json")
    assert kept.schedules == paths_plan(plan, None, others, full).schedules
    assert kept.sums == paths_plan(plan).sums
    assert read_config(folder / "config.toml").paths.full == 3
    _, step, timeline = read_measured(folder / "timeline-full.json")
    assert (step, timeline.schedule) == (6, full.schedule)
    assert {one.ranks for one in timeline.sums} == {
        tuple(sorted(one.ranks)) for one in kept.sums
    }
    for file in (folder / "checkpoints" / "step-00000006").iterdir():
        file.unlink()  # as if it had been killed in step 5
    run(text, f"train {folder} --resume")
    assert losses(read_rows(folder)) == losses(rows)


def test_a_part_that_is_lost_with_its_only_node_is_held_by_another_one(text, planned):
    plan = planned[0]
    node = next(nodes[0] for nodes in plan.partitions[1:] if len(nodes) == 1)
    recovered = replan(plan, Budget(50), [node])
    write_plan(paths_plan(recovered), text / "paths.json")
    total = len(recovered.schedule.microbatches)
    changes = f"--set data.global_batch={total} --set schedule.name=paths.json:full=0 --set run.steps=2"
    _, err = run(text, f"{TRAIN} {changes} --set run.checks=forecast,memory")
    assert "paths: 5 ranks" in err
    assert "layers 2 2 2 2 0" in err
    kept = read_plan(text / "runs" / "config" / "plan.json")
    left = [str(other) for other in range(6) if other != node]
    assert kept.facts["nodes"] == " ".join(left)
    config = read_config(text / "runs" / "config" / "config.toml")
    assert step_paths(kept, config.paths).full is None
