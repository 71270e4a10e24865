"""Measured links match an emulated network and a limited cable, and a cluster.toml keeps them."""

from __future__ import annotations

import pytest

from commands import environment
from forked import Command
from machines import limit, two_machines
from penstock import Network
from penstock.formats import dump_cluster, load_cluster, read_cluster
from penstock.measure.links import disjoint_pairs, measured_network
from penstock.measure.survey import cluster_of
from penstock.runtime import run_threads, spawn
from penstock.runtime.comm.thread import ThreadComm
from virtual_time import ShapedComm, run_in_virtual_time

MEGABYTE = 1e6
LATENCY = ((0.0, 5e-3, 15e-3), (5e-3, 0.0, 10e-3), (15e-3, 10e-3, 0.0))
# Not the same both ways.
BANDWIDTH = ((1e9, 40e6, 80e6), (20e6, 1e9, 60e6), (80e6, 30e6, 1e9))
PAIRS = [(a, b) for a in range(3) for b in range(3) if a != b]


def test_both_directions_of_emulated_links_are_measured_and_saved(monkeypatch):
    run_in_virtual_time(monkeypatch)

    def work(comm: ThreadComm):
        return cluster_of(ShapedComm(comm, Network(LATENCY, BANDWIDTH)))

    found = run_threads(3, work, patience=60)[0]
    for a, b in PAIRS:
        # A trip also has a reply of 8 bytes, which the fit takes for latency.
        assert found.latency[a][b] == pytest.approx(LATENCY[a][b], abs=1e-6)
        assert found.bandwidth[a][b] == pytest.approx(BANDWIDTH[a][b], rel=1e-6)
    assert load_cluster(dump_cluster(found)) == found
    assert found.serial
    assert len({node.site for node in found.nodes}) == 1
    assert max(node.speed for node in found.nodes) == 1.0
    assert all(node.memory > 1e6 for node in found.nodes)


def test_one_number_for_all_links_is_the_median_of_neighbors(monkeypatch):
    run_in_virtual_time(monkeypatch)
    network = Network(((0.0, 2e-3, 0.1), (2e-3, 0.0, 2e-3), (0.1, 2e-3, 0.0)), 100e6)

    def work(comm: ThreadComm) -> Network:
        return measured_network(ShapedComm(comm, network))

    # The slow pair, 0 and 2, are no neighbours.
    found = run_threads(3, work, patience=60)[0]
    assert found.latency == pytest.approx(2e-3, abs=1e-6)
    assert found.bandwidth == pytest.approx(100e6, rel=1e-6)
    assert found.serial


def test_messages_over_gloo_do_not_wait_for_each_other():
    assert spawn(2, measured_network, patience=60)[0].channels is None


def test_pairs_measured_at_the_same_time_share_no_host():
    pairs = [(a, b) for a in range(6) for b in range(a + 1, 6)]
    apart = disjoint_pairs(pairs, ["a", "b", "c", "d", "e", "f"])
    assert sorted(pair for turn in apart for pair in turn) == pairs
    assert all(
        len({rank for pair in turn for rank in pair}) == 2 * len(turn) for turn in apart
    )
    assert len(apart) <= 9
    # One machine: one after the other.
    assert len(disjoint_pairs(pairs, ["a"] * 6)) == len(pairs)
    halls = disjoint_pairs(pairs, ["a", "a", "a", "b", "b", "b"])
    assert all(
        len(turn) == 1 or all((a < 3) == (b < 3) for a, b in turn) for turn in halls
    )


# ---------------------------------------------------------------- as a user does it
def test_profile_links_writes_a_cluster_that_paths_plans_for(run):
    code, out, err = run("profile --links --ranks 3")
    assert (code, err) == (0, "wrote cluster.toml\n")
    assert "iB/s" in out
    found = read_cluster("cluster.toml")
    assert all(node.memory > 0 for node in found.nodes)
    assert all(0 < found.latency[a][b] < 1 < found.bandwidth[a][b] for a, b in PAIRS)
    code, out, _ = run(
        "lab paths --cluster cluster.toml --stages 3 --microbatches 2 --iterations 500 "
        "--cost F=0.01,held=1e6"
    )
    assert code == 0
    assert "no plan takes less than" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "profile --links",
            "one rank has no links; measure between at least two ranks",
        ),
        ("profile tiny --links --gpu h100", "leave one of them out"),
    ],
)
def test_links_that_cannot_be_measured_are_refused(run, words, says):
    code, out, err = run(words)
    assert (code, out) == (2, "")
    assert says in err


def test_two_machines_measure_the_limit_of_the_cable_between_them(tmp_path):
    """As torchrun starts it, one rank on each of two machines, on a cable limited by the kernel's token bucket."""
    megabits = 80
    with two_machines() as machines:
        limit(machines, megabits)
        meeting = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": machines[0][2],
            "MASTER_PORT": "29572",
        }
        started = [
            Command(
                tmp_path,
                ["profile", "--links", "-o", "cluster.toml"],
                environment(**meeting, RANK=str(rank), GLOO_SOCKET_IFNAME=card),
                network=name,
            )
            for rank, (name, card, _) in enumerate(machines)
        ]
        said = [one.communicate(timeout=600) for one in started]
    assert [one.returncode for one in started] == [0, 0], said
    assert said[1][0] == ""  # the first rank speaks
    found = read_cluster(tmp_path / "cluster.toml")
    rate = megabits * MEGABYTE / 8
    ways = [found.bandwidth[0][1], found.bandwidth[1][0]]
    assert min(ways) > 0
    assert (
        max(ways) < 1.15 * rate
    )  # never faster than the cable, however busy the machine is
