"""Compares the plan of `auto` with the schedules that people choose by hand, in real processes.

    python benchmarks/auto.py --out docs/results/auto/cpu.json                   two CPU workers, gloo
    penstock lab testbed --workers 8 -- python benchmarks/auto.py --device cuda --out docs/results/auto/h200.json
    penstock lab testbed --workers 8 --backend nccl -- python benchmarks/auto.py --device cuda --backend nccl \\
        --only 0,2 --out docs/results/auto/nccl.json
    python benchmarks/auto.py --kept             puts the tables of the three files into docs/results/planner.md
    python benchmarks/auto.py --quick            one small case on ranks that are threads; writes nothing

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
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import gcd
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu.bench import (
    Size,
    clocked,
    free_memory,
    gathered,
    note,
    stages_of,
)
from harness import (
    RESULTS,
    Found,
    Row,
    Script,
    alternate,
    numbers,
    quartiles,
    ratios,
    read,
    say,
    table,
    write,
)
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
from penstock.runtime import Comm, CudaTape, Executor, batch_of, run_threads, spawn
from penstock.runtime.proof import warm_up
from penstock.train.before.profile import (
    ProfileRequest,
    affordable,
    measure_rows_of,
    measuring_rounds,
)
from penstock.train.before.start import plan_workload, rows_to_measure

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
QUICK_CASES = (Case("quick", llama(16, 4, 31, 2), 16, 2, 2, 2),)


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
        free_memory(run.device)
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

    def clocked(self, comm: Comm) -> tuple[float, float]:
        """Seconds of a step, and its loss."""
        return clocked(
            comm, lambda: self.executor.step(self.batch).loss, self.stages, self.size
        )


def run_contests(
    comm: Comm, contests: Sequence[Contest], run: Run, before: list[Row]
) -> list[Row]:
    """A rank: one case after the other."""
    if run.device == "cpu":
        torch.set_num_threads(1)
    begin = time.perf_counter()
    rows: list[Row] = []
    for contest in contests:
        size = Size(contest.case.config, contest.case.tokens, run.device)
        passed = max(gathered(comm, time.perf_counter() - begin, size))
        if passed > run.seconds:
            note(comm, f"{contest.case.name}: no time left")
            continue
        rows.append(run_contest(comm, contest, run))
        if comm.rank == 0:
            write(run.out, found_of(run, [*before, *rows]))
            note(comm, f"{contest.case.name} ran  [{passed:.0f} s before]")
    return rows


def run_contest(comm: Comm, contest: Contest, run: Run) -> Row:
    """All contenders by turns; in several groups, each with auto, if they need too much memory."""
    times: dict[str, list[float]] = {}
    over: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    for sitting, group in sittings_of(contest, run):
        turns: dict[str, Callable[[], float]] = {}
        for one in group:
            runner = Runner(comm, contest, one, run)
            warm_up(runner.executor, runner.batch, evaluates=False)
            comm.barrier()
            losses[one.label] = runner.clocked(comm)[1]
            if run.device == "cuda":  # the first recorded step
                runner.clocked(comm)
            turns[one.label] = lambda runner=runner: runner.clocked(comm)[0]
        rounds = run.rounds // run.sittings
        measured = alternate(turns, rounds, cold=0, dice=random.Random(sitting))
        for label, values in measured.items():
            times.setdefault(label, []).extend(values)
            over.setdefault(label, []).extend(ratios(measured[AUTO], values))
        turns.clear()
        del runner
        free_memory(run.device)
    return row_of(contest, run, times, over, losses)


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


def row_of(
    contest: Contest,
    run: Run,
    times: dict[str, list[float]],
    over: dict[str, list[float]],
    losses: dict[str, float],
) -> Row:
    """What one case found, as JSON."""
    case = contest.case
    auto = contest.contenders[0]
    rows = {}
    for one in contest.contenders:
        candidate = one.candidate
        rows[one.label] = {
            "plan": title(candidate.name, candidate.shape),
            "rows": one.cell.rows,
            "microbatches": one.cell.microbatches,
            "recompute": candidate.recompute,
            "partition": candidate.partition,
            "predicted": candidate.makespan,
            "seconds": quartiles(times[one.label]),
            "auto_over": quartiles(over[one.label]),
            "loss": losses[one.label],
            "same": one is not auto and is_same(one, auto),
        }
    return {
        "name": case.name,
        "tokens": case.tokens,
        "batch": case.batch,
        "ranks": case.ranks,
        "microbatches": case.microbatches,
        "rounds": run.rounds,
        "bound": contest.bound,
        "planning": contest.planning,
        "missing": contest.missing,
        "contenders": rows,
    }


# ---------------------------------------------------------------- all cases
def measure_cases(cases: Sequence[Case], run: Run) -> Row:
    """Measure, plan and run all cases.

    A GPU starts slowly, so there all cases are measured first and run last, in two sets of
    processes. On a CPU, each case is measured just before it runs.
    """
    rows: list[Row] = []
    begin = time.perf_counter()
    together = [list(cases)] if run.device == "cuda" else [[case] for case in cases]
    for group in together:
        left = run.seconds - (time.perf_counter() - begin)
        if left <= 0:
            say(f"no time left for {group[0].name}")
            continue
        contests = plan_group(group, run)
        left = run.seconds - (time.perf_counter() - begin)
        rows += on_ranks(
            group[0].ranks,
            run,
            run_contests,
            contests,
            replace(run, seconds=left),
            rows,
        )
    return found_of(run, rows)


def on_ranks(ranks: int, run: Run, work: Callable[..., Any], *args: Any) -> Any:
    """Run all ranks, and return what the first one found."""
    if run.backend == "threads":
        return run_threads(ranks, lambda comm: work(comm, *args))[0]
    return spawn(ranks, work, *args, patience=PATIENCE, backend=run.backend)[0]


def plan_group(group: Sequence[Case], run: Run) -> list[Contest]:
    """Measure and plan cases; several are planned at the same time."""
    ranks = group[0].ranks
    if run.device == "cpu":  # Those that cannot compute at once would only disturb.
        ranks = min(ranks, len(os.sched_getaffinity(0)))
    profiles = on_ranks(ranks, run, profile_cases, group, run)
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


def found_of(run: Run, rows: list[Row]) -> Row:
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


# ---------------------------------------------------------------- the script
def options(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--device", choices=("cpu", "cuda"), default="cpu")
    flag("--backend", choices=("penstock_ipc", "nccl"), default="penstock_ipc")
    flag("--rounds", type=int, default=0, help="24 on a CPU, 7 on a GPU")
    flag("--only", type=numbers, default=(), help="comma-separated numbers of cases")
    flag("--seconds", type=float, default=0.0, help="begin no case after this many")


def measure(given: argparse.Namespace) -> Found:
    on_gpu = given.device == "cuda"
    cases = QUICK_CASES if given.quick else GPU_CASES if on_gpu else CPU_CASES
    run = Run(
        given.device,
        2 if given.quick else given.rounds or (7 if on_gpu else 24),
        1 if on_gpu or given.quick else 4,
        given.seconds or (420.0 if on_gpu else 3600.0),
        given.out,
        "threads" if given.quick else given.backend if on_gpu else "gloo",
    )
    return measure_cases([cases[n] for n in given.only] or cases, run)


def committed(folder: Path) -> Found:
    files = sorted(folder.glob("*.json"))
    return {"files": {file.stem: read(file) for file in files}}


def best_rival(row: Row) -> str:
    """Return the rival with the least median."""
    rivals = [label for label in row["contenders"] if label != AUTO]
    return min(rivals, key=lambda label: row["contenders"][label]["seconds"][0])


def plan_words(row: Row, one: Row) -> str:
    words: str = one["plan"]
    if not row["microbatches"]:
        words += f", {one['microbatches']} x {one['rows']}"
    if one["recompute"]:
        words += f", {len(one['recompute'])} of {len(one['partition'])} recomputed"
    return words


def tables(found: Found) -> dict[str, str]:
    """A table for each machine: the plan of auto beside the best of the others and beside 1F1B."""
    columns = {
        "case": "{name}",
        "auto's plan": "{plan}",
        "step, ms": "{seconds[0]!m:.2f}",
        "predicted / measured": "{predicted:.3f}",
        "best of the others": "{rival}",
        "its step, ms": "{rival_seconds[0]!m:.2f}",
        "auto / best": "{over:.3f}{same}",
        "auto / 1f1b": "{over_1f1b:.3f}",
    }
    made = {}
    for name, file in found.get("files", {found.get("device"): found}).items():
        rows = []
        for row in file["rows"]:
            auto, best = (row["contenders"][who] for who in (AUTO, best_rival(row)))
            first = row["contenders"].get("1f1b", {})
            rows.append(
                {
                    **row,
                    "plan": plan_words(row, auto),
                    "seconds": auto["seconds"],
                    "predicted": auto["predicted"] / auto["seconds"][0],
                    "rival": plan_words(row, best),
                    "rival_seconds": best["seconds"],
                    "over": best["auto_over"],
                    "same": " same" if best["same"] else "",
                    "over_1f1b": first.get("auto_over"),
                }
            )
        where = f"{file['machine']}, torch {file['torch']}, {rows[0]['rounds']} rounds"
        made[f"auto: {name}"] = f"{table(rows, columns)}\n\nOn {where}."
    return made


if __name__ == "__main__":
    folder = RESULTS / "auto"
    Script(__doc__, measure, tables, committed, True, options, folder=folder).main()
