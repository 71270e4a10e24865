"""Recorded actions, on a tape that needs no GPU: it does the work again, and leaves what it makes in its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_executor import shape_for
from torch import Tensor

from again_tape import Again, leave_in_place
from penstock import REGISTRY, lower, make
from penstock.errors import RunError
from penstock.ir import Action, MicroBatch, Op, Stage, schedule_of
from penstock.ir.lane import RECEIVE, SEND, lane_turns
from penstock.measure.probe import Probe, Subject
from penstock.models import split, token_loss
from penstock.runtime import Batch, Executor, Mean, batch_of, replay, run_threads
from penstock.runtime.comm.thread import ThreadComm
from penstock.runtime.executor import RunOptions
from penstock.runtime.replay import assign_takes, stage_visits
from penstock.schedules.transforms import slice_tokens
from pipelines import Outcome, data, gpt, layers_of, llama, piped, unsplit, worst

pytestmark = pytest.mark.numerics  # run once more with other kernels by .ci/run


@pytest.fixture
def few(monkeypatch):
    """Every lane has more actions than may be recorded one by one."""
    monkeypatch.setattr(replay, "MAX_RECORDED_ACTIONS", 0)


def played(schedule, whole, batches, **options):
    """Through the schedule with a tape a rank; the tapes too."""
    tapes = [Again() for _ in range(schedule.ranks)]
    return piped(
        schedule, whole, batches, each=lambda rank: {"tape": tapes[rank]}, **options
    ), tapes


def apart(ours: Outcome, theirs: Outcome) -> float:
    """The largest difference of two outcomes of one schedule."""
    pairs = [
        (ours.gradients.get(name), gradient)
        for name, gradient in theirs.gradients.items()
    ]
    return max(
        float("inf") if mine is None else float((mine - other).abs().max())
        for mine, other in pairs
    )


@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, llama) for name in REGISTRY), ("1f1b", gpt), ("zb-v", gpt)],
)
def test_gradients_and_losses_are_those_of_the_unsplit_model(name, model):
    schedule = make(name, **shape_for(name, 4, 5))
    whole = model(sum(layers_of(schedule)))
    batches = [data(5), data(5, seed=1), data(5, seed=2)]
    losses, gradients = unsplit(schedule, whole, batches)
    ours, tapes = played(schedule, whole, batches)
    assert worst(ours, gradients) < 1e-10
    assert all(found == pytest.approx(losses, abs=1e-12) for found in ours.losses)
    assert sum(tape.plays for tape in tapes) == 3 * schedule.actions


@pytest.mark.parametrize("name", ["seq1f1b", "hanayo", "zb-v"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_slices_are_recorded_one_by_one(name, options):
    schedule = make(
        name, ranks=2, microbatches=3, **({"slices": 1} if name == "seq1f1b" else {})
    )
    whole, batches = (
        llama(schedule.parts),
        [data(3, tokens=8, seed=seed) for seed in range(3)],
    )
    if options:
        options = {"recompute": frozenset(range(len(schedule.stages)))}
    losses, gradients = unsplit(schedule, whole, batches)
    sliced = slice_tokens(schedule, (0, 3, 4, 8))
    ours, tapes = played(sliced, whole, batches, **options)
    assert worst(ours, gradients) < 1e-12
    assert all(found == pytest.approx(losses, abs=1e-12) for found in ours.losses)
    assert sum(tape.plays for tape in tapes) == 3 * sliced.actions


@pytest.mark.parametrize("name", ["chimera", "1f1b", "zb-v"])
def test_gradients_of_replicas_and_tied_ones_add_up_over_steps(name):
    copies = {} if name == "zb-v" else {"copies": 2}
    schedule = make(name, ranks=2, microbatches=3, **copies)
    count = len(schedule.microbatches)
    whole, batches = (
        gpt(schedule.parts, tied=True),
        [data(count, seed=seed) for seed in range(3)],
    )
    ours, _ = played(schedule, whole, batches)
    assert worst(ours, unsplit(schedule, whole, batches)[1]) < 1e-12


@pytest.mark.parametrize("mean", Mean)
def test_partial_paths_have_the_gradients_of_steps_that_are_not_recorded(mean):
    schedule = make("skip", ranks=4, microbatches=4, skips=1)
    whole, batches = llama(sum(layers_of(schedule))), [data(4), data(4, seed=1)]
    options = RunOptions(mean=mean)
    expected = piped(schedule, whole, batches, options=options)
    assert apart(played(schedule, whole, batches, options=options)[0], expected) < 1e-12


class DirectComm:
    """Threads that read what they send at once, and let it arrive where it is needed, as ranks on a shared GPU do."""

    reads_in_order = True

    def __init__(self, inner: ThreadComm) -> None:
        self.inner = inner
        self.sent: list[int] = []  # the address of each message
        self.in_place: list[
            bool
        ] = []  # whether each message arrived where it is needed

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def send(self, tensor, target):
        self.sent.append(tensor.data_ptr())
        return self.inner.send(tensor.clone(), target)

    def receive(self, shape, dtype, source):
        return DirectReceive(self, self.inner.receive(shape, dtype, source))


class DirectReceive:
    """A tensor that arrives in a certain place, if there is one."""

    def __init__(self, comm: DirectComm, inner) -> None:
        self.comm = comm
        self.inner = inner

    def wait(self, into: Tensor | None = None) -> Tensor:
        received = self.inner.wait()
        self.comm.in_place.append(into is not None)
        if into is None:
            return received
        assert (into.shape, into.dtype) == (received.shape, received.dtype)
        into.copy_(received)
        return into


@pytest.mark.parametrize("name", ["1f1b", "hanayo", "zb-v", "chimera", "seq1f1b"])
def test_messages_leave_and_arrive_without_further_copies(name):
    schedule = make(name, **shape_for(name, 4, 5))
    whole = llama(sum(layers_of(schedule)))
    # All micro-batches have the same shape, so every step sends from the same memory.
    batches = [even(5, seed=seed) for seed in range(3)]
    losses, gradients = unsplit(schedule, whole, batches)
    comms: dict[int, DirectComm] = {}

    def connect(comm: ThreadComm) -> DirectComm:
        return comms.setdefault(comm.rank, DirectComm(comm))

    ours, _ = played(schedule, whole, batches, connect=connect)
    assert worst(ours, gradients) < 1e-10
    assert all(found == pytest.approx(losses, abs=1e-12) for found in ours.losses)
    for comm in comms.values():
        # The evaluation at the end is computed, and is not looked at.
        evaluated = forward_messages(schedule, comm.rank, SEND)
        sent = comm.sent[: len(comm.sent) - evaluated]
        step = len(sent) // 3
        assert sent[:step] == sent[step : 2 * step] == sent[2 * step :]
        evaluated = forward_messages(schedule, comm.rank, RECEIVE)
        assert all(comm.in_place[: len(comm.in_place) - evaluated])


def forward_messages(schedule, rank: int, do: int) -> int:
    """The messages of a rank in a step that only evaluates, sent or received."""
    return sum(
        step.do is do and not step.goes_back
        for turn in lane_turns(lower(schedule), rank)
        for step in turn.messages
    )


@pytest.mark.parametrize("messages", [torch.bfloat16, torch.int8])
def test_messages_in_another_type_arrive_in_a_buffer(messages):
    schedule = make("zb-v", ranks=2, microbatches=4)
    whole, batches = llama(schedule.parts), [even(4, seed=seed) for seed in range(2)]
    comms: list[DirectComm] = []

    def connect(comm: ThreadComm) -> DirectComm:
        comms.append(DirectComm(comm))
        return comms[-1]

    options = RunOptions(messages=messages)
    ours, _ = played(schedule, whole, batches, connect=connect, options=options)
    theirs, _ = played(schedule, whole, batches, options=options)
    assert apart(ours, theirs) < 1e-12
    assert not any(comm.in_place[0] for comm in comms)


def even(microbatches: int, seed: int = 0, tokens: int = 6) -> Batch:
    """Micro-batches that are all alike."""
    draw = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randint(0, 61, (2, tokens), generator=draw) for _ in range(microbatches)
    ]
    return batch_of(inputs, [torch.roll(x, -1, 1) for x in inputs])


def test_a_lane_has_one_memory_and_a_recording_for_each_action():
    schedule = make("zb-v", ranks=2, microbatches=4)
    _, tapes = played(schedule, llama(schedule.parts), [even(4)] * 2)
    assert [tape.takes for tape in tapes] == [1, 1]
    assert [tape.recorded for tape in tapes] == [len(lane) for lane in schedule.lanes]
    assert all(tape.rehearsed == 2 for tape in tapes)  # one micro-batch of each stage


class Overwriting(Again):
    """A tape on which the action that made a gradient overwrites it, as a CUDA graph does."""

    replays_memory = True

    def __init__(self, parameters) -> None:
        super().__init__()
        self.parameters = parameters

    def record(self, work, prepare=None):
        before = [p.grad for p in self.parameters]
        first, _ = super().record(work)
        pairs = zip(self.parameters, before, strict=True)
        made = [p for p, grad in pairs if grad is None and p.grad is not None]

        def play() -> None:
            places = [p.grad for p in made]
            for p in made:
                p.grad = None
            result = work()
            for p, place in zip(made, places, strict=True):
                place.copy_(p.grad)
                p.grad = place
            leave_in_place(first, result)

        self.kept = [*getattr(self, "kept", []), first, work]  # their memory stays
        return first, play


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "seq1f1b"])
def test_recordings_overwrite_the_gradients_of_the_step_before(name, to_none):
    """Gradients of an earlier step that were not cleared are added all the same."""
    shape = {"slices": 2} if name == "seq1f1b" else {}
    program = lower(make(name, ranks=1, microbatches=3, **shape))

    def gradients(recorded: bool) -> list[list[Tensor]]:
        model = llama(2)
        tape = Overwriting(list(model.parameters())) if recorded else None
        found = []

        def work(comm):
            stage = {0: split(model, [2])[0]}
            executor = Executor(program, stage, comm, token_loss, tape=tape)
            for seed in range(4):
                executor.step(even(3, seed))
                if seed % 2:
                    found.append([p.grad.clone() for p in model.parameters()])
                    model.zero_grad(set_to_none=to_none)

        run_threads(1, work)
        return found

    for ours, expected in zip(gradients(True), gradients(False), strict=True):
        for one, other in zip(ours, expected, strict=True):
            assert float((one - other).abs().max()) < 1e-12


@pytest.mark.parametrize("name", ["zb-v", "hanayo", "seq1f1b", "skip"])
def test_takes_of_long_lanes_have_the_gradients_of_the_unsplit_model(name, few):
    """A lane of very many actions shares recordings between micro-batches."""
    schedule = make(name, **shape_for(name, 4, 5))
    whole, batches = llama(sum(layers_of(schedule))), [data(5), data(5, seed=1)]
    losses, gradients = unsplit(schedule, whole, batches)
    ours, _ = played(schedule, whole, batches)
    assert worst(ours, gradients) < 1e-10
    assert all(found == pytest.approx(losses, abs=1e-12) for found in ours.losses)


@pytest.mark.parametrize(
    ("name", "takes"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])]
)
def test_a_stage_has_as_many_takes_as_it_has_micro_batches_in_flight(name, takes, few):
    schedule = make(name, ranks=4, microbatches=8)
    _, tapes = played(schedule, llama(4), [even(8)])
    assert [tape.takes for tape in tapes] == takes
    assert [tape.recorded for tape in tapes] == [2 * count for count in takes]
    assert all(tape.rehearsed == 1 for tape in tapes)


def test_a_take_serves_only_micro_batches_that_are_alike():
    schedule = make("1f1b", ranks=1, microbatches=4)
    places = stage_visits(lane_turns(lower(schedule), 0))
    alike = assign_takes(places, dict.fromkeys(places, (1, 7)))
    assert {number for _, number in alike.values()} == {0}
    assert len(set(alike.values())) == 1
    unlike = {(stage, number): (number % 2, 7) for stage, number in places}
    assert len(set(assign_takes(places, unlike).values())) == 2


def test_batches_of_another_shape_and_packed_documents_run_as_without_a_tape():
    schedule = make("zb-v", ranks=2, microbatches=3)
    whole = llama(schedule.parts)
    starts = [torch.tensor([[0, 0, 0, 3, 3, 3]]).expand(2, 6)] * 3
    packed = replace(even(3, 2), starts=tuple(starts))
    batches = [packed, even(3), even(3, 1, tokens=9), even(3, 3)]
    expected = piped(schedule, whole, batches)
    ours, tapes = played(schedule, whole, batches)
    assert apart(ours, expected) < 1e-12
    assert ours.losses == [pytest.approx(found, abs=1e-12) for found in expected.losses]
    assert sum(tape.plays for tape in tapes) == 2 * schedule.actions


@pytest.mark.parametrize("to_none", [True, False])
def test_an_optimizer_moves_the_weights_as_without_a_tape(to_none):
    program = lower(make("1f1b", ranks=1, microbatches=4))

    def train(tape: Again | None) -> list[Tensor]:
        model = llama(2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def work(comm):
            executor = Executor(
                program,
                {0: split(model, [2])[0]},
                comm,
                token_loss,
                tape=tape,
            )
            for seed in range(4):
                for half in range(2):  # accumulated
                    executor.step(even(4, 2 * seed + half))
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)

        run_threads(1, work)
        return [p.detach() for p in model.parameters()]

    for ours, expected in zip(train(Again()), train(None), strict=True):
        assert torch.equal(ours, expected)


def test_a_timed_step_counts_what_is_held():
    schedule = make("1f1b", ranks=4, microbatches=8)
    ours, _ = played(schedule, llama(4), [even(8)], timed=True)
    timeline = ours.results[0].timeline
    assert timeline is not None
    assert [timeline.peak_bytes(rank) for rank in range(4)] == [4, 3, 2, 1]


class Silent(Again):
    """A tape that only counts what it plays, as a probe's state must not change by it."""

    def record(self, work, prepare=None):
        return work(), lambda: setattr(self, "plays", self.plays + 1)


@pytest.mark.parametrize("prefix", [0, 16])
def test_a_probe_times_what_is_recorded(prefix):
    """A whole backward and a split one: F B F I W; the embedding's I leaves nothing to a W."""
    embed, middle, head = split(llama(2), (0, 2, 0))
    tokens, labels = (torch.randint(0, 60, (1, 24)) for _ in range(2))
    hidden = torch.randn(1, 24, next(head.parameters()).shape[-1], dtype=torch.float64)
    for subject, actions in (
        (Subject(embed, tokens), 4),
        (Subject(middle, hidden, layers=2, prefixes=True), 5),
        (Subject(head, hidden, loss=token_loss, labels=labels), 5),
    ):
        tape = Silent()
        times = Probe(subject, tape).times(8, prefix, passes=3)
        assert len(times) == 3
        assert (tape.takes, tape.rehearsed, tape.plays) == (1, actions, 3 * actions)
        gradients = [float(p.grad.abs().max()) for p in subject.module.parameters()]
        assert min(gradients) > 0  # rehearsed, and recorded


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            RuntimeError("not now\nfor a reason"),
            RunError,
            r"B0 cannot be recorded: not now\n  without recordings",
        ),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
    ],  # the worker has words for it
)
def test_what_cannot_be_recorded_is_said(error, kind, words):
    class Refuses(Again):
        def record(self, work, prepare=None):
            if self.recorded == 1:
                raise error
            return super().record(work)

    schedule = make("1f1b", ranks=1, microbatches=4)
    with pytest.raises(kind, match=words):
        piped(schedule, llama(1), [data(4)], each=lambda rank: {"tape": Refuses()})


def test_micro_batches_that_are_cut_differently_have_recordings_of_their_own(few):
    pieces = [MicroBatch((0,), 8, cuts) for cuts in ((0, 3, 8), (0, 5, 8), (0, 3, 8))]
    order = ((Op.F, 0), (Op.F, 1), (Op.B, 1), (Op.B, 0))
    lane = [Action(op, 0, m, part) for m in range(3) for op, part in order]
    schedule, whole = schedule_of([Stage(0, 0)], pieces, [lane]), llama(1)
    tokens = [torch.arange(8 * m, 8 * m + 8)[None] % 11 for m in range(3)]
    batches = [batch_of(tokens, tokens)] * 2
    ours, (tape,) = played(schedule, whole, batches)
    assert apart(ours, piped(schedule, whole, batches)) < 1e-12
    assert tape.takes == 2
