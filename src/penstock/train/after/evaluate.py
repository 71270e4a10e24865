"""Evaluates a run's model on its held-out text, whole and with parts left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import FileError, ShapeError
from penstock.formats.config_toml import read_config
from penstock.train.after.ablation import TokenRows, chosen_path, evaluate_ablation
from penstock.train.after.generate import open_trained
from penstock.train.data.loader import Deal, Loader
from penstock.train.worker import CONFIG_FILE, corpus_of, with_kept_files


@dataclass(frozen=True, slots=True)
class Examination:
    """The perplexities of a run's model, and the held-out sequences they were measured on."""

    rows: TokenRows
    sequences: int
    held_out: int
    tokens: int  # per sequence
    # Further sequences, on which the best subsets were searched; 0 if on the measured ones.
    searched: int

    @property
    def text(self) -> str:
        """Describe the text that was measured on."""
        if self.sequences == self.held_out:
            count = f"all {self.sequences:,}"
        else:
            count = f"{self.sequences:,} of {self.held_out:,}"
        words = f"{count} held-out sequences of {self.tokens} tokens, each once"
        if not any(row.way == "best" for row in self.rows):
            return words
        if self.searched:
            return f"{words}; best subsets were searched on {self.searched:,} others"
        return (
            f"{words}; best subsets were searched on the same ones, which flatters them"
        )


def evaluate_run(
    run: Path,
    omit: Sequence[float | Sequence[int]],
    draws: int = 8,
    batches: int = 2,
    seed: int = 0,
    exits: Sequence[int] = (),
) -> Examination:
    """Measure the perplexity of a run's last checkpoint on `batches` batches of held-out text.

    omit: what to leave out, one after the other: a share of the layers, or some layers.
    exits: layers after which the head follows, one after the other.

    Each sequence counts at most once. Best subsets are searched on other held-out text than
    they are measured on, if there is any left.
    """
    shares = [one for one in omit if isinstance(one, int | float)]
    given = [one for one in omit if not isinstance(one, int | float)]
    for share in shares:
        if not 0 <= share < 1:
            raise ShapeError(
                f"a share of {share:g} cannot be left out: 0 is nothing, and 1 would be all"
            )
    if batches < 1 or draws < 1:
        raise ShapeError(f"{batches} batches and {draws} draws; the least is 1 of each")
    if not (run / CONFIG_FILE).is_file():
        raise FileError(
            f"{run} has no {CONFIG_FILE}, which says what text was held out\n  name the folder of a run"
        )
    config = with_kept_files(read_config(run / CONFIG_FILE), run)
    corpus = corpus_of(config, run)
    loader = Loader(corpus, Deal(config.rows, config.passages), config.run.seed)
    held = loader.evaluation(2 * batches)
    if not held:
        raise FileError(
            f"{run} held out no text: its data.held_out is {config.data.held_out:g}\n"
            "  train with data.held_out above 0 to have text for evaluations"
        )
    trained = open_trained(run)
    layers = trained.sizes.layers
    chosen = [chosen_path(layers, one) for one in given]
    chosen += [chosen_path(layers, exit_after=layer) for layer in exits]
    rows = evaluate_ablation(
        trained.model,
        held[:batches],
        shares,
        draws,
        seed,
        held[batches:],
        chosen=chosen,
    )
    measured = loader.examined(batches)
    return Examination(
        rows,
        measured,
        corpus.held_out,
        corpus.length,
        loader.examined(2 * batches) - measured,
    )
