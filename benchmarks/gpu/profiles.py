"""Profiles a Llama layer of several widths on one GPU, with the errors on points that took no part in the fit.

    penstock testbed --workers 8 -- python benchmarks/gpu/profiles.py --out profiles.json

All ranks measure at once, as they will train. The file contains the whole profiles, including their points.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import DRY, Size, arguments, note, profile_of, write

from penstock.formats import dump_profile
from penstock.ir.action import COMPUTING_OPS
from penstock.models import LlamaConfig
from penstock.runtime import Comm, spawn

WIDTHS, TOKENS = (512, 1024, 2048, 4096), 4096
HEAD = 64  # width of an attention head


@dataclass(frozen=True)
class Setting:
    """What one run does."""

    sizes: tuple[Size, ...]
    rounds: int
    out: Path | None


def wide(width: int, tokens: int) -> Size:
    """A Llama of this width; a head as small as that of the schedules' benchmark."""
    heads = width // HEAD
    config = LlamaConfig(
        vocab=2048,
        width=width,
        layers=16,
        heads=heads,
        kv_heads=heads,
        inner=width * 11 // 4,
    )
    return Size(config, tokens)


def work(comm: Comm, setting: Setting) -> dict[str, Any]:
    """Width after width."""
    rows: list[dict[str, Any]] = []
    for size in setting.sizes:
        begin = time.perf_counter()
        profile = profile_of(comm, size, setting.rounds)
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
            write(setting.out, {"ranks": comm.ranks, "rows": rows})
        errors = ", ".join(f"{op} {one[0]:.1%} ({one[2]})" for op, one in worst.items())
        note(comm, f"width {size.config.width}: {errors} [{took:.0f} s]")
    return {"ranks": comm.ranks, "rows": rows}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    sizes = tuple(
        wide(width, given.tokens) for width in map(int, given.widths.split(","))
    )
    if given.dry:
        sizes = (DRY,)
    setting = Setting(sizes, given.rounds, given.out.absolute() if given.out else None)
    backend = "gloo" if given.dry else "penstock_ipc"
    write(
        given.out,
        spawn(
            2 if given.dry else given.ranks,
            work,
            setting,
            patience=120.0,
            backend=backend,
        )[0],
    )


if __name__ == "__main__":
    main()
