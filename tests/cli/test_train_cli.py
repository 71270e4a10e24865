"""Training as a user sees it: real processes that are killed, stopped and resumed, and the errors before they start."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import starved_workers
from case_tables import cases
from commands import SMALL_CONFIG, called, ended, environment, torchrun, wait_for
from forked import Command
from penstock import MicroBatch, Plan, Schedule, Stage, make
from penstock.cli.run import _show_ending
from penstock.config import PRESETS
from penstock.errors import FileError, RunError
from penstock.formats import read_plan, write_plan
from penstock.formats.config_toml import (
    apply_changes,
    load_config,
    read_config,
    written_keys,
)
from penstock.ir import parse_action
from penstock.plan.planner import plan_run
from penstock.runtime import run_threads
from penstock.runtime.process.launch import WorkerOutcome
from penstock.schedules.transforms import replicate
from penstock.train.data.corpus import open_corpus
from penstock.train.history import StepRow, read_events, read_rows
from penstock.train.job import (
    Verdict,
    describe_model,
    job_of,
    model_sizes,
    settle_tokenizer,
)
from penstock.train.launch import _story, launch, read_failure, run_worker
from penstock.train.loop import Trainer


@pytest.fixture
def text(tmp_path):
    """Return a folder with some text and a config."""
    lines = [
        f"the {n % 7} cats sat on {n % 5} mats and said {n % 3}\n" for n in range(3000)
    ]
    (tmp_path / "text.txt").write_text("".join(lines))
    (tmp_path / "config.toml").write_text(
        SMALL_CONFIG.replace("[data]", '[data]\nsources = ["text.txt"]')
    )
    return tmp_path


@dataclass
class Done:
    code: int
    out: str
    err: str


def run(folder: Path, line: str, **more: str) -> Done:
    """Run a command line in another process, as from a shell."""
    process = Command(folder, line.split(), environment(**more), strict=True)
    out, err = process.communicate()
    assert process.returncode is not None
    return Done(process.returncode, out, err)


def start(folder: Path, line: str, **options: Any) -> Command:
    return Command(folder, line.split(), environment(), **options)


def weights(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, read without our code."""
    files = (run_folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture
def here(monkeypatch, capsys, text):
    """Run a command line in this process; return exit code, stdout, stderr."""
    monkeypatch.chdir(text)
    monkeypatch.setenv("COLUMNS", "200")

    return lambda line: Done(*called(monkeypatch, capsys, line))


def passed(here: Callable[[str], Done], line: str) -> Done:
    """Run a command line that works."""
    done = here(line)
    assert done.code == 0, done.err
    return done


def refused(here: Callable[[str], Done], line: str) -> str:
    """Run a command line that is refused, and return its message; a dry run gives the same one."""
    done = here(line)
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    if line.startswith("train"):
        assert here(f"{line} --dry-run") == done
    return done.err


# ---------------------------------------------------------------- a whole run
def makespans_of(page: str) -> list[str]:
    """The makespans of the predicted and the measured timeline on a page."""
    found = re.findall(r'"makespan":([^,]+),', unescape(page))
    assert len(found) == 2
    return found


def test_a_run_ends_with_a_curve_a_report_a_checkpoint_and_a_sample(  # noqa: PLR0915
    text, here, monkeypatch, capsys
):
    done = run(text, "train config.toml --set run.checks=forecast,gradients,memory")
    assert done.code == 0, done.err
    folder = text / "runs" / "config"
    rows = read_rows(folder)
    assert [row.step for row in rows] == list(range(1, 13))
    assert rows[-1].loss < rows[0].loss - 0.3
    told = "model ,schedule ,2 processes on,gloo,step 12/12,tokens/s,norm ,iB  bubble "
    assert [words for words in told.split(",") if words not in done.err] == []
    assert re.search(
        r"predicted [\d,]+ tokens/s, [\d.]+ m?s per step \(.* to .*\): a pass .*, optimizer and the rest [\d.]+ [mµ]?s",
        done.err,
    )
    assert "Traceback" not in done.err
    assert re.search(r"a step took [\d.]+ m?s, predicted [\d.]+ m?s", done.out)
    assert re.search("(?s)trained 12 steps.*report .*checkpoint .*", done.out)
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 4
    assert re.search("(?s)predicted.*measured, step 12", page)
    told = ("2 ranks and 4 micro-batches", "Largest differences", "rank 1: parts ")
    assert [words for words in told if words not in page] == []
    assert "of weights and optimizer" in page
    assert (folder / "checkpoints" / "step-00000012" / "checkpoint.json").is_file()
    assert read_plan(folder / "plan.json").schedule.ranks == 2
    assert list((folder / "tensorboard").iterdir())
    passed(here, "explain runs/config -o again.html")
    own = "runs/config/plan.json runs/config/timeline.json"
    passed(here, f"draw {own} -o step.html")
    assert makespans_of((text / "step.html").read_text()) == makespans_of(page)
    prompt = (folder / "prompt.txt").read_text()
    assert prompt
    assert page == (text / "again.html").read_text()
    told = passed(here, "explain runs/config --step 12 --against runs/config").out
    assert re.search(r"a step took .*, predicted", told)
    assert "step 12: idle " in told
    assert "+0.0% against runs/config" in told
    facts = json.loads(passed(here, "explain runs/config --json").out)
    assert (facts["version"], facts["steps"], facts["kinds"][0]["step"]) == (1, 12, 12)
    assert (
        "step 3 was not measured; measured: 12"
        in here("explain runs/config --step 3").err
    )
    # In a terminal a run ends with a sample, which the page keeps.
    assert not (folder / "sample.txt").exists()
    monkeypatch.setenv("FORCE_COLOR", "1")
    _show_ending(folder, Verdict(12))
    assert (folder / "sample.txt").read_text().startswith(prompt)
    assert "a sample" in capsys.readouterr().out
    _show_ending(folder, Verdict(12), whole=False)  # only a share of the model is here
    monkeypatch.delenv("FORCE_COLOR")
    assert "a sample" not in capsys.readouterr().out
    assert not (folder / "sample.txt").exists()
    drawn = here("generate runs/config --prompt the --max-tokens 15 --temperature 0")
    assert drawn.out.startswith("the")
    passed(here, "export runs/config -o hub")
    assert (
        json.loads((text / "hub" / "config.json").read_text())["model_type"] == "llama"
    )
    assert (
        here("generate hub --prompt the --max-tokens 15 --temperature 0").out
        == drawn.out
    )
    tried = passed(here, "eval runs/config --omit 0.5 --batches 1")
    whole, drawn_parts = tried.out.splitlines()
    assert re.match(
        r"all +4/4 parts  perplexity [\d.]+  1\.000 of the full model's", whole
    )
    assert re.match(r"random +2/4 parts  perplexity [\d.]+ ± ", drawn_parts)
    chosen = here("eval runs/config --omit 2 --omit 2,3 --batches 1 --json")
    ways = [one["path"] for one in json.loads(chosen.out)["rows"][1:]]
    assert ways == [[0, 1, 3], [0, 1]]
    early = here("generate runs/config --prompt the --max-tokens 9 --omit 2,3")
    assert (early.code, early.out[:3]) == (0, "the")
    refused = here("generate runs/config --omit 0,2")
    assert (refused.code, refused.out) == (2, "")
    assert "leave out some of the layers 1 to 3" in refused.err
    code, err = ended(
        text, "generate runs/config --max-tokens 1000000 --temperature 0", 2.0
    )
    assert code == 130, err
    assert (
        "new tokens must be at least 0, not -5"
        in here("generate runs/config --max-tokens -5").err
    )
    assert "name the folder of a run" in here("eval hub --omit 0.5").err
    assert "a share of 1 cannot be left out" in here("eval runs/config --omit 1.0").err


# ---------------------------------------------------------------- trouble
def undisturbed(folder: Path, other: Path) -> list[StepRow]:
    """Repeat the run of a folder in another folder, with threads for ranks."""
    job = replace(job_of(folder, read_config(folder / "config.toml")), folder=other)
    run_threads(job.plan.schedule.ranks, lambda comm: Trainer(job, comm).run())
    return read_rows(other)


def test_a_killed_worker_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(
    text, here
):
    process = start(
        text,
        "train config.toml --set run.steps=30 --set run.save_every=5",
    )
    folder = text / "runs" / "config"
    wait_for(folder, 7)
    while not (folder / "checkpoints" / "step-00000005" / "checkpoint.json").is_file():
        time.sleep(0.01)
    os.kill(int((folder / "ranks" / "1.pid").read_text()), signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "a worker was lost; restart 1 of 3" in err
    assert re.search(r"going on from runs/config/checkpoints/step-000000\d\d", err)
    assert "trained 30 steps" in out
    (event,) = read_events(folder)
    assert f"going on from runs/config/checkpoints/step-{event.step:08d}" in err
    assert (event.event, event.members) == ("restart", (0, 1))
    assert 7 <= event.step + event.back <= 30
    back = f"went back {event.back} step" if event.back else "2 workers went on after"
    assert back in (folder / "report.html").read_text()
    quiet = undisturbed(folder, text / "quiet")
    assert [row.loss for row in read_rows(folder)] == [row.loss for row in quiet]
    one, other = weights(text / "quiet", 30), weights(folder, 30)
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_ctrl_c_saves_and_ends_and_the_run_goes_on_from_there(text, here):
    process = start(
        text,
        "train config.toml --set run.steps=400 --set run.save_every=0",
    )
    folder = text / "runs" / "config"
    wait_for(folder, 4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "Interrupted." not in err
    stopped = int(re.search(r"stopped after (\d+) steps", out)[1])
    assert 4 <= stopped < 400
    assert "continue    penstock train runs/config --resume" in out
    assert not (folder / "stop").exists()
    more = passed(
        here,
        f"train runs/config --resume --set run.steps={stopped + 3} --set schedule.name=1f1b",
    )
    assert "finished" not in more.err
    assert [row.step for row in read_rows(folder)] == list(range(1, stopped + 4))
    over = passed(here, "train runs/config --resume")
    said = f"finished  step {stopped + 3} is saved and run.steps = {stopped + 3}, so"
    assert said in " ".join(over.err.split("\n"))
    assert over.out == ""  # no second summary


def test_under_torchrun_it_is_the_same_run(text, here):
    line = "train config.toml --set run.steps=4 --set run.folder=runs/torchrun"
    launcher = "--standalone --nproc-per-node 2 -m penstock"
    env = environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    process = torchrun(text, [*launcher.split(), *line.split()], env)
    out, err = process.communicate()
    assert process.returncode == 0, err
    folder = text / "runs" / "torchrun"
    assert "trained 4 steps" in out
    assert [row.loss for row in read_rows(folder)] == [
        row.loss for row in undisturbed(folder, text / "quiet")
    ]


def test_under_a_launcher_the_folder_must_be_named(here, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = here("train config.toml")
    assert (
        "under a launcher all ranks must know the folder: --set run.folder=runs/NAME"
        in done.err
    )


def test_an_error_before_the_first_step_is_printed_and_not_retried(text, here):
    folder = text / "runs" / "lost"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        SMALL_CONFIG.replace("[data]", '[data]\nsources = ["gone.txt"]')
    )
    passed(here, "draw hanayo --pp 2 --microbatches 4 -o runs/lost/plan.json")
    with pytest.raises(FileError, match=r"cannot read gone\.txt"):
        launch(run_worker, Path("runs/lost"), 2, 1, False)


def test_two_processes_do_not_train_in_one_folder_and_a_second_ctrl_c_ends_one_at_once(
    text, here
):
    process = start(
        text, "train config.toml --set run.steps=10000000 --set run.save_every=0"
    )
    folder = text / "runs" / "config"
    wait_for(folder, 2)
    pids = [int(file.read_text()) for file in (folder / "ranks").glob("*.pid")]
    assert len(pids) == 2
    refused = here("train config.toml --set run.folder=runs/config")
    assert refused.code == 2
    assert "another process trains in runs/config" in refused.err
    process.send_signal(signal.SIGINT)
    late = time.monotonic() + 600
    while not (folder / "stop").exists() and time.monotonic() < late:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    # The steps that are left would take hours.
    _, err = process.communicate(timeout=600)
    assert process.returncode in (0, 130), err
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_shape_options_that_would_change_nothing_are_refused(text, here):
    done = here("train config.toml --dry-run --set schedule.name=auto:waves=3,split")
    assert done.code == 2
    assert (
        "auto picks the shape, so auto:waves=3,split would change nothing" in done.err
    )


def test_a_full_disk_is_reported_although_nothing_can_be_written(tmp_path):
    (tmp_path / "failure.json").touch()
    found = read_failure(tmp_path)
    assert found is not None
    assert "No space left on device" in found.text


def test_a_rank_without_memory_for_the_first_step_says_so_and_is_not_started_again(
    text, here
):
    folder = text / "runs" / "config"
    folder.mkdir(parents=True)
    shutil.copy(text / "config.toml", folder)
    line = "draw hanayo --pp 2 --microbatches 4 -o runs/config/plan.json"
    passed(here, line)
    starved = start(text, "runs/config", script=Path(starved_workers.__file__))
    _, err = starved.communicate()
    assert (
        "rank 1 has no memory left: CUDA out of memory. Tried to allocate 3.00 GiB\n  fewer"
        in err
    )
    assert "restart 1 of 3" not in err


# ---------------------------------------------------------------- starts that come to nothing
KILLED = """
import os, signal, sys
if any("forkserver" in word for word in sys.orig_argv):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_error_says_that_the_process_which_starts_workers_was_killed(text):
    (text / "sitecustomize.py").write_text(KILLED)
    path = os.pathsep.join([str(text), environment()["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "train", "config.toml"],
        cwd=text,
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 2
    assert "RunError: the process that starts the workers is gone" in done.stderr
    assert (
        "there is no checkpoint yet; start again with the same command" in done.stderr
    )
    assert "Aborted" not in done.stderr
    assert [path.name for path in (text / "runs").iterdir()] == ["cache"]


def test_a_run_that_is_stopped_before_its_first_step_says_so_and_leaves_nothing(
    text, here, monkeypatch
):
    verdict = Verdict(0, stopped=True, interrupted=True)
    monkeypatch.setattr("penstock.training.launch", lambda *_: verdict)
    done = here("train config.toml")
    said = done.out.splitlines()[0]
    assert (done.code, said) == (130, "stopped before the first step")
    assert "start again with the same command" in done.out
    assert not (text / "runs" / "config").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_workers_start_leaves_nothing(number, text, here, monkeypatch):
    monkeypatch.setattr(
        "penstock.training.launch", lambda *_: os.kill(os.getpid(), number)
    )
    done = here("train config.toml")
    assert done.code == 128 + number
    assert f"ended     by {number.name}" in done.err
    assert not (text / "runs" / "config").exists()


def test_a_failed_start_leaves_what_was_there_before(text, here, monkeypatch):
    def fail(*_: object) -> None:
        raise RunError("no")

    monkeypatch.setattr("penstock.training.launch", fail)
    mine = text / "deep" / "mine"
    assert here("train config.toml --set run.folder=deep/mine").code == 2
    assert not mine.parent.exists()
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("kept")
    assert here("train config.toml --set run.folder=deep/mine").code == 2
    assert (mine / "notes.txt").read_text() == "kept"
    assert (mine / "config.toml").is_file()


@pytest.mark.skipif(
    sys.platform != "linux", reason="workers are forks of one process only there"
)
def test_sigterm_to_every_process_of_a_run_saves_and_ends(text):
    line = "train config.toml --set run.steps=4000 --set run.save_every=0"
    process = start(text, line, session=True)
    wait_for(text / "runs" / "config", 2)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 130, err
    assert "stopping  this step is finished and saved first" in err
    assert "a worker was lost" not in err
    stopped = int(re.search(r"stopped after (\d+) steps", out)[1])
    saved = text / "runs" / "config" / "checkpoints" / f"step-{stopped:08d}"
    assert (saved / "checkpoint.json").is_file()


# ---------------------------------------------------------------- before anything starts
def test_a_dry_run_shows_plan_memory_and_speed_and_leaves_only_tokens(here, text):
    done = passed(here, "train config.toml --dry-run")
    assert re.search(
        r"predicted: [\d,]+ tokens/s, [\d.]+ m?s per step \(.* to .*\): a pass of [\d.]+ m?s \(bubble \d",
        done.out,
    )
    assert len(re.findall(r"^ \d +[\d.]+ [KM]iB", done.out, re.M)) == 2
    assert "hanayo: 2 ranks" in done.err
    assert [folder.name for folder in (text / "runs").iterdir()] == ["cache"]


def test_auto_picks_a_schedule_that_fits_the_layers(here):
    sizes = "--set model.layers=6 --set model.hidden_size=32 --set model.intermediate_size=32"
    done = passed(
        here, f"train --dry-run {sizes} --set data.seq_len=16 --set data.global_batch=4"
    )
    found = re.search(
        r"4 ranks, (\d+) micro-batch(?:es)? of (\d+) x 16 tokens", done.err
    )
    assert found, done.err
    assert int(found[1]) * int(found[2]) == 4
    assert sum(map(int, done.err.split("layers ")[2].split("\n")[0].split())) == 6


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved"])
def test_a_plan_from_a_file_brings_its_own_ranks(here, name):
    passed(here, f"draw {name} --pp 2 --microbatches 8 -o plan.json")
    done = passed(
        here,
        "train config.toml --dry-run --set schedule.name=plan.json --set schedule.microbatches=8",
    )
    assert "2 ranks, 8 micro-batches of 1 x 32 tokens" in done.err


def test_init_writes_a_config_that_is_read_back(here, text):
    passed(here, "init mine.toml --from gpt2 --set run.steps=7")
    config = read_config(text / "mine.toml")
    assert config.run.steps == 7
    assert config.model == PRESETS["gpt2"].model
    assert "already exists" in here("init mine.toml").err
    passed(here, "init other.toml")
    assert load_config((text / "other.toml").read_text()) == PRESETS["tiny"]


@pytest.mark.parametrize(
    ("line", "words"),
    cases(
        r"""
        train none.toml  =>  cannot read none.toml
        train config.toml --set run.steps=0  =>  run.steps = 0 must be at least 1
        train config.toml --set schedule.name=hanay  =>  there is no schedule 'hanay'; did you mean 'hanayo'?
        train config.toml --set run.device=gpu  =>  there is no run.device 'gpu'; did you mean 'cuda'?
        train config.toml --set run.precision=bf16  =>  there is no run.precision 'bf16'; did you mean 'bfloat16'?
        train config.toml --set schedule.name=hanayo:waves=4  =>  16 parts, but the model has only 4 layers
        train config.toml --set schedule.name=1f1b:waves=2  =>  1f1b has no 'waves'
        train config.toml --set schedule.name=auto --set parallel.pp=8  =>  4 layers cannot fill 8 ranks
        train config.toml --set data.sources=["gone.txt"]  =>  cannot read gone.txt
        train config.toml --set model.path=nowhere  =>  cannot read nowhere/config.json
        train config.toml --set model.heads=5  =>  width must be a multiple of heads
        train huge  =>  there is neither a file nor a preset huge
        train nothere --resume  =>  name the folder of a run, such as runs/tiny
        train config.toml --set schedule.rank=3  =>  did you mean 'lora.rank'
        train config.toml --set schedule.partition=[1,1,1,1,1]  =>  schedule.partition has 5 layers
        train config.toml --set schedule.partition=[2,2]  =>  is for 2 parts and 4 layers, but there are 4 parts
        generate nowhere  =>  nowhere has no checkpoint
        export nowhere  =>  nowhere has no checkpoint
        explain nowhere  =>  has no steps of a run
        explain text.txt  =>  has no steps of a run
        export nowhere -o text.txt  =>  text.txt is a file
        init x.toml --set run.steps=0  =>  run.steps = 0 must be at least 1
        train text.txt  =>  text.txt:1:5: this is not TOML
        train config.toml --set run.folder=text.txt  =>  cannot write to text.txt: File exists
        train config.toml --set model.path=text.txt  =>  cannot read text.txt/config.json: Not a directory
        train config.toml --set schedule.name=text.txt  =>  there is no schedule 'text.txt'
        train config.toml --set data.sources=3  =>  data.sources must be a list of strings
        train config.toml --set run.steps=1e3  =>  run.steps must be a whole number, not 1000.0
        train config.toml --set optimizer.name=AdamX  =>  there is no optimizer.name 'AdamX'; did you mean 'Adam'?
        train config.toml --set schedule.name=auto --set optimizer.name=AdamX
            =>  there is no optimizer.name 'AdamX'; did you mean 'Adam'?
        train config.toml --set data.seq_len=200000  =>  too few for sequences of 200000
        train config.toml --set data.validation=short.txt  =>  too few for sequences of 32
        train config.toml --resume  =>  there is no good checkpoint
        """
    ),
)
def test_a_mistake_is_one_message_before_anything_starts(here, text, line, words):
    (text / "short.txt").write_text("too short")
    assert words in refused(here, line)
    assert not (text / "runs").exists() or not list(
        (text / "runs").glob("*/metrics.jsonl")
    )


def test_a_folder_without_a_run_is_refused(here, text):
    (text / "folder").mkdir()
    assert (
        "folder is not the folder of a run: it has no config.toml"
        in here("train folder").err
    )


@pytest.mark.parametrize(
    ("change", "words"),
    cases(
        r"""
        model.intermediate_size=96  =>  is of another model: its inner is 64, here it is 96
        run.seed=3  =>  its seed is 0, here
        data.seq_len=16  =>  its length is 32, here it is 16
        """
    ),
)
def test_a_refused_resume_leaves_the_run_as_it_was(change, words, here, text):
    config = read_config(text / "config.toml")
    corpus = open_corpus(config.data, text / "runs" / "cache")
    saved = text / "runs" / "mine" / "checkpoints" / "step-00000003"
    saved.mkdir(parents=True)
    facts = {
        "penstock": "checkpoint",
        "step": 3,
        "files": {},
        "model": describe_model(model_sizes(config)),
        "data": {"seen": 24, "seed": 0, "length": 32, "digest": corpus.digest},
    }
    (saved / "checkpoint.json").write_text(json.dumps(facts))
    told = text / "runs" / "mine" / "config.toml"
    told.write_text((text / "config.toml").read_text())
    (told.parent / "lock").touch()  # as every run has it
    done = here(f"train runs/mine --resume --set {change}")
    assert (done.code, words in done.err) == (2, True), done.err
    assert told.read_text() == (text / "config.toml").read_text()
    assert sorted(file.name for file in told.parent.iterdir()) == [
        "checkpoints",
        "config.toml",
        "lock",
    ]


def test_the_error_of_a_killed_worker_names_the_signal_and_the_last_checkpoint(
    tmp_path,
):
    text = "was killed by SIGILL"
    killed = WorkerOutcome(0, -signal.SIGILL, error="(killed)", text=text)
    story = _story(killed, 3, tmp_path)
    assert (
        "rank 0 was killed by SIGILL, 3 restarts did not help\n  there is no checkpoint yet"
        in story
    )
    assert "run.precision=float32" in story
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    assert "the last checkpoint is " in _story(killed, 0, tmp_path)


def test_a_run_is_not_overwritten_and_a_resume_needs_a_checkpoint(text, here):
    (text / "runs" / "config" / "checkpoints" / "step-00000003").mkdir(parents=True)
    done = here("train config.toml --set run.folder=runs/config")
    assert done.code == 2
    assert "already contains a run" in done.err
    lost = here("train config.toml --resume --set run.folder=runs/empty")
    assert lost.code == 2
    assert "there is no good checkpoint in runs/empty/checkpoints" in lost.err
    assert "Traceback" not in lost.err


def test_a_folder_without_a_checkpoint_can_be_started_in_but_not_resumed(text, here):
    """The folder has a name that looks like markup."""
    folder = "a[/b] [red]x"
    # as a full disk leaves it
    left = text / folder / "checkpoints" / "step-00000003.saving"
    left.mkdir(parents=True)
    line = f"train config.toml --set 'run.folder={folder}' --set run.steps=2"
    resumed = here(f"{line} --resume")
    assert (resumed.code, "start without --resume" in resumed.err) == (2, True), (
        resumed.err
    )
    started = passed(here, line)
    assert f"report      {folder}/report.html" in started.out
    assert [path.name for path in left.parent.iterdir()] == ["step-00000002"]
    assert f"{folder} already contains a run" in here(line).err


# ---------------------------------------------------------------- a plan file has its own shape
BARE = '[data]\nsources = ["text.txt"]\n[model]\nlayers = 4\n'


def test_a_plan_file_has_its_own_shape_and_a_contradicting_value_is_refused(text, here):
    (text / "bare.toml").write_text(BARE)
    passed(here, "draw 1f1b --pp 4 --microbatches 1 -o p.json")
    passed(here, "draw seq1f1b:slices=2 --pp 2 --microbatches 4 -o cut.json")
    line = "train bare.toml --dry-run --set schedule.name=p.json --set data.global_batch=1 --set data.seq_len=16"
    done = passed(
        here,
        f"{line} --set parallel.pp=4 --set parallel.dp_replicate=1",
    )
    assert "4 ranks, 1 micro-batch of 1 x 16 tokens" in done.err
    for key, value, its in (
        ("parallel.pp", "2", "4"),
        ("schedule.microbatches", "8", "1"),
        ("parallel.dp_replicate", "2", "1"),
    ):
        refused = here(f"{line} --set {key}={value}")
        assert refused.code == 2
        assert f"{key} = {value}, but p.json has {its}" in refused.err
    refused = here(f"{line} --set schedule.name=p.json:waves=2")
    assert "a plan file has its own shape; leave waves=2 out" in refused.err
    assert "schedule.microbatches = 8" not in here(f"{line} --set parallel.pp=2").err
    changes = ["schedule.name=cut.json"]
    written = written_keys(Path("config.toml"), changes)
    assert {"schedule.name", "data.global_batch"} < written
    assert "parallel.pp" not in written  # The plan replaces the config's schedule.
    # What is written agrees.
    config, plan = plan_run(read_config("config.toml", changes), 4, written)
    assert (plan.schedule.slices, config.rows) == (2, 2)
    # Which has 16 micro-batches.
    preset = apply_changes(PRESETS["llama-150m"], ["schedule.name=p.json"])
    assert plan_run(preset, 12, {"schedule.name"})[0].rows == 64
    other = "--set parallel.pp=2 --set schedule.microbatches=4"
    refused = here(f"train config.toml --dry-run --set schedule.name=p.json {other}")
    assert refused.code == 2
    for words in (
        "parallel.pp = 2, but p.json has 4",
        "schedule.microbatches = 4, but p.json has 1",
        "leave these",
    ):
        assert words in refused.err
    odd = here(
        "train bare.toml --dry-run --set schedule.name=p.json --set data.global_batch=1 --set schedule.partition=[4]"
    )
    assert (
        "the partition [4] is for 1 parts and 4 layers, but there are 4 parts"
        in odd.err
    )


def test_copies_in_a_plan_file_agree_with_ranks_times_copies(text, here):
    (text / "bare.toml").write_text(BARE)
    write_plan(
        Plan(replicate(make("1f1b", ranks=2, microbatches=4), 2), "two", (1, 3)),
        text / "two.json",
    )
    line = "train bare.toml --dry-run --set schedule.name=two.json --set parallel.dp_replicate=2"
    told = [
        "schedule.name=two.json",
        "parallel.dp_replicate=2",
        "parallel.pp=2",
        "schedule.microbatches=4",
        "schedule.partition=[1,3]",
    ]
    config, plan = plan_run(read_config("bare.toml", told), 4, written_keys(None, told))
    assert (
        plan.schedule.ranks,
        config.parallel.dp_replicate,
        config.rows,
        plan.partition,
    ) == (4, 1, 2, (1, 3))
    refused = here(f"{line} --set parallel.pp=4 --set schedule.partition=[2,2]")
    assert (
        "parallel.pp = 4 x parallel.dp_replicate = 2, but two.json has 4" in refused.err
    )
    assert "schedule.partition = [2, 2], but two.json has [1, 3]" in refused.err


def test_a_run_can_continue_with_another_plan_file(text, here):
    passed(here, "train config.toml --set run.steps=2")
    passed(here, "draw 1f1b --pp 1 --microbatches 2 -o one.json")
    passed(
        here,
        "train runs/config --resume --set schedule.name=one.json --set run.steps=3",
    )
    assert read_plan(text / "runs" / "config" / "plan.json").schedule.ranks == 1
    passed(here, "train runs/config --resume --set run.steps=4")


def test_empty_text_is_refused_before_anything_is_measured(text, here):
    (text / "empty.txt").touch()
    done = here(
        "train config.toml --set schedule.name=auto --set data.sources=empty.txt"
    )
    assert done.code == 2
    assert "there is no text in empty.txt: every file is empty" in done.err
    assert "name other text in data.sources" in done.err


def test_a_plan_that_leaves_out_a_part_trains_resumes_evaluates_and_exports(text, here):
    stages = (Stage(0, 0), Stage(1, 1), Stage(0, 3))
    words = ("0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1", "1F0 1B0 1F1 1B1")
    lanes = tuple(tuple(map(parse_action, lane.split())) for lane in words)
    write_plan(
        Plan(Schedule(stages, (MicroBatch((0, 1, 2)),) * 2, lanes), "partial"),
        text / "partial.json",
    )
    config = text / "config.toml"
    told = config.read_text().replace(
        'name = "hanayo"\nranks = 2\nmicrobatches = 4', 'name = "partial.json"'
    )
    config.write_text(told)
    passed(here, "train config.toml --set run.steps=3 --set run.keep_checkpoints=1")
    passed(here, "train runs/config --resume --set run.steps=5")
    shown = passed(here, "eval runs/config --batches 1000")
    assert re.search(
        r"all \d+ held-out sequences of 32 tokens, each once$", shown.err, re.M
    )
    held_out = here("eval runs/config --batches 2")
    found = re.search(r"perplexity ([\d.]+)", held_out.out)
    assert math.log(float(found[1])) == pytest.approx(
        read_rows(text / "runs" / "config")[-1].evaluation, abs=1e-3
    )
    assert (
        "batches must be at least 1, not 0" in here("eval runs/config --batches 0").err
    )
    exported = here("export runs/config -o hub")
    assert exported.code == 0
    assert "wrote hub, the model of runs/config/checkpoints/step-" in exported.out
    passed(here, "generate hub --prompt the --max-tokens 3")


# ---------------------------------------------------------------- fine-tuning
def test_a_run_continues_with_its_own_tokenizer_and_fine_tuning_uses_that_of_the_model(
    text, here
):
    tokenizers = pytest.importorskip("tokenizers")
    known = ["<unk>", "the", "cats", "sat", "on", "mats", "and", "said"]
    words = {word: number for number, word in enumerate(known)}
    theirs = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    theirs.save(str(text / "own.json"))
    line = "train config.toml --set data.tokenizer=own.json --set run.folder=runs/words --set run.steps=1"
    passed(here, line)
    (text / "own.json").unlink()
    passed(here, "eval runs/words --batches 1")
    more = passed(here, "train runs/words --resume --set run.steps=2")
    assert "trained 2 steps" in more.out
    passed(here, "export runs/words -o hub")
    tuned = passed(
        here,
        "train config.toml --set model.path=hub --set run.folder=runs/more --set run.steps=1",
    )
    assert f"tokenizer {text}/hub/tokenizer.json" in tuned.err
    assert read_config(text / "runs" / "more" / "config.toml").data.tokenizer == str(
        text / "hub" / "tokenizer.json"
    )
    rows = [read_rows(text / "runs" / run)[0].loss for run in ("words", "more")]
    assert rows[1] < rows[0]  # of the same words
    said = load_config(
        (text / "config.toml").read_text(),
        changes=["model.path=hub", "data.tokenizer=bytes"],
    )
    assert settle_tokenizer(said).data.tokenizer == "bytes"  # what is said wins
    (text / "hub" / "tokenizer.json").unlink()
    lost = here("train config.toml --dry-run --set model.path=hub")
    assert lost.code == 2
    assert "has a vocabulary of 8, so it was not trained on bytes" in lost.err


# ---------------------------------------------------------------- sources that are not text
def test_empty_sources_mean_the_default_and_never_the_current_folder(text, here):
    assert (
        load_config(
            (text / "config.toml").read_text(), changes=["data.sources="]
        ).data.sources
        == ()
    )
    assert load_config('[data]\nsources = ""').data.sources == ()
    (text / "odd.toml").write_text(
        '[data]\nsources = [""]\n[schedule]\nname = "1f1b"\n'
    )
    said = refused(here, "train odd.toml")
    assert "data.sources has a source without a name" in said


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.orc",
            b"ORC",
            "a.orc is a table: write its texts as lines of JSON",
        ),
        ("a.jsonl.zst", b"x", "a.jsonl.zst is an archive: unpack it first"),
        ("a.tar.gz", b"x", "is an archive"),
        ("a.bin", b"some text", "a.bin is not text: Penstock reads"),
        ("a.txt", b"text\0text", "a.txt is not text: byte 4 is zero"),
        ("a.txt", b"\x1f\x8b8", "a.txt is compressed by gzip, whatever its name says"),
        ("a.txt.gz", b"some text", "cannot read a.txt.gz: Not a gzipped file"),
        (
            "a.txt.gz",
            gzip.compress(b"some text" * 99, mtime=0)[:-9],
            "cannot unpack a.txt.gz: ",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "a.jsonl:2:9: this line is not JSON"),
        (
            "a.jsonl",
            b'{"body": "a"}\n',
            "a.jsonl:1: this line has no text under 'text'",
        ),
    ],
)
def test_a_source_that_is_not_text_is_refused(name, content, words, text, here):
    (text / name).write_bytes(content)
    assert words in refused(here, f"train config.toml --set data.sources={name}")
