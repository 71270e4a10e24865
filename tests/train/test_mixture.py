"""Mixtures: every source has its share, whatever the number of ranks, and a run says what it has read."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import SMALL_CONFIG
from penstock import Plan, make
from penstock.config import DataConfig, MixtureSource
from penstock.crew.files import RunFiles, settle_config
from penstock.errors import ConfigError, FileError
from penstock.formats import write_plan
from penstock.formats.config_toml import (
    apply_changes,
    dump_config,
    load_config,
    read_config,
    with_absolute_paths,
)
from penstock.train.data.corpus import (
    BLOCK,
    Corpus,
    MixedCorpus,
    cut_corpus,
    open_text,
    quotas_of,
    read_use,
)
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.history import read_rows
from penstock.train.job import corpus_of as worker_corpus

LENGTH = 10
COUNTS = (30, 200, 7)  # sequences of each source to train on
WEIGHTS = (2.0, 1.0, 1.0)
TABLES = """
[[data.sources]]
files = ["web.txt"]
weight = 3
[[data.sources]]
files = ["code"]
name = "programs"
"""


def source(number: int, count: int, held_out: float = 0.1) -> Corpus:
    """Word k of source n is 10,000 n + k // LENGTH, so that a row shows where it is from."""
    rows = round(count / (1 - held_out))
    words = 10_000 * number + np.arange(rows * LENGTH + 1) // LENGTH
    data = DataConfig(seq_len=LENGTH, validation=held_out)
    return cut_corpus(words.astype(np.uint32), data, f"digest {number}")


def mixed(held_out: float = 0.1) -> MixedCorpus:
    sources = tuple(source(n, count, held_out) for n, count in enumerate(COUNTS))
    return MixedCorpus(
        sources[0].tokens,
        LENGTH,
        sum(one.trained for one in sources),
        sum(one.held_out for one in sources),
        "mixed",
        sources=sources,
        names=("a", "b", "c"),
        quotas=quotas_of(WEIGHTS),
    )


def rows(loader: Loader, steps: int) -> list[int]:
    """The first word of every row, in order."""
    batches = [batch for _ in range(steps) for batch in loader.step()]
    return [int(row[0]) for batch in batches for x in batch.inputs for row in x]


def test_every_block_has_the_share_of_each_source_and_sources_repeat_epoch_by_epoch():
    corpus = mixed()
    seen = rows(Loader(corpus, BatchShape(64, 4), seed=3), BLOCK // 256)
    for number, (quota, one) in enumerate(
        zip(corpus.quotas, corpus.sources, strict=True)
    ):
        own = [word % 10_000 for word in seen if word // 10_000 == number]
        assert len(own) == quota == BLOCK * WEIGHTS[number] / sum(WEIGHTS)
        for begin in range(0, quota - one.trained, one.trained):
            assert sorted(own[begin : begin + one.trained]) == list(range(one.trained))
    shares = Counter(word // 10_000 for word in seen[:1000])
    assert shares[0] == pytest.approx(500, abs=60)
    use = corpus.use(BLOCK, seed=3)
    assert [one.tokens for one in use] == [q * LENGTH for q in corpus.quotas]
    assert use[2].epochs == corpus.quotas[2] / corpus.sources[2].trained
    partly = corpus.use(BLOCK + 300, seed=3)
    assert sum(one.tokens for one in partly) == (BLOCK + 300) * LENGTH


def test_draws_follow_from_the_seed_and_the_position_alone():
    corpus = mixed()
    whole = rows(Loader(corpus, BatchShape(12, 2), seed=1), 200)
    assert rows(Loader(corpus, BatchShape(4, 3, passes=2), seed=1), 200) == whole
    assert rows(Loader(corpus, BatchShape(12, 2), seed=2), 200) != whole
    resumed = Loader(corpus, BatchShape(6, 4), seed=1)
    resumed.resume({**resumed.state(), "seen": 24 * 177})
    assert rows(resumed, 23) == whole[24 * 177 :]
    counts = corpus.use(24 * 200, seed=1)
    for number, one in enumerate(counts):
        found = sum(word // 10_000 == number for word in whole)
        assert one.tokens == found * LENGTH


def test_an_evaluation_has_held_out_sequences_of_all_sources_each_once():
    corpus = mixed(held_out=0.3)
    loader = Loader(corpus, BatchShape(5, 2), seed=0)
    held = [
        int(row[0])
        for batch in loader.evaluation(100)
        for x, y in zip(batch.inputs, batch.labels, strict=True)
        for row, labels in zip(x, y, strict=True)
        if int(labels[0]) != -100
    ]
    assert len(set(held)) == len(held) == corpus.held_out
    for number, one in enumerate(corpus.sources):
        own = {word % 10_000 for word in held if word // 10_000 == number}
        assert own == set(range(one.trained, one.trained + one.held_out))
    some = loader.evaluation(1)[0]
    assert {int(x[0]) // 10_000 for y in some.inputs for x in y} >= {0, 1}
    assert torch.equal(some.inputs[0], loader.evaluation(100)[0].inputs[0])


# ---------------------------------------------------------------- configs
def test_a_mixture_is_written_as_tables_and_read_back():
    config = load_config(TABLES)
    assert config.data.mixture == (
        MixtureSource(("web.txt",), 3.0),
        MixtureSource(("code",), 1.0, "programs"),
    )
    assert load_config(dump_config(config)) == config
    absolute = with_absolute_paths(config).data.mixture[1].files
    assert absolute == (str(Path("code").absolute()),)
    assert apply_changes(config, ["data.sources="]).data.mixture == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[data]\nsources = [{file = "a"}]', "did you mean 'files'"),
        ("[data]\nsources = [{files = 3}]", "must be a list of strings"),
        ('[data]\nsources = [{files = "a", weight = "b"}]', "must be a number"),
        ('[data]\nsources = [{files = "a", weight = 0}]', "must be above 0"),
        ("[data]\nsources = [{weight = 2}]", "files is empty"),
    ],
)
def test_a_mixture_that_is_none_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        load_config(text)


def test_a_run_on_a_mixture_says_what_it_has_read(run, tmp_path):
    (tmp_path / "web.txt").write_text("web text " * 4000)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n" * 300)
    (tmp_path / "config.toml").write_text(SMALL_CONFIG + TABLES)
    code, out, err = run(
        "train config.toml --set run.folder=run --set run.steps=2 --set data.global_batch=64 "
        "--set schedule.name=1f1b --set parallel.pp=1"
    )
    assert code == 0, err
    web, programs = read_use(tmp_path / "run")
    assert (web.name, web.weight) == ("web.txt", 0.75)
    assert (programs.name, programs.weight) == ("programs", 0.25)
    assert web.tokens + programs.tokens == sum(
        row.tokens for row in read_rows(tmp_path / "run")
    )
    assert f"programs: {programs.tokens:,} tokens" in out + err
    assert "Text by source" in (tmp_path / "run" / "report.html").read_text()
    code, out, err = run("eval run --batches 1")
    assert code == 0, err


def test_a_worker_elsewhere_reads_the_same_mixture_and_guesses_the_same_words(tmp_path):
    for name in ("web", "code"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text " * 400)
    config = load_config('[data]\nseq_len = 16\n[model]\nfamily = "bert"')
    mixture = tuple(
        MixtureSource((str(tmp_path / f"{name}.txt"),)) for name in ("web", "code")
    )
    config = replace(
        config, data=replace(config.data, sources=mixture, tokenizer="bytes")
    )
    run, far = tmp_path / "run", tmp_path / "far"
    run.mkdir()
    far.mkdir()
    here = worker_corpus(config, run)
    (run / "config.toml").write_text(dump_config(config))
    write_plan(Plan(make("1f1b", ranks=1, microbatches=1), "1f1b"), run / "plan.json")
    for name, file in RunFiles(run, config).inputs.items():
        shutil.copyfile(file, far / name)
    shutil.rmtree(tmp_path / "cache")
    settle_config(far)
    there = worker_corpus(read_config(far / "config.toml"), far)
    shape = BatchShape(4, 8)
    ours, theirs = (Loader(one, shape, seed=1).step()[0] for one in (here, there))
    assert torch.equal(torch.cat(ours.inputs), torch.cat(theirs.inputs))
    assert torch.equal(torch.cat(ours.labels), torch.cat(theirs.labels))
    assert 0 < ours.valid < 4 * 8 * 16


def test_a_missing_source_of_a_mixture_is_named(tmp_path):
    data = DataConfig(sources=(MixtureSource((str(tmp_path / "none"),)),))
    with pytest.raises(FileError, match="there is no such file or folder"):
        open_text(data, tmp_path)
    (tmp_path / "a.txt").write_text("some text " * 40)
    other = MixtureSource((str(tmp_path / "a.txt"),), 2.0)
    both = replace(data, sources=(other, other), seq_len=16)
    assert open_text(both, tmp_path).names == ("a.txt", "a.txt")


def test_an_empty_source_of_a_mixture_is_named(tmp_path):
    (tmp_path / "full.txt").write_text("some words " * 50)
    (tmp_path / "empty.txt").touch()
    names = [str(tmp_path / name) for name in ("full.txt", "empty.txt")]
    mixture = tuple(MixtureSource(files=(name,)) for name in names)
    data = DataConfig(seq_len=LENGTH, tokenizer="bytes", sources=mixture)
    with pytest.raises(FileError, match=r"source empty\.txt of data\.sources: the tex"):
        open_text(data, tmp_path / "cache")
