"""Results are what they were, or no worse."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import freeze

ALL = [(room, name) for room in freeze.rooms() for name in freeze.cases_of(room)]


@pytest.mark.parametrize(("room", "name"), ALL, ids=[f"{r}-{n}" for r, n in ALL])
def test_a_result_is_what_it_was_or_no_worse(room: str, name: str) -> None:
    module = freeze.module_of(room)
    before = freeze.frozen(room)[name]
    now = freeze.plain(freeze.cases_of(room)[name]())
    if hasattr(module, "no_worse"):
        assert not module.no_worse(name, before, now)
    else:
        assert not freeze.differences(before, now, module.TOLERANCE)


@pytest.mark.parametrize("room", freeze.rooms())
def test_every_frozen_answer_has_its_case(room: str) -> None:
    assert set(freeze.frozen(room)) == set(freeze.cases_of(room))
