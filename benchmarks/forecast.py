"""Compares forecasts with the steps that follow: trains in fresh folders, one run after the other.

    python benchmarks/forecast.py                              the demo, five runs; writes docs/results/forecast.md
    python benchmarks/forecast.py --runs 3 --steps 60          fewer and shorter runs; writes nothing
    python benchmarks/forecast.py --gpu                        our Llama of about 1 B parameters, and Hugging Face's
    python benchmarks/forecast.py --json                       one JSON object to stdout

A run is `penstock train`, which measures, plans, forecasts and trains. Taken is the median step after the first three.
The other columns say where a difference comes from, in the last timed step: `pass` is predicted and measured, `work`
the sum of all actions, `rest` what the step takes beside its pass. If the work differs, actions are faster or slower
than the pieces that were timed (clocks of a GPU, caches, launches). If only the pass differs, ranks wait or the host
is late between actions. If only the rest differs, it is the optimizer, the sums or the data.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tables import table

from penstock.train.after.report import summarize_run

RESULT = Path(__file__).parent.parent / "docs" / "results" / "forecast.md"
RUNS = 5
BAR = {"cpu": 0.15, "gpu": 0.05}  # how far a step may be from its forecast
# Llama with the sizes of about 1 B parameters: ours by the preset, Hugging Face's by a config.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
ON_GPU = ("data.seq_len=2048", "data.global_batch=16", "run.precision=bfloat16")


@dataclass(frozen=True, slots=True)
class Case:
    """A forecast and the run after it, in seconds."""

    name: str
    schedule: str
    predicted: float
    low: float
    high: float
    taken: float
    passes: tuple[float, float]  # predicted and measured
    work: tuple[float, float]
    rest: tuple[float, float]

    @property
    def ratio(self) -> float:
        """The step over its forecast."""
        return self.taken / self.predicted


def run_case(name: str, options: list[str], folder: Path) -> Case:
    """Train in a new folder, and read the figures from it."""
    command = [sys.executable, "-m", "penstock", "train", *options]
    command += ["--set", f"run.folder={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    summary = summarize_run(folder)
    kind = summary.main
    forecast, measured = kind.forecast, kind.measured
    if forecast is None or measured is None:
        sys.exit(f"{name}: the run made no forecast, or timed no step")
    predicted = forecast.timeline
    timed = next(row.seconds for row in summary.rows if row.step == kind.step)
    return Case(
        name,
        summary.plan.name,
        forecast.seconds,
        *forecast.range,
        kind.seconds,
        (predicted.makespan, measured.makespan),
        (float(predicted.busy.sum()), float(measured.busy.sum())),
        (forecast.seconds - predicted.makespan, timed - measured.makespan),
    )


def options_of(changes: list[str]) -> list[str]:
    """The changes as options of the command."""
    return [word for change in changes for word in ("--set", change)]


def cases(gpu: bool, runs: int, steps: int) -> list[Case]:
    """Run the cases in turns, and print each as it ends."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        kinds = {"demo": [f"run.steps={steps}"]}
        if gpu:
            model = root / "llama"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(LLAMA))
            ours = [
                "model.hidden_size=2048",
                "model.intermediate_size=5632",
                "model.layers=16",
                "model.heads=16",
                "model.kv_heads=16",
                "model.vocab_size=32000",
            ]
            common = [*ON_GPU, f"run.steps={steps}", "run.save_every=0"]
            kinds = {
                "ours": [*ours, *common],
                "Hugging Face": [f"model.path={model}/config.json", *common],
            }
        for turn in range(runs):
            for number, (kind, changes) in enumerate(kinds.items()):
                case = run_case(kind, options_of(changes), root / f"{turn}-{number}")
                found.append(case)
                sys.stderr.write(
                    f"{kind}: {case.ratio:.3f} of {1e3 * case.predicted:.1f} ms\n"
                )
    return found


def page(found: list[Case], bar: float) -> str:
    """The table of all runs, and how many were within the bar."""

    def pair(seconds: tuple[float, float]) -> str:
        return f"{1e3 * seconds[0]:.1f}, {1e3 * seconds[1]:.1f}"

    heads = "run | schedule | predicted, ms | range, ms | taken, ms | taken over predicted | pass | work | rest"
    rows = [
        [
            one.name,
            one.schedule,
            f"{1e3 * one.predicted:.1f}",
            f"{1e3 * one.low:.1f}-{1e3 * one.high:.1f}",
            f"{1e3 * one.taken:.1f}",
            f"{one.ratio:.3f}",
            pair(one.passes),
            pair(one.work),
            pair(one.rest),
        ]
        for one in found
    ]
    within = sum(abs(one.ratio - 1) <= bar for one in found)
    inside = sum(one.low <= one.taken <= one.high for one in found)
    return f"""\
# Forecasts and the steps that followed

Written by `python benchmarks/forecast.py`. Pass, work and rest are those of one timed step, predicted and measured,
in ms.

{table(heads, rows, ("run", "schedule"))}

{within} of {len(found)} steps are within {bar:.0%} of their forecasts, {inside} within the range.
"""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="Llamas on a GPU")
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    runs = given.runs or (2 if given.gpu else RUNS)
    steps = given.steps or (40 if given.gpu else 200)
    found = cases(given.gpu, runs, steps)
    text = page(found, BAR["gpu" if given.gpu else "cpu"])
    if not (given.gpu or given.runs or given.steps):
        RESULT.write_text(text)
    rows = [{**asdict(one), "ratio": one.ratio} for one in found]
    sys.stdout.write(json.dumps(rows) + "\n" if given.json else text)


if __name__ == "__main__":
    main()
