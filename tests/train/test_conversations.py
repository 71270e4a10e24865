"""Instruction data: only answers are learned, whatever template writes them and however rows are packed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from commands import SMALL_CONFIG, called
from hugging_face import decoder_sizes
from penstock import make
from penstock.config import DataConfig
from penstock.errors import FileError
from penstock.train.data.chat import (
    BEGINS,
    LEARNED,
    Conversation,
    find_template,
    pack_rows,
)
from penstock.train.data.corpus import open_corpus
from penstock.train.data.loader import BatchShape, Loader, wanted_by
from penstock.train.data.tokenizer import FileTokenizer, train_tokenizer
from penstock.train.history import read_rows

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def chat(number: int) -> dict[str, object]:
    question = {"role": "user", "content": f"how many cats sat on mat {number}?"}
    answer = {"role": "assistant", "content": "cat " * (1 + number % 4)}
    turns = [question, answer] * (1 + number % 2)
    system = [{"role": "system", "content": "count"}] if number % 3 else []
    return {"messages": system + turns}


CHATS = [chat(number) for number in range(13)]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with conversations, and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("chats")
    lines = "\n".join(map(json.dumps, CHATS))
    (folder / "chats.jsonl").write_text(lines)
    (folder / "README.md").write_text("not a conversation")
    train_tokenizer(["not a conversation"], 270, folder / "tokenizer.json")
    words = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**words, "chat_template": UNMARKED})
    )
    return folder


def data_of(home: Path, **changes: object) -> DataConfig:
    plain = DataConfig(
        sources=(str(home),),
        tokenizer=str(home / "tokenizer.json"),
        format="chat",
        seq_len=192,
        validation=0.0,
    )
    return replace(plain, **changes)


def beside(home: Path, folder: Path, template: str) -> str:
    """A copy of the tokenizer with another chat template beside it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((home / name).read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return str(folder / "tokenizer.json")


def their_tokens(home: Path) -> list[tuple[list[int], list[int]]]:
    """What transformers makes of the conversations: words, and which of them an assistant says."""
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(home / "tokenizer.json"),
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
    )
    found = []
    for one in CHATS:
        said = theirs.apply_chat_template(
            one["messages"],
            chat_template=TEMPLATE,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        found.append((said["input_ids"], said["assistant_masks"]))
    return found


def conversations(corpus) -> list[tuple[list[int], list[int]]]:
    """Cut a corpus where conversations begin; padding is left out."""
    marks = np.asarray(corpus.marks)
    begins = [*(marks & BEGINS).nonzero()[0].tolist(), len(marks)]
    found = []
    for begin, end in pairwise(begins):
        learned = (marks[begin:end] & LEARNED).tolist()
        if any(learned):
            found.append((corpus.tokens[begin:end].tolist(), learned))
    return found


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED])
def test_assistants_turns_are_learned_as_transformers_marks_them(
    template, home, tmp_path
):
    data = data_of(home, tokenizer=beside(home, tmp_path, template))
    corpus = open_corpus(data, tmp_path)
    assert sorted(conversations(corpus)) == sorted(their_tokens(home))
    assert corpus.tally.conversations == len(CHATS)
    assert corpus.tally.cut == corpus.tally.left_out == 0
    assert open_corpus(replace(data, seq_len=160), tmp_path).digest != corpus.digest, (
        "rows of another length are another cache"
    )


def test_a_template_is_found_beside_the_tokenizer(home, tmp_path):
    assert find_template(data_of(home)).text == UNMARKED
    (tmp_path / "tokenizer.json").write_bytes((home / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("hello")
    beside = data_of(home, tokenizer=str(tmp_path / "tokenizer.json"))
    assert find_template(beside).text == "hello"
    assert find_template(data_of(home, tokenizer="bytes")) is None


# ---------------------------------------------------------------- rows
@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.integers(12, 20))
@settings(max_examples=40)
def test_rows_hold_every_conversation_whole_and_once(lengths, row):
    coming = [
        Conversation(
            np.full(length, number, dtype=np.uint16),
            np.array([BEGINS] + [LEARNED] * (length - 1), dtype=np.uint8),
        )
        for number, length in enumerate(lengths)
    ]
    rows = list(pack_rows(coming, row, padding=999))
    assert {len(one.words) for one in rows} == {row}
    words = np.concatenate([one.words for one in rows])
    for number, length in enumerate(lengths):
        places = (words == number).nonzero()[0]
        assert len(places) == length
        assert places[0] // row == places[-1] // row
        assert places[-1] - places[0] == length - 1
    used = sum(lengths)
    assert len(rows) <= -(-2 * used // row) + 1


def test_prompts_are_not_learned_and_completions_are_with_their_end(tmp_path):
    lines = [
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": "a very long question " * 3, "completion": "x"},
        {"prompt": "say it: ", "completion": "no" * 20},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    parquet.write_table(pa.Table.from_pylist(lines), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        data = DataConfig(
            sources=(str(tmp_path / name),), format="chat", seq_len=16, validation=0.0
        )
        corpus = open_corpus(data, tmp_path)
        found = [
            bytes(word for word, learned in zip(words, mask, strict=True) if learned)
            for words, mask in conversations(corpus)
        ]
        assert sorted(found) == [b"4\0", b"nonononono"[:8]]
        tally = corpus.tally
        assert (tally.conversations, tally.cut, tally.left_out) == (3, 2, 1)


def test_only_answers_are_labels_on_every_rank_and_all_ranks_count_the_same(
    home, tmp_path
):
    corpus = open_corpus(data_of(home, document_mask=True), tmp_path)
    schedule = make("1f1b", ranks=2, microbatches=2, copies=2)
    rows = corpus.trained
    batches = []
    for rank in range(4):
        shape = BatchShape(rows, 4, wanted=wanted_by(schedule, rank, separate=True))
        batches.append(Loader(corpus, shape, seed=1).step()[0])
    learned = 4 * sum(sum(mask) for _, mask in their_tokens(home))
    assert {batch.valid for batch in batches} == {learned}
    whole = Loader(corpus, BatchShape(rows, 4), seed=1).step()[0]
    for number, labels in enumerate(whole.labels):
        assert int((labels != -100).sum()) == whole.counts[number]
        counted = labels[labels != -100]
        following = whole.inputs[number][:, 1:][labels[:, :-1] != -100]
        assert torch.equal(counted, following)
    assert sum(whole.counts) == learned


def test_the_loss_of_a_run_is_the_mean_over_all_answers(
    home, tmp_path, monkeypatch, capsys
):
    """The judge is transformers: each conversation alone, with labels where its own mask says so."""
    torch.manual_seed(1)
    vocab = FileTokenizer(str(home / "tokenizer.json")).vocab
    sizes = decoder_sizes(vocab, width=32, kv_heads=4, inner=48, initializer_range=0.2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "start")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "start" / name).write_bytes((home / name).read_bytes())
    total, count = 0.0, 0
    for words, mask in their_tokens(home):
        x = torch.tensor([words])
        labels = x.where(torch.tensor([mask]) > 0, -100)
        with torch.no_grad():
            loss = model(x, labels=labels).loss
        total += float(loss) * sum(mask)
        count += sum(mask)
    rows = open_corpus(data_of(home), tmp_path).trained
    (tmp_path / "config.toml").write_text(SMALL_CONFIG)
    monkeypatch.chdir(tmp_path)
    line = (
        f"train config.toml --set data.sources={home} --set data.format=chat --set data.document_mask=true "
        f"--set data.seq_len=192 --set data.validation=0 --set data.global_batch={4 * rows} --set model.path=start "
        f"--set run.folder=run --set run.steps=1 "
        "--set schedule.name=seq1f1b:slices=2 --set schedule.microbatches=2 "
        "--set parallel.pp=1 --set parallel.dp_replicate=2"
    )
    code, out, err = called(monkeypatch, capsys, line)
    assert code == 0, err
    assert f"{len(CHATS)} conversations, {count:,} tokens to learn" in out + err
    rows = read_rows(tmp_path / "run")
    assert rows[0].loss == pytest.approx(total / count, rel=1e-5)
    assert (tmp_path / "run" / "chat_template.jinja").read_text() == UNMARKED
    assert (tmp_path / "run" / "prompt.txt").read_text().endswith("<|assistant|>")


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"text": "a"}, r"a\.jsonl:1: there are neither `messages` nor .*'text'"),
        ({"prompt": "a", "completion": 3}, r"a\.jsonl:1: `completion` is not text: 3"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": [{"content": "a"}]}, "message 0 has no `role`"),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            "`content` of message 0 is not text",
        ),
        ({"messages": [{"role": "user", "content": "a"}]}, "there is nothing to learn"),
    ],
)
def test_a_record_that_is_no_conversation_is_refused(line, words, home, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    with pytest.raises(FileError, match=words):
        open_corpus(data_of(home, sources=(str(tmp_path),)), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_templates_that_cannot_tell_where_answers_are_are_refused(home, tmp_path):
    def refused(text: str, words: str, **changes: object) -> None:
        changes = {"tokenizer": beside(home, tmp_path, text), **changes}
        with pytest.raises(FileError, match=words):
            open_corpus(data_of(home, **changes), tmp_path)

    refused("{{ messages|length }}", "writes message 1 in another way")
    refused("{{ raise_exception('no roles') }}", "cannot write these messages: no")
    refused("", "messages need a chat template", tokenizer="bytes")
    refused("", "is plain text", sources=(str(home / "README.md"),))
    refused("", "needs conversations", sources=())
