"""What the simulator, the costs and the search for orders found before costs became columns.

A column of numbers is kept as its sum under fixed positive weights, so that a change of any entry shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from penstock import (
    REGISTRY,
    Cost,
    ModelCost,
    Network,
    PartCost,
    Profile,
    ProfileCost,
    Schedule,
    Seconds,
    UnitCost,
    make,
    simulate,
)
from penstock.cost import NoisyCost, PausedCost, finer
from penstock.cost.columns import columns
from penstock.cost.cost import CopiedCost, GivenSumsCost, PlannedSumsCost, WaitingCost
from penstock.cost.gpus import analytic_profile
from penstock.cost.memory import device_memory
from penstock.cost.network import BufferedMessage
from penstock.cost.placed import PlacedCost
from penstock.cost.sums import link_matrices, ring_plan
from penstock.ir.sums import SumPlan
from penstock.plan.improve import improve_order
from penstock.sim import simulate_shared
from penstock.sim.simulate import simulate_own_times
from penstock.sim.sums import plan_sums, sum_intervals

TOLERANCE = 1e-9
MOVES = 600


class Sizes:
    """A small Llama, for the profile of a known GPU."""

    family = "llama"
    layers = 12
    hidden_size = 256
    heads = 4
    kv_heads = 2
    intermediate_size = 512
    vocab_size = 1000
    positions = 0
    tie_embeddings = True


@cache
def schedules() -> dict[str, Schedule]:
    """One small schedule of each name, and some with slices, splits and copies."""
    found = {name: make(name, ranks=4, microbatches=6) for name in REGISTRY}
    found["hanayo:slices=2,split"] = make(
        "hanayo", ranks=2, microbatches=3, slices=2, split=True
    )
    found["1f1b:copies=2"] = make("1f1b", ranks=3, microbatches=4, copies=2)
    found["zb-h1:slices=3,copies=3"] = make(
        "zb-h1", ranks=2, microbatches=3, slices=3, copies=3
    )
    return found


@cache
def model_cost(parts: int) -> ModelCost:
    """Parts that differ, with everything that a part can have."""
    each = tuple(
        PartCost(
            Seconds(0.1 + 0.01 * part, 0.02, 0.001, 0.0002),
            Seconds(0.15, 0.02, 0.002, 0.0001 * part),
            Seconds(0.05, 0.03),
            None if part % 2 else Seconds(0.2, 0.05),
            held=10.0 + part,
            kept=None if part % 3 else 4.0,
            message=3.0,
            sent=1.5 if part % 2 else None,
            weights=100.0 + part,
            recompute=part % 3 == 1,
            tied=7.0,
            gradients=20.0 + part,
            tied_gradients=2.0,
            working=1.0,
            scratch=5.0,
            carried=0.5,
        )
        for part in range(parts)
    )
    return ModelCost(each, Network(0.01, 200.0), tokens=16)


def pairs(ranks: int, value: float, step: float) -> tuple[tuple[float, ...], ...]:
    """A different number for each pair of ranks."""
    return tuple(
        tuple(value + step * ((3 * a + 5 * b) % 7) for b in range(ranks))
        for a in range(ranks)
    )


def with_network(
    network: Network, speeds: tuple[float, ...] = ()
) -> Callable[[Schedule], Cost]:
    def cost(schedule: Schedule) -> Cost:
        plain = model_cost(schedule.parts)
        return ModelCost(plain.parts, network, speeds, tokens=16)

    return cost


BUFFERS = (BufferedMessage(8.0, 0.01, 0.02), BufferedMessage(60.0, math.inf, 0.1))
UNEVEN = Network(pairs(8, 0.01, 0.005), pairs(8, 100.0, 30.0))
SPEEDS = (1.0, 0.5, 2.0, 1.0, 1.5, 1.0, 0.75, 1.0)


@cache
def profile(gpu: str = "h200") -> Profile:
    return analytic_profile(Sizes(), 512, 2, gpu, ranks=8)


def profiled(**words: object) -> Callable[[Schedule], Cost]:
    return lambda schedule: ProfileCost(profile(), **words)


def placed(**words: object) -> Callable[[Schedule], Cost]:
    return lambda schedule: PlacedCost(profile(), 512, **words)


COSTS: dict[str, Callable[[Schedule], Cost]] = {
    "unit": lambda schedule: UnitCost(),
    "unit with comm": lambda schedule: UnitCost(
        F=1.25, B=2.5, comm=0.3, I=1.0, sum=0.7
    ),
    "model": lambda schedule: model_cost(schedule.parts),
    "serial": with_network(
        Network(UNEVEN.latency, UNEVEN.bandwidth, serial=True), SPEEDS
    ),
    "one channel": with_network(
        Network(0.02, 150.0, channels=1, sum_bandwidth=80.0, buffers=BUFFERS)
    ),
    "two channels": with_network(
        Network(UNEVEN.latency, UNEVEN.bandwidth, channels=2), SPEEDS
    ),
    "noisy": lambda schedule: NoisyCost(
        with_network(UNEVEN)(schedule), spread=0.2, seed=3
    ),
    "paused": lambda schedule: PausedCost(
        UnitCost(comm=0.1), gap=0.05, first=0.2, head=0.15
    ),
    "waiting": lambda schedule: WaitingCost(
        PausedCost(with_network(UNEVEN)(schedule), gap=0.01)
    ),
    "copied": lambda schedule: CopiedCost(model_cost(schedule.parts), copies=6),
    "planned sums": lambda schedule: PlannedSumsCost(with_network(UNEVEN)(schedule)),
    "profile": profiled(),
    "recomputed profile": profiled(tokens=1024, recompute=True),
    "placed": placed(recomputed=0.5),
    "placed on uneven ranks": placed(speeds=SPEEDS, recompute=(1,)),
}
COLUMNS = (
    *("seconds", "gain", "loss", "bytes", "link"),
    *("latency", "wire", "send", "receive", "pause"),
)
USES = ("weights", "activations", "more", "messages", "sums")
IN_FULL = ("1f1b", "zb-v", "skip", "hanayo:slices=2,split", "zb-h1:slices=3,copies=3")


def weighed(column: Sequence[float]) -> float:
    """A column as one number; NaN and infinity count as fixed numbers."""
    values = np.nan_to_num(np.asarray(column, dtype=np.float64), nan=0.1, posinf=7.7)
    golden = np.arange(1, len(values) + 1) * 0.6180339887498949
    return float((values * (1.0 + golden % 1.0)).sum())


def timeline_of(timeline: object) -> dict[str, object]:
    return {
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "peak": timeline.peak_activations.tolist(),
        "weights": timeline.weights.tolist(),
        "start": weighed(timeline.start),
        "end": weighed(timeline.end),
        "sent": weighed(timeline.sent),
        "arrived": weighed(timeline.arrived),
        "cause": weighed(timeline.cause),
        "bytes": weighed(timeline.bytes),
        "sums": [[one.name, one.start, one.end, one.cause] for one in timeline.sums],
    }


def timelines(cost: Callable[[Schedule], Cost]) -> object:
    """Only the figures that say most, of all schedules."""
    found = {}
    for name, schedule in schedules().items():
        whole = timeline_of(simulate(schedule, cost(schedule)))
        if name not in IN_FULL:
            keys = ("makespan", "start", "arrived", "cause")
            whole = {**{key: whole[key] for key in keys}, "peak": max(whole["peak"])}
        found[name] = whole
    return found


def costs_of(cost: Callable[[Schedule], Cost]) -> object:
    """All columns, and the bytes of a device by use."""
    found = {}
    for name in IN_FULL:
        schedule = schedules()[name]
        asked = columns(schedule, cost(schedule))
        use = device_memory(schedule, cost(schedule))
        found[name] = {
            "columns": {word: weighed(getattr(asked, word)) for word in COLUMNS},
            "switch": asked.switch,
            "memory": [weighed(getattr(use, word)) for word in USES],
            "updates": cost(schedule).updates(schedule),
        }
    return found


def plan_rings(schedule: Schedule, cost: Cost) -> tuple[SumPlan, ...]:
    plans = []
    for one in sum_intervals(schedule, cost, simulate(schedule, cost).end):
        links = link_matrices(one.ranks, cost.latency, cost.bandwidth)
        plans.append(ring_plan(*links, one.bytes, one.ranks, one.parts))
    return tuple(plans)


def gradient_sums() -> object:
    """Sums as planned, as rings, and a simulation with the planned ones."""
    found = {}
    for copies in (2, 3, 6):
        schedule = make("1f1b", ranks=2, microbatches=2, copies=copies)
        size = 2 * copies
        network = Network(pairs(size, 0.01, 0.02), pairs(size, 400.0, 150.0))
        near = tuple(
            tuple(0.001 if a // 4 == b // 4 else 0.3 for b in range(size))
            for a in range(size)
        )
        for name, links in (
            ("uneven", network),
            ("near", Network(near, 1e5)),
            ("tied", Network(0.02, 1e6)),
        ):
            parts = model_cost(2).parts
            cost = ModelCost(parts, links, tokens=16)
            quickest = PlannedSumsCost(cost)
            plans = plan_sums(simulate(schedule, quickest), quickest)
            rings = plan_rings(schedule, cost)
            found[f"{name} {copies}"] = {
                "ends": ends_of_sums(schedule, quickest),
                "ring ends": ends_of_sums(schedule, cost),
                "plans": [facts_of(plan) for plan in plans],
                "rings": [[plan.name, plan.ranks] for plan in rings],
                "given ends": ends_of_sums(schedule, GivenSumsCost(cost, plans)),
                "given rings": ends_of_sums(schedule, GivenSumsCost(cost, rings)),
            }
    return found


def ends_of_sums(schedule: Schedule, cost: Cost) -> list[float]:
    return [one.end for one in simulate(schedule, cost).sums]


def facts_of(plan: SumPlan) -> list[object]:
    kind = plan.kind.value
    return [plan.name, kind, plan.ranks, plan.shares, plan.groups, plan.whole]


def shared() -> object:
    """Ranks that share processors."""
    found = {}
    for name in ("1f1b", "zb-v", "hanayo"):
        schedule = schedules()[name]
        for word in ("model", "paused", "serial", "profile"):
            cost = COSTS[word](schedule)
            turn = 0.3 if word != "profile" else 4e-3
            timeline = simulate_shared(schedule, cost, 2, turn)
            found[f"{name} {word}"] = timeline_of(timeline)
    return found


def own_times() -> object:
    timeline = simulate(schedules()["zb-v"], COSTS["noisy"](schedules()["zb-v"]))
    return timeline_of(simulate_own_times(timeline))


def orders() -> object:
    """The orders that the search finds: makespan before and after."""
    found = {}
    cases = (
        ("v-half", "unit with comm", None),
        ("zb-v", "unit with comm", 4.0),
        ("hanayo", "serial", None),
        ("interleaved", "one channel", None),
        ("zb-h1", "two channels", None),
        ("seq1f1b", "model", None),
        ("skip", "paused", None),
    )
    for name, word, cap in cases:
        schedule = schedules()[name]
        cost = COSTS[word](schedule)
        for seed in (0, 1):
            better = improve_order(schedule, cost, cap, MOVES, seed)
            timeline = simulate(better, cost)
            found[f"{name} {word} {seed}"] = [
                simulate(schedule, cost).makespan,
                timeline.makespan,
                float(timeline.peak_activations.max()),
            ]
    return found


def pieces() -> object:
    """A model whose parts are cut into pieces."""
    schedule = make("hanayo", ranks=2, microbatches=3)
    return timeline_of(simulate(schedule, finer(model_cost(2), 2)))


def short(answer: object) -> object:
    """An answer with twelve digits of each number, which keeps the file small."""
    if isinstance(answer, dict):
        return {key: short(one) for key, one in answer.items()}
    if isinstance(answer, list | tuple):
        return [short(one) for one in answer]
    return float(f"{answer:.12g}") if isinstance(answer, float) else answer


def cases() -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}
    for name, cost in COSTS.items():
        found[f"timelines {name}"] = lambda cost=cost: timelines(cost)
        found[f"columns {name}"] = lambda cost=cost: costs_of(cost)
    found["sums"] = gradient_sums
    found["shared"] = shared
    found["own times"] = own_times
    found["orders"] = orders
    found["pieces"] = pieces
    return {name: lambda case=case: short(case()) for name, case in found.items()}


def no_worse(name: str, frozen: object, now: object) -> str:
    """Everything is equal but orders, which may be better, and causes.

    Where an action waits for two that end at the same time, the last bit of their ends decides which is its cause, and
    that bit depends on the CPU. A rank that waits for its messages waits for that of each micro-batch's own path; the
    frozen answers took the first micro-batch's for all, so they do not hold where paths differ.
    """
    import freeze  # noqa: PLC0415

    if name != "orders":
        differences = freeze.differences(frozen, now, TOLERANCE)
        if name.endswith("waiting"):
            differences = [one for one in differences if not one.startswith(".skip")]
        return "\n".join(line for line in differences if ".cause:" not in line)
    before = {key: one[1] for key, one in frozen.items()}  # type: ignore[attr-defined]
    after = {key: one[1] for key, one in now.items()}  # type: ignore[attr-defined]
    slower = [key for key in before if after[key] > before[key] * 1.001]
    change = np.mean([after[key] / before[key] for key in before])
    if slower:
        return f"slower: {slower}"
    return "" if change <= 1.0 + TOLERANCE else f"slower on average by {change - 1:g}"
