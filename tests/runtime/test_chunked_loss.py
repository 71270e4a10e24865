"""Tests of the loss that never has all logits in memory: the plain loss and its gradients, with less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock import lower, make
from penstock.models import GPT, GPTConfig, Llama, LlamaConfig, split, token_loss
from penstock.runtime import (
    Batch,
    ChunkedLoss,
    Executor,
    batch_of,
    compile_stage,
    prove,
    run_threads,
)
from penstock.schedules.transforms import slice_tokens

WIDTH = 16
# With this vocabulary the gradients of the logits of few tokens are smaller than that of the weight, and those of many
# tokens are larger.
VOCAB = 61
FEW, MANY = 8, 40
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:.*Function'> should not be instantiated:DeprecationWarning"
    ),
]


def model_of(family: str, tied: bool = False) -> nn.Module:
    torch.manual_seed(3)
    if family == "gpt":
        return GPT(GPTConfig(VOCAB, WIDTH, 1, 4, 24, 64, tied=tied))
    return Llama(LlamaConfig(VOCAB, WIDTH, 1, 4, 2, 24, tied=tied))


def batch_with(tokens: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randint(0, VOCAB, (2, tokens), generator=draw) for _ in range(2)]
    labels = [torch.randint(0, VOCAB, x.shape, generator=draw) for x in inputs]
    labels[0][0, 3:6] = -100
    return batch_of(inputs, labels)


def trained(model, schedule, data, loss, compiler="", **options):
    """The loss and the gradients of one step of one rank, and its evaluation."""
    stage = split(copy.deepcopy(model), [1])[0]
    if compiler:
        compile_stage(stage, compiler)

    def work(comm):
        executor = Executor(lower(schedule), {0: stage}, comm, loss, **options)
        found = executor.step(data).loss
        return found, executor.evaluate(data), executor

    found, evaluated, executor = run_threads(1, work, patience=300)[0]
    gradients = {name: p.grad for name, p in stage.named_parameters()}
    return found, evaluated, gradients, executor


@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "sliced"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_chunks_have_the_loss_and_the_gradients_of_the_whole(family, name, tokens):
    """Chunks of 7 tokens divide no micro-batch evenly, and some labels do not count."""
    schedule = make("zb-h1" if name == "sliced" else name, ranks=1, microbatches=2)
    if name == "sliced":
        schedule = slice_tokens(schedule, (0, 3, 5, 8))
    model = model_of(family, tied=True).double()
    data = batch_with(tokens)
    chunked = ChunkedLoss(token_loss, chunk=7, min_bytes=0)
    loss, evaluated, gradients, executor = trained(model, schedule, data, chunked)
    other, expected, theirs, _ = trained(model, schedule, data, token_loss)
    assert loss == pytest.approx(other, rel=1e-13)
    assert evaluated == pytest.approx(expected, rel=1e-13)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[key], msg=key)
    assert not executor.stages_without_weight_work


@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("options", [{"recompute": frozenset({0})}, {}])
def test_chunks_compose_with_autocast_and_recomputation(tokens, options):
    """In bfloat16 both losses round in the same places, except where chunks of a product are added."""
    schedule = make("1f1b", ranks=1, microbatches=2)
    model = model_of("llama")
    data = batch_with(tokens)
    options = {**options, "autocast": torch.bfloat16}
    chunked = ChunkedLoss(token_loss, chunk=7, min_bytes=0)
    loss, evaluated, gradients, _ = trained(model, schedule, data, chunked, **options)
    other, expected, theirs, _ = trained(model, schedule, data, token_loss, **options)
    rounding = torch.finfo(torch.bfloat16).eps
    assert loss == pytest.approx(other, rel=1e-5)
    assert evaluated == pytest.approx(expected, rel=1e-5)
    for key, gradient in gradients.items():
        off = float((gradient - theirs[key]).norm() / theirs[key].norm())
        assert off < 4 * rounding, key


def test_a_compiled_chunk_computes_the_same():
    torch.compiler.reset()
    schedule = make("zb-h1", ranks=1, microbatches=2)
    model = model_of("llama").double()
    data = batch_with(MANY)
    chunked = ChunkedLoss(token_loss, 7, "aot_eager", min_bytes=0)
    loss, _, gradients, _ = trained(model, schedule, data, chunked, "aot_eager")
    other, _, theirs, _ = trained(model, schedule, data, token_loss)
    assert loss == pytest.approx(other, rel=1e-12)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[key], msg=key)


def test_the_proof_compares_chunks_with_the_plain_loss():
    stage = split(model_of("llama").double(), [1])[0]

    def work(comm):
        schedule = make("zb-h1", ranks=1, microbatches=2)
        loss = ChunkedLoss(token_loss, chunk=7, min_bytes=0)
        executor = Executor(lower(schedule), {0: stage}, comm, loss)
        return prove(executor, batch_with(MANY))

    proof = run_threads(1, work)[0]
    assert proof.stages == 1
    assert 0 < proof.worst < 1


def test_a_frozen_output_and_hooks_are_respected():
    """A frozen weight gets no gradient, and a hook on the output layer makes the loss a plain one."""
    schedule = make("zb-h1", ranks=1, microbatches=2)
    data = batch_with(MANY)
    chunked = ChunkedLoss(token_loss, chunk=7, min_bytes=0)
    model = model_of("llama").double()
    model.head.output.weight.requires_grad_(False)
    _, _, gradients, _ = trained(model, schedule, data, chunked)
    _, _, theirs, _ = trained(model, schedule, data, token_loss)
    assert gradients.pop("head.output.weight") is None
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[key], msg=key)
    seen = []
    model.head.output.register_forward_hook(lambda *_: seen.append(1))
    trained(model, schedule, data, chunked)
    assert seen


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_the_logits_of_a_large_vocabulary_are_never_in_memory_at_once(autocast):
    """By default too: 1,024 tokens of 32,000 words are 131 MB of logits in float32."""
    torch.manual_seed(0)
    vocab, tokens = 32_000, 1024
    stage = split(Llama(LlamaConfig(vocab, 8, 1, 2, 2, 8)), [1])[0]
    words = torch.randint(0, vocab, (1, tokens))
    data = batch_of([words], [words])
    largest = {}
    found = {}
    for loss in (token_loss, ChunkedLoss(token_loss, chunk=128)):

        def work(comm, loss=loss):
            executor = Executor(
                lower(make("1f1b", ranks=1, microbatches=1)),
                {0: stage},
                comm,
                loss,
                autocast=autocast,
            )
            executor.warns_of_deferrals = False
            executor.agreement = executor.agree()  # without the checks of a first step
            with LargestTensor() as watch:
                value = executor.step(data).loss
            return value, watch.bytes

        found[loss], largest[loss] = run_threads(1, work)[0]
        stage.zero_grad()
    plain, chunked = largest
    logits = tokens * vocab * torch.float32.itemsize
    assert largest[plain] >= logits
    assert largest[chunked] <= logits // 8
    assert found[chunked] == pytest.approx(found[plain], rel=1e-3)
