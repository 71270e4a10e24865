"""Times eight planned workers beside one process on the whole GPU, for each multiprocessor that they have.

    python benchmarks/gpu/workers.py --plans docs/results/h200/plans --out workers.json
    python benchmarks/gpu/workers.py --kept        puts the table of docs/results/h200 into docs/results/gpu.md
    python benchmarks/gpu/workers.py --quick       a tiny model on a CPU; writes nothing

Both train the same Llama on the same data with `penstock train`, compiled, recorded and planned by `auto`. One process
has the whole GPU and plans its micro-batches. The eight workers are a pipeline with 16 micro-batches in a testbed, each
with an equal share of the GPU. Their shares do not cover all of it, so speeds are compared for each multiprocessor.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import bench  # noqa: F401, which finds the harness
from harness import Found, Row, Script, kept, quartiles, say, table, write

from penstock.formats import write_plan
from penstock.train.after.report import Summary, summarize_run

WORKERS = 8
MODELS = {
    # The layers, the embedding and the head divide evenly among eight ranks.
    "63 layers of width 1,024": "layers=63 hidden_size=1024 heads=16 kv_heads=16 intermediate_size=2816",
    "31 layers of width 2,048": "layers=31 hidden_size=2048 heads=16 kv_heads=16 intermediate_size=5632",
}
QUICK_MODELS = {
    "4 layers of width 32": "layers=4 hidden_size=32 heads=2 kv_heads=2 intermediate_size=48"
}
COMMON = (
    "--set data.seq_len=1024 --set data.global_batch=32 --set run.precision=bfloat16 --set optimizer.lr=3e-4 "
    "--set run.log_every=100 --set run.eval_every=0 --set run.save_every=0"
)
QUICK = (
    "--set data.seq_len=32 --set data.global_batch=4 --set run.device=cpu --set run.log_every=100 "
    "--set run.eval_every=0 --set run.save_every=0 --set run.checks=forecast,memory"
)
COLD = 4  # steps that are not counted
COUNT = "import torch; print(torch.cuda.get_device_properties(0).multi_processor_count)"


def settings_of(model: str, ranks: int, plan: Path, quick: bool) -> str:
    """The options of `penstock train` for a model and its workers.

    If there is no plan yet, auto plans what is open; a quick run takes 1F1B, because planning takes long.
    """
    sizes = " ".join(f"--set model.{word}" for word in model.split())
    sizes += " --set model.vocab_size=8192"
    microbatches = 2 * ranks if ranks > 1 or quick else 0
    shape = f"--set parallel.pp={ranks} --set schedule.microbatches={microbatches}"
    if plan.is_file():
        shape = f"--set schedule.name={plan}"
    elif quick:
        shape += " --set schedule.name=1f1b"
    return f"{sizes} {QUICK if quick else COMMON} {shape}"


def penstock(words: str, workers: int = 0) -> list[str]:
    """A command of Penstock, in a testbed if there are workers."""
    command = [sys.executable, "-m", "penstock"]
    if workers:
        command += ["lab", "testbed", "--workers", str(workers), "--", *command]
    return [*command, *words.split()]


def train(folder: Path, settings: str, workers: int = 0) -> Summary:
    """Train with these settings; side by side in a testbed if there are workers."""
    words = f"train {settings} --set run.folder={folder}"
    done = subprocess.run(
        penstock(words, workers), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return summarize_run(folder)


def multiprocessors(workers: int = 0) -> int:
    """The multiprocessors that a process has: of the whole GPU, or as one of several workers."""
    command = [sys.executable, "-c", COUNT]
    if workers:
        command = [*penstock(f"testbed --workers {workers} --"), *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def row_of(name: str, ranks: int, share: int, done: Summary) -> Row:
    """What the table has about a run on this many multiprocessors."""
    kind, rows = done.main, done.rows
    middle, low, high = quartiles([row.seconds for row in rows[COLD:]])
    return {
        "model": name,
        "ranks": ranks,
        "multiprocessors": share,
        "schedule": done.plan.name,
        "steps": len(rows),
        "seconds": middle,
        "spread": [low, high],
        "tokens": rows[-1].tokens,
        "memory": rows[-1].memory,
        "memory_early": rows[COLD].memory,
        "loss": rows[-1].loss,
        "predicted": kind.forecast.seconds if kind.forecast else None,
        "bubble": kind.measured.bubble if kind.measured else None,
        "predicted_bubble": kind.timelines[0][0].bubble if kind.timelines else None,
        "microbatches": len(done.plan.schedule.microbatches),
        "bound": done.plan.facts.get("lower_bound"),
        "speed": rows[-1].tokens / middle / share,
    }


def compare(
    name: str, model: str, folder: Path, given: argparse.Namespace
) -> list[Row]:
    """The rows of a model: one process, then the workers."""
    rows = []
    plans = given.plans or folder
    for ranks in (1, 2 if given.quick else WORKERS):
        own = f"{name.split(maxsplit=1)[0]}-{ranks}"
        plan = plans / f"workers-{own}.json"
        settings = settings_of(model, ranks, plan, given.quick)
        settings += f" --set run.steps={6 if given.quick else given.steps}"
        testbed = ranks if ranks > 1 and not given.quick else 0
        done = train(folder / own, settings, testbed)
        if not plan.is_file():
            plans.mkdir(parents=True, exist_ok=True)
            write_plan(done.plan, plan)
        share = 1 if given.quick else multiprocessors(testbed) * ranks
        row = row_of(name, ranks, share, done)
        rows.append(row)
        speed = f"{row['speed']:.0f} tokens/s a multiprocessor"
        say(f"{name}, {ranks} ranks: {1e3 * row['seconds']:.1f} ms, {speed}")
    return rows


# ---------------------------------------------------------------- the script
def options(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--steps", type=int, default=20)
    flag("--only", default="", help="the models whose name has this")
    flag("--plans", type=Path, help="take plans from here; missing ones are added")


def measure(given: argparse.Namespace) -> Found:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (QUICK_MODELS if given.quick else MODELS).items():
            if given.only in name:
                rows += compare(name, model, Path(folder), given)
                write(given.out, {"rows": rows})
    return {"rows": rows}


def tables(found: Found) -> dict[str, str]:
    """One process beside eight workers, with what was predicted and what no plan can beat."""
    lines = []
    for row in found["rows"]:
        who = f"{row['ranks']} workers: {row['schedule']}"
        times = {who: row["seconds"]}
        if row["ranks"] == 1:
            alone = row["speed"]
            times = {f"{row['model']}, one process": row["seconds"]}
        else:
            times |= {"the same, predicted": row["predicted"]}
            times |= {"no plan can be faster than": row["bound"]}
        for label, seconds in times.items():
            if seconds:
                speed = row["tokens"] / seconds
                each = speed / row["multiprocessors"]
                line = {**row, "label": label, "seconds": seconds, "speed": speed}
                lines.append(line | {"each": each, "share": each / alone})
    columns = {
        "": "{label}",
        "micro-batches": "{microbatches}",
        "multiprocessors": "{multiprocessors}",
        "step, ms": "{seconds!m:.0f}",
        "tokens/s": "{speed:,.0f}",
        "for each multiprocessor": "{each:,.0f} ({share:.2f})",
    }
    return {"workers": table(lines, columns)}


def committed(folder: Path) -> Found:
    return {"rows": kept(folder, "workers.json")}


if __name__ == "__main__":
    Script(__doc__, measure, tables, committed, True, options).main()
