"""Masks words for a model that has to guess them, as BERT was trained (Devlin et al., 2019).

    the cat sat on the mat            a share of the words is chosen
    the [M] sat on the tree           8 of 10 chosen words are masked, 1 is replaced by a random word, 1 stays
     .  cat  .   .  .  mat            only chosen words have labels

What is chosen follows from the seed, the sequence and the epoch. So every rank chooses the same words without asking
another, a resumed run goes on as if it had never stopped, and every epoch asks for other words.

Rows for a Bert may hold one or two segments of a document between words that mark their borders:

    data.segments = 1      [CLS] a a a a a a [SEP] . .            every token is of type 0
    data.segments = 2      [CLS] a a a [SEP] b b b [SEP] .        up to the first [SEP] of type 0, then of type 1

A row holds as many whole sentences of one document as fit, and padding that nobody sees. Two segments follow each
other in their document, and the border between them is a border of sentences, drawn at random as in BERT's own data.
There is no next sentence to predict, so the second segment always continues the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FileError
from penstock.train.data.chat import (
    BEGINS,
    SECOND,
    Conversation,
    join,
    padding_row,
)
from penstock.train.data.files import EncodedPiece
from penstock.train.data.tokenizer import TokenArray, Tokenizer, token_type

USUAL_NAMES = {
    "mask_token": ("[MASK]", "<mask>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "pad_token": ("[PAD]", "<pad>"),
}
# A tokenizer with the mask of RoBERTa has its other words too, under names that others give other meanings.
ROBERTA_MASK = "<mask>"
ROBERTA_NAMES = {"cls_token": "<s>", "sep_token": "</s>"}
SPECIAL_KEYS = ("cls_token", "sep_token", "pad_token", "bos_token", "eos_token")
MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Masking:
    """Which words stand for others, and how many are chosen."""

    word: int  # that stands for a masked one
    vocab: int  # random words are below it
    share: float
    spared: tuple[int, ...] = ()  # words that are never chosen, such as the end

    def mask(
        self, words: NDArray[np.int64], seed: int, sequence: int, epoch: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the words of a sequence as a model sees them, and which of them have to be guessed."""
        draws, fate, others = (
            _draws(seed, sequence, epoch, len(words), kind) for kind in range(3)
        )
        chosen = (draws < self.share) & ~np.isin(words, self.spared)
        seen = words.copy()
        seen[chosen & (fate < MASKED_SHARE)] = self.word
        replaced = (
            chosen & (fate >= MASKED_SHARE) & (fate < MASKED_SHARE + RANDOM_SHARE)
        )
        seen[replaced] = (others * self.vocab)[replaced].astype(seen.dtype)
        return seen, chosen


def _draws(
    seed: int, sequence: int, epoch: int, count: int, kind: int
) -> NDArray[np.float64]:
    """Uniform numbers from 0 to 1 that follow from where they are used."""
    raw = np.random.Philox(key=seed, counter=[0, kind, sequence, epoch])
    # The raw numbers of a generator are the same in every version of numpy.
    bits = raw.random_raw(count) >> np.uint64(11)
    return bits.astype(np.float64) * np.float64(2.0**-53)


# ---------------------------------------------------------------- words with a meaning of their own
@dataclass(frozen=True, slots=True)
class BertWords:
    """The words of a Bert that stand for no text, and the number of words that a model has to know."""

    mask: int
    begin: int  # before a row, [CLS]
    border: int  # after each segment, [SEP]
    padding: int
    vocab: int


def bert_words(tokenizer: Tokenizer, segments: int = 0) -> BertWords:
    """Return the words of a tokenizer that stand for no text.

    A mask that it lacks is a new word after all others; so are the borders of segments, if rows have any.
    """
    vocab = tokenizer.vocab
    found = []
    for key in ("mask_token", "cls_token", "sep_token"):
        number = _special_word(tokenizer, key)
        if number is None and (key == "mask_token" or segments):
            number = vocab
        vocab = max(vocab, -1 if number is None else number + 1)
        found.append(-1 if number is None else number)
    padding = _special_word(tokenizer, "pad_token")
    if padding is None:
        padding = found[-1] if tokenizer.end is None else tokenizer.end
    mask, begin, border = found
    return BertWords(mask, begin, border, padding, vocab)


def masking_of(tokenizer: Tokenizer, share: float, segments: int = 0) -> Masking:
    """Return how words of a tokenizer are masked. Words with a meaning of their own are spared."""
    spared = {tokenizer.end, *(_special_word(tokenizer, key) for key in SPECIAL_KEYS)}
    words = bert_words(tokenizer, segments)
    if segments:
        spared |= {words.begin, words.border, words.padding}
    never = sorted(word for word in spared if word is not None)
    return Masking(words.mask, tokenizer.vocab, share, tuple(never))


def _special_word(tokenizer: Tokenizer, key: str) -> int | None:
    """The word that the files beside a tokenizer give a meaning, or one with the usual name of that meaning."""
    words = list(USUAL_NAMES.get(key, ()))
    if key in tokenizer.named:
        words.insert(0, tokenizer.named[key])
    if key in ROBERTA_NAMES and tokenizer.number([ROBERTA_MASK]) is not None:
        words.append(ROBERTA_NAMES[key])
    return tokenizer.number(words)


# ---------------------------------------------------------------- rows of segments
def segment_rows(
    sentences: Iterable[EncodedPiece], words: BertWords, segments: int, length: int
) -> Iterator[Conversation]:
    """Yield one example of at most `length` tokens after the other, without padding."""
    room = length - 1 - segments
    if room < segments:
        raise FileError(
            f"data.seq_len = {length} is too short for {segments} segments with their borders\n"
            f"  give at least {1 + 2 * segments}"
        )
    for number, texts in enumerate(_fill_rows(sentences, room)):
        own = _draw_pair(texts, number) if segments == 2 else [_join(texts)]
        yield _framed(own, words)


def _fill_rows(
    sentences: Iterable[EncodedPiece], room: int
) -> Iterator[list[TokenArray]]:
    """Yield sentences of one document that fit into a row; one that is longer than a row is cut."""
    row: list[TokenArray] = []
    size = 0
    for sentence in sentences:
        rest = sentence.words
        while len(rest):
            if size and size + len(rest) > room:
                yield row
                row, size = [], 0
            row.append(rest[:room])
            size += len(row[-1])
            rest = rest[room:]
        if sentence.ends and row:
            yield row
            row, size = [], 0
    if row:
        yield row


def _draw_pair(texts: Sequence[TokenArray], number: int) -> list[TokenArray]:
    """Cut a row's text into two segments: between two sentences, or a single sentence in its middle."""
    if len(texts) == 1:
        half = len(texts[0]) // 2
        pair = [texts[0][:half], texts[0][half:]]
        return [segment for segment in pair if len(segment)]
    border = 1 + int(Random(number).random() * (len(texts) - 1))
    return [_join(texts[:border]), _join(texts[border:])]


def _join(texts: Sequence[Any]) -> TokenArray:
    joined: TokenArray = np.concatenate(texts)
    return joined


def _framed(segments: Sequence[TokenArray], special: BertWords) -> Conversation:
    """Put the words of the borders around segments, and mark the tokens of the second one."""
    dtype = token_type(special.vocab)
    begin: Any = np.asarray([special.begin], dtype)
    border = np.asarray([special.border], dtype)
    pieces = [Conversation(begin, np.asarray([BEGINS]))]
    for number, segment in enumerate(segments):
        words: TokenArray = np.append(segment.astype(dtype), border)
        marks = np.full(len(words), SECOND * number, dtype=np.uint8)
        pieces.append(Conversation(words, marks))
    return join(pieces)


def pad_rows(
    examples: Iterable[Conversation], length: int, padding: int
) -> Iterator[Conversation]:
    """Fill up every example to a row of its own. The padding is a document that the example does not see."""
    for one in examples:
        rest = padding_row(length - len(one.words), padding, one.words.dtype)
        yield join([one, rest])
