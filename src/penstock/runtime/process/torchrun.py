"""An error under torchrun: one rank of a machine prints it, all leave it where torchrun looks for it.

    rank 0   prints the message            ──► error file ──► torchrun's summary shows the message, not a traceback
    rank 1   waits a moment, prints nothing ──► error file

Torchrun adds a traceback of its own, which no worker can prevent. It also ends all ranks as soon as one has ended, so
the quiet ones wait until rank 0 has had the time to print.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's name for the path at which it looks for the reason of a failure
HEAD_START = 3.0  # seconds for rank 0 to print before the others end


def prints_errors() -> bool:
    """Whether this process is the one of its machine that prints an error; always true without a launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def tell_launcher(text: str) -> None:
    """Leaves the reason of a failure for torchrun, if it has started this process."""
    file = os.environ.get(ERROR_FILE)
    if file:
        said = {
            "message": {
                "message": text,
                "extraInfo": {"timestamp": str(int(time.time()))},
            }
        }
        with suppress(OSError):
            Path(file).write_text(json.dumps(said), encoding="utf-8")
    if not prints_errors():
        time.sleep(HEAD_START)
