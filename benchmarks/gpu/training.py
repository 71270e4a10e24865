"""Times `penstock train` on one GPU as users start it: one process and four side by side, recorded and not.

    python benchmarks/gpu/training.py --out training.json

The model is a Llama of 133 million parameters (the preset llama-150m), with 16 sequences of 1,024 tokens per step.
Each case is a separate run in its own folder, from which the forecast and the measurements are read.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import arguments, quartiles, write

from penstock.train.after.report import summarize_run

SIZES = (
    "--preset llama-150m --set data.batch=16 --set run.log=100 --set run.evaluate=0 --set run.save=0 "
    "--set run.timed=20 --sample 0"
)
SMALL = (
    "--set data.batch=4 --set run.log=100 --set run.evaluate=0 --set run.save=0 --set run.timed=4 "
    "--set run.device=cpu --sample 0"
)
SHAPES = {
    1: "--set schedule.ranks=1 --set schedule.microbatches=4",
    2: "--set schedule.ranks=2 --set schedule.microbatches=2",
    4: "--set schedule.ranks=4 --set schedule.microbatches=8",
}
COLD = 4  # steps that are not counted


def trained(
    folder: Path, ranks: int, graphs: bool, steps: int, dry: bool
) -> dict[str, Any]:
    """One run, and its figures."""
    line = f"{SMALL if dry else SIZES} {SHAPES[ranks]} --set run.steps={steps} --set run.folder={folder}"
    line += " --set run.graphs=true" if graphs else ""
    command = [sys.executable, "-m", "penstock", "train", *line.split()]
    if ranks > 1 and not dry:
        command = [
            sys.executable,
            "-m",
            "penstock",
            "testbed",
            "--workers",
            str(ranks),
            "--",
            *command,
        ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found = summarize_run(folder)
    kind = found.main
    middle, low, high = quartiles([row.seconds for row in found.rows[COLD:]])
    return {
        "ranks": ranks,
        "graphs": graphs,
        "schedule": found.plan.name,
        "steps": steps,
        "seconds": middle,
        "spread": [low, high],
        "tokens": found.rows[-1].tokens,
        "memory": found.rows[-1].memory,
        "memory_early": found.rows[COLD].memory,
        "loss": found.rows[-1].loss,
        "predicted": kind.forecast.seconds if kind.forecast else None,
        "bubble": kind.measured.bubble if kind.measured else None,
        "predicted_bubble": kind.predicted.bubble if kind.predicted else None,
        "said": next(
            (
                text.strip()
                for text in done.stderr.splitlines()
                if "launches take longer" in text
            ),
            "",
        ),
    }


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
            rows.append(
                trained(
                    Path(place) / f"{ranks}-{graphs}",
                    ranks,
                    graphs,
                    given.steps,
                    given.dry,
                )
            )
            write(given.out, {"rows": rows})
            row = rows[-1]
            sys.stdout.write(
                f"{ranks} ranks, graphs {graphs}: {1e3 * row['seconds']:.1f} ms, predicted "
                f"{1e3 * (row['predicted'] or 0):.1f}, {row['memory'] / 1e9:.2f} GB\n"
            )


if __name__ == "__main__":
    main()
