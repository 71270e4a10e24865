"""`penstock plan`: searches for the fastest plan, and says how far from the optimum it can be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from penstock.cli.completion import complete_framework, complete_gpu
from penstock.cli.cost import price_of
from penstock.cli.landscape import landscape_facts, print_landscape, show_progress
from penstock.cli.options import (
    AcceptError,
    BackwardOption,
    CommOption,
    ConfigChanges,
    ForwardOption,
    JsonFlag,
    OutputFile,
    ProfileFile,
    TokensOption,
)
from penstock.cli.tables import print_json, progress, tell, write
from penstock.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.config import Config
    from penstock.cost import RowProfiles
    from penstock.integrations.terms import Framework
    from penstock.plan.price import Price
    from penstock.plan.question import Question
    from penstock.plan.recipes import Limits
    from penstock.plan.workload import Workload
    from penstock.train.placement import Placement
    from penstock.train.weights import Sizes

MAX_SKIP = 0.9  # the largest share of the layers that a micro-batch may leave out
CONFIG_PANEL = "A model and its devices"


def plan_command(
    source: Annotated[
        Optional[Path],
        typer.Argument(
            metavar="CONFIG",
            help="A config.toml, whose model is measured here unless --profile or --gpu is given.",
        ),
    ] = None,
    changes: ConfigChanges = None,
    devices: Annotated[
        Optional[int],
        typer.Option(
            help="Divide this many devices into copies, ranks and meshes. "
            "Default: as many as the config has.",
            rich_help_panel=CONFIG_PANEL,
        ),
    ] = None,
    memory: Annotated[
        Optional[str],
        typer.Option(
            help="Memory of a device, such as 80GiB. Without a model: micro-batches that "
            "a rank may hold; with --profile alone a bare number means MiB."
        ),
    ] = None,
    gpu: Annotated[
        Optional[str],
        typer.Option(
            help="Plan for a known GPU without having one: v100, a100-40, a100, h100 "
            "or h200. Its times come from a formula.",
            autocompletion=complete_gpu,
            rich_help_panel=CONFIG_PANEL,
        ),
    ] = None,
    cluster: Annotated[
        Optional[Path],
        typer.Option(
            help="A cluster.toml with the speeds of the devices and the links between them.",
            rich_help_panel=CONFIG_PANEL,
        ),
    ] = None,
    profile: ProfileFile = None,
    tokens: TokensOption = None,
    accept_error: AcceptError = False,
    ranks: Annotated[Optional[int], typer.Option(help="Ranks of the pipeline.")] = None,
    microbatches: Annotated[
        Optional[int], typer.Option(help="Micro-batches in a step.")
    ] = None,
    forward: ForwardOption = None,
    backward: BackwardOption = None,
    comm: CommOption = None,
    stages: Annotated[
        int,
        typer.Option(
            help="The most stages on a rank. A model cannot have more stages than layers."
        ),
    ] = 16,
    slices: Annotated[
        int,
        typer.Option(
            help="The most token slices of a sequence; 1 for models that cannot be sliced."
        ),
    ] = 16,
    granularity: Annotated[
        Optional[int],
        typer.Option(
            help="Cuts are multiples of this number of tokens. "
            "Default: 16, or 128 for a GPU."
        ),
    ] = None,
    weights: Annotated[
        int, typer.Option(help="The most copies of the weights; 2 admits chimera.")
    ] = 1,
    skip: Annotated[
        Optional[float],
        typer.Option(
            help="Let each micro-batch leave out up to this share of the layers, such as 0.25. "
            "This changes what is computed. Default: schedule.skip of the config, or 0."
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="The number of rows to show.")] = 15,
    output: OutputFile = None,
    page: Annotated[
        Optional[Path],
        typer.Option(help="Write a page that shows all that was compared, as HTML."),
    ] = None,
    framework_name: Annotated[
        Optional[str],
        typer.Option(
            "--for",
            metavar="FRAMEWORK",
            help="Plan for another framework, and print what it takes: torchtitan or megatron.",
            autocompletion=complete_framework,
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Search for the fastest plan; with -o, write it as a plan.json that `penstock train` runs.

    It divides the devices into copies, ranks and meshes, the batch into micro-batches and token slices, and the layers
    into parts, and orders what every rank does. The bound under the table holds for every plan of that space.

    Example: penstock plan config.toml --devices 32 --memory 80GiB --gpu h100 -o plan.json --page plan.html

    Example: penstock plan --ranks 8 --microbatches 16 --comm 0.05 --memory 8 -o plan.json

    Example: penstock plan --ranks 4 --microbatches 2 --profile profile.json --tokens 8192

    Example: penstock plan config.toml --devices 32 --gpu h100 --for torchtitan -o plan.json
    """
    from penstock.formats import dump_plan
    from penstock.plan.planner import chosen_plan
    from penstock.plan.recipes import Limits
    from penstock.plan.search import search
    from penstock.schedules.orders import require_at_least
    from penstock.view.numbers import write_size

    require_at_least(1, stages=stages, slices=slices, weights=weights, top=top)
    given = {"granularity": granularity, "devices": devices}
    require_at_least(1, **{key: one for key, one in given.items() if one is not None})
    if skip is not None and not 0 <= skip <= MAX_SKIP:
        raise ShapeError(f"--skip must be from 0 to {MAX_SKIP:g}, not {skip:g}")
    limits = Limits(stages, slices, weights, skip=skip or 0.0)
    framework = _framework_of(framework_name, limits)
    if framework is not None:
        limits = framework.narrow(limits)
    if source is not None or gpu is not None:
        _refuse_beside_config(
            ranks=ranks,
            microbatches=microbatches,
            tokens=tokens,
            forward=forward,
            backward=backward,
            comm=comm,
        )
        model = ModelOptions(
            source,
            tuple(changes or ()),
            devices,
            memory,
            gpu,
            cluster,
            profile,
            accept_error,
            granularity,
            skip,
        )
        question = config_question(model, limits, framework)
    else:
        _refuse_without_config(devices=devices, cluster=cluster, set=changes or None)
        if ranks is None or microbatches is None:
            raise ShapeError(
                "name a config.toml, or give --ranks and --microbatches\n"
                "  penstock plan config.toml --devices 8; `penstock init` writes a config"
            )
        price = price_of(forward, backward, comm, profile, tokens, accept_error)
        question = pipeline_question(
            price, profile, ranks, microbatches, memory, granularity, limits
        )
    with progress("planning") as status:
        landscape = search(
            question.workload,
            question.pricing,
            question.limits,
            show_progress(status),
            lambda size: write_size(size, question.units, digits=4),
        )
    if landscape.interrupted:
        tell("stopped", "this is the best plan so far, not the end of the search")
    if page is not None:
        from penstock.cli.landscape_page import landscape_page
        from penstock.view.landscape import render_landscape

        shown = landscape_page(landscape, question)
        write(page, render_landscape(shown), quiet=json)
    if framework is not None:
        from penstock.cli.advice import show_counsel

        show_counsel(landscape, question, framework, output, json)
        return
    if output is not None:
        plan = chosen_plan(landscape, question.facts)
        write(output, dump_plan(plan), quiet=json)
    if json:
        print_json(landscape_facts(landscape, question))
    else:
        print_landscape(landscape, question, top)


def _framework_of(name: str | None, limits: Limits) -> Framework | None:
    """Return the framework to plan for; refuse limits that only our own runtime can use."""
    from penstock.integrations.advice import framework_of

    if name is None:
        return None
    if limits.skip:
        raise ShapeError(
            f"--skip plans partial paths, which {name} cannot run\n"
            "  leave out --skip or --for"
        )
    return framework_of(name)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options of a plan for a model."""

    source: Path | None
    changes: tuple[str, ...]
    devices: int | None
    memory: str | None
    gpu: str | None
    cluster: Path | None
    profile: Path | None
    accept_error: bool
    granularity: int | None
    skip: float | None = None


# ---------------------------------------------------------------- questions
def pipeline_question(
    price: Price,
    profile: Path | None,
    ranks: int,
    microbatches: int,
    memory: str | None,
    granularity: int | None,
    limits: Limits,
) -> Question:
    """Ask for a pipeline with given ranks and micro-batches."""
    from penstock.cost import UnitCost
    from penstock.plan.question import (
        microbatches_of,
        parse_bytes,
        profile_question,
        profile_workload,
        unit_question,
    )
    from penstock.schedules.orders import require_at_least

    require_at_least(1, ranks=ranks, microbatches=microbatches)
    if profile is None:
        if granularity is not None:
            raise ShapeError(
                "--granularity needs a profile or a config\n"
                "  name a config, or add --profile profile.json; without them, only the "
                "proportions of cuts matter"
            )
        assert isinstance(price.cost, UnitCost)
        size = None if memory is None else microbatches_of(memory)
        return unit_question(ranks, microbatches, price.cost, size, limits)
    profiles = price.profiles
    assert profiles is not None, "price_of has read them"
    size = None if memory is None else parse_bytes(memory)
    workload = profile_workload(
        profiles, ranks, microbatches, price.tokens, size, granularity
    )
    return profile_question(workload, profiles.at, limits, str(profile))


def config_question(
    options: ModelOptions, limits: Limits, framework: Framework | None = None
) -> Question:
    """Ask for the best plan of a config, on this machine or on devices that are described."""
    from penstock.formats import read_cluster
    from penstock.formats.config_toml import written_keys
    from penstock.plan.question import parse_bytes, profile_question
    from penstock.train.own_models import config_of, limits_of, read_model

    config, sizes = read_model(options.source, options.changes)
    if options.skip is None:
        limits = replace(limits, skip=config.schedule.skip)
    limits = limits_of(sizes, limits)
    # Whoever asks for a number of devices wants to know how to divide them.
    file = None if options.devices else options.source
    given = written_keys(file, options.changes)
    memory = None if options.memory is None else parse_bytes(options.memory)
    if options.gpu is not None:
        return _gpu_question(options, config, sizes, given, memory, limits, framework)
    _require_torch()
    from penstock.train.auto import machine_workload, workload_limits

    cluster = None
    devices = options.devices or 0
    if options.cluster is not None:
        cluster = read_cluster(options.cluster)
        devices = devices or len(cluster.nodes)
        if devices > len(cluster.nodes):
            raise ShapeError(
                f"--devices {devices}, but {options.cluster} has {len(cluster.nodes)} nodes\n"
                f"  give --devices {len(cluster.nodes)} or less, or add nodes to the file"
            )
        memories = [node.memory for node in cluster.nodes if node.memory is not None]
        memory = memory or min(memories, default=None)
    workload, placement = machine_workload(
        config,
        sizes.layers,
        given,
        devices=devices,
        memory=memory,
        granularity=options.granularity,
        uneven=cluster is not None,
        model=config_of(sizes),
    )
    if framework is not None:
        workload = framework.adapt(workload)
    limits = workload_limits(workload, limits)
    profiles, origin = profiles_of(
        options.profile,
        options.accept_error,
        workload,
        placement,
        whole=limits.slices == 1,
    )
    return profile_question(workload, profiles.at, limits, origin, cluster=cluster)


def _gpu_question(
    options: ModelOptions,
    config: Config,
    sizes: Sizes,
    given: Collection[str],
    memory: float | None,
    limits: Limits,
    framework: Framework | None,
) -> Question:
    """Ask for the best plan on GPUs of a known kind."""
    from penstock.cost.gpus import gpu_of
    from penstock.cost.profile import tile_of
    from penstock.plan.question import gpu_question
    from penstock.plan.workload import USABLE_SHARE, workload_of
    from penstock.train.own_models import config_of

    if options.profile is not None or options.cluster is not None:
        raise ShapeError(
            "--gpu cannot be combined with --profile or --cluster\n"
            "  --gpu computes times by a formula: leave it out to plan with measured ones"
        )
    gpu = gpu_of(options.gpu or "")
    if options.source is None and not any(
        change.strip().startswith("model.") for change in options.changes
    ):
        raise ShapeError(
            f"which model should be planned for the {gpu.name}? name its config\n"
            f"  penstock plan config.toml --gpu {options.gpu}; `penstock init config.toml "
            "--preset llama-1b` writes one"
        )
    devices = options.devices or 0
    workload = workload_of(
        config,
        sizes.layers,
        given,
        devices,
        memory or USABLE_SHARE * gpu.memory,
        granularity=options.granularity or tile_of("cuda"),
        uneven=True,
        open_mesh=True,
        model=config_of(sizes),
        on_gpu=True,
    )
    if framework is not None:
        workload = framework.adapt(workload)
    return gpu_question(workload, config_of(sizes), gpu, limits)


def _require_torch() -> None:
    """Refuse to measure a model without torch, and name the way to plan without it."""
    from importlib.util import find_spec

    from penstock.errors import RunError

    if find_spec("torch") is None:
        raise RunError(
            "measuring a model needs torch, which is not installed: pip install 'penstock[torch]'\n"
            "  to plan without it for a GPU that is known, add --gpu h100"
        )


def _refuse_beside_config(**options: float | None) -> None:
    """Refuse the options that contradict a config."""
    for name, value in options.items():
        if value is not None:
            raise ShapeError(
                f"--{name} is for a pipeline without a config; a config has its own: "
                f"--set schedule.ranks=8, data.tokens and so on\n  leave --{name} out"
            )


def _refuse_without_config(**options: object) -> None:
    """Refuse the options that only make sense with a config."""
    for name, value in options.items():
        if value is not None:
            raise ShapeError(
                f"--{name} needs a config: penstock plan config.toml --{name} ...\n"
                "  `penstock init` writes one"
            )


def profiles_of(
    file: Path | None,
    accept_error: bool,
    workload: Workload,
    placement: Placement,
    whole: bool = False,
) -> tuple[RowProfiles, str]:
    """Return the profiles of a config's model, and where they come from.

    With `whole`, nothing will be sliced, so that no slices need to be measured.
    """
    from penstock.cost.profile import refuse_error
    from penstock.formats import read_row_profiles
    from penstock.train.auto import measure_workload

    if file is not None:
        profiles = read_row_profiles(file)
        if not accept_error:
            refuse_error(profiles.measured[0], str(file))
        if profiles.layers != workload.layers or profiles.tokens != workload.tokens:
            raise ShapeError(
                f"{file} is of {profiles.layers} layers and "
                f"{profiles.tokens} tokens, but the config has {workload.layers} layers "
                f"and {workload.tokens} tokens\n"
                "  measure it: penstock profile config.toml"
            )
        return profiles, str(file)
    with progress("timing a layer"):
        profiles = measure_workload(workload, placement, whole=whole)
    return profiles, "measured on this machine"
