"""A plan with partial paths, from the command line to its training."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from commands import SMALL_CONFIG, called
from penstock.config import check_config
from penstock.errors import ConfigError
from penstock.formats.config_toml import apply_changes
from penstock.plan.planner import plan_run
from penstock.train.job import Job
from penstock.train.weights import sizes_of
from trainings import SMALL, VOCAB, corpus, train


def test_a_named_schedule_refuses_what_only_auto_understands():
    with pytest.raises(ConfigError, match="says what auto may leave out"):
        check_config(apply_changes(SMALL, ("schedule.name=1f1b:skip=0.25",)))


def test_the_command_says_what_it_leaves_out_and_its_plan_trains(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    run = partial(called, monkeypatch, capsys)
    Path("config.toml").write_text(SMALL_CONFIG)
    line = (
        "plan config.toml --gpu h100 --devices 4 --skip 0.5 --limit slices=1,stages=1"
    )
    sizes = ("schedule.microbatches=4", "parallel.dp_replicate=1", "parallel.pp=4")
    fixed = " ".join(
        f"--set {one}" for one in (*sizes, "parallel.tp=1", "parallel.dp_shard=1")
    )
    code, out, _ = run(f"{line} {fixed} -o plan.json --page plan.html")
    assert code == 0
    flat = " ".join(out.split())
    assert "at most 50% of the layers; this changes what is computed" in flat
    assert "the best plan that leaves out nothing is" in flat
    assert (
        "of the layers, which changes what is computed" in Path("plan.html").read_text()
    )
    stored = json.loads(Path("plan.json").read_text())
    assert 0 < stored["why"]["skipped_share"] <= 0.5
    assert "changes what is computed" in stored["why"]["skipping"]
    losses = train_plan(tmp_path / "plan.json")
    assert losses[-1] < losses[0]


def train_plan(file: Path) -> list[float]:
    """Train a small model by a plan file, as `penstock train --set schedule.name=plan.json` does."""
    config = replace(SMALL, schedule=replace(SMALL.schedule, name=str(file)))
    config, plan = plan_run(config, config.model.layers, given=())
    sizes = sizes_of(config.model, VOCAB, config.data.seq_len)
    rows = train(Job(config, plan, sizes, corpus(config), file.parent / "run"))
    return [row.loss for row in rows]
