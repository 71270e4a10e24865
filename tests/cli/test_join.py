"""Workers of a second machine join a run, are killed and replaced; the machines share nothing but a cable."""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path

from test_churn import STEPS, signal_worker, undisturbed, wait_for_events

from commands import SMALL_CONFIG, called, environment
from forked import Command
from machines import two_machines
from penstock.train.checkpoints.checkpoint import newest, newest_good
from penstock.train.history import read_events, read_rows

PORT = 29500


def write_run(folder: Path, address: str, workers: int) -> None:
    """Write a config for two copies of a pipeline, some of whose workers come from elsewhere."""
    lines = [f"the {n % 7} cats sat on {n % 5} mats\n" for n in range(3000)]
    folder.mkdir()
    (folder / "text.txt").write_text("".join(lines))
    config = SMALL_CONFIG.replace("[data]", '[data]\nsources = ["text.txt"]')
    config = config.replace('"hanayo"', '"1f1b"').replace(
        "[parallel]", "[parallel]\ndp_replicate = 2"
    )
    config = config.replace("microbatches = 4", "microbatches = 2")
    config = config.replace("steps = 12", f"steps = {STEPS}\nsilence = 300")
    config = config.replace("save = 3", "save = 50\nrestarts = 0")
    config += f'listen = "{address}:{PORT}"\nworkers = {workers}\n'
    (folder / "config.toml").write_text(config)


def wait_for_text(process: Command, text: str) -> None:
    """Wait until a command has printed a text on stderr."""
    while text not in b"".join(process.chunks[1]).decode():
        assert process.poll() is None, "the command has ended"
        time.sleep(0.02)


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the addresses at which the machine of a process listens."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                host, port = local.split(":")
                raw = bytes.fromhex(host)[::-1] if len(host) == 8 else b""
                found.append((".".join(map(str, raw)) or host, int(port, 16)))
    return found


def test_workers_of_another_machine_join_and_are_replaced_and_no_loss_differs(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with two_machines() as ((here, _, address), (there, _, _)):
        write_run(near, address, workers=3)
        run = Command(near, ["train", "config.toml"], environment(), network=here)
        folder = near / "runs" / "config"
        wait_for_text(run, "others can join")
        far.mkdir()
        shutil.copy(folder / "key.pem", far)
        words = ["join", f"{address}:{PORT}", "--behind-nat"]
        # Whoever is killed leaves its copy of the tokens behind.
        at = environment(TMPDIR=str(tmp_path))
        both = [Command(far, words, at, network=there) for _ in range(2)]
        wait_for_text(run, "waits as a spare")
        wait_for_events(run, folder, 1)
        both.sort(key=lambda one: b"as worker 3" not in b"".join(one.chunks[1]))
        first, spare = both
        wait_for_text(spare, "this worker is a spare")
        ports = {port for host, port in listening(run.pid) if host != "127.0.0.1"}
        assert ports == set(range(PORT, PORT + 4))  # of the launcher, and of 3 workers
        first.kill()
        wait_for_events(run, folder, 3)
        signal_worker(folder, 0, signal.SIGKILL)  # Rank 0 wrote the files of the run.
        wait_for_events(run, folder, 4)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=600)
        assert run.returncode == 130, err
        _, far_err = spare.communicate(timeout=600)
        assert spare.returncode == 0, far_err
        first.communicate(timeout=600)
    assert re.search(r"worker 3 on \S+ has joined; 4 workers go on", err)
    assert re.search(r"worker 3 on \S+ has ended, or cannot be reached any more", err)
    assert [len(event.members) for event in read_events(folder)] == [4, 3, 4, 3]
    assert sorted(far.iterdir()) == [far / "key.pem"]
    assert "over      the run has done" in far_err
    rows = read_rows(folder)
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    joined, lost, replaced, last = (event.step for event in read_events(folder))
    crews = [(0, (0, 1, 2)), (joined, (0, 1, 2, 3)), (lost, (0, 1, 2))]
    crews += [(replaced, (0, 1, 2, 3)), (last, (1, 2, 3))]
    ends = [*(step for step, _ in crews[1:]), len(rows)]
    crews = [one for one, end in zip(crews, ends, strict=True) if one[0] < end]
    expected = undisturbed(folder, tmp_path / "quiet", crews, len(rows))
    assert [row.loss for row in rows] == expected
    # The checkpoint at the end has the files of the worker far away, too.
    saved = newest(folder / "checkpoints")[0]
    assert saved.name == f"step-{len(rows):08d}"
    assert newest_good(folder / "checkpoints") == saved
    assert len(list(saved.glob("*-of-00003.safetensors"))) >= 2


def test_joining_needs_a_key_and_a_run(monkeypatch, capsys, tmp_path):
    code, _, err = called(monkeypatch, capsys, f"join here:1 --key {tmp_path}/key.pem")
    assert (code, "cannot use the key" in err) == (2, True)
    code, _, err = called(monkeypatch, capsys, "join here --key key.pem")
    assert (code, "must be HOST:PORT" in err) == (2, True)
    for line, text in (
        ("elastic.workers=2", "elastic.workers is for workers of other machines"),
        ("elastic.listen=a:1 --set elastic.mode=off", "does not allow"),
        (
            "elastic.listen=a:1 --set run.loss=a.py:f",
            "run.loss = a.py:f is a file that",
        ),
    ):
        code, _, err = called(
            monkeypatch, capsys, f"init {tmp_path}/c.toml --set {line}"
        )
        assert (code, text in err) == (2, True), err
