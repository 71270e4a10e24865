"""A cost together with the profile it was measured in, as the options of a command give them.

from numbers        UnitCost       time in forwards of a micro-batch, memory in micro-batches
from a profile      ProfileCost    seconds and bytes; also the layers, tokens and device of a model
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.cost.cluster import Cluster
from penstock.cost.cost import Cost
from penstock.cost.mesh import gather_seconds, mesh_profile
from penstock.cost.network import slowest_sum_link
from penstock.cost.placed import PlacedCost
from penstock.cost.profile import Profile
from penstock.cost.row_profiles import RowProfiles
from penstock.errors import ShapeError
from penstock.ir.plan import Plan
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.partition import even_partition


@dataclass(frozen=True, slots=True)
class Price:
    """A cost, and the profile it comes from, if it comes from one."""

    cost: Cost
    profile: Profile | None = None
    tokens: int = 0  # tokens of a sequence; only with a profile
    # For other numbers of rows; only with a profile.
    profiles: RowProfiles | None = None
    gather: float = 0.0  # seconds in which a step gathers sharded weights
    shard: int = 1  # processes of a rank that train on different sequences

    def partition(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the layers of each part of an even partition; () without a profile."""
        if self.profile is None:
            return ()
        return even_partition(self.profile.layers, schedule.parts)

    def for_plan(self, plan: Plan, cluster: Cluster | None = None) -> Price:
        """Return the price for one plan: with its own partition, recomputed parts, rows and mesh.

        In a cluster, rank 2 runs on node 2. The processes of a rank have the slowest link of
        the profile between them.
        """
        if self.profile is None:
            return self
        profile = self.profile
        rows = plan.facts.get("rows")
        if self.profiles is not None and isinstance(rows, int):
            profile = self.profiles.at(rows)
        partition = plan.partition or self.partition(plan.schedule)
        ranks = plan.schedule.ranks
        speeds: tuple[float, ...] = ()
        if cluster is not None:
            if ranks > len(cluster.nodes):
                raise ShapeError(
                    f"the plan has {ranks} ranks, but the cluster has "
                    f"{len(cluster.nodes)} nodes"
                )
            profile = replace(profile, network=cluster.network())
            speeds = tuple(node.speed for node in cluster.nodes[:ranks])
        tensor, shard = plan.mesh
        gather = 0.0
        if tensor * shard > 1:
            if cluster is not None:
                raise ShapeError(
                    f"a rank of the plan is tensor {tensor} x shard {shard} processes, but a "
                    "cluster.toml says on which node a rank is, not its processes\n"
                    "  leave --cluster out, or plan with mesh.tensor=1 and mesh.shard=1"
                )
            link = slowest_sum_link(profile.network)
            gather = gather_seconds(profile, tensor, shard, link)
            profile = mesh_profile(profile, tensor, shard, link)
        profile.check(partition, ranks)
        cost = PlacedCost(
            profile,
            self.tokens,
            partition=partition,
            recompute=plan.recompute,
            speeds=speeds,
        )
        return replace(self, cost=cost, profile=profile, gather=gather, shard=shard)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts of a step that only a profile knows."""

    tokens: int  # of a sequence
    weights: tuple[float, ...]  # bytes on each rank
    optimizer: float  # seconds of the slowest rank's update
    gather: float  # seconds in which sharded weights are gathered before the first pass
    tokens_per_second: float


def step_facts(price: Price, plan: Plan, timeline: Timeline) -> StepFacts | None:
    """Return the facts of a step that only a profile knows; None without a profile."""
    profile = price.profile
    if profile is None:
        return None
    optimizer = max(price.cost.updates(plan.schedule))
    tokens = price.tokens * profile.rows * len(plan.schedule.microbatches)
    tokens *= price.shard
    seconds = price.gather + timeline.makespan + optimizer
    return StepFacts(
        tokens=price.tokens,
        weights=tuple(timeline.weights.tolist()),
        optimizer=optimizer,
        gather=price.gather,
        tokens_per_second=tokens / seconds,
    )
