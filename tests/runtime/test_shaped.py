"""The emulated slow network: messages and steps take as long as the links and the simulator say."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from commands import environment
from forked import Command
from machines import limit, two_machines
from penstock import ModelCost, Network, PartCost, Seconds, lower, make, simulate
from penstock.ir import schedule_of
from penstock.runtime import Executor, batch_of, run_threads
from penstock.runtime.comm.thread import ThreadComm
from penstock.runtime.recorder import clock_offset
from virtual_time import ShapedComm, run_in_virtual_time, sleeping

KILOBYTE = torch.zeros(1, 1, 256)
SCRIPT = Path(__file__).parents[1] / "shaped_workers.py"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The clock of a world in which only sleep takes time."""
    return run_in_virtual_time(monkeypatch)


def exchange(
    clock: Callable[[], float], network: Network, messages: int = 1, **options: float
) -> list[float]:
    """Seconds from the first send until each message is there."""

    def work(comm: ThreadComm) -> list[float]:
        shaped = ShapedComm(comm, network, **options)
        begin = clock()
        comm.barrier()
        if comm.rank == 0:
            for _ in range(messages):
                shaped.send(KILOBYTE, 1)
            return []
        there = []
        for _ in range(messages):
            shaped.receive((1, 1, 256), torch.float32, 0).wait()
            there.append(clock() - begin)
        return there

    return run_threads(2, work)[1]


def test_a_message_takes_latency_and_bandwidth(clock):
    took = exchange(clock, Network(0.02, 1024 / 0.03))
    assert took == pytest.approx([0.05])


def test_on_a_real_clock_no_message_is_early():
    took = exchange(time.monotonic, Network(0.02, 1024 / 0.03, serial=True), 2)
    assert took[0] >= 0.05
    assert took[1] >= 0.08


def test_time_and_size_can_be_scaled(clock):
    network = Network(2.0, 1024 * 1000 / 3.0)
    assert exchange(clock, network, scale=0.01, inflate=1000) == pytest.approx([0.05])


def test_messages_of_a_serial_link_queue_and_others_do_not(clock):
    alone = Network(0.02, 1024 / 0.02)
    assert exchange(clock, alone, 3) == pytest.approx([0.04, 0.04, 0.04])
    serial = replace(alone, serial=True)
    assert exchange(clock, serial, 3) == pytest.approx([0.04, 0.06, 0.08])


def test_each_direction_of_each_pair_has_its_own_link(clock):
    network = Network(((0.0, 0.01), (0.05, 0.0)))

    def work(comm: ThreadComm) -> float:
        shaped = ShapedComm(comm, network)
        shaped.send(KILOBYTE, 1 - comm.rank)
        shaped.receive((1, 1, 256), torch.float32, 1 - comm.rank).wait()
        return clock()

    assert run_threads(2, work) == pytest.approx([0.05, 0.01])


def test_clocks_agree_whatever_an_emulated_link_takes(clock):
    network = Network(((0.0, 0.01), (0.05, 0.0)))
    ahead = run_threads(2, lambda comm: clock_offset(ShapedComm(comm, network)))
    assert ahead == [0.0, 0.0]


def test_ranks_of_one_host_read_the_same_clock():
    assert run_threads(3, clock_offset) == [0.0] * 3


def test_a_sum_takes_as_long_as_a_ring(clock):
    def work(comm: ThreadComm) -> float:
        shaped, x = ShapedComm(comm, Network(0.005, 1024 / 0.03)), KILOBYTE.clone() + 1
        shaped.add(x, (0, 1, 2)).wait()
        assert x.unique().tolist() == [3.0]
        return clock()

    assert run_threads(3, work) == pytest.approx([4 * (0.005 + 0.01)] * 3)


# ---------------------------------------------------------------- a whole step
CASES = {
    "skip": {"ranks": 4, "microbatches": 6, "skips": 1},
    "1f1b": {"ranks": 4, "microbatches": 6},
    "hanayo": {"ranks": 3, "microbatches": 3},
    "seq1f1b": {"ranks": 3, "microbatches": 3, "slices": 2},
    "zb-h1": {"ranks": 3, "microbatches": 4},
}


def uneven(ranks: int, serial: bool) -> Network:
    """Links of 5 to 40 ms."""
    far = tuple(
        tuple(0.005 + 0.005 * ((3 * a + 5 * b) % 8) for b in range(ranks))
        for a in range(ranks)
    )
    return Network(far, 32 * 4 / 0.01, serial)


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_as_long_as_the_simulator_says(clock, name, serial):
    schedule = make(name, **CASES[name])
    tokens = 2 * schedule.slices
    speeds = tuple(1.0 + rank / 4 for rank in range(schedule.ranks))
    part = PartCost(
        Seconds(0.0, 0.02 / tokens),
        Seconds(0.0, 0.02 / tokens),
        Seconds(0.0, 0.01 / tokens),
        message=64.0,
    )
    cost = ModelCost((part,) * schedule.parts, uneven(schedule.ranks, serial), speeds)
    predicted = simulate(rescaled(schedule, tokens), cost).makespan
    assert one_step(schedule, cost, tokens) == pytest.approx(predicted, rel=1e-9)


def rescaled(schedule, tokens: int):
    """The same with sequences of so many tokens."""
    cut = [
        replace(m, tokens=tokens, cuts=tuple(c * tokens // m.tokens for c in m.cuts))
        for m in schedule.microbatches
    ]
    return schedule_of(schedule.stages, cut, schedule.lanes)


def one_step(schedule, cost: ModelCost, tokens: int) -> float:
    """Sleeping stages on a shaped network; 16 numbers a token are the 64 bytes of the cost."""
    count = len(schedule.microbatches)
    batch = batch_of(
        [torch.zeros(1, tokens, 16)] * count,
        [torch.zeros(1, tokens, dtype=torch.long)] * count,
    )

    def work(comm: ThreadComm) -> float:
        shaped = ShapedComm(comm, cost.network)
        mine = {
            number: sleeping.Sleeping(cost.parts[stage.part], cost.speeds[comm.rank])
            for number, stage in enumerate(schedule.stages)
            if stage.rank == comm.rank
        }
        executor = Executor(lower(schedule), mine, shaped, lambda y, _: y.sum())
        comm.barrier()
        timeline = executor.step(batch, timed=True).timeline
        return timeline.makespan if timeline is not None else 0.0

    return max(run_threads(schedule.ranks, work, patience=30))


# ---------------------------------------------------------------- against a real limit
def test_a_real_link_of_that_bandwidth_is_no_faster(clock, tmp_path):
    """Two machines on a cable limited by the kernel's token bucket, against the emulation of it.

    How much slower it is depends on what else the machine does.
    """
    megabits, size = 80, 1_000_000
    network = Network(0.0, megabits * 1e6 / 8, serial=True)
    _, emulated = exchange(clock, network, 2, inflate=size / KILOBYTE.nbytes)
    with two_machines() as machines:
        limit(machines, megabits)
        started = [
            Command(
                tmp_path,
                [str(rank), machines[0][2], card, str(size)],
                environment(),
                script=SCRIPT,
                network=name,
            )
            for rank, (name, card, _) in enumerate(machines)
        ]
        said = [one.communicate(timeout=600) for one in started]
    took = [float(word) for word in re.findall(r"took ([\d.]+)", said[1][0])]
    assert took, said
    # The bucket lets a little through at once, before each of the two messages.
    assert min(took) > 0.9 * emulated
