"""Ranks as processes: exact gradients, and a clear error when a rank hangs, dies or gets other data."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import penstock
import process_workers as workers
from commands import free_port, torchrun
from forked import Command
from machines import two_machines
from penstock import make
from penstock.errors import PeerLostError, RunError, StuckError
from penstock.runtime import ProcessComm
from penstock.runtime.comm import process
from penstock.runtime.process import launch, watchdog
from penstock.runtime.process import watchdog as board
from penstock.runtime.process.launch import init, spawn, worker_outcomes
from penstock.runtime.process.watchdog import (
    Board,
    Failure,
    RankState,
    lost_failure,
    stuck_failure,
)

SCRIPT = Path(workers.__file__)
TWO = [
    ("1f1b", {}),
    ("interleaved", {}),
    ("zb-v", {}),
    ("hanayo", {"waves": 2}),
    ("chimera", {}),
    ("skip", {}),
]
FOUR = [
    ("1f1b", {}),
    ("zb-v", {}),
    ("hanayo", {"waves": 2}),
    ("chimera", {}),
    ("skip", {}),
]
HALVES = [("1f1b", {"copies": 2}), ("hanayo", {"waves": 2, "split": 1, "copies": 2})]


def shapes(cases, ranks, microbatches):
    return [
        (name, {"ranks": ranks, "microbatches": microbatches, **shape})
        for name, shape in cases
    ]


# ---------------------------------------------------------------- as it should be
@pytest.mark.numerics
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, shapes(TWO, 2, 4)),
        (4, shapes(FOUR, 4, 4) + shapes(HALVES, 2, 2) + shapes(FOUR[:1], 4, 1)),
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_gradients_through_processes_equal_those_of_the_unsplit_model(ranks, cases):
    for results in spawn(ranks, workers.compare, cases):
        assert len(results) == len(cases)
        for case, wrong_gradient, wrong_loss in results:
            assert wrong_gradient < 1e-13, case
            assert wrong_loss < 1e-13, case


def test_tensors_of_any_layout_arrive_unchanged():
    for result in spawn(2, workers.talk):
        assert result["got"] == [[[0, 3], [1, 4], [2, 5]], [], [[1]]]
        assert result["summed"] == [[0, 0, 0], [3, 3, 3]]


def test_all_ranks_prepare_the_same_groups_and_members_use_them():
    sums, errors = zip(*spawn(3, workers.group), strict=True)
    assert list(sums) == [[4, 1, 6], [2, 5, 6], [4, 5, 6]]
    for rank, (unmade, unlike) in enumerate(errors):
        assert (
            unmade == "the group of ranks (7, 8) does not exist yet: "
            "all ranks must first call comm.prepare(groups_of(schedule))"
        )
        assert unlike.startswith(
            f"the ranks prepare different groups; rank {rank} prepares [("
        )


@pytest.mark.skipif(sys.platform != "linux", reason="the test looks into /proc")
def test_threads_that_need_python_end_before_it_does():
    """They drop the tensors of a sum later than the sum ends; Python would abort the process."""
    for before, after in spawn(2, workers.leave):
        assert before
        assert not after


def test_nothing_that_arrives_is_unpickled():
    for module in (process, watchdog, board):
        text = Path(module.__file__).read_text()
        assert "_object" not in text
        assert not re.search(
            r"^\s*(import|from) (pickle|marshal)|\beval\(|\bexec\(|torch\.load",
            text,
            re.M,
        )


# ---------------------------------------------------------------- scripts
def environment(**more):
    source = str(Path(penstock.__file__).parents[1])
    return os.environ | {"PYTHONPATH": source, "GLOO_SOCKET_IFNAME": "lo"} | more


def places(ranks):
    """What a launcher would put into the environment of each rank."""
    same = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [
        same | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
    ]


def test_ranks_on_two_machines_train_together_under_torchrun(tmp_path):
    with two_machines() as machines:
        leader = ["--master-addr", machines[0][2], "--master-port", "29555"]
        started = []
        for number, (name, card, _) in enumerate(machines):
            node = f"--nnodes 2 --node-rank {number} --nproc-per-node 1".split()
            words = [*node, *leader, str(SCRIPT), "well"]
            env = environment(GLOO_SOCKET_IFNAME=card)
            started.append(torchrun(tmp_path, words, env, network=name))
        try:
            said = [one.communicate(timeout=600) for one in started]
        finally:
            for one in started:
                one.kill()
    assert [one.returncode for one in started] == [0, 0], said
    losses = re.findall(
        r"rank \d of 2 on gloo: (\[.*\])", "".join(out for out, _ in said)
    )
    assert len(losses) == 2
    assert len(set(losses)) == 1


def test_scripts_run_under_plain_torchrun_and_end_when_one_is_killed(tmp_path):
    words = ["--standalone", "--nproc-per-node", "2", str(SCRIPT), "well"]
    started = [
        torchrun(tmp_path, words, environment()),
        *(
            Command(tmp_path, ["kill", "1"], environment(**place), script=SCRIPT)
            for place in places(2)
        ),
    ]
    try:
        (said, errors), (_, hurt), _ = (one.communicate(timeout=600) for one in started)
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0, 1, -signal.SIGKILL], errors
    losses = re.findall(r"rank \d of 2 on gloo: (\[.*\])", said)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert re.search(
        r"PeerLostError: rank 0 waits at 0B\d .* from rank 1; rank 1 is lost, last seen at 1F2$",
        hurt,
        re.M,
    )


# ---------------------------------------------------------------- ranks that go wrong, without a launcher's help
@dataclass
class End:
    code: int | None
    text: str


def train(folder, ranks, name, culprit):
    """How each rank ends, and what it says; a stopped one is killed once the others have ended, late ones too."""
    context = launch.process_context()
    files = [folder / f"{name} {culprit} {rank}" for rank in range(ranks)]
    processes = [
        context.Process(target=workers.train_as, args=(place, str(file), name, culprit))
        for place, file in zip(places(ranks), files, strict=True)
    ]
    for process_ in processes:
        process_.start()
    for rank, process_ in enumerate(processes):
        if (name, rank) != ("stop", culprit):
            process_.join(280)
    for process_ in processes:
        process_.kill()
        process_.join()
    return [End(p.exitcode, files[r].read_text()) for r, p in enumerate(processes)]


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """The runs that take their time, side by side."""
    folder = tmp_path_factory.mktemp("ends")
    runs = {"sleep": (3, "sleep", 1), "deaf": (2, "deaf", 1), "stop": (3, "stop", 1)}
    with ThreadPoolExecutor() as pool:
        return dict(
            zip(
                runs,
                pool.map(lambda run: train(folder, *run), runs.values()),
                strict=True,
            )
        )


def test_a_stuck_rank_ends_all_ranks_with_the_same_error(slow):
    head = slow["sleep"][0].text.split("StuckError: ")[1].splitlines()[0]
    assert re.fullmatch(
        r"rank [02] waits at (0B\d for 1B\d|2F2 for 1F2) from rank 1; rank 1 is at 1F2",
        head,
    )
    for end in slow["sleep"]:
        assert end.code == 1
        assert f"StuckError: {head}\n" in end.text
        for line in (
            "rank 0 waits at 0B",
            "rank 1 is at 1F2\n",
            "rank 2 waits at 2F2 for 1F2 from rank 1\n",
        ):
            assert f"\n  {line}" in end.text
    assert "in sleep\n" in slow["sleep"][1].text  # where it slept


def test_a_stuck_rank_that_cannot_be_interrupted_is_ended(slow):
    for end in slow["deaf"]:
        assert end.code == 1
        assert re.search(
            r"StuckError: rank 0 waits at 0B(\d) for 1B\1 from rank 1; rank 1 is at 1F2$",
            end.text,
            re.M,
        )
    assert "in sleep_deaf" in slow["deaf"][1].text  # where it sleeps still


def test_a_silent_rank_ends_the_others(slow):
    first, _, third = slow["stop"]
    for end in (first, third):
        assert end.code == 1
        assert re.search(
            r"PeerLostError: .*rank 1 is lost, last seen at 1F2$", end.text, re.M
        )


@pytest.mark.parametrize(("ranks", "culprit"), [(4, 3), (3, 0)])
def test_a_killed_rank_ends_the_others_and_is_named(tmp_path, ranks, culprit):
    ends = train(tmp_path, ranks, "kill", culprit)
    dead = ends.pop(culprit)
    assert dead.code == -signal.SIGKILL
    for end in ends:
        assert end.code == 1
        # Whoever loses patience, after 300 seconds, ends with a StuckError instead.
        assert re.search(rf"PeerLostError: .*rank {culprit}\b.* is lost", end.text)
        assert (
            culprit == 0
            or "waits at 2B2 for 3B2 from rank 3; rank 3 is lost, last seen at 3F2"
            in end.text
        )


def test_a_failed_rank_ends_the_others(tmp_path):
    *others, failed = train(tmp_path, 3, "raise", 2)
    assert failed.code == 1
    assert "IndexError: out of cheese" in failed.text
    for end in others:
        assert end.code == 1
        assert (
            "PeerLostError: rank 2 has failed at 2F2: IndexError: out of cheese"
            in end.text
        )


# ---------------------------------------------------------------- spawned workers that go wrong
@pytest.mark.parametrize("rows", [(1, 2), (2, 1)])
def test_a_tensor_of_another_size_raises_an_error_that_names_both_sizes(rows):
    sent, due = rows
    with pytest.raises(
        RunError,
        match=rf"at 1F0 for float64 \({due}, 5, 8\) from rank 0, .* sent float64 \({sent}, 5, 8",
    ):
        spawn(2, workers.mismatch, rows, patience=60.0)


def test_the_preparation_of_rank_0_may_take_longer_than_the_patience(tmp_path):
    assert spawn(2, workers.prepare, str(tmp_path), patience=2.0) == [True, True]


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere workers are new processes"
)
def test_the_fork_server_ignores_ctrl_c_even_while_it_loads(
    tmp_path,
):
    (tmp_path / "loaded.py").write_text(
        "import os, signal; from pathlib import Path\n"
        "Path('told').write_text(f'{signal.getsignal(signal.SIGINT)!r} {os.environ[\"TORCH_CPP_LOG_LEVEL\"]}')\n"
    )
    code = (
        "import signal, time; from pathlib import Path; from penstock.runtime.process.launch import serve_forks\n"
        "serve_forks(['loaded'])\n"
        "while not Path('told').exists(): time.sleep(0.05)\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, timeout=600
    )
    assert "SIG_IGN" in (tmp_path / "told").read_text()
    assert "ERROR" in (tmp_path / "told").read_text()


def test_a_failed_worker_raises_an_error_with_its_text():
    with pytest.raises(
        RunError, match=r"rank 1 has failed: ValueError: the cat is on the keyboard"
    ) as caught:
        spawn(2, workers.fail, "raise", patience=30.0)
    assert "process_workers.py" in str(caught.value)


def test_every_worker_has_an_outcome_even_a_killed_one():
    first, second, third = worker_outcomes(3, workers.fail, "kill", patience=30.0)
    assert (first.error, third.error) == ("PeerLostError", "PeerLostError")
    assert str(second) == "rank 1 was killed by SIGKILL"
    assert [first.code, second.code, third.code] == [1, -signal.SIGKILL, 1]


def alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_in(folder, count):
    end = time.monotonic() + 600
    while time.monotonic() < end:
        texts = [file.read_text() for file in folder.iterdir()]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.05)
    raise AssertionError("the workers did not start")


def test_a_worker_that_is_killed_while_it_reports_has_an_outcome():
    found = worker_outcomes(2, workers.die_while_reporting, patience=30.0)
    assert [str(one) for one in found[1:]] == ["rank 1 was killed by SIGKILL"]
    assert not found[0].error


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_no_worker_outlives_the_caller(tmp_path):
    caller = launch.process_context().Process(
        target=workers.call_sleepers, args=(str(tmp_path),)
    )
    caller.start()
    sleeping = pids_in(tmp_path, 2)
    assert all(map(alive, sleeping))
    caller.kill()
    caller.join()
    end = time.monotonic() + 120
    while any(map(alive, sleeping)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, sleeping))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_workers_that_do_not_end_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SECONDS_TO_REPORT", 1.0)
    found = worker_outcomes(2, workers.sleep_or_raise, str(tmp_path), patience=30.0)
    assert [str(outcome).splitlines()[0] for outcome in found] == [
        "rank 0 had to be ended",
        "rank 1 has failed: ValueError: awake",
    ]
    assert not any(map(alive, pids_in(tmp_path, 2)))


# ---------------------------------------------------------------- in this process
@pytest.fixture
def alone():
    """A process group of this process alone."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield ProcessComm(patience=20.0)
    dist.destroy_process_group()


def report(text):
    """Report a failure as another rank would."""
    later = Board(dist.distributed_c10d._get_default_store().clone(), 1, 2)
    later.fail(Failure("StuckError", text))


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="interrupts the main thread",
)
def test_a_busy_rank_is_interrupted_and_raises_what_another_has_reported(
    alone, monkeypatch
):
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.4)
    schedule = make("1f1b", ranks=1, microbatches=1)
    executor = workers.executor_of(schedule, alone, workers.model_of(1))
    slept = False
    with (  # noqa: PT012
        pytest.raises(StuckError, match="rank 7 waits at 7B0"),
        watchdog.watching(executor),
    ):
        executor.step(workers.batch_for(schedule))
        report("rank 7 waits at 7B0")
        time.sleep(600)
        slept = True
    assert not slept
    assert alone.guard is None
    assert signal.getsignal(watchdog.ALARM_SIGNAL) is signal.SIG_DFL
    with watchdog.watching(executor):  # a new board: the old failure is forgotten
        executor.step(workers.batch_for(schedule))


def test_watching_a_step_costs_almost_nothing(alone):
    schedule = make("1f1b", ranks=1, microbatches=4)
    executor = workers.executor_of(schedule, alone, workers.model_of(1))
    dog = watchdog.Watchdog(executor, alone)
    begin = time.process_time()  # not what others do on this machine
    for _ in range(100):
        assert dog.look() is None
    assert (time.process_time() - begin) / 100 < watchdog.TICK_SECONDS / 25


def test_without_a_launcher_init_says_what_is_missing(monkeypatch):
    for name in launch.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        RunError,
        match="the environment does not set WORLD_SIZE, MASTER_ADDR, MASTER_PORT; "
        "start the program with torchrun",
    ):
        init()


@pytest.mark.parametrize(
    ("rank", "words"), [("0", "1/2 clients joined"), ("1", "timed out .* to connect")]
)
def test_a_rank_that_meets_nobody_says_where_it_waited(monkeypatch, rank, words):
    """Rank 0 keeps the store and waits for the others; rank 1 finds nobody there."""
    port = str(free_port())
    values = (rank, "2", "127.0.0.1", port)
    for name, value in zip(launch.LAUNCHER_VARIABLES, values, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "TORCH_EXTRA_SECONDS", 0.5)
    with pytest.raises(PeerLostError) as lost:
        init(patience=0.5)
    first, hint = str(lost.value).split("\n")
    where = f"rank {rank} of 2 cannot meet the others at 127.0.0.1, port {port}: "
    assert re.match(f"{where}.*{words}", first)
    assert "MASTER_ADDR must name the machine of rank 0" in hint


# ---------------------------------------------------------------- words
def waits(at, peer, kind="receive"):
    return RankState(
        1, at, kind, f"for {kind} {peer}", (peer,) if isinstance(peer, int) else peer
    )


def test_the_text_of_a_stuck_pipeline_starts_at_the_end_of_the_chain():
    states = {
        0: waits("0B0", 1),
        1: waits("1B0", 2),
        2: RankState(9, "2F5"),
        3: waits("3F5", 2),
    }
    head, *rest = stuck_failure(0, states, 1.0).text.splitlines()
    assert head == "rank 1 waits at 1B0 for receive 2; rank 2 is at 2F5"
    assert [line.split()[:2] for line in rest if line.startswith("  ")] == [
        ["rank", str(r)] for r in range(4)
    ]


def test_a_sum_blames_absent_ranks_and_a_circle_of_waits_ends():
    group = (0, 1, 2)
    there = waits("the end", group, "sum")
    assert stuck_failure(
        0, {0: there, 1: there, 2: RankState(3, "2B7")}, 1.0
    ).text.startswith("rank 0 waits after the end for sum")
    assert (
        "; rank 2 is at 2B7"
        in stuck_failure(
            0, {0: there, 1: there, 2: RankState(3, "2B7")}, 1.0
        ).text.splitlines()[0]
    )
    assert stuck_failure(0, {0: there, 1: there, 2: there}, 1.0).text.startswith(
        "rank 0 waits"
    )
    ring = {0: waits("0F1", 1), 1: waits("1B0", 0)}
    assert stuck_failure(1, ring, 1.0).text.startswith(
        "rank 1 waits at 1B0 for receive 0; rank 0 waits at 0F1"
    )


def test_a_rank_that_left_normally_is_not_called_lost():
    text = lost_failure(
        0, {0: waits("0B0", 1), 1: RankState(5, "1B3", left=True)}, [1]
    ).text
    assert text.startswith(
        "rank 0 waits at 0B0 for receive 1; rank 1 has left after 1B3"
    )


def test_a_long_list_of_ranks_is_cut():
    states = {rank: RankState(1, f"{rank}F0") for rank in range(100)}
    assert (
        stuck_failure(0, states | {0: waits("0B0", 1)}, 1.0).text.count("\n  rank")
        == board.MAX_RANKS_SHOWN
    )
    assert "  and 68 more" in lost_failure(0, states, [3]).text


def test_different_messages_have_different_tags(alone):
    wide, double = torch.float32, torch.float64
    shapes = [(rows, 128, width) for rows in range(4) for width in (64, 512, 4096)]
    kinds = [
        (shape, wide)
        for shape in (*shapes, (128, 4, 64), (4 * 128 * 64,), (4, 128, 64, 1), (0,), ())
    ]
    tags = [
        alone.tag(turn, *kind)
        for turn in range(1024)
        for kind in (*kinds, ((4, 128, 64), double))
    ]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < process.UNUSED_TAG for tag in tags)
