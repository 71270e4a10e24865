"""The verbs of the command line that train: one short function each, added to those of `penstock.cli.app`."""

from __future__ import annotations

import sys
from collections.abc import Collection
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from penstock.cli.ending import SAMPLE, show_ending
from penstock.cli.forecast import (
    describe_placement,
    describe_step,
    forecast_of,
    prediction,
    print_memory,
    tell_if_too_large,
)
from penstock.cli.tables import console, counting, progress, tell, write
from penstock.errors import ConfigError, FileError, PenstockError, RunError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.ir import Plan
    from penstock.train.data.corpus import Corpus
    from penstock.train.lock import Lock
    from penstock.train.placement import Placement

RUNS_FOLDER, DEFAULT_PRESET = Path("runs"), "tiny"
Changes = Annotated[
    Optional[list[str]],
    typer.Option("--set", help="Change a value: section.key=value."),
]
Preset = Annotated[str, typer.Option(help="tiny, llama-150m, llama-1b or gpt2.")]
NoPreset = Annotated[
    Optional[str],
    typer.Option(
        help="Without a config: tiny, llama-150m, llama-1b or gpt2. [dim]\\[default: tiny][/]"
    ),
]
RunFolder = Annotated[
    Path,
    typer.Argument(help="The folder of a run, a checkpoint, or a Hugging Face folder."),
]


def train_command(
    source: Annotated[
        Optional[Path],
        typer.Argument(metavar="[CONFIG]", help="A config.toml, or a run's folder."),
    ] = None,
    changes: Changes = None,
    preset: NoPreset = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest good checkpoint.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show plan, memory and speed; train nothing."),
    ] = False,
    sample: Annotated[
        int, typer.Option(min=0, help="Tokens of the sample at the end; 0: none.")
    ] = 200,
) -> None:
    """Train a model. Without a config: a small Llama on Python's own source, on four local workers, in a minute.

    A rank is one process, or several: --set mesh.tensor=2 shares out layers, --set mesh.shard=2 weights between steps.

    Example: penstock train config.toml --set model.layers=24 --set schedule.name=hanayo
    """
    _needs_torch()
    from penstock.formats.config_toml import written_keys
    from penstock.train.entry import run_worker
    from penstock.train.launcher import (
        avoid_broken_amx,
        ended_by_signals,
        launch,
        under_launcher,
        way_on,
    )
    from penstock.train.lock import locking
    from penstock.train.placement import check_gpus_suffice, uses_gpus

    config, folder = _config(source, preset, changes or [], resume or dry_run)
    given = written_keys(source, changes or [])
    if config.run.precision == "bfloat16" and not uses_gpus(config):
        avoid_broken_amx()
    if under_launcher():
        _as_a_rank(config, folder, resume, sample, given)
        return
    if not dry_run:
        _refuse(config, folder, resume)
    with locking() as lock, ended_by_signals(partial(tell, "ended")):
        config, plan, corpus, placement = _prepared(
            config, folder, resume, None if dry_run else lock, given
        )
        check_gpus_suffice(config, placement)
        _announce(config, plan, folder, corpus, placement)
        if dry_run:
            found = forecast_of(config, plan, placement)
            print_memory(found, config)
            tell_if_too_large(config, plan, placement)
            console().print(
                f"predicted: {describe_step(found, config)}",
                highlight=False,
                soft_wrap=True,
            )
            return
        if config.run.forecast:
            tell("predicted", prediction(config, plan, placement, folder))
        try:
            verdict = launch(
                run_worker,
                folder,
                placement.processes,
                config.run.restarts,
                resume,
                partial(tell, "stopping"),
            )
        except KeyboardInterrupt:
            tell("ended", way_on(folder))
            raise
        show_ending(folder, verdict, sample)


def init_command(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("config.toml"),
    preset: Preset = DEFAULT_PRESET,
    changes: Changes = None,
) -> None:
    """Write a config with a comment on every value.

    Example: penstock init config.toml --preset gpt2
    """
    from penstock.config import check_config
    from penstock.formats.config_toml import apply_changes, dump_config
    from penstock.formats.config_toml import preset as named

    if file.exists():
        raise FileError(f"{file} is there already\n  name another file")
    config = check_config(apply_changes(named(preset), changes or []))
    text = dump_config(config, f"penstock train {file}; from the preset {preset}")
    write(file, text)


def export_command(
    run: RunFolder,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="A new folder.")
    ] = Path("export"),
) -> None:
    """Write a trained model as a Hugging Face folder: config.json and safetensors, which transformers loads.

    Example: penstock export runs/tiny -o tiny-llama
    """
    _needs_torch()
    from penstock.train.after.generate import export_run as write_folder

    trained = write_folder(run, output)
    console().print(
        f"wrote {output}: {trained.path}", highlight=False, markup=False, soft_wrap=True
    )


def generate_command(
    run: RunFolder,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "def ",
    tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="0: the likeliest word each time.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the words that are drawn.")] = 0,
) -> None:
    """Let a trained model go on with a text.

    Example: penstock generate runs/tiny --prompt "import "
    """
    _needs_torch()
    from penstock.train.after.generate import generate_text as go_on
    from penstock.train.after.generate import open_trained

    sys.stdout.write(go_on(open_trained(run), prompt, tokens, temperature, seed) + "\n")


def eval_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    omit: Annotated[
        Optional[list[float]],
        typer.Option(help="Share of the parts to leave out; again for more."),
    ] = None,
    draws: Annotated[int, typer.Option(help="Random subsets of parts.")] = 8,
    batches: Annotated[
        int, typer.Option(help="Batches of held-out text; each sequence counts once.")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Of the subsets that are drawn.")] = 0,
) -> None:
    """Measure a trained model's perplexity on held-out text, also with parts left out; the first part always runs.

    Example: penstock eval runs/tiny --omit 0.25 --omit 0.5
    """
    _needs_torch()
    from penstock.train.after.evaluate import evaluate_run

    with progress("evaluating"):
        found = evaluate_run(run, omit or [], draws, batches, seed)
    tell("text", found.text)
    for row in found.rows:
        spread = f" ± {row.spread:.4g}" if row.way == "random" else ""
        which = f"  parts {' '.join(map(str, row.path))}" if row.way == "best" else ""
        words = f"{row.way:7}{row.kept}/{row.parts} parts  perplexity {row.perplexity:.4g}{spread}"
        console().print(
            f"{words}  {row.ratio:.3f} of the whole{which}", highlight=False
        )


def report_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    output: Annotated[
        Optional[Path], typer.Option("-o", "--output", help="Page to write.")
    ] = None,
) -> None:
    """Write the page of a run: curves, and the predicted timeline of a step above the measured one.

    Example: penstock report runs/tiny
    """
    from penstock.train.after.report import render_report, summarize_run

    sample = run / SAMPLE
    text = sample.read_text(encoding="utf-8") if sample.is_file() else ""
    write(
        output or run / "report.html",
        render_report(summarize_run(run), run.resolve().name, text),
    )


def add_train_commands(app: typer.Typer) -> None:
    """Adds the verbs above to a command line."""
    app.command("train")(train_command)
    app.command("init")(init_command)
    app.command("export")(export_command)
    app.command("generate")(generate_command)
    app.command("report")(report_command)
    app.command("eval")(eval_command)


# ---------------------------------------------------------------- before
def _config(
    source: Path | None, preset: str | None, changes: list[str], exists: bool
) -> tuple[Config, Path]:
    """The config of a file, a run's folder or a preset, and where the run is."""
    from dataclasses import replace

    from penstock.config import check_config
    from penstock.formats.config_toml import apply_changes, read_config
    from penstock.formats.config_toml import preset as named

    inside = source is not None and source.is_dir()
    if source is None:
        config = check_config(apply_changes(named(preset or DEFAULT_PRESET), changes))
    elif preset:
        what = f"--preset {preset} is for a run without a config; {source} says its own"
        raise ConfigError(
            f"{what}\n  write preset = {preset!r} at the top of a config, or leave one of the two out"
        )
    elif inside and not (source / "config.toml").is_file():
        raise FileError(
            f"{source} is not the folder of a run: it has no config.toml\n"
            "  name a run's folder, or a config; `penstock init` writes one"
        )
    else:
        config = read_config(source / "config.toml" if inside else source, changes)
    from penstock.train.checkpoint import newest
    from penstock.train.hub import settle_tokenizer
    from penstock.train.launcher import restarted, under_launcher
    from penstock.train.worker import with_kept_files

    name = (
        source.stem if source is not None and not inside else preset or DEFAULT_PRESET
    )
    if under_launcher() and not inside and not config.run.folder:
        raise ConfigError(
            "under a launcher all ranks must know the folder: --set run.folder=runs/NAME"
        )
    if (
        inside
        and source is not None
        and not any(change.startswith("run.folder") for change in changes)
    ):
        folder = source
    else:
        folder = (
            Path(config.run.folder) if config.run.folder else _new_folder(name, exists)
        )
    if not exists and not restarted() and newest(folder / "checkpoints"):
        raise ConfigError(
            f"{folder} has a run already\n  go on with --resume, or name another run.folder"
        )
    config = settle_tokenizer(
        replace(config, run=replace(config.run, folder=str(folder)))
    )
    said = any(change.strip().startswith("data.tokenizer") for change in changes)
    return (with_kept_files(config, folder) if inside and not said else config), folder


def _new_folder(name: str, exists: bool) -> Path:
    """The first that is free; to go on with, the last that is not."""
    names = [
        RUNS_FOLDER / name,
        *(RUNS_FOLDER / f"{name}-{number}" for number in range(2, 10_000)),
    ]
    used = [folder for folder in names[:1000] if folder.exists()]
    if exists and used:
        return used[-1]
    return next(folder for folder in names if not folder.exists())


def _refuse(config: Config, folder: Path, resume: bool) -> None:
    """What no worker could begin with is said before any starts."""
    from penstock.train.checkpoint import newest
    from penstock.train.hub import weight_files
    from penstock.train.loop import nothing_to_resume
    from penstock.train.placement import check_gpu_exists
    from penstock.train.worker import model_sizes

    check_gpu_exists(config)
    model_sizes(config)
    if config.model.weights:
        weight_files(Path(config.model.weights))
    if resume and not newest(folder / "checkpoints"):
        raise nothing_to_resume(folder / "checkpoints")


def _prepared(
    config: Config,
    folder: Path,
    resume: bool,
    lock: Lock | None,
    given: Collection[str],
) -> tuple[Config, Plan, Corpus | None, Placement]:
    """Plans, reads the text, and writes down what every rank will read; without a lock, text is only looked for."""
    from dataclasses import replace

    from penstock.formats import dump_plan, write_plan
    from penstock.formats.config_toml import dump_config, with_absolute_paths
    from penstock.plan.planner import plan_run
    from penstock.train.capacity import check_memory, check_timing
    from penstock.train.data.corpus import open_corpus, source_files
    from penstock.train.data.tokenizer import keep_tokenizer
    from penstock.train.history import TIMELINE
    from penstock.train.loop import check_resumable
    from penstock.train.placement import decide_placement
    from penstock.train.worker import CONFIG_FILE, PLAN_FILE, cache_of, model_sizes

    with progress("planning"):
        config, plan = plan_run(config, model_sizes(config).layers, given)
    placement = decide_placement(config, plan.schedule.ranks * config.mesh.size)
    if lock is None:
        check_timing(config, model_sizes(config), placement)
        source_files(config.data)
        return config, plan, None, placement
    check_memory(config, plan, model_sizes(config), placement)
    with counting("reading text") as watch:
        corpus = open_corpus(config.data, cache_of(config, folder), watch)
    if resume:
        check_resumable(
            folder / "checkpoints", model_sizes(config), corpus, config.run.seed
        )
    if Path(
        config.schedule.name
    ).suffix:  # of a file: the run keeps its own copy of it, to go on from
        config = replace(
            config, schedule=replace(config.schedule, name=str(folder / PLAN_FILE))
        )
    config = with_absolute_paths(config)
    try:
        lock.claim(folder)
        (folder / CONFIG_FILE).write_text(
            dump_config(config, f"penstock train {folder} --resume"), encoding="utf-8"
        )
        keep_tokenizer(config.data.tokenizer, folder)
    except OSError as error:
        hint = (
            "make room there, or name another run.folder"
            if error.errno == ENOSPC
            else "name another run.folder"
        )
        raise FileError(
            f"cannot write to {folder}: {error.strerror}\n  {hint}"
        ) from None
    if (folder / PLAN_FILE).is_file() and (folder / PLAN_FILE).read_text(
        encoding="utf-8"
    ) != dump_plan(plan):
        (folder / TIMELINE).unlink(missing_ok=True)  # of another schedule
    write_plan(plan, folder / PLAN_FILE)
    return config, plan, corpus, placement


def _announce(
    config: Config,
    plan: Plan,
    folder: Path,
    corpus: Corpus | None,
    placement: Placement,
) -> None:
    """What was picked, a line each."""
    from penstock.train.after.generate import parameter_count
    from penstock.train.worker import model_sizes

    sizes, ranks, mesh = model_sizes(config), plan.schedule.ranks, config.mesh
    tokens = config.data.batch * config.data.tokens
    for name, words in (
        (
            "model",
            f"{config.model.family}, {sizes.layers} layers of {sizes.width}, "
            f"{parameter_count(sizes):,} parameters",
        ),
        (
            "schedule",
            f"{plan.name}: {ranks} ranks, {len(plan.schedule.microbatches)} micro-batches of "
            f"{config.rows} x {config.data.tokens} tokens, layers {' '.join(map(str, plan.partition))}",
        ),
        *([("mesh", mesh.over(ranks))] if mesh.size > 1 else []),
        *([("data", _said_of(corpus, config))] if corpus is not None else []),
        ("tokenizer", config.data.tokenizer),
        (
            "step",
            f"{tokens:,} tokens; {config.run.steps} steps, {config.run.precision}",
        ),
        ("workers", describe_placement(placement)),
        ("folder", str(folder)),
    ):
        tell(name, words)


def _said_of(corpus: Corpus, config: Config) -> str:
    """How much text there is, and how often a run will see it."""
    epochs = config.run.steps * config.data.batch / corpus.trained
    return (
        f"{len(corpus.tokens):,} tokens: {corpus.trained:,} sequences to train on, {corpus.held_out:,} held out; "
        f"{config.run.steps} steps are {epochs:.3g} epochs"
    )


# ---------------------------------------------------------------- meanwhile
def _as_a_rank(
    config: Config, folder: Path, resume: bool, sample: int, given: Collection[str]
) -> None:
    """Under torchrun: rank 0 prepares the folder, the others wait for it; then as a local worker."""
    import os

    from penstock.train.entry import run_worker
    from penstock.train.launcher import after_first, forget_previous_end, restarted
    from penstock.train.lock import Lock
    from penstock.train.placement import launched_placement
    from penstock.train.worker import join

    comm, lock = join(config, launched_placement(config)), Lock()

    def prepare() -> None:
        told, plan, corpus, placement = _prepared(
            config, folder, resume and not restarted(), lock, given
        )
        if not restarted():
            forget_previous_end(folder)
        if plan.schedule.ranks * told.mesh.size != comm.ranks:
            words = told.mesh.over(plan.schedule.ranks)
            raise ConfigError(
                f"the schedule has {words}, but {comm.ranks} were launched"
            )
        _announce(told, plan, folder, corpus, placement)

    try:
        after_first(comm, prepare)
    except PenstockError:
        lock.clean_up()
        raise
    verdict = run_worker(str(folder), resume)
    if verdict.error:
        raise RunError(verdict.text)
    if os.environ["RANK"] == "0":
        show_ending(folder, verdict, sample)


# ---------------------------------------------------------------- screens and files
def _needs_torch() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise RunError(
            "this needs torch, which is not installed: pip install 'penstock[torch]'"
        ) from None
