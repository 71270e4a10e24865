"""The benchmark that simulates the experiments of the Hanayo paper."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def hanayo(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import papers as benchmark  # noqa: PLC0415

    return benchmark


def test_gains_of_waves_are_near_the_published_ones(hanayo):
    facts = hanayo.figure_9(["FC"])
    assert len(facts) == 11
    for fact in facts:
        ratio = fact["over_gpipe"] / fact["published_over_gpipe"]
        assert 0.93 < ratio < 1.08, fact


def test_copies_pay_for_the_sum_of_gradients(hanayo):
    site = hanayo.SITES["TACC"]
    one = hanayo.run(hanayo.BERT, site, "GPipe", 8, 1)
    four = hanayo.run(hanayo.BERT, site, "GPipe", 8, 4)
    efficiency = four.sequences_per_second / (4 * one.sequences_per_second)
    assert 0.9 < efficiency < 0.99


def test_what_does_not_fit_says_why(hanayo):
    site = hanayo.SITES["TACC"]
    small = hanayo.run(hanayo.BERT, site, "GPipe", 4, 2)
    assert hanayo.cell(small, site.gpu.memory).startswith("out of memory")
    assert (
        hanayo.cell(hanayo.run(hanayo.BERT, site, "Hanayo W=8", 8, 1), 1e12)
        == "too few layers"
    )
