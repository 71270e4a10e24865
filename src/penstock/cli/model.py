"""Commands about a model: `init` and `train`; `explain`, `eval`, `generate` and `export`."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.sources import ModelSource, complete_model, find_model
from penstock.cli.terminal import (
    MODEL_HELP,
    PRESET_NAMES,
    RESUME_AUTO,
    ConfigChanges,
    JsonFlag,
    print_json,
    print_plain,
    progress,
    tell,
    write,
)
from penstock.config import DEFAULT_PRESET, check_config
from penstock.errors import FileError, RunError, ShapeError
from penstock.formats import config_toml
from penstock.train.after.report import (
    chosen_step,
    explaining_lines,
    render_report,
    summarize_run,
    summary_facts,
)
from penstock.train.data.corpus import read_prompt

if TYPE_CHECKING:
    from penstock.train.after.evaluate import AblationRow

REPORT = "report.html"  # in the folder of a run
SAMPLE = "sample.txt"  # in the folder of a run

ModelFolder = Annotated[
    Path,
    typer.Argument(help="The folder of a run, a checkpoint, or a Hugging Face model."),
]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run.")]


def train_command(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model),
    ] = None,
    changes: ConfigChanges = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the newest good checkpoint; with --resume=auto, start if there is none.",
        ),
    ] = False,
    resume_auto: Annotated[bool, typer.Option(RESUME_AUTO, hidden=True)] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything, show the plan, memory and speed, but do not train.",
        ),
    ] = False,
) -> None:
    """Train a model. Without a config: a small Llama on Python's own source, on four local workers, in a minute.

    The weights of a Hugging Face folder are fine-tuned; a config.json gives the sizes of a new model. A rank is one
    process or several: --set parallel.tp=2 divides its layers between two processes,
    --set parallel.dp_shard=2 divides its
    weights between two processes while they are not in use.

    Example: penstock train config.toml --set model.layers=24 --set schedule.name=hanayo
    """
    # These load torch.
    from penstock.cli.run import train, train_as_rank
    from penstock.runtime.process.launch import under_launcher

    if under_launcher() and os.environ["RANK"] != "0":
        # Another machine may have neither the config nor the model: rank 0 sends the config.
        is_model = source is not None and source.suffix == ".json"
        own = ModelSource(None if is_model else source, None, tuple(changes or ()))
        train_as_rank(own, resume, resume_auto)
        return
    if resume and source is not None and not source.exists():
        raise FileError(
            f"there is no run in {source} to continue\n  name the folder of a run, such as runs/tiny"
        )
    run = (find_model(source, changes, trained=True), resume, resume_auto)
    if not under_launcher():
        train(*run, dry_run)
        return
    if dry_run:
        raise RunError(
            "--dry-run makes its forecast in a single process, not under torchrun or another launcher\n"
            "  start penstock train without it"
        )
    train_as_rank(*run)


def init_command(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path(
        "config.toml"
    ),
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help=f"{PRESET_NAMES}; or a Hugging Face folder, to fine-tune its model.",
            autocompletion=complete_model,
        ),
    ] = DEFAULT_PRESET,
    whole: Annotated[
        bool,
        typer.Option("--all", help="Write all settings, not only the usual ones."),
    ] = False,
    changes: ConfigChanges = None,
) -> None:
    """Write a config with a comment on every value.

    What it leaves out comes from the preset that it names.

    Example: penstock init config.toml --from gpt2
    """
    if file.exists():
        raise FileError(f"{file} already exists\n  name another file")
    changed = config_toml.apply_changes(config_toml.start_from(source), changes or [])
    checked = check_config(changed, counted=False)
    title = f"penstock train {file}"
    if not whole:
        title += "; penstock init --all writes all settings"
    write(file, config_toml.dump_config(checked, title, short=not whole))


def export_command(
    run: ModelFolder,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The folder to create.")
    ] = Path("export"),
    dtype: Annotated[
        str,
        typer.Option(help="The type of the weights: float32, bfloat16 or float16."),
    ] = "float32",
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Write the whole model with its LoRA adapters added to it, instead of the adapters alone.",
        ),
    ] = False,
) -> None:
    """Write a trained model as a Hugging Face folder, which transformers loads: config.json and safetensors.

    If a run has trained LoRA adapters, the folder holds them instead, and peft loads it beside the base model.

    Example: penstock export runs/tiny -o tiny-llama
    """
    from penstock.train.after.export import export_run

    trained = export_run(run, output, dtype, merge)
    if not trained.adapters or merge:
        print_plain(f"wrote {output}, the model of {trained.path}")
        return
    print_plain(
        f"wrote {output}, the LoRA adapters of {trained.path}, which are no model by themselves\n"
        f"  peft loads them beside the base model, {trained.base}\n"
        f"  to write the whole model with the adapters added to it: penstock export {run} --merge -o FOLDER"
    )


def generate_command(
    run: ModelFolder,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="The beginning of the text. Default: the first words of a held-out "
            "document of the run; a Hugging Face model starts from a random token."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The number of tokens to add.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the most likely token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    omit: Annotated[
        str | None,
        typer.Option(help="Layers to leave out, counted from 0, such as 2,5."),
    ] = None,
) -> None:
    """Let a trained model continue a text, with all layers or, to be faster, with some of them.

    A model that was trained with partial paths can do without some of its layers: `penstock eval` says at what
    price.

    Example: penstock generate runs/tiny --prompt "import "

    Example: penstock generate runs/tiny --omit 2,5
    """
    from penstock.train.after.generate import (
        chosen_path,
        generate_text,
        open_trained,
        parse_layers,
    )

    begin = read_prompt(run) if prompt is None else prompt
    trained = open_trained(run)
    path = None
    if omit is not None:
        path = chosen_path(trained.sizes.layers, parse_layers(omit))
    text = generate_text(trained, begin, max_tokens, temperature, seed, path)
    sys.stdout.write(text + "\n")


def eval_command(
    run: ModelFolder,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help="A file or folder to measure on, instead of the text of the run's own evaluations. May be repeated.",
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens per sequence of --text. Default: as in the run; for a Hugging Face model at most 1024."
        ),
    ] = None,
    omit: Annotated[
        list[str] | None,
        typer.Option(
            help="Share of the parts to leave out, such as 0.25, or the parts themselves, such as 2,5. May be repeated."
        ),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(
            help="Batches of text; each sequence counts once. Default: 2 of held-out text, all of --text."
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Measure the perplexity of a trained model, with all parts and with some left out.

    The text is that of the run's own evaluations (data.validation, or what was held out), or any other text. Every
    layer is a part of its own, counted from 0. The first part always runs.

    Example: penstock eval runs/tiny --omit 0.25 --omit 0.5

    Example: penstock eval runs/tiny --omit 2,5

    Example: penstock eval my-model --text notes.txt
    """
    from penstock.train.after.evaluate import evaluate_run, evaluate_text
    from penstock.train.after.generate import parse_omission

    if seq_len is not None and not text:
        raise ShapeError(
            "--seq-len is for --text; held-out text has the sequences of its run"
        )

    omissions = [parse_omission(text) for text in omit or []]
    with progress("evaluating"):
        if text:
            evaluation = evaluate_text(
                run, text, omissions, batches=batches, tokens=seq_len
            )
        else:
            evaluation = evaluate_run(
                run, omissions, batches=2 if batches is None else batches
            )
    if json:
        rows = [asdict(row) | {"ratio": row.ratio} for row in evaluation.rows]
        facts = {"text": evaluation.text, "by_byte": evaluation.by_byte}
        print_json({**facts, "rows": rows})
        return
    tell("text", evaluation.text)
    if evaluation.by_byte:
        tell("bytes", evaluation.by_byte)
    for row in evaluation.rows:
        print_plain(_describe_row(row))


def _describe_row(row: AblationRow) -> str:
    perplexity = f"perplexity {row.perplexity:.4g}"
    if row.way == "random":
        perplexity += f" ± {row.spread:.4g}"
    text = f"{row.way:7}{row.kept}/{row.parts} parts  {perplexity}"
    text += f"  {row.ratio:.3f} of the full model's"
    if row.way == "chosen":
        text += f"  parts {' '.join(map(str, row.path))}"
    return text


def explain_command(
    run: RunFolder,
    step: Annotated[
        int | None,
        typer.Option(help="The measured step to explain. Default: all that were."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="The folder of another run to compare with.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help=f"The page to write. Default: {REPORT} in the folder of the run.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Say where the steps of a run spent their time, beside what was predicted.

    The page shows curves, and the predicted timeline of a step above the measured one.

    Example: penstock explain runs/tiny

    Example: penstock explain runs/tiny-2 --against runs/tiny
    """
    summary = chosen_step(summarize_run(run), step)
    other = None if against is None else summarize_run(against)
    sample = run / SAMPLE
    text = sample.read_text(encoding="utf-8") if sample.is_file() else ""
    page = render_report(summary, run.resolve().name, text)
    write(output or run / REPORT, page, quiet=json)
    if json:
        facts = summary_facts(summary)
        if other is not None:
            facts["against"] = summary_facts(other)
        print_json(facts)
        return
    for line in explaining_lines(summary):
        print_plain(line)
    if other is not None:
        change = summary.speed / other.speed - 1
        print_plain(
            f"{summary.speed:,.0f} tokens/s, {change:+.1%} against {against} ({other.speed:,.0f})"
        )
