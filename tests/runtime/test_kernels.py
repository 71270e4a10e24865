"""Tests for CPUs that advertise AMX but fault on it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from penstock.runtime.process import machine as amx


@pytest.mark.parametrize(
    ("advertised", "trial", "given", "disabled"),
    [
        (True, "import os, signal; os.kill(os.getpid(), signal.SIGILL)", None, True),
        (True, "pass", None, False),
        (False, "import os, signal; os.kill(os.getpid(), signal.SIGILL)", None, False),
        (True, "import os, signal; os.kill(os.getpid(), signal.SIGILL)", "AVX2", False),
    ],
    ids=["faults", "works", "not advertised", "set by the user"],
)
def test_amx_is_disabled_only_if_it_kills_a_process_that_uses_it(
    advertised, trial, given, disabled, monkeypatch
):
    monkeypatch.setenv(amx.ISA_LIMIT_VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(amx.ISA_LIMIT_VARIABLE)
    monkeypatch.setattr(amx, "AMX_TRIAL", trial)
    assert amx.avoid_broken_amx(advertised) is disabled
    assert os.environ.get(amx.ISA_LIMIT_VARIABLE) == (
        amx.ISA_WITHOUT_AMX if disabled else given
    )


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="this CPU does not advertise AMX"
)
def test_bf16_products_run_on_any_machine_afterwards():
    code = f"from penstock.runtime.process.machine import avoid_broken_amx; avoid_broken_amx(); {amx.AMX_TRIAL}"
    env = {
        key: value for key, value in os.environ.items() if key != amx.ISA_LIMIT_VARIABLE
    }
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"PYTHONPATH": path},
        check=False,
        timeout=600,
    )
    assert done.returncode == 0
