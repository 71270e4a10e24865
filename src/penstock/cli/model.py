"""Commands about a model: `init` and `train`; `export`, `generate`, `eval` and `report`; and `tokenizer`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import (
    PRESET_NAMES,
    ConfigChanges,
    beginning,
    counting,
    print_plain,
    progress,
    tell,
    write,
)
from penstock.config import DEFAULT_PRESET, Config, check_config
from penstock.errors import FileError, RunError, ShapeError
from penstock.formats import config_toml
from penstock.train.after.report import render_report, summarize_run
from penstock.train.data.corpus import read_prompt
from penstock.train.data.files import plain_texts
from penstock.train.data.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from penstock.train.after.evaluate import AblationRow

REPORT = "report.html"  # in the folder of a run
SAMPLE = "sample.txt"  # in the folder of a run

ModelFolder = Annotated[
    Path,
    typer.Argument(help="The folder of a run, a checkpoint, or a Hugging Face model."),
]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run.")]


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

    A rank is one process or several: --set parallel.tp=2 divides its layers between two processes,
    --set parallel.dp_shard=2 divides its weights between two processes while they are not in use.

    Example: penstock train config.toml --set model.layers=24 --set schedule.name=hanayo
    """
    # These load torch.
    from penstock.cli.run import train, train_as_rank
    from penstock.runtime.process.launch import under_launcher

    run = (source, preset, changes or [], resume, resume_if_any)
    if not under_launcher():
        train(*run, dry_run, sample)
        return
    if dry_run:
        raise RunError(
            "--dry-run makes its forecast in a single process, not under torchrun or another launcher\n"
            "  start penstock train without it"
        )
    train_as_rank(*run, sample)


def init_command(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path(
        "config.toml"
    ),
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help=f"{PRESET_NAMES}; or a Hugging Face folder, to fine-tune its model.",
            autocompletion=complete_preset,
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
            "document of the run; a Hugging Face model begins with any word."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="The number of tokens to add.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the most likely token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    omit: Annotated[
        str | None,
        typer.Option(help="Layers to leave out, counted from 0, such as 2,5."),
    ] = None,
    exit_after: Annotated[
        int | None,
        typer.Option(help="The last layer to run, counted from 0; the head follows."),
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
    if omit is not None or exit_after is not None:
        layers = trained.sizes.layers
        path = chosen_path(layers, parse_layers(omit or ""), exit_after)
    text = generate_text(trained, begin, tokens, temperature, seed, path)
    sys.stdout.write(text + "\n")


def eval_command(
    run: ModelFolder,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            "--sources",
            help="A file or folder to measure on, instead of the text of the run's own evaluations. May be repeated.",
        ),
    ] = None,
    tokens: Annotated[
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
    exit_after: Annotated[
        list[int] | None,
        typer.Option(help="The last part before the head. May be repeated."),
    ] = None,
    draws: Annotated[
        int, typer.Option(help="Random subsets of parts to try for each share.")
    ] = 8,
    batches: Annotated[
        int | None,
        typer.Option(
            help="Batches of text; each sequence counts once. Default: 2 of held-out text, all of --text."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for choosing the subsets.")] = 0,
) -> None:
    """Measure the perplexity of a trained model, with all parts and with some left out.

    The text is that of the run's own evaluations (data.validation, or what was held out), or any other text. Every
    layer is a part of its own, counted from 0. The first part always runs.

    Example: penstock eval runs/tiny --omit 0.25 --omit 0.5

    Example: penstock eval runs/tiny --omit 2,5 --exit-after 5

    Example: penstock eval my-model --text notes.txt
    """
    from penstock.train.after.evaluate import evaluate_run, evaluate_text
    from penstock.train.after.generate import parse_omission

    if tokens is not None and not text:
        raise ShapeError(
            "--tokens is for --text; held-out text has the sequences of its run"
        )

    omissions = [parse_omission(text) for text in omit or []]
    with progress("evaluating"):
        exits = exit_after or []
        if text:
            evaluation = evaluate_text(
                run, text, omissions, draws, batches, seed, exits, tokens
            )
        else:
            evaluation = evaluate_run(
                run, omissions, draws, 2 if batches is None else batches, seed, exits
            )
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


def report_command(
    run: RunFolder,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page to write.")
    ] = None,
) -> None:
    """Write the page of a run: its curves, and the predicted timeline of a step above the measured one.

    Example: penstock report runs/tiny
    """
    sample = run / SAMPLE
    text = sample.read_text(encoding="utf-8") if sample.is_file() else ""
    page = render_report(summarize_run(run), run.resolve().name, text)
    write(output or run / REPORT, page)


def tokenizer_command(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A config whose data.sources name the text. Default: Python's own standard library."
        ),
    ] = None,
    vocab: Annotated[
        int, typer.Option(help="The number of words, including one for each byte.")
    ] = 8192,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The file to create.")
    ] = Path("tokenizer.json"),
    changes: ConfigChanges = None,
) -> None:
    """Train a tokenizer (byte pairs) on the text of a config, for data.tokenizer.

    Example: penstock tokenizer --set data.sources=books --vocab 16000 -o books.json
    """
    if output.exists():
        raise FileError(f"{output} already exists\n  name another file")
    settings = Config() if config is None else config_toml.read_config(config)
    data = config_toml.apply_changes(settings, changes or []).data
    with counting("reading text") as watch:
        words = train_tokenizer(plain_texts(data, watch), vocab, output)
    print_plain(f"wrote {output}: {words:,} words")
    print_plain(f"  use it: penstock train --set data.tokenizer={output}")
