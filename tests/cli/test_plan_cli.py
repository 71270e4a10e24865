"""`penstock plan` as a person meets it: mistakes, narrow terminals, and what becomes of a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from commands import SMALL_CONFIG
from penstock.config import Config, ModelConfig, RunConfig
from penstock.cost.gpus import analytic_profile
from penstock.cost.profile import FASTEST_ROUND, SLOWEST_ROUND
from penstock.formats import write_profile
from penstock.plan.pricing import profile_question
from penstock.plan.space import Limits
from penstock.plan.workload import Workload
from penstock.view.numbers import write_range

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
    "plan config.toml --gpu h100 --set parallel.pp=16": "4 layers cannot fill 16 ranks",
    "plan config.toml --gpu h100 --devices 2 --set parallel.tp=4": "4 processes, but there are only 2",
    "plan config.toml --gpu h100 --devices 2 --set data.global_batch=7 --set schedule.microbatches=4": (
        "data.global_batch = 7 is not divisible by 4"
    ),
    "plan --gpu h100 --devices 64": "which model should be planned for the H100?",
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
    noisy = [row["noisy_step"] for row in facts["schedules"]]
    assert all(one is None or one > 0 for one in noisy)
    # The config has another shape, which the named plan replaces.
    code, _, err = run("train config.toml --set schedule.name=plan.json --dry-run")
    assert code == 0, err
    code, _, err = run(
        "train config.toml --set schedule.name=plan.json --set parallel.pp=7 --dry-run"
    )
    assert "parallel.pp = 7, but plan.json has" in err


def test_the_first_line_of_a_plan_names_precision_and_origin_of_its_times(run):
    run("init fresh.toml")
    line = (
        "plan fresh.toml --set model.vocab_size=256 --devices 2 --stages 1 --slices 1"
    )
    steps = {}
    for gpu, precision, words in (
        ("h100", "bfloat16", ""),
        ("v100", "float32", ""),  # it has no bfloat16
        ("h100", "float32", "--set run.precision=float32"),
    ):
        code, out, err = run(f"{line} --gpu {gpu} {words}")
        assert code == 0, err
        first = out.splitlines()[0]
        name = gpu.upper()
        basis = f"in {precision}, with times from the data sheet of the NVIDIA {name}"
        assert first == f"planned {basis}"
        code, out, _ = run(f"{line} --gpu {gpu} {words} --json")
        facts = json.loads(out)
        assert facts["basis"] == basis
        steps[gpu, precision] = facts["schedules"][0]["step"]
    assert steps["h100", "bfloat16"] < steps["h100", "float32"]
    _, out, _ = run(f"{line} --gpu h100 --for megatron --page page.html")
    assert out.startswith("planned in bfloat16, with times from the data sheet")
    page = Path("page.html").read_text()
    assert "It was planned in bfloat16, with times from the data sheet" in page
    _, out, _ = run("plan --ranks 2 --microbatches 2 --stages 1 --slices 1")
    assert out.startswith("planned in units of the papers")


def test_a_plan_by_a_measured_profile_says_that_it_was_measured():
    computed = analytic_profile(ModelConfig(vocab_size=256), 64, gpu="h100")
    device = (("device", "cpu"), ("dtype", "float32"), ("autocast", None))
    profile = replace(computed, device=device)
    workload = Workload(8, 64, batch=4, devices=2)
    question = profile_question(workload, lambda rows: profile, Limits(), "p.json")
    assert question.basis == "in float32, with measured times"


def test_a_plan_gives_the_range_of_its_step(run):
    computed = analytic_profile(ModelConfig(layers=4, vocab_size=256), 64, gpu="h100")
    rounds = ((FASTEST_ROUND, 0.88), (SLOWEST_ROUND, 1.09))
    device = (("device", "cpu"), ("dtype", "float32"), *rounds)
    write_profile(replace(computed, device=device), "profile.json")
    shape = "--ranks 2 --microbatches 2 --stages 1 --slices 1"
    config = "config.toml --devices 2 --stages 1 --slices 1 --gpu h100"
    measured = "measured times vary from -12% to +9%"
    formula = "measured times differ from this formula by -30% to +30%"
    for line, low, high, reason in (
        (f"plan {shape} --profile profile.json --tokens 64", 0.88, 1.09, measured),
        (f"plan {config}", 0.7, 1.3, formula),
    ):
        code, out, err = run(f"{line} --json")
        assert code == 0, err
        rows = json.loads(out)["schedules"]
        for row in rows:
            assert row["range"] == pytest.approx(
                [low * row["step"], high * row["step"]]
            )
        words = f"{reason}, so the step takes {write_range(*rows[0]['range'])}"
        _, out, _ = run(f"{line} --page page.html")
        assert words in " ".join(out.split())
        assert words[1:] in Path("page.html").read_text()
    _, out, _ = run(f"plan {config} --for megatron --json")
    expected = json.loads(out)["expected"]
    assert expected["range"] == pytest.approx(
        [0.7 * expected["step"], 1.3 * expected["step"]]
    )
    _, out, _ = run(f"plan {config} --for megatron")
    assert f"{formula}, so the step takes {write_range(*expected['range'])}" in out
    # In units of the papers nobody has measured anything.
    _, out, _ = run(f"plan {shape} --json")
    assert json.loads(out)["schedules"][0]["range"] is None
    _, out, _ = run(f"plan {shape}")
    assert "so the step takes" not in out


def test_train_and_profile_compute_as_a_plan_for_this_machine_says():
    pytest.importorskip("torch")
    from penstock.train.before.profile import request_of  # noqa: PLC0415
    from penstock.train.placement import decide_placement, precision_on  # noqa: PLC0415

    assert precision_on(Config(), "cpu") == "float32"
    config = Config(run=RunConfig(device="cpu"))
    request = request_of(config, decide_placement(config, 1))
    assert (request.device, request.autocast) == ("cpu", None)
    asked = replace(config, run=replace(config.run, precision="bfloat16"))
    assert request_of(asked, decide_placement(asked, 1)).autocast == "bfloat16"


def test_a_search_says_which_settings_of_the_config_it_does_not_use(run):
    change = "--set model.vocab_size=256 --set parallel.pp=2 --stages 1 --slices 1"
    named = "--set schedule.name=hanayo:waves=2"
    run("init named.toml")
    line = f"plan named.toml --gpu h100 --devices 2 {change}"
    code, out, err = run(f"{line} {named}")
    assert code == 0, err
    text = " ".join((out + err).split())
    assert "not used: schedule.name = hanayo:waves=2; this command searches" in text
    code, out, err = run(line)
    assert (code, "not used" in out + err) == (0, False)
