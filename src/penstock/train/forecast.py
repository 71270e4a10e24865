"""What a step of a run will take, before it runs: pieces of the model, timed on this machine; the schedule, simulated.

config, plan ──► a layer, embedding, head    timed by as many processes at once as will run at once
                 ──► the parts' costs ──► simulated, on the processors that there are ──► a pass
                 ──► AdamW, timed too                                                 ──► + the optimizer
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.cost import PausedCost, Profile
from penstock.cost.curve import sum_curves
from penstock.cost.fit import Fit
from penstock.cost.profile import Block, enlarge
from penstock.formats import read_profile, write_profile
from penstock.ir import Plan, Timeline
from penstock.ir.schedule import stretch
from penstock.runtime.process.mps import workers_of_a_gpu
from penstock.sim import simulate_shared

if TYPE_CHECKING:
    from penstock.train.mesh import Share

PROFILE = "profile.json"  # in the folder of a run
FEW_ROUNDS, MANY_ROUNDS = 5, 12
QUICK_OPERATIONS = 5e9  # operations of a pass on a CPU that is timed often: its speed changes from second to second
MAX_TIMED_OPERATIONS = {
    "cpu": 5e10,
    "cuda": 5e13,
}  # operations of a pass that is timed; of more, a sample is


@dataclass(frozen=True, slots=True)
class Forecast:
    """One step: `passes` through the pipeline, each as long as the timeline, then the optimizer."""

    timeline: Timeline
    optimizer: float  # seconds
    passes: int
    tokens: int
    processors: int  # that the ranks share
    launch: float = (
        1.0  # how many times longer a layer takes because a GPU waits for its launches
    )

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.passes * self.timeline.makespan + self.optimizer

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def weights(self) -> list[float]:
        """Bytes of weights, gradients and optimizer, by rank."""
        return [float(value) for value in self.timeline.weights]

    @property
    def activations(self) -> list[float]:
        """Bytes at the fullest moment, by rank."""
        return [float(value) for value in self.timeline.peak_activations]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the ranks of a run compute: on the GPUs, or with so many threads each on the cores."""

    device: str
    processors: int  # how many ranks can compute at once
    threads: int


def machine_of(config: Config, ranks: int) -> Machine:
    """The same choice as the workers make; a rank may be several."""
    import torch  # noqa: PLC0415  # only where something runs

    ranks *= config.mesh.size
    gpus = (
        torch.cuda.device_count()
        if torch.cuda.is_available() and config.run.device != "cpu"
        else 0
    )
    if gpus and (config.run.device == "cuda" or config.mesh.size == 1 or gpus >= ranks):
        return Machine("cuda", min(gpus * workers_of_a_gpu(), ranks), 1)
    cores = os.cpu_count() or 1
    threads = config.run.threads or max(1, cores // ranks)
    return Machine("cpu", max(1, min(cores // threads, ranks)), threads)


def forecast(config: Config, plan: Plan, profile: Profile, processors: int) -> Forecast:
    """Simulates a step by a profile, on so many processors."""
    size, profile = config.mesh.size, profile_of_process(profile, config, processors)
    ops = replace(profile, turn=0.0).cost(
        plan.partition, None, config.run.recompute, config.data.tokens
    )
    cost = PausedCost(
        ops, profile.turn, profile.turn, profile.turn
    )  # between two actions, as it is measured
    timeline = simulate_shared(plan.schedule, cost, max(1, processors // size))
    updates, each = profile.update(plan.partition), [0.0] * plan.schedule.ranks
    for stage in plan.schedule.stages:
        each[stage.rank] += updates[stage.part]
    tokens, launch = (
        config.data.batch * config.data.tokens,
        float(dict(profile.device).get("launch") or 1.0),
    )
    optimizer = max(*each, sum(each) * size / processors)
    return Forecast(
        timeline, optimizer, config.run.accumulate, tokens, processors, launch
    )


def profile_of_process(profile: Profile, config: Config, processors: int) -> Profile:
    """What each process of a rank does and holds, if there are several; the sums between them are not in it.

    They compute at the same time; where there are fewer processors than that, all the slower.
    """
    if config.mesh.size == 1:
        return profile
    from penstock.train.mesh import shares_of  # noqa: PLC0415  # torch
    from penstock.train.worker import model_sizes  # noqa: PLC0415

    slow = max(1.0, config.mesh.size / processors)
    embed, layer, head = shares_of(model_sizes(config), config.mesh)
    tied = (
        0.0 if config.mesh.shard > 1 else profile.tied * head.memory
    )  # shards keep a copy for each part
    return replace(
        profile,
        tied=tied,
        embed=_shared(profile.embed, embed, slow),
        layer=_shared(profile.layer, layer, slow),
        head=_shared(profile.head, head, slow),
    )


def _shared(block: Block, share: Share, slow: float) -> Block:
    def less(fit: Fit) -> Fit:
        return replace(fit, curve=sum_curves([(share.work * slow, fit.curve)]))

    return replace(
        block,
        F=less(block.F),
        B=less(block.B),
        I=less(block.I),
        W=less(block.W),
        held=block.held * share.held,
        kept=block.kept * share.held,
        weights=block.weights * share.memory,
        update=block.update * share.numbers,
    )


def profile_run(config: Config, plan: Plan, machine: Machine) -> Profile:
    """Times the pieces of a run's model, on as many ranks at once as will compute at once."""
    from penstock.models.flops import flops_per_token  # noqa: PLC0415  # torch
    from penstock.train.profile import Request, profile_model  # noqa: PLC0415
    from penstock.train.worker import model_sizes  # noqa: PLC0415

    tokens, cuts = config.data.tokens, cuts_of(config, plan)
    sizes, depth = model_sizes(config), max(plan.partition)
    flops = flops_per_token(sizes, tokens) / sizes.layers * depth
    rows, short = sample_size(
        flops, config.rows, tokens, cuts, MAX_TIMED_OPERATIONS[machine.device]
    )
    less = (rows, short) != (config.rows, 1)
    rounds = (
        MANY_ROUNDS
        if machine.device == "cpu" and flops * rows * tokens <= QUICK_OPERATIONS
        else FEW_ROUNDS
    )
    where = {
        ((end - begin) // short, begin // short)
        for some in cuts
        for begin, end in pairwise(some)
    }
    request = Request(
        sizes,
        tokens // short,
        rows,
        machine.device,
        threads=machine.threads,
        rounds=1 if less else rounds,
        autocast=config.run.precision if config.run.precision != "float32" else None,
        depth=1 if less else depth,
        where=tuple(sorted(where)),
        mean=True,
        separate=config.data.separate,
        graphs=config.run.graphs,
    )
    found = profile_model(request, machine.processors)
    assert found is not None, "only under torchrun, where no forecast is made"
    found = enlarge(found, config.rows, tokens) if less else found
    return replace(found, device=(*found.device, ("run", profile_mark(config, plan))))


def sample_size(
    flops: float, rows: int, tokens: int, cuts: Iterable[tuple[int, ...]], most: float
) -> tuple[int, int]:
    """Of a micro-batch that would take too many operations (`flops` a token): so many rows, of sequences so many times
    shorter; all cuts stay between tokens.

    >>> sample_size(1e6, 4, 1024, [(0, 512, 1024)], 1e9), sample_size(1e6, 2, 1024, [(0, 1024)], 1e12)
    ((1, 2), (2, 1))
    """
    if flops * rows * tokens <= most:
        return rows, 1
    fewer, short = max(1, min(rows, int(most / (flops * tokens)))), 1
    finest = gcd(*(cut for some in cuts for cut in some))
    while (
        flops * fewer * tokens / short > most
        and tokens // short > 64
        and finest % (2 * short) == 0
    ):
        short *= 2
    return fewer, short


def cuts_of(config: Config, plan: Plan) -> set[tuple[int, ...]]:
    """Where sequences are cut into slices, in tokens; each way once."""
    return {stretch(one, config.data.tokens).cuts for one in plan.schedule.microbatches}


def profile_mark(config: Config, plan: Plan) -> str:
    """Of all that a profile depends on, but for the machine: runs with the same mark have the same one."""
    data, run = config.data, config.run
    parts = (
        config.model,
        config.mesh,
        config.rows,
        data.tokens,
        data.tokenizer,
        data.separate,
        run.precision,
        run.graphs,
        run.device,
        run.threads,
        plan.schedule.ranks,
        plan.partition,
        sorted(cuts_of(config, plan)),
    )
    return sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def known_forecast(folder: Path, config: Config, plan: Plan) -> Forecast | None:
    """The forecast of a run, by the profile in its folder; None without one, or if it is of another run."""
    if not (folder / PROFILE).is_file():
        return None
    profile = read_profile(folder / PROFILE)
    if dict(profile.device).get("run") != profile_mark(config, plan):
        return None
    return forecast(config, plan, profile, int(dict(profile.device).get("ranks") or 1))


def measure_forecast(
    config: Config, plan: Plan, folder: Path | None = None
) -> Forecast:
    """Measure the pieces of the model and predict a step.

    If a folder is given, the measurements are kept there.
    """
    machine = machine_of(config, plan.schedule.ranks)
    profile = profile_run(config, plan, machine)
    if folder is not None:
        write_profile(profile, folder / PROFILE)
    return forecast(config, plan, profile, machine.processors)
