"""The verb that measures: `penstock profile`, added to those of `penstock.cli.app`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from penstock.cli.tables import print_json, print_table, progress, tell, write
from penstock.errors import RunError, ShapeError

if TYPE_CHECKING:
    from penstock.cost import Profile

Size = Annotated[Optional[int], typer.Option(rich_help_panel="Model")]


def profile_command(
    output: Annotated[
        Optional[Path],
        typer.Option(
            "-o",
            "--output",
            help="File to write: profile.json; with --links cluster.toml.",
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="tiny, llama-150m, llama-1b, gpt2; sizes below change it.",
            rich_help_panel="Model",
        ),
    ] = "tiny",
    width: Size = None,
    layers: Size = None,
    heads: Size = None,
    kv_heads: Size = None,
    inner: Size = None,
    vocab: Size = None,
    hf: Annotated[
        Optional[Path],
        typer.Option(
            help="Folder of a Hugging Face model: its config.json.",
            rich_help_panel="Model",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
    rows: Annotated[int, typer.Option(help="Sequences of a micro-batch.")] = 1,
    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda, or cuda:1; with several ranks cuda is a GPU each."
        ),
    ] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Of the weights: float32, bfloat16, float16.")
    ] = "float32",
    autocast: Annotated[
        Optional[str], typer.Option(help="Compute in this type: bfloat16.")
    ] = None,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs",
            help="On a GPU: recorded actions, as a run with run.graphs has them.",
        ),
    ] = False,
    threads: Annotated[
        Optional[int], typer.Option(help="Threads of a rank; as torch has it.")
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            help="Ranks that measure at once on this machine, and then their links."
        ),
    ] = 1,
    links: Annotated[
        bool,
        typer.Option(
            "--links",
            help="The link of every pair of ranks: into a cluster.toml that `paths` reads.",
        ),
    ] = False,
    slots: Annotated[
        Optional[int],
        typer.Option(help="With --links: micro-batches that a rank may hold."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often every point is measured.")] = 6,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to stdout.")
    ] = False,
) -> None:
    """Measure a model on this device: one layer over about forty slices, embedding, head, optimizer, links.

    `simulate` and `plan` take the file with --profile. Under torchrun its ranks measure. With --links no model is
    measured, but who is there: latency and bandwidth of every pair of ranks, both ways, and each rank's host, speed and
    memory; `-o some.json` measures the model, and every pair as well.

    Example: penstock profile --preset llama-150m --tokens 2048 --ranks 2 --threads 1 -o profile.json

    Example: torchrun --nnodes 4 --nproc-per-node 1 ... -m penstock profile --links --slots 3 -o cluster.toml
    """
    numbers = (
        ("rows", rows),
        ("ranks", ranks),
        ("rounds", rounds),
        ("threads", threads),
        ("slots", slots),
    )
    for word, value in numbers:
        if value is not None and value < 1:
            raise ShapeError(f"--{word} {value} is too few; the least is 1")
    sizes = {
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "inner": inner,
        "vocab": vocab,
    }
    given = {word: value for word, value in sizes.items() if value is not None}
    if hf is not None and given:
        raise ShapeError(
            f"--hf has its sizes: it does not go together with --{' --'.join(given).replace('_', '-')}"
        )
    try:
        from penstock.train import profile as measuring
    except ModuleNotFoundError as error:
        raise RunError(
            f"profile needs {error.name}, which is not installed: pip install 'penstock[torch]'"
        ) from None
    output = output or Path("cluster.toml" if links else "profile.json")
    if links and output.suffix != ".json":
        _survey(output, ranks, slots, json)
        return
    if slots is not None:
        raise ShapeError("--slots is for a cluster.toml, which --links writes")
    model = hf if hf is not None else measuring.preset_sizes(preset, tokens, given)
    request = measuring.Request(
        model,
        tokens,
        rows,
        device,
        dtype,
        autocast,
        threads,
        links,
        rounds,
        graphs=graphs,
    )
    with progress("measuring") as status:
        found = measuring.profile_model(
            request, ranks, (lambda text: None) if status is None else status.update
        )
    if found is not None:
        _told(found, output, json)


def add_profile_command(app: typer.Typer) -> None:
    """Adds the verb above to a command line."""
    app.command("profile")(profile_command)


def _survey(output: Path, ranks: int, slots: int | None, json: bool) -> None:
    from penstock.formats import dump_cluster
    from penstock.measure.survey import survey

    with progress("measuring links"):
        found = survey(ranks, slots)
    if found is None:
        return
    write(output, dump_cluster(found), quiet=json)
    pairs = [
        (a, b)
        for a in range(len(found.nodes))
        for b in range(len(found.nodes))
        if a != b
    ]
    if json:
        rows = [
            {
                "from": a,
                "to": b,
                "latency": found.latency[a][b],
                "bandwidth": found.bandwidth[a][b],
            }
            for a, b in pairs
        ]
        print_json(
            {
                "file": str(output),
                "nodes": [asdict(node) for node in found.nodes],
                "links": rows,
            }
        )
        return
    table = [
        (
            str(a),
            str(b),
            f"{1e3 * found.latency[a][b]:.3g} ms",
            f"{found.bandwidth[a][b] / 1e6:.4g} MB/s",
        )
        for a, b in pairs
    ]
    nodes = "; ".join(
        f"rank {n} {node.site}, speed {node.speed:g}"
        for n, node in enumerate(found.nodes)
    )
    print_table(("from", "to", "latency", "bandwidth"), table, nodes)


def _told(found: Profile, output: Path, json: bool) -> None:
    from penstock.cost.profile import MAX_ERROR, error_warning
    from penstock.formats import dump_profile

    write(output, dump_profile(found), quiet=json)
    if found.worst_error > MAX_ERROR:
        tell("WARNING", f"{output}: {error_warning(found)}")
    rows = _rows(found)
    if json:
        heads = ("block", "op", "form", "seconds", "worst", "median")
        fits = [dict(zip(heads, row, strict=True)) for row in rows]
        print_json(
            {
                "file": str(output),
                **dict(found.model),
                **dict(found.device),
                "worst_error": found.worst_error,
                "fits": fits,
            }
        )
        return
    table = [
        (name, op, f"{1e3 * seconds:.3g} ms", form, f"{worst:.1%}", f"{median:.1%}")
        for name, op, form, seconds, worst, median in rows
    ]
    heads = ("", "op", f"{found.tokens} tokens", "form", "worst error", "median error")
    print_table(heads, table, _note(found))


def _rows(found: Profile) -> list[tuple[str, str, str, float, float, float]]:
    from penstock.ir import Op

    blocks = (("embedding", found.embed), ("layer", found.layer), ("head", found.head))
    rows = []
    for name, block in blocks:
        for op in (Op.F, Op.B, Op.I, Op.W):
            fit = block.fit(op)
            rows.append(
                (
                    name,
                    op.value,
                    fit.form,
                    fit.curve.of(found.tokens, 0),
                    fit.worst,
                    fit.median,
                )
            )
    return rows


def _note(found: Profile) -> str:
    out = sum(point.held_out for point in found.layer.points)
    layer, net = found.layer, found.network
    links = "links not measured: messages take no time (--ranks 2)"
    if net.serial:
        links = "links: every pair of ranks"
        if isinstance(net.latency, float) and isinstance(net.bandwidth, float):
            links = f"links: {1e6 * net.latency:.3g} us and {net.bandwidth / 1e6:.4g} MB a second"
    return (
        f"errors on {out} points that took no part in the fit, which has {len(layer.points) - out}\n"
        f"a layer holds {layer.held / 1024:.4g} KiB a token from F to B and {layer.kept / 1024:.4g} KiB from I to W; "
        f"weights, gradients and AdamW {layer.weights / 2**20:.4g} MiB, its step {1e3 * layer.update:.3g} ms\n{links}"
    )
