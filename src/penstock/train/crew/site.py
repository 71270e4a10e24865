"""Where a worker of a crew runs, and what it has there: its folder, its connections, its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config import Config
from penstock.formats.config_toml import read_config
from penstock.formats.plan_json import read_plan
from penstock.runtime.wire.door import split_address
from penstock.runtime.wire.exchange import Exchange
from penstock.runtime.wire.key import KEY_FILE
from penstock.train.checkpoint import Depot
from penstock.train.crew.depot import (
    MODEL_FOLDER,
    VALIDATION,
    files_of_tokens,
    texts_of,
)
from penstock.train.data.corpus import all_held_out, read_corpus
from penstock.train.data.mixture import mix_corpora
from penstock.train.data.tokenizer import tokenizer_of
from penstock.train.history import PLAN_FILE
from penstock.train.hub import settle_model
from penstock.train.job import Job
from penstock.train.run_source import CONFIG_FILE
from penstock.train.worker import job_of, model_sizes, with_guesses, with_kept_files


@dataclass(frozen=True, slots=True)
class Site:
    """The surroundings of one worker."""

    folder: Path
    exchange: Exchange | None = None  # encrypted connections; None if gloo connects
    depot: Depot | None = None  # the launcher's files, if it does not see them

    @property
    def is_elsewhere(self) -> bool:
        """Whether this worker runs on another machine than the launcher."""
        return self.depot is not None

    def config(self) -> Config:
        """The config of the run; elsewhere, with copied files in place of those it names."""
        config = read_config(self.folder / CONFIG_FILE)
        if not self.is_elsewhere:
            return config
        config = with_kept_files(config, self.folder)
        model = config.model
        copied = str(self.folder / MODEL_FOLDER)
        if model.weights:
            model = replace(model, weights=copied)
        if model.config:
            model = replace(model, config=copied)
        return replace(config, model=model)

    def job(self, config: Config, resume: bool) -> Job:
        """The run that this worker takes part in; elsewhere, on tokens that were copied."""
        if not self.is_elsewhere:
            return job_of(self.folder, config, resume)
        config = settle_model(config)
        plan = read_plan(self.folder / PLAN_FILE)
        end = tokenizer_of(config.data.tokenizer).end
        texts = {}
        for name, text in texts_of(config.data).items():
            row, note = files_of_tokens(self.folder, name)
            texts[name] = read_corpus(row, note, text, end)
        validation = None
        if VALIDATION in texts:
            validation = with_guesses(config, all_held_out(texts.pop(VALIDATION)))
        corpus = with_guesses(config, mix_corpora(config.data, list(texts.values())))
        sizes = model_sizes(config)
        return Job(
            config,
            plan,
            sizes,
            corpus,
            self.folder,
            resume,
            validation=validation,
            depot=self.depot,
        )


def key_of(config: Config, folder: Path) -> Path:
    """The file with the key of a run."""
    return Path(config.run.key) if config.run.key else folder / KEY_FILE


def own_site(folder: Path, worker: int, workers: int) -> Site:
    """The site of one of the workers of a run, on the launcher's machine."""
    config = read_config(folder / CONFIG_FILE)
    if not config.run.listen:
        return Site(folder)
    host, port = split_address(config.run.listen, "run.listen")
    own = port + 1 + worker if port else 0
    shown = f"[{host}]" if ":" in host else host
    return Site(folder, Exchange(f"{shown}:{own}", key_of(config, folder), workers))
