"""Writes docs/results/h200.md, h200_uncompiled.md and their pictures from the JSON files of the runs on one H200.

    python benchmarks/gpu/page.py

How predictions are made: eight workers share the memory, caches and power of one GPU, so an action takes longer the
more of the others are busy: seconds = alone x (1 + c x load), where the load is the busy share of all eight. Three
timed steps give all constants: 1F1B gives the forwards and backwards, ZB-V the split backwards, and Hanayo W=4 (the
busiest) gives c. All seconds are then multiplied by one number, so that the makespan of that 1F1B comes out right.
Every other makespan, also with four workers, is predicted by the simulator alone, with the load of its own answer.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from compiled_page import kernel_gain
from measured import FILES, Row, rows_of

from penstock import Schedule, make, simulate
from penstock.cost import ModelCost, PartCost, ProfileCost, Seconds
from penstock.cost.network import Network
from penstock.formats import read_plan, read_profile
from penstock.ir import Timeline
from penstock.view import svg
from schedules import DEPTH, NAMES

DOCS = Path(__file__).parent.parent.parent / "docs"
IMAGES = DOCS / "images"
PAGES = {  # by template
    "page.md": DOCS / "results" / "h200.md",
    "page_uncompiled.md": DOCS / "results" / "h200_uncompiled.md",
}
WORKERS = 8  # shares of the GPU
WEIGHTS = 4 * 1024**2 + 3 * 1024 * 2816  # of a layer
PUBLISHED = {"GPipe": (1.132, 1.149), "DAPPLE (1F1B)": (1.130, 1.142), "Chimera-wave": (1.444, 1.439),
             "Hanayo W=2": (1.645, 1.625), "Hanayo W=4": (1.753, 1.664)}  # fmt: skip  # fully connected, in pairs
HERE = {
    "GPipe": "gpipe",
    "DAPPLE (1F1B)": "1f1b",
    "Chimera-wave": "hanayo W=1",
    "Hanayo W=2": "hanayo W=2",
    "Hanayo W=4": "hanayo W=4",
}
CALIBRATED = ("1f1b", "zb-v", "hanayo W=4")


# ---------------------------------------------------------------- predictions
class Model:
    """What three timed steps tell of every action."""

    def __init__(self, rows: list[Row], transport: Row, tokens: int) -> None:
        by = {row["name"]: row for row in rows if row["microbatches"] == 8}
        self.tokens = tokens
        low, high = by["1f1b"], by["hanayo W=4"]
        ratio, before, after = (
            sum(high["work"]) / sum(low["work"]),
            load_of(low, 8),
            load_of(high, 8),
        )
        self.crowding = (ratio - 1) / (after - ratio * before)
        self.layer: dict[str, float] = {}
        self.ends: dict[tuple[str, bool], float] = {}
        for name, ops, layers in (("1f1b", "FB", DEPTH), ("zb-v", "IW", DEPTH // 2)):
            times = spans_of(by[name])
            last = max(stage for _, stage in times)
            for op in ops:
                slow = 1 + self.crowding * load_of(by[name], 8)
                middle = (
                    statistics.median(times[op, stage] for stage in range(1, last))
                    / slow
                )
                self.layer[op] = middle / layers
                self.ends |= {
                    (op, False): times[op, 0] / slow - middle,
                    (op, True): times[op, last] / slow - middle,
                }
        weights = 2 * 2 * DEPTH * WEIGHTS  # bfloat16, and their gradients
        self.held = (max(by["gpipe"]["memory"][1:-1]) - weights) / (
            DEPTH * by["gpipe"]["microbatches"]
        )
        (small, first), (large, second) = sorted(
            (int(size), took) for size, took in transport["hops"].items()
        )[1:]
        byte = (second - first) / (large - small)
        self.network = Network(first - small * byte, 1 / byte)
        off = low["makespan"] / self.timeline(schedule_of(low, 8)).makespan
        self.layer = {op: seconds * off for op, seconds in self.layer.items()}
        self.ends = {end: seconds * off for end, seconds in self.ends.items()}

    def timeline(self, schedule: Schedule) -> Timeline:
        """The simulator's answer, with the load that it has itself."""
        load, found = 1.0, simulate(schedule, self.cost(schedule, 1.0))
        for _ in range(6):
            load = float(found.busy.sum()) / (WORKERS * found.makespan)
            found = simulate(schedule, self.cost(schedule, load))
        return found

    def cost(self, schedule: Schedule, load: float) -> ModelCost:
        layers, unit = (
            DEPTH * schedule.ranks // schedule.parts,
            schedule.microbatches[0].tokens,
        )
        slow = (1 + self.crowding * load) / unit

        def part(number: int) -> PartCost:
            times = {op: layers * seconds for op, seconds in self.layer.items()}
            for op in times:
                times[op] += self.ends[op, False] if number == 0 else 0.0
                times[op] += (
                    self.ends[op, True] if number == schedule.parts - 1 else 0.0
                )
            f, b, i, w = (Seconds(token=slow * times[op]) for op in "FBIW")
            return PartCost(
                f,
                i,
                w,
                b,
                held=layers * self.held / unit,
                message=self.tokens * 2048 / unit,
            )

        return ModelCost(tuple(map(part, range(schedule.parts))), self.network)


def load_of(row: Row, workers: int) -> float:
    """The share of all workers' time that is work."""
    return float(sum(row["work"]) / (workers * row["makespan"]))


def spans_of(row: Row) -> dict[tuple[str, int], float]:
    """Seconds of an op of a stage, the median over micro-batches."""
    found = defaultdict(list)
    for action, start, end in row["spans"]:
        stage, op, _ = re.split("([FBIW])", action)
        found[op, int(stage)].append(end - start)
    return {key: statistics.median(some) for key, some in found.items()}


def schedule_of(row: Row, ranks: int) -> Schedule:
    if row["name"].startswith("planned"):
        return read_plan(
            FILES / "plans" / f"schedules-{ranks}-{row['microbatches']}.json"
        ).schedule
    name, shape = NAMES[row["name"]]
    return make(name, ranks=ranks, microbatches=row["microbatches"], **shape)


def measured_timeline(row: Row, predicted: Timeline) -> Timeline:
    """Spans of a step as a timeline."""
    times = {action: (start, end) for action, start, end in row["spans"]}
    names = [str(action) for lane in predicted.schedule.lanes for action in lane]
    start, end = (np.array([times[name][n] for name in names]) for n in (0, 1))
    # With the memory that was predicted.
    return replace(predicted, start=start, end=end)


# ---------------------------------------------------------------- tables
def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def schedules_table(model: Model) -> tuple[str, list[float]]:
    lines, errors = [], []
    for name, ranks in (("schedules-8.json", 8), ("schedules-4.json", 4)):
        for row in rows_of(name):
            predicted = model.timeline(schedule_of(row, ranks)).makespan
            error = predicted / row["makespan"] - 1
            own = ranks == row["microbatches"] == 8 and row["name"] in CALIBRATED
            errors += [] if own else [abs(error)]
            tokens = row["microbatches"] * model.tokens / row["ours"]
            lines.append(
                [
                    f"{row['name'].replace(': ', ', ')}{' *' if own else ''}",
                    str(ranks),
                    str(row["microbatches"]),
                    f"{1e3 * row['ours']:.0f}",
                    f"{tokens / 1e3:.1f}",
                    f"{max(row['memory']) / 1e9:.2f}",
                    f"{1e3 * row['makespan']:.0f}",
                    f"{1e3 * predicted:.0f}",
                    f"{error:+.1%}",
                    f"{row['bubble']:.1%}",
                    *causes(row, ranks),
                ]
            )
    heads = [
        "schedule",
        "P",
        "M",
        "step, ms",
        "tokens/s, 1,000",
        "memory, GB",
        "makespan, ms",
        "predicted",
        "error",
        "idle",
        "schedule",
        "hop",
        "host",
    ]
    return table(heads, lines), errors


def causes(row: Row, ranks: int) -> list[str]:
    """Shares of all time: what is not made yet (and the end), on its way, and the host."""
    whole, idle = ranks * row["makespan"], row["idle"]
    return [
        f"{(sum(idle['schedule']) + sum(idle['end'])) / whole:.1%}",
        f"{sum(idle['hop']) / whole:.1%}",
        f"{sum(idle['host']) / whole:.1%}",
    ]


def torch_table() -> str:
    lines = []
    for name, tokens, depth in (("torch.json", 1024, 8), ("torch-small.json", 512, 4)):
        for row in rows_of(name):
            if row["torch"] is None:
                continue
            lines.append(
                [
                    row["name"],
                    str(tokens),
                    str(depth),
                    f"{1e3 * row['chunk']:.2f}",
                    f"{1e3 * row['ours']:.0f}",
                    f"{1e3 * row['recorded'][0]:.0f}",
                    f"{1e3 * row['torch']:.0f}",
                    spread(row["over"], *row["over_spread"]),
                    spread(*row["torch_over_recorded"]),
                    most(row["memory"]),
                    most(row["recorded_memory"]),
                    most(row["torch_memory"]),
                ]
            )
    heads = [
        "schedule",
        "tokens",
        "layers a rank",
        "action, ms",
        "ours, ms",
        "recorded",
        "torch, ms",
        "torch / ours (quartiles)",
        "torch / recorded",
        "memory, GB",
        "recorded",
        "torch's",
    ]
    return table(heads, lines)


def spread(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def most(memory: list[float] | None) -> str:
    return "" if memory is None else f"{max(memory) / 1e9:.2f}"


def profiles_table() -> str:
    lines = [
        [
            f"{row['width']:,}",
            *(
                f"{worst:.1%} ({middle:.1%})"
                for worst, middle, _ in row["worst"].values()
            ),
        ]
        for row in sorted(rows_of("profiles.json"), key=lambda row: row["width"])
    ]
    return table(["width", "F", "B", "I", "W"], lines)


def wave_gain(ranks: int) -> str:
    """How much faster four waves are than one, M = P, with the two steps in ms."""
    rows = rows_of(f"schedules-{ranks}.json")
    steps = {
        row["name"]: round(1e3 * row["ours"])
        for row in rows
        if row["microbatches"] == ranks
    }
    one, four = steps["hanayo W=1"], steps["hanayo W=4"]
    return f"{one} / {four} ms, {one / four - 1:.0%} faster,"


def published_table() -> str:
    rows = {
        row["name"]: row
        for row in rows_of("schedules-8.json")
        if row["microbatches"] == 8
    }
    lines = []
    for name, (full, pairs) in PUBLISHED.items():
        ours = rows["gpipe"]["ours"] / rows[HERE[name]]["ours"]
        lines.append(
            [
                name,
                f"{ours:.2f}",
                f"{full / PUBLISHED['GPipe'][0]:.2f}",
                f"{pairs / PUBLISHED['GPipe'][1]:.2f}",
            ]
        )
    return table(
        ["", "here", "paper, 8 A100, all linked", "paper, 8 A100, linked in pairs"],
        lines,
    )


def slices_table() -> str:
    rows, lines, profile = (
        rows_of("slices.json"),
        [],
        read_profile(FILES / "slices-profile.json"),
    )
    for tokens, count in dict.fromkeys(
        (row["tokens"], row["sequences"]) for row in rows
    ):
        some = [
            row for row in rows if (row["tokens"], row["sequences"]) == (tokens, count)
        ]
        whole = some[0]
        for row in some:
            name, kind = row["name"].replace(": ", ", "), row["name"].split(":")[0]
            predicted = [""] * 2
            if kind in ("planned", "composed"):
                plan = read_plan(
                    FILES / "plans" / f"slices-{tokens}-{count}-{kind}.json"
                )
                foretold = simulate(
                    plan.schedule, ProfileCost(profile, tokens)
                ).makespan
                predicted = [
                    f"{1e3 * foretold:.0f}",
                    f"{foretold / row['makespan'] - 1:+.1%}",
                ]
            lines.append(
                [
                    name,
                    f"{tokens:,}",
                    str(count),
                    f"{1e3 * row['seconds']:.0f}",
                    f"{whole['seconds'] / row['seconds']:.2f}",
                    f"{(count + 7) / count:.1f}",
                    most(row["memory"]),
                    percent(row.get("bubble")),
                    f"{1e3 * row['makespan']:.0f}" if "makespan" in row else "",
                    *predicted,
                ]
            )
    heads = [
        "slices",
        "tokens",
        "sequences",
        "step, ms",
        "speed-up",
        "bound",
        "memory, GB",
        "idle",
        "makespan, ms",
        "predicted",
        "error",
    ]
    return table(heads, lines)


def training_table() -> str:
    lines = []
    for row in rows_of("training.json"):
        who = (
            "one process"
            if row["ranks"] == 1
            else f"{row['ranks']} side by side, {row['schedule']}"
        )
        told = row["predicted"]
        lines.append(
            [
                f"{who}{', recorded' if row['graphs'] else ''}",
                f"{1e3 * row['seconds']:.0f}",
                "" if told is None else f"{1e3 * told:.0f}",
                f"{row['tokens'] / row['seconds']:,.0f}",
                f"{row['memory'] / 1e9:.2f}",
                percent(row["bubble"]),
                percent(row["predicted_bubble"]),
            ]
        )
    return table(
        ["", "step, ms", "predicted", "tokens/s", "memory, GB", "bubble", "predicted"],
        lines,
    )


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def workers_table() -> str:
    """One process beside eight workers, with what was predicted and what no plan can beat."""
    lines: list[list[str]] = []
    alone: dict[str, float] = {}
    for row in rows_of("workers.json"):
        name, share = row["model"], row["multiprocessors"]
        alone.setdefault(name, row["speed"])
        who = f"{name}, one process" if row["ranks"] == 1 else "eight workers"
        count = row["microbatches"]
        plan = f"{count} micro-batch{'es' if count > 1 else ''}"
        if row["ranks"] > 1:
            plan = f"{row['schedule']}, {plan}"
        times = {f"{who}: {plan}": row["seconds"]}
        if row["ranks"] > 1:
            times["the same, predicted"] = row["predicted"]
            times["no plan can be faster than"] = row["bound"]
        for label, seconds in times.items():
            speed = row["tokens"] / seconds
            each = f"{speed / share:,.0f}"
            if row["ranks"] > 1:
                each += f" ({speed / share / alone[name]:.2f})"
            cells = [label, str(share), f"{1e3 * seconds:.0f} ms"]
            lines.append([*cells, f"{speed:,.0f}", each])
    heads = ["", "multiprocessors", "step", "tokens/s", "a multiprocessor"]
    return table(heads, lines)


def workers_share(quartile: str) -> float:
    """The share of one process's speed that the slow or fast quartile of eight workers' steps has, with 63 layers."""
    alone, workers = rows_of("workers.json")[:2]
    fast, slow = workers["spread"]
    seconds = {"slow": slow, "fast": fast}[quartile]
    speed = workers["tokens"] / seconds / workers["multiprocessors"]
    return float(speed / alone["speed"])


# ---------------------------------------------------------------- compiled
def gains_table() -> str:
    """Torch and ours, both compiled, in one process and in eight."""
    lines = []
    for row in rows_of("compiled-200m.json") + rows_of("compiled-1b.json"):
        count = row["microbatches"]
        plain, ours = (row["candidates"][who] for who in ("plain", "recorded"))
        lines.append(
            [
                f"one process, {row['parameters'] / 1e6:,.0f} M parameters, "
                f"{count} micro-batch{'es' if count > 1 else ''}",
                f"{plain['tokens_per_second']:,.0f} tokens/s",
                f"{ours['tokens_per_second']:,.0f} tokens/s",
                spread(*ours["over_plain"]),
            ]
        )
    rows = {row["name"]: row for row in rows_of("compiled-pipeline.json")}
    for label, peer, own in (
        ("eight workers, 1F1B", "1f1b", "1f1b"),
        ("eight workers, Hanayo W=2", "hanayo W=2", "hanayo W=2"),
        ("eight workers, the fastest of each (1F1B; ZB-V)", "1f1b", "zb-v"),
    ):
        theirs = rows[peer]["times"]["torch"][0]
        ours = rows[own]["times"]["recorded"][0]
        gain = f"{theirs / ours:.2f}"
        if peer == own:
            gain = spread(*rows[own]["over_recorded"]["torch"])
        lines.append([label, f"{1e3 * theirs:.1f} ms", f"{1e3 * ours:.1f} ms", gain])
    return table(["", "torch, compiled", "ours, compiled and recorded", "gain"], lines)


def zb_share() -> float:
    """The time of our ZB-V over that of torch's 1F1B."""
    rows = {row["name"]: row["times"] for row in rows_of("compiled-pipeline.json")}
    return float(rows["zb-v"]["recorded"][0] / rows["1f1b"]["torch"][0])


def transport_table(found: Row) -> str:
    lines = [
        [
            f"{1e3 * one['seconds']:.2f} ms",
            f"{one['efficiency']:.3f}",
            f"{one['spread'][0]:.3f}-{one['spread'][1]:.3f}",
        ]
        for one in found["chunks"]
    ]
    return table(["chunk", "ideal / measured", "quartiles"], lines)


def pictures(model: Model) -> None:
    row = next(
        row for row in rows_of("schedules-8.json") if row["name"] == "hanayo W=2"
    )
    predicted = model.timeline(schedule_of(row, 8))
    measured = measured_timeline(row, predicted)
    for name, one in (("predicted", predicted), ("measured", measured)):
        (IMAGES / f"h200-{name}.svg").write_text(
            svg(one, f"Hanayo W=2, eight workers of one H200, {name}")
        )


def pages() -> tuple[list[str], Model]:
    """The texts of both pages, and what their predictions come from."""
    transport = json.loads((FILES / "transport.json").read_text())
    model = Model(rows_of("schedules-8.json"), transport, 2048)
    schedules, errors = schedules_table(model)
    hops = ", ".join(
        f"{1e6 * took:.0f} us for {int(size) >> 10:,} KiB"
        for size, took in transport["hops"].items()
    )
    values = {
        "gains": gains_table(),
        "kernel_gain": kernel_gain(rows_of("compiled-1b.json")[0]),
        "zb_share": zb_share(),
        "transport": transport_table(transport),
        "hops": hops,
        "waiting": f"{transport['waiting']:.1%}",
        "schedules": schedules,
        "median": f"{statistics.median(errors):.1%}",
        "worst": f"{max(errors):.1%}",
        "count": len(errors),
        "crowding": f"{model.crowding:.2f}",
        "torch": torch_table(),
        "profiles": profiles_table(),
        "published": published_table(),
        "gain_8": wave_gain(8),
        "gain_4": wave_gain(4),
        "slices": slices_table(),
        "training": training_table(),
        "workers": workers_table(),
        "workers_low": workers_share("slow"),
        "workers_high": workers_share("fast"),
    }
    texts = [(Path(__file__).parent / name).read_text() for name in PAGES]
    return [text.format(**values) for text in texts], model


def main() -> None:
    texts, model = pages()
    for file, text in zip(PAGES.values(), texts, strict=True):
        file.write_text(text)
    pictures(model)


if __name__ == "__main__":
    main()
