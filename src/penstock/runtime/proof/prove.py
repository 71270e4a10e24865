"""Proves a model before its first step: every stage is run the way the plan will run it, and once more plainly.

    first micro-batch   part 0 ──x──► part 1 ──x──► part 2      plain forwards, whole: each rank gets its real inputs
    on every stage      planned: sliced, split, recomputed, ...  ─┐
                        plain:   one call, one backward          ─┴─ the same output, the same gradients?

A stage is proven alone, so no rank needs more than its own parts. Its input is real: the first rows of a micro-batch
go along their path, a chain of plain forwards, which is cheap and cannot deadlock since all ranks walk it in one order.
The gradient of its output is drawn, but for the last stage, which has its labels and its loss. A real gradient would
need a second walk back, and would say nothing of a stage below a head that starts at zero.

How much may differ, and why: `penstock.runtime.proof.judge`.

Dropout is compared with equal random numbers. Slices, compiled code and recordings draw others than a plain call, so
with them dropout is off, and what the other options do to it is compared among ways that draw the same.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ProofError
from penstock.ir.schedule import Schedule
from penstock.runtime.batch import Batch
from penstock.runtime.comm.comm import Comm
from penstock.runtime.dtensor_share import local_share
from penstock.runtime.executor import Executor
from penstock.runtime.proof.judge import Difference, Judge
from penstock.runtime.proof.traceless import is_compiled, kept_numbers, uncompiled
from penstock.runtime.proof.ways import REDRAWS, Bench, Option, call
from penstock.runtime.torch_internals import original_module

_log = logging.getLogger(__name__)
ROWS = 2  # of a micro-batch, at most: two show whether rows leak into each other

WAYS_OUT = {
    Option.SLICES: "do not cut this model into token slices: `--set schedule.slices=0`, and a schedule other than "
    "terapipe and seq1f1b; in Python make the schedule with slices=1",
    Option.SPLIT: "keep its backwards whole: `--set schedule.split=false`, and a schedule that does not split, "
    "`--set schedule.name=1f1b`",
    Option.RECOMPUTE: "keep its activations: `--set run.recompute=false`, or Executor(recompute=frozenset())",
    Option.AUTOCAST: "train it in its own precision: `--set run.precision=float32`, or Executor(autocast=None)",
    Option.RECORDED: "do not record it: `--set run.graphs=false`, or Executor(tape=None)",
    Option.COMPILED: "do not compile it, or not those of its layers that differ",
    Option.INTERLEAVED: "its module keeps something on itself from a forward to its backward, which the next forward "
    "overwrites: keep it in autograd's context, or train with one micro-batch at a time, "
    "`--set schedule.microbatches=1`",
}
WORDS = {
    Option.SLICES: "token slices",
    Option.SPLIT: "the split backward",
    Option.RECOMPUTE: "recomputation",
    Option.AUTOCAST: "autocast",
    Option.RECORDED: "recorded actions",
    Option.COMPILED: "torch.compile",
    Option.INTERLEAVED: "several micro-batches in flight",
}
LAST_RESORT = "  `--set run.prove=false` skips this check"


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proven, alike on all ranks."""

    stages: int = 0  # of all ranks
    worst: float = 0.0  # the largest difference, as a share of what is allowed
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    skipped: str = ""  # why nothing was proven


@dataclass(slots=True)
class Verdict:
    """On the stages of one rank."""

    failure: str = ""
    warnings: list[str] = field(default_factory=list)
    stages: int = 0
    worst: float = 0.0


def prove(executor: Executor, batch: Batch) -> Proof:
    """Raises a `ProofError`, the same on all ranks, if the plan changes what a stage computes. All ranks call it.

    `batch` is one that `executor.step` could have. Nothing of it stays: gradients, buffers and random numbers are as
    they were, so a run that was proven trains like one that was not.
    """
    began = time.perf_counter()
    told = _tell(
        executor.comm,
        {
            "why": _why_not(executor),
            "compiled": any(map(is_compiled, _modules(executor))),
        },
    )
    why = next((one["why"] for one in told if one["why"]), "")
    if why:
        if executor.comm.rank == 0:
            _log.info("the model is not proven before it trains: %s", why)
        return Proof(skipped=why)
    devices = {p.device for module in _modules(executor) for p in module.parameters()}
    with kept_numbers(devices, executor.comm.barrier):
        verdict = _judge_all(
            executor, batch, None if any(one["compiled"] for one in told) else ROWS
        )
        verdicts = [Verdict(**one) for one in _tell(executor.comm, _as_dict(verdict))]
    if devices and next(iter(devices)).type == "cuda":
        torch.cuda.empty_cache()
    warnings = tuple(words for one in verdicts for words in one.warnings)
    if executor.comm.rank == 0:
        for words in warnings:
            _log.warning("%s", words)
    failures = [one.failure for one in verdicts if one.failure]
    if failures:
        raise ProofError(f"{failures[0]}\n{LAST_RESORT}")
    stages, worst = (
        sum(one.stages for one in verdicts),
        max(one.worst for one in verdicts),
    )
    return Proof(stages, worst, time.perf_counter() - began, warnings)


def _modules(executor: Executor) -> list[nn.Module]:
    return list(executor.modules.values())


def _why_not(executor: Executor) -> str:
    """What stands in the way of a proof on one rank alone."""
    shared = any(
        local_share(p) is not p
        for module in _modules(executor)
        for p in module.parameters()
    )
    if executor.shards.parts or shared:
        return "its weights are shared out over processes (mesh.shard, mesh.tensor); no rank can run a plain call alone"
    return ""


def _as_dict(verdict: Verdict) -> dict[str, Any]:
    return {name: getattr(verdict, name) for name in Verdict.__slots__}


def _tell(comm: Comm, words: dict[str, Any]) -> list[dict[str, Any]]:
    """What all ranks say, by rank: as numbers, since ranks can only add."""
    world, raw = tuple(range(comm.ranks)), json.dumps(words).encode()
    sizes = torch.zeros(comm.ranks, dtype=torch.int64)
    sizes[comm.rank] = len(raw)
    comm.add(sizes, world).wait()
    letters = torch.zeros(comm.ranks, int(sizes.max()), dtype=torch.int64)
    letters[comm.rank, : len(raw)] = torch.tensor(list(raw))
    comm.add(letters, world).wait()
    texts = [
        bytes(row[:size].tolist())
        for row, size in zip(letters, sizes.tolist(), strict=True)
    ]
    return [json.loads(text) for text in texts]


# ---------------------------------------------------------------- real inputs
def chosen_for(schedule: Schedule) -> dict[int, int]:
    """A micro-batch for every stage: few of them for all stages, and those with the most slices first."""
    found: dict[int, int] = {}
    for number in sorted(
        range(len(schedule.microbatches)),
        key=lambda n: -schedule.microbatches[n].slices,
    ):
        for stage in schedule.microbatches[number].path:
            found.setdefault(stage, number)
    return found


def _judge_all(executor: Executor, batch: Batch, rows: int | None) -> Verdict:
    """All stages of this rank, on what arrives at them."""
    chosen = chosen_for(executor.program.schedule)
    mine = sorted(stage for stage in executor.modules if stage in chosen)
    benches = {stage: Bench(executor, stage, chosen[stage], batch) for stage in mine}
    for stage, x in _inputs(executor, batch, chosen, rows, benches):
        number = chosen[stage]
        starts = batch.starts[number][:rows] if batch.starts else None
        benches[stage].fill(x, batch.labels[number][:rows], starts)
    verdict = Verdict()
    for bench in benches.values():
        _judge(bench, verdict)
        bench.samples.clear()
        if verdict.failure:
            break
    return verdict


def _inputs(
    executor: Executor,
    batch: Batch,
    chosen: dict[int, int],
    rows: int | None,
    benches: dict[int, Bench],
) -> Iterator[tuple[int, Tensor]]:
    """What each stage of this rank gets: chain after chain of plain forwards, in the same order on all ranks."""
    schedule, comm = executor.program.schedule, executor.comm
    for number in sorted(set(chosen.values())):
        path = schedule.microbatches[number].path
        wanted = [place for place, stage in enumerate(path) if chosen[stage] == number]
        x = batch.inputs[number][:rows]
        device, shape = x.device, (x.shape[0], x.shape[1], executor.width)
        starts = batch.starts[number][:rows] if batch.starts else None
        for place, stage in enumerate(path[: wanted[-1] + 1]):
            rank = schedule.stages[stage].rank
            if rank != comm.rank:
                continue
            before = schedule.stages[path[place - 1]].rank if place else rank
            if before != rank:
                x = comm.receive(shape, executor.dtype, before).wait().to(device)
            if place in wanted:
                yield stage, x
            if place < wanted[-1]:
                x = _forward(executor, stage, x, starts, benches)
                after = schedule.stages[path[place + 1]].rank
                if after != rank:
                    comm.send(x.to(executor.dtype), after).wait()


def _forward(
    executor: Executor,
    stage: int,
    x: Tensor,
    starts: Tensor | None,
    benches: dict[int, Bench],
) -> Tensor:
    """A plain forward that leaves nothing behind."""
    bench = benches[stage]
    try:
        with (
            torch.no_grad(),
            uncompiled(bench.module) as plain,
            bench.cast(autocast=True),
        ):
            return call(plain, x, starts)
    finally:
        bench.memory.restore()


# ---------------------------------------------------------------- one stage
def _judge(bench: Bench, verdict: Verdict) -> None:
    """Adds what is found on one stage."""
    where = f"stage {bench.stage} on rank {bench.executor.comm.rank}"
    judge = Judge(bench, quiet=False)
    rounds: list[Callable[[], Judge]] = [lambda: judge]
    redrawn = bench.options & REDRAWS
    if judge.drew and redrawn:
        rounds = [lambda: Judge(bench, quiet=True)]
        base = bench.options - {Option.SPLIT, Option.RECOMPUTE}
        if base != bench.options:
            rounds.append(lambda: Judge(bench, quiet=False, base=base))
    for make in rounds:
        judge = make()
        if not judge.finite:
            verdict.warnings.append(
                f"{where} is not proven: its plain call makes numbers that are not finite"
            )
            continue
        differences = judge.compare(bench.options)
        verdict.worst = max(verdict.worst, judge.worst)
        if judge.unstable:
            verdict.warnings.append(
                f"{where} is not deterministic: two equal plain calls of it differ in {judge.unstable}, "
                "so differences of that size are not seen"
            )
        if not differences:
            continue
        if (
            judge.quiet
            and not differences[0].raised
            and judge.drawn_anew(differences[0].name)
        ):
            words = " and ".join(
                WORDS[option] for option in Option if option in redrawn
            )
            verdict.warnings.append(
                f"{where} is not proven: it draws random numbers that cannot be switched off, and {words} draw others"
            )
            continue
        verdict.failure = _story(where, differences, _cause(judge))
        return
    verdict.stages += 1
    _look_at_weights(bench, where, verdict)


def _look_at_weights(bench: Bench, where: str, verdict: Verdict) -> None:
    """A W that has nothing to do makes a split backward useless."""
    plain = original_module(bench.module)
    tables = {
        id(p)
        for one in plain.modules()
        if isinstance(one, nn.Embedding)
        for p in one.parameters()
    }
    matrices = [
        p
        for p in plain.parameters()
        if p.requires_grad and p.dim() > 1 and id(p) not in tables
    ]
    if Option.SPLIT in bench.options and matrices and not bench.deferred:
        verdict.warnings.append(
            f"{where} splits its backward for nothing: no layer of it leaves its weight gradients to W; "
            "torch.nn.Linear does, if it is not compiled, and so does what calls penstock.runtime.defer"
        )


def _cause(judge: Judge) -> list[Option]:
    """The options that cause it: each that does so alone, else the fewest that do together. None: no option does."""
    options, base = judge.bench.options, judge.base or frozenset()
    candidates = [option for option in Option if option in options - base]
    if judge.base is None and judge.compare(base):
        return []
    if len(candidates) == 1:
        return candidates
    guilty = [option for option in candidates if judge.compare(base | {option})]
    if guilty:
        return guilty
    needed = options
    for option in candidates:
        if judge.compare(needed - {option}):
            needed = needed - {option}
    return [option for option in Option if option in needed - base]


def _story(
    where: str, differences: Sequence[Difference], cause: Sequence[Option]
) -> str:
    """The failure in words: what differs, why, and what to do."""
    first, worst = differences[0], max(differences, key=lambda one: one.share)
    if first.raised:
        lines = [
            f"{where} cannot run the way the plan wants it to, though a plain call of it runs: {first.raised}"
        ]
    else:
        lines = [
            f"{where} computes something else in this plan than in a plain call: {first}"
        ]
    if worst is not first:
        lines.append(
            f"  {len(differences)} tensors differ, most of all {worst.what}, by {worst.share:.2g}"
        )
    if cause:
        lines.append(
            f"  cause: {' together with '.join(WORDS[option] for option in cause)}"
        )
    else:
        lines.append(
            "  cause: none of the plan's options; look for something that it keeps from one call to the next"
        )
    return "\n".join([*lines, *(f"  way out: {WAYS_OUT[option]}" for option in cause)])
