"""What `penstock train` does, in one process or as one of torchrun's ranks: it prepares a run, trains and tells.

before   the model, the plan, the data, where the processes run, and how long a step will take
after    the report, a sample, and how the run ended

Everything here may load torch.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from penstock.cli.landscape import planning
from penstock.cli.model import REPORT, SAMPLE
from penstock.cli.sources import ModelSource
from penstock.cli.terminal import (
    INTERRUPTED,
    ShownInterrupt,
    console,
    counting,
    print_plain,
    print_table,
    progress,
    tell,
    write,
)
from penstock.config import Config, reasons_against_recording
from penstock.cost import RowProfiles
from penstock.crew.files import (
    agree_on_restarts,
    can_resume,
    hear_run,
    settle_folders,
)
from penstock.errors import PenstockError, RunError
from penstock.formats.config_toml import written_keys
from penstock.ir import Plan
from penstock.runtime.process.launch import after_first, meet
from penstock.train.after.generate import (
    continues_texts,
    generate_text,
    open_trained,
    parameter_count,
)
from penstock.train.after.report import (
    Summary,
    list_comparisons,
    list_events,
    render_report,
    summarize_run,
)
from penstock.train.before.capacity import check_memory
from penstock.train.before.forecast import (
    Forecast,
    forecast,
    known_forecast,
    measure_forecast,
)
from penstock.train.before.start import (
    Display,
    Lock,
    PreparedRun,
    check_sources,
    check_start,
    check_unused,
    find_run,
    has_checkpoint,
    kept_plan,
    locking,
    plan_and_prepare,
)
from penstock.train.checkpoints.checkpoint import (
    CHECKPOINTS_FOLDER,
    faults,
    step_name,
)
from penstock.train.data.corpus import Corpus, describe_use, read_prompt
from penstock.train.history import read_rows
from penstock.train.job import Verdict, model_sizes
from penstock.train.launch import (
    ended_by_signals,
    forget_previous_end,
    join,
    restarted,
    run_worker,
    saved_step,
    way_on,
)
from penstock.train.optimizer import describe_rate
from penstock.train.placement import (
    Placement,
    launched_placement,
    precision_on,
    prepare_cpu,
)
from penstock.train.step_paths import describe_paths
from penstock.train.weights import model_name
from penstock.training import start_workers
from penstock.view.numbers import (
    MICROBATCHES,
    RANKS,
    STEPS,
    count_of,
    short,
    write_range,
    write_size,
    write_time,
)

# The time with launches over the time of the kernels; less than this is not worth a hint.
MIN_LAUNCH_OVERHEAD = 1.1
SAMPLE_TOKENS = 200


def train(model: ModelSource, resume: bool, resume_if_any: bool, dry_run: bool) -> None:
    """Train a run with workers of its own, or only say how it would be."""
    source, preset, changes = model.file, model.preset, model.changes
    config, folder = find_run(source, preset, changes, resume or resume_if_any)
    resume = resume or (resume_if_any and has_checkpoint(config, folder))
    given = written_keys(source, changes)
    prepare_cpu(config)
    check_sources(config)
    check_start(config, folder, resume)
    kept = kept_plan(config, folder, changes) if resume else None
    with locking() as lock, ended_by_signals(partial(tell, "ended")):
        claimed = None if dry_run else lock
        prepared = plan_and_prepare(
            config, folder, resume, claimed, given, kept, _display()
        )
        _announce(prepared, folder)
        config, plan, placement = prepared.config, prepared.plan, prepared.placement
        saved = saved_step(folder) if resume else 0
        if saved >= config.run.steps:
            tell(
                "finished",
                f"step {saved} is saved and run.steps = {config.run.steps}, so nothing is left to train; "
                "--set run.steps=N goes on",
            )
        if dry_run:
            _print_dry_run(prepared)
        if dry_run or saved >= config.run.steps:
            return
        if config.run.asks("forecast"):
            tell("predicted", _prediction(config, plan, placement, folder))
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
        _show_ending(folder, verdict)
    if verdict.interrupted:
        raise ShownInterrupt(INTERRUPTED)


def train_as_rank(model: ModelSource, resume: bool, resume_if_any: bool) -> None:
    """Train as one of torchrun's workers. Rank 0 finds the run and prepares its folder while the others wait."""
    source, preset, changes = model.file, model.preset, model.changes
    found = None
    if os.environ["RANK"] == "0":
        # Before it meets the others, so that its error ends the run at once. Whether the folder may have checkpoints is
        # known when the ranks have met.
        found = find_run(source, preset, changes, exists=True)
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
        _announce(prepared, folder)

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
        _show_ending(folder, verdict, whole=not faults(last, quick=True))


# ---------------------------------------------------------------- before the workers start
def _display() -> Display:
    """Return what shows the preparation of a run in the terminal."""
    timing = partial(progress, "timing a layer")
    return Display(timing, planning, partial(counting, "reading text"))


def _announce(prepared: PreparedRun, folder: Path) -> None:
    """Print what will be trained, how and where, with one line for each topic."""
    config, plan = prepared.config, prepared.plan
    sizes = model_sizes(config)
    schedule = plan.schedule
    ranks = count_of(schedule.ranks, *RANKS)
    microbatches = count_of(len(schedule.microbatches), *MICROBATCHES)
    layers = " ".join(map(str, plan.partition))
    tokens = config.data.global_batch * config.data.seq_len
    tell(
        "model",
        f"{model_name(sizes)}, {sizes.layers} layers of width {sizes.width}, "
        f"{parameter_count(sizes):,} parameters",
    )
    tell(
        "schedule",
        f"{plan.name}: {ranks}, {microbatches} of "
        f"{config.rows} x {config.data.seq_len} tokens, layers {layers}",
    )
    paths = describe_paths(plan, config.paths)
    if paths:
        tell("paths", paths)
    if config.parallel.size > 1:
        tell("mesh", config.parallel.over(schedule.ranks))
    tell("data", _describe_text(prepared.corpus, config))
    tell("tokenizer", config.data.tokenizer)
    steps = count_of(config.run.steps, *STEPS)
    tell(
        "step",
        f"{tokens:,} tokens; {steps}, {precision_on(config, prepared.placement.device)}",
    )
    encrypted = bool(config.elastic.listen)
    tell("rate", describe_rate(config))
    tell("workers", describe_placement(prepared.placement, encrypted))
    tell("folder", str(folder))


def _describe_text(corpus: Corpus, config: Config) -> str:
    """Describe the amount of text, and how often the run will read it."""
    epochs = config.run.steps * config.data.global_batch / corpus.trained
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
    config, plan, placement = prepared.config, prepared.plan, prepared.placement
    forecast = _measured_forecast(config, plan, placement, profiles=prepared.profiles)
    _print_memory(forecast, config)
    print_plain(f"predicted: {describe_step(forecast, config)}")
    check_memory(config, plan, model_sizes(config), placement)


# ---------------------------------------------------------------- what a step will take
def describe_placement(placement: Placement, encrypted: bool = False) -> str:
    """Describe where the processes of a run will be, and how they connect."""
    machine = placement.machine
    processes = count_of(placement.processes, "process", "processes")
    if placement.neighbours != placement.processes:
        processes += f", {placement.neighbours} of them here"
    if placement.device == "cpu":
        reason = ""
        if placement.wanted == "auto" and machine.gpus:
            gpus = count_of(machine.gpus, "GPU is", "GPUs are")
            reason = f" ({gpus} too few)"
        cores = count_of(machine.cores, "CPU core", "CPU cores")
        links = "encrypted links" if encrypted else "gloo"
        return f"{processes} on {cores}, {links}{reason}"
    where = f"{processes} on {count_of(machine.gpus, 'GPU', 'GPUs')}"
    if not placement.shares_gpus:
        return f"{where}, NCCL"
    if placement.processors == placement.neighbours:
        backend = "NCCL" if machine.nccl_shares_gpus else "penstock_ipc"
        return f"{where}, {backend}, side by side"
    workers = -(-placement.neighbours // machine.gpus)
    return (
        f"{where}, penstock_ipc, in turns "
        f"(side by side with penstock lab testbed --workers {workers})"
    )


def _measured_forecast(
    config: Config,
    plan: Plan,
    placement: Placement,
    folder: Path | None = None,
    profiles: RowProfiles | None = None,
) -> Forecast:
    """Predict a step. The pieces of the plan are measured while the terminal shows it.

    The profiles by which a search has chosen the plan will do on a GPU, where measurements repeat. On cores they
    differ from one to the next, and the plan that is the fastest of hundreds by one of them promises too much.
    """
    if profiles is not None and placement.device == "cuda":
        profile = profiles.at(config.rows)
        return forecast(config, plan, profile, placement.processors)
    with progress("timing a layer"):
        return measure_forecast(config, plan, placement, folder)


def _prediction(config: Config, plan: Plan, placement: Placement, folder: Path) -> str:
    """Describe the forecast of a run. A failed forecast never blocks a run."""
    try:
        forecast = known_forecast(folder, config, plan)
        if forecast is None or (forecast.searched and placement.device == "cpu"):
            forecast = _measured_forecast(config, plan, placement, folder)
        return describe_step(forecast, config) + hint(forecast, config)
    except PenstockError as error:
        return f"not known: {str(error).splitlines()[0]}"


def _print_memory(forecast: Forecast, config: Config) -> None:
    """Print the memory of each rank; of several processes, that of the fullest."""
    owner = "rank" if config.parallel.size == 1 else "process of rank"
    heads = (owner, "weights, gradients, optimizer", "activations at most", "together")
    rows = []
    for rank, weights in enumerate(forecast.weights):
        activations = forecast.activations[rank]
        sizes = (weights, activations, weights + activations)
        rows.append((str(rank), *map(write_size, sizes)))
    print_table(heads, rows)


def describe_step(forecast: Forecast, config: Config) -> str:
    """Describe the speed and the time of a step."""
    step = write_time(forecast.seconds, digits=3)
    makespan = write_time(forecast.timeline.makespan, digits=3)
    optimizer = write_time(forecast.optimizer, digits=3)
    passes = f"{forecast.passes} passes" if forecast.passes > 1 else "a pass"
    details = [f"bubble {forecast.timeline.bubble:.1%}"]
    processes = forecast.timeline.schedule.ranks * config.parallel.size
    if forecast.processors < processes:
        workers = "ranks" if config.parallel.size == 1 else "processes"
        details.append(f"{processes} {workers} on {forecast.processors} processors")
    full = ""
    if forecast.full is not None:
        seconds = write_time(forecast.full.seconds, digits=3)
        between = write_range(*forecast.full.range)
        full = f"; a step that runs all parts {seconds} ({between})"
    gather = ""
    if forecast.gather:
        gather = f"{write_time(forecast.gather, digits=3)} to gather weights, "
    return (
        f"{forecast.speed:,.0f} tokens/s, {step} per step ({write_range(*forecast.range)}): "
        f"{gather}{passes} of {makespan} ({', '.join(details)}), optimizer and the rest {optimizer}"
        f"{full}"
    )


def hint(forecast: Forecast, config: Config) -> str:
    """Return a line that suggests `run.cuda_graphs` if launches slow a GPU down; else ""."""
    if forecast.launch < MIN_LAUNCH_OVERHEAD:
        return ""
    if config.run.cuda_graphs != "false" or reasons_against_recording(config):
        return ""
    return (
        "\n          launching kernels takes longer than running them; a step would be "
        f"{forecast.launch:.1f} times as fast with --set run.cuda_graphs=true"
    )


# ---------------------------------------------------------------- afterwards
def _show_ending(folder: Path, verdict: Verdict, whole: bool = True) -> None:
    """Write the report, and print how the run ended; in a terminal, also a sample if the `whole` model is here."""
    if verdict.stopped and not verdict.step:
        steps = len(read_rows(folder))
        moment = "before the first step"
        if steps:
            moment = f"after {steps} steps, before the first checkpoint"
        print_plain(f"stopped {moment}\n{way_on(folder)}")
        return
    summary = summarize_run(folder)
    text = ""
    if whole and console().is_terminal:
        trained = open_trained(folder)
        if continues_texts(trained.sizes):
            text = generate_text(trained, read_prompt(folder), SAMPLE_TOKENS)
    if text:
        write(folder / SAMPLE, text, quiet=True)
    else:
        (folder / SAMPLE).unlink(missing_ok=True)
    report = render_report(summary, folder.resolve().name, text)
    write(folder / REPORT, report, quiet=True)
    print_plain("\n".join(_ending_lines(folder, verdict, summary)))
    if text:
        console().rule("a sample", style="dim")
        sys.stdout.write(text + "\n")


def _ending_lines(folder: Path, verdict: Verdict, summary: Summary) -> list[str]:
    """Return the results of a run, and where its files are."""
    first = summary.rows[0]
    last = summary.rows[-1]
    ending = "stopped after" if verdict.stopped else "trained"
    seconds = sum(row.seconds for row in summary.rows)
    loss = f"loss {first.loss:.4f} -> {last.loss:.4f}"
    if summary.evaluation is not None:
        loss += f", held-out loss {summary.evaluation:.4f}"
    lines = [
        f"{ending} {verdict.step} steps in {write_time(seconds, digits=3)}: {loss}, "
        f"{summary.speed:,.0f} tokens/s"
    ]
    lines += list_comparisons(summary)
    for kind in summary.kinds:
        source = "predicted"
        if kind.forecast is None:
            source = "simulated from the times of its actions"
        step = f"step {kind.step}"
        if len(summary.kinds) > 1:
            step = f"{step}, a {kind.name},"
        for predicted, measured in kind.timelines:
            lines.append(
                f"{step} had a bubble of {measured.bubble:.1%}, "
                f"{source} {predicted.bubble:.1%}"
            )
    lines += list_events(summary)
    lines += [f"read from   {line}" for line in describe_use(summary.sources)]
    checkpoint = folder / CHECKPOINTS_FOLDER / step_name(verdict.step)
    lines.append(f"report      {folder / REPORT}")
    lines.append(f"checkpoint  {checkpoint}")
    if verdict.stopped:
        lines.append(f"continue    penstock train {folder} --resume")
    return lines
