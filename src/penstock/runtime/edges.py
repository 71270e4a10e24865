"""The tensors that go from one stage to the next: their shapes and types, found before the first step.

A rank must know what arrives before it arrives, and it sees only its own stages. So all ranks walk along the paths
together, before the first step with micro-batches of a new shape:

    rank 0    x ─► stage 0 on meta tensors ─► edge 0 ──┐ told to all
    rank 1                                             └─► stage 1 on meta tensors ─► edge 1 ──┐ ...

Meta tensors have shapes and no numbers, so this takes no memory and hardly any time. A module that cannot run on them
runs once on zeros. A module can also say that it returns hidden states of shape (rows, tokens, `hidden_width`), as the
parts of our own models do, and of the type `hidden_dtype` if that is not the type of its parameters. If all modules say
so, nobody has to run them, and nothing has to be told.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import PeerLostError, PenstockError, ShapeError
from penstock.ir.schedule import Schedule
from penstock.runtime.batch import Batch, NamedShapes, refuse_other_batches
from penstock.runtime.comm.comm import Comm, exchange
from penstock.runtime.module_state import (
    ModuleMemory,
    uncompiled,
    undrawn,
    whole_buffers,
)
from penstock.runtime.passed_values import (
    PIECE,
    Edge,
    LayerChain,
    TensorSpec,
    described,
    forward_parameters,
    has_gradient,
    named_arguments,
    passed_by,
    refuse_missing,
)
from penstock.runtime.replicas import memory_mark
from penstock.torch_internals import original_module


class StageFact(NamedTuple):
    """What every rank knows about a stage."""

    asks: tuple[str, ...]
    hidden_width: int  # 0: the stage does not say what it returns
    hidden_dtype: torch.dtype
    buffers: Mapping[str, int]  # a mark of the memory of each buffer


class EdgeKind(NamedTuple):
    """What two micro-batches must have in common to have the same edges."""

    path: tuple[int, ...]
    shape: tuple[int, ...]  # of the input
    named: NamedShapes  # the shapes of the batch's named tensors


class EdgeFinder:
    """Finds the edges of micro-batches, together with the other ranks, and remembers them.

    `messages` is the type in which floating point numbers travel between ranks; None: their own. Others keep theirs.
    """

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        comm: Comm,
        messages: torch.dtype | None,
    ) -> None:
        self.schedule = schedule
        self.modules = modules
        self.comm = comm
        self.messages = messages
        self.parameters = {stage: forward_parameters(m) for stage, m in modules.items()}
        self.facts: list[StageFact] = []
        self.known: dict[EdgeKind, tuple[Edge, ...]] = {}

    def find(self, batch: Batch) -> list[tuple[Edge, ...]]:
        """The edges of each micro-batch along its path. All ranks must call this for batches of the same shapes."""
        kinds = [self.kind(batch, number) for number in range(len(batch.inputs))]
        missing: dict[EdgeKind, int] = {}
        for number, kind in enumerate(kinds):
            if kind not in self.known:
                missing.setdefault(kind, number)
        if missing:
            self.facts = self.facts or self.share_stage_facts()
            self.refuse_unasked(missing)
            unknown = {}
            for kind, number in missing.items():
                edges = self.stated_edges(kind)
                if edges is None:
                    unknown[kind] = number
                else:
                    self.known[kind] = edges
            if unknown:
                self.walk_paths(unknown, batch)
        return [self.known[kind] for kind in kinds]

    def kind(self, batch: Batch, number: int) -> EdgeKind:
        """The kind of a micro-batch."""
        shapes = batch.named_shapes[number] if batch.named else ()
        path = self.schedule.microbatches[number].path
        return EdgeKind(path, tuple(batch.inputs[number].shape), shapes)

    def share_stage_facts(self) -> list[StageFact]:
        """What the ranks must know about all stages."""
        own = {}
        for stage, module in self.modules.items():
            original = original_module(module)
            width = getattr(original, "hidden_width", 0)
            dtype = getattr(original, "hidden_dtype", None) or floating_type(module)
            asks = self.parameters[stage].after(1)
            part = self.schedule.stages[stage].part
            marks = {
                name: memory_mark(x, self.comm.rank)
                for name, x in whole_buffers(part, module).items()
            }
            own[str(stage)] = [asks, width, _name_of(dtype), marks]
        everything: dict[str, Any] = {}
        for facts in exchange(self.comm, own):
            everything |= facts
        stages = []
        for stage in range(len(self.schedule.stages)):
            asks, width, dtype, marks = everything[str(stage)]
            stages.append(StageFact(tuple(asks), width, getattr(torch, dtype), marks))
        return stages

    def copied_buffers(self) -> dict[int, dict[str, list[int]]]:
        """By stage, the buffers of this rank of which other ranks hold copies, and all ranks that hold one."""
        marks: dict[str, dict[int, int]] = {}  # by name and rank
        for stage, fact in zip(self.schedule.stages, self.facts, strict=False):
            for name, mark in fact.buffers.items():
                marks.setdefault(name, {})[stage.rank] = mark
        copied: dict[int, dict[str, list[int]]] = {}
        for number, fact in enumerate(self.facts):
            for name in fact.buffers if number in self.modules else ():
                if len(set(marks[name].values())) > 1:
                    copied.setdefault(number, {})[name] = sorted(marks[name])
        return copied

    def refuse_unasked(self, kinds: Iterable[EdgeKind]) -> None:
        """Raise an error if the batch has a named tensor that no stage asks for: it would change nothing."""
        asked = {name for fact in self.facts for name in fact.asks}
        for kind in kinds:
            for name, _ in kind.named:
                if name not in asked:
                    raise ShapeError(
                        f"the batch has a tensor named {name}, but no stage asks for it\n"
                        f"  a stage gets the tensors that its forward has parameters for: "
                        f"{', '.join(sorted(asked)) or 'here there are none'}"
                    )

    def stated_edges(self, kind: EdgeKind) -> tuple[Edge, ...] | None:
        """The edges of a path on which every stage says what it returns; None if a stage does not."""
        edges = []
        for stage in kind.path[:-1]:
            fact = self.facts[stage]
            if not fact.hidden_width:
                return None
            spec = self.spec((*kind.shape[:2], fact.hidden_width), fact.hidden_dtype)
            edges.append(Edge(1, (), (spec,)))
        return tuple(edges)

    def spec(self, shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
        """A tensor with the type in which it travels."""
        sent_as = dtype
        if self.messages is not None and dtype.is_floating_point:
            sent_as = self.messages
        if sent_as is torch.int8 and not shape:
            sent_as = dtype  # A single number has no row to share a scale with.
        return TensorSpec(tuple(shape), dtype, sent_as)

    # ------------------------------------------------------------ along the paths
    def walk_paths(self, kinds: Mapping[EdgeKind, int], batch: Batch) -> None:
        """Run all stages once, in the order of the paths. Each kind comes with a micro-batch of it."""
        refuse_other_batches(self.comm, self.schedule, batch)
        edges: dict[EdgeKind, list[Edge]] = {kind: [] for kind in kinds}
        copies: dict[int, nn.Module | None] = {}  # on the meta device
        for position in range(max(len(kind.path) for kind in kinds)):
            found: dict[str, Any] = {}
            failure: Exception | None = None
            for place, (kind, number) in enumerate(kinds.items()):
                stage = kind.path[position] if position < len(kind.path) else -1
                if stage not in self.modules:
                    continue
                try:
                    trial = StageTrial(self, kind, position, edges[kind], copies)
                    if position + 1 == len(kind.path):
                        trial.check_last(batch, number)
                        continue
                    edge = trial.edge(batch, number)
                except Exception as error:  # a module may raise anything
                    failure = error
                    found[FAILURE] = _failure_text(stage, self.modules[stage], error)
                    found[MISFIT] = isinstance(error, ShapeError)
                    break
                found[str(place)] = _as_json(edge)
            everything: dict[str, Any] = {}
            for facts in exchange(self.comm, found):
                everything |= facts
            if FAILURE in everything:
                raise_failure(everything[FAILURE], everything[MISFIT], failure)
            for place, kind in enumerate(kinds):
                if position + 1 < len(kind.path):
                    edges[kind].append(self.from_json(everything[str(place)]))
        self.known.update({kind: tuple(found) for kind, found in edges.items()})

    def from_json(self, raw: list[Any]) -> Edge:
        """An edge that another rank has found."""
        values, names, tensors = raw
        specs = [self.spec(shape, getattr(torch, dtype)) for shape, dtype in tensors]
        return Edge(values, tuple(names), tuple(specs))

    def asked_after(self, kind: EdgeKind, position: int) -> set[str]:
        """The names that later stages of a path ask for."""
        asked: set[str] = set()
        for stage in kind.path[position + 1 :]:
            asked.update(self.facts[stage].asks)
        return asked


class StageTrial:
    """One stage at its place on a path, run once to see what it returns."""

    def __init__(
        self,
        finder: EdgeFinder,
        kind: EdgeKind,
        position: int,
        before: Sequence[Edge],
        copies: dict[int, nn.Module | None],
    ) -> None:
        self.finder = finder
        self.kind = kind
        self.position = position
        self.stage = kind.path[position]
        self.module = finder.modules[self.stage]
        self.before = before[-1] if before else None
        self.copies = copies

    def edge(self, batch: Batch, number: int) -> Edge:
        """What the stage passes to the next one, given real micro-batches for their types and device."""
        values, travelling, given = self.inputs(batch, number)
        returned = self.run(values, self.arguments(values, travelling, given))
        passed = passed_by(returned)
        if passed is None:
            raise ShapeError(
                f"it returned {described(returned)}, but a stage must return a tensor, a tuple of tensors, or a "
                "dict of tensors with names"
            )
        for name in passed.named:
            if name in given:
                raise ShapeError(
                    f"it returns a value named {name}, but the batch has a tensor of that name: rename one"
                )
        known = {**travelling, **passed.named}
        asked = self.finder.asked_after(self.kind, self.position)
        names = [name for name, x in known.items() if x is not None and name in asked]
        tensors = [*passed.values, *(known[name] for name in names)]
        specs = [self.finder.spec(x.shape, x.dtype) for x in tensors if x is not None]
        return Edge(len(passed.values), tuple(names), tuple(specs))

    def check_last(self, batch: Batch, number: int) -> None:
        """Raise an error if the last stage of a path does not get what its forward asks for.

        What it returns is the business of the loss. Layers in a chain say only when they run what they ask for.
        """
        values, travelling, given = self.inputs(batch, number)
        named = self.arguments(values, travelling, given)
        original = original_module(self.module)
        if isinstance(original, LayerChain):
            self.run_on_meta(values, named)
            return
        signature = inspect.signature(original.forward)
        pieces = {PIECE: None} if PIECE in signature.parameters else {}
        try:
            signature.bind(*values, **named, **pieces)
        except TypeError as error:
            raise ShapeError(
                f"its forward cannot be called with what it gets: {error}"
            ) from None

    def inputs(
        self, batch: Batch, number: int
    ) -> tuple[list[Tensor], dict[str, Tensor], Mapping[str, Tensor]]:
        """Empty tensors like those that the stage gets: its first arguments, and those that travel with names.

        The third value has the named tensors of the batch.
        """
        x = batch.inputs[number]
        given = batch.named[number] if batch.named else {}
        if self.before is None:
            return [_empty(tuple(x.shape), x.dtype, x.device)], {}, given
        empty = [_empty(s.shape, s.dtype, x.device) for s in self.before.tensors]
        count = self.before.values
        named = dict(zip(self.before.names, empty[count:], strict=True))
        return empty[:count], named, given

    def arguments(
        self,
        values: Sequence[Tensor],
        travelling: Mapping[str, Tensor],
        given: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """The named arguments of the stage."""
        clash = sorted(set(travelling) & set(given))
        if clash:
            raise ShapeError(
                f"the batch has a tensor named {clash[0]}, and so does what an earlier stage passes on: rename one"
            )
        parameters = self.finder.parameters[self.stage]
        named = named_arguments(parameters, len(values), travelling, given)
        refuse_missing(parameters, len(values), named)
        return named

    def run(self, values: Sequence[Tensor], named: Mapping[str, Tensor]) -> object:
        """Run the stage on meta tensors or, if it cannot, on zeros; and leave no trace.

        It runs without gradients first, which takes less memory. A forward that hooks a tensor needs them.
        """
        returned = self.run_on_meta(values, named)
        if returned is not None:
            return returned
        with uncompiled(self.module) as plain:
            try:
                return self.call(plain, torch.zeros_like, values, named, False)
            except ShapeError:
                raise
            except Exception as error:  # a module may raise anything
                try:
                    return self.call(plain, torch.zeros_like, values, named, True)
                except Exception:
                    raise error from None

    def call(
        self,
        module: nn.Module,
        empty: Callable[[Tensor], Tensor],
        values: Sequence[Tensor],
        named: Mapping[str, Tensor],
        gradients: bool,
    ) -> object:
        """Call a module on `empty` tensors like these, and leave the stage and the random numbers as they were."""
        with torch.set_grad_enabled(gradients), undrawn(values[0].device):
            memory = ModuleMemory(self.module)
            try:
                return module(
                    *(self.as_input(empty(x)) for x in values),
                    **{name: self.as_input(empty(x)) for name, x in named.items()},
                )
            finally:
                memory.restore()

    def as_input(self, x: Tensor) -> Tensor:
        """A tensor that needs a gradient if what an earlier stage passes on would."""
        if self.before is not None and has_gradient(x.dtype):
            x.requires_grad_(torch.is_grad_enabled())
        return x

    def run_on_meta(
        self, values: Sequence[Tensor], named: Mapping[str, Tensor]
    ) -> object:
        """Run the stage on meta tensors; None if it cannot.

        The copy may run the stage itself: a `forward` that was put into a module need not know that it was copied.
        """
        if self.stage not in self.copies:
            self.copies[self.stage] = meta_copy(self.module)
        meta = self.copies[self.stage]
        if meta is None:
            return None
        for gradients in (False, True):
            try:
                return self.call(meta, _on_meta, values, named, gradients)
            except ShapeError:
                raise
            except Exception:  # a module may raise anything on meta tensors
                continue
        self.copies[self.stage] = None
        return None


def _on_meta(x: Tensor) -> Tensor:
    return x.to("meta")


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape that takes no memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def meta_copy(module: nn.Module) -> nn.Module | None:
    """A copy of a module on the meta device, which knows shapes and has no numbers; None if it cannot be copied."""
    with uncompiled(module) as plain:
        memo: dict[int, object] = {}
        for tensor in _tensors_of(plain):
            empty = tensor.detach().to("meta")
            memo[id(tensor)] = (
                nn.Parameter(empty, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
        try:
            return copy.deepcopy(plain, memo)
        except Exception:  # a module may hold anything
            return None


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a module, and the tensors that are plain attributes of it."""
    yield from module.parameters()
    yield from module.buffers()
    for layer in module.modules():
        for value in vars(layer).values():
            if isinstance(value, Tensor):
                yield value


def floating_type(module: nn.Module) -> torch.dtype:
    """The type that can hold all floating point parameters of a module; float32 if it has none."""
    found: torch.dtype | None = None
    for parameter in module.parameters():
        if parameter.is_floating_point():
            kind = parameter.dtype
            found = kind if found is None else torch.promote_types(found, kind)
    return found or torch.float32


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_json(edge: Edge) -> list[Any]:
    tensors = [(spec.shape, _name_of(spec.dtype)) for spec in edge.tensors]
    return [edge.values, edge.names, tensors]


def _failure_text(stage: int, module: nn.Module, error: Exception) -> str:
    name = type(original_module(module)).__name__
    if isinstance(error, ShapeError):
        return f"stage {stage} ({name}) does not fit: {error}"
    reason = str(error).strip().partition("\n")[0]
    return f"stage {stage} ({name}) raised {type(error).__name__}: {reason}"


# ---------------------------------------------------------------- failures
# Facts of a rank that has failed: the error in words, and whether it is a `ShapeError`, which all ranks then raise.
FAILURE, MISFIT = "failure", "misfit"


def fail_together(comm: Comm, failure: PenstockError | None) -> None:
    """Raise an error on all ranks if one of them has failed, so that no other goes on. All ranks must call this."""
    told: dict[str, Any] = {}
    if failure is not None:
        told = {FAILURE: str(failure), MISFIT: isinstance(failure, ShapeError)}
    shared = exchange(comm, told)
    if failure is not None:
        raise failure
    for facts in shared:
        if facts:
            raise_failure(facts[FAILURE], facts[MISFIT])


def raise_failure(text: str, misfit: bool, own: Exception | None = None) -> None:
    """Raise the error of a stage: as it is on its own rank, in words on the others."""
    if misfit:
        raise ShapeError(text)
    raise own or PeerLostError(text)
