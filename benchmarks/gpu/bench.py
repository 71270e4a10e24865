"""What the benchmarks on one GPU share: the stages of a rank, a step of ours, a step of torch's, and a clock.

Most scripts run in a testbed, so that the ranks share the GPU side by side:

    penstock lab testbed --workers 8 -- python benchmarks/gpu/compiled.py --part pipeline --out pipeline.json

Without a GPU, `--quick` runs a script on CPU workers with small sizes. That tests the script and measures nothing.
"""

from __future__ import annotations

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from harness import Row, say, write
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from penstock import Schedule, lower
from penstock.cost import Profile
from penstock.measure.links import gather_rows as rows_of_all
from penstock.measure.links import settle
from penstock.models import LlamaConfig, even_partition, token_loss
from penstock.runtime import (
    Batch,
    Comm,
    CudaTape,
    Executor,
    batch_of,
    run_threads,
    spawn,
)
from penstock.runtime.comm.ipc import IpcGroup
from penstock.torch_internals import recording_bytes, schedule_runtime
from penstock.train.before.profile import ProfileRequest, measure_request
from penstock.train.weights import draw_parameters, hold

# One step, until the GPU has done it; the loss where it is known.
Step = Callable[[], float]


@dataclass(frozen=True)
class Size:
    """A Llama, its sequences, and where it is."""

    config: LlamaConfig
    tokens: int
    device: str = "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def with_layers(self, layers: int) -> Size:
        return replace(self, config=replace(self.config, layers=layers))


REAL = Size(
    LlamaConfig(vocab=8192, width=1024, layers=64, heads=16, kv_heads=16, inner=2816),
    1024,
)
DRY = Size(
    LlamaConfig(vocab=97, width=32, layers=8, heads=2, kv_heads=2, inner=48), 32, "cpu"
)


def size_of(given: Namespace, layers: int, tokens: int = 1024) -> Size:
    """The model with so many layers; a tiny one on a CPU if it is to be quick."""
    return DRY if given.quick else replace(REAL.with_layers(layers), tokens=tokens)


def on_ranks(
    given: Namespace, work: Callable[..., Any], *args: Any, threads: bool = True
) -> Any:
    """Run all ranks, and return what the first one found.

    If it is to be quick, there are two on a CPU: threads, or processes where torch's own runtime needs them.
    """
    if given.quick and threads:
        return run_threads(2, lambda comm: work(comm, *args))[0]
    ranks, backend = (2, "gloo") if given.quick else (given.ranks, "penstock_ipc")
    return spawn(ranks, work, *args, patience=400.0, backend=backend)[0]


def measure_cases(
    comm: Comm, given: Namespace, size: Size, cases: Mapping[str, Callable[[], Row]]
) -> list[Row]:
    """A rank: case after case. All rows are kept after each, and none is begun after so many seconds."""
    begin = time.perf_counter()
    if size.device == "cpu":
        torch.set_num_threads(1)
    rows: list[Row] = []
    for label, case in cases.items():
        passed = time.perf_counter() - begin
        if comm.ranks > 1:  # all of them must agree
            passed = most(comm, passed, size)
        if passed > given.seconds:
            note(comm, f"no time left for {label}")
            continue
        rows.append(case())
        free_memory(size.device)
        if comm.rank == 0:
            write(given.out, {"ranks": comm.ranks, "rows": rows})
        note(comm, f"{label} was measured, after {passed:.0f} s")
    return rows


def note(comm: Comm, text: str) -> None:
    """A line from the first rank."""
    if comm.rank == 0:
        say(text)


def free_memory(device: str) -> None:
    """Give back what earlier work has left, which would count as memory of what comes next."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def stages_of(
    schedule: Schedule, comm: Comm, size: Size, partition: Sequence[int] = ()
) -> dict[int, nn.Module]:
    """This rank's stages, with weights that do not depend on the schedule.

    Without a partition, all parts have equally many layers.
    """
    partition = partition or even_partition(size.config.layers, schedule.parts)
    holding = hold(
        size.config, schedule, partition, comm.rank, torch.device(size.device)
    )
    with torch.no_grad():
        if size.device == "cpu":
            draw_parameters(holding, 0)
        for name, parameter in (
            holding.parameters.items() if size.device == "cuda" else ()
        ):
            dice = torch.Generator("cuda").manual_seed(sum(name.encode()))
            parameter.normal_(
                0.0, 0.02, generator=dice
            ) if parameter.dim() > 1 else parameter.fill_(1.0)
    return {number: part.to(size.dtype) for number, part in holding.stages.items()}


def data(schedule: Schedule, size: Size) -> list[Tensor]:
    dice = torch.Generator().manual_seed(1)
    shape = (1, size.tokens)
    return [
        torch.randint(0, size.config.vocab, shape, generator=dice).to(size.device)
        for _ in schedule.microbatches
    ]


def profile_of(comm: Comm, size: Size, rounds: int) -> Profile:
    """What all ranks measure at the same time, as they will train, with recorded actions."""
    dtype = str(size.dtype).removeprefix("torch.")
    return measure_request(
        comm,
        ProfileRequest(
            size.config,
            size.tokens,
            device=size.device,
            dtype=dtype,
            rounds=rounds,
            graphs=size.device == "cuda",
        ),
    )


class Ours:
    """A step of ours; `recorded`: its actions are CUDA graphs."""

    def __init__(
        self,
        schedule: Schedule,
        stages: dict[int, nn.Module],
        comm: Comm,
        size: Size,
        recorded: bool = False,
    ) -> None:
        tokens = data(schedule, size)
        self.batch: Batch = batch_of(tokens, tokens)
        tape = CudaTape() if recorded and size.device == "cuda" else None
        self.executor = Executor(
            lower(schedule),
            stages,
            comm,
            token_loss,
            tape=tape,
        )
        self.stages = stages

    def __call__(self) -> float:
        return self.executor.step(self.batch).loss

    def timeline(self) -> Any:
        return self.executor.step(self.batch, timed=True).timeline


class Torchs:
    """The same step by torch's runtime, on the same modules and in the same order of actions.

    With `native`, torch makes its own GPipe or 1F1B; otherwise its runtime runs our lanes.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: dict[int, nn.Module],
        size: Size,
        native: bool = False,
    ) -> None:
        self.size = size
        self.has_first = 0 in stages
        self.has_last = len(schedule.stages) - 1 in stages
        made = _torch_stages(schedule, stages, size)
        runtime = _native_runtime if native else _listed_runtime
        self.runtime = runtime(schedule, made)
        self.tokens = torch.cat(data(schedule, size))

    def __call__(self) -> float:
        losses: list[Tensor] = []
        inputs = (self.tokens,) if self.has_first else ()
        if self.has_last:
            self.runtime.step(*inputs, target=self.tokens, losses=losses)
        else:
            self.runtime.step(*inputs)
        settle(self.size.device)
        if not losses:
            return 0.0
        detached = [loss.detach() for loss in losses]
        return float(torch.stack(detached).mean())


def _torch_stages(
    schedule: Schedule, stages: dict[int, nn.Module], size: Size
) -> list[PipelineStage]:
    """Torch's stages of this rank, which want to know the shapes of what they pass on."""
    count = len(schedule.stages)
    words = torch.empty(1, size.tokens, device="meta", dtype=torch.int64)
    hidden = _blank_output(size, size.config.width)
    logits = _blank_output(size, size.config.vocab)
    made = []
    for number, module in stages.items():
        x = words if number == 0 else hidden
        y = logits if number == count - 1 else hidden
        device = torch.device(size.device)
        stage = PipelineStage(
            module, number, count, device, input_args=(x,), output_args=(y,)
        )
        made.append(stage)
    return made


def _blank_output(size: Size, features: int) -> Tensor:
    """What a stage passes on for one row, without memory."""
    return torch.empty(
        1,
        size.tokens,
        features,
        device="meta",
        dtype=size.dtype,
        requires_grad=True,
    )


def _mean_loss(y: Tensor, labels: Tensor) -> Tensor:
    return token_loss(y, labels) / labels.numel()


def _native_runtime(schedule: Schedule, made: list[PipelineStage]) -> Any:
    """Torch's own schedule of the same name."""
    kind = ScheduleGPipe if _all_first(schedule) else Schedule1F1B
    return kind(made[0], len(schedule.microbatches), loss_fn=_mean_loss)


def _listed_runtime(schedule: Schedule, made: list[PipelineStage]) -> Any:
    """Torch's runtime with our lanes."""
    rows = [list(map(str, lane)) for lane in schedule.lanes]
    count = len(schedule.microbatches)
    return schedule_runtime(made, count, _mean_loss, rows, messages=False)


def _all_first(schedule: Schedule) -> bool:
    """Whether a rank does all its forwards before its first backward."""
    lane = [str(action.op.value) for action in schedule.lanes[0]]
    return lane == sorted(lane, reverse=True)


def clocked(
    comm: Comm, step: Step, stages: dict[int, nn.Module], size: Size
) -> tuple[float, float]:
    """Seconds of a step, of the slowest rank; and the loss."""
    for part in stages.values():
        part.zero_grad(set_to_none=True)  # as training does
    settle(size.device)
    comm.barrier()
    begin = time.perf_counter()
    loss = step()
    settle(size.device)
    took = time.perf_counter() - begin
    return most(comm, took, size), loss


def most(comm: Comm, value: float, size: Size) -> float:
    """The largest over all ranks."""
    return max(gathered(comm, value, size))


def gathered(comm: Comm, value: float, size: Size) -> list[float]:
    """A number of every rank."""
    row = torch.zeros(comm.ranks, dtype=torch.float64, device=size.device)
    row[comm.rank] = value
    return [float(one) for one in rows_of_all(comm, row)]


def memory(comm: Comm, size: Size, recorded: bool = False) -> list[float]:
    """Bytes at the fullest moment since the last call, by rank; with those that recordings have for themselves."""
    peak = float(torch.cuda.max_memory_allocated()) if size.device == "cuda" else 0.0
    if size.device == "cuda" and recorded:
        peak += recording_bytes()
    if size.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return gathered(comm, peak, size)


def rings(comm: Comm) -> int:
    """Bytes of this rank's rings, which torch does not count."""
    group = getattr(comm, "world", None)
    return group.held if isinstance(group, IpcGroup) else 0
