"""Writes docs/results/compiled.md from the JSON files of `compiled.py`.

python benchmarks/gpu/compiled_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent.parent / "docs" / "results"
PAGE = RESULTS / "compiled.md"
NAMES = {"plain": "plain loop", "ours": "ours", "recorded": "ours, recorded"}
TEXT = """# Compiled stages on one H200

One NVIDIA H200, torch 2.11. What users of torch run today is compiled, so it is what we compare with. `python
benchmarks/gpu/compiled.py` runs all candidates in one process (or one set of processes), step by step in turn.
Ratios are taken within a round of steps; a range has the quartiles over all rounds. Weights are float32 and
products bfloat16 in the first table, all is bfloat16 in the second.

## One process

A plain loop over micro-batches with `torch.compile` on the whole model, and our runtime with compiled layers
and a loss in chunks. 16 sequences of 1,024 tokens a step, vocabulary 32,000, AdamW.

{alone}

Recorded, we run at {least:.2f} to {most:.2f} times the speed of the plain loop. Without recordings we lose: our
executor calls every layer from Python, and the GPU waits for it. The plain loop compiles the whole model as one
graph, so with one large micro-batch it has as few launches as our recording.

## Eight workers

Layers of width 1,024, four on each rank, 16 micro-batches of 1,024 tokens. torch's pipelining runs with
compiled layers, over the same transport as ours. It cannot compile split backwards (see [peers](../peers.md)),
so it has no figures for ZB-V and Interleaved-ZB.

{pipeline}

Compiled and recorded, the zero-bubble schedules take {split_gain:.0%} less time than 1F1B, because the weight
gradients of compiled layers really move: each linear layer passes its input and the gradient of its output on
to the W. Before, the compiled backward did all of the work in I and left W empty.

Recordings take memory: {memory_least:.2f} to {memory_most:.2f} times as much on the fullest rank in these runs.
Split backwards need the most, because every stage has a set of buffers for each micro-batch in flight.
"""


def main() -> None:
    """Write the page."""
    alone = _rows("compiled-200m.json") + _rows("compiled-1b.json")
    pipeline = _rows("compiled-torch.json") + _rows("compiled-split.json")[1:]
    ratios = [row["candidates"]["recorded"]["over_plain"][0] for row in alone]
    times = {row["name"]: row["times"]["recorded"][0] for row in pipeline}
    memory = [
        max(row["memory"]["recorded"]) / max(row["memory"]["ours"]) for row in pipeline
    ]
    text = TEXT.format(
        alone=_alone_table(alone),
        pipeline=_pipeline_table(pipeline),
        least=min(ratios),
        most=max(ratios),
        split_gain=1 - min(times["zb-v"], times["interleaved-zb v=2"]) / times["1f1b"],
        memory_least=min(memory),
        memory_most=max(memory),
    )
    PAGE.write_text(text, encoding="utf-8")


def _rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / "h200" / name).read_text())[
        "rows"
    ]
    return found


def _alone_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | micro-batches | | tokens/s | over the plain loop | peak memory |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for row in rows:
        size = f"{row['parameters'] / 1e6:,.0f} M"
        for key, name in NAMES.items():
            one = row["candidates"][key]
            middle, low, high = one["over_plain"]
            lines.append(
                f"| {size} | {row['microbatches']} | {name} "
                f"| {one['tokens_per_second']:,.0f} "
                f"| {middle:.2f} ({low:.2f}-{high:.2f}) "
                f"| {one['peak_bytes'] / 1e9:.1f} GB |"
            )
    return "\n".join(lines)


def _pipeline_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| schedule | torch | ours | ours, recorded | torch over recorded | simulated |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        times = {key: f"{1e3 * value[0]:.1f} ms" for key, value in row["times"].items()}
        ratio = "-"
        if "torch" in row["over_recorded"]:
            middle, low, high = row["over_recorded"]["torch"]
            ratio = f"{middle:.2f} ({low:.2f}-{high:.2f})"
        lines.append(
            f"| {row['name']} | {times.get('torch', '-')} | {times['ours']} "
            f"| {times['recorded']} | {ratio} | {1e3 * row['simulated']:.1f} ms |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
