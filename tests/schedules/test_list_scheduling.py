"""List scheduling under memory caps: it never stalls, never exceeds the cap, and never idles without a reason."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import ModelCost, PartCost, Seconds, UnitCost, make, simulate
from penstock.cost.columns import columns
from penstock.errors import ShapeError
from penstock.schedules.list_scheduling import (
    backward_first,
    defer_weights,
    list_schedule,
    oldest_first,
    sequential_schedule,
)
from penstock.schedules.orders import loop_placement, paths_through, wave_placement
from penstock.schedules.transforms import split_backward
from random_schedules import random_cost, random_schedule


def least_caps(stages, microbatches, cost, split) -> list[float]:
    """Return the most that one whole micro-batch takes on each rank."""
    draft = sequential_schedule(stages, microbatches, split)
    gains = columns(draft, cost).gain
    caps = np.zeros((draft.ranks, len(microbatches)))
    np.add.at(caps, (draft.table.rank, draft.table.microbatch), gains)
    return caps.max(axis=1).tolist()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("priority", [backward_first, oldest_first])
def test_it_never_stalls_when_the_cap_holds_one_micro_batch(split, priority):
    rng = np.random.default_rng(5)
    for _ in range(60):
        tables = random_schedule(rng)
        cost = random_cost(rng, tables.ranks, tables.parts, serial=False)
        least = least_caps(tables.stages, tables.microbatches, cost, split)
        for factor in (1.0, 1.3, 2.0):
            caps = [cap * factor for cap in least]
            listed = list_schedule(
                tables.stages, tables.microbatches, cost, caps, split, priority
            )
            peaks = simulate(listed, cost).peak_activations
            assert all(
                peak <= cap + 1e-6 for peak, cap in zip(peaks, caps, strict=True)
            )


@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize("comm", [0.0, 0.1, 0.25])
def test_waves_with_split_backwards_never_stall_under_any_cap(waves, comm):
    for ranks in (4, 6):
        stages = wave_placement(ranks, waves)
        for cap in (1, ranks / 2, 0.75 * ranks, ranks, 2 * ranks):
            cost = UnitCost(comm=comm)
            listed = list_schedule(
                stages, paths_through(stages, 2 * ranks), cost, cap, split=True
            )
            assert max(simulate(listed, cost).peak_activations) <= cap + 1e-9


def test_a_cap_that_does_not_hold_one_micro_batch_is_refused_with_the_least_that_does():
    stages = loop_placement(4, 2)
    with pytest.raises(
        ShapeError,
        match=r"a cap of 0.5 on rank 0 .* the least cap that works there is 1",
    ):
        list_schedule(stages, paths_through(stages, 4), UnitCost(), cap=0.5)


def test_no_rank_idles_while_it_could_act():
    rng = np.random.default_rng(9)
    for _ in range(40):
        tables = random_schedule(rng)
        cost = random_cost(rng, tables.ranks, tables.parts, serial=False)
        listed = list_schedule(tables.stages, tables.microbatches, cost)
        timeline = simulate(listed, cost)
        table = listed.table
        ready = np.zeros(len(table))
        for column in table.needs.T:
            local = table.rank[column] == table.rank
            there = np.where(local, timeline.end[column], timeline.arrived[column])
            ready = np.maximum(ready, np.where(column >= 0, there, 0.0))
        for rank in range(listed.ranks):
            lane = timeline.lane(rank)
            start, end, can = timeline.start[lane], timeline.end[lane], ready[lane]
            for i in range(len(start)):
                idle_from = end[i - 1] if i else 0.0
                if start[i] > idle_from + 1e-6:
                    # No later action could have run in this idle time.
                    assert (can[i:] >= start[i] - 1e-6).all()


def test_deferring_weights_costs_neither_time_nor_memory():
    rng = np.random.default_rng(13)
    for _ in range(60):
        ranks, waves = int(rng.integers(2, 6)), int(rng.integers(1, 3))
        schedule = split_backward(
            make("hanayo", ranks=ranks, microbatches=6, waves=waves)
        )
        cost = UnitCost(comm=float(rng.uniform(0, 0.3)))
        before, after = (
            simulate(schedule, cost),
            simulate(defer_weights(schedule, cost), cost),
        )
        assert after.makespan <= before.makespan + 1e-9
        assert (after.peak_activations <= before.peak_activations + 1e-9).all()


def test_deferring_weights_keeps_the_order_of_everything_else():
    schedule = split_backward(make("interleaved", ranks=3, microbatches=6))
    later = defer_weights(schedule, UnitCost())
    for before, after in zip(schedule.lanes, later.lanes, strict=True):
        assert [a for a in before if a.op != "W"] == [a for a in after if a.op != "W"]


def test_compiled_and_plain_loops_make_the_same_schedule(monkeypatch):
    stages = wave_placement(3, 2)
    plain = list_schedule(
        stages, paths_through(stages, 7), UnitCost(comm=0.05), cap=3, split=True
    )
    monkeypatch.setattr("penstock.ir.compiled.MIN_COMPILED_SIZE", 0)
    compiled = list_schedule(
        stages, paths_through(stages, 7), UnitCost(comm=0.05), cap=3, split=True
    )
    assert plain == compiled
    cost = UnitCost(comm=0.05)
    fast = simulate(compiled, cost)
    monkeypatch.undo()
    assert np.array_equal(fast.start, simulate(plain, cost).start)


@pytest.mark.parametrize("recompute", [False, True])
def test_odd_numbers_of_bytes_neither_stall_it_nor_exceed_the_cap(recompute):
    rng = np.random.default_rng(7)
    for _ in range(20):
        ranks, count = int(rng.integers(2, 6)), int(rng.integers(1, 9))
        parts = tuple(
            PartCost(
                Seconds(*rng.random(1)),
                Seconds(*rng.random(1)),
                Seconds(*rng.random(1)),
                held=float(rng.uniform(1e7, 1e10)),
                kept=float(rng.uniform(1e6, 1e7)),
                message=float(rng.uniform(1e5, 1e6)),
                recompute=recompute,
            )
            for _ in range(ranks)
        )
        cost, stages = ModelCost(parts), loop_placement(ranks)
        least = max(least_caps(stages, paths_through(stages, count), cost, split=True))
        for cap in (least, 2.5 * least):
            listed = list_schedule(
                stages, paths_through(stages, count), cost, cap, split=True
            )
            assert max(simulate(listed, cost).peak_activations) <= cap * (1 + 1e-9)
        split = split_backward(make("gpipe", ranks=ranks, microbatches=count))
        before, after = (
            simulate(one, cost).peak_activations
            for one in (split, defer_weights(split, cost))
        )
        assert (after <= before * (1 + 1e-9)).all()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_recomputed_activations_need_room_only_once(chunks, split):
    part = PartCost(
        Seconds(1), Seconds(1), Seconds(1), held=10.0, message=1.0, recompute=True
    )
    cost, stages = ModelCost((part,) * 2 * chunks), loop_placement(2, chunks)
    least = float(
        max(
            simulate(
                sequential_schedule(stages, paths_through(stages, 8), split), cost
            ).peak_activations
        )
    )
    assert least == 10 + chunks - 1
    for cap in (least, least + 3):
        listed = list_schedule(stages, paths_through(stages, 8), cost, cap, split)
        assert max(simulate(listed, cost).peak_activations) <= cap
    with pytest.raises(
        ShapeError, match=f"the least cap that works there is {least:g}"
    ):
        list_schedule(stages, paths_through(stages, 8), cost, least - 1, split)
