"""The benchmarks: each runs with tiny sizes, and the tables of the pages are those of the committed measurements."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from commands import environment
from forked import Command

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

import harness  # noqa: E402

SCRIPTS = [
    file.relative_to(FOLDER).as_posix()
    for file in sorted(FOLDER.rglob("*.py"))
    if "Script(" in file.read_text() and file.stem != "harness"
]
# They start `penstock train` several times, which takes half a minute or more.
LONG = ("churn.py", "gpu/workers.py")
KEPT = [name for name in SCRIPTS if "def committed(" in (FOLDER / name).read_text()]
KEPT.remove("convergence.py")  # whose runs are not committed


def run(script: str, *words: str) -> str:
    done = Command(FOLDER, words, environment(), script=FOLDER / script)
    out, err = done.communicate()
    assert done.returncode == 0, err
    return out


@pytest.fixture
def load(monkeypatch):
    """Import a script."""
    before = set(sys.modules)

    def load_script(name: str):
        monkeypatch.syspath_prepend(str((FOLDER / name).parent))
        return import_module(Path(name).stem)

    yield load_script
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(FOLDER):
            del sys.modules[name]


# ---------------------------------------------------------------- every script
def both_sides_are_planned(found):
    *_, full, paths = found["rows"]
    assert paths["saved_predicted"] == 1 - paths["predicted"] / full["predicted"]


def rivals_compute_the_same_loss(found):
    (row,) = found["rows"]
    contenders = row["contenders"]
    assert next(iter(contenders)) == "auto"
    assert {"1f1b", "hanayo waves=1", "zb-v"} <= set(contenders) | set(row["missing"])
    for one in contenders.values():
        assert one["loss"] == pytest.approx(contenders["auto"]["loss"], rel=1e-5)
    others = [one["predicted"] for one in contenders.values()]
    assert contenders["auto"]["predicted"] <= min(others) * 1.003


def both_runtimes_find_the_same_loss(found):
    losses = [row["loss"] for row in found["pipeline"]]
    assert losses[0]["torch"] == pytest.approx(losses[0]["ours"], rel=1e-5)
    assert losses[1]["ours"] == pytest.approx(losses[0]["ours"], rel=1e-5)
    (alone,) = found["alone"]
    assert set(alone["candidates"]) == {"plain", "autocast", "ours", "recorded"}


def transports_are_compared_with_what_the_simulator_says(found):
    whole, half, *replicas = found["rows"]
    assert (whole["messages"], half["messages"]) == ("float32", "bfloat16")
    assert half["message_bytes"] == whole["message_bytes"] / 2
    assert half["loss"] == pytest.approx(whole["loss"], rel=1e-3)
    for row in found["rows"]:
        assert row["free"] <= row["simulated"]
    for row in (whole, half):
        assert row["sums"] == 0
        assert row["in_order_with_sums"] == row["in_order"]
    for row in replicas:
        assert row["sums"] == len(row["gradient_bytes"]) == 2
        assert row["in_order_with_sums"] > row["in_order"]


def profiles_come_with_how_far_their_fits_are_off(found):
    (row,) = found["rows"]
    assert set(row["worst"]) == set("FBIW")
    points = row["profile"]["blocks"]["layer"]["points"]
    assert any("held_out" in point for point in points)


def half_the_parts_make_twice_the_steps(found):
    names = [run["name"] for run in found["runs"]]
    assert names == ["0", "50", "50-recipe", "50-rate"]
    assert found["runs"][1]["curve"][-1][0] == 2 * found["runs"][1]["steps"]


def gains_of_waves_are_near_the_published_ones(found):
    assert len(found["9"]) == 11
    for row in found["9"]:
        assert 0.93 < row["over_gpipe"] / row["published_over_gpipe"] < 1.08


CLAIMS = {
    "auto.py": rivals_compute_the_same_loss,
    "convergence.py": half_the_parts_make_twice_the_steps,
    "gpu/compiled.py": both_runtimes_find_the_same_loss,
    "gpu/profiles.py": profiles_come_with_how_far_their_fits_are_off,
    "gpu/transports.py": transports_are_compared_with_what_the_simulator_says,
    "papers.py": gains_of_waves_are_near_the_published_ones,
    "wan.py": both_sides_are_planned,
}


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in LONG])
def test_a_quick_run_prints_tables_and_leaves_the_pages(name, tmp_path):
    files = sorted(harness.RESULTS.rglob("*"))
    states = [file.stat().st_mtime_ns for file in files]
    said = run(name, "--quick", "--out", str(tmp_path / "found.json"))
    assert re.search(r"^\|[-:|]+\|$", said, re.M)
    assert states == [file.stat().st_mtime_ns for file in files]
    assert files == sorted(harness.RESULTS.rglob("*"))
    if name in CLAIMS:
        CLAIMS[name](json.loads((tmp_path / "found.json").read_text()))


@pytest.mark.parametrize("name", LONG)
def test_a_long_script_explains_itself(name):
    assert "--quick" in run(name, "--help")


@pytest.mark.parametrize("name", KEPT)
def test_the_tables_of_a_page_are_those_of_the_committed_measurements(name, load):
    script = load(name)
    folder = harness.RESULTS / ("auto" if name == "auto.py" else "h200")
    tables = script.tables(script.committed(folder))
    assert tables
    assert all(text.count("\n") > 1 for text in tables.values())
    stale = harness.stale(harness.RESULTS, tables)
    assert stale == [], f"run benchmarks/{name} --kept"


def test_the_index_lists_every_script():
    text = (FOLDER / "README.md").read_text()
    assert re.findall(r"^\| \[([\w/]+\.py)\]\(\1\) ", text, re.M) == SCRIPTS


def test_candidates_that_do_not_fit_together_run_in_groups_with_auto(load):
    auto = load("auto.py")
    needed = 0.4 * auto.GPU_BYTES
    contenders = tuple(auto.Contender(name, None, None, needed) for name in "abcd")
    case = auto.Case("wide", auto.llama(16, 2, 31, 2), 16, 2, 2)
    contest = auto.Contest(case, None, contenders, (), 0.0, 0.0)
    groups = auto.groups_of(contest, auto.Run("cuda"))
    names = ["".join(one.label for one in group) for group in groups]
    assert names == ["ab", "ac", "ad"]


def test_copies_pay_for_the_sum_of_gradients(load):
    papers = load("papers.py")
    one = papers.run(papers.BERT, "TACC", "GPipe", 8, 1)
    four = papers.run(papers.BERT, "TACC", "GPipe", 8, 4)
    efficiency = four.speed / (4 * one.speed)
    assert 0.9 < efficiency < 0.99
    assert papers.run(papers.BERT, "TACC", "Hanayo W=8", 8, 1) is None


def test_a_table_formats_its_rows_and_aligns_numbers():
    rows = [
        {"name": "1f1b", "took": 0.0125, "over": [1.05, 1.0, 1.1], "held": [1, 3e9]},
        {"name": "zb-v", "took": None, "over": None, "held": [2, 4e9]},
    ]
    columns = {
        "schedule": "{name}",
        "ms": "{took!m:.1f}",
        "over": "{over:.2f}",
        "most, GB": lambda row: f"{max(row['held']) / 1e9:g}",
    }
    assert harness.table(rows, columns) == (
        "| schedule | ms | over | most, GB |\n"
        "|---|--:|--:|--:|\n"
        "| 1f1b | 12.5 | 1.05 (1.00-1.10) | 3 |\n"
        "| zb-v |  |  | 4 |"
    )


def test_a_table_stands_between_its_markers(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    assert harness.stale(tmp_path, {"x": "new"}) == ["x"]
    harness.put(tmp_path, {"x": "new", "y": "other"})
    assert page.read_text() == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"
    assert harness.stale(tmp_path, {"x": "new", "y": "other"}) == []
    assert "<!-- y -->" in capsys.readouterr().err


def test_a_run_with_other_options_writes_no_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- x -->\n<!-- /x -->")
    script = harness.Script(
        "about",
        lambda given: {"rounds": given.rounds},
        lambda found: {"x": str(found["rounds"])},
        options=lambda parser: parser.add_argument("--rounds", type=int, default=3),
    )
    for words in (["--quick"], ["--rounds", "4"]):
        script.main(words)
        assert page.read_text() == "<!-- x -->\n<!-- /x -->"
    script.main(["--out", str(tmp_path / "found.json")])
    assert page.read_text() == "<!-- x -->\n3\n<!-- /x -->"
    assert json.loads((tmp_path / "found.json").read_text()) == {"rounds": 3}
    assert capsys.readouterr().out == "3\n4\n3\n"


def test_machines_take_turns_and_cold_rounds_do_not_count():
    said = []

    def machine(name):
        return lambda: said.append(name) or float(len(said))

    times = harness.alternate({"a": machine("a"), "b": machine("b")}, 2)
    assert "".join(said) == "ababab"
    assert times == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
