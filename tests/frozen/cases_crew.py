"""What workers that survive losses decide, send and store: decisions, messages, keys, and mended checkpoints."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from penstock import Plan, make
from penstock.config import Config, ElasticConfig, RunConfig
from penstock.crew.coordinator import Coordinator, Worker
from penstock.crew.decision import (
    Decision,
    Report,
    Situation,
    decide,
    load_decision,
    load_report,
)
from penstock.crew.links import Address, Inbox, Links, TensorTransfer
from penstock.crew.pace import PaceWatch
from penstock.crew.tls import context_of, receive_frame, send_frame
from penstock.errors import PenstockError
from penstock.ir.sums import SumKind, SumPlan
from penstock.runtime import run_threads
from penstock.schedules.transforms import replicate
from penstock.train.checkpoints.folders import RunFolders
from penstock.train.checkpoints.place import RemoteCheckpoints, fetch_newest
from penstock.train.checkpoints.separate import SeparateCheckpoints
from penstock.train.elastic import first_plan, rank_work, speed_limit, split_address
from penstock.train.history import EventLog, StepFigures, read_events

TOLERANCE = 1e-9
KEY = Path(__file__).with_name("old_key.pem")
FIGURES = StepFigures(2.5, 0.5, 100, 1.0, None, False)
TWO_COPIES = Plan(
    replicate(make("1f1b", ranks=2, microbatches=2), 2), "1f1b copies=2", (3, 1)
)
THREE_COPIES = Plan(
    replicate(make("1f1b", ranks=2, microbatches=2), 3),
    "1f1b copies=3",
    (2, 2),
    sums=(
        SumPlan((0,), SumKind.DIRECT, (0, 2, 4), (0.6, 0.3, 0.1)),
        SumPlan((1,), SumKind.TWO_LEVELS, (1, 3, 5), groups=((1, 3), (5,)), whole=True),
    ),
)
ALONE = Plan(make("1f1b", ranks=3, microbatches=4), "1f1b", (2, 1, 1))
PLANS = {"two copies": TWO_COPIES, "three copies": THREE_COPIES, "alone": ALONE}


def cases() -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {}
    for name, plan in PLANS.items():
        for lost in ((), (0,), (1,), (0, 1), (1, 2)):
            for mirror, saved in product((False, True), (-1, 4)):
                title = f"decision: {name}, lost {lost}, mirror {mirror}, saved {saved}"
                found[title] = partial(loss, plan, lost, mirror, saved)
        found[f"decision: {name}, slow"] = partial(slowness, plan)
        found[f"decision: {name}, joined"] = partial(arrival, plan)
    found |= {
        "decision: one rank is a step ahead": one_ahead,
        "decision: a worker moves": partial(moves, moving=True),
        "decision: no worker moves": partial(moves, moving=False),
        "decision: plans for fewer workers": fewer_workers,
        "launcher: what it says": launcher_texts,
        "paces": paces,
        "notes": notes,
        "frames: bytes": frame_bytes,
        "frames: refused": refused_frames,
        "links: bytes": link_bytes,
        "links: too early": too_early,
        "addresses": addresses,
        "key": key,
    }
    for place, damage in product(PLACES, DAMAGES):
        found[f"mended: {place} {damage}"] = partial(mended, place, damage)
        found[f"mended apart: {place} {damage}"] = partial(mended_apart, place, damage)
    return found


# ---------------------------------------------------------------- decisions
def told(decision: Decision) -> dict[str, object]:
    """All that workers are told; of the plan, what it does and not how it is written."""
    assert load_decision(decision.dump()) == decision
    plan = decision.plan
    return {
        "members": decision.members,
        "seats": decision.seats,
        "step": [decision.step, decision.seen, decision.figures is not None],
        "flags": [decision.keep, decision.resume, decision.save, decision.close],
        "transfers": decision.transfers,
        "mirrors": decision.mirrors,
        "restores": decision.restores,
        "plan": [plan.name, decision.whole],
        "stages": [tuple(stage) for stage in stages_of(plan)],
        "sums": [[one.ranks, one.shares, one.groups] for one in plan.sums],
        "work": rank_work(plan),
    }


def stages_of(plan: Plan) -> Iterator[tuple[int, int]]:
    for stage in plan.schedule.stages:
        yield stage.rank, stage.part


def parts_of(plan: Plan, rank: int) -> tuple[int, ...]:
    return tuple(sorted({part for holder, part in stages_of(plan) if holder == rank}))


def reports_at(plan: Plan, step: int, mirror: bool) -> dict[int, Report]:
    """What the workers of an undisturbed run have."""
    start = {n: Report(n) for n in range(plan.schedule.ranks)}
    mirrors = decide(Situation(plan, start, 1, False, mirror)).mirrors
    kept: dict[int, list[int]] = {n: [] for n in start}
    for part, _, target in mirrors:
        kept[target].append(part)
    return {
        n: Report(
            n, step, FIGURES, parts=parts_of(plan, n), mirrors=tuple(kept[n]), seen=9
        )
        for n in start
    }


def loss(plan: Plan, lost: tuple[int, ...], mirror: bool, saved: int) -> object:
    reports = reports_at(plan, 4, mirror)
    for worker in lost:
        del reports[worker]
    return told(decide(Situation(plan, reports, 2, False, mirror, lambda: saved)))


def slowness(plan: Plan) -> object:
    reports = reports_at(plan, 4, True)
    decision = decide(Situation(plan, reports, 2, False, True, paces={0: 3.0}))
    limit = speed_limit(plan, decision.seats, {0: 3.0})
    return [told(decision), limit]


def arrival(plan: Plan) -> object:
    reports = reports_at(plan, 4, True)
    before = {n: n for n in reports if n != 1}
    reports[1] = Report(1, newcomer=True)
    return told(decide(Situation(plan, reports, 3, False, True, seats=before)))


def one_ahead() -> object:
    reports = reports_at(TWO_COPIES, 4, False)
    del reports[3]
    reports[0] = Report(0, 5, FIGURES, saving=True, parts=(0,), seen=11)
    return told(decide(Situation(TWO_COPIES, reports, 2, False, written=lambda: 4)))


def moves(moving: bool) -> object:
    reports = reports_at(TWO_COPIES, 4, False)
    del reports[0]
    seats = {n: n for n in range(4)}
    return told(
        decide(Situation(TWO_COPIES, reports, 2, False, seats=seats, moving=moving))
    )


def fewer_workers() -> object:
    plans = [first_plan(plan, count) for plan in PLANS.values() for count in (0, 2)]
    return [[plan.name, list(stages_of(plan)), rank_work(plan)] for plan in plans]


def launcher_texts() -> object:
    """What the launcher says and writes down when workers are lost, move, or come back."""

    def nobody(*words: Any) -> Any:
        raise AssertionError("no worker is started")

    with folder_of_a_run() as run:
        said: list[str] = []
        settings = Config(
            run=RunConfig(timeout=12_000.0),
            elastic=ElasticConfig(restarts=0),
        )
        coordinator = Coordinator(nobody, run, TWO_COPIES, settings, False, said.append)
        coordinator.own_workers = 4
        coordinator.workers = {n: Worker(n, Alive()) for n in range(4)}  # type: ignore[arg-type]

        def go_on(*reports: Report) -> None:
            coordinator.reports = {one.worker: one for one in reports}
            for lost in coordinator.workers.keys() - coordinator.reports.keys():
                del coordinator.workers[lost]
            coordinator.broken_at = 0.0
            coordinator.begin_generation()

        go_on(*map(Report, range(4)))
        coordinator.losses = ["worker 0 was killed by SIGKILL"]
        go_on(*(Report(n, 4, FIGURES, parts=(n % 2,)) for n in (1, 2, 3)))
        seats = coordinator.decision.seat_of if coordinator.decision is not None else {}
        coordinator.changed_paces = ["worker 1 is as fast as before again"]
        parts = {1: (1,), 2: (0,), 3: (0,)}
        go_on(*(Report(n, 5, FIGURES, parts=own) for n, own in parts.items()))
        coordinator.losses = ["worker 1 ended with exit code 1 before it could say why"]
        go_on(*(Report(n, 6, FIGURES, parts=(0,)) for n in (2, 3)))
        coordinator.write_event()
        events = [
            [e.step, e.event, e.text, e.members, e.speed, e.limit, e.back]
            for e in read_events(run)
        ]
        EventLog(run, resume=False)
        return [said, sorted(seats.items()), events, len(read_events(run))]


class Alive:
    """A process that lives."""

    pid = None


def paces() -> object:
    watch = PaceWatch(1.5)
    work = {0: 1.0, 1: 2.0, 2: 1.0}
    changes = []
    for factor in (1, 1, 1, 4, 4, 4, 4, 1, 1, 1, 1):
        seconds = {0: 1.0, 1: 2.0 * factor, 2: 1.0}
        changes.append(watch.hear(seconds, work))
    return [changes, watch.paces]


def notes() -> object:
    report = Report(3, 7, FIGURES, True, (0, 2), "rank 1 is lost", mirrors=(1,))
    assert load_report(report.dump()) == report
    return json.loads(report.dump())


# ---------------------------------------------------------------- messages
def frame_bytes() -> object:
    near, far = socket.socketpair()
    with near, far:
        sent = {"want": "place", "version": "1", "name": "größer", "of": [1, 2.5, None]}
        send_frame(near, sent)
        raw = far.recv(1 << 16)
        send_frame(near, sent)
        assert receive_frame(far) == sent
        return raw.hex()


def refused_frames() -> object:
    contents = {
        "too long": b"\x7f\xff\xff\xff",
        "no JSON": b"\x00\x00\x00\x01{",
        "no object": b"\x00\x00\x00\x02[]",
        "cut off": b"\x00\x00\x00\x09{",
        "deep": b"\x00\x01\x00\x00" + b"[" * (1 << 16),
    }
    texts = {}
    for name, content in contents.items():
        near, far = socket.socketpair()
        with near:
            with far:
                threading.Thread(target=far.sendall, args=(content,)).run()
            texts[name] = text_of(lambda near=near: receive_frame(near))
    return texts


def link_bytes() -> object:
    """What a tensor looks like on the wire, and what becomes of one of another size."""
    ours, theirs = socket.socketpair()
    back, forth = socket.socketpair()
    links = Links(0, {1: ours}, {1: back})  # type: ignore[dict-item]
    links.send(torch.arange(3, dtype=torch.int16), 1, Address(5, 7)).wait()
    raw = theirs.recv(1 << 10)
    room = torch.zeros(3, dtype=torch.int16)
    arriving = links.receive(room, 1, Address(5, 7))
    forth.sendall(raw)
    arriving.wait()
    wrong = links.receive(torch.zeros(9), 1, Address(5, 7))
    forth.sendall(raw)
    fault = text_of(wrong.wait)
    for one in (ours, theirs, back, forth):
        one.close()
    return [raw.hex(), room.tolist(), fault]


def too_early() -> object:
    inbox = Inbox(most_early=1000)
    inbox.admit(600)
    transfer = TensorTransfer(memoryview(bytearray(3)))
    assert inbox.keep(Address(0, 1), bytearray(b"abcd")) is None
    inbox.expect(Address(0, 1), transfer)
    return [text_of(lambda: inbox.admit(600)), text_of(transfer.wait)]


def addresses() -> object:
    texts = ("10.0.0.1:29500", "[::1]:80", "host", "host:", ":80", "host:x", "h:70000")
    return [
        text_of(lambda text=text: split_address(text, "elastic.listen"))
        for text in texts
    ]


def key() -> object:
    found = []
    for server in (False, True):
        context = context_of(KEY, server=server)
        (certificate,) = context.get_ca_certs()
        fields = ("subject", "notBefore", "notAfter", "serialNumber")
        found.append([certificate[field] for field in fields])
        found.append([context.minimum_version.name, context.verify_mode.name])
    with folder_of_a_run() as run:
        (run / "text.pem").write_text("no key")
        for name in ("text.pem", "missing.pem"):
            text = text_of(lambda name=name: context_of(run / name, server=True))
            found.append(str(text).replace(str(run), "RUN"))
    return found


def text_of(work: Callable[[], object]) -> object:
    try:
        return work()
    except (PenstockError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------- checkpoints
FILES = {"a.safetensors": b"weights of a", "b.safetensors": b"weights of b"}
PLACES = (
    *("b.safetensors here", "note here", "b.safetensors everywhere", "note everywhere"),
    *("b.safetensors in the storage", "note in the storage", "the other folder"),
)
DAMAGES = ("truncated", "flipped", "missing")


@contextmanager
def folder_of_a_run() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name).resolve()


def write_checkpoint(folder: Path, step: int, names: Mapping[str, bytes]) -> None:
    """Write a checkpoint of which a folder has only some files."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    known = {n: {"bytes": len(c), "crc32": zlib.crc32(c)} for n, c in FILES.items()}
    facts = {"penstock": "checkpoint", "step": step, "files": known}
    (path / "checkpoint.json").write_text(json.dumps(facts))
    for name, content in names.items():
        (path / name).write_bytes(content)


def spoil(file: Path, damage: str) -> None:
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[:-1])
    else:
        file.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])


def spoil_place(place: str, damage: str, folders: Mapping[str, Path]) -> None:
    """Damage the newest checkpoint in some of the folders."""
    name, _, where = place.partition(" ")
    if place == "the other folder":
        name, where = "a.safetensors", "in other"
    name = "checkpoint.json" if name == "note" else name
    chosen = {
        "here": ["here"],
        "in the storage": ["storage"],
        "everywhere": list(folders),
        "in other": ["other"],
    }[where]
    for one in chosen:
        file = folders[one] / "step-00000002" / name if one in folders else None
        if file is not None and file.is_file():
            spoil(file, damage)


def state_of(folders: Mapping[str, Path]) -> dict[str, object]:
    found = {}
    for name, folder in folders.items():
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                label = f"{name}/{file.relative_to(folder)}"
                found[label] = zlib.crc32(file.read_bytes())
    return found


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what is logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("penstock")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def mended(place: str, damage: str) -> object:
    """A folder that all ranks see, and a storage."""
    with folder_of_a_run() as run, heard() as lines:
        folders = {"here": run / "here", "storage": run / "storage"}
        for folder in folders.values():
            for step in (1, 2):
                write_checkpoint(folder, step, FILES)
        spoil_place(place, damage, folders)
        remote = RemoteCheckpoints(f"file://{folders['storage']}", keep=2)
        found = fetch_newest(remote, folders["here"])
        again = fetch_newest(remote, folders["here"])
        shutil.rmtree(folders["here"])
        fresh = fetch_newest(remote, folders["here"])
        names = [path.name if path else None for path in (found, again, fresh)]
        return [
            names,
            state_of(folders),
            [line.replace(str(run), "RUN") for line in lines],
        ]


def mended_apart(place: str, damage: str) -> object:
    """Two machines that have different files of a checkpoint, a third one without any, and a storage."""
    with folder_of_a_run() as run, heard() as lines:
        names = ("here", "other", "new")
        folders = {name: run / name for name in (*names, "storage")}
        for step in (1, 2):
            b = FILES["b.safetensors"]
            write_checkpoint(folders["here"], step, FILES)
            write_checkpoint(folders["other"], step, {"b.safetensors": b})
            write_checkpoint(folders["storage"], step, FILES)
        spoil_place(place, damage, folders)
        apart = RunFolders((0, 1, 2), names, tuple(str(folders[n]) for n in names))
        remote = RemoteCheckpoints(f"file://{folders['storage']}", keep=2)

        def work(comm: Any) -> object:
            own = folders[names[comm.rank]]
            search = SeparateCheckpoints(own, comm, apart, (remote,))
            path = search.newest_good()
            text = "" if path else str(search.nothing_found())
            return [path.name if path else None, text, search.faults]

        results = json.loads(json.dumps(run_threads(3, work, patience=300)))
        told = json.dumps([results[0], state_of(folders), sorted(lines)])
        return json.loads(told.replace(str(run), "RUN"))
