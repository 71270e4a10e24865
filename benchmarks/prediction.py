"""Compares predicted and measured steps: profiles a model, simulates schedules from the profile, and runs them.

    chrt -f 5 python benchmarks/prediction.py   the tables of docs/results/prediction.md (about ten minutes)
    python benchmarks/prediction.py --quick     a tiny model, once, on ranks that are threads; writes nothing

The two ranks are processes with one thread each, on a machine with two cores. The script repeats three times: a
profile by both ranks at the same time, a profile by rank 0 alone, and rounds of real steps. They take turns so that
drift in the speed of the machine affects all of them. A prediction is the median over the profiles; a measurement is
the median over all rounds, each of which visits the schedules in another order. A step lasts from the start of its
first action to the end of its last one, without the optimizer.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from dataclasses import dataclass

import torch
from harness import Found, Row, Script, quartiles, table

from penstock import Schedule, lower, make, simulate
from penstock.cost import Profile, ProfileCost
from penstock.measure.profile import Setup
from penstock.measure.profile import measure as measure_profile
from penstock.models import Llama, LlamaConfig, even_partition, split, token_loss
from penstock.runtime import Comm, Executor, batch_of, run_threads, spawn
from penstock.schedules.transforms import slice_tokens
from penstock.train.before.profile import ProfileRequest, subjects_of

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
    LlamaConfig(vocab=31, width=16, layers=2, heads=2, kv_heads=2, inner=48),
    32,
    1,
    1,
    1,
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


def work(comm: Comm, setting: Setting) -> tuple[dict[str, list[Profile]], Steps]:
    """A rank: profiles and steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dice = torch.Generator().manual_seed(0)
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
            measure_profile(
                subjects_of(setting.request, comm), Setup(comm, rounds=setting.rounds)
            )
        )
        if comm.rank == 0:
            profiles["alone"].append(
                measure_profile(
                    subjects_of(setting.request), Setup(rounds=setting.rounds)
                )
            )
        for number in range(1 + setting.steps):
            for key in random.Random(f"{turn} {number}").sample(
                list(executors), len(executors)
            ):
                executor, sequences = executors[key]
                inputs = [
                    torch.randint(
                        0, setting.config.vocab, (1, setting.tokens), generator=dice
                    )
                    for _ in range(sequences)
                ]
                model.zero_grad(set_to_none=True)
                comm.barrier()
                timeline = executor.step(batch_of(inputs, inputs), timed=True).timeline
                assert timeline is not None
                if number:
                    times[key].append((timeline.makespan, timeline.busy.tolist()))
    return profiles, times


def rows_of(
    setting: Setting, profiles: dict[str, list[Profile]], times: Steps
) -> list[Row]:
    """A row a schedule."""
    rows: list[Row] = []
    costs = {
        name: [ProfileCost(one, setting.tokens) for one in some]
        for name, some in profiles.items()
    }
    for (name, sequences, cuts), schedule in schedules(setting.tokens).items():
        steps = times[f"{name}|{sequences}|{cuts}"]
        measured = quartiles([makespan for makespan, _ in steps])
        worked = statistics.median(sum(busy) for _, busy in steps)
        row: Row = {"name": name, "sequences": sequences, "cuts": cuts}
        row["measured"] = measured
        for which, some in costs.items():
            timelines = [simulate(schedule, cost) for cost in some]
            busy = statistics.median(float(one.busy.sum()) for one in timelines)
            row[which] = statistics.median(one.makespan for one in timelines)
            row[f"{which}_error"] = row[which] / measured.middle - 1
            row[f"{which}_work_error"] = busy / worked - 1
        rows.append(row)
    for row in rows:
        base = next(
            r
            for r in rows
            if r["name"] == "1f1b" and r["sequences"] == row["sequences"]
        )
        row["speed_up"] = base["measured"].middle / row["measured"].middle
        row["predicted_speed_up"] = base["together"] / row["together"]
    return rows


def fits_of(profiles: dict[str, list[Profile]]) -> list[Row]:
    """The errors of the curves on points that took no part in their fit."""
    rows = []
    for which, some in profiles.items():
        for op in "FBIW":
            fits = [getattr(one.layer, op) for one in some]
            row = {"by": which, "op": op, "forms": ", ".join(fit.form for fit in fits)}
            row["worst"] = statistics.median(fit.worst for fit in fits)
            rows.append(row | {"median": statistics.median(fit.median for fit in fits)})
    return rows


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


# ---------------------------------------------------------------- the script
def measure(given: argparse.Namespace) -> Found:
    if given.quick:
        setting = QUICK
        profiles, times = run_threads(RANKS, lambda comm: work(comm, QUICK))[0]
    else:
        setting = FULL
        profiles, times = spawn(RANKS, work, FULL, patience=3600.0)[0]
    return {
        "rows": rows_of(setting, profiles, times),
        "fits": fits_of(profiles),
        "drift": drift(profiles["together"]),
        "where": f"{os.cpu_count()} cores, torch {torch.__version__}",
    }


def tables(found: Found) -> dict[str, str]:
    rows = found["rows"]
    columns = {
        "schedule": "{name}",
        "sequences": "{sequences}",
        "slices": "{cuts}",
        "measured, ms": "{measured!m:.0f}",
        "predicted, ms": "{together!m:.0f}",
        "error": "{together_error:+.1%}",
        "error of the work": "{together_work_error:+.1%}",
        "predicted by one rank alone, ms": "{alone!m:.0f}",
        "its error": "{alone_error:+.1%}",
        "speed-up measured": "{speed_up:.3f}",
        "speed-up predicted": "{predicted_speed_up:.3f}",
    }
    fits = {
        "measured by": "{by}",
        "op of a layer": "{op}",
        "form": "{forms}",
        "worst error": "{worst:.1%}",
        "median error": "{median:.1%}",
    }

    def off(errors: list[float]) -> str:
        sizes = [abs(error) for error in errors]
        return f"{statistics.median(sizes):.1%} in the median and {max(sizes):.1%} at worst"

    gains = [row["predicted_speed_up"] / row["speed_up"] - 1 for row in rows]
    summary = (
        f"Predictions from the profile of both ranks are off by {off([r['together_error'] for r in rows])}, those from "
        f"the profile of one rank alone by {off([r['alone_error'] for r in rows])}, and predicted speed-ups by "
        f"{off(gains)}. Meanwhile the speed of the machine itself drifted: the same backwards took up to "
        f"{found['drift']:.1%} longer in one profile than in another. Measured on {found['where']}."
    )
    return {
        "prediction": f"{table(rows, columns)}\n\n{summary}",
        "prediction: curves": table(found["fits"], fits),
    }


if __name__ == "__main__":
    Script(__doc__, measure, tables).main()
