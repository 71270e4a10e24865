"""Sets up a rank before it trains: its place in the mesh, its parts, its executors and its loader.

job, comm ─► set_up_rank ─► RankSetup ─┬─ executor(schedule)     runs this rank's lane
                                       └─ loader(schedules)      reads the tokens that the lane needs

A rank has an executor for each schedule of the run; a step takes one of them:

    stages, comm ──┬── executor of the paths a ──┐
                   ├── executor of the paths b ──┼── step ──► gradients of the same parameters
                   └── executor of full steps ───┘

All of them are built before the first step, over the same stages and the same `Comm`, so that
switching costs nothing and needs no more memory. A lane is only a list.

Before its first step a rank compiles its stages and proves them. Both use the data of that step, and leave no trace in
weights or loader.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.config import is_recording
from penstock.ir import Program, Schedule, lower
from penstock.models import Part
from penstock.models.family import keys_per_token
from penstock.runtime import (
    Batch,
    Comm,
    CudaTape,
    Executor,
    ProcessComm,
    compile_stage,
    prove,
)
from penstock.runtime.executor import RunOptions
from penstock.runtime.loss import Reduction
from penstock.runtime.proof import warm_up
from penstock.schedules.coverage import through_all_parts, visited_parts
from penstock.train.compiling import COMPILER, chunk_of, is_compiling, loss_of
from penstock.train.data.loader import BatchShape, DocumentCutter, Loader, wanted_by
from penstock.train.job import Job
from penstock.train.placement import precision_on
from penstock.train.rank_weights import RankWeights
from penstock.train.step_paths import StepPaths, sum_messages_of
from penstock.train.user_code import probe_loss
from penstock.train.weights import Holding, MeshPlace, attach_parameters, hold, place_of

# The types of run.comm_dtype; None is that of the stages.
MESSAGE_DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class RankSetup:
    """One process of a run, with its place in the mesh and the parts that it holds."""

    job: Job
    device: torch.device
    place: MeshPlace
    holding: Holding
    compiles: bool  # whether its stages are compiled

    def executor(self, schedule: Schedule) -> Executor:
        """Return an executor for this rank's lane of a schedule over the plan's stages."""
        config = self.job.config
        run = config.run
        recompute = frozenset(
            stage
            for stage in self.holding.stages
            if run.recompute == "full"
            or schedule.stages[stage].part in self.job.plan.recompute
        )
        precision = precision_on(config, self.device.type)
        records = is_recording(config, self.device.type == "cuda")
        records = records and schedule is self.job.plan.schedule
        loss = loss_of(COMPILER if self.compiles else "", chunk_of(config), run)
        return Executor(
            lower(schedule),
            self.holding.stages,
            self.place.pipeline,
            loss,
            recompute=recompute,
            autocast=torch.bfloat16 if precision == "bfloat16" else None,
            tape=CudaTape() if records else None,
            reduction=self.reduction,
            options=RunOptions(
                tied=self.holding.tied,
                messages=MESSAGE_DTYPES[run.comm_dtype],
                sums=self.job.plan.sums,
                sum_messages=MESSAGE_DTYPES[sum_messages_of(self.job.plan)],
                accumulates=run.accumulate > 1,
            ),
        )

    @property
    def reduction(self) -> Reduction:
        """How the loss combines the losses of its labels; the user's own is probed."""
        run = self.job.config.run
        return probe_loss(run, self.job.sizes.vocab) if run.own_loss else Reduction.SUM

    def wanted(self, schedules: Iterable[Schedule]) -> frozenset[int]:
        """Return the micro-batches whose tokens this rank reads with any of these schedules."""
        rank = self.place.pipeline.rank
        apart = self.job.corpus.apart
        wanted = [wanted_by(schedule, rank, apart) for schedule in schedules]
        return frozenset().union(*wanted)

    def loader(self, schedules: Iterable[Schedule]) -> Loader:
        """Return the loader of the training text for steps with any of these schedules."""
        job = self.job
        config = job.config
        shape = BatchShape(
            config.rows,
            len(job.plan.schedule.microbatches),
            config.run.accumulate,
            self.wanted(schedules),
            config.parallel.dp_shard,
            self.place.shard,
        )
        cutter = cutter_of(job, self.device)
        seed = config.run.seed
        return Loader(job.corpus, shape, seed, self.device, cutter)


def set_up_rank(
    job: Job,
    comm: Comm,
    schedules: Iterable[Schedule],
    device: torch.device,
    before: RankWeights | None,
) -> RankSetup:
    """Give a process its place and the parts that it trains with these schedules.

    All processes must call it. Parts that it had `before` are used again.
    """
    config = job.config
    schedule = job.plan.schedule
    place = place_of(comm, config.parallel, schedule.ranks, device)
    kept: dict[int, Part] = {}
    if before is not None:
        # A generation that broke before it had begun may have tied them otherwise.
        attach_parameters(before.holding)
        kept = before.filled_parts
    holding = hold(
        job.sizes,
        schedule,
        job.partition,
        place.pipeline.rank,
        device,
        place,
        frozenset().union(*map(visited_parts, schedules)),
        kept,
        job.adapt,
    )
    compiles = is_compiling(config, device)
    if compiles:
        parts = {schedule.stages[n].part: part for n, part in holding.stages.items()}
        for number, part in parts.items():
            if number not in kept:
                compile_stage(part, COMPILER)
    return RankSetup(job, device, place, holding, compiles)


def cutter_of(job: Job, device: torch.device) -> DocumentCutter | None:
    """Return what cuts the documents of each step; None if the plan's cuts are right for all.

    On a GPU attention computes the whole pack and hides what a document must not see, so
    that documents do not change the time of a slice.
    """
    schedule = job.plan.schedule
    if (
        not job.config.data.document_mask
        or schedule.slices == 1
        or device.type != "cpu"
    ):
        return None
    slices = tuple(microbatch.slices for microbatch in schedule.microbatches)
    return DocumentCutter(slices, keys_per_token(job.sizes))


class StepExecutors:
    """The executors of a rank, and the one that runs now, which the watchdog looks at."""

    def __init__(self, executors: Sequence[Executor], paths: StepPaths) -> None:
        self.executors = tuple(executors)
        self.paths = paths
        self.running = self.executors[0]
        for executor in self.executors[1:]:
            # The first one has warned already.
            executor.warns_of_deferrals = False
            # All have the same stages, so that one copy of the weights serves them.
            executor.casts = self.executors[0].casts

    def at(self, step: int) -> Executor:
        """Return the executor of a step, counted from 0, and watch it from now on."""
        self.running = self.executors[self.paths.at(step)]
        return self.running

    @property
    def covering(self) -> list[Executor]:
        """The first executor, and others as long as they visit further stages of any rank."""
        found: list[Executor] = []
        visited: set[int] = set()
        for executor in self.executors:
            stages: set[int] = set()
            for microbatch in executor.program.schedule.microbatches:
                stages.update(microbatch.path)
            if not found or not stages <= visited:
                found.append(executor)
            visited |= stages
        return found

    # ------------------------------------------------------------ for the watchdog
    @property
    def program(self) -> Program:
        """The program that runs now."""
        return self.running.program

    @property
    def comm(self) -> Comm:
        """The connection to the other ranks."""
        return self.running.comm

    @property
    def doing(self) -> str:
        """The action that runs now, or that waits for its input."""
        return self.running.doing


class Evaluator:
    """Evaluates the whole model, whatever paths are trained.

    If the schedule skips parts, the evaluation has the lanes of full steps or, if there are
    none, lanes of its own, with links that training may not use.
    """

    def __init__(
        self, setup: RankSetup, executors: StepExecutors, loader: Loader
    ) -> None:
        job = setup.job
        schedules = executors.paths.schedules
        trained = schedules[-1]  # the full one, if there is one
        schedule = through_all_parts(trained)
        self.setup = setup
        self.executor = executors.executors[-1]
        self.needs_links = len(schedules) > 1
        shape, cutter = loader.shape, loader.cutter
        if schedule is not trained:
            self.needs_links = True
            self.executor = setup.executor(schedule)
            shape = replace(shape, wanted=setup.wanted([schedule]))
            cutter = None
        corpus = job.corpus if job.validation is None else job.validation
        seed = job.config.run.seed
        self.loader = Loader(corpus, shape, seed, setup.device, cutter)

    def losses(self, batches: int) -> list[float]:
        """Return the loss of each pass; their sum is the mean loss over all sequences."""
        passes = self.loader.evaluation(batches)
        if self.needs_links and passes:
            self.executor.prepare_messages(passes[0])
            self.needs_links = False
        return [self.executor.evaluate(batch) for batch in passes]

    def mean_loss(self) -> float | None:
        """Return the mean loss on held-out text, the same on all ranks; None without any."""
        losses = self.losses(EVALUATED_BATCHES)
        place = self.setup.place
        share = sum(losses) if place.speaks else 0.0
        total = torch.tensor([share], dtype=torch.float64, device=self.setup.device)
        place.world.add(total, tuple(range(place.world.ranks))).wait()
        return float(total) if losses else None


EVALUATED_BATCHES = 2
_log = logging.getLogger(__name__)


def next_batch(loader: Loader) -> Batch:
    """Return the first batch of the next step, which the loader will deal again."""
    seen = loader.seen
    batch = loader.step()[0]
    loader.seen = seen
    return batch


def compile_stages(
    executors: StepExecutors, loader: Loader, comm: Comm, patience: float, leads: bool
) -> None:
    """Compile the stages of this rank while no other rank waits for them.

    A rank that is done waits for the slowest compiler, so the usual patience begins afterwards.
    """
    began = time.perf_counter()
    if leads:
        _log.info("compiling the stages, which may take some minutes")
    batch = next_batch(loader)
    for executor in executors.covering:
        warm_up(executor, batch)
    if isinstance(comm, ProcessComm):
        comm.set_patience(patience)
    if leads:
        seconds = time.perf_counter() - began
        _log.info("compiled the stages in %.1f s", seconds)


def prove_stages(executors: StepExecutors, loader: Loader, leads: bool) -> None:
    """Check that every stage computes under the plan what a plain call computes."""
    batch = next_batch(loader)
    proofs = [prove(executor, batch) for executor in executors.covering]
    if loader.device.type == "cuda":
        # The report shows the peak of the steps, not of the proof.
        torch.cuda.reset_peak_memory_stats(loader.device)
    if leads and not proofs[0].skipped:
        seconds = sum(proof.seconds for proof in proofs)
        # The one with the most gaps; if there are none, the one with the most stages.
        told = max(proofs, key=lambda one: (one.visited - one.stages, one.stages))
        _log.info("%s", replace(told, seconds=seconds))
