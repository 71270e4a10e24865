"""torchtitan's own command, on the text of this repository.

    torchrun tests/titan_entry.py --module penstock.integrations.torchtitan ...

Ranks that share a GPU meet over NCCL (`penstock lab testbed --backend nccl`). Ranks without a GPU meet over gloo,
with an attention that has a backward on the CPU. The losses go to the file LOSSES_FOLDER/RANK.jsonl in full precision.

torch 2.11 cannot run torchtitan's loss in chunks, so this trains with the whole loss.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import titan_workers as workers  # tells torchtitan its device

# isort: split
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.attention.flex_attention import flex_attention
from torchtitan import train
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import fsdp
from torchtitan.distributed import utils as distributed
from torchtitan.hf_datasets import text_datasets
from torchtitan.models.common import attention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import config_registry

from penstock.runtime.process.mps import be_own_host
from penstock.torch_internals import provide_set_timeout

ROOT = Path(__file__).parents[1]
CONFIGS = ("llama3_debugmodel", "llama3_debugmodel_varlen_attn")
RANK = os.environ["RANK"]


def documents() -> list[dict[str, str]]:
    """The pages of our documentation, one document each."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [{"text": page.read_text(encoding="utf-8")} for page in pages]


def read_documents() -> None:
    """Let every data set that torchtitan knows be our documents."""
    for name, known in text_datasets.DATASETS.items():
        ours = replace(known, loader=lambda path: Dataset.from_list(documents()))
        text_datasets.DATASETS[name] = ours


def tune_nothing() -> None:
    """Let torchtitan compile its flex attention as in its deterministic mode, without trying many kernels."""
    flex = attention.FlexAttention
    flex.inductor_configs["max_autotune"] = False
    flex.inductor_configs["coordinate_descent_tuning"] = False
    flex._compiled_flex_attn = torch.compile(
        flex_attention, options=flex.inductor_configs
    )


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that has one token for every byte."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {sign: number for number, sign in enumerate(alphabet)}
    words |= {"<s>": len(words), "</s>": len(words) + 1}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(folder / "tokenizer.json"))
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))


def change_configs() -> None:
    """Give torchtitan's configs the whole loss and, without a GPU, another attention."""
    for name in CONFIGS:
        make = getattr(config_registry, name)
        setattr(config_registry, name, lambda make=make: _changed(make()))


def _changed(config: Any) -> Any:
    words = decoder_vocab_size(config.model_spec)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=words)
    config.training = replace(config.training, disable_cuda_graphs=True)
    if not workers.ON_GPU:
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = (
                attention.ScaledDotProductAttention.Config()
            )
    return config


def record_losses(folder: Path) -> None:
    """Write the loss of each step and each validation to a file of this rank."""
    folder.mkdir(parents=True, exist_ok=True)
    log, log_validation = MetricsProcessor.log, MetricsProcessor.log_validation

    def write(kind: str, step: int, loss: float) -> None:
        with (folder / f"{RANK}.jsonl").open("a") as file:
            file.write(json.dumps([kind, step, float(loss)]) + "\n")

    def both(self: Any, step: int, loss: float, *others: Any, **more: Any) -> None:
        write("train", step, loss)
        log(self, step, loss, *others, **more)

    def validation(self: Any, loss: float, step: int, **more: Any) -> None:
        write("validate", step, loss)
        log_validation(self, loss, step, **more)

    MetricsProcessor.log = both
    MetricsProcessor.log_validation = validation


def be_on_cpu() -> None:
    """Leave out what gloo cannot do."""
    divide = fsdp.disable_fsdp_gradient_division

    def only_sum(model: Any) -> None:
        divide(model)
        for module in model.modules():
            if isinstance(module, workers.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = only_sum
    distributed.set_pg_timeouts = lambda **options: None


def main() -> None:
    losses = Path(os.environ["LOSSES_FOLDER"])
    if workers.ON_GPU:
        be_own_host(int(RANK))
    else:
        be_on_cpu()
    if "penstock.integrations.torchtitan" not in sys.argv:
        provide_set_timeout()  # as our trainer does
    # FA3 is a package of its own, which torchtitan takes for granted on a Hopper GPU.
    workers.utils.get_cuda_flash_attention_impl = lambda: None
    read_documents()
    tune_nothing()
    change_configs()
    record_losses(losses)
    assets = losses / f"assets-{RANK}"
    write_tokenizer(assets)
    sys.argv += ["--hf_assets_path", str(assets)]
    train.main()


if __name__ == "__main__":
    main()
