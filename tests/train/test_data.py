"""Text becomes batches: all of it, once an epoch, in an order that can be taken up anywhere."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import make
from penstock.config import DataConfig
from penstock.errors import FileError, RunError
from penstock.formats.config_toml import load_config
from penstock.train.data import chat, files
from penstock.train.data.corpus import Corpus, cut_corpus, open_corpus, shuffled
from penstock.train.data.files import source_files
from penstock.train.data.loader import BatchShape, Loader, wanted_by
from penstock.train.data.stream import TextStream
from penstock.train.data.tokenizer import ByteTokenizer, FileTokenizer, tokenizer_of
from penstock.train.job import settle_tokenizer
from penstock.train.own_models import vocab_of


def cut_into_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let files be read and encoded in pieces of this many bytes."""
    monkeypatch.setattr(files, "PIECE_BYTES", size)


def corpus_of(tokens: int = 1001, length: int = 10, held_out: float = 0.1) -> Corpus:
    """Token k is k, so that a sequence shows where it is from."""
    return cut_corpus(
        np.arange(tokens, dtype=np.uint16),
        replace(DataConfig(), seq_len=length, validation=held_out),
        "digest",
    )


def loader_of(
    rows: int, microbatches: int, passes: int = 1, seed: int = 0, held_out: float = 0.1
) -> Loader:
    shape = BatchShape(rows, microbatches, passes)
    return Loader(corpus_of(held_out=held_out), shape, seed)


@pytest.fixture
def opened(tmp_path) -> Callable[..., Corpus]:
    """Opens files of a test's folder as a corpus; `watch` sees the progress."""

    def open_files(*names: str, watch=lambda done, total: None, **data) -> Corpus:
        sources = tuple(str(tmp_path / name) for name in names)
        data = DataConfig(sources=sources, **data)
        return open_corpus(data, tmp_path / "cache", watch)

    return open_files


def numbers(loader: Loader, batches) -> list[int]:
    """Which sequences a step has, in order."""
    return [
        int(row[0]) // loader.corpus.length
        for batch in batches
        for x in batch.inputs
        for row in x
    ]


# ---------------------------------------------------------------- order
@given(st.integers(1, 700), st.integers(0, 2**63 - 1), st.integers(0, 5))
@settings(max_examples=60)
def test_an_epoch_is_a_permutation_of_all_sequences(length, seed, epoch):
    assert sorted(
        shuffled(epoch * length + k, length, seed) for k in range(length)
    ) == list(range(length))


def test_seeds_and_epochs_shuffle_differently_and_far():
    orders = {
        tuple(shuffled(e * 500 + k, 500, seed) for k in range(500))
        for seed in range(4)
        for e in range(4)
    }
    assert len(orders) == 16
    for order in orders:
        assert abs(float(np.corrcoef(order, range(500))[0, 1])) < 0.2


# ---------------------------------------------------------------- batches
def test_a_label_is_the_next_token_and_every_token_has_one():
    batch = loader_of(3, 2).step()[0]
    for x, y in zip(batch.inputs, batch.labels, strict=True):
        assert torch.equal(y, x + 1)
    assert batch.valid == 60


def test_documents_that_are_told_apart_have_starts_and_guess_nothing_of_each_other():
    tokens = np.array([4, 5, 0, 6, 7, 8, 0, 9, 0, 1, 2, 3, 5], dtype=np.uint16)
    corpus = cut_corpus(
        tokens, DataConfig(seq_len=6, validation=0, document_mask=True), end=0
    )
    batch = Loader(corpus, BatchShape(rows=1, microbatches=2), seed=0).step()[0]
    found = {
        tuple(x[0].tolist()): (y[0].tolist(), s[0].tolist())
        for x, y, s in zip(batch.inputs, batch.labels, batch.starts, strict=True)
    }
    assert found == {
        (4, 5, 0, 6, 7, 8): ([5, 0, -100, 7, 8, 0], [0, 0, 0, 3, 3, 3]),
        (0, 9, 0, 1, 2, 3): ([-100, 0, -100, 2, 3, 5], [0, 1, 1, 3, 3, 3]),
    }
    assert batch.valid == 9
    assert not loader_of(1, 2).step()[0].starts


def test_a_tokenizer_without_an_end_cannot_tell_documents_apart(
    opened, tmp_path, monkeypatch
):
    (tmp_path / "a.txt").write_text("some text " * 20)
    monkeypatch.setattr(ByteTokenizer, "end", None)
    with pytest.raises(FileError, match="bytes has no word that ends a document"):
        opened("a.txt", document_mask=True)
    assert opened("a.txt", seq_len=8).end is None


def test_every_sequence_is_seen_once_an_epoch_and_held_out_ones_never():
    loader = loader_of(3, 5, seed=1)
    # 180 = 2 * 90.
    seen = Counter(n for _ in range(12) for n in numbers(loader, loader.step()))
    assert set(seen) == set(range(90))
    assert set(seen.values()) == {2}
    assert set(numbers(loader, loader.evaluation(1))) == set(range(90, 100))


@pytest.mark.parametrize("copies", [2, 3])
def test_each_replica_sees_its_own_shard_once_an_epoch(copies):
    schedule = make("1f1b", ranks=2, microbatches=3, copies=copies)
    ranks = [
        schedule.stages[microbatch.path[0]].rank for microbatch in schedule.microbatches
    ]
    loader = loader_of(2, len(schedule.microbatches), seed=3)
    shards: dict[int, list[int]] = {}
    for _ in range(90 // loader.shape.sequences):
        batch = loader.step()[0]
        for rank, x in zip(ranks, batch.inputs, strict=True):
            shards.setdefault(rank, []).extend(int(row[0]) // 10 for row in x)
    assert len(shards) == copies
    everything = [n for shard in shards.values() for n in shard]
    assert (
        len(everything)
        == len(set(everything))
        == 90 // loader.shape.sequences * loader.shape.sequences
    )


def test_the_order_does_not_depend_on_how_a_step_is_cut():
    steps = []
    for rows, microbatches, passes in ((12, 1, 1), (3, 4, 1), (2, 3, 2), (1, 2, 6)):
        loader = loader_of(rows, microbatches, passes, seed=5)
        steps.append([numbers(loader, loader.step()) for _ in range(9)])
    assert all(step == steps[0] for step in steps)


def test_an_evaluation_sees_the_same_sequences_however_a_step_is_cut():
    found = []
    for rows, microbatches, passes in ((12, 1, 1), (3, 4, 1), (2, 3, 2), (1, 2, 6)):
        loader = loader_of(rows, microbatches, passes, seed=5, held_out=0.5)
        batches = loader.evaluation(2)
        # Losses add up to the mean over all.
        assert {batch.valid for batch in batches} == {240}
        found.append(numbers(loader, batches))
    assert all(one == list(range(50, 74)) for one in found)


@pytest.mark.parametrize("batches", [1, 3, 1000])
@pytest.mark.parametrize("end", [None, 823])
def test_an_evaluation_counts_every_held_out_sequence_at_most_once(batches, end):
    for rows, microbatches, passes in ((3, 2, 1), (1, 3, 2), (2, 1, 3)):
        loader = Loader(
            replace(corpus_of(held_out=0.2), end=end),
            BatchShape(rows, microbatches, passes),
            seed=0,
        )
        found = loader.evaluation(batches)
        counted = [
            int(x[0]) // 10
            for batch in found
            for inputs, labels in zip(batch.inputs, batch.labels, strict=True)
            for x, y in zip(inputs, labels, strict=True)
            if (y >= 0).any()
        ]
        assert counted == list(range(80, 80 + min(6 * batches, 20)))
        assert loader.examined(batches) == len(counted)
        labels = sum(int((y >= 0).sum()) for batch in found for y in batch.labels)
        assert {batch.valid for batch in found} == {labels}
        assert {batch.shapes for batch in found} == {((rows, 10),) * microbatches}


def test_a_rank_reads_only_what_begins_or_ends_on_it():
    schedule = make("1f1b", ranks=3, microbatches=2, copies=2)
    assert [sorted(wanted_by(schedule, rank)) for rank in range(6)] == [
        [0, 1],
        [],
        [0, 1],
        [2, 3],
        [],
        [2, 3],
    ]
    whole = loader_of(2, 4).step()[0]
    shape = BatchShape(2, 4, wanted=frozenset({1}))
    some = Loader(corpus_of(), shape, seed=0).step()[0]
    assert some.shapes == whole.shapes
    assert some.valid == whole.valid
    assert torch.equal(some.inputs[1], whole.inputs[1])
    assert not some.inputs[0].any()


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=30)
def test_a_loader_goes_on_in_the_middle_of_an_epoch_as_if_it_had_never_stopped(
    steps, rows, microbatches
):
    first = loader_of(rows, microbatches, seed=7)
    for _ in range(steps):
        first.step()
    state = json.loads(json.dumps(first.state()))
    second = loader_of(rows, microbatches, seed=7)
    second.resume(state)
    for _ in range(3):
        assert numbers(first, first.step()) == numbers(second, second.step())


@pytest.mark.parametrize("change", [{"seed": 8}, {"length": 11}, {"digest": "other"}])
def test_going_on_with_other_data_is_refused(change):
    loader = loader_of(1, 1, seed=7)
    with pytest.raises(RunError, match=f"its {next(iter(change))} is"):
        loader.resume(loader.state() | change)


def test_batches_that_are_read_ahead_are_those_of_the_next_step():
    """Reading ahead counts nothing, and what it has read is dropped if another step comes next."""
    plain, ahead = loader_of(2, 3, seed=5), loader_of(2, 3, seed=5)
    for number in range(4):
        expected = [batch.inputs for batch in plain.step()]
        ahead.prepare()
        ahead.prepare()
        assert ahead.seen == ahead.state()["seen"] == 6 * number
        found = [batch.inputs for batch in ahead.step()]
        assert torch.equal(torch.cat(*found), torch.cat(*expected))
    ahead.prepare()
    ahead.seen = plain.seen = 0
    (one,), (other,) = ahead.step(), plain.step()
    assert torch.equal(torch.cat(one.labels), torch.cat(other.labels))


def test_a_mean_over_passes_counts_the_labels_of_all():
    assert [batch.valid for batch in loader_of(1, 2, 3).step()] == [60, 60, 60]


# ---------------------------------------------------------------- text
def test_files_folders_and_lines_of_json_are_packed_one_after_the_other(
    opened, tmp_path
):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "one.txt").write_text("abc")
    (tmp_path / "folder" / "deep" / "two.md").write_text("de")
    (tmp_path / "folder" / "left.bin").write_text("zzz")
    (tmp_path / "three.jsonl").write_text(
        '{"text": "fg"}\n\n{"text": "h", "more": 1}\n'
    )
    corpus = opened("one.txt", "folder", "three.jsonl", seq_len=3, validation=0.0)
    assert bytes(corpus.tokens.astype(np.uint8)) == b"abc\0de\0fg\0h\0"
    assert (corpus.trained, corpus.held_out) == (3, 0)


def test_the_cache_is_mapped_and_made_once_until_the_text_changes(opened, tmp_path):
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("x" * 100)
    first = opened("a.txt", seq_len=10)
    assert isinstance(first.tokens, np.memmap)
    made = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert len(made) == 2
    opened("a.txt", seq_len=10)
    assert {file: file.stat().st_mtime_ns for file in cache.iterdir()} == made
    text.write_text("y" * 101)
    other = opened("a.txt", seq_len=10)
    assert (len(other.tokens), other.digest != first.digest) == (102, True)


def test_a_cache_that_was_cut_off_is_made_again(opened, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    opened("a.txt", seq_len=10)
    row = next((tmp_path / "cache").glob("*.bin"))
    row.write_bytes(row.read_bytes()[:50])
    assert len(opened("a.txt", seq_len=10).tokens) == 101


def test_pythons_own_library_is_the_default_text():
    files = source_files(DataConfig())
    names = {file.name for file in files}
    assert {"argparse.py", "random.py"} <= names
    assert not any(
        "site-packages" in file.parts or "test" in file.parts for file in files
    )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "bad.jsonl",
            '{"text": "a"}\n{"text"\n',
            "bad.jsonl:2:8: this line is not JSON: Expecting ':' delimiter",
        ),
        ("bad.jsonl", '{"body": "a"}\n', "no text under 'text'; it has 'body'"),
        ("bad.jsonl", "[1]\n", "bad.jsonl:1: this line is not a JSON object"),
        (
            "bad.jsonl",
            '{"text": 3}\n',
            "bad.jsonl:1: the value of 'text' is not text: 3",
        ),
        ("short.txt", "abc", "too few for sequences of 10"),
        ("empty.txt", "", "the text is empty"),
    ],
)
def test_text_that_cannot_be_used_is_said_where(opened, tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(FileError) as caught:
        opened(name, seq_len=10)
    assert words in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_folder_inside_that_cannot_be_read_is_said_not_left_out(
    tmp_path, monkeypatch
):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "closed").mkdir(mode=0)
    if os.access(tmp_path / "closed", os.R_OK):  # root reads everything
        scandir = os.scandir

        def refused(path):
            if Path(path).name == "closed":
                raise PermissionError(13, "Permission denied", str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(FileError, match="closed: Permission denied"):
        source_files(replace(DataConfig(), sources=(str(tmp_path),)))


def test_text_that_was_copied_elsewhere_is_the_same_text(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, when in ((here, 1), (there, 2)):
        folder.mkdir()
        (folder / "a.txt").write_text("a few words " * 20)
        os.utime(folder / "a.txt", (when, when))
    first, second = (
        open_corpus(DataConfig(sources=(str(one),), seq_len=8), one / "cache")
        for one in (here, there)
    )
    assert first.digest == second.digest
    assert {file.name for file in (here / "cache").iterdir()} != {
        file.name for file in (there / "cache").iterdir()
    }


def test_a_large_file_is_read_in_pieces_and_says_how_far_it_is(
    opened, tmp_path, monkeypatch
):
    cut_into_pieces(monkeypatch, 64)
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 201)))
    (tmp_path / "b.jsonl").write_text('{"text": "xyz"}\n' * 20)
    seen: list[tuple[int, int]] = []
    found = opened(
        "a.txt", "b.jsonl", seq_len=8, watch=lambda *place: seen.append(place)
    )
    assert (
        bytes(found.tokens.astype(np.uint8))
        == bytes(range(1, 201)) + b"\0" + b"xyz\0" * 20
    )
    assert seen == sorted(seen)
    assert (len(seen) > 8, seen[-1]) == (True, (520, 520))


@pytest.mark.parametrize(
    ("ending", "pack"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
def test_compressed_text_and_lines_of_json_are_unpacked(
    ending, pack, opened, tmp_path, monkeypatch
):
    cut_into_pieces(monkeypatch, 64)
    plain, lines = b"a few words " * 30, b'{"text": "xyz"}\n' * 3
    names = f"a.txt{ending}", f"b.jsonl{ending}"
    for name, content in zip(names, (plain, lines), strict=True):
        (tmp_path / name).write_bytes(pack(content))
    seen: list[tuple[int, int]] = []
    corpus = opened(*names, seq_len=4, watch=lambda *place: seen.append(place))
    assert bytes(corpus.tokens.astype(np.uint8)) == plain + b"\0" + b"xyz\0" * 3
    size = sum((tmp_path / name).stat().st_size for name in names)
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)
    if ending == ".gz":
        found = source_files(DataConfig(sources=(str(tmp_path),)))
        assert [file.name for file in found] == ["a.txt.gz", "b.jsonl.gz"]


def test_a_source_that_is_not_there_and_a_folder_without_text_are_named(tmp_path):
    with pytest.raises(FileError, match="no such file or folder"):
        source_files(replace(DataConfig(), sources=(str(tmp_path / "none"),)))
    with pytest.raises(FileError, match="has no file that ends in"):
        source_files(replace(DataConfig(), sources=(str(tmp_path),)))


def test_a_cache_that_cannot_be_written_is_said_so(opened, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(FileError, match="cannot write the token cache"):
        opened("a.txt", seq_len=10)


# ---------------------------------------------------------------- tokenizers
def test_bytes_come_back_and_rubbish_is_marked():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve".encode(), "x").tolist()) == "naïve"
    assert tokenizer.decode([255, 104]) == "\ufffdh"


def test_a_tokenizer_json_makes_the_words_that_its_own_library_makes(opened, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<unk>", "</s>"], vocab_size=40, show_progress=False
    )
    theirs.train_from_iterator(["the cat sat on the mat", "the dog"], trainer)
    path = str(tmp_path / "tokenizer.json")
    theirs.save(path)
    (tmp_path / "a.txt").write_text("the cat")
    (tmp_path / "b.txt").write_text("the dog")
    ours = tokenizer_of(path)
    corpus = opened("a.txt", "b.txt", tokenizer=path, seq_len=2)
    end = theirs.token_to_id("</s>")
    assert corpus.tokens.tolist() == [
        *theirs.encode("the cat").ids,
        end,
        *theirs.encode("the dog").ids,
        end,
    ]
    assert ours.vocab == theirs.get_vocab_size()
    (tmp_path / "half.jsonl").write_text('{"text": "the"}\n{"text": "\\ud800"}\n')
    with pytest.raises(FileError, match=r"half\.jsonl:2 is not text"):
        opened("half.jsonl", tokenizer=path)
    with pytest.raises(FileError, match="byte 0 is not UTF-8"):
        ours.encode(b"\xff", "some file")


def trained_tokenizer(kind: str):
    """A small tokenizer with one of the usual ways to split text into words, trained on text with odd white space."""
    tokenizers = pytest.importorskip("tokenizers")
    before, models, trainers = (
        tokenizers.pre_tokenizers,
        tokenizers.models,
        tokenizers.trainers,
    )
    theirs = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    of_four = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ways = {
        "byte level": lambda: before.ByteLevel(add_prefix_space=False),
        "byte level, a space before": lambda: before.ByteLevel(add_prefix_space=True),
        "byte level, newlines with signs": lambda: before.Sequence(
            [
                before.Split(tokenizers.Regex(of_four), "isolated"),
                before.ByteLevel(use_regex=False),
            ]
        ),
        "white space": before.Whitespace,
        "metaspace": before.Metaspace,
        "lines": lambda: before.Split("\n", "merged_with_next"),
        "whole text": lambda: None,
    }
    if ways[kind]() is not None:
        theirs.pre_tokenizer = ways[kind]()
    if kind == "whole text":
        theirs.normalizer = tokenizers.normalizers.Sequence(
            [
                tokenizers.normalizers.Prepend("_"),
                tokenizers.normalizers.Replace(" ", "_"),
            ]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "</s>"],
        show_progress=False,
        initial_alphabet=before.ByteLevel.alphabet(),
    )
    theirs.train_from_iterator(
        [ODD_TEXT[at : at + 200] for at in range(0, len(ODD_TEXT), 200)], trainer
    )
    # As many tokenizer.json have it, for models of one sentence.
    theirs.enable_truncation(7)
    return theirs


WORDS = [
    "the",
    "cats",
    "sat.",
    "on\n\n",
    "mats,",
    "  and",
    "\tsaid",
    "naïve",
    "ünï\u3000",
    "x\n",
    "(1234)",
    "\n",
    "a.\n",
]
ODD_TEXT = " ".join(
    WORDS[k * k % 13] + ("" if k % 3 else " " * (k % 4)) for k in range(1500)
)


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        ("byte level", True),
        ("byte level, a space before", True),
        ("byte level, newlines with signs", True),
        ("white space", True),
        ("metaspace", True),
        ("lines", False),
        ("whole text", False),
    ],
)
def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(
    kind, cuts, opened, tmp_path, monkeypatch
):
    theirs = trained_tokenizer(kind)
    theirs.save(str(tmp_path / "tokenizer.json"))
    theirs.no_truncation()
    (tmp_path / "a.txt").write_text(ODD_TEXT, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": ODD_TEXT[::-1]}) + "\n")
    cut_into_pieces(monkeypatch, 1024)
    seen: list[int] = []
    encode_all = FileTokenizer.encode_all
    monkeypatch.setattr(
        FileTokenizer,
        "encode_all",
        lambda self, raws, source: (
            seen.extend(map(len, raws)) or encode_all(self, raws, source)
        ),
    )
    tokenizer = str(tmp_path / "tokenizer.json")
    found = opened("a.txt", "b.jsonl", tokenizer=tokenizer, seq_len=4)
    end = theirs.token_to_id("</s>")
    whole = [
        theirs.encode(text, add_special_tokens=False).ids
        for text in (ODD_TEXT, ODD_TEXT[::-1])
    ]
    assert found.tokens.tolist() == [*whole[0], end, *whole[1], end]
    assert (max(seen) <= 1024) is cuts


def test_what_is_no_text_in_a_later_piece_is_said_by_its_place(
    opened, tmp_path, monkeypatch
):
    trained_tokenizer("byte level").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_bytes(b"some words " * 200 + b"\xff\xff")
    cut_into_pieces(monkeypatch, 1024)
    with pytest.raises(FileError, match=r"a\.txt is not text: byte 2200 is not UTF-8"):
        opened("a.txt", tokenizer=str(tmp_path / "tokenizer.json"))


def test_a_tokenizer_that_is_none_is_said_so(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(FileError, match="there is no tokenizer"):
        tokenizer_of(str(tmp_path / "none.json"))
    Path(tmp_path / "bad.json").write_text("{}")
    with pytest.raises(FileError, match="is not a tokenizer"):
        tokenizer_of(str(tmp_path / "bad.json"))


def test_a_tokenizer_with_gaps_has_a_place_for_every_number(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 5, "<unk>": 999}, unk_token="<unk>")
    )
    theirs.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_of(str(tmp_path / "tokenizer.json")).vocab == 1000


def test_a_tokenizer_is_read_once_until_its_files_change(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "<unk>": 1}
    for word, folder in (("b", "one"), ("c", "two")):
        (tmp_path / folder).mkdir()
        model = tokenizers.models.WordLevel(words | {word: 2}, unk_token="<unk>")
        tokenizers.Tokenizer(model).save(str(tmp_path / folder / "tokenizer.json"))
    path = tmp_path / "one" / "tokenizer.json"
    first = tokenizer_of(str(path))
    assert tokenizer_of(str(path)) is first
    assert tokenizer_of(str(tmp_path / "two" / "tokenizer.json")).decode([2]) == "c"
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "b"}')
    assert (first.end, tokenizer_of(str(path)).end) == (None, 2)
    content = path.read_text()
    path.write_text(content.replace('"b"', '"bb"'))
    assert tokenizer_of(str(path)).decode([2]) == "bb"


def test_a_cache_is_for_all_who_may_read_files(opened, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 10)
    opened("a.txt", seq_len=10)
    plain = tmp_path / "plain"
    plain.touch()
    assert {file.stat().st_mode for file in (tmp_path / "cache").iterdir()} == {
        plain.stat().st_mode
    }


# ---------------------------------------------------------------- large texts
@pytest.mark.parametrize("kind", ["text", "conversations"])
def test_memory_does_not_grow_with_the_corpus(kind, tmp_path, monkeypatch):
    """Pieces are made small here, so that a few megabytes are many of them."""
    cut_into_pieces(monkeypatch, 1 << 15)
    monkeypatch.setattr(chat, "POOL", 16)
    line = json.dumps({"prompt": "why? " * 40, "completion": "because " * 60}) + "\n"
    name = "a.txt" if kind == "text" else "a.jsonl"

    def peak(lines: int) -> int:
        """The most bytes that Python and numpy held while text was encoded and read."""
        folder = tmp_path / f"{lines}"
        folder.mkdir()
        (folder / name).write_text(line * lines)
        data = DataConfig(
            sources=(str(folder / name),),
            seq_len=1024,
            format="text" if kind == "text" else "chat",
        )
        tracemalloc.start()
        try:
            corpus = open_corpus(data, folder)
            loader = Loader(corpus, BatchShape(2, 2), seed=0)
            for _ in range(10):
                loader.step()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(60)  # what is loaded on first use
    small, large = peak(150), peak(1500)
    assert large < 1.5 * small + (1 << 16)
    assert large < len(line) * 1500 / 2


def test_rows_are_copied_from_the_file_and_outlive_it(opened, tmp_path):
    """Whoever touches a mapped file maps much of it, which would count as memory of the process."""
    (tmp_path / "a.txt").write_text("0123456789" * 5)
    corpus = opened("a.txt", seq_len=10, validation=0.0)
    assert isinstance(corpus.tokens, np.memmap)
    rows = [corpus.sequence(number) for number in range(5)]
    assert not any(isinstance(row, np.memmap) for row in rows)
    for file in (tmp_path / "cache").iterdir():
        file.unlink()
    for number, row in enumerate(rows):
        expected = corpus.tokens[10 * number : 10 * number + 11]
        assert row.tolist() == expected.tolist()
        assert corpus.sequence(number).tolist() == expected.tolist()


def test_a_stream_reads_anything_that_has_examples():
    """A list of mappings will do; the library `datasets` has tests of its own."""
    texts = [{"text": f"text {n} " * (n % 5)} for n in range(40)] + [{"text": None}]
    batches = list(TextStream(texts, tokens=5, rows=2))
    first = TextStream(texts, tokens=5, rows=2)
    reader = iter(first)
    next(reader)
    again = TextStream(texts, tokens=5, rows=2)
    again.load_state_dict(first.state_dict())
    for (x, y), (ours, labels) in zip(again, batches[1:], strict=True):
        assert torch.equal(x, ours)
        assert torch.equal(y, labels)
    bare = [one["text"] for one in texts[:-1]]
    for (x, _), (ours, _) in zip(TextStream(bare, 5, 2), batches, strict=True):
        assert torch.equal(x, ours)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ((text for text in ["a", "b"]), "train with `fit`"),
        ({"train": ["a"]}, r"hand over one of them, such as dataset\['train'\]"),
        ([["a"]], "neither a text nor a mapping, but list"),
    ],
)
def test_what_a_stream_cannot_read_is_refused(dataset, words):
    with pytest.raises(FileError, match=words):
        list(TextStream(dataset, tokens=5, rows=2))


def test_of_a_saved_dataset_with_splits_only_one_is_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    home = tmp_path / "saved"
    home.mkdir()
    (home / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        (home / split).mkdir()
        table = pa.table({"text": [f"{split} text " * 9]})
        with pa.ipc.new_stream(home / split / "data.arrow", table.schema) as file:
            file.write_table(table)
    data = DataConfig(sources=(str(home),), seq_len=16, validation=0)
    assert [file.parent.name for file in source_files(data)] == ["train"]
    other = replace(data, sources=(str(home / "test"),))
    words = open_corpus(other, tmp_path / "cache").tokens
    assert bytes(words.tolist()).startswith(b"test text test")
    (home / "train").rename(home / "dev")
    with pytest.raises(FileError, match="no split 'train'; it has dev, test"):
        source_files(data)


def test_a_pattern_names_files_of_any_ending(tmp_path):
    for name in ("a.rst", "b.rst", "c.md"):
        (tmp_path / name).write_text("some words")
    data = DataConfig(sources=(str(tmp_path / "*.rst"),))
    assert [file.name for file in source_files(data)] == ["a.rst", "b.rst"]
    with pytest.raises(FileError, match="there is no such file or folder"):
        source_files(replace(data, sources=(str(tmp_path / "*.tex"),)))


def test_byte_pairs_are_trained_once_on_the_text_of_a_run(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 50)
    config = load_config(
        "", changes=[f"data.sources={tmp_path / 'a.txt'}", "data.tokenizer=bpe:300"]
    )
    assert vocab_of(config) == 300  # A plan trains nothing.
    assert not (tmp_path / "home").exists()
    settled = settle_tokenizer(config).data.tokenizer
    assert tokenizer_of(settled).vocab <= 300
    made = Path(settled).stat().st_mtime_ns
    assert settle_tokenizer(config).data.tokenizer == settled
    assert Path(settled).stat().st_mtime_ns == made
    (tmp_path / "a.txt").write_text("other words " * 50)
    assert settle_tokenizer(config).data.tokenizer != settled
