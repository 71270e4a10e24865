"""The frameworks themselves read our advice: their own parsers, placements and orders, on a CPU.

The packages are large and pull in many others, so they are not among our own. `make test-integrations` installs them.
"""

from __future__ import annotations

import importlib
import shlex
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from penstock import make
from penstock.integrations.advice import (
    FRAMEWORKS,
    PipelineTerms,
    layout_text,
    torch_name,
)
from penstock.integrations.torchtitan.options import modules_of
from penstock.partition import even_partition

STEM = Path("plan")
SHAPES: list[tuple[str, dict[str, int]]] = [
    ("1f1b", {"ranks": 4, "microbatches": 8}),
    ("interleaved", {"ranks": 2, "microbatches": 4, "chunks": 3}),
    ("zb-v", {"ranks": 4, "microbatches": 8}),
    ("hanayo", {"ranks": 3, "microbatches": 4, "waves": 1}),
    ("zb-h1", {"ranks": 3, "microbatches": 4}),
]


def their(module: str) -> ModuleType:
    """A module of a framework; skip the test if the framework or something it needs is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, while they are imported
        try:
            return importlib.import_module(module)
        except (ImportError, RuntimeError, OSError) as error:
            pytest.skip(f"{module} cannot be imported: {error}")


def pipeline(name: str, shape: dict[str, int]) -> PipelineTerms:
    schedule = make(name, **shape)
    partition = even_partition(2 * schedule.parts + 1, schedule.parts)
    return PipelineTerms(schedule, partition, 2, 1, 1, 1, 1, (), 64)


def homes(plan: PipelineTerms) -> list[list[int]]:
    """The stages of each rank."""
    found: list[list[int]] = [[] for _ in range(plan.ranks)]
    for stage in plan.schedule.stages:
        found[stage.rank].append(stage.part)
    return found


# ---------------------------------------------------------------- torchtitan
@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_torchtitan_parses_the_options_and_places_the_stages_as_planned(
    name: str, shape: dict[str, int]
) -> None:
    configs = their("torchtitan.config.configs")
    manager = their("torchtitan.config.manager")
    checkpoint = their("torchtitan.distributed.activation_checkpoint")
    peer = their("torchtitan.distributed.pipeline_parallel")
    tyro = their("tyro")

    @dataclass
    class Config:
        training: configs.TrainingConfig = field(default_factory=configs.TrainingConfig)
        parallelism: configs.ParallelismConfig = field(
            default_factory=configs.ParallelismConfig
        )
        activation_checkpoint: checkpoint.ActivationCheckpointingConfig = field(
            default_factory=checkpoint.SelectiveAC.Config
        )

    Config.__annotations__ = {
        "training": configs.TrainingConfig,
        "parallelism": configs.ParallelismConfig,
        "activation_checkpoint": checkpoint.ActivationCheckpointingConfig,
    }
    for one in Config.__dataclass_fields__.values():
        one.type = Config.__annotations__[one.name]
    plan = pipeline(name, shape)
    text = FRAMEWORKS["torchtitan"].advise(plan, STEM).text
    manager.ConfigManager()  # registers how lists are parsed
    words = shlex.split(text.replace("\\\n", " "))
    parsed = tyro.cli(Config, args=words, registry=manager.custom_registry)
    parallelism = parsed.parallelism
    assert parallelism.module_fqns_per_model_part == [
        list(names) for names in modules_of(plan.partition)
    ]
    assert parallelism.pipeline_parallel_degree == plan.ranks
    assert parsed.activation_checkpoint is None
    microbatches = (
        parsed.training.local_batch_size
        // parallelism.pipeline_parallel_microbatch_size
    )
    assert microbatches == plan.microbatches
    placed = [
        list(
            peer._get_pp_rank_to_stage_indices_mapping(
                rank,
                plan.ranks,
                parallelism.pipeline_parallel_schedule,
                plan.schedule.parts,
            )
        )
        for rank in range(plan.ranks)
    ]
    assert placed == homes(plan)


def test_torchtitan_finds_every_module_of_an_even_split() -> None:
    peer = their("torchtitan.distributed.pipeline_parallel")
    theirs = peer._generate_llm_fqn_per_model_part(4, 8, 0, 0)
    plan = replace(pipeline(*SHAPES[0]), partition=(2, 2, 2, 2))
    assert [list(names) for names in modules_of(plan.partition)] == theirs


# ---------------------------------------------------------------- megatron
@pytest.mark.parametrize("partition", [(2, 3, 3, 1), (1, 1, 1, 1), (0, 12, 10, 3)])
@pytest.mark.parametrize("ranks", [4, 2])
def test_megatron_parses_the_layout(partition: tuple[int, ...], ranks: int) -> None:
    peer = their("megatron.core.transformer.pipeline_parallel_layer_layout")
    kinds = their("megatron.core.transformer.enums").LayerType
    shape = {"ranks": ranks, "microbatches": 4}
    name = "1f1b" if ranks == 4 else "interleaved"
    schedule = make(name, **shape, **({} if ranks == 4 else {"chunks": 2}))
    plan = replace(
        pipeline("1f1b", SHAPES[0][1]), schedule=schedule, partition=partition
    )
    parsed = peer.PipelineParallelLayerLayout(layout_text(plan.partition), ranks)
    parsed.validate_layer_layout(sum(partition), 0)
    for stage in schedule.stages:
        held = parsed.layout[stage.rank][stage.part // ranks]
        assert held.count(kinds.decoder) == partition[stage.part]
        assert (kinds.embedding in held) == (stage.part == 0)
        assert (kinds.loss in held) == (stage.part == 3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 3])
def test_megatrons_order_is_the_one_that_we_simulate(
    ranks: int, chunks: int, rounds: int
) -> None:
    peer = their("megatron.core.pipeline_parallel.schedules")
    microbatches = ranks * rounds
    table = peer.get_schedule_table(microbatches, chunks, ranks)
    shape = {"ranks": ranks, "microbatches": microbatches}
    name, more = ("1f1b", {}) if chunks == 1 else ("interleaved", {"chunks": chunks})
    schedule = make(name, **shape, **more)
    for rank, lane in enumerate(schedule.lanes):
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        virtual = None if chunks == 1 else chunks
        comm = SimpleNamespace(
            pp_group=group, virtual_pipeline_model_parallel_size=virtual
        )
        _, _, warm_up, rest = peer.get_pp_rank_microbatches(
            microbatches, chunks, ranks, p2p_communicator=comm
        )
        there = [f"{chunk * ranks + rank}F{m}" for m, chunk in table]
        back = [f"{(chunks - 1 - chunk) * ranks + rank}B{m}" for m, chunk in table]
        order = there[:warm_up]
        for number in range(rest):
            order += [there[warm_up + number], back[number]]
        assert [str(action) for action in lane] == order + back[rest:]


# ---------------------------------------------------------------- torch
def test_the_names_that_torch_knows_have_the_orders_that_we_simulate() -> None:
    peer = their("torch.distributed.pipelining._schedule_visualizer")
    compared = set()
    for ours, more in (
        ("interleaved", {"chunks": 2}),
        ("interleaved-zb", {"chunks": 3}),
        ("zb-v", {}),
    ):
        for ranks in (2, 4):
            for microbatches in (1, 3, 4, 6, 8, 9, 16):
                schedule = make(ours, ranks=ranks, microbatches=microbatches, **more)
                name, has_csv = torch_name(schedule)
                if has_csv:  # torch has no such order under this name
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # some call themselves experimental
                    rows = peer.get_schedule_ops(
                        name,
                        ranks,
                        microbatches,
                        len(schedule.stages) // ranks,
                        with_comms=False,
                    )
                assert [[str(one) for one in row if one] for row in rows] == [
                    [str(action) for action in lane] for lane in schedule.lanes
                ]
                compared.add((name, microbatches))
    assert ("Interleaved1F1B", 8) in compared
    assert ("InterleavedZeroBubble", 16) in compared
    assert ("ZBVZeroBubble", 9) in compared
