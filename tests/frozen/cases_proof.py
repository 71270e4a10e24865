"""What is found wrong with a model before or in its first step: the error or the warnings, without measured numbers.

Three ranks run an `Entry`, a layer that is broken in some way, and an `Exit`. `proof` cases prove it, `step` cases
run a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from again_tape import Again
from penstock import Schedule, lower, make
from penstock.errors import PenstockError
from penstock.models import token_loss
from penstock.models.slice import Slice
from penstock.runtime import (
    Batch,
    Executor,
    batch_of,
    current_ledger,
    defer,
    prove,
    run_threads,
)
from penstock.runtime.executor import RunOptions
from penstock.schedules.transforms import slice_tokens, split_backward

TOLERANCE = 1e-12
CUTS = (0, 3, 4, 7)
RECOMPUTE = {"recompute": frozenset(range(3))}
VOCAB, WIDTH, TOKENS = 61, 8, 7
ONE = make("1f1b", ranks=3, microbatches=1)
WHOLE = make("1f1b", ranks=3, microbatches=3)
SPLIT = split_backward(WHOLE)
SLICED = slice_tokens(WHOLE, CUTS)
BOTH = slice_tokens(SPLIT, CUTS)

Answer = dict[str, object]


def cases() -> dict[str, Callable[[], Answer]]:
    found: dict[str, Callable[[], Answer]] = {}
    for name, make_inner, schedule, options in proofs():
        found[f"proof: {name}"] = partial(proof_of, make_inner, schedule, **options)
    for name, make_inner, schedule, options in steps():
        found[f"step: {name}"] = partial(step_of, make_inner, schedule, **options)
    return found


def proofs() -> list[tuple[str, Callable[[], nn.Module], Schedule, dict[str, Any]]]:
    tapes: dict[str, Any] = {"each": lambda rank: {"tape": Again()}}
    stale: dict[str, Any] = {
        "each": lambda rank: {"tape": Stale() if rank == 1 else Again()}
    }
    autocast: dict[str, Any] = {"autocast": torch.bfloat16}
    return [
        ("sound", Inner, WHOLE, {}),
        ("sound, sliced, split and recomputed", Attention, BOTH, RECOMPUTE),
        ("sound, recorded", Inner, SPLIT, tapes),
        ("sound, under autocast", partial(Losing, "both"), WHOLE, autocast),
        ("leaks over slices", Leaky, SLICED, {}),
        ("leaks over slices, recomputed", Leaky, BOTH, RECOMPUTE),
        ("leaks, not sliced", Leaky, SPLIT, RECOMPUTE),
        ("counts in a buffer, sliced", Counting, BOTH, {}),
        ("counts in a buffer, recomputed", Counting, SPLIT, RECOMPUTE),
        ("counts in an attribute, recomputed", CountingItself, WHOLE, RECOMPUTE),
        ("counts in an attribute", CountingItself, SPLIT, {}),
        ("draws from its own generator", Masked, SPLIT, RECOMPUTE),
        ("checkpoints in slices", partial(Recurrent, True), SLICED, {}),
        ("state in slices", partial(Recurrent, False), SLICED, RECOMPUTE),
        ("w forgets", partial(Losing, "split"), SPLIT, {}),
        ("w forgets, whole backward", partial(Losing, "split"), WHOLE, {}),
        ("w forgets under autocast", partial(Losing, "both"), BOTH, autocast),
        ("keeps state for its backward", Keeping, WHOLE, {}),
        ("keeps state, one micro-batch", Keeping, ONE, {}),
        ("a stale recording", Inner, WHOLE, stale),
        ("raises in slices", Picky, SLICED, {}),
        ("raises always", Raising, WHOLE, {}),
        ("changes its weights", ChangesWeights, WHOLE, {}),
        ("moves an average in slices", SlicedMean, SLICED, {}),
        ("leaves nothing to W", Dense, SPLIT, {}),
        ("draws random numbers, sliced", Noisy, SLICED, {}),
        ("infinite", Infinite, WHOLE, {}),
        ("not deterministic", Moody, WHOLE, {}),
        ("too large for a plain call", Large, WHOLE, {}),
    ]


def steps() -> list[tuple[str, Callable[[], nn.Module], Schedule, dict[str, Any]]]:
    return [
        ("sound", Inner, WHOLE, {}),
        ("detached", Detached, WHOLE, {}),
        ("returns a list of numbers", Numbers, WHOLE, {}),
        ("changes its input", InPlace, WHOLE, {}),
        ("shape by number", ShapeByNumber, WHOLE, {}),
        ("asks for what nobody has", Asking, WHOLE, {}),
        ("without a parameter piece", Whole, SLICED, {}),
        ("lazy weights", Lazy, WHOLE, {}),
        ("other random numbers", Masked, WHOLE, {}),
        ("hooks that need gradients", Hooked, WHOLE, RECOMPUTE),
        ("a mean taken for a sum", Inner, WHOLE, {"loss": mean_loss}),
        ("a sum taken for a mean", Inner, WHOLE, {"reduction": "mean"}),
        ("other labels on rank 2", Inner, WHOLE, {"other": "labels"}),
        ("other shapes on rank 1", Inner, WHOLE, {"other": "shapes"}),
        ("other intervals on rank 2", Inner, WHOLE, {"other": "intervals"}),
        ("too few micro-batches", Inner, ONE, {}),
    ]


# ---------------------------------------------------------------- running
def stages_of(inner: nn.Module) -> list[nn.Module]:
    torch.manual_seed(5)
    return [Entry().double(), inner.double(), Exit().double()]


def rows(count: int, tokens: int = TOKENS, seed: int = 0) -> Batch:
    dice = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, VOCAB, (2, count, 2, tokens), generator=dice)
    return batch_of(list(x), list(y))


def proof_of(
    make_inner: Callable[[], nn.Module],
    schedule: Schedule,
    each: Callable[[int], dict[str, Any]] = lambda rank: {},
    **options: Any,
) -> Answer:
    torch.manual_seed(6)
    stages = stages_of(make_inner())
    batch = rows(len(schedule.microbatches))
    enabled = torch.backends.mkldnn.enabled

    def work(comm: Any) -> Answer:
        mine = {comm.rank: stages[comm.rank]}
        told = options | each(comm.rank)
        executor = Executor(lower(schedule), mine, comm, token_loss, **told)
        found = prove(executor, batch)
        return {
            "stages": found.stages,
            "visited": found.visited,
            "warnings": [without_numbers(words) for words in found.warnings],
        }

    torch.backends.mkldnn.enabled = False  # its bfloat16 depends on the machine
    try:
        return run_threads(3, work, patience=60)[0]
    except Exception as error:
        return refusal(error)
    finally:
        torch.backends.mkldnn.enabled = enabled


def step_of(
    make_inner: Callable[[], nn.Module],
    schedule: Schedule,
    other: str = "",
    loss: Callable[..., Tensor] = token_loss,
    **options: Any,
) -> Answer:
    torch.manual_seed(6)
    stages = stages_of(make_inner())
    batch = rows(3)

    def work(comm: Any) -> float:
        mine = {comm.rank: stages[comm.rank]}
        given = batch
        more: dict[str, Any] = {}
        if other == "labels" and comm.rank == 2:
            given = batch_of(list(batch.inputs), list(rows(3, seed=1).labels))
        if other == "shapes" and comm.rank == 1:
            given = rows(3, tokens=TOKENS + 1)
        if other == "intervals" and comm.rank == 2:
            more["options"] = RunOptions(compare=7)
        executor = Executor(lower(schedule), mine, comm, loss, **options, **more)
        return executor.step(given).loss

    try:
        return {"loss": run_threads(3, work, patience=60)[0]}
    except Exception as error:
        return refusal(error)


def refusal(error: Exception) -> Answer:
    kind = type(error).__name__ if isinstance(error, PenstockError) else "other"
    return {"error": kind, "text": without_numbers(str(error))}


def without_numbers(text: str) -> str:
    """The text without shares and limits, and without what differs most: they depend on how a machine rounds."""
    text = re.sub(r"\n  \d+ tensors differ, most of all .*", "", text)
    return re.sub(r"(by|at most) [\d.e+-]+|inf\b", r"\1 #", text)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# ---------------------------------------------------------------- the ends
class Entry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        return self.mix(self.words(x))


class Exit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        return self.scores(x)


# ---------------------------------------------------------------- layers, most of them broken
class Inner(nn.Module):
    """A linear layer, and `twist`, which is right here."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Any:
        return self.twist(self.plain(x), piece)

    def twist(self, x: Tensor, piece: Slice | None) -> Any:
        return x.tanh()


class Attention(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        key, value = x, x.sin()
        seen = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        if piece is not None:
            key = piece.extend(0, "key", key)
            value = piece.extend(0, "value", value)
            seen = piece.seen(x.device)
        return x + F.scaled_dot_product_attention(x, key, value, seen)


class Leaky(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return x + x.mean(1, keepdim=True)


class Counting(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls)


class CountingItself(Inner):
    calls = 0

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls)


class Masked(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.Generator().manual_seed(1)

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return x * torch.randint(0, 2, x.shape, generator=self.numbers)


class Recurrent(Inner):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        if not self.checkpointed:
            return self.run(x, piece)
        return torch.utils.checkpoint.checkpoint(
            self.run, x, piece, use_reentrant=False
        )

    def run(self, x: Tensor, piece: Slice | None) -> Tensor:
        before = None if piece is None else piece.take("sum", "state")
        total = x.cumsum(1) if before is None else x.cumsum(1) + before
        if piece is not None:
            piece.leave("sum", "state", total[:, -1:])
        return total.sin()


class Loses(torch.autograd.Function):
    """A scale whose gradient is left to W, and `lost` there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, lost: str) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.ledger = current_ledger()
        under_autocast = torch.is_autocast_enabled("cpu")
        ctx.lost = lost == "split" or (lost == "both" and under_autocast)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        split = ctx.ledger is not None and ctx.ledger.open
        if not (split and ctx.lost):
            defer(ctx.ledger, lambda: add_to(scale, (grad * x).sum((0, 1))))
        return grad * scale, None, None


def add_to(parameter: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    before = parameter.grad
    parameter.grad = gradient if before is None else before + gradient


class Losing(Inner):
    def __init__(self, lost: str) -> None:
        super().__init__()
        self.lost = lost
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return Loses.apply(x, self.scale, self.lost)


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Any) -> Tensor:
        ctx.owner = owner
        owner.kept = x.detach()
        return x**2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2 * ctx.owner.kept, None


class Keeping(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return Keeps.apply(x, self)


class Stale(Again):
    """A tape that replays its recording, whatever its input."""

    def record(self, work: Any, prepare: Any = None) -> Any:
        return work(), lambda: None


class Picky(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        if x.shape[1] < TOKENS:
            raise ValueError("seven tokens, please")
        return x


class Raising(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        raise ValueError("a layer of the user's is broken")


class ChangesWeights(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        with torch.no_grad():
            self.plain.bias.div_(self.plain.bias.norm())
        return x


class SlicedMean(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.5)
        return x


class Dense(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Identity()
        self.matrix = nn.Parameter(torch.eye(WIDTH))

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return x @ self.matrix


class Noisy(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return x * torch.rand_like(x)


class Infinite(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return x / 0


class Counter:
    """Counts where no proof can see it."""

    calls = 0


class Moody(Inner):
    def __init__(self) -> None:
        super().__init__()
        Counter.calls = 0

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        Counter.calls += 1
        return x * (1 + Counter.calls % 7)


class Large(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x


class Detached(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        return x.detach()


class Numbers(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> list[float]:
        return [1.0, 2.0]


class InPlace(Inner):
    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        return self.plain(x.mul_(2))


class ShapeByNumber(Inner):
    """Returns what its first call with numbers does not promise."""

    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        if x.is_meta or not bool(x.abs().sum() > 0):
            return x
        return x[:, :-1]


class Asking(Inner):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.plain(x) * mask


class Whole(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x)


class Lazy(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.LazyLinear(WIDTH)


class Hooked(Inner):
    def twist(self, x: Tensor, piece: Slice | None) -> Tensor:
        y = x.tanh()
        y.register_hook(lambda gradient: gradient)
        return y
