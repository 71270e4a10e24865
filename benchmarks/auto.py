"""Compares the plan of `auto` with the schedules that people choose by hand, in real processes.

    python benchmarks/auto.py --out docs/results/auto/cpu.json                   two CPU workers, gloo
    penstock testbed --workers 8 -- python benchmarks/auto.py --device cuda --out docs/results/auto/h200.json
    penstock testbed --workers 8 --backend nccl -- python benchmarks/auto.py --device cuda --backend nccl \\
        --only 0,2 --out docs/results/auto/nccl.json
    python benchmarks/auto.py --page                        writes docs/results/auto.md from the three files
    python benchmarks/auto.py --dry --out found.json        one small case, which tries the script

For each case the workers measure a profile, as `penstock train` does for schedule.name = auto. From this profile, and
under the same limit of memory, come the plan of `auto` and the rivals: 1F1B, Interleaved-ZB, Hanayo with one and two
waves, ZB-V, and the fixed schedule that the simulator likes best. The rivals are planned as well as ours: they get the
layers of each part that suit them, split backwards, recomputation, and the rows of a micro-batch with which they are
fastest in simulation.

All of them then run in one set of processes, on weights of their own, step by step in turns. Ratios are taken within a
round. On a CPU, all are built four times in different orders, because it matters where weights lie in memory. A step is
the forward and backward of a whole batch, without the optimizer. On a GPU, actions are recorded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import gcd
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu.bench import (
    Size,
    clocked,
    gathered,
    memory,
    note,
    quartiles,
    stages_of,
    write,
)
from tables import table
from torch import nn

from penstock import lower
from penstock.cost import Profile, RowProfiles
from penstock.cost.memory import device_bytes
from penstock.cost.profile import enlarge, tile_of
from penstock.errors import ShapeError
from penstock.ir import Plan
from penstock.models import LlamaConfig, token_loss
from penstock.plan.candidates import (
    Candidate,
    candidate_plan,
    evaluate_schedule,
    title,
)
from penstock.plan.pricing import ProfilePricing
from penstock.plan.search import Landscape
from penstock.plan.space import fixed_recipes
from penstock.plan.workload import (
    MIN_GRANULARITY,
    Division,
    Fixed,
    Workload,
    divisions_of,
)
from penstock.runtime import Comm, CudaTape, Executor, batch_of, spawn
from penstock.runtime.proof import warm_up
from penstock.torch_internals import recording_bytes
from penstock.train.before.profile import (
    ProfileRequest,
    affordable,
    measure_rows_of,
    measuring_rounds,
)
from penstock.train.before.start import plan_workload, rows_to_measure

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TEMPLATE = Path(__file__).parent / "auto.md"
RIVALS = ("1f1b", "interleaved-zb", "hanayo waves=1", "hanayo waves=2", "zb-v")
AUTO = "auto"
BEST_FIXED = "best fixed"
# Bytes of one GPU that all candidates of a round may hold together.
GPU_BYTES = 100e9
PATIENCE = 300.0


@dataclass(frozen=True)
class Case:
    """A workload: a model, its sequences, the ranks, and what is already decided."""

    name: str
    config: LlamaConfig
    tokens: int
    batch: int  # sequences of a step
    ranks: int
    microbatches: int = 0  # 0: the planner chooses
    # The memory of a device, as a share of what 1F1B needs without recomputation.
    memory_share: float = 0.0


@dataclass(frozen=True)
class Run:
    """How all cases run."""

    device: str = "cpu"
    rounds: int = 24
    sittings: int = 1
    seconds: float = 420.0  # no new case is begun after this many
    out: Path | None = None
    backend: str = "gloo"


@dataclass(frozen=True)
class Contender:
    """A candidate with the cell that it is for."""

    label: str
    cell: Division
    candidate: Candidate
    total: float = 0.0  # bytes of all ranks

    @property
    def plan(self) -> Plan:
        return candidate_plan(self.candidate)


@dataclass(frozen=True)
class Contest:
    """A case with all that run in it; the first contender is auto's."""

    case: Case
    workload: Workload
    contenders: tuple[Contender, ...]
    missing: tuple[str, ...]  # rivals that need more layers or more memory
    bound: float
    planning: float  # seconds


def llama(width: int, layers: int, vocab: int, heads: int) -> LlamaConfig:
    inner = width * 11 // 4
    return LlamaConfig(vocab, width, layers, heads, heads, inner)


CPU_CASES = (
    Case("tiny actions", llama(32, 8, 128, 2), 32, 8, 2, 8),
    Case("tiny actions, 16 layers", llama(32, 16, 128, 2), 32, 4, 2, 4),
    Case("short sequences", llama(128, 8, 512, 4), 64, 16, 2),
    Case("M < P, one long sequence", llama(128, 8, 512, 4), 1024, 1, 2),
    Case("large vocabulary", llama(128, 8, 16_000, 4), 128, 8, 2),
    Case("tight memory", llama(128, 8, 512, 4), 256, 8, 2, 8, 0.75),
    Case("M < P, 4 ranks on 2 cores", llama(128, 8, 512, 4), 512, 2, 4),
)
GPU_CASES = (
    Case("M = 2P", llama(1024, 32, 8192, 16), 1024, 16, 8, 16),
    Case("short sequences", llama(1024, 32, 8192, 16), 512, 32, 8),
    Case("M < P", llama(1024, 32, 8192, 16), 2048, 4, 8, 4),
    Case("one long sequence", llama(1024, 16, 2048, 16), 16_384, 1, 8),
    Case("large vocabulary", llama(1024, 32, 65_536, 16), 1024, 16, 8, 16),
    Case("tight memory", llama(1024, 32, 8192, 16), 1024, 16, 8, 16, 0.7),
)
DRY_CASES = (Case("dry", llama(32, 4, 97, 2), 32, 2, 2),)


# ---------------------------------------------------------------- measuring
def workload_of_case(case: Case, run: Run, limit: float | None = None) -> Workload:
    cores = len(os.sched_getaffinity(0))
    is_shared = run.device == "cpu" and cores < case.ranks
    tile = max(MIN_GRANULARITY, tile_of(run.device))
    return Workload(
        layers=case.config.layers,
        tokens=case.tokens,
        batch=case.batch,
        devices=case.ranks,
        heads=case.config.heads,
        kv_heads=case.config.kv_heads,
        memory=limit,
        processors=cores if is_shared else None,
        granularity=gcd(tile, case.tokens),
        recorded=run.device == "cuda",
        exact=True,
        fixed=Fixed(
            ranks=case.ranks,
            microbatches=case.microbatches,
            copies=1,
            tensor=1,
            shard=1,
        ),
    )


def profile_cases(comm: Comm, cases: Sequence[Case], run: Run) -> list[RowProfiles]:
    """A rank: measure the model of each case, at the same time as all other ranks."""
    if run.device == "cpu":
        torch.set_num_threads(1)
    found = []
    for case in cases:
        begin = time.perf_counter()
        found.append(without_update(profile_case(comm, case, run)))
        note(comm, f"{case.name}: measured in {time.perf_counter() - begin:.0f} s")
        release(run)
    return found


def profile_case(comm: Comm, case: Case, run: Run) -> RowProfiles:
    """Measure what `penstock train` measures for `auto`."""
    rows = rows_to_measure(workload_of_case(case, run))
    request = ProfileRequest(
        case.config,
        case.tokens,
        rows[0],
        run.device,
        dtype="bfloat16" if run.device == "cuda" else "float32",
        threads=1 if run.device == "cpu" else None,
        rounds=measuring_rounds(quick=True),
        graphs=run.device == "cuda",
        quick=True,
    )
    request, counts = affordable(request, rows)
    found = measure_rows_of(comm, request, counts)
    if request.tokens == case.tokens:
        return found
    longer = [enlarge(one, one.rows, case.tokens) for one in found.measured]
    return RowProfiles(tuple(longer))


def without_update(profiles: RowProfiles) -> RowProfiles:
    """Leave out the optimizer, which these steps do not have."""

    def strip(profile: Profile) -> Profile:
        return replace(
            profile,
            embed=replace(profile.embed, update=0.0),
            layer=replace(profile.layer, update=0.0),
            head=replace(profile.head, update=0.0),
        )

    return RowProfiles(tuple(map(strip, profiles.measured)))


# ---------------------------------------------------------------- planning
def plan_case(case: Case, profiles: RowProfiles, run: Run) -> Contest:
    """Plan with auto, and plan every rival."""
    begin = time.perf_counter()
    workload = workload_of_case(case, run)
    if case.memory_share:
        plain = next(divisions_of(workload))
        needed = best_of_name(workload, profiles, (plain,), ("1f1b",))["1f1b"]
        limit = case.memory_share * needed.candidate.peak
        workload = workload_of_case(case, run, limit)
    landscape = plan_workload(workload, profiles).landscape
    planning = time.perf_counter() - begin
    rivals = best_of_name(workload, profiles, tuple(divisions_of(workload)), RIVALS)
    fixed = best_fixed(landscape, rivals.pop(BEST_FIXED, None))
    if fixed is not None and not any(is_same(fixed, one) for one in rivals.values()):
        rivals[BEST_FIXED] = fixed
    best = landscape.best
    contenders = [Contender(AUTO, best.division, best), *rivals.values()]
    pricing = ProfilePricing(workload, profiles.at)
    return Contest(
        case,
        workload,
        tuple(with_total(one, pricing) for one in contenders),
        tuple(name for name in RIVALS if name not in rivals),
        landscape.bound,
        planning,
    )


def best_of_name(
    workload: Workload,
    profiles: RowProfiles,
    cells: Sequence[Division],
    names: Sequence[str],
) -> dict[str, Contender]:
    """Return the fastest of each name that fits, over all cells; and of all fixed ones."""
    found: dict[str, Contender] = {}
    for cell, candidate in fixed_candidates(workload, profiles, cells):
        labels = [name_of_rival(candidate, names)]
        if candidate.order_kind == "fixed":
            labels.append(BEST_FIXED)
        for label in filter(None, labels):
            if label not in found or candidate.step < found[label].candidate.step:
                found[label] = Contender(label, cell, candidate)
    return found


def fixed_candidates(
    workload: Workload, profiles: RowProfiles, cells: Sequence[Division]
) -> Iterator[tuple[Division, Candidate]]:
    """Yield all orders of the registry, whole and split, that fit."""
    pricing = ProfilePricing(workload, profiles.at)
    for cell in cells:
        evaluator = pricing.evaluator(cell)
        for recipe in fixed_recipes(pricing.pipeline(cell), 1):
            try:
                schedule = recipe.build()
            except ShapeError:
                continue
            if schedule.parts > workload.layers:
                continue
            candidate = evaluate_schedule(
                cell,
                recipe.name,
                recipe.shape,
                recipe.order_kind,
                schedule,
                evaluator,
            )
            if evaluator.fits(candidate.peak):
                yield cell, candidate


def name_of_rival(candidate: Candidate, names: Sequence[str]) -> str:
    """Return which rival a candidate is: hanayo+split waves=2 is hanayo waves=2."""
    base = candidate.name.removesuffix("+split")
    shape = (f"{word}={value}" for word, value in candidate.shape)
    for name in (base, " ".join([base, *shape])):  # as the stored results spell them
        if name in names:
            return name
    return ""


def best_fixed(landscape: Landscape, whole: Contender | None) -> Contender | None:
    """Return the fastest fixed order, whole or with the slices that the search tried."""
    found = [whole] if whole is not None else []
    found += [
        Contender(BEST_FIXED, row.division, row)
        for row in landscape.candidates
        if row.order_kind == "fixed"
    ]
    return min(found, key=lambda one: one.candidate.step, default=None)


def with_total(one: Contender, pricing: ProfilePricing) -> Contender:
    """Add the bytes of all ranks together, which share one GPU."""
    schedule = one.candidate.schedule
    cost = pricing.cost(one.cell)
    needed = device_bytes(schedule, cost, pricing.workload.recorded)
    return replace(one, total=float(needed.sum()))


def is_same(one: Contender, other: Contender) -> bool:
    """Whether two contenders run the same actions on the same layers."""
    a, b = one.candidate, other.candidate
    return one.cell == other.cell and (a.schedule, a.partition, a.recompute) == (
        b.schedule,
        b.partition,
        b.recompute,
    )


# ---------------------------------------------------------------- running
class Runner:
    """A contender in this process: its stages and its executor."""

    def __init__(self, comm: Comm, contest: Contest, one: Contender, run: Run) -> None:
        plan = one.plan
        case = contest.case
        self.held = 0  # bytes between steps
        self.size = Size(case.config, case.tokens, run.device)
        self.stages: dict[int, nn.Module] = stages_of(
            plan.schedule, comm, self.size, plan.partition
        )
        again = {
            number
            for number, stage in enumerate(plan.schedule.stages)
            if stage.part in plan.recompute
        }
        dice = torch.Generator().manual_seed(1)
        shape = (case.batch, case.tokens)
        tokens = torch.randint(0, case.config.vocab, shape, generator=dice)
        pieces = list(tokens.to(run.device).split(one.cell.rows))
        self.batch = batch_of(pieces, pieces)
        self.executor = Executor(
            lower(plan.schedule),
            self.stages,
            comm,
            token_loss,
            recompute=frozenset(again),
            tape=CudaTape() if run.device == "cuda" else None,
        )

    def __call__(self) -> float:
        return self.executor.step(self.batch).loss


def run_contests(
    comm: Comm, contests: Sequence[Contest], run: Run, before: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A rank: one case after the other."""
    if run.device == "cpu":
        torch.set_num_threads(1)
    begin = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for contest in contests:
        size = Size(contest.case.config, contest.case.tokens, run.device)
        passed = max(gathered(comm, time.perf_counter() - begin, size))
        if passed > run.seconds:
            note(comm, f"{contest.case.name}: no time left")
            continue
        rows.append(run_contest(comm, contest, run))
        if comm.rank == 0:
            write(run.out, found_of(run, [*before, *rows]))
            note(comm, line_of(rows[-1]) + f"  [{passed:.0f} s before]")
    return rows


def run_contest(comm: Comm, contest: Contest, run: Run) -> dict[str, Any]:
    """All contenders by turns; in several groups, each with auto, if they need too much memory."""
    times: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for sitting, group in sittings_of(contest, run):
        runners: dict[str, Runner] = {}
        for one in group:
            before = held_bytes(run)
            runner = runners[one.label] = Runner(comm, contest, one, run)
            warm_up(runner.executor, runner.batch, evaluates=False)
            comm.barrier()
            losses[one.label] = clocked(comm, runner, runner.stages, runner.size)[1]
            if run.device == "cuda":  # the first recorded step
                clocked(comm, runner, runner.stages, runner.size)
            runner.held = held_bytes(run) - before
        measured = alternate(comm, runners, run, peaks, sitting)
        for label, values in measured.items():
            times.setdefault(label, []).extend(values)
            pairs = zip(measured[AUTO], values, strict=True)
            ratios.setdefault(label, []).extend(a / b for a, b in pairs)
        runners.clear()
        del runner
        release(run)
    return row_of(contest, run, times, ratios, losses, peaks)


def alternate(
    comm: Comm,
    runners: dict[str, Runner],
    run: Run,
    peaks: dict[str, float],
    sitting: int,
) -> dict[str, list[float]]:
    """Seconds of each runner in each round. Every round has another order."""
    labels = list(runners)
    times: dict[str, list[float]] = {label: [] for label in labels}
    dice = random.Random(sitting)  # the same on all ranks
    for _ in range(run.rounds // run.sittings):
        for label in dice.sample(labels, len(labels)):
            runner = runners[label]
            memory(comm, runner.size)
            before = torch.cuda.memory_allocated() if run.device == "cuda" else 0
            took, _ = clocked(comm, runner, runner.stages, runner.size)
            times[label].append(took)
            own = runner.held - before
            peak = memory(comm, runner.size)[comm.rank] + own
            peaks[label] = max(gathered(comm, peak, runner.size))
    return times


def sittings_of(
    contest: Contest, run: Run
) -> Iterator[tuple[int, Sequence[Contender]]]:
    """Yield the groups that run by turns.

    Where weights lie in memory makes a few per cent. So all are built again for each
    sitting, in another order.
    """
    dice = random.Random(0)
    for sitting in range(run.sittings):
        for group in groups_of(contest, run):
            yield sitting, dice.sample(group, len(group))


def held_bytes(run: Run) -> int:
    """Bytes that this process holds on its GPU between steps, with all recordings."""
    if run.device == "cpu":
        return 0
    return torch.cuda.memory_allocated() + recording_bytes()


def groups_of(contest: Contest, run: Run) -> list[list[Contender]]:
    """Divide the rivals so that each group fits into the GPU together with auto."""
    auto, *rivals = contest.contenders
    if run.device == "cpu":
        return [[auto, *rivals]]

    def needed(group: Sequence[Contender]) -> float:
        return sum(one.total for one in group)

    groups: list[list[Contender]] = [[auto]]
    for rival in rivals:
        if len(groups[-1]) > 1 and needed([*groups[-1], rival]) > GPU_BYTES:
            groups.append([auto])
        groups[-1].append(rival)
    return groups


def release(run: Run) -> None:
    gc.collect()
    if run.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()


def row_of(
    contest: Contest,
    run: Run,
    times: dict[str, list[float]],
    ratios: dict[str, list[float]],
    losses: dict[str, float],
    peaks: dict[str, float],
) -> dict[str, Any]:
    """What one case found, as JSON."""
    case = contest.case
    auto = contest.contenders[0]
    rows = {}
    for one in contest.contenders:
        candidate = one.candidate
        cuts = candidate.schedule.microbatches[0].cuts
        rows[one.label] = {
            "plan": title(candidate.name, candidate.shape),
            "order": candidate.order_kind,
            "cell": one.cell.name,
            "rows": one.cell.rows,
            "microbatches": one.cell.microbatches,
            "recompute": candidate.recompute,
            "partition": candidate.partition,
            "cuts": cuts if candidate.slices > 1 else (),
            "actions": candidate.schedule.actions,
            "predicted": candidate.makespan,
            "predicted_peak": candidate.peak,
            "seconds": quartiles(times[one.label]),
            "auto_over": quartiles(ratios[one.label]),
            "peak": peaks[one.label],
            "loss": losses[one.label],
            "same": one is not auto and is_same(one, auto),
        }
    return {
        "name": case.name,
        "config": asdict(case.config),
        "tokens": case.tokens,
        "batch": case.batch,
        "ranks": case.ranks,
        "microbatches": case.microbatches,
        "memory": contest.workload.memory,
        "processors": contest.workload.processors,
        "rounds": run.rounds,
        "bound": contest.bound,
        "planning": contest.planning,
        "missing": contest.missing,
        "contenders": rows,
    }


# ---------------------------------------------------------------- all cases
def measure(cases: Sequence[Case], run: Run) -> dict[str, Any]:
    """Measure, plan and run all cases.

    A GPU starts slowly, so there all cases are measured first and run last, in two sets of
    processes. On a CPU, each case is measured just before it runs.
    """
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    together = [list(cases)] if run.device == "cuda" else [[case] for case in cases]
    for group in together:
        left = run.seconds - (time.perf_counter() - begin)
        if left <= 0:
            say(f"no time left for {group[0].name}")
            continue
        contests = plan_group(group, run)
        left = run.seconds - (time.perf_counter() - begin)
        rows += spawn(
            group[0].ranks,
            run_contests,
            contests,
            replace(run, seconds=left),
            rows,
            patience=PATIENCE,
            backend=run.backend,
        )[0]
    return found_of(run, rows)


def plan_group(group: Sequence[Case], run: Run) -> list[Contest]:
    """Measure and plan cases; several are planned at the same time."""
    ranks = group[0].ranks
    if run.device == "cpu":  # Those that cannot compute at once would only disturb.
        ranks = min(ranks, len(os.sched_getaffinity(0)))
    profiles = spawn(
        ranks, profile_cases, group, run, patience=PATIENCE, backend=run.backend
    )[0]
    if len(group) == 1:
        contests = [plan_case(group[0], profiles[0], run)]
    else:
        with ProcessPoolExecutor(len(group), get_context("spawn")) as pool:
            waiting = [
                pool.submit(plan_case, case, one, run)
                for case, one in zip(group, profiles, strict=True)
            ]
            contests = [one.result() for one in waiting]
    for contest in contests:
        auto = contest.contenders[0].candidate
        say(
            f"{contest.case.name}: {title(auto.name, auto.shape)}, "
            f"planned in {contest.planning:.0f} s"
        )
    return contests


def found_of(run: Run, rows: list[dict[str, Any]]) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    machine = f"{cores} cores, {platform.machine()}"
    if run.device == "cuda":
        machine = f"{torch.cuda.get_device_name()}, {cores} cores"
    return {
        "device": run.device,
        "machine": machine,
        "torch": torch.__version__,
        "rows": rows,
    }


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


# ---------------------------------------------------------------- the page
def best_rival(row: dict[str, Any]) -> str:
    """Return the rival with the least median."""
    rivals = [label for label in row["contenders"] if label != AUTO]
    return min(rivals, key=lambda label: row["contenders"][label]["seconds"][0])


def line_of(row: dict[str, Any]) -> str:
    auto = row["contenders"][AUTO]
    label = best_rival(row)
    middle, low, high = row["contenders"][label]["auto_over"]
    return (
        f"{row['name']}: auto {1e3 * auto['seconds'][0]:.2f} ms ({auto['plan']}), "
        f"{middle:.3f} ({low:.3f}-{high:.3f}) times {label}, "
        f"predicted {auto['predicted'] / auto['seconds'][0]:.3f} of measured"
    )


def results_table(found: dict[str, Any]) -> str:
    heads = (
        "case | auto's plan | step, ms | predicted / measured | "
        "best of the others | its step, ms | auto / best | auto / 1f1b"
    )
    lines = []
    for row in found["rows"]:
        auto = row["contenders"][AUTO]
        label = best_rival(row)
        best = row["contenders"][label]
        lines.append(
            [
                row["name"],
                plan_words(row, auto),
                f"{1e3 * auto['seconds'][0]:.2f}",
                f"{auto['predicted'] / auto['seconds'][0]:.3f}",
                plan_words(row, best),
                f"{1e3 * best['seconds'][0]:.2f}",
                spread(best["auto_over"]) + (" same" if best["same"] else ""),
                spread(row["contenders"]["1f1b"]["auto_over"])
                if "1f1b" in row["contenders"]
                else "none",
            ]
        )
    return table(heads, lines, ("case", "auto's plan", "best of the others"))


def plan_words(row: dict[str, Any], one: dict[str, Any]) -> str:
    words = one["plan"]
    if not row["microbatches"]:
        words += f", {one['microbatches']} x {one['rows']}"
    if one["recompute"]:
        words += f", {len(one['recompute'])} of {len(one['partition'])} recomputed"
    return words


def spread(values: Sequence[float]) -> str:
    middle, low, high = values
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def steps_table(found: dict[str, Any]) -> str:
    """Each contender of each case: its step over its prediction, and over auto's."""
    heads = ["case", AUTO, *RIVALS, BEST_FIXED]
    lines = []
    for row in found["rows"]:
        cells = [row["name"]]
        for label in heads[1:]:
            one = row["contenders"].get(label)
            if one is None:
                cells.append("none" if label in row["missing"] else "-")
                continue
            error = one["predicted"] / one["seconds"][0] - 1
            cells.append(f"{1e3 * one['seconds'][0]:.2f} ({error:+.1%})")
        lines.append(cells)
    return table(" | ".join(heads), lines, ("case",))


def cases_table(found: dict[str, Any]) -> str:
    heads = (
        "case | P | layers | width | vocabulary | tokens | sequences | M | memory, MB | "
        "auto's memory, predicted and measured | bound / predicted | planning, s"
    )
    lines = []
    for row in found["rows"]:
        auto = row["contenders"][AUTO]
        limit = f"{row['memory'] / 1e6:,.0f}" if row["memory"] else "any"
        lines.append(
            [
                row["name"],
                str(row["ranks"]),
                str(row["config"]["layers"]),
                str(row["config"]["width"]),
                f"{row['config']['vocab']:,}",
                f"{row['tokens']:,}",
                str(row["batch"]),
                str(row["microbatches"] or "open"),
                limit,
                f"{auto['predicted_peak'] / 1e6:,.0f}, "
                + (f"{auto['peak'] / 1e6:,.0f}" if auto["peak"] else "-"),
                f"{row['bound'] / auto['predicted']:.3f}",
                f"{row['planning']:.0f}",
            ]
        )
    return table(heads, lines, ("case",))


def surprises(files: dict[str, dict[str, Any]], count: int = 3) -> str:
    """The plans that gain most over the best of the others, with all that they chose."""
    rows = []
    for name, found in files.items():
        for row in found["rows"]:
            gain = row["contenders"][best_rival(row)]["auto_over"][0]
            rows.append((gain, name, row))
    rows.sort(key=lambda one: one[0])
    return "\n".join(surprise(*one) for one in rows[:count])


def surprise(gain: float, name: str, row: dict[str, Any]) -> str:
    """One plan in words."""
    auto = row["contenders"][AUTO]
    best = row["contenders"][best_rival(row)]
    text = (
        f"- *{row['name']}* ({name}): {auto['plan']}, {auto['microbatches']} "
        f"micro-batches of {auto['rows']}; the parts have {words_of(auto['partition'])} "
        "layers"
    )
    if auto["cuts"]:
        text += f"; sequences are cut at {words_of(auto['cuts'][1:-1])} tokens"
    if auto["recompute"]:
        text += f"; recomputed are the parts {words_of(auto['recompute'])}"
    text += f". It takes {gain:.3f} of the time of {best['plan']}"
    if "1f1b" in row["contenders"]:
        text += f", and {row['contenders']['1f1b']['auto_over'][0]:.3f} of 1F1B's"
    return text + "."


def words_of(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def page() -> str:
    """The page of the results that are there."""
    parts = {}
    files = {}
    for name in ("cpu", "h200", "nccl"):
        file = RESULTS / "auto" / f"{name}.json"
        text = "This part has not been run yet."
        if file.exists():
            found = files[name] = json.loads(file.read_text())
            rounds = found["rows"][0]["rounds"]
            text = (
                f"On {found['machine']}, torch {found['torch']}, medians and quartiles "
                f"of {rounds} rounds.\n\n{results_table(found)}\n\n"
                "All contenders, in milliseconds, with the error of the prediction:\n\n"
                f"{steps_table(found)}\n\nThe cases:\n\n{cases_table(found)}"
            )
        parts[name] = text
    return TEMPLATE.read_text().format(**parts, surprises=surprises(files))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("penstock_ipc", "nccl"), help="on a GPU")
    parser.add_argument("--rounds", type=int, default=0, help="24 on a CPU, 7 on a GPU")
    parser.add_argument("--only", default="", help="comma-separated numbers of cases")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="begin no new case after this many"
    )
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument(
        "--page", action="store_true", help="write docs/results/auto.md"
    )
    parser.add_argument(
        "--dry", action="store_true", help="one small case on CPU workers"
    )
    given = parser.parse_args()
    if given.page:
        (RESULTS / "auto.md").write_text(page())
        return
    on_gpu = given.device == "cuda"
    cases = DRY_CASES if given.dry else GPU_CASES if on_gpu else CPU_CASES
    if given.only:
        cases = tuple(cases[int(number)] for number in given.only.split(","))
    run = Run(
        given.device,
        given.rounds or (7 if on_gpu else 24),
        1 if on_gpu or given.dry else 4,
        given.seconds or (420.0 if on_gpu else 3600.0),
        given.out.absolute() if given.out else None,
        (given.backend or "penstock_ipc") if on_gpu else "gloo",
    )
    found = measure(cases, run)
    write(given.out, found)
    sys.stdout.write(
        f"{results_table(found)}\n\n{steps_table(found)}\n\n{cases_table(found)}\n"
    )


if __name__ == "__main__":
    main()
