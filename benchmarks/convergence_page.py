"""Writes the results of benchmarks/convergence.py as tables and pictures, one section for each scale."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.view.chart import COLOURS, Series, chart

ROOT = Path(__file__).parent.parent / "docs"
RESULT = ROOT / "results" / "convergence.md"
HEADS = {
    "cpu": "One CPU core",
    "gpu": "One GPU",
    "gpu-seeds": "One GPU, three seeds and the paper's recipe",
    "gpu-100m": "One GPU, 100 M parameters and three seeds",
    "quick": "A few steps",
}
COMMANDS = {
    "cpu": "python benchmarks/convergence.py",
    "gpu": "python benchmarks/convergence.py --gpu --out FOLDER`, and `--merge FOLDER",
    "gpu-seeds": "python benchmarks/convergence.py --seeds-gpu --out FOLDER`, and `--merge FOLDER",
    "gpu-100m": "python benchmarks/convergence.py --seeds-100m --out FOLDER`, and `--merge FOLDER",
    "quick": "python benchmarks/convergence.py --quick",
}
PLAIN = ("0", "25", "33", "50")
# Student's, two-sided, by degrees of freedom.
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36}
Record = dict[str, Any]

INTRODUCTION = """\
# What leaving out parts costs

`benchmarks/convergence.py` writes this page and describes the method. One process computes the gradients that a
pipeline with these paths computes. Time is simulated as (parts run) / (parts) of a full step. Perplexity is per byte
on held-out Python files, and always of the whole model unless a table says otherwise. Rows are named by the
percentage of parts that each micro-batch leaves out. Paths rotate, parts run in order, and gradients are means over
all micro-batches, unless the name says otherwise:

| in a name | meaning |
|---|---|
| `fixed` | Each shard of the text keeps its path for the whole run. |
| `swaps` | Up to two pairs of neighbors change places on a path. |
| `visitors` | The gradient of a part is the mean over the micro-batches that visited it. |
| `full10` | Every tenth step runs all parts, so at equal tokens it computes more than its share of parts says. |
| `recipe` | `visitors` and `full10`, as in SkipPipe's later scripts, and all parts run while the learning rate rises. |
| `rate` | The learning rate of a part is multiplied by (all micro-batches) / (those that visited it), in every step. |
| `sgd` | SGD with momentum replaces AdamW. |

## Verdict

SkipPipe says that leaving out parts hardly changes convergence. Three seeds with 22 M and with 100 M parameters say
when that holds here, with AdamW and a constant learning rate:

- *At equal tokens* it does not hold. The perplexity of the whole model is 1.14 and 1.15 times that of full training
  with 25% left out, and 1.27 and 1.26 times with 33%, and every seed is worse. One seed with 100 M parameters and
  800 steps instead of 320 had 1.06 and 1.08, so the gap seems to shrink as runs get longer.
- *At equal time* it holds. With 100 M parameters the ratios are 0.96 with 25% and 0.96 with 33%, and all three
  seeds are better than full training, by more than the noise with 33%. With 22 M they are 0.99 and 1.01. This
  counts a step as (parts run) / (parts), as in a pipeline that is always busy.
- *The recipe* of the paper's later scripts differs from plain skipping by no more than the noise at equal tokens,
  with both sizes.
- *A higher learning rate* for parts that were left out does not help: the ratios at equal tokens are 1.24 and 1.49.
  That is within the noise of plain skipping for 25%, and worse for 33%. Adam divides the size of a gradient out, so
  parts that are left out already move as far in a step as the others. Their gradients are means over fewer tokens,
  and a higher rate most likely adds to that noise.

So skipping is worth its price where time counts and text is plentiful. Where text is what is scarce, train all
parts.

"""


# ---------------------------------------------------------------- figures
def names(records: Sequence[Record]) -> list[str]:
    """Plain shares first, then what is special, as they were run."""
    found = dict.fromkeys(record["name"] for record in records)
    return sorted(
        found,
        key=lambda name: (
            name not in PLAIN,
            int(name.split("-")[0]),
            "sgd" in name,
            name,
        ),
    )


def by_name(records: Sequence[Record], name: str) -> list[Record]:
    return [record for record in records if record["name"] == name]


def at_tokens(record: Record) -> float:
    """Held-out loss after as many tokens as the full model read."""
    return float(
        next(held for step, _, _, held in record["curve"] if step == record["steps"])
    )


def at_time(record: Record) -> float | None:
    """Held-out loss after as much time; none where the run was not that long."""
    return (
        float(record["curve"][-1][3])
        if record["work"] > record["steps"] - 1.5
        else None
    )


def difference(
    records: Sequence[Record], one: str, other: str
) -> dict[str, Any] | None:
    """Held-out loss of one run less that of the other, at equal tokens, within each seed; half a 95% interval."""
    losses = [
        {r["seed"]: at_tokens(r) for r in by_name(records, name)}
        for name in (one, other)
    ]
    seeds = sorted(losses[0].keys() & losses[1].keys())
    if not seeds:
        return None
    apart = [losses[0][seed] - losses[1][seed] for seed in seeds]
    mean, half = statistics.mean(apart), None
    if len(apart) > 1:
        half = (
            T_95.get(len(apart) - 1, 2.0)
            * statistics.stdev(apart)
            / math.sqrt(len(apart))
        )
    return {
        "one": one,
        "other": other,
        "seeds": len(seeds),
        "apart": apart,
        "mean": mean,
        "half": half,
    }


def pairs(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each run with a special word against the same without its first one, and shares against none."""
    made = []
    for name in names(records):
        percent, *words = name.split("-")
        others = [
            "-".join([percent, *(w for w in words if w != word)])
            for word in words
            if word != "sgd"
        ]
        if name != "0" and (not words or {"recipe", "rate"} & set(words)):
            others.append("0")
        made += [
            found for other in others if (found := difference(records, name, other))
        ]
    return made


def verdict(pair: dict[str, Any]) -> str:
    if pair["seeds"] < 3:
        return "too few seeds to say"
    if abs(pair["mean"]) <= pair["half"]:
        return "within the noise"
    return "worse" if pair["mean"] > 0 else "better"


# ---------------------------------------------------------------- tables
def section(records: Sequence[Record]) -> str:
    first = records[0]
    seeds = len({record["seed"] for record in records})
    scale = first["scale"]
    images = [
        f"![{alt}](../images/{file})"
        for file, alt in shown(scale).items()
        if scale != "quick"
    ]
    seeds_text = (
        "1 seed per run."
        if seeds == 1
        else f"up to {seeds} seeds per run. Cells show the mean over the seeds, "
        "with the lowest and highest in brackets."
    )
    setting = (
        f"`{COMMANDS[scale]}`; {first['device']}, torch {first['torch']}. "
        f"A Llama of {first['parameters'] / 1e6:.2f} M parameters in {first['parts']} parts of one layer; "
        f"{first['microbatches']} micro-batches, {first['tokens']} bytes per step in rows of {first['length']}; "
        f"equal tokens means {first['steps']} steps, "
        f"{first['steps'] * first['tokens'] / 1e6:.2f} M of {first['text'] / 1e6:.0f} M bytes; {seeds_text}"
    )
    left_out = (
        "The ratio to the perplexity of the same model with all parts, after equal tokens. For random subsets: "
        "the mean, ± the standard deviation over draws. The best subset was found greedily on other held-out text. "
        "The first part always runs."
    )
    pairs_text = (
        "Held-out loss (nats per byte) of the first run minus that of the second, after equal tokens and within a "
        "seed, ± half a 95% interval (Student's t)."
    )
    paragraphs = [
        f"## {HEADS[scale]}",
        setting,
        *images,
        f"### Perplexity of the whole model\n\n{losses(records)}",
        f"### Perplexity when parts are left out\n\n{left_out}\n\n{omissions(records)}",
        f"### Pairs\n\n{pairs_text}\n\n{paired(records)}",
    ]
    return "\n\n".join(paragraphs) + "\n"


def spread(values: Sequence[float], digits: int = 3) -> str:
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.{digits}f}"
    return (
        mean
        if len(values) == 1
        else f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"
    )


def losses(records: Sequence[Record]) -> str:
    lines = [
        "| run | parts run | seeds | at equal tokens | over full | at equal time | over full | steps then |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    full = {record["seed"]: at_tokens(record) for record in by_name(records, "0")}
    for name in names(records):
        some = by_name(records, name)
        timed = [(r, held) for r in some if (held := at_time(r)) is not None]
        ratios = [
            math.exp(at_tokens(r) - full[r["seed"]]) for r in some if r["seed"] in full
        ]
        later = [
            math.exp(held - full[r["seed"]]) for r, held in timed if r["seed"] in full
        ]
        steps = str(timed[0][0]["curve"][-1][0]) if timed else "-"
        cells = [
            name,
            f"{some[0]['kept']}/{some[0]['parts']}",
            str(len(some)),
            spread([math.exp(at_tokens(r)) for r in some]),
            spread(ratios),
            spread([math.exp(held) for _, held in timed]),
            spread(later),
            steps,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def omissions(records: Sequence[Record]) -> str:
    shapes = [
        (row["way"], row["kept"], row["parts"])
        for row in records[0]["omission"]
        if row["way"] != "all"
    ]
    heads = [f"{way} {kept}/{parts}" for way, kept, parts in shapes]
    lines = [f"| run | {' | '.join(heads)} |", f"|---|{'--:|' * len(heads)}"]
    for name in names(records):
        cells = []
        for way, kept, _ in shapes:
            rows = [
                row
                for r in by_name(records, name)
                for row in r["omission"]
                if (row["way"], row["kept"]) == (way, kept)
            ]
            ratio = spread([row["ratio"] for row in rows], 2)
            sway = statistics.mean(
                [row["spread"] / row["perplexity"] * row["ratio"] for row in rows]
            )
            cells.append(f"{ratio} ± {sway:.2f}" if way == "random" else ratio)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def paired(records: Sequence[Record]) -> str:
    lines = [
        "| run | compared with | seeds | difference | verdict |",
        "|---|---|--:|--:|---|",
    ]
    for pair in pairs(records):
        half = "" if pair["half"] is None else f" ± {pair['half']:.4f}"
        lines.append(
            f"| {pair['one']} | {pair['other']} | {pair['seeds']} | {pair['mean']:+.4f}{half} | {verdict(pair)} |"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------- pictures
def shown(scale: str) -> dict[str, str]:
    return {
        f"convergence-{scale}-tokens.svg": "held-out loss over tokens, by share left out",
        f"convergence-{scale}-time.svg": "held-out loss over simulated time, by share left out",
        f"convergence-{scale}-variants.svg": "held-out loss minus that of the plain run, over tokens",
        f"convergence-{scale}-omission.svg": "perplexity with fewer parts over perplexity with all",
    }


def label(name: str) -> str:
    percent, *words = name.split("-")
    return (
        "all parts"
        if name == "0"
        else ", ".join([f"{percent}% left out", " ".join(words)]).removesuffix(", ")
    )


def curve(
    records: Sequence[Record],
    name: str,
    across: int,
    unit: float,
    until: float,
    colour: str = "",
) -> Series:
    """Mean of the seeds, with a band from the lowest to the highest."""
    some = by_name(records, name)
    points = list(zip(*(r["curve"] for r in some), strict=True))
    points = [point for point in points[1:] if point[0][across] <= until]
    held = [[one[3] for one in point] for point in points]
    band = len(some) > 1
    return Series(
        label(name),
        tuple(point[0][across] * unit for point in points),
        tuple(statistics.mean(h) for h in held),
        tuple(min(h) for h in held) if band else (),
        tuple(max(h) for h in held) if band else (),
        colour=colour,
    )


def apart(records: Sequence[Record], name: str, base: str, unit: float) -> Series:
    """How far a run is from the plain one, point by point of the curve, within each seed."""
    bases = {
        r["seed"]: {point[0]: point[3] for point in r["curve"]}
        for r in by_name(records, base)
    }
    some = [r for r in by_name(records, name) if r["seed"] in bases]
    steps = (
        [point[0] for point in some[0]["curve"] if 0 < point[0] <= some[0]["steps"]]
        if some
        else []
    )
    at = [
        [{p[0]: p[3] for p in r["curve"]}[s] - bases[r["seed"]][s] for r in some]
        for s in steps
    ]
    band = len(some) > 1
    return Series(
        label(name),
        tuple(step * unit for step in steps),
        tuple(statistics.mean(one) for one in at),
        tuple(min(one) for one in at) if band else (),
        tuple(max(one) for one in at) if band else (),
    )


def pictures(records: Sequence[Record]) -> dict[str, str]:
    first, found = records[0], names(records)
    scale, unit = first["scale"], first["tokens"] / 1e6
    plain = [name for name in PLAIN if name in found]
    files = list(shown(scale))
    ends = [at_tokens(r) for r in records if "sgd" not in r["name"]]
    top = max(ends) + 1.2 * max(max(ends) - min(ends), 0.15) + 0.35
    drawn = {}
    for file, across, per, until, word in (
        (files[0], 0, unit, first["steps"], "million bytes of training text"),
        (
            files[1],
            1,
            1.0,
            first["steps"] + 1.0,
            "simulated time, in steps with all parts",
        ),
    ):
        lines = [
            curve(records, name, across, per, until, COLOURS[PLAIN.index(name)])
            for name in plain
        ]
        title = (
            "Held-out loss at equal tokens"
            if across == 0
            else "Held-out loss at equal time"
        )
        if plain:
            drawn[file] = chart(lines, title, word, "nats per byte", top)
    special = [
        name
        for name in found
        if name not in PLAIN and "sgd" not in name and name.split("-")[0] in found
    ]
    lines = [apart(records, name, name.split("-")[0], unit) for name in special]
    if lines:
        bases = " and ".join(sorted({f"{name.split('-')[0]}%" for name in special}))
        title = f"Held-out loss minus that of the plain {bases}"
        drawn[files[2]] = chart(
            lines, title, "million bytes of training text", "nats per byte"
        )
    lines = []
    for name in plain:
        for way in ("random", "best"):
            shapes = sorted({row["kept"] for row in first["omission"]})
            ratios = [
                [
                    row["ratio"]
                    for r in by_name(records, name)
                    for row in r["omission"]
                    if row["kept"] == kept and row["way"] in (way, "all")
                ]
                for kept in shapes
            ]
            lines.append(
                Series(
                    f"{label(name)}, {way}",
                    tuple(100.0 * kept / first["parts"] for kept in shapes),
                    tuple(statistics.mean(one) for one in ratios),
                    dashed=way == "best",
                    colour=COLOURS[PLAIN.index(name)],
                )
            )
    if lines:
        title = "Perplexity with fewer parts, over that with all"
        drawn[files[3]] = chart(lines, title, "parts that run, %", "ratio", marks=True)
    return drawn


# ---------------------------------------------------------------- the page
def write(records: Sequence[Record], made: str) -> None:
    """Puts a scale's section into the page, beside the other's, and its pictures beside the page."""
    scale = records[0]["scale"]
    text = RESULT.read_text(encoding="utf-8") if RESULT.exists() else ""
    sections = dict(re.findall(r"<!-- ([\w-]+) -->\n(.*?)<!-- /\1 -->", text, re.S)) | {
        scale: made
    }
    ordered = [
        f"<!-- {name} -->\n{sections[name]}<!-- /{name} -->\n"
        for name in HEADS
        if name in sections
    ]
    RESULT.write_text(INTRODUCTION + "\n".join(ordered), encoding="utf-8")
    for file, drawn in pictures(records).items():
        (ROOT / "images" / file).write_text(drawn, encoding="utf-8")
