"""Token slices: a sequence cut into slices trains like the whole one, whatever the cuts, the schedule, the module."""

from __future__ import annotations

import copy
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from hugging_face import checkpoint_activations, decoder_sizes, gpt2_sizes
from penstock import REGISTRY, lower, make
from penstock.errors import RunError, ShapeError
from penstock.ir import MicroBatch, schedule_of
from penstock.models import (
    Bert,
    BertConfig,
    document_starts,
    shift_labels,
    split,
    token_loss,
)
from penstock.models.slice import Carry, Slice
from penstock.runtime import Executor, batch_of, run_threads
from penstock.runtime.batch import spans_of
from penstock.schedules.transforms import slice_tokens
from pipelines import (
    VOCAB,
    data,
    gpt,
    gradients_of,
    layers_of,
    llama,
    piped,
    unsplit,
    worst,
)
from random_schedules import random_schedule

pytestmark = pytest.mark.numerics  # run once more with other kernels by .ci/run

MODELS = {"llama": llama, "gpt": gpt}
UNEVEN = (0, 5, 6, 11, 13)
SLICED = [name for name in REGISTRY if name not in ("terapipe", "seq1f1b")]


def sliced(
    name: str,
    ranks: int,
    microbatches: int,
    cuts: tuple[int, ...] = UNEVEN,
    **shape: int,
):
    """A schedule of the registry whose micro-batches are all cut there."""
    if name in SLICED:
        return slice_tokens(
            make(name, ranks=ranks, microbatches=microbatches, **shape), cuts
        )
    even = make(
        name, ranks=ranks, microbatches=microbatches, slices=len(cuts) - 1, **shape
    )
    table = [MicroBatch(m.path, cuts[-1], cuts) for m in even.microbatches]
    return schedule_of(even.stages, table, even.lanes)


def assert_exact(
    schedule,
    whole: nn.Module,
    tokens: int = UNEVEN[-1],
    tolerance: float = 1e-12,
    **options,
) -> None:
    """Gradients and losses are of the size of 1: each of some hundred additions rounds them by about 1e-16."""
    batch = data(len(schedule.microbatches), tokens)
    (loss,), gradients = unsplit(schedule, whole, [batch])
    ours = piped(schedule, whole, [batch], **options)
    assert worst(ours, gradients) < tolerance
    assert [losses[0] for losses in ours.losses] == pytest.approx(
        [loss] * schedule.ranks, abs=tolerance
    )
    assert ours.evaluated == pytest.approx([loss] * schedule.ranks, abs=tolerance)


# ---------------------------------------------------------------- exact
@pytest.mark.parametrize(("ranks", "model"), [(1, "llama"), (2, "gpt"), (4, "llama")])
@pytest.mark.parametrize("name", REGISTRY)
def test_gradients_of_slices_are_those_of_the_whole_sequence(name, ranks, model):
    if name == "chimera" and ranks == 1:
        return  # refused: an even number of ranks
    schedule = sliced(name, ranks, 3)
    assert_exact(schedule, MODELS[model](sum(layers_of(schedule))))


@pytest.mark.parametrize(
    "cuts", [(0, 1, 13), (0, 12, 13), tuple(range(14)), (0, 4, 8, 13), (0, 13)]
)
def test_any_cuts_are_exact(cuts):
    for name in ("terapipe", "seq1f1b", "zb-v"):
        assert_exact(sliced(name, 2, 2, cuts), llama(4 if name == "zb-v" else 2))


@pytest.mark.parametrize(
    "name", ["terapipe", "seq1f1b", "hanayo", "zb-h1", "interleaved-zb"]
)
def test_slices_with_recomputation_are_exact(name):
    schedule = sliced(name, 2, 3)
    parts = frozenset(range(len(schedule.stages)))
    for model in MODELS.values():
        assert_exact(schedule, model(sum(layers_of(schedule))), recompute=parts)


@pytest.mark.parametrize("name", ["seq1f1b", "hanayo"])
def test_slices_under_replicas_split_backwards_and_tied_weights_are_exact(name):
    schedule = sliced(name, 2, 2, copies=2, split=True)
    for model in MODELS.values():
        assert_exact(schedule, model(sum(layers_of(schedule)), tied=True))


def test_random_schedules_with_cuts_of_their_own_are_exact():
    """Paths skip parts, swap them and pick a replica; each micro-batch has a length of its own."""
    for seed in range(15):
        draw = np.random.default_rng([9, seed])
        schedule = random_schedule(draw, ranks=3, microbatches=3, ends=True)
        whole = llama(sum(layers_of(schedule)))
        alone = [data(1, m.tokens, n) for n, m in enumerate(schedule.microbatches)]
        batch = batch_of(
            [one.inputs[0] for one in alone], [one.labels[0] for one in alone]
        )
        gradients = unsplit(schedule, whole, [batch])[1]
        assert worst(piped(schedule, whole, [batch]), gradients) < 1e-12


# ---------------------------------------------------------------- Hugging Face's own models
GATED = decoder_sizes(VOCAB, width=32, inner=48)
THEIRS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GATED)),
    "mistral, window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**GATED, sliding_window=4)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GATED)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**gpt2_sizes(VOCAB, width=32, n_inner=48))
    ),
}


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", THEIRS)
def test_a_hugging_face_model_runs_in_slices_too(name, kernel):
    """Eager attention rounds its softmax to float32 even in a float64 model, and in a slice it has fewer columns, which
    are summed in another order. So shares of attention may be one step of float32 apart, and with them what follows."""
    torch.manual_seed(3)
    model = THEIRS[name]().double()
    model.set_attn_implementation(kernel)
    schedule = sliced("hanayo", 2, 3)
    assert_exact(
        schedule,
        model,
        tolerance=torch.finfo(torch.float32).eps if kernel == "eager" else 1e-12,
    )


ROPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "long_factor": [3.0] * 4,
        "short_factor": [1.0] * 4,
    },
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


def rotary_llama(kind: str) -> nn.Module:
    """Sequences of more than 8 tokens may have frequencies of their own."""
    torch.manual_seed(5)
    rope = {"rope_type": kind, "rope_theta": 100.0, **ROPES[kind]}
    longest = 8 if kind == "dynamic" else 32
    config = transformers.LlamaConfig(
        **GATED, rope_parameters=rope, max_position_embeddings=longest
    )
    return transformers.LlamaForCausalLM(config).double()


def whole_gradients(batch, model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of Hugging Face's whole model, one micro-batch after the other; documents by position."""
    whole, loss = copy.deepcopy(model), 0.0
    for number, (x, labels) in enumerate(zip(batch.inputs, batch.labels, strict=True)):
        place = torch.arange(x.shape[1]) - (batch.starts[number] if batch.starts else 0)
        logits = whole(
            x, position_ids=place if place.dim() == 2 else place[None], use_cache=False
        ).logits
        one = token_loss(logits, labels) / batch.valid
        one.backward()
        loss += float(one.detach())
    return loss, {name: p.grad for name, p in whole.named_parameters()}


@pytest.mark.parametrize("kind", ROPES)
def test_slices_see_the_rotary_frequencies_of_the_whole_sequence(kind):
    schedule, model, batch = (
        sliced("hanayo", 2, 3),
        rotary_llama(kind),
        data(3, UNEVEN[-1]),
    )
    loss, gradients = whole_gradients(batch, model)
    ours = piped(schedule, model, [batch])
    assert worst(ours, gradients) < 1e-10
    assert ours.losses[0][0] == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_recomputed_slices_of_short_and_long_sequences_keep_their_own_frequencies(
    kind, packed
):
    """By the time a forward is computed again, another micro-batch has changed the module's frequencies."""
    schedule, model = sliced("hanayo", 2, 4, (0, 5, 9, 13)), rotary_llama(kind)
    rows = [data(1, tokens, seed) for seed, tokens in enumerate((13, 7, 13, 6))]
    inputs, labels = [one.inputs[0] for one in rows], [one.labels[0] for one in rows]
    documents = [
        torch.tensor([4, 9]),
        torch.tensor([2, 5]),
        torch.tensor([9, 4]),
        torch.tensor([6]),
    ]
    starts = [document_starts(one)[None] for one in documents] if packed else []
    batch = batch_of(inputs, labels, starts=starts)
    _, gradients = whole_gradients(batch, model)
    for recompute in (frozenset(), frozenset({0, 1, 2, 3})):
        assert (
            worst(piped(schedule, model, [batch], recompute=recompute), gradients)
            < 1e-10
        )


# ---------------------------------------------------------------- any state
class Recurrent(nn.Module):
    """h_t = tanh(A h_{t-1} + B x_t), token by token; what a slice ends with is what the next begins with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        state = None if piece is None else piece.take(self, "state")
        h = torch.zeros_like(x[:, 0]) if state is None else state
        out = []
        for token in x.unbind(1):
            h = torch.tanh(self.a(h) + self.b(token))
            out.append(h)
        if piece is not None:
            piece.leave(self, "state", h)
        return x + torch.stack(out, 1)


class Convolution(nn.Module):
    """Each token with the two before it, which may be in the slice before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, 3)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        before = None if piece is None else piece.take(self, "tail")
        wide = torch.cat(
            (x.new_zeros(x.shape[0], 2, x.shape[2]) if before is None else before, x), 1
        )
        if piece is not None:
            piece.leave(self, "tail", wide[:, -2:])
        return x + self.mix(wide.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    """Both, one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = Recurrent(width), Convolution(width)

    def forward(self, x: Tensor, piece: Slice | None = None) -> Tensor:
        return self.second(self.first(x, piece), piece)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["terapipe", "seq1f1b", "zb-h1"])
def test_a_recurrent_layer_carries_its_state_and_its_gradient_back(name, recompute):
    schedule = sliced(name, 2, 3)
    torch.manual_seed(4)
    blocks = [Block(8).double() for _ in range(2)]
    inputs = [torch.randn(2, 13, 8, dtype=torch.float64) for _ in range(3)]
    labels = [torch.zeros(2, 13, dtype=torch.long)] * 3
    whole = copy.deepcopy(blocks)
    for x in inputs:
        (square(whole[1](whole[0](x)), labels[0]) / 78).backward()

    def work(comm):
        stages = {comm.rank: blocks[comm.rank]}
        again = frozenset({0, 1}) if recompute else frozenset()
        executor = Executor(lower(schedule), stages, comm, square, recompute=again)
        return executor.step(batch_of(inputs, labels, 78)).loss

    run_threads(2, work, patience=300)
    for ours, theirs in zip(blocks, whole, strict=True):
        for (_, mine), (_, other) in zip(
            ours.named_parameters(), theirs.named_parameters(), strict=True
        ):
            assert float((mine.grad - other.grad).abs().max()) < 1e-12


def square(y: Tensor, _: Tensor) -> Tensor:
    return (y * y * torch.arange(1, y.shape[-1] + 1)).sum()


# ---------------------------------------------------------------- documents
@pytest.mark.parametrize("model", [*MODELS, "hf"])
@pytest.mark.parametrize("cuts", [(0, 13), UNEVEN])
def test_packed_documents_train_like_documents_alone(model, cuts):
    schedule = sliced("seq1f1b", 2, 2, cuts)
    whole = THEIRS["qwen2"]().double() if model == "hf" else MODELS[model](2)
    partition = (2, 2) if model == "hf" else (1, 1)
    lengths = [torch.tensor([4, 9]), torch.tensor([6, 1, 6])]
    tokens = [torch.randint(0, VOCAB, (1, 13)) for _ in lengths]
    starts = [document_starts(one)[None] for one in lengths]
    labels = [shift_labels(x, s) for x, s in zip(tokens, starts, strict=True)]
    batch = batch_of(tokens, labels, starts=starts)
    assert batch.valid == 26 - 5
    alone, loss = copy.deepcopy(whole), 0.0
    for row, sizes in zip(tokens, lengths, strict=True):
        for document in row[0].split(sizes.tolist()):
            x = document[None]
            for part in split(alone, partition):
                x = part(x)
            one = token_loss(x, shift_labels(document[None])) / batch.valid
            one.backward()
            loss += float(one.detach())
    ours = piped(schedule, whole, [batch], partition=partition)
    assert ours.losses == [pytest.approx([loss], abs=1e-10)] * 2
    assert worst(ours, gradients_of(alone)) < 1e-10


def test_starts_must_have_the_shape_of_the_tokens():
    x = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(
        ShapeError, match=r"input of shape \(1, 4\) and starts of shape \(1, 3\)"
    ):
        batch_of([x], [x], starts=[x[:, :3]])


# ---------------------------------------------------------------- attention
def test_the_mask_of_a_slice_is_aligned_at_the_lower_right():
    carry = Carry(6)
    carry.open(0, 4)
    seen = carry.open(4, 6).seen(torch.device("cpu"))
    assert seen.tolist() == [[True] * 5 + [False], [True] * 6]


def test_is_causal_with_fewer_queries_than_keys_would_be_wrong():
    """Why there is a mask at all; should torch ever change this, the mask may go."""
    q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    carry = Carry(6)
    carry.open(0, 4)
    mask = carry.open(4, 6).mask(q.device, q.dtype)
    right = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    wrong = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert float((right - wrong).abs().max()) > 0.1


def test_keys_lie_in_one_buffer_that_no_slice_copies():
    carry, owner, k = Carry(12), object(), torch.randn(2, 3, 12, 4)
    views = []
    for begin, end in ((0, 4), (4, 6), (6, 12)):
        piece = carry.open(begin, end)
        views.append(
            piece.extend(owner, "keys", k[:, :, begin:end].clone().requires_grad_())
        )
        assert torch.equal(views[-1], k[:, :, :end])
    assert len({view.data_ptr() for view in views}) == 1
    assert carry.rows[owner, "keys"].shape == (2, 3, 12, 4)


def test_gradients_of_keys_are_summed_in_one_buffer():
    carry, owner = Carry(5), object()
    pieces = [carry.open(0, 2), carry.open(2, 5)]
    leaves = [
        torch.randn(1, 2, 3, requires_grad=True),
        torch.randn(1, 3, 3, requires_grad=True),
    ]
    outs = [
        piece.extend(owner, "k", x, dim=1)
        for piece, x in zip(pieces, leaves, strict=True)
    ]
    (outs[1] * 2).sum().backward()
    held = carry.gradients[owner, "k"]
    (outs[0] * 3).sum().backward()
    assert carry.gradients[owner, "k"] is held
    assert leaves[1].grad.unique().tolist() == [2.0]
    assert leaves[0].grad.unique().tolist() == [5.0]


def test_gradients_of_keys_in_half_precision_are_summed_in_float32():
    """The first token gets 256 + 1 + 1, of which bfloat16 would forget the ones."""
    carry, owner = Carry(3), object()
    pieces = [carry.open(place, place + 1) for place in range(3)]
    leaves = [torch.ones(1, 1, 1, dtype=torch.bfloat16) for _ in pieces]
    outs = []
    for piece, x in zip(pieces, leaves, strict=True):
        outs.append(piece.extend(owner, "k", x.requires_grad_(), dim=1))
    for out, scale in zip(reversed(outs), (256.0, 1.0, 1.0), strict=True):
        (out * scale).sum().backward()
    assert leaves[0].grad.item() == 258.0


# ---------------------------------------------------------------- order and left-overs
def test_a_forward_out_of_order_raises():
    carry = Carry(8)
    carry.open(0, 4)
    with pytest.raises(
        RunError, match="tokens 6:8 of 8 go forward, but the next one is 4"
    ):
        carry.open(6, 8)


def test_a_backward_out_of_order_raises():
    carry = Carry(8)
    first = carry.open(0, 4)
    with pytest.raises(
        RunError,
        match="backward of tokens 0:4 comes out of order: the forward of token 4 is due",
    ):
        carry.back(first)
    carry.open(4, 8)
    with pytest.raises(
        RunError,
        match="backward of tokens 0:4 comes out of order: the backward of token 7 is due",
    ):
        carry.back(first)


@pytest.mark.parametrize("fault", ["swapped", "missing"])
def test_a_program_that_goes_back_wrongly_is_caught_by_the_executor(fault):
    schedule = make("seq1f1b", ranks=1, microbatches=1, slices=2)
    part = split(llama(1), [1])[0]

    def work(comm):
        executor = Executor(lower(schedule), {0: part}, comm, token_loss)
        back = [
            n
            for n, turn in enumerate(executor.turns)
            if turn.step is not None and turn.step.do == 1
        ]
        if fault == "swapped":
            executor.turns[back[0]], executor.turns[back[1]] = (
                executor.turns[back[1]],
                executor.turns[back[0]],
            )
        else:
            del executor.turns[back[1]]
        return executor.step(data(1, 8))

    message = {
        "swapped": "comes out of order",
        "missing": "came back only to token 4",
    }[fault]
    with pytest.raises(RunError, match=message):
        run_threads(1, work)


# ---------------------------------------------------------------- refusals
def test_a_model_that_looks_both_ways_cannot_be_sliced():
    bert = Bert(BertConfig(VOCAB, 16, 2, 4, 24, 16)).double()
    schedule = make("seq1f1b", ranks=2, microbatches=2, slices=2)
    with pytest.raises(
        ShapeError, match=r"stage [01] cannot be sliced: its tokens see later tokens"
    ):
        piped(schedule, bert, [data(2, 8)])
    with pytest.raises(
        ShapeError, match="cannot run a slice: its tokens see later tokens"
    ):
        split(bert, [1, 1])[0](torch.zeros(1, 4, dtype=torch.long), Carry(8).open(0, 4))


def test_gradient_checkpointing_of_hugging_face_is_refused_with_slices_only():
    schedule = sliced("hanayo", 2, 2)
    model = THEIRS["llama"]().double()
    checkpoint_activations(model)
    with pytest.raises(
        ShapeError,
        match=r"stage \d cannot be sliced: .*activation_checkpointing_disable.*recompute=",
    ):
        piped(schedule, model.train(), [data(2, 13)])
    with pytest.raises(
        ShapeError,
        match="cannot run a slice: its layers use Hugging Face's activation checkpointing",
    ):
        split(model, [4])[0](torch.zeros(1, 4, dtype=torch.long), Carry(8).open(0, 4))
    packed = Carry(4, torch.zeros(1, 4, dtype=torch.long)).open(0, 4)
    assert (
        split(model, [4])[0](torch.zeros(1, 4, dtype=torch.long), packed)
        .isfinite()
        .all()
    )
    checkpoint_activations(model, enable=False)
    assert_exact(schedule, model, recompute=frozenset({0, 1, 2, 3}))


def test_a_module_that_knows_nothing_of_slices_is_refused_with_what_is_missing():
    schedule = make("terapipe", ranks=1, microbatches=1, slices=2)
    with pytest.raises(
        ShapeError, match="the forward of Linear has no parameter `piece`"
    ):
        run_threads(
            1,
            lambda comm: Executor(lower(schedule), {0: nn.Linear(4, 4)}, comm, square),
        )


def test_a_sequence_of_another_length_is_cut_in_the_same_shares():
    schedule = sliced("seq1f1b", 2, 2, (0, 2, 3, 4))
    for tokens in (4, 8, 21):
        assert_exact(schedule, llama(2), tokens=tokens)
    with pytest.raises(
        ShapeError, match=r"2 tokens cannot be cut into 3 slices; give at most 2"
    ):
        spans_of(schedule.microbatches[0], 2)
    with pytest.raises(
        ShapeError,
        match="a sequence of 5 tokens has an empty slice when it is cut in the proportions of",
    ):
        spans_of(MicroBatch((0,), 1000, (0, 1, 2, 1000)), 5)


# ---------------------------------------------------------------- memory
class Resident:
    """Bytes that autograd keeps, by storage: grows when something is saved and shrinks when its graph goes."""

    def __init__(self) -> None:
        self.users: dict[int, int] = {}
        self.size: dict[int, int] = {}
        self.most = 0

    def pack(self, x: Tensor):
        storage = x.untyped_storage()
        place = storage.data_ptr()
        self.users[place] = self.users.get(place, 0) + 1
        self.size[place] = storage.nbytes()
        self.most = max(
            self.most, sum(self.size[one] for one, users in self.users.items() if users)
        )
        box = [x]
        holder = Held(box)
        weakref.finalize(holder, self.release, place)
        return holder

    def release(self, place: int) -> None:
        self.users[place] -= 1


class Held:
    def __init__(self, box: list[Tensor]) -> None:
        self.box = box


def resident(schedule, whole: nn.Module, tokens: int, rank: int) -> int:
    """The most bytes of activations that a rank's graphs keep, weights left out."""
    copies = [copy.deepcopy(whole) for _ in range(schedule.ranks)]
    meter = Resident()
    inputs = [torch.randint(0, VOCAB, (1, tokens)) for _ in schedule.microbatches]
    batch = batch_of(inputs, inputs)
    weights = {p.untyped_storage().data_ptr() for p in copies[rank].parameters()}

    def work(comm):
        part = split(copies[comm.rank], layers_of(schedule))[comm.rank]
        executor = Executor(
            lower(schedule),
            {comm.rank: part},
            comm,
            token_loss,
        )
        if comm.rank != rank:
            return executor.step(batch).loss

        def pack(x: Tensor):
            return x if x.untyped_storage().data_ptr() in weights else meter.pack(x)

        def unpack(held):
            return held.box[0] if isinstance(held, Held) else held

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return executor.step(batch).loss

    run_threads(schedule.ranks, work, patience=300)
    return meter.most


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_seq1f1b_holds_its_share_of_1f1bs_activations_plus_keys_and_values(slices):
    ranks, tokens, microbatches = 4, 64, 8
    whole = llama(ranks)
    plain = resident(
        make("1f1b", ranks=ranks, microbatches=microbatches), whole, tokens, 0
    )
    ours = resident(
        make("seq1f1b", ranks=ranks, microbatches=microbatches, slices=slices),
        whole,
        tokens,
        0,
    )
    share = (slices + ranks - 1) / (slices * ranks)
    flying = -(-(slices + ranks - 1) // slices)  # micro-batches, at most
    # Keys and values: 2 heads of 4 numbers of 8 bytes for each token.
    keys = flying * 2 * 2 * 4 * 8 * tokens
    # The mask of a slice: one for all layers, on a CPU only.
    masks = flying * 8 * tokens * tokens
    assert ours <= share * plain + keys + masks
    assert ours >= share * plain * 0.8
    assert share * plain + keys + masks < 0.9 * plain
