"""What commands print as JSON, which options they have, and how they refuse mistakes.

Every command runs in this process, in an empty folder. Plans and paths may become better, so of their answers only the
names and types of the values are kept.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from penstock.cli.app import COMMANDS, main
from penstock.cost import Cluster
from penstock.formats import write_cluster

TOLERANCE = 1e-9  # profiles are fitted by least squares
CITIES = ["Paris", "London", "Tokyo", "Osaka", "Lisbon", "Rome", "Boston", "Madrid"]
PIPELINE = "--pp 4 --microbatches 8"
SEARCH = f"{PIPELINE} --cost comm=0.05 --memory 4mb --limit stages=2,slices=2"
GPU = "plan config.toml --gpu h100 --devices 2 --limit stages=1,slices=1"
NODES = "lab paths --cluster cluster.toml --stages 4 --microbatches 3 --iterations 200"
PATHS = f"{NODES} --cost F=0.5,message=8e6"
SMALL = "profile tiny --gpu h100 --set model.vocab_size=256 --set data.seq_len=64 --set run.cuda_graphs=false"
PROFILE = f"{SMALL} --rows 1 --ranks 2 -o profile.json"
DRAWN = "draw hanayo:waves=2 --pp 2 --microbatches 2 -o x.json"

# The whole answer is kept.
ANSWERS = (
    "draw --json",
    "draw 1f1b --pp 4 --microbatches 8 --json",
    "draw hanayo:waves=2 --pp 4 --microbatches 4 --cost comm=0.05 --json",
    "draw zb-h1 --cost F=2,B=3 --json",
    "draw zb-v --cost comm=0.25,channels=1 --json",
    "draw 1f1b:copies=2 --pp 2 --microbatches 4 --cost sum=3 --json",
    "draw seq1f1b:slices=4,split --pp 2 --microbatches 4 --json",
    "simulate 1f1b",
    f"{PROFILE} | draw 1f1b --cost profile.json --seq-len 64 --json",
    f"{PROFILE} | draw 1f1b --pp 2 --microbatches 4 --cost profile.json",
    f"check 1f1b {PIPELINE} --json",
    f"check chimera {PIPELINE} --json",
    "check 1f1b --pp 1 --microbatches 1",
    "check gpipe:copies=2 --pp 2 --microbatches 2",
    f"{DRAWN} | check x.json --json",
    f"{DRAWN} | draw x.json --json",
    "draw 1f1b --pp 2 --microbatches 2",
    "draw 1f1b gpipe --pp 2 --microbatches 2 -o x.html",
    f"{SMALL} --rows 1 --json",
    f"{SMALL} --rows 1,2 --json",
)
# Names and types of the values are kept.
OUTLINES = (
    f"plan {SEARCH} --json",
    f"init config.toml | {GPU} --set model.vocab_size=256 --json",
    f"init config.toml | {GPU} --set model.vocab_size=256 --for megatron --json",
    f"{PATHS} --json",
    f"{PATHS} --rotate 1 --json",
    "doctor --json",
)
# The message is kept, and that the exit code is 2.
MISTAKES = (
    "draw hanyo",
    "draw 1f1b --cost comm=-1",
    "draw 1f1b --cost F=nan",
    "draw 1f1b --seq-len 8",
    "draw 1f1b --cluster c.toml",
    f"{PROFILE} | draw 1f1b --cost profile.json:comm=1,sum=2",
    f"{PROFILE} | draw 1f1b --cost profile.json --seq-len 0",
    f"{DRAWN} | draw x.json --pp 4",
    "init c.toml | check c.toml",
    "draw 1f1b -o x.pdf",
    "draw 1f1b gpipe -o x.png",
    "plan --top 0",
    "plan --devices 4",
    "plan --set run.steps=3",
    "plan --skip 1",
    "plan --gpu h100 --devices 64",
    f"init config.toml | {GPU} --cost F=2",
    f"init config.toml | {GPU} --cost profile.json",
    f"init config.toml | {GPU} --for megatron --skip 0.25",
    f"init config.toml | {GPU.replace('h100', 'h10')}",
    NODES,
    f"{PATHS} --set run.steps=3",
    f"{PATHS} --sums fast",
    f"{PATHS} --sums planned:fp8",
    f"{PATHS} --sums ring:int8",
    f"{NODES} --cost F=0",
    f"{NODES} --cost F=1,message=-1",
    f"{PATHS} --iterations 0",
    "init config.toml | lab paths config.toml --cluster cluster.toml",
    "profile tiny --rows 1,x",
    "profile tiny --ranks 0",
    "profile --set run.steps=3",
    "profile tiny --gpu h100 --links",
    "join 10.0.0.1:29500 --listen 10.0.0.2:29500 --behind-nat",
    "eval runs/none --seq-len 3",
    "init config.toml | init config.toml",
)
# Values of a config that are refused.
CHANGES = (
    "model.layer=3",
    "modle.layers=3",
    "model.steps=3",
    "run.learning_rate=1",
    "model.layers=x",
    "run.steps=0 run.keep_checkpoints=0 model.hidden_size=0",
    "optimizer.lr=inf optimizer.lr_schedule=cosine:min=2 optimizer.betas=[2]",
    "model.family=lama run.precision=bf16 run.device=gpu run.compile=yes",
    "run.comm_dtype=float8 run.recompute=some elastic.mode=maybe",
    "optimizer.lr_schedule=cosin",
    'optimizer.groups=[{match=""},{match="a",lr=-1.0},{match="b",frozen=true,lr=1.0}]',
    "lora.rank=4 parallel.dp_shard=2",
    "run.loss=mine run.smoothing=0.1",
    "run.loss=cross_entropy:smoothing=2,x=1 run.checks=forecasts",
    "run.eval_every=0 run.early_stop=2 elastic.mode=on:slow=0.5",
    'run.callbacks=["mine"]',
    "run.cuda_graphs=true data.document_mask=true model.dropout=0.1 run.device=cpu",
    "run.compile=true parallel.dp_shard=2 run.recompute=attention",
    "elastic.listen=localhost:1 elastic.mode=off",
    "elastic.listen=localhost:1 run.loss=mine.py:loss optimizer.lr_schedule=mine.py:rate",
    "elastic.workers=3",
    "schedule.name=1f1b:share=0.5",
    "schedule.name=plan.json:keep=1,swaps=1",
    "schedule.name=skip:skips=1,share=0.5,keep=9",
    "schedule.name=1f1b parallel.pp=8 parallel.devices=4",
    "schedule.name=1f1b:skip=0.5",
    "schedule.name=1f1b data.global_batch=12 schedule.microbatches=8",
    "data.format=pictures data.validation=0.7",
    "model.family=bert schedule.name=seq1f1b:slices=2 data.format=chat",
    "data.format=text:segments=2",
    'data.sources=[{files=[]},{files=["a"],weight=-1.0}]',
    "model.family=gpt schedule.partition=[1,2]",
)


def cases() -> dict[str, Callable[[], object]]:
    """All cases by the words of their command."""
    changed = [_changing(words) for words in CHANGES]
    return {
        **{f"{name} --help": partial(_options, name) for name in COMMANDS},
        **{line: partial(_answer, line) for line in ANSWERS},
        **{line: partial(_outline, line) for line in OUTLINES},
        **{line: partial(_refusal, line) for line in (*MISTAKES, *changed)},
    }


def _changing(words: str) -> str:
    changes = " ".join(f"--set '{change}'" for change in words.split())
    return f"init other.toml {changes}"


# ---------------------------------------------------------------- what is kept
def _options(command: str) -> list[str]:
    """The names of the options of a command, as its help lists them."""
    _, out, _ = _run(f"{command} --help")
    names = set()
    for line in out.splitlines():
        found = re.match(r"│ +\*? *(--[\w-]+(?:,--[\w-]+)*)", line)
        names.update(found[1].split(",") if found else ())
    return sorted(names)


def _answer(line: str) -> object:
    code, out, err = _run(line)
    assert code == 0, err
    if not line.endswith("--json"):
        return [out, err]
    return json.loads(out)


def _outline(line: str) -> object:
    return _outline_of(_answer(line))


def _outline_of(value: object) -> object:
    """Names and types instead of values; a list is outlined by its first item."""
    if isinstance(value, dict):
        return {key: _outline_of(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_outline_of(one) for one in value[:1]]
    if value is None or (
        isinstance(value, int | float) and not isinstance(value, bool)
    ):
        return "number or null"
    return type(value).__name__


def _refusal(line: str) -> str:
    code, out, err = _run(line)
    assert (code, out) == (2, ""), err
    return err


# ---------------------------------------------------------------- running
def _run(line: str) -> tuple[int, str, str]:
    """Run commands one after the other in a new folder, and return what the last one says."""
    answer = (0, "", "")
    with _empty_folder(), patch.dict(os.environ, COLUMNS="200", TERM="dumb"):
        for words in line.split(" | "):
            answer = _run_one(words)
    return answer


def _run_one(line: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    code = 0
    words = ["penstock", *shlex.split(line)]
    with patch.object(sys, "argv", words), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 0
    return code, out.getvalue(), err.getvalue()


@contextmanager
def _empty_folder() -> Iterator[None]:
    """Work in a folder that holds nothing but a cluster.toml."""
    before = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        write_cluster(Cluster.geo(CITIES), "cluster.toml")
        try:
            yield
        finally:
            os.chdir(before)
