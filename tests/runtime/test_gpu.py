"""Tests on a GPU: flash attention in slices, recordings, and times. Run them with `make test-gpu`."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from commands import train_elsewhere
from gpu_workers import (
    kind_of,
    memory_of_steps,
    passes_several_tensors,
    trains_like_one_piece,
)
from penstock import lower, make
from penstock.config import DataConfig
from penstock.errors import RunError
from penstock.measure.probe import Probe, Subject
from penstock.models import (
    GPT,
    GPTConfig,
    Llama,
    LlamaConfig,
    document_starts,
    shift_labels,
    split,
    token_loss,
)
from penstock.models.slice import Carry
from penstock.runtime import (
    ChunkedLoss,
    CudaTape,
    Executor,
    batch_of,
    compile_stage,
    prove,
    run_threads,
    spawn,
)
from penstock.runtime.backward import accumulate_product
from penstock.runtime.process.mps import products_are_complete
from penstock.runtime.recorder import Clock
from penstock.schedules.transforms import slice_tokens
from penstock.torch_internals import free_bytes
from penstock.train.data.corpus import open_corpus
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.data.masking import Masking

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUTS = (0, 192, 256, 448, 512)


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    gated = LlamaConfig(vocab=512, width=256, layers=2, heads=4, kv_heads=2, inner=512)
    return {
        "llama": Llama(gated).cuda(),
        "gpt": GPT(GPTConfig(512, 256, 2, 4, 512, 512, tied=False)).cuda(),
    }


def gradients(model, schedule, batch, autocast):
    model = copy.deepcopy(model)
    stages = dict(enumerate(split(model, [2])))

    def work(comm):
        executor = Executor(
            lower(schedule),
            stages,
            comm,
            token_loss,
            autocast=autocast,
        )
        return executor.step(batch).loss

    (loss,) = run_threads(1, work)
    return loss, {name: p.grad for name, p in model.named_parameters()}


class Trained(NamedTuple):
    """The losses of a model in training, and its weights at the end."""

    losses: list[float]
    weights: list[torch.Tensor]


def trained_by(losses_of_ranks: list[list[float]], model: torch.nn.Module) -> Trained:
    """Return what one rank has trained."""
    weights = [parameter.detach() for parameter in model.parameters()]
    return Trained(losses_of_ranks[0], weights)


def train_four_steps(
    executor: Executor,
    optimizer: torch.optim.Optimizer,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train on other tokens in every step; return the losses."""
    losses = []
    for seed in range(4):
        dice = torch.Generator("cuda").manual_seed(seed)
        tokens = [
            torch.randint(0, 512, (2, 256), device="cuda", generator=dice)
            for _ in range(4)
        ]
        losses.append(executor.step(batch_of(tokens, tokens)).loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step()
    return losses


def assert_alike(ours: Trained, theirs: Trained, autocast: torch.dtype | None) -> None:
    """Both have learned, and the same up to rounding, which bfloat16 does more of."""
    loss_limit = 1e-4 if autocast is None else 1e-2
    weight_limit = 1e-3 if autocast is None else 2e-2
    assert theirs.losses == pytest.approx(ours.losses, rel=loss_limit)
    assert ours.losses[-1] < ours.losses[0]
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        assert float((one - other).norm() / one.norm()) < weight_limit


def compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "seq1f1b"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_recorded_actions_train_like_unrecorded_ones(name, autocast, recompute):
    """Over steps of an optimizer, which sets gradients to None in between; alone, so without any transport."""
    shape = {"slices": 4} if name == "seq1f1b" else {}
    program = lower(make(name, ranks=1, microbatches=4, **shape))
    stages = frozenset([0]) if recompute else frozenset()
    found = []
    for tape in (None, CudaTape()):
        model = models()["llama"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def work(comm, model=model, optimizer=optimizer, tape=tape):
            executor = Executor(
                program,
                {0: split(model, [2])[0]},
                comm,
                token_loss,
                recompute=stages,
                autocast=autocast,
                tape=tape,
            )
            return train_four_steps(executor, optimizer)

        found.append(trained_by(run_threads(1, work), model))
    assert_alike(*found, autocast)


@pytest.mark.filterwarnings("ignore")  # those of torch's own compiler
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "seq1f1b"])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_compiled_stages_train_like_uncompiled_ones(name, autocast, recorded):
    """Recorded too, with a loss in chunks, and with weight gradients that wait for W. Nothing is compiled twice."""
    shape = {"slices": 4} if name == "seq1f1b" else {}
    program = lower(make(name, ranks=1, microbatches=4, **shape))
    found = []
    for compiler in ("", "inductor"):
        model = models()["llama"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        stage = split(model, [2])[0]
        if compiler:
            compile_stage(stage, compiler)

        def work(comm, stage=stage, optimizer=optimizer, compiler=compiler):
            executor = Executor(
                program,
                {0: stage},
                comm,
                ChunkedLoss(token_loss, 100, compiler, min_bytes=0),
                autocast=autocast,
                tape=CudaTape() if recorded else None,
            )
            counts = []
            losses = train_four_steps(
                executor, optimizer, lambda: counts.append(compiled_graphs())
            )
            assert not executor.stages_without_weight_work
            assert counts == [counts[0]] * 4
            return losses

        found.append(trained_by(run_threads(1, work, patience=600), model))
    assert_alike(*found, autocast)


def test_products_in_half_precision_add_up_in_float32():
    """Rounded to bfloat16, they would be wrong by 2e-3."""
    x, grad = (torch.randn(512, 256, device="cuda").bfloat16() for _ in range(2))
    weight = torch.nn.Parameter(torch.zeros(256, 256, device="cuda"))
    for _ in range(3):
        accumulate_product(weight, grad, x)
    expected = 3 * (grad.double().t() @ x.double())
    assert float((weight.grad - expected).norm() / expected.norm()) < 1e-4


def test_products_on_this_share_of_the_gpu_are_complete():
    """Without the check of `penstock lab testbed` they would not be for 3, 5, 6 or 7 workers."""
    assert products_are_complete("cuda")


def test_training_has_a_finite_held_out_loss(tmp_path):
    """Compiled and recorded in bfloat16, as `penstock train` does it: evaluations run uncaptured between the steps."""
    _, rows = train_elsewhere(
        tmp_path / "run",
        "model.layers=2",
        "run.device=cuda",
        "run.precision=bfloat16",
        "run.steps=6",
        "run.eval_every=2",
        "run.log_every=1",
        "run.checks=gradients,memory",
        "schedule.name=1f1b",
        "parallel.pp=1",
        "schedule.microbatches=4",
    )
    found = [row.evaluation for row in rows if row.evaluation is not None]
    assert len(found) == 3
    assert all(map(math.isfinite, found))
    assert found[2] < found[0]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_loss_in_chunks_needs_far_less_memory(name):
    """The head has 32,000 words, and the micro-batch 8,192 tokens."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab=32_000, width=256, layers=1, heads=4, kv_heads=4, inner=256
    )
    model = Llama(sizes).cuda()
    tokens = torch.randint(0, 32_000, (8, 1024), device="cuda")
    peaks = []
    losses = []
    for loss in (token_loss, ChunkedLoss(token_loss, chunk=1024)):

        def work(comm, loss=loss):
            executor = Executor(
                lower(make(name, ranks=1, microbatches=1)),
                {0: split(model, [1])[0]},
                comm,
                loss,
                autocast=torch.bfloat16,
            )
            executor.step(batch_of([tokens], [tokens]))
            torch.cuda.reset_peak_memory_stats()
            return executor.step(batch_of([tokens], [tokens])).loss

        model.zero_grad()
        losses += run_threads(1, work)
        peaks.append(torch.cuda.max_memory_allocated())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "sliced"])
@pytest.mark.parametrize("recorded", [False, True])
def test_recomputed_dropout_drops_the_same_values(name, recorded):
    """A recorded backward draws from where the generator stands when it is played; it is set back for that."""
    schedule = make("1f1b" if name == "sliced" else name, ranks=1, microbatches=4)
    program = lower(
        slice_tokens(schedule, (0, 64, 256)) if name == "sliced" else schedule
    )

    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = split(models()["llama"], [2])[0]

        def forward(self, x, piece=None):
            return torch.nn.functional.dropout(self.part(x, piece), 0.3)

    found = []
    for again in (False, True):
        stage = Dropping()

        def work(comm, stage=stage, again=again):
            executor = Executor(
                program,
                {0: stage},
                comm,
                token_loss,
                tape=CudaTape() if recorded else None,
                recompute=frozenset([0]) if again else frozenset(),
            )
            dice = torch.Generator("cuda").manual_seed(3)
            tokens = [
                torch.randint(0, 512, (2, 256), device="cuda", generator=dice)
                for _ in range(4)
            ]
            for _ in range(2):
                stage.zero_grad()
                torch.manual_seed(7)
                loss = executor.step(batch_of(tokens, tokens)).loss
            return loss

        found.append((run_threads(1, work)[0], [p.grad for p in stage.parameters()]))
    (loss, gradients), (other, theirs) = found
    assert other == pytest.approx(loss, rel=1e-5)
    for one, two in zip(gradients, theirs, strict=True):
        assert float((one - two).norm() / one.norm()) < 1e-4


class Looks(torch.nn.Module):
    """A stage that asks the GPU for a number, which no recording can."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y if float(y.detach().abs().max()) < 1e9 else y * 0


def test_a_stage_that_cannot_be_recorded_gets_a_warning_and_runs_unrecorded():
    """A recording that breaks off half-way leaves nothing behind that others stumble over."""
    program = lower(make("1f1b", ranks=1, microbatches=2))
    tokens = [torch.randint(0, 512, (2, 256), device="cuda") for _ in range(2)]

    def work(comm, tape=None, wrap=Looks):
        stage = wrap(split(models()["llama"], [2])[0])
        return (
            Executor(program, {0: stage}, comm, token_loss, tape=tape)
            .step(batch_of(tokens, tokens))
            .loss
        )

    with pytest.raises(
        RunError, match=r"F0 cannot be recorded: .*\n  without recordings it may run"
    ):
        run_threads(1, lambda comm: work(comm, CudaTape()))
    plain, again = (
        run_threads(1, lambda comm, tape=tape: work(comm, tape, lambda stage: stage))[0]
        for tape in (None, CudaTape())
    )
    assert run_threads(1, work)[0] == pytest.approx(plain, rel=1e-5)
    assert again == pytest.approx(plain, rel=1e-5)


def test_segments_of_a_bert_arrive_on_the_gpu_as_on_the_cpu(tmp_path):
    """Words, labels and types of a pass are copied at once, from memory that the GPU reads directly."""
    (tmp_path / "a.txt").write_text(
        "".join(f"the {n % 7} cats sat on {n % 5} mats.\n\n" for n in range(900))
    )
    data = DataConfig(
        sources=(str(tmp_path / "a.txt"),), seq_len=32, format="text:segments=2"
    )
    masking = Masking(256, 256, 0.15, ())
    corpus = replace(open_corpus(data, tmp_path), masking=masking)
    batches = [
        Loader(corpus, BatchShape(4, 2), 1, torch.device(device)).step()[0]
        for device in ("cpu", "cuda")
    ]
    on_cpu, on_gpu = batches
    for key in ("inputs", "labels", "starts"):
        for one, other in zip(getattr(on_cpu, key), getattr(on_gpu, key), strict=True):
            assert other.device.type == "cuda"
            assert torch.equal(one, other.cpu())
    for one, other in zip(on_cpu.named, on_gpu.named, strict=True):
        assert int(one["types"].max()) == 1
        assert torch.equal(one["types"], other["types"].cpu())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_slices_train_like_the_whole_sequence(name, autocast, packed):
    model = models()[name]
    tokens = torch.randint(0, 512, (2, 512), device="cuda")
    starts = (
        document_starts(torch.tensor([200, 312]))[None].expand(2, 512)
        if packed
        else None
    )
    labels = shift_labels(tokens, None if starts is None else starts.cuda())
    batch = batch_of([tokens], [labels], starts=() if starts is None else [starts])
    plain = make("1f1b", ranks=1, microbatches=1)
    loss, whole = gradients(model, plain, batch, autocast)
    other, ours = gradients(model, slice_tokens(plain, CUTS), batch, autocast)
    assert other == pytest.approx(loss, rel=1e-5 if autocast is None else 1e-2)
    for key, gradient in ours.items():
        assert float((gradient - whole[key]).norm() / whole[key].norm()) < (
            1e-4 if autocast is None else 3e-2
        ), key


def test_a_slice_in_half_precision_uses_a_flash_kernel():
    q = torch.randn(
        1, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    k, v = (
        torch.randn(
            1, 2, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        for _ in range(2)
    )
    carry = Carry(256)
    carry.open(0, 192)
    mask = carry.open(192, 256).mask(q.device, q.dtype)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # an error if it cannot
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True
        )
    seen = (
        torch.arange(256, device="cuda")
        <= torch.arange(192, 256, device="cuda")[:, None]
    )
    wide = [
        x.float().repeat_interleave(2, 1) if x is not q else x.float()
        for x in (q, k, v)
    ]
    right = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=seen)
    assert float((y.detach().float() - right.detach()).abs().max()) < 2e-2
    y.sum().backward()
    assert k.grad is not None


def test_times_on_a_gpu_are_those_of_its_kernels():
    model = models()["llama"]
    tokens = torch.randint(0, 512, (2, 512), device="cuda")
    schedule = make("seq1f1b", ranks=1, microbatches=2, slices=2)

    def work(comm):
        executor = Executor(
            lower(schedule), dict(enumerate(split(model, [2]))), comm, token_loss
        )
        for _ in range(2):
            result = executor.step(
                batch_of([tokens] * 2, [shift_labels(tokens)] * 2), timed=True
            )
        return result.timeline

    (timeline,) = run_threads(1, work)
    spans = list(timeline.spans())
    assert len(spans) == 8
    for before, after in pairwise(spans):
        assert before.start < before.end <= after.start


def test_a_span_on_a_gpu_is_its_kernels_not_their_launch():
    clock = Clock([torch.nn.Linear(2, 2).cuda()])
    x = torch.randn(4096, 4096, device="cuda")
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    clock.begin()
    launch = time.perf_counter()
    # The GPU still sleeps while the host launches the rest, so that a busy host leaves no gaps.
    torch.cuda._sleep(1_000_000_000)
    moments = [clock.now()]
    before.record()
    for _ in range(50):
        x = x @ x * 1e-3
    after.record()
    moments.append(clock.now())
    start, end = clock.seconds(moments)
    done = time.perf_counter()
    assert end - start == pytest.approx(before.elapsed_time(after) / 1e3, rel=0.05)
    assert launch - 1e-3 < start < end < done + 1e-3


def test_a_profile_can_be_taken_in_half_precision():
    model = models()["llama"]
    rotary, layer = model.rotary, model.layers[0]

    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, piece=None):
            return self.layer(x, *rotary(x, piece), piece)

    x = torch.randn(1, 256, 256, device="cuda")
    for tape in (None, CudaTape()):
        probe = Probe(Subject(One(), x, prefixes=True, autocast=torch.bfloat16), tape)
        for times in probe.times(64, 128, passes=3):
            assert all(seconds > 0 for seconds in times)


def test_ranks_that_share_a_gpu_find_their_backend():
    assert spawn(2, kind_of, backend=None) == ["penstock_ipc"] * 2


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu_train_like_one_piece(ranks, recorded):
    for worst in spawn(
        ranks, trains_like_one_piece, recorded, backend="penstock_ipc", patience=60
    ):
        assert max(worst.values()) < 1e-4, worst


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_recorded_stages_pass_several_tensors(ranks, recorded):
    """One rank passes them on in place, two through messages; in float64, so that only the order of sums differs."""
    for worst in spawn(
        ranks, passes_several_tensors, recorded, backend="penstock_ipc", patience=60
    ):
        assert max(worst.values()) < 1e-11, worst


def test_messages_free_their_memory_once_sent():
    """A message has 1 MiB, a step 8 of them each way."""
    for found in spawn(2, memory_of_steps, backend="penstock_ipc", patience=60):
        assert max(found[3:]) - min(found[3:]) < 2 << 20, found


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "seq1f1b"])
def test_recorded_stages_are_proven_without_a_warning(name):
    """Hooks on parameters would keep autograd's nodes alive and break the recording."""
    shape = {"slices": 4} if name == "seq1f1b" else {}
    program = lower(make(name, ranks=1, microbatches=4, **shape))
    model = models()["llama"]

    def work(comm):
        stages = {0: split(model, [2])[0]}
        executor = Executor(program, stages, comm, token_loss, tape=CudaTape())
        dice = torch.Generator("cuda").manual_seed(3)
        tokens = [
            torch.randint(0, 512, (2, 256), device="cuda", generator=dice)
            for _ in range(4)
        ]
        return prove(executor, batch_of(tokens, [shift_labels(one) for one in tokens]))

    (proof,) = run_threads(1, work)
    assert proof.stages == 1
    assert not proof.warnings


def test_memory_that_the_allocator_keeps_counts_as_free():
    """The next tensors can take it, without asking the driver."""
    device = torch.device("cuda", torch.cuda.current_device())
    size, slack = 1 << 28, 64 << 20
    before = free_bytes(device)
    taken = torch.empty(size, dtype=torch.uint8, device=device)
    assert abs(before - free_bytes(device) - size) < slack
    del taken
    assert abs(before - free_bytes(device)) < slack
