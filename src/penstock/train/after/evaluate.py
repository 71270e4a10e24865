"""Evaluates a model, whole and with parts left out: on the held-out text of its run, or on any other text.

    all     0 1 2 3 4 5  head      perplexity with every part
    random  0 . 2 3 . .  head      several draws: mean and spread
    chosen  0 1 2 3 . .  head      the parts that somebody asked for, such as an early exit

The first part, which has the embedding, and the head always run. Parts keep their order, and
nothing is rescaled to make up for those left out. A whole model is cut into one layer per
part and the head; if parts are given, the last one must be the head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch
from torch import Tensor, nn

from penstock.config import DataConfig
from penstock.errors import FileError, RunError, ShapeError
from penstock.formats.config_toml import CONFIG_FILE, read_config
from penstock.models import layer_count, split, token_loss, valid_tokens
from penstock.models.slice import Carry
from penstock.runtime import Batch, batch_of
from penstock.schedules.skip import PartPath, skips_of
from penstock.train.after.generate import (
    Trained,
    chosen_path,
    continues_texts,
    open_trained,
)
from penstock.train.data.corpus import Corpus, SequenceRef, open_corpus
from penstock.train.data.loader import BatchShape, Loader, read_rows
from penstock.train.data.masking import masking_of
from penstock.train.data.tokenizer import tokenizer_of
from penstock.train.job import corpus_of, validation_of, with_kept_files
from penstock.view.numbers import count_of

WholeOrParts: TypeAlias = nn.Module | Sequence[nn.Module]  # a whole model, or its parts
Omitted: TypeAlias = float | Sequence[int]  # a share of the layers, or some layers
MAX_EXPONENT = 700.0  # exp of more would overflow.
TOKENS_WITHOUT_RUN = 1024  # of a sequence, for a model whose run nobody knows
TOKENS_AT_ONCE = 8192  # of a batch


@dataclass(frozen=True, slots=True)
class AblationRow:
    """The perplexity of one way to leave out parts."""

    way: str  # all, random, chosen
    kept: int  # parts that run, without the head
    parts: int  # all parts, without the head
    perplexity: float  # for random draws, the mean
    spread: float  # for random draws, the standard deviation
    ratio: float  # to the perplexity with all parts
    path: PartPath  # for random draws, empty


@dataclass(frozen=True, slots=True)
class Examination:
    """The perplexities of a model, and the sequences they were measured on."""

    rows: tuple[AblationRow, ...]
    sequences: int
    available: int  # sequences
    tokens: int  # per sequence
    kind: str = "held-out "  # of the text; empty for other text
    bytes_per_token: float | None = None  # None if tokens do not stand for bytes

    @property
    def text(self) -> str:
        """Describe the text that was measured on."""
        count = f"{self.sequences:,} of {self.available:,}"
        if self.sequences == self.available:
            count = f"all {self.sequences:,}"
        return f"{count} {self.kind}sequences of {self.tokens} tokens, each once"

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


# ---------------------------------------------------------------- the text of a run
def evaluate_run(
    run: Path,
    omit: Sequence[Omitted],
    draws: int = 8,
    batches: int = 2,
    seed: int = 0,
) -> Examination:
    """Measure the perplexity of a run's last checkpoint on `batches` batches of text that it was not trained on.

    That is the text of its own evaluations: data.validation, or what it has held out. Each sequence counts at most
    once.

    omit: what to leave out, one after the other: a share of the layers, or some layers.
    """
    _check_counts(omit, draws, batches)
    if not (run / CONFIG_FILE).is_file():
        raise FileError(
            f"{run} has no {CONFIG_FILE}, which says what text was held out\n"
            "  name the folder of a run, or some text with --text"
        )
    config = with_kept_files(read_config(run / CONFIG_FILE), run)
    corpus = validation_of(config, run) or corpus_of(config, run)
    loader = Loader(corpus, BatchShape(config.rows, config.passages), config.run.seed)
    held = loader.evaluation(batches)
    if not held:
        raise FileError(
            f"{run} held out no text: its data.validation is {config.data.held_out:g}\n"
            "  train with data.validation above 0 to have text for evaluations"
        )
    return Examination(
        _measure(open_trained(run), held, omit, draws, seed),
        loader.examined(batches),
        corpus.held_out,
        corpus.length,
        bytes_per_token=_bytes_per_token(corpus),
    )


def _check_counts(omit: Sequence[Omitted], draws: int, batches: int) -> None:
    """Refuse shares and counts that make no sense, before anything is read."""
    for share in omit:
        if isinstance(share, int | float) and not 0 <= share < 1:
            raise ShapeError(
                f"a share of {share:g} cannot be left out: 0 is nothing, and 1 would be all"
            )
    for name, count in (("batches", batches), ("draws", draws)):
        if count < 1:
            raise ShapeError(f"{name} must be at least 1, not {count}")


def _measure(
    trained: Trained,
    batches: Iterable[Batch],
    omit: Sequence[Omitted],
    draws: int,
    seed: int,
) -> tuple[AblationRow, ...]:
    """Measure a model with everything, and with each of these left out."""
    count = trained.sizes.layers
    shares = [one for one in omit if isinstance(one, int | float)]
    layers = [one for one in omit if not isinstance(one, int | float)]
    chosen = [chosen_path(count, one) for one in layers]
    return evaluate_ablation(trained.model, batches, shares, draws, seed, chosen)


def _bytes_per_token(corpus: Corpus) -> float | None:
    """The bytes that a label stands for; None if only some tokens are labels."""
    if corpus.marks is not None or corpus.masking is not None:
        return None
    return corpus.bytes_per_token


# ---------------------------------------------------------------- other text
def evaluate_text(
    path: Path,
    sources: Sequence[str],
    omit: Sequence[Omitted] = (),
    draws: int = 8,
    batches: int | None = None,
    seed: int = 0,
    tokens: int | None = None,
) -> Examination:
    """Measure the perplexity of a run, a checkpoint or a Hugging Face folder on other text.

    The text is read as the run reads its own, in sequences of `tokens` tokens. Every token but the first one of the
    text is predicted once; `batches` is the number of batches to read at most.
    """
    _check_counts(omit, draws, 1 if batches is None else batches)
    for source in sources:
        if not Path(source).expanduser().exists():
            raise FileError(
                f"cannot read {source}: there is no such file or folder\n  name some text with --text"
            )
    trained = open_trained(path)
    data = _data_of(path, trained, sources, tokens)
    with TemporaryDirectory(prefix="penstock-eval-") as cache:
        text = _open_text(data, trained, Path(cache))
        measured = text
        if batches is not None:
            fewer = min(text.sequences, batches * text.rows)
            measured = replace(text, sequences=fewer)
        return Examination(
            _measure(trained, measured, omit, draws, seed),
            measured.sequences,
            text.sequences,
            data.seq_len,
            "",
            _bytes_per_token(text.corpus),
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
        data = DataConfig(
            seq_len=min(TOKENS_WITHOUT_RUN, longest or TOKENS_WITHOUT_RUN)
        )
    if tokens is not None:
        data = replace(data, seq_len=tokens)
    if longest and data.seq_len > longest:
        raise ShapeError(
            f"sequences of {data.seq_len} tokens are too long for this model, which has {longest} positions\n"
            f"  give --seq-len {longest} or less"
        )
    return replace(
        data,
        sources=tuple(sources),
        tokenizer=trained.tokenizer,
        validation=0.0,
    )


@dataclass(frozen=True, slots=True)
class TextBatches:
    """A text in batches, made one by one so that memory does not grow with it."""

    corpus: Corpus
    rows: int
    sequences: int  # the last one may be shorter than the others

    def __iter__(self) -> Iterator[Batch]:
        """Make the batches again from the first one on."""
        whole = min(self.sequences, self.corpus.held_out)
        for begin in range(0, whole, self.rows):
            yield _batch(self.corpus, range(begin, min(begin + self.rows, whole)))
        if self.sequences > whole:
            rest = self.corpus.tokens[whole * self.corpus.length :]
            yield _batch(replace(self.corpus, tokens=rest, length=len(rest) - 1), [0])


def _batch(corpus: Corpus, numbers: Iterable[int]) -> Batch:
    """A batch of these sequences as one micro-batch."""
    rows = read_rows(corpus, [SequenceRef(number) for number in numbers], seed=0)
    starts = () if rows.starts is None else (rows.starts,)
    named = () if rows.types is None else ({"types": rows.types},)
    return batch_of((rows.tokens,), (rows.labels,), starts=starts, named=named)


def _open_text(data: DataConfig, trained: Trained, cache: Path) -> TextBatches:
    """Encode a text, and cut all of it into sequences; the last one of plain text may be shorter."""
    guesses = not continues_texts(trained.sizes)
    plain = not guesses and not data.marked
    # A text may be shorter than a sequence.
    corpus = open_corpus(replace(data, seq_len=2) if plain else data, cache)
    sequences = (corpus.token_count - 1) // data.seq_len
    rest = plain and (corpus.token_count - 1) % data.seq_len > 0
    corpus = replace(corpus, length=data.seq_len, trained=0, held_out=sequences)
    if guesses:
        tokenizer = tokenizer_of(data.tokenizer)
        masking = masking_of(tokenizer, data.mlm_probability, data.segments)
        corpus = replace(corpus, masking=masking, typed=data.segments > 1)
    rows = max(1, TOKENS_AT_ONCE // data.seq_len)
    return TextBatches(corpus, rows, sequences + int(rest))


# ---------------------------------------------------------------- parts left out
def evaluate_ablation(
    model: WholeOrParts,
    batches: Iterable[Batch],
    omit: Sequence[float],
    draws: int = 8,
    seed: int = 0,
    chosen: Sequence[PartPath] = (),
) -> tuple[AblationRow, ...]:
    """Measure the perplexity with all parts, without each share in `omit`, and along the `chosen` paths.

    `batches` can be iterated over more than once. Each share gets a row of random draws.
    """
    parts = single_layer_parts(model)
    count = len(parts) - 1
    everything = tuple(range(count))
    ways = [("all", [everything])]
    ways += [("random", [*omit_parts(count, share, draws, seed)]) for share in omit]
    ways += [("chosen", [path]) for path in chosen]
    rows: list[AblationRow] = []
    for way, paths in ways:
        found = [perplexity(parts, batches, path) for path in paths]
        spread = stdev(found) if len(found) > 1 else 0.0
        own = mean(found)
        ratio = own / rows[0].perplexity if rows else 1.0
        path = () if way == "random" else paths[0]
        rows.append(AblationRow(way, len(paths[0]), count, own, spread, ratio, path))
    return tuple(rows)


def single_layer_parts(model: WholeOrParts) -> list[nn.Module]:
    """Cut a model into parts of one layer and the head; return parts as they are."""
    if isinstance(model, nn.Module):
        return [*split(model, [1] * layer_count(model) + [0])]
    if len(model) < 2:
        raise ShapeError(
            "a single part leaves nothing to leave out; "
            "make the head its own part: split(model, [..., 0])"
        )
    return list(model)


def omit_parts(
    parts: int, share: float, draws: int = 1, seed: int = 0
) -> tuple[PartPath, ...]:
    """Return different random paths that leave out a share of the parts.

    If fewer than `draws` exist, return all of them.

    >>> omit_parts(4, 0.5, draws=9)
    ((0, 1), (0, 2), (0, 3))
    """
    skips = skips_of(parts, share)
    draw = Random(f"omission {seed}")
    if math.comb(parts - 1, skips) <= draws:
        kept = combinations(range(1, parts), parts - 1 - skips)
        return tuple((0, *others) for others in kept)
    paths: dict[PartPath, None] = {}
    while len(paths) < draws:
        others = sorted(draw.sample(range(1, parts), parts - 1 - skips))
        paths[(0, *others)] = None
    return tuple(paths)


@torch.no_grad()
def perplexity(
    model: WholeOrParts, batches: Iterable[Batch], keep: Sequence[int] | None = None
) -> float:
    """Return exp of the mean loss per token when only the parts in `keep` and the head run.

    Without `keep`, all parts run.
    """
    *layers, head = single_layer_parts(model)
    parts = [*(layers if keep is None else [layers[part] for part in keep]), head]
    loss = 0.0
    valid = 0
    with _without_dropout(parts):
        for batch in batches:
            for number, labels in enumerate(batch.labels):
                logits = _run(parts, batch, number)
                loss += float(token_loss(logits, labels).double())
                valid += valid_tokens(labels)
    mean_loss = loss / max(valid, 1)
    if math.isnan(mean_loss):
        raise RunError(
            "the model produces NaN, so it has no perplexity\n"
            "  check the losses of its training, and train again with a lower optimizer.lr"
        )
    return math.exp(min(mean_loss, MAX_EXPONENT))


def _run(parts: Sequence[nn.Module], batch: Batch, microbatch: int) -> Tensor:
    """Send a micro-batch through parts, one after the other; only the first one gets its named tensors."""
    x = batch.inputs[microbatch]
    tokens = x.shape[1]
    named = batch.named[microbatch] if batch.named else {}
    for part in parts:
        # Packed documents must not see each other.
        starts = batch.starts[microbatch : microbatch + 1]
        pieces = [Carry(tokens, one).open(0, tokens) for one in starts]
        x = part(x, *pieces, **named)
        named = {}
    return x


@contextmanager
def _without_dropout(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Switch dropout off for a while."""
    before = [part.training for part in parts]
    try:
        for part in parts:
            part.eval()
        yield
    finally:
        for part, training in zip(parts, before, strict=True):
            part.train(training)
