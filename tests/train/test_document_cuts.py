"""Slices that are cut anew in every step, for the documents that the step holds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import make
from penstock.errors import ShapeError
from penstock.models import document_starts
from penstock.plan.slices import equal_work_cuts
from penstock.runtime.batch import Batch, cut_units
from penstock.train.data.loader import DocumentCutter
from penstock.train.setup import cutter_of
from trainings import apart, job_of, train, watch_batches

CPU = torch.device("cpu")


def most_work(starts, cuts, token_work) -> int:
    """The work of the longest slice."""
    rows, tokens = starts.shape
    work = (np.arange(1, tokens + 1) - starts).sum(axis=0) + rows * token_work
    return max(int(work[begin:end].sum()) for begin, end in pairwise(cuts))


def least_longest(starts, slices, token_work) -> int:
    """The work of the longest slice with the best cuts, by a program over all cuts."""
    rows, tokens = starts.shape
    work = (np.arange(1, tokens + 1) - starts).sum(axis=0) + rows * token_work
    done = np.concatenate([[0], np.cumsum(work)]).tolist()
    best = done[:]
    for _ in range(slices - 1):
        best = [
            min(
                (max(best[cut], done[end] - done[cut]) for cut in range(end)), default=0
            )
            for end in range(tokens + 1)
        ]
    return best[-1]


def packed(lengths) -> np.ndarray:
    return document_starts(torch.tensor(lengths)).numpy()[None]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from([0, 3, 50]),
)
def test_cuts_are_valid_and_nearly_the_best(lengths, slices, token_work):
    starts = packed(lengths)
    tokens = sum(lengths)
    slices = min(slices, tokens)
    cuts = equal_work_cuts(starts, slices, token_work)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, tokens, slices + 1)
    assert all(begin < end for begin, end in pairwise(cuts))
    best = least_longest(starts, slices, token_work)
    token = token_work + max(lengths)  # a cut moves by less than a token on each side
    assert most_work(starts, cuts, token_work) <= best + 2 * token


def test_cuts_follow_the_documents():
    one = packed([4096])
    eight = packed([512] * 8)
    assert equal_work_cuts(eight, 4, 100) == (0, 1024, 2048, 3072, 4096)
    later = equal_work_cuts(one, 4, 100)
    assert most_work(one, later, 100) < 0.6 * most_work(
        one, (0, 1024, 2048, 3072, 4096), 100
    )
    assert most_work(eight, later, 100) > 1.5 * most_work(
        eight, (0, 1024, 2048, 3072, 4096), 100
    )
    assert equal_work_cuts(one, 4, 100, step=128) == tuple(
        round(cut / 128) * 128 for cut in later
    )


def test_impossible_cuts_are_refused_with_their_numbers():
    with pytest.raises(ShapeError, match="4 tokens cannot be cut into 5 slices"):
        equal_work_cuts(packed([4]), 5, 1)


def test_a_batch_may_bring_cuts_of_its_own():
    schedule = make("seq1f1b", ranks=1, microbatches=2, slices=2)
    x = torch.zeros(1, 8, dtype=torch.long)
    starts = (torch.zeros(1, 8, dtype=torch.long),) * 2

    def shapes(*cuts):
        batch = Batch((x, x), (x, x), 16, starts, cuts)
        return [x.shape[1] for x in cut_units(schedule, batch).inputs]

    assert shapes() == [4, 4, 4, 4]
    assert shapes((0, 3, 8), (0, 7, 8)) == [3, 5, 7, 1]
    with pytest.raises(ShapeError, match="into 3 slices, but the schedule has 2"):
        shapes((0, 3, 8), (0, 2, 7, 8))
    with pytest.raises(ShapeError, match=r"at \[0, 9\], but it has 8 tokens"):
        shapes((0, 3, 8), (0, 9))


def test_the_trainer_cuts_each_step_by_its_documents_and_learns_the_same(
    tmp_path, monkeypatch
):
    seen = watch_batches(monkeypatch)
    changes = ("data.document_mask=true", "data.seq_len=64", "run.steps=4")
    job = job_of(tmp_path / "sliced", "seq1f1b", *changes, slices=4)
    rows = train(job)
    cutter = cutter_of(job, CPU)
    assert isinstance(cutter, DocumentCutter)
    trained = [batch for batch in seen if batch.cuts]
    assert len(trained) >= 4
    assert len({cuts for batch in trained for cuts in batch.cuts}) > 4
    even = (0, 16, 32, 48, 64)
    for batch in trained:
        for starts, cuts in zip(batch.starts, batch.cuts, strict=True):
            work = (
                most_work(starts.numpy(), each, cutter.token_work)
                for each in (cuts, even)
            )
            assert next(work) <= next(work)
    whole = train(job_of(tmp_path / "whole", "1f1b", *changes))
    assert apart(rows, [row.loss for row in whole]) < 1e-5


def test_whole_sequences_single_documents_and_gpus_keep_the_cuts_of_the_plan(tmp_path):
    sliced = job_of(tmp_path, "seq1f1b", "data.document_mask=true", slices=4)
    assert cutter_of(sliced, CPU) is not None
    assert cutter_of(sliced, torch.device("cuda")) is None
    assert cutter_of(job_of(tmp_path, "seq1f1b", slices=4), CPU) is None
    assert cutter_of(job_of(tmp_path, "1f1b", "data.document_mask=true"), CPU) is None
