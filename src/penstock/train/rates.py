"""The learning rate of every step: a warm-up, then a course that has a name or is the user's own.

    cosine        ╱‾‾╲            linear   ╱╲               wsd   ╱‾‾‾‾‾╲         inverse_sqrt   ╱╲
                ╱      ╲___              ╱    ╲___              ╱        ╲___                  ╱    `- . __

A rate depends only on the number of the step, so that a resumed run goes on with the right one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from penstock.config import Config, OptimizerConfig, names_own_code
from penstock.errors import ConfigError
from penstock.train.user_code import own_function

SCHEDULE_KEY = "optimizer.schedule"
TRAINED_RATE = (
    2e-5  # for weights of model.weights; fresh ones bear a hundred times as much
)
ADAPTER_RATE = 1e-4  # for LoRA, whose adapters begin at zero


def rate_at(step: int, steps: int, settings: OptimizerConfig) -> float:
    """Return the learning rate of a step, counted from 0.

    >>> from penstock.config import OptimizerConfig
    >>> [round(rate_at(step, 10, OptimizerConfig(rate=1.0, warmup=2, final=0.1)), 3) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.55, 0.134]
    """
    return settings.highest_rate * factor_at(step, steps, settings)


def factor_at(step: int, steps: int, settings: OptimizerConfig) -> float:
    """Return the rate of a step as a share of the highest rate.

    >>> from penstock.config import OptimizerConfig
    >>> wsd = OptimizerConfig(schedule="wsd", warmup=2, cooldown=0.4, final=0.0)
    >>> [round(factor_at(step, 10, wsd), 3) for step in (0, 2, 6, 7, 8, 9)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    if names_own_code(settings.schedule):
        return own_factor(step, settings.schedule)
    return COURSES[settings.schedule](step, steps, settings)


def own_factor(step: int, name: str) -> float:
    """Return the factor that the user's own function gives for a step, counted from 0."""
    factor = own_function(name, SCHEDULE_KEY)(step)
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not number or not 0 <= factor < math.inf:
        raise ConfigError(
            f"{SCHEDULE_KEY} = {name} returned {factor!r} for step {step}\n"
            "  return a number of at least 0, by which optimizer.rate is multiplied"
        )
    return float(factor)


# ---------------------------------------------------------------- the highest rate
def settle_rate(config: Config) -> Config:
    """Replace an open rate (0) by one that suits what is trained."""
    rate = config.optimizer.rate or _suitable_rate(config)[0]
    return replace(config, optimizer=replace(config.optimizer, rate=rate))


def describe_rate(config: Config) -> str:
    """Say what the highest rate is, and what it was chosen for."""
    rate = config.optimizer.rate
    suitable, trained = _suitable_rate(config)
    if rate == suitable:
        return f"{rate:g}, as suits {trained}"
    return f"{rate:g}, as optimizer.rate says; {suitable:g} suits {trained}"


def _suitable_rate(config: Config) -> tuple[float, str]:
    """The rate that suits what a run trains, and what that is."""
    if config.lora.rank:
        return ADAPTER_RATE, "adapters"
    if config.model.weights:
        return TRAINED_RATE, "weights that are trained already"
    return config.optimizer.fresh_rate, "new weights"


# ---------------------------------------------------------------- courses after the warm-up
Course = Callable[[int, int, OptimizerConfig], float]


def _constant(step: int, steps: int, settings: OptimizerConfig) -> float:
    return 1.0


def _linear(step: int, steps: int, settings: OptimizerConfig) -> float:
    return _between(1 - _share_done(step, steps, settings), settings)


def _cosine(step: int, steps: int, settings: OptimizerConfig) -> float:
    done = _share_done(step, steps, settings)
    return _between(0.5 * (1 + math.cos(math.pi * done)), settings)


def _wsd(step: int, steps: int, settings: OptimizerConfig) -> float:
    length = settings.cooldown * steps
    left = steps - step
    return _between(min(1.0, left / length) if length else 1.0, settings)


def _inverse_sqrt(step: int, steps: int, settings: OptimizerConfig) -> float:
    highest = max(settings.warmup, 1)
    return max(math.sqrt(highest / max(step + 1, highest)), settings.final)


COURSES: dict[str, Course] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}


def _share_done(step: int, steps: int, settings: OptimizerConfig) -> float:
    """The share of the steps after the warm-up that is done."""
    done = (step - settings.warmup) / max(steps - settings.warmup, 1)
    return min(done, 1.0)


def _between(height: float, settings: OptimizerConfig) -> float:
    """A factor between the final share, at height 0, and 1."""
    return settings.final + (1 - settings.final) * height
