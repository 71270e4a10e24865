"""`penstock lab paths`: a mistake gives one clear message, and Ctrl-C shows the best plan so far."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import make, simulate
from penstock.cost import Cluster, RowProfiles
from penstock.cost.gpus import analytic_profile, gpu_of
from penstock.cost.memory import device_bytes
from penstock.formats import (
    dump_plan,
    read_cluster,
    read_plan,
    write_cluster,
    write_row_profiles,
)
from penstock.formats.config_toml import load_config
from penstock.ir import Plan
from penstock.plan.paths.rules import Rules, rules_from, rules_text
from penstock.schedules.coverage import visits_all_parts

CITIES = ["Paris", "London", "Tokyo", "Osaka", "Lisbon", "Rome", "Boston", "Madrid"]
COST = "--cost F=0.5,message=8e6"
SIZES = f"lab paths --cluster cluster.toml --stages 4 --microbatches 3 {COST} --iterations 500"
TWO = 'penstock = "cluster"\n[[nodes]]\nsite = "Tokyo"\nslots = 3\n[[nodes]]\nsite = "Osaka"\nslots = 3\n'


@pytest.fixture
def run(run, monkeypatch):
    """Run a command line in a folder with a cluster.toml."""
    monkeypatch.setenv("COLUMNS", "120")
    write_cluster(Cluster.geo(CITIES), "cluster.toml")
    return run


def test_a_longer_search_never_makes_the_mean_over_partial_and_full_steps_slower(run):
    """Paths alone got faster here, on an arrangement that made full steps slower by more."""
    line = (
        "lab paths --cluster cluster.toml --stages 3 --microbatches 2 --cost F=0.5,message=8e6 "
        "--rule full=3 --seed 5 --json"
    )
    means = []
    for iterations in (300, 1500):
        code, out, err = run(f"{line} --iterations {iterations} -o plan.json")
        assert code == 0, err
        found = json.loads(out)
        mean = (2 * found["makespan"] + found["full_step"]) / 3
        assert found["mean_step"] == pytest.approx(mean)
        plan = read_plan("plan.json")
        assert plan.facts["makespan"] == found["makespan"]
        assert plan.facts["full_makespan"] == found["full_step"]
        means.append(mean)
    assert means[1] <= means[0]


def test_a_rotation_of_one_set_says_that_nothing_changes(run):
    line = "lab paths --cluster cluster.toml --stages 3 --microbatches 2 --rotate 0 --cost F=0.5"
    code, out, err = run(f"{line} --rule share=0 --rule full=0 --iterations 300")
    assert code == 0, err
    text = " ".join(out.split())
    assert "a single set, so nothing changes from step to step: it meets all" in text


def test_a_plan_is_shown_with_its_bound_and_written(run):
    code, out, err = run(f"{SIZES} --skip 0.25 -o plan.json")
    assert (code, err) == (0, "wrote plan.json\n")
    for word in (
        "no plan takes less than",
        "gap",
        "a step that skips nothing",
        "with all parts every 10 steps",
        "part 3",
    ):
        assert word in out
    assert (
        read_plan("plan.json").facts["bound_holds_for"]
        == "every plan under these rules"
    )
    assert run("check plan.json")[1].endswith("Its paths follow the rules.\n")
    code, out, _ = run(f"{SIZES} --skip 0.25 --json")
    found = json.loads(out)
    assert found["makespan"] >= found["lower_bound"] > 0
    assert (
        found["stopped"]
        is found["cut_short"]
        is found["full_pipeline_cut_short"]
        is False
    )
    assert found["simulations"] == 500


CONFIG = """\
[model]
family = "llama"
layers = 8
hidden_size = 64
heads = 4
kv_heads = 2
intermediate_size = 128
vocab_size = 512

[data]
seq_len = 64
global_batch = 12
"""
MODEL = "--stages 3 --microbatches 2 --rule share=1/3 --iterations 200"


def test_a_config_is_planned_with_its_profile_layers_sums_and_memory(run):
    pytest.importorskip("torch")
    Path("config.toml").write_text(CONFIG)
    code, _, err = run(
        f"lab paths config.toml --cluster cluster.toml --cost h100 {MODEL} -o plan.json"
    )
    assert (code, err) == (0, "wrote plan.json\n")
    plan = read_plan("plan.json")
    assert sum(plan.partition) == 8
    assert plan.partition[-1] == 0  # the head has no layer
    assert plan.schedule.parts == 4
    assert plan.schedule.microbatches[0].tokens == 64
    facts = plan.facts
    assert facts["sums"] == "ring"  # what runs
    assert str(facts["profile"]).startswith("analytic profile of the")
    data_nodes = len({microbatch.path[0] for microbatch in plan.schedule.microbatches})
    assert facts["rows"] == 12 / (2 * data_nodes)
    gpu = gpu_of("h100")
    config = load_config(CONFIG)
    profile = analytic_profile(
        config.model, 64, facts["rows"], gpu, "bfloat16", recorded=True
    )
    cost = replace(
        replace(profile, turn=0.0).cost(plan.partition, tokens=64),
        network=read_cluster("cluster.toml").network(),
    )
    timeline = simulate(plan.schedule, cost)
    assert timeline.sums
    # The plan also counts the pause between two actions.
    assert timeline.makespan == pytest.approx(facts["makespan"], rel=0.1)
    # A profile in a file gives the same plan as the formula that wrote it.
    write_row_profiles(RowProfiles((profile,)), "profile.json")
    run(
        f"lab paths config.toml --cluster cluster.toml --cost profile.json {MODEL} -o same.json"
    )
    assert read_plan("same.json").schedule == plan.schedule
    quick = json.loads(
        run(
            f"lab paths config.toml --cluster cluster.toml --cost h100 {MODEL} --json --sums planned"
        )[1]
    )
    assert quick["makespan"] < facts["makespan"]
    # Nodes with a memory instead of slots hold weights and optimizer too.
    small = read_cluster("cluster.toml")
    used = device_bytes(plan.schedule, cost)
    for memory, code, words in (
        (int(used.max() * 900), 0, ""),
        (1000, 2, "cannot hold a single micro-batch of any part"),
    ):
        nodes = [replace(node, slots=None, memory=memory) for node in small.nodes]
        write_cluster(replace(small, nodes=tuple(nodes)), "memory.toml")
        ended, _, err = run(
            f"lab paths config.toml --cluster memory.toml --cost profile.json {MODEL}"
        )
        assert (ended, words in err) == (code, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--cost F=1", "--cost F=1 describes a model of equal parts"),
        ("--stages 6 --set model.layers=5", "5 layers cannot fill 6 parts"),
        (
            "--microbatches 5",
            "12 is not divisible by 2 data nodes with 5",
        ),
        ("--sums fast", "--sums is ring or planned, not 'fast'"),
        ("--cost b900", "b900"),
    ],
)
def test_a_wrong_option_beside_a_config_gives_one_clear_message(run, words, says):
    pytest.importorskip("torch")
    Path("config.toml").write_text(CONFIG)
    code, _, err = run(
        f"lab paths config.toml --cluster cluster.toml --cost h100 {MODEL} {words}".replace(
            "--stages 3", "--stages 3:data_nodes=2"
        )
    )
    assert code == 2
    assert says in err
    assert "Traceback" not in err


def test_what_is_missing_is_named(run):
    for words, says in {
        "--cluster cluster.toml --stages 4 --microbatches 3": "--cost F=0.5 is missing",
        "--cluster cluster.toml": "--stages is missing",
        "--stages 4 --microbatches 3": "--cluster is missing",
        "missing.toml --cluster cluster.toml": "cannot read missing.toml: No such file",
        f"{SIZES} --set run.steps=3".removeprefix("lab paths "): "name a model",
    }.items():
        code, _, err = run(f"lab paths {words}")
        assert (code, says in err) == (2, True), err


def test_sums_are_planned_proven_and_priced_by_their_type_and_passes(run):
    cost = f"{COST},gradients=4e8 --rule full=0 -o plan.json"
    sizes = SIZES.replace("500", "50").replace(COST, cost)
    steps = []
    for options, passes in (
        ("", 1),
        ("--sums planned:int8", 1),
        ("--sums planned:int8", 3),
    ):
        line = sizes.replace("--stages 4", f"--stages 4:accumulate={passes}")
        code, out, _ = run(f"{line} {options}")
        assert code == 0
        assert re.search(r"all-reduces of gradients .* after the last backward", out)
        assert ("a pass, of 3 in a step" in out) is (passes == 3)
        steps.append(read_plan("plan.json").facts["makespan"])
    assert steps == sorted(steps, reverse=True)
    plan = read_plan("plan.json")
    assert (plan.facts["sum_messages"], plan.facts["passes"]) == ("int8", 3)
    assert len(plan.sums) == 4
    out = run("check plan.json")[1]
    assert re.search(r"The \d+ messages that sum gradients cannot deadlock", out)
    code, _, err = run(f"{sizes} --sums ring:int8")
    assert (code, "write planned:int8" in err) == (2, True)


def test_the_same_command_writes_the_same_plan(run):
    for name in ("one", "other"):
        run(f"{SIZES} --skip 0.25 --seed 3 -o {name}.json")
    assert Path("one.json").read_bytes() == Path("other.json").read_bytes()


def test_a_search_that_a_time_limit_cuts_short_says_so(run):
    code, out, _ = run(f"{SIZES} --skip 0.25 --seconds 1e-9 -o plan.json")
    assert code == 0
    # The paths' search and the full pipeline's; also that of steps with all parts.
    assert (out.count("0 moves"), out.count("cut short")) == (2, 3)
    assert read_plan("plan.json").facts["cut_short"] is True
    found = json.loads(run(f"{SIZES} --skip 0.25 --seconds 1e-9 --json")[1])
    assert found["cut_short"] is found["full_pipeline_cut_short"] is True
    assert found["stopped"] is False
    assert "cut short" not in run(f"{SIZES} --skip 0.25 --seconds 3600")[1]


def test_steps_in_turn_and_full_steps_are_planned_for_the_same_nodes(run):
    sizes = SIZES.replace("--stages 4", "--stages 5").replace("500", "300")
    code, out, _ = run(f"{sizes} --rotate 1 -o plan.json")
    assert code == 0
    assert "with these nodes for the parts" in out
    plan = read_plan("plan.json")
    sets = int(re.search(r"paths in turn +(\d+) set", out)[1])
    assert sets == 1 + len(plan.rotation) > 1
    assert visits_all_parts(plan.full)
    assert plan.facts["full_makespan"] > plan.facts["makespan"]
    assert run("check plan.json")[0] == 0


def test_the_others_keep_their_parts_when_a_node_is_lost(run):
    sizes = f"{SIZES} --seed 2"
    whole = json.loads(run(f"{sizes} --json")[1])["nodes"]
    part = next(number for number, nodes in enumerate(whole) if len(nodes) > 1)
    node = whole[part][0]
    code, out, err = run(f"{sizes} --lost {node} -o left.json")
    assert code == 0, err
    assert "a step that skips nothing" not in out  # it would need the lost node
    left = json.loads(run(f"{sizes} --lost {node} --json")[1])
    assert left["nodes"] == [[n for n in nodes if n != node] for nodes in whole]
    schedule = read_plan("left.json").schedule
    assert schedule.lanes[node] == ()
    assert "the plan has nodes 0..7" in run(f"{sizes} --lost 9")[2]


def test_the_full_pipeline_is_planned_in_the_same_way_as_the_paths(run):
    found = json.loads(run(f"{SIZES} --skip 0.25 --json")[1])
    data = len(found["nodes"][0])
    alone = json.loads(
        run(
            f"{SIZES} --skip 0 --rule swaps=0 --rule behind=0 "
            "--rule distance=0 --json".replace(
                "--stages 4", f"--stages 4:data_nodes={data}"
            )
        )[1]
    )
    assert found["full_pipeline"] == alone["makespan"]
    waved = json.loads(
        run(f"{SIZES} --skip 0.25 --json".replace("--stages 4", "--stages 4:waves"))[1]
    )
    assert waved["full_pipeline"] > 0


def test_rules_are_data(run):
    code, _, _ = run(
        f"{SIZES} --rule share=1/4 --rule swaps=0 --rule full=5 -o plan.json"
    )
    assert code == 0
    facts = read_plan("plan.json").facts
    assert rules_from(str(facts["rules"]).split()) == Rules(share=0.25, swaps=0, full=5)
    schedule = read_plan("plan.json").schedule
    paths = [
        [schedule.stages[stage].part for stage in microbatch.path]
        for microbatch in schedule.microbatches
    ]
    assert all(sorted(path) == path for path in paths)  # no steps back
    code, out, _ = run(
        f"{SIZES} --rule share=1/4 --rule full=0".replace(
            "--stages 4", "--stages 4:data_nodes=3"
        )
    )
    assert code == 0
    assert "every" not in out


def test_rules_read_back_what_they_write():
    for rules in (Rules(), Rules(share=0.5, swaps=0, ahead=2, full=0, wait=1.5)):
        assert rules_from(rules_text(rules).split()) == rules


def test_a_broken_rule_is_named_with_its_micro_batches(run):
    run(f"{SIZES} --skip 0.25 -o plan.json")
    text = Path("plan.json").read_text()
    assert "share=0.25" in text
    Path("plan.json").write_text(text.replace("share=0.25", "share=0.0"))
    code, out, err = run("check plan.json")
    assert (code, out) == (2, "")
    assert "share: the path over parts" in err
    assert "meets 3 of 4 parts, not 4" in err
    assert "micro-batches: " in err
    code, _, err = run(f"{SIZES} --skip 0.25 --rule wait=0")
    assert code == 2
    assert "collision: " in err
    assert "waits" in err
    Path("other.json").write_text(
        dump_plan(Plan(make("1f1b", ranks=2, microbatches=2), "1f1b"))
    )
    code, out, _ = run("check other.json")
    assert code == 0
    assert "rules" not in out  # it was planned without rules


def test_a_plan_changed_by_hand_must_still_follow_its_rules(run):
    run(f"{SIZES} --skip 0.25 -o plan.json")
    plan = read_plan("plan.json")
    text = dump_plan(plan).replace(str(plan.facts["slots"]), " ".join(["1"] * 8))
    Path("plan.json").write_text(text)
    code, _, err = run("check plan.json")
    assert code == 2
    assert "it has 1 slots" in err


@pytest.fixture
def interruptible():
    """Handle Ctrl-C as in a terminal, wherever the tests run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_first_ctrl_c_shows_the_best_so_far(run):
    run(f"{SIZES} --skip 0.25")  # loads the compiled loops
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    code, out, err = run(
        f"{SIZES.replace('500', '1000000000')} --skip 0.25 -o plan.json"
    )
    timer.cancel()
    assert (code, err) == (130, "wrote plan.json\n")
    assert "interrupted: this is the best plan so far" in out
    assert "a step" in out
    assert read_plan("plan.json").facts["makespan"] > 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sites_that_are_cities_need_no_links(run):
    Path("cities.toml").write_text(TWO + "[links]\ncities = true\n")
    assert read_cluster("cities.toml") == Cluster.geo(["Tokyo", "Osaka"])


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read broken.toml: No such file"),
        ("penstock = ", "broken.toml:1:11: this is not TOML"),
        (
            TWO + "[links]\nlatency = [[0, 1]]\n",
            "the latency matrix has 1 rows, but there are 2 nodes",
        ),
        (
            TWO + "[links]\nlatency = [[0, 1], [1]]\n",
            "row 1 of the latency matrix has 1 numbers",
        ),
        (
            TWO + "[links]\nbandwidth = [[0, -1], [1, 0]]\n",
            "the bandwidth from rank 0 to rank 1 is -1",
        ),
        (
            TWO.replace("Osaka", "Osoka") + "[links]\ncities = true\n",
            "there is no city 'Osoka'; did you mean 'Osaka'",
        ),
        (
            TWO + '[[link]]\nbetween = ["Tokyo", "Osoka"]\nlatency = 1\n',
            "names the site 'Osoka', but no node is there",
        ),
        (TWO.replace("slots = 3", ""), "node 0 has neither slots nor memory"),
        (
            TWO.replace("slots = 3", "memory = 1e9"),
            "node 0 has a memory, but the bytes of a micro-batch are unknown",
        ),
    ],
)
def test_a_broken_cluster_gives_one_clear_message(run, text, says):
    if text is not None:
        Path("broken.toml").write_text(text)
    code, out, err = run(
        "lab paths --cluster broken.toml --stages 2 --microbatches 2 --skip 0 --cost F=1"
    )
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--skip 1.5", "a path cannot leave out a share of 1.5 of the parts"),
        ("--skip 0.9", "a path over 0 of 4 parts; leave out fewer parts"),
        ("--stages 9", "8 nodes cannot hold 9 parts; give at least 9 nodes"),
        ("--microbatches 0", "microbatches"),
        ("--cost F=0", "--cost: F must be above 0, not 0"),
        ("--cost F=1,message=-1", "--cost: message must be at least 0, not -1"),
        ("--seconds 0", "--seconds must be above 0, not 0"),
        ("--iterations 0", "--iterations must be at least 1, not 0"),
        ("--stages 4:slices=0", "slices"),
        ("--stages 4:slices=99999999", "actions; at most 4,000,000 are possible"),
        ("--microbatches 99999999", "actions; at most 4,000,000 are possible"),
        ("--stages 99999999", "actions; at most 4,000,000 are possible"),
        ("--stages four", "--stages must be a number, such as 4, not 'four'"),
        (
            "--stages 4:data_nodes=7",
            "7 data nodes do not fit 8 nodes and 4 parts; give from 1 to 5",
        ),
        ("--rule ahaed=3", "there is no rule 'ahaed'; did you mean 'ahead'"),
        ("--rule ahead", "a rule is NAME=VALUE, like ahead=4; not 'ahead'"),
        ("--rule ahead=x", "the rule ahead is 'x', not a number"),
        ("--rule swaps=1.5", "the rule swaps is 1.5, not a whole number"),
        ("--rule ahead=0", "ahead must be at least 1, not 0: no path could go on"),
        ("--rule wait=-1", "wait must be at least 0 seconds, not -1.0"),
    ],
)
def test_a_wrong_option_gives_one_clear_message(run, words, says):
    code, out, err = run(f"{SIZES} {words}")
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err
