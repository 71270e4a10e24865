"""Holds back what transformers logs if the weights of a folder do not fit its model.

    MixtralForCausalLM LOAD REPORT from: start
    Key                                     | Status     |
    model.layers.1.input_layernorm.weight   | MISSING    |
    model.layers.1.mlp.experts.gate_up_proj | CONVERSION | (a traceback)

Where we refuse the folder, our error says it in a sentence, and a user should not have to read both. Where we accept
it, as with weights that the model has no use for, the report is logged afterwards.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

LOADER = logging.getLogger("transformers.modeling_utils")
UNMADE = re.compile(r"^(?P<name>\S+) *\| *CONVERSION", re.MULTILINE)
TITLES = ("LOAD REPORT", "Some weights of")  # the second one is of transformers 4


class LoadReport(logging.Filter):
    """The reports on one load, which are not logged before `log`."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Hold back a report, and let every other message pass."""
        message = record.getMessage()
        is_report = any(title in message for title in TITLES)
        if is_report:
            self.records.append(record)
        return not is_report

    def log(self) -> None:
        """Log what was held back."""
        for record in self.records:
            LOADER.handle(record)

    def unmade_weight(self) -> str | None:
        """The first weight that could not be put together from several tensors of the files."""
        for record in self.records:
            row = UNMADE.search(record.getMessage())
            if row:
                return row["name"]
        return None


@contextmanager
def load_report_held() -> Iterator[LoadReport]:
    """Inside, hold back the reports of transformers on a load."""
    report = LoadReport()
    LOADER.addFilter(report)
    try:
        yield report
    finally:
        LOADER.removeFilter(report)
