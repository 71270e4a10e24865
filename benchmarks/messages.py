"""Measures what smaller messages between ranks cost a model and save on slow links, and what encryption costs.

    python benchmarks/messages.py            two cores, about ten minutes: writes docs/results/messages.md
    python benchmarks/messages.py --quick    runs everything once, in seconds; writes nothing

Every run trains the same small Llama on Python's standard library, byte by byte, through a 1F1B pipeline of four ranks
that are threads, with penstock's own trainer. All runs of a seed start from the same weights and read the same text in
the same order, so differences are taken within a seed.

    int8                gradients get back what rounding took from the last message of the same action (error feedback)
    int8, no feedback   every message is rounded for itself
    int8, all feedback  hidden states get it back, too

The time of a step is measured over links that are emulated in user space (`ShapedComm`): each message takes as long as
its bytes take at the bandwidth of its link, and nothing else is slowed down. In every round all kinds are measured one
after the other, and compared within the round; the page has the medians over the rounds, and how far the rounds differ.

For encryption, two processes send each other large tensors and add up small ones, over gloo and over the encrypted
links of a run with `elastic.listen`. The time of the processor counts, which other work hardly changes.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from shaped import ShapedComm
from tables import middle_and_range, table

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
from penstock.cost.profile import sent_bytes
from penstock.crew.links import Exchange, GlooComm, WireComm
from penstock.crew.tls import KEY_FILE, keep_key
from penstock.runtime import Comm, run_threads
from penstock.runtime.passed_values import Feedback
from penstock.runtime.process.launch import LOCALHOST, keep_store
from penstock.torch_internals import PrefixStore, TCPStore
from penstock.train.data.corpus import Corpus, open_corpus
from penstock.train.history import StepRow, read_rows
from penstock.train.job import Job
from penstock.train.loop import Trainer
from penstock.train.weights import sizes_of

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "results" / "messages.md"
VOCAB = 256
RANKS = 4
KINDS = ("float32", "bfloat16", "int8", "int8, no feedback", "int8, all feedback")
TIMED_KINDS = KINDS[:3]
LINKS = {"10 Mbit/s": 1.25e6, "50 Mbit/s": 6.25e6, "1 Gbit/s": 1.25e8}  # bytes a second
WARM_UP_STEPS = 2
NUMBERS = 1 << 20  # of a large tensor
StepSeconds = dict[str, dict[str, list[float]]]  # by link, kind and round
CoreSeconds = dict[str, list[tuple[float, float, float]]]  # by kind of link and round
SUMS = 300


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    steps: int
    seeds: int
    timed_steps: int
    rounds: int
    tensors: int  # over each kind of link


FULL = Scale(steps=200, seeds=3, timed_steps=8, rounds=5, tensors=64)
QUICK = Scale(steps=3, seeds=1, timed_steps=3, rounds=1, tensors=2)
CONFIG = Config(
    ModelConfig(
        layers=4,
        hidden_size=64,
        heads=4,
        kv_heads=4,
        intermediate_size=176,
        vocab_size=VOCAB,
    ),
    DataConfig(seq_len=64, global_batch=16, validation=0.02, tokenizer="bytes"),
    ScheduleConfig(name="1f1b", microbatches=4),
    OptimizerConfig(lr=3e-3, warmup_steps=20),
    RunConfig(eval_every=0, save_every=0, checks="forecast,memory"),
    parallel=ParallelConfig(pp=RANKS),
)


def job_of(corpus: Corpus, folder: Path, kind: str, seed: int, steps: int) -> Job:
    """The run of one kind of messages."""
    run = replace(
        CONFIG.run,
        comm_dtype=kind.partition(",")[0],
        seed=seed,
        steps=steps,
        log_every=steps,
    )
    config = replace(CONFIG, run=run)
    schedule = make("1f1b", ranks=RANKS, microbatches=4)
    sizes = sizes_of(config.model, VOCAB, config.data.seq_len)
    return Job(config, Plan(schedule, "1f1b"), sizes, corpus, folder)


def train(
    job: Job, kind: str, shape: Callable[[Comm], Comm] = lambda comm: comm
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

    run_threads(RANKS, work, patience=600)
    return read_rows(job.folder)


def measure_loss(corpus: Corpus, scale: Scale) -> dict[str, list[float]]:
    """The held-out loss at the end, for each kind and seed."""
    losses: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(scale.seeds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as name:
                job = job_of(corpus, Path(name), kind, seed, scale.steps)
                row = train(job, kind)[-1]
            assert row.evaluation is not None
            losses[kind].append(row.evaluation)
            print(f"seed {seed}  {kind:20}  held-out loss {row.evaluation:.4f}")
    return losses


def measure_seconds(corpus: Corpus, scale: Scale) -> StepSeconds:
    """The median seconds of a step over each link, for each kind and round."""
    seconds: StepSeconds = {link: {kind: [] for kind in TIMED_KINDS} for link in LINKS}
    for _ in range(scale.rounds):
        for link, bandwidth in LINKS.items():
            network = Network(0.0, bandwidth, serial=True)
            for kind in TIMED_KINDS:
                with tempfile.TemporaryDirectory() as name:
                    job = job_of(corpus, Path(name), kind, 0, scale.timed_steps)
                    rows = train(job, kind, partial(ShapedComm, network=network))
                steps = [row.seconds for row in rows[WARM_UP_STEPS:]]
                seconds[link][kind].append(statistics.median(steps))
    return seconds


# ---------------------------------------------------------------- encryption
def measure_links(scale: Scale) -> CoreSeconds:
    """Seconds of a processor to send a GB, to receive it, and to add four numbers, for each kind of link and round."""
    store = keep_store()
    context = multiprocessing.get_context("spawn")
    results: CoreSeconds = {"gloo": [], "encrypted": []}
    with tempfile.TemporaryDirectory() as name:
        keep_key(Path(name) / KEY_FILE)
        for turn, kind in itertools.product(range(scale.rounds), results):
            words = (kind, f"{kind} {turn}", store.port, name, scale.tensors)
            with context.Pool(2) as pool:
                tasks = [
                    pool.apply_async(exchange_tensors, (rank, *words))
                    for rank in (0, 1)
                ]
                (sending, adding), (receiving, _) = (task.get() for task in tasks)
            results[kind].append((sending, receiving, adding))
    return results


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
    for _ in range(SUMS):
        comm.add(torch.ones(4, dtype=torch.float64), (0, 1)).wait()
    sums = (time.process_time() - began) / SUMS
    comm.barrier()
    return seconds, sums


def link_table(links: CoreSeconds) -> str:
    """The time of the processor for each kind of link."""
    rows = []
    for kind, rounds in links.items():
        sending, receiving, adding = zip(*rounds, strict=True)
        seconds = [
            middle_and_range(values, ".2f", " s") for values in (sending, receiving)
        ]
        sums = middle_and_range([1e6 * one for one in adding], ".0f", " µs")
        rows.append([kind, *seconds, sums])
    return table("link | send 1 GB | receive 1 GB | sum of 4 numbers", rows, ("link",))


# ---------------------------------------------------------------- the page
def message_kilobytes(kind: str) -> float:
    """The size of a message between two ranks."""
    rows = CONFIG.data.global_batch // 4
    message = rows * CONFIG.model.hidden_size * 4
    sent = sent_bytes(message, rows, kind.partition(",")[0])
    return sent * CONFIG.data.seq_len / 1e3


def loss_table(losses: dict[str, list[float]]) -> str:
    """The held-out losses, with the differences to float32 within a seed."""
    base = losses["float32"]
    rows = []
    for kind, values in losses.items():
        differences = [one - other for one, other in zip(values, base, strict=True)]
        mean = statistics.fmean(differences)
        spread = f"{min(differences):+.4f} to {max(differences):+.4f}"
        each = " ".join(f"{value:.4f}" for value in values)
        difference = "" if kind == "float32" else f"{mean:+.4f} ({spread})"
        rows.append([kind, f"{message_kilobytes(kind):.1f} kB", each, difference])
    heads = "messages | size of one | held-out loss of each seed | difference to float32, mean (range)"
    return table(heads, rows, ("messages",))


def time_table(seconds: StepSeconds) -> str:
    """The seconds of a step over each link, and how many times as fast as float32 it is in each round."""
    rows = []
    for link, kinds in seconds.items():
        base = kinds["float32"]
        cells = [f"{1e3 * statistics.median(base):,.0f} ms"]
        for kind in TIMED_KINDS[1:]:
            ratios = [a / b for a, b in zip(base, kinds[kind], strict=True)]
            milliseconds = 1e3 * statistics.median(kinds[kind])
            gain = middle_and_range(ratios, ".2f", "x")
            cells.append(f"{milliseconds:,.0f} ms, {gain}")
        rows.append([link, *cells])
    return table(" | ".join(["link", *TIMED_KINDS]), rows, ("link",))


def page(
    losses: dict[str, list[float]],
    seconds: StepSeconds,
    links: CoreSeconds,
    scale: Scale,
    note: str,
) -> str:
    """The page of results."""
    load = os.getloadavg()[0]
    return f"""# Smaller and encrypted messages

`run.comm_dtype` says in which type hidden states and their gradients travel between ranks. This page says what the
smaller types cost a model, and what they save over slow links. `benchmarks/messages.py` measured it: a Llama of 4
layers of width 64 learns Python source for {scale.steps} steps of
{CONFIG.data.global_batch} x {CONFIG.data.seq_len} tokens, through a 1F1B pipeline of {RANKS} ranks,
with {scale.seeds} seeds. All runs of a seed have the same initial weights and
data, so differences are taken within a seed.

{loss_table(losses)}

*No feedback* rounds every message for itself. *All feedback* also adds to a hidden state what rounding took from the
last hidden state of the same action, which belonged to other text; `run.comm_dtype = "int8"` does that only for
gradients.

The time of a step over emulated links (`ShapedComm`), as the median of {scale.rounds} rounds, and how many times as
fast as with float32 a step is (in brackets: in the worst and in the best round):

{time_table(seconds)}

The ranks are threads of one process, so computing takes more of a step here than on four machines, where slow links
matter more. Packing costs time as well, so small messages do not help over fast links.

Runs with `elastic.listen` [encrypt their links](../guides/several_machines.md). The time that a core is busy with
messages, between two processes of one machine, as the median and the range of {scale.rounds} rounds:

{link_table(links)}

`python benchmarks/messages.py`, with torch {torch.__version__} on {os.cpu_count()} cores ({platform.machine()}).
The load average at the end was {load:.0f}. {note}
"""


def main() -> None:
    """Measure everything, and write the page unless it was quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--note",
        default="Above the number of cores, times of steps are those of a busy machine.",
        help="what to say about the machine, after the load average",
    )
    options = parser.parse_args()
    quick = options.quick
    scale = QUICK if quick else FULL
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        corpus = open_corpus(CONFIG.data, Path(cache))
        losses = measure_loss(corpus, scale)
        seconds = measure_seconds(corpus, scale)
    text = page(losses, seconds, measure_links(scale), scale, options.note)
    print(text)
    if not quick:
        RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
