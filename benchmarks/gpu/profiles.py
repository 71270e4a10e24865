"""Profiles a layer on one GPU: how well the curves fit, and the measurements behind `penstock.cost.gpus`.

    penstock lab testbed --workers 8 -- python benchmarks/gpu/profiles.py --part fits --out profiles.json
    python benchmarks/gpu/profiles.py --part whole --out docs/results/h200/whole.json
    python benchmarks/gpu/profiles.py --kept       puts the table of docs/results/h200 into docs/results/gpu.md
    python benchmarks/gpu/profiles.py --quick      the fits of a tiny layer on a CPU; writes nothing

`fits`: a Llama layer of several widths on eight workers that measure at once, as they will train, with the errors on
points that took no part in the fit. The file contains the whole profiles, including their points.

`whole`: embedding, layer and head of Llama and GPT of several widths on a whole GPU, as the trainer runs them: float32
weights, computing in bfloat16, with recorded actions and once without.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from bench import DRY, Size, note, on_ranks, profile_of
from harness import Found, Row, Script, kept, numbers, say, table, write

from penstock.families import GPTConfig, LlamaConfig
from penstock.formats.profile_json import dump_profile
from penstock.ir.action import COMPUTING_OPS
from penstock.runtime import Comm
from penstock.train.before.profile import ProfileRequest, measure_request

WIDTHS, TOKENS = (512, 1024, 2048, 4096), 4096
INNER = {1024: 2816, 2048: 5632, 4096: 11264}
POINTS = ((128, 0), (128, 3968), (256, 0), (512, 0), (512, 1536), (512, 3584))
POINTS += ((1024, 0), (2048, 0), (2048, 2048), (4096, 0))
CASES = (
    ("llama", 1024, True),
    ("llama", 2048, True),
    ("llama", 4096, True),
    ("gpt", 2048, True),
    ("llama", 1024, False),
    ("llama", 4096, False),
)


def wide(width: int, tokens: int) -> Size:
    """A Llama of this width, with heads of 64 features and a small vocabulary."""
    heads = width // 64
    return Size(LlamaConfig(2048, width, 16, heads, heads, width * 11 // 4), tokens)


def measure_fits(
    comm: Comm, sizes: tuple[Size, ...], rounds: int, out: Path | None
) -> list[Row]:
    """A rank: width after width."""
    rows: list[Row] = []
    for size in sizes:
        begin = time.perf_counter()
        profile = profile_of(comm, size, rounds)
        layer = profile.layer
        worst = {
            op.value: (layer.fit(op).worst, layer.fit(op).median, layer.fit(op).form)
            for op in COMPUTING_OPS
        }
        took = time.perf_counter() - begin
        rows.append(
            {
                "width": size.config.width,
                "tokens": size.tokens,
                "worst": worst,
                "seconds": took,
                "profile": json.loads(dump_profile(profile)),
            }
        )
        if comm.rank == 0:
            write(out, {"ranks": comm.ranks, "rows": rows})
        errors = ", ".join(f"{op} {one[0]:.1%} ({one[2]})" for op, one in worst.items())
        note(comm, f"width {size.config.width}: {errors} [{took:.0f} s]")
    return rows


def config_of(family: str, width: int) -> LlamaConfig | GPTConfig:
    """The usual sizes of a model of this width, with heads of 64 or 128 features."""
    heads = width // (128 if width >= 2048 else 64)
    if family == "gpt":
        return GPTConfig(
            vocab=32_000,
            width=width,
            layers=16,
            heads=heads,
            inner=4 * width,
            positions=TOKENS,
        )
    return LlamaConfig(32_000, width, 16, heads, heads, INNER[width])


def measure_whole(out: Path | None) -> list[Row]:
    """Measure all cases, and write them after each."""
    rows: list[Row] = []
    for family, width, recorded in CASES:
        request = ProfileRequest(
            config_of(family, width),
            TOKENS,
            device="cuda",
            autocast="bfloat16",
            rounds=3,
            graphs=recorded,
            where=POINTS,
        )
        profile = json.loads(dump_profile(measure_request(None, request)))
        row = {"family": family, "width": width, "recorded": recorded}
        rows.append({**row, "profile": profile})
        write(out, {"rows": rows})
        say(f"{family}, width {width}, recorded {recorded}")
    return rows


# ---------------------------------------------------------------- the script
def options(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--part", choices=("fits", "whole"), default="fits")
    flag("--ranks", type=int, default=8)
    flag("--widths", type=numbers, default=WIDTHS)
    flag("--tokens", type=int, default=TOKENS)
    flag("--rounds", type=int, default=2)


def measure(given: argparse.Namespace) -> Found:
    if given.part == "whole":
        return {"rows": measure_whole(given.out)}
    sizes = tuple(wide(width, given.tokens) for width in given.widths)
    rounds = given.rounds
    if given.quick:
        sizes, rounds = (replace(DRY, tokens=16),), 1
    rows = on_ranks(given, measure_fits, sizes, rounds, given.out)
    return {"ranks": given.ranks, "rows": rows}


def tables(found: Found) -> dict[str, str]:
    rows = [row for row in found["rows"] if "worst" in row]
    columns = {"width": "{width:,}"} | {
        f"{op}, worst (median)": f"{{worst[{op}][0]:.1%}} ({{worst[{op}][1]:.1%}})"
        for op in "FBIW"
    }
    rows.sort(key=lambda row: int(row["width"]))
    return {"profiles": table(rows, columns)} if rows else {}


def committed(folder: Path) -> Found:
    return {"rows": kept(folder, "profiles.json")}


if __name__ == "__main__":
    Script(__doc__, measure, tables, committed, True, options).main()
