"""Text in tables, and tokenizers that are trained on any text."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pyarrow
import pytest
from pyarrow import parquet

from penstock.config import DataConfig
from penstock.errors import FileError, ShapeError
from penstock.train.data.corpus import open_corpus
from penstock.train.data.files import plain_texts, text_pieces
from penstock.train.data.tokenizer import tokenizer_of, train_tokenizer

TEXTS = [f"row {n} says {'na' * (n % 5)} batman\n" for n in range(700)]


def write_stream(table: pyarrow.Table, file: str) -> None:
    """As `datasets` saves its tables."""
    with (
        pyarrow.OSFile(file, "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=100)


def write_file(table: pyarrow.Table, file: str) -> None:
    with (
        pyarrow.OSFile(file, "wb") as sink,
        pyarrow.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=100)


WRITERS = {
    "a.parquet": parquet.write_table,
    "b.arrow": write_stream,
    "c.feather": write_file,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_gives_the_tokens_of_the_same_lines_of_json(name, tmp_path):
    """A row without a text is left out, and every row is a document."""
    table = pyarrow.table({"text": [*TEXTS, None], "number": range(701)})
    WRITERS[name](table, str(tmp_path / name))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "d.jsonl").write_text(lines)
    data = DataConfig(seq_len=16, document_mask=True, tokenizer="bytes")
    corpora = []
    for source in (name, "d.jsonl"):
        files = replace(data, sources=(str(tmp_path / source),))
        corpora.append(open_corpus(files, tmp_path / "cache"))
    assert corpora[0].digest == corpora[1].digest


def test_a_column_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": TEXTS, "number": range(700)}), file)
    with pytest.raises(
        FileError, match="has no column 'text'; it has 'body', 'number'"
    ):
        list(text_pieces(file, "text", len))
    with pytest.raises(FileError, match="'number' does not hold text, but int64"):
        list(text_pieces(file, "number", len))
    file.write_bytes(b"PAR1 nothing")
    with pytest.raises(FileError, match="is not a table, or is damaged"):
        list(text_pieces(file, "body", len))


def test_a_tokenizer_is_trained_on_the_text_of_a_config(tmp_path):
    (tmp_path / "text.txt").write_text("".join(TEXTS))
    file = tmp_path / "words" / "tokenizer.json"
    data = DataConfig(sources=(str(tmp_path / "text.txt"),))
    assert train_tokenizer(plain_texts(data), 300, file) == 300
    words = tokenizer_of(str(file))
    assert (words.vocab, words.end) == (300, 299)
    text = "batman says na, 蝙蝠俠\n"
    tokens = words.encode(text.encode(), "here")
    assert words.decode(tokens.tolist()) == text
    assert len(words.encode(b"batman says", "here")) < 5  # frequent words are short


def test_a_vocabulary_has_room_for_every_byte(tmp_path):
    with pytest.raises(ShapeError, match="at least 257 words, not 200"):
        train_tokenizer([], 200, tmp_path / "t.json")


def test_arrow_holds_little_of_a_table_at_a_time(tmp_path):
    """Random bytes cannot be compressed, so that a table held in memory would be seen."""
    texts = pyarrow.table({"text": [os.urandom(5000).hex() for _ in range(600)]})
    parquet.write_table(texts, tmp_path / "a.parquet", row_group_size=20)
    before = pyarrow.total_allocated_bytes()
    del texts
    held = []
    for piece in text_pieces(tmp_path / "a.parquet", "text", len):
        assert len(piece.text) == 10_000
        held.append(pyarrow.total_allocated_bytes())
    assert len(held) == 600
    assert max(held) < before
    assert held[-1] < held[len(held) // 2] + 500_000
