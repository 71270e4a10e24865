"""What a step is said to take: ranks that share processors, the optimizer, and the plan it is said of."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import REGISTRY, Plan, UnitCost, make, simulate
from penstock.cli.run import describe_placement, describe_step, hint
from penstock.config import Config, DataConfig, ModelConfig, RunConfig
from penstock.cost import ModelCost, PausedCost, Profile, Seconds
from penstock.cost.gpus import analytic_profile
from penstock.cost.network import Network
from penstock.cost.placed import PlacedCost
from penstock.cost.profile import (
    REST,
    Point,
    RowProfiles,
    block,
    enlarge,
    send_as,
)
from penstock.errors import ShapeError
from penstock.formats import write_profile
from penstock.formats.profile_json import dump_profile, load_profile
from penstock.ir import Action, MicroBatch, Op, Stage, needs
from penstock.ir.schedule import schedule_of
from penstock.measure import probe as probe_module
from penstock.measure.overhead import empty_schedule, measured_overhead
from penstock.measure.probe import Probe, load_of
from penstock.measure.profile import Setup, measure
from penstock.models import GPTConfig, LlamaConfig, even_partition
from penstock.plan.candidates import Evaluator
from penstock.plan.workload import Workload
from penstock.runtime import spawn
from penstock.runtime.recorder import Clock
from penstock.sim import simulate_in_order, simulate_shared
from penstock.train.after.report import StepKind, Summary, render_report
from penstock.train.before import profile as measuring
from penstock.train.before import start as starting
from penstock.train.before.forecast import (
    PROFILE,
    forecast,
    known_forecast,
    profile_mark,
    profile_run,
)
from penstock.train.before.profile import ProfileRequest, subjects_of
from penstock.train.history import StepRow
from penstock.train.placement import decide_placement
from penstock.train.weights import hold
from penstock.view.numbers import write_time

QUANTUM = 1 / 64


def in_quanta(schedule, cost, processors: int) -> float:
    """The oracle: time goes by in small pieces; in each, all who are ready share the processors."""
    left = {
        action: cost.seconds(schedule, action)
        for lane in schedule.lanes
        for action in lane
    }
    due, done, now = [0] * schedule.ranks, {}, 0.0
    while any(due[rank] < len(lane) for rank, lane in enumerate(schedule.lanes)):
        ready = []
        for rank, lane in enumerate(schedule.lanes):
            if due[rank] < len(lane):
                before = needs(schedule, lane[due[rank]])
                if all(done.get(action, now + 1) <= now for action in before):
                    ready.append(rank)
        speed = min(1.0, processors / len(ready))
        now += QUANTUM
        for rank in ready:
            action = schedule.lanes[rank][due[rank]]
            left[action] -= QUANTUM * speed
            if left[action] <= 1e-9:
                done[action] = now
                due[rank] += 1
    return now


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "hanayo", "zb-h1"])
@pytest.mark.parametrize("processors", [1, 2, 3])
def test_ranks_that_share_processors_take_as_long_as_small_pieces_of_time_say(
    name, processors
):
    schedule = make(name, ranks=4, microbatches=4)
    shared = simulate_shared(schedule, UnitCost(), processors, turn=QUANTUM).makespan
    assert shared == pytest.approx(
        in_quanta(schedule, UnitCost(), processors), abs=QUANTUM * schedule.actions / 4
    )


def test_who_waits_for_a_processor_is_idle_and_a_turn_says_for_how_long():
    schedule = schedule_of(
        [Stage(0, 0), Stage(1, 0)],
        [MicroBatch((0,)), MicroBatch((1,))],
        [[Action(op, rank, rank) for op in (Op.F, Op.B)] for rank in range(2)],
    )
    found = [
        {
            str(action): (start, end)
            for _, action, start, end in simulate_shared(
                schedule, UnitCost(), 1, turn
            ).spans()
        }
        for turn in (9, 1.5)
    ]
    assert found[0] == {"0F0": (0, 1), "0B0": (1, 3), "1F1": (3, 4), "1B1": (4, 6)}
    assert found[1] == {
        "0F0": (0, 1),
        "0B0": (1, 4.5),
        "1F1": (1.5, 2.5),
        "1B1": (2.5, 6),
    }


class SlowHandoverCost(UnitCost):
    """A processor loses half a unit when it goes to another rank."""

    @property
    def handover(self) -> float:
        return 0.5


def test_a_processor_loses_time_when_it_goes_to_another_rank():
    schedule = make("gpipe", ranks=2, microbatches=2)
    spans = simulate_shared(schedule, SlowHandoverCost(), 1, 9).spans()
    found = {str(action): (start, end) for _, action, start, end in spans}
    assert found["0F1"] == (1, 2)  # the same rank goes on
    assert found["1F0"] == (2.5, 3.5)
    assert found["1B1"] == (6.5, 8.5)
    assert found["0B0"] == (9, 11)


def test_ranks_that_take_turns_on_a_gpu_are_slower_than_one_rank():
    sizes = ModelConfig(
        layers=12,
        hidden_size=1024,
        heads=16,
        kv_heads=4,
        intermediate_size=2752,
        vocab_size=256,
    )
    profile = analytic_profile(sizes, 1024, rows=16, gpu="h200", ranks=2)
    evaluator = Evaluator(PlacedCost(profile, 1024), processors=1)
    one, two = (make("1f1b", ranks=ranks, microbatches=4) for ranks in (1, 2))
    alone = evaluator.step(one, evaluator.timeline(one).makespan)
    assert evaluator.step(two, evaluator.timeline(two).makespan) > 1.03 * alone
    assert replace(profile, device=(("device", "cpu"),)).handover == 0


@pytest.mark.parametrize("turn", [0.1, 9.0])
def test_a_pause_takes_the_processor_but_is_no_work(turn):
    schedule = make("gpipe", ranks=2, microbatches=2)
    plain, paused = (
        simulate_shared(schedule, PausedCost(UnitCost(), gap, gap, gap), 1, turn)
        for gap in (0.0, 0.5)
    )
    assert plain.makespan == pytest.approx(12)
    # None after the last action of a rank.
    assert paused.makespan == pytest.approx(12 + 6 * 0.5)
    assert [end - start >= 1 - 1e-9 for _, _, start, end in paused.spans()] == [
        True
    ] * 8


@given(
    st.sampled_from([name for name in REGISTRY if name != "chimera"]),
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(1, 5),
    st.floats(0, 0.3),
    st.sampled_from([0.1, 0.7, 5.0]),
)
@settings(max_examples=40)
def test_sharing_never_helps_and_no_processor_does_more_than_it_can(
    name, ranks, microbatches, processors, comm, turn
):
    schedule, cost = (
        make(name, ranks=ranks, microbatches=microbatches),
        UnitCost(comm=comm),
    )
    alone, shared = (
        simulate(schedule, cost),
        simulate_shared(schedule, cost, processors, turn),
    )
    work = sum(
        cost.seconds(schedule, action) for lane in schedule.lanes for action in lane
    )
    assert shared.makespan >= max(alone.makespan, work / processors) - 1e-9
    for _, action, start, end in shared.spans():
        assert end - start >= cost.seconds(schedule, action) - 1e-9
    if processors == 1 and not comm:
        assert shared.makespan == pytest.approx(work)
    spans = {action: (start, end) for _, action, start, end in shared.spans()}
    for action, (start, _) in spans.items():
        assert all(
            spans[before][1] <= start + 1e-9 for before in needs(schedule, action)
        )
    if processors >= ranks:
        assert shared.makespan == alone.makespan


# ---------------------------------------------------------------- a step
CONFIG = Config(
    ModelConfig(layers=4),
    DataConfig(seq_len=32, global_batch=16),
    run=RunConfig(accumulate=2),
)
PLAN = Plan(make("1f1b", ranks=2, microbatches=8), "1f1b", (2, 2))


def profile_of(turn: float = 0.0) -> Profile:
    """A layer takes 1 and 2 seconds, its optimizer 0.5; a head 0.5 and 1."""
    layer = block(
        [Point(32, 0, 1.0, 2.0, 1.0, 1.0)], held=2.0, weights=10.0, update=0.5
    )
    nothing = block([Point(32, 0, 1e-9, 1e-9, 1e-9, 0.0)])
    head = block([Point(32, 0, 0.5, 1.0, 0.5, 0.5)])
    return Profile(
        4, 32, 1, 0.0, nothing, layer, head, device=(("ranks", 2),), turn=turn
    )


def test_a_step_is_its_passes_and_the_optimizer():
    found = forecast(CONFIG, PLAN, profile_of(), 2)
    cost = profile_of().cost((2, 2), tokens=32)
    assert isinstance(cost, ModelCost)
    assert found.timeline.makespan == pytest.approx(
        simulate(PLAN.schedule, cost).makespan
    )
    assert found.optimizer == pytest.approx(1.0)
    assert found.seconds == pytest.approx(2 * found.timeline.makespan + 1.0)
    assert found.speed == pytest.approx(16 * 32 / found.seconds)
    shared = forecast(CONFIG, PLAN, profile_of(), 1)
    assert shared.optimizer == pytest.approx(2.0)
    assert shared.timeline.makespan == pytest.approx(8 * (4 * 3 + 1.5), rel=1e-6)


def test_messages_in_bfloat16_take_half_as_long_on_their_way():
    """The hidden state on a rank stays as large as it is; so does the input that a recomputed part keeps."""
    slow = replace(profile_of(), message=8.0, network=Network(0.0, 64.0))
    halved = replace(CONFIG, run=replace(CONFIG.run, comm_dtype="bfloat16"))
    whole, half = (forecast(config, PLAN, slow, 2) for config in (CONFIG, halved))
    ways = [found.timeline.arrived - found.timeline.sent for found in (whole, half)]
    assert np.nanmax(ways[0]) == pytest.approx(32 * 8 / 64)
    assert np.nanmax(ways[1]) == pytest.approx(32 * 8 / 64 / 2)
    assert half.seconds < whole.seconds
    kept = slow.cost((2, 2), tokens=32, recompute=(0, 1))
    assert kept.parts[0].left == 8.0
    already = replace(slow, device=(("dtype", "bfloat16"), ("messages", "bfloat16")))
    assert already.sent == 8.0
    assert send_as(slow, "int8").sent == 8.0 / 4 + 4 * slow.rows
    assert profile_mark(CONFIG, PLAN) != profile_mark(halved, PLAN)


def test_over_nccl_the_messages_of_a_rank_wait_for_each_other():
    at_once = replace(profile_of(), network=Network(0.5, serial=True))
    nccl = replace(at_once, network=replace(at_once.network, channels=1))
    found = forecast(CONFIG, PLAN, nccl, 2).timeline
    cost = at_once.cost((2, 2), tokens=32)
    assert found.makespan == simulate_in_order(PLAN.schedule, cost).makespan
    assert found.makespan > forecast(CONFIG, PLAN, at_once, 2).timeline.makespan


def test_a_step_ends_with_its_sums_as_fast_as_all_ranks_sum():
    copies = make("1f1b", ranks=2, microbatches=8, copies=2)
    plan = Plan(copies, "1f1b copies=2", (2, 2))
    alike = replace(profile_of(), network=Network(0.5, 100.0))
    slow = replace(alike, network=replace(alike.network, sum_bandwidth=2.0))
    found, quick = (forecast(CONFIG, plan, one, 4) for one in (slow, alike))
    # The gradients of two layers are a quarter of their weights: 5 bytes.
    assert found.seconds - quick.seconds == pytest.approx(5 / 2 - 5 / 100)
    assert found.timeline.makespan == max(one.end for one in found.timeline.sums)


def test_what_an_action_takes_beside_its_op_is_counted_between_two_actions():
    plan = Plan(make("gpipe", ranks=1, microbatches=3), "gpipe", (4,))
    plain, more = (
        forecast(CONFIG, plan, profile_of(turn), 1).timeline for turn in (0.0, 0.25)
    )
    assert more.makespan == pytest.approx(plain.makespan + 5 * 0.25)
    assert more.busy == pytest.approx(plain.busy)
    assert Seconds(base=2.25) == profile_of(0.25).part(2, False, False).F


def test_a_sample_of_a_large_model_is_taken_in_proportion():
    plan, large = (
        Plan(make("1f1b", ranks=2, microbatches=2), "1f1b", (2, 2)),
        enlarge(profile_of(), 4, 128),
    )
    more = replace(CONFIG, data=replace(CONFIG.data, seq_len=128))
    assert (large.rows, large.tokens) == (4, 128)
    ours, theirs = (
        forecast(more, plan, large, 2).timeline,
        forecast(CONFIG, plan, profile_of(), 2).timeline,
    )
    assert ours.makespan == pytest.approx(16 * theirs.makespan)
    assert ours.peak_activations.max() == pytest.approx(
        16 * theirs.peak_activations.max()
    )
    assert ours.weights.tolist() == theirs.weights.tolist()
    with pytest.raises(
        ShapeError, match="has sequences of 32 tokens, and 100 is not a multiple"
    ):
        enlarge(profile_of(), 1, 100)


def test_a_forecast_is_found_again_unless_it_is_of_other_micro_batches(tmp_path):
    assert known_forecast(tmp_path, CONFIG, PLAN) is None
    profile = profile_of(0.1)
    write_profile(profile, tmp_path / PROFILE)
    assert known_forecast(tmp_path, CONFIG, PLAN) is None  # nobody knows of what
    write_profile(
        replace(profile, device=(*profile.device, ("run", profile_mark(CONFIG, PLAN)))),
        tmp_path / PROFILE,
    )
    found = known_forecast(tmp_path, CONFIG, PLAN)
    assert found is not None
    assert found.seconds == pytest.approx(forecast(CONFIG, PLAN, profile, 2).seconds)
    longer = replace(CONFIG, run=replace(CONFIG.run, steps=1000, seed=3))
    assert known_forecast(tmp_path, longer, PLAN) is not None
    for section, change in {
        "data": {"global_batch": 64},
        "run": {"cuda_graphs": "true"},
        "model": {"hidden_size": 8},
    }.items():
        other = replace(
            CONFIG, **{section: replace(getattr(CONFIG, section), **change)}
        )
        assert known_forecast(tmp_path, other, PLAN) is None
    sliced = Plan(make("seq1f1b", ranks=2, microbatches=8, slices=2), "seq1f1b", (2, 2))
    assert known_forecast(tmp_path, CONFIG, sliced) is None


def test_a_report_lays_the_forecast_over_what_was_measured_and_names_the_largest_difference():
    plan = Plan(
        make("1f1b", ranks=2, microbatches=8), "1f1b", (2, 2), (("chosen", "by hand"),)
    )
    made = forecast(CONFIG, plan, profile_of(), 2)
    slow = made.timeline.end.copy()
    slow[3] += 1.5
    measured = replace(
        made.timeline, end=slow, activations=made.timeline.activations * 0 + 1
    )
    rows = tuple(StepRow(step, 1.0, 1.0, 0.1, 2.0, 10, 10, 0.1) for step in range(1, 6))
    kind = StepKind("step", rows, made, None, 5, measured)
    found = Summary(rows, plan, (kind,))
    ((predicted, _),) = kind.timelines
    assert predicted.makespan == made.timeline.makespan
    assert predicted.peak_bytes(0) == measured.peak_bytes(0)  # counts, not bytes
    page = render_report(found, "a run")
    for words in (
        f"{plan.schedule.table.action(3)} on rank 0: predicted 2 s, took 3.5 s",
        "chosen: by hand",
        "rank 1: parts 1, layers 2; predicted 20 B of weights",
        "Where the time went",
    ):
        assert words in page, words


def test_pieces_are_timed_by_as_many_processes_as_will_run(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    on_cores = replace(CONFIG, run=RunConfig(device="cpu"))
    demo = decide_placement(on_cores, 4)
    assert (demo.processors, demo.measurers) == (2, 4)
    # With four on each core, caches are as cold as they get.
    assert decide_placement(on_cores, 64).measurers == 8
    asked = []

    def note(request, rows, ranks, *_):
        asked.append(ranks)
        return RowProfiles((profile_of(),))

    monkeypatch.setattr(measuring, "profile_rows", note)
    monkeypatch.setattr(starting, "profile_rows", note)
    four = Plan(make("1f1b", ranks=4, microbatches=8), "1f1b", (1, 1, 1, 1))
    sizes = ModelConfig(
        layers=4,
        hidden_size=16,
        heads=2,
        kv_heads=2,
        intermediate_size=24,
        vocab_size=256,
    )
    config = replace(on_cores, model=sizes)
    profile_run(config, four, demo)
    starting.measure_workload(Workload(4, 32, 8, devices=4, config=config), demo)
    assert asked == [4, 4]


def test_processes_that_time_their_own_pieces_are_no_load():
    sizes = LlamaConfig(32, 16, 1, 4, 4, 24)
    layer = subjects_of(ProfileRequest(sizes, 16)).layer
    for crowd, load in ((1.0, 3.0), (2.0, 1.5), (4.0, 1.0)):
        probe = Probe(layer, crowd=crowd)
        probe.processor_seconds, probe.elapsed_seconds = 1.0, 3.0
        assert probe.load == load
        assert load_of([probe], [(0.5, 2.5)]) == 1.0


def test_a_forecast_ranges_over_the_rounds_of_its_measurement(monkeypatch):
    """Every other round takes half as long again; then what is predicted lies between them."""
    real = Probe.times
    visits = []

    def times(probe, *where):
        taken = real(probe, *where)
        visits.append(probe)
        # Each piece has one slice: its first visit warms up.
        slow = visits.count(probe) % 2
        return [type(one)(*[(1.5 if slow else 1.0) * 1e-3] * 4) for one in taken]

    monkeypatch.setattr(Probe, "times", times)
    sizes = LlamaConfig(32, 16, 4, 4, 4, 24)
    monkeypatch.setattr(probe_module, "has_thread_clock", lambda: False)  # no load
    found = measure(
        subjects_of(ProfileRequest(sizes, 32)),
        Setup(rounds=4, where=((32, 0),), middle=fmean),
    )
    low, high = found.spread
    assert low < 1 < high
    assert high / low == pytest.approx(1.5, rel=0.05)
    made = forecast(CONFIG, PLAN, load_profile(dump_profile(found)), 2)
    assert made.range == pytest.approx((low * made.seconds, high * made.seconds))
    words = describe_step(made, CONFIG)
    for seconds in made.range:
        assert write_time(seconds, digits=3) in words
    kind = StepKind(
        "step", (StepRow(5, 1.0, 1.0, 0.1, 2.0, 10, 10, 0.1),), made, None, 5
    )
    assert write_time(made.range[1], digits=3) in kind.text


def test_a_computed_profile_ranges_over_the_error_of_its_formulas():
    sizes = ModelConfig(
        layers=4,
        hidden_size=256,
        heads=4,
        kv_heads=4,
        intermediate_size=704,
        vocab_size=512,
    )
    for gpu, error in (("h200", 0.13), ("h100", 0.3)):
        low, high = analytic_profile(sizes, 64, gpu=gpu).spread
        assert (low, high) == pytest.approx((1 - error, 1 + error))


def test_a_step_takes_more_than_its_actions_and_updates():
    plan = Plan(make("1f1b", ranks=4, microbatches=8), "1f1b", (1, 1, 1, 1))
    more = replace(profile_of(), device=((REST, 0.5),))
    plain, rest = (forecast(CONFIG, plan, one, 2) for one in (profile_of(), more))
    # Four ranks do it on two processors.
    assert rest.seconds - plain.seconds == pytest.approx(4 * 0.5 / 2)


def test_the_host_reads_no_time_before_all_actions_of_a_gpu_are_launched(monkeypatch):
    """So that the GPU works without a rest, as in a step."""
    sizes = LlamaConfig(32, 16, 1, 4, 4, 24)
    probe = Probe(subjects_of(ProfileRequest(sizes, 16)).layer)
    seen = []
    real = Clock.seconds

    def read(clock, moments):
        seen.append(len(moments))
        return real(clock, moments)

    monkeypatch.setattr(Clock, "seconds", read)
    times = probe.times_in_a_row(16, 0, 3)
    # The begins and ends of F, B, the F before I, I and W of three passes, all at once.
    assert seen == [30]
    assert len(times) == 3
    assert all(one.F > 0 and one.B > 0 for one in times)


def test_a_machine_has_as_many_processors_as_its_threads_leave(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    found = []
    for threads in (0, 1, 4, 16):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        config = replace(CONFIG, run=RunConfig(device="cpu"))
        found.append(decide_placement(config, 4))
    assert [(one.processors, one.threads) for one in found] == [
        (4, 2),
        (4, 1),
        (2, 4),
        (1, 16),
    ]


@pytest.fixture
def gpus(monkeypatch):
    """So many GPUs, of which torch only tells."""

    def there(count: int, share: str = "") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", share)
        monkeypatch.delenv("PENSTOCK_TESTBED_WORKERS", raising=False)

    return there


@pytest.mark.parametrize(
    ("count", "share", "at_once", "words"),
    [
        (
            1,
            "",
            1,
            "4 processes on 1 GPU, penstock_ipc, in turns (side by side with penstock lab testbed --workers 4)",
        ),
        (1, "25", 4, "4 processes on 1 GPU, penstock_ipc, side by side"),
        (
            1,
            "50",
            2,
            "4 processes on 1 GPU, penstock_ipc, in turns (side by side with penstock lab testbed --workers 4)",
        ),
        (2, "50", 4, "4 processes on 2 GPUs, penstock_ipc, side by side"),
        (4, "", 4, "4 processes on 4 GPUs, NCCL"),
        (
            1,
            "rubbish",
            1,
            "4 processes on 1 GPU, penstock_ipc, in turns (side by side with penstock lab testbed --workers 4)",
        ),
    ],
)
def test_ranks_of_a_testbed_compute_side_by_side(gpus, count, share, at_once, words):
    gpus(count, share)
    placement = decide_placement(Config(), 4)
    assert placement.processors == at_once
    assert describe_placement(placement) == words


def test_launches_that_take_longer_than_the_work_are_told():
    profile = replace(profile_of(), device=(("device", "cuda"), ("launch", 1.9)))
    found = forecast(CONFIG, PLAN, profile, 2)
    words = "a step would be 1.9 times as fast with --set run.cuda_graphs=true"
    plain = replace(CONFIG, run=replace(CONFIG.run, cuda_graphs="false"))
    assert words in hint(found, plain)
    assert hint(found, CONFIG) == ""
    assert (
        hint(found, replace(plain, data=replace(plain.data, document_mask=True))) == ""
    )
    assert hint(forecast(CONFIG, PLAN, profile_of(), 2), plain) == ""


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [LlamaConfig(32, 16, 2, 4, 4, 24), GPTConfig(32, 16, 2, 4, 24, positions=32)],
)
def test_the_layer_that_is_timed_has_the_mask_of_the_data(sizes, separate, monkeypatch):
    masks = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **more: (masks.append(more["attn_mask"]), real(*args, **more))[1],
    )
    request = ProfileRequest(
        sizes, 32, 2, separate=separate, where=((32, 0),), rounds=1, mean=True
    )
    found = measure(
        subjects_of(request), Setup(rounds=1, where=request.where, middle=fmean)
    )
    assert found.layer.points[0].F > 0
    whole = [
        mask for mask in masks if mask is None or mask.shape[-1] == mask.shape[-2] == 32
    ]
    assert whole[-1] is None if not separate else whole[-1].shape == (2, 1, 32, 32)


def test_hollow_stages_run_and_cost_something():
    assert empty_schedule(3).actions == 48
    found = spawn(2, measured_overhead, 1, 16, 8)
    assert found[0] == found[1]
    assert found[0].action + found[0].step > 1e-6


# ---------------------------------------------------------------- weights that are held once
@pytest.mark.parametrize(
    "sizes",
    [
        GPTConfig(300, 16, 4, 2, 32, positions=16, tied=True),
        LlamaConfig(300, 16, 4, 2, 2, 32, tied=True),
    ],
    ids=["gpt", "llama"],
)
def test_the_forecast_counts_a_tied_weight_as_often_as_ranks_hold_it(sizes):
    measured = measure(
        subjects_of(ProfileRequest(sizes, 16)), Setup(rounds=1, where=((16, 0),))
    )
    profile = load_profile(dump_profile(measured))
    for name, ranks in (("hanayo", 2), ("1f1b", 2), ("gpipe", 1), ("skip", 3)):
        schedule = make(name, microbatches=2, ranks=ranks)
        partition = even_partition(4, schedule.parts)
        predicted = simulate(
            schedule, PausedCost(profile.cost(partition, tokens=16))
        ).weights
        for rank, weights in enumerate(predicted.tolist()):
            numbers = sum(
                one.numel()
                for one in hold(sizes, schedule, partition, rank).parameters.values()
            )
            # Weights, gradients, and two means of AdamW.
            assert weights == pytest.approx(16 * numbers, rel=0.02)
