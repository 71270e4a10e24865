"""`penstock plan` as a person meets it: mistakes, narrow terminals, and what becomes of a plan."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from commands import SMALL_CONFIG
from penstock.cli import terminal
from penstock.cli.landscape import planning
from penstock.config import Config, ModelConfig, RunConfig
from penstock.cost.gpus import analytic_profile
from penstock.cost.profile import FASTEST_ROUND, SLOWEST_ROUND
from penstock.formats import write_profile
from penstock.plan.pricing import profile_question
from penstock.plan.search import SearchProgress
from penstock.plan.space import Limits
from penstock.plan.workload import Workload
from penstock.view.numbers import write_range

MISTAKES = {
    "plan --pp 2 --microbatches 2 --memory 80GB": "is a number of micro-batches above 0",
    "plan --pp 2 --microbatches 2 --memory -1": "is a number of micro-batches above 0",
    "plan --pp 5000 --microbatches 5000": "50,000,000 actions; at most 4,000,000 are possible",
    "plan --pp 2 --microbatches 2 --top 0": "--top must be at least 1, not 0",
    "plan --pp 2 --microbatches 2 --devices 4": "--devices needs a model",
    "plan config.toml --gpu h100 --limit slices=0": "slices must be at least 1, not 0",
    "plan config.toml --gpu h100 --devices 0": "--devices must be at least 1, not 0",
    "plan config.toml --gpu h100 --devices 1000000": "from 1 to 100,000 devices",
    "plan config.toml --gpu h100 --memory abc": "a size above 0 with its unit, such as 80GiB, not abc",
    "plan config.toml --gpu h100 --set parallel.pp=16": "4 layers cannot fill 16 ranks",
    "plan config.toml --gpu h100 --devices 2 --set parallel.tp=4": "4 processes, but there are only 2",
    "plan config.toml --gpu h100 --devices 2 --set data.global_batch=7 --set schedule.microbatches=4": (
        "data.global_batch = 7 is not divisible by 4"
    ),
    "plan --gpu h100 --devices 64": "--devices needs a model: penstock plan MODEL",
    "plan --gpu h100": "--gpu needs a model: penstock plan MODEL",
    "plan --baseline dp_shard=8": "--baseline needs a model",
    "plan config.toml --gpu h100 --memory 80": "with its unit, such as 80GiB, not 80",
    "plan config.toml --cost F=2": "--cost F=2 is for a pipeline without a model",
    "plan config.toml --gpu h100 --baseline cp=2": "cp is not planned yet",
    "plan config.toml --gpu h100 --baseline ranks=2": "layout has no 'ranks'",
    "plan config.toml --gpu h100 --devices 2 --baseline dp_shard=4": "takes 4 devices, but there are 2",
    "plan config.toml --gpu h100 --devices 3 --baseline dp_shard=3": "8 sequences is not divisible by 3",
    "plan nothere": "neither a file nor a preset nothere",
    "draw 1f1b --pp 2 --microbatches 2 --cluster c.toml": "--cluster needs the times",
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
    limits = "--limit stages=2,slices=1 --top 3"
    line = f"plan config.toml --gpu h100 --devices 4 {limits} -o plan.json"
    code, out, err = run(line)
    assert (code, err) == (0, "wrote plan.json\n")
    assert max(map(len, out.splitlines())) <= 80
    head = next(row for row in out.splitlines() if "schedule" in row)
    assert head.split()[:6] == ["schedule", "dp", "fsdp", "pp", "tp", "mb"]
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
    line = "plan fresh.toml --set model.vocab_size=256 --devices 2 --limit stages=1,slices=1"
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
    _, out, _ = run("plan --pp 2 --microbatches 2 --limit stages=1,slices=1")
    assert out.startswith("planned with unit costs (F = 1")


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
    shape = "--pp 2 --microbatches 2 --limit stages=1,slices=1"
    config = "config.toml --devices 2 --limit stages=1,slices=1 --gpu h100"
    measured = "measured times vary from -12% to +9%"
    formula = "measured times differ from this formula by -30% to +30%"
    for line, low, high, reason in (
        (f"plan {shape} --cost profile.json", 0.88, 1.09, measured),
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
    change = "--set model.vocab_size=256 --pp 2 --limit stages=1,slices=1"
    named = "--set schedule.name=hanayo:waves=2"
    run("init named.toml")
    line = f"plan named.toml --gpu h100 --devices 2 {change}"
    code, out, err = run(f"{line} {named}")
    assert code == 0, err
    text = " ".join((out + err).split())
    assert "not used: schedule.name = hanayo:waves=2; this command searches" in text
    code, out, err = run(line)
    assert (code, "not used" in out + err) == (0, False)


LLAMA = {
    **{
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 4,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128},
}
QUICK = "--devices 4 --limit stages=1,slices=1 --top 3"


def test_a_hugging_face_model_is_planned_without_tokenizer_or_torch(run, monkeypatch):
    Path("hub").mkdir()
    Path("hub/config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it now fails
    facts = []
    for model in ("hub", "hub/config.json"):
        code, out, err = run(f"plan {model} --gpu h100 {QUICK} --json")
        assert code == 0, err
        facts.append(json.loads(out))
    assert facts[0] == facts[1]
    assert sum(facts[0]["schedules"][0]["partition"]) == 4
    code, out, _ = run(f"plan hub --cost h100 {QUICK}")
    assert (code, out.splitlines()[1][:21]) == (0, "model: hub, 4 layers;")


def test_an_untied_model_of_a_folder_is_planned_for_torchtitan(run):
    Path("hub").mkdir()
    Path("hub/config.json").write_text(json.dumps(LLAMA))
    line = f"plan hub --gpu h100 {QUICK} --pp 2 --for torchtitan"
    assert run(line)[0] == 0
    tied = LLAMA | {"tie_word_embeddings": True}
    Path("hub/config.json").write_text(json.dumps(tied))
    assert "ties its embedding to its head" in run(line)[2]


def test_a_plan_is_compared_with_fsdp_and_with_a_baseline(run):
    """A row can be pasted as a baseline, and has the same time again."""
    line = "plan tiny --gpu h100 --devices 4 --limit stages=2,slices=1"
    facts = json.loads(run(f"{line} --json")[1])
    assert [one["name"] for one in facts["compared_with"]] == ["FSDP only"]
    published = [one for one in facts["schedules"] if one["order"] == "published"]
    for row in published[:4]:
        code, out, err = run(f"{line} --baseline {row['layout']} --json")
        assert code == 0, err
        fsdp, again = json.loads(out)["compared_with"]
        assert fsdp["layout"].startswith("dp_shard=4,microbatches=")
        assert (again["step"], again["peak"]) == (row["step"], row["peak"])
        assert again["layout"] == row["layout"]
    code, out, _ = run(f"{line} --baseline pp=4,microbatches=1")
    last = " ".join(" ".join(out.splitlines()[-3:]).split())
    assert "plan 1 takes " in last
    assert (
        "less time than baseline (pp=4,microbatches=1,schedule=1f1b): idle time" in last
    )
    rows = [row.split() for row in out.splitlines() if row.startswith(" -  ")]
    assert [row[1] for row in rows] == ["FSDP", "1f1b"]


def test_plans_that_look_equal_are_shown_once_under_the_published_name(run):
    _, out, _ = run("plan --pp 4 --microbatches 8 --limit stages=1,slices=1")
    rows = [row.split()[1:] for row in out.splitlines() if row[1:3].strip().isdecimal()]
    numbers = [tuple(row[1:]) for row in rows]
    assert len(set(numbers)) == len(numbers) > 2
    assert "zb-h1" in [row[0] for row in rows]


def test_a_search_ends_after_the_seconds_that_it_may_take(run):
    code, out, err = run("plan tiny --gpu h100 --devices 8 --seconds 1e-9 --json")
    assert code == 0
    assert json.loads(out)["interrupted"] is True
    assert "this is the best plan so far" in err


def test_a_log_has_lines_of_progress(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    with planning() as watch:
        watch(SearchProgress("pp=2", 2.0, 1.0, 0.4))
    shown = capsys.readouterr().err
    assert (
        shown
        == "planning ████······ 40%: pp=2 (best so far 2 s, optimality gap at most 100.0%)\n"
    )
