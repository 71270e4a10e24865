"""`penstock profile`: measures a model and the links between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Optional

import typer

from penstock.cli.options import PRESET_NAMES, ConfigChanges, JsonFlag
from penstock.cli.tables import print_json, print_table, progress, tell, write
from penstock.errors import ShapeError

if TYPE_CHECKING:
    from penstock.cost import Cluster, Profile, RowProfiles
    from penstock.train.profile import ProfileRequest

DEFAULT_TOKENS = 1024

Size = Annotated[Optional[int], typer.Option(rich_help_panel="Model")]


def profile_command(
    source: Annotated[
        Optional[Path],
        typer.Argument(
            metavar="CONFIG",
            help="A config.toml or the folder of a run: measures its model as it will run.",
        ),
    ] = None,
    changes: ConfigChanges = None,
    output: Annotated[
        Optional[Path],
        typer.Option(
            "-o",
            "--output",
            help="The file to write. Default: profile.json, with --links cluster.toml.",
        ),
    ] = None,
    preset: Annotated[
        Optional[str],
        typer.Option(
            help=f"{PRESET_NAMES}; the sizes below change it. [dim]\\[default: tiny][/]",
            rich_help_panel="Model",
        ),
    ] = None,
    width: Size = None,
    layers: Size = None,
    heads: Size = None,
    kv_heads: Size = None,
    inner: Size = None,
    vocab: Size = None,
    hf: Annotated[
        Optional[Path],
        typer.Option(
            help="The folder of a Hugging Face model; its config.json gives the sizes.",
            rich_help_panel="Model",
        ),
    ] = None,
    tokens: Annotated[
        Optional[int], typer.Option(help="Tokens in a sequence. Default: 1024.")
    ] = None,
    rows: Annotated[
        Optional[str],
        typer.Option(
            help="Sequences in a micro-batch, or several numbers such as 1,2,4. "
            "Default: 1, or those of the config."
        ),
    ] = None,
    device: Annotated[
        Optional[str],
        typer.Option(
            help="cpu (the default), cuda, or cuda:1; with several ranks cuda gives each its own GPU."
        ),
    ] = None,
    dtype: Annotated[
        Optional[str],
        typer.Option(
            help="Data type of the weights: float32 (the default), bfloat16 or float16."
        ),
    ] = None,
    autocast: Annotated[
        Optional[str],
        typer.Option(
            help="Compute in this data type instead: bfloat16, the default on GPUs unless --dtype is given."
        ),
    ] = None,
    gpu: Annotated[
        Optional[str],
        typer.Option(
            help="Measure nothing, but compute the profile of a GPU: v100, a100-40, a100, h100 or h200.",
        ),
    ] = None,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs",
            help="On a GPU: measure recorded actions, as with run.graphs = true.",
        ),
    ] = False,
    threads: Annotated[
        Optional[int], typer.Option(help="Threads per rank. Default: torch's choice.")
    ] = None,
    ranks: Annotated[
        Optional[int],
        typer.Option(
            help="Ranks on this machine that measure at the same time, then their links and sums. "
            "Default: 1, or as many as a run of the config has at work at once."
        ),
    ] = None,
    links: Annotated[
        bool,
        typer.Option(
            "--links",
            help="Measure the link of every pair of ranks, for a cluster.toml that "
            "`penstock paths` reads.",
        ),
    ] = False,
    slots: Annotated[
        Optional[int],
        typer.Option(help="With --links: micro-batches that each rank may hold."),
    ] = None,
    rounds: Annotated[
        Optional[int],
        typer.Option(
            help="How many times to measure each point. Default: 6, or 3 with --quick."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Measure about ten slices in a few seconds, and less exactly.",
        ),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Measure a model on this device: one layer over about forty slices, embedding, head, optimizer, links and sums.

    `simulate` and `plan` read the file with --profile. Under torchrun, torchrun's ranks do the measuring.

    With --links it measures hosts instead of a model: latency and bandwidth of every pair of ranks in both directions,
    and the host, speed and memory of each rank. With --links and `-o some.json` it measures the model and every link.

    Example: penstock profile --preset llama-150m --tokens 2048 --ranks 2 --threads 1 -o profile.json

    Example: penstock profile config.toml --rows 1,2,4 --quick -o profile.json

    With --gpu it computes a profile from the data sheet of a GPU instead, for planning without that GPU.

    Example: penstock profile --gpu h100 --preset llama-1b --vocab 32000 --tokens 4096 --ranks 8 --graphs -o h100.json

    Example: torchrun --nnodes 4 --nproc-per-node 1 ... -m penstock profile --links --slots 3 -o cluster.toml
    """
    _check_counts(ranks=ranks, rounds=rounds, threads=threads, slots=slots)
    row_counts = _row_counts(rows)
    sizes = {
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "inner": inner,
        "vocab": vocab,
    }
    given = {name: value for name, value in sizes.items() if value is not None}
    if hf is not None and given:
        options = " ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ShapeError(
            f"--hf already gives the sizes; it cannot be combined with {options}\n"
            "  leave one of them out"
        )
    settings = {
        "preset": preset,
        **given,
        "hf": hf,
        "tokens": tokens,
        "device": device,
        "dtype": dtype,
        "autocast": autocast,
        "graphs": graphs or None,
        "threads": threads,
    }
    if source is not None:
        _refuse_settings(source, settings)
    elif changes:
        raise ShapeError("--set changes a config; name one, or leave --set out")
    from penstock.formats.config_toml import DEFAULT_PRESET

    if gpu is not None:
        if hf is not None or links or slots is not None or source is not None:
            raise ShapeError(
                "--gpu cannot be combined with a config, --hf, --links or --slots\n"
                "  penstock plan config.toml --gpu h100 plans for a config"
            )
        computed = _analytic(
            gpu,
            preset or DEFAULT_PRESET,
            given,
            tokens or DEFAULT_TOKENS,
            row_counts or (1,),
            autocast,
            ranks or 1,
            recorded=graphs,
        )
        _write_profiles(computed, output or Path("profile.json"), json)
        return
    from penstock.train import profile as measuring

    if output is None:
        output = Path("cluster.toml" if links else "profile.json")
    if links and output.suffix != ".json":
        _survey(output, ranks or 1, slots, json)
        return
    if slots is not None:
        raise ShapeError("--slots needs --links, which writes a cluster.toml")
    if source is not None:
        request, config_rows, processes = _request_of_config(
            source, changes or [], quick
        )
        row_counts = row_counts or config_rows
    else:
        length = tokens or DEFAULT_TOKENS
        model = hf or measuring.preset_sizes(preset or DEFAULT_PRESET, length, given)
        request = measuring.ProfileRequest(
            model,
            length,
            1,
            device or "cpu",
            dtype or "float32",
            autocast or _default_autocast(device, dtype),
            threads,
            rounds=measuring.measuring_rounds(quick),
            graphs=graphs,
            quick=quick,
        )
        processes = 1
    request = replace(request, links=links, rounds=rounds or request.rounds)
    with progress("measuring") as status:

        def show(text: str) -> None:
            if status is not None:
                status.update(text)

        profiles = measuring.profile_rows(
            request, row_counts or (request.rows,), ranks or processes, show
        )
    if profiles is not None:
        _write_profiles(profiles, output, json)


def _default_autocast(device: str | None, dtype: str | None) -> str | None:
    """Return the type in which a model computes that has no config, as `train` would compute it."""
    from penstock.config import Config
    from penstock.train.placement import precision_on

    kind = (device or "cpu").partition(":")[0]
    if dtype is not None or precision_on(Config(), kind) == "float32":
        return None
    return "bfloat16"


def _request_of_config(
    source: Path, changes: list[str], quick: bool
) -> tuple[ProfileRequest, tuple[int, ...], int]:
    """Return the request to measure a run's model, the rows that a plan may choose, and how many processes measure."""
    from penstock.config import AUTO
    from penstock.formats.config_toml import written_keys
    from penstock.plan.planner import plan_run
    from penstock.train.auto import machine_workload, rows_to_measure
    from penstock.train.launch import model_sizes
    from penstock.train.placement import check_gpu_exists, decide_placement
    from penstock.train.profile import request_of
    from penstock.train.start import find_run

    config, _ = find_run(source, None, changes, exists=True)
    check_gpu_exists(config)
    layers = model_sizes(config).layers
    if config.schedule.name == AUTO:
        given = written_keys(source, changes)
        workload, placement = machine_workload(config, layers, given)
        rows = tuple(rows_to_measure(workload))
    else:
        config, plan = plan_run(config, layers)
        processes = plan.schedule.ranks * config.mesh.size
        placement = decide_placement(config, processes)
        rows = (config.rows,)
    request = request_of(config, placement, rows[0], quick=quick)
    return request, rows, placement.measurers


def _refuse_settings(source: Path, settings: Mapping[str, object]) -> None:
    """Refuse options that a config decides."""
    given = [name for name, value in settings.items() if value is not None]
    if given:
        options = " ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ShapeError(
            f"{source} decides what is measured; it cannot be combined with {options}\n"
            "  change its values with --set section.key=value"
        )


def _row_counts(text: str | None) -> tuple[int, ...]:
    """Parse --rows; empty if it was not given."""
    if text is None:
        return ()
    counts = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise ShapeError(
                f"--rows must be at least 1, or several numbers such as 1,2,4, not {text}"
            )
        counts.append(int(word))
    return tuple(counts)


def _analytic(
    gpu: str,
    preset: str,
    changes: dict[str, int],
    tokens: int,
    rows: tuple[int, ...],
    autocast: str | None,
    ranks: int,
    recorded: bool,
) -> RowProfiles:
    """Compute the profiles of a preset on a known GPU."""
    from penstock.cost import RowProfiles
    from penstock.cost.gpus import analytic_profile, gpu_of
    from penstock.formats import config_toml

    device = gpu_of(gpu)
    precision = autocast or next(
        name for name in ("bfloat16", "float16") if name in device.peak
    )
    model = replace(config_toml.preset(preset).model, **changes)  # type: ignore[arg-type]
    profiles = [
        analytic_profile(
            model, tokens, count, device, precision, ranks, recorded=recorded
        )
        for count in sorted(set(rows))
    ]
    return RowProfiles(tuple(profiles))


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ShapeError(f"--{name} must be at least 1, not {count}")


# ---------------------------------------------------------------- links
def _survey(output: Path, ranks: int, slots: int | None, json: bool) -> None:
    """Measure the hosts and links, and write a cluster.toml."""
    from penstock.formats import dump_cluster
    from penstock.measure.survey import survey

    with progress("measuring links"):
        cluster = survey(ranks, slots)
    if cluster is None:  # this is not rank 0
        return
    write(output, dump_cluster(cluster), quiet=json)
    if json:
        print_json(
            {
                "file": str(output),
                "nodes": [asdict(node) for node in cluster.nodes],
                "links": [_link_facts(link) for link in _links(cluster)],
            }
        )
    else:
        _print_links(cluster)


class _Link(NamedTuple):
    """A link from one rank to another."""

    source: int
    target: int
    latency: float  # seconds
    bandwidth: float  # bytes per second


def _links(cluster: Cluster) -> list[_Link]:
    """Return the links of all pairs of ranks, in both directions."""
    ranks = range(len(cluster.nodes))
    links = []
    for source in ranks:
        for target in ranks:
            if source != target:
                latency = cluster.latency[source][target]
                bandwidth = cluster.bandwidth[source][target]
                links.append(_Link(source, target, latency, bandwidth))
    return links


def _link_facts(link: _Link) -> dict[str, float]:
    """Return a link as JSON has it."""
    return {
        "from": link.source,
        "to": link.target,
        "latency": link.latency,
        "bandwidth": link.bandwidth,
    }


def _print_links(cluster: Cluster) -> None:
    from penstock.view.numbers import write_size, write_time

    rows = [
        (
            str(link.source),
            str(link.target),
            write_time(link.latency, digits=3),
            f"{write_size(link.bandwidth)}/s",
        )
        for link in _links(cluster)
    ]
    nodes = [
        f"rank {rank} {node.site}, speed {node.speed:g}"
        for rank, node in enumerate(cluster.nodes)
    ]
    print_table(("from", "to", "latency", "bandwidth"), rows, "; ".join(nodes))


# ---------------------------------------------------------------- the model
class _FitRow(NamedTuple):
    """How well the curve of an op fits the measured times."""

    block: str
    op: str
    form: str
    seconds: float  # of a whole sequence
    worst: float  # relative error on points that took no part in the fit
    median: float


def _write_profiles(profiles: RowProfiles, output: Path, json: bool) -> None:
    """Write profiles, and show how well their curves fit."""
    from penstock.cost.profile import MAX_ERROR, error_warning
    from penstock.formats import dump_row_profiles

    write(output, dump_row_profiles(profiles), quiet=json)
    if profiles.worst_error > MAX_ERROR:
        tell("WARNING", f"{output}: {error_warning(profiles)}")
    if json:
        print_json(_profile_facts(profiles, output))
        return
    for profile in profiles.measured:
        _print_fits(profile, _fit_rows(profile))


def _profile_facts(profiles: RowProfiles, output: Path) -> dict[str, object]:
    """Return what --json prints: one profile as such, several as a list."""
    first = profiles.measured[0]
    facts: dict[str, object] = {
        "file": str(output),
        **dict(first.model),
        **dict(first.device),
        "worst_error": profiles.worst_error,
        "fits": [row._asdict() for row in _fit_rows(first)],
    }
    if len(profiles.measured) > 1:
        facts["rows"] = [
            {
                "rows": profile.rows,
                "worst_error": profile.worst_error,
                "fits": [row._asdict() for row in _fit_rows(profile)],
            }
            for profile in profiles.measured
        ]
    return facts


def _fit_rows(profile: Profile) -> list[_FitRow]:
    from penstock.ir import Op

    blocks = {
        "embedding": profile.embed,
        "layer": profile.layer,
        "head": profile.head,
    }
    rows = []
    for name, block in blocks.items():
        for op in (Op.F, Op.B, Op.I, Op.W):
            fit = block.fit(op)
            seconds = fit.curve.of(profile.tokens, 0)
            row = _FitRow(name, op.value, fit.form, seconds, fit.worst, fit.median)
            rows.append(row)
    return rows


def _print_fits(profile: Profile, rows: list[_FitRow]) -> None:
    from penstock.view.numbers import write_time

    heads = (
        "",
        "op",
        f"{profile.rows} x {profile.tokens} tokens",
        "form",
        "worst error",
        "median error",
    )
    table = [
        (
            row.block,
            row.op,
            write_time(row.seconds, digits=3),
            row.form,
            f"{row.worst:.1%}",
            f"{row.median:.1%}",
        )
        for row in rows
    ]
    print_table(heads, table, _notes(profile))


def _notes(profile: Profile) -> str:
    """Return the facts under the table of fits."""
    from penstock.view.numbers import write_size, write_time

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
    from penstock.cost.buffers import held_whole
    from penstock.view.numbers import write_size, write_time

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
        note += f", and {write_size(network.sum_bandwidth)}/s in sums of all ranks"
    if network.channels == 1:
        note += "; the messages of a rank wait for each other"
    if network.channels == 2:
        note += "; the messages of a rank wait for others in the same direction"
    held = held_whole(network.buffers)
    if held:
        note += f"; buffers hold messages of up to {write_size(held[-1].bytes)}"
    return note
