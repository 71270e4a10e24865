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
from penstock.cli.app import COMMANDS, OLD_COMMANDS, OLD_OPTIONS, load
from penstock.cli.terminal import (
    PRESET_NAMES,
)
from penstock.config import PRESETS, SECTIONS
from penstock.formats import load_torch_csv, read_plan
from suite import installed

HANAYO = "hanayo:waves=2 --pp 4 --microbatches 4"


def test_simulate_prints_one_json_object(run):
    code, out, err = run(
        "draw hanayo:waves=2 --pp 8 --microbatches 8 --cost comm=0.05 --json"
    )
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["makespan"] == pytest.approx(34.4)
    assert facts["bubble"] == pytest.approx(0.3023, abs=1e-4)
    assert facts["peak_activations"] == [6.25, 6.5, 6.75, 7.0, 7.25, 7.5, 7.75, 8.0]
    assert facts["actions"] == 512
    assert facts["lower_bound"] <= facts["makespan"]


def test_costs_are_options(run):
    _, out, _ = run("draw 1f1b --pp 4 --microbatches 8 --cost F=2,B=3 --json")
    assert json.loads(out)["makespan"] == pytest.approx(5 * (8 + 3))


def test_messages_can_wait_for_each_other_as_over_nccl(run):
    makespans = []
    for more in ("", ",channels=2", ",channels=1"):
        _, out, _ = run(
            f"draw zb-v --pp 4 --microbatches 8 --cost comm=0.25{more} --json"
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
    _, by_name, _ = run(f"draw {HANAYO} --cost comm=0.1 --json")
    _, by_file, _ = run(f"draw x.{ending} --cost comm=0.1 --json")
    assert json.loads(by_file)["makespan"] == json.loads(by_name)["makespan"]
    code, _, _ = run(f"draw x.{ending} -o y.svg")
    assert code == 0


def test_one_rank_and_one_micro_batch_are_not_plural(run):
    code, out, _ = run("check 1f1b --pp 1 --microbatches 1")
    assert code == 0
    assert "1 rank, 1 micro-batch and 2 actions" in out


def test_plan_ranks_the_schedules_and_writes_the_best(run):
    code, out, _ = run(
        "plan --pp 4 --microbatches 8 --memory 4mb  --cost comm=0.05 --limit stages=2,slices=2 "
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
    code, out, _ = run("check hanayo:waves=2 --pp 2 --microbatches 2 --json")
    assert (code, json.loads(out)["actions"]) == (0, 32)


@pytest.mark.parametrize("source", ["plan.json", "x.csv"])
def test_check_run_compares_every_gradient_with_the_unsplit_model(run, source):
    pytest.importorskip("torch")
    run(
        "plan --pp 2 --microbatches 4 --memory 2mb --cost comm=0.05 --limit slices=1 -o plan.json"
    )
    run("draw interleaved-zb --pp 2 --microbatches 3 -o x.csv")
    code, out, err = run(f"check {source} --run --json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["gradients"] > 10
    assert facts["worst"] < 1e-10


def test_check_run_accepts_sliced_schedules(run):
    pytest.importorskip("torch")
    run("draw seq1f1b:slices=3 --pp 2 --microbatches 2 -o x.json")
    code, out, err = run("check x.json --run")
    assert (code, err) == (0, "")
    assert "Gradient check passed" in " ".join(out.split())


def test_check_run_tells_a_wrong_gradient_from_rounding(run, monkeypatch):
    """The weights of the ranks are off by 1e-7: far more than rounding, but still small."""
    trial = pytest.importorskip("penstock.train.before.trial")
    shifts = iter([0.0, 1e-7, 1e-7])  # the unsplit model, then each rank's copy

    def copied(model):
        twin, shift = copy.deepcopy(model), next(shifts)
        for parameter in twin.parameters():
            parameter.data += shift
        return twin

    run("draw 1f1b --pp 2 --microbatches 2 -o x.json")
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


def test_check_says_that_a_single_rank_sends_nothing(run):
    code, out, _ = run("check gpipe --pp 1 --microbatches 2")
    assert code == 0
    assert "Its ranks send each other no activations." in " ".join(out.split())


def test_compare_shows_two_schedules_on_one_page(run):
    run(f"draw {HANAYO} -o x.json")
    code, _, err = run(
        "draw 1f1b x.json --pp 4 --microbatches 4 --cost comm=0.05 -o report.html"
    )
    assert (code, err) == (0, "wrote report.html\n")
    assert "1f1b" in Path("report.html").read_text()


def test_several_schedules_are_one_table(run):
    """Those by name take the size of a file beside them."""
    run(f"draw {HANAYO} -o x.json")
    code, out, err = run("draw x.json 1f1b Interleaved1F1B:chunks=2 zb-v")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if "%" in line]
    names = [row[0] for row in rows]
    assert names == ["hanayo:waves=2", "1f1b", "interleaved:chunks=2", "zb-v"]
    _, out, _ = run("draw x.json 1f1b --json")
    assert [one["microbatches"] for one in json.loads(out)["schedules"]] == [4, 4]
    _, out, _ = run("draw 1f1b zb-v --json")
    assert [one["ranks"] for one in json.loads(out)["schedules"]] == [4, 4]
    assert json.loads(out)["version"] == 1


def test_draw_alone_lists_every_schedule(run):
    code, out, _ = run("draw --json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)["schedules"]] == list(REGISTRY)
    _, out, _ = run("draw")
    assert all(name in out for name in REGISTRY)


def test_every_command_has_help_with_an_example_and_begins_as_the_list_says(run):
    for name, (_, about) in COMMANDS.items():
        code, out, _ = run(f"{name} --help")
        assert code == 0
        assert f"Example: penstock {name}" in out
        assert load(name).help.startswith(f"{about}\n\n")


def test_there_are_few_options():
    """Beside --help, hidden ones and arguments."""
    counts = {name: len(options_of(name)) for name in COMMANDS}
    assert sum(counts.values()) == 80, counts  # 85 at most
    assert len(COMMANDS) == 14


def options_of(name: str) -> list[str]:
    params = load(name).params
    shown = [one for one in params if one.opts[0].startswith("-") and not one.hidden]
    return [one.opts[-1] for one in shown]


def test_what_is_gone_is_refused_with_the_new_way(run):
    assert not {*OLD_COMMANDS} & {*COMMANDS}
    for name, instead in OLD_COMMANDS.items():
        code, out, err = run(name)
        assert (code, out) == (2, "")
        assert instead in said(err)
    for option, instead in OLD_OPTIONS.items():
        lacking = next(one for one in COMMANDS if option not in options_of(one))
        code, out, err = run(f"{lacking} {option}=3")
        assert (code, out) == (2, "")
        assert f"{option} is gone: {instead}" in said(err)


def said(err: str) -> str:
    """A message without its frame."""
    return " ".join(err.replace("│", " ").split())


def test_simulate_is_draw(run):
    assert run("simulate 1f1b --json") == run("draw 1f1b --json")
    assert "simulate" not in run("--help")[1]


def test_a_list_of_the_commands_imports_none_of_them():
    code = (
        "import sys; from typer.testing import CliRunner; from penstock.cli.app import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "assert not {'numpy', 'penstock.plan', 'penstock.view', 'penstock.cli.model'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_draw_takes_a_function_of_the_user(run):
    Path("mine.py").write_text(
        "from penstock import make\n\n"
        "def eager(pp, microbatches):\n    return make('1f1b', ranks=pp, microbatches=microbatches)\n\n"
        "def wrong(pp, microbatches):\n    return 3\n\n"
        "def broken(pp, microbatches):\n    return pp / 0\n"
    )
    mine = json.loads(run("draw mine.py:eager --pp 3 --json")[1])
    named = json.loads(run("draw 1f1b --pp 3 --json")[1])
    assert mine.pop("name") == "eager"
    assert named.pop("name") == "1f1b"
    assert mine == named
    assert run("check mine.py:eager")[0] == 0
    for name, words in {
        "eagre": "did you mean 'eager'",
        "wrong": "wrong of mine.py returned int, not a Schedule",
        "broken": "broken(4, 8) failed in mine.py:10: ZeroDivisionError",
    }.items():
        code, _, err = run(f"draw mine.py:{name}")
        assert (code, words in err) == (2, True), err
    assert "cannot read his.py" in run("draw his.py:eager")[2]


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
    "draw hanyo --pp 4 --microbatches 4": "did you mean 'hanayo'?",
    "draw chimera --pp 5 --microbatches 4": "the nearest is 6",
    "draw 1f1b --pp 0 --microbatches 4": "ranks must be at least 1, not 0",
    "draw 1f1b:waves=2 --pp 4 --microbatches 4": "1f1b has no 'waves'",
    "draw 1f1b:slices=0 --pp 4 --microbatches 4": "slices must be at least 1, not 0",
    "draw 1f1b:copies=0 --pp 4 --microbatches 4": "copies must be at least 1, not 0",
    "draw 1f1b --pp 4 --microbatches 4 --cost comm=-1": "--cost: comm must be at least 0 and at most 1e+12, not -1",
    "draw 1f1b --pp 4 --microbatches 4 --cost F=nan": "--cost: F must be above 0 and at most 1e+12, not nan",
    "draw skip:skips=3 --pp 4 --microbatches 4": "at most 2 can be left out",
    "draw missing.json": "cannot read missing.json",
    "draw missing.csv": "cannot read missing.csv",
    "draw 1f1b --pp 2 --microbatches 2 -o x.pdf": "its name must end in one of",
    "draw 1f1b --pp 2 --microbatches 2 -o no/such/folder/x.svg": "cannot write",
    "draw seq1f1b --pp 2 --microbatches 2 -o x.csv": "torch's CSV cannot hold this schedule",
    "check missing.json": "cannot read missing.json",
    "check .": "cannot read .",
    "plan --pp 0 --microbatches 4": "pp must be at least 1, not 0",
    "plan --pp 2 --microbatches 2 --memory nan": "--memory is a number of micro-batches above 0, such as 4mb, not nan",
    "plan --pp 2 --microbatches 2 --memory -1": "--memory is a number of micro-batches above 0, such as 4mb, not -1",
    "draw 1f1b --cost comm=1e308": "--cost: comm must be at least 0 and at most 1e+12, not 1e+308",
    "draw 1f1b gpipe --pp 2 --microbatches 2 -o x.png": "its name must end in one of .html",
    "draw 1f1b --pp four --microbatches 4": "Invalid value for '--pp'",
    "nonsense": "No such command",
    "draw 1f1b --cost h100": "penstock profile MODEL --gpu h100",
    "draw 1f1b --cost channels=3": "channels must be 1 or 2, not 3",
    "draw 1f1b --cost speed=3": "--cost has no 'speed'",
    "plan --memory 4": "such as 4mb, not 4",
    "plan --limit layers=2": "--limit has no 'layers'",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_message_and_exit_code_2(run, line):
    code, out, err = run(line)
    assert code == 2
    assert out == ""
    assert MISTAKES[line] in " ".join(err.split())
    assert "Traceback" not in err


def test_a_script_can_tell_that_nothing_fits(run):
    code, out, err = run("plan --pp 4 --microbatches 4 --memory 0.01mb")
    assert (code, out) == (3, "")
    assert "NothingFitsError: nothing fits into a memory of 0.01" in err


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
    code, _, err = run("draw x.json --pp 4")
    assert code == 2
    assert "has its own shape" in err


@installed
def test_it_runs_as_a_program():
    done = subprocess.run(
        [
            Path(sys.executable).parent / "penstock",
            "draw",
            "nope",
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
        "draw hanayo:waves=100000 --pp 4 --microbatches 4",
        "draw gpipe --pp 4 --microbatches 99999999",
        "draw 1f1b:slices=99999999 --pp 4 --microbatches 4",
        "plan --pp 4 --microbatches 99999999",
        "plan --pp 99999999 --microbatches 4",
        "draw 1f1b gpipe --pp 4 --microbatches 99999999 -o x.html",
        "draw 1f1b:copies=99999999 --pp 4 --microbatches 4",
    ],
)
def test_an_absurd_size_is_refused_with_the_number_of_actions(run, line):
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert "actions; at most 4,000,000 are possible" in err
    assert "Traceback" not in err


def test_no_number_in_a_table_is_cut_off(run, monkeypatch):
    sizes = "--pp 2 --microbatches 4 --limit stages=2,slices=2"
    line = f"plan {sizes} --cost comm=0.05,F=33.777"
    rows = json.loads(run(f"{line} --json")[1])["schedules"]
    for width in (80, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, _ = run(f"{line} --top 9")
        assert code == 0
        assert all(len(text) <= width for text in out.splitlines())
        assert "…" not in out
        words = out.split()
        for row in rows[:9]:
            assert f"{row['step']:.4g}" in words


@pytest.mark.parametrize(
    "line",
    [
        "draw",
        "draw 1f1b zb-v",
        "draw hanayo:waves=2 --pp 16 --microbatches 32 --cost comm=0.0512345",
    ],
)
def test_tables_fit_into_a_narrow_terminal(run, monkeypatch, line):
    for width in (80, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, _ = run(line)
        assert code == 0
        assert all(len(text) <= width for text in out.splitlines())
        assert "…" not in out
