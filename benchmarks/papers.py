"""Simulates the experiments of two papers, with what they published beside it.

    python benchmarks/papers.py            all tables of docs/results/papers.md (about two minutes)
    python benchmarks/papers.py --quick    one cluster and three settings; writes nothing

`hanayo`: Figures 8 and 9 of the paper (SC'23), with analytic profiles of its devices. It states neither the tokens
of a sequence, nor the precision, nor the micro-batches of a step. We take float32, because V100 and A100 differ as in
float32 (0.76 in the paper, 0.81 in the data sheets, 0.40 in half precision); 2,048 tokens, with which GPipe's
throughput and memory come out near the published ones; and as many micro-batches as ranks, for which the paper defines
its schedule. Published figures were read from the vector graphics of the paper's figures.

`terapipe`: the settings of Li et al. 2021, with one analytic cost of their cluster for all. The public facts of the
machine are: AWS p3.16xlarge, eight V100 SXM2 of 125 TFLOPS in half precision and 900 GB/s of memory, NVLink between
them, 25 Gbit/s between nodes. Two unknowns are fitted by least squares to the whole sequences and the five published
equal slicings of setting 9: the seconds that a layer costs however short the slice is, and the share of peak that its
matrices reach. The rate at which copies of the pipeline sum their gradients does not occur in setting 9, so it comes
from setting 6 without slices. All other rows are predictions.

The published figures are in published.json.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from batches import BatchCuts, best_batch
from harness import Found, Row, Script, read, table

from penstock import make, simulate
from penstock.config import ModelConfig
from penstock.cost import Network, Profile
from penstock.cost.gpus import Link, analytic_profile, gpu_of
from penstock.cost.memory import device_bytes
from penstock.partition import even_partition
from penstock.plan.slices.curves import SliceTimes, tabulated_times

PUBLISHED = read(Path(__file__).parent / "published.json")
FIGURES = dict(zip((8, 9), PUBLISHED["hanayo"].values(), strict=True))
TERAPIPE = PUBLISHED["terapipe"]

# ---------------------------------------------------------------- Hanayo
TOKENS = 2048
BERT = ModelConfig(
    family="gpt",
    layers=64,
    hidden_size=2560,
    heads=64,
    kv_heads=64,
    intermediate_size=4 * 2560,
    vocab_size=30_522,
)
GPT = ModelConfig(
    family="gpt",
    layers=128,
    hidden_size=1024,
    heads=16,
    kv_heads=16,
    intermediate_size=4096,
    vocab_size=50_257,
)
MODELS = {"BERT": BERT, "GPT": GPT}
SCHEMES: dict[str, tuple[str, dict[str, int]]] = {
    "GPipe": ("gpipe", {}),
    "DAPPLE": ("1f1b", {}),
    "Chimera-wave": ("hanayo", {"waves": 1}),
    "Hanayo W=2": ("hanayo", {"waves": 2}),
    "Hanayo W=4": ("hanayo", {"waves": 4}),
    "Hanayo W=8": ("hanayo", {"waves": 8}),
}
NVLINK_A100 = Link(10e-6, 0.8 * 300e9)
NVLINK_V100 = Link(12e-6, 0.8 * 150e9)
PCIE = Link(20e-6, 0.8 * 25e9)
INFINIBAND = Link(25e-6, 0.8 * 12.5e9)


# Which GPU, how many of them have the first link among themselves, and the link between these groups.
SITES = {
    "PC": ("a100", 2, NVLINK_A100, PCIE),
    "FC": ("a100", 8, NVLINK_A100, INFINIBAND),
    "TACC": ("a100-40", 2, PCIE, INFINIBAND),
    "TC": ("v100", 8, NVLINK_V100, PCIE),
}


@cache
def profile_of(model: ModelConfig, site: str, devices: int) -> Profile:
    """The profile of a model on the devices of a site."""
    gpu, size, inside, between = SITES[site]
    links = [
        [inside if a // size == b // size else between for b in range(devices)]
        for a in range(devices)
    ]
    latency, bandwidth = (
        tuple(tuple(getattr(link, key) for link in row) for row in links)
        for key in ("latency", "bandwidth")
    )
    found = analytic_profile(model, TOKENS, 1, gpu_of(gpu), "float32", recorded=False)
    return replace(found, network=Network(latency, bandwidth, serial=True))


class Run(NamedTuple):
    """One simulated step."""

    speed: float  # sequences per second
    memory: np.ndarray  # bytes, by rank of one pipeline


def run(
    model: ModelConfig, site: str, scheme: str, ranks: int, copies: int
) -> Run | None:
    """Simulate a step with as many micro-batches a pipeline as ranks; None if there are too few layers."""
    name, shape = SCHEMES[scheme]
    parts = 2 * shape.get("waves", 0) * ranks or ranks
    if parts > model.layers:
        return None
    schedule = make(name, ranks=ranks, microbatches=ranks, copies=copies, **shape)
    partition = even_partition(model.layers, schedule.parts)
    profile = profile_of(model, site, ranks * copies)
    cost = profile.cost(partition, tokens=TOKENS)
    memory = device_bytes(schedule, cost)[:ranks]
    return Run(copies * ranks / simulate(schedule, cost).makespan, memory)


def figure_8() -> list[Row]:
    """Memory over the devices."""
    rows = []
    for name, published in FIGURES[8].items():
        for scheme, largest in published.items():
            found = run(MODELS[name], "TACC", scheme, 8, 4)
            assert found is not None
            size = found.memory / 1e9
            row = {"model": name, "scheme": scheme, "published": largest}
            row |= {"least": float(size.min()), "most": float(size.max())}
            rows.append(row | {"variance": float(size.var())})
    return rows


def figure_9(sites: Sequence[str] = tuple(SITES)) -> list[Row]:
    """Throughput of BERT on several kinds of link."""
    rows = []
    for name, published in FIGURES[9].items():
        site, copies, _, ranks = name.split()
        if site not in sites:
            continue
        base = None
        for scheme, theirs in published.items():
            found = run(BERT, site, scheme, int(ranks), int(copies))
            if found is None:
                continue
            speed = found.speed
            base = base or speed
            row = {"site": site, "D": int(copies), "P": int(ranks), "scheme": scheme}
            row |= {"speed": speed, "over_gpipe": speed / base, "published": theirs}
            rows.append(row | {"published_over_gpipe": theirs / published["GPipe"]})
    return rows


# ---------------------------------------------------------------- TeraPipe
GRAIN = 8  # tokens; the paper's
PEAK = 125e12  # half precision, a V100 SXM2
MEMORY = 900e9  # bytes a second of its HBM2
NVLINK = 130e9  # bytes a second of an all-reduce over eight of them, as nccl-tests reports its bus bandwidth
WIRE = 25e9 / 8  # bytes a second between nodes
DEVICES = 8  # of a node
PASSES = 6  # of a layer's weights through memory for each slice: read there and back, gradients made, and added
SCORES = 40  # bytes moved for each attention score, there and back, by kernels that are not fused: ten times four
SIZES = {
    "1B": (24, 2048, 16),
    "13B": (40, 5120, 40),
    "44B": (96, 6144, 96),
    "175B": (96, 12288, 96),
}


@dataclass(frozen=True)
class Setting:
    """A row of the paper's table: the model, devices, and seconds of a step without and with slices."""

    number: str
    model: str
    batch: int
    data: int
    pipe: int
    op: int
    whole: float
    sliced: float
    tokens: int = 2048
    slices: str = ""


SETTINGS = [Setting(**row) for row in TERAPIPE["settings"]]
TEN = 10  # of them are in the paper's table; the others have longer sequences


@dataclass(frozen=True)
class Calibration:
    """Seconds a layer takes at least, there and back; share of peak of its matrices; bytes a second of gradients."""

    launch: float
    share: float
    gradients: float


def times(setting: Setting, known: Calibration) -> SliceTimes:
    """All slices of one row, there and back.

    A rank waits for its messages, so those of a stage at a node's edge are part of its work; another stage's count as
    often as hops leave a node. A third is there, two thirds back: one slice is longest both ways.
    """
    layers, hidden, heads = SIZES[setting.model]
    op, points = setting.op, setting.tokens // GRAIN
    prefix, length = (
        GRAIN * axis.astype(float) for axis in np.indices((points, points))
    )
    length += GRAIN
    # Unfused attention also computes the scores that it then masks.
    scores = length * (length + prefix)
    work = 3 * (24 * length * hidden**2 + 4 * hidden * scores) / op
    traffic = SCORES * scores * heads / op / MEMORY
    reduced = 4 * 2 * (op - 1) / op * 2 * hidden * length / NVLINK
    weights = PASSES * 2 * 12 * hidden**2 / op / MEMORY
    each = known.launch + work / (known.share * PEAK) + traffic + reduced + weights
    seconds = layers / setting.pipe * each
    wire = 2 * 2 * hidden * length / WIRE
    peaks = seconds + min(op / DEVICES, 1.0) * wire
    return tabulated_times(seconds + wire, peaks, np.zeros_like(peaks))


def gradient_bytes(setting: Setting) -> float:
    """Bytes that leave a node to sum the gradients of its devices over the copies of the pipeline, in a ring."""
    layers, hidden, _ = SIZES[setting.model]
    shard = 12 * layers * hidden**2 / (setting.pipe * setting.op) * 2
    return 2 * (setting.data - 1) / setting.data * DEVICES * shard


def step(setting: Setting, known: Calibration) -> float:
    """Seconds beside the pipeline: gradients over the copies."""
    return gradient_bytes(setting) / known.gradients


def equal(setting: Setting, known: Calibration, length: int) -> float:
    """A step with all slices of one length, one row at a time."""
    table = times(setting, known)
    slices = setting.tokens // length
    at = np.arange(slices) * length // GRAIN, np.full(slices, length // GRAIN)
    sums, peaks = table.of(*at)
    work_of_all = setting.batch // setting.data * float(sums.sum())
    return work_of_all + (setting.pipe - 1) * float(peaks.max()) + step(setting, known)


@dataclass(frozen=True)
class Planned:
    """A step with the best cuts, and with whole sequences."""

    slicing: BatchCuts
    latency: float
    whole: float

    @property
    def speedup(self) -> float:
        """The latency with whole sequences over the latency with slices."""
        return self.whole / self.latency


def planned(setting: Setting, known: Calibration) -> Planned:
    """A step with the best cuts, and with whole sequences; one row at a time, as all published plans are."""
    sequences = setting.batch // setting.data
    table = times(setting, known)
    sums, peaks = table.of(np.array([0]), np.array([table.points]))
    slicing = best_batch({1: table}, sequences, setting.pipe)
    whole = sequences * float(sums[0]) + (setting.pipe - 1) * float(peaks[0, 0])
    added = step(setting, known)
    return Planned(slicing, slicing.latency + added, whole + added)


# ---------------------------------------------------------------- calibration
def calibrated() -> Calibration:
    """Launch and share from setting 9, gradients from setting 6: linear least squares, errors by their share."""
    nine, six = SETTINGS[8], SETTINGS[5]
    rows, wanted = [], []
    for length, seconds in TERAPIPE["equal"]["9"].items():
        terms = ((0.0, math.inf), (1.0, math.inf), (0.0, 1.0))
        zero, launch, flops = (
            equal(nine, Calibration(*term, math.inf), int(length)) for term in terms
        )
        rows.append([(launch - zero) / seconds, (flops - zero) / seconds])
        wanted.append((seconds - zero) / seconds)
    launch, inverse = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[
        0
    ].tolist()
    alone = Calibration(launch, 1 / inverse, math.inf)
    return Calibration(
        launch,
        1 / inverse,
        gradient_bytes(six) / (six.whole - planned(six, alone).whole),
    )


def predict(setting: Setting, known: Calibration) -> Row:
    """A setting beside what was published about it."""
    found = planned(setting, known)
    tokens = setting.tokens
    lengths = [tokens >> n for n in range(12) if tokens % (GRAIN << n) == 0]
    uniform = {length: equal(setting, known, length) for length in lengths}
    best = min(uniform, key=uniform.__getitem__)
    published = setting.whole / setting.sliced
    return {
        "setting": setting.number,
        "model": setting.model,
        "layout": f"{setting.data} x {setting.pipe} x {setting.op}",
        "sequences": setting.batch // setting.data,
        "whole": setting.whole,
        "our_whole": found.whole,
        "whole_off": found.whole / setting.whole - 1,
        "sliced": setting.sliced,
        "our_sliced": found.latency,
        "sliced_off": found.latency / setting.sliced - 1,
        "speedup": published,
        "our_speedup": found.speedup,
        "speedup_off": found.speedup / published - 1,
        "slices": setting.slices,
        "our_slices": runs([GRAIN * length for length in found.slicing.lengths]),
        "uniform_length": best,
        "uniform": uniform[best],
        "gain": uniform[best] / found.latency - 1,
    }


def runs(lengths: list[int]) -> str:
    """Slices, the same ones counted."""
    pieces = [(length, len(list(same))) for length, same in groupby(lengths)]
    return " ".join(
        f"{count}x{length}" if count > 1 else str(length) for length, count in pieces
    )


# ---------------------------------------------------------------- the script
def measure(given: argparse.Namespace) -> Found:
    known = calibrated()
    settings = SETTINGS[7:TEN] if given.quick else SETTINGS
    found: Found = {
        "calibration": vars(known),
        "terapipe": [predict(setting, known) for setting in settings],
    }
    if given.quick:
        return found | {"9": figure_9(["FC"])}
    return found | {
        "8": figure_8(),
        "9": figure_9(),
    }


def tables(found: Found) -> dict[str, str]:
    model = {"model": "{model}", "scheme": "{scheme}"}
    speed = {"sequences/s": "{speed:.2f}"}
    columns = {
        "8": model
        | {"least, GB": "{least:.1f}", "most, GB": "{most:.1f}"}
        | {"variance": "{variance:.1f}", "paper, most": "{published:g}"},
        "9": {"cluster": "{site}", "D x P": "{D} x {P}", "scheme": "{scheme}"}
        | speed
        | {
            "paper": "{published:.2f}",
            "over GPipe": "{over_gpipe:.2f}",
            "in the paper": "{published_over_gpipe:.2f}",
        },
        "terapipe": {
            "setting": "{setting}",
            "model": "{model}",
            "data x pipe x op": "{layout}",
            "sequences": "{sequences}",
            "whole, published s": "{whole:.3f}",
            "ours": "{our_whole:.3f}",
            "off": "{whole_off:+.0%}",
            "sliced, published s": "{sliced:.3f}",
            "ours, sliced": "{our_sliced:.3f}",
            "off, sliced": "{sliced_off:+.0%}",
            "speed-up, published": "{speedup:.2f}",
            "speed-up, ours": "{our_speedup:.2f}",
            "off by": "{speedup_off:+.0%}",
            "best equal slices, ours": "{uniform:.3f} (of {uniform_length})",
            "planned gains": "{gain:.1%}",
            "slices, published": "{slices}",
            "slices, ours": "{our_slices}",
        },
    }
    names = {"8": "hanayo: memory", "9": "hanayo: gains"}
    made = {
        names.get(key, key): table(found[key], columns[key])
        for key in columns
        if key in found
    }
    off = [abs(r["over_gpipe"] / r["published_over_gpipe"] - 1) for r in found["9"]]
    made["hanayo: gains"] += (
        f"\n\nThe gains over GPipe differ from the published ones by {median(off):.0%} in the median and "
        f"{max(off):.0%} at worst, over {len(off)} cells."
    )
    errors = [abs(row["speedup_off"]) for row in found["terapipe"]]
    known = Calibration(**found["calibration"])
    made["terapipe"] += (
        f"\n\nThe predicted speed-up is off by {fmean(errors):.0%} on average and by {max(errors):.0%} at most. "
        f"Calibrated were {known.launch * 1e3:.2f} ms per layer beside its work, {known.share:.0%} of peak for its "
        f"matrices, and {known.gradients / 1e9:.2f} GB/s at which a node sums gradients."
    )
    return made


if __name__ == "__main__":
    Script(__doc__, measure, tables).main()
