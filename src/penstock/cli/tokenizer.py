"""`penstock tokenizer`: trains a tokenizer on your text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from penstock.cli.options import ConfigChanges
from penstock.cli.tables import counting, print_plain
from penstock.errors import FileError


def tokenizer_command(
    config: Annotated[
        Optional[Path],
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
    from penstock.config import Config
    from penstock.formats.config_toml import apply_changes, read_config
    from penstock.train.data.tokenizer_training import train_tokenizer

    if output.exists():
        raise FileError(f"{output} already exists\n  name another file")
    settings = Config() if config is None else read_config(config)
    data = apply_changes(settings, changes or []).data
    with counting("reading text") as watch:
        words = train_tokenizer(data, vocab, output, watch)
    print_plain(f"wrote {output}: {words:,} words")
    print_plain(f"  use it: penstock train --set data.tokenizer={output}")
