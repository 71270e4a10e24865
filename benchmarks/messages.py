"""Measures what smaller messages and cheaper sums of gradients cost a model and save, and what encryption costs.

    python benchmarks/messages.py            the tables of docs/results/networks.md (two cores, twenty minutes)
    python benchmarks/messages.py --quick    runs everything once, in seconds; writes nothing

Every run trains the same small Llama on Python's standard library, byte by byte, on ranks that are threads, with
penstock's own trainer. All runs of a seed start from the same weights and read the same text in the same order, so
differences are taken within a seed.

`messages`: through a 1F1B pipeline of four ranks.

    int8                gradients get back what rounding took from the last message of the same action (error feedback)
    int8, no feedback   every message is rounded for itself
    int8, all feedback  hidden states get it back, too

`sums`: through two copies of a pipeline of two ranks, with planned sums. All runs see the same number of tokens: a run
that sums every k passes has k times the batch and one k-th of the steps.

`steps`: the time of a step over links that are emulated in user space (`ShapedComm`): each message takes as long as its
bytes take at the bandwidth of its link, and nothing else is slowed down. In every round all kinds are measured one
after the other, and compared within the round.

`links`: two processes send each other large tensors and add up small ones, over gloo and over the encrypted links of a
run with `run.listen`. The time of the processor counts, which other work hardly changes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, Found, Row, Script, extremes, ratios, say, table
from shaped import ShapedComm

from penstock import Plan, make
from penstock.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
)
from penstock.cost import Network
from penstock.cost.profile import SUM_SHARES, sent_bytes
from penstock.crew.links import Exchange, GlooComm, WireComm
from penstock.crew.tls import KEY_FILE, keep_key
from penstock.ir.sums import SumKind, SumPlan
from penstock.runtime import Comm, run_threads
from penstock.runtime.passed_values import Feedback
from penstock.runtime.process.launch import LOCALHOST, keep_store
from penstock.torch_internals import PrefixStore, TCPStore
from penstock.train.data.corpus import Corpus, open_corpus
from penstock.train.history import StepRow, read_rows
from penstock.train.job import Job
from penstock.train.loop import Trainer
from penstock.train.weights import sizes_of

VOCAB, RATE = 256, 3e-3
MODEL = ModelConfig(
    layers=4,
    hidden_size=64,
    heads=4,
    kv_heads=4,
    intermediate_size=176,
    vocab_size=VOCAB,
)
DATA = DataConfig(seq_len=64, global_batch=16, tokenizer="bytes")
RUN = RunConfig(eval_every=0, save_every=0, checks="memory")
MESSAGES = Config(
    MODEL,
    DATA,
    ScheduleConfig(name="1f1b", microbatches=4),
    OptimizerConfig(lr=RATE, warmup_steps=20),
    RUN,
    parallel=ParallelConfig(pp=4),
)
SUMMING = Config(
    MODEL,
    replace(DATA, global_batch=8),
    ScheduleConfig(name="1f1b", microbatches=2),
    OptimizerConfig(lr=RATE),
    RUN,
    parallel=ParallelConfig(pp=2, dp_replicate=2),
)
KINDS = ("float32", "bfloat16", "int8", "int8, no feedback", "int8, all feedback")
TIMED_KINDS = KINDS[:3]
LINKS = {"10 Mbit/s": 1.25e6, "50 Mbit/s": 6.25e6, "1 Gbit/s": 1.25e8}  # bytes a second
SUMS = (
    SumPlan((0,), SumKind.DIRECT, (0, 2), (0.7, 0.3)),
    SumPlan((1,), SumKind.RING, (1, 3)),
)
WARM_UP_STEPS, WARM_UP_PASSES = 2, 40
NUMBERS = 1 << 20  # of a large tensor
ADDITIONS = 300


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    steps: int
    passes: int
    seeds: int
    timed_steps: int
    rounds: int
    tensors: int  # over each kind of link
    kinds: int = 9  # of each experiment, at most
    pool: Any = multiprocessing.get_context("spawn").Pool


FULL = Scale(steps=200, passes=300, seeds=3, timed_steps=8, rounds=5, tensors=64)
QUICK = Scale(
    steps=1,
    passes=2,
    seeds=1,
    timed_steps=3,
    rounds=1,
    tensors=2,
    kinds=2,
    pool=ThreadPool,
)
QUICK_SOURCES = (str(ROOT / "benchmarks"),)


@dataclass(frozen=True, slots=True)
class Sum:
    """A way to sum: every so many passes, in messages of a type, with a learning rate."""

    passes: int = 1
    messages: str = "float32"
    rate: float = RATE


SUM_KINDS = (
    Sum(),
    Sum(messages="int8"),
    Sum(2, rate=RATE * math.sqrt(2)),
    Sum(4),
    Sum(4, rate=RATE * 2),
)


# ---------------------------------------------------------------- runs
def message_job(corpus: Corpus, folder: Path, kind: str, seed: int, steps: int) -> Job:
    """The run of one kind of messages."""
    kinds = kind.partition(",")[0]
    run = replace(RUN, comm_dtype=kinds, seed=seed, steps=steps, log_every=steps)
    sizes = sizes_of(MODEL, VOCAB, DATA.seq_len)
    plan = Plan(make("1f1b", ranks=4, microbatches=4), "1f1b")
    return Job(replace(MESSAGES, run=run), plan, sizes, corpus, folder)


def sum_job(corpus: Corpus, folder: Path, kind: Sum, seed: int, passes: int) -> Job:
    """The run of one kind of sums, over so many passes."""
    steps = passes // kind.passes
    warmup = min(WARM_UP_PASSES // kind.passes, steps - 1)
    run = replace(SUMMING.run, seed=seed, steps=steps, log_every=steps)
    config = replace(
        SUMMING,
        data=replace(
            SUMMING.data, global_batch=SUMMING.data.global_batch * kind.passes
        ),
        optimizer=OptimizerConfig(lr=kind.rate, warmup_steps=warmup),
        run=replace(run, accumulate=kind.passes),
    )
    sizes = sizes_of(MODEL, VOCAB, DATA.seq_len)
    schedule = make("1f1b", ranks=2, microbatches=2, copies=2)
    plan = Plan(schedule, "1f1b", why=(("sum_messages", kind.messages),), sums=SUMS)
    return Job(config, plan, sizes, corpus, folder)


def train(
    job: Job, kind: str = "", shape: Callable[[Comm], Comm] = lambda comm: comm
) -> list[StepRow]:
    """Train on threads; return the rows of all steps."""

    def work(comm: Comm) -> None:
        trainer = Trainer(job, shape(comm))
        for executor in trainer.executors.executors:
            if kind.endswith("no feedback"):
                executor.feedback = None
            elif kind.endswith("all feedback"):
                executor.feedback = Feedback(states=True)
        trainer.run()

    run_threads(job.plan.schedule.ranks, work, patience=600)
    return read_rows(job.folder)


def measure_losses(
    seeds: int, jobs: Mapping[str, Callable[[Path, int], Job]]
) -> dict[str, list[float]]:
    """The held-out loss at the end, for each kind and seed."""
    losses: dict[str, list[float]] = {kind: [] for kind in jobs}
    for seed in range(seeds):
        for kind, job_in in jobs.items():
            with tempfile.TemporaryDirectory() as name:
                row = train(job_in(Path(name), seed), kind)[-1]
            assert row.evaluation is not None
            losses[kind].append(row.evaluation)
            say(f"seed {seed}  {kind:20}  held-out loss {row.evaluation:.4f}")
    return losses


def measure_seconds(corpus: Corpus, scale: Scale) -> list[Row]:
    """The median seconds of a step over each link, for each kind and round."""
    links = dict(list(LINKS.items())[-scale.kinds :])
    seconds: dict[str, dict[str, list[float]]] = {
        link: {kind: [] for kind in TIMED_KINDS} for link in links
    }
    for _ in range(scale.rounds):
        for link, bandwidth in links.items():
            network = Network(0.0, bandwidth, serial=True)
            for kind in TIMED_KINDS:
                with tempfile.TemporaryDirectory() as name:
                    job = message_job(corpus, Path(name), kind, 0, scale.timed_steps)
                    rows = train(job, kind, partial(ShapedComm, network=network))
                steps = [row.seconds for row in rows[WARM_UP_STEPS:]]
                seconds[link][kind].append(statistics.median(steps))
    return [
        {
            "link": link,
            "steps": {kind: statistics.median(some) for kind, some in kinds.items()},
            "gains": {
                kind: extremes(ratios(kinds["float32"], some))
                for kind, some in kinds.items()
            },
        }
        for link, kinds in seconds.items()
    ]


# ---------------------------------------------------------------- encryption
def measure_links(scale: Scale) -> list[Row]:
    """Seconds of a processor to send a GB, to receive it, and to add four numbers."""
    store = keep_store()
    results: dict[str, list[tuple[float, float, float]]] = {"gloo": [], "encrypted": []}
    with tempfile.TemporaryDirectory() as name:
        keep_key(Path(name) / KEY_FILE)
        for turn, kind in itertools.product(range(scale.rounds), results):
            words = (kind, f"{kind} {turn}", store.port, name, scale.tensors)
            with scale.pool(2) as pool:
                tasks = [
                    pool.apply_async(exchange_tensors, (rank, *words))
                    for rank in (0, 1)
                ]
                (sending, adding), (receiving, _) = (task.get() for task in tasks)
            results[kind].append((sending, receiving, adding))
    rows = []
    for kind, rounds in results.items():
        send, receive, add = map(extremes, zip(*rounds, strict=True))
        rows.append({"link": kind, "send": send, "receive": receive, "add": add})
    return rows


def exchange_tensors(
    rank: int, kind: str, meeting: str, port: int, folder: str, tensors: int
) -> tuple[float, float]:
    """Send or receive tensors of 4 MB, and add up small ones; return the seconds of a GB and of a sum."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = PrefixStore(meeting, TCPStore(LOCALHOST, port, is_master=False))
    if kind == "gloo":
        comm = GlooComm(store, rank, 2, 600.0, lambda: False)
    else:
        exchange = Exchange(f"{LOCALHOST}:0", Path(folder) / KEY_FILE, 2)
        comm = WireComm(store, rank, 2, 600.0, lambda: False, exchange, meeting)
    tensor = torch.ones(NUMBERS)

    def pass_on() -> None:
        for _ in range(tensors):
            if rank == 0:
                comm.send(tensor, 1).wait()
            else:
                comm.receive((NUMBERS,), torch.float32, 0).wait()
        comm.barrier()

    pass_on()
    began = time.process_time()
    pass_on()
    seconds = (time.process_time() - began) / (tensors * tensor.nbytes) * 1e9
    began = time.process_time()
    for _ in range(ADDITIONS):
        comm.add(torch.ones(4, dtype=torch.float64), (0, 1)).wait()
    sums = (time.process_time() - began) / ADDITIONS
    comm.barrier()
    return seconds, sums


# ---------------------------------------------------------------- the script
def measure(given: argparse.Namespace) -> Found:
    scale = QUICK if given.quick else FULL
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        sources = QUICK_SOURCES if given.quick else DATA.sources
        corpus = open_corpus(replace(DATA, sources=sources), Path(cache))
        messages = {
            kind: lambda folder, seed, kind=kind: message_job(
                corpus, folder, kind, seed, scale.steps
            )
            for kind in KINDS[: scale.kinds]
        }
        sums = {
            str(number): lambda folder, seed, kind=kind: sum_job(
                corpus, folder, kind, seed, scale.passes
            )
            for number, kind in enumerate(SUM_KINDS[: scale.kinds])
        }
        found = {
            "messages": measure_losses(scale.seeds, messages),
            "sums": measure_losses(scale.seeds, sums),
            "steps": measure_seconds(corpus, scale),
        }
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    where = f"{cores}, torch {torch.__version__}"
    return {**found, "links": measure_links(scale), "where": where}


def with_differences(losses: Mapping[str, list[float]]) -> list[Row]:
    """A row for each kind, with its differences to the first one within a seed."""
    base = next(iter(losses.values()))
    rows = []
    for kind, values in losses.items():
        apart = [one - other for one, other in zip(values, base, strict=True)]
        mean, least, most = statistics.fmean(apart), min(apart), max(apart)
        each = " ".join(f"{value:.4f}" for value in values)
        difference = f"{mean:+.4f} ({least:+.4f} to {most:+.4f})"
        row = {"kind": kind, "each": each}
        rows.append(row | {"apart": "" if values is base else difference})
    return rows


def tables(found: Found) -> dict[str, str]:
    def kilobytes(row: Row) -> str:
        """The size of a message between two ranks."""
        rows = DATA.global_batch // 4
        kind = row["kind"].partition(",")[0]
        sent = sent_bytes(rows * MODEL.hidden_size * 4, rows, kind)
        return f"{sent * DATA.seq_len / 1e3:.1f}"

    losses = {
        "held-out loss of each seed": "{each}",
        "difference to the first row, mean (range)": "{apart}",
    }
    messages = {"p2p communication dtype": "{kind}", "size of one, kB": kilobytes}
    sums: dict[str, str | Callable[[Row], str]] = {
        "passes for each sum": "{passes}",
        "gradient all-reduce dtype": "{messages}",
        "learning rate, thousandths": "{rate!m:.2g}",
        "bytes of sums": "{share:.0%}",
    }
    kinds = [
        {"passes": kind.passes, "messages": kind.messages, "rate": kind.rate}
        | {"share": SUM_SHARES[kind.messages] / kind.passes, **row}
        for kind, row in zip(SUM_KINDS, with_differences(found["sums"]), strict=False)
    ]
    steps = {"link": "{link}", "float32, ms": "{steps[float32]!m:,.0f}"}
    for kind in TIMED_KINDS[1:]:
        steps[f"{kind}, ms"] = f"{{steps[{kind}]!m:,.0f}}"
        steps[f"{kind}, times as fast"] = f"{{gains[{kind}]:.2f}}"
    links = {
        "link": "{link}",
        "send 1 GB, s": "{send:.2f}",
        "receive 1 GB, s": "{receive:.2f}",
        "sum of 4 numbers, µs": "{add!u:.0f}",
    }
    made = {
        "messages": table(with_differences(found["messages"]), messages | losses),
        "sums": table(kinds, sums | losses),
        "messages: links": table(found["steps"], steps),
        "messages: encryption": table(found["links"], links),
    }
    return {name: f"{text}\n\nWith {found['where']}." for name, text in made.items()}


if __name__ == "__main__":
    Script(__doc__, measure, tables).main()
