"""Our count of operations equals torch's, and utilization is shown only where the peak is known."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
import transformers
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from hugging_face import decoder_sizes
from penstock.models import GPT, GPTConfig, Llama, LlamaConfig, token_loss
from penstock.models.decoder import decoder_of
from penstock.models.family import (
    count_parameters,
    flops_per_token,
    peak_flops,
    share_of_flops,
)
from penstock.train.history import Screen, StepRow
from penstock.train.loop import flops_utilization

MODELS = [
    LlamaConfig(96, 32, 3, 4, 2, 48),
    LlamaConfig(512, 64, 2, 8, 8, 176, tied=True),
    GPTConfig(96, 32, 3, 4, 128, positions=24),
]


@pytest.mark.parametrize("sizes", MODELS, ids=["grouped", "tied", "gpt"])
@pytest.mark.parametrize("tokens", [8, 24])
def test_the_count_equals_torchs(sizes, tokens):
    model = GPT(sizes) if isinstance(sizes, GPTConfig) else Llama(sizes)
    words = torch.zeros(2, tokens, dtype=torch.long)
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        token_loss(model(words), words).backward()
    assert flops_per_token(sizes, tokens) == pytest.approx(
        counter.get_total_flops() / (2 * tokens), rel=1e-6
    )


def test_a_token_pays_for_the_experts_that_it_visits_and_for_all_shared_ones():
    width, inner = 32, 16

    def matrices(**experts: int) -> int:
        sizes = decoder_sizes(
            96,
            layers=2,
            width=width,
            kv_heads=4,
            q_lora_rank=8,
            kv_lora_rank=8,
            v_head_dim=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            first_k_dense_replace=1,
            moe_intermediate_size=inner,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            **experts,
        )
        config = transformers.DeepseekV3Config(**sizes)
        return count_parameters(decoder_of(config)).matrices

    few = matrices(n_routed_experts=4, n_shared_experts=1)
    many = matrices(n_routed_experts=8, n_shared_experts=1)
    assert many - few == 4 * width  # the router
    shared = matrices(n_routed_experts=4, n_shared_experts=2)
    assert shared - few == 3 * width * inner


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("Tesla T4", None),
    ],
)
def test_devices_are_known_by_their_names(name, peak):
    assert peak_flops(name) == peak


def test_utilization_is_the_share_of_the_peak_of_all_devices(monkeypatch):
    sizes, gpu = MODELS[0], torch.device("cuda", 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB"
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    share = flops_utilization(sizes, 128, 4, gpu)
    assert share(1e6) == pytest.approx(1e6 * flops_per_token(sizes, 128) / (4 * 312e12))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # four ranks on one GPU
    assert flops_utilization(sizes, 128, 4, gpu)(1e6) == pytest.approx(4 * share(1e6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Tomorrow")
    assert flops_utilization(sizes, 128, 4, gpu)(1e6) is None
    assert flops_utilization(sizes, 128, 4, torch.device("cpu"))(1e6) is None


@pytest.mark.parametrize(("mfu", "words"), [(0.4321, "  MFU 43.2%"), (None, "")])
def test_the_line_of_a_step_shows_utilization_where_it_is_known(mfu, words):
    told = io.StringIO()
    with Screen(2, 1, Console(file=told, width=200)) as screen:
        screen.put(StepRow(1, 2.0, 1.0, 0.1, 0.5, 100, 1000, 0.1, mfu=mfu))
    assert ("MFU" in told.getvalue()) is bool(words)
    assert words in told.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_the_live_line_shows_the_remaining_time_even_if_it_is_narrow(width):
    told = io.StringIO()
    with Screen(
        5000,
        10,
        Console(file=told, width=width, force_terminal=True, color_system=None),
    ) as screen:
        screen.put(StepRow(853, 2.56, 0.969, 1e-3, 0.1, 2048, 324_800_000, 0.1, 0.431))
    assert "-:--:--" in told.getvalue()  # unknown after one step
    assert "step  853/5000  loss 2.5600" in told.getvalue()


def test_a_token_that_skips_layers_needs_as_many_operations_as_a_smaller_model():
    for sizes in (LlamaConfig(256, 64, 8, 4, 2, 96), GPTConfig(256, 64, 8, 4, 96, 128)):
        fewer = flops_per_token(replace(sizes, layers=6), 128)
        share = share_of_flops(sizes, 128, layers=6)
        assert share * flops_per_token(sizes, 128) == pytest.approx(fewer)
