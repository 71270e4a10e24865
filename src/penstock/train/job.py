"""A job: everything that defines a run, the same on all its ranks, and how it ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from penstock.config import Config
from penstock.ir.plan import Plan
from penstock.models import even_partition
from penstock.models.layer import recompute_inside, set_dropout
from penstock.runtime import Comm
from penstock.schedules.coverage import hold_every_part
from penstock.train.checkpoint import CHECKPOINTS_FOLDER, RemoteFiles, Saver
from penstock.train.data.corpus import Corpus
from penstock.train.handover import PartTransfer
from penstock.train.lora import adapt
from penstock.train.separate import SeparateFolders
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
        """Give a model without memory the dropout, the adapters and the recomputation of the run."""
        if self.config.model.dropout:
            set_dropout(model, self.config.model.dropout)
        recompute_inside(model, self.config.run.recomputed_inside)
        if self.adapts:
            adapt(model, self.sizes, self.config.lora)

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
        copied = folder == self.checkpoints
        if self.separate is not None:
            return self.separate.saver(folder, comm, keep, names, copied)
        leads = comm.rank == self.leader
        files = self.remote_files if copied else None
        return Saver(folder, comm.rank, comm.ranks, keep, names, leads, files)


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
