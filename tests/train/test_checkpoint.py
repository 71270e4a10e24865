"""A checkpoint is whole or not there, and any split goes on from any other's."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from commands import called
from penstock.config import LoraConfig
from penstock.errors import FileError, RunError
from penstock.formats.config_toml import apply_changes
from penstock.runtime import run_threads
from penstock.runtime.comm.thread import Hub, ThreadComm
from penstock.train.after.export import export_run
from penstock.train.after.generate import generate_text, open_trained
from penstock.train.checkpoints import checkpoint
from penstock.train.checkpoints.checkpoint import (
    Saver,
    faults,
    good_step,
    load,
    newest,
    newest_good,
    prune,
    read_facts,
    step_name,
    step_of,
)
from penstock.train.hub import read_sizes
from penstock.train.job import settle_tokenizer
from penstock.train.loop import Trainer
from penstock.train.lora import Adapter, merge
from penstock.train.weights import draw_parameters, hold_whole, sizes_of
from trainings import SMALL, VOCAB, apart, corpus, job_of, losses, outcomes, train

SOME = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
FEWER = {"a": SOME["a"]}
FACTS = {"model": {}, "data": {}, "tokenizer": "bytes"}


class DiskUsage(NamedTuple):
    free: int


def alone() -> ThreadComm:
    """The connection of a rank without others."""
    return ThreadComm(Hub(1), 0)


def save_all(
    folder: Path, step: int, keep: int = 9, tensors: dict[str, torch.Tensor] = SOME
) -> Path:
    """One rank that saves at once."""
    saver = Saver(folder, alone(), keep)
    saver.begin(step, tensors, FACTS)
    saver.thread.join()
    assert saver.done()
    return saver.commit()


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, read without our code."""
    return {
        name: tensor
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def stop_after(step: int):
    def stop(rank: int):
        asked = []

        def ask() -> bool:
            asked.append(0)
            return len(asked) == step

        return ask

    return stop


# ---------------------------------------------------------------- any split from any other
SPLITS = {
    "4 ranks, 2 parts each": ("hanayo", {"ranks": 4, "microbatches": 4, "waves": 1}),
    "2 ranks": ("1f1b", {"ranks": 2, "microbatches": 8}),
    "1 rank": ("gpipe", {"ranks": 1, "microbatches": 2}),
    "2 copies": ("zb-h1", {"ranks": 2, "microbatches": 2, "copies": 2}),
    "two directions": ("chimera", {"ranks": 2, "microbatches": 4}),
}


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "tied"),
    [
        ("4 ranks, 2 parts each", "2 ranks", True),
        ("2 ranks", "4 ranks, 2 parts each", False),
        ("1 rank", "2 copies", True),
        ("2 copies", "two directions", True),
        ("two directions", "1 rank", False),
    ],
)
def test_a_run_goes_on_in_another_split_as_if_it_had_never_stopped(
    saved_by, resumed_by, tied, tmp_path
):
    changes = (
        "model.layers=8",
        "run.steps=5",
        f"model.tie_embeddings={str(tied).lower()}",
    )
    name, shape = SPLITS[resumed_by]
    undisturbed = train(job_of(tmp_path / "whole", name, *changes, **shape))
    name, shape = SPLITS[saved_by]
    outcomes(job_of(tmp_path / "two", name, *changes, **shape), stop_after(3))
    name, shape = SPLITS[resumed_by]
    rows = train(job_of(tmp_path / "two", name, *changes, resume=True, **shape))
    assert [row.step for row in rows] == list(range(1, 6))
    # Float32: another split adds the gradients in another order.
    assert apart(rows, losses(undisturbed)) < 1e-5


@pytest.mark.numerics
def test_the_same_split_goes_on_bit_for_bit(tmp_path):
    undisturbed = train(job_of(tmp_path / "whole", "hanayo", "run.steps=12"))
    outcomes(job_of(tmp_path / "two", "hanayo", "run.steps=12"), stop_after(7))
    rows = train(job_of(tmp_path / "two", "hanayo", "run.steps=12", resume=True))
    assert losses(rows) == losses(undisturbed)
    one, other = (
        tensors_in(tmp_path / run / "checkpoints" / "step-00000012")
        for run in ("whole", "two")
    )
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_names_are_those_of_the_unsplit_model(tmp_path):
    job = job_of(tmp_path, "hanayo", "run.steps=1")
    train(job)
    trained = open_trained(tmp_path)
    assert trained.step == 1
    holding = hold_whole(job.sizes)
    assert set(trained.holding.parameters) == set(holding.parameters)
    assert not any(name.startswith("optimizer") for name in holding.parameters)


# ---------------------------------------------------------------- whole or not there
@pytest.mark.numerics
def test_saving_goes_on_while_training_does_and_keeps_the_last(tmp_path):
    job = job_of(
        tmp_path, "1f1b", "run.steps=20", "run.save_every=4", "run.keep_checkpoints=3"
    )
    undisturbed = train(job_of(tmp_path / "other", "1f1b", "run.steps=20"))
    rows = train(job)
    assert losses(rows) == losses(undisturbed)
    assert [path.name for path in newest(job.checkpoints)] == [
        "step-00000020",
        "step-00000016",
        "step-00000012",
    ]
    assert not list(job.checkpoints.glob("*.saving"))
    assert all(not faults(path) for path in newest(job.checkpoints))


def test_a_copy_is_saved_not_what_training_makes_of_it_meanwhile(tmp_path):
    tensor = torch.zeros(1000)
    saver = Saver(tmp_path, alone(), 2)
    saver.begin(1, {"x": tensor}, FACTS)
    tensor.fill_(7)
    saver.thread.join()
    saver.commit()
    found = torch.full((1000,), 3.0)
    load(tmp_path / "step-00000001", {"x": found})
    assert not found.any()


def test_a_checkpoint_is_on_the_disk_when_its_save_ends(tmp_path, monkeypatch):
    synced = []
    own = os.fsync
    final = tmp_path / "step-00000005"

    def note(handle: int) -> None:
        synced.append((os.fstat(handle).st_ino, final.exists()))
        own(handle)

    monkeypatch.setattr(os, "fsync", note)
    assert save_all(tmp_path, 5) == final
    note_of, folder = (one.stat().st_ino for one in (final / checkpoint.NOTE, tmp_path))
    assert synced[-2:] == [(note_of, False), (folder, True)]  # then it has its name


@pytest.mark.parametrize("moment", ["while writing", "before the rename"])
def test_a_crash_while_saving_leaves_the_last_good_one(moment, tmp_path, monkeypatch):
    good = save_all(tmp_path, 5)
    saver = Saver(tmp_path, alone(), 2)
    saver.begin(6, SOME, FACTS)
    saver.thread.join()
    if moment == "while writing":
        next(saver.path.glob("*.safetensors")).write_bytes(b"half a fi")
    else:
        monkeypatch.setattr(
            Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            saver.commit()
        monkeypatch.undo()
    assert newest_good(tmp_path) == good
    prune(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def flip_a_bit(file: Path) -> None:
    *rest, last = file.read_bytes()
    file.write_bytes(bytes([*rest, last ^ 1]))


def test_what_a_crash_has_left_does_not_get_into_the_next_checkpoint(tmp_path):
    job = job_of(tmp_path, "1f1b", "run.steps=2")
    left = job.checkpoints / "step-00000002.saving"
    left.mkdir(parents=True)
    (left / "shard-00001-model-00008-of-00008.safetensors").write_bytes(b"half")
    train(job)
    new = newest_good(job.checkpoints)
    assert new.name == "step-00000002"
    assert {file.name for file in new.iterdir()} == {
        checkpoint.NOTE,
        *read_facts(new)["files"],
    }


def rewrite(file: Path, **facts: object) -> None:
    note = file.parent / checkpoint.NOTE
    note.write_text(json.dumps(json.loads(note.read_text()) | facts))


def known_of(file: Path) -> dict[str, int]:
    """What the note of a checkpoint says about a file of it."""
    return read_facts(file.parent)["files"][file.name]


DAMAGES = {
    "a bit": (flip_a_bit, "does not have its checksum"),
    "cut off": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "bytes, not"),
    "missing": (lambda p: p.unlink(), "is missing"),
    "the note": (
        lambda p: (p.parent / "checkpoint.json").write_text("{"),
        "cannot be read",
    ),
    "no note": (lambda p: (p.parent / "checkpoint.json").unlink(), "cannot be read"),
    "another note": (
        lambda p: (p.parent / "checkpoint.json").write_text("[]"),
        "is not the note of a checkpoint",
    ),
    "its version": (lambda p: rewrite(p, version="2"), "its version cannot be read"),
    "its step": (lambda p: rewrite(p, step="x"), "its step cannot be read"),
    "its model": (lambda p: rewrite(p, model=[]), "its model cannot be read"),
    "its files": (lambda p: rewrite(p, files={p.name: {}}), "its files cannot be read"),
    "files elsewhere": (
        lambda p: rewrite(p, files={f"../{p.parent.name}/{p.name}": known_of(p)}),
        "its files cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_found_and_the_one_before_is_taken(damage, tmp_path, caplog):
    good, bad = save_all(tmp_path, 5), save_all(tmp_path, 10)
    spoil, words = DAMAGES[damage]
    spoil(next(bad.glob("*.safetensors")))
    assert newest_good(tmp_path) == good
    assert words in caplog.text
    assert str(bad) in caplog.text


def test_a_later_checkpoint_with_damage_displaces_no_new_one(tmp_path):
    save_all(tmp_path, 5)
    flip_a_bit(next(save_all(tmp_path, 10).glob("*.safetensors")))
    # The run has gone on from step 5. By its size alone the damaged one looks complete.
    new = save_all(tmp_path, 6, keep=1)
    assert [path.name[-2:] for path in newest(tmp_path)] == ["10", "06"]
    assert newest_good(tmp_path) == new


@pytest.mark.parametrize(
    "damage", ["cut off", "too long", "missing", "no note", "of fewer weights"]
)
def test_the_newest_complete_checkpoint_stays_beside_damaged_ones(damage, tmp_path):
    good = save_all(tmp_path, 5)
    for step in (10, 15):
        file = next(save_all(tmp_path, step).glob("*.safetensors"))
        if damage == "too long":
            file.write_bytes(file.read_bytes() + b"\0")
        elif damage == "of fewer weights":
            save_all(tmp_path, step, tensors=FEWER)
        else:
            DAMAGES[damage][0](file)
    prune(tmp_path, 1, SOME if damage == "of fewer weights" else ())
    assert newest(tmp_path) == [tmp_path / "step-00000015", good]


def test_damage_in_the_middle_of_a_large_file_is_found(tmp_path):
    path = save_all(tmp_path, 5, tensors={"a": torch.zeros(3 << 18)})  # 3 MiB
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert newest_good(tmp_path) is None


def test_the_newest_is_that_of_the_largest_step_and_a_folder(tmp_path):
    steps = (99_999_999, 100_000_000, 7)  # names of more digits are smaller texts
    for step in steps:
        (tmp_path / step_name(step)).mkdir()
    for other in ("step-00000008", "step-x"):
        (tmp_path / other).write_text("no checkpoint")
    (tmp_path / "step-00000009.saving").mkdir()
    assert [step_of(path) for path in newest(tmp_path)] == sorted(steps, reverse=True)


def test_a_complete_checkpoint_has_its_note_and_the_files_that_it_names(tmp_path):
    path = save_all(tmp_path, 5)
    found = {file.name for file in path.iterdir()}
    assert found == {checkpoint.NOTE, *read_facts(path)["files"]}


def test_the_newest_checkpoint_has_a_good_step_only_without_damage(tmp_path):
    assert good_step(tmp_path) == -1
    save_all(tmp_path, 5)
    path = save_all(tmp_path, 10)
    assert good_step(tmp_path) == 10
    flip_a_bit(next(path.glob("*.safetensors")))
    assert good_step(tmp_path) == -1


@pytest.mark.parametrize("moment", ["read_metadata", "read_data"])
def test_ctrl_c_while_a_checkpoint_loads_is_an_interrupt_and_no_fault_of_it(
    moment, tmp_path, monkeypatch, capsys
):
    config = apply_changes(SMALL, ["model.vocab_size=256"])
    train(job_of(tmp_path, "1f1b", "run.steps=1", config=config))
    own = getattr(HuggingFaceStorageReader, moment)

    def interrupted(*args: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return own(*args)

    # DCP catches whatever is raised in here, and raises an exception of its own.
    monkeypatch.setattr(HuggingFaceStorageReader, moment, interrupted)
    code, out, err = called(monkeypatch, capsys, f"generate {tmp_path} --max-tokens 2")
    assert (code, out, err) == (130, "", "Interrupted.\n")


def test_all_ranks_agree_when_one_of_them_finds_damage(tmp_path):
    job = job_of(tmp_path, "1f1b", "run.steps=4", "run.save_every=2")
    train(job)
    newer = newest(job.checkpoints)[0]
    file = sorted(newer.glob("*.safetensors"))[1]  # rank 1 reads it
    file.write_bytes(file.read_bytes()[:-4])
    found = run_threads(2, lambda comm: newest_good(job.checkpoints, comm))
    assert [path.name for path in found] == ["step-00000002"] * 2


def test_a_folder_that_another_rank_takes_away_is_made_again(tmp_path, monkeypatch):
    """It gives up when its disk is full, and this rank then says what is wrong with its own, if anything is."""
    taken = []

    def save(*args: object, **kwargs: object) -> object:
        if not taken:
            taken.append((tmp_path / "step-00000002.saving").rmdir())
        return dcp_save(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "dcp_save", save)
    saver = Saver(tmp_path, alone(), 2)
    saver.begin(2, {"weight": torch.ones(3)}, {})
    saver.finish()
    assert taken
    assert newest_good(tmp_path).name == "step-00000002"


def test_what_cannot_be_written_ends_the_run_and_loses_nothing(tmp_path):
    job = job_of(tmp_path, "1f1b", "run.steps=8", "run.save_every=2")
    train(job_of(tmp_path, "1f1b", "run.steps=2"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def work(comm):
        return Trainer(job, comm).run()

    # The system's own "File too large".
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(
            RunError,
            match=r"(?s)cannot write .*File too large.*last good checkpoint is .*00000002",
        ):
            run_threads(2, work, patience=20)
    finally:
        for thread in threading.enumerate():  # that still save for the other rank
            if thread.name.startswith("saves step"):
                thread.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert newest_good(job.checkpoints).name == "step-00000002"
    assert [path.name for path in job.checkpoints.iterdir()] == ["step-00000002"]


def test_a_checkpoint_for_which_there_is_no_room_is_not_begun(tmp_path, monkeypatch):
    job = job_of(tmp_path, "1f1b", "run.steps=8", "run.save_every=2")
    train(job_of(tmp_path, "1f1b", "run.steps=2"))
    taken = sum(
        tensor.nbytes for tensor in tensors_in(newest(job.checkpoints)[0]).values()
    )
    disk = [taken - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(*disk))
    words = (
        rf"(?s)checkpoint of step 2 takes {taken / 1e9:.3f} GB, but .*checkpoints has room for "
        rf"{disk[0] / 1e9:.3f} GB\n  the last good checkpoint is .*00000002; make room"
    )
    with pytest.raises(RunError, match=words):
        run_threads(2, lambda comm: Trainer(job, comm).run(), patience=20)
    assert [path.name for path in job.checkpoints.iterdir()] == ["step-00000002"]
    disk[0] = taken
    run_threads(2, lambda comm: Trainer(job, comm).run(), patience=20)
    assert newest_good(job.checkpoints).name == "step-00000008"


def test_an_export_that_finds_no_room_leaves_nothing_in_its_way(tmp_path):
    train(job_of(tmp_path, "1f1b", "run.steps=1", "model.hidden_size=64"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(FileError, match="cannot write"):
            export_run(tmp_path, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "out").iterdir())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    train(job_of(tmp_path, "1f1b", "run.steps=2"))
    with pytest.raises(RunError, match="is of another model"):
        train(
            job_of(
                tmp_path,
                "1f1b",
                "run.steps=4",
                "model.intermediate_size=32",
                resume=True,
            )
        )


def test_a_rank_that_is_ahead_and_saves_already_is_not_swept_away(tmp_path):
    first = Saver(tmp_path, alone(), 2)
    first.begin(5, SOME, FACTS)
    first.thread.join()
    for step in (4, 6):  # a crash has left one, another rank has begun the other
        (tmp_path / f"step-{step:08d}.saving").mkdir()
    first.commit()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000005",
        "step-00000006.saving",
    ]


def test_a_checkpoint_that_lacks_weights_of_the_model_is_not_complete(tmp_path, caplog):
    path = save_all(tmp_path, 5)
    assert not faults(path, ["a", "b"], quick=True)
    assert faults(path, ["a", "lost", "more"], quick=True)
    assert newest_good(tmp_path, names=["a", "b"]) == path
    assert newest_good(tmp_path, names=["a", "lost", "more"]) is None
    assert "it has no lost and 1 other weights" in caplog.text


def test_what_to_do_without_a_good_checkpoint_depends_on_whether_there_is_any(tmp_path):
    resumed = job_of(tmp_path, "1f1b", "run.steps=2", resume=True)
    with pytest.raises(
        RunError, match=r"no good checkpoint in .*\n  start without --resume"
    ):
        train(resumed)
    train(replace(resumed, resume=False))
    (
        newest(resumed.checkpoints)[0] / checkpoint.NOTE
    ).unlink()  # to start here would overwrite it, so that is not the advice
    with pytest.raises(
        RunError,
        match=r"all are damaged or lack weights of this model\n  start a new run in another",
    ):
        train(resumed)


def test_nothing_is_pickled_or_unpickled(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle")

    for module, names in (
        (pickle, ("load", "loads", "dump", "dumps")),
        (torch, ("load", "save")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    train(job_of(tmp_path, "1f1b", "run.steps=2"))
    rows = train(job_of(tmp_path, "hanayo", "run.steps=4", resume=True))
    assert len(rows) == 4
    kinds = {
        path.suffix for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()
    }
    assert kinds == {".safetensors", ".json"}


def test_a_later_version_is_refused(tmp_path):
    path = save_all(tmp_path, 1)
    facts = json.loads((path / checkpoint.NOTE).read_text())
    (path / checkpoint.NOTE).write_text(json.dumps(facts | {"version": 99}))
    with pytest.raises(FileError, match="upgrade"):
        read_facts(path)


# ---------------------------------------------------------------- Hugging Face
@pytest.mark.numerics
@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("model.tie_embeddings=true",),
        ("model.family=gpt", "model.tie_embeddings=true"),
    ],
)
def test_an_export_loads_in_transformers_with_equal_logits_and_training_starts_from_it(
    changes, tmp_path
):
    transformers = pytest.importorskip("transformers")
    job = job_of(tmp_path / "run", "hanayo", "run.steps=5", *changes)
    train(job)
    trained = export_run(tmp_path / "run", tmp_path / "hub")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub").eval()
    words = torch.randint(0, 31, (3, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(trained.model(words), theirs(words).logits, atol=1e-5)
    assert read_sizes(tmp_path / "hub") == job.sizes
    again = job_of(
        tmp_path / "more",
        "1f1b",
        "run.steps=1",
        *changes,
        f"model.path={tmp_path / 'hub'}",
    )
    first = train(again)[0].loss
    batch = again.corpus.sequence(0)
    assert len(batch) == 9
    with torch.no_grad():
        trainer = run_threads(2, lambda comm: _begun(again, comm))
    for held in trainer:
        for name, tensor in held.items():
            assert torch.equal(tensor, trained.holding.parameters[name])
    assert (
        first
        < train(job_of(tmp_path / "fresh", "1f1b", "run.steps=1", *changes))[0].loss
    )


def _begun(job, comm):
    trainer = Trainer(job, comm)
    trainer.begin()
    return dict(trainer.holding.parameters)


def test_an_export_adds_adapters_as_strongly_as_they_were_trained():
    parameters = {"up.weight": nn.Parameter(torch.zeros(3, 2))}
    ones = Adapter("up", down=torch.ones(4, 2), up=torch.ones(3, 4))
    sizes = sizes_of(SMALL.model, VOCAB, SMALL.data.seq_len)
    merge(parameters, [ones], sizes, LoraConfig(rank=4, alpha=8))
    assert parameters["up.weight"].unique().tolist() == [4 * 8 / 4]


def test_an_export_does_not_overwrite(tmp_path):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "x").touch()
    with pytest.raises(FileError, match="not empty"):
        export_run(tmp_path, tmp_path / "hub")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "t5"}, "type 't5'"),
        ({"hidden_size": None}, "does not have the sizes of a model"),
        ({"num_attention_heads": 0}, "does not have the sizes of a model"),
        ({"vocab_size": "many"}, "does not have the sizes of a model"),
    ],
)
def test_a_folder_of_a_model_that_cannot_be_trained_is_refused(change, words, tmp_path):
    train(job_of(tmp_path / "run", "1f1b", "run.steps=1"))
    export_run(tmp_path / "run", tmp_path / "hub")
    file = tmp_path / "hub" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(FileError, match=words):
        read_sizes(tmp_path / "hub")


def test_a_folder_without_safetensors_is_refused(tmp_path):
    config = apply_changes(SMALL, [f"model.path={tmp_path}"])
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileError, match="are pickles"):
        train(job_of(tmp_path / "run", "1f1b", "run.steps=1", config=config))
    with pytest.raises(FileError, match=r"cannot read .*config\.json"):
        read_sizes(tmp_path)
    config = apply_changes(SMALL, [f"model.path={tmp_path / 'missing'}/config.json"])
    with pytest.raises(FileError, match=r"model\.path is a folder with config"):
        settle_tokenizer(config)


# ---------------------------------------------------------------- text
def test_generation_goes_on_from_its_prompt_and_the_seed_decides(tmp_path):
    config = apply_changes(SMALL, ["model.vocab_size=256"])
    job = job_of(tmp_path, "1f1b", "run.steps=1", config=config)
    train(job)
    trained = open_trained(tmp_path)
    texts = [generate_text(trained, "ab", 20, seed=seed) for seed in (0, 0, 1)]
    assert texts[0].startswith("ab")
    assert texts[0] == texts[1] != texts[2]
    assert generate_text(trained, "ab", 5, temperature=0) == generate_text(
        trained, "ab", 5, temperature=0, seed=9
    )
    draw_parameters(trained.holding, 0)
    next(iter(trained.holding.parameters.values())).data.fill_(float("nan"))
    with pytest.raises(RunError, match="NaN or infinite logits"):
        generate_text(trained, "ab", 3)
    assert corpus().trained
    with pytest.raises(FileError, match="has no checkpoint"):
        open_trained(tmp_path / "nowhere")
