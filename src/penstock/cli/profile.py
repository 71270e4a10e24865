"""`penstock profile`: measures a model and the links between ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.sources import complete_model, find_model, read_model
from penstock.cli.terminal import (
    MODEL_HELP,
    ConfigChanges,
    JsonFlag,
    option,
    print_json,
    print_table,
    progress,
    tell,
    write,
)
from penstock.config import AUTO, is_recording, precision_of
from penstock.cost import Profile, RowProfiles
from penstock.cost.gpus import analytic_profile, gpu_of
from penstock.cost.network import held_whole
from penstock.cost.profile import MAX_ERROR, error_warning
from penstock.errors import ShapeError, refuse_first
from penstock.formats import config_toml, dump_cluster, dump_row_profiles
from penstock.ir.action import COMPUTING_OPS
from penstock.plan.planner import plan_run
from penstock.train.own_models import config_of
from penstock.train.placement import check_gpu_exists, decide_placement
from penstock.view.numbers import write_size, write_time

if TYPE_CHECKING:
    from penstock.train.before.profile import ProfileRequest  # loads torch


@dataclass(frozen=True, slots=True)
class MeasuringOptions:
    """What is measured, and how exactly."""

    rows: str | None = option(
        None,
        "Micro-batch sizes, such as 1 or 1,2,4. Default: those of the config.",
    )
    gpu: str | None = option(
        None,
        "Measure nothing, but compute the profile of a GPU: v100, a100-40, a100, h100 or h200.",
    )
    ranks: int | None = option(
        None,
        "Ranks on this machine that measure at the same time, then their links and all-reduces. "
        "Default: 1, or as many as a run of the config has at work at once.",
        least=1,
    )
    links: bool = option(
        False,
        "Measure the link of every pair of ranks, for a cluster.toml that --cluster reads.",
        "--links",
    )
    quick: bool = option(
        False,
        "Measure about ten slices in a few seconds, and less exactly.",
        "--quick",
    )

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The numbers of --rows; empty if it was not given."""
        counts = []
        for word in [] if self.rows is None else self.rows.split(","):
            if not word.strip().isdecimal() or int(word) < 1:
                raise ShapeError(
                    f"--rows must be at least 1, or several numbers such as 1,2,4, not {self.rows}"
                )
            counts.append(int(word))
        return tuple(counts)


def profile_command(
    measuring: MeasuringOptions,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help=f"{MODEL_HELP} It is measured as it will run.",
            autocompletion=complete_model,
        ),
    ] = None,
    changes: ConfigChanges = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="The file to write. Default: profile.json, with --links cluster.toml.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Measure a model on this device: one layer over about forty slices, embedding, head, optimizer and links.

    `draw` and `plan` read the file with --cost. Under torchrun, torchrun's ranks do the measuring.

    With --links and without a model it measures hosts: latency and bandwidth of every pair of ranks in both directions,
    and the host, speed and memory of each rank. With --links and a model it measures the model and every link.

    Example: penstock profile config.toml --rows 1,2,4 --quick -o profile.json

    Example: penstock profile llama-150m --set data.seq_len=2048 --ranks 2 -o profile.json

    With --gpu it computes a profile from the data sheet of a GPU instead, for planning without that GPU.

    Example: penstock profile llama-1b --gpu h100 --ranks 8 -o h100.json

    Example: torchrun --nnodes 4 --nproc-per-node 1 ... -m penstock profile --links -o cluster.toml
    """
    rows = measuring.row_counts
    links = measuring.links
    measures_links = links and source is None
    output = output or Path("cluster.toml" if measures_links else "profile.json")
    refuse_first(
        ShapeError,
        (
            source is None and not links,
            "name a model: a config, a Hugging Face folder or config.json, or a preset, as in penstock profile tiny\n"
            "  or measure the links of this machine with --links",
        ),
        (
            source is None and changes,
            "--set changes a config; name a model, or leave --set out",
        ),
        (
            measuring.gpu is not None and links,
            "--gpu computes a profile, --links measures: leave one of them out",
        ),
    )
    if measuring.gpu is not None:
        _write_profiles(_analytic(source, changes, measuring), output, json)
        return
    if measures_links:
        _survey(output, measuring.ranks or 1, json)
        return
    from penstock.train.before.profile import profile_rows  # loads torch

    request, own_rows, processes = _request_of_model(
        source, changes, rows, measuring.quick
    )
    request = replace(request, links=links)
    with progress("measuring") as show:
        profiles = profile_rows(
            request, rows or own_rows, measuring.ranks or processes, show
        )
    if profiles is not None:
        _write_profiles(profiles, output, json)


def _request_of_model(
    source: Path | None,
    changes: list[str] | None,
    rows: tuple[int, ...],
    quick: bool,
) -> tuple[ProfileRequest, tuple[int, ...], int]:
    """Return the request to measure a run's model, the rows that a plan may choose, and how many processes measure."""
    # These load torch.
    from penstock.train.before.profile import request_of
    from penstock.train.before.start import find_run, machine_workload, rows_to_measure
    from penstock.train.job import model_sizes

    found = find_model(source, changes)
    config, _ = find_run(found.file, found.preset, found.changes, exists=True)
    check_gpu_exists(config)
    layers = model_sizes(config).layers
    if config.schedule.kind == AUTO:
        written = config_toml.written_keys(found.file, found.changes)
        workload, placement = machine_workload(config, layers, written)
        rows = rows or tuple(rows_to_measure(workload))
    else:
        config, plan = plan_run(config, layers)
        processes = plan.schedule.ranks * config.parallel.size
        placement = decide_placement(config, processes)
        rows = rows or (config.rows,)
    request = request_of(config, placement, rows[0], quick=quick)
    return request, rows, placement.measurers


def _analytic(
    source: Path | None, changes: list[str] | None, measuring: MeasuringOptions
) -> RowProfiles:
    """Compute the profiles of a model on a known GPU."""
    config, sizes = read_model(source, changes or ())
    gpu = gpu_of(measuring.gpu or "")
    rows = measuring.row_counts or (config.rows if config.passages else 1,)
    profiles = [
        analytic_profile(
            config_of(sizes),
            config.data.seq_len,
            count,
            gpu,
            precision_of(config, on_gpu="bfloat16" in gpu.peak),
            measuring.ranks or 1,
            recorded=is_recording(config, on_gpu=True),
        )
        for count in sorted(set(rows))
    ]
    return RowProfiles(tuple(profiles))


# ---------------------------------------------------------------- links
def _survey(output: Path, ranks: int, json: bool) -> None:
    """Measure the hosts and links, and write a cluster.toml."""
    from penstock.measure.survey import survey  # loads torch

    with progress("measuring links"):
        cluster = survey(ranks)
    if cluster is None:  # this is not rank 0
        return
    write(output, dump_cluster(cluster), quiet=json)
    heads = ("from", "to", "latency", "bandwidth")
    links = [
        (
            source,
            target,
            cluster.latency[source][target],
            cluster.bandwidth[source][target],
        )
        for source, target in permutations(range(len(cluster.nodes)), 2)
    ]
    if json:
        facts = {
            "file": str(output),
            "nodes": [asdict(node) for node in cluster.nodes],
            "links": [dict(zip(heads, link, strict=True)) for link in links],
        }
        print_json(facts)
        return
    rows = [
        (
            str(source),
            str(target),
            write_time(latency, digits=3),
            f"{write_size(bandwidth)}/s",
        )
        for source, target, latency, bandwidth in links
    ]
    nodes = [
        f"rank {rank} {node.site}, speed {node.speed:g}"
        for rank, node in enumerate(cluster.nodes)
    ]
    print_table(heads, rows, "; ".join(nodes))


# ---------------------------------------------------------------- the model
def _write_profiles(profiles: RowProfiles, output: Path, json: bool) -> None:
    """Write profiles, and show how well their curves fit."""
    write(output, dump_row_profiles(profiles), quiet=json)
    if profiles.worst_error > MAX_ERROR:
        tell("WARNING", f"{output}: {error_warning(profiles)}")
    if json:
        print_json(_profile_facts(profiles, output))
        return
    for profile in profiles.measured:
        shown = f"{profile.rows} x {profile.tokens} tokens"
        heads = ("", "op", shown, "form", "worst error", "median error")
        rows = [
            (
                fit["block"],
                fit["op"],
                write_time(fit["seconds"], digits=3),
                fit["form"],
                f"{fit['worst']:.1%}",
                f"{fit['median']:.1%}",
            )
            for fit in _fit_facts(profile)
        ]
        print_table(heads, rows, _notes(profile))


def _profile_facts(profiles: RowProfiles, output: Path) -> dict[str, object]:
    """Return what --json prints: one profile as such, several as a list."""
    first = profiles.measured[0]
    facts: dict[str, object] = {
        "file": str(output),
        **dict(first.model),
        **dict(first.device),
        "worst_error": profiles.worst_error,
        "fits": _fit_facts(first),
    }
    if len(profiles.measured) > 1:
        facts["rows"] = [
            {
                "rows": profile.rows,
                "worst_error": profile.worst_error,
                "fits": _fit_facts(profile),
            }
            for profile in profiles.measured
        ]
    return facts


def _fit_facts(profile: Profile) -> list[dict[str, Any]]:
    """Return how well the curve of each op fits the measured times.

    The time is that of a whole sequence; errors are relative, on points that took no part in the fit.
    """
    blocks = {
        "embedding": profile.embed,
        "layer": profile.layer,
        "head": profile.head,
    }
    facts = []
    for name, block in blocks.items():
        for op in COMPUTING_OPS:
            fit = block.fit(op)
            row = {
                "block": name,
                "op": op.value,
                "form": fit.form,
                "seconds": fit.curve.of(profile.tokens, 0),
                "worst": fit.worst,
                "median": fit.median,
            }
            facts.append(row)
    return facts


def _notes(profile: Profile) -> str:
    """Return the facts under the table of fits."""
    layer = profile.layer
    held_out = sum(point.held_out for point in layer.points)
    fitted = len(layer.points) - held_out
    held = write_size(layer.held, digits=4)
    kept = write_size(layer.kept, digits=4)
    weights = write_size(layer.weights, digits=4)
    update = write_time(layer.update, digits=3)
    errors = (
        f"errors are those on {held_out} held-out points; the fit used {fitted} others"
    )
    if dict(profile.device).get("analytic"):
        errors = f"computed, not measured; errors are those of curves through {fitted} computed points"
    return (
        f"{errors}\n"
        f"a layer holds {held} per token from F to B, and {kept} from I to W; its "
        f"weights, gradients and AdamW state take {weights}, an AdamW update {update}\n"
        f"{_link_note(profile)}"
    )


def _link_note(profile: Profile) -> str:

    network = profile.network
    if not network.serial:
        return (
            "links were not measured, so messages take no time; --ranks 2 measures them"
        )
    latency = network.latency
    bandwidth = network.bandwidth
    note = "links: every pair of ranks has its own"
    if isinstance(latency, float) and isinstance(bandwidth, float):
        note = (
            f"links: latency {write_time(latency, digits=3)}, "
            f"bandwidth {write_size(bandwidth)}/s"
        )
    if isinstance(network.sum_bandwidth, float):
        note += (
            f", and {write_size(network.sum_bandwidth)}/s in all-reduces of all ranks"
        )
    if network.channels == 1:
        note += "; the messages of a rank wait for each other"
    if network.channels == 2:
        note += "; the messages of a rank wait for others in the same direction"
    held = held_whole(network.buffers)
    if held:
        note += f"; buffers hold messages of up to {write_size(held[-1].bytes)}"
    return note
