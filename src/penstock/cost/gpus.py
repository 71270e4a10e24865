"""Profiles of known GPUs by arithmetic, so that planning needs no GPU.

    matrix product   waves of 128 x 128 tiles over the multiprocessors, or reading its operands, whichever takes longer
    attention        operations over the rate of attention kernels
    everything else  bytes over the memory bandwidth: norms, activations, residuals, casts of weights, loss
    launch           a few microseconds for each kernel; without recording (CUDA graphs), at least what the host takes

The rates and counts below were fitted to `docs/results/h200/whole.json`: Llamas of width 1,024, 2,048
and 4,096 and a GPT of width 2,048 on a whole H200, computing in bfloat16. There, the times of a layer are
off by 2% in the median and 13% at worst, those of the head by 1% and 8%, for slices of 128 to 4,096
tokens. Other GPUs take the same rates with their own data sheet. They were not measured here: expect
errors of about 30%.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from penstock.cost.network import Link, Network, pair_matrix
from penstock.cost.profile import (
    FASTEST_ROUND,
    SLOWEST_ROUND,
    Block,
    Point,
    Profile,
    block,
)
from penstock.cost.sizes import (
    FLOAT32_BYTES,
    HALF_BYTES,
    ModelSizes,
    WeightMatrix,
    check_sizes,
    chunk_in_use,
    deferred_numbers,
    held_numbers,
    key_width,
    layer_matrices,
    parameters_of_pieces,
)
from penstock.errors import ShapeError, UnknownNameError

GIB = 2.0**30
# The GPU to which the rates below were fitted, the worst error of a layer there, and what to expect of others.
FITTED_GPU = "H200"
FITTED_ERROR = 0.13
OTHER_ERROR = 0.3
TILE = 128  # rows and columns of the tile that a multiprocessor computes at a time
# Shares of the data sheet's figures that kernels reach.
PRODUCT_RATE = 0.85
DIVIDED_RATE = 0.8  # of products whose tiles do not fill the multiprocessors
MIN_DEPTH_SHARE = 0.42  # the least share of a tile's sum that one multiprocessor takes
ATTENTION_RATE = 0.3
ATTENTION_BACKWARD_RATE = 0.31
BANDWIDTH_RATE = 0.9
LINK_RATE = 0.8
ATTENTION_BACKWARD_WORK = 2.5  # operations of the backward over those of the forward
# Kernels of a layer, of the head and of the embedding, by op: F, I, W. A kernel that takes longer
# to start than others counts as several.
LAYER_KERNELS = {"llama": (58, 77, 17), "gpt": (30, 50, 57)}
HEAD_KERNELS = (8, 8, 6)
EMBED_KERNELS = (31, 4, 0)
# Bytes that kernels other than products and attention move for each token, as multiples of
# the bytes of one number of the hidden state (F, I).
LAYER_BYTES = {"llama": (62.0, 98.0), "gpt": (23.0, 59.0)}
LOSS_BYTES = (29.0, 29.0)  # for each logit
EMBED_BYTES = (8.0, 118.0)  # for each feature
# Bytes that are moved for each parameter.
CAST_BYTES = 6.8  # F and I read float32 and write the smaller type
# W: the gradient, its cast to float32, and its sum with the gradient so far.
WEIGHT_GRADIENT_BYTES = 26.0
WHOLE_WEIGHT_GRADIENT_BYTES = 20.0  # the same within B
EMBED_GRADIENT_BYTES = 15.8
FLOAT32_GRADIENT_BYTES = 16.0
ADAM_PASSES = 6.0  # over weights, gradients and state, in float32
PREFIX_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
MIN_POINT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device by its data sheet, in machines of `per_machine` devices."""

    name: str
    memory: float  # bytes
    peak: Mapping[str, float] = field(hash=False)  # operations per second, by precision
    bandwidth: float  # bytes per second of its memory
    multiprocessors: int
    inside: Link  # to another device of the machine
    between: Link  # to a device of another machine
    per_machine: int = 8
    kernel_seconds: float = 1.7e-6  # of a recorded kernel, at least
    # The time that a host takes to launch a kernel without recording.
    launch_seconds: float = 8e-6


def _peaks(float32: float, half: float, bfloat16: bool = True) -> Mapping[str, float]:
    peaks = {"float32": float32, "float16": half}
    if bfloat16:
        peaks["bfloat16"] = half
    return MappingProxyType(peaks)


# From the vendors' data sheets. Links are NVLink inside a machine, and for each GPU its share of
# the network: InfiniBand with 4 x 100 Gb/s (V100), 8 x 200 Gb/s (A100) and 8 x 400 Gb/s (H100, H200).
_GPUS = (
    Gpu(
        "V100",
        32 * GIB,
        _peaks(15.7e12, 125e12, bfloat16=False),
        900e9,
        80,
        Link(12e-6, LINK_RATE * 150e9),
        Link(20e-6, LINK_RATE * 6.25e9),
    ),
    Gpu(
        "A100-40",
        40 * GIB,
        _peaks(19.5e12, 312e12),
        1555e9,
        108,
        Link(10e-6, LINK_RATE * 300e9),
        Link(18e-6, LINK_RATE * 25e9),
    ),
    Gpu(
        "A100",
        80 * GIB,
        _peaks(19.5e12, 312e12),
        2039e9,
        108,
        Link(10e-6, LINK_RATE * 300e9),
        Link(18e-6, LINK_RATE * 25e9),
    ),
    Gpu(
        "H100",
        80 * GIB,
        _peaks(67e12, 989e12),
        3350e9,
        132,
        Link(9e-6, LINK_RATE * 450e9),
        Link(16e-6, LINK_RATE * 50e9),
    ),
    Gpu(
        "H200",
        141e9,
        _peaks(67e12, 989e12),
        4800e9,
        132,
        Link(9e-6, LINK_RATE * 450e9),
        Link(16e-6, LINK_RATE * 50e9),
    ),
)
GPUS = MappingProxyType({gpu.name.lower(): gpu for gpu in _GPUS})


def gpu_of(name: str) -> Gpu:
    """The GPU of this name.

    >>> gpu_of("H100").memory / 2**30, gpu_of("a100-40").memory / 2**30
    (80.0, 40.0)
    """
    found = GPUS.get(name.lower())
    if found is None:
        raise UnknownNameError("GPU", name, GPUS)
    return found


def gpu_network(gpu: Gpu, ranks: int, devices_per_rank: int = 1) -> Network:
    """The links between ranks that fill one machine after the other.

    A rank of several devices sends over the links of its first device. Ranks on one machine
    have one link for all pairs, others a matrix.
    """
    machines = [rank * devices_per_rank // gpu.per_machine for rank in range(ranks)]
    if len(set(machines)) <= 1:
        return Network(gpu.inside.latency, gpu.inside.bandwidth, serial=True)

    def matrix(inside: float, between: float) -> tuple[tuple[float, ...], ...]:
        return pair_matrix(machines, lambda a, b: inside if a == b else between, inside)

    return Network(
        matrix(gpu.inside.latency, gpu.between.latency),
        matrix(gpu.inside.bandwidth, gpu.between.bandwidth),
        serial=True,
    )


# ---------------------------------------------------------------- seconds of kernels
@dataclass(frozen=True, slots=True)
class _Machine:
    """A GPU that computes in one precision."""

    gpu: Gpu
    precision: str
    recorded: bool

    @property
    def item(self) -> int:
        """Bytes of a number in a product."""
        return FLOAT32_BYTES if self.precision == "float32" else HALF_BYTES

    @property
    def rate(self) -> float:
        """Operations per second at the peak."""
        return self.gpu.peak[self.precision]

    def move(self, size: float) -> float:
        """Seconds to read or write this many bytes."""
        return size / (BANDWIDTH_RATE * self.gpu.bandwidth)

    def product(self, rows: int, depth: int, columns: int) -> float:
        """Seconds of a product of a (rows x depth) and a (depth x columns) matrix."""
        tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
        waves = math.ceil(tiles / self.gpu.multiprocessors)
        tile = 2.0 * TILE * TILE * depth
        full = waves * self.gpu.multiprocessors * tile / (PRODUCT_RATE * self.rate)
        # A product with few tiles and a long sum is divided along the sum.
        work = 2.0 * rows * depth * columns
        divided = work / (DIVIDED_RATE * self.rate)
        least = tile * MIN_DEPTH_SHARE * self.gpu.multiprocessors / self.rate
        operands = rows * depth + depth * columns + rows * columns
        return max(min(full, max(divided, least)), self.move(self.item * operands))

    def products(self, matrices: Sequence[WeightMatrix], tokens: int) -> float:
        """Seconds to multiply tokens with matrices, or gradients with their transposes."""
        return sum(self.product(tokens, one.rows, one.columns) for one in matrices)

    def weight_products(self, matrices: Sequence[WeightMatrix], tokens: int) -> float:
        """Seconds of the gradients of matrices: the sum goes over the tokens."""
        return sum(self.product(one.rows, tokens, one.columns) for one in matrices)

    def cast(self, parameters: float) -> float:
        """Seconds to turn weights into the type in which products compute."""
        if self.precision == "float32":
            return 0.0
        return self.move(CAST_BYTES * parameters)

    def weight_gradients(
        self, matrices: Sequence[WeightMatrix], tokens: int, parameters: float
    ) -> tuple[float, float]:
        """Seconds to compute and store the gradients of weights, for a W and within a whole B."""
        products = self.weight_products(matrices, tokens)
        alone, within = WEIGHT_GRADIENT_BYTES, WHOLE_WEIGHT_GRADIENT_BYTES
        if self.precision == "float32":
            alone = within = FLOAT32_GRADIENT_BYTES
        return (
            products + self.move(alone * parameters),
            products + self.move(within * parameters),
        )

    def op(self, kernels: int, seconds: float) -> float:
        """Seconds of an op with this many kernels, which compute for `seconds`."""
        if not kernels:
            return 0.0
        computing = seconds + kernels * self.gpu.kernel_seconds
        if self.recorded:
            return computing
        return max(computing, kernels * self.gpu.launch_seconds)


def _point(
    machine: _Machine,
    place: tuple[int, int],
    kernels: tuple[int, int, int],
    forward: float,
    backward: float,
    weights: tuple[float, float],
) -> Point:
    """The four ops of a slice, from the seconds of their kernels; `weights` are those of W, alone and within B."""
    f, i, w = kernels
    alone, within = weights
    return Point(
        *place,
        F=machine.op(f, forward),
        B=machine.op(i + w, backward + within),
        I=machine.op(i, backward),
        W=machine.op(w, alone),
    )


# ---------------------------------------------------------------- a model on a GPU
def analytic_profile(
    sizes: ModelSizes,
    tokens: int,
    rows: int = 1,
    gpu: Gpu | str = "h100",
    precision: str = "bfloat16",
    ranks: int = 1,
    devices_per_rank: int = 1,
    recorded: bool = True,
    loss_chunk: int = 0,
) -> Profile:
    """The profile of a model on a known GPU, by arithmetic.

    Weights, gradients and AdamW's state are float32, as the trainer keeps them; products compute in
    `precision`. The links are those between `ranks` ranks. The device facts say `analytic`. With
    `loss_chunk`, large logits are never all in memory (run.loss_chunk); the times are those of
    layers that are not compiled, and of a loss without chunks.
    """
    check_sizes(sizes)
    device = gpu_of(gpu) if isinstance(gpu, str) else gpu
    if precision not in device.peak:
        known = ", ".join(device.peak)
        raise ShapeError(
            f"the {device.name} does not compute in {precision}\n  it computes in {known}; "
            "set run.precision"
        )
    for name, value in (("tokens", tokens), ("rows", rows), ("ranks", ranks)):
        if value < 1:
            raise ShapeError(f"{name} must be at least 1, not {value}")
    machine = _Machine(device, precision, recorded)
    layer = _layer(sizes, machine, tokens, rows)
    embed = _embed(sizes, machine, tokens, rows)
    chunk = chunk_in_use(loss_chunk, rows * tokens, sizes.vocab_size)
    head = _head(sizes, machine, tokens, rows, chunk > 0)
    tied = 0.0
    if sizes.tie_embeddings:
        tied = 4.0 * FLOAT32_BYTES * sizes.vocab_size * sizes.hidden_size
    model = (
        ("family", sizes.family),
        ("vocab", sizes.vocab_size),
        ("width", sizes.hidden_size),
        ("layers", sizes.layers),
        ("heads", sizes.heads),
        ("kv_heads", sizes.kv_heads),
        ("inner", sizes.intermediate_size),
        ("tied", sizes.tie_embeddings),
    )
    error = FITTED_ERROR if device.name == FITTED_GPU else OTHER_ERROR
    facts = (
        ("device", "cuda"),
        ("name", f"NVIDIA {device.name}"),
        ("analytic", True),
        (FASTEST_ROUND, 1.0 - error),
        (SLOWEST_ROUND, 1.0 + error),
        ("dtype", "float32"),
        ("autocast", None if precision == "float32" else precision),
        ("recorded", recorded),
        ("loss_chunk", chunk),
    )
    return Profile(
        sizes.layers,
        tokens,
        rows,
        float(FLOAT32_BYTES * rows * sizes.hidden_size),
        embed,
        layer,
        head,
        gpu_network(device, ranks, devices_per_rank),
        model,
        facts,
        tied=tied,
    )


def _layer(sizes: ModelSizes, machine: _Machine, tokens: int, rows: int) -> Block:
    matrices = layer_matrices(sizes)
    parameters = parameters_of_pieces(sizes, tokens).layer
    moved = LAYER_BYTES[sizes.family]
    scale = FLOAT32_BYTES * sizes.hidden_size * _inner_scale(sizes)
    keys = key_width(sizes)
    points = []
    for length, prefix in slice_points(tokens):
        count = rows * length
        pairs = rows * (length * prefix + length * length / 2)
        work = 4.0 * sizes.hidden_size * pairs / machine.rate
        cast = machine.cast(parameters)
        products = machine.products(matrices, count)
        keys_read = machine.move(4.0 * machine.item * rows * prefix * keys)
        forward = products + cast + keys_read + machine.move(moved[0] * scale * count)
        backward = (
            products + cast + 2 * keys_read + machine.move(moved[1] * scale * count)
        )
        points.append(
            _point(
                machine,
                (length, prefix),
                LAYER_KERNELS[sizes.family],
                forward + work / ATTENTION_RATE,
                backward + ATTENTION_BACKWARD_WORK * work / ATTENTION_BACKWARD_RATE,
                machine.weight_gradients(matrices, count, parameters),
            )
        )
    whole, cut = held_numbers(
        sizes.family, sizes.hidden_size, keys, sizes.intermediate_size
    )
    held = rows * (whole * FLOAT32_BYTES + cut * machine.item)
    kept = rows * deferred_numbers(sizes) * machine.item
    return _block(points, held, kept, parameters, machine)


def _inner_scale(sizes: ModelSizes) -> float:
    """How many bytes a layer moves, relative to one with an MLP of the usual size."""
    usual = {"llama": 2.75, "gpt": 4.0}[sizes.family] * sizes.hidden_size
    return (1.0 + sizes.intermediate_size / usual) / 2


def _embed(sizes: ModelSizes, machine: _Machine, tokens: int, rows: int) -> Block:
    parameters = parameters_of_pieces(sizes, tokens).embed
    points = []
    for length in _lengths(tokens):
        size = rows * length * sizes.hidden_size
        gradient = machine.move(EMBED_GRADIENT_BYTES * parameters)
        points.append(
            _point(
                machine,
                (length, 0),
                EMBED_KERNELS,
                machine.move(EMBED_BYTES[0] * size),
                machine.move(EMBED_BYTES[1] * size) + gradient,
                (0.0, 0.0),
            )
        )
    return _block(points, rows * 8.0, 0.0, parameters, machine)


def _head(
    sizes: ModelSizes, machine: _Machine, tokens: int, rows: int, chunked: bool
) -> Block:
    parameters = parameters_of_pieces(sizes, tokens).head
    matrices = (WeightMatrix(sizes.hidden_size, sizes.vocab_size),)
    points = []
    for length in _lengths(tokens):
        count = rows * length
        logits = count * sizes.vocab_size
        product = machine.products(matrices, count) + machine.cast(parameters)
        points.append(
            _point(
                machine,
                (length, 0),
                HEAD_KERNELS,
                product + machine.move(LOSS_BYTES[0] * logits),
                product + machine.move(LOSS_BYTES[1] * logits),
                machine.weight_gradients(matrices, count, parameters),
            )
        )
    width = sizes.hidden_size
    # The loss keeps its logits or, if it has chunks, their gradients.
    logit = machine.item if chunked else FLOAT32_BYTES
    held = rows * (logit * sizes.vocab_size + (FLOAT32_BYTES + machine.item) * width)
    kept = rows * machine.item * (sizes.vocab_size + width)
    return _block(points, held, kept, parameters, machine)


def _block(
    points: Sequence[Point],
    held: float,
    kept: float,
    parameters: int,
    machine: _Machine,
) -> Block:
    weights = 4.0 * FLOAT32_BYTES * parameters
    return block(points, held, kept, weights, machine.move(ADAM_PASSES * weights))


def slice_points(tokens: int) -> list[tuple[int, int]]:
    """The slices whose times make up a curve, by tokens and prefix."""
    points = set()
    for length in _lengths(tokens):
        longest = tokens - length
        for share in PREFIX_SHARES:
            points.add((length, int(share * longest)))
    return sorted(points)


def _lengths(tokens: int) -> list[int]:
    """The whole sequence, three quarters of it, and halves of halves, in tiles."""
    lengths = {tokens}
    for target in (0.75 * tokens, *(tokens / 2**n for n in range(1, 12))):
        if target >= MIN_POINT_TOKENS:
            unit = TILE if target >= TILE else MIN_POINT_TOKENS
            lengths.add(max(int(target) // unit * unit, MIN_POINT_TOKENS))
    return sorted(lengths)
