"""A mixture of corpora, each read as often as its weight says.

    position   0  1  2  3  4  5  6  7 ...        4,096 of them are a block, which has a fixed share of each source
    source     a  a  b  a  c  a  b  a ...        in a random order that follows from the seed and the block
    its k-th   0  1  0  2  0  3  1  4 ...        the sequences of a source come in its own order, epoch by epoch

Everything follows from the seed and the position, so the state is still one number, and it does not matter how many
ranks there are. A small source with a large weight is simply read for several epochs.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.config import DataConfig, MixtureSource
from penstock.errors import FileError
from penstock.train.data.conversations import Marks
from penstock.train.data.corpus import Corpus, Ticket, open_corpus
from penstock.train.data.text_files import ProgressBytes
from penstock.train.data.tokenizer import TokenArray
from penstock.view.numbers import short

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

    @property
    def text_source(self) -> Corpus:
        """The source with the largest weight."""
        return self.sources[int(np.argmax(self.quotas))]

    def ticket(self, position: int, seed: int) -> Ticket:
        """Return which sequence comes at a position, in which epoch of its source."""
        block, place = divmod(position, BLOCK)
        order = _block_order(seed, block, self.quotas)
        number = int(order.sources[place])
        drawn = block * self.quotas[number] + int(order.ranks[place])
        own = self.sources[number].ticket(drawn, seed)
        first = sum(source.trained for source in self.sources[:number])
        return Ticket(first + own.sequence, own.epoch)

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
        order = _block_order(seed, blocks, self.quotas)
        counts += np.bincount(order.sources[:rest], minlength=len(self.quotas))
        return [
            SourceUse(
                name, quota / BLOCK, int(count) * self.length, int(count) / one.trained
            )
            for name, quota, count, one in zip(
                self.names, self.quotas, counts, self.sources, strict=True
            )
        ]


class BlockOrder(NamedTuple):
    """The source of each place in a block, and how many places of the same source come before it."""

    sources: NDArray[np.int64]
    ranks: NDArray[np.int64]


@lru_cache(maxsize=16)
def _block_order(seed: int, block: int, quotas: tuple[int, ...]) -> BlockOrder:
    members = np.repeat(np.arange(len(quotas)), quotas)
    raw = np.random.Philox(key=seed, counter=[0, 0, block, 1]).random_raw(BLOCK)
    sources = members[np.argsort(raw, kind="stable")]
    ranks = np.zeros(BLOCK, dtype=np.int64)
    for number, quota in enumerate(quotas):
        ranks[sources == number] = np.arange(quota)
    return BlockOrder(sources, ranks)


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
            raise FileError(f"the source {name} of data.mixture: {error}") from None
    return mix_corpora(data, sources)


def mix_corpora(data: DataConfig, sources: Sequence[Corpus]) -> Corpus:
    """Mix the corpora of a config; without a mixture there is one, which is returned as it is."""
    if not data.mixture:
        return sources[0]
    names = _names(data.mixture)
    for name, source in zip(names, sources, strict=True):
        if source.trained < 1:
            raise FileError(f"the source {name} of data.mixture has no sequence")
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
        source.name or ", ".join(Path(one).name for one in source.sources)
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
