"""Evaluates a model, whole and with parts left out: on the held-out text of its run, or on any other text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from penstock.config import DataConfig
from penstock.errors import FileError, ShapeError
from penstock.formats.config_toml import read_config
from penstock.models import shift_labels
from penstock.runtime import Batch, batch_of
from penstock.train.after.ablation import TokenRows, chosen_path, evaluate_ablation
from penstock.train.after.generate import Trained, continues_texts, open_trained
from penstock.train.data.corpus import Corpus, open_corpus
from penstock.train.data.loader import Deal, Loader, starts_in
from penstock.train.data.masking import masking_of
from penstock.train.data.tokenizer import tokenizer_of
from penstock.train.launch import corpus_of, validation_of, with_kept_files
from penstock.train.run_source import CONFIG_FILE
from penstock.view.numbers import count_of


@dataclass(frozen=True, slots=True)
class Examination:
    """The perplexities of a model, and the sequences they were measured on."""

    rows: TokenRows
    sequences: int
    available: int  # sequences
    tokens: int  # per sequence
    # Further sequences, on which the best subsets were searched; 0 if on the measured ones.
    searched: int
    kind: str = "held-out "  # of the text; empty for other text
    bytes_per_token: float | None = None  # None if tokens do not stand for bytes

    @property
    def text(self) -> str:
        """Describe the text that was measured on."""
        if self.sequences == self.available:
            count = f"all {self.sequences:,}"
        else:
            count = f"{self.sequences:,} of {self.available:,}"
        words = f"{count} {self.kind}sequences of {self.tokens} tokens, each once"
        if not any(row.way == "best" for row in self.rows):
            return words
        if self.searched:
            return f"{words}; best subsets were searched on {self.searched:,} others"
        return (
            f"{words}; best subsets were searched on the same ones, which flatters them"
        )

    @property
    def by_byte(self) -> str:
        """Describe the perplexity of a byte, which compares models with different tokenizers; empty if unknown."""
        if not self.bytes_per_token:
            return ""
        nats = math.log(self.rows[0].perplexity) / self.bytes_per_token
        length = f"{self.bytes_per_token:.4g}"
        return (
            f"perplexity {math.exp(nats):.4g} per byte ({nats / math.log(2):.4g} bits), "
            f"{count_of(length, 'byte', 'bytes')} per token"
        )


def evaluate_run(
    run: Path,
    omit: Sequence[float | Sequence[int]],
    draws: int = 8,
    batches: int = 2,
    seed: int = 0,
    exits: Sequence[int] = (),
) -> Examination:
    """Measure the perplexity of a run's last checkpoint on `batches` batches of text that it was not trained on.

    That is the text of its own evaluations: data.validation, or what it has held out.

    omit: what to leave out, one after the other: a share of the layers, or some layers.
    exits: layers after which the head follows, one after the other.

    Each sequence counts at most once. Best subsets are searched on other held-out text than
    they are measured on, if there is any left.
    """
    questions = _questions(omit, exits, draws, batches)
    if not (run / CONFIG_FILE).is_file():
        raise FileError(
            f"{run} has no {CONFIG_FILE}, which says what text was held out\n"
            "  name the folder of a run, or some text with --text"
        )
    config = with_kept_files(read_config(run / CONFIG_FILE), run)
    corpus = validation_of(config, run) or corpus_of(config, run)
    loader = Loader(corpus, Deal(config.rows, config.passages), config.run.seed)
    held = loader.evaluation(2 * batches)
    if not held:
        raise FileError(
            f"{run} held out no text: its data.held_out is {config.data.held_out:g}\n"
            "  train with data.held_out above 0 to have text for evaluations"
        )
    trained = open_trained(run)
    rows = questions.answer(trained, held[:batches], held[batches:], seed)
    measured = loader.examined(batches)
    return Examination(
        rows,
        measured,
        corpus.held_out,
        corpus.length,
        loader.examined(2 * batches) - measured,
        bytes_per_token=_bytes_per_token(corpus),
    )


def _bytes_per_token(corpus: Corpus) -> float | None:
    """The bytes that a label stands for; None if only some tokens are labels."""
    if corpus.marks is not None or corpus.masking is not None:
        return None
    return corpus.bytes_per_token


@dataclass(frozen=True, slots=True)
class _Questions:
    """What to leave out, one after the other."""

    shares: tuple[float, ...]
    layers: tuple[Sequence[int], ...]
    exits: tuple[int, ...]
    draws: int

    def answer(
        self,
        trained: Trained,
        batches: Sequence[Batch],
        search: Sequence[Batch],
        seed: int,
    ) -> TokenRows:
        """Measure a model with everything, and with each of these left out."""
        count = trained.sizes.layers
        chosen = [chosen_path(count, one) for one in self.layers]
        chosen += [chosen_path(count, exit_after=layer) for layer in self.exits]
        return evaluate_ablation(
            trained.model,
            batches,
            self.shares,
            self.draws,
            seed,
            search,
            chosen=chosen,
        )


def _questions(
    omit: Sequence[float | Sequence[int]],
    exits: Sequence[int],
    draws: int,
    batches: int,
) -> _Questions:
    shares = tuple(one for one in omit if isinstance(one, int | float))
    layers = tuple(one for one in omit if not isinstance(one, int | float))
    for share in shares:
        if not 0 <= share < 1:
            raise ShapeError(
                f"a share of {share:g} cannot be left out: 0 is nothing, and 1 would be all"
            )
    for name, count in (("batches", batches), ("draws", draws)):
        if count < 1:
            raise ShapeError(f"{name} must be at least 1, not {count}")
    return _Questions(shares, layers, tuple(exits), draws)


# ---------------------------------------------------------------- other text
TOKENS_WITHOUT_RUN = 1024  # of a sequence, for a model whose run nobody knows
TOKENS_AT_ONCE = 8192  # of a batch


def evaluate_text(
    path: Path,
    sources: Sequence[str],
    omit: Sequence[float | Sequence[int]] = (),
    draws: int = 8,
    batches: int | None = None,
    seed: int = 0,
    exits: Sequence[int] = (),
    tokens: int | None = None,
) -> Examination:
    """Measure the perplexity of a run, a checkpoint or a Hugging Face folder on other text.

    The text is read as the run reads its own, in sequences of `tokens` tokens. Every token but the first one of the
    text is predicted once; `batches` is the number of batches to read at most.
    """
    questions = _questions(omit, exits, draws, 1 if batches is None else batches)
    for source in sources:
        if not Path(source).expanduser().exists():
            raise FileError(
                f"cannot read {source}: there is no such file or folder\n  name some text with --text"
            )
    trained = open_trained(path)
    data = _data_of(path, trained, sources, tokens)
    with TemporaryDirectory(prefix="penstock-eval-") as cache:
        text = _open_text(data, trained, Path(cache))
        measured = text if batches is None else text[:batches]
        rows = questions.answer(trained, measured, (), seed)
        return Examination(
            rows,
            measured.sequences,
            text.sequences,
            data.tokens,
            0,
            "",
            text.bytes_per_token,
        )


def _data_of(
    path: Path, trained: Trained, sources: Sequence[str], tokens: int | None
) -> DataConfig:
    """The data of the run that a model is from, or of no run, with other sources."""
    data = None
    for folder in (path, path.parent.parent):
        if (folder / CONFIG_FILE).is_file():
            data = read_config(folder / CONFIG_FILE).data
            break
    longest = getattr(trained.sizes, "positions", 0)
    if data is None:
        data = DataConfig(tokens=min(TOKENS_WITHOUT_RUN, longest or TOKENS_WITHOUT_RUN))
    if tokens is not None:
        data = replace(data, tokens=tokens)
    if longest and data.tokens > longest:
        raise ShapeError(
            f"sequences of {data.tokens} tokens are too long for this model, which has {longest} positions\n"
            f"  give --tokens {longest} or less"
        )
    return replace(
        data,
        sources=tuple(sources),
        mixture=(),
        tokenizer=trained.tokenizer,
        held_out=0.0,
    )


class TextBatches(Sequence[Batch]):
    """A text in batches, made one by one so that memory does not grow with it."""

    def __init__(self, corpus: Corpus, rows: int, seed: int, sequences: int) -> None:
        self.corpus = corpus
        self.rows = rows
        self.seed = seed
        self.sequences = sequences  # the last one may be shorter than the others
        self.bytes_per_token = _bytes_per_token(corpus)

    def __len__(self) -> int:
        return -(-self.whole // self.rows) + self.sequences - self.whole

    @property
    def whole(self) -> int:
        """The sequences of full length."""
        return min(self.sequences, self.corpus.held_out)

    def __getitem__(self, place: Any) -> Any:
        """Return a batch, or the first batches as another text."""
        if isinstance(place, slice):
            most = len(range(*place.indices(len(self)))) * self.rows
            fewer = min(self.sequences, most)
            return TextBatches(self.corpus, self.rows, self.seed, fewer)
        if not 0 <= place < len(self):
            raise IndexError(place)
        begin = place * self.rows
        if begin >= self.whole:
            return self._rest()
        count = min(self.rows, self.whole - begin)
        loader = Loader(self.corpus, Deal(count, 1), self.seed)
        return loader.batch_of(range(begin, begin + count))

    def _rest(self) -> Batch:
        """The last sequence, which is shorter."""
        corpus = self.corpus
        words = corpus.tokens[self.whole * corpus.length :].astype(np.int64)
        tokens = torch.from_numpy(words)[None]
        starts = None if corpus.end is None else starts_in(tokens, corpus.end)
        labels = shift_labels(tokens, starts)
        own = () if starts is None else (starts[:, :-1],)
        return batch_of((tokens[:, :-1],), (labels[:, :-1],), starts=own)


def _open_text(data: DataConfig, trained: Trained, cache: Path) -> TextBatches:
    """Encode a text, and cut all of it into sequences; the last one of plain text may be shorter."""
    guesses = not continues_texts(trained.sizes)
    plain = not guesses and not data.marked
    # A text may be shorter than a sequence.
    corpus = open_corpus(replace(data, tokens=2) if plain else data, cache)
    sequences = (corpus.token_count - 1) // data.tokens
    rest = plain and (corpus.token_count - 1) % data.tokens > 0
    corpus = replace(corpus, length=data.tokens, trained=0, held_out=sequences)
    if guesses:
        tokenizer = tokenizer_of(data.tokenizer)
        masking = masking_of(tokenizer, data.mask, data.segments)
        corpus = replace(corpus, masking=masking, typed=data.segments > 1)
    rows = max(1, TOKENS_AT_ONCE // data.tokens)
    return TextBatches(corpus, rows, 0, sequences + int(rest))
