"""What users import stays, unless a change of the snapshot says that it was meant."""

from __future__ import annotations

import difflib

import public_api


def test_the_public_names_and_parameters_are_those_of_the_snapshot() -> None:
    before = public_api.SNAPSHOT.read_text(encoding="utf-8").splitlines()
    now = list(public_api.lines())
    changed = [line for line in difflib.ndiff(before, now) if line[0] in "+-"]
    assert not changed, (
        "\n".join(changed) + "\nif that is meant: python tests/public_api.py"
    )
