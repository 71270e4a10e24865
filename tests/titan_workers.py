"""The processes of tests/integrations: torchtitan's own pipeline and ours on the same parts, weights and data.

torchtitan takes an accelerator for granted, so these processes tell it that its device is the CPU. In a testbed
(`penstock lab testbed --workers 4 --backend nccl -- pytest tests/integrations`) they all share the GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import ScheduleGPipe
from torchtitan.tools import utils

import titan_names  # noqa: F401  # before torchtitan
from penstock.runtime import ProcessComm
from penstock.runtime.comm.comm import NCCL
from penstock.runtime.process.mps import shared_gpu_backend


def answering(answer: Any) -> Any:
    return lambda *given, **named: answer


# What torchtitan asks the module of its device for, on a CPU.
CPU_MODULE = SimpleNamespace(
    set_device=answering(None),
    device_count=answering(1),
    current_device=answering(0),
    get_device_name=answering("cpu"),
    get_device_properties=answering(SimpleNamespace(total_memory=1 << 30, name="cpu")),
    memory_stats=answering({}),
    reset_peak_memory_stats=answering(None),
    empty_cache=answering(None),
    synchronize=answering(None),
)
ON_GPU = torch.cuda.is_available() and shared_gpu_backend() == NCCL
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BACKEND = NCCL if ON_GPU else "gloo"
# With torch 2.11, torchtitan's loss in chunks crashes in its own pipeline, too.
CHUNKS = (
    4 if "loss_kwargs" in signature(ScheduleGPipe._step_microbatches).parameters else 0
)
if not ON_GPU:
    # Told before any other module of torchtitan asks which device it has.
    utils.device_type = "cpu"
    utils.device_module = CPU_MODULE
warnings.filterwarnings("ignore", message="DTensor random operators")

# ruff: noqa: E402
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as distributed
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from penstock.integrations.torchtitan.model_method import pipeline_with
from penstock.integrations.torchtitan.options import PenstockOptions
from penstock.integrations.torchtitan.trainer import use_plan, with_penstock

LAYERS, WIDTH, WORDS, TOKENS = 6, 16, 32, 16


@dataclass(frozen=True)
class Case:
    """A pipeline of ours, and what both trainers are told."""

    schedule: str
    shape: dict[str, Any] = field(default_factory=dict)  # of --penstock
    batch: int = 4  # rows of a step
    rows: int = 1  # of a micro-batch
    shard: int = 1
    chunks: int = 0  # of the loss; 0: in one piece
    precision: str = "float32"
    recompute: str = ""  # "full" or "selective"
    documents: bool = False  # whether attention keeps packed documents apart
    accumulate: int = 1


def documents_attention() -> Any:
    """torchtitan's attention with the documents of a dense mask: flex attention has no backward on a CPU."""

    class DenseAttention(FlexAttention):
        @dataclass(kw_only=True, slots=True)
        class Config(FlexAttention.Config):
            pass

        def forward(
            self,
            q_BLNH,
            k_BLNH,
            v_BLNH,
            *,
            attention_masks,
            scale=None,
            enable_gqa=False,
        ):
            mixed = torch.nn.functional.scaled_dot_product_attention(
                *(one.transpose(1, 2) for one in (q_BLNH, k_BLNH, v_BLNH)),
                attn_mask=attention_masks,
                scale=scale,
                enable_gqa=enable_gqa,
            )
            return mixed.transpose(1, 2)

    return DenseAttention.Config()


def document_mask(positions: Tensor) -> Tensor:
    """Which keys each token sees: (rows, 1, tokens, tokens)."""
    place = torch.arange(positions.shape[1], device=positions.device)
    start = (place - positions)[:, :, None]
    return ((place <= place[:, None]) & (place >= start))[:, None]


def model_config(documents: bool = False) -> Any:
    """A small Llama of torchtitan's own classes."""
    rope = ComplexRoPE.Config(dim=4, max_seq_len=TOKENS, theta=500000, scaling="llama")
    layers = llama3._build_llama3_layers(
        n_layers=LAYERS,
        dim=WIDTH,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=24,
        attn_backend="varlen",
        rope=rope,
    )
    attention = ScaledDotProductAttention.Config()
    if documents:
        attention = documents_attention()
    for layer in layers:
        layer.attention.inner_attention = attention
    return llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=WORDS,
        tok_embeddings=Embedding.Config(
            num_embeddings=WORDS,
            embedding_dim=WIDTH,
            param_init=llama3._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=WIDTH,
            out_features=WORDS,
            param_init=llama3._output_linear_init(WIDTH),
        ),
        layers=layers,
    )


def trainer_config(case: Case, ranks: int) -> Any:
    """The config of torchtitan's trainer for a case, with Penstock's section."""
    loss = CrossEntropyLoss.Config(global_vocab_size=WORDS)
    if case.chunks:
        loss = ChunkedLossWrapper.Config(num_chunks=case.chunks, loss_fn=loss)
    spec = replace(
        model_registry("debugmodel", attn_backend="varlen"),
        model=model_config(case.documents),
    )
    recompute = {
        "": None,
        "full": FullAC.Config(),
        "selective": SelectiveAC.Config(),
    }[case.recompute]
    config = Trainer.Config(
        model_spec=spec,
        loss=loss,
        training=TrainingConfig(
            local_batch_size=case.batch,
            seq_len=TOKENS,
            mixed_precision_param=case.precision,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=ranks // case.shard,
            pipeline_parallel_microbatch_size=case.rows,
            data_parallel_shard_degree=case.shard,
            # torch 2.13 cannot shard what torchtitan's newest backend prepares.
            spmd_backend="partial_dtensor" if case.shard > 1 else "spmd_types",
        ),
        activation_checkpoint=recompute,
    )
    return with_penstock(config, PenstockOptions(schedule=case.schedule, **case.shape))


@dataclass
class Pipelined:
    """What a `pipelining_fn` has returned."""

    schedule: Any
    parts: list[nn.Module]
    has_first: bool
    has_last: bool
    loss: Any


def build(config: Any, dims: Any, pipelining_fn: Any) -> Pipelined:
    """Call a `pipelining_fn` and initialize the parts, as torchtitan's trainer does."""
    model_config = config.model_spec.model
    with torch.device("meta"):
        model = model_config.build()
    loss = config.loss.build(compile_config=config.compile)
    built = pipelining_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
        device=DEVICE,
        model_config=model_config,
        parallelize_fn=config.model_spec.parallelize_fn,
        loss_fn=loss,
    )
    pipelined = Pipelined(*built, loss)
    for part in pipelined.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule) and not ON_GPU:
                # gloo can only sum.
                module.set_force_sum_reduction_for_comms(True)
        part.to_empty(device=DEVICE)
        with torch.no_grad():
            part.init_weights(buffer_device=None)
        set_weights(part)
        part.train()
    if isinstance(loss, ChunkedLossWrapper) and pipelined.has_last:
        loss.set_lm_head(pipelined.parts[-1].lm_head)
        pipelined.parts[-1]._skip_lm_head = True
    return pipelined


def set_weights(part: nn.Module) -> None:
    """Give every parameter numbers that depend on its name only."""
    for wrapped, parameter in part.named_parameters():
        name = plain_name(wrapped)
        draw = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = torch.randn(parameter.shape, generator=draw) * 0.2
        share = parameter.to_local()
        start = dist_start(parameter)
        with torch.no_grad():
            share.copy_(whole[start : start + len(share)])


def plain_name(name: str) -> str:
    """The name of a parameter without the wrappers of activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def dist_start(parameter: Any) -> int:
    """The first row of a sharded parameter that this process has."""
    mesh = parameter.device_mesh
    rows = -(-parameter.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * rows, parameter.shape[0])


def data_of(case: Case, copy: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions of a step; copies of the pipeline have different ones."""
    draw = torch.Generator().manual_seed(100 * step + copy)
    tokens = torch.randint(0, WORDS, (case.batch, TOKENS), generator=draw)
    labels = torch.randint(0, WORDS, (case.batch, TOKENS), generator=draw)
    labels[:, :2] = -100
    positions = torch.arange(TOKENS).repeat(case.batch, 1)
    if case.documents:
        positions = torch.where(positions < 5, positions, positions - 5)
    return tokens.to(DEVICE), labels.to(DEVICE), positions.to(DEVICE)


def calls(case: Case, built: Pipelined, data: Any, valid: int) -> dict[str, Any]:
    """The arguments of `schedule.step`, as torchtitan's trainer passes them."""
    tokens, labels, positions = (one.split(case.rows) for one in data)
    keywords = []
    for one in positions:
        keyword = {"positions": one}
        if case.documents:
            keyword["attention_masks"] = document_mask(one)
        keywords.append(keyword)
    return {
        "arg_mbs": [(one,) for one in tokens] if built.has_first else None,
        "kwarg_mbs": keywords,
        "target_mbs": list(labels) if built.has_last else None,
        "losses": [] if built.has_last else None,
        "loss_kwargs": {"global_valid_tokens": torch.tensor(valid, device=DEVICE)},
        "return_outputs": False,
    }


def gradients(parts: list[nn.Module]) -> dict[str, Tensor]:
    """The gradients of the parameters by their names in the whole model."""
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, name
            found[plain_name(name)] = parameter.grad.full_tensor().cpu()
    return found


def run(case: Case, config: Any, dims: Any, pipelining_fn: Any) -> Any:
    """Build a pipeline and run its steps; return its losses and gradients."""
    built = build(config, dims, pipelining_fn)
    copy = dist.get_rank() % case.shard
    all_losses = []
    with get_spmd_context(parallel_dims=dims)():
        for number in range(case.accumulate):
            data = data_of(case, copy, number)
            valid = case.batch * case.shard * (TOKENS - 2) * case.accumulate
            arguments = calls(case, built, data, valid)
            built.schedule.step(**arguments)
            if built.has_last:
                all_losses += [float(one.detach()) for one in arguments["losses"]]
    return built, all_losses, gradients(built.parts)


def compare(comm: ProcessComm, cases: list[Case]) -> list[tuple[Any, ...]]:
    """Run each case in both pipelines; return losses and gradients of all ranks, ours and theirs."""
    results = []
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's trainer does
    for case in cases:
        config = trainer_config(case, comm.ranks)
        dims = ParallelDims.from_config(config.parallelism, comm.ranks)
        dims.build_mesh()
        set_spmd_backend(config.parallelism.spmd_backend)
        config.model_spec.model.update_from_config(config=config)
        ours = use_plan(config)
        built, losses, grads = run(case, ours, dims, ours.model_spec.pipelining_fn)
        theirs = replace(config, parallelism=own_order(case, config.parallelism))
        _, peer_losses, peer_grads = run(case, theirs, dims, pipeline_llm)
        evaluated = evaluate(case, built, dims)
        proof = built.schedule.proof
        results.append((losses, grads, peer_losses, peer_grads, evaluated, proof))
    return results


def own_order(case: Case, parallelism: Any) -> Any:
    """torchtitan's parallelism with 1F1B, or GPipe if 1F1B refuses so few micro-batches."""
    few = case.batch // case.rows < parallelism.pipeline_parallel_degree
    return replace(parallelism, pipeline_parallel_schedule="GPipe" if few else "1F1B")


def evaluate(case: Case, built: Pipelined, dims: Any) -> list[float]:
    """The losses of an evaluation, which torchtitan does not divide by the number of labels."""
    arguments = calls(case, built, data_of(case, dist.get_rank() % case.shard, 0), 1)
    del arguments["loss_kwargs"], arguments["return_outputs"]
    with torch.no_grad(), get_spmd_context(parallel_dims=dims)():
        built.schedule.eval(**arguments)
    return [float(one) for one in arguments["losses"] or []]


# ---------------------------------------------------------------- the method of a model, in torchtitan's repository
def packed_model() -> Any:
    """A stand-in for a model of torchtitan's repository: packed tokens, and the method `parallelize`."""

    class PackedLlama(llama3.Llama3Model):
        def forward(self, x: Tensor, positions: Tensor, attention_masks: Any = None):
            return super().forward(x[None], positions=positions[None])[0]

        def parallelize(
            self,
            *,
            parallelism_context: Any,
            training: Any,
            parallelism: Any,
            local_compile_regions: Any,
            ac_config: Any,
            dump_folder: str,
            skip_dp: bool = False,
        ) -> Any:
            assert parallelism_context.pp_enabled
            return self

    return PackedLlama(model_config())


def method_arguments(loss: Any, microbatches: int) -> dict[str, Any]:
    """What the repository's training engine passes to `model.pipeline`, without the context."""
    return {
        "training": SimpleNamespace(
            num_tokens_per_microbatch_per_dp_rank=TOKENS,
            mixed_precision_param="float32",
            enable_cpu_offload=False,
        ),
        "parallelism": SimpleNamespace(
            pipeline_parallel_degree=2,
            num_pp_microbatches=microbatches,
            pipeline_parallel_module_fqns_per_model_part=None,
            pipeline_parallel_schedule_csv="",
            tensor_parallel_degree=1,
            context_parallel_degree=1,
            expert_parallel_degree=1,
        ),
        "ac_config": None,
        "dump_folder": "",
        "device": torch.device("cpu"),
        "model_config": model_config(),
        "loss_fn": loss,
        "local_compile_regions": None,
    }


def call_model_method(
    comm: ProcessComm, schedules: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Losses and gradients of this rank by schedule and name: of the pipeline, and of the model in one piece."""
    config = trainer_config(Case("1f1b"), comm.ranks)
    dims = ParallelDims.from_config(config.parallelism, comm.ranks)
    dims.build_mesh()
    tokens, labels, positions = (one.cpu() for one in data_of(Case("1f1b"), 0, 0))
    valid = {"global_valid_tokens": torch.tensor(len(tokens) * (TOKENS - 2))}
    rowwise = config.loss.build(compile_config=config.compile)

    def loss(logits: Tensor, labels: Tensor, **keywords: Any) -> Any:
        return rowwise(logits[None], labels[None], **keywords)

    found: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name in schedules:
        torch.manual_seed(0)
        whole = packed_model()
        whole.init_weights(buffer_device=None)
        whole.__class__.pipeline = pipeline_with(name)
        context = SimpleNamespace(get_mesh=dims.get_mesh, pp_enabled=True)
        schedule, parts, has_first, has_last = whole.pipeline(
            **method_arguments(loss, len(tokens)), parallelism_context=context
        )
        losses: list[Tensor] | None = [] if has_last else None
        schedule.step(
            arg_mbs=[(one,) for one in tokens] if has_first else None,
            kwarg_mbs=[{"positions": one} for one in positions],
            target_mbs=list(labels) if has_last else None,
            losses=losses,
            loss_kwargs=valid,
            return_outputs=False,
            finalize_gradients=True,
        )
        plain = [
            loss(whole(*one), y, **valid)[0]
            for *one, y in zip(tokens, positions, labels, strict=True)
        ]
        torch.stack(plain).sum().backward()
        for part in parts:
            for key, parameter in part.named_parameters():
                assert parameter.grad is not None
                found[f"{name} {key}"] = parameter.grad
                theirs = whole.get_parameter(key).grad
                assert theirs is not None
                expected[f"{name} {key}"] = theirs
        if losses is not None:
            found[name] = torch.stack(losses)
            expected[name] = torch.stack(plain).detach()
    return found, expected


# ---------------------------------------------------------------- torchtitan's whole trainer
def train_config(
    case: Case, ranks: int, folder: Path, steps: int, seed: str | None
) -> Any:
    """A config that trains from a seed checkpoint, with checkpoints, validation and random text."""

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, *, tokenizer_path: str) -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            return []

        def decode(self, *args: Any, **kwargs: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return WORDS

    class RandomText(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True

        def __init__(self, config: Any, *, local_batch_size: int, **others: Any):
            self.rows = local_batch_size
            self.row = 0

        def __iter__(self) -> Any:
            while True:
                rows = range(self.row, self.row + self.rows)
                self.row += self.rows
                draws = [torch.Generator().manual_seed(row) for row in rows]
                text = [
                    torch.randint(0, WORDS, (TOKENS + 1,), generator=d) for d in draws
                ]
                text = torch.stack(text)
                positions = torch.arange(TOKENS).repeat(self.rows, 1)
                yield {"input": text[:, :-1], "positions": positions}, text[:, 1:]

        def state_dict(self) -> dict[str, int]:
            return {"row": self.row}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.row = state["row"]

    config = trainer_config(case, ranks)
    return replace(
        config,
        dump_folder=str(folder),
        training=replace(config.training, steps=steps),
        tokenizer=Tokenizer.Config(),
        dataloader=RandomText.Config(),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        metrics=MetricsProcessor.Config(log_freq=1),
        validator=Validator.Config(
            enable=True, freq=2, steps=1, dataloader=RandomText.Config()
        ),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=2,
            initial_load_path=seed,
            last_save_model_only=False,
        ),
    )


def make_seed(case: Case, folder: Path) -> None:
    """Save the weights that all runs begin with, as torchtitan recommends for comparisons."""
    config = train_config(case, 1, folder, 1, None)
    checkpoint = replace(config.checkpoint, create_seed_checkpoint=True)
    trainer = replace(config, checkpoint=checkpoint).build()
    trainer.checkpointer.save(curr_step=0, last_step=True)
    trainer.close()


def train(
    comm: ProcessComm, case: Case, folder: Path, steps: Sequence[int]
) -> list[tuple[str, int, float]]:
    """Run torchtitan's trainer up to each number of steps; return what it logs on this rank.

    One rank trains without a pipeline, after it has saved the weights to begin with.
    """
    if not ON_GPU:  # where gloo knows no barrier of devices
        distributed.set_pg_timeouts = lambda **options: None
    logged = []

    def log(self: Any, step: int, loss: float, *others: Any, **more: Any) -> None:
        logged.append(("train", step, float(loss)))

    def log_validation(self: Any, loss: float, step: int, **more: Any) -> None:
        logged.append(("validate", step, float(loss)))

    MetricsProcessor.log = log
    MetricsProcessor.log_validation = log_validation
    seed = folder / "seed"
    if comm.ranks == 1:
        make_seed(case, seed)
    begin = str(seed / "checkpoint" / "step-0")
    own = folder / f"{comm.ranks} ranks"
    for last in steps:
        trainer = train_config(case, comm.ranks, own, last, begin).build()
        trainer.train()
        trainer.close()
    return logged
