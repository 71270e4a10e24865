"""Says what a run will take: where its processes run, the time of a step, the memory of each rank."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.tables import print_table, progress
from penstock.config import Config, reasons_against_recording
from penstock.cost import RowProfiles
from penstock.errors import PenstockError
from penstock.ir import Plan
from penstock.train.before.forecast import (
    Forecast,
    forecast,
    known_forecast,
    measure_forecast,
)
from penstock.train.placement import Placement
from penstock.view.numbers import count_of, write_range, write_size, write_time

# The time with launches over the time of the kernels; less than this is not worth a hint.
MIN_LAUNCH_OVERHEAD = 1.1


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
        f"(side by side with penstock testbed --workers {workers})"
    )


def measured_forecast(
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


def prediction(config: Config, plan: Plan, placement: Placement, folder: Path) -> str:
    """Describe the forecast of a run. A failed forecast never blocks a run."""
    try:
        forecast = known_forecast(folder, config, plan)
        if forecast is None or (forecast.searched and placement.device == "cpu"):
            forecast = measured_forecast(config, plan, placement, folder)
        return describe_step(forecast, config) + hint(forecast, config)
    except PenstockError as error:
        return f"not known: {str(error).splitlines()[0]}"


def print_memory(forecast: Forecast, config: Config) -> None:
    """Print the memory of each rank; of several processes, that of the fullest."""
    owner = "rank" if config.mesh.size == 1 else "process of rank"
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
    processes = forecast.timeline.schedule.ranks * config.mesh.size
    if forecast.processors < processes:
        workers = "ranks" if config.mesh.size == 1 else "processes"
        details.append(f"{processes} {workers} on {forecast.processors} processors")
    gather = ""
    if forecast.gather:
        gather = f"{write_time(forecast.gather, digits=3)} to gather weights, "
    return (
        f"{forecast.speed:,.0f} tokens/s, {step} per step ({write_range(*forecast.range)}): "
        f"{gather}{passes} of {makespan} ({', '.join(details)}), optimizer and the rest {optimizer}"
        f"{_describe_full(forecast)}"
    )


def _describe_full(forecast: Forecast) -> str:
    """Describe the time of steps that run all parts, if there are such steps beside others."""
    if forecast.full is None:
        return ""
    full = write_time(forecast.full.seconds, digits=3)
    return f"; a step that runs all parts {full} ({write_range(*forecast.full.range)})"


def hint(forecast: Forecast, config: Config) -> str:
    """Return a line that suggests `run.graphs` if launches slow a GPU down; else ""."""
    if forecast.launch < MIN_LAUNCH_OVERHEAD:
        return ""
    if config.run.graphs != "false" or reasons_against_recording(config):
        return ""
    return (
        "\n          launching kernels takes longer than running them; a step would be "
        f"{forecast.launch:.1f} times as fast with --set run.graphs=true"
    )
