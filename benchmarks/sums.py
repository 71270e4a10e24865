"""Measures what cheaper sums of gradients cost a model: sums of rounded numbers, and one sum for several passes.

    python benchmarks/sums.py            two cores, about ten minutes: writes docs/results/sums.md
    python benchmarks/sums.py --quick    runs everything once, in seconds; writes nothing

Every run trains the same small Llama on Python's standard library, byte by byte, through two copies of a 1F1B pipeline
of two ranks that are threads, with penstock's own trainer and planned sums. All runs of a seed start from the same
weights and read the same text in the same order, and all see the same number of tokens: a run that sums every k passes
has k times the batch and one k-th of the steps. Differences are taken within a seed.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tables import table

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
from penstock.cost.profile import SUM_SHARES
from penstock.ir.sums import SumKind, SumPlan
from penstock.runtime import Comm, run_threads
from penstock.train.data.corpus import Corpus, open_corpus
from penstock.train.history import read_rows
from penstock.train.job import Job
from penstock.train.loop import Trainer
from penstock.train.weights import sizes_of

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "results" / "sums.md"
VOCAB = 256
SCHEDULE = make("1f1b", ranks=2, microbatches=2, copies=2)
SUMS = (
    SumPlan((0,), SumKind.DIRECT, (0, 2), (0.7, 0.3)),
    SumPlan((1,), SumKind.RING, (1, 3)),
)
RATE, WARM_UP_PASSES = 3e-3, 40
CONFIG = Config(
    ModelConfig(
        layers=4,
        hidden_size=64,
        heads=4,
        kv_heads=4,
        intermediate_size=176,
        vocab_size=VOCAB,
    ),
    DataConfig(seq_len=64, global_batch=8, validation=0.02, tokenizer="bytes"),
    ScheduleConfig(name="1f1b", microbatches=2),
    OptimizerConfig(lr=RATE),
    RunConfig(eval_every=0, save_every=0, checks="forecast,memory"),
    parallel=ParallelConfig(pp=2, dp_replicate=2),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to sum: every so many passes, in messages of a type, with a learning rate."""

    passes: int = 1
    messages: str = "float32"
    rate: float = RATE

    @property
    def bytes(self) -> float:
        """The bytes of sums for each pass, compared with a sum in float32 in every pass."""
        return SUM_SHARES[self.messages] / self.passes


BASE = Kind()
KINDS = (
    BASE,
    Kind(messages="int8"),
    Kind(2, rate=RATE * math.sqrt(2)),
    Kind(4),
    Kind(4, rate=RATE * 2),
)


def job_of(corpus: Corpus, folder: Path, kind: Kind, seed: int, passes: int) -> Job:
    """The run of one kind, over so many passes."""
    steps = passes // kind.passes
    config = replace(
        CONFIG,
        data=replace(CONFIG.data, global_batch=CONFIG.data.global_batch * kind.passes),
        optimizer=replace(
            CONFIG.optimizer,
            lr=kind.rate,
            warmup_steps=min(WARM_UP_PASSES // kind.passes, steps - 1),
        ),
        run=replace(
            CONFIG.run, seed=seed, steps=steps, log_every=steps, accumulate=kind.passes
        ),
    )
    sizes = sizes_of(config.model, VOCAB, config.data.seq_len)
    return Job(
        config,
        Plan(SCHEDULE, "1f1b", why=(("sum_messages", kind.messages),), sums=SUMS),
        sizes,
        corpus,
        folder,
    )


def measure(corpus: Corpus, passes: int, seeds: int) -> dict[Kind, list[float]]:
    """The held-out loss at the end, for each kind and seed."""
    losses: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(seeds):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as name:
                job = job_of(corpus, Path(name), kind, seed, passes)

                def work(comm: Comm, job: Job = job) -> None:
                    Trainer(job, comm).run()

                run_threads(SCHEDULE.ranks, work, patience=600)
                row = read_rows(job.folder)[-1]
            assert row.evaluation is not None
            losses[kind].append(row.evaluation)
            print(
                f"seed {seed}  {kind}  held-out loss {row.evaluation:.4f}", flush=True
            )
    return losses


def loss_table(losses: dict[Kind, list[float]]) -> str:
    """The held-out losses, with the differences to sums in float32 in every pass."""
    rows = []
    for kind, values in losses.items():
        pairs = zip(values, losses[BASE], strict=True)
        differences = [one - other for one, other in pairs]
        spread = f"{min(differences):+.4f} to {max(differences):+.4f}"
        rows.append(
            [
                str(kind.passes),
                kind.messages,
                f"{1e3 * kind.rate:.2g}",
                f"{kind.bytes:.0%}",
                " ".join(f"{value:.4f}" for value in values),
                ""
                if kind == BASE
                else f"{statistics.fmean(differences):+.4f} ({spread})",
            ]
        )
    heads = (
        "passes for each sum | messages | rate, thousandths | bytes of sums | "
        "held-out loss of each seed | difference to the first row, mean (range)"
    )
    return table(heads, rows, ("messages",))


def page(losses: dict[Kind, list[float]], passes: int, seeds: int) -> str:
    """The page of results."""
    return f"""# Cheaper sums of gradients

Replicas of a part sum their gradients. Over slow links this can be made cheaper in two ways besides
[planning it](../guides/partial_paths.md#sums-of-gradients): numbers travel in fewer bytes (`paths.sum_messages`), or
several passes share one sum (`run.accumulate`). This page says what that costs a model. `benchmarks/sums.py` measured
it: a Llama of 4 layers of width 64 learns Python source with AdamW for {passes} passes of {CONFIG.data.global_batch} x
{CONFIG.data.seq_len} tokens, through two copies of a pipeline of two ranks, with {seeds} seeds. All runs of a seed have
the same initial weights and the same tokens, so differences are taken within a seed.

{loss_table(losses)}

A sum for k passes is exact: the optimizer sees the gradients of a batch that is k times as large. But it makes one k-th
of the updates, so that a model that has seen few tokens learns less from them. The rows with a larger rate multiply it
by the root of k. In int8, what rounding loses is added to the next sum.

`python benchmarks/sums.py`, with torch {torch.__version__} on {os.cpu_count()} cores ({platform.machine()}).
"""


def main() -> None:
    """Measure everything, and write the page unless it was quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    passes, seeds = (16, 1) if quick else (300, 3)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        corpus = open_corpus(CONFIG.data, Path(cache))
        losses = measure(corpus, passes, seeds)
    text = page(losses, passes, seeds)
    print(text)
    if not quick:
        RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
