"""Planned paths reproduce the published figures, keep to the rules, and never beat their bound."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from itertools import count as counting
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest

from penstock import PartCost, Seconds, UnitCost, lower, needs, simulate, verify
from penstock.cost import Cluster, Node
from penstock.cost.cluster import CITIES
from penstock.cost.memory import device_bytes
from penstock.cost.sums import planned_sum_end, ring_seconds
from penstock.errors import ShapeError
from penstock.formats import dump_plan, load_plan
from penstock.ir import Action, MicroBatch, Op, Stage
from penstock.plan.paths.bound import Window, least_end, least_sum_seconds, path_bound
from penstock.plan.paths.divide import cut_into_cells
from penstock.plan.paths.planner import (
    PathPlan,
    paths_plan,
    plan_paths,
    rule_faults,
    schedule_from,
)
from penstock.plan.paths.problem import (
    PLANNED,
    PUBLISHED,
    Problem,
    QueueOrder,
    even_parts,
    halves_of,
)
from penstock.plan.paths.rotation import (
    DEFAULT_RECOVERY_MOVES,
    full_pipeline,
    parts_met,
    replan,
    rotate,
)
from penstock.plan.paths.rules import Rules, find_rule_faults, order_fault, part_subsets
from penstock.plan.paths.search import DEFAULT_SEARCH_MOVES, Budget
from penstock.plan.paths.simulator import (
    choose_queueing,
    ends_of_sums,
    simulate_solution,
    solution_of,
    solution_value,
    task_graph,
)
from penstock.plan.paths.stages import is_restart, stage_moves
from penstock.plan.paths.starts import (
    part_designs,
    part_of_each_node,
    random_routes,
    replica_counts,
)
from penstock.schedules.list_scheduling import list_schedule

CITED = json.loads((Path(__file__).parents[1] / "data" / "skippipe.json").read_text())
GAPS = {"gap": CITED["model"]["gap"], "first_gap": CITED["model"]["gap_after_first"]}
CITY_NAMES = [
    "Paris",
    "London",
    "Tokyo",
    "Osaka",
    "Lisbon",
    "Rome",
    "Seattle",
    "Boston",
    "Sydney",
    "Madrid",
]


def cluster_of(name: str, slots: int = 3) -> Cluster:
    cited = CITED["instances"][name]
    count = len(cited["locations"])
    nodes = tuple(Node(site, 1.0, slots) for site in cited["locations"])
    return Cluster(
        nodes,
        tuple(map(tuple, cited["delays"])),
        tuple((math.inf,) * count for _ in range(count)),
    )


def problem_of(name: str) -> Problem:
    parts = even_parts(6, CITED["instances"][name]["forward"])
    return Problem(cluster_of(name), parts, 6, policy=PUBLISHED, **GAPS)


def plan_instance(name: str, given: bool, **how):
    cited = CITED["instances"][name]
    parts, arrangement = (
        even_parts(6, cited["forward"]),
        cited["partitions"] if given else None,
    )
    return searched(
        cluster_of(name),
        parts,
        6,
        policy=PUBLISHED,
        arrangement=arrangement,
        **GAPS,
        **how,
    )


def searched(
    *problem,
    iterations=DEFAULT_SEARCH_MOVES,
    seconds=None,
    seed=0,
    clock=time.perf_counter,
    **how,
) -> PathPlan:
    return plan_paths(
        Problem(*problem, **how), Budget(iterations, seconds, clock), seed
    )


def geo(count: int, **how) -> Cluster:
    return Cluster.geo([CITY_NAMES[n % len(CITY_NAMES)] for n in range(count)], **how)


def check_plan(plan) -> None:
    """Check that a plan keeps the rules, cannot deadlock and is above its bound, and that both simulators agree."""
    assert rule_faults(plan) == ()
    verify(lower(plan.schedule))
    found = simulate_solution(plan.problem, plan.solution)
    timeline = simulate(plan.schedule, plan.problem.cost())
    assert timeline.end.max() == pytest.approx(found.makespan, abs=1e-6)
    value, _ = solution_value(plan.problem, plan.solution)
    assert timeline.makespan == plan.makespan == pytest.approx(value, abs=1e-6)
    assert plan.makespan >= plan.bound > 0
    assert (
        path_bound(
            plan.problem,
            np.bincount([p for p in plan.solution.part_of_node if p >= 0]),
            None,
        )
        <= plan.makespan + 1e-9
    )


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Compile the loops, or load them, before any test measures seconds."""
    for given in (True, False):
        plan_instance("A", given, iterations=5)
    searched(geo(9), even_parts(4, 0.5), 2, Rules(share=0.25), iterations=5)


# ---------------------------------------------------------------- the published figures
@pytest.mark.parametrize(
    ("name", "plan"), [(n, p) for n in "AB" for p in CITED["instances"][n]["plans"]]
)
def test_the_published_policy_gives_the_published_times(name, plan):
    cited, problem = CITED["instances"][name], problem_of(name)
    paths = cited["plans"][plan]["paths"]
    paths = paths if len(paths) > 5 else [path for path in paths for _ in range(3)]
    part_of_node = part_of_each_node(cited["partitions"], 20)
    if (
        plan == "lanes, own arrangement"
    ):  # which part is where does not matter to the time
        for path in paths:
            part_of_node[path[0]], part_of_node[path[1:]] = 0, (1, 2, 3)
    solution = solution_of(problem, part_of_node, paths)  # staggered by a forward
    found = simulate_solution(problem, solution)
    assert found.makespan == pytest.approx(cited["plans"][plan]["seconds"], abs=1e-7)
    # The lanes it found, in our simulator.
    schedule = schedule_from(problem, solution, found)
    timeline = simulate(schedule, problem.cost())
    assert timeline.makespan == pytest.approx(found.makespan, abs=1e-9)
    assert len(schedule.microbatches) == 30


@pytest.mark.parametrize(
    ("name", "given", "most"),
    [("A", True, 33.314), ("B", True, 66.493), ("B", False, 66.0)],
)
def test_plans_under_the_published_rules_are_as_good_or_better_after_the_default_work(
    name, given, most
):
    found = plan_instance(name, given)
    assert found.simulations == DEFAULT_SEARCH_MOVES
    assert not found.cut_short
    assert found.makespan <= most
    check_plan(found)


def test_the_published_rules_are_kept_node_by_node():
    found = plan_instance("A", True, iterations=300)
    used = np.bincount(
        [node for path in found.solution.paths for node in path], minlength=20
    )
    assert (used == 3).all()  # every node by as many paths as it has slots
    assert {len(path) for path in found.solution.paths} == {4}


def test_free_slots_and_a_planned_order_are_better_than_the_published_rules():
    cited = CITED["instances"]["B"]
    found = searched(
        cluster_of("B"), even_parts(6, cited["forward"]), 6, iterations=1600, **GAPS
    )
    check_plan(found)
    assert found.makespan < 65.6
    wide = searched(
        cluster_of("B", 6), even_parts(6, cited["forward"]), 6, iterations=800, **GAPS
    )
    check_plan(wide)
    assert wide.makespan < 50


# ---------------------------------------------------------------- the quick simulator
def closure(needs: dict[int, set[int]]) -> dict[int, set[int]]:
    """All that comes before each task, directly or not."""
    before: dict[int, set[int]] = {}

    def collect(task: int) -> set[int]:
        if task not in before:
            before[task] = set()
            for need in needs[task]:
                before[task] |= {need} | collect(need)
        return before[task]

    return {task: collect(task) for task in needs}


@pytest.mark.parametrize("length", [1, 2, 3, 6])
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_the_quick_simulator_has_the_dependencies_of_every_schedule(length, slices):
    """The graph is a reduced one, so it is compared with `needs` by all that comes before a task."""
    stages = [Stage(position, position) for position in range(length)]
    microbatch = MicroBatch(tuple(range(length)), slices, tuple(range(slices + 1)))
    whole = list_schedule(stages, [microbatch], UnitCost())

    def task(action: Action) -> int:
        return 2 * (action.stage * slices + action.slice) + (action.op is Op.B)

    by_rules = {
        task(action): {task(need) for need in needs(whole, action)}
        for lane in whole.lanes
        for action in lane
    }
    graph = task_graph(length, slices)
    by_graph: dict[int, set[int]] = {number: set() for number in by_rules}
    for number, following in enumerate(graph.unlocked.tolist()):
        for then in following:
            if then >= 0:
                by_graph[then].add(number)
    assert closure(by_graph) == closure(by_rules)
    assert graph.needed.tolist() == [len(by_graph[n]) for n in range(len(by_graph))]


# ---------------------------------------------------------------- the bound, against brute force
def brute_force(problem: Problem, sizes) -> float:
    """Return the best makespan of all arrangements, paths and orders."""
    arrays, body, count = (
        problem.arrays,
        problem.body,
        problem.microbatches * sizes[0],
    )
    best = math.inf
    for part_of_node in set(
        permutations([part for part, size in enumerate(sizes) for _ in range(size)])
    ):
        data = [node for node, part in enumerate(part_of_node) if part == 0]
        ways = [
            order
            for order in permutations(
                [node for node, part in enumerate(part_of_node) if part], problem.hops
            )
            if not order_fault(
                (0, *(part_of_node[node] for node in order)), problem.rules
            )
            and len({part_of_node[node] for node in order}) == len(order)
        ]
        for chosen in product(ways, repeat=count):
            met_parts = [
                sum(part_of_node[node] == part for way in chosen for node in way)
                for part in range(1, body)
            ]
            uneven = max(met_parts) - min(met_parts)
            if uneven > (0 if sum(met_parts) % len(met_parts) == 0 else 1):
                continue
            paths = [(data[m % len(data)], *way) for m, way in enumerate(chosen)]
            best = min(best, best_order(arrays, paths, part_of_node, best))
    return best


def best_order(arrays, paths, part_of_node, best):
    """Return the best makespan of all orders of the tasks, each of which starts as early as it can."""
    tasks = []  # of each micro-batch: (node, seconds, wait before it, slots it takes, gap after it)
    head, hop = len(arrays.forward) - 1, arrays.hop(1)
    for path in paths:
        rows, before = [], path[0]
        for place, node in enumerate(path):
            gap = arrays.first_gap if place == 0 else arrays.gap
            rows.append(
                (
                    node,
                    arrays.forward[part_of_node[node], 0] * arrays.slow[node],
                    hop[before, node],
                    1,
                    gap,
                )
            )
            before = node
        home = path[0]
        loss = (arrays.forward[head, 0] + arrays.backward[head, 0]) * arrays.slow[home]
        rows.append((home, loss, hop[before, home], 0, arrays.gap))
        before = home
        for node in reversed(path):
            seconds = arrays.backward[part_of_node[node], 0] * arrays.slow[node]
            rows.append((node, seconds, hop[before, node], -1, arrays.gap))
            before = node
        tasks.append(rows)
    least = [sum(seconds + wait for _, seconds, wait, _, _ in rows) for rows in tasks]
    done, ready = [0] * len(paths), [0.0] * len(paths)
    free, used = [0.0] * arrays.nodes, [0] * arrays.nodes

    def go(latest):
        nonlocal best
        if all(done[m] == len(tasks[m]) for m in range(len(tasks))):
            best = min(best, latest)
            return
        for m, rows in enumerate(tasks):
            if done[m] == len(rows):
                continue
            node, seconds, wait, slot, gap = rows[done[m]]
            if slot == 1 and used[node] >= arrays.slots[node]:
                continue
            start = max(free[node], ready[m] + wait)
            left = sum(s + w for _, s, w, _, _ in rows[done[m] + 1 :])
            if start + seconds + left >= best - 1e-12:
                continue
            kept = free[node], ready[m]
            free[node], ready[m] = start + seconds + gap, start + seconds
            used[node] += slot
            done[m] += 1
            go(max(latest, start + seconds))
            done[m] -= 1
            used[node] -= slot
            free[node], ready[m] = kept

    if max(least) < best:
        go(0.0)
    return best


def tiny(rng, sizes, share, microbatches):
    count = sum(sizes)
    nodes = tuple(
        Node("", float(rng.uniform(0.5, 2)), int(rng.integers(1, 3)))
        for _ in range(count)
    )
    latency = tuple(map(tuple, rng.uniform(0.05, 3.0, (count, count)).tolist()))
    cluster = Cluster(nodes, latency, tuple((math.inf,) * count for _ in range(count)))
    gaps = {
        "gap": float(rng.choice([0.0, 0.2])),
        "first_gap": float(rng.choice([0.0, 0.1])),
    }
    return (
        cluster,
        even_parts(len(sizes), float(rng.uniform(0.2, 2))),
        microbatches,
        Rules(share=share),
        gaps,
    )


@pytest.mark.parametrize(
    ("sizes", "share", "microbatches"),
    [
        ((1, 1, 1), 1 / 3, 2),
        ((1, 1, 1), 0.0, 2),
        ((1, 2, 1), 1 / 3, 2),
        ((2, 1, 1), 1 / 3, 1),
        ((1, 1), 0.0, 3),
    ],
)
def test_the_bound_is_below_the_optimum_and_the_plan_close_to_it(
    sizes, share, microbatches
):
    rng = np.random.default_rng(sum(sizes) * 10 + microbatches)
    ratios = []
    for _ in range(4):
        cluster, parts, count, rules, gaps = tiny(rng, sizes, share, microbatches)
        problem = Problem(cluster, parts, count, rules, **gaps)
        best = brute_force(problem, sizes)
        assert path_bound(problem, np.array(sizes), None) <= best + 1e-9
        found = searched(
            cluster, parts, count, rules, sizes=sizes, iterations=1500, **gaps
        )
        check_plan(found)
        assert found.makespan >= best - 1e-9
        ratios.append(found.makespan / best)
        given = path_bound(problem, np.array(sizes), found.solution.part_of_node)
        assert given <= found.makespan + 1e-9
        assert given >= path_bound(problem, np.array(sizes), None) - 1e-9 or given > 0
    assert max(ratios) < 1.02, ratios


@pytest.mark.parametrize("seed", range(30))
def test_the_least_end_of_a_data_node_is_that_of_the_best_order_of_its_tasks(seed):
    rng = np.random.default_rng(seed)
    slots, count = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    window = Window(
        *(float(x) for x in rng.uniform(0.1, 2, 4)),
        *(float(x) for x in rng.uniform(0, 6, 2)),
        0.1,
        0.2,
    )
    assert least_end(window, count, slots) == pytest.approx(
        any_order(window, count, slots)
    )


def any_order(window, count, slots):
    """Return the least end over all orders of the tasks, in which micro-batches may overtake."""
    took = (window.forward, window.head, window.head_back, window.backward)
    ways = (0.0, window.there, 0.0, window.back)
    rests = (window.first_pause, 0.0, window.pause, window.pause)
    best = math.inf

    def go(free, stages, ready, end):
        nonlocal best
        if end >= best:
            return
        if all(stage == 4 for stage in stages):
            best = end
        for m, stage in enumerate(stages):
            if stage == 4 or (stage == 0 and sum(0 < s < 4 for s in stages) >= slots):
                continue
            done = max(free, ready[m] + ways[stage]) + took[stage]
            go(
                done + rests[stage],
                (*stages[:m], stage + 1, *stages[m + 1 :]),
                (*ready[:m], done, *ready[m + 1 :]),
                max(end, done),
            )

    go(0.0, (0,) * count, (0.0,) * count, 0.0)
    return best


def test_the_plan_of_instance_a_on_its_own_arrangement_is_optimal():
    cited = CITED["instances"]["A"]
    how = {"arrangement": cited["partitions"], "iterations": 6000}
    found = searched(cluster_of("A"), even_parts(6, cited["forward"]), 6, **how, **GAPS)
    assert found.gap < 0.001


def test_the_bound_knows_that_good_nodes_cannot_serve_everybody():
    """Four nodes share one place. They cannot serve all data nodes, and the bound must know this."""
    near, far = 0.01, 2.0
    place = [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    latency = tuple(tuple(near if a == b else far for b in place) for a in place)
    cluster = Cluster(
        (Node("", 1.0, 1),) * 12, latency, tuple((math.inf,) * 12 for _ in place)
    )
    problem = Problem(cluster, even_parts(4, 0.2), 4, Rules(share=0.25))
    best = min(
        searched(
            cluster,
            even_parts(4, 0.2),
            4,
            Rules(share=0.25),
            iterations=1500,
            seed=seed,
        ).makespan
        for seed in range(2)
    )
    alone = least_end(Window(0.2, 0.0167, 0.0333, 0.3, 0.43, 0.63), 4, 1)
    assert alone < path_bound(problem, np.array(replica_counts(12, 4, 2)), None) <= best


def test_the_bound_knows_that_few_nodes_can_be_data_nodes():
    """Nodes that could be done early as data nodes lie together, so they compete for the same hops."""
    problem = Problem(
        cluster_of("A"), even_parts(6, CITED["instances"]["A"]["forward"]), 6
    )
    sizes = np.array((5, 3, 3, 3, 3, 3))
    fifth_least_end_of_a_data_node = 18.008
    bound = path_bound(problem, sizes, None)
    assert fifth_least_end_of_a_data_node < 19.1 < bound < 24.06  # the best known plan


# ---------------------------------------------------------------- options of the planner
@pytest.mark.parametrize("count", [5, 9, 14])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_every_plan_is_sound(count, share):
    check_plan(
        searched(
            geo(count),
            even_parts(4, 0.5, message=8e6),
            4,
            Rules(share=share),
            iterations=150,
        )
    )


@pytest.mark.parametrize(
    "how",
    [
        {"slices": 4, "tokens": 64},
        {"waves": True},
        {"waves": True, "slices": 2, "tokens": 64},
        {"gradients": 1e7},
        {"gap": 0.2, "first_gap": 0.1, "slices": 2, "tokens": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("serial", [False, True])
def test_plans_with_combined_options_are_sound(how, serial):
    parts = even_parts(4, 0.5, tokens=how.get("tokens", 1), message=8e6)
    check_plan(
        searched(
            geo(11, serial=serial), parts, 3, Rules(share=0.25), iterations=120, **how
        )
    )


def test_unequal_nodes_are_planned_for():
    base = geo(10)
    slow = Cluster(
        tuple(
            replace(node, speed=0.2 if n == 4 else 1.0, slots=1 + n % 3)
            for n, node in enumerate(base.nodes)
        ),
        base.latency,
        base.bandwidth,
    )
    found = searched(slow, even_parts(4, 0.5), 4, Rules(share=0.25), iterations=800)
    check_plan(found)
    assert found.solution.part_of_node[4] != 0  # the slow node has no data
    work = np.bincount(
        [node for path in found.solution.paths for node in path], minlength=10
    )
    assert work[4] < work.max()


def test_slices_overlap_transfer_and_work_on_slow_links():
    parts = even_parts(6, 0.5, tokens=64, message=33e6)
    whole, cut = (
        searched(
            geo(20, serial=True), parts, 6, tokens=64, slices=slices, iterations=400
        )
        for slices in (1, 4)
    )
    assert cut.makespan < 0.8 * whole.makespan
    assert cut.schedule.slices == 4


def test_waves_bring_the_loss_home_and_pay_where_links_are_quick():
    parts = even_parts(4, 1.0)
    how = {"rules": Rules(share=0.25), "iterations": 1500}
    quick = [
        searched(Cluster.even(12, latency=0.001, slots=8), parts, 3, waves=w, **how)
        for w in (False, True)
    ]
    assert quick[1].makespan < quick[0].makespan
    ends = [
        quick[1].schedule.stages[m.path[i]].rank
        for m in quick[1].schedule.microbatches
        for i in (0, -1)
    ]
    assert ends[::2] == ends[1::2]
    slow = [
        searched(Cluster.even(12, latency=3.0, slots=8), parts, 3, waves=w, **how)
        for w in (False, True)
    ]
    # A wave passes more links: it loses on slow ones.
    assert slow[1].makespan > slow[0].makespan


def test_the_plan_takes_the_allreduce_of_gradients_into_account():
    parts = even_parts(4, 0.1, message=1e5)
    how = {"rules": Rules(share=0.25), "iterations": 1500}
    blind = searched(geo(12), parts, 3, **how)
    seen = searched(geo(12), parts, 3, gradients=2e8, **how)
    check_plan(seen)
    late = simulate(blind.schedule, seen.problem.cost()).makespan
    assert blind.makespan < seen.makespan < late
    rings = searched(geo(12), parts, 3, gradients=2e8, planned_sums=False, **how)
    check_plan(rings)
    quicker = simulate(rings.schedule, seen.problem.cost()).makespan
    assert quicker <= rings.makespan  # the quickest kind of sum, on the same lanes
    waves = searched(geo(12), parts, 3, gradients=2e8, waves=True, **how)
    check_plan(waves)


@pytest.mark.parametrize("planned", [False, True])
def test_no_sum_is_quicker_than_its_lower_bound_or_begins_too_early(planned):
    rng = np.random.default_rng(0)
    for _ in range(60):
        size = float(rng.choice([1.0, 1e6, 1e9]))
        problem = Problem(
            geo(10),
            even_parts(4, 1.0, gradients=size),
            2,
            Rules(share=0.25),
            planned_sums=planned,
        )
        nodes = rng.permutation(10)[: rng.integers(2, 8)]
        part_of_node = np.full(10, -1)
        part_of_node[nodes] = 0
        last = rng.uniform(0, 50, 10)

        def end_of(last, problem=problem, part_of_node=part_of_node):
            args = (problem.arrays, planned, part_of_node, last, np.zeros(10))
            return ends_of_sums(*args)[0]

        end = end_of(last)
        least = least_sum_seconds(problem, 0, len(nodes))
        assert end >= last[nodes].max() + least - 1e-9
        later = last.copy()
        later[nodes[0]] += 5.0
        assert end_of(later) >= end - 1e-9
        alone = end_of(np.full(10, last[nodes].max()))
        assert end <= alone + 1e-9  # whoever is ready early helps, or waits


def test_sums_go_over_near_links_first_and_over_many_links_at_once():
    """Two pairs of nodes, a slow link between any two of different pairs: 2 x 2 links carry a quarter each."""
    far, near = 1e-6, 1e-9  # seconds per byte
    pair = [0, 0, 1, 1]
    byte = np.array([[near if a == b else far for b in pair] for a in pair])
    none = np.zeros((4, 4))
    assert planned_sum_end(none, byte, 1e6, [0.0] * 4) == pytest.approx(
        0.25 + 2 * 0.0005, rel=1e-6
    )
    assert ring_seconds(none, byte, 1e6) == pytest.approx(2 * 3 * 0.25)
    # A node that is done late has the gradients of the others by then, and sends the sum.
    two = planned_sum_end(np.zeros((2, 2)), np.full((2, 2), far), 1e6, [0.0, 10.0])
    assert two == pytest.approx(10 + 2 / 3)


def test_a_seed_gives_the_same_plan_again():
    how = {"rules": Rules(share=0.25), "iterations": 300}
    one, other = (
        searched(geo(9), even_parts(4, 0.5), 3, seed=4, **how) for _ in range(2)
    )
    assert one.schedule == other.schedule
    assert one.makespan == other.makespan
    assert one.simulations == other.simulations == 300


def test_a_slow_clock_does_not_change_the_plan():
    ticks = counting(step=1000)  # seconds between two readings of the clock
    how = {"rules": Rules(share=0.25), "iterations": 300}
    slow = searched(
        geo(9), even_parts(4, 0.5), 3, clock=lambda: float(next(ticks)), **how
    )
    assert slow.seconds >= 1000
    assert not slow.cut_short
    usual = searched(geo(9), even_parts(4, 0.5), 3, **how)
    assert slow.schedule == usual.schedule
    assert dump_plan(paths_plan(slow)) == dump_plan(paths_plan(usual))


@pytest.mark.parametrize("count", [9, 42])
def test_a_time_limit_cuts_a_search_short_and_the_plan_says_so(count):
    ticks = counting()  # one second for each reading, one reading for each move
    found = searched(
        geo(count),
        even_parts(4, 0.5),
        3,
        seconds=200.0,
        clock=lambda: float(next(ticks)),
    )
    assert 100 <= found.simulations <= 200
    assert found.cut_short
    none = searched(geo(count), even_parts(4, 0.5), 3, seconds=1e-9)
    assert none.simulations == 0
    assert none.cut_short
    assert dict(paths_plan(none).why)["cut_short"] is True
    check_plan(none)


def test_a_full_pipeline_that_was_cut_short_says_so():
    whole = full_pipeline(plan_instance("A", True, iterations=10), Budget(seconds=1e-9))
    assert whole.cut_short
    check_plan(whole)


@pytest.mark.parametrize("policy", [PLANNED, PUBLISHED], ids=["planned", "published"])
@pytest.mark.parametrize("name", "AB")
def test_more_work_never_gives_a_worse_plan(name, policy):
    parts = even_parts(6, CITED["instances"][name]["forward"])
    work = [1, 400, 1500]  # the second stage of the search begins after 300
    found = [
        searched(
            cluster_of(name), parts, 6, policy=policy, iterations=n, **GAPS
        ).makespan
        for n in work
    ]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def test_more_work_never_gives_a_worse_plan_of_a_large_cluster():
    base, parts = Cluster.geo(list(CITIES)[:36]), even_parts(4, 0.5, message=8e6)
    nodes = tuple(
        replace(node, speed=0.5 + n % 5 / 4, slots=2)
        for n, node in enumerate(base.nodes)
    )
    cluster = replace(base, nodes=nodes)
    budgets = (0, 400, 1000, 1600)  # stages begin after 300 and 1500
    found = [searched(cluster, parts, 4, iterations=n).makespan for n in budgets]
    assert found == sorted(found, reverse=True)


def test_a_search_has_stages_of_growing_length():
    """The stages do not depend on the budget. By default the search ends with its fourth stage."""
    stages = [stage_moves(stage) for stage in range(7)]
    assert stages == [300, 1200, 4800, 19200, 20000, 40000, 20000]
    assert [is_restart(stage) for stage in range(7)] == [False] * 4 + [
        True,
        False,
        True,
    ]
    assert sum(stage_moves(stage) for stage in range(4)) == DEFAULT_SEARCH_MOVES


@pytest.mark.parametrize("count", [42, 200])
def test_large_clusters_are_planned(count):
    found = searched(geo(count), even_parts(6, 0.5, message=8e6), 6, iterations=500)
    assert found.simulations == 500
    assert found.gap < 1.0
    assert rule_faults(found) == ()


def test_a_plan_file_stores_the_figures_of_the_plan():
    found = searched(geo(9), even_parts(4, 0.5), 3, Rules(share=0.25), iterations=50)
    kept = load_plan(dump_plan(paths_plan(found)))
    assert kept.schedule == found.schedule
    assert kept.facts["lower_bound"] == found.bound
    assert kept.facts["makespan"] == found.makespan
    assert kept.facts["gap"] == pytest.approx(found.makespan / found.bound - 1)


# ---------------------------------------------------------------- baselines, rotation, recovery
def test_planned_is_faster_than_random_and_full():
    found = plan_instance("A", True, iterations=1000)
    whole = full_pipeline(found, Budget(1000))
    assert {len(path) for path in whole.solution.paths} == {6}
    assert len(whole.schedule.microbatches) == len(found.schedule.microbatches)
    check_plan(whole)
    assert whole.makespan > found.makespan
    part_of_node = found.solution.part_of_node
    for seed in range(3):
        paths = random_routes(found.problem, part_of_node, seed)
        random = solution_of(found.problem, part_of_node, paths)
        random = choose_queueing(found.problem, random)
        assert solution_value(found.problem, random)[0] > found.makespan


def test_the_full_pipeline_is_planned_by_the_same_search_as_the_paths():
    """On instance B, the paths' own arrangement would cost the full pipeline more than a fifth."""
    cited = CITED["instances"]["B"]
    parts = even_parts(6, cited["forward"])
    found = searched(cluster_of("B"), parts, 6, iterations=400)
    whole = full_pipeline(found, Budget(400))
    kept = searched(
        cluster_of("B"),
        parts,
        6,
        Rules(share=0, behind=0, distance=0, swaps=0),
        iterations=400,
        arrangement=found.partitions,
    )
    assert whole.simulations == found.simulations
    assert whole.makespan < kept.makespan / 1.2
    assert len(whole.partitions[0]) == len(found.partitions[0])
    anew = searched(
        cluster_of("B"), parts, 6, whole.problem.rules, iterations=400, data_nodes=5
    )
    assert whole.schedule == anew.schedule
    given = full_pipeline(plan_instance("B", True, iterations=100), Budget(100))
    # One that was asked for is kept.
    assert list(map(set, given.partitions)) == list(map(set, cited["partitions"]))
    sized = searched(
        cluster_of("B"), parts, 6, iterations=100, sizes=(5, 3, 3, 3, 3, 3)
    )
    assert [len(nodes) for nodes in full_pipeline(sized, Budget(100)).partitions] == [
        5,
        3,
        3,
        3,
        3,
        3,
    ]


def test_a_rotation_meets_every_set_of_parts_with_every_shard():
    found = plan_instance("A", True, iterations=500)
    turns = rotate(found, Budget(120_000), slack=0.01)
    assert not turns.cut_short
    assert turns.left_out == ()
    assert turns.makespan <= found.makespan * 1.01
    for plan in turns.plans:
        check_plan(plan)
        assert plan.partitions == found.partitions  # weights stay where they are
    wanted = set(part_subsets(range(1, 6), 3))
    assert set().union(*(parts_met(plan) for plan in turns.plans)) == wanted
    shards: dict[int, set[frozenset[int]]] = {shard: set() for shard in range(5)}
    for step in range(5 * len(turns.plans)):
        plan, reads = turns.at(step)
        for path in plan.solution.paths:
            shard = reads[plan.partitions[0].index(path[0])]
            shards[shard].add(
                frozenset(plan.solution.part_of_node[node] for node in path[1:])
            )
    assert all(sets == wanted for sets in shards.values())


def test_a_plan_after_a_loss_leaves_the_parts_where_they_are():
    found = plan_instance("A", False, iterations=500)
    for lost in (
        [found.partitions[3][0]],
        [found.partitions[0][1], found.partitions[2][0]],
    ):
        left = replan(found, Budget(DEFAULT_RECOVERY_MOVES), lost)
        assert left.simulations == DEFAULT_RECOVERY_MOVES
        check_plan(left)
        assert not {node for path in left.solution.paths for node in path} & set(lost)
        assert all(
            left.solution.part_of_node[n] == found.solution.part_of_node[n]
            for n in range(20)
            if n not in lost
        )
        assert len(left.schedule.microbatches) >= 28
        assert all(not left.schedule.lanes[node] for node in lost)


def test_a_part_without_replicas_is_skipped_until_it_returns():
    found = plan_instance("A", True, iterations=200)
    left = replan(found, Budget(300), found.partitions[2])
    check_plan(left)
    assert 2 not in {
        left.solution.part_of_node[node]
        for path in left.solution.paths
        for node in path
    }
    back = replan(left, Budget(20), returned=found.partitions[2])
    check_plan(back)
    assert 2 in {
        back.solution.part_of_node[node]
        for path in back.solution.paths
        for node in path
    }
    assert back.partitions == found.partitions
    assert back.lost == ()


def test_a_node_that_cannot_be_lost_or_return_is_named():
    found = plan_instance("A", True, iterations=20)
    with pytest.raises(ShapeError, match="no data node is left"):
        replan(found, Budget(20), lost=found.partitions[0])
    with pytest.raises(
        ShapeError, match=r"node 99 is lost, but the plan has nodes 0\.\.19"
    ):
        replan(found, Budget(20), lost=[99])
    with pytest.raises(ShapeError, match="node 3 returned, but it was not lost"):
        replan(found, Budget(20), returned=[3])


# ---------------------------------------------------------------- sizes and errors
def test_sizes_balance_the_work():
    assert replica_counts(20, 6, 3) == (5, 3, 3, 3, 3, 3)
    assert replica_counts(18, 4, 2) == (6, 4, 4, 4)
    assert sum(replica_counts(42, 6, 3)) == 42
    for lanes in (5, 10, 50):
        counts = np.bincount(np.ravel(part_designs(lanes, 6, 3)), minlength=6)
        assert (counts[1:] == lanes * 3 // 5).all()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"sizes": (3, 3)}, "sizes for 2 parts, but the model has 4"),
        ({"sizes": (3, 3, 3, 3)}, "add up to 12 nodes, but the cluster has 9"),
        ({"sizes": (9, 0, 0, 0)}, "a part has no node"),
        ({"arrangement": [[0, 1], [2], [3], [4, 4]]}, "node 4 holds parts 3 and 3"),
        (
            {"arrangement": [[0, 1], [2], [3], [12]]},
            r"part 3 is on node 12, but there are nodes 0\.\.8",
        ),
        ({"arrangement": [[0, 1], [2], [3]]}, "part 3 is on no node"),
        ({"slices": 3}, "1 tokens cannot be cut into 3 slices"),
        (
            {"policy": PUBLISHED},
            "3 micro-batches for each data node do not divide into 2 rounds",
        ),
    ],
    ids=str,
)
def test_an_error_names_both_numbers_that_do_not_fit(how, says):
    with pytest.raises(ShapeError, match=says):
        searched(geo(9), even_parts(4, 0.5), 3, Rules(share=0.25), iterations=10, **how)


def test_too_few_nodes_are_refused():
    with pytest.raises(ShapeError, match="3 nodes cannot hold 4 parts"):
        searched(geo(3), even_parts(4, 0.5), 3, Rules(share=0.25))


def test_a_part_without_visits_has_nothing_to_sum():
    cluster = Cluster.even(6, bandwidth=1.0)
    found = searched(
        cluster,
        even_parts(4, 1.0),
        1,
        Rules(share=0.5),
        data_nodes=1,
        gradients=100.0,
        iterations=50,
    )
    for node in range(6):
        if [node] != list(found.partitions[0]):
            left = replan(found, Budget(50), [node])
            assert left.bound <= left.makespan


def test_a_wave_keeps_a_backward_in_one_piece():
    part = PartCost(Seconds(1), Seconds(1), Seconds(1), B=Seconds(1.5))
    assert Seconds(2.25) == halves_of((part,) * 3)[-1].B
    plain = PartCost(Seconds(1), Seconds(1), Seconds(1))
    assert halves_of((plain,) * 3)[-1].B is None
    assert Seconds(2.75) == halves_of((part, part, plain))[-1].B


def test_the_bound_counts_a_path_once_for_every_round():
    nodes = tuple(Node("x", speed, 1) for speed in (1.0, 0.1, 1.0))
    apart = ((0.0, 0.7, 0.4), (1.1, 0.0, 1.9), (0.7, 1.3, 0.0))
    cluster = Cluster(nodes, apart, ((math.inf,) * 3,) * 3)
    found = searched(
        cluster,
        even_parts(3, 0.1),
        2,
        Rules(share=1 / 3),
        PUBLISHED,
        arrangement=[[0], [1], [2]],
        iterations=60,
    )
    assert found.bound <= found.makespan


@pytest.mark.parametrize(
    ("recompute", "head"),
    [(True, {}), (False, {"weights": 5.0}), (False, {"held": 10.0})],
)
def test_no_node_holds_more_than_its_memory(recompute, head):
    def part(seconds: float, **sizes: float) -> PartCost:
        curve = Seconds(token=seconds)
        return PartCost(curve, curve, curve, message=1.0, **sizes)

    parts = (
        *(replace(part(1.0, held=10.0, weights=5.0), recompute=recompute),) * 4,
        part(0.1, **head),
    )
    for memory in (50.0, 55.0, 75.0):
        nodes = tuple(Node("x", 1.0, None, memory) for _ in range(8))
        found = memory_plan(nodes, parts)
        assert device_bytes(found.schedule, found.problem.cost()).max() <= memory
        assert (np.array(slots_in(found)) <= found.problem.arrays.slots).all()
    with pytest.raises(ShapeError, match="cannot hold a single micro-batch of any"):
        memory_plan((Node("x", 1.0, None, 15.0),) * 8, parts)


def memory_plan(nodes, parts):
    count = len(nodes)
    apart = ((0.01,) * count,) * count, ((math.inf,) * count,) * count
    return searched(Cluster(nodes, *apart), parts, 4, Rules(share=0.25), iterations=50)


def slots_in(plan) -> list[int]:
    return [int(word) for word in str(paths_plan(plan).facts["slots"]).split()]


def test_small_nodes_get_the_parts_that_fit():
    """A data node has the embedding, the first part and the head; here only five nodes are large enough."""
    part = PartCost(*(Seconds(token=1.0),) * 3, held=4.0, weights=8.0, message=0.1)
    head = PartCost(*(Seconds(token=0.1),) * 3, weights=50.0, message=0.1)
    memories = [20.0, 80.0, 20.0, 80.0, 80.0, 20.0, 80.0, 80.0]
    nodes = tuple(Node("x", 1.0, None, memory) for memory in memories)
    found = memory_plan(nodes, (part,) * 4 + (head,))
    check_plan(found)
    assert all(memories[node] == 80.0 for node in found.partitions[0])
    used = device_bytes(found.schedule, found.problem.cost())
    assert (used <= memories).all()
    assert set(slots_in(found)) > {2}  # small nodes hold fewer micro-batches
    small = (Node("x", 1.0, None, 20.0),) * 7 + (Node("x", 1.0, None, 80.0),)
    with pytest.raises(ShapeError, match="part 0 fits into the memory of 1 of 8 nodes"):
        memory_plan(small, (part,) * 4 + (head,))
    with pytest.raises(ShapeError, match="part 0 does not fit into the memory of node"):
        searched(
            found.problem.cluster,
            (part,) * 4 + (head,),
            4,
            Rules(share=0.25),
            arrangement=[[0], [1, 2], [3, 4], [5, 6, 7]],
        )


def test_a_limit_on_waiting_is_searched_for():
    """The rules forbid to wait for another micro-batch for long; the search must find a plan that keeps to it."""
    parts = even_parts(4, 0.5, message=8e6)
    free, short = Rules(share=0.25), Rules(share=0.25, wait=0.3)
    usual = searched(geo(16), parts, 2, free, iterations=1000)
    faults = find_rule_faults(usual.schedule, 4, short, timeline=usual.timeline)
    assert {fault.rule for fault in faults} == {"collision"}
    found = searched(geo(16), parts, 2, short, iterations=1000)
    assert rule_faults(found) == ()
    check_plan(found)


def test_sites_are_planned_one_by_one_as_well_as_a_lane_alone():
    cluster = Cluster.geo(["Paris"] * 20 + ["Tokyo"] * 20)
    found = searched(cluster, even_parts(6, 0.5, message=8e6), 6, iterations=300)
    check_plan(found)
    sites = {node: cluster.nodes[node].site for node in range(40)}
    for path in found.solution.paths:
        assert len({sites[node] for node in path}) == 1  # no path leaves its site
    lane = searched(
        Cluster.geo(["Paris"] * 4),
        even_parts(4, 0.5, message=8e6),
        6,
        Rules(share=0),
        data_nodes=1,
        iterations=1,
    )
    assert found.makespan <= lane.makespan + 1e-9


def test_cells_share_plans_and_take_the_data_nodes_that_places_have_no_room_for():
    """Paris has room for four data nodes and three nodes more, Rome and Milan for one and one node more each."""
    places = ["Paris"] * 19 + ["Rome"] * 5 + ["Milan"] * 5 + ["Tokyo"] * 11
    cluster = Cluster.geo(places)
    parts = even_parts(6, 0.5, message=8e6)
    problem = Problem(cluster, parts, 6)
    cells = cut_into_cells(problem, 10)
    assert sorted(node for cell in cells for node in cell.nodes) == list(range(40))
    assert sum(cell.data for cell in cells) == 10
    crowded = [cell for cell in cells if cell.data > 1]
    assert len(crowded) == 2  # in Paris and in Tokyo, which have the most nodes left
    for cell in crowded:
        assert len(cell.nodes) == 7
        assert len({places[node] for node in cell.nodes}) == 1
    found = searched(cluster, parts, 6, iterations=0)
    check_plan(found)  # also that all parts are visited equally often
    home = {node: number for number, cell in enumerate(cells) for node in cell.nodes}
    for path in found.solution.paths:
        assert len({home[node] for node in path}) == 1  # no path leaves its cell
    assert cut_into_cells(Problem(geo(20), parts, 6), 5) is None


@pytest.mark.parametrize("planned", [False, True], ids=["rings", "planned sums"])
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1), (2, 2, 1)], ids=str)
def test_no_plan_with_sums_of_gradients_beats_the_bound(sizes, planned):
    """All arrangements and all paths of small clusters, each with two queue orders."""
    rng = np.random.default_rng(sum(sizes))
    for _ in range(2):
        cluster, parts, _, rules, gaps = tiny(rng, sizes, 1 / 3, 1)
        count = sum(sizes)
        speeds = rng.uniform(0.5, 50.0, (count, count)).tolist()
        cluster = replace(cluster, bandwidth=tuple(map(tuple, speeds)))
        problem = Problem(
            cluster, parts, 1, rules, gradients=20.0, planned_sums=planned, **gaps
        )
        bound = path_bound(problem, np.array(sizes), None)
        assert bound > path_bound(
            replace(problem, parts=parts, gradients=0.0), np.array(sizes), None
        ) or sizes == (1, 2, 1)
        roles = [part for part, size in enumerate(sizes) for _ in range(size)]
        for part_of_node in set(permutations(roles)):
            given = path_bound(problem, np.array(sizes), np.array(part_of_node))
            data = [node for node, part in enumerate(part_of_node) if part == 0]
            hops = [node for node, part in enumerate(part_of_node) if part > 0]
            for chosen in product(hops, repeat=len(data)):
                paths = tuple(zip(data, chosen, strict=True))
                visits = [
                    sum(part_of_node[n] == part for n in chosen) for part in (1, 2)
                ]
                if abs(visits[0] - visits[1]) > len(data) % 2:
                    continue
                for order in (QueueOrder.ARRIVAL, QueueOrder.URGENT):
                    first = solution_of(problem, part_of_node, paths)
                    orders = np.full_like(first.orders, order)
                    solution = replace(first, orders=orders)
                    end, _ = solution_value(problem, solution)
                    assert end >= max(bound, given) - 1e-9
