"""What a user reads who has another torchtitan or torch than the ones that work together."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from penstock.errors import RunError
from penstock.integrations import torchtitan


@pytest.fixture
def fresh_trainer(monkeypatch):
    """Import our trainer and torchtitan's anew."""
    for name in ("penstock.integrations.torchtitan.trainer", "torchtitan.trainer"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("fresh_trainer")
def test_another_torchtitan_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(torchtitan, "version", lambda package: "0.2.2")
    with pytest.raises(
        RunError, match=r"but 0.2.2 is installed: pip install 'penstock"
    ):
        import_module("penstock.integrations.torchtitan.trainer")


@pytest.mark.usefixtures("fresh_trainer")
def test_a_torch_that_lacks_a_name_is_told_with_what_to_install(monkeypatch):
    versions = {"torchtitan": "0.3.0", "torch": "2.11.0"}
    monkeypatch.setattr(torchtitan, "version", versions.get)
    monkeypatch.setitem(sys.modules, "torchtitan", None)  # importing it fails
    with pytest.raises(RunError) as caught:
        import_module("penstock.integrations.torchtitan.trainer")
    text = str(caught.value)
    assert "torchtitan's trainer cannot be imported" in text
    assert "installed are torchtitan 0.3.0 and torch 2.11.0: pip install" in text
