"""Disables AMX in oneDNN if the CPU advertises it but faults on it.

    advertised   AMX        some virtual machines advertise it, then kill a process that uses it (SIGILL)
    tried        x          in a separate process
    so use       AVX-512    through ONEDNN_MAX_CPU_ISA, which oneDNN reads before its first kernel

Only bf16 on a CPU uses these instructions.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys

from penstock.runtime.torch_internals import supports_amx

ISA_LIMIT_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_WITHOUT_AMX = "AVX512_CORE_BF16"
AMX_TRIAL = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
_log = logging.getLogger(__name__)


def avoid_broken_amx(advertised: bool | None = None) -> bool:
    """Disable AMX in oneDNN if it does not work here, and return whether it was disabled.

    Call this before the first matrix product of the process; child processes inherit the
    setting. `advertised` replaces what the CPU says, for tests.
    """
    if ISA_LIMIT_VARIABLE in os.environ:
        return False
    if advertised is None:
        advertised = supports_amx()
    if not advertised:
        return False
    trial = subprocess.run(
        [sys.executable, "-c", AMX_TRIAL], capture_output=True, check=False
    )
    killed = trial.returncode < 0
    if not killed:
        return False
    os.environ[ISA_LIMIT_VARIABLE] = ISA_WITHOUT_AMX
    _log.warning(
        "this machine advertises AMX but cannot run it, so %s=%s is now set",
        ISA_LIMIT_VARIABLE,
        ISA_WITHOUT_AMX,
    )
    return True
