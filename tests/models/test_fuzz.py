"""Cases of the fuzzer that cover every kind of model, schedule and option. `make fuzz` runs more."""

from __future__ import annotations

import pytest
import torch

import fuzz
import fuzz_modules
from fuzz import FAMILIES, FROZEN, ROPES, Verdict, draw_case, run_case, run_many
from fuzz_modules import draw_module_case, run_module_case
from penstock import REGISTRY
from penstock.models import hf_part

SEEDS = (
    *(99, 151, 161, 203, 216, 270, 435, 483, 588, 758, 930, 1460),
    *(1547, 1669, 2413, 2428, 2744, 2820, 3001, 3235, 3565, 4488, 4609),
)
MODULE_SEEDS = (8, 11, 18, 26, 29, 41, 49, 62, 79, 87, 98, 101, 106, 110, 128)
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
    assert run_case(case) == Verdict("exact")


def test_a_seed_always_gives_the_same_case():
    assert draw_case(3) == draw_case(3)
    assert draw_case(3) != draw_case(4)


def test_a_wrong_gradient_is_a_failure_and_is_printed_with_its_seed(
    monkeypatch, capsys
):
    """Restores an old bug: the rotary module of a slice sees only the slice's positions."""
    assert run_case(draw_case(SLICED_DYNAMIC)) == Verdict("exact")
    monkeypatch.setattr(
        hf_part.AnglesOfSlice,
        "__call__",
        lambda self, x, *args, **kwargs: self.module(x, *args, **kwargs),
    )
    assert run_many([SLICED_DYNAMIC])["failed"] == 1
    printed = capsys.readouterr().out
    assert f"FAILED seed={SLICED_DYNAMIC} " in printed
    assert "0 exact, 0 refused, 1 failed" in printed


def test_a_refusal_is_counted_with_its_reason(capsys):
    assert run_many([SLICED_CHECKPOINTING, PLAIN])["refused"] == 1
    assert (
        "refused 1 times: stage # cannot be sliced: its layers use"
        in capsys.readouterr().out
    )


def test_any_other_exception_is_a_failure(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(fuzz, "piped", broken)
    verdict = run_case(draw_case(PLAIN))
    assert verdict.word == "failed"
    assert "RuntimeError: out of order" in verdict.why


# ---------------------------------------------------------------- modules that pass several tensors
def test_modules_that_pass_several_tensors_compute_what_plain_calls_compute():
    """And all kinds of modules, schedules and options occur among the cases that are exact."""
    kinds = {"tuple", "dict", "ended", "named", "skip", "added loss", "frozen"}
    kinds |= {"slices", "split", "replicas", "recompute", "recorded"}
    exact, recorded, refused = set(), set(), set()
    for seed in MODULE_SEEDS:
        case = draw_module_case(seed)
        verdict = run_module_case(case)
        assert verdict.word != "failed", f"{case}\n{verdict.why}"
        if verdict.word == "exact":
            exact |= kinds & set(case.marks)
            if case.recorded:
                recorded |= kinds & set(case.marks)
        else:
            refused.add(verdict.why.partition(",")[0])
    assert exact == kinds
    assert recorded == kinds
    assert "stage 0 (LayerChain) does not fit: its forward asks for memory" in refused


def test_a_wrong_gradient_of_a_module_is_a_failure(monkeypatch):
    case = draw_module_case(MODULE_SEEDS[0])
    assert run_module_case(case) == Verdict("exact")
    right = fuzz_modules.call_plainly

    def wrong(case, batches):
        losses, gradients = right(case, batches)
        name = min(gradients)
        return losses, gradients | {name: gradients[name] + 1e-6}

    monkeypatch.setattr(fuzz_modules, "call_plainly", wrong)
    assert run_module_case(case).why.startswith("the gradient of 0.")
