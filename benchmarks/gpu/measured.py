"""The measurements that the pages about the GPU are made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RESULTS = Path(__file__).parent.parent.parent / "docs" / "results"
FILES = RESULTS / "h200"


def rows_of(name: str) -> list[Row]:
    """The rows of a measurement."""
    found: list[Row] = json.loads((FILES / name).read_text())["rows"]
    return found
