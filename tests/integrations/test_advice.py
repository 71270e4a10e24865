"""Advice for other frameworks: what they are told, what they cannot run, and which plan is chosen for them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock import UnitCost, make, simulate
from penstock.cli.landscape import LandscapePage
from penstock.cost import ModelCost, Network, PartCost, Seconds
from penstock.cost.columns import columns
from penstock.cost.cost import WaitingCost
from penstock.errors import ShapeError, UnknownNameError
from penstock.formats import load_torch_csv, read_plan
from penstock.integrations.advice import (
    FRAMEWORKS,
    LOOP,
    WAVES,
    PipelineTerms,
    V,
    framework_of,
    order_of,
    pipeline_terms,
    placement_kind,
)
from penstock.plan.planner import chosen_plan
from penstock.plan.pricing import Question, unit_question
from penstock.plan.search import Landscape, row_title, search
from penstock.plan.space import Limits
from penstock.plan.workload import Division, Fixed, Workload

STEM = Path("plan")


def pipeline(name: str, partition: tuple[int, ...] = (), **shape: int) -> PipelineTerms:
    return PipelineTerms(make(name, **shape), partition, 2, 1, 3, 1, 1, (), 64)


FLAT = partial(pipeline, "1f1b", (3, 4, 2), ranks=3, microbatches=4)


# ---------------------------------------------------------------- orders
@pytest.mark.parametrize(
    ("name", "shape", "order", "placement"),
    [
        ("1f1b", {}, "1f1b", LOOP),
        ("gpipe", {}, "gpipe", LOOP),
        ("interleaved", {"chunks": 3}, "interleaved", LOOP),
        ("zb-v", {}, "zb-v", V),
        ("hanayo", {"waves": 1}, "", V),
        ("hanayo", {"waves": 2}, "", WAVES),
        ("zb-h1", {}, "", LOOP),
        ("chimera", {}, "", ""),
    ],
)
def test_a_schedule_has_the_name_of_its_lanes(name, shape, order, placement):
    schedule = make(name, ranks=4, microbatches=8, **shape)
    assert order_of(schedule) == order
    if len(schedule.stages) == schedule.parts:
        assert placement_kind(schedule.stages) == placement


# ---------------------------------------------------------------- what they are told
def test_torchtitan_gets_modules_and_a_name():
    text = FRAMEWORKS["torchtitan"].advise(FLAT(), STEM).text
    assert "--parallelism.pipeline_parallel_schedule 1F1B \\\n" in text
    assert "--parallelism.pipeline_parallel_schedule_csv" not in text
    assert "--training.local_batch_size 8 \\\n--training.global_batch_size 24" in text
    assert (
        "module_fqns_per_model_part tok_embeddings,layers.0,layers.1,layers.2 "
        "layers.3,layers.4,layers.5,layers.6 layers.7,layers.8,norm,lm_head \\\n"
        in text
    )
    assert text.endswith("activation-checkpoint:none\n")


def test_an_order_without_a_name_comes_as_a_csv():
    plan = pipeline("hanayo", ranks=2, microbatches=4, waves=1)
    advice = FRAMEWORKS["torchtitan"].advise(plan, STEM)
    assert "ZBVZeroBubble" in advice.text
    assert "plan.csv" in advice.text
    assert load_torch_csv(advice.files["plan.csv"]) == plan.schedule
    assert "only says which rank holds which stage" in advice.notes[0]


@pytest.mark.parametrize(
    ("order", "microbatches", "chunks"),
    [("1f1b", 3, {}), ("interleaved", 6, {"chunks": 2}), ("interleaved-zb", 9, {})],
)
def test_micro_batches_for_which_torchs_own_schedule_has_no_such_order_come_as_a_csv(
    order, microbatches, chunks
):
    plan = pipeline(order, ranks=4, microbatches=microbatches, **chunks)
    framework = FRAMEWORKS["torchtitan"]
    advice = framework.advise(plan, STEM)
    assert "pipeline_parallel_schedule PipelineScheduleMulti" in advice.text
    assert load_torch_csv(advice.files["plan.csv"]) == plan.schedule
    assert not framework.waits(
        plan.schedule
    )  # Only torch's own 1F1B waits for its messages.


def test_a_single_rank_accumulates_micro_batches():
    plan = pipeline("1f1b", (9,), ranks=1, microbatches=4)
    text = FRAMEWORKS["torchtitan"].advise(plan, STEM).text
    assert "--training.local_batch_size 2 \\\n--training.global_batch_size 24" in text
    assert "pipeline_parallel_schedule" not in text


def test_megatron_gets_a_layout():
    text = FRAMEWORKS["megatron"].advise(FLAT(), STEM).text
    assert "--pipeline-model-parallel-layout 'Et*3|t*4|t*2L'" in text
    assert "--num-layers 9 \\\n" in text
    again = replace(FLAT(), recompute=(0, 1, 2), shard=2)
    text = FRAMEWORKS["megatron"].advise(again, STEM).text
    assert "--recompute-granularity full" in text
    assert "--use-distributed-optimizer" in text


def test_passes_become_micro_batches_where_gradients_accumulate_in_the_pipeline():
    two = Workload(6, 64, batch=48, devices=2, passes=2, fixed=Fixed(microbatches=4))
    adapted = FRAMEWORKS["megatron"].adapt(two)
    assert (adapted.fixed.microbatches, adapted.passes) == (8, 1)
    assert FRAMEWORKS["torchtitan"].adapt(two) is two


# ---------------------------------------------------------------- what they cannot run
@pytest.mark.parametrize(
    ("names", "schedule", "words"),
    [
        (
            "torchtitan",
            make("hanayo", ranks=2, microbatches=4, waves=2),
            "its stages lie in several waves",
        ),
        (
            "torchtitan megatron",
            make("seq1f1b", ranks=2, microbatches=2, slices=2),
            "token slices",
        ),
        (
            "torchtitan megatron",
            make("chimera", ranks=2, microbatches=2),
            "more than once",
        ),
        (
            "megatron",
            make("zb-h1", ranks=2, microbatches=4),
            "runs 1F1B",
        ),
        (
            "megatron",
            make("interleaved", ranks=2, microbatches=5, chunks=2),
            "the 2 ranks divide the micro-batches, of which there are 5",
        ),
        (
            "torchtitan megatron",
            make("interleaved", ranks=1, microbatches=2, chunks=2),
            "a single rank",
        ),
    ],
)
def test_an_order_that_a_framework_cannot_run_is_refused_with_the_reason(
    names, schedule, words
):
    for name in names.split():
        assert words in FRAMEWORKS[name].refuse_order(schedule), name


HALF = Division(1, 3, 1, 1, 4, 1, 0.5)


@pytest.mark.parametrize(
    ("names", "division", "tied", "words"),
    [
        (
            "torchtitan megatron",
            HALF,
            False,
            "it recomputes 50% of its parts",
        ),
        ("torchtitan", HALF, True, "model.tie_embeddings=false"),
    ],
)
def test_a_division_that_a_framework_cannot_run_is_refused_with_the_reason(
    names, division, tied, words
):
    for name in names.split():
        assert words in FRAMEWORKS[name].refuse_division(division, tied), name


def test_every_framework_runs_1f1b():
    for framework in FRAMEWORKS.values():
        assert framework.refuse_order(FLAT().schedule) == ""
        assert (
            framework.refuse_division(replace(HALF, recomputed=1.0), tied=False) == ""
        )


def test_an_unknown_framework_has_a_suggestion():
    with pytest.raises(UnknownNameError, match="did you mean 'torchtitan'"):
        framework_of("torchtitian")


# ---------------------------------------------------------------- what is expected
def test_ranks_that_wait_for_messages_take_the_time_of_the_formula():
    """With one micro-batch, waiting changes nothing; each further one waits once more in each direction."""
    for microbatches, waits in ((1, 0), (4, 6)):
        schedule = make("gpipe", ranks=2, microbatches=microbatches)
        free = simulate(schedule, UnitCost(comm=0.25)).makespan
        waiting = simulate(schedule, WaitingCost(UnitCost(comm=0.25))).makespan
        assert waiting - free == pytest.approx(0.25 * waits)


def test_the_wait_is_as_long_as_the_message():
    part = PartCost(Seconds(1.0), Seconds(1.0), Seconds(1.0), message=100.0)
    cost = WaitingCost(ModelCost((part, part), Network(0.5, 50.0)))
    schedule = make("1f1b", ranks=2, microbatches=2)
    pause = columns(schedule, cost).pause[: len(schedule.lanes[0])]
    assert pause[0] == pytest.approx(0.5 + 100 / 50)
    assert pause[-1] == 0  # the last backward sends nothing


def asked(name: str) -> tuple[Landscape, Question]:
    """Search among what a framework can run, for two ranks and four micro-batches."""
    limits = FRAMEWORKS[name].narrow(Limits(4, 4))
    question = unit_question(2, 4, UnitCost(comm=0.05), None, limits)
    return search(question), question


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_search_for_a_framework_tries_only_what_runs_there(name):
    landscape, _ = asked(name)
    framework = FRAMEWORKS[name]
    for row in landscape.candidates:
        schedule = row.schedule
        assert framework.refuse_order(schedule) == ""
        cost = UnitCost(comm=0.05)
        timed = WaitingCost(cost) if framework.waits(schedule) else cost
        assert row.makespan == simulate(schedule, timed).makespan
    assert landscape.bound <= landscape.best.step * (1 + 1e-9)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_page_file_and_options_of_a_framework_show_one_plan(name):
    landscape, question = asked(name)
    pipeline = pipeline_terms(landscape.best, question.workload)
    plan = chosen_plan(landscape, question.facts)
    assert pipeline.schedule == plan.schedule
    text = " ".join(LandscapePage(landscape, question).sentences())
    assert f"The fastest plan is {row_title(landscape.best, landscape)}. " in text
    assert f"The plan is for {name}" in text


def test_a_framework_that_can_run_nothing_says_why():
    limits = FRAMEWORKS["torchtitan"].narrow(Limits(4, 1))
    question = unit_question(2, 4, UnitCost(), None, limits)
    tied = replace(question.workload, tied=True)
    with pytest.raises(ShapeError, match=r"torchtitan can run none of .* ties its"):
        search(replace(question, workload=tied))


# ---------------------------------------------------------------- the command line
ASKED = "plan --pp 2 --microbatches 4 --cost comm=0.05 --limit stages=2"


def test_plan_for_a_framework_prints_and_writes_what_it_takes(run):
    code, out, err = run(f"{ASKED} --for torchtitan -o best.json")
    assert code == 0, err
    assert "for torchtitan: " in out
    assert "expected: a step of " in out
    text = Path("best.torchtitan.sh").read_text()
    assert text.strip() in out
    plan = read_plan("best.json")
    if "schedule_csv" in text:
        assert "best.csv" in text
        assert load_torch_csv(Path("best.csv").read_text()) == plan.schedule


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_page_file_and_terminal_show_one_plan_for_a_framework(run, name):
    code, out, err = run(f"{ASKED} --for {name} -o best.json --page best.html")
    assert code == 0, err
    chosen = out.split(f"for {name}: ")[1].split(", as ")[0]
    assert f"The fastest plan is {chosen}. " in Path("best.html").read_text()
    plan = read_plan("best.json")
    assert FRAMEWORKS[name].refuse_order(plan.schedule) == ""
    assert chosen == plan.name


def test_whether_weights_are_tied_is_read_from_the_folder_of_the_model(run):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    ).save_pretrained("model")
    Path("config.toml").write_text(
        '[model]\npath = "model/config.json"\ntie_embeddings = true\n'
        "[data]\nseq_len = 64\nglobal_batch = 4\n[parallel]\npp = 2\n[schedule]\nmicrobatches = 4\n"
    )
    line = "plan config.toml --gpu h100 --for torchtitan --limit stages=1"
    code, out, err = run(line)
    assert code == 0, err
    assert "pipeline_parallel_degree 2" in out
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(
        json.dumps({**config, "tie_word_embeddings": True})
    )
    code, _, err = run(line)
    assert code == 2
    assert "torchtitan can run none of these plans: the model ties" in err


def test_plan_for_a_framework_prints_json(run):
    line = ASKED.replace("stages=2", "stages=1")
    code, out, _ = run(f"{line} --for megatron --json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["for"], facts["schedule"]) == ("megatron", "as 1F1B")
    assert facts["expected"]["waits"]
    assert "--global-batch-size 4" in facts["text"]


def test_plan_refuses_an_unknown_framework(run):
    code, _, err = run(f"{ASKED} --for megatorn")
    assert code == 2
    assert "did you mean 'megatron'?" in err


def test_partial_paths_are_for_our_own_runtime(run):
    code, _, err = run(f"{ASKED} --skip 0.25 --for torchtitan")
    assert code == 2
    assert "--skip plans partial paths, which torchtitan cannot run" in err
