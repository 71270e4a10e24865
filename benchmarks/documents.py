"""How much a step gains when its packed documents are dealt out to micro-batches anew (data.balance), in simulation.

    python benchmarks/documents.py            all rows, writes docs/results/documents.md (about a minute)
    python benchmarks/documents.py --quick    one row; writes nothing
    python benchmarks/documents.py --json     one JSON object to stdout

The lengths of documents are drawn from a log-normal distribution, as those of text from the web about are. Documents
are packed one after the other into rows of a fixed length, as the trainer does, and the rows are shuffled. A step then
runs twice in the simulator: with the rows as they are read, and with the packs of `deal_documents`. The work of a token
is that of its matrices, plus one key for each token of its document that it sees.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from tables import table

from penstock import Action, Schedule, make, simulate
from penstock.cost.cost import Cost
from penstock.ir import Op
from penstock.ir.schedule import MicroBatch
from penstock.models.attention import PAIRS_PER_CALL
from penstock.plan.slices.packs import (
    DocumentWork,
    deal_documents,
    step_clock,
    works_of_rows,
)

STEPS = 20
KEYS_PER_FEATURE = 6  # a token's matrices take as long as this many keys per feature
# tokens of a row, width of the model, mean length of a document, spread of its logarithm
TEXTS = (
    (2_048, 512, 600, 1.2),
    (8_192, 1_024, 1_000, 1.3),
    (32_768, 4_096, 4_000, 1.5),
    (32_768, 1_024, 4_000, 1.5),
)
# schedule, its shape, and rows of a micro-batch
RUNS = (
    ("1f1b", {"ranks": 4, "microbatches": 8}, 1),
    ("1f1b", {"ranks": 4, "microbatches": 8}, 4),
    ("hanayo", {"ranks": 4, "microbatches": 8, "waves": 2}, 1),
    ("zb-h1", {"ranks": 4, "microbatches": 8}, 1),
    ("1f1b", {"ranks": 4, "microbatches": 8, "copies": 2}, 1),
)
OP_WORK = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}
RESULT = Path(__file__).parent.parent / "docs" / "results" / "documents.md"


class WorkCost(Cost):
    """The tokens of a micro-batch stand for its work."""

    def seconds(self, schedule: Schedule, action: Action) -> float:
        begin, end = schedule.span(action)
        share = (end - begin) / int(schedule.table.crowd[action.stage])
        return OP_WORK[action.op] * share


def makespan(schedule: Schedule, works: list[int]) -> float:
    pairs = zip(schedule.microbatches, works, strict=True)
    microbatches = tuple(MicroBatch(one.path, work) for one, work in pairs)
    return simulate(replace(schedule, microbatches=microbatches), WorkCost()).makespan


def draw_rows(
    draw: np.random.Generator, count: int, tokens: int, mean: float, spread: float
) -> list[list[int]]:
    """Rows of documents, cut from a stream that is twice as long and shuffled."""
    rows: list[list[int]] = [[]]
    room = tokens
    while len(rows) <= 2 * count:
        length = 2 + int(draw.lognormal(np.log(mean) - spread**2 / 2, spread))
        while length:
            part = min(length, room)
            rows[-1].append(part)
            length -= part
            room -= part
            if not room:
                rows.append([])
                room = tokens
    return [rows[place] for place in draw.permutation(2 * count)[:count]]


def measure(
    text: tuple[int, int, int, float], run: tuple[str, dict[str, int], int]
) -> dict[str, object]:
    tokens, width, mean, spread = text
    name, shape, each = run
    schedule = make(name, **shape)
    clock = step_clock(schedule, (1,) * schedule.parts)
    assert clock is not None
    count = len(schedule.microbatches)
    work = DocumentWork(KEYS_PER_FEATURE * width, PAIRS_PER_CALL)
    draw = np.random.default_rng(0)
    gains = []
    largest = 1.0
    for _ in range(STEPS):
        rows = draw_rows(draw, count * each, tokens, mean, spread)
        before = after = makespan(schedule, works_of_rows(rows, count, work))
        packs = deal_documents(rows, clock, work)
        if packs is not None:
            after = makespan(schedule, [pack.work for pack in packs])
            most = max(pack.tokens for pack in packs)
            largest = max(largest, most / (tokens * each))
        gains.append(before / after)
    return {
        "tokens": tokens,
        "width": width,
        "document": mean,
        "schedule": name + (" x 2 copies" if "copies" in shape else ""),
        "rows": each,
        "gain": statistics.mean(gains),
        "least": min(gains),
        "most": max(gains),
        "largest": largest,
    }


def shown(rows: list[dict[str, object]]) -> str:
    heads = "tokens | width | mean document | schedule | rows of a micro-batch | speedup | range | longest micro-batch"
    lines = [
        [
            f"{r['tokens']:,}",
            f"{r['width']:,}",
            f"{r['document']:,}",
            f"{r['schedule']}",
            f"{r['rows']}",
            f"{r['gain']:.3f}",
            f"{r['least']:.3f}-{r['most']:.3f}",
            f"{r['largest']:.2f}",
        ]
        for r in rows
    ]
    return table(heads, lines, ("schedule",))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one row; writes nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    given = parser.parse_args()
    cases = [(text, run) for text in TEXTS for run in RUNS]
    rows = [measure(*case) for case in (cases[:1] if given.quick else cases)]
    mean = statistics.mean(float(str(row["gain"])) for row in rows)
    text = (
        "# Documents dealt out in every step\n\n"
        "`python benchmarks/documents.py`: with `data.separate = true` on a CPU, attention computes each document by "
        "itself.\nA row with one long document then takes longer than a row with many short ones. The trainer deals "
        "the documents of\nevery step out to its micro-batches, so that these take about the same time "
        "(`data.balance`). The table compares this\nwith the rows as they were read, in the simulator, over "
        f"{STEPS} random steps on 4 ranks with 8 micro-batches. A speedup of\n1.05 means that the step with the rows "
        "as read takes 5% longer. The last column is the longest micro-batch, as a\nmultiple of the tokens of a "
        "micro-batch as read; 1.25 is the most that is allowed, because activations need memory.\n\n"
        f"{shown(rows)}\n\n"
        f"The mean speedup is {mean:.3f}. Long documents beside short ones and a narrow model gain most, because there "
        "attention is\na large share of the work. Copies gain, because a step waits for the slowest copy. With one row "
        "per micro-batch a\ndocument that fills a row by itself remains the longest micro-batch, whatever is dealt to "
        "the others.\n\n"
        "On a GPU attention computes the whole row and hides what a document must not see. The time of a row does not "
        "depend\non its documents there, so nothing could be gained, and the trainer keeps the rows as they are.\n"
    )
    if not given.quick:
        RESULT.write_text(text)
    sys.stdout.write(
        json.dumps({"rows": rows, "mean": mean}) + "\n" if given.json else text
    )


if __name__ == "__main__":
    main()
