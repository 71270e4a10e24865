"""Proves a model before its first step: runs every stage as the plan will run it, and once more plainly.

    first micro-batch   part 0 ──x──► part 1 ──x──► part 2      plain forwards of whole sequences: real inputs for all
    on every stage      planned: sliced, split, recomputed, ...  ─┐
                        plain:   one call, one backward          ─┴─ the same output, the same gradients?

Each stage is proven alone, so no rank needs more than its own parts. Its input is real: the
first rows of a micro-batch travel along their path through plain forwards. This is cheap, and
cannot deadlock, since all ranks walk the path in one order. The last stage has its labels and
its loss; the output gradient of any other stage is random. A real gradient would need a second
walk back, and would say nothing about stages below a head that starts at zero.

The section on limits explains how much may differ, and why.

Dropout is compared with equal random numbers. Slices, compiled code and recordings draw other
numbers than a plain call. With these options dropout is switched off, and the effect of the
remaining options on it is compared among ways that draw the same numbers.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, isnan

import torch
from torch import Tensor, nn

from penstock.errors import ProofError
from penstock.ir.schedule import Schedule
from penstock.runtime.batch import Batch
from penstock.runtime.bench import PROOF_SEED, REDRAWS, Bench, Option, Options, Results
from penstock.runtime.comm.comm import exchange
from penstock.runtime.executor import Executor
from penstock.runtime.module_state import has_compiled_layer, restored_random
from penstock.runtime.passed_values import Edge, Value, has_gradient
from penstock.torch_internals import free_bytes, is_distributed

_log = logging.getLogger(__name__)

# Two rows of a micro-batch are enough to show that rows leak into each other.
MAX_PROOF_ROWS = 2

WAYS_OUT = {
    Option.SLICES: "do not cut this model into token slices: take a schedule without slices=, and not "
    "terapipe or seq1f1b; in Python, make the schedule with slices=1",
    Option.SPLIT: "keep its backwards whole: take a schedule that does not split, such as "
    "`--set schedule.name=1f1b`",
    Option.RECOMPUTE: "keep its activations: use `--set run.recompute=none`, or Executor(recompute=frozenset())",
    Option.AUTOCAST: "train it in its own precision: use `--set run.precision=float32`, or Executor(autocast=None)",
    Option.RECORDED: "do not record it: use `--set run.cuda_graphs=false`, or Executor(tape=None)",
    Option.COMPILED: "do not compile it, or at least not the layers that differ: use `--set run.compile=false`",
    Option.INTERLEAVED: "its module stores something on itself in a forward and reads it in the backward, but the next "
    "forward overwrites it: store it in autograd's context, or train with one micro-batch at a time, "
    "`--set schedule.microbatches=1`",
}

OPTION_NAMES = {
    Option.SLICES: "token slices",
    Option.SPLIT: "the split backward",
    Option.RECOMPUTE: "recomputation",
    Option.AUTOCAST: "autocast",
    Option.RECORDED: "recorded actions",
    Option.COMPILED: "torch.compile",
    Option.INTERLEAVED: "several micro-batches in flight",
}

MAX_NAMES_SHOWN = 3

LAST_RESORT = (
    "  `--set run.checks=forecast,memory`, or Pipeline(prove=False), skips this check"
)


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a proof, which is the same on all ranks."""

    stages: int = 0  # the number of stages proven, over all ranks
    visited: int = 0  # the number of stages that there are to prove
    worst: float = 0.0  # the largest difference, as a share of what is allowed
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    skipped: str = ""  # why nothing was proven

    def __str__(self) -> str:
        """What was checked, and what was not."""
        took = f"in {self.seconds:.1f} s"
        if self.skipped:
            return f"no gradient check: {self.skipped}"
        if self.stages == self.visited:
            return (
                f"gradient check passed {took}: {self.stages} stages match plain calls"
            )
        rest = f"{self.visited - self.stages} of {self.visited} stages were not checked, as the warnings say"
        if not self.stages:
            return f"no stage passed the gradient check {took}: {rest}"
        return f"gradient check passed {took}: {self.stages} stages match plain calls; {rest}"


@dataclass(slots=True)
class RankVerdict:
    """The result of a proof for the stages of one rank."""

    failure: str = ""
    warnings: list[str] = field(default_factory=list)
    stages: int = 0
    worst: float = 0.0
    # Stages whose plain call did not fit into memory, and the bytes that were free for it; -1 if nobody knows.
    starved: list[int] = field(default_factory=list)
    free_bytes: int = -1


def prove(executor: Executor, batch: Batch) -> Proof:
    """Raise a `ProofError` on all ranks if the plan changes what a stage computes.

    All ranks must call this, with a `batch` that `executor.step` accepts. It restores
    gradients, buffers and random number generators, so a run that was proven trains exactly
    like one that was not.
    """
    began = time.perf_counter()
    comm = executor.comm
    executor.compare_batches(batch)
    compiled = any(map(has_compiled_layer, executor.modules.values()))
    obstacle = ""
    if any(map(is_distributed, _parameters(executor))):
        obstacle = (
            "its weights are distributed over processes (parallel.dp_shard, parallel.tp), so no "
            "rank can run a plain call alone"
        )
    mine = {"obstacle": obstacle, "compiled": compiled}
    facts = exchange(comm, mine)
    obstacles = [fact["obstacle"] for fact in facts if fact["obstacle"]]
    if obstacles:
        if comm.rank == 0:
            _log.info("the model is not proven before it trains: %s", obstacles[0])
        return Proof(skipped=obstacles[0])
    # Compiled code is proven on all rows, since it depends on the shape.
    compiled = any(fact["compiled"] for fact in facts)
    devices = _devices(executor)
    with restored_random(devices, comm.barrier):
        verdicts = _judge_together(executor, batch, compiled)
    _free_cached(devices)
    warnings: list[str] = []
    for verdict in verdicts:
        warnings += verdict.warnings
    if comm.rank == 0:
        for warning in warnings:
            _log.warning("%s", warning)
    for verdict in verdicts:
        if verdict.failure:
            raise ProofError(f"{verdict.failure}\n{LAST_RESORT}")
    stages = sum(verdict.stages for verdict in verdicts)
    worst = max(verdict.worst for verdict in verdicts)
    visited = len(choose_microbatches(executor.program.schedule))
    seconds = time.perf_counter() - began
    return Proof(stages, visited, worst, seconds, tuple(warnings))


def _judge_together(
    executor: Executor, batch: Batch, compiled: bool
) -> list[RankVerdict]:
    """Judge the stages of all ranks, again with fewer rows if a plain call does not fit into memory."""
    verdicts: list[RankVerdict] = []
    wanted = set(choose_microbatches(executor.program.schedule))
    numbers = _numbers_of_rows(batch, compiled)
    for rows in numbers:
        verdict = _judge_stages(executor, _first_rows(batch, rows), wanted)
        told = exchange(executor.comm, asdict(verdict))
        found = [RankVerdict(**fields) for fields in told]
        verdicts += found
        starved = {stage for one in found for stage in one.starved}
        if compiled and rows < numbers[0]:
            verdicts.append(_fewer_rows_verdict(wanted - starved, rows, numbers[0]))
        if not starved or any(one.failure for one in found):
            return verdicts
        # Another try, on all ranks together, since the inputs of stages come from those before.
        wanted = starved
        executor.recordings = (
            None  # on all ranks, which record again in their next step
        )
        gc.collect()
        _free_cached(_devices(executor))
    return [*verdicts, _starved_verdict(found)]


def _free_cached(devices: Collection[torch.device]) -> None:
    """Give the memory of dropped tensors and recordings back to the GPU."""
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()


def _numbers_of_rows(batch: Batch, compiled: bool) -> list[int]:
    """How many rows of a micro-batch to try one after the other, each if the one before needs too much memory."""
    most = max(len(x) for x in batch.inputs)
    first = most if compiled else min(most, MAX_PROOF_ROWS)
    return [first, *(rows for rows in (MAX_PROOF_ROWS, 1) if rows < first)]


def _fewer_rows_verdict(stages: Collection[int], rows: int, most: int) -> RankVerdict:
    """What to say of compiled stages that are not compared on all rows that they will train on."""
    warnings = [
        f"stage {stage} is compared on {rows} of {most} rows only: there is not enough memory for a "
        "plain call on all rows beside the plan"
        for stage in sorted(stages)
    ]
    return RankVerdict(warnings=warnings)


def _starved_verdict(verdicts: Sequence[RankVerdict]) -> RankVerdict:
    """What to say of stages that need too much memory even for a single row."""
    warnings = []
    for rank, verdict in enumerate(verdicts):
        free = ""
        if verdict.free_bytes >= 0:
            free = f" ({verdict.free_bytes / 2**30:.1f} GiB were free)"
        warnings += [
            f"stage {stage} on rank {rank} is not proven: there is not enough memory for a plain call on one row "
            f"beside the plan{free}"
            for stage in verdict.starved
        ]
    return RankVerdict(warnings=warnings)


def _parameters(executor: Executor) -> Iterator[nn.Parameter]:
    for module in executor.modules.values():
        yield from module.parameters()


def _devices(executor: Executor) -> set[torch.device]:
    return {parameter.device for parameter in _parameters(executor)}


# ---------------------------------------------------------------- real inputs
def choose_microbatches(schedule: Schedule) -> dict[int, int]:
    """Choose a micro-batch for every stage: few in all, preferably with many slices."""
    microbatches = schedule.microbatches
    chosen: dict[int, int] = {}
    numbers = range(len(microbatches))
    for number in sorted(numbers, key=lambda n: -microbatches[n].slices):
        for stage in microbatches[number].path:
            chosen.setdefault(stage, number)
    return chosen


def _first_rows(batch: Batch, rows: int) -> Batch:
    """A batch with only the first rows of each micro-batch."""
    named = [{name: x[:rows] for name, x in each.items()} for each in batch.named]
    return replace(
        batch,
        inputs=tuple(x[:rows] for x in batch.inputs),
        labels=tuple(y[:rows] for y in batch.labels),
        starts=tuple(starts[:rows] for starts in batch.starts),
        named=tuple(named),
    )


def _judge_stages(
    executor: Executor, batch: Batch, wanted: Collection[int]
) -> RankVerdict:
    """Judge the wanted stages of this rank, each on its real input."""
    edges = executor.edges(batch)  # together with the other ranks
    chosen = choose_microbatches(executor.program.schedule)
    benches = {
        stage: Bench(executor, stage, chosen[stage], batch)
        for stage in sorted(executor.modules)
        if stage in chosen
    }
    for stage, x in _inputs(executor, batch, edges, chosen, benches):
        benches[stage].set_input(x, batch, chosen[stage])
    verdict = RankVerdict()
    for bench in benches.values():
        if bench.stage not in wanted:
            bench.samples.clear()
            continue
        try:
            _judge(bench, verdict)
        except torch.OutOfMemoryError:
            # A plain call needs more than the plan: it is not compiled, and keeps all activations.
            verdict.starved.append(bench.stage)
        if bench.changed_weights and not verdict.failure:
            verdict.failure = _changed_weights_text(bench)
        bench.samples.clear()
        if bench.stage in verdict.starved:
            # Not before the error is gone, whose traceback holds what the call has made.
            gc.collect()
            verdict.free_bytes = free_bytes(bench.device)
        if verdict.failure:
            break
    return verdict


def _changed_weights_text(bench: Bench) -> str:
    """The error message for a stage that changes its weights, as only an optimizer may."""
    return (
        f"{bench.title} changes its weights itself, in a forward or in a hook of a gradient: "
        f"{', '.join(bench.changed_weights[:MAX_NAMES_SHOWN])}\n"
        "  other micro-batches are in flight meanwhile, and copies of the weights would differ\n"
        "  change them after the step, as an optimizer does (also what max_norm of an embedding does)"
    )


def _inputs(
    executor: Executor,
    batch: Batch,
    edges: Sequence[tuple[Edge, ...]],
    chosen: dict[int, int],
    benches: dict[int, Bench],
) -> Iterator[tuple[int, Value]]:
    """The stages of this rank and their inputs.

    The inputs come from one chain of plain forwards after another, in the same order on all
    ranks.
    """
    schedule = executor.program.schedule
    comm = executor.comm
    for number in sorted(set(chosen.values())):
        path = schedule.microbatches[number].path
        wanted = [place for place, stage in enumerate(path) if chosen[stage] == number]
        end = wanted[-1]
        x: Value = (batch.inputs[number],)
        device = x[0].device
        for place, stage in enumerate(path[: end + 1]):
            rank = schedule.stages[stage].rank
            if rank != comm.rank:
                continue
            before = schedule.stages[path[place - 1]].rank if place else rank
            if before != rank:
                x = benches[stage].receive(before, edges[number][place - 1], device)
            if place in wanted:
                yield stage, x
            if place < end:
                edge = edges[number][place]
                x = benches[stage].forward(x, batch, number, edge)
                after = schedule.stages[path[place + 1]].rank
                if after != rank:
                    benches[stage].send(x, after, edge)


# ---------------------------------------------------------------- one stage
def _judge(bench: Bench, verdict: RankVerdict) -> None:
    """Judge one stage, and add the result to the verdict."""
    where = f"stage {bench.stage} on rank {bench.executor.comm.rank}"
    proven = True
    for judge in _rounds(bench):
        if not judge.finite:
            verdict.warnings.append(
                f"{where} is not proven: its plain call produces infinite or NaN values"
            )
            proven = False
            continue
        differences = judge.compare(bench.options)
        verdict.worst = max(verdict.worst, judge.worst)
        if judge.unstable:
            verdict.warnings.append(
                f"{where} is not deterministic: two equal plain calls of it differ in {judge.unstable}, "
                "so the proof cannot see differences of that size"
            )
        if not differences:
            continue
        if _is_only_random(judge, differences[0]):
            redrawn = bench.options & REDRAWS
            names = [OPTION_NAMES[option] for option in Option if option in redrawn]
            verdict.warnings.append(
                f"{where} is not proven: it draws random numbers that cannot be switched off, and "
                f"{' and '.join(names)} draw other ones"
            )
            proven = False
            continue
        verdict.failure = _failure_text(where, differences, _find_cause(judge))
        return
    verdict.stages += proven
    _check_split(bench, where, verdict)


def _rounds(bench: Bench) -> Iterator[DifferenceJudge]:
    """The comparisons of a stage, which are not all made if one of them fails.

    One is enough, unless the stage draws random numbers and the plan draws other ones. Then
    one runs without dropout. If the plan also splits or recomputes, a second one compares
    these options with dropout, against a run that draws the same numbers.
    """
    plain = DifferenceJudge(bench, quiet=False)
    if not plain.drew_random or not bench.options & REDRAWS:
        yield plain
        return
    del plain  # its tensors
    yield DifferenceJudge(bench, quiet=True)
    base = bench.options - {Option.SPLIT, Option.RECOMPUTE}
    if base != bench.options:
        yield DifferenceJudge(bench, quiet=False, base=base)


def _is_only_random(judge: DifferenceJudge, difference: TensorDifference) -> bool:
    """Whether a stage without dropout still draws numbers that explain a difference."""
    if not judge.quiet or difference.raised:
        return False
    return judge.depends_on_random(difference.name)


def _check_split(bench: Bench, where: str, verdict: RankVerdict) -> None:
    """Warn if the backward is split, but W has nothing to do."""
    if bench.splits_in_vain:
        verdict.warnings.append(
            f"{where} splits its backward for nothing: none of its layers leaves weight gradients to W; "
            "torch.nn.Linear does, unless you compiled it yourself instead of calling penstock.runtime.compile_stage, "
            "and so do layers that call penstock.runtime.defer"
        )


def _find_cause(judge: DifferenceJudge) -> list[Option]:
    """The options that cause a difference; an empty list if no option does.

    These are all options that cause it alone, or else the fewest that cause it together.
    """
    options = judge.bench.options
    base = judge.base or frozenset()
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


def _failure_text(
    where: str, differences: Sequence[TensorDifference], cause: Sequence[Option]
) -> str:
    """The error message: what differs, why, and what to do."""
    first = differences[0]
    worst = max(differences, key=lambda difference: difference.share)
    if first.raised:
        lines = [
            f"{where} cannot run the way the plan runs it, though a plain call of it works: {first.raised}"
        ]
    else:
        lines = [
            f"{where} computes something else in this plan than in a plain call: {first}"
        ]
    if worst is not first:
        lines.append(
            f"  {len(differences)} tensors differ, most of all {worst.title}, by {worst.share:.2g}"
        )
    if cause:
        names = " together with ".join(OPTION_NAMES[option] for option in cause)
        lines.append(f"  cause: {names}")
    else:
        lines.append(
            "  cause: none of the plan's options; look for something that the stage keeps from one call to the next"
        )
    for option in cause:
        lines.append(f"  way out: {WAYS_OUT[option]}")
    return "\n".join(lines)


# ---------------------------------------------------------------- warm up
# Compiles the stages of a rank before its first step.
#
# Compiling takes from seconds to minutes, and not equally long on all ranks. Within a step, all other ranks would wait
# for the slowest compiler at one message after the other. Here each rank runs its own stages alone, in every way that
# the plan runs them, and the ranks meet once afterwards.


def warm_up(executor: Executor, batch: Batch, evaluates: bool = True) -> None:
    """Run every stage of this rank once, in training and in evaluation if it `evaluates`, and leave no trace.

    All ranks must call this. It sends no message except to find the shapes between stages, and to meet at the end.
    """
    chosen = choose_microbatches(executor.program.schedule)
    executor.edges(batch)  # together with the other ranks
    own = [stage for stage in sorted(executor.modules) if stage in chosen]
    devices = {x.device for x in batch.inputs}
    with restored_random(devices, executor.comm.barrier):
        for stage in own:
            number = chosen[stage]
            bench = Bench(executor, stage, number, batch)
            x: Value = (batch.inputs[number],)
            if bench.incoming is not None:
                x = _random_input(bench.incoming, x[0].device)
            bench.set_input(x, batch, number)
            bench.run_all(evaluates)


def _random_input(edge: Edge, device: torch.device) -> Value:
    """Random numbers like those that another stage passes on; whole numbers are zero."""
    dice = torch.Generator().manual_seed(PROOF_SEED)
    tensors = []
    for shape, dtype, _ in edge.tensors:
        x = torch.zeros(shape, dtype=dtype)
        if has_gradient(dtype):
            x = torch.randn(shape, generator=dice, dtype=dtype)
        tensors.append(x.to(device))
    return tuple(tensors)


# ---------------------------------------------------------------- limits
# Decides whether two ways to run a stage compute the same result, except for rounding.
#
# Two ways that are equal on paper still differ by rounding, because they add numbers in another
# order. All limits apply to the norm of a tensor's difference, since single numbers near zero
# have no precision of their own:
#
# - Every tensor may differ by `ALLOWED_ROUNDINGS` roundings of its norm. Buffers are compared by what the step has
#   added to them, which may differ by as many roundings of the buffer as well. One rounding is the eps
#   of the data type, or of matrix products, which a GPU may compute in TF32. The limit is at
#   most `MAX_ROUNDING_SHARE`, because half precision would hide real faults otherwise.
# - Under autocast, both ways are compared with the plain way in full precision. The planned way
#   may be off by `AUTOCAST_FACTOR` times as much as the plain way under autocast.
# - Only if that is not enough, the effect of rounding is measured: the plain way runs again with
#   every layer's output changed by one rounding, up or down at random. `NOISE_FACTOR` times the
#   observed change is allowed as well. Some gradients are zero on paper and noise in practice,
#   such as that of the bias of keys in attention; this keeps them from raising a false alarm.
#
# Real faults are far larger. A slice with wrong positions, or a dropout mask that is drawn again,
# changes some gradients by hundreds of times as much.

ALLOWED_ROUNDINGS = 32  # of a tensor's norm

MAX_ROUNDING_SHARE = 0.01  # of a tensor's norm, whatever the data type

NOISE_FACTOR = 16  # times the change that rounding was observed to make

AUTOCAST_FACTOR = 4  # times the error of the plain way under autocast

NOISE_RUNS = 2  # measurements of the effect of rounding

# The eps of products of float32 matrices, by torch.get_float32_matmul_precision().
PRODUCT_EPS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs by more than rounding, or the error of the planned way."""

    name: str
    gap: float = 0.0  # the norm of the difference
    allowed: float = 0.0
    norm: float = 0.0  # of the expected tensor
    raised: str = ""

    @property
    def share(self) -> float:
        """The difference as a share of the tensor's norm, if that is not zero."""
        return self.gap / (self.norm or 1.0)

    @property
    def title(self) -> str:
        """What differs, as text."""
        if self.name.startswith("the "):
            return self.name
        return f"the gradient of {self.name}"

    def __str__(self) -> str:
        unit = "of its norm" if self.norm else "from zero"
        allowed = self.allowed / (self.norm or 1.0)
        return (
            f"{self.title} differs by {self.share:.2g} {unit}; "
            f"rounding explains at most {allowed:.2g}"
        )


class DifferenceJudge:
    """Compares ways to run one stage with an expected result, with or without dropout.

    The expected result is that of the plain way, or that of the planned way with only the
    options `base`.
    """

    def __init__(self, bench: Bench, quiet: bool, base: Options | None = None) -> None:
        self.bench = bench
        self.quiet = quiet
        self.base = base
        if base is None:
            self.expected = bench.run_plain(quiet=quiet)
        else:
            self.expected = bench.run_planned(base, quiet)
        self.drew_random = bench.drew_random
        self.norms = {name: _norm(value) for name, value in self.expected.items()}
        self.worst = 0.0  # the largest difference, as a share of what is allowed
        # The first tensor that differs between two equal runs of the plain way.
        self.unstable = ""
        self.autocast_errors: dict[str, float] | None = None
        self.noise_limits: dict[bool, dict[str, float]] = {}

    @property
    def finite(self) -> bool:
        """Whether the expected result is finite, so that it can be compared."""
        return all(isfinite(norm) for norm in self.norms.values())

    def compare(self, options: Options) -> list[TensorDifference]:
        """Run the planned way with these options, and return what differs too much."""
        try:
            results = self.bench.run_planned(options, self.quiet)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a layer may raise anything
            first_line = str(error).strip().partition("\n")[0]
            return [
                TensorDifference("", raised=f"{type(error).__name__}: {first_line}")
            ]
        cast = Option.AUTOCAST in options
        gaps = _gaps(results, self.expected)
        limits = {name: self.limit(name, cast) for name in gaps}
        if any(gap > limits[name] for name, gap in gaps.items()):
            noise = self.noise_limit(cast)
            limits = {one: limit + noise.get(one, 0.0) for one, limit in limits.items()}
        differences = []
        for name, gap in gaps.items():
            limit = limits[name]
            if limit:
                self.worst = max(self.worst, gap / limit)
            if gap > limit:
                norm = self.norms.get(name, 0.0)
                differences.append(TensorDifference(name, gap, limit, norm))
        return differences

    def limit(self, name: str, cast: bool) -> float:
        """How much a tensor may differ, before the effect of rounding is measured."""
        against_plain = self.base is None
        eps = self.eps(cast and not against_plain)
        share = min(ALLOWED_ROUNDINGS * eps, MAX_ROUNDING_SHARE)
        limit = share * self.norms.get(name, 0.0)
        limit += ALLOWED_ROUNDINGS * self.bench.buffer_rounding.get(name, 0.0)
        if cast and against_plain:
            limit += AUTOCAST_FACTOR * self.autocast_error(name)
        return limit

    def eps(self, cast: bool) -> float:
        """The eps of the least precise data type in use."""
        executor = self.bench.executor
        types = {p.dtype for p in self.bench.module.parameters()}
        edges = [edge for edge in (self.bench.incoming, self.bench.outgoing) if edge]
        types.update(spec.dtype for edge in edges for spec in edge.tensors)
        if cast and executor.stages.autocast is not None:
            types.add(executor.stages.autocast)
        real = {kind.to_real() for kind in types if has_gradient(kind)}
        eps = max(torch.finfo(kind).eps for kind in real or {torch.float32})
        if torch.float32 in real:
            eps = max(eps, PRODUCT_EPS[torch.get_float32_matmul_precision()])
        return eps

    def autocast_error(self, name: str) -> float:
        """How far the plain way under autocast is from the one in full precision."""
        if self.autocast_errors is None:
            results = self.bench.run_plain(autocast=True, quiet=self.quiet)
            self.autocast_errors = _gaps(results, self.expected)
        return self.autocast_errors.get(name, 0.0)

    def noise_limit(self, cast: bool) -> dict[str, float]:
        """How much each tensor may differ because of rounding and of unstable kernels.

        That is how much changes when all outputs are rounded differently, plus how much
        changes when the same run is repeated.
        """
        if cast in self.noise_limits:
            return self.noise_limits[cast]
        plain = self.bench.run_plain(cast, self.quiet)
        change = dict.fromkeys(self.expected, 0.0)
        for seed in range(NOISE_RUNS):
            rounded = self.bench.run_plain(
                cast, self.quiet, noise=self.eps(cast), noise_seed=seed
            )
            for name in change:
                gap = _gap(rounded.get(name), plain.get(name))
                change[name] = max(change[name], gap)
        repeated = self.bench.run_plain(cast, self.quiet)
        for name in change:
            gap = _gap(repeated.get(name), plain.get(name))
            change[name] += gap
            stable = ALLOWED_ROUNDINGS * self.eps(cast) * self.norms[name]
            if gap > stable and not self.unstable:
                self.unstable = name
        limits = {name: NOISE_FACTOR * gap for name, gap in change.items()}
        self.noise_limits[cast] = limits
        return limits

    def depends_on_random(self, name: str) -> bool:
        """Whether other random numbers change a tensor."""
        other = self.bench.run_plain(quiet=self.quiet, seed=PROOF_SEED + 1)
        gap = _gap(other.get(name), self.expected.get(name))
        return self.drew_random and gap > self.limit(name, cast=False)


def _norm(value: Tensor | None) -> float:
    """The norm of a tensor; infinite if it has a NaN."""
    if value is None:
        return 0.0
    wide = torch.promote_types(value.dtype, torch.float32)
    norm = float(torch.linalg.vector_norm(value.to(wide)))
    return float("inf") if isnan(norm) else norm


def _gaps(results: Results, expected: Results) -> dict[str, float]:
    """The norm of the difference of each tensor; a buffer may have changed in one of the ways only."""
    names = dict.fromkeys([*expected, *results])
    return {name: _gap(results.get(name), expected.get(name)) for name in names}


def _gap(first: Tensor | None, second: Tensor | None) -> float:
    """The norm of the difference of two tensors; a missing one counts as zero."""
    if first is None:
        return _norm(second)
    if second is None:
        return _norm(first)
    if first.shape != second.shape:
        return float("inf")
    wide = torch.promote_types(first.dtype, second.dtype)
    wide = torch.promote_types(wide, torch.float32)
    return _norm(first.to(second.device, wide) - second.to(wide))
