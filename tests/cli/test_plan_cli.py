"""`penstock plan` as a person meets it: mistakes, narrow terminals, and what becomes of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import SMALL_CONFIG

MISTAKES = {
    "plan": "name a config.toml, or give --ranks and --microbatches",
    "plan --ranks 2 --microbatches 2 --memory 80GB": "is a number of micro-batches above 0",
    "plan --ranks 2 --microbatches 2 --memory -1": "is a number of micro-batches above 0",
    "plan --ranks 5000 --microbatches 5000": "50,000,000 actions; at most 4,000,000 are possible",
    "plan --ranks 2 --microbatches 2 --top 0": "top must be at least 1, not 0",
    "plan --ranks 2 --microbatches 2 --devices 4": "--devices needs a config",
    "plan config.toml --gpu h100 --slices 0": "slices must be at least 1, not 0",
    "plan config.toml --gpu h100 --devices 0": "devices must be at least 1, not 0",
    "plan config.toml --gpu h100 --granularity 0": "granularity must be at least 1, not 0",
    "plan config.toml --gpu h100 --devices 1000000": "from 1 to 100,000 devices",
    "plan config.toml --gpu h100 --memory abc": "a size above 0, such as 80GiB, not abc",
    "plan config.toml --gpu h100 --set schedule.ranks=16": "4 layers cannot fill 16 ranks",
    "plan config.toml --gpu h100 --devices 2 --set mesh.tensor=4": "4 processes, but there are only 2",
    "plan config.toml --gpu h100 --devices 2 --set data.batch=7 --set schedule.microbatches=4": (
        "7 sequences cannot be dealt out evenly to 4 micro-batches"
    ),
    "simulate 1f1b --ranks 2 --microbatches 2 --cluster c.toml": "--cluster needs the times",
}
NEEDS_TORCH = "config.toml"


@pytest.fixture
def run(run, monkeypatch):
    """Run a command line in a folder with a config."""
    monkeypatch.setenv("COLUMNS", "80")
    Path("config.toml").write_text(SMALL_CONFIG)
    return run


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gets_a_short_answer(run, line):
    if NEEDS_TORCH in line:
        pytest.importorskip("torch")
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert MISTAKES[line] in err
    assert len(err.splitlines()) <= 2


def test_a_plan_for_devices_is_shown_in_a_narrow_terminal_and_trains(run):
    pytest.importorskip("torch")
    limits = "--stages 2 --slices 1 --top 3"
    line = f"plan config.toml --gpu h100 --devices 4 {limits} -o plan.json"
    code, out, err = run(line)
    assert (code, err) == (0, "wrote plan.json\n")
    assert max(map(len, out.splitlines())) <= 80
    head = next(row for row in out.splitlines() if "schedule" in row)
    assert "copies x ranks" in head
    assert "batch" in head
    first = Path("plan.json").read_bytes()
    _, out, _ = run(f"{line} --json")
    assert Path("plan.json").read_bytes() == first
    facts = json.loads(out, parse_constant=pytest.fail)
    noisy = [row["noisy_makespan"] for row in facts["schedules"]]
    assert noisy[0] > 0
    assert None in noisy
    # The config has another shape, which the named plan replaces.
    code, _, err = run("train config.toml --set schedule.name=plan.json --dry-run")
    assert code == 0, err
    code, _, err = run(
        "train config.toml --set schedule.name=plan.json --set schedule.ranks=7 --dry-run"
    )
    assert "schedule.ranks = 7, but plan.json has" in err


def test_a_search_says_which_settings_of_the_config_it_does_not_use(run):
    change = "--set model.vocab=256 --set schedule.ranks=2 --stages 1 --slices 1"
    named = "--set schedule.name=hanayo --set schedule.waves=2"
    run("init named.toml")
    line = f"plan named.toml --gpu h100 --devices 2 {change}"
    code, out, err = run(f"{line} {named}")
    assert code == 0, err
    text = " ".join((out + err).split())
    assert "not used: schedule.name, schedule.waves; this command searches" in text
    code, out, err = run(line)
    assert (code, "not used" in out + err) == (0, False)
