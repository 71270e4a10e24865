"""Datasets that are Python objects: encoded as files are, in little memory, and trained on by `fit`."""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import SMALL_CONFIG
from penstock import fit
from penstock.config import DataConfig
from penstock.errors import ConfigError, FileError
from penstock.formats.config_toml import read_config, written_keys
from penstock.train.after.evaluate import evaluate_run
from penstock.train.before import start
from penstock.train.before.forecast import known_forecast
from penstock.train.before.start import find_run, kept_plan, locking, plan_and_prepare
from penstock.train.data.cache import encode_dataset
from penstock.train.data.corpus import open_corpus
from penstock.train.data.tokenizer import train_tokenizer
from penstock.train.job import job_of

TEXTS = [f"Text {n} is here. " + "la " * (n % 13) for n in range(60)]
CHATS = [{"prompt": f"{n} + 1 = ", "completion": f"{n + 1}"} for n in range(60)]
PLAIN = DataConfig(seq_len=32, validation=0.0)


def as_tokens(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("dataset", "data"),
    [
        (TEXTS, PLAIN),
        (({"body": text, "n": 1} for text in TEXTS), replace(PLAIN, text_field="body")),
        ([as_tokens(text) for text in TEXTS], PLAIN),
        ([np.array([*as_tokens(text), 0]) for text in TEXTS], PLAIN),
        (({"ids": torch.tensor(as_tokens(t))} for t in TEXTS), replace(PLAIN, text_field="ids")),
        (TEXTS, replace(PLAIN, format="text:segments=2")),
        (CHATS, replace(PLAIN, format="chat", document_mask=True)),
    ],
)  # fmt: skip
def test_a_dataset_becomes_the_tokens_that_a_file_of_it_becomes(
    dataset, data, tmp_path
):
    lines = CHATS if data.instructions else [{"text": text} for text in TEXTS]
    (tmp_path / "same.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = replace(data, sources=(str(tmp_path / "same.jsonl"),), text_field="text")
    expected = open_corpus(files, tmp_path / "cache")
    file = encode_dataset(dataset, data, tmp_path)
    named = replace(data, sources=(str(file),))
    found = open_corpus(named, tmp_path / "cache")
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.digest == expected.digest
    if data.marked:
        assert np.array_equal(found.marks, expected.marks)
        with pytest.raises(FileError, match=r"encoded with data\.seq_len = 32"):
            open_corpus(replace(named, seq_len=16), tmp_path / "cache")
    assert not list(tmp_path.glob("*.part"))


def test_nobody_knows_how_many_bytes_tokens_without_text_have(tmp_path):
    file = encode_dataset(map(as_tokens, TEXTS), PLAIN, tmp_path)
    corpus = open_corpus(replace(PLAIN, sources=(str(file),)), tmp_path)
    assert corpus.bytes_per_token is None


def test_a_dataset_that_another_tokenizer_has_encoded_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    words = tmp_path / "words.json"
    train_tokenizer(TEXTS, 300, words)
    copy = tmp_path / "copy.json"
    copy.write_bytes(words.read_bytes())
    file = encode_dataset(TEXTS, replace(PLAIN, tokenizer=str(words)), tmp_path)
    named = replace(PLAIN, sources=(str(file),))
    assert open_corpus(replace(named, tokenizer=str(copy)), tmp_path).trained > 0
    with pytest.raises(
        FileError, match=r"data\.tokenizer = a file .* here it is bytes"
    ):
        open_corpus(named, tmp_path)


def test_memory_does_not_grow_with_a_dataset(tmp_path):
    def peak_bytes(texts: int) -> int:
        tracemalloc.start()
        encode_dataset(("la " * 150_000 for _ in range(texts)), PLAIN, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(80) < 1.2 * peak_bytes(40)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ({"train": TEXTS}, r"mapping from names \('train'\).*dataset\['train'\]"),
        ("notes.txt", r"a text or a path.*data\.sources"),
        (3, "a int is not a dataset"),
        ([], "the text is empty"),
        (
            [{"title": "a"}],
            r"example 0 .* has no 'text'; it has 'title'.*data\.text_field",
        ),
        (["a", [1]], "example 1 .* is not text, as those before, but list"),
        ([[1], "a"], "example 1 .* neither a text nor a list of tokens, but str"),
        ([[1.5]], "example 0 .* neither a text nor a list of tokens"),
        ([[1, 256]], r"token 256, but the model has 256 words.*data\.tokenizer"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset, words, tmp_path):
    with pytest.raises(FileError, match=f"(?s){words}"):
        encode_dataset(dataset, PLAIN, tmp_path)
    assert not list(tmp_path.glob("*.bin"))


def test_fit_trains_on_a_dataset_and_its_run_needs_it_no_more(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(SMALL_CONFIG)
    small = ["schedule.name=1f1b", "parallel.pp=1", "run.folder=run", "run.steps=1"]
    run = fit("config.toml", iter(TEXTS), ["tests " * 20], changes=small)
    assert (run.folder, run.step, run.stopped) == (Path("run"), 1, False)
    [row] = run.rows
    assert row.evaluation is not None
    job = job_of(run.folder, read_config(run.folder / "config.toml"), resume=True)
    text = "\0".join(TEXTS).encode() + b"\0"
    assert bytes(job.corpus.tokens.tolist()) == text
    assert bytes(job.validation.tokens.tolist()) == b"tests " * 20 + b"\0"
    with pytest.raises(ConfigError, match=r"data\.sources names text"):
        fit("run", TEXTS, resume=True)
    examined = evaluate_run(run.folder, ())  # on the validation set, as the run itself
    assert (examined.available, examined.sequences) == (3, 3)
    perplexity = examined.rows[0].perplexity
    assert perplexity == pytest.approx(math.exp(row.evaluation), rel=1e-5)


def test_auto_keeps_its_profiles_and_its_plan_before_workers_start(
    tmp_path, monkeypatch
):
    """So the forecast needs no second measurement, and a run that is resumed has the plan of the first one."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(TEXTS))
    Path("config.toml").write_text(SMALL_CONFIG)
    changes = ["schedule.name=auto", "parallel.pp=1", "model.layers=1"]
    changes += ["data.sources=text.txt", "data.seq_len=16", "run.folder=run"]
    Path("run").mkdir()  # A folder that was there before is kept.
    given = written_keys(Path("config.toml"), changes)
    config, folder = find_run(Path("config.toml"), None, changes, exists=False)
    with locking() as lock:
        first = plan_and_prepare(config, folder, False, lock, given)
    predicted = known_forecast(folder, first.config, first.plan)
    assert predicted is not None
    assert predicted.seconds > 0
    monkeypatch.delattr(start, "measure_workload")
    kept = kept_plan(config, folder, ["run.steps=9"])
    with locking() as lock:
        again = plan_and_prepare(config, folder, False, lock, given, kept)
        with pytest.raises(ConfigError, match="has 1 ranks, but 3 were launched"):
            plan_and_prepare(config, folder, False, lock, given, kept, launched=3)
    assert again.plan == first.plan
    assert kept_plan(config, folder, ["data.global_batch=4"]) is None
