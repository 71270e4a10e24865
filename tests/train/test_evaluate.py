"""Any text can be evaluated, on a run or on a Hugging Face folder; the judge is transformers."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import transformers

from commands import called
from hugging_face import bert_sizes
from penstock.errors import FileError, ShapeError
from penstock.train.after.evaluate import (
    AblationRow,
    Examination,
    evaluate_run,
    evaluate_text,
)

TEXT = "".join(f"{n % 7} cats sat on {n % 5} mats\n" for n in range(30)) + "the end"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A GPT-2 with random weights, for bytes."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=16, n_layer=3, n_head=2, n_positions=32
    )
    gpt = transformers.GPT2LMHeadModel(config)
    for parameter in gpt.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape))
    gpt.save_pretrained(folder)
    return folder


def nats(folder: Path, rows: list[bytes]) -> float:
    """The summed loss of predicting every byte but the first of each row, by transformers."""
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    total = 0.0
    for row in rows:
        tokens = torch.tensor([list(row)])
        with torch.no_grad():
            logits = theirs(tokens[:, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
        total += float(loss)
    return total


def windows(text: bytes, length: int) -> list[bytes]:
    """Rows of `length` tokens with the next token, and a shorter one at the end."""
    return [text[n : n + length + 1] for n in range(0, len(text) - 1, length)]


def test_the_perplexity_of_a_folder_on_a_text_is_that_of_transformers(
    model, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    code, out, err = called(
        monkeypatch, capsys, f"eval {model} --text {file} --omit 1 --seq-len 24"
    )
    assert code == 0, err
    raw = TEXT.encode() + b"\0"  # a document and its end
    total = nats(model, windows(raw, 24))
    found = re.search(r"all +3/3 parts +perplexity ([\d.]+)", out)
    per_token = math.exp(total / (len(raw) - 1))
    assert float(found[1]) == pytest.approx(per_token, rel=1e-3)
    assert "chosen 2/3 parts" in out
    bits = re.search(r"per byte \(([\d.]+) bits\)", out + err)
    ratio = len(TEXT) / len(raw)
    expected = total / (len(raw) - 1) / ratio / math.log(2)
    assert float(bits[1]) == pytest.approx(expected, rel=1e-3)
    rows = len(windows(raw, 24))
    assert f"all {rows} sequences of 24 tokens" in out + err


def test_a_token_may_be_one_byte():
    rows = (AblationRow("all", 3, 3, 2.0, 0.0, 1.0, ()),)
    one = Examination(rows, 1, 1, 24, bytes_per_token=0.99999)
    assert one.by_byte.endswith(", 1 byte per token")


def test_a_text_shorter_than_a_sequence_counts_and_batches_limit_a_long_one(
    model, tmp_path
):
    (tmp_path / "short.txt").write_text("hello")
    short = evaluate_text(model, [str(tmp_path / "short.txt")])
    total = nats(model, [b"hello\0"])
    assert short.rows[0].perplexity == pytest.approx(math.exp(total / 5), rel=1e-4)
    assert (short.sequences, short.tokens) == (1, 32)
    (tmp_path / "long.txt").write_text(TEXT * 20)
    some = evaluate_text(model, [str(tmp_path / "long.txt")], batches=1)
    assert 0 < some.sequences < some.available
    assert f"{some.sequences:,} of {some.available:,} sequences" in some.text


def test_the_run_of_a_model_says_how_text_is_read(model, tmp_path):
    """With data.document_mask in its config, a token sees only its own document."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.toml").write_text("[data]\ndocument_mask = true\nseq_len = 20")
    (tmp_path / "texts").mkdir()
    documents = ["one document", "another one that is longer", "3"]
    for number, text in enumerate(documents):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    raw = b"".join(text.encode() + b"\0" for text in documents)
    pieces = []
    for row in windows(raw, 20):
        begin = 0
        for place, byte in enumerate(row[:-1]):
            if byte == 0:
                pieces.append(row[begin : place + 1])
                begin = place + 1
        pieces.append(row[begin:])
    pieces = [piece for piece in pieces if len(piece) > 1]
    labels = sum(len(piece) - 1 for piece in pieces)
    found = evaluate_text(tmp_path, [str(tmp_path / "texts")])
    expected = math.exp(nats(model, pieces) / labels)
    assert found.tokens == 20
    assert found.rows[0].perplexity == pytest.approx(expected, rel=1e-4)


def test_a_bert_is_evaluated_on_words_that_it_guesses(tmp_path):
    torch.manual_seed(1)
    sizes = bert_sizes(257, layers=2, width=16, heads=2, inner=24, positions=64)
    config = transformers.BertConfig(**sizes)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    (tmp_path / "text.txt").write_text(TEXT)
    found = evaluate_text(tmp_path / "bert", [str(tmp_path / "text.txt")])
    assert found.rows[0].perplexity == pytest.approx(257, rel=0.2)
    assert (found.tokens, found.by_byte) == (64, "")


def test_what_cannot_be_evaluated_is_refused(model, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(ShapeError, match=r"too long .* 32 positions\n  give --seq-len"):
        evaluate_text(model, [str(tmp_path / "a.txt")], tokens=33)
    with pytest.raises(FileError, match="or some text with --text"):
        evaluate_run(model, [])
    with pytest.raises(FileError, match=r"there is no such file .*\n  name .* --text"):
        evaluate_text(model, [str(tmp_path / "b.txt")])
    with pytest.raises(ShapeError, match="batches must be at least 1, not 0"):
        evaluate_text(model, [str(tmp_path / "a.txt")], batches=0)
