"""Times `penstock train` on one GPU as users start it: one process and four side by side, recorded and not.

    python benchmarks/gpu/training.py --out training.json

The model is a Llama of 133 million parameters (the preset llama-150m), with 16 sequences of 1,024 tokens per step.
Each case is a separate run in its own folder, from which the forecast and the measurements are read.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import arguments, write
from trained import trained

SIZES = (
    "llama-150m --set data.global_batch=16 --set run.log_every=100 --set run.eval_every=0 "
    "--set run.save_every=0"
)
SMALL = (
    "--set data.global_batch=4 --set run.log_every=100 --set run.eval_every=0 --set run.save_every=0 "
    "--set run.device=cpu"
)
SHAPES = {
    1: "--set parallel.pp=1 --set schedule.microbatches=4",
    2: "--set parallel.pp=2 --set schedule.microbatches=2",
    4: "--set parallel.pp=4 --set schedule.microbatches=8",
}


def one(
    folder: Path, ranks: int, graphs: bool, steps: int, dry: bool
) -> dict[str, Any]:
    """One run, and its figures."""
    settings = f"{SMALL if dry else SIZES} {SHAPES[ranks]} --set run.steps={steps}"
    settings += " --set run.cuda_graphs=true" if graphs else ""
    done = trained(folder, settings, ranks if ranks > 1 and not dry else 0)
    advice = (
        text.strip()
        for text in done.said.splitlines()
        if "launches take longer" in text
    )
    said = next(advice, "")
    return {"ranks": ranks, "graphs": graphs, **done.figures, "said": said}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=25)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    kinds = (
        [(2, False)] if given.dry else [(1, False), (4, False), (1, True), (4, True)]
    )
    with tempfile.TemporaryDirectory() as place:
        for ranks, graphs in kinds:
            folder = Path(place) / f"{ranks}-{graphs}"
            rows.append(one(folder, ranks, graphs, given.steps, given.dry))
            write(given.out, {"rows": rows})
            row = rows[-1]
            sys.stdout.write(
                f"{ranks} ranks, graphs {graphs}: {1e3 * row['seconds']:.1f} ms, predicted "
                f"{1e3 * (row['predicted'] or 0):.1f}, {row['memory'] / 1e9:.2f} GB\n"
            )


if __name__ == "__main__":
    main()
