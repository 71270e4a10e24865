"""Reports an error under torchrun: one rank per machine prints it, and all hand it to torchrun.

    rank 0   prints the message             ──► error file ──► torchrun's summary shows the message, not a traceback
    rank 1   waits a moment, prints nothing ──► error file

torchrun adds its own traceback, which no worker can prevent. It also ends all ranks as soon
as one has ended, so the silent ranks wait until rank 0 has had the time to print.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # holds the path that torchrun reads
HEAD_START_SECONDS = 3.0  # for rank 0 to print before the others end


def prints_errors() -> bool:
    """Whether this process prints errors for its machine; true without a launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def tell_launcher(text: str) -> None:
    """Write the reason of a failure where torchrun reads it, if it started this process."""
    file = os.environ.get(ERROR_FILE_VARIABLE)
    if file:
        timestamp = str(int(time.time()))
        report = {"message": text, "extraInfo": {"timestamp": timestamp}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": report}), encoding="utf-8")
    if not prints_errors():
        time.sleep(HEAD_START_SECONDS)
