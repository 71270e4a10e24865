"""`penstock plan`: searches for the fastest plan, and says how far from the optimum it can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.landscape import (
    LandscapePage,
    describe_range,
    landscape_facts,
    note_unused,
    planning,
    print_landscape,
)
from penstock.cli.schedule import price_of
from penstock.cli.terminal import (
    ConfigChanges,
    ProfileFile,
    ProfileOptions,
    UnitTimes,
    beginning,
    console,
    given,
    option,
    print_json,
    print_plain,
    progress,
    refuse,
    tell,
    write,
)
from penstock.config import Config
from penstock.cost import RowProfiles, UnitCost
from penstock.cost.gpus import gpu_of
from penstock.cost.profile import refuse_error, tile_of
from penstock.errors import RunError, ShapeError
from penstock.formats import dump_plan, read_cluster, read_row_profiles
from penstock.formats.config_toml import is_folder, read_source, written_keys
from penstock.integrations.advice import (
    Framework,
    framework_of,
    pipeline_terms,
)
from penstock.plan.planner import chosen_plan
from penstock.plan.pricing import (
    Question,
    gpu_question,
    profile_question,
    unit_question,
)
from penstock.plan.search import Landscape, row_title, search
from penstock.plan.space import Limits
from penstock.plan.workload import (
    USABLE_SHARE,
    Hardware,
    Workload,
    microbatches_of,
    parse_bytes,
    profile_workload,
    workload_of,
)
from penstock.schedules.orders import require_at_least
from penstock.train.own_models import config_of, limits_of, settled_sizes
from penstock.train.placement import Placement
from penstock.view.numbers import name_size, name_time, write_size

if TYPE_CHECKING:
    from penstock.train.weights import Sizes  # loads torch

DEFAULT_STEM = Path("plan")  # of the files that advice would be in
MAX_SKIP = 0.9  # the largest share of the layers that a micro-batch may leave out
CONFIG_PANEL = "A model and its devices"
FOR_A_PIPELINE = (
    "{option} is for a pipeline without a config; a config has its own: "
    "--set parallel.pp=8, data.seq_len and so on\n  leave {option} out"
)
NEEDS_A_CONFIG = (
    "{option} needs a config: penstock plan config.toml {option} ...\n"
    "  `penstock init` writes one"
)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """The devices to plan for."""

    devices: int | None = option(
        None,
        "Divide this many devices into copies, ranks and meshes. "
        "Default: as many as the config has.",
        rich_help_panel=CONFIG_PANEL,
    )
    memory: str | None = option(
        None,
        "Memory of a device, such as 80GiB. Without a model: micro-batches that "
        "a rank may hold; with --profile alone a bare number means MiB.",
    )
    gpu: str | None = option(
        None,
        "Plan for a known GPU without having one: v100, a100-40, a100, h100 "
        "or h200. Its times come from a formula.",
        autocompletion=beginning("cost.gpus:GPUS"),
        rich_help_panel=CONFIG_PANEL,
    )
    cluster: Path | None = option(
        None,
        "A cluster.toml with the speeds of the devices and the links between them.",
        rich_help_panel=CONFIG_PANEL,
    )

    @property
    def memory_bytes(self) -> float | None:
        """The memory of a device, if it is given."""
        return None if self.memory is None else parse_bytes(self.memory)


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """A pipeline without a config."""

    ranks: int | None = option(None, "Ranks of the pipeline.")
    microbatches: int | None = option(None, "Micro-batches in a step.")


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """What the search may try."""

    stages: int = option(
        16,
        "The most stages on a rank. A model cannot have more stages than layers.",
    )
    slices: int = option(
        16,
        "The most token slices of a sequence; 1 for models that cannot be sliced.",
    )
    granularity: int | None = option(
        None,
        "Cuts are multiples of this number of tokens. Default: 16, or 128 for a GPU.",
    )
    weights: int = option(1, "The most copies of the weights; 2 admits chimera.")
    skip: float | None = option(
        None,
        "Let each micro-batch leave out up to this share of the layers, such as 0.25. "
        "This changes what is computed. Default: that of schedule.name (auto:skip=0.25), or 0.",
    )


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """What is done with the best plan."""

    top: int = option(15, "The number of rows to show.")
    output: Path | None = option(None, "The file to write.", "-o", "--output")
    page: Path | None = option(
        None, "Write a page that shows all that was compared, as HTML."
    )
    framework: str | None = option(
        None,
        "Plan for another framework, and print what it takes: torchtitan or megatron.",
        "--for",
        metavar="FRAMEWORK",
        autocompletion=beginning("integrations.advice:FRAMEWORKS"),
    )
    json: bool = option(False, "Print one JSON object to stdout.", "--json")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model to plan, and what is known about it and its devices."""

    source: Path | None
    changes: tuple[str, ...]
    devices: DeviceOptions
    profile: ProfileOptions
    limits: LimitOptions


def plan_command(
    devices: DeviceOptions,
    profile: ProfileOptions,
    pipeline: PipelineOptions,
    times: UnitTimes,
    limiting: LimitOptions,
    result: ResultOptions,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="A config.toml, whose model is measured here unless --profile or --gpu is given.",
        ),
    ] = None,
    changes: ConfigChanges = None,
) -> None:
    """Search for the fastest plan; with -o, write it as a plan.json that `penstock train` runs.

    It divides the devices into copies, ranks and meshes, the batch into micro-batches and token slices, and the layers
    into parts, and orders what every rank does. The bound under the table holds for every plan of that space.

    Example: penstock plan config.toml --devices 32 --memory 80GiB --gpu h100 -o plan.json --page plan.html

    Example: penstock plan --ranks 8 --microbatches 16 --comm 0.05 --memory 8 -o plan.json

    Example: penstock plan --ranks 4 --microbatches 2 --profile profile.json --tokens 8192

    Example: penstock plan config.toml --devices 32 --gpu h100 --for torchtitan -o plan.json
    """
    counts = {
        "stages": limiting.stages,
        "slices": limiting.slices,
        "weights": limiting.weights,
        "top": result.top,
        "granularity": limiting.granularity,
        "devices": devices.devices,
    }
    given_counts = {name: one for name, one in counts.items() if one is not None}
    require_at_least(1, **given_counts)
    skip = limiting.skip or 0.0
    if not 0 <= skip <= MAX_SKIP:
        raise ShapeError(f"--skip must be from 0 to {MAX_SKIP:g}, not {skip:g}")
    limits = Limits(limiting.stages, limiting.slices, limiting.weights, skip=skip)
    framework = None
    if result.framework is not None:
        if skip:
            raise ShapeError(
                f"--skip plans partial paths, which {result.framework} cannot run\n"
                "  leave out --skip or --for"
            )
        framework = framework_of(result.framework)
        limits = framework.narrow(limits)
    if source is not None or devices.gpu is not None:
        tokens = ["--tokens"] if profile.tokens is not None else []
        refuse([*given(pipeline), *tokens, *given(times)], FOR_A_PIPELINE)
        model = ModelOptions(source, tuple(changes or ()), devices, profile, limiting)
        question = config_question(model, limits, framework)
    else:
        needing = [name for name in given(devices) if name != "--memory"]
        refuse([*needing, *["--set"] * bool(changes)], NEEDS_A_CONFIG)
        question = pipeline_question(
            pipeline, times, profile, devices.memory, limiting, limits
        )
    with planning() as watch:
        landscape = search(
            question,
            watch,
            lambda size: write_size(size, question.units, digits=4),
        )
    if landscape.interrupted:
        tell("stopped", "this is the best plan so far, not the end of the search")
    if result.page is not None:
        shown = LandscapePage(landscape, question)
        write(result.page, shown.html(), quiet=result.json)
    if framework is not None:
        _show_advice(landscape, question, framework, result.output, result.json)
        return
    if result.output is not None:
        plan = chosen_plan(landscape, question.facts)
        write(result.output, dump_plan(plan), quiet=result.json)
    if result.json:
        print_json(landscape_facts(landscape, question))
    else:
        print_landscape(landscape, question, result.top)


# ---------------------------------------------------------------- other frameworks
def _show_advice(
    landscape: Landscape,
    question: Question,
    framework: Framework,
    output: Path | None,
    json: bool,
) -> None:
    """Print the best plan for a framework, and what to tell it; with an output, write both."""
    stem = DEFAULT_STEM if output is None else output.with_suffix("")
    best = landscape.best
    pipeline = pipeline_terms(landscape.best, question.workload)
    advice = framework.advise(pipeline, stem)
    options = f"{stem.name}.{framework.ending}"
    name = row_title(landscape.best, landscape)
    waits = framework.waits(best.schedule)
    if output is not None:
        write(output, dump_plan(chosen_plan(landscape, question.facts)), json)
        for file, text in {options: advice.text, **advice.files}.items():
            write(stem.with_name(file), text, json)
    if json:
        facts = {
            "for": framework.name,
            "basis": question.basis,
            "plan": name,
            "schedule": advice.schedule,
            "ranks": pipeline.ranks,
            "microbatches": pipeline.microbatches,
            "partition": list(pipeline.partition),
            "expected": {
                "step": best.step,
                "range": question.range_of(best.step),
                "makespan": best.makespan,
                "bubble": best.bubble,
                "peak": best.peak,
                "waits": waits,
            },
            "text": advice.text,
            "files": dict(advice.files),
            "notes": list(advice.notes),
        }
        print_json(facts)
        return
    units = question.units
    sends = "wait for their messages" if waits else "send in the background"
    how = f" (simulated for ranks that {sends})" if pipeline.ranks > 1 else ""
    print_plain(f"planned {question.basis}")
    print_plain(
        f"for {framework.name}: {name}, {advice.schedule}\n"
        f"expected: a step of {name_time(best.step, units)}, bubble "
        f"{best.bubble:.1%}, {name_size(best.peak, units)} on the fullest device{how}"
    )
    for line in describe_range(question, best.step):
        print_plain(line)
    console().rule(framework.ending, style="dim")
    print_plain(advice.text.rstrip("\n"))
    console().rule(style="dim")
    for note in (*advice.notes, *note_unused(question)):
        print_plain(note)
    if output is None:
        *files, last = ["the plan", options, *advice.files]
        also = f"{', '.join(files)} and {last}"
        print_plain(f"-o plan.json also writes {also}", stderr=True)


# ---------------------------------------------------------------- questions
def pipeline_question(
    pipeline: PipelineOptions,
    times: UnitTimes,
    profile: ProfileOptions,
    memory: str | None,
    limiting: LimitOptions,
    limits: Limits,
) -> Question:
    """Ask for a pipeline with given ranks and micro-batches."""
    ranks, microbatches = pipeline.ranks, pipeline.microbatches
    if ranks is None or microbatches is None:
        raise ShapeError(
            "name a config.toml, or give --ranks and --microbatches\n"
            "  penstock plan config.toml --devices 8; `penstock init` writes a config"
        )
    price = price_of(times, profile)
    require_at_least(1, ranks=ranks, microbatches=microbatches)
    if price.profiles is None:
        if limiting.granularity is not None:
            raise ShapeError(
                "--granularity needs a profile or a config\n"
                "  name a config, or add --profile profile.json; without them, only the "
                "proportions of cuts matter"
            )
        assert isinstance(price.cost, UnitCost)
        held = None if memory is None else microbatches_of(memory)
        return unit_question(ranks, microbatches, price.cost, held, limits)
    workload = profile_workload(
        price.profiles,
        ranks,
        microbatches,
        price.tokens,
        None if memory is None else parse_bytes(memory),
        limiting.granularity,
    )
    return profile_question(workload, price.profiles.at, limits, str(profile.profile))


def read_model(source: Path | None, changes: Sequence[str]) -> tuple[Config, Sizes]:
    """Return a config and the sizes of its model; a model or a run in a folder needs torch."""
    config = read_source(source, None, changes)
    if not config.model.folder and not is_folder(source):
        return settled_sizes(config)
    from penstock.train.before.start import find_run  # loads torch
    from penstock.train.job import model_sizes  # loads torch

    config, _ = find_run(source, None, changes, exists=True)
    return config, model_sizes(config)


def config_question(
    options: ModelOptions, limits: Limits, framework: Framework | None = None
) -> Question:
    """Ask for the best plan of a config, on this machine or on devices that are described."""
    config, sizes = read_model(options.source, options.changes)
    if options.limits.skip is None:
        limits = replace(limits, skip=config.schedule.skip)
    limits = limits_of(sizes, limits)
    wanted = options.devices
    # Whoever asks for a number of devices wants to know how to divide them.
    file = None if wanted.devices else options.source
    settings = written_keys(file, options.changes)
    memory = wanted.memory_bytes
    if wanted.gpu is not None:
        workload = _gpu_workload(options, config, sizes, settings)
        if framework is not None:
            workload = framework.adapt(workload)
        return gpu_question(workload, config_of(sizes), gpu_of(wanted.gpu), limits)
    if find_spec("torch") is None:
        raise RunError(
            "measuring a model needs torch, which is not installed: pip install 'penstock[torch]'\n"
            "  to plan without it for a GPU that is known, add --gpu h100"
        )
    from penstock.train.before.start import (  # loads torch
        machine_workload,
        workload_limits,
    )

    cluster = None
    devices = wanted.devices or 0
    if wanted.cluster is not None:
        cluster = read_cluster(wanted.cluster)
        devices = devices or len(cluster.nodes)
        if devices > len(cluster.nodes):
            raise ShapeError(
                f"--devices {devices}, but {wanted.cluster} has {len(cluster.nodes)} nodes\n"
                f"  give --devices {len(cluster.nodes)} or less, or add nodes to the file"
            )
        memories = [node.memory for node in cluster.nodes if node.memory is not None]
        memory = memory or min(memories, default=None)
    workload, placement = machine_workload(
        config,
        sizes.layers,
        settings,
        devices=devices,
        memory=memory,
        granularity=options.limits.granularity,
        uneven=cluster is not None,
        model=config_of(sizes),
    )
    if framework is not None:
        workload = framework.adapt(workload)
    limits = workload_limits(workload, limits)
    profiles, origin = profiles_of(
        options.profile, workload, placement, whole=limits.slices == 1
    )
    return profile_question(workload, profiles.at, limits, origin, cluster=cluster)


def _gpu_workload(
    options: ModelOptions, config: Config, sizes: Sizes, settings: Collection[str]
) -> Workload:
    """Return what is planned on GPUs of a known kind."""
    wanted = options.devices
    if options.profile.profile is not None or wanted.cluster is not None:
        raise ShapeError(
            "--gpu cannot be combined with --profile or --cluster\n"
            "  --gpu computes times by a formula: leave it out to plan with measured ones"
        )
    gpu = gpu_of(wanted.gpu or "")
    if options.source is None and not any(
        change.strip().startswith("model.") for change in options.changes
    ):
        raise ShapeError(
            f"which model should be planned for the {gpu.name}? name its config\n"
            f"  penstock plan config.toml --gpu {wanted.gpu}; `penstock init config.toml "
            "--preset llama-1b` writes one"
        )
    return workload_of(
        config,
        sizes.layers,
        settings,
        Hardware(
            wanted.devices or 0,
            wanted.memory_bytes or USABLE_SHARE * gpu.memory,
            uneven=True,
            on_gpu=True,
        ),
        options.limits.granularity or tile_of("cuda"),
        open_mesh=True,
        model=config_of(sizes),
    )


def profiles_of(
    options: ProfileFile,
    workload: Workload,
    placement: Placement,
    whole: bool = False,
) -> tuple[RowProfiles, str]:
    """Return the profiles of a config's model, and where they come from.

    With `whole`, nothing will be sliced, so that no slices need to be measured.
    """
    file = options.profile
    if file is not None:
        profiles = read_row_profiles(file)
        if not options.accept_error:
            refuse_error(profiles.measured[0], str(file))
        if profiles.layers != workload.layers or profiles.tokens != workload.tokens:
            raise ShapeError(
                f"{file} is of {profiles.layers} layers and "
                f"{profiles.tokens} tokens, but the config has {workload.layers} layers "
                f"and {workload.tokens} tokens\n"
                "  measure it: penstock profile config.toml"
            )
        return profiles, str(file)
    from penstock.train.before.start import measure_workload  # loads torch

    with progress("timing a layer"):
        profiles = measure_workload(workload, placement, whole=whole)
    return profiles, "measured on this machine"
