"""Tests of compiled stages: the same gradients, no recompilation, and a W that has work to do.

Most of them compile with torch's `aot_eager`, which traces forward and backward like the real compiler, but runs the
traces without making kernels of them.
"""

from __future__ import annotations

import copy
import logging
import shutil

import pytest
import torch
from torch import Tensor, nn

from hugging_face import decoder_sizes, gpt2_sizes
from penstock import Schedule, lower, make
from penstock.errors import ProofError, ShapeError
from penstock.models import split, token_loss
from penstock.models.llama import LlamaLayer
from penstock.runtime import (
    Batch,
    CompiledLoss,
    Executor,
    batch_of,
    compile_stage,
    make_deferrable,
    prove,
    run_threads,
)
from penstock.runtime.backward import Ledger, record_in
from penstock.runtime.compiled import Way, compiled_method
from penstock.runtime.module_state import uncompiled
from penstock.schedules.transforms import slice_tokens
from penstock.torch_internals import compiled_call
from pipelines import VOCAB, gpt, llama, piped, unsplit, without_float32, worst

# Torch's tracer causes warnings of torch itself, which it hides from users.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:.*Function'> should not be instantiated:DeprecationWarning"
    ),
]
TRACER = "aot_eager"
TOKENS = 12
CUTS = (0, 5, 8, 12)  # of uneven lengths
# In float64, other orders of additions change a gradient near 1 by about 1e-16 each.
TOLERANCE = 1e-11


def forget_compiled_code() -> None:
    """Start without compiled code: torch counts the versions of a function, and stops at a limit."""
    torch.compiler.reset()
    compiled_method.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def _compiled_code_of_this_file():
    """The tests share what they compile, which saves most of their time."""
    forget_compiled_code()
    yield
    forget_compiled_code()


def batch(microbatches: int, tokens: int = TOKENS, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    shape = (2, tokens)
    inputs = [
        torch.randint(0, VOCAB, shape, generator=draw) for _ in range(microbatches)
    ]
    labels = [
        torch.randint(0, VOCAB, shape, generator=draw) for _ in range(microbatches)
    ]
    return batch_of(inputs, labels)


def compiled(part: nn.Module) -> nn.Module:
    return compile_stage(part, TRACER)


def graphs() -> int:
    """The number of graphs that torch has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


SCHEDULES = {
    "1f1b": make("1f1b", ranks=2, microbatches=3),
    "hanayo": make("hanayo", ranks=2, microbatches=2, waves=1),
    "zb-h1": make("zb-h1", ranks=2, microbatches=3),
    "zb-v": make("zb-v", ranks=2, microbatches=4),
    "interleaved-zb": make("interleaved-zb", ranks=2, microbatches=2, chunks=2),
    "sliced zb-h1": slice_tokens(make("zb-h1", ranks=2, microbatches=2), CUTS),
}


def alone(stage: nn.Module, schedule, data: Batch, **options: object) -> Executor:
    """An executor of one rank that has run one step."""

    def work(comm):
        executor = Executor(lower(schedule), {0: stage}, comm, token_loss, **options)
        executor.step(data)
        return executor

    return run_threads(1, work, patience=300)[0]


# ---------------------------------------------------------------- no recompilation
# These come first, before any code is compiled; the others share what these have compiled.
def test_nothing_is_compiled_again_from_step_to_step_or_slice_to_slice():
    """The slices have three lengths, and each layer of both parts runs the same code."""
    schedule = slice_tokens(make("zb-v", ranks=1, microbatches=2), CUTS)
    parts = [compiled(part) for part in split(llama(4), [2, 2])]
    counts = []

    def work(comm):
        plain, recomputing = (
            Executor(
                lower(schedule),
                dict(enumerate(parts)),
                comm,
                CompiledLoss(token_loss, TRACER),
                recompute=recompute,
            )
            for recompute in (frozenset(), frozenset({0, 1}))
        )
        begin = graphs()
        for seed in range(3):
            plain.step(batch(2, seed=seed))
            counts.append(graphs() - begin)
        for seed in range(2):
            recomputing.step(batch(2, seed=seed))
            counts.append(graphs() - begin)
        for seed in range(2):
            plain.evaluate(batch(2, seed=seed))
            counts.append(graphs() - begin)

    run_threads(1, work)
    # angles, before and after the attention, head and loss; once more where no gradient is
    # needed, as in the first forward of a recomputed stage and in an evaluation
    assert counts == [5, 5, 5, 10, 10, 10, 10]
    # Torch limits the versions of one function, so each way to run has its own.
    for way in (Way.GHOSTS, Way.EVALUATION):
        assert compiled_method(LlamaLayer.after_mixing, TRACER, way).graphs == 1


def test_all_layers_of_all_parts_share_the_compiled_code():
    data = batch(2)
    counts = []
    for layers in (2, 6):
        begin = graphs()
        stage = compiled(split(llama(layers).float(), [layers])[0])
        alone(stage, make("1f1b", ranks=1, microbatches=2), data)
        counts.append(graphs() - begin)
    assert counts == [3, 0]  # angles, layer and head


# ---------------------------------------------------------------- gradients
def assert_exact_and_split(schedule: Schedule, model: nn.Module, data: Batch) -> None:
    """Compiled stages compute what the unsplit model does, and leave weight gradients to W."""
    losses, expected = unsplit(schedule, model, [data])
    ours = piped(schedule, model, [data], prepare=compiled)
    assert ours.losses[0] == pytest.approx(losses, abs=TOLERANCE)
    assert worst(ours, expected) < TOLERANCE
    assert not any(e.stages_without_weight_work for e in ours.executors)


@pytest.mark.parametrize("name", SCHEDULES)
def test_compiled_stages_have_the_gradients_of_the_unsplit_model(name, caplog):
    """Also those of a tied weight; and no schedule splits a backward in vain."""
    schedule = SCHEDULES[name]
    model = gpt(schedule.parts) if name == "zb-h1" else llama(schedule.parts, tied=True)
    data = batch(len(schedule.microbatches))
    assert_exact_and_split(schedule, model, data)
    assert "weight gradients in I" not in caplog.text


@pytest.mark.parametrize("make_model", [llama, gpt])
def test_compiled_slices_recompute_and_split(make_model):
    schedule = SCHEDULES["sliced zb-h1"]
    data = batch(len(schedule.microbatches))
    model = make_model(schedule.parts)
    losses, expected = unsplit(schedule, model, [data])
    each = {0: frozenset({0}), 1: frozenset({1})}
    ours = piped(
        schedule,
        model,
        [data],
        prepare=compiled,
        each=lambda rank: {"recompute": each[rank]},
    )
    assert ours.losses[0] == pytest.approx(losses, abs=TOLERANCE)
    assert worst(ours, expected) < TOLERANCE


def test_autocast_composes_with_compiled_and_split_backwards():
    """All ways round to bfloat16, at different places, so their errors are alike.

    A whole backward runs the same compiled code as a split one.
    """
    data = batch(2)
    model = llama(2).float()
    found = {}
    counts = []
    for way in ("exact", "plain", "compiled", "compiled, whole"):
        schedule = make("1f1b" if "whole" in way else "zb-h1", ranks=1, microbatches=2)
        stage = split(copy.deepcopy(model), [2])[0]
        if "compiled" in way:
            compile_stage(stage, TRACER)
        autocast = None if way == "exact" else torch.bfloat16
        executor = alone(stage, schedule, data, autocast=autocast)
        assert not executor.stages_without_weight_work
        found[way] = {name: p.grad for name, p in stage.named_parameters()}
        counts.append(graphs())
    for name, exact in found["exact"].items():
        usual = float((found["plain"][name] - exact).norm())
        for way in ("compiled", "compiled, whole"):
            off = float((found[way][name] - exact).norm())
            assert off <= 2 * usual + 1e-6 * float(exact.norm()), (name, way)
    assert counts[3] == counts[2]


def test_a_layer_that_is_compiled_again_and_again_is_reported(caplog):
    layer = compile_stage(nn.Sequential(nn.Linear(4, 4)), TRACER)
    limits = {"recompile_limit": 4, "automatic_dynamic_shapes": False}
    with (
        torch._dynamo.config.patch(limits),
        caplog.at_level(logging.WARNING, "penstock.runtime.compiled"),
    ):
        for tokens in (2, 3):
            layer(torch.ones(1, tokens, 4))
        assert not caplog.text
        layer(torch.ones(1, 4, 4))
    assert "Sequential.forward was compiled 3 times, and after 4 torch runs" in (
        caplog.text
    )


# ---------------------------------------------------------------- modules of all kinds
class Odd(nn.Module):
    """Calls one linear layer twice, one on other rows, one without gradient, and one with a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(16, 16)
        self.flat = nn.Linear(16, 16, bias=False)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.watched = nn.Linear(16, 16)
        self.plain = nn.Linear(16, VOCAB)
        self.embed = nn.Embedding(VOCAB, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.twice(torch.tanh(self.twice(x)))
        x = x + self.flat(x.flatten(0, 1)).view_as(x)
        x = torch.tanh(self.watched(self.frozen(x)))
        return self.plain(x)


def test_only_what_can_wait_waits_and_all_gradients_are_right():
    torch.manual_seed(0)
    model = Odd().double()
    data = batch(2)
    found = []
    for compiler in (None, TRACER):
        stage = copy.deepcopy(model)
        stage.watched.weight.register_hook(lambda gradient: 2 * gradient)
        if compiler:
            compile_stage(stage, compiler)
        schedule = make("zb-h1", ranks=1, microbatches=2)
        alone(stage, schedule, data)
        found.append({n: p.grad for n, p in stage.named_parameters()})
    for name, gradient in found[0].items():
        if gradient is None:
            assert found[1][name] is None
        else:
            torch.testing.assert_close(found[1][name], gradient, msg=name)


def test_w_computes_the_weight_gradients_of_compiled_layers():
    """After the walk back, x has its gradient and the weights have none; then the ledger is settled."""
    layer = compile_stage(llama(1).layers[0], TRACER)
    make_deferrable(layer)
    x = torch.randn(2, TOKENS, 16, dtype=torch.float64, requires_grad=True)
    angle = torch.zeros(TOKENS, 4, dtype=torch.float64)
    ledger = Ledger()
    ledger.open = True
    record_in(ledger)
    try:
        y = layer(x, angle.cos(), angle.sin())
    finally:
        record_in(None)
    y.sum().backward()
    matrices = [p for p in layer.parameters() if p.dim() > 1]
    assert x.grad is not None
    assert len(ledger.due) == len(matrices) == 7
    assert all(p.grad is None for p in matrices)
    ledger.settle()
    with uncompiled(layer) as plain:
        again = copy.deepcopy(plain)
    again.zero_grad()
    again(x.detach(), angle.cos(), angle.sin()).sum().backward()
    for (name, one), other in zip(
        layer.named_parameters(), again.parameters(), strict=True
    ):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_a_module_compiled_by_the_user_is_said_to_split_in_vain(caplog):
    stage = split(llama(1).float(), [1])[0]
    stage.compile(backend=TRACER)
    executor = alone(stage, make("zb-h1", ranks=1, microbatches=2), batch(2))
    assert executor.stages_without_weight_work == {0}
    assert "modules that you compiled yourself" in caplog.text


def test_a_layer_with_hooks_stays_uncompiled(caplog):
    part = split(llama(2).float(), [2])[0]
    seen = []
    last = part.get_submodule("layers.1")
    last.register_forward_hook(lambda *_: seen.append(1))
    compile_stage(part, TRACER)
    assert "LlamaLayer is not compiled: compiled code would not call" in caplog.text
    alone(part, make("1f1b", ranks=1, microbatches=2), batch(2))
    assert len(seen) == 2


def test_an_unknown_compiler_is_refused():
    with pytest.raises(
        ShapeError, match=r"no backend 'inductr'; there are: .*inductor"
    ):
        compile_stage(nn.Linear(2, 2), "inductr")


# ---------------------------------------------------------------- the proof
def proof_of(stage: nn.Module, schedule) -> object:
    def work(comm):
        executor = Executor(lower(schedule), {0: stage}, comm, token_loss)
        return prove(executor, batch(2))

    return run_threads(1, work, patience=300)[0]


@pytest.mark.parametrize("cuts", [None, CUTS])
def test_the_proof_covers_compiled_and_split_stages(cuts):
    schedule = make("zb-h1", ranks=1, microbatches=2)
    if cuts:
        schedule = slice_tokens(schedule, cuts)
    proof = proof_of(compiled(split(llama(2), [2])[0]), schedule)
    assert proof.stages == 1
    assert not proof.warnings


def test_the_proof_refuses_a_wrong_w_of_compiled_layers(monkeypatch):
    """Neither the output nor the gradient of the input shows it."""
    schedule = make("zb-h1", ranks=1, microbatches=2)
    stage = compiled(split(llama(2), [2])[0])
    assert proof_of(stage, schedule).stages == 1
    monkeypatch.setattr(
        "penstock.runtime.backward.accumulate_linear",
        lambda weight, *_: setattr(weight, "grad", torch.ones_like(weight)),
    )
    with pytest.raises(ProofError, match="computes something else"):
        proof_of(stage, schedule)


# ---------------------------------------------------------------- the real compiler
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler on this machine")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_kernels_of_the_real_compiler_split_their_backward():
    torch.manual_seed(0)
    config = [nn.Linear(16, 24, bias=False), nn.SiLU(), nn.Linear(24, 16)]
    layer = nn.Sequential(*config).double()
    plain = copy.deepcopy(layer)
    compile_stage(layer, "inductor")
    make_deferrable(layer)
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    ledger = Ledger()
    ledger.open = True
    record_in(ledger)
    try:
        y = layer(x)
    finally:
        record_in(None)
    y.square().sum().backward()
    assert len(ledger.due) == 2
    assert all(p.grad is None for p in layer.parameters())
    ledger.settle()
    expected = plain(x.detach())
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected)
    for one, other in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


# ---------------------------------------------------------------- Hugging Face's models
@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_layers_of_transformers_compile_and_split(family, caplog):
    """GPT-2's linear layers have transposed weights and biases."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    if family == "GPT2":
        config = transformers.GPT2Config(**gpt2_sizes(VOCAB, layers=2))
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = decoder_sizes(VOCAB, layers=2, kv_heads=4)
        config = transformers.LlamaConfig(**sizes)
        model = transformers.LlamaForCausalLM(config)
    schedule = make("zb-h1", ranks=2, microbatches=2)
    model = without_float32(model.double())
    data = batch(2)
    assert_exact_and_split(schedule, model, data)
    assert "weight gradients in I" not in caplog.text


def test_slices_of_transformers_run_uncompiled():
    """Their layers change Python objects while they run a slice, for which torch would compile again and again."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    config = transformers.Qwen3Config(**decoder_sizes(VOCAB, layers=2, head_dim=4))
    model = without_float32(transformers.Qwen3ForCausalLM(config).double())
    schedule = make("seq1f1b", ranks=2, microbatches=2, slices=2)
    data = batch(2)
    losses, expected = unsplit(schedule, model, [data])
    ours = piped(schedule, model, [data], prepare=forbidden_to_compile)
    assert ours.losses[0] == pytest.approx(losses, abs=TOLERANCE)
    assert worst(ours, expected) < TOLERANCE


def forbidden_to_compile(part: nn.Module) -> nn.Module:
    """Compiles a part, but forbids its layers to call what was compiled. (Its head sees whole tensors only.)"""
    part = compiled(part)
    for path in part.layout.layers[part.begin : part.end]:
        compiled_call(part.get_submodule(path)).run = None
    return part
