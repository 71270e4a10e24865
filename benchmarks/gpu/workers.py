"""Times eight planned workers beside one process on the whole GPU, for each multiprocessor that they have.

    python benchmarks/gpu/workers.py --plans docs/results/h200/plans --out workers.json

Both train the same Llama on the same data with `penstock train`, compiled, recorded and planned by `auto`. One process
has the whole GPU and plans its micro-batches. The eight workers are a pipeline with 16 micro-batches in a testbed, each
with an equal share of the GPU. Their shares do not cover all of it, so speeds are compared for each multiprocessor.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import arguments, write
from trained import Training, penstock, trained

from penstock.formats import write_plan

WORKERS = 8
MODELS = {
    # The layers, the embedding and the head divide evenly among eight ranks.
    "63 layers of width 1,024": "layers=63 width=1024 heads=16 kv_heads=16 inner=2816",
    "31 layers of width 2,048": "layers=31 width=2048 heads=16 kv_heads=16 inner=5632",
}
DRY_MODELS = {"4 layers of width 32": "layers=4 width=32 heads=2 kv_heads=2 inner=48"}
COMMON = (
    "--set data.seq_len=1024 --set data.global_batch=32 --set run.precision=bfloat16 --set optimizer.lr=3e-4 "
    "--set run.log_every=100 --set run.eval_every=0 --set run.save_every=0"
)
DRY = (
    "--set data.seq_len=32 --set data.global_batch=4 --set run.device=cpu --set run.log_every=100 "
    "--set run.eval_every=0 --set run.save_every=0 --set run.checks=forecast,memory"
)
COUNT = "import torch; print(torch.cuda.get_device_properties(0).multi_processor_count)"


def settings_of(model: str, ranks: int, plan: Path, dry: bool) -> str:
    """The options of `penstock train` for a model and its workers.

    If there is no plan yet, auto plans what is open; a dry run takes 1F1B, because planning takes long.
    """
    sizes = " ".join(f"--set model.{word}" for word in model.split())
    sizes += " --set model.vocab_size=8192"
    microbatches = 2 * ranks if ranks > 1 or dry else 0
    shape = f"--set parallel.pp={ranks} --set schedule.microbatches={microbatches}"
    if plan.is_file():
        shape = f"--set schedule.name={plan}"
    elif dry:
        shape += " --set schedule.name=1f1b"
    return f"{sizes} {DRY if dry else COMMON} {shape}"


def multiprocessors(workers: int = 0) -> int:
    """The multiprocessors that a process has: of the whole GPU, or as one of several workers."""
    command = [sys.executable, "-c", COUNT]
    if workers:
        command = [*penstock(f"lab testbed --workers {workers} --"), *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def row_of(name: str, ranks: int, share: int, done: Training) -> dict[str, Any]:
    """What the table has about a run on this many multiprocessors."""
    figures = done.figures
    speed = figures["tokens"] / figures["seconds"]
    return {
        "model": name,
        "ranks": ranks,
        "multiprocessors": share,
        **figures,
        "microbatches": len(done.summary.plan.schedule.microbatches),
        "bound": done.summary.plan.facts.get("lower_bound"),
        "speed": speed / share,
    }


def compare(
    name: str, model: str, folder: Path, plans: Path, steps: int, dry: bool
) -> list[Any]:
    """The rows of a model: one process, then the workers."""
    workers = 2 if dry else WORKERS
    rows = []
    for ranks in (1, workers):
        own = f"{name.split(maxsplit=1)[0]}-{ranks}"
        plan = plans / f"workers-{own}.json"
        settings = settings_of(model, ranks, plan, dry)
        testbed = ranks if ranks > 1 and not dry else 0
        done = trained(folder / own, f"{settings} --set run.steps={steps}", testbed)
        if not plan.is_file():
            plans.mkdir(parents=True, exist_ok=True)
            write_plan(done.summary.plan, plan)
        share = 1 if dry else multiprocessors(testbed) * ranks
        row = row_of(name, ranks, share, done)
        rows.append(row)
        sys.stdout.write(
            f"{name}, {ranks} ranks: {1e3 * row['seconds']:.1f} ms, predicted {1e3 * (row['predicted'] or 0):.1f}, "
            f"{row['speed']:.0f} tokens/s a multiprocessor, {row['schedule']}, {row['microbatches']} micro-batches\n"
        )
        sys.stdout.flush()
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="the models whose name has this")
    parser.add_argument("--folder", type=Path, help="keep the folders of the runs here")
    parser.add_argument(
        "--plans",
        type=Path,
        help="take the plans from here; those that are missing are added",
    )
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        plans = given.plans or Path(temporary)
        for name, model in (DRY_MODELS if given.dry else MODELS).items():
            if given.only in name:
                rows += compare(name, model, folder, plans, given.steps, given.dry)
                write(given.out, {"rows": rows})


if __name__ == "__main__":
    main()
