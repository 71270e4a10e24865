"""Random modules of one's own through random schedules, each compared with plain calls of the same modules.

    layers     take one to three tensors, ask for named ones, return a tensor, a tuple or a dict, end a journey,
               add losses, are frozen
    batch      masks and numbers that belong to the batch; micro-batches of several sizes
    run        any schedule of the fuzzer, recomputed stages, recorded actions (the tape that needs no GPU)

A case is `exact` if the loss, every gradient and the evaluated loss are those of plain calls, and `refused` if a
`ShapeError` comes before any rank has finished a step. A case that plain calls cannot run (a path that leaves out the
layer that makes a tensor) must be refused.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, Signature
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from again_tape import Again
from fuzz import REFUSALS, Said, Verdict, draw_schedule
from penstock import Schedule, lower
from penstock.carry import Slice
from penstock.ir import Op
from penstock.pipeline import cut_into_parts
from penstock.runtime import Batch, Executor, add_loss, batch_of, run_threads
from pipelines import own_stages

WORDS, WIDTH, CLASSES = 11, 4, 5
BATCH_NAMES = ("mask", "scale")
TRAVELLERS = ("skip", "memory", "odd")  # `odd` has whole numbers
UNFIT = (KeyError, ValueError)  # of a layer that does not get what it asks for
FLOAT64 = 1e-10  # tolerance for sums in another order


# ---------------------------------------------------------------- a case
@dataclass(frozen=True)
class LayerSpec:
    """What one layer takes and returns."""

    takes: int = 1  # values
    asks: tuple[str, ...] = ()
    says_so: bool = False  # by `asked_names` instead of by its parameters
    returns: int = 1  # values, if it returns a tensor or a tuple
    makes: tuple[str, ...] = ()  # names, if it returns a dict
    ends: tuple[str, ...] = ()  # names that travel no further
    adds_loss: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class ModuleCase:
    """Everything that one seed decides."""

    seed: int
    layers: tuple[LayerSpec, ...]
    schedule: Schedule
    partition: tuple[int, ...]
    rows: tuple[int, ...]
    recompute: frozenset[int]
    recorded: bool
    steps: int
    marks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        told = ", ".join(f"{word} {value}" for word, value in self.marks.items())
        return f"seed={self.seed}  {told}"


def draw_module_case(seed: int) -> ModuleCase:
    """Draw the case of a seed. No module is built yet."""
    rng = np.random.default_rng([43, seed])
    name, schedule = draw_schedule(rng, ranks=None)
    if schedule.slices > 1 and rng.random() < 0.5:
        schedule = uncut(schedule)
    partition = tuple(int(rng.choice([1, 1, 2, 3])) for _ in range(schedule.parts))
    layers = draw_layers(rng, sum(partition))
    rows = tuple(int(rng.integers(1, 4)) for _ in schedule.microbatches)
    stages = [stage for stage in range(len(schedule.stages)) if rng.random() < 0.6]
    recompute = frozenset(stages if rng.random() < 0.3 else ())
    recorded = bool(rng.random() < 0.3)
    steps = int(rng.choice([1, 2]))
    kinds = {
        "tuple": any(layer.returns > 1 for layer in layers),
        "dict": any(layer.makes for layer in layers),
        "ended": any(layer.ends for layer in layers),
        "named": any(set(layer.asks) & set(BATCH_NAMES) for layer in layers),
        "skip": any(set(layer.asks) & set(TRAVELLERS) for layer in layers),
        "added loss": any(layer.adds_loss for layer in layers),
        "frozen": any(layer.frozen for layer in layers),
        "split": any(action.op is Op.W for lane in schedule.lanes for action in lane),
        "slices": schedule.slices > 1,
        "replicas": len(schedule.stages) > schedule.parts,
        "recompute": bool(recompute),
        "recorded": recorded,
    }
    marks = {
        "schedule": name,
        "ranks": str(schedule.ranks),
        "layers": "+".join(map(str, partition)),
        **{kind: "yes" for kind, there in kinds.items() if there},
    }
    return ModuleCase(
        seed, layers, schedule, partition, rows, recompute, recorded, steps, marks
    )


def uncut(schedule: Schedule) -> Schedule:
    """The schedule without its slices; the slice that a stage runs last stands for all.

    That is the last one in forwards, and the first one in backwards.
    """
    microbatches = [replace(one, cuts=(0, one.tokens)) for one in schedule.microbatches]
    lanes = []
    for lane in schedule.lanes:
        kept = []
        for action in lane:
            slices = schedule.microbatches[action.microbatch].slices
            last = slices - 1 if action.op is Op.F else 0
            if action.slice == last:
                kept.append(action._replace(slice=0))
        lanes.append(tuple(kept))
    return Schedule(schedule.stages, tuple(microbatches), tuple(lanes))


def draw_layers(rng: np.random.Generator, count: int) -> tuple[LayerSpec, ...]:
    """Draw layers that fit each other when all of them run in their order."""
    layers = []
    values, travelling = 1, set[str]()
    for number in range(count):
        asks = [name for name in BATCH_NAMES if rng.random() < 0.15]
        asks += [name for name in sorted(travelling) if rng.random() < 0.5]
        kind = rng.random()
        returns, makes, ends = 1, (), ()
        if number < count - 1 and kind < 0.2:
            returns = int(rng.integers(2, 4))
        elif kind < 0.5:
            makes = tuple(name for name in TRAVELLERS if rng.random() < 0.4)
            open_ones = sorted(travelling - set(makes))
            ends = tuple(name for name in open_ones if rng.random() < 0.2)
            ends = ends if makes else ()
        layers.append(
            LayerSpec(
                values,
                tuple(asks),
                bool(rng.random() < 0.3),
                returns,
                makes,
                ends,
                adds_loss=bool(rng.random() < 0.1),
                frozen=bool(rng.random() < 0.1),
            )
        )
        travelling = (travelling | set(makes)) - set(ends)
        values = returns
    return tuple(layers)


# ---------------------------------------------------------------- its modules and data
class RandomLayer(nn.Module):
    """A layer as a spec describes it, with weights that a generator draws."""

    def __init__(self, spec: LayerSpec, first: bool, last: bool, draw: torch.Generator):
        super().__init__()

        def linear(outputs: int = WIDTH) -> nn.Linear:
            made = nn.Linear(WIDTH, outputs, dtype=torch.float64)
            for parameter in made.parameters():
                drawn = torch.randn(parameter.shape, generator=draw)
                parameter.data.copy_(0.6 * drawn)
            return made

        self.spec, self.first = spec, first
        self.note: Callable[[Tensor], None] = add_loss
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=torch.float64) if first else None
        if self.embed is not None:
            drawn = torch.randn(WORDS, WIDTH, generator=draw)
            self.embed.weight.data.copy_(drawn)
        self.each = nn.ModuleList(linear() for _ in range(spec.takes))
        self.side = nn.ModuleDict({name: linear() for name in spec.asks})
        self.more = nn.ModuleList(linear() for _ in range(spec.returns - 1))
        self.out = linear(CLASSES) if last else None
        self.requires_grad_(not spec.frozen)
        self.state_what_it_takes()

    def state_what_it_takes(self) -> None:
        """Give the forward the parameters of the spec, or say by name what it asks for."""
        spec = self.spec
        if spec.says_so:
            self.asked_names = spec.asks
            return
        values = [
            Parameter(f"x{number}", Parameter.POSITIONAL_OR_KEYWORD)
            for number in range(spec.takes)
        ]
        asked = [Parameter(name, Parameter.KEYWORD_ONLY) for name in spec.asks]
        piece = Parameter("piece", Parameter.KEYWORD_ONLY, default=None)

        def forward(
            *values: Tensor, piece: Slice | None = None, **named: Tensor
        ) -> object:
            return self.compute(values, named, piece)

        forward.__signature__ = Signature([*values, *asked, piece])
        self.forward = forward

    def forward(
        self, *values: Tensor, piece: Slice | None = None, **named: Tensor
    ) -> object:
        return self.compute(values, named, piece)

    def compute(
        self,
        values: Sequence[Tensor],
        named: Mapping[str, Tensor],
        piece: Slice | None = None,
    ) -> object:
        """Mix all that was given; return what the spec says.

        A slice gets its own tokens of what earlier layers made, and whole tensors of the batch.
        """
        if piece is not None:
            own = slice(piece.begin, piece.end)
            named = {
                name: x[:, own] if name in BATCH_NAMES else x
                for name, x in named.items()
            }
        tokens = values[0] if self.first else None
        if self.embed is not None:
            values = (self.embed(values[0]),)
        mixed = [one(x) for one, x in zip(self.each, values, strict=True)]
        mixed += [one(per_feature(named[name])) for name, one in self.side.items()]
        y = values[0] + sum(mixed).tanh()
        made = {"skip": y.sin(), "memory": values[0] * 0.5}
        made["odd"] = (y.detach().sum(-1) > 0).long() if tokens is None else tokens % 2
        if self.spec.adds_loss:
            self.note(0.3 * y.square().mean())
        if self.out is not None:
            y = self.out(y)
        if self.spec.returns > 1:
            return (y, *(one(y).tanh() for one in self.more))
        if not self.spec.makes:
            return y
        return {
            "main": y,
            **{name: made[name] for name in self.spec.makes},
            **dict.fromkeys(self.spec.ends),
        }


def per_feature(x: Tensor) -> Tensor:
    """A tensor with features, from one that has a number for each token."""
    if x.dim() == 3:
        return x
    return x.double()[..., None].expand(*x.shape, WIDTH)


def build_layers(case: ModuleCase) -> list[RandomLayer]:
    """Build the layers; every call draws the same weights."""
    draw = torch.Generator().manual_seed(case.seed)
    last = len(case.layers) - 1
    return [
        RandomLayer(spec, number == 0, number == last, draw)
        for number, spec in enumerate(case.layers)
    ]


def batch_for_modules(case: ModuleCase, step: int) -> Batch:
    """Draw the micro-batches of a step."""
    draw = torch.Generator().manual_seed(1000 * case.seed + step)
    asked = {name for layer in case.layers for name in layer.asks}
    inputs, labels, named = [], [], []
    for microbatch, rows in zip(case.schedule.microbatches, case.rows, strict=True):
        shape = (rows, microbatch.tokens)
        inputs.append(torch.randint(0, WORDS, shape, generator=draw))
        drawn = torch.randint(0, CLASSES, shape, generator=draw)
        counted = torch.rand(shape, generator=draw) < 0.9
        labels.append(drawn.masked_fill(~counted, -100))
        given = {
            "mask": torch.rand(shape, generator=draw) < 0.5,
            "scale": torch.rand(shape, generator=draw, dtype=torch.float64),
        }
        named.append({name: given[name] for name in BATCH_NAMES if name in asked})
    return batch_of(inputs, labels, named=named if named[0] else ())


def summed_loss(y: object, labels: Tensor) -> Tensor:
    """The sum of the losses of all labels; the last layer may return a dict."""
    logits = y["main"] if isinstance(y, Mapping) else y
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


# ---------------------------------------------------------------- plain calls
def call_plainly(case: ModuleCase, batches: Sequence[Batch]) -> Said:
    """The loss of each step and the gradients, by calls of the layers one after the other.

    Raises a KeyError or a ValueError if a layer does not get what it asks for.
    """
    layers = build_layers(case)
    added: list[Tensor] = []
    for layer in layers:
        layer.note = added.append
    bounds = list(pairwise(accumulate(case.partition, initial=0)))
    losses = []
    for batch in batches:
        losses.append(0.0)
        for number, microbatch in enumerate(case.schedule.microbatches):
            parts = [case.schedule.stages[stage].part for stage in microbatch.path]
            path = [layer for part in parts for layer in layers[slice(*bounds[part])]]
            given = batch.named[number] if batch.named else {}
            y = walk(path, batch.inputs[number], given)
            labels = batch.labels[number]
            share = labels.numel() / sum(one.numel() for one in batch.labels)
            loss = summed_loss(y, labels) / batch.valid
            loss = loss + share * sum(added, torch.zeros(()))
            added.clear()
            if loss.requires_grad:
                loss.backward()
            losses[-1] += float(loss.detach())
    return losses, gradients_by_name(layers)


def walk(
    layers: Sequence[RandomLayer], tokens: Tensor, given: Mapping[str, Tensor]
) -> object:
    """Call layers one after the other, with everything that earlier ones have made."""
    values: tuple[Tensor, ...] = (tokens,)
    travelling: dict[str, Tensor] = {}
    y: object = None
    for layer in layers:
        known = {**given, **travelling}
        y = layer.compute(values, {name: known[name] for name in layer.spec.asks})
        if isinstance(y, Mapping):
            main, *names = y
            values = (y[main],)
            for name in names:
                travelling.pop(name, None)
                if y[name] is not None:
                    travelling[name] = y[name]
        else:
            values = y if isinstance(y, tuple) else (y,)
    return y


def gradients_by_name(layers: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The gradients of layers, by the number of the layer and the name of the parameter."""
    return {
        f"{number}.{name}": one.grad
        for number, layer in enumerate(layers)
        for name, one in layer.named_parameters()
        if one.grad is not None
    }


# ---------------------------------------------------------------- our pipeline
@dataclass(frozen=True)
class ModuleOutcome:
    """What the ranks of a pipeline computed."""

    losses: list[list[float]]
    evaluated: list[float]
    gradients: list[dict[str, Tensor]]  # of each rank
    held: list[set[str]]  # the names of the parameters of each rank that train


def run_pipeline(
    case: ModuleCase,
    batches: Sequence[Batch],
    models: Sequence[list[RandomLayer]],
    finished: list[int],
) -> ModuleOutcome:
    """Run the case with one thread per rank, each with its own modules; note the rank of every finished step."""
    schedule = case.schedule
    program = lower(schedule)

    def work(comm):
        parts = cut_into_parts(models[comm.rank], schedule.parts, case.partition)
        stages = own_stages(schedule, parts, comm.rank)
        executor = Executor(
            program,
            stages,
            comm,
            summed_loss,
            recompute=case.recompute & stages.keys(),
            tape=Again() if case.recorded else None,
        )
        losses = []
        for batch in batches:
            losses.append(executor.step(batch).loss)
            finished.append(comm.rank)
        held = {
            name
            for part in stages.values()
            for name, one in part.named_parameters()
            if one.requires_grad
        }
        return losses, executor.evaluate(batches[0]), held

    done = run_threads(schedule.ranks, work, patience=60)
    return ModuleOutcome(
        [losses for losses, _, _ in done],
        [evaluated for _, evaluated, _ in done],
        [gradients_by_name(layers) for layers in models],
        [held for _, _, held in done],
    )


# ---------------------------------------------------------------- a verdict
def run_module_case(case: ModuleCase) -> Verdict:
    """Run a case, and turn any outcome into a verdict."""
    batches = [batch_for_modules(case, step) for step in range(case.steps)]
    try:
        expected: Said | None = call_plainly(case, batches)
    except UNFIT:
        expected = None
    models = [build_layers(case) for _ in range(case.schedule.ranks)]
    finished: list[int] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = run_pipeline(case, batches, models, finished)
    except Exception as error:
        if expected is None and isinstance(error, UNFIT):
            return Verdict("refused", "a layer itself says that it lacks something")
        if type(error) not in REFUSALS:
            return Verdict("failed", traceback.format_exc())
        if finished:
            return Verdict("failed", f"refused after a step was done: {error}")
        return Verdict("refused", str(error).partition("\n")[0])
    if expected is None:
        return Verdict("failed", "it ran, but plain calls cannot run it")
    text = difference_of_modules(ours, expected)
    return Verdict("failed", text) if text else Verdict("exact")


def difference_of_modules(ours: ModuleOutcome, expected: Said) -> str:
    """Describe the first wrong loss or gradient; "" if there is none."""
    losses, gradients = expected
    found = [*ours.losses, *([value] for value in ours.evaluated)]
    for each in found:
        for mine, other in zip(each, losses, strict=False):
            if not math.isclose(mine, other, rel_tol=FLOAT64, abs_tol=FLOAT64):
                return f"the loss is {mine!r}, not {other!r}"
    largest = max((float(one.abs().max()) for one in gradients.values()), default=0.0)
    for rank, names in enumerate(ours.held):
        for name in names:
            zero = torch.zeros((), dtype=torch.float64)
            mine = ours.gradients[rank].get(name, zero)
            far = float((mine - gradients.get(name, zero)).abs().max())
            if not far <= FLOAT64 * max(1.0, largest):
                return f"the gradient of {name} on rank {rank} is off by {far:.3g}, of at most {largest:.3g}"
    return ""
