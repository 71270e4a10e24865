"""A job: everything that defines a run, the same on all its ranks, how it is read, how it resumes, and how it ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from penstock.config import (
    AUTO,
    BYTE_TOKENIZER,
    Config,
    check_config,
    segments_fault,
    trained_words,
)
from penstock.errors import ConfigError, FileError, RunError
from penstock.formats.plan_json import read_plan
from penstock.ir.plan import Plan
from penstock.models import (
    BertConfig,
    DecoderConfig,
    EncoderConfig,
    GPTConfig,
    even_partition,
)
from penstock.models.decoder import check_positions, config_differences
from penstock.models.layer import recompute_inside, set_dropout
from penstock.models.tensor import check_shares
from penstock.runtime import Comm
from penstock.schedules.coverage import hold_every_part
from penstock.train.checkpoints.checkpoint import (
    CHECKPOINTS_FOLDER,
    CheckpointFacts,
    RemoteFiles,
    Saver,
    lost_files,
    newest,
    newest_good,
    read_facts,
)
from penstock.train.checkpoints.place import remote_checkpoints
from penstock.train.checkpoints.separate import SeparateFolders
from penstock.train.data.corpus import (
    Corpus,
    byte_pairs,
    open_text,
    open_validation,
)
from penstock.train.data.files import ProgressBytes
from penstock.train.data.loader import Loader, check_same_data
from penstock.train.data.masking import masking_of
from penstock.train.data.tokenizer import (
    TOKENIZER,
    ByteTokenizer,
    kept_tokenizer,
    tokenizer_of,
)
from penstock.train.elastic import PartTransfer
from penstock.train.history import PLAN_FILE
from penstock.train.hub import read_sizes
from penstock.train.lora import adapt, describe_adapters
from penstock.train.optimizer import describe_optimizer, frozen_names, settle_rate
from penstock.train.own_models import sizes_of, vocab_of
from penstock.train.weights import Sizes


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that defines a run; it is the same on all ranks."""

    config: Config
    plan: Plan
    sizes: Sizes
    corpus: Corpus
    folder: Path
    resume: bool = False  # start from the newest good checkpoint
    fresh: bool = False  # if there is no checkpoint, start from the beginning
    whole: bool = True  # whether the plan is the run's own, and not one for fewer ranks
    validation: Corpus | None = None  # text for evaluations, if it is not held out
    # Parts with their rank and that of their mirror.
    mirrors: tuple[PartTransfer, ...] = ()
    leader: int = 0  # the rank that writes the files of the run
    remote_files: RemoteFiles | None = (
        None  # for a rank that does not see the folder of the run
    )
    separate: SeparateFolders | None = None  # if the ranks do not all see one folder

    def __post_init__(self) -> None:
        held = self.plan.map_schedules(hold_every_part)
        object.__setattr__(self, "plan", held)

    @property
    def partition(self) -> tuple[int, ...]:
        """The number of layers of each part."""
        if self.plan.partition:
            return self.plan.partition
        return even_partition(self.sizes.layers, self.plan.schedule.parts)

    def adapt(self, model: nn.Module) -> None:
        """Give a model without memory the dropout, adapters, recomputation and frozen weights of the run."""
        if self.config.model.dropout:
            set_dropout(model, self.config.model.dropout)
        recompute_inside(model, self.config.run.recomputed_inside)
        if self.adapts:
            adapt(model, self.sizes, self.config.lora)
        names = [name for name, _ in model.named_parameters()]
        for name in frozen_names(names, self.config.optimizer):
            model.get_parameter(name).requires_grad_(False)

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained instead of the model itself."""
        return self.config.lora.rank > 0

    def keeps_folder(self, rank: int) -> bool:
        """Whether a rank keeps its folder in order: the leader, or the first rank of each separate folder."""
        if self.separate is not None:
            return self.separate.folders.keeps(rank)
        return rank == self.leader

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / CHECKPOINTS_FOLDER

    def saver(
        self, folder: Path, comm: Comm, keep: int, names: Collection[str]
    ) -> Saver:
        """Return what saves checkpoints in a folder; only those that the run resumes from are copied elsewhere."""
        saver = partial(Saver, folder, comm, keep, names, self.leader)
        apart = None if self.separate is None else self.separate.folders
        if folder != self.checkpoints:
            return saver(apart=apart)
        if self.separate is not None:
            return saver(apart=apart, storage=self.separate.remote)
        leads = comm.rank == self.leader
        storage = remote_checkpoints(self.config.run) if leads else None
        return saver(self.remote_files, storage=storage)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The last step of a run, and how it ended for a rank.

    `stopped` says that somebody asked it to stop, and `interrupted` that this was not one of
    the run's own callbacks. `error` and `text` describe a failure that a restart cannot fix.
    """

    step: int = 0
    stopped: bool = False
    error: str = ""
    text: str = ""
    interrupted: bool = False


def job_of(
    folder: Path, config: Config, resume: bool = False, fresh: bool = False
) -> Job:
    """Return the run that a folder describes."""
    config = settle_model(config)
    plan = read_plan(folder / PLAN_FILE)
    corpus = corpus_of(config, folder)
    validation = validation_of(config, folder)
    sizes = model_sizes(config)
    return Job(
        config, plan, sizes, corpus, folder, resume, fresh, validation=validation
    )


def corpus_of(
    config: Config,
    folder: Path,
    watch: ProgressBytes = lambda done, total: None,
) -> Corpus:
    """Open the text of a run, with words to guess if its model is an encoder."""
    return with_guesses(config, open_text(config.data, cache_of(folder), watch))


def validation_of(config: Config, folder: Path) -> Corpus | None:
    """Open the text of data.validation; None without any."""
    corpus = open_validation(config.data, cache_of(folder))
    return None if corpus is None else with_guesses(config, corpus)


def with_guesses(config: Config, corpus: Corpus) -> Corpus:
    """Return text with words to guess, if the model is an encoder."""
    if config.model.family != "bert":
        return corpus
    data = config.data
    masking = masking_of(
        tokenizer_of(data.tokenizer), data.mlm_probability, data.segments
    )
    return replace(corpus, masking=masking, typed=data.segments > 1)


def model_sizes(config: Config) -> Sizes:
    """Return the sizes of a config's model, from its folder if it starts from one."""
    vocab = vocab_of(config)
    folder = config.model.folder
    if folder:
        sizes = read_sizes(Path(folder))
        if isinstance(sizes, DecoderConfig | BertConfig | GPTConfig):
            check_positions(sizes, config.data.seq_len)
        if isinstance(sizes, BertConfig | EncoderConfig):
            check_segments(folder, sizes.types, config.data.segments)
        if sizes.vocab < vocab:
            raise RunError(
                f"the model in {folder} has a vocabulary of {sizes.vocab}, the tokenizer one of {vocab}\n"
                "  data.tokenizer must be the one that the model was trained with"
            )
    else:
        sizes = sizes_of(config.model, vocab, config.data.seq_len)
    check_shares(sizes, config.parallel.tp)
    return sizes


def check_segments(folder: str, types: int, segments: int) -> None:
    """Refuse more segments than the model in a folder can tell apart; one needs no types."""
    if segments > max(types, 1):
        known = f"knows {types} type" if types else "knows no types"
        raise RunError(
            f"the model in {folder} {known} of segments, so it cannot tell {segments} of them apart\n"
            "  set data.format=text:segments=1"
        )


def with_kept_files(config: Config, folder: Path) -> Config:
    """Replace files that a run's config names, if they are gone, by the run's copies."""
    tokenizer = kept_tokenizer(config.data.tokenizer, folder)
    return replace(config, data=replace(config.data, tokenizer=tokenizer))


def cache_of(folder: Path) -> Path:
    """Return the folder of a run's token cache."""
    return folder.parent / "cache"


def settle_model(config: Config) -> Config:
    """Replace what a config leaves to its model: the tokenizer, the learning rate, and the family of an encoder.

    All encoders are of the family bert: they guess masked words and see both ways.
    """
    if config.model.folder:
        sizes = read_sizes(Path(config.model.folder))
        if isinstance(sizes, BertConfig | EncoderConfig):
            model = replace(config.model, family="bert")
            config = check_config(replace(config, model=model))
        elif config.data.segments:
            raise ConfigError(segments_fault(config))
    return settle_rate(settle_tokenizer(config))


def settle_tokenizer(config: Config) -> Config:
    """Replace the tokenizer "auto" by that of the model's folder, or by bytes without a folder; train a "bpe".

    Raises ConfigError if the folder has no tokenizer.json and the size of its vocabulary
    shows that the model was not trained on bytes.
    """
    if trained_words(config.data.tokenizer):
        own = str(byte_pairs(config.data))
        return replace(config, data=replace(config.data, tokenizer=own))
    if config.data.tokenizer != AUTO:
        return config
    tokenizer = BYTE_TOKENIZER
    folder = Path(config.model.folder)
    if config.model.folder and (folder / TOKENIZER).is_file():
        tokenizer = str(folder / TOKENIZER)
    elif config.model.folder:
        vocab = read_sizes(folder).vocab
        if vocab != ByteTokenizer.vocab:
            raise ConfigError(
                f"the model in {folder} has a vocabulary of {vocab}, so it was not trained on bytes, "
                f"but there is no {TOKENIZER} beside it\n  name one in data.tokenizer; "
                "data.tokenizer=bytes trains it on bytes anyway"
            )
    return replace(config, data=replace(config.data, tokenizer=tokenizer))


def checkpoint_facts(
    job: Job, loader: Loader, progress: Mapping[str, object]
) -> CheckpointFacts:
    """Return the description of a run that goes into its checkpoints."""
    config = job.config
    return {
        "model": describe_model(job.sizes),
        "data": loader.state(),
        "tokenizer": config.data.tokenizer,
        "optimizer": describe_optimizer(config.optimizer),
        "progress": progress,
        **describe_adapters(config),
        "schedule": job.plan.name,
        "ranks": job.plan.schedule.ranks,
        "partition": list(job.partition),
        "mesh": {"shard": config.parallel.dp_shard, "tensor": config.parallel.tp},
    }


def describe_model(sizes: Sizes) -> dict[str, object]:
    """Describe a model in plain values."""
    family = type(sizes).__name__.removesuffix("Config").lower()
    return {"family": family, **asdict(sizes)}


def checkpoint_to_resume(job: Job, comm: Comm, names: tuple[str, ...]) -> Path | None:
    """Return the checkpoint that a run goes on from; None if it starts at the beginning.

    All ranks must call it. `names` are the parameters that a checkpoint must hold.
    """
    if not job.resume:
        return None
    if job.remote_files is not None:
        job.remote_files.fetch(job.checkpoints)
    if job.separate is not None:
        search = job.separate.checkpoints(job.checkpoints, comm)
        checkpoint = search.newest_good(names)
        if checkpoint is None and not job.fresh:
            raise search.nothing_found()
        return checkpoint
    checkpoint = newest_good(job.checkpoints, comm, names)
    if checkpoint is None and not job.fresh:
        raise nothing_to_resume(job.checkpoints)
    return checkpoint


def nothing_to_resume(checkpoints: Path) -> RunError:
    """Return the error for a run that cannot resume."""
    lost = lost_files(checkpoints)
    if lost:
        return RunError(lost)
    if newest(checkpoints):
        return RunError(
            f"no checkpoint in {checkpoints} is good: "
            "all are damaged or lack weights of this model\n"
            "  start a new run in another run.folder, "
            "or delete that folder and start without --resume"
        )
    return RunError(
        f"there is no good checkpoint in {checkpoints}\n  start without --resume"
    )


def check_same_model(path: Path, facts: CheckpointFacts, sizes: Sizes) -> None:
    """Raise RunError if a checkpoint belongs to a model with other sizes."""
    theirs = facts.get("model", {})
    mine = describe_model(sizes)
    differences = []
    if isinstance(sizes, DecoderConfig):
        differences = config_differences(str(theirs.get("config")), sizes)
        del mine["config"]
    for key, value in mine.items():
        if theirs.get(key) != value:
            differences.append(f"its {key} is {theirs.get(key)}, here it is {value}")
    if differences:
        raise RunError(
            f"{path} is of another model: {'; '.join(differences)}\n"
            "  go on with its own sizes, or start a new run in another run.folder"
        )


def check_resumable(config: Config, folder: Path, corpus: Corpus) -> None:
    """Raise RunError if a run cannot resume from its newest checkpoint.

    This happens before the run overwrites any file.
    """
    sizes = model_sizes(config)
    for path in newest(folder / CHECKPOINTS_FOLDER):
        try:
            facts = read_facts(path)
        except FileError:
            # It is damaged. The ranks will report that and look for an earlier one.
            continue
        check_same_model(path, facts, sizes)
        check_same_data(facts.get("data", {}), corpus, config.run.seed)
        return
