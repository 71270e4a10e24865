"""What a processor announces is tried before it is believed.

    announced   AMX        some virtual machines announce it, and end whoever uses it (SIGILL)
    tried       x          by a process of its own
    then        AVX-512    ONEDNN_MAX_CPU_ISA, which oneDNN reads before its first kernel

Only bf16 on a CPU comes to these instructions.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys

from penstock.runtime.torch_internals import supports_amx

LIMIT, LESS = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
AMX_TRIAL = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
_log = logging.getLogger(__name__)


def avoid_broken_amx(announced: bool | None = None) -> bool:
    """Keeps oneDNN from instructions that this machine announces and does not have; whether it had to.

    To be called before the first product of this process; processes that it starts inherit it.
    """
    if LIMIT in os.environ or not (supports_amx() if announced is None else announced):
        return False
    if (
        subprocess.run(
            [sys.executable, "-c", AMX_TRIAL], capture_output=True, check=False
        ).returncode
        >= 0
    ):
        return False
    os.environ[LIMIT] = LESS
    _log.warning(
        "this machine announces AMX, but does not run it: %s=%s is set", LIMIT, LESS
    )
    return True
