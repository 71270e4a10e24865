"""Plans of small workloads, portfolios, and cuts of sequences: they may get better, but not worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from penstock import UnitCost, portfolio
from penstock.config import Config, ModelConfig
from penstock.cost import Seconds
from penstock.cost.cluster import Cluster, Node
from penstock.cost.gpus import analytic_profile, gpu_of
from penstock.cost.network import Network
from penstock.cost.profile import Profile
from penstock.plan import title
from penstock.plan.planner import chosen_plan
from penstock.plan.pricing import (
    Question,
    gpu_question,
    profile_question,
    unit_question,
)
from penstock.plan.search import search
from penstock.plan.slices import best_cuts, times_from_curves
from penstock.plan.space import Limits
from penstock.plan.workload import Fixed, Hardware, Workload, workload_of

TOLERANCE = 1e-12
SLOWER = 1e-3  # by which a plan may be slower than the frozen one
ROUNDING = 1e-9
TOKENS = 256
MODEL = ModelConfig(
    layers=8,
    hidden_size=128,
    heads=4,
    kv_heads=4,
    intermediate_size=256,
    vocab_size=500,
)
LARGE = replace(
    MODEL, hidden_size=1024, heads=8, intermediate_size=2816, vocab_size=32_000
)
FEW = Limits(stages=2, slices=4)
Ask = Callable[[], Question]


@cache
def profile_at(rows: int, gpu: str = "h100", channels: int | None = None) -> Profile:
    profile = analytic_profile(MODEL, TOKENS, rows, gpu)
    if channels is None:
        return profile
    slow = Network(2e-5, 2e9, channels=channels)
    return replace(profile, network=slow)


def of_units(
    ranks: int,
    microbatches: int,
    memory: float | None = None,
    limits: Limits = Limits(stages=4, slices=4),  # noqa: B008
    **cost: float,
) -> Ask:
    price = UnitCost(**{"comm": 0.1, **cost})
    return partial(unit_question, ranks, microbatches, price, memory, limits)


def of_profile(
    devices: int,
    memory: float | None = None,
    limits: Limits = FEW,
    cluster: Cluster | None = None,
    gpu: str = "h100",
    channels: int | None = None,
    processors: int | None = None,
    passes: int = 1,
    batch: int = 8,
    **fixed: int,
) -> Ask:
    workload = Workload(
        MODEL.layers,
        TOKENS,
        batch,
        devices,
        heads=4,
        kv_heads=4,
        memory=memory,
        processors=processors,
        passes=passes,
        granularity=64,
        uneven=cluster is not None,
        fixed=Fixed(**{"tensor": 1, "shard": 1, **fixed}),
    )
    at = partial(profile_at, gpu=gpu, channels=channels)
    return partial(profile_question, workload, at, limits, "formula", cluster=cluster)


def of_gpus(devices: int, gigabytes: float, limits: Limits, gpu: str = "h100") -> Ask:
    def ask() -> Question:
        config = replace(Config(), model=LARGE)
        config = replace(config, data=replace(config.data, seq_len=512, global_batch=8))
        workload = workload_of(
            config,
            LARGE.layers,
            (),
            Hardware(devices, gigabytes * 2.0**30, uneven=True),
            open_mesh=True,
        )
        return gpu_question(workload, LARGE, gpu_of(gpu), limits)

    return ask


def nodes(*speeds: float) -> Cluster:
    count = len(speeds)
    latency = tuple(
        tuple(1e-5 * (1 + abs(one - other)) for other in range(count))
        for one in range(count)
    )
    bandwidth = tuple(tuple(1e10 for _ in range(count)) for _ in range(count))
    return Cluster(tuple(Node(speed=one) for one in speeds), latency, bandwidth)


def asked() -> dict[str, Ask]:
    """The questions, by names that say what is special about each."""
    whole = Limits(stages=4, slices=1)
    return {
        "units 2x4": of_units(2, 4),
        "units 2x4 memory 1": of_units(2, 4, 1.0, Limits(stages=2, slices=2)),
        "units 2x4 memory 1.5": of_units(2, 4, 1.5),
        "units 3x3 whole": of_units(3, 3, None, whole),
        "units 4x4 memory 2": of_units(4, 4, 2.0, FEW),
        "units 4x8": of_units(4, 8, None, Limits(stages=2, slices=2)),
        "units 4x8 whole backwards": of_units(4, 8, 4.0, replace(FEW, split=False)),
        "units 4x4 two weights": of_units(4, 4, None, replace(whole, weights=2)),
        "units 4x4 skipped": of_units(4, 4, None, replace(whole, skip=0.25)),
        "units 2x3 dear split": of_units(2, 3, 2.0, FEW, I=1.5, W=1.5),
        "units 1x4": of_units(1, 4),
        "units 8x8 whole no hops": of_units(8, 8, 4.0, FEW, comm=0.0),
        "profile 1 device": of_profile(1),
        "profile 2 devices": of_profile(2, 1e8),
        "profile 2 tight": of_profile(2, 1.7e7),
        "profile 4 tight": of_profile(4, 1.1e7),
        "profile 4 fixed ranks": of_profile(4, None, ranks=4, copies=1, microbatches=8),
        "profile 4 many slices": of_profile(
            4, None, Limits(stages=1, slices=4), ranks=4, copies=1, microbatches=1
        ),
        "profile a100": of_profile(2, 2.5e7, gpu="a100"),
        "profile skipped": of_profile(
            4, None, replace(FEW, skip=0.25), ranks=4, copies=1, microbatches=4
        ),
        "profile two channels": of_profile(
            2, None, FEW, channels=2, ranks=2, copies=1, microbatches=4
        ),
        "profile shared processors": of_profile(2, processors=1),
        "profile two passes": of_profile(2, passes=2),
        "cluster of two": of_profile(2, 8e7, FEW, nodes(1.0, 0.5)),
        "cluster of three tight": of_profile(
            3, 1.8e7, Limits(stages=1, slices=2), nodes(1.0, 0.7, 0.9)
        ),
        "gpus 2": of_gpus(2, 8.0, Limits(stages=2, slices=1)),
        "gpus 4 tight": of_gpus(4, 1.6, Limits(stages=1, slices=1)),
        "gpus 2 v100": of_gpus(2, 6.0, Limits(stages=1, slices=2), "v100"),
    }


def plan_of(ask: Ask) -> object:
    question = ask()
    found = search(question)
    best = found.best
    return {
        "name": title(best.name, best.shape),
        "cell": found.best.division.name,
        "step": best.step,
        "makespan": best.makespan,
        "peak": best.peak,
        "gap": found.gap,
        "stored gap": chosen_plan(found, question.facts).facts["gap"],
        "tried": len(found.candidates),
        "left out": found.left_out,
    }


def portfolio_of(*sizes: int, **options: float) -> object:
    found = portfolio(*sizes, UnitCost(comm=0.1), **options)
    best = found.best
    return {
        "name": title(best.name, best.shape),
        "step": best.step,
        "peak": best.peak,
        "work": found.work,
    }


def curves() -> dict[str, tuple[list[Seconds], list[Seconds]]]:
    """Sums and peaks of slices: with costly starts, long prefixes, one peak and two."""
    forward = Seconds(base=40.0, token=1.0, pair=0.01)
    backward = Seconds(base=60.0, token=2.0, pair=0.02)
    hop = Seconds(base=15.0, token=0.1)
    reading = Seconds(base=10.0, token=1.0, prefix=0.3)
    return {
        "one peak": ([forward], [forward]),
        "two peaks": ([forward, backward], [forward, backward]),
        "with hops": ([forward, backward, hop], [forward, backward]),
        "prefixes": ([reading, forward], [reading, forward]),
        "no start": ([Seconds(token=1.0)], [Seconds(token=1.0, base=5.0)]),
    }


def cuts_of(name: str, points: int, stages: int, slices: int | None) -> object:
    sums, peaks = curves()[name]
    times = times_from_curves(points, 4, sums, peaks)
    found = best_cuts(times, stages, slices)
    return {"latency": found.latency, "bound": found.bound, "passes": found.passes}


def cases() -> dict[str, Callable[[], object]]:
    every: dict[str, Callable[[], object]] = {
        name: partial(plan_of, ask) for name, ask in asked().items()
    }
    every["portfolio 2x4"] = partial(portfolio_of, 2, 4, stages=4, slices=4)
    every["portfolio 4x4"] = partial(portfolio_of, 4, 4, memory=2.0, stages=2, slices=2)
    for name in curves():
        for points, stages, slices in ((48, 4, None), (96, 8, None), (40, 4, 5)):
            key = f"cuts {name} {points} points {stages} stages {slices} slices"
            every[key] = partial(cuts_of, name, points, stages, slices)
    return every


def no_worse(name: str, frozen: dict[str, float], now: dict[str, float]) -> str:
    """Say what has become worse, if anything has."""
    for key, slack in (
        ("step", SLOWER),
        ("makespan", SLOWER),
        ("latency", ROUNDING),
        ("left out", 0.0),
    ):
        if key in frozen and now[key] > frozen[key] * (1 + slack):
            return f"{name}: {key} {now[key]!r} is more than {frozen[key]!r}"
    for key in ("gap", "stored gap"):
        if key in frozen and now[key] > frozen[key] + ROUNDING:
            return f"{name}: {key} {now[key]!r} is more than {frozen[key]!r}"
    if now.get("work", 0) > frozen.get("work", 0):
        return f"{name}: work {now['work']} is more than {frozen['work']}"
    if "bound" in frozen and now["bound"] < frozen["bound"] * (1 - ROUNDING):
        return f"{name}: bound {now['bound']!r} is less than {frozen['bound']!r}"
    return ""
