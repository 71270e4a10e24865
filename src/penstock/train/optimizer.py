"""The optimizer of a process: classes of torch.optim by name, groups of parameters, one norm of all gradients.

    layers.0.mlp.up.weight   ─┐ first group whose pattern matches ─► rate, decay ─┐
    layers.0.mlp_norm.weight ─┤ matrix or vector              ─► weight decay     ├─► torch.optim.AdamW, Muon, ...
    embed.weight             ─┘ frozen                        ─► left out        ─┘

    rank 0  ‖g‖² of its parameters ─┐                            Each square comes from the owner of its parameter.
    rank 1  ‖g‖² of its parameters ─┼─► one column ──► norm      They are added in one order, so the result has the
    rank 2  ...                     ─┘                           same bits however the model is split.

If several processes share a parameter, each measures and updates its own share. The learning rate of a step is a
warm-up, then a course that has a name or is the user's own:

    cosine        ╱‾‾╲            linear   ╱╲               wsd   ╱‾‾‾‾‾╲         inverse_sqrt   ╱╲
                ╱      ╲___              ╱    ╲___              ╱        ╲___                  ╱    `- . __

It depends only on the number of the step, so that a resumed run goes on with the right one. What an optimizer remembers
of each parameter is found by one step on a tiny parameter:

    AdamW       exp_avg, exp_avg_sq   as large as the parameter        step      one number
    SGD         momentum_buffer, if it has momentum
    Adafactor   row_var, col_var      one number a row, one a column   step      one number

Checkpoints and other processes must know the shapes of this state before a parameter has taken its first step.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.config import (
    PRESET_RATES,
    Config,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    ParameterGroup,
)
from penstock.errors import ConfigError, RunError, UnknownNameError, nearest_name
from penstock.models.split import Part, find_layout
from penstock.runtime import Comm, local_share
from penstock.runtime.gradients import scale_down
from penstock.shaped import split_name
from penstock.torch_internals import norms_of_all
from penstock.train.history import Counts, OwnNumbers
from penstock.train.lora import adapted_blueprint, is_adapter
from penstock.train.user_code import own_function
from penstock.train.weights import NUMBERS_PER_PARAMETER, Holding, Sizes

OptimizerClass: TypeAlias = type[torch.optim.Optimizer]
MUON = "Muon"
BESIDE_MUON = "AdamW"  # for embeddings, heads, norms and biases
FUSED = ("Adam", "AdamW")  # one kernel updates all parameters
# Their updates of a number depend on other numbers of its matrix, which another process may hold.
WHOLE_MATRICES = (MUON, "Adafactor")
REFUSED = {
    "LBFGS": "it computes the loss several times in a step",
    "SparseAdam": "it takes only sparse gradients, and models here have none",
}
# Keyword arguments that have their own keys in the config, or that the trainer decides.
OWN_KEYS = {
    "params": "optimizer.groups",
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "betas": "optimizer.betas",
}
DECIDED_HERE = ("capturable", "differentiable", "foreach", "fused")
HIGHEST_RATE = "initial_lr"  # in a group, as torch's own schedulers name it


# ---------------------------------------------------------------- classes by name
def optimizer_class(name: str) -> OptimizerClass:
    """Return the class of torch.optim with this name."""
    if name in REFUSED:
        raise ConfigError(f"optimizer.name = {name} does not work: {REFUSED[name]}")
    known = known_optimizers()
    if name not in known:
        raise UnknownNameError("optimizer.name", name, known)
    return known[name]


def known_optimizers() -> dict[str, OptimizerClass]:
    """Return the classes of the installed torch that can train a pipeline."""
    found = {}
    for name, value in vars(torch.optim).items():
        is_class = isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        if is_class and value is not torch.optim.Optimizer and name not in REFUSED:
            found[name] = value
    return found


def classes_of(settings: OptimizerConfig) -> tuple[OptimizerClass, ...]:
    """Return the class of the layers' matrices, then that of everything else if it is another."""
    first = optimizer_class(settings.name)
    if settings.name != MUON:
        return (first,)
    return first, optimizer_class(BESIDE_MUON)


def arguments_of(kind: OptimizerClass, settings: OptimizerConfig) -> dict[str, Any]:
    """Return the keyword arguments of a class, without the parameters."""
    accepted = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {"lr": settings.highest_rate}
    if "betas" in accepted:
        arguments["betas"] = settings.betas
    if kind.__name__ in FUSED:
        arguments["fused"] = True
    if kind.__name__ == settings.name:
        arguments |= dict(settings.options)
    return arguments


def check_optimizer(settings: OptimizerConfig, mesh: ParallelConfig) -> None:
    """Raise ConfigError if torch has no such optimizer, or if it cannot work here."""
    kind = optimizer_class(settings.name)
    if settings.name in WHOLE_MATRICES and mesh.size > 1:
        raise ConfigError(
            f"optimizer.name = {settings.name} needs whole matrices, but parallel.dp_shard = {mesh.dp_shard} and "
            f"parallel.tp = {mesh.tp} divide them among processes\n"
            "  use parallel.dp_replicate instead of the mesh, or AdamW, Adam or SGD"
        )
    accepted = inspect.signature(kind).parameters
    for key, _ in settings.options:
        _check_option(key, kind, accepted)
    with_decay = [group for group in settings.groups if group.weight_decay is not None]
    if with_decay and "weight_decay" not in accepted:
        raise ConfigError(
            f"optimizer.groups gives {with_decay[0].match!r} a decay, but {settings.name} has no weight decay"
        )
    if not settings.options:
        return  # Torch's own defaults need no trial, which would import its compiler.
    try:
        for one in classes_of(settings):
            find_slots(one, settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"torch.optim.{settings.name} refuses optimizer.options: {error}"
        ) from None


def _check_option(key: str, kind: OptimizerClass, accepted: Collection[str]) -> None:
    name = kind.__name__
    if key in OWN_KEYS and key in accepted:
        raise ConfigError(f"optimizer.options has {key!r}; set {OWN_KEYS[key]} instead")
    if key in DECIDED_HERE:
        raise ConfigError(
            f"optimizer.options has {key!r}, which the trainer decides itself\n  leave it out"
        )
    if key not in accepted:
        options = sorted(set(accepted) - {*OWN_KEYS, *DECIDED_HERE})
        near = nearest_name(key, options)
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(
            f"torch.optim.{name} has no argument {key!r}\n  {hint}known: {', '.join(options)}"
        )


# ---------------------------------------------------------------- groups by pattern
def group_of(name: str, settings: OptimizerConfig) -> ParameterGroup | None:
    """Return the first group that matches the name of a parameter; None if there is none."""
    matching = (one for one in settings.groups if fnmatchcase(name, one.match))
    return next(matching, None)


def frozen_names(names: Iterable[str], settings: OptimizerConfig) -> frozenset[str]:
    """Return the parameters that groups freeze."""
    frozen = set()
    for name in names:
        group = group_of(name, settings)
        if group is not None and group.frozen:
            frozen.add(name)
    return frozenset(frozen)


def check_groups(names: Collection[str], settings: OptimizerConfig) -> None:
    """Raise ConfigError if a group matches no parameter of the model, or if all are frozen."""
    for number, group in enumerate(settings.groups):
        mine = [name for name in names if fnmatchcase(name, group.match)]
        if not mine:
            examples = ", ".join(sorted(names)[:3])
            raise ConfigError(
                f"optimizer.groups: no parameter of the model matches {group.match!r}\n"
                f"  names look like {examples}; * stands for any text"
            )
        if all(group_of(name, settings) is not group for name in mine):
            raise ConfigError(
                f"optimizer.groups: earlier groups already match all that {group.match!r} matches\n"
                f"  the first match counts, so put group {number} first"
            )
    if len(frozen_names(names, settings)) == len(names):
        raise ConfigError(
            "optimizer.groups freezes all parameters, so nothing would be trained\n"
            "  let some of them train"
        )


# ---------------------------------------------------------------- the optimizer of a process
class Optimizer:
    """One or two optimizers of torch.optim over the parameters of a process.

    `parameters` are all that the process holds, and `trained` those that steps update. The
    others keep what a checkpoint says about them. `matrices` names the weights of layers,
    which Muon updates.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerConfig,
        trained: Collection[str] | None = None,
        matrices: Collection[str] = (),
    ) -> None:
        self.settings = settings
        classes = classes_of(settings)
        self.kind_of: dict[nn.Parameter, int] = {}  # which of the classes updates it
        self.slots_by_shape: dict[tuple[int, int], tuple[Slot, ...]] = {}
        updated: list[dict[str, nn.Parameter]] = [{} for _ in classes]
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue
            is_muons = name in matrices and parameter.dim() == 2
            number = 0 if len(classes) == 1 or is_muons else 1
            self.kind_of[parameter] = number
            if trained is None or name in trained:
                updated[number][name] = parameter
        self.kinds = [
            kind(_groups(kind, mine, settings), **arguments_of(kind, settings))
            for kind, mine in zip(classes, updated, strict=True)
        ]
        self.classes = classes

    def step(self, factor: float) -> None:
        """Update the weights with this share of the highest rates, and drop the gradients."""
        for kind in self.kinds:
            for group in kind.param_groups:
                group["lr"] = factor * group[HIGHEST_RATE]
            kind.step()
            kind.zero_grad(set_to_none=True)

    # ------------------------------------------------------------ state
    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return what is remembered of a parameter; empty before its first step."""
        state: dict[str, Any] = self.kinds[self.kind_of[parameter]].state[parameter]
        return state

    def slots_of(self, parameter: nn.Parameter) -> tuple[Slot, ...]:
        """Return which state there is of a parameter; none if it is frozen."""
        number = self.kind_of.get(parameter)
        if number is None:
            return ()
        place = number, parameter.dim()
        if place not in self.slots_by_shape:
            self.slots_by_shape[place] = find_slots(
                self.classes[number], self.settings, parameter.dim(), parameter.device
            )
        return self.slots_by_shape[place]

    def filled_state(self, parameter: nn.Parameter) -> list[tuple[Slot, Tensor]]:
        """Return the state of a parameter, with zeros before its first step."""
        slots = self.slots_of(parameter)
        state = self.state_of(parameter) if slots else {}
        filled: list[tuple[Slot, Tensor]] = []
        for slot in slots:
            value = state.get(slot.name)
            known = slot.blank(parameter) if value is None else value.detach()
            filled.append((slot, known))
        return filled

    def load_state(self, parameter: nn.Parameter, state: State) -> None:
        """Go on with the state of a checkpoint or of another process."""
        self.state_of(parameter).update(state)


def _groups(
    kind: OptimizerClass,
    parameters: Mapping[str, nn.Parameter],
    settings: OptimizerConfig,
) -> list[dict[str, Any]]:
    """The groups of one optimizer, in which matrices decay and vectors do not."""
    decays = "weight_decay" in inspect.signature(kind).parameters
    # One fused update takes only tensors of one mesh.
    groups: dict[tuple[float, float, object], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        rate = settings.highest_rate
        decay = settings.weight_decay if parameter.dim() > 1 else 0.0
        own = group_of(name, settings)
        if own is not None:
            rate = rate if own.lr is None else own.lr
            decay = decay if own.weight_decay is None else own.weight_decay
        groups.setdefault((rate, decay, mesh), []).append(parameter)
    listed: list[dict[str, Any]] = []
    for (rate, decay, _), members in groups.items():
        group: dict[str, Any] = {"params": members, "lr": rate, HIGHEST_RATE: rate}
        if decays:
            group["weight_decay"] = decay
        listed.append(group)
    if not listed:
        # A rank may have nothing to train, but torch refuses an empty list of groups.
        listed.append({"params": [], HIGHEST_RATE: settings.highest_rate})
    return listed


# ---------------------------------------------------------------- memory
@dataclass(frozen=True, slots=True)
class ParameterNumbers:
    """How many numbers a run holds for each parameter: itself and, if it trains, a gradient and optimizer state.

    They are means over the layers, and over embedding and head.
    """

    layers: float = NUMBERS_PER_PARAMETER
    ends: float = NUMBERS_PER_PARAMETER
    layers_trained: float = 1.0  # share of the parameters that train
    ends_trained: float = 1.0


def parameter_numbers(
    settings: OptimizerConfig, sizes: Sizes, lora: LoraConfig | None = None
) -> ParameterNumbers:
    """Count the numbers that a run with this optimizer holds for each parameter of the model."""
    plain = OptimizerConfig()
    if (settings.name, settings.options) == (plain.name, plain.options):
        state = [float(NUMBERS_PER_PARAMETER - 2)] * 2
    else:
        classes = classes_of(settings)
        kinds = (classes[0], classes[-1])
        state = [_state_numbers(kind, settings, sizes.width) for kind in kinds]
    adapts = lora is not None and lora.rank > 0
    if not adapts and not any(group.frozen for group in settings.groups):
        return ParameterNumbers(2 + state[0], 2 + state[1])
    counts = _count(settings, sizes, lora or LoraConfig())
    numbers = []
    shares = []
    for place, states in enumerate(state):
        model, trained = counts[place, "model"], counts[place, "trained"]
        shares.append(trained / model)
        held = model + counts[place, "adapters"] + trained * (1 + states)
        numbers.append(held / model)
    return ParameterNumbers(*numbers, *shares)


def _state_numbers(
    kind: OptimizerClass, settings: OptimizerConfig, width: int
) -> float:
    """Numbers of state for each number of a square matrix of this width."""
    slots = find_slots(kind, settings)
    total = sum(slot.numbers((width, width)) for slot in slots if not slot.is_number)
    return total / width**2


def _count(
    settings: OptimizerConfig, sizes: Sizes, lora: LoraConfig
) -> Counter[tuple[int, str]]:
    """Count the parameters of the layers (0), and those of embedding and head (1): all, adapters, and trained ones."""
    model = adapted_blueprint(sizes, lora)
    paths = tuple(f"{path}." for path in find_layout(model).layers)
    counts: Counter[tuple[int, str]] = Counter()
    for name, parameter in model.named_parameters():
        place = 0 if name.startswith(paths) else 1
        owner = "adapters" if is_adapter(name) else "model"
        counts[place, owner] += parameter.numel()
        if parameter.requires_grad and not frozen_names([name], settings):
            counts[place, "trained"] += parameter.numel()
    return counts


# ---------------------------------------------------------------- checkpoints
def describe_optimizer(settings: OptimizerConfig) -> dict[str, Any]:
    """Describe what a checkpoint has of the optimizer."""
    slots = []
    for kind in classes_of(settings):
        slots += [slot.name for slot in find_slots(kind, settings)]
    return {"name": settings.name, "state": slots}


def check_same_optimizer(
    path: Path, facts: Mapping[str, Any], settings: OptimizerConfig
) -> None:
    """Raise RunError if a checkpoint has the state of another optimizer."""
    theirs = facts.get("optimizer") or {"name": BESIDE_MUON}  # older ones do not say
    ours = describe_optimizer(settings)
    state = theirs.get("state", ours["state"])
    if theirs["name"] != ours["name"] or state != ours["state"]:
        kept = ", ".join(state) or "nothing"
        raise RunError(
            f"{path} has the state of {theirs['name']} ({kept}), but this run has {ours['name']} "
            f"({', '.join(ours['state']) or 'nothing'})\n"
            "  go on with the same optimizer.name and options, or train the exported model in a new run (model.path)"
        )


def layer_parameters(parts: Iterable[Part]) -> frozenset[str]:
    """Return the names of the parameters of layers: not those of embedding, head and last norm."""
    found: set[str] = set()
    for part in parts:
        paths = tuple(f"{path}." for path in part.layout.layers)
        found |= {name for name in part.whole_names() if name.startswith(paths)}
    return frozenset(found)


# ---------------------------------------------------------------- gradients of all ranks
class Gradients:
    """The gradients of a process, measured together with those of all others.

    One sum per step carries everything that the processes tell each other: the squares, the
    own numbers of each, the counts that everybody adds to, and the loss.
    """

    def __init__(
        self,
        holding: Holding,
        comm: Comm,
        device: torch.device,
    ) -> None:
        self.holding = holding
        self.comm = comm
        self.device = device
        self.owned = [name for name in holding.parameters if name in holding.owned]
        numbers = {name: number for number, name in enumerate(holding.names)}
        places = [numbers[name] for name in self.owned]
        self.places = torch.tensor(places, dtype=torch.long, device=device)
        # The square of each gradient, then places for all the rest; None before `begin`.
        self.column: Tensor | None = None

    def begin(self) -> None:
        """Start to square the gradients. On a GPU the host goes on meanwhile, and can wait for the loss."""
        names = len(self.holding.names)
        rest = self.comm.ranks * len(OwnNumbers._fields) + len(Counts._fields) + 1
        self.column = torch.zeros(names + rest, dtype=torch.float64, device=self.device)
        squares = self._squares()
        if squares is not None:
            self.column[self.places] = squares

    def measure(
        self, loss: float, own: OwnNumbers, counts: Counts
    ) -> tuple[float, float, list[OwnNumbers], Counts]:
        """Add up what all processes measured; all of them must call it.

        Each gives its share of the loss, some numbers of its own, and its counts. Return the
        whole loss, the norm of all gradients, the numbers of every process, and the sums of
        the counts.
        """
        column = self.column
        assert column is not None, "`begin` has squared the gradients"
        self.column = None
        names = len(self.holding.names)
        ranks = self.comm.ranks
        width = len(own)
        others = [0.0] * (ranks * width)
        others[self.comm.rank * width : (self.comm.rank + 1) * width] = own
        rest = torch.tensor([*others, *counts, loss], dtype=torch.float64)
        column[names:] = rest
        if ranks > 1:
            self.comm.add(column, tuple(range(ranks))).wait()
        sums = column.cpu()
        norm = math.sqrt(float(sums[:names].sum()))
        rows = sums[names : names + ranks * width].view(ranks, width).tolist()
        totals = map(int, sums[names + ranks * width : -1].tolist())
        owns = [OwnNumbers(*row) for row in rows]
        return float(sums[-1]), norm, owns, Counts(*totals)

    def _squares(self) -> Tensor | None:
        """The squared norm of each parameter that this process owns; 0 without a gradient."""
        if not self.owned:
            return None
        gradients = [self.holding.parameters[name].grad for name in self.owned]
        present = [local_share(grad) for grad in gradients if grad is not None]
        norms = iter(norms_of_all(present)) if present else iter(())
        zero = torch.zeros((), device=self.device)
        column = [zero if grad is None else next(norms) for grad in gradients]
        return torch.stack(column).double().square()

    def clip(self, norm: float, most: float) -> None:
        """Scale all gradients so that their norm is at most `most`; 0 leaves them alone."""
        if not most:
            return
        gradients = [
            local_share(parameter.grad)
            for parameter in self.holding.parameters.values()
            if parameter.grad is not None
        ]
        scale_down(gradients, norm, most)


State: TypeAlias = dict[str, Tensor]
PROBE_SHAPE = (2, 3, 5, 7, 11)
COUNTER = "step"  # most optimizers count the steps of each parameter


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of the state of a parameter."""

    name: str
    # For each dimension, whether the state has all of it or one entry; None for a single number.
    dimensions: tuple[bool, ...] | None
    dtype: torch.dtype
    on_cpu: bool

    @property
    def is_number(self) -> bool:
        """Whether it is a single number for the whole parameter."""
        return self.dimensions is None

    def blank(self, parameter: Tensor) -> Tensor:
        """Return zeros in the shape that the state of a parameter has."""
        device = torch.device("cpu") if self.on_cpu else parameter.device
        if self.dimensions is None:
            return torch.zeros((), dtype=self.dtype, device=device)
        if all(self.dimensions):
            return torch.zeros_like(parameter, dtype=self.dtype)
        sizes = zip(parameter.shape, self.dimensions, strict=True)
        shape = [size if full else 1 for size, full in sizes]
        return torch.zeros(shape, dtype=self.dtype, device=device)

    def numbers(self, shape: tuple[int, ...]) -> int:
        """How many numbers it has for a parameter of this shape."""
        total = 1
        for size, full in zip(shape, self.dimensions or (), strict=False):
            total *= size if full else 1
        return total


def find_slots(
    kind: OptimizerClass,
    settings: OptimizerConfig,
    dimensions: int = 2,
    device: torch.device | None = None,
) -> tuple[Slot, ...]:
    """Return the state that an optimizer keeps of parameters with this many dimensions."""
    shape = PROBE_SHAPE[:dimensions]
    probe = nn.Parameter(torch.ones(shape, device=device or torch.device("cpu")))
    probe.grad = torch.ones_like(probe)
    optimizer = kind([probe], **arguments_of(kind, settings))
    optimizer.step()
    slots = []
    for name, value in sorted(optimizer.state[probe].items()):
        if value is None:
            continue
        full = _dimensions(value, shape)
        if not isinstance(value, Tensor) or (full is None and value.dim()):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {name!r} in a form that no checkpoint here has\n"
                "  choose another optimizer.name"
            )
        on_cpu = value.device.type == "cpu"
        slots.append(Slot(name, full, value.dtype, on_cpu))
    return tuple(slots)


def _dimensions(value: object, shape: tuple[int, ...]) -> tuple[bool, ...] | None:
    """Which dimensions of a parameter a tensor has in full; None if it is not shaped like that."""
    if not isinstance(value, Tensor) or value.dim() != len(shape) or not shape:
        return None
    pairs = list(zip(value.shape, shape, strict=True))
    if any(size not in (1, whole) for size, whole in pairs):
        return None
    return tuple(size == whole for size, whole in pairs)


def is_unused(state: Mapping[str, Tensor]) -> bool:
    """Whether the state in a checkpoint is that of a parameter that has not taken a step yet.

    Such state is left out, because optimizers begin with more than zeros (Rprop with its rate).
    """
    if COUNTER in state:
        return not bool(state[COUNTER].any())
    return not any(bool(local_share(value).any()) for value in state.values())


SCHEDULE_KEY = "optimizer.lr_schedule"
TRAINED_RATE = (
    2e-5  # for weights of model.path; fresh ones bear a hundred times as much
)
ADAPTER_RATE = 1e-4  # for LoRA, whose adapters begin at zero


def rate_at(step: int, steps: int, settings: OptimizerConfig) -> float:
    """Return the learning rate of a step, counted from 0.

    >>> from penstock.config import OptimizerConfig
    >>> [round(rate_at(step, 10, OptimizerConfig(lr=1.0, warmup_steps=2)), 3) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.55, 0.134]
    """
    return settings.highest_rate * factor_at(step, steps, settings)


def factor_at(step: int, steps: int, settings: OptimizerConfig) -> float:
    """Return the rate of a step as a share of the highest rate.

    >>> from penstock.config import OptimizerConfig
    >>> wsd = OptimizerConfig(lr_schedule="wsd:0.4,min=0", warmup_steps=2)
    >>> [round(factor_at(step, 10, wsd), 3) for step in (0, 2, 6, 7, 8, 9)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.own_schedule:
        return own_factor(step, settings.lr_schedule)
    name, _ = split_name(settings.lr_schedule)
    return COURSES[name](step, steps, settings)


def own_factor(step: int, name: str) -> float:
    """Return the factor that the user's own function gives for a step, counted from 0."""
    factor = own_function(name, SCHEDULE_KEY)(step)
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not number or not 0 <= factor < math.inf:
        raise ConfigError(
            f"{SCHEDULE_KEY} = {name} returned {factor!r} for step {step}\n"
            "  return a number of at least 0, by which optimizer.lr is multiplied"
        )
    return float(factor)


# ---------------------------------------------------------------- the highest rate
def settle_rate(config: Config) -> Config:
    """Replace an open rate (0) by one that suits what is trained."""
    rate = config.optimizer.lr or _suitable_rate(config)[0]
    return replace(config, optimizer=replace(config.optimizer, lr=rate))


def describe_rate(config: Config) -> str:
    """Say what the highest rate is, and what it was chosen for."""
    rate = config.optimizer.lr
    suitable, trained = _suitable_rate(config)
    if rate == suitable:
        return f"{rate:g}, as suits {trained}"
    return f"{rate:g}, as optimizer.lr says; {suitable:g} suits {trained}"


def _suitable_rate(config: Config) -> tuple[float, str]:
    """The rate that suits what a run trains, and what that is."""
    if config.lora.rank:
        return ADAPTER_RATE, "adapters"
    if config.model.weights:
        return TRAINED_RATE, "weights that are trained already"
    return PRESET_RATES[config.preset], "new weights"


# ---------------------------------------------------------------- courses after the warm-up
Course = Callable[[int, int, OptimizerConfig], float]


def _linear(step: int, steps: int, settings: OptimizerConfig) -> float:
    return _between(1 - _share_done(step, steps, settings), settings)


def _cosine(step: int, steps: int, settings: OptimizerConfig) -> float:
    done = _share_done(step, steps, settings)
    return _between(0.5 * (1 + math.cos(math.pi * done)), settings)


def _wsd(step: int, steps: int, settings: OptimizerConfig) -> float:
    length = settings.rate_shape["cooldown"] * steps
    left = steps - step
    return _between(min(1.0, left / length) if length else 1.0, settings)


def _inverse_sqrt(step: int, steps: int, settings: OptimizerConfig) -> float:
    highest = max(settings.warmup_steps, 1)
    least: float = settings.rate_shape["min"]
    return max(math.sqrt(highest / max(step + 1, highest)), least)


COURSES: dict[str, Course] = {
    "constant": lambda step, steps, settings: 1.0,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}


def _share_done(step: int, steps: int, settings: OptimizerConfig) -> float:
    """The share of the steps after the warm-up that is done."""
    done = (step - settings.warmup_steps) / max(steps - settings.warmup_steps, 1)
    return min(done, 1.0)


def _between(height: float, settings: OptimizerConfig) -> float:
    """A factor between the final share, at height 0, and 1."""
    least: float = settings.rate_shape["min"]
    return least + (1 - least) * height
