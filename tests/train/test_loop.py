"""Training is the same whatever the schedule: weights, data, norms and losses are those of one process."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock import Plan, make
from penstock.config import ModelConfig
from penstock.errors import ConfigError, RunError, ShapeError
from penstock.models import even_partition, shift_labels, token_loss, valid_tokens
from penstock.runtime import run_threads
from penstock.train.after.evaluate import perplexity
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.history import read_timeline
from penstock.train.job import Verdict
from penstock.train.loop import Trainer
from penstock.train.optimizer import rate_at
from penstock.train.weights import draw_parameters, hold, hold_whole, sizes_of
from trainings import (
    END,
    LENGTH,
    SMALL,
    VOCAB,
    apart,
    corpus,
    job_of,
    outcomes,
    train,
)

pytestmark = pytest.mark.numerics  # run once more with other kernels by .ci/run

# One of each kind of placement and order; tests/runtime has them all.
NAMES = ("gpipe", "hanayo", "zb-v", "interleaved-zb", "chimera", "terapipe", "seq1f1b")
GPT = ("model.family=gpt", "model.tie_embeddings=true")


def whole_rows(model, inputs: Tensor, labels: Tensor) -> Tensor:
    return token_loss(model(inputs), labels)


def document_by_document(model, inputs: Tensor, labels: Tensor) -> Tensor:
    """Each document alone, without a mask, from position 0 on."""
    total = torch.zeros(())
    for x, y in zip(inputs, labels, strict=True):
        cuts = [0, *((x[:-1] == END).nonzero().flatten() + 1).tolist(), len(x)]
        for begin, end in pairwise(cuts):
            total = total + token_loss(model(x[None, begin:end]), y[None, begin:end])
    return total


def by_hand(
    config=SMALL, steps: int = SMALL.run.steps, loss_of=whole_rows
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The oracle: torch's own optimizer, clipping and schedule on the model in one piece, batch by batch."""
    sizes = sizes_of(config.model, VOCAB, config.data.seq_len)
    holding = hold_whole(sizes)
    draw_parameters(holding, config.run.seed)
    model, settings = holding.stages[0], config.optimizer
    named = dict(holding.parameters)
    groups = [
        {
            "params": [p for p in named.values() if p.dim() > 1],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        eps=1e-8,
    )
    scale = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: rate_at(step, config.run.steps, settings) / settings.lr,
    )
    loader = Loader(
        corpus(config), BatchShape(config.data.global_batch, 1), config.run.seed
    )
    found, norms = [], []
    for _ in range(steps):
        batch = loader.step()[0]
        optimizer.zero_grad()
        loss = loss_of(model, batch.inputs[0], batch.labels[0]) / valid_tokens(
            batch.labels[0]
        )
        loss.backward()
        norms.append(
            float(
                torch.nn.utils.clip_grad_norm_(list(named.values()), settings.clip_norm)
            )
        )
        optimizer.step()
        scale.step()
        found.append(float(loss.detach()))
    return found, norms, {name: p.detach() for name, p in named.items()}


@pytest.fixture(scope="module")
def oracle():
    return by_hand()


# ---------------------------------------------------------------- one curve for all
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_the_loss_curve_of_one_process(name, oracle, tmp_path):
    parts = make(name, ranks=2, microbatches=4).parts
    rows = train(job_of(tmp_path, name, f"model.layers={max(parts, 4)}"))
    expected = (
        oracle
        if parts <= 4
        else by_hand(replace(SMALL, model=replace(SMALL.model, layers=parts)))
    )
    assert apart(rows, expected[0]) < 1e-5
    assert [row.norm for row in rows] == pytest.approx(expected[1], rel=1e-3)
    assert rows[-1].loss < rows[0].loss - 0.5


def test_a_schedule_of_ones_own_has_the_loss_curve_of_one_process(oracle, tmp_path):
    file = Path(__file__).resolve().parents[2] / "examples" / "own_schedule.py"
    job = job_of(tmp_path, "1f1b")
    own = replace(job, plan=Plan(runpy.run_path(str(file))["eager"](2, 4), "own"))
    assert own.plan.schedule != job.plan.schedule
    assert apart(train(own), oracle[0]) < 1e-5


@pytest.mark.parametrize(
    ("name", "changes", "shape"),
    [
        ("1f1b", (), {"copies": 2, "microbatches": 2}),
        ("hanayo", (), {"copies": 2, "microbatches": 2, "waves": 1}),
        ("1f1b", (), {"ranks": 4}),
        ("1f1b", (), {"ranks": 1}),
        ("zb-h1", (), {"ranks": 4, "microbatches": 8}),
        ("1f1b", (), {"microbatches": 1}),
        ("1f1b", ("run.accumulate=4",), {"microbatches": 2}),
        ("1f1b", ("run.recompute=full",), {}),
    ],
)
def test_how_a_step_is_divided_does_not_change_the_curve(
    name, changes, shape, oracle, tmp_path
):
    assert apart(train(job_of(tmp_path, name, *changes, **shape)), oracle[0]) < 1e-5


@pytest.mark.parametrize("name", ["1f1b", "hanayo"])
def test_tied_weights_and_a_gpt_have_the_curve_of_one_process(name, tmp_path):
    job = job_of(tmp_path, name, *GPT)
    expected = by_hand(job.config)
    rows = train(job)
    assert apart(rows, expected[0]) < 1e-5
    assert [row.norm for row in rows] == pytest.approx(expected[1], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "shape"),
    [
        ("hanayo", ("model.layers=8",), {"waves": 2}),
        ("seq1f1b", (), {"slices": 4}),
        ("1f1b", GPT, {"ranks": 4}),
        ("1f1b", ("run.accumulate=2",), {"microbatches": 2, "copies": 2}),
    ],
    ids=["hanayo", "seq1f1b", "gpt", "copies"],
)
def test_separate_documents_train_as_if_each_were_alone(name, changes, shape, tmp_path):
    job = job_of(
        tmp_path,
        name,
        *changes,
        "data.document_mask=true",
        "run.steps=12",
        "run.eval_every=12",
        **shape,
    )
    crossed = by_hand(
        replace(job.config, data=replace(job.config.data, document_mask=False)), 12
    )
    rows = train(job)
    assert apart(rows, by_hand(job.config, 12, document_by_document)[0]) < 1e-5
    assert apart(rows, crossed[0]) > 1e-2
    assert rows[-1].evaluation is not None


def test_the_perplexity_of_separate_documents_is_that_of_each_alone():
    config = replace(SMALL, data=replace(SMALL.data, document_mask=True))
    holding = hold_whole(sizes_of(config.model, VOCAB, LENGTH))
    draw_parameters(holding, 0)
    model = holding.stages[0]
    batches = Loader(corpus(config), BatchShape(4, 2), 0).evaluation(1)
    with torch.no_grad():
        pairs = zip(batches[0].inputs, batches[0].labels, strict=True)
        alone = sum(document_by_document(model, *pair) for pair in pairs)
    assert perplexity(model, batches) == pytest.approx(
        math.exp(alone / batches[0].valid), rel=1e-5
    )


def test_the_norm_of_all_gradients_is_the_same_bits_for_every_split(tmp_path):
    norms = {
        name: train(job_of(tmp_path / name, name, "run.steps=3", **shape))[0].norm
        for name, shape in {
            "1f1b": {"ranks": 4},
            "hanayo": {"ranks": 2},
            "gpipe": {"ranks": 1},
        }.items()
    }
    assert len(set(norms.values())) == 1, norms


def test_bfloat16_learns_too(oracle, tmp_path):
    # Some virtual machines claim AMX and do not have it.
    enabled, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        rows = train(job_of(tmp_path, "1f1b", "run.precision=bfloat16"))
    finally:
        torch.backends.mkldnn.set_flags(enabled)
    assert 1e-5 < apart(rows, oracle[0]) < 0.3
    assert rows[-1].loss < rows[0].loss - 0.5


def test_another_seed_is_another_curve(oracle, tmp_path):
    assert apart(train(job_of(tmp_path, "1f1b", "run.seed=1")), oracle[0]) > 0.01


# ---------------------------------------------------------------- weights
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1f1b", {"ranks": 4}),
        ("hanayo", {"waves": 2}),
        ("chimera", {}),
        ("1f1b", {"copies": 2}),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_do_not_depend_on_who_holds_them(name, shape, tied):
    schedule = make(name, **{"ranks": 2, "microbatches": 2, **shape})
    sizes = sizes_of(replace(SMALL.model, layers=8, tie_embeddings=tied), VOCAB, 8)
    everything = hold_whole(sizes)
    draw_parameters(everything, 3)
    owned: list[str] = []
    for rank in range(schedule.ranks):
        mine = hold(sizes, schedule, even_partition(8, schedule.parts), rank)
        draw_parameters(mine, 3)
        assert mine.names == tuple(everything.parameters)
        for key, parameter in mine.parameters.items():
            assert torch.equal(parameter, everything.parameters[key]), key
        in_stages = {id(p) for part in mine.stages.values() for p in part.parameters()}
        assert in_stages == {id(p) for p in mine.parameters.values()}
        owned += mine.owned
    assert sorted(owned) == sorted(everything.parameters)  # each once


def test_a_rank_has_memory_for_its_own_parts_alone():
    schedule, sizes = (
        make("1f1b", ranks=4, microbatches=1),
        sizes_of(replace(SMALL.model, layers=8), VOCAB, 8),
    )
    held = [
        set(hold(sizes, schedule, (2, 2, 2, 2), rank).parameters) for rank in range(4)
    ]
    assert (
        sum(map(len, held))
        == len(set().union(*held))
        == len(hold_whole(sizes).parameters)
    )


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"model.vocab_size = 10 is less than the vocabulary size of the tokenizer, 31",
    ):
        sizes_of(ModelConfig(vocab_size=10), 31, 8)
    with pytest.raises(ShapeError, match="2 parts, but the schedule has 4"):
        hold(
            sizes_of(SMALL.model, VOCAB, 8),
            make("1f1b", ranks=4, microbatches=1),
            (2, 2),
            0,
        )


# ---------------------------------------------------------------- evaluation, timing, stopping
def test_evaluation_is_the_mean_loss_of_the_held_out_sequences_and_disturbs_nothing(
    oracle, tmp_path
):
    job = job_of(tmp_path, "hanayo", "run.eval_every=5")
    rows = train(job)
    assert apart(rows, oracle[0]) < 1e-5
    assert [row.step for row in rows if row.evaluation is not None] == [5, 10, 12]
    held, model = corpus(), oracle[2]
    holding = hold_whole(job.sizes)
    for name, parameter in holding.parameters.items():
        parameter.data.copy_(model[name])
    total = 0.0
    for turn in range(2):
        numbers = [held.trained + (turn * 8 + row) % held.held_out for row in range(8)]
        rows_ = torch.stack(
            [torch.tensor(held.sequence(n).astype("int64")) for n in numbers]
        )
        with torch.no_grad():
            total += (
                float(
                    token_loss(
                        holding.stages[0](rows_[:, :-1]), shift_labels(rows_)[:, :-1]
                    )
                )
                / 64
            )
    assert rows[-1].evaluation == pytest.approx(total / 2, abs=1e-5)


def test_a_timed_step_leaves_its_timeline_and_bubble(tmp_path):
    job = job_of(tmp_path, "hanayo", "run.steps=5")
    rows = train(job)
    assert [row.step for row in rows if row.bubble is not None] == [3, 5]
    step, timeline = read_timeline(tmp_path, job.plan.schedule)
    assert step == 5
    assert timeline.bubble == pytest.approx(rows[4].bubble)
    assert timeline.makespan <= rows[4].seconds


@pytest.mark.parametrize(("steps", "which"), [(2, [2]), (4, [3, 4])])
def test_a_short_run_is_timed_too(tmp_path, steps, which):
    rows = train(job_of(tmp_path, "1f1b", f"run.steps={steps}"))
    assert [row.step for row in rows if row.bubble is not None] == which


def test_anybody_may_ask_to_stop_and_all_stop_after_the_same_step(tmp_path):
    asked = {1: 0}

    def stop(rank):
        def ask() -> bool:
            asked[rank] = asked.get(rank, 0) + 1
            return rank == 1 and asked[rank] == 7

        return ask

    job = job_of(tmp_path, "1f1b")
    assert set(outcomes(job, stop)) == {Verdict(7, stopped=True, interrupted=True)}
    assert (tmp_path / "checkpoints" / "step-00000007" / "checkpoint.json").is_file()


def test_a_loss_that_is_no_number_ends_the_run_with_the_weights_before_it(tmp_path):
    job = job_of(tmp_path, "1f1b", "run.steps=6")

    def work(comm):
        trainer = Trainer(job, comm)
        update, seen = trainer.update, []

        def spoil(norm):
            rate = update(norm)
            if comm.rank == 0 and trainer.step == 2:
                next(iter(trainer.holding.parameters.values())).data.fill_(math.nan)
            seen.append(rate)
            return rate

        trainer.update = spoil
        trainer.run()

    with pytest.raises(RunError, match=r"(?s)in step 4 the loss is nan.*--resume"):
        run_threads(2, work)
    saved = tmp_path / "checkpoints" / "step-00000003" / "checkpoint.json"
    assert saved.is_file()
    assert '"seen": 24' in saved.read_text()
