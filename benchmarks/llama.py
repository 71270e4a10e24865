"""Measures the step time of a 7 M-parameter Llama on CPU workers, in turns with our runtime and torch's.

    chrt -r 5 python benchmarks/llama.py            P = 2, writes docs/results/llama.md (about two minutes)
    chrt -r 5 python benchmarks/llama.py --quick    fewer rounds; writes nothing
    python benchmarks/llama.py --json               one JSON object to stdout

Each rank has one thread, and there are 8 micro-batches of one sequence of 128 tokens. Both runtimes run the same
schedules on the same parts with the same weights. Before timing, the losses and gradient norms of both are compared
with those of the whole model. Rounds alternate, and ratios are taken within a round. The last column is the time of
our step over the time that a runtime without any cost would take for the same actions, each at its measured duration.
A better runtime could gain that much and no more.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tables import table
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from penstock import Schedule, lower, make, simulate
from penstock.models import Llama, LlamaConfig, even_partition, split, token_loss
from penstock.runtime import Batch, Executor, ProcessComm, cut_batch
from penstock.sim.simulate import own_cost
from penstock.torch_internals import schedule_runtime

RESULT = Path(__file__).parent.parent / "docs" / "results" / "llama.md"
CONFIG = LlamaConfig(vocab=2048, width=256, layers=8, heads=8, kv_heads=8, inner=672)
NAMES: dict[str, dict[str, int]] = {
    "1f1b": {},
    "interleaved": {"chunks": 2},
    "hanayo": {"waves": 1},
    "zb-h1": {},
    "zb-v": {},
    "interleaved-zb": {"chunks": 2},
}
MICROBATCHES, LENGTH = 8, 128
Machine = Callable[[], float]  # one step; the loss, where it is known


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shape = (MICROBATCHES, LENGTH)
    return tuple(
        torch.randint(0, CONFIG.vocab, shape, generator=draw) for _ in range(2)
    )  # type: ignore[return-value]


def whole() -> Llama:
    torch.manual_seed(0)
    return Llama(CONFIG)


def parts_of(schedule: Schedule, rank: int, model: Llama) -> dict[int, torch.nn.Module]:
    parts = split(model, even_partition(CONFIG.layers, schedule.parts))
    return {n: parts[s.part] for n, s in enumerate(schedule.stages) if s.rank == rank}


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return token_loss(logits, labels) / labels.numel()


def ours(schedule: Schedule, rank: int, model: Llama) -> Machine:
    executor = Executor(
        lower(schedule),
        parts_of(schedule, rank, model),
        ProcessComm(60),
        token_loss,
    )
    batch = cut_batch(*data(), MICROBATCHES)
    return Ours(executor, batch)


class Ours:
    """A step of ours, or one that is timed: what its own actions would take on a runtime that costs nothing."""

    def __init__(self, executor: Executor, batch: Batch) -> None:
        self.executor, self.batch = executor, batch

    def __call__(self) -> float:
        return self.executor.step(self.batch).loss

    def over_own_spans(self) -> float:
        timeline = self.executor.step(self.batch, timed=True).timeline
        assert timeline is not None
        return (
            timeline.makespan
            / simulate(timeline.schedule, own_cost(timeline, statistics.mean)).makespan
        )


def torchs(schedule: Schedule, rank: int, model: Llama) -> Machine:
    total, mine = len(schedule.stages), parts_of(schedule, rank, model)
    stages = [
        PipelineStage(part, n, total, torch.device("cpu")) for n, part in mine.items()
    ]
    runtime: Any
    if total == schedule.ranks and "I" not in str(schedule.lanes):
        runtime = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=mean_loss)
    else:
        rows = [list(map(str, lane)) for lane in schedule.lanes]
        runtime = schedule_runtime(
            stages, MICROBATCHES, mean_loss, rows, messages=False
        )
    inputs, labels = data()

    def step() -> float:
        losses: list[Tensor] = []
        extra = {"target": labels, "losses": losses} if total - 1 in mine else {}
        runtime.step(*((inputs,) if 0 in mine else ()), **extra)
        return (
            float(torch.stack([one.detach() for one in losses]).mean())
            if losses
            else 0.0
        )

    return step


MACHINES = {"ours": ours, "torch": torchs}


def norm(model: Llama) -> float:
    total = torch.tensor(
        [
            sum(
                float(p.grad.pow(2).sum())
                for p in model.parameters()
                if p.grad is not None
            )
        ]
    )
    dist.all_reduce(total)
    return float(total) ** 0.5


def rank_main(rank: int, ranks: int, port: int, rounds: int, out: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    machines: dict[tuple[str, str], tuple[Machine, Llama]] = {}
    for name, shape in NAMES.items():
        schedule = make(name, ranks=ranks, microbatches=MICROBATCHES, **shape)
        for who, build in MACHINES.items():
            model = whole()
            machines[name, who] = (build(schedule, rank, model), model)
    expected = reference() if rank == 0 else (0.0, 0.0)
    times: dict[str, list[float]] = {f"{name} {who}": [] for name, who in machines}
    times |= {f"{name} over its spans": [] for name in NAMES}
    for turn in range(1 + rounds):
        for (name, who), (step, model) in machines.items():
            model.zero_grad(set_to_none=True)
            dist.barrier()
            begin = time.perf_counter()
            loss = step()
            took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn:
                times[f"{name} {who}"].append(float(took))
                continue
            shown = torch.tensor([loss])
            dist.all_reduce(shown, dist.ReduceOp.MAX)
            size = norm(model)
            if rank == 0:
                assert abs(float(shown) - expected[0]) < 1e-4, (
                    name,
                    who,
                    float(shown),
                    expected,
                )
                assert abs(size - expected[1]) < 1e-3 * expected[1], (
                    name,
                    who,
                    size,
                    expected,
                )
        for (name, _), (step, _) in machines.items():
            if turn and isinstance(step, Ours):
                times[f"{name} over its spans"].append(step.over_own_spans())
    if rank == 0:
        Path(out).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def reference() -> tuple[float, float]:
    """Loss and gradient norm of the whole model."""
    model, (inputs, labels) = copy.deepcopy(whole()), data()
    loss = mean_loss(model(inputs), labels)
    loss.backward()
    squares = sum(
        float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None
    )
    return float(loss.detach()), squares**0.5


def summary(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for name in NAMES:
        spans = sorted(times[f"{name} over its spans"])
        mine, theirs, base = (
            times[f"{name} ours"],
            times[f"{name} torch"],
            times["1f1b ours"],
        )
        against = sorted(a / b for a, b in zip(mine, theirs, strict=True))
        own = sorted(a / b for a, b in zip(mine, base, strict=True))
        quarter = len(against) // 4
        rows.append(
            {
                "name": name,
                "ours_ms": 1e3 * statistics.median(mine),
                "torch_ms": 1e3 * statistics.median(theirs),
                "over_torch": statistics.median(against),
                "over_torch_spread": (against[quarter], against[-1 - quarter]),
                "over_own_1f1b": statistics.median(own),
                "over_own_1f1b_spread": (own[quarter], own[-1 - quarter]),
                "over_own_spans": statistics.median(spans),
                "over_own_spans_spread": (spans[quarter], spans[-1 - quarter]),
            }
        )
    return rows


def shown(rows: list[dict[str, Any]]) -> str:
    heads = "schedule | ours, ms | torch, ms | ours / torch | ours / our 1F1B | ours / its actions alone"
    ratios = ("over_torch", "over_own_1f1b", "over_own_spans")
    lines = [
        [
            r["name"],
            f"{r['ours_ms']:.0f}",
            f"{r['torch_ms']:.0f}",
            *(ratio(r, one) for one in ratios),
        ]
        for r in rows
    ]
    return table(heads, lines, ("schedule",))


def ratio(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_spread"]
    return f"{row[name]:.3f} ({low:.3f}-{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds; writes nothing"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    given = parser.parse_args()
    out = f"/tmp/penstock-llama-{os.getpid()}.json"
    rounds, port = 4 if given.quick else 20, 20000 + os.getpid() % 20000
    mp.spawn(rank_main, (2, port, rounds, out), nprocs=2)
    rows = summary(json.loads(Path(out).read_text()))
    Path(out).unlink()
    text = (
        "# A 7 M-parameter Llama on two CPU workers\n\n"
        "`chrt -r 5 python benchmarks/llama.py` on two ranks with one thread each, with 8 micro-batches of 128 "
        f"tokens and\ntorch {torch.__version__}. The table shows medians over the rounds, with quartiles in brackets. "
        "*Its actions\n"
        "alone* is the time that the same actions, each at its measured duration, would take on a runtime that costs\n"
        f"nothing.\n\n{shown(rows)}\n"
    )
    if not given.quick:
        RESULT.write_text(text)
    sys.stdout.write(json.dumps({"rows": rows}) + "\n" if given.json else text)


if __name__ == "__main__":
    main()
