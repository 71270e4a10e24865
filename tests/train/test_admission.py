"""How the launcher admits workers of other machines: what they get, what they may send, and how they end."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from commands import wait_until
from penstock import Plan, make
from penstock.crew import admission as admission_module
from penstock.crew.admission import (
    MAX_CONNECTIONS,
    MAX_SPARES,
    Admission,
    Joining,
)
from penstock.crew.files import RunFiles
from penstock.crew.member import Member
from penstock.crew.store import RemoteStore
from penstock.crew.tls import keep_key, receive_frame, send_frame
from penstock.errors import PeerLostError, RunError
from penstock.formats import write_plan
from penstock.formats.config_toml import dump_config, read_config
from penstock.runtime.process.launch import keep_store
from penstock.torch_internals import PrefixStore, TCPStore
from penstock.train.data.cache import encode_dataset
from penstock.train.data.corpus import open_corpus, open_validation
from penstock.train.job import Verdict, job_of
from trainings import SMALL


@pytest.fixture
def admission(tmp_path):
    """Return the admission of a run that has a config, tokens and a checkpoint."""
    run = tmp_path / "run"
    saved = run / "checkpoints" / "step-00000004"
    saved.mkdir(parents=True)
    (saved / "checkpoint.json").write_text("{}")
    (saved / "a.safetensors").write_bytes(bytes(3_000_000))
    (tmp_path / "text.txt").write_text("the cats sat on the mats\n" * 200)
    other = encode_dataset(["the dogs ran to the logs\n" * 100], SMALL.data, tmp_path)
    data = replace(
        SMALL.data,
        sources=(str(tmp_path / "text.txt"),),
        validation=(str(other),),
        tokenizer="bytes",
    )
    config = replace(SMALL, data=data, model=replace(SMALL.model, vocab_size=0))
    open_corpus(config.data, tmp_path / "cache")
    open_validation(config.data, tmp_path / "cache")
    (run / "config.toml").write_text(dump_config(config))
    plan = Plan(make("1f1b", ranks=2, microbatches=4), "1f1b", (2, 2))
    write_plan(plan, run / "plan.json")
    (run / "secret.txt").write_text("not for workers")
    pytest.importorskip("cryptography")
    keep_key(run / "key.pem")
    said: list[str] = []
    files = RunFiles(run, config)
    opened = Admission(
        "127.0.0.1:0", run / "key.pem", keep_store(), files, "1", said.append, 2
    )
    opened.said = said
    opened.run = run
    yield opened
    opened.close()


def joining(admission: Admission, folder) -> Joining:
    address = f"127.0.0.1:{admission.port}"
    return Joining(address, admission.run / "key.pem", folder, lambda topic, line: None)


def ask_for_place(admission: Admission, folder):
    """Join up to the point where the worker has a token; return it and its connection."""
    worker = joining(admission, folder)
    control = worker.ask("place", version="1", name="far\x1b[1m")
    worker.token = receive_frame(control)["token"]
    return worker, control


def test_a_worker_copies_what_it_needs_and_brings_checkpoints_back(admission, tmp_path):
    far = tmp_path / "far"
    worker, control = ask_for_place(admission, far)
    worker.bring_files()
    names = {str(file.relative_to(far)) for file in far.rglob("*") if file.is_file()}
    assert names == {
        *("config.toml", "plan.json", "tokens.bin", "tokens.tokens"),
        *("validation.bin", "validation.tokens"),
    }
    files = worker.launcher_files()
    ours, theirs = (read_config(one / "config.toml") for one in (admission.run, far))
    copies = [far / "tokens.bin", far / "validation.bin"]
    for file in copies:
        file.touch()
    before = [file.stat().st_mtime_ns for file in copies]
    worker.bring_files()  # Tokens are not copied again.
    assert [file.stat().st_mtime_ns for file in copies] == before
    # A worker far away trains and is evaluated on the same text as one of this machine.
    mine, theirs = job_of(admission.run, ours), job_of(far, theirs)
    for here, there in (
        (mine.corpus, theirs.corpus),
        (mine.validation, theirs.validation),
    ):
        assert np.array_equal(here.tokens, there.tokens)
        assert (here.trained, here.held_out) == (there.trained, there.held_out)
    # Checkpoints come and go.
    files.fetch(far / "checkpoints")
    copied = far / "checkpoints" / "step-00000004"
    assert (copied / "a.safetensors").read_bytes() == bytes(3_000_000)
    share = far / "checkpoints" / "step-00000008.saving"
    share.mkdir()
    (share / "b.safetensors").write_bytes(b"1234")
    (share / "rank-00001.json").write_text("{}")
    files.put(share)
    there = admission.run / "checkpoints" / "step-00000008.saving"
    assert sorted(file.name for file in there.iterdir()) == [
        "b.safetensors",
        "rank-00001.json",
    ]
    control.close()


@pytest.mark.parametrize(
    "name",
    [
        "secret.txt",
        "key.pem",
        "../text.txt",
        "checkpoints/step-00000004/../../secret.txt",
        "checkpoints/step-00000004/x.txt",
    ],
)
def test_a_worker_gets_no_other_files_and_writes_none(name, admission, tmp_path):
    worker, control = ask_for_place(admission, tmp_path / "far")
    with worker.ask("files", token=worker.token) as connection:
        send_frame(connection, {"get": name})
        assert "has no file" in receive_frame(connection)["error"]
        send_frame(connection, {"put": name, "bytes": 3})
        connection.sendall(b"abc")
        with pytest.raises(PeerLostError):
            receive_frame(connection)
    assert (admission.run / "secret.txt").read_text() == "not for workers"
    assert not (admission.run / "checkpoints" / "step-00000004" / "x.txt").exists()
    control.close()


def test_a_worker_gets_a_place_and_says_how_it_ended(admission, tmp_path):
    worker, control = ask_for_place(admission, tmp_path / "far")
    place: list[dict] = []
    waits = threading.Thread(
        target=lambda: place.append(worker.wait_for_place(control))
    )
    waits.start()
    wait_until(lambda: bool(admission.waiting()))
    (remote,) = admission.waiting()
    assert remote.name == "far[1m"  # without the letter that would colour a terminal
    remote.give_place(worker=2, workers=4, resume=False)
    waits.join()
    assert place == [
        {"worker": 2, "workers": 4, "resume": False, "token": worker.token}
    ]
    assert admission.waiting() == []
    verdict = Verdict(7, False, "RunError", "no room")
    worker.tell_verdict(verdict)
    assert remote.outcome().result == verdict
    control.close()


def test_a_worker_that_was_given_up_reaches_nothing_any_more(admission, tmp_path):
    worker, control = ask_for_place(admission, tmp_path / "far")
    store = RemoteStore(worker.dial_store)
    store.set("a", "b")
    (remote,) = admission.remotes.values()
    remote.kill()
    with pytest.raises(Exception, match="cannot be reached"):
        store.set("a", "c")
    assert "cannot be reached any more" in remote.outcome().text
    wait_until(lambda: not admission.waiting() and not admission.remotes)
    late = RemoteStore(worker.dial_store)  # It has the key, but its place is gone.
    with pytest.raises(Exception, match="cannot be reached"):
        late.set("a", "c")
    port = admission.store.port
    assert TCPStore("127.0.0.1", port, is_master=False).get("a") == b"b"
    store.close()
    late.close()
    control.close()


def test_spares_are_told_when_the_run_is_over_and_other_versions_are_refused(
    admission, tmp_path, monkeypatch
):
    # However slow this machine is, the spare hears of it before its connection ends.
    monkeypatch.setattr(admission_module, "ANSWER_SECONDS", 600.0)
    with pytest.raises(RunError, match="it is Penstock 1, and this one 2"):
        joining(admission, tmp_path / "old").run(None, "2")
    ended: list[Verdict] = []
    spare = joining(admission, tmp_path / "far")
    waits = threading.Thread(target=lambda: ended.append(spare.run("", "1")))
    waits.start()
    wait_until(lambda: bool(admission.waiting()))
    admission.close()
    waits.join()
    assert ended == [Verdict()]


def test_a_worker_that_was_let_in_cannot_exhaust_the_launcher(admission, tmp_path):
    worker, control = ask_for_place(admission, tmp_path / "far")
    (remote,) = admission.remotes.values()
    store = RemoteStore(worker.dial_store)
    with pytest.raises(Exception, match="cannot be reached"):
        store.set("long", "x" * (1 << 21))
    store.close()
    wait_until(lambda: not remote.others)
    stores = [RemoteStore(worker.dial_store) for _ in range(MAX_CONNECTIONS)]
    for number, one in enumerate(stores):
        one.set("a", str(number))
    late = RemoteStore(worker.dial_store)
    with pytest.raises(Exception, match="cannot be reached"):
        late.set("a", "too many")
    for one in (*stores, late):
        one.close()
    wait_until(lambda: not remote.others)
    # The run has places for two, and keeps some spares beyond these.
    others = [ask_for_place(admission, tmp_path / "far") for _ in range(MAX_SPARES + 1)]
    with pytest.raises(RunError, match=f"has {MAX_SPARES + 2} workers and spares"):
        joining(admission, tmp_path / "far").run("", "1")
    control.close()
    wait_until(remote.gone.is_set)
    others.append(ask_for_place(admission, tmp_path / "far"))
    for _, one in others:
        one.close()


def test_a_worker_has_no_more_connections_after_many_generations(admission, tmp_path):
    worker, control = ask_for_place(admission, tmp_path / "far")
    (remote,) = admission.remotes.values()
    member = Member(0, RemoteStore(worker.dial_store))
    wait_until(lambda: len(remote.others) == 2)  # with that of its signs of life
    for _ in range(2 * MAX_CONNECTIONS):
        member.meeting = member.own_connection()
        board = PrefixStore("g1", member.meeting).clone()  # as a watchdog does
        board.set("a", "b")
        wait_until(lambda: len(remote.others) == 4)
        member.leave()
        wait_until(lambda: len(remote.others) == 2)
    member.store.close()
    control.close()


def test_the_user_hears_of_strangers_but_not_of_each(admission):
    for number in range(250):
        admission.refuse(f"10.0.0.{number}")
    assert admission.said == [
        "refused one without the run's key, last from 10.0.0.0",
        "refused 10 connections without the run's key, last from 10.0.0.9",
        "refused 100 connections without the run's key, last from 10.0.0.99",
    ]
