"""Runs one rank's lane of a program on real tensors. The same code for every schedule.

An `Executor` is made once and runs step after step; what one step does is in `penstock.runtime.walk`. Before the
first step the ranks agree on what each of them cannot see alone (`penstock.runtime.rank_agreement`), and during it what a
user's modules and loss do is compared with what they should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import ShapeError
from penstock.ir.program import Program
from penstock.runtime.backward import make_deferrable
from penstock.runtime.batch import Batch
from penstock.runtime.comm.comm import Comm
from penstock.runtime.deferral_report import Watch
from penstock.runtime.frozen_stages import Rests, at_rest
from penstock.runtime.gradients import Replicas, Tied, groups_of, ties_of
from penstock.runtime.lane import lane_turns, receives_of
from penstock.runtime.loss_reduction import Loss, reduction_of
from penstock.runtime.process.malloc import keep_freed_memory
from penstock.runtime.rank_agreement import Agreement, agree
from penstock.runtime.recorder import Clock, Recorder
from penstock.runtime.replay import Replays, Tape, refuse_shares
from penstock.runtime.shards import Shards
from penstock.runtime.slices import refuse_whole
from penstock.runtime.stage_checks import changed, stages_of
from penstock.runtime.step_result import Result
from penstock.runtime.visits import Mean, Visits
from penstock.runtime.walk import Pass

__all__ = ["Executor", "Loss", "Pass", "Result"]


class Executor:
    """One rank's lane, ready to run step after step. All ranks make theirs at the same time.

    `stages` are the modules of this rank's stages, `width` and `dtype` those of the hidden state between them. `loss`
    takes logits and labels and returns the sum of the labels' losses, or their mean if `reduction` says so. `recompute`
    names stages that keep their input alone and compute their forward again. `tied` names parameters that several parts
    use; without it those that `penstock.models.split` knows of are taken.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, nn.Module],
        comm: Comm,
        loss: Loss,
        width: int,
        dtype: torch.dtype = torch.float32,
        recompute: frozenset[int] = frozenset(),
        autocast: torch.dtype | None = None,
        tied: Mapping[str, Tied] | None = None,
        mean: Mean = Mean.ALL,
        tape: Tape | None = None,
        reduction: str = "sum",
    ) -> None:
        self.program, self.comm, self.loss = program, comm, loss
        self.reduction, self.knows_loss = (
            reduction_of(reduction),
            False,
        )  # whether the loss was found to be that
        self.modules, self.width, self.dtype = (
            stages_of(program.schedule, stages, comm),
            width,
            dtype,
        )
        self.recompute, self.autocast, self.tape = recompute, autocast, tape
        self.replays: Replays | None = None  # of the first batch's shape
        refuse_whole(program.schedule, self.modules)
        if tape is not None:
            refuse_shares(self.modules)
        self.turns = lane_turns(program, comm.rank)
        self.receives = receives_of(self.turns)
        tied = ties_of(program.schedule, self.modules) if tied is None else tied
        self.tied = tied
        comm.prepare(groups_of(program.schedule, tied))
        self.replicas = Replicas(program.schedule, self.modules, comm, tied)
        self.shards = Shards(program.schedule, self.modules, comm.rank, tied)
        if (
            not self.shards.parts
        ):  # they save memory, which what is kept would cost again
            keep_freed_memory()
        self.visits = Visits(program.schedule, self.modules, mean, tied)
        self.world = tuple(range(comm.ranks))
        self.recorder, self.clock = (
            Recorder(program.schedule, comm),
            Clock(self.modules.values()),
        )
        self.at = 0  # the turn that runs now
        self.room: Sequence[
            tuple[int, ...]
        ] = ()  # shapes of messages that there is room for
        self.named = [
            (f"{name} of stage {n}", p)
            for n, m in self.modules.items()
            for name, p in m.named_parameters()
        ]
        self.trainable = [p.requires_grad for _, p in self.named]
        self.agreed: Agreement | None = None  # before the first step
        self.rests, self.common, self.takes_turns = Rests(), frozenset[int](), False
        self.watch = Watch(self.modules)
        self.length_checks = _length_checks(self.modules.values())
        if any(turn.step is not None and turn.step.split for turn in self.turns):
            for module in self.modules.values():
                make_deferrable(module)

    @property
    def doing(self) -> str:
        """The action that runs now, or that waits for its input."""
        step = self.turns[self.at].step
        return str(step.instruction) if step is not None else "the start"

    def step(self, batch: Batch, timed: bool = False) -> Result:
        """Forward and backward of every micro-batch once; gradients are added to what is there."""
        self.check_lengths(batch)
        run = Pass(self, batch, timed)
        if [p.requires_grad for _, p in self.named] != self.trainable:
            raise changed(
                [
                    n
                    for (n, p), was in zip(self.named, self.trainable, strict=True)
                    if p.requires_grad != was
                ]
            )
        if self.agreed is None:
            self.agreed = self.agree()
            run.checks = True
        if run.shapes != self.room:
            self.comm.reserve(self.program, run.shapes, self.dtype)
            self.room = run.shapes
        if self.tape is not None and not batch.starts:
            self.replays = self.replays or Replays(run, self.tape)
            if self.replays.fits(batch):
                run.replays = self.replays
        return run.run()

    def check_lengths(self, batch: Batch) -> None:
        """Lets stages refuse a batch whose lengths would matter to one another; replicas see only some of them."""
        if self.length_checks:
            lengths = batch.longest
            for check in self.length_checks:
                check(lengths)

    def agree(self) -> Agreement:
        """What only all ranks together know; then what follows from it here."""
        schedule = self.program.schedule
        found = agree(
            schedule,
            self.modules,
            self.comm,
            self.replicas.order,
            self.tied,
            self.recompute,
        )
        if not any(
            found.trains[stage] for m in schedule.microbatches for stage in m.path
        ):
            raise ShapeError(
                "no stage has a parameter that trains: requires_grad is False for all of them\n"
                "  unfreeze some and make a new Executor, or call evaluate instead of step"
            )
        self.common = frozenset(
            id(p)
            for one in self.replicas.order
            if one.name in found.one
            for p in one.parameters
        )
        if self.common.intersection(map(id, self.visits.owners)):
            raise ShapeError(
                "ranks that are threads share the memory of a part that some micro-batches skip: for "
                "Mean.VISITS give each rank a copy of its own (copy.deepcopy of the model)"
            )
        self.replicas.leave_out(found.one)
        self.turns, self.rests = at_rest(schedule, found.trains, self.turns)
        self.receives, self.takes_turns = receives_of(self.turns), found.recomputes
        return found

    def evaluate(self, batch: Batch) -> float:
        """The mean loss of a batch: the forwards of the same lanes alone."""
        self.check_lengths(batch)
        return Pass(self, batch, timed=False, training=False).run().loss


def _length_checks(
    modules: Iterable[nn.Module],
) -> list[Callable[[Sequence[int]], None]]:
    """The checks of stages for which one sequence's length changes another's result."""
    checks: list[Callable[[Sequence[int]], None]] = []
    for module in modules:
        plain: Any = getattr(module, "_orig_mod", module)
        if getattr(plain, "remembers_lengths", False):
            checks.append(plain.refuse_lengths)
    return checks
