"""One process of a run: under our own launcher, or under torchrun. It finds all it needs in the run's folder.

    RUN/config.toml    what to do          RUN/stop          somebody asks all to stop after this step
    RUN/plan.json      in which order      RUN/ranks/3.pid   which process of the system is rank 3 of the launcher

SIGINT and SIGTERM ask for the same as the file: the step is finished, a checkpoint is saved, all ranks leave.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from errno import ENOSPC
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

import torch

from penstock.config import Config
from penstock.errors import PeerLostError, PenstockError, RunError, StuckError
from penstock.formats.config_toml import read_config
from penstock.formats.plan_json import read_plan
from penstock.models.tensor import check_shares
from penstock.runtime import ProcessComm, finish, init
from penstock.runtime.process.launch import hear_signals
from penstock.runtime.torch_internals import (
    is_connection_error_text,
    is_memory_error_text,
)
from penstock.train.checkpoint import newest
from penstock.train.data.corpus import open_corpus
from penstock.train.data.tokenizer import kept_tokenizer, tokenizer_of
from penstock.train.history import ROOM
from penstock.train.hub import read_sizes, settle_tokenizer
from penstock.train.loop import Job, Trainer, WatchRow
from penstock.train.weights import Sizes, sizes_of

CONFIG_FILE, PLAN_FILE, STOP_FILE, PIDS_FOLDER, FAILURE_FILE = (
    "config.toml",
    "plan.json",
    "stop",
    "ranks",
    "failure.json",
)
FULL_FILE = "full"  # a rank had too little memory
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a rank ended: after which step; asked to stop; or by a mistake of the user's, which a restart cannot mend."""

    step: int = 0
    stopped: bool = False
    error: str = ""
    text: str = ""


def work(folder: Path, resume: bool, watch: WatchRow | None = None) -> Verdict:
    """Trains as the rank that the environment names. What a restart may mend is raised; what not, returned."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    over = _over(folder) if again else None
    if over is not None:
        return over
    hear_signals()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    saved, trainer = _saved(folder) if resume or again else 0, None
    try:
        trainer, stop = _ready(folder, resume or again, again, watch)
        outcome = trainer.run(stop)
    except (PeerLostError, StuckError):
        raise
    except PenstockError as error:
        _confess(folder, error)
        if (
            trainer is None
        ):  # of this rank alone: the others wait for it, and learn of it when all start again
            raise
        return Verdict(
            error=type(error).__name__, text=str(error)
        )  # most often all ranks have it
    except Exception as error:
        started = trainer is not None and trainer.step > saved
        again_full = (
            ran_out_of_memory(error) and (folder / FULL_FILE).exists()
        )  # twice, so it is no neighbour's doing
        if again_full or (not started and not broken_connection(error)):
            _confess(folder, RunError(_last_words(error, folder, started)))
        elif ran_out_of_memory(error):
            (folder / FULL_FILE).touch()
        raise
    finish()
    return Verdict(outcome.step, outcome.stopped)


def _saved(folder: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    done = newest(folder / "checkpoints")
    return int(done[0].name[5:]) if done else 0


def ran_out_of_memory(error: Exception) -> bool:
    """Whether memory could not be allocated: on a GPU, or by torch or Python on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and is_memory_error_text(str(error))


def broken_connection(error: Exception) -> bool:
    """Whether an error tells of another process that is gone: torch has no type of its own for gloo's."""
    if isinstance(
        error, ConnectionError | EOFError | TimeoutError | torch.distributed.DistError
    ):
        return True
    return isinstance(error, RuntimeError) and is_connection_error_text(str(error))


def _last_words(error: Exception, folder: Path, started: bool) -> str:
    """Why a rank gives up. Anything but memory is a fault of the program, so its trace is worth a report."""
    rank = os.environ.get("RANK", "0")
    if ran_out_of_memory(error):
        return out_of_memory_text(int(rank), error, read_config(folder / CONFIG_FILE))
    when = "during a step" if started else "before its first step"
    trace = "".join(traceback.format_exception(error)).rstrip()
    return (
        f"rank {rank} failed {when}: {type(error).__name__}: {error}\n"
        "  it would fail again, so it was not started again; if nothing here is amiss, please report this:\n\n"
        f"{trace}"
    )


def out_of_memory_text(rank: int, error: Exception, config: Config) -> str:
    """That there is no memory left, and what would help."""
    words = ["fewer data.tokens", "a smaller data.batch or more micro-batches"]
    words += [] if config.run.recompute else ["run.recompute=true"]
    words += ["run.graphs=false"] if config.run.graphs else []
    asked = re.search(r"tried to allocate (\d+) bytes", str(error))
    said = (
        f"it tried to allocate {int(asked[1]) / 1e9:,.1f} GB"
        if asked
        else str(error).partition(". GPU ")[0]
    )
    return f"rank {rank} has no memory left: {said}\n  {', '.join(words)}; `--dry-run` says what a rank will need"


def _confess(folder: Path, error: PenstockError) -> None:
    """Writes down why this rank gives up: a restart would find the same. On a full disk it is a file without words."""
    part = folder / f"{FAILURE_FILE}.part"
    with suppress(OSError):
        try:
            part.write_text(
                json.dumps([type(error).__name__, str(error)]), encoding="utf-8"
            )
            part.replace(folder / FAILURE_FILE)
        except OSError:
            (folder / FAILURE_FILE).touch()


def _over(folder: Path) -> Verdict | None:
    """Whether there is nothing to start again: somebody asked to stop, or a rank has said why it cannot even begin."""
    found = read_failure(folder)
    if found is not None:
        return found
    if (
        folder / STOP_FILE
    ).exists():  # a worker was ended before it could say that it had stopped
        return Verdict(_saved(folder), stopped=True)
    return None


def read_failure(folder: Path) -> Verdict | None:
    """What a rank has written down before it gave up."""
    try:
        words = (folder / FAILURE_FILE).read_text(encoding="utf-8")
        if not words:
            return Verdict(
                error="RunError",
                text=f"cannot write to {folder}: {os.strerror(ENOSPC)}\n  {ROOM}",
            )
        kind, text = json.loads(words)
    except (OSError, ValueError):
        return None
    return Verdict(error=str(kind), text=str(text))


def _ready(
    folder: Path, resume: bool, again: bool, watch: WatchRow | None
) -> tuple[Trainer, Callable[[], bool]]:
    """All that comes before the first step, and who is asked whether to stop."""
    config = read_config(folder / CONFIG_FILE)
    torch.set_num_threads(
        config.run.threads or max(1, (os.cpu_count() or 1) // _neighbours())
    )
    comm = join(config)
    asked = threading.Event()
    _listen(asked)  # not before: a rank that cannot reach the others should end at once
    if again and comm.rank == 0:
        turn = os.environ["TORCHELASTIC_RESTART_COUNT"]
        _log.warning("a worker was lost; restart %s of %d", turn, config.run.restarts)
    _sign(folder, comm.rank)
    job = job_of(folder, config, resume, again)
    stop = folder / STOP_FILE
    return Trainer(
        job, comm, comm.device, watch
    ), lambda: asked.is_set() or (comm.rank == 0 and stop.exists())


def need_gpu(config: Config) -> None:
    """Raises if a run asks for a GPU and there is none."""
    if torch.cuda.is_available():
        return
    if config.run.device == "cuda":
        raise RunError(
            "run.device = cuda, but torch sees no GPU here\n  say auto, or cpu"
        )
    if config.run.graphs:
        raise RunError(
            "run.graphs = true records launches of a GPU, but torch sees none here\n  leave it false"
        )


def join(config: Config) -> ProcessComm:
    """The connection to the others, as the config says: NCCL where every process has a GPU, our own backend where they
    share some, else gloo."""
    need_gpu(config)
    few = (
        config.run.device == "auto"
        and config.mesh.size > 1
        and torch.cuda.device_count() < _neighbours()
    )
    if config.run.device == "cpu" or few:  # the processes of a rank do not share a GPU
        return init("gloo", config.run.patience, "cpu")
    if config.run.device == "cuda":
        gpu = torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        )
        torch.cuda.set_device(gpu)
        return init(None, config.run.patience, gpu)
    return init(None, config.run.patience)


def job_of(
    folder: Path, config: Config, resume: bool = False, fresh: bool = False
) -> Job:
    """The run that a folder describes."""
    config = settle_tokenizer(config)
    plan = read_plan(folder / PLAN_FILE)
    corpus = open_corpus(config.data, cache_of(config, folder))
    return Job(config, plan, model_sizes(config), corpus, folder, resume, fresh)


def model_sizes(config: Config) -> Sizes:
    """Of the model that a config asks for, from its folder if it starts from one."""
    words = tokenizer_of(config.data.tokenizer).vocab
    if config.model.weights:
        sizes = read_sizes(Path(config.model.weights))
        if sizes.vocab < words:
            raise RunError(
                f"the model in {config.model.weights} has {sizes.vocab} words, the tokenizer {words}\n"
                "  data.tokenizer must be the one that it was trained with"
            )
    else:
        sizes = sizes_of(config.model, words, config.data.tokens)
    check_shares(sizes, config.mesh.tensor)
    return sizes


def with_kept_files(config: Config, folder: Path) -> Config:
    """A run's config with what its folder keeps for it, where the files that it names are gone."""
    kept = kept_tokenizer(config.data.tokenizer, folder)
    return replace(config, data=replace(config.data, tokenizer=kept))


def cache_of(config: Config, folder: Path) -> Path:
    """Where its tokens are kept."""
    return (
        Path(config.data.cache).expanduser()
        if config.data.cache
        else folder.parent / "cache"
    )


def _neighbours() -> int:
    """Ranks of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _listen(asked: threading.Event) -> None:
    """A signal asks to stop; it interrupts nothing."""

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see `serve_forks`


def _sign(folder: Path, rank: int) -> None:
    (folder / PIDS_FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / PIDS_FOLDER / f"{rank}.pid").write_text(f"{os.getpid()}\n")


def _end_with_parent() -> None:
    """A worker whose launcher is gone ends too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
