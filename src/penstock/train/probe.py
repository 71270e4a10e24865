"""How long the pieces of a model take on this machine: one layer, the embedding and the head, timed for a moment.

    seconds of a part  =  layers x layer  (+ embedding, if it is the first)  (+ head, if it is the last)

A rough guess before a run; the run then measures itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from penstock.models import GPTConfig, token_loss
from penstock.models.tensor import largest_share
from penstock.train.weights import Sizes, blueprint, draw, whole

MOST = 512  # tokens of a probe; more are taken in proportion
ROUNDS = 4
ENOUGH = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Piece:
    """Seconds of a micro-batch's forward and backward; bytes that a token leaves for the backward; parameters."""

    forward: float
    backward: float
    held: float
    parameters: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """A model's three kinds of pieces."""

    embed: Piece
    layer: Piece
    head: Piece


def probe(sizes: Sizes, rows: int, tokens: int, device: torch.device, bfloat16: bool = False) -> Pieces:
    """Times the pieces for micro-batches of so many rows and tokens, on one CPU thread or one GPU."""
    short = min(tokens, max(MOST // rows, 1))
    share = tokens / short
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cast = torch.autocast(device.type, torch.bfloat16) if bfloat16 and device.type == "cuda" else nullcontext()
    try:
        holding = whole(replace(sizes, layers=1), device)
        draw(holding, 0)
        part = holding.stages[0]
        words = torch.zeros(rows, short, dtype=torch.long, device=device)
        x = torch.randn(rows, short, sizes.width, device=device, requires_grad=True)
        with torch.no_grad():
            beside = part.get_submodule("rotary")(x) if hasattr(part, "rotary") else ()
        embed, layer, head = (part.get_submodule(name) for name in ("embed", "layers.0", "head"))
        return Pieces(
            _timed(lambda: embed(words), embed, share, cast, device, 4 * sizes.width),
            _timed(lambda: layer(x, *beside), layer, share, cast, device, 4 * _held(sizes)),
            _timed(lambda: token_loss(head(x), words), head, share, cast, device, 8 * sizes.vocab + 8 * sizes.width),
        )
    finally:
        torch.set_num_threads(threads)


def counted(sizes: Sizes) -> Pieces:
    """The same without times: memory alone, for a model that is too large to try here."""
    model = blueprint(sizes)
    sums = [sum(p.numel() for p in piece.parameters()) for piece in (model.embed, model.layers[0], model.head)]
    return Pieces(
        Piece(0.0, 0.0, 4 * sizes.width, sums[0]),
        Piece(0.0, 0.0, 4 * _held(sizes), sums[1]),
        Piece(0.0, 0.0, 8 * sizes.vocab + 8 * sizes.width, sums[2]),
    )


def share_of(pieces: Pieces, sizes: Sizes, tensor: int) -> Pieces:
    """What one of `tensor` processes does and holds of each piece; sums between them are not in the times."""
    model = blueprint(sizes)
    numbers = [largest_share(getattr(model, name), name, tensor) for name in ("embed", "head")]
    layer = largest_share(model.get_submodule("layers.0"), "layers.0", tensor)
    return Pieces(
        replace(pieces.embed, parameters=numbers[0]),
        replace(pieces.layer, forward=pieces.layer.forward / tensor, backward=pieces.layer.backward / tensor,
                held=4 * _held(sizes, tensor), parameters=layer),
        replace(pieces.head, forward=pieces.head.forward / tensor, backward=pieces.head.backward / tensor,
                parameters=numbers[1]),
    )  # fmt: skip


def _held(sizes: Sizes, tensor: int = 1) -> float:
    """Numbers that a token leaves in a layer for its backward: inputs of norms, linear layers, attention and gate. The
    norms and what comes out of them are whole in each of `tensor` processes."""
    whole = 4 * sizes.width
    if isinstance(sizes, GPTConfig):
        return whole + (4 * sizes.width + 2 * sizes.inner) / tensor
    keys = sizes.kv_heads * sizes.head_width
    return whole + (3 * sizes.width + 2 * keys + 4 * sizes.inner) / tensor


def _timed(
    run: Callable[[], Tensor], module: nn.Module, share: float, cast: AbstractContextManager[object],
    device: torch.device, held: float,
) -> Piece:  # fmt: skip
    forwards: list[float] = []
    backwards: list[float] = []
    while len(forwards) < ROUNDS and sum(forwards) + sum(backwards) < ENOUGH:
        begin = _now(device)
        with cast:
            y = run().sum()
        middle = _now(device)
        y.backward()  # type: ignore[no-untyped-call]
        forwards.append(middle - begin)
        backwards.append(_now(device) - middle)
    return Piece(min(forwards) * share, min(backwards) * share, held, sum(p.numel() for p in module.parameters()))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
