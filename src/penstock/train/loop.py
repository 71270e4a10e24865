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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.config import Config, RunConfig, is_recording
from penstock.dropout import dropping, set_dropout
from penstock.errors import FileError, RunError
from penstock.ir.plan import Plan
from penstock.ir.program import lower
from penstock.ir.schedule import Schedule
from penstock.models import (
    BertConfig,
    Part,
    even_partition,
    part_parameters,
    split,
)
from penstock.models.attention import PAIRS_PER_CALL
from penstock.models.flops import (
    flops_per_token,
    keys_per_token,
    peak_flops,
    share_of_flops,
)
from penstock.models.recompute import recompute_mlps
from penstock.plan.slices.packs import DocumentWork, step_clock
from penstock.runtime import (
    Batch,
    Comm,
    CudaTape,
    Executor,
    ProcessComm,
    compile_stage,
    local_share,
    prove,
    share_offset,
    watching,
)
from penstock.runtime.process.machine import count_neighbours
from penstock.runtime.process.watchdog import alarm_held
from penstock.runtime.proof.warm_up import warm_up
from penstock.runtime.visits import Mean
from penstock.schedules.coverage import (
    hold_every_part,
    through_all_parts,
    visited_parts,
    visits_all_parts,
)
from penstock.train.callbacks import Callbacks
from penstock.train.checkpoint import (
    CheckpointFacts,
    Depot,
    Saver,
    load,
    missing_tensors,
    newest,
    newest_good,
    read_facts,
    step_name,
    sweep,
)
from penstock.train.compiling import COMPILER, chunk_of, is_compiling, loss_of
from penstock.train.crew.handover import PartState, Transfer, Transfers
from penstock.train.crew.mirror import Mirror, Mirrors
from penstock.train.data.corpus import Corpus
from penstock.train.data.documents import DocumentCutter, DocumentDealer
from penstock.train.data.loader import (
    Deal,
    Loader,
    check_same_data,
    wanted_by,
)
from penstock.train.data.mixture import MixedCorpus, write_use
from penstock.train.early_stop import BEST_FOLDER, Progress, read_progress
from penstock.train.history import History, StepRow, write_timeline
from penstock.train.lora import (
    adapt,
    adapted_blueprint,
    base_parameters,
    check_same_adapters,
    describe_adapters,
    draw_adapters,
    is_adapter,
)
from penstock.train.mesh import place_of
from penstock.train.optimizer import (
    Gradients,
    Optimizer,
    check_same_optimizer,
    describe_optimizer,
    frozen_names,
    layer_parameters,
)
from penstock.train.optimizer_state import is_unused
from penstock.train.rates import factor_at, rate_at
from penstock.train.remote import RemoteCheckpoints
from penstock.train.step_executors import StepExecutors
from penstock.train.step_paths import StepPaths, mean_layers, step_paths
from penstock.train.weights import (
    Holding,
    Sizes,
    attach_parameters,
    blank_parameters,
    copy_weights,
    draw_parameters,
    hold,
    unvisited_parameters,
)

_log = logging.getLogger(__name__)
WatchRow = Callable[[StepRow], None]
# The counts that ranks exchange with every step: how many were asked to stop, how many have
# saved their share of a checkpoint, how many know that the crew is about to change, and what
# mirrors cost: bytes that were sent, and microseconds since the last step.
STOP_COUNT = 0
SAVED_COUNT = 1
CHANGE_COUNT = 2
MIRROR_BYTES = 3
MIRROR_MICROSECONDS = 4
COUNTS = 5
# The numbers of each rank that all others get with every step: its memory in bytes, and the
# seconds that it has worked.
MEMORY_NUMBER = 0
WORK_NUMBER = 1
OWN_NUMBERS = 2
STATE_PREFIX = "optimizer."  # of the names of optimizer state in a checkpoint
# The types of run.messages; None is that of the stages.
MESSAGE_TYPES = {"float32": None, "bfloat16": torch.bfloat16, "int8": torch.int8}
# Earlier steps are not worth timing, because caches are still cold.
FIRST_TIMED_STEP = 3
CHECKPOINTS_FOLDER = "checkpoints"  # in the folder of a run


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The last step of a run, and whether it was asked to stop before its end."""

    step: int
    stopped: bool


class CrewChange(Exception):  # noqa: N818  # It is not an error.
    """Raised on all ranks after a step, because workers have come."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What all ranks know about a step once it is done."""

    loss: float
    norm: float
    memory: int  # bytes of the fullest rank
    seconds: float
    bubble: float | None
    stopping: bool  # whether a rank was asked to stop
    mirror_bytes: int = 0  # sent to mirrors by all ranks
    mirror_seconds: float = 0.0  # that mirrors cost a rank on average


@dataclass(frozen=True, slots=True)
class Handover:
    """Where all ranks of a new generation go on (`penstock.train.crew`)."""

    step: int  # steps done
    seen: int  # sequences of those steps, and of earlier runs
    figures: StepFigures | None  # of the last step, if it is still to be closed
    transfers: Transfers
    save: bool = False  # whether a checkpoint was interrupted
    # Ranks that read a part from the checkpoint of this step, because its holder is lost.
    restores: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that defines a run; it is the same on all ranks."""

    config: Config
    plan: Plan
    sizes: Sizes
    corpus: Corpus
    folder: Path
    resume: bool = False  # start from the newest good checkpoint
    fresh: bool = False  # if there is no checkpoint, start from the beginning
    whole: bool = True  # whether the plan is the run's own, and not one for fewer ranks
    validation: Corpus | None = None  # text for evaluations, if it is not held out
    mirrors: tuple[Transfer, ...] = ()  # parts with their rank and that of their mirror
    leader: int = 0  # the rank that writes the files of the run
    depot: Depot | None = None  # for a rank that does not see the folder of the run

    def __post_init__(self) -> None:
        held = self.plan.map_schedules(hold_every_part)
        object.__setattr__(self, "plan", held)

    @property
    def partition(self) -> tuple[int, ...]:
        """The number of layers of each part."""
        if self.plan.partition:
            return self.plan.partition
        return even_partition(self.sizes.layers, self.plan.schedule.parts)

    def adapt(self, model: nn.Module) -> None:
        """Give a model without memory the dropout, the adapters and the recomputation of the run."""
        if self.config.model.dropout:
            set_dropout(model, self.config.model.dropout)
        if self.config.run.recompute_mlp:
            recompute_mlps(model)
        if self.adapts:
            adapt(model, self.sizes, self.config.lora)

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained instead of the model itself."""
        return self.config.lora.rank > 0

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / CHECKPOINTS_FOLDER


class Trainer:
    """One process of a run: a rank of the schedule, or a share of one."""

    peak_bytes = 0  # memory of this process at its fullest moment, after a step

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
        schedule = job.plan.schedule
        self.job = job
        self.comm = comm
        self.watch = watch
        self.paths = step_paths(job.plan, config.paths)
        schedules = self.paths.schedules
        self.device = device or torch.device("cpu")
        self.place = place_of(comm, config.mesh, schedule.ranks, self.device)
        pipeline = self.place.pipeline
        # What this process trained until a worker was lost or came (`penstock.train.crew`).
        self.before = before
        self.handover = handover
        kept: dict[int, Part] = {}
        if before is not None:
            # A generation that broke before it had begun may have tied them otherwise.
            attach_parameters(before.holding)
            kept = before.parts
        self.holding: Holding = hold(
            job.sizes,
            schedule,
            job.partition,
            pipeline.rank,
            self.device,
            self.place,
            frozenset().union(*map(visited_parts, schedules)),
            kept,
            lambda names: frozen_names(names, config.optimizer),
            job.adapt,
        )
        # A run that trains adapters does not save the model beside them.
        saved = filter(is_adapter, self.holding.names)
        self.saved_names = tuple(saved) if job.adapts else self.holding.names
        self.compiles = is_compiling(config, self.device)
        if self.compiles:
            for number, part in self.parts.items():
                if number not in kept:
                    compile_stage(part, COMPILER)
        deal = Deal(
            config.rows,
            len(schedule.microbatches),
            config.run.accumulate,
            self.wanted(schedules),
            config.mesh.shard,
            self.place.shard,
        )
        cutter = cutter_of(job, self.device)
        dealer = dealer_of(job, self.device, self.compiles)
        self.loader = Loader(
            job.corpus, deal, config.run.seed, self.device, cutter, dealer
        )
        executors = [self.executor_for(one) for one in schedules]
        self.executors = StepExecutors(executors, self.paths)
        self.examiner = Examiner(self)
        self.optimizer = Optimizer(
            self.holding.parameters,
            config.optimizer,
            self.holding.trained,
            layer_parameters(self.holding.stages.values()),
        )
        self.gradients = Gradients(self.holding, comm, self.device, COUNTS, OWN_NUMBERS)
        self.leads = comm.rank == job.leader  # whether it writes the files of the run
        self.mirrors = self.mirrors_of(before)
        self.work_seconds = 0.0  # that this rank computed in the last step
        # Called with the seconds that each rank has worked, after every step.
        self.tell_work: Callable[[list[float]], None] = lambda seconds: None
        self.saver = Saver(
            job.checkpoints,
            comm.rank,
            comm.ranks,
            config.run.keep,
            self.saved_names,
            self.leads,
            job.depot,
        )
        self.callbacks = Callbacks(config.run.callbacks if self.leads else ())
        self.saver.announce = self.announce
        self.progress = Progress()
        self.utilization = flops_utilization(
            job.sizes, config.data.tokens, comm.ranks, self.device
        )
        self.step = 0  # steps done
        # Layers that a micro-batch passes through in a step with each schedule.
        self.layers = [mean_layers(one, job.partition) for one in schedules]
        self.seen = 0  # sequences of those steps, and of earlier runs
        self.begun = False  # whether the weights are filled
        self.figures: StepFigures | None = None  # of the last step
        self.closed = True  # whether the last step was evaluated and written down
        self.save_again = False  # because a loss has interrupted the last checkpoint
        # Whether the crew is about to change, so that all should leave after this step.
        self.changing: Callable[[], bool] = lambda: False
        self.leaving = False  # whether a rank has said so

    @property
    def parts(self) -> dict[int, Part]:
        """The parts that this process holds, by number."""
        stages = self.job.plan.schedule.stages
        return {stages[n].part: part for n, part in self.holding.stages.items()}

    def mirrors_of(self, before: Trainer | None) -> Mirrors:
        """Return this rank's mirrors of other parts, with those that it has already."""
        job = self.job
        held = {number: part_parameters(part) for number, part in self.parts.items()}
        kept = {}
        for number, _, target in job.mirrors:
            if target != self.comm.rank:
                continue
            if before is not None and number in before.mirrors.kept:
                kept[number] = before.mirrors.kept[number]
                continue
            model = adapted_blueprint(job.sizes, job.config.lora)
            part = split(model, job.partition)[number]
            frozen = frozen_names(part_parameters(part), job.config.optimizer)
            blank = blank_parameters(part, frozen, self.device)
            matrices = layer_parameters([part])
            kept[number] = Mirror(blank, matrices, job.config.optimizer)
        return Mirrors(job.mirrors, self.comm, held, kept)

    @property
    def states(self) -> dict[int, PartState]:
        """The parts in the memory of this process: those that it trains, and its mirrors."""
        states = {}
        for number, mirror in self.mirrors.kept.items():
            states[number] = mirror.state
        for number, part in self.parts.items():
            states[number] = PartState(part_parameters(part), self.optimizer)
        return states

    def executor_for(self, schedule: Schedule) -> Executor:
        """Return an executor of this rank for a schedule over the stages of the plan."""
        pipeline = self.place.pipeline
        return executor_of(
            self.job, schedule, self.holding, pipeline, self.compiles, self.device
        )

    def wanted(self, schedules: Iterable[Schedule]) -> frozenset[int]:
        """Return the micro-batches whose tokens this rank reads with any of these schedules."""
        rank = self.place.pipeline.rank
        separate = self.job.config.data.separate
        wanted = [wanted_by(schedule, rank, separate) for schedule in schedules]
        return frozenset().union(*wanted)

    @property
    def executor(self) -> Executor:
        """The executor of the next step."""
        return self.executors.at(self.step)

    # ------------------------------------------------------------ beginning
    def begin(self) -> None:
        """Fill the weights: from what this process had, a checkpoint, a folder, or at random."""
        if self.handover is not None:
            self.take_over(self.before, self.handover)
        else:
            self.fill()
            Transfers(self.job.mirrors).run(self.comm, self.states, self.states)
        self.before = None  # It would keep its memory.
        self.begun = True

    def take_over(self, before: Trainer | None, handover: Handover) -> None:
        """Go on after the last step of the generation before, with its weights.

        A step in flight is dropped with its gradients, and its data is read again.
        """
        for name, parameter in self.holding.parameters.items():
            parameter.grad = None
            if before is None or parameter is not before.holding.parameters.get(name):
                continue
            if parameter.requires_grad:
                state = before.optimizer.state_of(parameter)
                self.optimizer.load_state(parameter, state)
        targets = self.states
        sources = before.states if before is not None else {}
        for number in targets.keys() & sources.keys():
            # A mirror has become a part that is trained, or the other way round.
            assert before is not None
            if (number in self.parts) != (number in before.parts):
                targets[number].copy_from(sources[number])
        mine = [part for rank, part in handover.restores if rank == self.comm.rank]
        if mine and self.job.depot is not None:
            self.job.depot.fetch(self.job.checkpoints)
        if mine and self.job.adapts:
            self.read_base()  # Checkpoints have only the adapters.
        for number in mine:
            path = self.job.checkpoints / step_name(handover.step)
            self.read_state(path, targets[number])
        handover.transfers.run(self.comm, {**targets, **sources}, targets)
        self.step = handover.step
        self.seen = self.loader.seen = handover.seen
        self.figures = handover.figures
        self.closed = handover.figures is None
        self.save_again = handover.save

    def fill(self) -> None:
        """Fill the weights: from the newest good checkpoint, from a folder, or at random."""
        job = self.job
        checkpoint = None
        if job.resume:
            if job.depot is not None:
                job.depot.fetch(job.checkpoints)
            checkpoint = newest_good(job.checkpoints, self.comm, self.saved_names)
            if checkpoint is None and not job.fresh:
                raise nothing_to_resume(job.checkpoints)
        seed = job.config.run.seed
        if job.adapts:
            self.read_base()
            draw_adapters(self.holding, seed)
        if checkpoint is not None:
            self.resume(checkpoint)
        elif job.config.model.weights and not job.adapts:
            self.read_base()
        elif not job.adapts:
            draw_parameters(self.holding, seed)

    def read_base(self) -> None:
        """Fill the weights of this rank from model.weights."""
        from penstock.train.hub import read_weights  # noqa: PLC0415  # safetensors, only where it is needed

        folder = Path(self.job.config.model.weights)
        names = base_parameters(self.holding)
        tensors = read_weights(folder, names, self.job.sizes)
        copy_weights(self.holding, ((names[name], one) for name, one in tensors))

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of the same model, however it was split."""
        facts = read_facts(path)
        check_same_model(path, facts, self.job.sizes)
        check_same_optimizer(path, facts, self.job.config.optimizer)
        check_same_adapters(path, facts, self.job.config.lora)
        self.read_state(path, PartState(self.holding.parameters, self.optimizer))
        self.loader.resume(facts["data"])
        self.seen = self.loader.seen
        self.step = int(facts["step"])
        self.progress = read_progress(facts)
        if self.leads:
            _log.info("going on from %s", path)

    def read_state(self, path: Path, target: PartState) -> None:
        """Fill weights and optimizer state from a checkpoint."""
        optimizer = target.optimizer
        tensors: dict[str, Tensor] = {}
        for name, parameter in target.parameters.items():
            if self.job.adapts and not is_adapter(name):
                continue
            tensors[name] = parameter.detach()
            for slot in optimizer.slots_of(parameter):
                blank = slot.blank(parameter)
                shaped = blank.reshape(1) if slot.is_number else blank.detach()
                tensors[f"{STATE_PREFIX}{slot.name}.{name}"] = shaped
        # A parameter that was frozen until now begins with new state.
        for name in missing_tensors(path, tensors):
            if name.startswith(STATE_PREFIX):
                del tensors[name]
        load(path, tensors)
        for name, parameter in target.parameters.items():
            state = {}
            for slot in optimizer.slots_of(parameter):
                found = tensors.get(f"{STATE_PREFIX}{slot.name}.{name}")
                if found is not None:
                    state[slot.name] = found.view(()) if slot.is_number else found
            if state and not is_unused(state):
                optimizer.load_state(parameter, state)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights and the optimizer state that this process saves, by name."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.holding.parameters.items():
            if self.job.adapts and not is_adapter(name):
                continue
            if not self._saves(name):
                continue
            tensors[name] = parameter.detach()
            for slot, value in self.optimizer.filled_state(parameter):
                if slot.is_number and any(share_offset(parameter)):
                    # The process with the first number of a parameter counts its steps.
                    continue
                tensor = value.reshape(1) if slot.is_number else value
                tensors[f"{STATE_PREFIX}{slot.name}.{name}"] = tensor
        return tensors

    def _saves(self, name: str) -> bool:
        """Whether this process saves a parameter: it owns it and has numbers of it."""
        if name not in self.holding.owned:
            return False
        return local_share(self.holding.parameters[name]).numel() > 0

    def next_batch(self) -> Batch:
        """The first batch of the next step, which the loader will deal again."""
        seen = self.loader.seen
        batch = self.loader.step()[0]
        self.loader.seen = seen
        return batch

    def compile(self) -> None:
        """Compile the stages of this rank while no other rank waits for them.

        A rank that is done waits for the slowest compiler, so the usual patience begins afterwards.
        """
        began = time.perf_counter()
        if self.leads:
            _log.info("compiling the stages, which may take some minutes")
        batch = self.next_batch()
        for executor in self.executors.covering:
            warm_up(executor, batch)
        if isinstance(self.comm, ProcessComm):
            self.comm.set_patience(self.job.config.run.patience)
        if self.leads:
            seconds = time.perf_counter() - began
            _log.info("compiled the stages in %.1f s", seconds)

    def prove(self) -> None:
        """Check that every stage computes under the plan what a plain call computes.

        It uses the data of the next step, and leaves no trace in weights or loader.
        """
        batch = self.next_batch()
        proofs = [prove(executor, batch) for executor in self.executors.covering]
        if self.device.type == "cuda":
            # The report shows the peak of the steps, not of the proof.
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.leads and not proofs[0].skipped:
            _log.info(
                "proved %d stages in %.1f s: the plan computes the gradients of plain calls",
                max(proof.stages for proof in proofs),
                sum(proof.seconds for proof in proofs),
            )

    # ------------------------------------------------------------ running
    def run(
        self,
        stop: Callable[[], bool] = lambda: False,
        ready: Callable[[], None] = lambda: None,
    ) -> RunOutcome:
        """Train until the last step, or until a rank is asked to stop; then save.

        Calls `ready` before the first step. Raises CrewChange after a step if another
        generation is to go on from there.
        """
        if self.leads:
            sweep(self.job.checkpoints)
        self.comm.barrier()
        with watching(self.executors):
            fresh = self.handover is None
            self.begin()
            if fresh and self.compiles:
                self.compile()
            if fresh and self.job.config.run.prove:
                self.prove()
            history = History(self.job.folder, self.step) if self.leads else None
            ready()
            try:
                stopped = self.steps(history, stop)
                self.saver.finish(self.comm)
                if self.remote is not None:
                    self.remote.finish()
            finally:
                if history is not None:
                    history.close()
        if self.leaving:
            raise CrewChange
        self.callbacks.on_end(self.step, stopped)
        return RunOutcome(self.step, stopped)

    def steps(self, history: History | None, stop: Callable[[], bool]) -> bool:
        """Run the steps; return whether a rank was asked to stop."""
        settings = self.job.config.run
        if not self.closed and self.close_step(history):
            return not self.gets_no_better
        while self.step < settings.steps and not self.gets_no_better:
            began = time.perf_counter()
            loss_share, bubble = self.forward_and_back(
                is_timed(self.step + 1, settings, self.paths)
            )
            own = (float(self.peak_bytes), self.work_seconds)
            loss, norm, numbers, counts = self.gradients.measure(
                loss_share, own, self.counts(stop)
            )
            if self.saver.step is not None and counts[SAVED_COUNT] == self.comm.ranks:
                self.saver.commit()
            if not math.isfinite(loss) or not math.isfinite(norm):
                self.give_up(loss, norm)
            stopping = counts[STOP_COUNT] > 0
            figures = StepFigures(
                loss,
                norm,
                int(max(one[MEMORY_NUMBER] for one in numbers)),
                0.0,
                bubble,
                stopping,
                counts[MIRROR_BYTES],
                counts[MIRROR_MICROSECONDS] * 1e-6 / self.comm.ranks,
            )
            self.commit(figures, began)
            self.tell_work([one[WORK_NUMBER] for one in numbers])
            if self.close_step(history):
                return not self.gets_no_better
            if counts[CHANGE_COUNT] and self.step < settings.steps:
                self.leaving = True
                return False
        return False

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
            self.seen = self.loader.seen
            self.figures = figures
            self.closed = False

    def close_step(self, history: History | None) -> bool:
        """Evaluate, write down and save the step that is done, where that is due.

        Return whether to stop. After a loss, it may be called again for the same step.
        """
        figures = self.figures
        assert figures is not None
        settings = self.job.config.run
        last = self.step == settings.steps
        evaluation = None
        if last or _is_due(self.step, settings.evaluate):
            evaluation = self.evaluate()
            self.judge(evaluation)
        if history is not None and not history.has(self.step):
            tokens = self.loader.deal.sequences * self.loader.corpus.length
            layers = self.layers[self.paths.at(self.step - 1)]
            work = share_of_flops(self.job.sizes, self.job.corpus.length, layers)
            row = StepRow(
                self.step,
                figures.loss,
                figures.norm,
                rate_at(self.step - 1, settings.steps, self.job.config.optimizer),
                figures.seconds,
                tokens,
                figures.memory,
                self.loader.epoch,
                figures.bubble,
                evaluation,
                self.utilization(tokens / figures.seconds * work),
                layers if min(self.layers) < self.job.sizes.layers else None,
                figures.mirror_bytes or None,
                figures.mirror_seconds if figures.mirror_bytes else None,
            )
            history.put(row)
            self.callbacks.on_step(row)
            if self.watch is not None:
                self.watch(row)
        ends = last or self.gets_no_better
        if ends:
            self.take_best()
        due = ends or _is_due(self.step, settings.save)
        if figures.stopping or due or self.save_again:
            self.save()
        self.save_again = False
        self.closed = True
        return figures.stopping or self.gets_no_better

    # ------------------------------------------------------------ early stopping
    @cached_property
    def best_saver(self) -> Saver:
        """Saves the weights of the best evaluation, beside the checkpoints."""
        folder = self.job.folder / BEST_FOLDER
        comm = self.comm
        return Saver(folder, comm.rank, comm.ranks, 1, self.saved_names, self.leads)

    @property
    def gets_no_better(self) -> bool:
        """Whether enough evaluations in a row had no lower loss, so that the run ends."""
        limit = self.job.config.run.early_stop
        return 0 < limit <= self.progress.worse

    def judge(self, evaluation: float | None) -> None:
        """Compare an evaluation with the best one so far, and keep the weights of a better one."""
        known = self.progress.step
        if evaluation is None or not self.job.config.run.early_stop:
            return
        self.progress = self.progress.after(self.step, evaluation)
        if self.progress.step != known:
            self.best_saver.begin(self.step, self.tensors(), self.facts())
            self.best_saver.finish(self.comm)

    def take_best(self) -> None:
        """Go back to the weights of the best evaluation, if the run has kept them."""
        if self.progress.best is None or self.progress.step == self.step:
            return
        path = newest_good(self.best_saver.folder, self.comm, self.saved_names)
        if path is None or int(read_facts(path)["step"]) != self.progress.step:
            return
        self.read_state(path, PartState(self.holding.parameters, self.optimizer))
        if self.leads:
            _log.info("took the weights of step %d, the best", self.progress.step)

    def counts(self, stop: Callable[[], bool]) -> list[int]:
        """Whether this rank was asked to stop, has saved its share, and knows of a change; the cost of mirrors."""
        saved = self.saver.step is not None and self.saver.done()
        return [
            int(stop() or self.callbacks.wants_stop),
            int(saved),
            int(self.changing()),
            self.mirrors.sent_bytes,
            self.mirrors.take_microseconds(),
        ]

    def forward_and_back(self, timed: bool) -> tuple[float, float | None]:
        """Run all passes of a step; return this process's share of the loss, and the bubble.

        The bubble is None if the step was not timed.
        """
        executor = self.executor
        results = []
        self.work_seconds = 0.0
        for turn, batch in enumerate(self.loader.step()):
            with dropping(self.job.config.run.seed, self.step, self.first_row(turn)):
                results.append(executor.step(batch, timed))
            self.work_seconds += executor.work_seconds
        self.drop_unvisited()
        # Reading the loss makes the host wait for the GPU, so what can be done before comes first.
        self.gradients.begin()
        self.peak_bytes = _peak_memory(self.device, executor)
        self.mirrors.start()
        loss = sum(result.loss for result in results) if self.place.speaks else 0.0
        self.mirrors.collect()
        timeline = results[-1].timeline
        if timeline is None:
            return loss, None
        if self.leads and self.job.whole:
            number = self.paths.at(self.step)
            full = self.paths.is_full(self.step)
            write_timeline(self.job.folder, self.step + 1, timeline, number, full)
        return loss, timeline.bubble

    def first_row(self, turn: int) -> int:
        """Return the first row of this shard in a pass, counted over all rows of the step."""
        deal = self.loader.deal
        return (turn * deal.shards + deal.shard) * deal.each

    def update(self, norm: float) -> None:
        """Update the weights."""
        config = self.job.config
        factor = factor_at(self.step, config.run.steps, config.optimizer)
        self.gradients.clip(norm, config.optimizer.clip)
        self.optimizer.step(factor)
        self.mirrors.update(factor, norm, config.optimizer.clip)

    def drop_unvisited(self) -> None:
        """Leave parts alone that no micro-batch has visited in this step.

        The sum over the replicas of such a part has left zeros as its gradients, and most
        optimizers would still move and decay its weights.
        """
        schedule = self.executor.program.schedule
        for parameter in unvisited_parameters(self.holding, schedule):
            parameter.grad = None

    def evaluate(self) -> float | None:
        """Return the mean loss of the whole model on held-out text; None without any."""
        losses = self.examiner.losses(self.job.config.run.evaluations)
        share = sum(losses) if self.place.speaks else 0.0
        total = torch.tensor([share], dtype=torch.float64, device=self.device)
        self.comm.add(total, tuple(range(self.comm.ranks))).wait()
        return float(total) if losses else None

    # ------------------------------------------------------------ saving
    def save(self) -> None:
        """Begin a checkpoint, after waiting for an earlier one that is still being written."""
        corpus = self.job.corpus
        if self.comm.rank == 0 and isinstance(corpus, MixedCorpus):
            use = corpus.use(self.loader.seen, self.job.config.run.seed)
            write_use(self.job.folder, use)
        if self.saver.step is not None:
            self.saver.finish(self.comm)
        if self.remote is not None:
            self.remote.wait()  # What it copies might be deleted as soon as the next one is complete.
        self.saver.begin(self.step, self.tensors(), self.facts())

    @cached_property
    def remote(self) -> RemoteCheckpoints | None:
        """The copies of the checkpoints in object storage, if this process makes them."""
        settings = self.job.config.run
        if not self.leads or not settings.checkpoints:
            return None
        return RemoteCheckpoints(settings.checkpoints, settings.keep)

    def announce(self, step: int, folder: Path) -> None:
        """Tell callbacks that a checkpoint is complete, and copy it to object storage."""
        self.callbacks.on_checkpoint(step, folder)
        if self.remote is not None:
            self.remote.put(folder)

    def facts(self) -> CheckpointFacts:
        """Return the description that goes into a checkpoint."""
        return {
            "model": describe(self.job.sizes),
            "data": self.loader.state(),
            "tokenizer": self.job.config.data.tokenizer,
            "optimizer": describe_optimizer(self.job.config.optimizer),
            "progress": self.progress.describe(),
            **describe_adapters(self.job.config),
            "schedule": self.job.plan.name,
            "ranks": self.job.plan.schedule.ranks,
            "partition": list(self.job.partition),
            "mesh": asdict(self.job.config.mesh),
        }

    def give_up(self, loss: float, norm: float) -> None:
        """Save the weights before a step whose loss or gradients are not finite, and raise."""
        self.loader.seen -= self.loader.deal.sequences  # This step does not count.
        self.save()
        self.saver.finish(self.comm)
        raise RunError(
            f"in step {self.step + 1} the loss is {loss:g} and the norm of the gradients "
            f"{norm:g}\n  the weights before that step are saved in "
            f"{self.job.checkpoints}; go on with --resume and a lower optimizer.rate, "
            "a lower optimizer.clip or a longer optimizer.warmup"
        )


class Examiner:
    """Evaluates the whole model in the pipeline, whatever paths are trained.

    Held-out text, or the user's own validation set, goes through all parts. If the schedule
    skips parts, the evaluation has the lanes of full steps or, if there are none, lanes of its
    own, with links that training may not use.
    """

    def __init__(self, trainer: Trainer) -> None:
        job = trainer.job
        trained = trainer.paths.schedules[-1]  # the full one, if there is one
        schedule = through_all_parts(trained)
        self.executor = trainer.executors.executors[-1]
        self.loader = trainer.loader
        self.needs_links = len(trainer.paths.schedules) > 1
        if schedule is not trained:
            self.needs_links = True
            self.executor = trainer.executor_for(schedule)
            deal = replace(trainer.loader.deal, wanted=trainer.wanted([schedule]))
            self.loader = Loader(job.corpus, deal, job.config.run.seed, trainer.device)
        if job.validation is not None:
            self.loader = Loader(
                job.validation,
                self.loader.deal,
                job.config.run.seed,
                trainer.device,
                self.loader.cutter,
            )

    def losses(self, batches: int) -> list[float]:
        """Return the loss of each pass; their sum is the mean loss over all sequences."""
        passes = self.loader.evaluation(batches)
        if self.needs_links and passes:
            self.executor.prepare_messages(passes[0])
            self.needs_links = False
        return [self.executor.evaluate(batch) for batch in passes]


def is_timed(step: int, settings: RunConfig, paths: StepPaths) -> bool:
    """Whether to record the timeline of a step, counted from 1.

    An early step and the last are included, so that short and stopped runs have one too. If
    some steps are full and others are not, the next one of the other kind is timed as well.
    """
    if not settings.timed:
        return False
    first_candidate = paths.previous(step - 1) + 2
    return any(
        _is_due(one, settings.timed) or one in (FIRST_TIMED_STEP, settings.steps)
        for one in range(first_candidate, step + 1)
    )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def nothing_to_resume(checkpoints: Path) -> RunError:
    """Return the error for a run that cannot resume."""
    if newest(checkpoints):
        return RunError(
            f"no checkpoint in {checkpoints} is good: "
            "all are damaged or lack weights of this model\n"
            "  start anew in another run.folder, "
            "or delete that folder and start without --resume"
        )
    return RunError(
        f"there is no good checkpoint in {checkpoints}\n  start anew, without --resume"
    )


def check_same_model(path: Path, facts: CheckpointFacts, sizes: Sizes) -> None:
    """Raise RunError if a checkpoint belongs to a model with other sizes."""
    theirs = facts.get("model", {})
    differences = []
    for key, value in describe(sizes).items():
        if theirs.get(key) != value:
            differences.append(f"its {key} is {theirs.get(key)}, here it is {value}")
    if differences:
        raise RunError(
            f"{path} is of another model: {'; '.join(differences)}\n"
            "  go on with its own sizes, or start anew in another run.folder"
        )


def check_resumable(checkpoints: Path, sizes: Sizes, corpus: Corpus, seed: int) -> None:
    """Raise RunError if a run cannot resume from its newest checkpoint.

    This happens before the run overwrites any file.
    """
    for path in newest(checkpoints):
        try:
            facts = read_facts(path)
        except FileError:
            # It is damaged. The ranks will report that and look for an earlier one.
            continue
        check_same_model(path, facts, sizes)
        check_same_data(facts.get("data", {}), corpus, seed)
        return


def executor_of(
    job: Job,
    schedule: Schedule,
    holding: Holding,
    comm: Comm,
    compiled: bool,
    device: torch.device,
) -> Executor:
    """Return an executor for this rank's lane of a schedule over the plan's stages."""
    run = job.config.run
    recompute = frozenset(
        stage
        for stage in holding.stages
        if run.recompute or schedule.stages[stage].part in job.plan.recompute
    )
    records = is_recording(job.config, device.type == "cuda")
    record = records and schedule is job.plan.schedule
    loss = loss_of(COMPILER if compiled else "", chunk_of(job.config), run)
    return Executor(
        lower(schedule),
        holding.stages,
        comm,
        loss,
        recompute=recompute,
        autocast=torch.bfloat16 if run.precision == "bfloat16" else None,
        tied=holding.tied,
        mean=Mean(job.config.paths.mean),
        tape=CudaTape() if record else None,
        accumulates=run.accumulate > 1,
        reduction=run.reduction,
        messages=MESSAGE_TYPES[run.messages],
    )


def cutter_of(job: Job, device: torch.device) -> DocumentCutter | None:
    """Return what cuts the documents of each step; None if the plan's cuts are right for all.

    On a GPU attention computes the whole pack and hides what a document must not see, so
    that documents do not change the time of a slice.
    """
    schedule = job.plan.schedule
    if not job.config.data.separate or schedule.slices == 1 or device.type != "cpu":
        return None
    slices = tuple(microbatch.slices for microbatch in schedule.microbatches)
    return DocumentCutter(slices, keys_per_token(job.sizes))


def dealer_of(
    job: Job, device: torch.device, compiled: bool = False
) -> DocumentDealer | None:
    """Return what deals out the documents of each step; None if rows stay as they are read.

    That is the case on a GPU, where documents do not change the time of a row, for compiled
    stages, which would be compiled again for every length, and with partial paths, where it
    matters which documents skip which parts.
    """
    config = job.config
    schedule = job.plan.schedule
    plans_documents = config.data.separate and config.data.balance
    if not plans_documents or device.type != "cpu" or compiled:
        return None
    if isinstance(job.sizes, BertConfig):
        return None  # Its attention computes whole rows, whatever documents they hold.
    if not visits_all_parts(schedule):
        return None
    clock = step_clock(schedule, job.partition, config.mesh.shard)
    if clock is None:
        return None
    work = DocumentWork(keys_per_token(job.sizes), PAIRS_PER_CALL)
    return DocumentDealer(clock, work, schedule.slices)


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


def describe(sizes: Sizes) -> dict[str, object]:
    """Describe a model in plain values."""
    family = type(sizes).__name__.removesuffix("Config").lower()
    return {"family": family, **asdict(sizes)}


def _peak_memory(device: torch.device, executor: Executor) -> int:
    """The peak memory of this rank in bytes, of its GPU or of its process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) + executor.recording_bytes
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
