"""Training, in one process: the same lines in every one, with a thread, a process or a GPU behind `comm`.

    batches ─► executor.step ─► gradients.measure ─► clip ─► AdamW ─► row ─┬─ evaluate, now and then
       ▲        the lane          one sum over all                         ├─ save, now and then
       └───────────────────────────────────────────────────────────────────┴─ stop, if anybody was asked to

What a step does depends on config and seed alone: schedules, ranks, copies and meshes change the order of sums, nothing
else.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.config import Config, RunConfig
from penstock.errors import FileError, RunError
from penstock.ir.plan import Plan
from penstock.ir.program import lower
from penstock.ir.schedule import Schedule
from penstock.models import even_partition, token_loss
from penstock.models.flops import flops_per_token, peak_flops
from penstock.runtime import (
    Comm,
    CudaTape,
    Executor,
    local_share,
    prove,
    share_offset,
    watching,
)
from penstock.runtime.executor import Pass
from penstock.schedules.coverage import hold_every_part, through_all_parts
from penstock.train.checkpoint import (
    CheckpointFacts,
    Saver,
    load,
    newest,
    newest_good,
    read_facts,
    sweep,
)
from penstock.train.data.corpus import Corpus
from penstock.train.data.loader import Deal, Loader, check_same_data, wanted_by
from penstock.train.history import History, StepRow, write_timeline
from penstock.train.mesh import place_of
from penstock.train.optimizer import Gradients, adamw, rate_at
from penstock.train.weights import Holding, Sizes, copy_weights, draw_parameters, hold

_log = logging.getLogger(__name__)
WatchRow = Callable[[StepRow], None]
STOP_WORD, SAVED_WORD = 0, 1  # what ranks tell each other with every step
FIRST_TIMED_STEP = (
    3  # the first step that is worth timing: those before it find everything cold
)
OPTIMIZER_SLOTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW, for each parameter


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended: after which step, and whether it was asked to stop before its last."""

    step: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A run, the same on all ranks."""

    config: Config
    plan: Plan
    sizes: Sizes
    corpus: Corpus
    folder: Path
    resume: bool = False  # from the newest good checkpoint; without one, from the start if `fresh`, else an error
    fresh: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "plan",
            replace(self.plan, schedule=hold_every_part(self.plan.schedule)),
        )

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of each part."""
        return self.plan.partition or even_partition(
            self.sizes.layers, self.plan.schedule.parts
        )

    @property
    def checkpoints(self) -> Path:
        """Their folder."""
        return self.folder / "checkpoints"


class Trainer:
    """One process of a run: a rank of the schedule, or its share of one."""

    def __init__(
        self,
        job: Job,
        comm: Comm,
        device: torch.device | None = None,
        watch: WatchRow | None = None,
    ) -> None:
        self.job, self.comm, self.watch = job, comm, watch
        self.device = device or torch.device("cpu")
        config, schedule = job.config, job.plan.schedule
        self.place = place_of(comm, config.mesh, schedule.ranks, self.device)
        pipeline = self.place.pipeline
        self.holding = hold(
            job.sizes, schedule, job.partition, pipeline.rank, self.device, self.place
        )
        wanted = wanted_by(schedule, pipeline.rank, config.data.separate)
        deal = Deal(
            config.rows,
            len(schedule.microbatches),
            config.run.accumulate,
            wanted,
            config.mesh.shard,
            self.place.shard,
        )
        self.loader = Loader(job.corpus, deal, config.run.seed, self.device)
        self.executor = executor_of(job, schedule, self.holding, pipeline)
        self.examiner = Examiner(self, through_all_parts(schedule))
        self.optimizer = adamw(self.holding.trained, config.optimizer)
        self.gradients = Gradients(self.holding, comm, self.device, words=2)
        self.saver = Saver(
            job.checkpoints, comm.rank, comm.ranks, config.run.keep, self.holding.names
        )
        self.utilization = flops_utilization(
            job.sizes, config.data.tokens, comm.ranks, self.device
        )
        self.step = 0  # steps done

    # ------------------------------------------------------------ beginning
    def begin(self) -> None:
        """Weights: drawn, read from a folder, or those of the newest good checkpoint."""
        job, found = self.job, None
        if job.resume:
            found = newest_good(job.checkpoints, self.comm, self.holding.names)
            if found is None and not job.fresh:
                raise nothing_to_resume(job.checkpoints)
        if found is not None:
            self.resume(found)
        elif job.config.model.weights:
            from penstock.train.hub import read_weights  # noqa: PLC0415  # safetensors, only where it is needed

            copy_weights(
                self.holding,
                read_weights(
                    Path(job.config.model.weights), self.holding.parameters, job.sizes
                ),
            )
        else:
            draw_parameters(self.holding, job.config.run.seed)

    def resume(self, path: Path) -> None:
        """Goes on from a checkpoint of the same model, whatever split has saved it."""
        facts = read_facts(path)
        check_same_model(path, facts, self.job.sizes)
        tensors = self.tensors(empty=True)
        load(path, tensors)
        for name, parameter in self.holding.parameters.items():
            state = self.optimizer.state[parameter]
            for slot in OPTIMIZER_SLOTS:
                filled = tensors[f"optimizer.{slot}.{name}"]
                state[slot] = filled.view(()) if slot == "step" else filled
        self.loader.resume(facts["data"])
        self.step = int(facts["step"])
        if self.comm.rank == 0:
            _log.info("going on from %s", path)

    def tensors(self, empty: bool = False) -> dict[str, Tensor]:
        """All that is saved, by name: weights and the optimizer's state. `empty`: to be filled, of all held."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.holding.parameters.items():
            if not empty and (
                name not in self.holding.owned or not local_share(parameter).numel()
            ):
                continue
            found[name] = parameter.detach()
            state = self.optimizer.state.get(parameter, {})
            for slot in OPTIMIZER_SLOTS:
                if slot == "step" and not empty and any(share_offset(parameter)):
                    continue  # whoever has the first number of a parameter counts its steps
                blank = (
                    torch.zeros(1, device=self.device)
                    if slot == "step"
                    else torch.zeros_like(parameter)
                )
                tensor = blank if empty else state.get(slot, blank)
                found[f"optimizer.{slot}.{name}"] = (
                    tensor.detach().reshape(1) if slot == "step" else tensor.detach()
                )
        return found

    def prove(self) -> None:
        """Compares every stage as the plan runs it with plain calls, on data of the next step. Nothing of it stays."""
        seen = self.loader.seen
        batch = self.loader.step()[0]
        self.loader.seen = seen
        proof = prove(self.executor, batch)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(
                self.device
            )  # a step's peak is what is reported
        if self.comm.rank == 0 and not proof.skipped:
            _log.info(
                "proved %d stages in %.1f s: the plan computes the gradients of plain calls",
                proof.stages,
                proof.seconds,
            )

    # ------------------------------------------------------------ running
    def run(self, stop: Callable[[], bool] = lambda: False) -> RunOutcome:
        """All steps, or as many as until somebody asks to stop; ends with a checkpoint."""
        if self.comm.rank == 0:
            sweep(self.job.checkpoints)
        self.comm.barrier()
        with watching(self.executor):
            self.begin()
            if self.job.config.run.prove:
                self.prove()
            history = (
                History(self.job.folder, self.step) if self.comm.rank == 0 else None
            )
            try:
                stopped = self.steps(history, stop)
                self.saver.finish(self.comm)
            finally:
                if history is not None:
                    history.close()
        return RunOutcome(self.step, stopped)

    def steps(self, history: History | None, stop: Callable[[], bool]) -> bool:
        """Step after step; whether it was asked to stop."""
        settings = self.job.config.run
        while self.step < settings.steps:
            began = time.perf_counter()
            share, bubble = self.forward_and_back(is_timed(self.step + 1, settings))
            most = _memory(self.device, self.executor)
            loss, norm, memory, words = self.gradients.measure(
                share, most, self.words(stop)
            )
            if self.saver.step is not None and words[SAVED_WORD] == self.comm.ranks:
                self.saver.commit()
            if not math.isfinite(loss) or not math.isfinite(norm):
                self.give_up(loss, norm)
            rate = self.update(norm)
            seconds = time.perf_counter() - began
            self.step += 1
            due = bool(settings.evaluate) and self.step % settings.evaluate == 0
            evaluation = self.evaluate() if due or self.step == settings.steps else None
            if history is not None:
                tokens, epoch = (
                    self.loader.deal.sequences * self.loader.corpus.length,
                    self.loader.epoch,
                )
                row = StepRow(
                    self.step,
                    loss,
                    norm,
                    rate,
                    seconds,
                    tokens,
                    max(memory),
                    epoch,
                    bubble,
                    evaluation,
                    self.utilization(tokens / seconds),
                )
                history.put(row)
                if self.watch is not None:
                    self.watch(row)
            last = words[STOP_WORD] > 0 or self.step == settings.steps
            if last or (settings.save and self.step % settings.save == 0):
                self.save()
            if words[STOP_WORD]:
                return True
        return False

    def words(self, stop: Callable[[], bool]) -> list[int]:
        """What this rank tells the others: whether it was asked to stop, and whether its share is saved."""
        return [int(stop()), int(self.saver.step is not None and self.saver.done())]

    def forward_and_back(self, timed: bool) -> tuple[float, float | None]:
        """All passes of a step: this process's share of the loss, and the bubble if it was timed."""
        results = [self.executor.step(batch, timed) for batch in self.loader.step()]
        loss = sum(result.loss for result in results) if self.place.speaks else 0.0
        timeline = results[-1].timeline
        if timeline is None:
            return loss, None
        if self.comm.rank == 0:
            write_timeline(self.job.folder, self.step + 1, timeline)
        return loss, timeline.bubble

    def update(self, norm: float) -> float:
        """Moves the weights; the rate at which."""
        settings = self.job.config
        rate = rate_at(self.step, settings.run.steps, settings.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.gradients.clip(norm, settings.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for name, parameter in self.holding.parameters.items():
            if name not in self.holding.trained:
                parameter.grad = None  # a sum over replicas of a part that no path visits has left zeros
        return rate

    def evaluate(self) -> float | None:
        """The mean loss of the whole model on what is held out; None if nothing is."""
        losses = self.examiner.losses(self.job.config.run.evaluations)
        share = sum(losses) if self.place.speaks else 0.0
        total = torch.tensor([share], dtype=torch.float64, device=self.device)
        self.comm.add(total, tuple(range(self.comm.ranks))).wait()
        return float(total) if losses else None

    # ------------------------------------------------------------ saving
    def save(self) -> None:
        """Begins a checkpoint; one that is still on its way is waited for."""
        if self.saver.step is not None:
            self.saver.finish(self.comm)
        self.saver.begin(self.step, self.tensors(), self.facts())

    def facts(self) -> CheckpointFacts:
        """What a checkpoint says of itself."""
        return {
            "model": describe(self.job.sizes),
            "data": self.loader.state(),
            "tokenizer": self.job.config.data.tokenizer,
            "schedule": self.job.plan.name,
            "ranks": self.job.plan.schedule.ranks,
            "partition": list(self.job.partition),
            "mesh": asdict(self.job.config.mesh),
        }

    def give_up(self, loss: float, norm: float) -> None:
        """A loss or a gradient that is no number: the weights before this step are saved, then it ends."""
        self.loader.seen -= self.loader.deal.sequences  # the step was not made
        if self.saver.step is not None:
            self.saver.finish(self.comm)
        self.saver.begin(self.step, self.tensors(), self.facts())
        self.saver.finish(self.comm)
        raise RunError(
            f"in step {self.step + 1} the loss is {loss:g} and the norm of the gradients {norm:g}\n"
            f"  the weights before that step are saved in {self.job.checkpoints}; go on with --resume and a lower "
            "optimizer.rate, a lower optimizer.clip or a longer optimizer.warmup"
        )


class Examiner:
    """Measures the whole model in the pipeline: held-out text goes through all parts, whatever paths are trained."""

    def __init__(self, trainer: Trainer, schedule: Schedule) -> None:
        job, place = trainer.job, trainer.place
        self.executor, self.loader = trainer.executor, trainer.loader
        self.own = (
            schedule is not job.plan.schedule
        )  # it has lanes of its own, with links that training may not use
        if self.own:
            self.executor = executor_of(job, schedule, trainer.holding, place.pipeline)
            wanted = wanted_by(schedule, place.pipeline.rank, job.config.data.separate)
            deal = replace(trainer.loader.deal, wanted=wanted)
            self.loader = Loader(job.corpus, deal, job.config.run.seed, trainer.device)

    def losses(self, batches: int) -> list[float]:
        """The loss of each pass over held-out text: their sum is the mean over all of it."""
        found = self.loader.evaluation(batches)
        if self.own and found:
            shapes = Pass(self.executor, found[0], timed=False, training=False).shapes
            self.executor.comm.reserve(
                self.executor.program, shapes, self.executor.dtype
            )
            self.own = False
        return [self.executor.evaluate(batch) for batch in found]


def is_timed(step: int, settings: RunConfig) -> bool:
    """Whether a step is worth a timeline: so that also a short run, and one that is stopped, has one."""
    return bool(settings.timed) and (
        step % settings.timed == 0 or step in (FIRST_TIMED_STEP, settings.steps)
    )


def nothing_to_resume(checkpoints: Path) -> RunError:
    """What is said where a run cannot go on. Only a folder without any checkpoint may be started in."""
    if newest(checkpoints):
        return RunError(
            f"no checkpoint in {checkpoints} is good: all are damaged or lack weights of this model\n"
            "  start anew in another run.folder, or delete that folder and start without --resume"
        )
    return RunError(
        f"there is no good checkpoint in {checkpoints}\n  start anew, without --resume"
    )


def check_same_model(path: Path, facts: CheckpointFacts, sizes: Sizes) -> None:
    """Raises if a checkpoint is of a model with other sizes."""
    theirs, ours = facts.get("model", {}), describe(sizes)
    other = [
        f"its {key} is {theirs.get(key)}, here it is {value}"
        for key, value in ours.items()
        if theirs.get(key) != value
    ]
    if other:
        raise RunError(
            f"{path} is of another model: {'; '.join(other)}\n"
            "  go on with its own sizes, or start anew in another run.folder"
        )


def check_resumable(checkpoints: Path, sizes: Sizes, corpus: Corpus, seed: int) -> None:
    """Raises if a run cannot go on from its newest checkpoint; before anything of the run is written anew."""
    for path in newest(checkpoints):
        try:
            facts = read_facts(path)
        except FileError:  # damaged: the ranks will look for an earlier one, and say so
            continue
        check_same_model(path, facts, sizes)
        check_same_data(facts.get("data", {}), corpus, seed)
        return


def executor_of(job: Job, schedule: Schedule, holding: Holding, comm: Comm) -> Executor:
    """The rank's lane of a schedule over the plan's stages, ready to run."""
    run = job.config.run
    mine = frozenset(holding.stages) if run.recompute else frozenset()
    return Executor(
        lower(schedule),
        holding.stages,
        comm,
        token_loss,
        holding.width,
        recompute=mine,
        autocast=torch.bfloat16 if run.precision == "bfloat16" else None,
        tied=holding.tied,
        tape=CudaTape() if run.graphs and schedule is job.plan.schedule else None,
    )


def flops_utilization(
    sizes: Sizes, tokens: int, ranks: int, device: torch.device
) -> Callable[[float], float | None]:
    """From tokens a second to the share of the peak of all devices (MFU); to None where that is not known."""
    peak = (
        peak_flops(torch.cuda.get_device_name(device))
        if device.type == "cuda"
        else None
    )
    if peak is None:
        return lambda speed: None
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    devices = ranks * min(1.0, torch.cuda.device_count() / here)  # ranks may share one
    share = flops_per_token(sizes, tokens) / (devices * peak)
    return lambda speed: speed * share


def describe(sizes: Sizes) -> dict[str, object]:
    """A model in plain values."""
    return {
        "family": type(sizes).__name__.removesuffix("Config").lower(),
        **asdict(sizes),
    }


def _memory(device: torch.device, executor: Executor) -> int:
    """The most bytes this rank has had: of the GPU, or of the process."""
    if device.type == "cuda":
        aside = 0 if executor.replays is None else executor.replays.aside
        return int(torch.cuda.max_memory_allocated(device)) + aside
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
