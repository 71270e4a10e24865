"""A user's own modules, batches and losses: exact, or refused with the reason and a way out."""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from test_replay import played
from torch import Tensor, nn
from torch.nn.utils import parametrize

import tied_workers
from again_tape import Again
from penstock import lower, make
from penstock.errors import PenstockError, RunError, ShapeError
from penstock.models import split, token_loss
from penstock.runtime import Executor, batch_of, cut_batch, run_threads, spawn
from penstock.schedules.transforms import slice_tokens
from pipelines import data, gpt, layers_of, llama, own_stages, piped, unsplit, worst

VOCAB, WIDTH = 11, 8


class Block(nn.Module):
    def __init__(
        self, linear: type[nn.Module] = nn.Linear, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = (
            nn.LayerNorm(WIDTH),
            linear(WIDTH, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Own(nn.Sequential):
    """A stage of a user's own; every token for itself, so that slices need no state."""

    def forward(self, x: Tensor, piece: object = None) -> Tensor:
        return super().forward(x)


def stages_of(count: int, **block: object) -> list[nn.Module]:
    torch.manual_seed(3)
    blocks = [Block(**block) for _ in range(count)]
    ends = [nn.Embedding(VOCAB, WIDTH)], [nn.Linear(WIDTH, VOCAB)]
    return [
        Own(
            *(ends[0] if n == 0 else []), one, *(ends[1] if n == count - 1 else [])
        ).double()
        for n, one in enumerate(blocks)
    ]


def batch(microbatches: int = 4, rows: int = 8, tokens: int = 6):
    draw = torch.Generator().manual_seed(4)
    x, y = (torch.randint(0, VOCAB, (rows, tokens), generator=draw) for _ in range(2))
    y[:, 0] = -100
    return cut_batch(x, y, microbatches)


def run(
    schedule,
    stages,
    given=None,
    loss=token_loss,
    steps=1,
    evaluates=False,
    seed=None,
    **options,
):
    """Steps on a thread a rank; the losses of rank 0. Stages are used as they are."""

    def work(comm):
        mine = {
            n: stages[n] for n, s in enumerate(schedule.stages) if s.rank == comm.rank
        }
        executor = Executor(lower(schedule), mine, comm, loss, **options)
        if evaluates:
            return [executor.evaluate(given or batch())]
        found = []
        for step in range(steps):
            if seed is not None:
                for stage in stages:
                    stage.zero_grad()
                torch.manual_seed(seed + step)
            found.append(executor.step(given or batch()).loss)
        return found

    return run_threads(schedule.ranks, work, patience=20)[0]


def whole(stages, given=None, loss=token_loss) -> tuple[float, list[Tensor | None]]:
    """The same in one piece."""
    model, given, total = copy.deepcopy(nn.Sequential(*stages)), given or batch(), 0.0
    for x, y in zip(given.inputs, given.labels, strict=True):
        one = loss(model(x), y) / given.valid
        one.backward()
        total += float(one.detach())
    return total, [p.grad for p in model.parameters()]


def assert_equal_gradients(stages, expected, atol=1e-12):
    found = [p.grad for stage in stages for p in stage.parameters()]
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or torch.allclose(mine, other, rtol=0, atol=atol)


# ---------------------------------------------------------------- random numbers
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "sliced"])
def test_recomputed_dropout_drops_the_same_values(name, recorded):
    """Against a run that keeps everything: from the same seed on, gradients are equal to the last bit."""
    schedule = make("1f1b" if name == "sliced" else name, ranks=1, microbatches=4)
    schedule = slice_tokens(schedule, (0, 2, 6)) if name == "sliced" else schedule
    plain = stages_of(1, dropout=0.4)
    again = copy.deepcopy(plain)
    losses = run(schedule, plain, steps=2, seed=5)
    tape = {"tape": Again()} if recorded else {}
    found = run(schedule, again, steps=2, seed=5, recompute=frozenset({0}), **tape)
    assert found[1] == pytest.approx(losses[1], abs=1e-12)
    assert_equal_gradients(again, [p.grad for p in plain[0].parameters()])
    assert losses[0] != losses[1]


class Noisy(nn.Module):
    """Draws often and slowly, and notes what it drew."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage, self.drawn = stage, []

    def forward(self, x: Tensor) -> Tensor:
        drawn = []
        for _ in range(20):
            drawn.append(float(torch.rand(())))
            time.sleep(0)  # lets other threads draw
        self.drawn.append(tuple(drawn))
        return self.stage(x) * (1 + sum(drawn) / 20)


@pytest.mark.parametrize("some", [{0, 1}, {0}])
def test_ranks_that_are_threads_do_not_draw_in_the_middle_of_one_another(some):
    stages = [Noisy(stage) for stage in stages_of(2)]
    run(
        make("1f1b", ranks=2, microbatches=4),
        stages,
        steps=2,
        recompute=frozenset(some),
    )
    for number, stage in enumerate(stages):
        assert set(Counter(stage.drawn).values()) == {2 if number in some else 1}


def test_a_forward_that_draws_other_numbers_the_second_time_is_refused():
    class Fickle(nn.Module):
        def __init__(self, stage: nn.Module) -> None:
            super().__init__()
            self.stage, self.calls = stage, 0

        def forward(self, x):
            self.calls += 1
            torch.rand(self.calls)
            return self.stage(x)

    stages = [Fickle(stage) for stage in stages_of(1)]
    with pytest.raises(
        RunError, match="0B0 computed its forward again and drew other random numbers"
    ):
        run(make("1f1b", ranks=1, microbatches=4), stages, recompute=frozenset({0}))


# ---------------------------------------------------------------- split backwards
class Plain(nn.Linear):
    """A subclass that keeps the forward."""


class Conv1D(nn.Module):
    """As in transformers."""

    def __init__(self, nx: int, nf: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = (
            nf,
            nn.Parameter(torch.randn(nx, nf)),
            nn.Parameter(torch.randn(nf)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(
            *x.shape[:-1], self.nf
        )


class Lora(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            nn.Linear(width, out),
            nn.Linear(width, 2, bias=False),
            nn.Linear(2, out),
        )
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Scaled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def doubled(width: int, out: int) -> nn.Module:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    return parametrize.register_parametrization(
        nn.Linear(width, out), "weight", Double()
    )


WAITS = {"plain": Plain, "conv1d": Conv1D, "lora": Lora}
CANNOT = {"scaled": Scaled, "parametrized": doubled, "hooked": nn.Linear}


@pytest.mark.parametrize("kind", [*WAITS, *CANNOT])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_split_backward_is_exact_and_says_which_layers_cannot_wait(
    kind, autocast, caplog
):
    stages = stages_of(2, linear=(WAITS | CANNOT)[kind])
    others = copy.deepcopy(stages)
    for stage in (*stages, *others) if kind == "hooked" else ():
        next(m for m in stage if isinstance(m, Block)).linear.weight.register_hook(
            lambda grad: grad * 3
        )
    options = {"autocast": autocast}
    with caplog.at_level(logging.WARNING, "penstock"):
        run(make("zb-h1", ranks=2, microbatches=4), stages, steps=2, **options)
    run(make("1f1b", ranks=2, microbatches=4), others, steps=2, **options)
    expected = [p.grad for stage in others for p in stage.parameters()]
    assert_equal_gradients(stages, expected, atol=1e-12 if autocast is None else 1e-2)
    warned = [
        record.getMessage()
        for record in caplog.records
        if "weight gradients in I" in record.getMessage()
    ]
    assert len(warned) == (0 if kind in WAITS else 2)  # one an executor
    assert all(
        "% of its trained parameters, in " in text and ".linear" in text
        for text in warned
    )


def test_a_layer_that_can_wait_does():
    stages = stages_of(1, linear=Conv1D)
    seen = []
    embedding, block, _ = stages[0]
    embedding.weight.register_post_accumulate_grad_hook(
        lambda _: seen.append(block.linear.weight.grad is None)
    )
    run(make("zb-h1", ranks=1, microbatches=1), stages, batch(1))
    assert seen == [True]
    assert block.linear.weight.grad is not None


def test_a_compiled_stage_of_a_split_schedule_is_named(caplog):
    (stage,) = stages_of(1)
    with caplog.at_level(logging.WARNING, "penstock"):
        run(
            make("zb-h1", ranks=1, microbatches=2),
            [torch.compile(stage, backend="eager")],
            batch(2),
        )
    assert "stage 0, which is compiled: " in caplog.text


# ---------------------------------------------------------------- frozen stages
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("1f1b", (0,)),
        ("1f1b", (2, 3)),
        ("1f1b", (0, 2)),
        ("zb-v", (0, 1)),
        ("zb-v", (1,)),
        ("zb-v", (0, 2)),
        ("interleaved-zb", (0,)),
        ("interleaved-zb", (1, 2, 3)),
        ("interleaved-zb", (2, 3)),
        ("sliced", (0, 1)),
        ("sliced", (1,)),
        ("sliced", (1, 2, 3)),
    ],
)
def test_frozen_parts_leave_the_gradients_of_the_others_exact(name, frozen):
    schedule = make(
        "1f1b" if name == "sliced" else name,
        ranks=2 if name in ("zb-v", "interleaved-zb") else 4,
        microbatches=4,
    )
    model, given = llama(schedule.parts), data(4, tokens=8)
    for part in frozen:
        split(model, layers_of(schedule))[part].requires_grad_(False)
    (loss,), gradients = unsplit(schedule, model, [given])
    ran = slice_tokens(schedule, (0, 3, 8)) if name == "sliced" else schedule
    everything = frozenset(range(len(schedule.stages)))
    for options in ({}, {"recompute": everything}):
        ours = piped(ran, model, [given], **options)
        assert worst(ours, gradients) < 1e-12
        assert {key.split(":")[2] for key in ours.gradients} == set(gradients)
        assert ours.losses[0] == pytest.approx([loss], abs=1e-12)
    ours, _ = played(ran, model, [given, given])
    assert (
        worst(ours, {key: 2 * gradient for key, gradient in gradients.items()}) < 1e-12
    )
    first = next(part for part in range(schedule.parts) if part not in frozen)
    sent = [m for e in ours.executors for m in e.lane.receives if m.goes_back]
    assert all(schedule.stages[m.instruction.action.stage].part > first for m in sent)


@pytest.mark.parametrize("name", ["chimera", "1f1b"])
def test_frozen_parts_of_replicas_and_tied_ones(name):
    schedule = make(name, ranks=2, microbatches=2, copies=2)
    model, given = gpt(schedule.parts, tied=True), data(4)
    for part in (0, 1):
        frozen = copy.deepcopy(model)
        split(frozen, layers_of(schedule))[part].requires_grad_(False)
        gradients = unsplit(schedule, frozen, [given])[1]
        ours = piped(schedule, frozen, [given])
        assert worst(ours, gradients) < 1e-12
        assert {key.split(":")[2] for key in ours.gradients} == set(gradients)


def test_a_model_that_is_all_frozen_can_only_be_evaluated():
    stages = [stage.requires_grad_(False) for stage in stages_of(2)]
    schedule = make("1f1b", ranks=2, microbatches=4)
    with pytest.raises(ShapeError, match="no stage has a parameter that trains"):
        run(schedule, stages)
    assert run(schedule, stages, evaluates=True)[0] > 0


def test_unfreezing_needs_a_new_executor():
    schedule, stages = make("1f1b", ranks=1, microbatches=4), stages_of(1)
    stages[0][0].requires_grad_(False)

    def work(comm):
        executor = Executor(lower(schedule), {0: stages[0]}, comm, token_loss)
        executor.step(batch())
        stages[0][0].requires_grad_()
        executor.step(batch())

    with pytest.raises(
        ShapeError,
        match=r"0\.weight of stage 0 has changed .*\n  make a new Executor on every rank",
    ):
        run_threads(1, work)


def test_a_result_without_a_gradient_is_refused_by_its_stage():
    class Cut(nn.Module):
        def __init__(self, stage):
            super().__init__()
            self.stage = stage

        def forward(self, x):
            return self.stage(x).detach()

    first, second = stages_of(2)
    with pytest.raises(
        RunError, match=r"0B0 has no gradient to compute: what stage 0 \(Cut\) returned"
    ):
        run(make("1f1b", ranks=2, microbatches=4), [Cut(first), second])


# ---------------------------------------------------------------- batches
@pytest.mark.parametrize("count", [2, 6, 8])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_batch_must_have_the_micro_batches_of_the_schedule(count, evaluates):
    words = (
        rf"the batch has {count} micro-batches, but the schedule has 4\n  cut it into 4"
    )
    with pytest.raises(ShapeError, match=words):
        run(
            make("1f1b", ranks=2, microbatches=4),
            stages_of(2),
            batch(count),
            evaluates=evaluates,
        )


def test_inputs_and_labels_must_be_equally_many():
    x = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ShapeError, match="2 micro-batches have 1 labels"):
        batch_of([x, x], [x])


# ---------------------------------------------------------------- tied weights
def assert_trained_like_one_piece(found, schedule):
    losses, model = tied_workers.in_one_piece(len(schedule.microbatches))
    whole = dict(model.named_parameters())
    for mine, weights in found:
        assert mine == pytest.approx(losses, abs=1e-12)
        for name, numbers in weights.items():
            assert numbers == pytest.approx(
                whole[name].detach().flatten().tolist(), abs=1e-12
            ), name
    owners = [
        rank
        for rank, (_, weights) in enumerate(found)
        if "transformer.wte.weight" in weights
    ]
    assert len(owners) == len(found)  # the first and the last part both have it


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("copies", [1, 2])
def test_tied_weights_of_hugging_face_stay_one_without_being_named(name, copies):
    schedule, model = (
        make(name, ranks=2, microbatches=2, copies=copies),
        tied_workers.gpt2(),
    )
    found = run_threads(
        schedule.ranks, lambda comm: tied_workers.train(comm, schedule, model)
    )
    assert_trained_like_one_piece(found, schedule)


def test_tied_weights_stay_one_on_processes():
    schedule = make("1f1b", ranks=2, microbatches=2)
    assert_trained_like_one_piece(
        spawn(2, tied_workers.train, schedule, patience=60.0), schedule
    )


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("copies", [1, 2])
def test_threads_that_share_one_model_count_each_gradient_once(name, copies):
    schedule = make(name, ranks=2, microbatches=2, copies=copies)
    count = len(schedule.microbatches)
    losses, other = tied_workers.in_one_piece(count)
    model = tied_workers.gpt2()
    parts = split(model, (1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number, given in enumerate(tied_workers.batches(count)):

        def work(comm, given=given):
            mine = own_stages(schedule, parts, comm.rank)
            return Executor(lower(schedule), mine, comm, token_loss).step(given).loss

        optimizer.zero_grad()
        assert run_threads(schedule.ranks, work) == pytest.approx(
            [losses[number]] * schedule.ranks, abs=1e-12
        )
        optimizer.step()
    for mine, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("copies", "what"),
    [(1, r"embed\.tokens\.weight"), (2, r"part [01]|embed\.tokens\.weight")],
)
def test_copies_that_differ_from_the_start_are_refused(copies, what):
    schedule = make("1f1b", ranks=2, microbatches=2, copies=copies)
    models = [gpt(2) for _ in range(schedule.ranks)]
    torch.nn.init.normal_(models[-1].embed.tokens.weight)

    def work(comm):
        parts = split(models[comm.rank], (1, 1))
        mine = own_stages(schedule, parts, comm.rank)
        return (
            Executor(lower(schedule), mine, comm, token_loss)
            .step(data(2 * copies))
            .loss
        )

    with pytest.raises(
        ShapeError,
        match=rf"({what}) is to be the same on the ranks .*, but its numbers differ",
    ):
        run_threads(schedule.ranks, work)


# ---------------------------------------------------------------- losses
def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def per_row(logits: Tensor, labels: Tensor) -> Tensor:
    return token_loss(logits, labels) / len(labels)


def shifted_inside(logits: Tensor, labels: Tensor) -> Tensor:
    return mean_loss(logits[:, :-1], labels[:, 1:])


def flat_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().mean()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "sliced", "recorded"])
def test_a_mean_that_is_said_to_be_one_gives_the_mean_over_all_labels(name):
    schedule = make("zb-h1" if name == "zb-h1" else "1f1b", ranks=2, microbatches=4)
    if name == "sliced":
        schedule = slice_tokens(schedule, (0, 1, 6))  # some slices have no label
    given = batch(rows=6)
    given.labels[1][:] = -100
    given = batch_of(given.inputs, given.labels)
    stages = stages_of(2)
    loss, gradients = whole(stages, given)
    tape = {"tape": Again()} if name == "recorded" else {}
    if name == "recorded":
        schedule = make("1f1b", ranks=1, microbatches=4)
        stages = [Own(*stages[0], *stages[1])]
    assert run(
        schedule, stages, given, loss=mean_loss, reduction="mean", **tape
    ) == pytest.approx([loss], abs=1e-12)
    assert_equal_gradients(stages, gradients)


def mean_over_all(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
    ).mean()


def mean_with_padding(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean that knows no label that does not count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0))


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def counted_labels(ignored: int):
    """A batch of which the first labels of each row do not count, or of which all do."""
    given = batch()
    for labels in given.labels:
        labels[labels == -100] = 0
        labels[:, :ignored] = -100
    return batch_of(given.inputs, given.labels)


NOT_A_SUM = r"the loss is a mean over labels, not their sum: .*\n.*reduction='mean'"
NOT_A_MEAN = "reduction='mean', but the loss is not a mean over labels"
BY_ALL = "divides by all labels, also by those that"


@pytest.mark.parametrize(
    ("loss", "reduction", "ignored", "words"),
    [
        *(
            (loss, "sum", 1, NOT_A_SUM)
            for loss in (mean_loss, per_row, shifted_inside, flat_mean)
        ),
        (
            each,
            "sum",
            1,
            r"the loss on stage 1 returned a float64 tensor of shape \(12,",
        ),
        (token_loss, "mean", 1, NOT_A_MEAN),
        (token_loss, "none", 1, "reduction must be 'sum' or 'mean', not 'none'"),
        (mean_over_all, "mean", 1, BY_ALL),
        (mean_over_all, "mean", 0, BY_ALL),  # if the labels of the first step all count
        (mean_with_padding, "mean", 1, "counts those that do not count"),
    ],
)
def test_a_loss_that_is_not_what_it_is_said_to_be_is_refused(
    loss, reduction, ignored, words
):
    given, schedule = counted_labels(ignored), make("1f1b", ranks=2, microbatches=4)
    with pytest.raises(ShapeError, match=words):
        run(schedule, stages_of(2), given, loss=loss, reduction=reduction)


def test_a_mean_without_ignored_labels_is_taken():
    given, stages = counted_labels(0), stages_of(2)
    expected, gradients = whole(stages, given)
    found = run(
        make("1f1b", ranks=2, microbatches=4),
        stages,
        given,
        loss=lambda y, labels: F.cross_entropy(
            y.flatten(0, 1), labels.flatten(), ignore_index=-1
        ),
        reduction="mean",
    )
    assert found == pytest.approx([expected], abs=1e-12)
    assert_equal_gradients(stages, gradients)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_target_of_minus_100_counts_in_a_regression(reduction):
    """Only whole numbers can be labels that do not count."""
    torch.manual_seed(0)
    stages = [nn.Linear(3, 3).double(), nn.Linear(3, 2).double()]
    inputs = [torch.randn(2, 3, dtype=torch.float64) for _ in range(4)]
    labels = [torch.randn(2, 2, dtype=torch.float64) for _ in range(4)]
    labels[1][0, 1] = -100.0
    labels[2][:] = -100.0
    loss = F.mse_loss(stages[1](stages[0](torch.cat(inputs))), torch.cat(labels))
    loss.backward()
    gradients = [one.grad for stage in stages for one in stage.parameters()]
    for stage in stages:
        stage.zero_grad()
    found = run(
        make("1f1b", ranks=2, microbatches=4),
        stages,
        batch_of(inputs, labels),
        loss=lambda y, labels: F.mse_loss(y, labels, reduction=reduction),
        reduction=reduction,
    )
    assert found == pytest.approx([loss.item()], rel=1e-12)
    for one, expected in zip(
        [one for stage in stages for one in stage.parameters()], gradients, strict=True
    ):
        torch.testing.assert_close(one.grad, expected, rtol=1e-10, atol=1e-10)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1
    )


@pytest.mark.parametrize(
    "loss", [smoothed, lambda y, _: y.sum(), lambda y, _: (y - 3).square().sum()]
)
def test_sums_of_any_kind_are_taken(loss):
    stages = stages_of(2)
    expected, gradients = whole(stages, loss=loss)
    assert run(
        make("1f1b", ranks=2, microbatches=4), stages, loss=loss
    ) == pytest.approx([expected], abs=1e-12)
    assert_equal_gradients(stages, gradients)


# ---------------------------------------------------------------- what stages return
class Returns(nn.Module):
    def __init__(self, stage: nn.Module, change) -> None:
        super().__init__()
        self.stage, self.change = stage, change

    def forward(self, x: Tensor) -> object:
        return self.change(self.stage(x))


def later(change):
    """A change that does not show when a stage is tried, on meta tensors."""
    return lambda y: y if y.is_meta else change(y)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda y: (y, None),
            r"stage 0 \(Returns\) does not fit: it returned a tuple of 2 \(Tensor, NoneType\), but",
        ),
        (
            later(lambda y: (y, y)),
            r"stage 0 \(Returns\) returned a tuple of 2 .* in 0F0, but",
        ),
        (
            later(lambda y: y[..., :5]),
            r"stage 0 returned a float64 tensor of shape \(2, 6, 5\) in 0F0, but rank 1 expects the "
            r"shape \(2, 6, 8\)",
        ),
        (
            later(lambda y: y.long()),
            "stage 0 returned a int64 tensor .* but rank 1 expects float64",
        ),
    ],
)
def test_what_a_stage_returns_is_checked(change, words):
    first, second = stages_of(2)
    with pytest.raises(ShapeError, match=words):
        run(make("1f1b", ranks=2, microbatches=4), [Returns(first, change), second])


def test_a_last_stage_that_returns_no_tensors_is_named():
    first, second = stages_of(2)
    with pytest.raises(
        ShapeError,
        match=r"stage 1 \(Returns\) returned a str .*must return tensors, for the loss",
    ):
        run(
            make("1f1b", ranks=2, microbatches=4),
            [first, Returns(second, lambda y: "y")],
        )


def test_labels_that_the_loss_cannot_take_are_named():
    x = torch.zeros(4, 6, dtype=torch.long)
    given = cut_batch(x, x[:, :5], 4)
    with pytest.raises(
        ShapeError, match=r"the loss on stage 1 cannot compare .* shape \(1, 5\)"
    ):
        run(make("1f1b", ranks=2, microbatches=4), stages_of(2), given)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ({}, "puts stage 0 on rank 0, but the stages given to the Executor are: none"),
        (
            {1: nn.Identity()},
            "has no stage 1, but the stages given to the Executor are: 1",
        ),
        ({0: nn.Identity(), 5: nn.Identity()}, "has no stage 5"),
        ({0: "layer"}, "stage 0 is a str, but a stage must be an nn.Module"),
    ],
)
def test_a_missing_stage_is_named(stages, words):
    with pytest.raises(ShapeError, match=words):
        run_threads(
            1,
            lambda c: Executor(
                lower(make("1f1b", ranks=1, microbatches=1)),
                stages,
                c,
                token_loss,
            ),
        )


def test_a_schedule_for_other_ranks_is_refused():
    program = lower(make("1f1b", ranks=2, microbatches=2))
    with pytest.raises(
        PenstockError, match="the schedule is for 2 ranks, but there are 1"
    ):
        run_threads(
            1,
            lambda comm: Executor(program, {0: nn.Identity()}, comm, token_loss),
        )
