"""The word that ends a document comes from the tokenizer and the files beside it; a sample begins as the text does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.config import DataConfig
from penstock.train.data.corpus import cut_corpus, find_prompt, open_corpus, read_prompt
from penstock.train.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    keep_tokenizer,
    kept_tokenizer,
)

tokenizers = pytest.importorskip("tokenizers")
WORDS = {"<unk>": 0, "a": 1, "b": 2, "<|done|>": 3, "<s>": 4, "</s>": 5, "<pad>": 6}


def saved(
    folder: Path, special: tuple[str, ...] = (), appended: str = "", **beside: object
) -> str:
    """A tokenizer.json of words, with special ones, and JSON files beside it; return its path."""
    theirs = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(dict(WORDS), unk_token="<unk>")
    )
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    theirs.add_special_tokens(list(special))
    if appended:
        theirs.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"<s> $A {appended}",
            special_tokens=[("<s>", WORDS["<s>"]), (appended, WORDS[appended])],
        )
    folder.mkdir(exist_ok=True)
    theirs.save(str(folder / "tokenizer.json"))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("word", "files"),
    [
        ("<|done|>", {"tokenizer_config": {"eos_token": "<|done|>"}}),
        ("<|done|>", {"tokenizer_config": {"eos_token": {"content": "<|done|>"}}}),
        ("<|done|>", {"special_tokens_map": {"eos_token": "<|done|>"}}),
        ("<|done|>", {"generation_config": {"eos_token_id": [3, 5]}}),
        ("<|done|>", {"config": {"eos_token_id": 3}}),
        ("</s>", {"tokenizer_config": {"eos_token": "not a word"}}),
        ("</s>", {"tokenizer_config": ["not an object"]}),
        ("</s>", {"config": {"eos_token_id": 999}}),
        ("</s>", {}),
    ],
)
def test_files_beside_a_tokenizer_name_the_end(tmp_path, word, files):
    path = saved(tmp_path, ("<s>", "</s>", "<|done|>"), **files)
    assert FileTokenizer(path).end == WORDS[word]


@pytest.mark.parametrize(
    ("special", "appended", "word"),
    [
        (("<s>", "<pad>", "<|done|>"), "<|done|>", "<|done|>"),  # it adds it
        (("<s>", "</s>", "<pad>"), "", "</s>"),  # its name says so
        (("<|done|>",), "", "<|done|>"),  # it is the only special one
        (("<s>", "<pad>"), "", None),
        ((), "", None),
    ],
)
def test_a_tokenizer_alone_says_what_ends_a_document(tmp_path, special, appended, word):
    end = FileTokenizer(saved(tmp_path, special, appended)).end
    assert end == (None if word is None else WORDS[word])


def test_the_copy_in_a_run_ends_documents_with_the_same_word(tmp_path):
    path = saved(
        tmp_path / "model", ("<s>", "</s>"), generation_config={"eos_token_id": 3}
    )
    run = tmp_path / "run"
    run.mkdir()
    keep_tokenizer(path, run)
    Path(path).unlink()
    kept = kept_tokenizer(path, run)
    assert Path(kept).parent == run
    assert FileTokenizer(kept).end == 3


def test_another_end_makes_another_corpus(tmp_path):
    path = saved(tmp_path / "model", ("<s>", "</s>"))
    (tmp_path / "text.txt").write_text("a b a b a b")
    data = DataConfig((str(tmp_path / "text.txt"),), tokenizer=path, seq_len=2)
    assert open_corpus(data, tmp_path / "cache").tokens[-1] == WORDS["</s>"]
    Path(path).with_name("tokenizer_config.json").write_text('{"eos_token": "b"}')
    assert open_corpus(data, tmp_path / "cache").tokens[-1] == WORDS["b"]


def test_a_relative_and_an_absolute_path_find_one_corpus(tmp_path, monkeypatch):
    path = Path(saved(tmp_path / "model", ("<s>", "</s>")))
    (tmp_path / "text.txt").write_text("a b a b a b")
    monkeypatch.chdir(tmp_path)
    for name in (str(path), "model/tokenizer.json"):
        data = DataConfig(("text.txt",), tokenizer=name, seq_len=2)
        open_corpus(data, tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 1
    assert not list((tmp_path / "cache").glob("*.part"))


# ---------------------------------------------------------------- prompts
def byte_corpus(text: bytes, held_out: float):
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    return cut_corpus(tokens, DataConfig(seq_len=8, validation=held_out))


def test_a_prompt_is_the_beginning_of_a_held_out_document():
    text = b"x" * 90 + b"\0Once upon a time there was a king\0more"
    prompt = find_prompt(byte_corpus(text, 0.3), ByteTokenizer())
    assert prompt == "Once upon a time there"


def test_a_prompt_from_the_middle_of_a_document_begins_with_a_line():
    text = b"one line after the other\n" * 20
    assert (
        find_prompt(byte_corpus(text, 0.3), ByteTokenizer())
        == "one line after the other"
    )


def test_a_prompt_has_no_half_letters():
    text = b"x" * 90 + b"\0" + "é".encode() * 40
    prompt = find_prompt(byte_corpus(text, 0.6), ByteTokenizer())
    assert prompt
    assert set(prompt) == {"é"}


def test_the_prompt_of_a_run_is_found_from_its_checkpoints(tmp_path):
    (tmp_path / "prompt.txt").write_text("Once upon")
    assert read_prompt(tmp_path) == "Once upon"
    assert read_prompt(tmp_path / "checkpoints" / "step-00000003") == "Once upon"
    assert read_prompt(tmp_path / "elsewhere" / "model" / "deeper") == ""
