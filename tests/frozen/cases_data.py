"""Text: the tokens of every format, the order of sequences at any step, and what is learned and seen of them."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import tokenizers
import torch
from freeze import said
from pyarrow import parquet
from torch import Tensor

from penstock import make
from penstock.config import DataConfig, MixtureSource
from penstock.models import Llama, LlamaConfig
from penstock.train.after.evaluate import TextBatches, evaluate_ablation
from penstock.train.data.cache import encode_dataset
from penstock.train.data.corpus import (
    Corpus,
    describe_use,
    find_prompt,
    open_text,
    open_validation,
)
from penstock.train.data.files import source_files
from penstock.train.data.loader import BatchShape, DocumentCutter, Loader, wanted_by
from penstock.train.data.masking import masking_of
from penstock.train.data.stream import TextStream
from penstock.train.data.tokenizer import tokenizer_of

TOLERANCE = 1e-9
TEXTS = [
    f"The {n} cats sat on {n % 5} mats. Did they purr?\n"
    + "Some slept all day.\n" * (n % 4)
    for n in range(40)
]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
GENERATION = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}!{% endgeneration %}{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
)
BAD_LINES = {
    "half.jsonl": '{"text": "a"}\n{"text"\n',
    "field.jsonl": '{"body": "a"}\n',
    "list.jsonl": "[1]\n",
    "number.jsonl": '{"text": 3}\n',
    "zero.txt": "a\0b",
    "short.txt": "ab",
    "empty.txt": "",
    "table.orc": "ORC",
    "a.zip": "PK",
    "a.pdf": "PDF",
    "magic.txt": "%PDF-1.5",
    "torn.txt.gz": "no gzip",
    "torn.parquet": "PAR1",
    "torn.arrow": "ARROW1",
    "note.tokens": "{}",
    "text.tokens": "text",
}
BAD_CHATS: dict[str, dict[str, object]] = {
    "nothing": {"words": 1},
    "no role": {"messages": [{"content": "a"}]},
    "no list": {"messages": "a"},
    "no text": {"messages": [{"role": "user", "content": 3}]},
    "prompt": {"prompt": 3, "completion": "a"},
    "half": {"prompt": "a"},
    "unlearned": {"messages": [{"role": "user", "content": "a"}]},
}


def cases() -> dict[str, Callable[[], object]]:
    """Formats, orders, prompts, streams, errors, and perplexities with parts left out."""
    found: dict[str, Callable[[], object]] = {
        f"{name}": partial(corpus_facts, name) for name in (*settings(), "validation")
    }
    found |= {
        "dataset": datasets,
        "stream": stream,
        "errors": errors,
        "names of files": names,
        "perplexity": perplexities,
    }
    return found


# ---------------------------------------------------------------- text on disk
@cache
def kept() -> TemporaryDirectory[str]:
    """A folder with the same texts in every format; it goes away with the process."""
    folder = TemporaryDirectory(prefix="frozen-data-")
    write_texts(Path(folder.name))
    return folder


def home() -> Path:
    return Path(kept().name)


def write_texts(folder: Path) -> None:
    lines = "".join(json.dumps({"text": one, "body": one[:9]}) + "\n" for one in TEXTS)
    for name, pack in {
        "a.jsonl": bytes,
        "a.jsonl.gz": gzip.compress,
        "a.jsonl.bz2": bz2.compress,
        "a.jsonl.xz": lzma.compress,
    }.items():
        (folder / name).write_bytes(pack(lines.encode()))
    (folder / "a.txt").write_text("".join(TEXTS))
    for number, text in enumerate(TEXTS[:9]):
        (folder / "many" / str(number % 3)).mkdir(parents=True, exist_ok=True)
        (folder / "many" / str(number % 3) / f"{number}.md").write_text(text)
    table = pyarrow.table({"text": [*TEXTS, None], "body": [*TEXTS[1:], None, "end"]})
    parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    with pyarrow.ipc.new_file(folder / "a.feather", table.schema) as file:
        file.write_table(table, max_chunksize=9)
    (folder / "split" / "train").mkdir(parents=True)
    (folder / "split" / "test").mkdir()
    (folder / "split" / "dataset_dict.json").write_text("{}")
    with pyarrow.ipc.new_stream(
        folder / "split" / "train" / "a.arrow", table.schema
    ) as file:
        file.write_table(table.slice(3, 30))
    chats = list(map(chat, range(23)))
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    parquet.write_table(
        pyarrow.table({"messages": [one["messages"] for one in chats]}),
        folder / "chats.parquet",
    )
    pairs = [
        {"prompt": text[:30], "completion": text[30:] if number % 5 else ""}
        for number, text in enumerate(TEXTS)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    for name, content in BAD_LINES.items():
        (folder / "bad").mkdir(exist_ok=True)
        (folder / "bad" / name).write_text(content)
    for name, record in BAD_CHATS.items():
        (folder / "bad" / f"{name}.chat.jsonl").write_text(json.dumps(record))
    write_tokenizer(folder / "words")
    write_tokenizer(folder / "where")
    (folder / "where" / "chat_template.jinja").write_text(GENERATION)


def chat(number: int) -> dict[str, Any]:
    question = {"role": "user", "content": TEXTS[number][:20]}
    answer = {"role": "assistant", "content": "cat " * (1 + number % 6)}
    return {"messages": [question, answer] * (1 + number % 3)}


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose words nobody trained."""
    known = {
        word for text in TEXTS for word in text.replace("?", ".").split() if word[0]
    }
    known = {word.strip(".") for word in known}
    ordered = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", ".", "?", *sorted(known)]
    model = tokenizers.models.WordLevel(
        {word: number for number, word in enumerate(ordered)}, unk_token="[UNK]"
    )
    ours = tokenizers.Tokenizer(model)
    ours.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ours.add_special_tokens(ordered[:5])
    folder.mkdir()
    ours.save(str(folder / "tokenizer.json"))
    said = {"eos_token": {"content": "[SEP]"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def settings() -> dict[str, DataConfig]:
    """A config for every way from text to batches."""
    words = str(home() / "words" / "tokenizer.json")
    where = str(home() / "where" / "tokenizer.json")
    plain = DataConfig(seq_len=24, validation=0.2)
    formats = {
        "text": "a.txt",
        "lines": "a.jsonl",
        "gzip": "a.jsonl.gz",
        "bzip2": "a.jsonl.bz2",
        "xz": "a.jsonl.xz",
        "folder": "many",
        "parquet": "a.parquet",
        "feather": "a.feather",
        "split": "split",
    }
    found = {
        name: replace(plain, sources=(str(home() / file),))
        for name, file in formats.items()
    }
    lines = found["lines"]
    chats = replace(
        plain,
        sources=(str(home() / "chats.jsonl"),),
        tokenizer=words,
        format="chat",
        seq_len=40,
    )
    found |= {
        "body": replace(lines, text_field="body"),
        "words": replace(lines, tokenizer=words),
        "apart": replace(lines, document_mask=True),
        "words apart": replace(lines, tokenizer=words, document_mask=True, seq_len=32),
        "chats": chats,
        "chats apart": replace(chats, document_mask=True),
        "chats of a table": replace(
            chats, sources=(str(home() / "chats.parquet"),), seq_len=25
        ),
        "chats that say where": replace(chats, tokenizer=where),
        "pairs": replace(
            chats, sources=(str(home() / "pairs.jsonl"),), document_mask=True
        ),
        "pairs of bytes": replace(
            chats, sources=(str(home() / "pairs.jsonl"),), tokenizer="bytes", seq_len=99
        ),
        "masked": replace(lines, tokenizer=words),
        "masked apart": replace(lines, tokenizer=words, document_mask=True),
        "masked bytes": replace(lines, mlm_probability=0.3),
        "a segment": replace(lines, tokenizer=words, format="text:segments=1"),
        "segments": replace(
            lines, tokenizer=words, format="text:segments=2", seq_len=20
        ),
        "segments apart": replace(
            lines, format="text:segments=2", seq_len=96, document_mask=True
        ),
    }
    sources = (
        MixtureSource(files=(str(home() / "a.txt"),), weight=3, name="prose"),
        MixtureSource(files=(str(home() / "many"),), weight=1),
        MixtureSource(files=(str(home() / "a.parquet"),), weight=0.01),
    )
    answers = (
        MixtureSource(files=(str(home() / "chats.jsonl"),), weight=2),
        MixtureSource(files=(str(home() / "pairs.jsonl"),), weight=1),
    )
    found |= {
        "mixture": replace(plain, sources=sources),
        "mixture apart": replace(plain, sources=sources, document_mask=True),
        "mixed chats": replace(chats, sources=answers, document_mask=True),
        "masked mixture": replace(plain, sources=sources, tokenizer=words),
    }
    return found


@cache
def opened(name: str) -> Corpus:
    if name == "validation":
        data = replace(settings()["text"], validation=(str(home() / "many"),))
        found = open_validation(data, home() / "cache")
        assert found is not None
        return found
    data = settings()[name]
    corpus = open_text(data, home() / "cache")
    if not name.startswith("masked") and not data.segments:
        return corpus
    tokenizer = tokenizer_of(data.tokenizer)
    masking = masking_of(tokenizer, data.mlm_probability, data.segments)
    return replace(corpus, masking=masking, typed=data.segments > 1)


# ---------------------------------------------------------------- what is frozen of a corpus
SHAPES = {
    "whole": BatchShape(12, 1),
    "parts": BatchShape(2, 3, 2),
    "shard": BatchShape(2, 2, 1, frozenset({1}), shards=2, shard=1),
}


def corpus_facts(name: str) -> dict[str, object]:
    """The digest of the tokens, the prompt, and the batches of steps, also after a resume and of an evaluation."""
    corpus = opened(name)
    data = settings().get(name, DataConfig())
    found: dict[str, object] = {
        "digest": corpus.digest,
        "tokens": corpus.token_count,
        "trained": corpus.trained,
        "held out": corpus.held_out,
        "apart": corpus.apart,
        "tally": str(corpus.tally),
        "bytes": corpus.bytes_per_token,
        "prompt": find_prompt(corpus, tokenizer_of(data.tokenizer)),
    }
    if hasattr(corpus, "use"):
        uses = [corpus.use(seen, 5) for seen in (7, 5000)]
        found["use"] = [describe_use(one) for one in uses]
    for way, shape in SHAPES.items():
        if corpus.trained:
            found[way] = steps(corpus, shape)
        loader = Loader(corpus, shape, seed=5)
        found[f"{way} examined"] = [
            loader.examined(2),
            *map(fingerprint, loader.evaluation(2)),
        ]
    if corpus.apart and corpus.trained:
        cutter = DocumentCutter((2, 3, 2), 7, 4)
        loader = Loader(corpus, BatchShape(2, 3), 5, cutter=cutter)
        batches = [batch for _ in range(2) for batch in loader.step()]
        found["cuts"] = [batch.cuts for batch in batches]
    return found


def steps(corpus: Corpus, shape: BatchShape) -> list[object]:
    """Batches of some steps, and the state after them; a loader that resumes makes the same ones."""
    first = Loader(corpus, shape, seed=5)
    found: list[object] = []
    for number in range(3):
        again = Loader(corpus, shape, seed=5)
        again.resume(json.loads(json.dumps(first.state())))
        batches = list(map(fingerprint, first.step()))
        assert batches == list(map(fingerprint, again.step())), f"step {number}"
        found += batches
    first.seen = 100_000
    found += map(fingerprint, first.step())
    return [*found, first.epoch, first.state()]


def fingerprint(batch: Any) -> str:
    """All that a batch says, as a hash, and the number of its labels."""
    parts = [*batch.inputs, *batch.labels, *batch.starts]
    parts += [one for named in batch.named for one in named.values()]
    text = hashed(parts, str((batch.valid, batch.cuts, batch.counts)))
    return f"{text} {batch.valid}"


def hashed(tensors: list[Tensor], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for one in tensors:
        digest.update(str((tuple(one.shape), one.dtype)).encode())
        digest.update(one.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- datasets and streams
def datasets() -> dict[str, object]:
    """The digests of Python objects as text, tokens, conversations and segments."""
    words = str(home() / "words" / "tokenizer.json")
    plain = DataConfig(seq_len=24)
    given: dict[str, tuple[Any, DataConfig]] = {
        "texts": (TEXTS, plain),
        "mappings": ([{"text": one} for one in TEXTS], replace(plain, tokenizer=words)),
        "tokens": (
            [{"input_ids": [*range(n % 7), 3]} for n in range(30)],
            replace(plain, text_field="input_ids", tokenizer=words),
        ),
        "chats": (
            map(chat, range(9)),
            replace(plain, format="chat", tokenizer=words),
        ),
        "segments": (TEXTS, replace(plain, format="text:segments=2", tokenizer=words)),
    }
    found: dict[str, object] = {}
    for name, (dataset, data) in given.items():
        note = encode_dataset(dataset, data, home() / "encoded")
        corpus = open_text(
            replace(data, sources=(str(note),), validation=0.0), home() / "cache"
        )
        found[name] = [note.name, corpus.token_count, steps(corpus, BatchShape(2, 2))]
    bad: dict[str, Any] = {
        "a text": "text",
        "splits": {"train": TEXTS},
        "a number": 3,
        "numbers": [0.5],
        "other field": [{"body": "a"}],
        "text then number": ["a", 3],
        "large token": [[1, 9999]],
        "nothing": [],
    }
    for name, dataset in bad.items():
        found[f"bad {name}"] = said(
            partial(encode_dataset, dataset, plain, home() / "encoded")
        )
    return found


def stream() -> dict[str, object]:
    """Batches out of a list, resumed after each."""
    examples: list[Any] = [{"text": one} for one in TEXTS[:9]]
    stream = TextStream(examples, 16, 3)
    found = []
    for inputs, labels in stream:
        found.append(hashed([inputs, labels], str(stream.left)))
        again = TextStream(examples, 16, 3)
        again.load_state_dict(stream.state_dict())
        following = next(iter(again), None)
        found.append("end" if following is None else hashed(list(following)))
    bad: dict[str, Any] = {
        "numbers": [1],
        "other field": [{"body": "a"}],
        "no text": [{"text": 3}],
        "iterator": iter(TEXTS),
        "text": "text",
    }
    refused = {
        name: said(lambda one=one: list(TextStream(one, 4, 1)))  # type: ignore[misc]
        for name, one in bad.items()
    }
    state = stream.state_dict()
    refused["length"] = said(
        lambda: TextStream(examples, 8, 1).load_state_dict(dict(state))
    )
    refused["kind"] = said(
        lambda: TextStream(examples, 16, 1).load_state_dict({**state, "dataset": {}})
    )
    refused["rows"] = said(lambda: TextStream(examples, 16, 0))
    return {"batches": found, "state": str(state), **refused}


# ---------------------------------------------------------------- refusals and names
def errors() -> dict[str, str]:
    """What is said of text that cannot be used."""
    words = str(home() / "words" / "tokenizer.json")
    plain = DataConfig(seq_len=24)
    found = {}
    for name in BAD_LINES:
        found[name] = refused(replace(plain, sources=(str(home() / "bad" / name),)))
    for name in BAD_CHATS:
        data = replace(
            plain,
            sources=(str(home() / "bad" / f"{name}.chat.jsonl"),),
            format="chat",
        )
        found[f"{name} in bytes"] = refused(data)
        found[f"{name} in words"] = refused(replace(data, tokenizer=words))
    lines = str(home() / "a.jsonl")
    changes: dict[str, dict[str, object]] = {
        "missing": {"sources": (str(home() / "none"),)},
        "nameless": {"sources": (" ",)},
        "column": {"sources": (str(home() / "a.parquet"),), "text_field": "words"},
        "long": {"seq_len": 99_999},
        "nothing to learn": {"format": "chat", "sources": ()},
        "plain text": {"format": "chat", "sources": (str(home() / "a.txt"),)},
        "short segments": {"format": "text:segments=2", "seq_len": 4},
        "tokenizer": {"tokenizer": str(home() / "none.json")},
        "bad tokenizer": {"tokenizer": str(home() / "bad" / "note.tokens")},
        "without template": {
            "format": "chat",
            "sources": (str(home() / "chats.jsonl"),),
        },
        "source": {
            "sources": (
                MixtureSource(files=(lines,)),
                MixtureSource(files=(str(home() / "bad" / "empty.txt"),)),
            )
        },
    }
    for name, change in changes.items():
        data: Any = replace(plain, sources=(lines,))
        found[name] = refused(replace(data, **change))
    note = encode_dataset(TEXTS, plain, home() / "encoded")
    with_note = replace(plain, sources=(str(note),))
    found["other encoding"] = refused(replace(with_note, tokenizer=words))
    found["beside others"] = refused(replace(plain, sources=(str(note), lines)))
    note.with_suffix(".bin").unlink()
    found["half encoded"] = refused(with_note)
    corpus = opened("text")
    loader = Loader(corpus, BatchShape(1, 1), 5)
    for key in ("digest", "seed", "length"):
        found[f"resume {key}"] = said(
            partial(loader.resume, {**loader.state(), key: 1})
        )
    return found


def refused(data: DataConfig) -> str:
    """An error without what the folder and other libraries add to it."""
    words = said(lambda: open_text(data, home() / "cache"))
    words = re.sub(r"(is damaged|digest|tokenizer\.json): ?[^\n]*", r"\1", words)
    words = re.sub(r"digest [0-9a-f]+", "digest", words)
    return words.replace(str(home()), "HOME")


def names() -> dict[str, object]:
    """Which files are read, and which micro-batches a rank reads."""
    schedule = make("1f1b", ranks=3, microbatches=2, copies=2)
    found: dict[str, object] = {
        str(apart): [sorted(wanted_by(schedule, rank, apart)) for rank in range(6)]
        for apart in (False, True)
    }
    for name in ("folder", "split", "pairs"):
        files = source_files(settings()[name])
        found[name] = [str(file.relative_to(home())) for file in files]
    return found


# ---------------------------------------------------------------- perplexity
def perplexities() -> list[object]:
    """A model with parts left out, on a text in batches."""
    torch.manual_seed(3)
    model = Llama(LlamaConfig(256, 16, 4, 2, 2, 24)).double()
    corpus = replace(opened("apart"), trained=0, held_out=6)
    batches = TextBatches(corpus, 4, 6)
    rows = evaluate_ablation(
        model, batches, (0.25, 0.5), draws=2, chosen=((0, 3), (0, 1, 2))
    )
    return [
        [row.way, row.kept, row.parts, row.perplexity, row.spread, row.ratio, row.path]
        for row in rows
    ]
