"""The list of faults stays true to the source, so that `make mutants` never tries a fault that is none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mutants import damaged, listed_mutants, source_of

MUTANTS = listed_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_has_its_place_compiles_and_has_tests(mutant):
    text = source_of(mutant)
    changed = damaged(mutant, text)
    assert changed != text
    compile(changed, mutant.file, "exec")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        content = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in content, test


def test_faults_have_names_of_their_own():
    assert Counter(mutant.name for mutant in MUTANTS).most_common(1)[0][1] == 1
