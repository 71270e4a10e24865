"""Predicts a step that will be compared with a measured one.

Both must count the same: seconds of the same machine, on which ranks may share processors, and memory in micro-batches,
because a run counts the forwards that it keeps and not their bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.config import Config
from penstock.cost import UnitCost
from penstock.formats.config_toml import read_config
from penstock.ir import Plan, Timeline
from penstock.ir.timeline import MEASURED_UNITS
from penstock.plan.candidates import Evaluator
from penstock.plan.pricing import Price
from penstock.sim import simulate
from penstock.train.before.forecast import known_forecast


def predict_like_run(folder: Path, plan: Plan, price: Price) -> Timeline:
    """Predict a pass of a plan on the machine of a run and with its batch, by the price of the run's own profile.

    The run's own plan gets the prediction that its report shows.
    """
    alone = replace(plan, rotation=(), full=None)
    if (folder / "config.toml").is_file():
        config = read_config(folder / "config.toml")
        known = known_forecast(folder, config, alone)
        if known is not None:
            return known.timeline
        alone = _with_rows(alone, config)
    processors = None
    if price.profile is not None:
        processors = price.profile.processors
    evaluator = Evaluator(price.for_plan(alone).cost, processors=processors)
    return evaluator.timeline(plan.schedule)


def _with_rows(plan: Plan, config: Config) -> Plan:
    """Divide the batch of a run among the micro-batches of a plan that does not say how many rows they have."""
    microbatches = len(plan.schedule.microbatches)
    passages = microbatches * config.mesh.shard * config.run.accumulate
    if "rows" in plan.facts or config.data.batch % passages:
        return plan
    rows = config.data.batch // passages
    return replace(plan, why=(*plan.why, ("rows", rows)))


def in_measured_units(timeline: Timeline) -> Timeline:
    """Return a timeline in seconds whose memory counts micro-batches, as a measured one does."""
    counted = simulate(timeline.schedule, UnitCost())
    return replace(
        timeline,
        activations=counted.activations,
        weights=counted.weights,
        units=MEASURED_UNITS,
    )
