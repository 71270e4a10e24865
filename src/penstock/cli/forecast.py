"""What a run will take, in words: where its processes are, seconds of a step, memory of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.tables import print_table, progress, tell
from penstock.errors import PenstockError
from penstock.train.screen import in_bytes, in_seconds

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.ir import Plan
    from penstock.train.forecast import Forecast
    from penstock.train.placement import Placement

SLOW = 1.1  # times longer than the kernels alone: worth a word


def describe_placement(placement: Placement) -> str:
    """Say where the processes of a run will be."""
    machine = placement.machine
    who = f"{placement.processes} processes"
    if placement.neighbours != placement.processes:
        who += f", {placement.neighbours} of them here"
    if placement.device == "cpu":
        why = ""
        if placement.wanted == "cuda":  # in a dry run
            why = (
                "; run.device = cuda, but torch sees no GPU here: "
                "times are of these cores"
            )
        elif placement.wanted == "auto" and machine.gpus:
            why = f" ({machine.gpus} GPUs are too few)"
        return f"{who} on {machine.cores} CPU cores, gloo{why}"
    where = f"{who} on {machine.gpus} GPUs"
    if not placement.shares_gpus:
        return f"{where}, NCCL"
    if placement.processors == placement.neighbours:
        return f"{where}, penstock_ipc, side by side"
    workers = -(-placement.neighbours // machine.gpus)
    return (
        f"{where}, penstock_ipc, by turns "
        f"(penstock testbed --workers {workers}: side by side)"
    )


def forecast_of(
    config: Config, plan: Plan, placement: Placement, folder: Path | None = None
) -> Forecast:
    """Times the pieces of the model, and keeps what was found in a folder, if there is one."""
    from penstock.formats import write_profile
    from penstock.train.forecast import PROFILE, forecast, profile_run

    with progress("timing a layer"):
        found = profile_run(config, plan, placement)
    if folder is not None:
        write_profile(found, folder / PROFILE)
    return forecast(config, plan, found, placement.processors)


def prediction(config: Config, plan: Plan, placement: Placement, folder: Path) -> str:
    """The forecast of a run in words; that there is none stops no run."""
    from penstock.train.forecast import known_forecast

    try:
        found = known_forecast(folder, config, plan) or forecast_of(
            config, plan, placement, folder
        )
        return describe_step(found, config) + hint(found, config)
    except PenstockError as error:
        return f"not known: {str(error).splitlines()[0]}"


def print_memory(found: Forecast, config: Config) -> None:
    """A line a rank: of its one process, or of the fullest of several."""
    who = "rank" if config.mesh.size == 1 else "process of rank"
    heads = (who, "weights, gradients, optimizer", "activations at most", "together")
    each = enumerate(zip(found.weights, found.activations, strict=True))
    print_table(
        heads,
        [
            (str(rank), *map(in_bytes, (own, held, own + held)))
            for rank, (own, held) in each
        ],
    )


def tell_if_too_large(config: Config, plan: Plan, placement: Placement) -> None:
    """Says so if a run that is only planned here would not fit here."""
    from penstock.train.capacity import why_too_large
    from penstock.train.worker import model_sizes

    refusal = why_too_large(config, plan, model_sizes(config), placement)
    if refusal:
        tell("memory", refusal)


def describe_step(found: Forecast, config: Config) -> str:
    """A step in words."""
    passes = f"{found.passes} passes of " if found.passes > 1 else "a pass of "
    processes, size = found.timeline.schedule.ranks * config.mesh.size, config.mesh.size
    who = "ranks" if size == 1 else "processes"
    shared = (
        f", {processes} {who} on {found.processors} processors"
        if found.processors < processes
        else ""
    )
    shared += ", without the sums inside a rank" if size > 1 else ""
    return (
        f"{found.speed:,.0f} tokens/s, {in_seconds(found.seconds)} a step: {passes}"
        f"{in_seconds(found.timeline.makespan)} (bubble {found.timeline.bubble:.1%}{shared}), optimizer "
        f"{in_seconds(found.optimizer)}"
    )


def hint(found: Forecast, config: Config) -> str:
    """What would make a step shorter, in words: on a GPU its launches, where they take longer than the work."""
    from penstock.config import reasons_against_recording

    if found.launch < SLOW or config.run.graphs or reasons_against_recording(config):
        return ""
    return (
        f"\n          launches take longer than kernels: without them {found.launch:.1f} times as fast; "
        "--set run.graphs=true, if there is memory for it"
    )
