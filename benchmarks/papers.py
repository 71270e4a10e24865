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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

import numpy as np
from batches import BatchCuts, best_batch
from harness import Found, Row, Script, read, table

from penstock import make, simulate
from penstock.config import ModelConfig
from penstock.cost import Cost, Network, Profile, WrappedCost
from penstock.cost.gpus import Gpu, Link, analytic_profile, gpu_of
from penstock.cost.memory import device_bytes
from penstock.cost.sums import even_ring_seconds
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
    width=2560,
    heads=64,
    kv_heads=64,
    inner=4 * 2560,
    vocab=30_522,
)
GPT = ModelConfig(
    family="gpt",
    layers=128,
    width=1024,
    heads=16,
    kv_heads=16,
    inner=4096,
    vocab=50_257,
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


@dataclass(frozen=True)
class Site:
    """Equal GPUs, and the link between any two of them."""

    name: str
    gpu: Gpu
    link: Callable[[int, int], Link]


def in_groups(size: int, inside: Link, between: Link) -> Callable[[int, int], Link]:
    """Groups of `size` devices with one link inside and another one between."""
    return lambda a, b: inside if a // size == b // size else between


SITES = {
    "PC": Site(
        "8 A100-80, NVLink in pairs", gpu_of("a100"), in_groups(2, NVLINK_A100, PCIE)
    ),
    "FC": Site(
        "8 A100-80, NVLink everywhere",
        gpu_of("a100"),
        in_groups(8, NVLINK_A100, INFINIBAND),
    ),
    "TACC": Site(
        "A100-40, two a node, PCIe and InfiniBand",
        gpu_of("a100-40"),
        in_groups(2, PCIE, INFINIBAND),
    ),
    "TC": Site("8 V100-32, NVLink", gpu_of("v100"), in_groups(8, NVLINK_V100, PCIE)),
}


def _everywhere(_: int, __: int) -> Link:
    return PCIE


@dataclass(frozen=True, slots=True)
class OnSite(WrappedCost):
    """A cost on the links of a site. Links are looked up, so that 4,096 ranks need no matrix."""

    link: Callable[[int, int], Link] = _everywhere

    def latency(self, source: int, target: int) -> float:
        """Seconds until the first byte of a message arrives."""
        return self.link(source, target).latency

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes per second."""
        return self.link(source, target).bandwidth

    def sum_end(
        self, ranks: Sequence[int], size: float, ready: Sequence[float]
    ) -> float:
        """A ring in the order of the ranks, at the pace of its slowest link, once the last rank is ready."""
        ring = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
        links = [self.link(a, b) for a, b in ring]
        slowest = min(one.bandwidth for one in links)
        latency = max(one.latency for one in links)
        seconds = even_ring_seconds(len(ranks), latency, slowest, size)
        return max(ready) + seconds


@cache
def profile_of(model: ModelConfig, gpu: Gpu, rows: int = 1) -> Profile:
    """The profile of a model, without links, which the sites have."""
    profile = analytic_profile(model, TOKENS, rows, gpu, "float32", recorded=False)
    return replace(profile, network=Network(serial=True))


@dataclass(frozen=True)
class Run:
    """One simulated step."""

    sequences_per_second: float
    memory: np.ndarray  # bytes, by rank of one pipeline
    idle: float


def run(
    model: ModelConfig,
    site: Site,
    scheme: str,
    ranks: int,
    copies: int,
    rows: int = 1,
    microbatches: int | None = None,
) -> Run | None:
    """Simulate a step with as many micro-batches a pipeline as ranks; None if there are too few layers."""
    name, shape = SCHEMES[scheme]
    parts = 2 * shape.get("waves", 0) * ranks or ranks
    if parts > model.layers:
        return None
    count = microbatches or ranks
    schedule = make(name, ranks=ranks, microbatches=count, copies=copies, **shape)
    partition = even_partition(model.layers, schedule.parts)
    bare: Cost = profile_of(model, site.gpu, rows).cost(partition, tokens=TOKENS)
    cost = OnSite(bare, site.link)
    timeline = simulate(schedule, cost)
    sequences = copies * count * rows
    one = make(name, ranks=ranks, microbatches=count, copies=min(copies, 2), **shape)
    memory = device_bytes(one, cost)[:ranks]
    return Run(sequences / timeline.makespan, memory, timeline.bubble)


def figure_8() -> list[Row]:
    """Memory over the devices."""
    rows = []
    for name, published in FIGURES[8].items():
        for scheme, largest in published.items():
            found = run(MODELS[name], SITES["TACC"], scheme, 8, 4)
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
            found = run(BERT, SITES[site], scheme, int(ranks), int(copies))
            if found is None:
                continue
            speed = found.sequences_per_second
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


def work(
    setting: Setting, rows: int, length: np.ndarray, prefix: np.ndarray
) -> np.ndarray:
    """Floating-point operations of a layer on one device, there and back."""
    _, hidden, _ = SIZES[setting.model]
    # Unfused attention also computes the scores that it then masks.
    scores = rows * length * (length + prefix)
    return 3 * (24 * rows * length * hidden**2 + 4 * hidden * scores) / setting.op


def traffic(
    setting: Setting, rows: int, length: np.ndarray, prefix: np.ndarray
) -> np.ndarray:
    """Seconds of a layer beside its matrices: scores and weights through memory, sums between a stage's devices."""
    _, hidden, heads = SIZES[setting.model]
    scores = SCORES * rows * length * (length + prefix) * heads / setting.op / MEMORY
    reduced = (
        4 * 2 * (setting.op - 1) / setting.op * 2 * hidden * rows * length / NVLINK
    )
    weights = PASSES * 2 * 12 * hidden**2 / setting.op / MEMORY
    return scores + reduced + weights


def stage(
    setting: Setting,
    known: Calibration,
    rows: int,
    length: np.ndarray,
    prefix: np.ndarray,
) -> np.ndarray:
    """Seconds of one stage, there and back, without its messages."""
    layers = SIZES[setting.model][0] / setting.pipe
    each = known.launch + work(setting, rows, length, prefix) / (known.share * PEAK)
    return layers * (each + traffic(setting, rows, length, prefix))


def message(setting: Setting, rows: int, length: np.ndarray) -> np.ndarray:
    """Seconds on the wire of what a stage sends on, and of what comes back."""
    return 2 * 2 * SIZES[setting.model][1] * rows * length / WIRE


def crossings(setting: Setting) -> float:
    """Of the hops between stages, the share that leaves a node."""
    return min(setting.op / DEVICES, 1.0)


def times(setting: Setting, known: Calibration, rows: int) -> SliceTimes:
    """All slices. A rank waits for its messages, so those of a stage at a node's edge are part of its work; another
    stage's count as often as hops leave a node. A third is there, two thirds back: one slice is longest both ways.
    """
    points = setting.tokens // GRAIN
    prefix, length = (
        GRAIN * axis.astype(float) for axis in np.indices((points, points))
    )
    length += GRAIN
    seconds, wire = (
        stage(setting, known, rows, length, prefix),
        message(setting, rows, length),
    )
    peaks = seconds + crossings(setting) * wire
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
    table = times(setting, known, 1)
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
    table = times(setting, known, 1)
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
