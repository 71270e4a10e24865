"""`penstock plan`: searches for the fastest plan, and says how far from the optimum it can be."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.landscape import (
    LandscapePage,
    Yardstick,
    describe_range,
    landscape_facts,
    note_unused,
    planning,
    print_comparison,
    print_landscape,
)
from penstock.cli.sources import (
    COST_HELP,
    PIPELINE_SETTINGS,
    PipelineOptions,
    complete_model,
    config_file,
    describe_model,
    read_cost_profile,
    read_costs,
    read_model,
)
from penstock.cli.terminal import (
    MODEL_HELP,
    ConfigChanges,
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
from penstock.config import Config, allows_meshes
from penstock.cost import RowProfiles, UnitCost
from penstock.cost.gpus import GPUS, gpu_of
from penstock.cost.profile import tile_of
from penstock.errors import RunError, ShapeError
from penstock.formats import dump_plan, read_cluster
from penstock.formats.config_toml import written_keys
from penstock.integrations.advice import (
    Framework,
    framework_of,
    pipeline_terms,
)
from penstock.layout import Layout, read_layout
from penstock.plan.baseline import layout_candidate
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
    parse_memory,
    profile_workload,
    workload_of,
)
from penstock.schedules.orders import require_at_least
from penstock.shaped import read_shape
from penstock.train.own_models import config_of, limits_of
from penstock.train.placement import Placement
from penstock.view.numbers import name_size, name_time, write_size

if TYPE_CHECKING:
    from penstock.train.weights import Sizes  # loads torch

DEFAULT_STEM = Path("plan")  # of the files that advice would be in
MAX_SKIP = 0.9  # the largest share of the layers that a micro-batch may leave out
LIMITS = {"stages": 16, "slices": 16, "weights": 1}  # the most that a search tries
MODEL_PANEL = "A model and its devices"
NEEDS_A_MODEL = (
    "{option} needs a model: penstock plan MODEL {option} ...\n"
    "  a config (`penstock init` writes one), a Hugging Face folder or config.json, or a preset such as llama-1b"
)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """The devices to plan for, and what a model costs there."""

    devices: int | None = option(
        None,
        "Divide the model over this many devices. Default: as many as the config has.",
        rich_help_panel=MODEL_PANEL,
        least=1,
    )
    gpu: str | None = option(
        None,
        f"Plan for a known GPU without having one: {', '.join(GPUS)}. Its times come from a formula.",
        autocompletion=beginning("cost.gpus:GPUS"),
        rich_help_panel=MODEL_PANEL,
    )
    memory: str | None = option(
        None,
        "Memory of a device, such as 80GiB; without a model, in-flight micro-batches of a rank, such as 4mb.",
    )
    cluster: Path | None = option(
        None,
        "A cluster.toml with the speeds of the devices and the links between them.",
        rich_help_panel=MODEL_PANEL,
    )
    cost: str | None = option(None, f"{COST_HELP} Or the name of a GPU.")

    @property
    def known_gpu(self) -> str | None:
        """The GPU whose data sheet gives the times, if there is one."""
        named = self.cost if self.cost and self.cost.casefold() in GPUS else None
        return self.gpu or named

    @property
    def profile(self) -> Path | None:
        """The profile that gives the times of a model, if there is one."""
        if self.cost is None or self.known_gpu:
            return None
        costs = read_costs(self.cost)
        if costs.file is None:
            raise ShapeError(
                f"--cost {self.cost} is for a pipeline without a model\n"
                "  give a profile.json or a GPU, or leave --cost out to measure the model here"
            )
        return costs.file

    @property
    def memory_bytes(self) -> float | None:
        """The memory of a device, if it is given."""
        return None if self.memory is None else parse_memory(self.memory)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What the search may try."""

    limit: str | None = option(
        None,
        "The most stages on a rank, token slices of a sequence and copies of the weights (chimera has two). "
        "Default: stages=16,slices=16,weights=1.",
    )
    skip: float | None = option(
        None,
        "Let each micro-batch leave out up to this share of the layers, such as 0.25. "
        "This changes what is computed. Default: that of schedule.name (auto:skip=0.25), or 0.",
    )
    seconds: float | None = option(
        None,
        "Stop after about this long with the best plan so far. Default: no limit.",
        above=0,
    )

    @property
    def limits(self) -> Limits:
        """The limits of the search."""
        counts = LIMITS | read_shape(
            "--limit", self.limit or "", dict.fromkeys(LIMITS, int)
        )
        require_at_least(1, **counts)
        skip = self.skip or 0.0
        if not 0 <= skip <= MAX_SKIP:
            raise ShapeError(f"--skip must be from 0 to {MAX_SKIP:g}, not {skip:g}")
        stages, slices, weights = counts.values()
        return Limits(stages, slices, weights, skip=skip)


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """What is done with the best plan."""

    framework: str | None = option(
        None,
        "Plan for another framework, and print what it takes: torchtitan or megatron.",
        "--for",
        metavar="FRAMEWORK",
        autocompletion=beginning("integrations.advice:FRAMEWORKS"),
    )
    baseline: str | None = option(
        None,
        "The layout that you run today, which becomes a row: dp_replicate=4,dp_shard=8 or "
        "tp=2,pp=4,schedule=interleaved:chunks=2. It also takes microbatches=8 and recompute=full.",
        metavar="LAYOUT",
    )
    top: int = option(15, "The number of rows to show.", least=1)
    output: Path | None = option(None, "The plan.json to write.", "-o", "--output")
    page: Path | None = option(
        None, "Write a page that shows all that was compared, as HTML."
    )
    json: bool = option(False, "Print one JSON object to stdout.", "--json")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model to plan, and what is known about it and its devices."""

    source: Path | None
    changes: tuple[str, ...]
    devices: DeviceOptions
    skip: float | None = None


def plan_command(
    devices: DeviceOptions,
    pipeline: PipelineOptions,
    searching: SearchOptions,
    result: ResultOptions,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help=f"{MODEL_HELP} It is measured here unless --gpu or --cost is given.",
            autocompletion=complete_model,
        ),
    ] = None,
    changes: ConfigChanges = None,
) -> None:
    """Search for the fastest plan; with -o, write it as a plan.json that `penstock train` runs.

    It chooses the degrees of data, tensor and pipeline parallelism, divides the batch into micro-batches and token
    slices and the layers into parts, and orders what every rank does. The bound under the table holds for every plan
    of that space. Without a model it plans one pipeline in which a forward of a micro-batch on a rank takes 1.

    The exit code is 0 if there is a plan, 2 if something is wrong with the question, and 3 if nothing fits.

    Example: penstock plan llama3-8b/config.json --devices 64 --gpu h100 --for torchtitan

    Example: penstock plan config.toml --devices 32 --memory 80GiB --gpu h100 --baseline dp_shard=32 -o plan.json

    Example: penstock plan --pp 8 --microbatches 16 --cost comm=0.05 --memory 8mb -o plan.json
    """
    limits = searching.limits
    framework = None
    if result.framework is not None:
        if limits.skip:
            raise ShapeError(
                f"--skip plans partial paths, which {result.framework} cannot run\n"
                "  leave out --skip or --for"
            )
        framework = framework_of(result.framework)
        limits = framework.narrow(limits)
    baseline = None if result.baseline is None else read_layout(result.baseline)
    about = ""
    if source is not None or any(
        one.strip().startswith("model.") for one in changes or ()
    ):
        sizes = {
            PIPELINE_SETTINGS[name]: value
            for name, value in (
                ("pp", pipeline.pp),
                ("microbatches", pipeline.microbatches),
            )
            if value is not None
        }
        words = [*(changes or ()), *(f"{key}={value}" for key, value in sizes.items())]
        model = ModelOptions(source, tuple(words), devices, searching.skip)
        question = config_question(model, limits, framework)
        about = describe_model(source, question.workload)
    else:
        needing = [
            name for name in given(devices) if name not in ("--memory", "--cost")
        ]
        needing += ["--set"] * bool(changes) + ["--baseline"] * (baseline is not None)
        refuse(needing, NEEDS_A_MODEL)
        question = pipeline_question(pipeline, devices, limits)
    yardsticks = _yardsticks(question, baseline)
    with planning(searching.seconds, question.units) as watch:
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
        if not result.json:
            print_comparison(landscape, question, yardsticks)
        return
    if result.output is not None:
        plan = chosen_plan(landscape, question.facts)
        write(result.output, dump_plan(plan), quiet=result.json)
    if result.json:
        print_json(landscape_facts(landscape, question, yardsticks))
    else:
        print_landscape(landscape, question, result.top, yardsticks, about)


def _yardsticks(question: Question, baseline: Layout | None) -> list[Yardstick]:
    """Return what the best plan is compared with: FSDP without a pipeline if it is possible, and the baseline."""
    workload = question.workload
    found = []
    config = workload.config
    fsdp = Layout(dp_shard=workload.devices)
    if config is not None and workload.devices > 1 and allows_meshes(config):
        try:
            candidate = layout_candidate(question, fsdp)
            found.append(Yardstick("FSDP only", "FSDP only", fsdp, candidate))
        except ShapeError:  # The batch has fewer sequences than there are devices.
            pass
    if baseline is not None:
        candidate = layout_candidate(question, baseline)
        found.append(Yardstick("baseline", baseline.schedule, baseline, candidate))
    return found


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
            "pp": pipeline.ranks,
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
    sends = "blocking" if waits else "asynchronous"
    how = f" (simulated with {sends} p2p)" if pipeline.ranks > 1 else ""
    print_plain(f"planned {question.basis}")
    print_plain(
        f"for {framework.name}: {name}, {advice.schedule}\n"
        f"expected: a step of {name_time(best.step, units)}, bubble "
        f"{best.bubble:.1%}, peak memory per GPU {name_size(best.peak, units)}{how}"
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
    pipeline: PipelineOptions, devices: DeviceOptions, limits: Limits
) -> Question:
    """Ask for a pipeline of some ranks and micro-batches, without a model."""
    costs = read_costs(devices.cost)
    if costs.channels is not None:
        raise ShapeError(
            "channels are for `penstock draw`; plan with --cost F=1,B=2,comm=0.05"
        )
    price = costs.price
    pp, microbatches = pipeline.sizes().values()
    require_at_least(1, pp=pp, microbatches=microbatches)
    if price.profiles is None:
        assert isinstance(price.cost, UnitCost)
        held = None
        if devices.memory is not None:
            held = parse_memory(devices.memory, in_microbatches=True)
        return unit_question(pp, microbatches, price.cost, held, limits)
    workload = profile_workload(
        price.profiles, pp, microbatches, price.tokens, devices.memory_bytes, None
    )
    return profile_question(workload, price.profiles.at, limits, str(costs.file))


def config_question(
    options: ModelOptions, limits: Limits, framework: Framework | None = None
) -> Question:
    """Ask for the best plan of a config, on this machine or on devices that are described."""
    config, sizes = read_model(options.source, options.changes)
    if options.skip is None:
        limits = replace(limits, skip=config.schedule.skip)
    limits = limits_of(sizes, limits)
    wanted = options.devices
    # Whoever asks for a number of devices wants to know how to divide them.
    file = None if wanted.devices else config_file(options.source)
    settings = written_keys(file, options.changes)
    memory = wanted.memory_bytes
    if wanted.known_gpu is not None:
        workload = _gpu_workload(options, config, sizes, settings)
        if framework is not None:
            workload = framework.adapt(workload)
        gpu = gpu_of(wanted.known_gpu)
        return gpu_question(workload, config_of(sizes), gpu, limits)
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
        uneven=cluster is not None,
        model=config_of(sizes),
    )
    if framework is not None:
        workload = framework.adapt(workload)
    limits = workload_limits(workload, limits)
    profiles, origin = profiles_of(
        wanted.profile, workload, placement, whole=limits.slices == 1
    )
    return profile_question(workload, profiles.at, limits, origin, cluster=cluster)


def _gpu_workload(
    options: ModelOptions,
    config: Config,
    sizes: Sizes,
    settings: Collection[str],
) -> Workload:
    """Return what is planned on GPUs of a known kind."""
    wanted = options.devices
    if wanted.cluster is not None or (wanted.gpu and wanted.cost):
        other = "--cluster" if wanted.cluster is not None else "--cost"
        raise ShapeError(
            f"the data sheet of a GPU cannot be combined with {other}\n"
            "  leave the GPU out to plan with measured times"
        )
    gpu = gpu_of(wanted.known_gpu or "")
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
        tile_of("cuda"),
        open_mesh=True,
        model=config_of(sizes),
    )


def profiles_of(
    file: Path | None,
    workload: Workload,
    placement: Placement,
    whole: bool = False,
) -> tuple[RowProfiles, str]:
    """Return the profiles of a config's model, and where they come from.

    With `whole`, nothing will be sliced, so that no slices need to be measured.
    """
    if file is not None:
        profiles = read_cost_profile(file)
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
