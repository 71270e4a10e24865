"""Random modules through random schedules, each compared with the same model in one piece.

    model      a list of layers that pass one to three tensors, in any form, and tensors with names; or a small model
               of Hugging Face; changed by up to three of the kinds of `fuzz_kinds`
    loss       of several conventions
    batch      masks and numbers that belong to the batch; micro-batches of several sizes
    run        any schedule of the fuzzer, slices, split backwards, recomputed stages, recorded actions (the tape that
               needs no GPU), a proof before the first step, steps of an optimizer

A case is `exact` if the losses, every gradient, weight and buffer, and the evaluated loss are those of the model in one
piece. It is `refused` if a `PenstockError` comes before any rank has finished a step. It is `unfit` if the model
does not run in one piece either; then a pipeline has to raise an error too.
"""

from __future__ import annotations

import copy
import math
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from inspect import Parameter, Signature
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from again_tape import Again
from fuzz import Verdict, along, difference_of_tensors, draw_schedule
from fuzz_kinds import (
    CLASSES,
    DRESSES,
    EXACT,
    KINDS,
    LOSSES,
    ONLY_BESIDE,
    WIDTH,
    WORDS,
    Draft,
    Kind,
    LossKind,
    undressed,
)
from hugging_face import decoder_sizes, gpt2_sizes
from penstock import Pipeline, Schedule, lower
from penstock.errors import PeerLostError, PenstockError, StuckError
from penstock.ir import Action, Op
from penstock.models.slice import Slice
from penstock.runtime import Batch, Executor, add_loss, batch_of, prove, run_threads

BATCH_NAMES = ("mask", "scale")
TRAVELLERS = ("skip", "memory", "odd")  # `odd` has whole numbers
BARE = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "layer norm": lambda: nn.LayerNorm(WIDTH, dtype=torch.float64),
    "identity": nn.Identity,
    "no dropout": lambda: nn.Dropout(0.0),
}
FAMILIES = {"llama": 4e-6, "gpt2": EXACT}  # Llama's norms round to float32
RATE = 0.05
MUST_BE_REFUSED = frozenset(
    [name for name, row in KINDS.items() if row.refused]
    + [f"loss {name}" for name, row in LOSSES.items() if row.refused]
)
CRASHES = (StuckError, PeerLostError)  # errors of ours that are no refusals


# ---------------------------------------------------------------- a case
@dataclass(frozen=True)
class LayerSpec:
    """What one layer takes and returns."""

    takes: int = 1  # values
    asks: tuple[str, ...] = ()
    says_so: bool = False  # by `asked_names` instead of by its parameters
    dresses: tuple[str, ...] = ("",)  # of the values it returns
    makes: tuple[str, ...] = ()  # names, if it returns a dict
    ends: tuple[str, ...] = ()  # names that travel no further
    adds_loss: bool = False
    bare: str = ""  # a module of torch

    @property
    def alike(self) -> bool:
        """Whether it may change places with others of its kind."""
        return self == LayerSpec()


@dataclass(frozen=True)
class ModuleCase:
    """Everything that one seed decides."""

    seed: int
    family: str  # "" for a list of layers
    layers: tuple[LayerSpec, ...]
    kinds: tuple[str, ...]
    loss: str
    schedule: Schedule
    partition: tuple[int, ...]
    rows: tuple[int, ...]
    recompute: frozenset[int]
    recorded: bool
    proven: bool
    updates: bool  # whether an optimizer takes steps
    steps: int
    only: str = ""  # the kind that was asked for
    marks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        told = ", ".join(
            word if value == "yes" else f"{word} {value}"
            for word, value in self.marks.items()
        )
        return f"seed={self.seed}  {told}\n  {self.command}"

    @property
    def command(self) -> str:
        """The command that repeats the case."""
        only = f" --kind {self.only!r}" if self.only else ""
        return f"python tests/fuzz.py --modules --cases 1 --seed {self.seed}{only}"

    @property
    def rows_of_kinds(self) -> tuple[Kind, ...]:
        """What is done to the model."""
        return tuple(KINDS[name] for name in self.kinds)

    @property
    def loss_kind(self) -> LossKind:
        """The loss and its convention."""
        return LOSSES[self.loss]

    @property
    def must_be_refused(self) -> bool:
        """Whether something in it may not run at all."""
        return self.loss_kind.refused or any(k.refused for k in self.rows_of_kinds)

    @property
    def counted(self) -> tuple[str, ...]:
        """The names under which the case is counted: of kinds, forms of tensors, the loss and more."""
        passed = {f"passes {d}" for one in self.layers for d in one.dresses if d}
        bare = {f"bare {one.bare}" for one in self.layers if one.bare}
        said = {f"with {w}" for w, value in self.marks.items() if value == "yes"}
        model = f"model {self.family or 'list of layers'}"
        return (*self.kinds, *passed, *bare, *said, f"loss {self.loss}", model)

    @property
    def limit(self) -> float:
        """How much may differ, as a share of the largest number."""
        limits = [kind.limit for kind in self.rows_of_kinds]
        if any("float32" in layer.dresses for layer in self.layers):
            limits.append(1e-5)
        own = FAMILIES[self.family] if self.family else EXACT
        return max(*limits, own, self.loss_kind.limit, EXACT)


def draw_module_case(seed: int, only: str = "") -> ModuleCase:
    """Draw the case of a seed, perhaps with a kind that is asked for. No module is built yet."""
    rng = np.random.default_rng([43, seed])
    family = str(rng.choice(list(FAMILIES))) if rng.random() < 0.25 else ""
    kinds, loss = draw_kinds(rng, family, only)
    if only in KINDS and not (KINDS[only].lists if not family else KINDS[only].models):
        family = "" if family else "gpt2"
    chosen = [KINDS[name] for name in kinds]
    name, schedule = draw_schedule(rng, ranks=None)
    # What is remembered outside of buffers is not restored where a forward runs again, nor compared among copies.
    elsewhere = any(kind.hidden and kind.ordered for kind in chosen)
    # A model in one piece ends a micro-batch before the next, which a norm in two of its layers remembers.
    norm_of_two_layers = family and "shared batch norm" in kinds
    while (
        (any(kind.ordered for kind in chosen) and not shared_order(schedule))
        or (elsewhere and len(schedule.stages) > schedule.parts)
        or (norm_of_two_layers and not one_after_another(schedule))
    ):
        name, schedule = draw_schedule(rng, ranks=None)
    whole = any(kind.whole for kind in chosen) or not LOSSES[loss].additive
    if schedule.slices > 1 and rng.random() < (0.8 if whole else 0.5):
        schedule = uncut(schedule)
    partition = tuple(int(rng.choice([1, 1, 2, 3])) for _ in range(schedule.parts))
    if family:
        partition = tuple(min(count, 2) for count in partition)
    layers = () if family else draw_layers(rng, sum(partition))
    if layers and (LOSSES[loss].refused or LOSSES[loss].reduction == "mean"):
        # Nobody but the loss can take several outputs apart, so it is not tried.
        layers = (*layers[:-1], replace(layers[-1], makes=(), ends=()))
    rows = tuple(int(rng.integers(1, 4)) for _ in schedule.microbatches)
    if rng.random() < 0.5:
        rows = rows[:1] * len(rows)
    stages = [stage for stage in range(len(schedule.stages)) if rng.random() < 0.6]
    recompute = frozenset(stages if rng.random() < 0.3 and not elsewhere else ())
    # The tape of the tests cannot write into a tensor whose numbers share a place.
    spread = any("expanded" in layer.dresses for layer in layers)
    unfit = family or spread or elsewhere
    recorded = bool(not unfit and rng.random() < 0.15)
    # A module inside a model cannot say that it needs whole sequences.
    hidden = any(kind.hidden or (kind.whole and family) for kind in chosen)
    hidden = hidden or not LOSSES[loss].additive
    proven = bool(rng.random() < 0.15 or hidden)
    updates = bool(rng.random() < 0.4)
    steps = int(rng.choice([1, 2]))
    case = ModuleCase(
        *(seed, family, layers, kinds, loss, schedule, partition, rows, recompute),
        *(recorded, proven, updates, steps, only),
    )
    return replace(case, marks=marks_of(case, name))


def draw_kinds(
    rng: np.random.Generator, family: str, only: str
) -> tuple[tuple[str, ...], str]:
    """Draw what is done to the model, and the loss."""
    fit = [name for name, row in KINDS.items() if (row.models if family else row.lists)]
    drawn = rng.choice(fit, size=int(rng.choice([0, 1, 1, 2, 3])), replace=False)
    loss = str(rng.choice(list(LOSSES))) if rng.random() < 0.4 else "sum"
    kinds = [str(name) for name in drawn]
    if only in KINDS and only not in kinds:
        kinds.append(only)
    return tuple(kinds), only if only in LOSSES else loss


def marks_of(case: ModuleCase, name: str) -> dict[str, str]:
    """What describes a case."""
    schedule, layers = case.schedule, case.layers
    splits = any(action.op is Op.W for lane in schedule.lanes for action in lane)
    kinds = {
        "tuple": any(len(layer.dresses) > 1 for layer in layers),
        "dict": any(layer.makes for layer in layers),
        "ended": any(layer.ends for layer in layers),
        "named": any(set(layer.asks) & set(BATCH_NAMES) for layer in layers),
        "skip": any(set(layer.asks) & set(TRAVELLERS) for layer in layers),
        "added loss": any(layer.adds_loss for layer in layers),
        "split": splits,
        "slices": schedule.slices > 1,
        "replicas": len(schedule.stages) > schedule.parts,
        "recompute": bool(case.recompute),
        "recorded": case.recorded,
        "proven": case.proven,
        "updates": case.updates,
    }
    dresses = sorted({one for layer in layers for one in layer.dresses if one})
    return {
        "schedule": name,
        "ranks": str(schedule.ranks),
        "model": case.family or "list",
        "layers": "+".join(map(str, case.partition)),
        "kinds": " & ".join(case.kinds) or "none",
        "loss": case.loss,
        **({"passes": " & ".join(dresses)} if dresses else {}),
        **{kind: "yes" for kind, there in kinds.items() if there},
    }


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


def forwards_of(schedule: Schedule) -> list[Action]:
    """All forwards of whole sequences, in an order in which the lanes may run them."""
    whole = uncut(schedule) if schedule.slices > 1 else schedule
    lanes = [[a for a in lane if a.op is Op.F] for lane in whole.lanes]
    reached = [0] * len(whole.microbatches)
    ordered = []
    while any(lanes):
        for lane in lanes:
            while lane:
                path = whole.microbatches[lane[0].microbatch].path
                if path[reached[lane[0].microbatch]] != lane[0].stage:
                    break
                reached[lane[0].microbatch] += 1
                ordered.append(lane.pop(0))
    return ordered


def one_after_another(schedule: Schedule) -> bool:
    """Whether every rank ends the forwards of a micro-batch before it begins those of the next."""
    forwards = [
        [action.microbatch for action in lane if action.op is Op.F]
        for lane in schedule.lanes
    ]
    return all(len(list(groupby(lane))) == len(set(lane)) for lane in forwards)


def shared_order(schedule: Schedule) -> list[int]:
    """The order of micro-batches that all stages have in common; empty if they have none."""
    by_stage: dict[int, list[int]] = {}
    for action in forwards_of(schedule):
        by_stage.setdefault(action.stage, []).append(action.microbatch)
    left = list(range(len(schedule.microbatches)))
    order = []
    while left:
        ready = [
            one
            for one in left
            if all(row[0] == one for row in by_stage.values() if one in row)
        ]
        if not ready:
            return []
        order.append(ready[0])
        left.remove(ready[0])
        for row in by_stage.values():
            if ready[0] in row:
                row.remove(ready[0])
    return order


def draw_layers(rng: np.random.Generator, count: int) -> tuple[LayerSpec, ...]:
    """Draw layers that fit each other when all of them run in their order."""
    layers: list[LayerSpec] = []
    values, travelling = 1, set[str]()
    fancy = rng.random() < 0.6  # other lists have plain layers, which may change places
    for number in range(count):
        last = number == count - 1
        bare = number and not last and values == 1 and rng.random() < 0.15
        if bare and not layers[-1].dresses[0] and not layers[-1].makes:
            layers.append(LayerSpec(bare=str(rng.choice(list(BARE)))))
            continue
        if not fancy:
            layers.append(LayerSpec())
            continue
        asks = [name for name in BATCH_NAMES if rng.random() < 0.15]
        asks += [name for name in sorted(travelling) if rng.random() < 0.5]
        kind = rng.random()
        dresses: tuple[str, ...] = ("",)
        makes, ends = (), ()
        if not last and kind < 0.3:
            more = rng.choice(["", *DRESSES], size=int(rng.choice([0, 1, 1, 2])))
            main = rng.choice(["", "", *(d for d in DRESSES if d not in ONLY_BESIDE)])
            dresses = (str(main), *map(str, more))
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
                dresses,
                makes,
                ends,
                adds_loss=bool(rng.random() < 0.1),
            )
        )
        travelling = (travelling | set(makes)) - set(ends)
        values = len(dresses)
    return tuple(layers)


# ---------------------------------------------------------------- its modules and data
class RandomLayer(nn.Module):
    """A layer as a spec describes it, with weights that a generator draws."""

    def __init__(self, spec: LayerSpec, first: bool, last: bool, draw: torch.Generator):
        super().__init__()

        def linear(outputs: int = WIDTH) -> nn.Linear:
            return drawn(nn.Linear(WIDTH, outputs, dtype=torch.float64), draw)

        self.spec, self.first = spec, first
        self.alike = spec.alike and not first and not last
        self.note: Callable[[Tensor], None] = add_loss
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=torch.float64) if first else None
        if self.embed is not None:
            drawn(self.embed, draw, scale=1.0)
        self.each = nn.ModuleList(linear() for _ in range(spec.takes))
        self.side = nn.ModuleDict({name: linear() for name in spec.asks})
        self.more = nn.ModuleList(linear() for _ in spec.dresses[1:])
        self.pieces = nn.ModuleList()
        self.out = linear(CLASSES) if last else None
        self.state_what_it_takes()

    @property
    def unsliceable(self) -> str:
        """Why it cannot be sliced, which a user knows of modules of their own."""
        mixes = any(getattr(one, "mixes", False) for one in self.pieces)
        frequency = self.embed is not None and self.embed.scale_grad_by_freq
        one = "one number" in self.spec.dresses
        return "it looks at whole sequences" if mixes or frequency or one else ""

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
        like = tuple(values[0].shape[:2])
        values = [undressed(x, like) for x in values]
        mixed = [one(x) for one, x in zip(self.each, values, strict=True)]
        mixed += [one(undressed(named[name], like)) for name, one in self.side.items()]
        y = values[0] + sum(mixed).tanh()
        for one in self.pieces:
            y = one(y)
        made = {"skip": y.sin(), "memory": values[0] * 0.5}
        made["odd"] = (y.detach().sum(-1) > 0).long() if tokens is None else tokens % 2
        if self.spec.adds_loss:
            self.note(0.3 * y.square().mean())
        if self.out is not None:
            y = self.out(y)
        main = self.dressed(0, y)
        if len(self.spec.dresses) > 1:
            others = enumerate(self.more, start=1)
            return (main, *(self.dressed(n, one(y).tanh()) for n, one in others))
        if not self.spec.makes:
            return main
        return {
            "main": main,
            **{name: made[name] for name in self.spec.makes},
            **dict.fromkeys(self.spec.ends),
        }

    def dressed(self, number: int, y: Tensor) -> Tensor:
        """A value in the form in which it is passed on."""
        name = self.spec.dresses[number]
        return DRESSES[name](self, y) if name else y


def build_layer(
    spec: LayerSpec, first: bool, last: bool, draw: torch.Generator
) -> nn.Module:
    """Build one layer."""
    if not spec.bare:
        return RandomLayer(spec, first, last, draw)
    return drawn(BARE[spec.bare](), draw)


def drawn(module: nn.Module, draw: torch.Generator, scale: float = 0.6) -> nn.Module:
    """A module whose parameters a generator has drawn."""
    for parameter in module.parameters():
        parameter.data.copy_(scale * torch.randn(parameter.shape, generator=draw))
    return module


@lru_cache(maxsize=32)
def base_model(family: str, layers: int) -> nn.Module:
    """A small model of Hugging Face, which is copied for every case."""
    torch.manual_seed(layers)
    if family == "llama":
        sizes = decoder_sizes(WORDS, layers, inner=12, initializer_range=0.3)
        config: Any = transformers.LlamaConfig(**sizes)
        return transformers.LlamaForCausalLM(config).double()
    sizes = gpt2_sizes(WORDS, layers, initializer_range=0.3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double()


@dataclass
class Subject:
    """The modules of a case: a list of layers, or a model."""

    layers: list[Any]
    model: Any = None

    @property
    def whole(self) -> nn.Module:
        """Everything as one module, whose names are those of a pipeline."""
        return nn.ModuleList(self.layers) if self.model is None else self.model

    @property
    def given(self) -> Any:
        """What a `Pipeline` is given."""
        return self.layers if self.model is None else self.model


def build(case: ModuleCase) -> Subject:
    """Build the model of a case; every call draws the same weights."""
    draw = torch.Generator().manual_seed(case.seed)
    if case.family:
        model: Any = copy.deepcopy(base_model(case.family, sum(case.partition)))
        model.train()
        base = model.base_model
        name = "layers" if hasattr(base, "layers") else "h"
        draft = Draft(list(getattr(base, name)), model.config.hidden_size, None, model)
    else:
        last = len(case.layers) - 1
        built = [
            build_layer(spec, number == 0, number == last, draw)
            for number, spec in enumerate(case.layers)
        ]
        draft = Draft(built, WIDTH, None)
    for place, kind in enumerate(case.rows_of_kinds):
        draft.rng = np.random.default_rng([47, case.seed, place])
        torch.manual_seed(case.seed + place)  # modules of torch draw their own weights
        kind.change(draft)
    if case.family:
        setattr(base, name, nn.ModuleList(draft.layers))
    return Subject(draft.layers, draft.model)


def batch_for_modules(case: ModuleCase, step: int) -> Batch:
    """Draw the micro-batches of a step."""
    draw = torch.Generator().manual_seed(1000 * case.seed + step)
    asked = {name for layer in case.layers for name in layer.asks}
    kind = case.loss_kind
    inputs, labels, named = [], [], []
    for microbatch, rows in zip(case.schedule.microbatches, case.rows, strict=True):
        shape = (rows, microbatch.tokens)
        inputs.append(torch.randint(0, WORDS, shape, generator=draw))
        classes = WORDS if case.family else CLASSES
        if kind.numbers:
            full = (*shape, classes)
            labels.append(torch.randn(full, generator=draw, dtype=torch.float64))
        else:
            drawn = torch.randint(0, CLASSES, shape, generator=draw)
            counted = torch.rand(shape, generator=draw) < kind.always
            labels.append(drawn.masked_fill(~counted, -100))
        given = {
            "mask": torch.rand(shape, generator=draw) < 0.5,
            "scale": torch.rand(shape, generator=draw, dtype=torch.float64),
        }
        named.append({name: given[name] for name in BATCH_NAMES if name in asked})
    return batch_of(inputs, labels, named=named if named and named[0] else ())


def loss_of(case: ModuleCase) -> Callable[[Any, Tensor], Tensor]:
    """The loss of what the last layer returns; that may be a dict."""
    kind = case.loss_kind

    def loss(y: Any, labels: Tensor) -> Tensor:
        logits = y["main"] if isinstance(y, Mapping) else y
        if not kind.numbers:
            logits, labels = logits[..., :CLASSES].flatten(0, 1), labels.flatten()
        return kind.loss(logits, labels)

    return loss


# ---------------------------------------------------------------- the model in one piece
@dataclass
class Outcome:
    """What a rank has computed, or the model in one piece."""

    losses: list[float] = field(default_factory=list)
    evaluated: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)  # weights and buffers
    trained: set[str] = field(default_factory=set)


def run_whole(case: ModuleCase, batches: Sequence[Batch]) -> Outcome:
    """Train the model in one piece, with micro-batches in the order in which the lanes run their forwards."""
    subject = build(case)
    whole = subject.whole
    outcome = Outcome()
    for batch in batches:
        outcome.losses.append(whole_loss(case, subject, batch, backward=True))
        outcome.gradients = gradients_of(whole.named_parameters())
        take_step(case, whole.parameters())
    outcome.state = state_of(whole)
    whole.eval()
    with torch.no_grad():
        outcome.evaluated = whole_loss(case, subject, batches[0], backward=False)
    return outcome


def take_step(case: ModuleCase, parameters: Any) -> None:
    """Take the step of an optimizer."""
    if not case.updates:
        return
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=RATE)
                parameter.grad = None


def whole_loss(
    case: ModuleCase, subject: Subject, batch: Batch, backward: bool
) -> float:
    """The loss of a batch: of all outputs at once if it is a mean, else the sum of the losses of micro-batches.

    The backward goes through one micro-batch after the other, as in a loop that adds up gradients.
    """
    outputs, added = whole_outputs(case, subject, batch)
    loss = loss_of(case)
    labels = batch.labels
    numbers = [y["main"] if isinstance(y, Mapping) else y for y in outputs]
    ends = [y.detach().requires_grad_(backward) for y in numbers]
    copies = [y.clone() for y in ends]  # a loss may change them
    if case.loss_kind.reduction == "mean":
        flat = torch.cat([y.flatten(0, 1)[None] for y in copies], 1)
        value = loss(flat, torch.cat([t.flatten(0, 1)[None] for t in labels], 1))
    else:
        each = [loss(y, t).reshape(()) for y, t in zip(copies, labels, strict=True)]
        value = torch.stack(each).sum() / count_of(case, labels)
    total = float(value.detach())
    if backward:
        value.backward()
    rows = sum(one.numel() for one in labels)
    for y, end, more, t in zip(numbers, ends, added, labels, strict=True):
        share = t.numel() / rows * sum(more, torch.zeros(()))
        total += float(share.detach())
        roots = [(y, end.grad), (share, torch.ones_like(share))]
        roots = [pair for pair in roots if backward and pair[0].requires_grad]
        if roots:
            torch.autograd.backward(*zip(*roots, strict=True))
    return total


def count_of(case: ModuleCase, labels: Sequence[Tensor]) -> int:
    """The labels that count; all numbers of a regression do."""
    if case.loss_kind.numbers:
        return sum(one.numel() for one in labels)
    return max(1, sum(int((one != -100).sum()) for one in labels))


def whole_outputs(
    case: ModuleCase, subject: Subject, batch: Batch
) -> tuple[list[Any], list[list[Tensor]]]:
    """What the last layer returns for each micro-batch, and the losses that layers have added."""
    schedule = case.schedule
    bounds = list(pairwise(accumulate(case.partition, initial=0)))
    added: list[list[Tensor]] = [[] for _ in schedule.microbatches]
    if subject.model is not None:
        outputs: list[Any] = [None] * len(batch.inputs)
        for number in shared_order(schedule) or range(len(batch.inputs)):
            parts = [
                schedule.stages[s].part for s in schedule.microbatches[number].path
            ]
            layers = [layer for part in parts for layer in range(*bounds[part])]
            with along(subject.model, layers):
                outputs[number] = subject.model(
                    batch.inputs[number], use_cache=False
                ).logits
        return outputs, added
    walks = [Walk(x) for x in batch.inputs]
    for action in forwards_of(schedule):
        number = action.microbatch
        given = batch.named[number] if batch.named else {}
        layers = subject.layers[slice(*bounds[schedule.stages[action.stage].part])]
        for layer in layers:
            layer.note = added[number].append
            walks[number].go(layer, given)
    return [walk.returned for walk in walks], added


class Walk:
    """One micro-batch on its way through the layers, with everything that earlier ones have made."""

    def __init__(self, tokens: Tensor) -> None:
        self.values: tuple[Tensor, ...] = (tokens,)
        self.travelling: dict[str, Tensor] = {}
        self.returned: Any = None

    def go(self, layer: Any, given: Mapping[str, Tensor]) -> None:
        """Go through one layer."""
        known = {**given, **self.travelling}
        asks = layer.spec.asks if isinstance(layer, RandomLayer) else ()
        y = layer(*self.values, **{name: known[name] for name in asks})
        self.returned = y
        if not isinstance(y, Mapping):
            self.values = y if isinstance(y, tuple) else (y,)
            return
        main, *names = y
        self.values = (y[main],)
        for name in names:
            self.travelling.pop(name, None)
            if y[name] is not None:
                self.travelling[name] = y[name]


def gradients_of(named: Any) -> dict[str, Tensor]:
    """The gradients of parameters, which may be sparse."""
    return {
        name: (one.grad.to_dense() if one.grad.is_sparse else one.grad).detach().clone()
        for name, one in named
        if one.grad is not None
    }


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """All weights, buffers, and tensors and numbers of calls that are plain attributes."""
    state: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    state |= dict(module.named_buffers(remove_duplicate=False))
    for name, inner in module.named_modules():
        for word in ("mean", "calls"):
            if word in vars(inner):
                state[f"{name}.{word}"] = torch.as_tensor(vars(inner)[word])
    return {
        name: tensor.detach().clone()
        for name, tensor in state.items()
        if not isinstance(tensor, nn.parameter.UninitializedTensorMixin)
    }


# ---------------------------------------------------------------- our pipeline
def run_pipeline(
    case: ModuleCase,
    batches: Sequence[Batch],
    subjects: Sequence[Subject],
    finished: list[int],
) -> list[Outcome]:
    """Run the case with one thread per rank, each with its own modules; note the rank of every finished step."""
    schedule = case.schedule

    def work(comm: Any) -> Outcome:
        pipeline = Pipeline(
            subjects[comm.rank].given,
            schedule,
            loss_of(case),
            comm=comm,
            partition=case.partition,
            reduction=case.loss_kind.reduction,
        )
        pipeline.recompute = case.recompute & pipeline.stages.keys()
        if case.recorded:
            vars(pipeline)["executor"] = Executor(
                lower(schedule),
                pipeline.stages,
                comm,
                pipeline.loss,
                recompute=pipeline.recompute,
                reduction=pipeline.reduction,
                tape=Again(),
            )
        if case.proven:
            prove(pipeline.executor, batches[0])
        outcome = Outcome()
        for batch in batches:
            outcome.losses.append(one_step(pipeline, batch).loss)
            finished.append(comm.rank)
            outcome.gradients = gradients_of(pipeline.named_parameters())
            take_step(case, pipeline.parameters())
        for part in pipeline.parts.values():
            outcome.state |= state_of(part)
        trained = pipeline.named_parameters()
        outcome.trained = {name for name, one in trained if one.requires_grad}
        with pipeline._in_eval_mode():
            outcome.evaluated = pipeline.executor.evaluate(batches[0])
        return outcome

    return run_threads(schedule.ranks, work, patience=60)


def one_step(pipeline: Pipeline, batch: Batch) -> Any:
    """Run one step: by `Pipeline.step` if all micro-batches have the same shape."""
    if len({tuple(x.shape) for x in batch.inputs}) > 1:
        return pipeline.executor.step(batch)
    named = {
        name: torch.cat([each[name] for each in batch.named])
        for name in (batch.named[0] if batch.named else ())
    }
    return pipeline.step(torch.cat(batch.inputs), torch.cat(batch.labels), **named)


# ---------------------------------------------------------------- a verdict
def run_module_case(case: ModuleCase) -> Verdict:
    """Run a case, and turn any outcome into a verdict."""
    batches = [batch_for_modules(case, step) for step in range(case.steps)]
    unfit = ""
    expected = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = run_whole(case, batches)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            unfit = f"{type(error).__name__}: {error}".partition("\n")[0]
    batches = [batch_for_modules(case, step) for step in range(case.steps)]
    before = copy.deepcopy(batches)
    finished: list[int] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Torch says this of models in one piece, too.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            warnings.filterwarnings("ignore", "For backward hooks to be called")
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            subjects = [build(case) for _ in range(case.schedule.ranks)]
            ours = run_pipeline(case, batches, subjects, finished)
    except Exception as error:
        return verdict_of_error(error, bool(unfit), bool(finished))
    if unfit:
        return Verdict("failed", f"it ran, but not in one piece: {unfit}")
    if case.must_be_refused:
        return Verdict("failed", "it ran, although it may not")
    text = difference_of_modules(case, ours, expected) or changed_batch(before, batches)
    return Verdict("failed", text) if text else Verdict("exact")


def verdict_of_error(error: Exception, unfit: bool, finished: bool) -> Verdict:
    """Whether an error is a refusal, the model's own, or a failure."""
    first = str(error).partition("\n")[0]
    if isinstance(error, PenstockError) and not isinstance(error, CRASHES):
        if finished:
            return Verdict("failed", f"refused after a step was done: {error}")
        return Verdict("unfit" if unfit else "refused", first)
    if unfit and not isinstance(error, (CRASHES, AssertionError)):
        return Verdict("unfit", f"{type(error).__name__}: {first}")
    return Verdict("failed", traceback.format_exc())


def difference_of_modules(
    case: ModuleCase, ours: Sequence[Outcome], expected: Outcome
) -> str:
    """Describe the first wrong loss, gradient, weight or buffer; "" if there is none."""
    for rank, mine in enumerate(ours):
        steps = [
            *zip(mine.losses, expected.losses, strict=True),
            (mine.evaluated, expected.evaluated),
        ]
        for step, (found, right) in enumerate(steps):
            if not math.isclose(found, right, rel_tol=case.limit, abs_tol=case.limit):
                when = f"of step {step}" if step < case.steps else "in eval mode"
                return f"the loss {when} is {found!r} on rank {rank}, not {right!r}"
        for what, found, right in (
            ("gradient", mine.gradients, expected.gradients),
            ("state", mine.state, expected.state),
        ):
            names = mine.trained if what == "gradient" else mine.state.keys()
            text = difference_of_tensors(names, found, right, case.limit)
            if text:
                return f"the {what} of {text} on rank {rank}"
    return ""


def changed_batch(before: Sequence[Batch], after: Sequence[Batch]) -> str:
    """Describe a tensor of the batch that was changed."""
    for one, other in zip(before, after, strict=True):
        for what in ("inputs", "labels"):
            pairs = zip(getattr(one, what), getattr(other, what), strict=True)
            if not all(torch.equal(x, y) for x, y in pairs):
                return f"the {what} of the batch were changed"
    return ""
