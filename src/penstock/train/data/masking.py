"""Masks words for a model that has to guess them, as BERT was trained (Devlin et al., 2019).

    the cat sat on the mat            a share of the words is chosen
    the [M] sat on the tree           8 of 10 chosen words are masked, 1 is replaced by a random word, 1 stays
     .  cat  .   .  .  mat            only chosen words have labels

What is chosen follows from the seed, the sequence and the epoch. So every rank chooses the same words without asking
another, a resumed run goes on as if it had never stopped, and every epoch asks for other words.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.train.data.document_end import WORD_FILES, read_json
from penstock.train.data.tokenizer import FileTokenizer, Tokenizer

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

    def chosen(
        self, words: NDArray[np.int64], seed: int, sequence: int, epoch: int
    ) -> NDArray[np.bool_]:
        """Say which words of a sequence have to be guessed."""
        draws = _draws(seed, sequence, epoch, len(words), kind=0)
        return (draws < self.share) & ~np.isin(words, self.spared)

    def masked(
        self, words: NDArray[np.int64], seed: int, sequence: int, epoch: int
    ) -> NDArray[np.int64]:
        """Return the words that a model sees."""
        chosen = self.chosen(words, seed, sequence, epoch)
        fate = _draws(seed, sequence, epoch, len(words), kind=1)
        others = _draws(seed, sequence, epoch, len(words), kind=2) * self.vocab
        seen = words.copy()
        seen[chosen & (fate < MASKED_SHARE)] = self.word
        replaced = (
            chosen & (fate >= MASKED_SHARE) & (fate < MASKED_SHARE + RANDOM_SHARE)
        )
        seen[replaced] = others[replaced].astype(seen.dtype)
        return seen


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


def bert_words(tokenizer: Tokenizer, name: str, segments: int = 0) -> BertWords:
    """Return the words of a tokenizer that stand for no text.

    A mask that it lacks is a new word after all others; so are the borders of segments, if rows have any.
    """
    vocab = tokenizer.vocab
    found = []
    for key in ("mask_token", "cls_token", "sep_token"):
        number = _special_word(tokenizer, name, key)
        if number is None and (key == "mask_token" or segments):
            number = vocab
        vocab = max(vocab, -1 if number is None else number + 1)
        found.append(-1 if number is None else number)
    padding = _special_word(tokenizer, name, "pad_token")
    if padding is None:
        padding = found[-1] if tokenizer.end is None else tokenizer.end
    mask, begin, border = found
    return BertWords(mask, begin, border, padding, vocab)


def masking_of(
    tokenizer: Tokenizer, name: str, share: float, segments: int = 0
) -> Masking:
    """Return how words of a tokenizer are masked. Words with a meaning of their own are spared."""
    spared = set() if tokenizer.end is None else {tokenizer.end}
    for key in SPECIAL_KEYS:
        number = _special_word(tokenizer, name, key)
        if number is not None:
            spared.add(number)
    words = bert_words(tokenizer, name, segments)
    if segments:
        spared |= {words.begin, words.border, words.padding}
    return Masking(words.mask, tokenizer.vocab, share, tuple(sorted(spared)))


def _special_word(tokenizer: Tokenizer, name: str, key: str) -> int | None:
    """The word that the files beside a tokenizer give a meaning, or one with the usual name of that meaning."""
    if not isinstance(tokenizer, FileTokenizer):
        return None
    usual = USUAL_NAMES.get(key, ())
    if key in ROBERTA_NAMES and tokenizer.theirs.token_to_id(ROBERTA_MASK) is not None:
        usual = (*usual, ROBERTA_NAMES[key])
    for word in (_named_beside(name, key), *usual):
        number = None if word is None else tokenizer.theirs.token_to_id(word)
        if number is not None:
            return int(number)
    return None


def _named_beside(name: str, key: str) -> str | None:
    """A special word that the files beside a tokenizer name."""
    for file in WORD_FILES:
        word = read_json(Path(name).with_name(file)).get(key)
        word = word.get("content") if isinstance(word, dict) else word
        if isinstance(word, str):
            return word
    return None
