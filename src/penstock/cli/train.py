"""`penstock train`, which trains a model, and `penstock init`, which writes a config."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.ending import show_ending
from penstock.cli.forecast import (
    describe_placement,
    describe_step,
    measured_forecast,
    prediction,
    print_memory,
)
from penstock.cli.landscape import show_progress
from penstock.cli.options import PRESET_NAMES, ConfigChanges, beginning
from penstock.cli.tables import (
    INTERRUPTED,
    ShownInterrupt,
    counting,
    print_plain,
    progress,
    tell,
    write,
)
from penstock.config import Config, check_config
from penstock.errors import FileError, PenstockError, RunError
from penstock.formats import config_toml
from penstock.formats.config_toml import written_keys
from penstock.ir import Plan
from penstock.plan.search import SearchProgress
from penstock.train.data.corpus import Corpus
from penstock.train.optimizer import describe_rate
from penstock.train.placement import (
    Placement,
    launched_placement,
    precision_on,
    prepare_cpu,
)
from penstock.train.step_paths import describe_paths
from penstock.view.numbers import MICROBATCHES, RANKS, STEPS, count_of, short

if TYPE_CHECKING:
    from penstock.train.before.start import Display, PreparedRun  # loads torch

complete_preset = beginning("config:PRESETS")


def train_command(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A config.toml, or the folder of a run."),
    ] = None,
    changes: ConfigChanges = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Without a config: {PRESET_NAMES}. [dim]\\[default: tiny][/]",
            autocompletion=complete_preset,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the newest good checkpoint."),
    ] = False,
    resume_if_any: Annotated[
        bool,
        typer.Option(
            "--resume-if-any", help="Continue if there is a checkpoint, else start."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything, show the plan, memory and speed, but do not train.",
        ),
    ] = False,
    sample: Annotated[
        int,
        typer.Option(min=0, help="Tokens of the sample at the end; 0 for no sample."),
    ] = 200,
) -> None:
    """Train a model. Without a config: a small Llama on Python's own source, on four local workers, in a minute.

    A rank is one process or several: --set mesh.tensor=2 divides its layers between two processes, --set mesh.shard=2
    divides its weights between two processes while they are not in use.

    Example: penstock train config.toml --set model.layers=24 --set schedule.name=hanayo
    """
    # These load torch.
    from penstock.runtime.process.launch import under_launcher
    from penstock.train.before.start import (
        check_sources,
        check_start,
        find_run,
        has_checkpoint,
        kept_plan,
        locking,
        plan_and_prepare,
    )
    from penstock.train.launch import ended_by_signals, way_on
    from penstock.training import start_workers

    if under_launcher():
        if dry_run:
            raise RunError(
                "--dry-run makes its forecast in a single process, not under torchrun or another launcher\n"
                "  start penstock train without it"
            )
        # Whether the folder may have checkpoints is known when the ranks have met.
        find = partial(find_run, source, preset, changes or [], exists=True)
        _as_a_rank(find, source, changes or [], resume, resume_if_any, sample)
        return
    exists = resume or resume_if_any
    config, folder = find_run(source, preset, changes or [], exists)
    resume = resume or (resume_if_any and has_checkpoint(config, folder))
    given = written_keys(source, changes or [])
    prepare_cpu(config)
    check_sources(config)
    check_start(config, folder, resume)
    kept = kept_plan(config, folder, changes or []) if resume else None
    with locking() as lock, ended_by_signals(partial(tell, "ended")):
        claimed = None if dry_run else lock
        prepared = plan_and_prepare(
            config, folder, resume, claimed, given, kept, _display()
        )
        config, plan, placement = prepared.config, prepared.plan, prepared.placement
        _announce(config, plan, folder, prepared.corpus, placement)
        if resume:
            _tell_if_finished(folder, config.run.steps)
        if dry_run:
            _print_dry_run(prepared)
            return
        if config.run.forecast:
            tell("predicted", prediction(config, plan, placement, folder))
        try:
            verdict = start_workers(
                config,
                plan,
                placement,
                folder,
                resume,
                partial(tell, "stopping"),
                partial(tell, "event"),
            )
        except KeyboardInterrupt:
            tell("ended", way_on(folder))
            raise
        show_ending(folder, verdict, sample)
    if verdict.interrupted:
        raise ShownInterrupt(INTERRUPTED)


def init_command(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path(
        "config.toml"
    ),
    preset: Annotated[
        str, typer.Option(help=f"{PRESET_NAMES}.", autocompletion=complete_preset)
    ] = "tiny",
    changes: ConfigChanges = None,
) -> None:
    """Write a config with a comment on every value.

    Example: penstock init config.toml --preset gpt2
    """
    if file.exists():
        raise FileError(f"{file} already exists\n  name another file")
    changed = config_toml.apply_changes(config_toml.preset(preset), changes or [])
    title = f"penstock train {file}; from the preset {preset}"
    write(file, config_toml.dump_config(check_config(changed), title))


# ---------------------------------------------------------------- before the workers start
@contextmanager
def _show_planning() -> Iterator[Callable[[SearchProgress], None]]:
    """Show the progress of a search for a plan."""
    with progress("planning") as status:
        yield show_progress(status)


def _display() -> Display:
    """Return what shows the preparation of a run in the terminal."""
    from penstock.train.before.start import Display

    timing = partial(progress, "timing a layer")
    return Display(timing, _show_planning, partial(counting, "reading text"))


def _announce(
    config: Config,
    plan: Plan,
    folder: Path,
    corpus: Corpus,
    placement: Placement,
) -> None:
    """Print what will be trained, how and where, with one line for each topic."""
    # These load torch.
    from penstock.train.after.generate import parameter_count
    from penstock.train.job import model_sizes
    from penstock.train.weights import model_name

    sizes = model_sizes(config)
    schedule = plan.schedule
    ranks = count_of(schedule.ranks, *RANKS)
    microbatches = count_of(len(schedule.microbatches), *MICROBATCHES)
    layers = " ".join(map(str, plan.partition))
    tokens = config.data.batch * config.data.tokens
    tell(
        "model",
        f"{model_name(sizes)}, {sizes.layers} layers of width {sizes.width}, "
        f"{parameter_count(sizes):,} parameters",
    )
    tell(
        "schedule",
        f"{plan.name}: {ranks}, {microbatches} of "
        f"{config.rows} x {config.data.tokens} tokens, layers {layers}",
    )
    paths = describe_paths(plan, config.paths)
    if paths:
        tell("paths", paths)
    if config.mesh.size > 1:
        tell("mesh", config.mesh.over(schedule.ranks))
    tell("data", _describe_text(corpus, config))
    tell("tokenizer", config.data.tokenizer)
    steps = count_of(config.run.steps, *STEPS)
    tell(
        "step", f"{tokens:,} tokens; {steps}, {precision_on(config, placement.device)}"
    )
    encrypted = bool(config.run.listen)
    tell("rate", describe_rate(config))
    tell("workers", describe_placement(placement, encrypted))
    tell("folder", str(folder))


def _tell_if_finished(folder: Path, steps: int) -> None:
    """Say that a run has all its steps already, and how it trains more of them."""
    from penstock.train.launch import saved_step

    saved = saved_step(folder)
    if saved >= steps:
        tell(
            "finished",
            f"step {saved} is saved and run.steps = {steps}, so nothing is left to train; --set run.steps=N goes on",
        )


def _describe_text(corpus: Corpus, config: Config) -> str:
    """Describe the amount of text, and how often the run will read it."""
    epochs = config.run.steps * config.data.batch / corpus.trained
    said = ""
    tally = corpus.tally
    if tally is not None:
        lost = ""
        if tally.cut or tally.left_out:
            lost = (
                f" ({tally.cut:,} cut at {corpus.length} tokens, "
                f"{tally.left_out:,} left out because nothing of them would be learned)"
            )
        said = f"{tally.conversations:,} conversations{lost}, {tally.learned:,} tokens to learn of "
    return (
        f"{said}{corpus.token_count:,} tokens: {corpus.trained:,} sequences to train on, "
        f"{corpus.held_out:,} held out; {config.run.steps} steps are {short(epochs, 3)} epochs"
    )


def _print_dry_run(prepared: PreparedRun) -> None:
    """Print the memory and the speed that a run would have; refuse it if this machine has too little memory."""
    from penstock.train.before.capacity import check_memory
    from penstock.train.job import model_sizes

    config, plan, placement = prepared.config, prepared.plan, prepared.placement
    forecast = measured_forecast(config, plan, placement, profiles=prepared.profiles)
    print_memory(forecast, config)
    print_plain(f"predicted: {describe_step(forecast, config)}")
    check_memory(config, plan, model_sizes(config), placement)


# ---------------------------------------------------------------- meanwhile
def _as_a_rank(
    find: Callable[[], tuple[Config, Path]],
    source: Path | None,
    changes: list[str],
    resume: bool,
    resume_if_any: bool,
    sample: int,
) -> None:
    """Run as one of torchrun's workers. Rank 0 finds the run and prepares its folder while the others wait."""
    # These load torch.
    from penstock.crew.files import (
        agree_on_restarts,
        can_resume,
        hear_run,
        settle_folders,
    )
    from penstock.runtime.process.launch import after_first, meet
    from penstock.train.before.start import (
        Lock,
        check_unused,
        kept_plan,
        plan_and_prepare,
    )
    from penstock.train.checkpoints.checkpoint import (
        CHECKPOINTS_FOLDER,
        is_complete_checkpoint,
        step_name,
    )
    from penstock.train.launch import forget_previous_end, join, restarted, run_worker

    # Rank 0 looks before it meets the others, so that its error ends the run at once.
    found = find() if os.environ["RANK"] == "0" else None
    meeting = meet()
    config, folder = hear_run(meeting, found, source, changes)
    prepare_cpu(config)
    comm = join(config, launched_placement(config), meeting)
    agree_on_restarts(comm)
    if resume_if_any and not resume:
        resume = can_resume(comm, config, folder)
    lock = Lock()

    def prepare() -> None:
        if not resume and not restarted():
            check_unused(folder)
        first_resume = resume and not restarted()
        kept = kept_plan(config, folder, ()) if resume or restarted() else None
        given = written_keys(source, changes)
        prepared = plan_and_prepare(
            config, folder, first_resume, lock, given, kept, _display(), comm.ranks
        )
        if not restarted():
            forget_previous_end(folder)
        _announce(
            prepared.config,
            prepared.plan,
            folder,
            prepared.corpus,
            prepared.placement,
        )

    try:
        after_first(comm, prepare)
        separate = settle_folders(
            comm, config, folder, resume, partial(tell, "folders")
        )
    except PenstockError:
        lock.clean_up()
        raise
    verdict = run_worker(str(folder), resume, separate)
    if verdict.error:
        raise RunError(verdict.text)
    # A rank that was asked to stop exits with 0: torchrun would restart all ranks after any other code.
    if comm.rank == 0:
        # If ranks with separate folders were asked to stop, this folder has only a share of the model.
        last = folder / CHECKPOINTS_FOLDER / step_name(verdict.step)
        show_ending(folder, verdict, sample if is_complete_checkpoint(last) else 0)
