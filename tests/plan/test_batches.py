"""Rows and cuts of a batch, planned together."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest

from penstock.cost import Profile, RowProfiles
from penstock.cost.profile import Point, block
from penstock.errors import ShapeError
from penstock.ir import MicroBatch
from penstock.plan.slices import Stages, cut_batch_alike, cut_batch_freely
from penstock.schedules import make
from penstock.schedules.list_scheduling import sequential_schedule
from penstock.schedules.orders import loop_placement
from penstock.schedules.transforms import slice_tokens
from penstock.sim import simulate

TOKENS = 64
RANKS = 3
NOTHING = block([Point(8, 0, 0.0, 0.0, 0.0, 0.0)])


def profile(rows: int, launch: float) -> Profile:
    """A layer with a fixed cost for each slice, so that two rows take less than twice as long."""

    def seconds(tokens: int, prefix: int) -> float:
        return launch + rows * (0.1 * tokens + 0.002 * tokens * (prefix + tokens / 2))

    layer = block(
        [
            Point(tokens, prefix, *(k * seconds(tokens, prefix) for k in (1, 2, 1, 1)))
            for tokens in (8, 16, 32, 64)
            for prefix in (0, 16, 32, 56)
            if tokens + prefix <= TOKENS
        ]
    )
    return Profile(RANKS, TOKENS, rows, 0.0, NOTHING, layer, NOTHING)


def stages(launch: float) -> Stages:
    profiles = RowProfiles(tuple(profile(rows, launch) for rows in (1, 2, 4)))
    return Stages(RANKS, TOKENS, profiles, granularity=16)


def simulated(setting: Stages, rows: int, microbatches: int, cuts) -> float:
    """What the simulator says about all forwards, then all backwards."""
    cost = setting.profiles.at(rows).cost((1,) * RANKS, tokens=TOKENS)
    gpipe = make("gpipe", ranks=RANKS, microbatches=microbatches)
    return simulate(slice_tokens(gpipe, cuts), cost).makespan


def every_cuts():
    inner = (16, 32, 48)
    for used in product((False, True), repeat=len(inner)):
        chosen = [cut for cut, is_used in zip(inner, used, strict=True) if is_used]
        yield (0, *chosen, TOKENS)


@pytest.mark.parametrize("launch", [0.01, 3.0, 40.0])
def test_the_first_choice_is_the_best_of_all_rows_and_cuts(launch):
    setting = stages(launch)
    choices = cut_batch_alike(setting, 4)
    assert [choice.latency for choice in choices] == sorted(
        choice.latency for choice in choices
    )
    assert {choice.rows for choice in choices} == {1, 2, 4}
    for choice in choices:
        assert choice.alike
        assert sum(each.rows for each in choice.microbatches) == 4
        cuts = choice.microbatches[0].cuts
        assert choice.latency == pytest.approx(
            simulated(setting, choice.rows, 4 // choice.rows, cuts)
        )
    best = min(
        simulated(setting, rows, 4 // rows, cuts)
        for rows in (1, 2, 4)
        for cuts in every_cuts()
    )
    assert choices[0].latency == pytest.approx(best)


def test_dear_launches_lead_to_more_rows_and_cheap_ones_to_slices():
    cheap = cut_batch_alike(stages(0.01), 4)[0]
    dear = cut_batch_alike(stages(200.0), 4)[0]
    assert (cheap.rows, dear.rows, dear.slices) == (1, 4, 1)
    assert cheap.slices > 1


def test_free_micro_batches_are_never_slower_than_equal_ones():
    for launch in (0.01, 3.0, 40.0):
        setting = stages(launch)
        for batch in (3, 4, 6):
            free = cut_batch_freely(setting, batch)
            assert sum(each.rows for each in free.microbatches) == batch
            assert all(each.cuts[-1] == TOKENS for each in free.microbatches)
            rows = [n for n in (1, 2, 4) if batch % n == 0]
            alike = cut_batch_alike(setting, batch, rows)[0]
            assert free.latency <= alike.latency * (1 + 1e-9)
    odd = cut_batch_freely(stages(40.0), 3)
    assert sorted(each.rows for each in odd.microbatches) == [1, 2]


def test_a_limit_on_slices_is_kept_and_a_higher_one_is_never_slower():
    setting = replace(stages(0.01), granularity=8)
    latencies = []
    for limit in (1, 2, 3, 8):
        choices = cut_batch_alike(setting, 2, limit=limit)
        assert max(choice.slices for choice in choices) <= limit
        latencies.append(choices[0].latency)
    assert latencies == sorted(latencies, reverse=True)
    assert latencies[0] > latencies[-1]


def test_cuts_of_a_choice_make_a_schedule_that_runs():
    choice = cut_batch_freely(stages(3.0), 6)
    path = tuple(range(RANKS))
    microbatches = [MicroBatch(path, TOKENS, each.cuts) for each in choice.microbatches]
    schedule = sequential_schedule(loop_placement(RANKS), microbatches)
    assert schedule.ranks == RANKS
    for each in choice.microbatches:
        assert all(begin < end for begin, end in pairwise(each.cuts))


def test_invalid_batches_are_refused_with_their_numbers():
    setting = stages(1.0)
    with pytest.raises(ShapeError, match=r"4 rows cannot be dealt out .* of 3 rows"):
        cut_batch_alike(setting, 4, rows=(3,))
    with pytest.raises(ShapeError, match="a batch of 0 rows"):
        cut_batch_freely(setting, 0)
    with pytest.raises(ShapeError, match="no micro-batches of"):
        cut_batch_freely(setting, 1, rows=(2,))
    with pytest.raises(ShapeError, match="has 2 parts, but there are 3 ranks"):
        cut_batch_alike(replace(setting, partition=(1, 2)), 4)
