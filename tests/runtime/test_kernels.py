"""A processor that announces what it does not have."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from penstock.runtime.process import amx as kernels


@pytest.mark.parametrize(
    ("announced", "trial", "given", "tamed"),
    [
        (True, "import os, signal; os.kill(os.getpid(), signal.SIGILL)", None, True),
        (True, "pass", None, False),
        (False, "import os, signal; os.kill(os.getpid(), signal.SIGILL)", None, False),
        (True, "import os, signal; os.kill(os.getpid(), signal.SIGILL)", "AVX2", False),
    ],
    ids=["forbidden", "good", "not announced", "the user knows"],
)
def test_an_instruction_that_ends_whoever_uses_it_is_not_used(
    announced, trial, given, tamed, monkeypatch
):
    monkeypatch.setenv(kernels.LIMIT, given or "")
    if given is None:
        monkeypatch.delenv(kernels.LIMIT)
    monkeypatch.setattr(kernels, "AMX_TRIAL", trial)
    assert kernels.avoid_broken_amx(announced) is tamed
    assert os.environ.get(kernels.LIMIT) == (kernels.LESS if tamed else given)


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="nothing is announced here"
)
def test_after_that_products_in_bf16_run_on_any_machine():
    code = f"from penstock.runtime.process.amx import tame; tame(); {kernels.AMX_TRIAL}"
    env = {key: value for key, value in os.environ.items() if key != kernels.LIMIT}
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"PYTHONPATH": path},
        check=False,
        timeout=600,
    )
    assert done.returncode == 0
