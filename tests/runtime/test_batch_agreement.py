"""Ranks that are given different batches are told so, before they train on a mixture of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drawing import drawn_from
from penstock import Pipeline, make
from penstock.errors import ShapeError
from penstock.models import shift_labels, token_loss
from penstock.runtime import ThreadComm, run_threads
from penstock.runtime.batch import checksum

VOCAB, WIDTH = 11, 4


@drawn_from(0)
def layers() -> list[nn.Module]:
    middle = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return [nn.Embedding(VOCAB, WIDTH), *middle, nn.Linear(WIDTH, VOCAB)]


def batch(seed: int = 0, rows: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(0, VOCAB, (rows, 5), generator=draw)
    return x, shift_labels(x)


def steps(given, ranks=3, schedule=None, **options):
    """The losses of every rank; `given` has the batches of each step, and takes the rank."""
    schedule = schedule or make("1f1b", ranks=ranks, microbatches=2)
    models = [layers() for _ in range(schedule.ranks)]

    def work(comm):
        pipeline = Pipeline(models[comm.rank], schedule, comm=comm, **options)
        return [pipeline.step(x, y).loss for x, y in given(comm.rank)]

    return run_threads(schedule.ranks, work, patience=20)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_rank_with_another_batch_of_the_same_shape_is_named(odd):
    usual = 1 if odd == 0 else 0
    with pytest.raises(
        ShapeError,
        match=f"rank {odd} was given another batch than rank {usual}: other numbers in the inputs of micro-batch 0\n"
        "  give all ranks of a pipeline the same batch",
    ):
        steps(lambda rank: [batch(int(rank == odd))])


def test_ranks_with_other_numbers_of_rows_do_not_wait_for_each_other():
    with pytest.raises(
        ShapeError,
        match=r"rank 2 .* the shapes of the inputs: 2 x \(3, 5\) instead of 2 x \(4, 5\)",
    ):
        steps(lambda rank: [batch(rows=6 if rank == 2 else 8)])


def test_the_same_rows_in_another_order_are_another_batch():
    x, y = batch(rows=4)
    swapped = x[[1, 0, 2, 3]], y[[1, 0, 2, 3]]
    with pytest.raises(ShapeError, match=r"rank 1 .* inputs of micro-batch 0"):
        steps(lambda rank: [swapped if rank == 1 else (x, y)])


def test_other_labels_and_other_counts_of_labels_are_noticed():
    x, y = batch()
    other = y.clone()
    other[7, 0] = (other[7, 0] + 1) % VOCAB
    with pytest.raises(ShapeError, match=r"rank 2 .* the labels of micro-batch 1"):
        steps(lambda rank: [(x, other if rank == 2 else y)])
    other[7, 0] = -100
    with pytest.raises(
        ShapeError, match=r"rank 2 .* number of labels that count: 31 instead of 32"
    ):
        steps(lambda rank: [(x, other if rank == 2 else y)])


def test_batches_are_compared_in_the_first_and_in_every_kth_step():
    def given(rank):
        return [batch(0), batch(10 + rank), batch(0), batch(20 + rank)]

    assert len(steps(given, compare=2)[0]) == 4  # too late for the second, unseen
    with pytest.raises(ShapeError, match="rank 1 was given another batch than rank 0"):
        steps(given, compare=3)
    assert len(steps(given, compare=0)[0]) == 4


def test_all_ranks_compare_in_the_same_steps():
    def work(comm):
        schedule = make("1f1b", ranks=2, microbatches=2)
        pipeline = Pipeline(layers(), schedule, comm=comm, compare=10 + comm.rank)
        return pipeline.step(*batch()).loss

    with pytest.raises(
        ShapeError,
        match="rank 1 compares batches every 11 steps, but rank 0 every 10",
    ):
        run_threads(2, work)


class CountingComm(ThreadComm):
    """Counts sums over ranks."""

    sums = 0

    def add(self, tensor, group):
        self.sums += 1
        return super().add(tensor, group)


@pytest.mark.parametrize("compare", [0, 3])
def test_a_step_that_does_not_compare_costs_no_message(compare):
    def work(comm):
        counting = CountingComm(comm.hub, comm.rank)
        schedule = make("1f1b", ranks=2, microbatches=2)
        pipeline = Pipeline(layers(), schedule, comm=counting, compare=compare)
        sums = []
        for _ in range(5):
            before = counting.sums
            pipeline.step(*batch()).wait()
            sums.append(counting.sums - before)
        return sums

    for sums in run_threads(2, work):
        assert sums[1] == sums[2] == sums[4] == 1  # of the loss
        assert (sums[3] > 1) == (compare == 3)
        assert sums[0] > 1


def test_a_rank_that_reads_no_data_needs_none():
    """It passes tensors that have only a shape."""
    x, y = batch()
    expected = steps(lambda rank: [(x, y)])

    def given(rank):
        return [(x.to("meta"), y.to("meta")) if rank == 1 else (x, y)]

    assert steps(given) == expected


@pytest.mark.parametrize(("rank", "name"), [(0, "x"), (2, "y")])
def test_a_rank_that_reads_data_needs_it(rank, name):
    x, y = batch()

    def given(own):
        mine = {"x": x, "y": y}
        if own == rank:
            mine[name] = mine[name].to("meta")
        return [(mine["x"], mine["y"])]

    with pytest.raises(
        ShapeError, match=f"{name} has only a shape .* on rank {rank} reads it"
    ):
        steps(given)


def test_each_copy_of_a_pipeline_may_have_data_of_its_own():
    schedule = make("1f1b", ranks=2, microbatches=2, copies=2)
    copy_of = [0] * schedule.ranks
    for microbatch in schedule.microbatches:
        for stage in microbatch.path:
            first = schedule.stages[microbatch.path[0]].rank
            copy_of[schedule.stages[stage].rank] = first
    assert len(set(copy_of)) == 2
    losses = steps(lambda rank: [batch(copy_of[rank])], schedule=schedule)
    assert len(set(map(tuple, losses))) == 1
    with pytest.raises(ShapeError, match="was given another batch"):
        steps(lambda rank: [batch(rank)], schedule=schedule)


def test_named_tensors_are_compared_too():
    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale[:, None, None]

    @drawn_from(0)
    def model() -> list[nn.Module]:
        ends = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        return [ends[0], Scaled(WIDTH, WIDTH), ends[1]]

    def work(comm):
        schedule = make("1f1b", ranks=2, microbatches=2)
        pipeline = Pipeline(model(), schedule, comm=comm)
        x, y = batch()
        return pipeline.step(x, y, scale=torch.full((8,), 1.0 + comm.rank)).loss

    with pytest.raises(
        ShapeError, match=r"rank 1 .* numbers in scale of micro-batch 0"
    ):
        run_threads(2, work)


def test_evaluations_are_compared_before_their_shapes_are_found():
    def work(comm):
        schedule = make("1f1b", ranks=2, microbatches=2)
        pipeline = Pipeline(layers(), schedule, token_loss, comm=comm)
        return pipeline.evaluate(*batch(comm.rank))

    with pytest.raises(ShapeError, match="rank 1 was given another batch than rank 0"):
        run_threads(2, work)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.float32, torch.bfloat16, torch.complex64, torch.bool]
)
def test_a_checksum_depends_on_every_number_and_its_place(dtype):
    x = torch.arange(6).reshape(2, 3).remainder(2 if dtype is torch.bool else 9)
    x = x.to(dtype)
    assert checksum([x]) == checksum([x.t().contiguous().t()])
    assert checksum([x, x.flip(0)]) != checksum([x.flip(0), x])
    assert checksum([x]) != checksum([x.flip(0)])
    for place in range(6):
        other = x.clone()
        other.view(-1)[place] = 0 if x.view(-1)[place] else 1
        assert checksum([x]) != checksum([other])
