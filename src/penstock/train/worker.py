"""One process of a run, started by our own launcher or by torchrun.

It finds everything it needs in the folder of the run:

    RUN/config.toml    what to do          RUN/stop          asks all ranks to stop after this step
    RUN/plan.json      in which order      RUN/ranks/3.pid   the process id of rank 3

SIGINT and SIGTERM ask for the same as the file RUN/stop: the process finishes its step,
all ranks save a checkpoint, and all leave.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from errno import ENOSPC
from pathlib import Path
from types import FrameType

import torch

from penstock.config import Config, is_recording
from penstock.errors import PeerLostError, PenstockError, RunError, StuckError
from penstock.formats.config_toml import read_config
from penstock.formats.plan_json import read_plan
from penstock.formats.text import put_in_place
from penstock.models import BertConfig, DecoderConfig, EncoderConfig, GPTConfig
from penstock.models.decoder import check_positions
from penstock.models.tensor import check_shares
from penstock.runtime import ProcessComm, finish, init
from penstock.runtime.process.launch import Meeting, end_with_parent, hear_signals
from penstock.runtime.process.machine import own_gpu, use_threads
from penstock.runtime.torch_internals import (
    is_connection_error_text,
    is_memory_error_text,
)
from penstock.train.checkpoint import CHECKPOINTS_FOLDER, newest, step_of, sweep
from penstock.train.compiling import starting_patience
from penstock.train.crew.events import Event, EventLog
from penstock.train.data.corpus import Corpus, open_validation
from penstock.train.data.masking import masking_of
from penstock.train.data.mixture import open_text
from penstock.train.data.text_files import ProgressBytes
from penstock.train.data.tokenizer import kept_tokenizer, tokenizer_of
from penstock.train.history import METRICS, PLAN_FILE, ROOM, WatchRow, last_step
from penstock.train.hub import read_sizes, settle_model
from penstock.train.job import Job
from penstock.train.loop import Trainer
from penstock.train.own_models import sizes_of, vocab_of
from penstock.train.placement import Placement, check_gpu_exists, launched_placement
from penstock.train.run_source import CONFIG_FILE
from penstock.train.weights import Sizes

# Files in the folder of a run.
STOP_FILE = "stop"
PIDS_FOLDER = "ranks"
FAILURE_FILE = "failure.json"
FULL_FILE = "full"  # A rank ran out of memory once.
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"  # a variable that torchrun sets
# Finds the run in a folder: config, whether to resume, whether to start if there is no checkpoint.
OpenJob = Callable[[Path, Config, bool, bool], Job]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a rank ended.

    `stopped` says that somebody asked it to stop, and `interrupted` that this was not one of
    the run's own callbacks. `error` and `text` describe a failure that a restart cannot fix.
    """

    step: int = 0
    stopped: bool = False
    error: str = ""
    text: str = ""
    interrupted: bool = False


def work(
    folder: Path,
    resume: bool,
    watch: WatchRow | None = None,
    open_job: OpenJob | None = None,
) -> Verdict:
    """Train as the rank that the environment names.

    Raises errors that a restart may fix; returns the others. `open_job` finds the run in the folder.
    """
    hear_signals()
    again = restarted()
    if again:
        earlier = _earlier_verdict(folder)
        if earlier is not None:
            return earlier
    threading.Thread(target=end_with_parent, daemon=True).start()
    saved = saved_step(folder) if resume or again else 0
    done, ended = last_step(folder), _last_sign(folder)
    trainer: Trainer | None = None

    def ready() -> None:
        if again and trainer is not None and trainer.leads:
            _note_restart(folder, trainer, done, time.time() - ended)

    try:
        trainer, stop = _prepare(
            folder, resume or again, again, watch, open_job or job_of
        )
        outcome = trainer.run(stop, ready)
    except (PeerLostError, StuckError):
        raise
    except PenstockError as error:
        write_failure(folder, error)
        if trainer is None:
            # Only this rank knows. The others wait for it, and read the failure when the
            # launcher starts all of them again.
            raise
        # Most often all ranks have the same error. This process waits until they have ended; if one of them crashes
        # instead, the launcher must be able to end this one.
        hear_signals()
        return Verdict(error=type(error).__name__, text=str(error))
    except Exception as error:
        started = trainer is not None and trainer.step > saved
        note_crash(folder, error, started)
        raise
    finish()
    return Verdict(outcome.step, outcome.stopped, interrupted=outcome.interrupted)


def restarted() -> bool:
    """Whether the launcher started this process to replace one that died."""
    return int(os.environ.get(RESTART_COUNT, "0")) > 0


def _last_sign(folder: Path) -> float:
    """When the last finished step was written down; now if none was."""
    with suppress(OSError):
        return (folder / METRICS).stat().st_mtime
    return time.time()


def _note_restart(folder: Path, trainer: Trainer, done: int, seconds: float) -> None:
    """Write down that all workers have started again, and how far they went back from the `done` steps."""
    step, ranks = trainer.step, range(trainer.comm.ranks)
    text = "a worker was lost, so all started again"
    event = Event(
        step,
        "restart",
        round(max(seconds, 0.0), 3),
        text,
        tuple(ranks),
        back=max(done - step, 0),
    )
    EventLog(folder, resume=True).put(event)


# ---------------------------------------------------------------- failures
def note_crash(folder: Path, error: Exception, started: bool) -> None:
    """Write down a crash that would repeat, so that the launcher gives up.

    A rank that runs out of memory may try once more, because a neighbour may have used
    the memory.
    """
    full = ran_out_of_memory(error)
    full_again = full and (folder / FULL_FILE).exists()
    would_repeat = not started and not broken_connection(error)
    if full_again or would_repeat:
        write_failure(folder, RunError(_crash_text(error, folder, started)))
    elif full:
        (folder / FULL_FILE).touch()


def saved_step(folder: Path) -> int:
    """The step of the newest checkpoint, or 0."""
    checkpoints = newest(folder / CHECKPOINTS_FOLDER)
    return step_of(checkpoints[0]) if checkpoints else 0


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: on a GPU, or on the CPU in torch or Python."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and is_memory_error_text(str(error))


def broken_connection(error: Exception) -> bool:
    """Whether an error says that another process is gone."""
    kinds = ConnectionError | EOFError | TimeoutError | torch.distributed.DistError
    if isinstance(error, kinds):
        return True
    return isinstance(error, RuntimeError) and is_connection_error_text(str(error))


def _crash_text(error: Exception, folder: Path, started: bool) -> str:
    """Why a rank gives up; with the traceback, unless it ran out of memory."""
    rank = os.environ.get("RANK", "0")
    if ran_out_of_memory(error):
        return out_of_memory_text(int(rank), error, read_config(folder / CONFIG_FILE))
    when = "during a step" if started else "before its first step"
    trace = "".join(traceback.format_exception(error)).rstrip()
    return (
        f"rank {rank} failed {when}: {type(error).__name__}: {error}\n"
        "  it would fail again, so it was not restarted; if your files and settings are "
        f"in order, please report this:\n\n{trace}"
    )


def out_of_memory_text(rank: int, error: Exception, config: Config) -> str:
    """Say that a rank has no memory left, and which settings would help."""
    remedies = ["fewer data.tokens", "a smaller data.batch or more micro-batches"]
    if not config.run.recompute:
        remedies.append("run.recompute=true")
    if is_recording(config, torch.cuda.is_available()):
        remedies.append("run.graphs=false")
    message = str(error)
    allocation = re.search(r"tried to allocate (\d+) bytes", message)
    if allocation:
        reason = f"it tried to allocate {int(allocation[1]) / 1e9:,.1f} GB"
    else:
        reason = message.partition(". GPU ")[0]
    return (
        f"rank {rank} has no memory left: {reason}\n"
        f"  {', '.join(remedies)}; `--dry-run` says what a rank will need"
    )


def write_failure(folder: Path, error: PenstockError) -> None:
    """Write down why this rank gives up, because a restart would fail in the same way.

    On a full disk the file is empty; `read_failure` knows what that means, and `tidy_up` removes it.
    """
    text = json.dumps([type(error).__name__, str(error)])
    with suppress(OSError):
        try:
            put_in_place(folder / FAILURE_FILE, text)
        except OSError:
            (folder / FAILURE_FILE).touch()


def read_failure(folder: Path) -> Verdict | None:
    """Return why a rank gave up, if one did."""
    try:
        content = (folder / FAILURE_FILE).read_text(encoding="utf-8")
        if not content:
            reason = os.strerror(ENOSPC)
            text = f"cannot write to {folder}: {reason}\n  {ROOM}"
            return Verdict(error="RunError", text=text)
        kind, text = json.loads(content)
    except (OSError, ValueError):
        return None
    return Verdict(error=str(kind), text=str(text))


def tidy_up(folder: Path) -> None:
    """Remove what is half-written once all workers have ended: checkpoints, and an empty failure."""
    sweep(folder / CHECKPOINTS_FOLDER)
    with suppress(OSError):
        if not (folder / FAILURE_FILE).stat().st_size:
            (folder / FAILURE_FILE).unlink()


def _earlier_verdict(folder: Path) -> Verdict | None:
    """The verdict of the workers before a restart, if there is nothing left to do."""
    failure = read_failure(folder)
    if failure is not None:
        return failure
    if (folder / STOP_FILE).exists():
        # A worker was killed before it could say that it had stopped.
        return Verdict(saved_step(folder), stopped=True, interrupted=True)
    return None


# ---------------------------------------------------------------- before the first step
def _prepare(
    folder: Path,
    resume: bool,
    again: bool,
    watch: WatchRow | None,
    open_job: OpenJob,
) -> tuple[Trainer, Callable[[], bool]]:
    """Return the trainer of this rank, and a function that says whether to stop."""
    config = read_config(folder / CONFIG_FILE)
    placement = launched_placement(config)
    use_threads(placement.threads)
    comm = join(config, placement)
    # Until now a signal ended the process at once, since it could not reach the others.
    asked = threading.Event()
    listen(asked)
    if again and comm.rank == 0:
        restart = os.environ[RESTART_COUNT]
        _log.warning(
            "a worker was lost; restart %s of %d", restart, config.run.restarts
        )
    write_pid(folder, comm.rank)
    job = open_job(folder, config, resume, again)
    stop_file = folder / STOP_FILE

    def stop() -> bool:
        return asked.is_set() or (job.keeps_folder(comm.rank) and stop_file.exists())

    return Trainer(job, comm, comm.device, watch), stop


def join(
    config: Config, placement: Placement, meeting: Meeting | None = None
) -> ProcessComm:
    """Connect to the other processes of a run, at the store of their `meeting` if they have met.

    The backend is NCCL where every process has its own GPU, our own where processes of
    one machine share GPUs, and gloo otherwise.
    """
    check_gpu_exists(config)
    on_gpu = placement.backend is None and placement.wanted == "cuda"
    patience = starting_patience(config, torch.device("cuda" if on_gpu else "cpu"))
    if placement.backend is not None:
        return init(placement.backend, patience, "cpu", meeting)
    if placement.wanted == "cuda":
        gpu = torch.device("cuda", own_gpu())
        torch.cuda.set_device(gpu)
        return init(None, patience, gpu, meeting)
    return init(None, patience, meeting=meeting)


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
    return with_guesses(config, open_text(config.data, cache_of(config, folder), watch))


def validation_of(config: Config, folder: Path) -> Corpus | None:
    """Open the text of data.validation; None without any."""
    corpus = open_validation(config.data, cache_of(config, folder))
    return None if corpus is None else with_guesses(config, corpus)


def with_guesses(config: Config, corpus: Corpus) -> Corpus:
    """Return text with words to guess, if the model is an encoder."""
    if config.model.family != "bert":
        return corpus
    name = config.data.tokenizer
    data = config.data
    masking = masking_of(tokenizer_of(name), name, data.mask, data.segments)
    return replace(corpus, masking=masking, typed=data.segments > 1)


def model_sizes(config: Config) -> Sizes:
    """Return the sizes of a config's model, from its folder if it starts from one."""
    vocab = vocab_of(config)
    folder = config.model.folder
    if folder:
        sizes = read_sizes(Path(folder), config.model.folder_key)
        if isinstance(sizes, DecoderConfig | BertConfig | GPTConfig):
            check_positions(sizes, config.data.tokens)
        if isinstance(sizes, BertConfig | EncoderConfig):
            check_segments(folder, sizes.types, config.data.segments)
        if sizes.vocab < vocab:
            raise RunError(
                f"the model in {folder} has {sizes.vocab} words, the tokenizer {vocab}\n"
                "  data.tokenizer must be the one that the model was trained with"
            )
    else:
        sizes = sizes_of(config.model, vocab, config.data.tokens)
    check_shares(sizes, config.mesh.tensor)
    return sizes


def check_segments(folder: str, types: int, segments: int) -> None:
    """Refuse more segments than the model in a folder can tell apart; one needs no types."""
    if segments > max(types, 1):
        known = f"knows {types} type" if types else "knows no types"
        raise RunError(
            f"the model in {folder} {known} of segments, so it cannot tell {segments} of them apart\n"
            "  set data.segments=1"
        )


def with_kept_files(config: Config, folder: Path) -> Config:
    """Replace files that a run's config names, if they are gone, by the run's copies."""
    tokenizer = kept_tokenizer(config.data.tokenizer, folder)
    return replace(config, data=replace(config.data, tokenizer=tokenizer))


def cache_of(config: Config, folder: Path) -> Path:
    """Return the folder of a run's token cache."""
    if config.data.cache:
        return Path(config.data.cache).expanduser()
    return folder.parent / "cache"


def listen(asked: threading.Event) -> None:
    """Let a signal set an event instead of interrupting the process."""

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)
        # The server of forks blocks SIGINT, and workers inherit that (`serve_forks`).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def write_pid(folder: Path, rank: int) -> None:
    """Write down the process id of a rank."""
    (folder / PIDS_FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / PIDS_FOLDER / f"{rank}.pid").write_text(f"{os.getpid()}\n")
