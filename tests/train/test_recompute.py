"""MLPs and attention that are recomputed train as they do otherwise, and keep less in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.formats.config_toml import apply_changes, load_config
from penstock.measure.probe import Probe, footprint
from penstock.models.layer import Dropout, current_place, dropping, place_at, recomputed
from penstock.train.before.capacity import load_of, needs_of
from penstock.train.before.profile import ProfileRequest, subjects_of
from penstock.train.weights import sizes_of
from trainings import SMALL, VOCAB, apart, job_of, losses, train

pytestmark = pytest.mark.numerics

SHORT = ("run.steps=3", "optimizer.warmup_steps=0")


@pytest.mark.parametrize(
    ("name", "changes", "shape"),
    [
        ("zb-h1", (), {}),
        ("seq1f1b", ("model.dropout=0.2", "data.document_mask=true"), {"slices": 2}),
        ("hanayo", ("model.family=gpt", "model.tie_embeddings=true"), {"waves": 1}),
    ],
    ids=["split", "sliced", "gpt"],
)
def test_what_is_recomputed_inside_layers_does_not_change_the_curve(
    name, changes, shape, tmp_path
):
    plain = losses(train(job_of(tmp_path / "a", name, *SHORT, *changes, **shape)))
    again = (
        *SHORT,
        *changes,
        "run.recompute=mlp",
        "run.recompute=attention",
    )
    assert apart(train(job_of(tmp_path / "b", name, *again, **shape)), plain) < 1e-6


def test_dropout_inside_a_recomputed_block_drops_the_same_numbers_again():
    """Although another micro-batch went forward in between. The dropout of LoRA's adapters is inside such blocks."""
    dropout = Dropout("here", 0.5)
    x = torch.randn(2, 3, 4, requires_grad=True)

    def gradient(wanted: bool) -> Tensor:
        with dropping(seed=1, step=2):
            place_at(row=4, token=3)
            y = recomputed(lambda x: dropout(x).square(), x, wanted)
            place_at(row=0, token=0)
            (found,) = torch.autograd.grad(y.sum(), x)
            assert current_place() == replace(current_place(), row=0, token=0)
        return found

    assert torch.equal(gradient(True), gradient(False))


@pytest.mark.parametrize("block", ["mlp", "attention"])
def test_what_is_recomputed_is_not_kept(block):
    sizes = sizes_of(SMALL.model, VOCAB, SMALL.data.seq_len)
    request = ProfileRequest(sizes, 8, rows=2)
    kept = footprint(Probe(subjects_of(request).layer)).held
    less = footprint(Probe(subjects_of(replace(request, inside=(block,))).layer)).held
    # Two layers are measured; what the norm keeps goes, too.
    tokens = 2 * 2 * 8
    inner = 4 * sizes.inner
    if block == "attention":
        inner = 2 * sizes.width + 2 * sizes.kv_heads * sizes.head_width
    inner *= 4 * tokens
    assert inner <= kept - less <= inner + 4 * tokens * 3 * sizes.width
    job = job_of(None, "1f1b")
    plan = replace(job.plan, partition=job.partition)
    changed = apply_changes(job.config, [f"run.recompute={block}"])
    before = needs_of(load_of(job.config, plan, sizes))
    after = needs_of(load_of(changed, plan, sizes))
    for one, other in zip(before, after, strict=True):
        assert other.activations < one.activations
        assert other.weights == one.weights


def test_full_recomputation_goes_with_no_other():
    with pytest.raises(ConfigError, match=r"there is no run\.recompute 'full,mlp'"):
        load_config("", changes=["run.recompute=full,mlp"])
