"""The user's own loss, callbacks and validation set, and runs that end when they get no better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.errors import ConfigError, PenstockError, RunError
from penstock.formats.config_toml import load_config
from penstock.models import smoothed_loss, token_loss, valid_tokens
from penstock.train.after.generate import open_trained
from penstock.train.checkpoints.checkpoint import newest, read_facts
from penstock.train.data.corpus import open_validation
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.history import read_rows
from penstock.train.hooks import checked_callback
from penstock.train.job import Verdict
from penstock.train.user_code import probe_loss
from penstock.train.weights import draw_parameters, hold_whole
from trainings import SMALL, corpus, job_of, losses, outcomes, train

pytestmark = pytest.mark.numerics

OWN_CODE = """
from pathlib import Path
import torch.nn.functional as F

def doubled(logits, labels):
    return 2 * F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

def broken(logits, labels):
    return {}["no"]

def mean(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

class Notes:
    def __init__(self):
        self.seen = []
    def on_step(self, row):
        self.seen.append(f"step {row.step}")
    def on_eval(self, row):
        self.seen.append(f"eval {row.step} {row.evaluation:.6f}")
        return row.step == 4
    def on_checkpoint(self, step, folder):
        self.seen.append(f"checkpoint {step} {folder.name}")
    def on_end(self, step, stopped):
        self.seen.append(f"end {step} {stopped}")
        Path("seen.txt").write_text("\\n".join(self.seen))

class Broken:
    def on_step(self, row):
        raise ValueError("no such thing")

class Nothing:
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN_CODE)
    return tmp_path


# ---------------------------------------------------------------- losses
def first_loss(loss) -> float:
    """The loss of the first step, in one piece."""
    job = job_of(None, "1f1b")
    model = hold_whole(job.sizes)
    draw_parameters(model, job.config.run.seed)
    batch = Loader(corpus(), BatchShape(SMALL.data.global_batch, 1), 0).step()[0]
    with torch.no_grad():
        total = loss(model.stages[0](batch.inputs[0]), batch.labels[0])
    return float(total) / valid_tokens(batch.labels[0])


def test_a_loss_of_ones_own_is_trained(own):
    short = ("run.steps=2", "optimizer.clip_norm=0", "run.checks=forecast,memory")
    plain = losses(train(job_of(own / "a", "1f1b", *short)))
    loss = "run.loss=own.py:doubled"
    doubled = losses(train(job_of(own / "b", "seq1f1b", *short, loss, slices=2)))
    assert doubled[0] == pytest.approx(2 * plain[0], rel=1e-5)
    # AdamW takes the same first step for a gradient that is twice as large.
    assert doubled[1] == pytest.approx(2 * plain[1], rel=1e-3)
    mean = "run.loss=own.py:mean"
    assert losses(train(job_of(own / "c", "1f1b", *short, mean))) == pytest.approx(
        plain, rel=1e-5
    )
    with pytest.raises(ConfigError, match="KeyError"):
        probe_loss(replace(SMALL.run, loss="own.py:broken"), 31)


def test_smoothing_and_z_loss_are_those_of_their_formulas(tmp_path):
    logits = torch.randn(2, 3, 5)
    labels = torch.tensor([[1, 2, -100], [0, 4, 3]])
    count = labels != -100
    logs = logits.log_softmax(-1)
    picked = logs.gather(-1, labels.where(count, 0)[..., None])[..., 0]
    each = -0.9 * picked - 0.1 * logs.mean(-1) + 0.5 * logits.logsumexp(-1) ** 2
    found = smoothed_loss(logits, labels, 0.1, 0.5)
    assert float(found) == pytest.approx(float(each[count].sum()), rel=1e-5)
    assert torch.equal(smoothed_loss(logits, labels), token_loss(logits, labels))
    changes = ("run.steps=1", "run.loss=cross_entropy:smoothing=0.1,z=0.01")
    (row,) = train(job_of(tmp_path, "hanayo", *changes))
    expected = first_loss(lambda y, labels: smoothed_loss(y, labels, 0.1, 0.01))
    assert row.loss == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------- callbacks
def test_callbacks_hear_of_everything_and_can_stop_a_run(own):
    changes = ("run.callbacks=[own.py:Notes]", "run.eval_every=2", "run.save_every=3")
    ends = outcomes(job_of(own / "run", "1f1b", *changes))
    rows = read_rows(own / "run")
    # It asks for the end after step 4; all ranks hear of it with step 5.
    assert ends == [Verdict(5, stopped=True, interrupted=False)] * 2
    seen = Path("seen.txt").read_text().splitlines()
    saved = [line for line in seen if line.startswith("checkpoint")]
    assert saved == ["checkpoint 3 step-00000003", "checkpoint 5 step-00000005"]
    assert [line for line in seen if line not in saved] == [
        *("step 1", "step 2", f"eval 2 {rows[1].evaluation:.6f}", "step 3"),
        *("step 4", f"eval 4 {rows[3].evaluation:.6f}", "step 5", "end 5 True"),
    ]


def test_a_callback_that_fails_is_named(own):
    job = job_of(own / "run", "1f1b", "run.callbacks=[own.py:Broken]", ranks=1)
    with pytest.raises(
        RunError, match=r"on_step of .*own.py:Broken failed: ValueError"
    ):
        train(job)
    with pytest.raises(PenstockError, match="has none of the methods on_step"):
        checked_callback("own.py:Nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.loss=here", "is not module:name"),
        ("run.early_stop=2;run.eval_every=0", "counts evaluations"),
        ("run.loss=cross_entropy:smoothing=2", "smoothing must be from 0 to 1"),
    ],
)
def test_what_contradicts_itself_is_refused(change, message):
    with pytest.raises(PenstockError, match=message):
        load_config("", changes=change.split(";"))


# ---------------------------------------------------------------- early stopping
def test_a_run_that_gets_no_better_ends_with_its_best_weights(tmp_path):
    changes = (
        "run.eval_every=1",
        "run.early_stop=2",
        "run.keep_checkpoints=1",
        "run.steps=40",
    )
    wild = (
        "optimizer.lr=1.0",
        "optimizer.warmup_steps=0",
    )  # so that it soon gets worse
    job = job_of(tmp_path, "1f1b", *changes, *wild)
    ends = outcomes(job)
    held_out = [row.evaluation for row in read_rows(tmp_path)]
    best = min(range(len(held_out)), key=held_out.__getitem__)
    assert len(held_out) == best + 3 < 40
    assert [(end.step, end.stopped) for end in ends] == [(len(held_out), False)] * 2
    # The last checkpoint has the weights of the best step, and another split resumes it: no more steps.
    (last,) = newest(tmp_path / "checkpoints")
    assert read_facts(last)["progress"]["step"] == best + 1
    trained = open_trained(last).holding.parameters
    kept = open_trained(next(iter(newest(tmp_path / "best")))).holding.parameters
    assert all(torch.equal(trained[name], kept[name]) for name in kept)
    again = job_of(tmp_path, "1f1b", *changes, *wild, resume=True, ranks=1)
    assert len(train(again)) == len(held_out)


# ---------------------------------------------------------------- validation
def test_evaluations_read_the_validation_set(tmp_path):
    text = tmp_path / "other.txt"
    text.write_bytes(bytes(number % 13 + 9 for number in range(200)))
    run = tmp_path / "run"
    changes = ("run.steps=1", f"data.validation=[{text}]")
    job = job_of(run, "1f1b", *changes)
    data = replace(job.config.data, tokenizer="bytes")
    validation = open_validation(data, tmp_path)
    assert validation.trained == 0
    (row,) = train(replace(job, validation=validation))
    numbers = range(2 * job.config.data.global_batch)
    rows = torch.tensor([validation.sequence(one).tolist() for one in numbers])
    with torch.no_grad():
        logits = open_trained(run).model(rows[:, :-1])
    loss = float(token_loss(logits, rows[:, 1:])) / rows[:, 1:].numel()
    assert row.evaluation == pytest.approx(loss, rel=1e-5)
