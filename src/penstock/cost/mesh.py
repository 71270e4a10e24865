"""The profile of one process, where a rank of the schedule is a mesh of several processes.

    tensor   each process has some heads and features of every layer, and all have x. A layer sums x over the
             processes twice in its forward, after attention and after the MLP, and twice in its backward. The
             embedding sums x once; the head gathers the logits, and sums the gradient of x.
    shard    each process keeps a share of the weights, their gradients and AdamW's state, and has micro-batches
             of its own. The runtime gathers a layer once per step, before its first forward, and sums its
             gradients once, after the last action of its part, whatever the number of micro-batches.

Sums are rings over the links of these processes. Actions wait for the sums of `tensor`, so these are part of their
times. The sum of gradients over `shard` follows a part's last action, as AdamW's update does, so it is part of
`update`. The gathers delay the first micro-batch on every part of its path: `gather_seconds`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from penstock.cost.curve import Curve, Fit, Seconds, sum_curves
from penstock.cost.network import Link
from penstock.cost.profile import TENSORS_PER_WEIGHT, Block, Point, Profile
from penstock.cost.sizes import FLOAT32_BYTES, HALF_BYTES, held_numbers
from penstock.errors import ShapeError
from penstock.ir.action import COMPUTING_OPS, Op

SUMS_PER_LAYER = 2  # of the hidden state, in a forward and in a backward each
# Whole copies that a sharded block has during a step: the weights and their gradients, and, while
# the gradients of an embedding or a head are summed, one more.
GATHERED_LAYER_COPIES = 2
GATHERED_END_COPIES = 3


class Shares(NamedTuple):
    """What one process has of a block; 1 is all of it."""

    work: float  # seconds of an action
    held: float  # activations
    numbers: float  # parameters, before they are sharded


def mesh_profile(
    profile: Profile,
    tensor: int,
    shard: int,
    link: Link,
    slowdown: float = 1.0,
    shard_link: Link | None = None,
) -> Profile:
    """The profile of a process in a mesh of `tensor` x `shard` processes, with their communication.

    `link` is the one between two of these processes. If shards lie on different machines, they
    have a `shard_link` of their own. With `slowdown`, processes that share too few processors
    compute this many times longer. The sizes of the model must be among the profile's facts. The
    processes of a mesh share the logits, so they compute all of them at once, without chunks.
    """
    if tensor < 1 or shard < 1:
        raise ShapeError(
            f"a mesh of {tensor} x {shard} processes is impossible; both must be at least 1"
        )
    if tensor == shard == 1 and slowdown == 1.0:
        return profile
    embed, layer, head = _shares(profile, tensor)
    item = HALF_BYTES if profile.is_half else FLOAT32_BYTES
    hidden = profile.rows * _size(profile, "width")
    vocab = profile.rows * _size(profile, "vocab")
    # A ring sums in two exchanges: to its shares, and back. A gather is one of them.
    embed_sum = _exchanges(2, FLOAT32_BYTES * hidden, tensor, link)
    layer_sums = _exchanges(2 * SUMS_PER_LAYER, item * hidden, tensor, link)
    head_gather = _exchanges(1, item * vocab, tensor, link)
    head_sum = _exchanges(2, item * hidden, tensor, link)
    blocks = {}
    for name, share, forward, backward, copies in (
        ("embed", embed, embed_sum, Seconds(), GATHERED_END_COPIES),
        ("layer", layer, layer_sums, layer_sums, GATHERED_LAYER_COPIES),
        ("head", head, head_gather, head_sum, GATHERED_END_COPIES),
    ):
        original: Block = getattr(profile, name)
        block = _share_of(original, share, slowdown, forward, backward)
        blocks[name] = _sharded(block, shard, copies, shard_link or link)
    facts = (*profile.device, ("tensor", tensor), ("shard", shard))
    if tensor * shard > 1 and dict(profile.device).get("loss_chunk"):
        whole_logits = vocab * (FLOAT32_BYTES - item)
        blocks["head"] = replace(
            blocks["head"], held=blocks["head"].held + whole_logits
        )
        facts = (*facts, ("loss_chunk", 0))
    # Shards keep a copy of a tied weight for each part.
    tied = 0.0 if shard > 1 else profile.tied * head.numbers
    return replace(profile, **blocks, tied=tied, device=facts)  # type: ignore[arg-type]


def split_processors(processors: int, size: int) -> tuple[int, float]:
    """Divide processors among ranks of `size` processes each.

    Return how many ranks can compute at once, and how many times longer a rank computes because
    its processes share too few processors.

    >>> split_processors(8, 4), split_processors(2, 4)
    ((2, 1.0), (1, 2.0))
    """
    return max(1, processors // size), max(1.0, size / processors)


def gather_seconds(profile: Profile, tensor: int, shard: int, link: Link) -> float:
    """Seconds by which gathering sharded weights delays a step: all layers, one after the other.

    The first micro-batch waits on every part of its path until that part's layers are gathered.
    `profile` is that of the whole model, before `mesh_profile`.
    """
    if shard == 1:
        return 0.0
    total = 0.0
    shares = _shares(profile, tensor)
    blocks = profile.blocks(profile.layers, first=True, last=True)
    for (count, block), share in zip(
        blocks, (shares[1], shares[0], shares[2]), strict=True
    ):
        size = block.weights * share.numbers / TENSORS_PER_WEIGHT
        total += count * _exchange(size, shard, link)
    return total


def _exchange(size: float, processes: int, link: Link) -> float:
    """Seconds to gather `size` bytes from all processes, or to sum them and leave each its share."""
    steps = processes - 1
    return steps * (link.latency + size / processes / link.bandwidth)


def _exchanges(count: int, bytes_per_token: float, tensor: int, link: Link) -> Seconds:
    """Seconds of exchanges of `bytes_per_token` in a tensor row, as a curve over tokens."""
    base = count * _exchange(0.0, tensor, link)
    token = count * _exchange(bytes_per_token, tensor, link) - base
    return Seconds(base=base, token=token)


def _share_of(
    block: Block, share: Shares, slowdown: float, forward: Seconds, backward: Seconds
) -> Block:
    """A block with the work of one process and the sums inside its actions. W sums nothing."""
    work = share.work * slowdown

    sums = (forward, backward, Seconds())  # by kind of action

    def scaled(op: Op) -> Fit:
        fit = block.fit(op)
        curve: Curve = sum_curves([(work, fit.curve), (1.0, sums[op.kind])])
        return replace(fit, curve=curve)

    points = []
    for one in block.points:
        place = (one.tokens, one.prefix)
        f, b, i, w = (
            work * one.of(op) + sums[op.kind].of(*place) for op in COMPUTING_OPS
        )
        points.append(Point(*place, f, b, i, w, one.held_out))
    f_fit, b_fit, i_fit, w_fit = map(scaled, COMPUTING_OPS)
    return replace(
        block,
        points=tuple(points),
        F=f_fit,
        B=b_fit,
        I=i_fit,
        W=w_fit,
        held=block.held * share.held,
        kept=block.kept * share.held,
        weights=block.weights * share.numbers,
        update=block.update * share.numbers * slowdown,
    )


def _sharded(block: Block, shard: int, copies: int, link: Link) -> Block:
    """A block whose weights, gradients and state are divided among `shard` processes."""
    if shard == 1:
        return block
    gradients = block.weights / TENSORS_PER_WEIGHT
    return replace(
        block,
        weights=block.weights / shard,
        gathered=copies * gradients,
        update=block.update / shard + _exchange(gradients, shard, link),
    )


# ---------------------------------------------------------------- the share of a process
def _shares(profile: Profile, tensor: int) -> tuple[Shares, Shares, Shares]:
    """The shares of embedding, layer and head in the fullest of `tensor` processes."""
    if tensor == 1:
        everything = Shares(1.0, 1.0, 1.0)
        return everything, everything, everything
    facts = dict(profile.model)
    is_gpt = facts.get("family") == "gpt"
    width, heads, inner, vocab = (
        _size(profile, name) for name in ("width", "heads", "inner", "vocab")
    )
    kv_heads = heads if is_gpt else _size(profile, "kv_heads")
    for name, count in (("heads", heads), ("kv_heads", kv_heads), ("inner", inner)):
        if count % tensor:
            fitting = max(n for n in range(1, tensor) if count % n == 0)
            raise ShapeError(
                f"{tensor} processes cannot divide the model's {name} = {count} evenly\n"
                f"  the next smaller parallel.tp that can is {fitting}"
            )
    keys = kv_heads * (width // heads)
    norms = (4 if is_gpt else 2) * width
    cut = 2 * width * width + 2 * width * keys + (2 if is_gpt else 3) * width * inner
    whole_numbers = norms
    if is_gpt:
        cut += 3 * width + inner  # biases of query, key, value and first MLP matrix
        whole_numbers += 2 * width  # biases of the outputs, which every process has
    words = math.ceil(vocab / tensor)
    positions = 0
    if is_gpt:
        embed_numbers = profile.embed.weights / TENSORS_PER_WEIGHT / FLOAT32_BYTES
        positions = max(round(embed_numbers) - vocab * width, 0)
    head_norm = (2 if is_gpt else 1) * width
    whole, divided = held_numbers("gpt" if is_gpt else "llama", width, keys, inner)
    item = HALF_BYTES if profile.is_half else FLOAT32_BYTES
    all_held = whole * FLOAT32_BYTES + divided * item
    held = (whole * FLOAT32_BYTES + divided * item / tensor) / all_held
    return (
        Shares(1.0, 1.0, (words * width + positions) / (vocab * width + positions)),
        Shares(
            1.0 / tensor,
            held,
            (cut / tensor + whole_numbers) / (cut + whole_numbers),
        ),
        Shares(
            1.0 / tensor,
            1.0,
            (words * width + head_norm) / (vocab * width + head_norm),
        ),
    )


def _size(profile: Profile, name: str) -> int:
    value = dict(profile.model).get(name)
    if not isinstance(value, int) or value < 1:
        raise ShapeError(
            f"the profile does not say the model's {name}, which a mesh needs; "
            "measure it again with `penstock profile`"
        )
    return value
