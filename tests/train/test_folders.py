"""Ranks whose folders differ: they find out, train, save, and resume together."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace

import pytest
import torch

from penstock.crew.files import agree_on_restarts, share_earlier_end
from penstock.errors import FileError, PenstockError, RunError
from penstock.runtime import run_threads
from penstock.runtime.comm.comm import exchange
from penstock.train.checkpoints import folders as group
from penstock.train.checkpoints.checkpoint import NOTE, Saver, faults, newest
from penstock.train.checkpoints.folders import (
    PIECE_BYTES,
    FileRelay,
    RunFolders,
    compare_folders,
    failing_together,
    relay_file,
    relay_files,
    work_together,
)
from penstock.train.checkpoints.place import RemoteCheckpoints
from penstock.train.checkpoints.separate import (
    Inventory,
    SeparateFolders,
    versions_of,
)
from penstock.train.history import StepRow, read_rows
from penstock.train.job import Job
from penstock.train.launch import RESTART_COUNT, write_failure
from penstock.train.loop import Trainer
from trainings import job_of, losses, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[float]:
    """The losses of a run in one folder, which nothing interrupts."""
    return losses(train(job_of(tmp_path_factory.mktemp("whole"))))


def train_apart(
    root: Path, machines: Sequence[str], job: Job, stop: int = 0
) -> list[StepRow]:
    """Train with a thread per rank, each with the folder of its machine; `stop` asks to stop in a step."""
    url = job.config.run.checkpoint_url

    def work(comm) -> None:
        folders = RunFolders(
            tuple(machines.index(machine) for machine in machines),
            tuple(machines),
            tuple(str(root / machine) for machine in machines),
        )
        remote = (
            RemoteCheckpoints(url, job.config.run.keep_checkpoints) if url else None
        )
        own = replace(
            job,
            folder=root / machines[comm.rank],
            separate=SeparateFolders(folders, remote),
        )
        trainer = Trainer(own, comm)
        trainer.run(lambda: trainer.step + 1 == stop)

    run_threads(len(machines), work, patience=300)
    return read_rows(root / machines[0])


def checkpoints(folder: Path) -> dict[str, bool]:
    """The checkpoints of a folder, and whether each is complete there."""
    found = newest(folder / "checkpoints")
    return {path.name: not faults(path, quick=True) for path in found}


def test_ranks_find_out_which_of_them_see_one_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "a")
    names = ("a", "b", "mounted", "b")

    def work(comm) -> RunFolders:
        return compare_folders(comm, tmp_path / names[comm.rank])

    (found,) = set(run_threads(4, work))
    assert found.owners == (0, 1, 0, 1)
    assert (found.keepers, found.neighbours(3), found.shared) == ((0, 1), [1, 3], False)
    assert f"ranks 1 3 {tmp_path}/b on" in str(found)
    assert not any((tmp_path / "b").iterdir())
    (tmp_path / "b").rmdir()
    (tmp_path / "b").touch()
    with pytest.raises(
        FileError, match=r"rank 1 on .*/b: File exists\n  name a folder"
    ):
        run_threads(4, work)


def test_all_ranks_know_of_a_restart_that_torchrun_has_counted_on_one_machine():
    counts = [{}, {RESTART_COUNT: "1"}, {RESTART_COUNT: "0"}]
    run_threads(3, lambda comm: agree_on_restarts(comm, counts[comm.rank]))
    assert counts == [{RESTART_COUNT: "1"}] * 3


def test_all_ranks_end_after_a_restart_if_one_machine_was_to_end(tmp_path):
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()

    def work(comm) -> None:
        share_earlier_end(comm, tmp_path / str(comm.rank))

    run_threads(3, work)
    assert not any(tmp_path.glob("*/stop"))
    (tmp_path / "1" / "stop").touch()
    run_threads(3, work)
    assert len(list(tmp_path.glob("*/stop"))) == 3
    write_failure(tmp_path / "2", RunError("it would repeat"))
    with pytest.raises(FileError, match=r"rank 2 on .*: it would repeat"):
        run_threads(3, work)


def test_ranks_hear_from_one_that_works_long_and_of_its_failure(monkeypatch):
    pulses = Semaphore(0)

    def count_pulses(comm, fact: object) -> list[object]:
        told = exchange(comm, fact)
        if comm.rank == 1:
            pulses.release()
        return told

    monkeypatch.setattr(group, "exchange", count_pulses)
    monkeypatch.setattr(group, "PULSE_SECONDS", 0.01)

    def work(comm) -> None:
        def fetch() -> None:
            if comm.rank == 0:
                heard = [pulses.acquire(timeout=60) for _ in range(3)]
                raise OSError(f"the others heard {sum(heard)} times")

        work_together(comm, fetch)

    with pytest.raises(FileError, match=r"rank 0 on .*: the others heard 3 times"):
        run_threads(2, work)


def test_a_file_goes_along_a_chain_of_ranks(tmp_path):
    content = bytes(range(256)) * (PIECE_BYTES // 256) + b"the end"
    for name, data in (("0", content), ("2", b""), ("1", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(data)
    run_threads(
        3,
        lambda comm: relay_file(
            comm, tmp_path / str(comm.rank) / "file", len(content), [0, 2, 1]
        ),
    )
    assert (tmp_path / "1" / "file").read_bytes() == content
    assert (tmp_path / "2" / "file").read_bytes() == content


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_at_a_file_lets_nobody_wait_for_it(tmp_path, failing):
    names = ("first", "second")
    (tmp_path / "0").mkdir()
    for name in names:
        (tmp_path / "0" / name).write_bytes(b"content")
    if failing == 0:
        (tmp_path / "0" / "first").unlink()
    else:
        (tmp_path / "1" / "first.part").mkdir(parents=True)  # where nobody can write

    def work(comm) -> None:
        folder = tmp_path / str(comm.rank)
        with failing_together(comm):
            relay_files(
                comm, [FileRelay(folder / name, 7, [0, 1, 2]) for name in names]
            )

    with pytest.raises(FileError, match=f"rank {failing} on .*first"):
        run_threads(4, work, patience=20)
    for rank in (1, 2):
        assert (tmp_path / str(rank) / "second").read_bytes() == b"content"
    assert (tmp_path / "2" / "first").exists() == (failing == 1)


@pytest.mark.numerics
def test_machines_bring_a_checkpoint_together_and_others_resume_it(tmp_path, whole):
    job = job_of(tmp_path, "1f1b", "run.save_every=3")
    train_apart(tmp_path, ("a", "b"), job, stop=6)
    apart = {"step-00000006": False, "step-00000003": False}
    assert checkpoints(tmp_path / "a") == checkpoints(tmp_path / "b") == apart
    # The second machine was lost after it had written step 3, and others come.
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000006")
    more = job_of(tmp_path, "1f1b", "run.save_every=9", ranks=3, resume=True)
    rows = train_apart(tmp_path, ("a", "b", "new"), more)
    assert [row.step for row in rows] == list(range(1, 13))
    assert losses(rows) == pytest.approx(whole, rel=1e-4)
    # When a run ends, rank 0 has all of its last checkpoint.
    assert checkpoints(tmp_path / "a") == {
        "step-00000012": True,
        "step-00000009": False,
    }
    shutil.rmtree(tmp_path / "b")
    for file in (tmp_path / "a" / "checkpoints").glob("*/*-00002-of-00003*"):
        file.unlink()
    lost = rf"00002-of-00003.safetensors is missing; it was saved in {tmp_path}/b on b"
    with pytest.raises(RunError, match=rf"{lost}\n  start a rank on that machine too"):
        train_apart(tmp_path, ("a", "c", "new"), more)


def spoil(file: Path) -> None:
    """Damage a file, but keep its size."""
    file.write_bytes(bytes(file.stat().st_size))


def files_of(folder: Path, step: int) -> list[Path]:
    path = folder / "checkpoints" / f"step-{step:08d}"
    return sorted(path.glob("*.safetensors"))


def test_an_intact_copy_on_another_machine_takes_the_place_of_a_damaged_file(
    tmp_path, caplog
):
    train_apart(tmp_path, ("a", "b"), job_of(tmp_path, "1f1b", "run.steps=3"))
    # At its end a run has all files in the first folder. One of them is damaged there, but not where it was saved.
    (first, second), (own,) = files_of(tmp_path / "a", 3), files_of(tmp_path / "b", 3)
    assert own.name == second.name
    good = second.read_bytes()
    spoil(second)
    # The third machine once had a copy of everything. One of its files was cut off since, and one is missing.
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    third, fourth = files_of(tmp_path / "c", 3)
    third.write_bytes(third.read_bytes()[:-1])
    fourth.unlink()
    (own.parent / "left.part").mkdir()  # which is not deleted, and stops nobody
    more = job_of(tmp_path, "1f1b", "run.steps=4", ranks=3, resume=True)
    rows = train_apart(tmp_path, ("a", "b", "c"), more)
    assert [row.step for row in rows] == [1, 2, 3, 4]
    for name in ("a", "b", "c"):
        assert [file.read_bytes() for file in files_of(tmp_path / name, 3)] == [
            first.read_bytes(),
            good,
        ]
    took = f"does not have its checksum; the copy from {tmp_path}/b on b took its place"
    assert f"{second} {took}" in caplog.text
    assert f"{third} has {first.stat().st_size - 1} bytes, not" in caplog.text
    # It is no news that a file is missing where it was not saved.
    assert str(fourth) not in caplog.text


def test_a_checkpoint_that_nobody_has_intact_is_left_out_with_the_places_of_the_file(
    tmp_path, caplog
):
    options = ("run.save_every=2", "run.steps=4")
    train_apart(tmp_path, ("a", "b"), job_of(tmp_path, "1f1b", *options))
    second = files_of(tmp_path / "a", 4)[1]
    spoil(second)
    files_of(tmp_path / "b", 4)[0].write_bytes(b"short")
    more = job_of(tmp_path, "1f1b", *options, resume=True)
    assert [row.step for row in train_apart(tmp_path, ("a", "b"), more)] == [1, 2, 3, 4]
    told = (
        f"step-00000004 is not complete: {second.name} does not have its checksum in {tmp_path}/a on a and "
        rf"has 5 bytes, not \d+ in {tmp_path}/b on b; it was saved in {tmp_path}/b on b"
    )
    assert re.search(f"{told}; looking for an earlier one", caplog.text)
    for step in (2, 4):
        spoil(files_of(tmp_path / "a", step)[0])
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(
        RunError, match=r"does not have its checksum in .*\n  put a good copy"
    ):
        train_apart(tmp_path, ("a", "b"), more)


def test_a_description_that_is_damaged_on_one_machine_is_taken_from_another(tmp_path):
    train_apart(tmp_path, ("a", "b"), job_of(tmp_path, "1f1b", "run.steps=3"))
    for file in files_of(tmp_path / "a", 3):
        shutil.copy(file, tmp_path / "b" / "checkpoints" / "step-00000003")
    note = tmp_path / "a" / "checkpoints" / "step-00000003" / "checkpoint.json"
    text = note.read_text()
    # It can be read, but has another checksum.
    note.write_text(text.replace('"crc32": ', '"crc32": 1'))
    more = job_of(tmp_path, "1f1b", "run.steps=4", resume=True)
    train_apart(tmp_path, ("a", "b"), more)
    assert note.read_text() == text
    assert checkpoints(tmp_path / "a")["step-00000004"]


def test_a_file_that_no_machine_has_intact_comes_from_the_storage(tmp_path, caplog):
    url = f"file://{tmp_path}/bucket"
    options = (f"run.checkpoint_url={url}", "run.save_every=2")
    job = job_of(tmp_path, "1f1b", *options, "run.steps=4")
    train_apart(tmp_path, ("a", "b"), job)
    first, second = files_of(tmp_path / "a", 4)
    good = first.read_bytes()
    spoil(first)
    # What is intact on a machine is not fetched, and here could not be.
    (tmp_path / "bucket" / "step-00000004" / second.name).unlink()
    more = job_of(tmp_path, "1f1b", *options, "run.steps=5", resume=True)
    assert [row.step for row in train_apart(tmp_path, ("a", "b"), more)][-1] == 5
    took = f"{first} does not have its checksum; the copy from {url} took its place"
    assert took in caplog.text
    assert [file.read_bytes() for file in files_of(tmp_path / "b", 4)] == [
        good,
        second.read_bytes(),
    ]


def test_a_damaged_storage_replaces_nothing_and_is_named(tmp_path, caplog):
    url = f"file://{tmp_path}/bucket"
    options = (f"run.checkpoint_url={url}", "run.save_every=2")
    job = job_of(tmp_path, "1f1b", *options, "run.steps=4")
    train_apart(tmp_path, ("a", "b"), job)
    bucket = tmp_path / "bucket"
    for path in (tmp_path / "a" / "checkpoints", bucket):
        spoil(sorted(path.glob("step-00000004/*.safetensors"))[0])
    more = job_of(tmp_path, "1f1b", *options, "run.steps=5", resume=True)
    assert [row.step for row in train_apart(tmp_path, ("a", "b"), more)][-1] == 5
    places = f"{url}, {tmp_path}/a on a"
    assert f"does not have its checksum in {places} and is missing in" in caplog.text
    # New machines go on from the one before, too; the newest has been written anew since.
    spoil(sorted(bucket.glob("step-00000005/*.safetensors"))[0])
    caplog.clear()
    rows = train_apart(tmp_path, ("c", "d"), more)
    assert [row.step for row in rows] == [5]
    assert f"does not have its checksum in {url}; looking" in caplog.text


@pytest.mark.numerics
def test_new_machines_resume_from_the_storage_without_what_was_half_copied(
    tmp_path, whole
):
    url = f"file://{tmp_path}/bucket"
    options = (
        f"run.checkpoint_url={url}",
        "run.save_every=3",
        "run.keep_checkpoints=2",
    )
    job = job_of(tmp_path, "1f1b", *options)
    train_apart(tmp_path, ("a", "b"), job, stop=6)
    remote = RemoteCheckpoints(url, keep=2)
    assert remote.steps() == [6, 3]
    # A rank was killed before the checkpoint of step 9 was complete.
    remote.put_files(tmp_path / "a/checkpoints/step-00000006", "step-00000009", ())
    remote.files.pipe_file(f"{remote.root}/step-00000009/a.safetensors", b"half")
    more = job_of(tmp_path, "gpipe", *options, ranks=3, resume=True)
    rows = train_apart(tmp_path, ("c", "d", "d"), more)
    assert [row.step for row in rows] == list(range(7, 13))
    assert losses(rows) == pytest.approx(whole[6:], rel=1e-4)
    assert remote.steps() == [12, 9]


def test_checkpoints_of_one_step_are_told_apart_by_their_descriptions():
    one, other = ({"bytes": 1, "crc32": number} for number in (1, 2))
    holders = {2: Inventory({NOTE: one}, {}, {}), 0: Inventory({NOTE: other}, {}, {})}
    versions = versions_of(holders, [(0, one), (1, other)])
    # First the one that the first rank has.
    found = [(set(each.holders), each.storages) for each in versions]
    assert found == [({0}, [1]), ({2}, [0])]


def test_a_later_checkpoint_that_cannot_be_resumed_displaces_no_new_one(tmp_path):
    bucket = tmp_path / "bucket"
    for folder in (
        tmp_path / "a" / "checkpoints",
        tmp_path / "b" / "checkpoints",
        bucket,
    ):
        (folder / "step-00000099").mkdir(parents=True)
    (bucket / "step-00000099" / "checkpoint.json").write_text("damaged")
    options = (
        f"run.checkpoint_url=file://{bucket}",
        "run.keep_checkpoints=1",
        "run.save_every=1",
    )
    train_apart(tmp_path, ("a", "b"), job_of(tmp_path, "1f1b", *options, "run.steps=2"))
    left = {"step-00000099", "step-00000002"}
    assert set(checkpoints(tmp_path / "a")) == set(checkpoints(tmp_path / "b")) == left
    assert RemoteCheckpoints(f"file://{bucket}", keep=1).steps() == [99, 2]


def test_an_old_checkpoint_stays_until_all_machines_have_the_new_one(tmp_path):
    options = ("run.keep_checkpoints=1", "run.save_every=2")
    train_apart(tmp_path, ("a", "b"), job_of(tmp_path, "1f1b", *options, "run.steps=2"))
    # A file has the name of the folder.
    (tmp_path / "b" / "checkpoints" / "step-00000004").write_text("")
    more = job_of(tmp_path, "1f1b", *options, "run.steps=4", resume=True)
    with pytest.raises(PenstockError, match="step-00000004"):
        train_apart(tmp_path, ("a", "b"), more)
    for machine in ("a", "b"):
        assert "step-00000002" in checkpoints(tmp_path / machine)


def test_each_machine_needs_room_for_the_files_of_its_own_ranks(tmp_path, monkeypatch):
    free = [400]
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0])
    )
    places = tuple(str(tmp_path / name) for name in ("a", "b"))
    folders = RunFolders((0, 1), ("a", "b"), places)

    def work(comm) -> None:
        saver = Saver(tmp_path, comm, 1, apart=folders)
        saver.check_room(1, {"x": torch.ones(100)})

    run_threads(2, work)
    free[0] = 399
    with pytest.raises(RunError, match="make room"):
        run_threads(2, work, patience=20)


def test_a_storage_that_lacks_the_files_of_one_rank_has_no_such_checkpoint(
    tmp_path, caplog
):
    url = f"file://{tmp_path}/bucket"
    # Where the second rank should write there are folders.
    name = "shard-00001-model-00002-of-00002.safetensors"
    (tmp_path / "bucket" / "step-00000002" / name / name).mkdir(parents=True)
    options = (f"run.checkpoint_url={url}", "run.save_every=2", "run.steps=3")
    train_apart(tmp_path, ("a", "b"), job_of(tmp_path, "1f1b", *options))
    assert "rank 1 on b: " in caplog.text
    assert RemoteCheckpoints(url, keep=2).steps() == [3]


def test_a_copy_that_fails_on_one_machine_ends_the_run_only_if_it_is_the_last(
    tmp_path, caplog
):
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    (bucket / "step-00000002").touch()  # so that nobody can write into this folder
    options = (f"run.checkpoint_url=file://{bucket}", "run.save_every=2")
    job = job_of(tmp_path, "1f1b", *options, "run.steps=4")
    train_apart(tmp_path, ("a", "b"), job)
    assert "cannot copy to" in caplog.text
    assert RemoteCheckpoints(f"file://{bucket}", keep=2).steps() == [4]
    (bucket / "step-00000005").touch()
    longer = job_of(tmp_path, "1f1b", *options, "run.steps=5", resume=True)
    with pytest.raises(RunError, match="its files are in the folders of the run"):
        train_apart(tmp_path, ("a", "b"), longer)
    assert set(checkpoints(tmp_path / "b")) == {"step-00000005", "step-00000004"}


def test_the_best_weights_are_kept_in_separate_folders_too(tmp_path):
    options = ("run.early_stop=3", "run.eval_every=1", "optimizer.lr=0.3")
    together = train(job_of(tmp_path / "one", "1f1b", *options))
    # The copies of checkpoints are not the best ones.
    copied = (
        *options,
        f"run.checkpoint_url=file://{tmp_path}/bucket",
        "run.save_every=1",
    )
    rows = train_apart(tmp_path, ("a", "b"), job_of(tmp_path, "1f1b", *copied))
    assert losses(rows) == losses(together)
    assert len(rows) < 12
    assert not any((tmp_path / "b" / "best").glob("*.saving"))
    (best,) = newest(tmp_path / "b" / "best")
    assert best == tmp_path / "b" / "best" / newest(tmp_path / "one" / "best")[0].name
