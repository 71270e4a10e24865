"""Times compiled stages on one GPU, beside what users run today: a plain loop and torch's pipelining, both compiled.

    python benchmarks/gpu/compiled.py --part alone --model 200m --out alone-200m.json
    python benchmarks/gpu/compiled.py --part alone --model 1b --out alone-1b.json
    python benchmarks/gpu/compiled.py --part alone --model wide --out alone-wide.json
    penstock lab testbed --workers 8 -- python benchmarks/gpu/compiled.py --part pipeline --out pipeline.json
    python benchmarks/gpu/compiled.py --kept        puts the tables of docs/results/h200 into docs/results/gpu.md
    python benchmarks/gpu/compiled.py --quick       both parts on a CPU with tiny sizes; writes nothing

`alone` is one process: a plain loop over micro-batches with torch.compile on the whole model, and our runtime with
compiled stages, recorded and not, and unrecorded with plain autocast instead of weights that are cast once in a step.
Weights are float32, products bfloat16, and the optimizer is AdamW.
`pipeline` is 8 workers on one GPU with 4 layers each, in bfloat16: torch's pipelining with compiled layers (without
split backwards, which it cannot compile), and ours compiled, and compiled and recorded.
With `--depth 8 --only "hanayo W=4,hanayo W=2,zb-v"` each worker has 8 layers, enough for four waves. With
`--candidates ours` or `--candidates recorded`, and `--only` one schedule, a pipeline runs by itself, which shows the
memory that it reserves.

Steps of all candidates alternate, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bench import (
    DRY,
    Ours,
    Size,
    Step,
    Torchs,
    clocked,
    free_memory,
    gathered,
    measure_cases,
    memory,
    note,
    on_ranks,
    size_of,
    stages_of,
)
from harness import (
    Found,
    Row,
    Script,
    alternate,
    kept,
    quartiles,
    ratios,
    say,
    table,
    words,
)
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from penstock import Schedule, lower, make, simulate
from penstock.ir.action import Op
from penstock.measure.links import settle
from penstock.models import Llama, LlamaConfig, split, token_loss
from penstock.runtime import (
    ChunkedLoss,
    Comm,
    CompiledLoss,
    CudaTape,
    Executor,
    batch_of,
    compile_stage,
    run_threads,
)
from penstock.runtime.proof import warm_up
from penstock.sim.simulate import own_cost
from penstock.torch_internals import recording_bytes

SEQUENCES = 16  # of a step


def llama(width: int, layers: int, inner: int) -> LlamaConfig:
    heads = 16 if width < 4096 else 32
    return LlamaConfig(32_000, width, layers, heads, heads, inner)


MODELS: dict[str, tuple[LlamaConfig, tuple[int, ...]]] = {  # with micro-batches
    "200m": (llama(1024, 10, 2816), (4, 1)),
    "1b": (llama(2048, 18, 5632), (8,)),
    "wide": (llama(4096, 4, 11264), (4,)),
}
PIPELINES: dict[str, tuple[str, dict[str, int]]] = {
    "1f1b": ("1f1b", {}),
    "hanayo W=2": ("hanayo", {"waves": 2}),
    "hanayo W=4": ("hanayo", {"waves": 4}),
    "zb-v": ("zb-v", {}),
    "interleaved-zb v=2": ("interleaved-zb", {"chunks": 2}),
    "v-half": ("v-half", {}),
    "v-min": ("v-min", {}),
    "dualpipe-v": ("dualpipe-v", {}),
    "skip 25%": ("skip", {"skips": 2}),
}
CANDIDATES = ("torch", "ours", "recorded")  # of a pipeline
DEPTH = 4  # layers of a rank
COLD = 3  # steps of each candidate that are not counted


# ---------------------------------------------------------------- one process
class Alone:
    """A model with its own weights and optimizer, one of the candidates for one process."""

    def __init__(
        self, config: LlamaConfig, tokens: Tensor, count: int, given: argparse.Namespace
    ) -> None:
        torch.manual_seed(0)
        with torch.device(given.device):
            self.model = Llama(config)
        on_gpu = given.device == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=on_gpu
        )
        self.given = given
        self.microbatches = list(tokens.chunk(count))
        self.step: Callable[[], float] = self.loop

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self) -> float:
        """One step with its update; the loss."""
        loss = self.step()
        self.update()
        return loss

    # ------------------------------------------------------------ as users write it
    def compile_loop(self) -> None:
        """Compile the model and the loss together, as one function."""
        model = self.model

        def loss(x: Tensor) -> Tensor:
            return token_loss(model(x), x)

        self.loss = torch.compile(loss, backend=self.given.compiler)

    def loop(self) -> float:
        total = torch.zeros((), device=self.given.device)
        valid = sum(x.numel() for x in self.microbatches)
        for x in self.microbatches:
            with torch.autocast(self.given.device, torch.bfloat16):
                loss = self.loss(x) / valid
            loss.backward()
            total += loss.detach()
        return float(total)

    # ------------------------------------------------------------ ours
    def build(self, comm: Comm, recorded: bool, casts: bool) -> None:
        """Put the model into an executor of one rank, with compiled stages.

        A step casts the weights once, or without `casts` autocast does so for every micro-batch.
        """
        compiler = self.given.compiler
        config = self.model.config
        stage = compile_stage(split(self.model, [config.layers])[0], compiler)
        schedule = make("1f1b", ranks=1, microbatches=len(self.microbatches))
        executor = Executor(
            lower(schedule),
            {0: stage},
            comm,
            ChunkedLoss(CompiledLoss(token_loss, compiler), compiler=compiler),
            autocast=torch.bfloat16,
            tape=CudaTape() if recorded and self.given.device == "cuda" else None,
        )
        if not casts:
            executor.casts = None
        batch = batch_of(self.microbatches, self.microbatches)
        self.step = lambda: executor.step(batch).loss


def run_alone(comm: Comm, given: argparse.Namespace) -> list[Row]:
    """All candidates of one model, for each number of micro-batches."""
    config, counts, sequences, length = *MODELS[given.model], SEQUENCES, 1024
    size = Size(config, length, given.device)
    if given.device == "cpu":
        size, counts, sequences = DRY.with_layers(1), (1,), 2
    dice = torch.Generator().manual_seed(1)
    shape = (sequences, size.tokens)
    tokens = torch.randint(0, size.config.vocab, shape, generator=dice)
    tokens = tokens.to(given.device)
    return measure_cases(
        comm,
        given,
        size,
        {
            f"{given.model}, M = {count}": partial(
                compare_alone, comm, size.config, tokens, count, given
            )
            for count in counts
        },
    )


def count_parameters(config: LlamaConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama(config).parameters())


def compare_alone(
    comm: Comm,
    config: LlamaConfig,
    tokens: Tensor,
    count: int,
    given: argparse.Namespace,
) -> Row:
    """Steps of the candidates by turns, and the peak memory of each while the others are idle."""
    # Otherwise a second shape would be compiled for any shape, which is slower.
    torch.compiler.reset()
    candidates: dict[str, Alone] = {}
    held: dict[str, int] = {}  # bytes that a candidate holds between steps
    losses: dict[str, float] = {}
    for who in ("plain", "autocast", "ours", "recorded"):
        before = allocated(given)
        one = Alone(config, tokens, count, given)
        if who == "plain":
            one.compile_loop()
        else:
            one.build(comm, recorded=who == "recorded", casts=who != "autocast")
        began = time.perf_counter()
        for _ in range(COLD):
            losses[who] = one.run()
        settle(given.device)
        say(f"  {who} runs, after {time.perf_counter() - began:.0f} s")
        candidates[who] = one
        held[who] = allocated(given) - before
    peaks: dict[str, int] = {}

    def turn(who: str) -> float:
        settle(given.device)
        base = allocated(given)
        if given.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        candidates[who].run()
        settle(given.device)
        took = time.perf_counter() - began
        most = torch.cuda.max_memory_allocated() if given.device == "cuda" else 0
        peaks[who] = most - base + held[who]
        return took

    turns = {who: partial(turn, who) for who in candidates}
    times = alternate(turns, given.rounds, cold=0)
    if given.device == "cuda":
        peaks["recorded"] += recording_bytes()
    figures = {}
    for who, one in candidates.items():
        middle, low, high = quartiles(times[who])
        figures[who] = {
            "seconds": [middle, low, high],
            "tokens_per_second": tokens.numel() / middle,
            "peak_bytes": peaks[who],
            "loss": losses[who],
            "over_plain": quartiles(ratios(times["plain"], times[who])),
            "kernel_seconds": kernel_seconds(one, given),
        }
    candidates.clear()
    del one
    free_memory(given.device)
    return {
        "model": given.model,
        "parameters": count_parameters(config),
        "microbatches": count,
        "tokens": tokens.numel(),
        "candidates": figures,
    }


def kernel_seconds(one: Alone, given: argparse.Namespace) -> float:
    """The seconds in which the GPU runs a kernel during a step; 0 on a CPU.

    Kernels that overlap count once. The marks that torch's optimizers leave around their kernels do not count.
    """
    if given.device != "cuda":
        return 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        one.run()
        settle(given.device)
    total = 0.0
    end = 0.0
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and "Optimizer." not in event.name
    )
    for start, stop in spans:
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total / 1e6


def allocated(given: argparse.Namespace) -> int:
    return int(torch.cuda.memory_allocated()) if given.device == "cuda" else 0


# ---------------------------------------------------------------- a pipeline
def run_pipeline(
    comm: Comm, size: Size, microbatches: int, given: argparse.Namespace
) -> list[Row]:
    """A rank: schedule after schedule, if there are enough ranks for its paths and layers for its parts."""
    cases = {}
    for label in given.only or tuple(PIPELINES):
        name, shape = PIPELINES[label]
        if name != "skip" or comm.ranks > 2 + shape["skips"]:
            schedule = make(name, ranks=comm.ranks, microbatches=microbatches, **shape)
            if schedule.parts <= size.config.layers:
                cases[label] = partial(
                    compare_pipelines, comm, size, label, schedule, given
                )
    return measure_cases(comm, given, size, cases)


def compare_pipelines(
    comm: Comm, size: Size, label: str, schedule: Schedule, given: argparse.Namespace
) -> Row:
    """Steps of torch's runtime and of ours by turns, on separate copies of the same weights."""
    machines: dict[str, Step] = {}
    stages = {who: stages_of(schedule, comm, size) for who in given.candidates}
    ours: dict[str, Ours] = {}
    for who in given.candidates:
        if who == "torch":
            continue
        for part in stages[who].values():
            compile_stage(part, given.compiler)
        one = Ours(schedule, stages[who], comm, size, recorded=who == "recorded")
        machines[who] = ours[who] = one
    # torch's runtime refuses compiled layers in split backwards.
    splits = any(action.op is Op.W for action in schedule.lanes[0])
    # Nor does it let micro-batches take different paths.
    paths = {microbatch.path for microbatch in schedule.microbatches}
    if "torch" in given.candidates and not splits and len(paths) == 1:
        for part in stages["torch"].values():
            for layer in part.pieces_to_compile:  # type: ignore[union-attr]
                layer.compile(backend=given.compiler)
        native = label == "1f1b"
        machines["torch"] = Torchs(schedule, stages["torch"], size, native=native)
    losses: dict[str, float] = {}
    for who in list(machines):
        if who in ours:
            warm_up(ours[who].executor, ours[who].batch, evaluates=False)
        else:
            warm_alone(stages[who], size)
        comm.barrier()
        for _ in range(COLD):
            losses[who] = clocked(comm, machines[who], stages[who], size)[1]
        note(comm, f"  {label}: {who} runs")
    turns = {
        who: lambda who=who: clocked(comm, machines[who], stages[who], size)[0]
        for who in machines
    }
    times = alternate(turns, given.rounds, cold=0)
    peaks, reserved = measure_memory(comm, machines, stages, size)
    last = given.candidates[-1]
    timeline = ours[last].timeline()
    row = {
        "name": label,
        "microbatches": len(schedule.microbatches),
        "times": {who: quartiles(values) for who, values in times.items()},
        "over_recorded": {
            who: quartiles(ratios(values, times[last])) for who, values in times.items()
        },
        "simulated": simulate(schedule, own_cost(timeline)).makespan,
        "bubble": timeline.bubble,
        "action": float((timeline.end - timeline.start).mean()),
        "memory": peaks,
        "reserved": reserved,
        "loss": losses,
    }
    machines.clear()
    ours.clear()
    stages.clear()
    return row


def measure_memory(
    comm: Comm,
    machines: dict[str, Step],
    stages: dict[str, dict[int, nn.Module]],
    size: Size,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run one more step of each; return the memory of each rank as allocated and as reserved.

    Each step begins with only the memory that tensors use. It has to reserve the rest again, so it is not timed.
    """
    peaks: dict[str, list[float]] = {}
    reserved: dict[str, list[float]] = {}
    for who, machine in machines.items():
        if size.device == "cuda":
            torch.cuda.empty_cache()
        memory(comm, size)
        clocked(comm, machine, stages[who], size)
        reserved[who] = gathered(comm, reserved_bytes(size), size)
        peaks[who] = memory(comm, size, who == "recorded")
    return peaks, reserved


def reserved_bytes(size: Size) -> float:
    """The most that torch had taken from the GPU since the last call of `memory`, with gaps between tensors."""
    return float(torch.cuda.max_memory_reserved()) if size.device == "cuda" else 0.0


def warm_alone(stages: dict[int, nn.Module], size: Size) -> None:
    """Compile every stage while no rank waits for another one."""
    for part in stages.values():
        x: Tensor = torch.randn(
            1, size.tokens, size.config.width, device=size.device, dtype=size.dtype
        )
        words = torch.zeros(1, size.tokens, device=size.device, dtype=torch.int64)
        x = words if part.first else x.requires_grad_()  # type: ignore[assignment]
        y = part(x)
        loss = token_loss(y, words) if part.last else y.float().sum()
        loss.backward()
        part.zero_grad(set_to_none=True)
    settle(size.device)


# ---------------------------------------------------------------- the script
def options(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--part", choices=("alone", "pipeline"), default="alone")
    flag("--model", choices=tuple(MODELS), default="200m")
    flag("--ranks", type=int, default=8)
    flag("--depth", type=int, default=DEPTH, help="layers of a rank")
    flag("--microbatches", type=int, default=0, help="2P unless given")
    flag("--only", type=words, default=(), help="comma-separated schedules")
    flag("--candidates", type=words, default=CANDIDATES, help="of a pipeline")
    flag("--rounds", type=int, default=8)
    flag("--seconds", type=float, default=400.0)
    flag("--compiler", default="inductor", help="backend of torch.compile")


def measure(given: argparse.Namespace) -> Found:
    given.device = "cpu" if given.quick else "cuda"
    count = given.microbatches or 2 * given.ranks
    if given.quick:
        given.rounds, given.compiler, count = 1, "eager", 2
        given.only = ("hanayo W=2", "zb-v")
    found: Found = {}
    if given.quick or given.part == "alone":
        found["alone"] = run_threads(1, lambda comm: run_alone(comm, given))[0]
    if given.quick or given.part == "pipeline":
        size = size_of(given, given.depth * given.ranks)
        some = on_ranks(given, run_pipeline, size, count, given, threads=False)
        found["pipeline"] = some
    return found | {"rows": [row for rows in found.values() for row in rows]}


def committed(folder: Path) -> Found:
    """By table: the rows of the runs on one H200."""
    sizes = ("200m", "1b", "wide")
    return {
        "alone": kept(folder, *(f"compiled-{size}.json" for size in sizes)),
        "pipeline": kept(folder, "compiled-pipeline.json"),
        "deep": kept(folder, "compiled-deep.json"),
    }


def tables(found: Found) -> dict[str, str]:
    made = {}
    if "alone" in found:
        rows = found["alone"]
        made["compiled: one process"] = table(
            [
                {**row, **row["candidates"][who], "who": who}
                for row in rows
                for who in NAMES
            ],
            {
                "model": model_of,
                "micro-batches": "{microbatches}",
                "": lambda row: NAMES[row["who"]],
                "tokens/s": "{tokens_per_second:,.0f}",
                "over the plain loop": "{over_plain:.2f}",
                "peak memory, GB": "{peak_bytes!G:.1f}",
            },
        )
    columns = {
        "schedule": "{name}",
        "torch, ms": "{torch!m:.1f}",
        "ours, ms": "{ours!m:.1f}",
        "ours with CUDA graphs, ms": "{recorded!m:.1f}",
        "torch over ours with graphs": "{over:.2f}",
        "simulated, ms": "{simulated!m:.1f}",
        "memory, GB": "{held!G:.2f}",
        "with graphs, GB": "{held_recorded!G:.2f}",
    }
    for key, name in (("pipeline", "eight workers"), ("deep", "deep")):
        if key in found:
            made[f"compiled: {name}"] = table(map(pipeline_row, found[key]), columns)
    return made


NAMES = {
    "plain": "plain loop",
    "autocast": "ours, with plain autocast",
    "ours": "ours",
    "recorded": "ours, with CUDA graphs",
}


def model_of(row: Row) -> str:
    """The parameters of a model, and its width if it has few wide layers."""
    wide = ", width 4,096" if row["model"] == "wide" else ""
    return f"{row['parameters'] / 1e6:,.0f} M{wide}"


def pipeline_row(row: Row) -> Row:
    """A row with the medians and the fullest ranks; torch has no zero-bubble schedules."""
    middle = {who: row["times"].get(who, [None])[0] for who in CANDIDATES}
    fullest = {who: max(some) for who, some in row["memory"].items()}
    return {
        **middle,
        "name": row["name"],
        "over": row["over_recorded"].get("torch"),
        "simulated": row["simulated"],
        "held": fullest["ours"],
        "held_recorded": fullest["recorded"],
    }


if __name__ == "__main__":
    Script(__doc__, measure, tables, committed, True, options).main()
