"""Measures what leaving out parts costs a Llama that learns Python source, each micro-batch along its own path.

    python benchmarks/convergence.py                one core, about ten minutes: writes docs/results/convergence.md
    python benchmarks/convergence.py --quick        runs everything once, in seconds; writes nothing
    python benchmarks/convergence.py --gpu --out F  100 M parameters on one GPU; one JSON file per run in folder F
    python benchmarks/convergence.py --seeds-gpu --out F    22 M parameters, small enough for three seeds of each run
    python benchmarks/convergence.py --seeds-100m --out F   100 M parameters, three seeds, shorter runs
    python benchmarks/convergence.py --merge F      writes tables and pictures from such a folder

The name of a run is the percentage of parts left out, followed by its special features: 50-fixed, 33-swaps-full10.

    fixed      every micro-batch, and with it its shard of the text, keeps its path; otherwise paths rotate
    swaps      up to two pairs of neighbors change places on a path; otherwise parts run in order
    visitors   the gradient of a part is the mean over the micro-batches that visited it; otherwise over all of them
    full10     every tenth step runs all parts
    recipe     visitors and full10, as in SkipPipe's later scripts, and all parts while the learning rate rises
    rate       a part that was left out gets a higher learning rate: times (all micro-batches) / (its visitors)
    sgd        SGD with momentum; otherwise AdamW

One process holds one model, and the micro-batches go through its parts along their paths. The gradients are those of
a pipeline with these paths: tests/train/test_convergence.py compares them with the executor's. No pipeline is timed
here. A step takes (parts run) / (parts) of a full one, or what --step-time gives for a share.

All runs of a seed start from the same weights and read the same text in the same order, so differences are taken
within a seed. The learning rate is constant after a warm-up. Therefore a run has a perplexity at equal tokens, after
as many steps as the full model makes, and, if it continues, one at equal time. The text is cut into one shard per
micro-batch. One file in twenty is held out, chosen by its name. The best subset is found greedily, on held-out text
other than that on which it is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.models import Llama, LlamaConfig, split, token_loss
from penstock.models.slice import Carry
from penstock.runtime import Batch, batch_of
from penstock.runtime.gradients import Mean, scale_gradients, visit_scales
from penstock.schedules.orders import require_at_least
from penstock.schedules.skip import Paths, skipping_paths
from penstock.train.after.evaluate import (
    AblationRow,
    evaluate_ablation,
    perplexity,
    skips_of,
)

BEGAN = time.monotonic()
OMITTED = (0.25, 0.5)
MAIN = ("0", "25", "33", "50")
SPECIAL = ("50-fixed", "50-swaps", "50-visitors", "50-full10", "50-visitors-full10")
OUT = Path(__file__).parent.parent / "out"


@dataclass(frozen=True)
class Variant:
    """What a run does, by its name."""

    name: str
    share: float
    fixed: bool
    swaps: int
    mean: Mean
    full: int  # every so many steps all parts; 0: never
    sgd: bool
    recipe: bool = False
    rate: bool = False  # whether the learning rate of a part follows its visits

    @property
    def on(self) -> bool:
        """Whether it goes on to equal time. The others take as long a step as the one they are compared with."""
        special = (
            self.fixed
            or self.swaps
            or self.sgd
            or self.rate
            or self.mean is Mean.VISITS
        )
        return self.recipe or not special


def variant(name: str) -> Variant:
    found = re.fullmatch(
        r"(\d+)((?:-(?:fixed|swaps|visitors|full\d+|sgd|recipe|rate))*)", name
    )
    if found is None:
        raise SystemExit(
            f"{name!r} is no run: a percentage, then any of -fixed -swaps -visitors -full10 -recipe -rate -sgd"
        )
    words = set(found[2].split("-"))
    if "recipe" in words:
        words |= {"visitors", "full10"}
    full = next((int(word[4:]) for word in words if word.startswith("full")), 0)
    mean = Mean.VISITS if "visitors" in words else Mean.ALL
    return Variant(
        name,
        int(found[1]) / 100,
        "fixed" in words,
        2 * ("swaps" in words),
        mean,
        full,
        "sgd" in words,
        "recipe" in words,
        "rate" in words,
    )


@dataclass(frozen=True)
class Scale:
    """A model, its data and how long it learns."""

    name: str
    config: LlamaConfig
    rows: int  # of a micro-batch
    tokens: int  # of a row
    steps: int  # at equal tokens
    rate: float
    sgd_rate: float
    runs: tuple[str, ...]
    seeds: int
    points: int = 12  # of a curve, up to equal tokens
    # Rows on which perplexity is measured, and half as many to search on.
    held: int = 64
    draws: int = 8
    seed: int = 0  # the first
    device: str = "cpu"
    folder: Path = field(default_factory=lambda: Path(sysconfig.get_paths()["stdlib"]))
    most: int = 300_000_000  # bytes of text
    omitted: tuple[float, ...] = OMITTED  # shares without which perplexity is measured

    @property
    def parts(self) -> int:
        return self.config.layers  # the head not counted

    @property
    def microbatches(self) -> int:
        return self.parts - 1  # so that every step covers the parts equally

    @property
    def warmup(self) -> int:
        return max(self.steps // 20, 1)  # steps in which the learning rate rises


def llama(width: int, layers: int, heads: int, inner: int) -> LlamaConfig:
    return LlamaConfig(
        vocab=256, width=width, layers=layers, heads=heads, kv_heads=heads, inner=inner
    )


QUICK = Scale(
    "quick",
    llama(16, 4, 2, 32),
    1,
    16,
    6,
    3e-3,
    0.3,
    (*MAIN, *SPECIAL, "50-swaps-fixed"),
    1,
    3,
    4,
    2,
)
CPU = Scale(
    "cpu",
    llama(48, 12, 4, 128),
    1,
    64,
    300,
    3e-3,
    1.0,
    (*MAIN, *SPECIAL, "50-sgd", "50-visitors-sgd"),
    3,
    10,
    48,
    8,
)
GPU = Scale(
    "gpu",
    llama(832, 12, 13, 2240),
    2,
    1024,
    800,
    5e-4,
    0.1,
    (*MAIN, *SPECIAL),
    1,
    16,
    64,
    16,
    0,
    "cuda",
    Path(sysconfig.get_paths()["purelib"]),
    150_000_000,
)
SEEDS_GPU = replace(
    GPU,
    name="gpu-seeds",
    config=llama(384, 12, 6, 1056),
    runs=("0", "25", "33", "25-recipe", "33-recipe"),
    seeds=3,
    points=8,
    draws=4,
    omitted=(0.25,),
    rate=1e-3,
    most=60_000_000,
)
SEEDS_100M = replace(
    GPU,
    name="gpu-100m",
    runs=("0", "25", "33", "25-recipe", "33-recipe", "25-rate", "33-rate"),
    steps=320,
    seeds=3,
    points=8,
    draws=4,
    omitted=(0.25,),
    most=60_000_000,
)


# ---------------------------------------------------------------- text
def texts(scale: Scale) -> tuple[Tensor, Tensor]:
    """Bytes to learn from, and held-out ones."""
    kept: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for file in sorted(scale.folder.rglob("*.py")):
        name = file.relative_to(scale.folder)
        if scale.device == "cpu" and {"site-packages", "test", "tests"} & set(
            name.parts
        ):
            continue  # of the standard library itself, and not the odd bytes of its tests
        if size < scale.most and file.is_file():
            text = file.read_bytes()
            kept[zlib.crc32(name.as_posix().encode()) % 20 == 0].append(text)
            size += len(text)
    enough = (scale.microbatches + 1) * 4 * scale.tokens
    found = [
        torch.frombuffer(bytearray(b"\n".join(some) or b"\n"), dtype=torch.uint8)
        for some in kept
    ]
    if min(map(len, found)) < enough:
        raise SystemExit(
            f"{scale.folder} has too little text in *.py files: {size} bytes; give another --data"
        )
    return found[0].to(scale.device), found[1].to(scale.device)


def rows_at(text: Tensor, offsets: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
    rows = torch.stack([text[at : at + tokens + 1] for at in offsets]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batches(text: Tensor, scale: Scale, seed: int) -> Iterator[Batch]:
    """Of step after step; micro-batch m reads in shard m of the text."""
    draw = torch.Generator().manual_seed(1000 + seed)
    shard = len(text) // scale.microbatches
    while True:
        at = torch.randint(
            0,
            shard - scale.tokens - 1,
            (scale.microbatches, scale.rows),
            generator=draw,
        )
        cut = [
            rows_at(text, (m * shard + at[m]).tolist(), scale.tokens)
            for m in range(scale.microbatches)
        ]
        tokens = scale.microbatches * scale.rows * scale.tokens
        yield batch_of([x for x, _ in cut], [y for _, y in cut], valid=tokens)


def held_out(text: Tensor, scale: Scale) -> tuple[list[Batch], list[Batch]]:
    """Rows from all over the text: two in three to measure on, the third to search on."""
    total = scale.held * 3 // 2
    space = (len(text) - scale.tokens - 1) // total
    offsets = [number * space for number in range(total)]
    measured = [at for number, at in enumerate(offsets) if number % 3 != 2]

    def made(some: Sequence[int]) -> list[Batch]:
        cut = [
            rows_at(text, some[first : first + 32], scale.tokens)
            for first in range(0, len(some), 32)
        ]
        return [batch_of([x], [y]) for x, y in cut]

    return made(measured), made(offsets[2::3])


# ---------------------------------------------------------------- a run
def fixed_paths(
    parts: int,
    microbatches: int,
    skips: int,
    swaps: int = 0,
    seed: int = 0,
    ahead: int | None = None,
) -> Iterator[Paths]:
    """Yield the first step of `skipping_paths` for ever.

    So each micro-batch, and thus each shard of the data, keeps its path.
    """
    steps = skipping_paths(parts, microbatches, skips, swaps, seed, ahead)
    return repeat(next(steps))


def with_full(steps: Iterable[Paths], parts: int, every: int) -> Iterator[Paths]:
    """Insert steps that run all parts in order, so that every `every`-th step is such a step.

    With every=10 these are the steps 9, 19, ... The given steps continue in between.

    """
    require_at_least(1, parts=parts, every=every)
    full_path = tuple(range(parts))
    for number, paths in enumerate(steps):
        if every == 1 or (number and number % (every - 1) == 0):
            yield (full_path,) * len(paths)
        if every > 1:
            yield paths


def paths_of(v: Variant, scale: Scale, seed: int) -> Iterator[Paths]:
    choose = fixed_paths if v.fixed else skipping_paths
    steps = choose(
        scale.parts, scale.microbatches, skips_of(scale.parts, v.share), v.swaps, seed
    )
    if v.full:
        steps = with_full(steps, scale.parts, v.full)
    if not v.recipe:
        return steps
    whole: Paths = (tuple(range(scale.parts)),) * scale.microbatches
    return chain(repeat(whole, scale.warmup), steps)


def optimizer_of(
    v: Variant, scale: Scale, parts: Sequence[nn.Module]
) -> torch.optim.Optimizer:
    """The optimizer, with a group of parameters for each part."""
    groups = [{"params": list(part.parameters())} for part in parts]
    if v.sgd:
        return torch.optim.SGD(groups, scale.sgd_rate, momentum=0.9)
    return torch.optim.AdamW(
        groups, scale.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )


def numbers(scale: Scale) -> AbstractContextManager[Any]:
    return (
        torch.autocast("cuda", torch.bfloat16)
        if scale.device == "cuda"
        else nullcontext()
    )


class Run:
    """One model learning; what is known of it so far is its record."""

    def __init__(
        self,
        v: Variant,
        scale: Scale,
        seed: int,
        text: Tensor,
        held: tuple[list[Batch], list[Batch]],
    ):
        torch.manual_seed(seed)
        self.v, self.scale, self.held = v, scale, held
        self.model = Llama(scale.config).to(scale.device)
        self.parts = split(self.model, [1] * scale.parts + [0])
        self.optimizer = optimizer_of(v, scale, self.parts)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.feed, self.paths = batches(text, scale, seed), paths_of(v, scale, seed)
        self.step = 0
        self.losses: list[Tensor] = []
        self.record: dict[str, Any] = {
            "scale": scale.name,
            "name": v.name,
            "seed": seed,
            "torch": torch.__version__,
            "parts": scale.parts,
            "microbatches": scale.microbatches,
            "steps": scale.steps,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "tokens": scale.microbatches * scale.rows * scale.tokens,
            "length": scale.tokens,
            "text": len(text),
            "device": torch.cuda.get_device_name()
            if scale.device == "cuda"
            else "one CPU core",
            "kept": scale.parts - skips_of(scale.parts, v.share),
            "curve": [],
            "finished": False,
        }

    def learn(self) -> float:
        """A step; the share of a full step's work."""
        batch, paths = next(self.feed), next(self.paths)
        warm = min(1.0, (self.step + 1) / self.scale.warmup)
        # Adam forgets the scale of gradients, so only the rate can make up for few visitors.
        visits = visit_scales(len(self.parts), paths, [1] * len(paths))
        for number, group in enumerate(self.optimizer.param_groups):
            rise = visits[number] if self.v.rate else 1.0
            group["lr"] = self.rates[number] * warm * rise
        with numbers(self.scale):
            loss = token_loss(
                torch.cat(run_along_paths(self.parts, batch.inputs, paths)),
                torch.cat(batch.labels),
            )
        (loss / batch.valid).backward()  # type: ignore[no-untyped-call]
        if self.v.mean is Mean.VISITS:
            scale_gradients(
                self.parts,
                visit_scales(len(self.parts), paths, [y.numel() for y in batch.labels]),
            )
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach() / batch.valid)
        self.step += 1
        return sum(map(len, paths)) / (self.scale.parts * len(paths))

    def note(self, spent: float) -> None:
        """A point of the curve: steps, simulated time in full steps, loss meanwhile, held-out loss of all parts."""
        with numbers(self.scale):
            held = math.log(perplexity(self.parts, self.held[0]))
        trained = float(torch.stack(self.losses).mean()) if self.losses else held
        self.losses.clear()
        self.record["curve"].append((self.step, spent, trained, held))

    def whole(self, deadline: float, times: dict[int, float]) -> dict[str, Any]:
        began, spent, percent = time.monotonic(), 0.0, round(100 * self.v.share)
        full = self.scale.steps
        self.note(spent)
        while self.step < full or (self.v.on and spent < full - 1e-6):
            if time.monotonic() > deadline:
                return self.record
            work = self.learn()
            spent += times[percent] if percent in times and work < 1.0 else work
            if self.step % max(full // self.scale.points, 1) == 0 or self.step == full:
                self.note(spent)
            if self.step == full:
                with numbers(self.scale):
                    rows = evaluate_ablation(
                        self.parts,
                        self.held[0],
                        self.scale.omitted,
                        self.scale.draws,
                    )
                    rows = with_best_subsets(rows, self.parts, *self.held)
                self.record |= {
                    "omission": [asdict(row) for row in rows],
                    "spent": spent,
                    "work": spent,
                }
        if self.record["curve"][-1][0] != self.step:
            self.note(spent)
        return self.record | {
            "finished": True,
            "seconds": time.monotonic() - began,
            "work": spent,
        }


# ---------------------------------------------------------------- many paths in one process
def run_along_paths(
    parts: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    paths: Sequence[Sequence[int]],
    starts: Sequence[Tensor] = (),
    named: Sequence[Mapping[str, Tensor]] = (),
) -> list[Tensor]:
    """Return the logits of each micro-batch.

    Paths name parts. The last part, which has the head, ends them all and is not named. If
    rows are packed with documents, `starts` has the start of each token's document. The first part gets the `named`
    tensors of each micro-batch, such as the types of a Bert's segments.
    """
    if len(inputs) != len(paths):
        raise ShapeError(
            f"{len(inputs)} micro-batches cannot go along {len(paths)} paths: give each its own"
        )
    for number, path in enumerate(paths):
        if (
            not path
            or path[0] != 0
            or not all(0 <= part < len(parts) - 1 for part in path)
        ):
            raise ShapeError(
                f"micro-batch {number} cannot go along {tuple(path)}: a path begins with part 0 and names parts "
                f"up to {len(parts) - 2}; part {len(parts) - 1} has the head and comes by itself"
            )
    states = list(inputs)
    left = [list(path) for path in paths]
    while any(left):
        part = min(path[0] for path in left if path)
        here = [number for number, path in enumerate(left) if path and path[0] == part]
        _run_together(parts[part], states, here, starts, () if part else named)
        for number in here:
            left[number].pop(0)
    _run_together(parts[-1], states, list(range(len(states))), starts)
    return states


def _run_together(
    part: nn.Module,
    states: list[Tensor],
    numbers: Sequence[int],
    starts: Sequence[Tensor],
    named: Sequence[Mapping[str, Tensor]] = (),
) -> None:
    """Run micro-batches through a part; those of equal length share a call."""
    for length in dict.fromkeys(states[number].shape[1] for number in numbers):
        same = [number for number in numbers if states[number].shape[1] == length]
        first = torch.cat([starts[number] for number in same]) if starts else None
        piece = () if first is None else (Carry(length, first).open(0, length),)
        rows = [len(states[number]) for number in same]
        joined = {
            name: torch.cat([named[number][name] for number in same])
            for name in (named[0] if named else ())
        }
        inputs = torch.cat([states[number] for number in same])
        outputs = part(inputs, *piece, **joined)
        for number, state in zip(same, outputs.split(rows), strict=True):
            states[number] = state


def with_best_subsets(
    rows: Sequence[AblationRow],
    parts: Sequence[nn.Module],
    batches: Sequence[Batch],
    search: Sequence[Batch],
) -> list[AblationRow]:
    """Add a row with the best subset after each row of random ones; it is searched greedily on other batches."""
    added = []
    for row in rows:
        added.append(row)
        if row.way == "random":
            path = greedy_path(parts, search, row.kept)
            own = perplexity(parts, batches, path)
            ratio = own / rows[0].perplexity
            added.append(
                AblationRow("best", row.kept, row.parts, own, 0.0, ratio, path)
            )
    return added


def greedy_path(
    parts: Sequence[nn.Module], batches: Sequence[Batch], kept: int
) -> tuple[int, ...]:
    """Start with all parts, and always leave out the one that is missed least."""
    path = tuple(range(len(parts) - 1))
    while len(path) > kept:
        shorter = [(*path[:n], *path[n + 1 :]) for n in range(1, len(path))]
        path = min(shorter, key=lambda shorter: perplexity(parts, batches, shorter))
    return path


# ---------------------------------------------------------------- many runs
def all_runs(
    scale: Scale, out: Path | None, deadline: float, times: dict[int, float]
) -> list[dict[str, Any]]:
    """Seed after seed; what lies in the folder already is not run again, what would not finish in time not begun."""
    text, held = texts(scale)
    measured = held_out(held, scale)
    say(
        f"{len(text)} bytes to learn, {len(held)} held out, ready after {time.monotonic() - BEGAN:.0f} s"
    )
    found: list[dict[str, Any]] = []
    pace: list[float] = []
    for seed in range(scale.seed, scale.seed + scale.seeds):
        for name in scale.runs:
            v = variant(name)
            file = out / f"{scale.name}-{name}-{seed}.json" if out else None
            if file and file.exists() and json.loads(file.read_text())["finished"]:
                found.append(json.loads(file.read_text()))
                continue
            cost = (
                1.0 if v.on else 1.0 - v.share * (1.0 - (1 / v.full if v.full else 0.0))
            )
            if pace and time.monotonic() + cost * max(pace) > deadline:
                say(f"{name}, seed {seed}: not begun, it would not end in time")
                continue
            record = Run(v, scale, seed, text, measured).whole(deadline, times)
            found.append(record)
            if record["finished"]:
                pace.append(record["seconds"] / cost)
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(record))
            last = record["curve"][-1]
            took = (
                f"{record['seconds']:.1f} s"
                if record["finished"]
                else "stopped, no time left"
            )
            say(
                f"{name}, seed {seed}: {last[0]} steps, held-out loss {last[3]:.4f}, {took}"
            )
    return found


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def scale_of(given: argparse.Namespace) -> Scale:
    scale = QUICK if given.quick else GPU if given.gpu else CPU
    scale = SEEDS_GPU if given.seeds_gpu else scale
    scale = SEEDS_100M if given.seeds_100m else scale
    runs = scale.runs
    if given.shares:
        percents = {round(100 * float(share)) for share in given.shares.split(",")}
        runs = tuple(
            name for name in runs if round(100 * variant(name).share) in percents
        )
    if given.only:
        runs = tuple(given.only.split(","))
    folder = Path(given.data) if given.data else scale.folder
    scale = replace(
        scale,
        runs=runs,
        folder=folder,
        steps=given.steps or scale.steps,
        seeds=given.seeds or scale.seeds,
    )
    return replace(scale, rows=given.rows or scale.rows, seed=given.seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few steps of a tiny model; writes nothing",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="about 100 M parameters on one NVIDIA GPU, in bf16",
    )
    parser.add_argument(
        "--seeds-gpu",
        action="store_true",
        help="about 22 M parameters on one NVIDIA GPU, in bf16, three seeds",
    )
    parser.add_argument(
        "--seeds-100m",
        action="store_true",
        help="about 100 M parameters on one NVIDIA GPU, in bf16, three seeds",
    )
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="text: all *.py below it, instead of the standard library",
    )
    parser.add_argument(
        "--shares", metavar="0,0.33", help="only the runs that leave out these shares"
    )
    parser.add_argument(
        "--only", metavar="NAMES", help="only these runs, such as 0,50,50-fixed"
    )
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--steps",
        type=int,
        help="steps at equal tokens; the same for all runs of a folder",
    )
    parser.add_argument("--rows", type=int, help="rows of a micro-batch")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="begin no run that would not end in time",
    )
    parser.add_argument(
        "--step-time",
        metavar="0.5=0.6",
        default="",
        help="of a share: its step over a full one",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="where each run is kept, as JSON"
    )
    parser.add_argument(
        "--merge",
        metavar="FOLDER",
        help="run nothing; tables and pictures of what is kept there",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.merge:
        found = [
            json.loads(file.read_text())
            for file in sorted(Path(given.merge).rglob("*.json"))
        ]
    else:
        scale = scale_of(given)
        out = (
            None
            if given.quick
            else Path(given.out or OUT / f"convergence-{scale.name}")
        )
        pairs = [one.split("=") for one in given.step_time.split(",") if one]
        times = {round(100 * float(share)): float(ratio) for share, ratio in pairs}
        found = all_runs(scale, out, BEGAN + 60 * given.minutes, times)
    # A run that has no time left may lack its end at equal time, but not the one at equal tokens.
    done = [record for record in found if "omission" in record]
    if not done:
        raise SystemExit("no run was finished; give more --minutes, or fewer --steps")
    if (given.gpu or given.seeds_gpu or given.seeds_100m) and not given.merge:
        return  # a machine with a GPU may lack what draws: it leaves its folder, which is merged elsewhere
    import convergence_page as page  # noqa: PLC0415

    section = page.section(done)
    if given.merge or not (given.quick or given.only or given.shares):
        page.write(done, section)
    sys.stdout.write(
        json.dumps({"runs": done, "pairs": page.pairs(done)}) + "\n"
        if given.json
        else section
    )


if __name__ == "__main__":
    main()
