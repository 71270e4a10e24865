"""Sums of gradients as a plan has them: every kind, through threads, processes and an emulated network."""

from __future__ import annotations

import copy

import pytest
import torch

from penstock import lower, make
from penstock.errors import ShapeError
from penstock.ir.sums import SumKind, SumPlan, even_sum
from penstock.models import part_parameters, split
from penstock.runtime import Executor, run_threads
from penstock.runtime.executor import RunOptions
from penstock.runtime.gradients import Mean
from penstock.runtime.planned_sums import CellFormat, PlannedSum, SumThread
from pipelines import data, gpt, layers_of, llama, token_loss

RANKS = (0, 1, 2, 3, 4)
KINDS = {
    "ring": SumPlan((0,), SumKind.RING, (3, 0, 4, 1, 2)),
    "direct": SumPlan((0,), SumKind.DIRECT, RANKS, (0.5, 0.0, 0.3, 0.1, 0.1)),
    "whole groups": SumPlan(
        (0,),
        SumKind.TWO_LEVELS,
        (0, 3, 1, 2, 4),
        groups=((0, 3), (1, 2), (4,)),
        whole=True,
    ),
    "groups with shares": SumPlan(
        (0,), SumKind.TWO_LEVELS, (0, 3, 4, 1, 2), groups=((0, 3, 4), (1, 2))
    ),
}
NUMBERS = 1543


def summed(plan, messages, steps, numbers=NUMBERS):
    """Sum random numbers of five ranks in several steps; return the addends and the sums of every rank."""
    draw = torch.Generator().manual_seed(0)
    addends = torch.randn(steps, 5, numbers, generator=draw)

    def work(comm):
        how = CellFormat(torch.float32, messages)
        sums = [PlannedSum(plan, comm.rank, numbers, how) for _ in range(2)]
        found = []
        for step in range(steps):
            thread = SumThread(comm.second_connection(), sums)
            flats = [addends[step, comm.rank].clone() for _ in sums]
            pending = [thread.put(flat) for flat in flats]
            for one in pending:
                one.wait()
            assert torch.equal(*flats)
            found.append(flats[0])
        return torch.stack(found)

    return addends, torch.stack(run_threads(5, work))


@pytest.mark.parametrize("messages", [None, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", KINDS)
def test_all_replicas_get_the_same_bits_of_the_sum(name, messages):
    steps = 8
    addends, sums = summed(KINDS[name], messages, steps)
    assert torch.equal(sums, sums[:1].expand_as(sums))
    exact = addends.double().sum(1)
    error = (sums[0] - exact).abs()
    # A number is rounded at most once on each of the up to eight messages on its way.
    largest = addends.abs().sum(1).max()
    unit = {None: 2.0**-23, torch.bfloat16: 2.0**-8, torch.int8: 1 / 127}[messages]
    assert error.max() <= 8 * unit * largest
    if messages is torch.int8:
        # What rounding loses in one step comes with the next, so that errors do not add up.
        total = (sums[0] - exact).sum(0).abs().max()
        assert total <= 8 * unit * largest


def test_a_sum_of_fewer_numbers_than_ranks_leaves_out_empty_messages():
    addends, sums = summed(KINDS["direct"], None, 1, numbers=2)
    torch.testing.assert_close(sums[0], addends.sum(1))


# ---------------------------------------------------------------- in an executor
def sums_for(schedule, tied=()):
    """A different kind of sum for each part."""
    plans = []
    for part in range(schedule.parts):
        ranks = tuple(sorted({s.rank for s in schedule.stages if s.part == part}))
        kinds = [
            SumPlan((part,), SumKind.RING, ranks[::-1]),
            even_sum((part,), ranks),
            SumPlan((part,), SumKind.TWO_LEVELS, ranks, groups=(ranks[:1], ranks[1:])),
        ]
        plans.append(kinds[part % len(kinds)])
    if tied:
        ranks = tuple(sorted({s.rank for s in schedule.stages if s.part in tied}))
        plans.append(even_sum(tied, ranks))
    return tuple(plans)


def trained(
    schedule, model, batches, sums=(), together=False, mean=Mean.ALL, timed=False
):
    """Train on threads with own copies; return the gradients of all ranks by name, and the last results."""

    def work(comm):
        parts = split(copy.deepcopy(model), layers_of(schedule))
        mine = {
            n: parts[s.part]
            for n, s in enumerate(schedule.stages)
            if s.rank == comm.rank
        }
        options = RunOptions(sums=sums, mean=mean)
        executor = Executor(lower(schedule), mine, comm, token_loss, options=options)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            result = executor.step(batch, timed=timed, sums=last or not together)
        assert not executor.gradients.local
        gradients = {}
        for part in mine.values():
            for name, parameter in part_parameters(part).items():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad
        return gradients, result.timeline

    return run_threads(schedule.ranks, work)


def assert_same(ours, theirs):
    for (mine, _), (expected, _) in zip(ours, theirs, strict=True):
        assert mine.keys() == expected.keys()
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_planned_sums_give_the_gradients_of_the_backends_sums(tied):
    schedule = make("1f1b", ranks=2, microbatches=2, copies=3)
    model = gpt(2, tied=tied)
    batches = [data(6, seed=seed) for seed in range(2)]
    plans = sums_for(schedule, (0, 1) if tied else ())
    theirs = trained(schedule, model, batches)
    ours = trained(schedule, model, batches, plans, timed=True)
    assert_same(ours, theirs)
    for copies in ((0, 2, 4), (1, 3, 5)):
        first = ours[copies[0]][0]
        for rank in copies[1:]:
            assert all(
                torch.equal(first[name], one) for name, one in ours[rank][0].items()
            )
    timeline = ours[0][1]
    assert len(timeline.sums) == len(plans)
    for one in timeline.sums:
        assert one.ranks in ((0, 2, 4), (1, 3, 5), (0, 1, 2, 3, 4, 5))
        assert 0 < one.start <= one.end <= timeline.makespan


@pytest.mark.parametrize("mean", list(Mean))
@pytest.mark.parametrize("planned", [False, True])
def test_several_steps_can_share_one_sum(planned, mean):
    schedule = make("skip", ranks=3, microbatches=4, skips=1, copies=2)
    model = llama(4)
    batches = [data(8, seed=seed) for seed in range(3)]
    plans = sums_for(schedule) if planned else ()
    theirs = trained(schedule, model, batches, mean=mean)
    assert_same(trained(schedule, model, batches, plans, True, mean), theirs)


def test_a_failed_step_gives_up_gradients_that_are_not_summed_yet():
    schedule = make("1f1b", ranks=1, microbatches=1, copies=2)
    model = llama(1)

    def work(comm):
        mine = {comm.rank: split(copy.deepcopy(model), (1,))[0]}
        executor = Executor(lower(schedule), mine, comm, token_loss)
        executor.step(data(2), sums=False)
        assert executor.gradients.local
        mine[comm.rank].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            executor.step(data(2))
        assert not executor.gradients.local

    run_threads(2, work)


def test_a_plan_for_other_ranks_is_refused():
    schedule = make("1f1b", ranks=2, microbatches=2, copies=2)
    plans = (even_sum((0,), (0, 1)),)
    with pytest.raises(
        ShapeError, match=r"over ranks \[0, 1\], but it is on ranks \[0, 2\]"
    ):
        trained(schedule, llama(2), [data(4)], plans)
