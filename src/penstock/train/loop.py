"""The training loop of one process; a thread, a process or a GPU may be behind `comm`.

    batches ─► executor.step ─► gradients.measure ─► clip ─► optimizer ─► row ─┬─ evaluate, now and then
       ▲        the lane          one sum over all                             ├─ save, now and then
       └───────────────────────────────────────────────────────────────────────┴─ stop, if a rank was asked to

The result of a step depends only on the config and the seed. Schedules, ranks, copies and
meshes change the order in which numbers are added, and nothing else.
"""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from penstock.errors import FileError, RunError
from penstock.models.family import flops_per_token, peak_flops, share_of_flops
from penstock.models.layer import dropping
from penstock.runtime import Comm, Executor, watching
from penstock.runtime.process.machine import count_neighbours
from penstock.runtime.process.watchdog import alarm_held
from penstock.train.checkpoints.checkpoint import CheckpointFacts, read_facts, sweep
from penstock.train.data.corpus import MixedCorpus, write_use
from penstock.train.history import (
    Counts,
    History,
    OwnNumbers,
    StepFigures,
    StepRow,
    WatchRow,
    write_timeline,
)
from penstock.train.hooks import Callbacks, EarlyStop, read_progress
from penstock.train.job import (
    Job,
    Verdict,
    check_same_model,
    checkpoint_facts,
    checkpoint_to_resume,
)
from penstock.train.lora import check_same_adapters
from penstock.train.optimizer import Gradients, check_same_optimizer, factor_at, rate_at
from penstock.train.rank_weights import CrewChange, Handover, RankWeights, transfer
from penstock.train.setup import (
    Evaluator,
    StepExecutors,
    compile_stages,
    prove_stages,
    set_up_rank,
)
from penstock.train.step_paths import (
    is_due,
    is_timed,
    mean_layers,
    step_paths,
)
from penstock.train.weights import Holding, Sizes, drop_unvisited_gradients

_log = logging.getLogger(__name__)


class Trainer:
    """One process of a run: a rank of the schedule, or a share of one."""

    def __init__(
        self,
        job: Job,
        comm: Comm,
        device: torch.device | None = None,
        watch: WatchRow | None = None,
        before: Trainer | None = None,
        handover: Handover | None = None,
    ) -> None:
        config = job.config
        self.job = job
        self.comm = comm
        self.watch = watch
        self.leads = comm.rank == job.leader  # whether it writes the files of the run
        self.device = device or torch.device("cpu")
        self.paths = step_paths(job.plan, config.paths)
        schedules = self.paths.schedules
        # What this process trained until a worker was lost or came (`penstock.crew`).
        self.before = before.weights if before is not None else None
        self.handover = handover
        self.setup = set_up_rank(job, comm, schedules, self.device, self.before)
        self.loader = self.setup.loader(schedules)
        executors = [self.setup.executor(schedule) for schedule in schedules]
        self.executors = StepExecutors(executors, self.paths)
        self.evaluator = Evaluator(self.setup, self.executors, self.loader)
        self.weights: RankWeights = RankWeights(
            job, comm, self.device, self.setup.holding, self.before
        )
        self.gradients = Gradients(self.holding, comm, self.device)
        self.early_stop = EarlyStop(job, comm, self.weights)
        # Called with the seconds that each rank has worked, after every step.
        self.tell_work: Callable[[list[float]], None] = lambda seconds: None
        self.saver = job.saver(
            job.checkpoints, comm, config.run.keep_checkpoints, self.weights.saved_names
        )
        self.callbacks = Callbacks(config.run.callbacks if self.leads else ())
        self.saver.announce = self.callbacks.on_checkpoint
        # Layers that a micro-batch passes through in a step with each schedule.
        self.layers = [mean_layers(one, job.partition) for one in schedules]
        self.utilization = flops_utilization(
            job.sizes, config.data.seq_len, comm.ranks, self.device
        )
        self.step = 0  # steps done
        # When the last of them was done, or the work on the first began.
        self.done_at: float = before.done_at if before is not None else time.monotonic()
        self.seen = 0  # sequences of those steps, and of earlier runs
        self.begun = False  # whether it takes the place of the trainer before
        self.figures: StepFigures | None = None  # of the last step
        self.closed = True  # whether the last step was evaluated and written down
        self.save_again = False  # because a loss has interrupted the last checkpoint
        # Whether the crew is about to change, so that all should leave after this step.
        self.changing: Callable[[], bool] = lambda: False
        self.leaving = False  # whether a rank has said so

    @property
    def holding(self) -> Holding:
        """The stages of this process and their parameters."""
        return self.weights.holding

    @property
    def executor(self) -> Executor:
        """The executor of the next step."""
        return self.executors.at(self.step)

    # ------------------------------------------------------------ beginning
    def begin(self) -> None:
        """Fill the weights: from what this process had, a checkpoint, a folder, or at random."""
        if self.handover is not None:
            self.take_over(self.handover)
        else:
            self.fill()
            states = self.weights.part_states
            transfer(self.job.mirrors, self.comm, states, states)
        self.weights.settle()
        self.begun = True

    def take_over(self, handover: Handover) -> None:
        """Go on after the last step of the generation before, with its weights.

        A step in flight is dropped with its gradients, and its data is read again. Until all ranks
        have their parts, nobody forgets one.
        """
        before, self.before = self.before, None  # It would keep its memory.
        self.begun = True  # It knows all that the trainer before knew.
        self.step = handover.step
        self.seen = self.loader.seen = handover.seen
        self.figures = handover.figures
        self.closed = handover.figures is None
        self.save_again = handover.save
        self.weights.take_over(before, handover)
        self.comm.barrier()

    def fill(self) -> None:
        """Fill the weights: from the newest good checkpoint, from a folder, or at random."""
        names = self.weights.saved_names
        checkpoint = checkpoint_to_resume(self.job, self.comm, names)
        self.weights.initialize(resumes=checkpoint is not None)
        if checkpoint is not None:
            self.resume(checkpoint)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of the same model, however it was split."""
        facts = read_facts(path)
        check_same_model(path, facts, self.job.sizes)
        check_same_optimizer(path, facts, self.job.config.optimizer)
        check_same_adapters(path, facts, self.job.config.lora)
        self.weights.read_checkpoint(path)
        self.loader.resume(facts["data"])
        self.seen = self.loader.seen
        self.step = int(facts["step"])
        self.early_stop.progress = read_progress(facts)
        if self.leads:
            _log.info("going on from %s", path)

    def rehearse(self) -> None:
        """Compile the stages and prove them, where the config asks for it."""
        settings = self.job.config.run
        if self.setup.compiles:
            compile_stages(
                self.executors, self.loader, self.comm, settings.timeout, self.leads
            )
        if settings.asks("gradients"):
            prove_stages(self.executors, self.loader, self.leads)

    # ------------------------------------------------------------ running
    def run(
        self,
        stop: Callable[[], bool] = lambda: False,
        ready: Callable[[], None] = lambda: None,
    ) -> Verdict:
        """Train until the last step, or until a rank is asked to stop; then save.

        Calls `ready` before the first step. Raises CrewChange after a step if another
        generation is to go on from there.
        """
        if self.job.keeps_folder(self.comm.rank):
            sweep(self.job.checkpoints)
        self.comm.barrier()
        with watching(self.executors):
            self.begin()
            if self.handover is None:
                self.rehearse()
            history = History(self.job.folder, self.step) if self.leads else None
            ready()
            try:
                stopped = self.steps(history, stop)
                self.saver.finish()
                self.saver.check_copy()
            finally:
                if history is not None:
                    history.close()
        if self.leaving:
            raise CrewChange
        if not stopped:
            self.collect_checkpoint()
        self.callbacks.on_end(self.step, stopped)
        figures = self.figures
        interrupted = stopped and figures is not None and figures.interrupted
        return Verdict(self.step, stopped, interrupted=interrupted)

    def steps(self, history: History | None, stop: Callable[[], bool]) -> bool:
        """Run the steps; return whether a rank was asked to stop."""
        settings = self.job.config.run
        if not self.closed and self.close_step(history):
            return not self.early_stop.gets_no_better
        while self.step < settings.steps and not self.early_stop.gets_no_better:
            began = time.perf_counter()
            loss_share, bubble, own = self.forward_and_back(
                is_timed(self.step + 1, settings, self.paths)
            )
            loss, norm, numbers, counts = self.gradients.measure(
                loss_share, own, self.counts(stop)
            )
            if not math.isfinite(loss) or not math.isfinite(norm):
                self.give_up(loss, norm)
            figures = StepFigures(
                loss,
                norm,
                memory=int(max(own.memory for own in numbers)),
                seconds=0.0,  # not known yet
                bubble=bubble,
                stopping=counts.stop + counts.enough > 0,
                mirror_bytes=counts.mirror_bytes,
                mirror_seconds=counts.mirror_microseconds * 1e-6 / len(numbers),
                interrupted=counts.stop > 0,
            )
            self.commit(figures, began)
            if self.saver.step is not None and counts.saved == self.comm.ranks:
                self.saver.commit()  # A rank may be lost in it, but the step is done.
            self.tell_work([one.worked for one in numbers])
            if self.close_step(history):
                return not self.early_stop.gets_no_better
            if counts.change and self.step < settings.steps:
                self.leaving = True
                return False
        return False

    def forward_and_back(self, timed: bool) -> tuple[float, float | None, OwnNumbers]:
        """Run all passes of a step; return this process's share of the loss, the bubble, and what it tells others.

        The bubble is None if the step was not timed.
        """
        executor = self.executor
        results = []
        worked = 0.0
        passes = self.job.config.run.accumulate
        for turn, batch in enumerate(self.loader.step()):
            first_row = self.loader.shape.first_row(turn)
            # Replicas sum the gradients of all passes at once.
            sums = turn == passes - 1
            with dropping(self.job.config.run.seed, self.step, first_row):
                results.append(executor.step(batch, timed, sums=sums))
            worked += executor.work_seconds
        drop_unvisited_gradients(self.holding, executor.program.schedule)
        # Reading the loss makes the host wait for the GPU, so what can be done before comes first.
        self.gradients.begin()
        own = OwnNumbers(peak_memory(self.device, executor), worked)
        self.weights.mirrors.start()
        if self.device.type == "cuda" and self.step + 1 < self.job.config.run.steps:
            self.loader.prepare()
        loss = (
            sum(result.loss for result in results) if self.setup.place.speaks else 0.0
        )
        self.weights.mirrors.collect()
        timeline = results[-1].timeline
        if timeline is None:
            return loss, None, own
        if self.leads and self.job.whole:
            number = self.paths.at(self.step)
            full = self.paths.is_full(self.step)
            write_timeline(self.job.folder, self.step + 1, timeline, number, full)
        return loss, timeline.bubble, own

    def counts(self, stop: Callable[[], bool]) -> Counts:
        """What this rank adds to the counts of a step."""
        saved = self.saver.step is not None and self.saver.done()
        return Counts(
            int(stop()),
            int(self.callbacks.wants_stop),
            int(saved),
            int(self.changing()),
            self.weights.mirrors.sent_bytes,
            self.weights.mirrors.take_microseconds(),
        )

    def commit(self, figures: StepFigures, began: float | None = None) -> None:
        """Update the weights and count the step; nothing can interrupt it.

        One sum over all ranks has given everybody the figures, so all ranks have all their
        gradients by now, and a rank that has missed the figures can still commit with them.
        """
        with alarm_held():
            self.update(figures.norm)
            if began is not None:
                figures = replace(figures, seconds=time.perf_counter() - began)
            self.step += 1
            self.done_at = time.monotonic()
            self.seen = self.loader.seen
            self.figures = figures
            self.closed = False

    def update(self, norm: float) -> None:
        """Update the weights."""
        config = self.job.config
        factor = factor_at(self.step, config.run.steps, config.optimizer)
        self.gradients.clip(norm, config.optimizer.clip_norm)
        self.weights.optimizer.step(factor)
        self.weights.mirrors.update(factor, norm, config.optimizer.clip_norm)

    def close_step(self, history: History | None) -> bool:
        """Evaluate, write down and save the step that is done, where that is due.

        Return whether to stop. After a loss, it may be called again for the same step.
        """
        figures = self.figures
        assert figures is not None
        settings = self.job.config.run
        last = self.step == settings.steps
        evaluation = None
        if last or is_due(self.step, settings.eval_every):
            evaluation = self.evaluator.mean_loss()
            if self.early_stop.note(self.step, evaluation):
                self.early_stop.keep(self.step, self.facts())
        if history is not None and not history.has(self.step):
            row = self.row(figures, evaluation)
            history.put(row)
            self.callbacks.on_step(row)
            if self.watch is not None:
                self.watch(row)
        ends = last or self.early_stop.gets_no_better
        if ends:
            self.early_stop.take_best(self.step)
        due = ends or is_due(self.step, settings.save_every)
        if figures.stopping or due or self.save_again:
            self.save()
        self.save_again = False
        self.closed = True
        return figures.stopping or self.early_stop.gets_no_better

    def row(self, figures: StepFigures, evaluation: float | None) -> StepRow:
        """Return what is written down about the step that is done."""
        config, sizes = self.job.config, self.job.sizes
        tokens = self.loader.shape.sequences * self.loader.corpus.length
        layers = self.layers[self.paths.at(self.step - 1)]
        work = share_of_flops(sizes, self.job.corpus.length, layers)
        leaves_out = min(self.layers) < sizes.layers
        mirrored = figures.mirror_bytes > 0
        return StepRow(
            self.step,
            figures.loss,
            figures.norm,
            rate_at(self.step - 1, config.run.steps, config.optimizer),
            figures.seconds,
            tokens,
            figures.memory,
            self.loader.epoch,
            figures.bubble,
            evaluation,
            self.utilization(tokens / figures.seconds * work),
            layers if leaves_out else None,
            figures.mirror_bytes if mirrored else None,
            figures.mirror_seconds if mirrored else None,
        )

    # ------------------------------------------------------------ saving
    def save(self) -> None:
        """Begin a checkpoint, after waiting for an earlier one that is still being written."""
        corpus = self.job.corpus
        if self.leads and isinstance(corpus, MixedCorpus):
            use = corpus.use(self.loader.seen, self.job.config.run.seed)
            write_use(self.job.folder, use)
        if self.saver.step is not None:
            self.saver.finish()
        tensors = self.weights.tensors()
        self.saver.check_room(self.step, tensors)
        self.saver.begin(self.step, tensors, self.facts())

    def collect_checkpoint(self) -> None:
        """Complete the last checkpoint in rank 0's folder, from which the model will be used."""
        if self.job.separate is None:
            return
        checkpoints = self.job.checkpoints
        try:
            self.job.separate.checkpoints(checkpoints, self.comm).collect(self.step)
        except FileError as error:
            if self.leads:
                _log.warning("the last checkpoint stays on several machines: %s", error)

    def facts(self) -> CheckpointFacts:
        """Return the description that goes into a checkpoint."""
        return checkpoint_facts(self.job, self.loader, asdict(self.early_stop.progress))

    def give_up(self, loss: float, norm: float) -> None:
        """Save the weights before a step whose loss or gradients are not finite, and raise."""
        self.loader.seen -= self.loader.shape.sequences  # This step does not count.
        self.save()
        self.saver.finish()
        raise RunError(
            f"in step {self.step + 1} the loss is {loss:g} and the norm of the gradients "
            f"{norm:g}\n  the weights before that step are saved in "
            f"{self.job.checkpoints}; go on with --resume and a lower optimizer.lr, "
            "a lower optimizer.clip_norm or a longer optimizer.warmup_steps"
        )


def flops_utilization(
    sizes: Sizes, tokens: int, ranks: int, device: torch.device
) -> Callable[[float], float | None]:
    """Return a function from tokens per second to model FLOPs utilization (MFU).

    MFU is the share of the peak of all devices. The function returns None if the peak of
    the device is not known.
    """
    peak = None
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device))
    if peak is None:
        return lambda speed: None
    gpus_per_rank = torch.cuda.device_count() / count_neighbours(ranks)
    devices = ranks * min(1.0, gpus_per_rank)  # Ranks may share a GPU.
    share = flops_per_token(sizes, tokens) / (devices * peak)
    return lambda speed: speed * share


def peak_memory(device: torch.device, executor: Executor) -> int:
    """The peak memory of this rank in bytes, of its GPU or of its process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) + executor.recording_bytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
