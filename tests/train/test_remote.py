"""Checkpoints in object storage: copied when they are complete, and fetched when a run has lost its own."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from commands import SMALL_CONFIG, called
from penstock.errors import FileError, RunError
from penstock.train.before.start import locking
from penstock.train.checkpoints.checkpoint import newest
from penstock.train.checkpoints.place import RemoteCheckpoints, fetch_newest
from penstock.train.history import read_rows
from trainings import job_of, losses, train


@pytest.fixture
def url(tmp_path):
    """A URL of a storage in memory, which is empty at first."""
    url = f"memory://{tmp_path}"
    yield url
    files, root = fsspec.url_to_fs(url)
    if files.exists(root):
        files.rm(root, recursive=True)


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "a.safetensors").write_bytes(b"weights")
    files = {"a.safetensors": {"bytes": 7, "crc32": zlib.crc32(b"weights")}}
    facts = {"penstock": "checkpoint", "step": step, "files": files}
    (path / "checkpoint.json").write_text(json.dumps(facts))
    return path


def stop_after(steps: int) -> Callable[[int], Callable[[], bool]]:
    """Ask all ranks to stop in a step; a rank is asked once in each."""

    def stop(rank: int) -> Callable[[], bool]:
        asked = count(1)
        return lambda: next(asked) == steps

    return stop


@pytest.mark.numerics
def test_a_run_that_lost_its_folder_resumes_from_the_storage_on_other_ranks(
    tmp_path, url
):
    options = (
        f"run.checkpoint_url={url}",
        "run.keep_checkpoints=1",
        "run.save_every=3",
    )
    whole = losses(train(job_of(tmp_path / "whole")))
    train(job_of(tmp_path / "lost", "1f1b", *options), stop_after(6))
    shutil.rmtree(tmp_path / "lost")
    remote = RemoteCheckpoints(url, keep=1)
    assert remote.steps() == [6]  # of 3 and 6, one is kept
    new = tmp_path / "new"
    fetched = fetch_newest(remote, new / "checkpoints")
    assert fetched == newest(new / "checkpoints")[0]
    assert fetch_newest(remote, new / "checkpoints") is None  # there is one as new
    resumed = train(job_of(new, "gpipe", *options, ranks=1, resume=True))
    assert [row.step for row in resumed] == list(range(7, 13))
    assert losses(resumed) == pytest.approx(whole[6:], rel=1e-4)
    assert remote.steps() == [12]


def test_a_copy_counts_once_its_description_is_there(tmp_path, url):
    remote = RemoteCheckpoints(url, keep=2)
    for step in (1, 2, 3):
        remote.put(checkpoint(tmp_path / "here", step))
    remote.finish()
    assert remote.steps() == [3, 2]
    remote.files.rm_file(f"{remote.root}/step-00000003/checkpoint.json")
    assert remote.steps() == [2]
    fetched = fetch_newest(remote, tmp_path / "there")
    assert fetched.name == "step-00000002"
    assert sorted(file.name for file in fetched.iterdir()) == [
        "a.safetensors",
        "checkpoint.json",
    ]


def test_a_damaged_file_is_replaced_by_the_intact_one_of_the_storage(
    tmp_path, url, caplog
):
    remote = RemoteCheckpoints(url, keep=2)
    here = tmp_path / "here"
    first, second = checkpoint(here, 1), checkpoint(here, 2)
    for path in (first, second):
        remote.put(path)
    remote.finish()
    file = second / "a.safetensors"
    file.write_bytes(b"damaged"[:7])
    assert fetch_newest(remote, here) == second
    assert file.read_bytes() == b"weights"
    assert "does not have its checksum; the copy from memory" in caplog.text
    (second / "checkpoint.json").write_text("damaged")
    assert fetch_newest(remote, here) == second
    assert json.loads((second / "checkpoint.json").read_text())["step"] == 2
    assert fetch_newest(remote, here) is None
    # The storage may be damaged, too. Then the one before counts.
    remote.files.pipe_file(f"{remote.root}/step-00000002/a.safetensors", b"DAMAGED")
    for path in (first, second):
        (path / "a.safetensors").unlink()
    assert fetch_newest(remote, here) == first
    assert "a.safetensors is missing, and in memory" in caplog.text
    assert [one.name for one in second.iterdir()] == ["checkpoint.json"]
    new = tmp_path / "new"
    assert fetch_newest(remote, new) == new / first.name
    assert [path.name for path in new.iterdir()] == [first.name]


def test_a_storage_that_cannot_be_used_is_named(tmp_path, caplog):
    with pytest.raises(
        FileError, match=r"nonsense(?s:.*)run.checkpoint_url must be a URL"
    ):
        RemoteCheckpoints("nonsense://bucket", keep=1)
    (tmp_path / "file").touch()
    remote = RemoteCheckpoints(f"file://{tmp_path}/file/below", keep=1)
    remote.put(checkpoint(tmp_path / "here", 1))
    with pytest.raises(RunError, match="itself is complete in the folder of the run"):
        remote.finish()
    assert "cannot copy to" in caplog.text


class RefusingFiles(MemoryFileSystem):
    """A storage whose credentials are wrong."""

    protocol = "refusing"

    def pipe_file(self, path, value, mode="overwrite", **options):
        raise OSError("An error occurred (403) when calling PutObject: Forbidden")


def test_a_storage_that_refuses_to_be_written_is_found_out_at_once(
    tmp_path, monkeypatch
):
    fsspec.register_implementation("refusing", RefusingFiles, clobber=True)
    with pytest.raises(FileError, match=r"cannot write to refusing(?s:.*)credentials"):
        RemoteCheckpoints("refusing://bucket", keep=1).check_writing()
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"NotADirectoryError(?s:.*)may write to"):
        RemoteCheckpoints(f"file://{tmp_path}/file/run", keep=1).check_writing()
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(FileError, match=r"s3fs(?s:.*)install what fsspec needs"):
        RemoteCheckpoints("s3://bucket/run", keep=1)


class KeepingFiles(MemoryFileSystem):
    """A storage that deletes no folder."""

    protocol = "keeping"

    def rm(self, path, recursive=False, maxdepth=None):
        raise PermissionError(f"{path} is kept until next year")


def test_an_old_copy_that_cannot_be_deleted_is_no_failure_of_the_new_one(
    tmp_path, caplog
):
    fsspec.register_implementation("keeping", KeepingFiles, clobber=True)
    remote = RemoteCheckpoints(f"keeping://{tmp_path}", keep=1)
    for step in (1, 2):
        remote.put(checkpoint(tmp_path, step))
    remote.finish()
    assert remote.steps() == [2]
    assert "cannot delete step-00000001 in keeping://" in caplog.text


class TalkingFiles(MemoryFileSystem):
    """A storage whose errors repeat the URL."""

    protocol = "talking"
    URL = "talking://me:secret@host/run?key=hidden"

    def makedirs(self, path, exist_ok=False):
        raise OSError(f"cannot connect to {self.URL} now")


def test_errors_show_no_secret_of_a_url(tmp_path, caplog):
    fsspec.register_implementation("talking", TalkingFiles, clobber=True)
    remote = RemoteCheckpoints(TalkingFiles.URL, keep=1)
    with pytest.raises(FileError) as refused:
        remote.check_writing()
    shown = "talking://me:***@host/run?***"
    assert str(refused.value).startswith(f"cannot write to {shown}: OSError: ")
    assert f"cannot connect to {shown} now" in str(refused.value)
    remote.put(checkpoint(tmp_path, 1))
    with pytest.raises(RunError) as failed:
        remote.finish()
    for text in (str(refused.value), str(failed.value), caplog.text):
        assert "secret" not in text
        assert "hidden" not in text


def test_s3_keeps_checkpoints_and_no_bucket_is_made_for_a_mistyped_url(
    tmp_path, monkeypatch
):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of these packages, while they are imported
        boto3 = pytest.importorskip("boto3")
        s3fs = pytest.importorskip("s3fs")
        moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    try:
        remote = RemoteCheckpoints("s3://bucket/run", keep=2)
        remote.check_writing()
        for step in (1, 2, 3):
            remote.put(checkpoint(tmp_path / "here", step))
        remote.finish()
        assert remote.steps() == [3, 2]
        fetched = fetch_newest(remote, tmp_path / "there")
        assert (fetched / "a.safetensors").read_bytes() == b"weights"
        with pytest.raises(FileError, match="cannot write to s3://bukket"):
            RemoteCheckpoints("s3://bukket/run", keep=2).check_writing()
        names = [one["Name"] for one in client.list_buckets()["Buckets"]]
        assert names == ["bucket"]
    finally:
        server.stop()


def write_config(folder: Path) -> Path:
    """Write a config whose checkpoints are copied to a folder beside it."""
    text = folder / "text.txt"
    text.write_text(
        "".join(f"the {n % 7} cats sat on {n % 5} mats\n" for n in range(999))
    )
    file = folder / "config.toml"
    config = SMALL_CONFIG.replace("[data]", f'[data]\nsources = ["{text}"]')
    file.write_text(config + f'checkpoint_url = "file://{folder}/bucket"\n')
    return file


def test_the_command_line_resumes_a_run_whose_folder_is_gone(
    tmp_path, monkeypatch, capsys
):
    file = write_config(tmp_path)
    quick = "--set parallel.pp=1 --set run.checks=forecast,memory"
    line = f"train {file} {quick} --set run.folder={tmp_path}/run"
    code, _, err = called(
        monkeypatch, capsys, f"{line} --set run.steps=3 --resume=auto"
    )
    assert code == 0, err
    shutil.rmtree(tmp_path / "run")
    code, _, err = called(
        monkeypatch, capsys, f"{line} --set run.steps=5 --resume=auto"
    )
    assert code == 0, err
    assert [row.step for row in read_rows(tmp_path / "run")] == [4, 5]
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "bucket")
    code, _, err = called(monkeypatch, capsys, f"{line} --resume")
    assert code == 2
    assert "no good checkpoint" in err
    other = f"train {file} --set run.folder={tmp_path}/other"
    code, _, err = called(
        monkeypatch, capsys, f"{other} --set run.checkpoint_url=nonsense://bucket"
    )
    assert (code, (tmp_path / "other").exists()) == (2, False)
    assert "cannot open nonsense://bucket" in err


def test_the_command_line_mends_a_damaged_checkpoint_from_the_storage(
    tmp_path, monkeypatch, capsys, caplog
):
    quick = "--set parallel.pp=1 --set run.checks=forecast,memory"
    line = f"train {write_config(tmp_path)} {quick} --set run.folder={tmp_path}/run"
    code, _, err = called(monkeypatch, capsys, f"{line} --set run.steps=3")
    assert code == 0, err

    def spoil() -> Path:
        file = next(newest(tmp_path / "run" / "checkpoints")[0].glob("*.safetensors"))
        file.write_bytes(bytes(file.stat().st_size))
        return file

    file = spoil()
    with (
        locking() as lock
    ):  # of a process that trains there, and whose files stay as they are
        lock.claim(tmp_path / "run")
        code, _, err = called(monkeypatch, capsys, f"{line} --set run.steps=5 --resume")
    assert (code, any(file.read_bytes())) == (2, False)
    assert "another process trains in" in err
    code, _, err = called(monkeypatch, capsys, f"{line} --set run.steps=5 --resume")
    assert code == 0, err
    assert [row.step for row in read_rows(tmp_path / "run")] == [1, 2, 3, 4, 5]
    took = f"does not have its checksum; the copy from file://{tmp_path}/bucket"
    assert f"{file} {took}" in caplog.text
    file = spoil()
    code, _, err = called(
        monkeypatch, capsys, f"generate {tmp_path}/run --max-tokens 2"
    )
    assert code == 0, err
    assert f"{file} {took}" in caplog.text
