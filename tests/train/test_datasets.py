"""Datasets of the library `datasets`, saved, loaded or streamed; they resume exactly."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from commands import SMALL_CONFIG
from penstock.config import DataConfig
from penstock.errors import FileError, RunError, ShapeError
from penstock.train.data.cache import encode_dataset
from penstock.train.data.corpus import open_corpus
from penstock.train.data.stream import TextStream

datasets = pytest.importorskip("datasets")

TEXTS = [f"text {n} " + "la " * (n % 13) for n in range(60)]
ALL = b"".join(text.encode() + b"\0" for text in TEXTS)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()


def stored() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": TEXTS, "number": list(range(60))})


def streamed(tmp_path) -> datasets.IterableDataset:
    """A dataset of local files, read by `load_dataset` without being stored."""
    for part in range(3):
        lines = [json.dumps({"text": text}) for text in TEXTS[20 * part :][:20]]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / f"{part}.jsonl") for part in range(3)]
    return datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True
    )


def test_a_folder_of_save_to_disk_is_trained_on_and_only_its_own_split(run, tmp_path):
    both = datasets.DatasetDict({"train": stored(), "test": stored().select([0])})
    both.save_to_disk(tmp_path / "both")
    data = DataConfig(sources=(str(tmp_path / "both"),), seq_len=16)
    assert bytes(open_corpus(data, tmp_path / "cache").tokens.tolist()) == ALL
    own = DataConfig(sources=(str(tmp_path / "both" / "test"),), seq_len=16)
    assert len(open_corpus(own, tmp_path / "cache").tokens) < len(ALL)
    (tmp_path / "config.toml").write_text(SMALL_CONFIG)
    code, out, err = run(
        "train config.toml --set data.sources=both --set run.folder=run --set run.steps=1 "
        "--set data.seq_len=8 --set parallel.pp=1 --set schedule.name=1f1b"
    )
    assert code == 0, err
    assert f"{len(ALL):,} tokens" in out + err


@pytest.mark.parametrize("kind", ["stored", "streamed"])
def test_a_stream_has_every_token_once_and_goes_on_from_any_batch(kind, tmp_path):
    def stream() -> TextStream:
        dataset = stored() if kind == "stored" else streamed(tmp_path)
        return TextStream(dataset, tokens=7, rows=3)

    batches = list(stream())
    words = torch.cat([x.flatten() for x, _ in batches])
    assert bytes(words.tolist()) == ALL[: len(words)]
    assert len(ALL) - len(words) <= 21
    for x, y in batches:
        assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
    for stop in (1, 17, len(batches)):
        first = stream()
        reader = iter(first)
        for _ in range(stop):
            next(reader)
        state = json.loads(json.dumps(first.state_dict()))
        again = stream()
        again.load_state_dict(state)
        rest = list(again)
        assert len(rest) == len(batches) - stop
        for (x, y), (ours, labels) in zip(rest, batches[stop:], strict=True):
            assert torch.equal(x, ours)
            assert torch.equal(y, labels)


def test_a_second_epoch_begins_with_what_the_first_has_left(tmp_path):
    stream = TextStream(stored(), tokens=7, rows=3)
    words = [x.flatten() for _ in range(2) for x, _ in stream]
    found = bytes(torch.cat(words).tolist())
    assert found == (ALL + ALL)[: len(found)]
    assert stream.epoch == 2


def test_what_is_no_text_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"no 'body'; it has 'text', 'number'"):
        list(TextStream(stored(), 7, 3, field="body"))
    with pytest.raises(FileError, match="'number' does not hold text, but int"):
        list(TextStream(stored(), 7, 3, field="number"))
    with pytest.raises(ShapeError, match="at least 1, not 0 and 7"):
        TextStream(stored(), 7, 0)
    state = TextStream(stored(), 7, 3).state_dict()
    with pytest.raises(RunError, match="another kind of dataset"):
        TextStream(streamed(tmp_path), 7, 3).load_state_dict(state)
    with pytest.raises(RunError, match="rows of 7 tokens"):
        TextStream(stored(), 8, 3).load_state_dict(state)


@pytest.mark.parametrize("kind", ["stored", "streamed"])
def test_a_dataset_object_is_encoded_for_the_trainer(kind, tmp_path):
    dataset = stored() if kind == "stored" else streamed(tmp_path)
    data = DataConfig(seq_len=16)
    file = encode_dataset(dataset, data, tmp_path)
    corpus = open_corpus(replace(data, sources=(str(file),)), tmp_path)
    assert bytes(corpus.tokens.tolist()) == ALL
    with pytest.raises(FileError, match="hand over one of them"):
        encode_dataset(datasets.DatasetDict({"train": stored()}), data, tmp_path)
