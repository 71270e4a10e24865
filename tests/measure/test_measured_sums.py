"""How fast sums are while all ranks sum is measured, written, and followed by simulations and plans."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Network, make, simulate
from penstock.config import ModelConfig
from penstock.cost.gpus import analytic_profile
from penstock.cost.network import BufferedMessage
from penstock.errors import PenstockError
from penstock.formats import dump_profile, load_profile, read_profile, write_profile
from penstock.measure.links import (
    groups_that_sum,
    measured_network,
    measured_sum_bandwidth,
)
from penstock.runtime import run_threads, spawn
from virtual_time import ShapedComm

TINY = (
    "tiny --set parallel.pp=2 --set model.hidden_size=32 --set model.layers=3 --set model.heads=4 "
    "--set model.kv_heads=2 "
    "--set model.intermediate_size=48 --quick"
)
MEGABYTE = 1e6


@given(ranks=st.integers(2, 65))
def test_every_rank_sums_with_at_least_one_other(ranks):
    groups = groups_that_sum(ranks)
    assert sorted(rank for group in groups for rank in group) == list(range(ranks))
    assert all(len(group) in (2, 3) for group in groups)
    assert all(list(group) == sorted(group) for group in groups)
    assert sum(len(group) == 3 for group in groups) == ranks % 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_that_are_slower_than_messages_are_measured(ranks):
    """On emulated links, where a sum sleeps as long as its ring takes."""
    network = Network(2e-3, 400 * MEGABYTE, sum_bandwidth=20 * MEGABYTE)

    def work(comm):
        return measured_sum_bandwidth(ShapedComm(comm, network), network)

    found = run_threads(ranks, work, patience=60)
    assert len(set(found)) == 1, "all ranks find the same number"
    # A busy machine makes sums slower, but nothing makes them faster than the links.
    assert 0 < found[0] < 25 * MEGABYTE


def test_sums_take_the_same_share_of_links_that_differ():
    fast, slow = 400 * MEGABYTE, 100 * MEGABYTE
    rows = tuple(
        tuple(fast if a // 2 == b // 2 else slow for b in range(4)) for a in range(4)
    )
    links = Network(1e-3, rows)
    emulated = replace(links, sum_bandwidth=20 * MEGABYTE)  # 0 and 3, and 1 and 2

    def work(comm):
        return measured_sum_bandwidth(ShapedComm(comm, emulated), links)

    found = run_threads(4, work, patience=60)[0]
    share = found[0][1] / fast
    assert 0 < share < 0.25
    assert found[0][3] / slow == pytest.approx(share)


@pytest.mark.parametrize(("ranks", "every"), [(2, False), (3, False), (3, True)])
def test_processes_measure_links_and_sums_over_gloo(ranks, every):
    found = spawn(ranks, measured_network, every, patience=60)
    assert all(one == found[0] for one in found)
    sums = found[0].sum_bandwidth
    assert isinstance(sums, tuple) == every
    assert 0 < (min(map(min, sums)) if every else sums) < math.inf  # the slowest


def test_one_rank_has_no_sums():
    assert run_threads(1, measured_network) == [Network()]


# ---------------------------------------------------------------- the file
BUFFERS = (BufferedMessage(1e6, 1e-4, 2e-4), BufferedMessage(4e6, math.inf, 1e-3))
ROWS = ((math.inf, 2e8), (3e8, math.inf))
PAIRS = Network(
    ((0.0, 1e-4), (2e-4, 0.0)), ((math.inf, 1e9), (2e9, math.inf)), sum_bandwidth=ROWS
)


@pytest.mark.parametrize(
    "network",
    [
        Network(1e-4, 1e9, serial=True, channels=1, sum_bandwidth=4e8),
        Network(1e-4, 1e9, serial=True, channels=2, buffers=BUFFERS),
        Network(1e-4, 1e9, serial=True, sum_bandwidth=math.inf),
        PAIRS,
    ],
    ids=["one", "buffers", "unlimited", "pairs"],
)
def test_everything_about_links_comes_back_from_its_file(network):
    made = replace(analytic_profile(ModelConfig(vocab_size=512), 64), network=network)
    assert load_profile(dump_profile(made)) == made


def test_buffers_that_make_no_sense_are_refused_with_their_place():
    network = Network(1e-4, 1e9, serial=True, channels=2, buffers=BUFFERS)
    made = replace(analytic_profile(ModelConfig(vocab_size=512), 64), network=network)
    text = dump_profile(made).replace('"bytes": 4000000.0', '"bytes": 4000.0')
    with pytest.raises(PenstockError, match="from the smallest to the largest") as why:
        load_profile(text)
    assert "penstock profile" in str(why.value)
    assert "buffers" in str(why.value)


def test_profiles_without_the_bandwidth_of_sums_have_the_one_of_messages():
    made = analytic_profile(ModelConfig(vocab_size=512), 64)
    text = dump_profile(made)
    assert "sum_bandwidth" not in text
    assert load_profile(text).network.sum_bandwidth is None


# ---------------------------------------------------------------- as a user does it
def test_penstock_profile_writes_how_fast_sums_are(run):
    line = f"profile {TINY} --set data.seq_len=16 --rows 1 --ranks 2 -o mine.json"
    code, out, _ = run(line)
    assert code == 0
    assert "/s in all-reduces of all ranks" in out
    assert 0 < read_profile("mine.json").network.sum_bandwidth < math.inf


@pytest.fixture
def slow_sums(run):
    """Profiles of one model, with sums as fast as messages and with slower ones."""
    measured = analytic_profile(ModelConfig(layers=8, vocab_size=512), 512, ranks=4)
    links = Network(1e-6, 1e11, serial=True)
    for name, bandwidth in (("alike", None), ("slow", 1e8)):
        network = replace(links, sum_bandwidth=bandwidth)
        write_profile(replace(measured, network=network), f"{name}.json")
    return run


def test_simulations_follow_the_bandwidth_of_sums(slow_sums):
    line = "draw 1f1b:copies=2 --pp 2 --microbatches 4 --json --cost"
    alike, slow = (
        json.loads(slow_sums(f"{line} {name}.json")[1]) for name in ("alike", "slow")
    )
    schedule = make("1f1b", ranks=2, microbatches=4, copies=2)
    expected = simulate(schedule, read_profile("slow.json").cost((4, 4), tokens=512))
    assert slow["makespan"] == expected.makespan
    assert expected.makespan == max(one.end for one in expected.sums)
    assert slow["makespan"] > alike["makespan"]


def test_plans_do_without_replicas_if_sums_are_slow(slow_sums):
    line = "plan --pp 4 --microbatches 4 --limit stages=1,slices=1,weights=2 --json"
    best, seconds = {}, {}
    for name in ("alike", "slow"):
        code, out, _ = slow_sums(f"{line} --cost {name}.json -o {name}.plan.json")
        assert code == 0
        found = json.loads(out)["schedules"]
        best[name] = found[0]["weights"]
        seconds[name] = {one["schedule"]: one["step"] for one in found}
    assert best == {"alike": 2.0, "slow": 1.0}
    assert seconds["slow"]["chimera"] > seconds["alike"]["chimera"]
    assert seconds["slow"]["1f1b"] == seconds["alike"]["1f1b"]
