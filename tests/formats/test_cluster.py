"""Clusters: reading and rejecting a cluster.toml, and its effect on a simulation."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from case_tables import cases
from commands import called
from penstock import make, simulate
from penstock.cost import City, Cluster, Node, NoisyCost, PartCost, PausedCost, Seconds
from penstock.errors import FileError, ShapeError, UnknownNameError
from penstock.formats import dump_cluster, load_cluster, read_cluster, write_cluster

HEAD = 'penstock = "cluster"\nversion = 1\n'
TWO = (
    HEAD
    + '[[nodes]]\nsite = "Tokyo"\ncount = 2\nslots = 3\n[[nodes]]\nsite = "Paris"\nspeed = 0.5\nmemory = 16e9\n'
)


def test_links_are_read_by_pair_by_site_and_as_a_matrix():
    text = TWO + (
        "[links]\nlatency = 0.1\nbandwidth = 1e8\n"
        '[[link]]\nbetween = ["Tokyo", "Paris"]\nlatency = 0.2\n'
        '[[link]]\nbetween = ["Tokyo", "Tokyo"]\nbandwidth = inf\n'
        "[[link]]\nbetween = [0, 2]\nlatency = 0.3\noneway = true\n"
    )
    found = load_cluster(text)
    assert found.nodes == (
        Node("Tokyo", 1.0, 3),
        Node("Tokyo", 1.0, 3),
        Node("Paris", 0.5, None, 16e9),
    )
    assert found.latency == ((0.0, 0.1, 0.3), (0.1, 0.0, 0.2), (0.2, 0.2, 0.0))
    assert found.bandwidth == (
        (math.inf, math.inf, 1e8),
        (math.inf, math.inf, 1e8),
        (1e8, 1e8, math.inf),
    )
    matrix = load_cluster(
        TWO + "[links]\nlatency = [[0, 1, 2], [3, 0, 4], [5, 6, 0]]\n"
    )
    assert matrix.latency[2] == (5.0, 6.0, 0.0)


def test_a_dumped_cluster_loads_as_an_equal_one():
    rng = np.random.default_rng(0)
    for serial in (False, True):
        slots = [int(rng.integers(1, 9)) if n % 2 else None for n in range(5)]
        nodes = tuple(
            Node(f'"si\\te" {n}\n', float(rng.uniform(0.1, 3)), slots[n], 1e9 * (n + 1))
            for n in range(5)
        )
        latency, bandwidth = (
            tuple(map(tuple, rng.uniform(0.1, 9, (5, 5)).tolist())) for _ in range(2)
        )
        cluster = Cluster((*nodes, nodes[-1])[:5], latency, bandwidth, serial)
        assert load_cluster(dump_cluster(cluster)) == cluster
    geo = Cluster.geo(["Tokyo", "Tokyo", "Paris"])
    assert load_cluster(dump_cluster(geo)) == geo


def test_a_file_is_written_and_read(tmp_path):
    cluster = Cluster.even(3, 0.1, 1e9)
    write_cluster(cluster, tmp_path / "cluster.toml")
    assert read_cluster(tmp_path / "cluster.toml") == cluster
    with pytest.raises(FileError, match=r"cannot read .*none\.toml"):
        read_cluster(tmp_path / "none.toml")


ADDED = cases(r"""
[link]\nlatency = 1  =>  write [[link]] with two brackets
[links]\nlatencies = 1  =>  links has no key 'latencies'  =>  did you mean 'latency'
[links]\nlatency = [[0, 1], [1, 0]]  =>  latency matrix has 2 rows, but there are 3 nodes
[links]\nlatency = [[0, 1, 1], [1, 0], [1, 1, 0]]
    =>  row 1 of the latency matrix has 2 numbers, but there are 3
[[link]]\nbetween = ["Tokio", "Paris"]\nlatency = 1  =>  'Tokio', but no node is there  =>  'Tokyo'
[[link]]\nbetween = [0, 3]\nlatency = 1  =>  node 3, but there are nodes 0..2
[[link]]\nlatency = 1  =>  does not name its two ends
[[link]]\nbetween = [0, 1]\nlatency = 1e308  =>  latency is out of range
[links]\nlatency = inf  =>  links.latency is out of range
[links]\nlatency = -1  =>  latency from rank 0 to rank 1 is -1
[links]\nbandwidth = 'much'  =>  links.bandwidth is "much", not a number
serial =  =>  not TOML
""")
CHANGED = cases(r"""
slots  =>  slot  =>  cluster.toml:6:1: nodes[0] has no key 'slot'\n\n  6 | slot = 3\n      ^^^^\n  did you mean 'slots'
speed = 0.5  =>  speed = 0  =>  speed 0; a speed must be more than 0
slots = 3  =>  slots = 0  =>  nodes[0].slots is out of range
count = 2  =>  count = 1.5  =>  not a whole number
version = 1  =>  version = 2  =>  version 2, but this Penstock reads versions up to 1
"cluster"  =>  "plan"  =>  its kind is "plan", not "cluster"
version = 1  =>  version = 1\nserial = 1  =>  serial is 1, not true or false  =>  write true or false
""")
BAD = [
    (HEAD, ["no nodes"]),
    *((TWO + added, says) for added, *says in ADDED),
    *((TWO.replace(old, new), says) for old, new, *says in CHANGED),
]


@pytest.mark.parametrize(("text", "says"), BAD)
def test_a_bad_file_is_refused_with_advice(text, says):
    with pytest.raises(FileError) as caught:
        load_cluster(text)
    assert [words for words in says if words not in str(caught.value)] == []


ODD = (
    TWO
    + '''[links]
# slots = "a comment"
latency = [
  [0, 1, 1],  # not a header:
  [1, 0, 1],
  [1, 1, 0]
]
[[link]]
between = ["Tokyo", "Paris"]
"latency" = 1
note = """
latency = 3
"""
[[link]]
  between = [0, 1]
  latency = "near"
'''
)


def test_the_wrong_value_is_found_among_equal_keys_comments_and_strings():
    text = ODD.replace('note = """\nlatency = 3\n"""\n', "")
    with pytest.raises(FileError) as caught:
        load_cluster(text)
    line = text[: text.index('"near"')].count("\n") + 1
    assert str(caught.value) == (
        f'cluster.toml:{line}:13: link[1].latency is "near", not a number\n\n'
        f'  {line} |   latency = "near"\n'
        "                   ^^^^^^\n"
        "  write a number from 0 to 1e+12"
    )
    with pytest.raises(FileError, match=r":21:1: link\[0\] has no key 'note'"):
        load_cluster(ODD)


def test_a_text_that_is_not_toml_is_drawn():
    with pytest.raises(FileError) as caught:
        load_cluster(HEAD + "serial = maybe\n")
    assert str(caught.value) == (
        "cluster.toml:3:10: this is not TOML: Invalid value\n\n"
        "  3 | serial = maybe\n"
        "               ^\n"
        "  correct this line"
    )


def test_latency_grows_with_distance_and_bandwidth_falls():
    near, far = Cluster.geo(["Paris", "Brussels"]), Cluster.geo(["Paris", "Sydney"])
    assert 0 < near.latency[0][1] < 0.01
    assert 0.1 < far.latency[0][1] < 0.2
    assert near.bandwidth[0][1] > 5 * far.bandwidth[0][1]
    assert Cluster.geo(["Paris", "Paris"]).bandwidth[0][1] > near.bandwidth[0][1]
    assert Cluster.geo([City("Moon base", 0, 0), "Paris"]).latency[0][1] > 0
    with pytest.raises(UnknownNameError, match="did you mean 'Paris'"):
        Cluster.geo(["Pariss"])


def test_a_cluster_needs_links_for_all_of_its_nodes():
    pair = ((0.0, 1.0),) * 2
    with pytest.raises(
        ShapeError, match="latency matrix is for 2 nodes, but there are 1"
    ):
        Cluster((Node(),), pair, pair)


def test_a_slow_node_and_a_long_link_slow_the_simulation_down():
    one = Seconds(token=1.0)
    parts = [PartCost(one, one, Seconds(), message=1.0)] * 2
    pipe = make("1f1b", ranks=2, microbatches=1)
    plain = Cluster.even(2)
    assert simulate(pipe, plain.cost(parts)).makespan == 4
    slow = Cluster((Node(), Node(speed=0.5)), plain.latency, plain.bandwidth)
    assert simulate(pipe, slow.cost(parts)).makespan == 6
    assert simulate(
        pipe, Cluster.even(2, latency=1.0, bandwidth=0.5).cost(parts)
    ).makespan == 4 + 2 * (1 + 2)


def test_a_rank_rests_after_an_action_while_its_message_is_on_its_way():
    one = Seconds(token=1.0)
    cost = Cluster.even(2, latency=1.0).cost([PartCost(one, one, Seconds())] * 2)
    pipe = make("gpipe", ranks=2, microbatches=2)
    rested = simulate(pipe, PausedCost(cost, gap=0.5, first=0.25))
    assert rested.lane(0)
    starts = {str(span.action): span.start for span in rested.spans()}
    assert (starts["0F1"], starts["1F0"]) == (1.25, 2.0)  # the first forward's rest
    assert simulate(pipe, PausedCost(cost)).makespan == simulate(pipe, cost).makespan
    assert (
        simulate(pipe, NoisyCost(PausedCost(cost, 5.0, 5.0), spread=0.0)).makespan
        > simulate(pipe, cost).makespan
    )


def test_the_command_plans_paths_for_a_cluster(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cities = "London Paris Tokyo Osaka Sydney Milan Seoul Madrid"
    write_cluster(Cluster.geo(cities.split()), "c.toml")
    line = "lab paths --cluster c.toml --stages 4 --microbatches 3 --skip 0.25 "
    line += "--iterations 1500 --cost F=0.5,message=1e6"
    out = ""
    for words in (f"{line} -o plan.json", "check plan.json", f"{line} --json"):
        code, said, _ = called(monkeypatch, capsys, words)
        assert code == 0
        out += said
    assert "no plan takes less than" in out
    assert "is a valid schedule: 8 ranks" in " ".join(out.split())
    facts = json.loads(out.splitlines()[-1])
    assert facts["lower_bound"] <= facts["makespan"] < facts["full_pipeline"]
    assert sorted(node for nodes in facts["nodes"] for node in nodes) == list(range(8))
