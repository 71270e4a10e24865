"""A run's model on the text that was held out from it, whole and with parts left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import FileError, ShapeError
from penstock.train.config_file import read_config
from penstock.train.corpus import open_corpus
from penstock.train.data import Deal, Loader
from penstock.train.generate import open_trained
from penstock.train.omission import Rows, evaluate
from penstock.train.worker import CONFIG, at_home, cache_of


def evaluate_run(run: Path, omit: Sequence[float], draws: int = 8, batches: int = 2, seed: int = 0) -> Rows:
    """Perplexity of a run's last checkpoint. Best subsets are looked for on other text than they are measured on."""
    for share in omit:
        if not 0 <= share < 1:
            raise ShapeError(f"a share of {share:g} cannot be left out: 0 is nothing, and 1 would be all")
    if batches < 1 or draws < 1:
        raise ShapeError(f"{batches} batches and {draws} draws; the least is 1 of each")
    if not (run / CONFIG).is_file():
        raise FileError(f"{run} has no {CONFIG}, which says what text was held out\n  name the folder of a run")
    config = at_home(read_config(run / CONFIG), run)
    corpus = open_corpus(config.data, cache_of(config, run))
    held = Loader(corpus, Deal(config.rows, config.passages), config.run.seed).evaluation(2 * batches)
    if not held:
        raise FileError(f"{run} held out no text: its data.held_out is {config.data.held_out:g}")
    return evaluate(open_trained(run).model, held[:batches], omit, draws, seed, held[batches:])
