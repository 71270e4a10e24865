"""Predicts how long a step of a run will take, before the run starts.

config, plan ──► embedding, layer, head    timed by as many processes at once as will run
             ──► cost of the parts         ──► simulated on the available processors ──► one pass
             ──► the optimizer, and empty steps, timed too                           ──► + the rest of a step
             ──► how much the rounds of these measurements differ                    ──► the range
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from penstock.config import Config
from penstock.cost import Cost, Profile, RowProfiles
from penstock.cost.cost import GivenSumsCost
from penstock.cost.mesh import gather_seconds, mesh_profile, split_processors
from penstock.cost.network import slowest_sum_link
from penstock.cost.placed import PlacedCost
from penstock.cost.profile import enlarge, send_as
from penstock.formats import read_row_profiles, write_row_profiles
from penstock.ir import Plan, Timeline, stretch
from penstock.plan.candidates import Evaluator
from penstock.train.placement import Placement
from penstock.train.step_paths import step_paths

PROFILE = "profile.json"  # in the folder of a run
SEARCHED = "searched"  # a fact of a profile by which a search has chosen the plan
FEW_ROUNDS = 5
MANY_ROUNDS = 12
# A pass on a CPU with at most this many operations is timed in many rounds, because the
# speed of a CPU changes from second to second.
QUICK_OPERATIONS = 5e9
# The largest pass that is timed in full, in operations; of a larger one we time a sample.
MAX_TIMED_OPERATIONS = {"cpu": 5e10, "cuda": 5e13}


@dataclass(frozen=True, slots=True)
class Forecast:
    """A predicted step: the gather, `passes` times the timeline, then the optimizer and the rest of the step."""

    timeline: Timeline
    optimizer: float  # seconds, with what else a step does beside its actions
    passes: int
    tokens: int  # of the whole step
    processors: int  # that the ranks share
    # How many times longer a layer takes because the GPU waits for its launches.
    launch: float = 1.0
    gather: float = 0.0  # seconds in which a step gathers sharded weights
    recorded: bool = False  # whether actions are recorded as CUDA graphs
    # The forecast of steps that run all parts, if the others leave out some.
    full: Forecast | None = None
    # The shares of the predicted time between which steps may lie (`Profile.spread`).
    spread: tuple[float, float] = (1.0, 1.0)
    searched: bool = False  # whether the plan was chosen by these very times

    @property
    def seconds(self) -> float:
        """The time of the whole step. Only its last pass sums gradients, unless actions are recorded."""
        summing = self.passes if self.recorded else 1
        passes = summing * self.timeline.makespan
        passes += (self.passes - summing) * float(self.timeline.end.max())
        return self.gather + passes + self.optimizer

    @property
    def range(self) -> tuple[float, float]:
        """The times between which steps may lie, in seconds."""
        low, high = self.spread
        return low * self.seconds, high * self.seconds

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def weights(self) -> list[float]:
        """Bytes of weights, gradients and optimizer state of each rank."""
        return [float(value) for value in self.timeline.weights]

    @property
    def activations(self) -> list[float]:
        """Bytes of activations of each rank at its fullest moment."""
        own = [float(value) for value in self.timeline.peak_activations]
        if self.full is None:
            return own
        return list(map(max, own, self.full.activations))


def forecast(config: Config, plan: Plan, profile: Profile, processors: int) -> Forecast:
    """Simulate a step with the costs of a profile, on a number of processors."""
    full = None
    if plan.full is not None and step_paths(plan, config.paths).full is not None:
        alone = replace(plan, schedule=plan.full, rotation=(), full=None)
        full = forecast(config, alone, profile, processors)
    mesh = config.parallel
    schedule = plan.schedule
    profile = send_as(profile, config.run.comm_dtype)
    link = slowest_sum_link(profile.network)
    gather = gather_seconds(profile, mesh.tp, mesh.dp_shard, link)
    ranks_at_once, slowdown = split_processors(processors, mesh.size)
    if mesh.size > 1:
        # The actions of a process contain the sums between the processes of its rank. They compute at the same
        # time, and more slowly where there are fewer processors than processes of a rank.
        profile = mesh_profile(profile, mesh.tp, mesh.dp_shard, link, slowdown)
    recompute = set(plan.recompute)
    if config.run.recompute == "full":
        recompute = set(range(schedule.parts))
    cost: Cost = PlacedCost(
        profile,
        config.data.seq_len,
        partition=plan.partition,
        recompute=tuple(sorted(recompute)),
    )
    if plan.sums:
        cost = GivenSumsCost(cost, plan.sums)
    evaluator = Evaluator(cost, processors=ranks_at_once)
    facts = dict(profile.device)
    return Forecast(
        evaluator.timeline(schedule),
        optimizer=evaluator.update(schedule),
        passes=config.run.accumulate,
        tokens=config.data.global_batch * config.data.seq_len,
        processors=processors,
        launch=float(facts.get("launch") or 1.0),
        gather=gather,
        recorded=bool(facts.get("recorded")),
        full=full,
        spread=profile.spread,
        searched=bool(facts.get(SEARCHED)),
    )


# ---------------------------------------------------------------- measuring
def profile_run(config: Config, plan: Plan, placement: Placement) -> Profile:
    """Time the pieces of a run's model, in as many processes as will run, or a sample of what takes too long."""
    from penstock.models.family import flops_per_token  # noqa: PLC0415  # torch
    from penstock.train.before.profile import (  # noqa: PLC0415
        affordable,
        profile_rows,
        request_of,
    )

    tokens = config.data.seq_len
    depth = max(plan.partition)
    slices = set()
    for boundaries in cuts_of(config, plan):
        for begin, end in pairwise(boundaries):
            slices.add((end - begin, begin))
    request = request_of(config, placement, config.rows)
    flops = flops_per_token(request.model, tokens) / request.model.layers * depth
    quick = (
        placement.device == "cpu" and flops * config.rows * tokens <= QUICK_OPERATIONS
    )
    whole = replace(
        request,
        rounds=MANY_ROUNDS if quick else FEW_ROUNDS,
        depth=depth,
        where=tuple(sorted(slices)),
        mean=True,
    )
    choices = range(1, config.rows + 1)
    request, counts = affordable(whole, choices, MAX_TIMED_OPERATIONS)
    request = replace(request, rows=counts[-1])
    sampled = request != whole
    if sampled:
        request = replace(request, rounds=1, depth=1)
    profiles = profile_rows(request, (request.rows,), placement.measurers)
    assert profiles is not None, (
        "only torchrun returns None, and there we do not forecast"
    )
    (profile,) = profiles.measured
    return enlarge(profile, config.rows, tokens) if sampled else profile


def cuts_of(config: Config, plan: Plan) -> set[tuple[int, ...]]:
    """Return the different ways in which sequences are cut into slices, in tokens."""
    tokens = config.data.seq_len
    return {stretch(one, tokens).cuts for one in plan.schedule.microbatches}


# ---------------------------------------------------------------- profiles that are kept
def profile_mark(config: Config, plan: Plan) -> str:
    """A digest of everything that a profile depends on, except the machine."""
    data = config.data
    run = config.run
    parts = (
        config.model,
        (config.parallel.dp_shard, config.parallel.tp),
        config.rows,
        data.seq_len,
        data.tokenizer,
        data.apart,
        run.precision,
        run.cuda_graphs,
        run.compile,
        run.comm_dtype,
        run.device,
        config.optimizer.name,
        config.optimizer.options,
        config.optimizer.groups,
        config.lora,
        config.run.recomputed_inside,
        plan.schedule.ranks,
        plan.partition,
        sorted(cuts_of(config, plan)),
    )
    return sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def keep_profiles(
    profiles: RowProfiles,
    folder: Path,
    config: Config,
    plan: Plan,
    searched: bool = False,
) -> None:
    """Write profiles into the folder of a run, with a mark of what they were measured for.

    `searched` says that a search has chosen the plan by them.
    """
    marks = (("run", profile_mark(config, plan)), (SEARCHED, searched))
    marked = [
        replace(profile, device=(*profile.device, *marks))
        for profile in profiles.measured
    ]
    write_row_profiles(RowProfiles(tuple(marked)), folder / PROFILE)


def known_forecast(folder: Path, config: Config, plan: Plan) -> Forecast | None:
    """Forecast a run with the profile in its folder.

    Return None if there is no profile, or if it belongs to another config or plan.
    """
    if not (folder / PROFILE).is_file():
        return None
    profiles = read_row_profiles(folder / PROFILE)
    facts = dict(profiles.measured[0].device)
    if facts.get("run") != profile_mark(config, plan):
        return None
    profile = profiles.at(config.rows)
    return forecast(config, plan, profile, profile.processors or 1)


def measure_forecast(
    config: Config, plan: Plan, placement: Placement, folder: Path | None = None
) -> Forecast:
    """Measure the pieces of the model and predict a step.

    If a folder is given, the measurements are kept there.
    """
    profile = profile_run(config, plan, placement)
    if folder is not None:
        keep_profiles(RowProfiles((profile,)), folder, config, plan)
    return forecast(config, plan, profile, placement.processors)
