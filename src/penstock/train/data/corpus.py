"""Text on disk as one long row of tokens, kept in a file that is mapped into memory.

    a.txt   b.py   c.jsonl                files, folders, lines of JSON
      │       │    │ │ │
      ▼       ▼    ▼ ▼ ▼
    ┌──────┬─┬────┬─┬──┬─┬──┬─┬──┬─┐
    │ a    │0│ b  │0│  │0│  │0│  │0│      packed one after the other, with an end word after each
    └──────┴─┴────┴─┴──┴─┴──┴─┴──┴─┘
    └─ sequence 0 ─┴─ sequence 1 ─┴─ …    cut when the length is reached

A sequence may hold several documents. Attention crosses their borders unless
`data.document_mask` forbids it.

The name of the file is a digest of its sources, so other text or another tokenizer gets
another file. Its content has a second digest: text that was moved or copied is still the
same text, and a run can resume with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.config import DataConfig, MixtureSource, trained_words
from penstock.errors import FileError
from penstock.train.data.cache import (
    cache_files,
    encode_files,
    file_of_marks,
    fill_cache,
    is_complete_cache,
    tokenizer_name,
)
from penstock.train.data.chat import LEARNED, Marks, Tally
from penstock.train.data.files import (
    ENCODED,
    ProgressBytes,
    plain_texts,
    source_files,
)
from penstock.train.data.masking import Masking
from penstock.train.data.tokenizer import (
    TOKENIZER,
    TokenArray,
    Tokenizer,
    tokenizer_of,
    train_tokenizer,
)
from penstock.view.numbers import short

_log = logging.getLogger(__name__)


class SequenceRef(NamedTuple):
    """A sequence to read, and how often all sequences were read before."""

    sequence: int
    epoch: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All tokens, cut into sequences: `trained` ones for training, then `held_out` ones."""

    tokens: TokenArray
    length: int  # tokens of a sequence
    trained: int
    held_out: int
    digest: str  # of the tokens
    end: int | None = None  # the word after each document, if documents are kept apart
    # For conversations and segments: which tokens are learned, and with which a document begins.
    marks: Marks | None = None
    separate: bool = False  # whether conversations or segments are kept apart
    tally: Tally | None = None  # of conversations
    masking: Masking | None = None  # for models that guess masked words
    typed: bool = False  # whether rows have two segments, whose tokens differ in type
    bytes_per_token: float | None = None  # of text; None if nobody has counted

    def sequence_at(self, position: int, seed: int) -> SequenceRef:
        """Return which sequence comes at a position, in which epoch."""
        return SequenceRef(
            shuffled(position, self.trained, seed), position // self.trained
        )

    @property
    def token_count(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def apart(self) -> bool:
        """Whether documents or conversations are kept apart."""
        return self.end is not None or self.separate

    @property
    def even(self) -> bool:
        """Whether every token of every sequence has a label that counts."""
        return self.end is None and self.marks is None and self.masking is None

    def sequence(self, number: int) -> TokenArray:
        """Return a sequence and the token after it, which is the label of the last one."""
        return copy_row(self.tokens, number, self.length)

    def sequence_marks(self, number: int) -> Marks:
        """Return the marks of a sequence's tokens, and of the token after it."""
        assert self.marks is not None
        return copy_row(self.marks, number, self.length)


def copy_row(array: NDArray[Any], number: int, length: int) -> NDArray[Any]:
    """Copy a row and the entry after it, from its file if the array is a mapped file.

    Where a mapped file is touched, the system maps up to 2 MB of it. Rows in random order would map all of it within a
    few hundred steps, and all of it would count as memory of the process.
    """
    begin, end = number * length, (number + 1) * length + 1
    if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):
        with suppress(OSError):  # The file was removed; what is mapped remains.
            return np.fromfile(
                str(array.filename),
                array.dtype,
                end - begin,
                offset=begin * array.itemsize,
            )
    return np.array(array[begin:end])


def open_corpus(
    data: DataConfig, cache: Path, watch: ProgressBytes = lambda done, total: None
) -> Corpus:
    """Open the corpus of a config.

    The text is encoded once, and found in the cache after that. `watch` sees the progress.
    """
    tokenizer = tokenizer_of(data.tokenizer)
    files = source_files(data)
    if data.document_mask and tokenizer.end is None and not data.marked:
        raise FileError(
            f"{tokenizer_name(data)} has no word that ends a document, "
            "so documents cannot be told apart\n"
            "  set data.document_mask=false, or name the word as eos_token in a "
            "tokenizer_config.json beside the tokenizer"
        )
    row, note = cache_files(data, files, cache)
    if not is_complete_cache(row, note):
        if note.suffix == ENCODED:
            raise FileError(
                f"the encoded dataset {note} is damaged, or {row.name} beside it is missing\n  encode it again"
            )
        fill_cache(
            row, note, data, tokenizer, encode_files(files, data, tokenizer, watch)
        )
    return read_corpus(row, note, data, tokenizer.end)


def read_corpus(row: Path, note: Path, data: DataConfig, end: int | None) -> Corpus:
    """Open tokens that are encoded already; `end` is the tokenizer's word after a document."""
    facts = json.loads(note.read_text(encoding="utf-8"))
    dtype = np.uint16 if facts["width"] == 2 else np.uint32
    marks: Marks | None = None
    try:
        tokens: TokenArray = np.memmap(row, dtype=dtype, mode="r")
        if data.marked:
            marks = np.memmap(file_of_marks(row), dtype=np.uint8, mode="r")
    except OSError as error:
        raise FileError(
            f"cannot read the token cache {row}: {error.strerror}\n"
            "  it is beside the run's folder: name another run.folder"
        ) from None
    if marks is not None:
        corpus = cut_corpus(tokens, data, facts["digest"])
        told = facts.get("conversations")
        tally = None if told is None else Tally(**told)
        return replace(corpus, marks=marks, separate=data.apart, tally=tally)
    corpus = cut_corpus(
        tokens, data, facts["digest"], end if data.document_mask else None
    )
    # Nobody has counted in a cache that an earlier version has written, nor for tokens without text.
    if not facts.get("bytes"):
        return corpus
    return replace(corpus, bytes_per_token=facts["bytes"] / len(tokens))


def open_validation(
    data: DataConfig, cache: Path, watch: ProgressBytes = lambda done, total: None
) -> Corpus | None:
    """Open the text of data.validation, all of which counts as held out; None without any."""
    own = validation_data(data)
    if own is None:
        return None
    corpus = open_corpus(own, cache, watch)
    return replace(corpus, trained=0, held_out=corpus.trained)


def validation_data(data: DataConfig) -> DataConfig | None:
    """Return data.validation as the sources of a corpus of its own; None without any."""
    if not data.validation_files:
        return None
    return replace(data, sources=data.validation_files, validation=0.0)


def byte_pairs(data: DataConfig) -> Path:
    """Train byte pairs on the text of a config, as `bpe:16000` asks; the same text finds them again.

    They are kept in the user's cache folder, under a name that follows from the files of the text.
    """
    words = trained_words(data.tokenizer)
    files = [file for part in data.parts for file in source_files(part)]
    stats = [(str(file.absolute()), file.stat()) for file in files]
    known = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    digest = hashlib.sha256(repr((words, data.text_field, known)).encode()).hexdigest()[
        :16
    ]
    home = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    file = home / "penstock" / f"bpe-{words}-{digest}" / TOKENIZER
    if not file.is_file():
        _log.info("training a tokenizer of %d words", words)
        train_tokenizer(plain_texts(data), words, file)
    return file


def cut_corpus(
    tokens: TokenArray, data: DataConfig, digest: str = "", end: int | None = None
) -> Corpus:
    """Cut tokens into sequences of one length, and hold out the last ones."""
    sequences = (len(tokens) - 1) // data.seq_len
    if sequences < 1:
        raise FileError(
            f"the text has {len(tokens)} tokens, "
            f"too few for sequences of {data.seq_len}\n"
            "  give more text in data.sources, or shorter sequences in data.seq_len"
        )
    held_out = 0
    if data.held_out:
        held_out = max(round(sequences * data.held_out), 1)
        held_out = min(held_out, sequences - 1)
    return Corpus(tokens, data.seq_len, sequences - held_out, held_out, digest, end)


# ---------------------------------------------------------------- order
MIXING_ROUNDS = 6
MASK_64_BITS = (1 << 64) - 1


def shuffled(position: int, length: int, seed: int) -> int:
    """Return which of `length` sequences comes at a position.

    Positions past the end belong to further epochs, each with its own order.

    >>> sorted(shuffled(k, 5, seed=1) for k in range(5))
    [0, 1, 2, 3, 4]
    >>> [shuffled(k, 5, seed=1) for k in range(5)] == [shuffled(k, 5, seed=1) for k in range(5, 10)]
    False
    """
    epoch, index = divmod(position, length)
    half = max((length - 1).bit_length() + 1, 2) // 2
    key = _mix(_mix(seed) ^ epoch)
    while True:
        index = _permute(index, half, key)
        if index < length:
            return index


def _permute(index: int, half: int, key: int) -> int:
    low = (1 << half) - 1
    left, right = index >> half, index & low
    for turn in range(MIXING_ROUNDS):
        left, right = right, left ^ (_mix(key ^ (turn << 56) ^ right) & low)
    return left << half | right


def _mix(number: int) -> int:
    """Mix 64 bits (the finisher of splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & MASK_64_BITS
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK_64_BITS
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK_64_BITS
    return number ^ number >> 31


# ---------------------------------------------------------------- mixtures
BLOCK = 4096  # sequences
MIXTURE = "mixture.json"  # in the folder of a run


@dataclass(frozen=True, slots=True)
class SourceUse:
    """How much of a source was read."""

    name: str
    weight: float  # of all sources together 1
    tokens: int
    epochs: float


@dataclass(frozen=True, slots=True, eq=False)
class MixedCorpus(Corpus):
    """Several corpora under one numbering: first what is trained on, source after source, then what is held out."""

    sources: tuple[Corpus, ...] = ()
    names: tuple[str, ...] = ()
    quotas: tuple[int, ...] = ()  # sequences of each source in a block

    @property
    def token_count(self) -> int:
        """The tokens of all sources."""
        return sum(source.token_count for source in self.sources)

    def sequence_at(self, position: int, seed: int) -> SequenceRef:
        """Return which sequence comes at a position, in which epoch of its source."""
        block, place = divmod(position, BLOCK)
        sources, ranks = _block_order(seed, block, self.quotas)
        number = int(sources[place])
        drawn = block * self.quotas[number] + int(ranks[place])
        own = self.sources[number].sequence_at(drawn, seed)
        first = sum(source.trained for source in self.sources[:number])
        return SequenceRef(first + own.sequence, own.epoch)

    def sequence(self, number: int) -> TokenArray:
        """Return a sequence and the token after it."""
        source, own = self._find(number)
        return source.sequence(own)

    def sequence_marks(self, number: int) -> Marks:
        """Return the marks of a sequence's tokens, and of the token after it."""
        source, own = self._find(number)
        return source.sequence_marks(own)

    def _find(self, number: int) -> tuple[Corpus, int]:
        """The source of a sequence, and its number there."""
        if number < self.trained:
            ends = list(accumulate(source.trained for source in self.sources))
            index = bisect_right(ends, number)
            source = self.sources[index]
            return source, number - (ends[index] - source.trained)
        # What is held out alternates between the sources, so that an evaluation of some of it has all of them.
        index, own = _spread(tuple(one.held_out for one in self.sources))[
            number - self.trained
        ]
        source = self.sources[index]
        return source, source.trained + own

    def use(self, seen: int, seed: int) -> list[SourceUse]:
        """Say how much of each source was read with the first `seen` sequences."""
        blocks, rest = divmod(seen, BLOCK)
        counts = blocks * np.array(self.quotas)
        order, _ = _block_order(seed, blocks, self.quotas)
        counts += np.bincount(order[:rest], minlength=len(self.quotas))
        return [
            SourceUse(
                name, quota / BLOCK, int(count) * self.length, int(count) / one.trained
            )
            for name, quota, count, one in zip(
                self.names, self.quotas, counts, self.sources, strict=True
            )
        ]


@lru_cache(maxsize=16)
def _block_order(
    seed: int, block: int, quotas: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source of each place in a block, and how many places of the same source come before it."""
    members = np.repeat(np.arange(len(quotas)), quotas)
    raw = np.random.Philox(key=seed, counter=[0, 0, block, 1]).random_raw(BLOCK)
    sources = members[np.argsort(raw, kind="stable")]
    ranks = np.zeros(BLOCK, dtype=np.int64)
    for number, quota in enumerate(quotas):
        ranks[sources == number] = np.arange(quota)
    return sources, ranks


@lru_cache(maxsize=4)
def _spread(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Spread the sequences of several sources evenly over one list.

    >>> _spread((2, 4))
    [(1, 0), (0, 0), (1, 1), (1, 2), (0, 1), (1, 3)]
    """
    places = [
        ((own + 0.5) / count, index, own)
        for index, count in enumerate(counts)
        for own in range(count)
    ]
    return [(index, own) for _, index, own in sorted(places)]


def quotas_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Divide a block by weights; what is left over goes to the largest remainders. Every source gets at least one.

    >>> quotas_of([3, 1]), quotas_of([1, 1, 1]), sum(quotas_of([1, 1e-9]))
    ((3072, 1024), (1366, 1365, 1365), 4096)
    """
    total = sum(weights)
    exact = [weight / total * BLOCK for weight in weights]
    quotas = [max(int(one), 1) for one in exact]
    by_remainder = sorted(
        range(len(exact)), key=lambda one: exact[one] - quotas[one], reverse=True
    )
    for number in by_remainder[: max(BLOCK - sum(quotas), 0)]:
        quotas[number] += 1
    while sum(quotas) > BLOCK:
        quotas[quotas.index(max(quotas))] -= 1
    return tuple(quotas)


def open_text(
    data: DataConfig, cache: Path, watch: ProgressBytes = lambda done, total: None
) -> Corpus:
    """Open the text of a config: one corpus, or a mixture of several."""
    if not data.mixture:
        return open_corpus(data, cache, watch)
    sources = []
    for name, part in zip(_names(data.mixture), data.parts, strict=True):
        try:
            sources.append(open_corpus(part, cache, watch))
        except FileError as error:
            raise FileError(f"the source {name} of data.sources: {error}") from None
    return mix_corpora(data, sources)


def mix_corpora(data: DataConfig, sources: Sequence[Corpus]) -> Corpus:
    """Mix the corpora of a config; without a mixture there is one, which is returned as it is."""
    if not data.mixture:
        return sources[0]
    names = _names(data.mixture)
    for name, source in zip(names, sources, strict=True):
        if source.trained < 1:
            raise FileError(f"the source {name} of data.sources has no sequence")
    quotas = quotas_of([source.weight for source in data.mixture])
    content = "\n".join([*(source.digest for source in sources), *map(str, quotas)])
    first = sources[0]
    return MixedCorpus(
        first.tokens,
        first.length,
        sum(source.trained for source in sources),
        sum(source.held_out for source in sources),
        hashlib.sha256(content.encode()).hexdigest()[:16],
        first.end,
        first.marks,
        first.separate,
        sources=tuple(sources),
        names=names,
        quotas=quotas,
    )


def _names(mixture: Sequence[MixtureSource]) -> tuple[str, ...]:
    """The names of the sources; those without a name are called after their files."""
    return tuple(
        source.name or ", ".join(Path(one).name for one in source.files)
        for source in mixture
    )


# ---------------------------------------------------------------- what a run has read
def write_use(folder: Path, use: Sequence[SourceUse]) -> None:
    """Write down how much a run has read of each source."""
    text = json.dumps([asdict(one) for one in use], indent=1)
    (folder / MIXTURE).write_text(text + "\n", encoding="utf-8")


def read_use(folder: Path) -> list[SourceUse]:
    """Read how much a run has read of each source; empty if it has no mixture."""
    try:
        content = json.loads((folder / MIXTURE).read_text(encoding="utf-8"))
        return [SourceUse(**one) for one in content]
    except (OSError, ValueError, TypeError):
        return []


def describe_use(use: Sequence[SourceUse]) -> list[str]:
    """Return a line for each source."""
    total = sum(one.tokens for one in use) or 1
    return [
        f"{one.name}: {one.tokens:,} tokens ({one.tokens / total:.1%}; weight {one.weight:.1%}), "
        f"{short(one.epochs, 3)} epochs"
        for one in use
    ]


# ---------------------------------------------------------------- the beginning of a text, for a sample
# The model has not seen the document, and it is a text of the kind that the model has learned to write. A run keeps the
# words in its folder, so that a sample needs no corpus.

PROMPT = "prompt.txt"  # in the folder of a run
MAX_PROMPT_TOKENS = 64
MAX_QUESTION_TOKENS = 512
MAX_PROMPT_CHARACTERS = 24


def find_prompt(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """The first words of the first document that begins in the held-out text.

    If no document begins there, the first words of a line of the held-out text. Of a conversation it is everything
    before the first answer.
    """
    if isinstance(corpus, MixedCorpus):  # the source with the largest weight
        corpus = corpus.sources[int(np.argmax(corpus.quotas))]
    if corpus.marks is not None:
        return _first_question(corpus, corpus.marks, tokenizer)
    begin = min(corpus.trained * corpus.length, len(corpus.tokens) - 1)
    tokens = corpus.tokens[begin : begin + corpus.held_out * corpus.length + 1]
    if tokenizer.end is not None:
        ends = (tokens == tokenizer.end).nonzero()[0]
        if len(ends) and ends[0] + 1 < len(tokens):
            tokens = tokens[int(ends[0]) + 1 :]
            return _first_words(_decode(tokens, tokenizer))
    text = _decode(tokens, tokenizer)
    return _first_words(text.partition("\n")[2]) or _first_words(text)


def _first_question(corpus: Corpus, marks: Marks, tokenizer: Tokenizer) -> str:
    """The text before the first answer of a conversation, a held-out one if there is any."""
    begin = corpus.trained * corpus.length if corpus.held_out else 0
    answer = int((marks[begin : begin + corpus.length] & LEARNED).argmax())
    question = corpus.tokens[begin : begin + answer][-MAX_QUESTION_TOKENS:]
    return tokenizer.decode(question.tolist())


def _decode(tokens: TokenArray, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(tokens[:MAX_PROMPT_TOKENS].tolist())


def _first_words(text: str) -> str:
    """The first words of the first line of a text, within a few characters.

    >>> _first_words("The quick brown fox jumps over the lazy dog")
    'The quick brown fox'
    >>> _first_words("  import os")
    'import os'
    """
    lines = text.replace("\x00", " ").strip().splitlines()
    line = lines[0] if lines else ""
    if len(line) > MAX_PROMPT_CHARACTERS:
        cut = line[: MAX_PROMPT_CHARACTERS + 1].rpartition(" ")[0]
        line = cut or line[:MAX_PROMPT_CHARACTERS]
    return line.rstrip("\ufffd ")


def read_prompt(path: Path) -> str:
    """The prompt of a run, given its folder or one of its checkpoints; empty if there is none."""
    for folder in (path, path.parent.parent):
        if (folder / PROMPT).is_file():
            return (folder / PROMPT).read_text(encoding="utf-8")
    return ""
