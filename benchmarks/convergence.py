"""Measures what leaving out parts costs a Llama that learns Python source, each micro-batch along its own path.

    python benchmarks/convergence.py                    one core, ten minutes: docs/results/convergence.md
    python benchmarks/convergence.py --scale gpu-100m --out F  100 M parameters on a GPU; a JSON file per run in F
    python benchmarks/convergence.py --kept F           the tables of all runs in such a folder
    python benchmarks/convergence.py --quick            a few steps of a tiny model; writes nothing

The name of a run is the percentage of parts left out, and perhaps what is special: 33, 33-recipe, 25-rate. Paths
rotate, parts run in order, gradients are means over all micro-batches, and the optimizer is AdamW.

    recipe     as in SkipPipe's later scripts: the gradient of a part is the mean over the micro-batches that visited
               it, every tenth step runs all parts, and all parts run while the learning rate rises
    rate       a part that was left out gets a higher learning rate: times (all micro-batches) / (its visitors)

One process holds one model, and the micro-batches go through its parts along their paths. The gradients are those of
a pipeline with these paths: tests/train/test_convergence.py compares them with the executor's. No pipeline is timed
here. A step takes (parts run) / (parts) of a full one.

All runs of a seed start from the same weights and read the same text in the same order, so differences are taken
within a seed. The learning rate is constant after a warm-up. Therefore a run has a perplexity at equal tokens, after
as many steps as the full model makes, and, if it continues, one at equal time. The text is cut into one shard per
micro-batch. One file in twenty is held out, chosen by its name.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sysconfig
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, Found, Row, Script, read, say, table, words, write
from torch import Tensor, nn

from penstock.errors import ShapeError
from penstock.models import Llama, LlamaConfig, split, token_loss
from penstock.runtime import Batch, batch_of
from penstock.runtime.gradients import scale_gradients, visit_scales
from penstock.schedules.orders import require_at_least
from penstock.schedules.skip import Paths, skipping_paths
from penstock.train.after.evaluate import perplexity, skips_of

BEGAN = time.monotonic()
FULL_EVERY = 10  # steps of the recipe run all parts
OUT = ROOT / "out" / "convergence"
PLAIN = ("0", "25", "33", "50")
# Student's, two-sided, by degrees of freedom.
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36}


@dataclass(frozen=True)
class Variant:
    """What a run does, by its name."""

    share: float  # of the parts left out
    special: str

    @property
    def recipe(self) -> bool:
        return self.special == "recipe"

    @property
    def on(self) -> bool:
        """Whether it goes on to equal time. The others take as long a step as the one they are compared with."""
        return self.special != "rate"


def variant(name: str) -> Variant:
    percent, _, special = name.partition("-")
    if not percent.isdigit() or special not in ("", "recipe", "rate"):
        raise SystemExit(f"{name!r} is no run: a percentage, then -recipe or -rate")
    return Variant(int(percent) / 100, special)


@dataclass(frozen=True)
class Scale:
    """A model, its data and how long it learns."""

    name: str
    config: LlamaConfig
    rows: int  # of a micro-batch
    tokens: int  # of a row
    steps: int  # at equal tokens
    rate: float
    runs: tuple[str, ...]
    seeds: int
    points: int = 12  # of a curve, up to equal tokens
    held: int = 64  # rows on which perplexity is measured
    seed: int = 0  # the first
    device: str = "cpu"
    folder: Path = field(default_factory=lambda: Path(sysconfig.get_paths()["stdlib"]))
    most: int = 300_000_000  # bytes of text

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
    rows=1,
    tokens=16,
    steps=6,
    rate=3e-3,
    runs=("0", "50", "50-recipe", "50-rate"),
    seeds=1,
    points=3,
    held=4,
    most=1_000_000,
)
CPU = Scale(
    "cpu",
    llama(48, 12, 4, 128),
    rows=1,
    tokens=64,
    steps=300,
    rate=3e-3,
    runs=PLAIN,
    seeds=3,
    points=10,
    held=48,
)
GPU = Scale(
    "gpu",
    llama(832, 12, 13, 2240),
    rows=2,
    tokens=1024,
    steps=800,
    rate=5e-4,
    runs=PLAIN,
    seeds=1,
    points=16,
    device="cuda",
    folder=Path(sysconfig.get_paths()["purelib"]),
    most=150_000_000,
)
RECIPES = ("0", "25", "33", "25-recipe", "33-recipe")
THREE = replace(GPU, runs=RECIPES, seeds=3, points=8, most=60_000_000)
SCALES = {
    "cpu": CPU,
    "gpu": GPU,
    "gpu-seeds": replace(
        THREE, name="gpu-seeds", config=llama(384, 12, 6, 1056), rate=1e-3
    ),
    "gpu-100m": replace(
        THREE, name="gpu-100m", runs=(*RECIPES, "25-rate", "33-rate"), steps=320
    ),
}


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
            f"{scale.folder} has too little text in *.py files: {size} bytes"
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


def held_out(text: Tensor, scale: Scale) -> list[Batch]:
    """Rows from all over the text. Every third of these places is left to other uses."""
    total = scale.held * 3 // 2
    space = (len(text) - scale.tokens - 1) // total
    some = [number * space for number in range(total) if number % 3 != 2]
    cut = [
        rows_at(text, some[first : first + 32], scale.tokens)
        for first in range(0, len(some), 32)
    ]
    return [batch_of([x], [y]) for x, y in cut]


# ---------------------------------------------------------------- a run
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
    skips = skips_of(scale.parts, v.share)
    steps = skipping_paths(scale.parts, scale.microbatches, skips, seed=seed)
    if not v.recipe:
        return steps
    whole: Paths = (tuple(range(scale.parts)),) * scale.microbatches
    later = with_full(steps, scale.parts, FULL_EVERY)
    return chain(repeat(whole, scale.warmup), later)


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
        name: str,
        scale: Scale,
        seed: int,
        text: Tensor,
        held: list[Batch],
    ):
        torch.manual_seed(seed)
        v = variant(name)
        self.v, self.scale, self.held = v, scale, held
        self.model = Llama(scale.config).to(scale.device)
        self.parts = split(self.model, [1] * scale.parts + [0])
        groups = [{"params": list(part.parameters())} for part in self.parts]
        self.optimizer = torch.optim.AdamW(
            groups, scale.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.feed, self.paths = batches(text, scale, seed), paths_of(v, scale, seed)
        self.step = 0
        self.losses: list[Tensor] = []
        self.record: dict[str, Any] = {
            "scale": scale.name,
            "name": name,
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
            rise = visits[number] if self.v.special == "rate" else 1.0
            group["lr"] = self.rates[number] * warm * rise
        with numbers(self.scale):
            loss = token_loss(
                torch.cat(run_along_paths(self.parts, batch.inputs, paths)),
                torch.cat(batch.labels),
            )
        (loss / batch.valid).backward()  # type: ignore[no-untyped-call]
        if self.v.recipe:
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
            held = math.log(perplexity(self.parts, self.held))
        trained = float(torch.stack(self.losses).mean()) if self.losses else held
        self.losses.clear()
        self.record["curve"].append((self.step, spent, trained, held))

    def whole(self, deadline: float) -> Row:
        began, spent = time.monotonic(), 0.0
        full = self.scale.steps
        self.note(spent)
        while self.step < full or (self.v.on and spent < full - 1e-6):
            if time.monotonic() > deadline:
                return self.record
            spent += self.learn()
            if self.step % max(full // self.scale.points, 1) == 0 or self.step == full:
                self.note(spent)
            if self.step == full:
                self.record["work"] = spent
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
) -> list[Tensor]:
    """Return the logits of each micro-batch.

    Paths name parts. The last part, which has the head, ends them all and is not named.
    """
    if len(inputs) != len(paths):
        raise ShapeError(
            f"{len(inputs)} micro-batches cannot go along {len(paths)} paths: give each its own"
        )
    for number, path in enumerate(paths):
        known = all(0 <= part < len(parts) - 1 for part in path)
        if not path or path[0] != 0 or not known:
            raise ShapeError(
                f"micro-batch {number} cannot go along {tuple(path)}: a path begins with part 0 and names parts "
                f"up to {len(parts) - 2}; part {len(parts) - 1} has the head and comes by itself"
            )
    states = list(inputs)
    left = [list(path) for path in paths]
    while any(left):
        part = min(path[0] for path in left if path)
        here = [number for number, path in enumerate(left) if path and path[0] == part]
        _run_together(parts[part], states, here)
        for number in here:
            left[number].pop(0)
    _run_together(parts[-1], states, list(range(len(states))))
    return states


def _run_together(
    part: nn.Module, states: list[Tensor], numbers: Sequence[int]
) -> None:
    """Run micro-batches through a part; those of equal length share a call."""
    for length in dict.fromkeys(states[number].shape[1] for number in numbers):
        same = [number for number in numbers if states[number].shape[1] == length]
        outputs = part(torch.cat([states[number] for number in same]))
        rows = [len(states[number]) for number in same]
        for number, state in zip(same, outputs.split(rows), strict=True):
            states[number] = state


# ---------------------------------------------------------------- many runs
def all_runs(scale: Scale, given: argparse.Namespace) -> list[Row]:
    """Seed after seed; what lies in the folder already is not run again, what would not finish in time not begun."""
    deadline = BEGAN + 60 * given.minutes
    out = None if given.quick else given.out or OUT
    text, held = texts(scale)
    measured = held_out(held, scale)
    found: list[Row] = []
    for seed in range(scale.seed, scale.seed + scale.seeds):
        for name in scale.runs:
            file = out / f"{scale.name}-{name}-{seed}.json" if out else None
            if file and file.exists() and read(file)["finished"]:
                found.append(read(file))
                continue
            if time.monotonic() > deadline:
                say(f"{name}, seed {seed}: not begun, there is no time left")
                continue
            record = Run(name, scale, seed, text, measured).whole(deadline)
            found.append(record)
            write(file, record)
            step, _, _, loss = record["curve"][-1]
            say(f"{name}, seed {seed}: {step} steps, held-out loss {loss:.4f}")
    return found


# ---------------------------------------------------------------- figures
def by_name(runs: Sequence[Row]) -> dict[str, list[Row]]:
    """Plain shares first, then what is special."""
    names = sorted({run["name"] for run in runs}, key=lambda name: ("-" in name, name))
    return {name: [run for run in runs if run["name"] == name] for name in names}


def at_tokens(run: Row) -> float:
    """Held-out loss after as many tokens as the full model read."""
    return float(next(h for step, _, _, h in run["curve"] if step == run["steps"]))


def at_time(run: Row) -> float | None:
    """Held-out loss after as much time; none where the run was not that long."""
    is_long = run["work"] > run["steps"] - 1.5
    return float(run["curve"][-1][3]) if is_long else None


def spread(values: Sequence[float]) -> str:
    """The mean, with the range."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.3f}"
    return mean + (f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else "")


def perplexities(runs: Sequence[Row]) -> list[Row]:
    """A row for each name, with ratios to the full model of the same seed."""
    named = by_name(runs)
    full = {run["seed"]: at_tokens(run) for run in named.get("0", ())}
    rows = []
    for name, some in named.items():
        early = [(run["seed"], at_tokens(run)) for run in some]
        late = [(r["seed"], held) for r in some if (held := at_time(r)) is not None]
        row: Row = {"name": name, "seeds": len(some)}
        row |= {"kept": some[0]["kept"], "parts": some[0]["parts"]}
        for key, losses in (("tokens", early), ("time", late)):
            over = [math.exp(loss - full[s]) for s, loss in losses if s in full]
            row[key] = spread([math.exp(loss) for _, loss in losses])
            row[f"{key}_over"] = spread(over)
        rows.append(row)
    return rows


def pairs(runs: Sequence[Row]) -> list[Row]:
    """Each special run against the plain one with this share, and all against none, within each seed."""
    losses = {
        name: {run["seed"]: at_tokens(run) for run in some}
        for name, some in by_name(runs).items()
    }
    rows = []
    for name, own in losses.items():
        for other in dict.fromkeys((name.partition("-")[0], "0")):
            seeds = own.keys() & losses.get(other, {}).keys()
            apart = [own[seed] - losses[other][seed] for seed in seeds]
            if apart and name != other:
                rows.append({"one": name, "other": other, **difference(apart)})
    return rows


def difference(apart: Sequence[float]) -> Row:
    """The mean difference, half a 95% interval, and what they say."""
    mean, count = statistics.mean(apart), len(apart)
    found: Row = {"seeds": count, "mean": f"{mean:+.4f}"}
    if count < 3:
        return found | {"verdict": "too few seeds to say"}
    half = T_95.get(count - 1, 2.0) * statistics.stdev(apart) / math.sqrt(count)
    verdict = "worse" if mean > 0 else "better"
    if abs(mean) <= half:
        verdict = "within the noise"
    return found | {"mean": f"{mean:+.4f} ± {half:.4f}", "verdict": verdict}


# ---------------------------------------------------------------- the script
def options(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--scale", choices=tuple(SCALES), default="cpu")
    flag("--only", type=words, default=(), help="runs, such as 0,50,50-recipe")
    flag("--seeds", type=int, help="how many")
    flag("--seed", type=int, default=0, help="the first of them")
    flag("--steps", type=int, help="at equal tokens; the same for a whole folder")
    flag("--minutes", type=float, default=math.inf, help="begin no run that ends later")


def measure(given: argparse.Namespace) -> Found:
    torch.set_num_threads(1)
    scale = QUICK if given.quick else SCALES[given.scale]
    scale = replace(
        scale,
        runs=given.only or scale.runs,
        steps=given.steps or scale.steps,
        seeds=given.seeds or scale.seeds,
        seed=given.seed,
    )
    runs = all_runs(scale, given)
    if not given.quick:
        given.out = None  # a folder, in which each run has a file already
    return {"runs": runs}


def committed(folder: Path) -> Found:
    """All runs of a folder, and of the folders in it."""
    return {"runs": [read(file) for file in sorted(folder.rglob("*.json"))]}


def tables(found: Found) -> dict[str, str]:
    """By scale. A run without time may lack its end at equal time, but not the one at equal tokens."""
    made = {}
    done = [run for run in found["runs"] if "work" in run]
    for name in dict.fromkeys(run["scale"] for run in done):
        runs = [run for run in done if run["scale"] == name]
        made[name] = table(
            perplexities(runs),
            {
                "run": "`{name}`",
                "parts run": "{kept}/{parts}",
                "seeds": "{seeds}",
                "perplexity at equal tokens": "{tokens}",
                "over full": "{tokens_over}",
                "at equal time": "{time}",
                "over full, at equal time": "{time_over}",
            },
        )
        made[f"{name}: pairs"] = table(
            pairs(runs),
            {
                "run": "`{one}`",
                "compared with": "`{other}`",
                "seeds": "{seeds}",
                "difference of the loss": "{mean}",
                "verdict": "{verdict}",
            },
        )
    return made


if __name__ == "__main__":
    Script(__doc__, measure, tables, committed, options=options, folder=OUT).main()
