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

MASK_NAMES = ("[MASK]", "<mask>")
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


# ---------------------------------------------------------------- the word that stands for others
def mask_word(tokenizer: Tokenizer, name: str) -> int:
    """Return the word of a tokenizer that stands for a masked one, or a new word after all others."""
    if not isinstance(tokenizer, FileTokenizer):
        return tokenizer.vocab
    for word in (_named_beside(name, "mask_token"), *MASK_NAMES):
        number = None if word is None else tokenizer.theirs.token_to_id(word)
        if number is not None:
            return int(number)
    return tokenizer.vocab


def masking_of(tokenizer: Tokenizer, name: str, share: float) -> Masking:
    """Return how words of a tokenizer are masked. Words with a meaning of their own are spared."""
    spared = set() if tokenizer.end is None else {tokenizer.end}
    if isinstance(tokenizer, FileTokenizer):
        for key in SPECIAL_KEYS:
            named = _named_beside(name, key)
            number = None if named is None else tokenizer.theirs.token_to_id(named)
            if number is not None:
                spared.add(int(number))
    word = mask_word(tokenizer, name)
    return Masking(word, tokenizer.vocab, share, tuple(sorted(spared)))


def vocab_with_mask(tokenizer: Tokenizer, name: str) -> int:
    """Return the number of words that a model has to know."""
    return max(tokenizer.vocab, mask_word(tokenizer, name) + 1)


def _named_beside(name: str, key: str) -> str | None:
    """A special word that the files beside a tokenizer name."""
    for file in WORD_FILES:
        word = read_json(Path(name).with_name(file)).get(key)
        word = word.get("content") if isinstance(word, dict) else word
        if isinstance(word, str):
            return word
    return None
