"""Documents that are dealt out to micro-batches anew in every step, so that these take the same time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import make, simulate
from penstock.cost.cost import Cost
from penstock.ir.schedule import MicroBatch
from penstock.models import document_starts
from penstock.plan.slices.packs import (
    MAX_TOKENS_RATIO,
    DocumentWork,
    deal_documents,
    step_clock,
    works_of_rows,
)
from penstock.runtime.batch import IGNORED_LABEL
from penstock.train.data.documents import document_ends
from penstock.train.data.loader import Deal, Loader
from penstock.train.rank_setup import dealer_of
from trainings import apart, corpus, job_of, losses, train, watch_batches

CPU = torch.device("cpu")
WORK = DocumentWork(token=300, call=100)
LONG = ("data.separate=true", "data.tokens=256", "run.steps=2")


def rows_of_documents(draw, count, tokens, mean):
    """Rows of `tokens` tokens, cut from a stream of documents of very different lengths."""
    lengths = []
    while sum(lengths) < 2 * count * tokens:
        lengths.append(int(draw.lognormal(np.log(mean), 1.3)) + 2)
    starts = document_starts(torch.tensor(lengths))[: count * tokens]
    rows = []
    for row in starts.view(count, tokens):
        _, counts = torch.unique_consecutive(row, return_counts=True)
        rows.append(counts.tolist())
    return rows


def clock_of(schedule, shards=1):
    return step_clock(schedule, (1,) * schedule.parts, shards)


@settings(max_examples=40)
@given(
    st.integers(0, 99), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(1, 4)
)
def test_packs_hold_every_document_once_and_are_quicker_than_the_rows(
    seed, each, copies, ranks
):
    count = 4 * copies
    rows = rows_of_documents(np.random.default_rng(seed), count * each, 512, 100)
    clock = clock_of(make("1f1b", ranks=ranks, microbatches=4, copies=copies))
    packs = deal_documents(rows, clock, WORK)
    if packs is None:
        return
    lengths = [length for row in rows for length in row]
    dealt = [number for pack in packs for number in pack.documents]
    assert sorted(dealt) == list(range(len(lengths)))
    for pack in packs:
        assert pack.tokens == sum(lengths[number] for number in pack.documents)
        assert pack.tokens <= MAX_TOKENS_RATIO * 512 * each
    before = clock.time(works_of_rows(rows, count, WORK))
    assert clock.time([pack.work for pack in packs]) < before


class WorkCost(Cost):
    """The tokens of a micro-batch count its work."""

    def seconds(self, schedule, action):
        begin, end = schedule.span(action)
        share = {"F": 1, "B": 2}.get(action.op.value, 1)
        return share * (end - begin) / int(schedule.table.crowd[action.stage])


def makespan(schedule, works) -> float:
    microbatches = [
        MicroBatch(one.path, work)
        for one, work in zip(schedule.microbatches, works, strict=True)
    ]
    return simulate(
        replace(schedule, microbatches=tuple(microbatches)), WorkCost()
    ).makespan


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1f1b", {}),
        ("hanayo", {"waves": 2}),
        ("zb-h1", {}),
        ("1f1b", {"copies": 2}),
    ],
)
def test_steps_of_dealt_documents_are_shorter_in_simulation(name, shape):
    schedule = make(name, ranks=4, microbatches=8, **shape)
    count = len(schedule.microbatches)
    clock = clock_of(schedule)
    work = DocumentWork(token=3000, call=100)
    draw = np.random.default_rng(0)
    ratios = []
    for _ in range(8):
        rows = rows_of_documents(draw, 2 * count, 4096, 400)
        packs = deal_documents(rows, clock, work)
        assert packs is not None
        dealt = [pack.work for pack in packs]
        read = works_of_rows(rows, count, work)
        ratios.append(makespan(schedule, dealt) / makespan(schedule, read))
    assert max(ratios) < 1.0
    assert np.mean(ratios) < 0.98


@pytest.mark.parametrize("name", ["1f1b", "hanayo", "interleaved-zb", "chimera"])
def test_the_clock_of_a_step_agrees_with_the_simulator(name):
    schedule = make(name, ranks=4, microbatches=8)
    works = np.random.default_rng(1).integers(5, 50, 8).tolist()
    crowd = len(schedule.stages) // schedule.ranks  # stages of a rank
    if name == "chimera":
        crowd //= 2
    assert clock_of(schedule).time(works) == crowd * makespan(schedule, works)
    assert clock_of(schedule, shards=2).time(works * 2) == clock_of(schedule).time(
        works
    )


def test_rows_that_are_equal_stay_as_they_are():
    clock = clock_of(make("1f1b", ranks=4, microbatches=8))
    assert deal_documents([[5, 3]] * 8, clock, WORK) is None


def test_documents_end_where_the_next_one_or_the_next_row_begins():
    starts = torch.stack([document_starts(torch.tensor(one)) for one in ([2, 2], [4])])
    assert document_ends(starts).tolist() == [2, 4, 8]


@pytest.mark.parametrize(
    ("name", "changes", "shape"),
    [
        ("seq1f1b", (), {"slices": 4}),
        ("1f1b", ("run.accumulate=2", "data.batch=32"), {"copies": 2}),
    ],
)
def test_dealt_documents_train_like_the_rows_they_came_from(
    name, changes, shape, tmp_path, monkeypatch
):
    seen = watch_batches(monkeypatch)
    dealt = train(job_of(tmp_path / "dealt", name, *LONG, *changes, **shape))
    assert any(batch.shapes[0][0] == 1 for batch in seen)  # A pack is one row.
    keep = ("data.balance=false", *changes)
    read = train(job_of(tmp_path / "read", name, *LONG, *keep, **shape))
    assert apart(dealt, losses(read)) < 1e-5


def test_a_resumed_loader_deals_the_same_documents(tmp_path):
    job = job_of(tmp_path, "1f1b", *LONG)
    words, dealer = corpus(job.config), dealer_of(job, CPU)

    def loader():
        return Loader(words, Deal(2, 4), seed=0, dealer=dealer)

    first = loader()
    first.step()
    resumed = loader()
    resumed.resume(first.state())
    for ours, theirs in zip(resumed.step(), first.step(), strict=True):
        assert ours.shapes == theirs.shapes
        assert all(map(torch.equal, ours.inputs, theirs.inputs))
        assert all(map(torch.equal, ours.starts, theirs.starts))


def test_shards_and_ranks_agree_on_the_packs(tmp_path):
    job = job_of(tmp_path, "1f1b", *LONG, "mesh.shard=2", "data.batch=16")
    dealer = dealer_of(job, CPU)
    assert dealer is not None
    assert dealer.clock.pipelines == ((0, 1, 2, 3), (4, 5, 6, 7))
    words = corpus(job.config)

    def batches(shard, wanted=None):
        deal = Deal(2, 4, 1, wanted, shards=2, shard=shard)
        return Loader(words, deal, seed=0, dealer=dealer).step()

    first, second = batches(0)[0], batches(1)[0]
    plain = Loader(words, Deal(4, 4), seed=0).step()[0]
    together = torch.cat([x.flatten() for x in (*first.inputs, *second.inputs)])
    rows = torch.cat([x.flatten() for x in plain.inputs])
    assert together.sort().values.equal(rows.sort().values)
    counted = sum(
        int((labels != IGNORED_LABEL).sum())
        for labels in (*first.labels, *second.labels)
    )
    assert counted == first.valid == plain.valid
    blank = batches(0, wanted=frozenset({1}))[0]
    assert blank.shapes == first.shapes
    assert blank.inputs[1].equal(first.inputs[1])


def test_gpus_partial_paths_and_compiled_stages_keep_the_rows(tmp_path):
    job = job_of(tmp_path, "1f1b", *LONG)
    assert dealer_of(job, CPU) is not None
    assert dealer_of(job, torch.device("cuda")) is None
    assert dealer_of(job, CPU, compiled=True) is None
    assert dealer_of(job_of(tmp_path, "1f1b"), CPU) is None
    assert dealer_of(job_of(tmp_path, "1f1b", *LONG, "data.balance=false"), CPU) is None
    assert dealer_of(job_of(tmp_path, "skip", *LONG, ranks=4), CPU) is None
