"""What `penstock paths` asks the planner: the nodes of a cluster, and the costs of a model's parts.

cluster.toml --parts --forward ...       options describe a model of equal parts, as in the paper
config.toml --cluster cluster.toml       the model of a config; it is measured, or its profile is given
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ShapeError

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.cost import Cluster, PartCost, Profile
    from penstock.plan.paths import Rules
    from penstock.plan.paths.problem import ModelParts
    from penstock.train.weights import Sizes


@dataclass(frozen=True, slots=True)
class PathQuestion:
    """What to plan: the nodes, and the costs of a model's parts."""

    cluster: Cluster
    parts: tuple[PartCost, ...]
    microbatches: int
    data_nodes: int | None
    tokens: int
    gap: float = 0.0
    model: ModelParts | None = None
    passes: int = 1  # of a step
    on_gpu: bool = False  # whether the times are those of a GPU
    basis: str = ""  # the precision of a model, and where its times come from


@dataclass(frozen=True, slots=True)
class ConfigOptions:
    """The options of paths for the model of a config."""

    source: Path
    changes: tuple[str, ...]
    cluster: Path
    profile: Path | None
    accept_error: bool
    gpu: str | None
    parts: int | None
    microbatches: int | None
    data_nodes: int | None


def question_from_options(
    cluster: Path,
    parts: int | None,
    microbatches: int | None,
    data_nodes: int | None,
    slices: int,
    described: dict[str, float | None],
) -> PathQuestion:
    """Ask for paths through a model of equal parts, which options describe."""
    from penstock.formats import read_cluster
    from penstock.plan.paths import even_parts

    numbers = {"parts": parts, "microbatches": microbatches, **described}
    for name in ("parts", "microbatches", "forward"):
        if numbers[name] is None:
            raise ShapeError(
                f"--{name} is missing\n"
                "  give --parts, --microbatches and --forward, "
                "or a config: penstock paths config.toml --cluster cluster.toml"
            )
    assert parts is not None
    assert microbatches is not None
    tokens = max(slices, 1)
    sizes = {name: value or 0.0 for name, value in described.items()}
    costs = even_parts(parts, tokens=tokens, **sizes)
    return PathQuestion(read_cluster(cluster), costs, microbatches, data_nodes, tokens)


def question_from_config(options: ConfigOptions, rules: Rules) -> PathQuestion:
    """Ask for paths through the model of a config, on the nodes of a cluster."""
    from penstock.cost.cluster import with_memory
    from penstock.formats import read_cluster
    from penstock.formats.config_toml import written_keys
    from penstock.plan.paths.problem import choose_data_nodes, model_parts
    from penstock.plan.paths.starts import replica_counts
    from penstock.plan.question import basis_of
    from penstock.train.launch import model_sizes
    from penstock.train.start import find_run

    if options.parts is None:
        raise ShapeError(
            "--parts is missing: into how many parts is the model divided?\n"
            "  every part is on several nodes, so give fewer parts than the cluster has nodes"
        )
    config, _ = find_run(options.source, None, options.changes, exists=True)
    written = written_keys(options.source, options.changes)
    microbatches = options.microbatches
    if microbatches is None and "schedule.microbatches" in written:
        microbatches = config.schedule.microbatches
    if not microbatches:
        raise ShapeError(
            "--microbatches is missing, and the config has no schedule.microbatches"
        )
    sizes = model_sizes(config)
    nodes = read_cluster(options.cluster)
    hops = rules.hops(options.parts)
    wanted = replica_counts(len(nodes.nodes), options.parts, hops, options.data_nodes)
    given = options.data_nodes is not None
    batch = config.data.batch // config.run.accumulate  # of a pass
    data = choose_data_nodes(batch, microbatches, wanted[0], given)
    rows = batch // (data * microbatches)
    profile, origin = _profile_of(options, config, sizes, rows)
    model = model_parts(
        profile, options.parts, config.data.tokens, config.run.recompute, origin
    )
    if options.gpu is not None:
        nodes = with_memory(nodes, _memory_of_gpu(options.gpu))
    return PathQuestion(
        nodes,
        model.costs,
        microbatches,
        data,
        config.data.tokens,
        model.turn,
        model,
        config.run.accumulate,
        dict(profile.device).get("device") == "cuda",
        basis_of(profile),
    )


def _profile_of(
    options: ConfigOptions, config: Config, sizes: Sizes, rows: int
) -> tuple[Profile, str]:
    """Return the profile of a config's model for micro-batches of `rows` rows, and where it comes from."""
    from penstock.cli.plan import profiles_of
    from penstock.config import is_recording, precision_of
    from penstock.cost.gpus import analytic_profile, gpu_of
    from penstock.plan.workload import Fixed, Workload
    from penstock.train.own_models import config_of
    from penstock.train.placement import decide_placement

    if options.gpu is not None:
        if options.profile is not None:
            raise ShapeError("--gpu cannot be combined with --profile")
        gpu = gpu_of(options.gpu)
        profile = analytic_profile(
            config_of(sizes),
            config.data.tokens,
            rows,
            gpu,
            precision_of(config, on_gpu="bfloat16" in gpu.peak),
            recorded=is_recording(config, on_gpu=True),
        )
        return (
            profile,
            f"analytic profile of the {gpu.name}, by formula and not measured",
        )
    workload = Workload(
        sizes.layers,
        config.data.tokens,
        batch=rows,
        devices=1,
        fixed=Fixed(ranks=1, microbatches=1, copies=1, tensor=1, shard=1),
        config=config,
    )
    profiles, origin = profiles_of(
        options.profile, options.accept_error, workload, decide_placement(config, 1)
    )
    return profiles.at(rows), origin


def _memory_of_gpu(name: str) -> float:
    from penstock.cost.gpus import gpu_of
    from penstock.plan.workload import USABLE_SHARE

    return USABLE_SHARE * gpu_of(name).memory
