"""The command line as a new user sees it, including mistakes."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from penstock import REGISTRY, make
from penstock.cli.app import COMMANDS, load
from penstock.cli.terminal import (
    PRESET_NAMES,
)
from penstock.config import PRESETS, SECTIONS
from penstock.formats import load_torch_csv, read_plan
from suite import installed

HANAYO = "hanayo --ranks 4 --microbatches 4 --waves 2"


def test_simulate_prints_one_json_object(run):
    code, out, err = run(
        "simulate hanayo --ranks 8 --microbatches 8 --waves 2 --comm 0.05 --json"
    )
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["makespan"] == pytest.approx(34.4)
    assert facts["bubble"] == pytest.approx(0.3023, abs=1e-4)
    assert facts["peak_activations"] == [6.25, 6.5, 6.75, 7.0, 7.25, 7.5, 7.75, 8.0]
    assert facts["actions"] == 512
    assert facts["lower_bound"] <= facts["makespan"]


def test_costs_are_options(run):
    _, out, _ = run(
        "simulate 1f1b --ranks 4 --microbatches 8 --forward 2 --backward 3 --json"
    )
    assert json.loads(out)["makespan"] == pytest.approx(5 * (8 + 3))


def test_messages_can_wait_for_each_other_as_over_nccl(run):
    makespans = []
    for option in ("", "--channels 2", "--channels 1"):
        _, out, _ = run(
            f"simulate zb-v --ranks 4 --microbatches 8 --comm 0.25 {option} --json"
        )
        makespans.append(json.loads(out)["makespan"])
    assert makespans == [28.75, 30.0, 33.0]


@pytest.mark.parametrize("ending", ["svg", "html", "json", "csv", "trace.json"])
def test_draw_writes_the_format_of_the_ending(run, ending):
    code, out, err = run(f"draw {HANAYO} -o x.{ending}")
    assert (code, out) == (0, "")
    assert err == f"wrote x.{ending}\n"
    text = Path(f"x.{ending}").read_text()
    if ending == "svg":
        assert ElementTree.fromstring(text).tag.endswith("svg")
    elif ending == "html":
        assert text.lower().startswith("<!doctype html>")
    elif ending == "csv":
        assert (
            load_torch_csv(text).lanes
            == make("hanayo", ranks=4, microbatches=4, waves=2).lanes
        )
    elif ending == "json":
        assert read_plan(f"x.{ending}").schedule == make(
            "hanayo", ranks=4, microbatches=4, waves=2
        )
    else:
        assert json.loads(text)["traceEvents"]


def test_draw_shows_one_line_per_rank_in_the_terminal(run):
    code, out, _ = run(f"draw {HANAYO}")
    assert code == 0
    assert sum(line.startswith("rank") for line in out.splitlines()) == 4
    assert all(len(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize("ending", ["json", "csv"])
def test_a_file_can_replace_the_name_of_a_schedule(run, ending):
    run(f"draw {HANAYO} -o x.{ending}")
    _, by_name, _ = run(f"simulate {HANAYO} --comm 0.1 --json")
    _, by_file, _ = run(f"simulate x.{ending} --comm 0.1 --json")
    assert json.loads(by_file)["makespan"] == json.loads(by_name)["makespan"]
    code, _, _ = run(f"draw x.{ending} -o y.svg")
    assert code == 0


def test_one_rank_and_one_micro_batch_are_not_plural(run):
    code, out, _ = run("check 1f1b --ranks 1 --microbatches 1")
    assert code == 0
    assert "1 rank, 1 micro-batch and 2 actions" in out


def test_plan_ranks_the_schedules_and_writes_the_best(run):
    code, out, _ = run(
        "plan --ranks 4 --microbatches 8 --comm 0.05 --memory 4 --stages 2 --slices 2 "
        "-o plan.json --json"
    )
    rows = json.loads(out)["schedules"]
    assert code == 0
    assert "NaN" not in out
    steps = [row["step"] for row in rows[1:]]
    assert steps == sorted(steps)
    # A slower plan comes first only if it is faster under noise.
    fastest = min(rows, key=lambda row: row["step"])
    assert rows[0]["noisy_step"] <= 1.003 * fastest["noisy_step"]
    assert json.loads(out)["lower_bound"] <= fastest["step"] + 1e-9
    assert all(row["peak"] <= 4 + 1e-9 for row in rows)
    plan = read_plan("plan.json")
    assert (plan.facts["step"], plan.facts["peak"]) == (
        rows[0]["step"],
        rows[0]["peak"],
    )
    code, out, _ = run("check plan.json")
    assert (code, "is a valid schedule" in out) == (0, True)
    code, out, _ = run("check plan.json --json")
    assert json.loads(out)["ok"] is True
    code, out, _ = run("check hanayo --ranks 2 --microbatches 2 --waves 2 --json")
    assert (code, json.loads(out)["actions"]) == (0, 32)


@pytest.mark.parametrize("source", ["plan.json", "x.csv"])
def test_check_run_compares_every_gradient_with_the_unsplit_model(run, source):
    pytest.importorskip("torch")
    run(
        "plan --ranks 2 --microbatches 4 --comm 0.05 --memory 2 --slices 1 -o plan.json"
    )
    run("draw interleaved-zb --ranks 2 --microbatches 3 -o x.csv")
    code, out, err = run(f"check {source} --run --json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["gradients"] > 10
    assert facts["worst"] < 1e-10


def test_check_run_accepts_sliced_schedules(run):
    pytest.importorskip("torch")
    run("draw seq1f1b --ranks 2 --microbatches 2 --slices 3 -o x.json")
    code, out, err = run("check x.json --run")
    assert (code, err) == (0, "")
    assert "equal those of the unsplit model" in " ".join(out.split())


def test_check_run_tells_a_wrong_gradient_from_rounding(run, monkeypatch):
    """The weights of the ranks are off by 1e-7: far more than rounding, but still small."""
    trial = pytest.importorskip("penstock.train.before.trial")
    shifts = iter([0.0, 1e-7, 1e-7])  # the unsplit model, then each rank's copy

    def copied(model):
        twin, shift = copy.deepcopy(model), next(shifts)
        for parameter in twin.parameters():
            parameter.data += shift
        return twin

    run("draw 1f1b --ranks 2 --microbatches 2 -o x.json")
    code, out, _ = run("check x.json --run")
    assert (
        code,
        "within the rounding of float64 (all differences are below 1e-10)"
        in " ".join(out.split()),
    ) == (0, True)
    monkeypatch.setattr(trial, "copy", SimpleNamespace(deepcopy=copied))
    code, _, err = run("check x.json --run")
    assert code == 2
    assert "differs from that of the unsplit model by" in err


def test_plan_prints_a_table_that_fits(run):
    limits = "--memory 4 --stages 2 --slices 2"
    code, out, _ = run(f"plan --ranks 4 --microbatches 8 --comm 0.05 {limits} --top 5")
    assert code == 0
    assert "bound: no plan of this space takes less than" in out
    assert "not tried: skip" in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_check_says_that_a_single_rank_sends_nothing(run):
    code, out, _ = run("check gpipe --ranks 1 --microbatches 2")
    assert code == 0
    assert "Its ranks send each other no activations." in " ".join(out.split())


def test_compare_shows_two_schedules_on_one_page(run):
    run(f"draw {HANAYO} -o x.json")
    code, _, err = run(
        "compare 1f1b x.json --ranks 4 --microbatches 4 --comm 0.05 -o report.html"
    )
    assert (code, err) == (0, "wrote report.html\n")
    assert "1f1b" in Path("report.html").read_text()
    code, _, err = run("compare 1f1b x.json --ranks 4 --microbatches 4")
    assert (code, err) == (0, "wrote compare.html\n")


def test_list_knows_every_schedule(run):
    code, out, _ = run("list --json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)["schedules"]] == list(REGISTRY)
    _, out, _ = run("list")
    assert all(name in out for name in REGISTRY)


def test_every_command_has_help_with_an_example_and_begins_as_the_list_says(run):
    for name, (_, about) in COMMANDS.items():
        code, out, _ = run(f"{name} --help")
        assert code == 0
        assert f"Example: penstock {name}" in out
        assert load(name).help.startswith(f"{about}\n\n")


def test_a_list_of_the_commands_imports_none_of_them():
    code = (
        "import sys; from typer.testing import CliRunner; from penstock.cli.app import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "assert not {'numpy', 'penstock.plan', 'penstock.view', 'penstock.cli.model'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("line", ["--help", "train --help"])
def test_help_does_not_show_a_value_where_a_flag_takes_none(line, run):
    code, out, _ = run(line)
    assert code == 0
    assert "bool" not in out.lower()


def test_help_names_all_presets():
    assert re.split(", | or ", PRESET_NAMES) == list(PRESETS)


def test_help_names_no_section_in_brackets():
    """The terminal would take [lora] for a style, and the word would be missing from its sentence."""
    sections = [f"[{name}]" for name in SECTIONS]
    assert "[lora]" in sections
    for name in COMMANDS:
        command = load(name)
        texts = [command.help, *(getattr(one, "help", "") for one in command.params)]
        text = " ".join(filter(None, texts))
        assert [section for section in sections if section in text] == [], name


# ---------------------------------------------------------------- mistakes
MISTAKES = {
    "simulate hanyo --ranks 4 --microbatches 4": "did you mean 'hanayo'?",
    "simulate chimera --ranks 5 --microbatches 4": "the nearest is 6",
    "simulate 1f1b --ranks 4": "1f1b needs microbatches",
    "simulate 1f1b --ranks 0 --microbatches 4": "ranks must be at least 1, not 0",
    "simulate 1f1b --ranks 4 --microbatches 4 --waves 2": "1f1b has no waves",
    "simulate 1f1b --ranks 4 --microbatches 4 --slices 0": "slices must be at least 1, not 0",
    "simulate 1f1b --ranks 4 --microbatches 4 --copies 0": "copies must be at least 1, not 0",
    "simulate 1f1b --ranks 4 --microbatches 4 --comm -1": "--comm must be at least 0 and at most 1e+12, not -1",
    "simulate 1f1b --ranks 4 --microbatches 4 --forward nan": "--forward must be above 0 and at most 1e+12, not nan",
    "simulate skip --ranks 4 --microbatches 4 --skips 3": "at most 2 can be left out",
    "simulate missing.json": "cannot read missing.json",
    "simulate missing.csv": "cannot read missing.csv",
    "draw 1f1b --ranks 2 --microbatches 2 -o x.pdf": "its name must end in one of",
    "draw 1f1b --ranks 2 --microbatches 2 -o no/such/folder/x.svg": "cannot write",
    "draw seq1f1b --ranks 2 --microbatches 2 -o x.csv": "torch's CSV cannot hold this schedule",
    "check missing.json": "cannot read missing.json",
    "check .": "cannot read .",
    "plan --ranks 4 --microbatches 4 --memory 0.01": "nothing fits into a memory of 0.01",
    "plan --ranks 0 --microbatches 4": "ranks must be at least 1, not 0",
    "plan --ranks 2 --microbatches 2 --memory nan": "--memory is a number of micro-batches above 0, such as 4, not nan",
    "plan --ranks 2 --microbatches 2 --memory -1": "--memory is a number of micro-batches above 0, such as 4, not -1",
    "draw 1f1b --ranks 2 --microbatches 2 --comm 1e308": "--comm must be at least 0 and at most 1e+12, not 1e+308",
    "compare 1f1b gpipe --ranks 2 --microbatches 2 -o x.png": "its name must end in .html",
    "simulate 1f1b --ranks four --microbatches 4": "Invalid value for '--ranks'",
    "nonsense": "No such command",
    "help train": "'help' is an option here: penstock --help, penstock COMMAND --help",
    "completion": "'completion' is an option here: penstock --install-completion",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_message_and_exit_code_2(run, line):
    code, out, err = run(line)
    assert code == 2
    assert out == ""
    assert MISTAKES[line] in " ".join(err.split())
    assert "Traceback" not in err


def test_a_broken_plan_is_shown_with_its_place(run):
    run(f"draw {HANAYO} -o x.json")
    text = Path("x.json").read_text()
    Path("cut.json").write_text(text[: len(text) // 2])
    code, _, err = run("check cut.json")
    assert code == 2
    assert "cut.json:" in err
    assert "ends too early" in err
    Path("order.json").write_text(text.replace("0F0 0F1", "0F1 0F1"))
    code, _, err = run("check order.json")
    assert code == 2
    assert "0F1 occurs twice" in err
    assert "^^^" in err


def test_a_file_cannot_be_combined_with_a_shape(run):
    run(f"draw {HANAYO} -o x.json")
    code, _, err = run("simulate x.json --ranks 4")
    assert code == 2
    assert "has its own shape" in err


@installed
def test_it_runs_as_a_program():
    done = subprocess.run(
        [
            Path(sys.executable).parent / "penstock",
            "simulate",
            "nope",
            "--ranks",
            "2",
            "--microbatches",
            "2",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("UnknownNameError: there is no schedule 'nope'")


# ---------------------------------------------------------------- sizes of schedules, and of terminals
@pytest.mark.parametrize(
    "line",
    [
        "simulate hanayo --ranks 4 --microbatches 4 --waves 100000",
        "draw gpipe --ranks 4 --microbatches 99999999",
        "simulate 1f1b --ranks 4 --microbatches 4 --slices 99999999",
        "plan --ranks 4 --microbatches 99999999",
        "plan --ranks 99999999 --microbatches 4",
        "compare 1f1b gpipe --ranks 4 --microbatches 99999999 -o x.html",
        "simulate 1f1b --ranks 4 --microbatches 4 --copies 99999999",
    ],
)
def test_an_absurd_size_is_refused_with_the_number_of_actions(run, line):
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert "actions; at most 4,000,000 are possible" in err
    assert "Traceback" not in err


def test_no_number_in_a_table_is_cut_off(run, monkeypatch):
    sizes = "--ranks 2 --microbatches 4 --stages 2 --slices 2"
    line = f"plan {sizes} --comm 0.05 --forward 33.777"
    rows = json.loads(run(f"{line} --json")[1])["schedules"]
    for width in (80, 60, 40, 20):
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, _ = run(f"{line} --top 1000")
        assert code == 0
        assert all(len(text) <= width for text in out.splitlines())
        assert "…" not in out
        words = out.split()
        for row in rows:
            assert f"{row['step']:.4g}" in words
            if width != 40 and row["noisy_step"] is not None:
                assert f"{row['noisy_step']:.4g}" in words
        if width == 40:
            told = " ".join(words)
            assert re.search(
                r"no room for [^:]*±10%[^:]*: widen the terminal, or use", told
            )


@pytest.mark.parametrize(
    "line",
    ["list", "simulate hanayo --ranks 16 --microbatches 32 --waves 2 --comm 0.0512345"],
)
def test_tables_fit_into_a_narrow_terminal(run, monkeypatch, line):
    for width in (80, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, _ = run(line)
        assert code == 0
        assert all(len(text) <= width for text in out.splitlines())
        assert "…" not in out
