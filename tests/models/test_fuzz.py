"""Cases of the fuzzer that cover every kind of model, schedule and option. `make fuzz` runs more."""

from __future__ import annotations

import contextlib
import types
from dataclasses import replace

import pytest
import torch

import fuzz
from fuzz import FAMILIES, FROZEN, ROPES, Verdict, draw_case, run_case, run_many
from fuzz_modules import (
    ModuleCase,
    draw_module_case,
    one_after_another,
    run_module_case,
)
from penstock import REGISTRY
from penstock.runtime import actions, backward

SEEDS = (
    *(99, 151, 161, 203, 216, 270, 435, 483, 588, 758, 930, 1460),
    *(1547, 1669, 2413, 2428, 2744, 2820, 3001, 3235, 3565, 4488, 4609),
    910_005,  # a rank without a stage, and tied weights
)
MODULE_SEEDS = range(50_000, 50_030)
SLICED_DYNAMIC, SLICED_CHECKPOINTING, PLAIN = 222, 123, 0
# Slices of a Gemma 3, whose kinds of layers have their own angles.
LONGROPE_BY_KIND = 2428


@pytest.fixture(autouse=True)
def one_thread():
    """Use one torch thread: ranks are threads already, and the tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pipeline_computes_what_hugging_faces_model_computes_or_is_refused(seed):
    case = draw_case(seed)
    verdict = run_case(case)
    assert verdict.word != "failed", f"{case}\n{verdict.why}"


def test_the_seeds_cover_every_kind_of_model_schedule_and_option():
    cases = [draw_case(seed) for seed in SEEDS]
    seen = {(word, value) for case in cases for word, value in case.marks.items()}
    assert {name for word, name in seen if word == "schedule"} == {*REGISTRY, "random"}
    assert {(case.family, case.kernel) for case in cases} == {
        (family, kernel)
        for family in FAMILIES
        for kernel in ("eager", "sdpa")
        if (family, kernel) != ("gemma2", "sdpa")  # transformers refuses it
    }
    ropes = {
        (case.marks["rope"], case.schedule.slices > 1)
        for case in cases
        if case.marks["rope"]
    }
    assert ropes == {(kind, sliced) for kind in ROPES for sliced in (True, False)}
    assert {case.frozen for case in cases} == {"", *FROZEN}
    for option in (
        "window",
        "tied",
        "packed",
        "split",
        "replicas",
        "recompute",
        "dropout",
        "checkpointing",
    ):
        for sliced in (True, False):
            assert any(
                case.marks[option] and (case.schedule.slices > 1) is sliced
                for case in cases
            ), option
    assert any(case.dropout and case.recompute for case in cases)
    assert any(len(set(case.lengths)) > 1 for case in cases)


def test_slices_choose_the_angles_of_each_kind_of_layer_by_the_whole_sequence():
    case = draw_case(LONGROPE_BY_KIND)
    assert (case.family, case.marks["rope"]) == ("gemma3", "longrope")
    assert case.schedule.slices > 1
    assert max(case.lengths) > fuzz.LIMIT
    verdict = run_case(case)
    if verdict.word == "unfit":
        pytest.skip(f"this version of transformers cannot run it: {verdict.why}")
    assert verdict == Verdict("exact")


def test_a_seed_always_gives_the_same_case():
    assert draw_case(3) == draw_case(3)
    assert draw_case(3) != draw_case(4)


def damage_weight_gradients(monkeypatch) -> None:
    """Let W compute weight gradients that are a little too large."""
    right = backward.accumulate_linear

    def wrong(weight, bias, turned, x, grad) -> None:
        right(weight, bias, turned, x, grad * (1 + 1e-5))

    monkeypatch.setattr(backward, "accumulate_linear", wrong)


def test_a_wrong_gradient_is_a_failure_and_is_printed_with_its_seed(
    monkeypatch, capsys
):
    assert run_case(draw_case(SLICED_DYNAMIC)) == Verdict("exact")
    damage_weight_gradients(monkeypatch)
    assert run_many([SLICED_DYNAMIC]).words["failed"] == 1
    printed = capsys.readouterr().out
    assert f"FAILED seed={SLICED_DYNAMIC} " in printed
    assert "0 exact, 0 refused, 0 unfit, 1 failed" in printed


def test_a_refusal_is_counted_with_its_reason(capsys):
    assert run_many([SLICED_CHECKPOINTING, PLAIN]).words["refused"] == 1
    assert (
        "1 times refused: stage # cannot be sliced: its layers use"
        in capsys.readouterr().out
    )


def test_any_other_exception_is_a_failure(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(fuzz, "piped", broken)
    verdict = run_case(draw_case(PLAIN))
    assert verdict.word == "failed"
    assert "RuntimeError: out of order" in verdict.why


# ---------------------------------------------------------------- modules of many kinds
@pytest.mark.parametrize("seed", MODULE_SEEDS)
def test_modules_of_many_kinds_compute_what_they_compute_in_one_piece(seed):
    case = draw_module_case(seed)
    verdict = run_module_case(case)
    assert verdict.word != "failed", f"{case}\n{verdict.why}"


def plain_case(kind: str, recomputes: bool = False) -> ModuleCase:
    """A case with this kind alone, of whole sequences without copies and without a proof.

    `Pipeline.step` would prove it, so its micro-batches have different sizes.
    """
    for seed in range(1000):
        case = draw_module_case(seed, kind)
        copied = len(case.schedule.stages) > case.schedule.parts
        if copied or case.schedule.slices > 1 or case.family or case.recorded:
            continue
        if len(case.rows) > 1 and "split" in case.marks:
            stages = range(len(case.schedule.stages) if recomputes else 0)
            return replace(
                case,
                kinds=(kind,),
                loss="sum",
                proven=False,
                rows=tuple(1 + number % 2 for number in range(len(case.rows))),
                recompute=frozenset(stages),
            )
    raise AssertionError


def test_a_damaged_gradient_is_found_and_printed_with_its_command(monkeypatch, capsys):
    case = plain_case("padding")
    assert run_module_case(case) == Verdict("exact")
    damage_weight_gradients(monkeypatch)
    assert "the gradient of" in run_module_case(case).why
    fuzz.run_many([case.seed], lambda seed: case, run_module_case)
    assert case.command in capsys.readouterr().out


def test_a_buffer_that_is_updated_twice_is_found(monkeypatch):
    case = plain_case("counter", recomputes=True)
    assert run_module_case(case) == Verdict("exact")
    monkeypatch.setattr(
        actions, "buffers_as_before", lambda *_: contextlib.nullcontext()
    )
    assert "the state of" in run_module_case(case).why


def test_a_norm_of_two_layers_of_a_model_sees_one_micro_batch_after_another():
    """As in one piece, where its moving averages would otherwise be others."""
    cases = [draw_module_case(seed, "shared batch norm") for seed in range(60)]
    models = [case for case in cases if case.family]
    assert any(len(case.schedule.microbatches) > 1 for case in models)
    assert all(one_after_another(case.schedule) for case in models)
    assert not all(one_after_another(case.schedule) for case in cases)


def test_a_kind_that_is_always_refused_is_reported():
    tally = fuzz.Tally(frozenset({"may not run"}))
    refused = types.SimpleNamespace(counted=("never runs", "may not run", "runs"))
    for _ in range(fuzz.ENOUGH):
        tally.add(refused, Verdict("refused", "no"))
    tally.add(types.SimpleNamespace(counted=("runs",)), Verdict("exact"))
    assert tally.always_refused == ["never runs"]
