"""Compares predicted and measured steps: profiles a model, simulates schedules from the profile, and runs them.

    chrt -f 5 python benchmarks/prediction.py            P = 2, writes docs/results/prediction.md (about ten minutes)
    chrt -f 5 python benchmarks/prediction.py --quick    a smaller model, fewer rounds; writes nothing
    python benchmarks/prediction.py --json               one JSON object to stdout

The two ranks are processes with one thread each, on a machine with two cores. The script repeats three times: a
profile by both ranks at the same time, a profile by rank 0 alone, and rounds of real steps. They take turns so that
drift in the speed of the machine affects all of them. A prediction is the median over the profiles; a measurement is
the median over all rounds, each of which visits the schedules in another order. A step lasts from the start of its
first action to the end of its last one, without the optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tables import table

from penstock import Schedule, lower, make, simulate
from penstock.cost import Profile, ProfileCost
from penstock.measure.profile import Setup, measure
from penstock.models import Llama, LlamaConfig, even_partition, split, token_loss
from penstock.runtime import Comm, Executor, batch_of, spawn
from penstock.schedules.transforms import slice_tokens
from penstock.train.before.profile import ProfileRequest, subjects_of

RESULT = Path(__file__).parent.parent / "docs" / "results" / "prediction.md"
RANKS = 2


@dataclass(frozen=True)
class Setting:
    """A model, a sequence, and how often everything is measured."""

    config: LlamaConfig
    tokens: int
    turns: int  # profiles, then steps
    rounds: int  # of a profile
    steps: int  # rounds of them in a turn

    @property
    def request(self) -> ProfileRequest:
        return ProfileRequest(self.config, self.tokens, threads=1)


FULL = Setting(
    LlamaConfig(vocab=2048, width=256, layers=8, heads=8, kv_heads=8, inner=672),
    2048,
    3,
    2,
    3,
)
QUICK = Setting(
    LlamaConfig(vocab=512, width=128, layers=4, heads=4, kv_heads=4, inner=352),
    1024,
    2,
    1,
    2,
)


def schedules(tokens: int) -> dict[tuple[str, int, str], Schedule]:
    """By name, sequences and cuts."""
    found = {}
    for sequences in (1, 2):
        found["1f1b", sequences, "1"] = make(
            "1f1b", ranks=RANKS, microbatches=sequences
        )
        for slices in (2, 4, 8):
            name = "terapipe" if sequences == 1 else "seq1f1b"
            found[name, sequences, str(slices)] = make(
                name, ranks=RANKS, microbatches=sequences, slices=slices
            )
    one = make("gpipe", ranks=RANKS, microbatches=1)
    for shares in (
        (5, 3),
        (3, 5),
        (5, 4, 4, 3),
    ):  # long slices first, last, and first again
        cuts = [sum(shares[:n]) * tokens // sum(shares) for n in range(len(shares) + 1)]
        found["terapipe", 1, ":".join(map(str, shares))] = slice_tokens(one, cuts)
    found["terapipe", 2, "4"] = make("terapipe", ranks=RANKS, microbatches=2, slices=4)
    found["zb-h1", 2, "1"] = make("zb-h1", ranks=RANKS, microbatches=2)
    return found


# By schedule: makespan, and work of each rank.
Steps = dict[str, list[tuple[float, list[float]]]]


def work(comm: Comm, setting: Setting) -> tuple[dict[str, list[Profile]], Steps, float]:
    """A rank: profiles, steps, and seconds of the optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(setting.config)
    parts = split(model, even_partition(setting.config.layers, RANKS))
    executors = {
        "|".join(map(str, key)): (
            Executor(
                lower(schedule),
                {comm.rank: parts[comm.rank]},
                comm,
                token_loss,
            ),
            len(schedule.microbatches),
        )
        for key, schedule in schedules(setting.tokens).items()
    }
    profiles: dict[str, list[Profile]] = {"together": [], "alone": []}
    times: Steps = {key: [] for key in executors}
    for turn in range(setting.turns):
        profiles["together"].append(
            measure(
                subjects_of(setting.request, comm), Setup(comm, rounds=setting.rounds)
            )
        )
        if comm.rank == 0:
            profiles["alone"].append(
                measure(subjects_of(setting.request), Setup(rounds=setting.rounds))
            )
        for number in range(1 + setting.steps):
            for key in random.Random(f"{turn} {number}").sample(
                list(executors), len(executors)
            ):
                executor, sequences = executors[key]
                inputs = [
                    torch.randint(0, setting.config.vocab, (1, setting.tokens))
                    for _ in range(sequences)
                ]
                model.zero_grad(set_to_none=True)
                comm.barrier()
                timeline = executor.step(batch_of(inputs, inputs), timed=True).timeline
                assert timeline is not None
                if number:
                    times[key].append((timeline.makespan, timeline.busy.tolist()))
    return profiles, times, _optimizer(parts[comm.rank], comm)


def _optimizer(part: torch.nn.Module, comm: Comm) -> float:
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-9)
    took = []
    for _ in range(6):
        comm.barrier()
        begin = time.perf_counter()
        optimizer.step()
        took.append(time.perf_counter() - begin)
    return statistics.median(took[1:])


def rows_of(
    setting: Setting, profiles: dict[str, list[Profile]], times: Steps
) -> list[dict[str, Any]]:
    """A row a schedule."""
    rows = []
    costs = {
        name: [ProfileCost(one, setting.tokens) for one in some]
        for name, some in profiles.items()
    }
    for (name, sequences, cuts), schedule in schedules(setting.tokens).items():
        steps = times[f"{name}|{sequences}|{cuts}"]
        spans = sorted(makespan for makespan, _ in steps)
        quarter, worked = (
            len(spans) // 4,
            statistics.median(sum(busy) for _, busy in steps),
        )
        row: dict[str, Any] = {
            "name": name,
            "sequences": sequences,
            "cuts": cuts,
            "measured": statistics.median(spans),
            "spread": (spans[quarter], spans[-1 - quarter]),
        }
        for which, some in costs.items():
            timelines = [simulate(schedule, cost) for cost in some]
            row[which] = statistics.median(one.makespan for one in timelines)
            row[f"{which}_error"] = row[which] / row["measured"] - 1
            row[f"{which}_work_error"] = (
                statistics.median(float(one.busy.sum()) for one in timelines) / worked
                - 1
            )
        rows.append(row)
    for row in rows:
        base = next(
            r
            for r in rows
            if r["name"] == "1f1b" and r["sequences"] == row["sequences"]
        )
        row["speed_up"] = base["measured"] / row["measured"]
        row["predicted_speed_up"] = base["together"] / row["together"]
    return rows


def runs_table(rows: list[dict[str, Any]]) -> str:
    heads = (
        "schedule | sequences | slices | measured, ms | predicted, ms | error | error of the work "
        "| predicted by one rank alone | error | speed-up measured | predicted"
    )
    lines = []
    for r in rows:
        low, high = r["spread"]
        lines.append(
            [
                r["name"],
                str(r["sequences"]),
                r["cuts"],
                f"{1e3 * r['measured']:.0f} ({1e3 * low:.0f}-{1e3 * high:.0f})",
                f"{1e3 * r['together']:.0f}",
                f"{r['together_error']:+.1%}",
                f"{r['together_work_error']:+.1%}",
                f"{1e3 * r['alone']:.0f}",
                f"{r['alone_error']:+.1%}",
                f"{r['speed_up']:.3f}",
                f"{r['predicted_speed_up']:.3f}",
            ]
        )
    return table(heads, lines, ("schedule", "slices"))


def fits_table(profiles: dict[str, list[Profile]]) -> str:
    lines, words = [], ("measured by", "op of a layer", "form")
    for which, some in profiles.items():
        for op in "FBIW":
            fits = [getattr(one.layer, op) for one in some]
            worst, median = (
                statistics.median(getattr(fit, word) for fit in fits)
                for word in ("worst", "median")
            )
            forms = ", ".join(fit.form for fit in fits)
            lines.append([which, op, forms, f"{worst:.1%}", f"{median:.1%}"])
    return table(" | ".join([*words, "worst error", "median error"]), lines, words)


def drift(some: list[Profile]) -> float:
    """By how much the same points differ between profiles: the largest of the ratios of their medians."""
    means = [
        statistics.median(
            a.B / b.B
            for a, b in zip(one.layer.points, some[0].layer.points, strict=True)
        )
        for one in some
    ]
    return max(means) / min(means) - 1


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for which in ("together", "alone"):
        errors = [abs(r[f"{which}_error"]) for r in rows]
        found |= {
            f"{which}_median_error": statistics.median(errors),
            f"{which}_worst_error": max(errors),
        }
    ratios = [abs(r["predicted_speed_up"] / r["speed_up"] - 1) for r in rows]
    return {
        **found,
        "speed_up_median_error": statistics.median(ratios),
        "speed_up_worst_error": max(ratios),
    }


def page(
    setting: Setting,
    rows: list[dict[str, Any]],
    profiles: dict[str, list[Profile]],
    update: tuple[float, float],
) -> str:
    s, net, c = summary(rows), profiles["together"][0].network, setting.config
    assert isinstance(net.latency, float)
    assert isinstance(net.bandwidth, float)
    return f"""\
# Predicted and measured step times

`chrt -f 5 python benchmarks/prediction.py` runs a Llama of {c.layers} layers, width {c.width} and {c.vocab} words on
sequences of {setting.tokens} tokens, through two ranks with one thread each, on a machine with {os.cpu_count()}
cores, with torch {torch.__version__} and gloo. It repeats the following {setting.turns} times: a profile by both
ranks at the same time, a profile by rank 0 alone, and {setting.steps} rounds of steps. The table shows medians, with
quartiles in brackets. *Error* is predicted over measured, minus one. *Error of the work* is the same for the sum of
the times of all actions, without waiting. Speed-ups compare with 1F1B on the same number of whole sequences. Slices
are even, or in the proportions shown.

{runs_table(rows)}

Predictions from the profile of both ranks are off by {s["together_median_error"]:.1%} in the median and
{s["together_worst_error"]:.1%} at worst. Predictions from the profile of one rank alone, while the other one waited,
are off by {s["alone_median_error"]:.1%} and {s["alone_worst_error"]:.1%}. Predicted speed-ups are off by
{s["speed_up_median_error"]:.1%} in the median and {s["speed_up_worst_error"]:.1%} at worst. Meanwhile the speed of
the machine itself drifted: the same backwards took up to {drift(profiles["together"]):.1%} longer in one profile than
in another. The optimizer's step takes {1e3 * update[1]:.1f} ms; the prediction was {1e3 * update[0]:.1f} ms. A link
has a latency of {1e6 * net.latency:.0f} us and a bandwidth of {net.bandwidth / 1e6:.0f} MB per second.

A prediction does not know four things:

- the speed of the machine, which other work on it changes from minute to minute (other work also fills a core that
  our own rank leaves idle, so *alone* is not quieter than *together* here);
- that a rank which runs while the other one waits has the memory to itself;
- that the first slice of a step writes weight gradients instead of adding to them;
- that work done once per stage is shared by two layers in the profile and by {c.layers // RANKS} layers here.

The last table shows the errors of the curves on points that took no part in their fit. There were {setting.turns}
profiles with {setting.rounds} rounds each; the table lists the form of each fit and the medians of the errors.

{fits_table(profiles)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smaller model, fewer rounds; writes nothing",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    given = parser.parse_args()
    setting = QUICK if given.quick else FULL
    ends = spawn(RANKS, work, setting, patience=3600.0)
    profiles, times, _ = ends[0]
    rows = rows_of(setting, profiles, times)
    partition = even_partition(setting.config.layers, RANKS)
    update = (
        statistics.median(max(one.update(partition)) for one in profiles["together"]),
        max(end[2] for end in ends),
    )
    text = page(setting, rows, profiles, update)
    if not given.quick:
        RESULT.write_text(text)
    sys.stdout.write(
        json.dumps({"rows": rows, **summary(rows)}) + "\n" if given.json else text
    )


if __name__ == "__main__":
    main()
