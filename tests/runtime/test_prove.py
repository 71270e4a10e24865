"""Plans that change what a stage computes are refused before the first step; all others pass."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import leaking_workers
from again_tape import Again
from commands import called
from hugging_face import NO_MARKS, decoder_sizes, gpt2_sizes
from penstock import REGISTRY, Schedule, lower, make, training
from penstock.errors import ProofError
from penstock.models import document_starts, split, token_loss
from penstock.models.slice import Slice
from penstock.runtime import (
    Batch,
    Executor,
    Proof,
    batch_of,
    current_ledger,
    defer,
    prove,
    run_threads,
)
from penstock.runtime.backward import accumulate
from penstock.schedules.transforms import slice_tokens, split_backward
from penstock.train.history import read_rows
from pipelines import VOCAB, data, gpt, layers_of, llama
from trainings import job_of, losses, train

CUTS = (0, 3, 4, 7)
ALL = frozenset(range(16))
Prepare = Callable[[nn.Module], nn.Module]


def proven(
    schedule: Schedule,
    whole: nn.Module,
    batch: Batch | None = None,
    prepare: Prepare = lambda part: part,
    **options,
) -> Proof:
    """A model of ours or of Hugging Face's, cut into stages."""
    copies = [
        split(copy.deepcopy(whole), layers_of(schedule)) for _ in range(schedule.ranks)
    ]
    stages = [prepare(copies[stage.rank][stage.part]) for stage in schedule.stages]
    return prove_stages(
        schedule,
        stages,
        batch,
        **options,
    )


def prove_stages(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    batch: Batch | None = None,
    each: Callable[[int], dict[str, object]] = lambda rank: {},
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    **options: object,
) -> Proof:
    """The proof of all ranks, which run as threads and must agree."""
    batch = batch or data(len(schedule.microbatches))
    program = lower(schedule)

    def work(comm):
        mine = {
            n: stages[n]
            for n, stage in enumerate(schedule.stages)
            if stage.rank == comm.rank
        }
        return prove(
            Executor(program, mine, comm, loss, **options, **each(comm.rank)),
            batch,
        )

    proofs = run_threads(schedule.ranks, work, patience=60)
    assert all(
        replace(one, seconds=0) == replace(proofs[0], seconds=0) for one in proofs
    )
    return proofs[0]


def shaped(
    name: str, ranks: int = 2, microbatches: int = 3, sliced: bool = False
) -> Schedule:
    extra = {"slices": 1} if name in ("terapipe", "seq1f1b") else {}
    schedule = make(name, ranks=ranks, microbatches=microbatches, **extra)
    return slice_tokens(schedule, CUTS) if sliced else schedule


def hugging_face(kind: str = "Llama", **more: object) -> nn.Module:
    torch.manual_seed(3)
    if kind == "GPT2":
        dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
        sizes = gpt2_sizes(VOCAB, layers=2, positions=16, **NO_MARKS) | dropout
    else:
        wild = {"max_position_embeddings": 16, "initializer_range": 0.3}
        sizes = decoder_sizes(VOCAB, layers=2, **wild)
    config = getattr(transformers, f"{kind}Config")(**sizes | more)
    return getattr(
        transformers, f"{kind}ForCausalLM" if kind != "GPT2" else "GPT2LMHeadModel"
    )(config).train()


# ---------------------------------------------------------------- what is right passes
@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, llama) for name in REGISTRY), ("1f1b", gpt), ("zb-v", gpt)],
)
def test_every_schedule_is_proven_with_and_without_slices(name, model):
    for sliced in (False, True):
        schedule = shaped(name, sliced=sliced)
        whole = model(sum(layers_of(schedule)))
        for dtype, options in (
            (torch.float64, {"recompute": ALL}),
            (torch.float32, {}),
        ):
            found = proven(schedule, whole.to(dtype), **options)
            visited = {stage for m in schedule.microbatches for stage in m.path}
            assert found.stages == len(visited)
            assert found.worst < 0.5
            assert not found.warnings


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "chimera"])
@pytest.mark.parametrize("sliced", [False, True])
def test_half_precision_recordings_and_copies_are_proven(name, sliced, no_onednn):
    schedule = shaped(name, sliced=sliced)
    whole = llama(2).float()
    tapes = [Again(), Again()]
    proven(schedule, whole, autocast=torch.bfloat16)
    proven(schedule, copy.deepcopy(whole).bfloat16())
    found = proven(schedule, whole, each=lambda rank: {"tape": tapes[rank]})
    assert found.stages == len(schedule.stages)
    assert all(tape.plays for tape in tapes)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "GPT2"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_hugging_face_models_are_proven_with_dropout(kind, name):
    """Slices run without dropout, since they draw other numbers than the whole."""
    whole = hugging_face(kind, **({} if kind == "GPT2" else {"attention_dropout": 0.3}))
    for sliced in (False, True):
        found = proven(shaped(name, sliced=sliced), whole, data(3))
        assert found.stages == 2


def test_packed_documents_are_proven():
    batch = data(3)
    starts = tuple(
        document_starts(torch.tensor([3, 4])).expand(*x.shape) for x in batch.inputs
    )
    for sliced in (False, True):
        assert (
            proven(
                shaped("zb-h1", sliced=sliced), llama(2), replace(batch, starts=starts)
            ).stages
            == 2
        )


# ---------------------------------------------------------------- a user's own stages, some of them wrong
WIDTH = 8


class Entry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        return self.mix(self.words(x))


class Exit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        return self.scores(x)


class Inner(nn.Module):
    """The stage between them: a linear layer, and `twist`, which is right here."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        return self.twist(self.plain(x), piece)

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return x.tanh()


def own(
    inner: nn.Module,
    schedule: Schedule | None = None,
    sliced: bool = False,
    **more: object,
) -> Proof:
    """Prove three ranks, the middle one with the given stage."""
    torch.manual_seed(5)
    schedule = schedule or make("1f1b", ranks=3, microbatches=3)
    stages = [Entry().double(), inner.double(), Exit().double()]
    return prove_stages(
        slice_tokens(schedule, CUTS) if sliced else schedule,
        stages,
        **more,
    )


def refused(inner: nn.Module, *words: str, **more: object) -> str:
    """The error text, which must name the stage and contain these texts."""
    with pytest.raises(ProofError) as caught:
        own(inner, **more)
    text = str(caught.value)
    for word in ("stage 1 on rank 1", *words, "run.checks=forecast,memory"):
        assert word in text, text
    return text


class Leaky(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return x + x.mean(1, keepdim=True)  # of tokens that a slice does not have


class Stretched(Inner):
    """Positions whose scale depends on how long the sequence is so far, as in rotary embeddings of type dynamic."""

    def __init__(self) -> None:
        super().__init__()
        kind = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        config = transformers.LlamaConfig(
            hidden_size=WIDTH,
            num_attention_heads=1,
            max_position_embeddings=4,
            rope_parameters=kind,
        )
        self.rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
            config
        )

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        place = torch.arange(x.shape[1]) if piece is None else piece.positions(x.device)
        cos, sin = self.rotary(x, place[None])
        return x * cos + x.roll(1, -1) * sin


class Counting(Inner):
    """Its forward changes what the next one does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls)


class CountingItself(Inner):
    """The same, but it counts where nobody sets it back for a second forward."""

    calls = 0

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls)


class Masked(Inner):
    """A dropout of its own, with random numbers that nobody puts back for a second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.Generator().manual_seed(1)

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return x * torch.randint(0, 2, x.shape, generator=self.numbers)


class Recurrent(Inner):
    """A running sum; its checkpoint takes the state of the last slice, not its own, when it runs again."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        if self.checkpointed:
            return torch.utils.checkpoint.checkpoint(
                self.run, x, piece, use_reentrant=False
            )
        return self.run(x, piece)

    def run(self, x: Tensor, piece: Slice | None) -> Tensor:
        before = None if piece is None else piece.take("sum", "state")
        total = x.cumsum(1) if before is None else x.cumsum(1) + before
        if piece is not None:
            piece.leave("sum", "state", total[:, -1:])
        return total.sin()


class Loses(torch.autograd.Function):
    """A scale whose gradient is left to W; `lost` there, always or only under autocast."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor, lost: str) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.ledger = current_ledger()
        ctx.lost = lost == "split" or (
            lost == "both" and torch.is_autocast_enabled("cpu")
        )
        return x * scale

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, scale = ctx.saved_tensors
        split = ctx.ledger is not None and ctx.ledger.open
        if not (split and ctx.lost):
            defer(ctx.ledger, lambda: accumulate(scale, (grad * x).sum((0, 1))))
        return grad * scale, None, None


class Losing(Inner):
    def __init__(self, lost: str) -> None:
        super().__init__()
        self.lost, self.scale = lost, nn.Parameter(torch.ones(WIDTH))

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return Loses.apply(x, self.scale, self.lost)


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, owner: nn.Module) -> Tensor:
        ctx.owner, owner.kept = owner, x.detach()
        return x**2

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * 2 * ctx.owner.kept, None


class Keeping(Inner):
    """Stores on itself what its backward needs, which only works with one micro-batch."""

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return Keeps.apply(x, self)


class Stale(Again):
    """A tape that replays its recording, whatever its input."""

    def record(self, work, prepare=None):
        return work(), lambda: None


ZB = split_backward(make("1f1b", ranks=3, microbatches=3))
REC = {"recompute": ALL}


def test_slices_that_need_all_tokens_are_refused():
    own(Leaky(), schedule=ZB, **REC)
    text = refused(
        Leaky(),
        "the output differs by",
        "cause: token slices\n",
        "a schedule without slices=",
        sliced=True,
    )
    assert "rounding explains at most" in text
    refused(Leaky(), "cause: token slices\n", schedule=ZB, sliced=True, **REC)


def test_rotary_embeddings_that_depend_on_the_length_are_refused_in_slices():
    own(Stretched())
    refused(Stretched(), "cause: token slices\n", sliced=True)


def test_a_forward_that_changes_its_module_is_refused_where_it_runs_again():
    own(Counting(), schedule=ZB)
    own(Counting(), schedule=ZB, **REC)
    own(CountingItself(), schedule=ZB)
    refused(
        CountingItself(),
        "the gradient of plain.weight",
        "cause: recomputation\n",
        "run.recompute=none",
        **REC,
    )
    refused(Counting(), "cause: token slices\n", schedule=ZB, sliced=True)
    own(Masked(), schedule=ZB)
    refused(
        Masked(),
        "the gradient of plain.weight",
        "cause: recomputation\n",
        schedule=ZB,
        **REC,
    )


def test_checkpoints_in_slices_are_refused():
    own(Recurrent(False), sliced=True, **REC)
    own(Recurrent(True))
    refused(Recurrent(True), "cause: token slices\n", sliced=True)


def test_a_weight_gradient_that_w_forgets_is_refused():
    own(Losing("no"), schedule=ZB)
    own(Losing("split"))
    text = refused(
        Losing("split"), "the gradient of scale differs by 1 of its norm", schedule=ZB
    )
    assert "cause: the split backward\n" in text
    assert "a schedule that does not split" in text


def test_options_that_only_fail_together_are_named_together(no_onednn):
    own(Losing("both"), autocast=torch.bfloat16)
    own(Losing("both"), schedule=ZB)
    refused(
        Losing("both"),
        "the gradient of scale",
        "cause: the split backward together with autocast\n",
        schedule=ZB,
        sliced=True,
        autocast=torch.bfloat16,
        **REC,
    )


def test_state_that_the_next_micro_batch_overwrites_is_refused():
    own(Keeping(), schedule=make("1f1b", ranks=3, microbatches=1))
    refused(
        Keeping(),
        "the gradient of plain.weight",
        "cause: several micro-batches in flight\n",
    )


def test_recordings_that_replay_something_else_are_refused():
    own(Inner(), each=lambda rank: {"tape": Again()})
    refused(
        Inner(),
        "the gradient of plain.weight differs",
        "cause: recorded actions\n",
        "run.cuda_graphs=false",
        each=lambda rank: {"tape": Stale() if rank == 1 else Again()},
    )


def test_a_compiler_that_changes_the_results_is_refused():
    def wrong(graph, inputs):
        return lambda *args: tuple(2 * one for one in graph(*args))

    def compiled(backend) -> Inner:
        inner = Inner()
        inner.plain = torch.compile(inner.plain, backend=backend)
        return inner

    only = make("1f1b", ranks=1, microbatches=2)
    stages = lambda backend: [nn.Sequential(compiled(backend).double())]  # noqa: E731
    draw = [torch.randn(2, 7, WIDTH, dtype=torch.float64) for _ in range(2)]
    batch = Batch(tuple(draw), tuple(draw), 1)
    weighed = lambda y, target: (y * target).sum()  # noqa: E731
    prove_stages(only, stages("aot_eager"), batch, loss=weighed)
    with pytest.raises(
        ProofError, match=r"(?s)the loss differs.*cause: torch.compile\n"
    ):
        prove_stages(only, stages(wrong), batch, loss=weighed)


def test_a_stage_that_cannot_run_as_planned_is_refused_with_what_it_raised():
    class Picky(Inner):
        def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
            if x.shape[1] < 7:
                raise ValueError("seven tokens, please")
            return x

    refused(
        Picky(),
        "ValueError: seven tokens, please",
        "cause: token slices\n",
        sliced=True,
    )


def test_an_error_of_the_model_itself_is_raised_unchanged():
    class Broken(Inner):
        def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
            raise ValueError("a layer of the user's is broken")

    with pytest.raises(ValueError, match="a layer of the user's is broken"):
        own(Broken())


class Attention(Inner):
    """Its keys have a bias, as in BERT: a softmax does not see it, so its gradient is zero but for noise."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        key, value, seen = (
            self.key(x),
            x,
            torch.ones(x.shape[1], x.shape[1]).tril().bool(),
        )
        if piece is not None:
            key, value, seen = (
                piece.extend(0, "key", key),
                piece.extend(0, "value", x),
                piece.seen(x.device),
            )
        return x + F.scaled_dot_product_attention(x, key, value, seen)


def test_a_gradient_of_pure_noise_is_not_a_fault():
    assert own(Attention(), sliced=True).stages == 3


# ---------------------------------------------------------------- what is not proven, and said
def test_a_split_without_work_for_w_gets_a_warning(caplog):
    class Dense(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Identity()
            self.matrix = nn.Parameter(torch.eye(WIDTH))

        def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
            return x @ self.matrix

    with caplog.at_level(logging.WARNING):
        found = own(Dense(), schedule=ZB)
    (words,) = found.warnings
    assert "stage 1 on rank 1 splits its backward for nothing" in words
    assert caplog.messages == [words]
    assert not own(Dense()).warnings


def test_random_numbers_that_cannot_be_switched_off_get_a_warning():
    class Noisy(Inner):
        def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
            return x * torch.rand_like(x)

    rows = torch.randint(0, VOCAB, (2, 7))
    batch = batch_of([rows] * 3, [rows] * 3)
    assert not own(
        Noisy(), schedule=ZB, batch=batch
    ).warnings  # the same numbers both ways
    (words,) = own(Noisy(), sliced=True, batch=batch).warnings
    assert "stage 1 on rank 1 is not proven: it draws random numbers" in words


def test_a_nondeterministic_module_gets_a_warning():
    counter = iter(range(10**6))

    class Moody(Inner):
        def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
            return x * (1 + next(counter) % 7)

    (words,) = own(Moody()).warnings
    assert "stage 1 on rank 1 is not deterministic" in words


def test_infinite_values_get_a_warning():
    class Infinite(Inner):
        def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
            return x / 0

    proof = own(Infinite())
    assert any(
        "stage 1 on rank 1 is not proven: its plain call" in words
        for words in proof.warnings
    )
    assert proof.stages < proof.visited  # it is not counted


class Large(Inner):
    """A stage for whose plain call there is memory for some rows only."""

    rows = 0

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        if torch.is_grad_enabled() and len(x) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x


def test_a_plain_call_without_memory_gets_a_warning():
    """A plan may fit where a plain call does not, and then it trains unproven."""
    proof = own(Large())
    assert proof.stages == 2  # the others
    assert any(
        "stage 1 on rank 1 is not proven: there is not enough memory" in words
        for words in proof.warnings
    )
    assert str(proof).endswith("1 of 3 stages were not checked, as the warnings say")


def test_a_stage_without_memory_for_two_rows_is_proven_on_one():
    large = Large()
    large.rows = 1
    rows = torch.randint(0, VOCAB, (2, 7))
    proof = own(large, batch=batch_of([rows] * 3, [rows] * 3))
    assert (proof.stages, proof.visited, proof.warnings) == (3, 3, ())
    assert "3 stages match plain calls" in str(proof)


def test_a_proof_gives_up_recordings_and_all_ranks_record_again():
    """Another rank must not go on with recordings while one records."""
    stages = [Entry().double(), Large().double(), Exit().double()]
    rows = torch.randint(0, VOCAB, (2, 7))
    batch = batch_of([rows] * 3, [rows] * 3)
    program = lower(make("1f1b", ranks=3, microbatches=3))
    stages[1].rows = 99

    def work(comm):
        mine = {comm.rank: stages[comm.rank]}
        executor = Executor(program, mine, comm, token_loss, tape=Again())
        executor.step(batch)
        assert executor.recordings is not None
        comm.barrier()
        stages[1].rows = 1
        proof = prove(executor, batch)
        assert executor.recordings is None
        comm.barrier()
        stages[1].rows = 99
        executor.step(batch)
        return proof.stages, executor.recordings is not None

    assert run_threads(3, work) == [(3, True)] * 3


def test_a_proof_of_nothing_says_so():
    proof = Proof(stages=0, visited=1, warnings=("stage 0 on rank 0 is not proven",))
    words = "no stage passed the gradient check in 0.0 s: 1 of 1 stages were not checked, as the warnings say"
    assert str(proof) == words


@pytest.fixture
def other_process():
    """A process group with a second process, which never answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_sharded_weights_are_not_proven_and_the_log_says_so(caplog, other_process):
    mesh = init_device_mesh("cpu", (2,))

    def work(comm):
        part = split(llama(2), (1, 1))[comm.rank]
        if comm.rank == 1:
            fully_shard(part, mesh=mesh)
        return prove(
            Executor(
                lower(shaped("1f1b")),
                {comm.rank: part},
                comm,
                token_loss,
            ),
            data(3),
        )

    with caplog.at_level(logging.INFO):
        found = run_threads(2, work)
    assert all("parallel.dp_shard" in one.skipped and not one.stages for one in found)
    assert "the model is not proven before it trains" in caplog.text


# ---------------------------------------------------------------- the command line
CONFIG = """
[model]
layers = 2
hidden_size = 16
heads = 2
kv_heads = 2
intermediate_size = 16
[data]
sources = ["text.txt"]
seq_len = 16
global_batch = 4
[schedule]
name = "seq1f1b:slices=2"
microbatches = 2
[parallel]
pp = 2
[run]
checks = "gradients,memory"
"""


def test_a_broken_model_is_refused_once_by_penstock_train(tmp_path, monkeypatch, capfd):
    (tmp_path / "text.txt").write_text("the cat sat on the mat and said so\n" * 100)
    (tmp_path / "config.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(training, "run_worker", leaking_workers.rank)
    code, _, err = called(monkeypatch, capfd, "train config.toml")
    assert code == 2, err
    assert (
        "ProofError: stage 1 on rank 1 computes something else in this plan than in a plain call"
        in err
    )
    assert "\n  cause: token slices\n" in err
    assert "a schedule without slices=" in err
    assert "restart" not in err
    assert "Traceback" not in err
    assert not read_rows(tmp_path / "runs" / "config")


# ---------------------------------------------------------------- no trace
def test_a_proof_leaves_no_trace():
    class Remembers(Inner):
        """A batch norm's statistics, and what some modules keep in plain attributes."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
            self.seen, self.lengths, self.last = 0, [], None

        def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
            self.seen += 1
            self.lengths.append(x.shape[1])
            self.last, self.new = x.detach(), True
            return self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2))

    inner = Remembers().double()
    kept = {name: value.clone() for name, value in inner.state_dict().items()}
    gradients = {name: torch.randn_like(p) for name, p in inner.named_parameters()}
    for name, parameter in inner.named_parameters():
        parameter.grad = gradients[name]
    stages = [Entry().double(), inner, Exit().double()]
    numbers = torch.get_rng_state()
    prove_stages(ZB, stages)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(
        torch.equal(value, kept[name]) for name, value in inner.state_dict().items()
    )
    assert all(
        parameter.grad is gradients[name]
        for name, parameter in inner.named_parameters()
    )
    assert (
        inner.seen,
        inner.lengths,
        inner.last,
        hasattr(inner, "new"),
        inner.drop.p,
    ) == (0, [], None, False, 0.5)


@pytest.mark.parametrize("tape", [Again, None])
def test_a_step_after_a_proof_is_the_step_without_one(tape):
    schedule = slice_tokens(split_backward(make("1f1b", ranks=2, microbatches=3)), CUTS)
    found: dict[bool, dict[str, Tensor]] = {}
    for ask in (True, False):
        found[ask] = {}
        whole = llama(2)

        def work(comm, whole=whole, ask=ask):
            part = split(whole, (1, 1))[comm.rank]
            executor = Executor(
                lower(schedule),
                {comm.rank: part},
                comm,
                token_loss,
                tape=tape() if tape else None,
            )
            executor.step(data(3, seed=1))
            if ask:
                prove(executor, data(3))
            executor.step(data(3, seed=2))
            found[ask] |= {name: p.grad for name, p in part.named_parameters()}

        run_threads(2, work)
    assert all(
        torch.equal(found[True][name], gradient)
        for name, gradient in found[False].items()
    )


@pytest.mark.parametrize("name", ["zb-h1", "seq1f1b"])
def test_a_run_has_the_same_losses_with_a_proof_and_without(name, tmp_path, caplog):
    shape = {"slices": 2} if name == "seq1f1b" else {}
    with caplog.at_level(logging.INFO):
        proved = train(
            job_of(
                tmp_path / "with", name, "run.steps=6", "run.checks=gradients", **shape
            )
        )
    assert any("2 stages match plain calls" in words for words in caplog.messages)
    caplog.clear()
    plain = train(job_of(tmp_path / "without", name, "run.steps=6", **shape))
    assert not any("proved" in words for words in caplog.messages)
    assert losses(proved) == losses(plain)
    more = ("run.steps=8", "run.checks=gradients")
    job = job_of(tmp_path / "with", name, *more, resume=True, **shape)
    with caplog.at_level(logging.INFO):
        train(job)
    assert any("2 stages match plain calls" in words for words in caplog.messages)


def test_a_loss_that_is_a_mean_is_proven_too():
    def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    schedule = make("1f1b", ranks=2, microbatches=2)
    proof = proven(schedule, llama(2), loss=mean_loss, reduction="mean")
    assert proof.stages == 2
    assert not proof.warnings
