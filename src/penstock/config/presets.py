"""The configs that have a name: `penstock train --preset llama-150m`."""

from __future__ import annotations

from penstock.config.sections import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)


def _on_devices(count: int) -> ScheduleConfig:
    """Everything about the schedule is left to auto."""
    return ScheduleConfig(devices=count, ranks=0, microbatches=0, copies=0)


def _long_run(steps: int, every: int) -> RunConfig:
    """A run that is evaluated, saved and timed now and then."""
    return RunConfig(
        steps=steps,
        precision="bfloat16",
        evaluate=every,
        save=every,
        timed=every,
        log=10,
    )


PRESETS: dict[str, Config] = {
    # About a minute on two CPU cores.
    "tiny": Config(schedule=ScheduleConfig(microbatches=0)),
    "llama-150m": Config(
        ModelConfig(layers=12, width=1024, heads=16, kv_heads=4, inner=2752, vocab=0),
        DataConfig(tokens=1024, batch=64),
        _on_devices(4),
        OptimizerConfig(fresh_rate=6e-4, warmup=200),
        _long_run(10_000, every=500),
    ),
    "llama-1b": Config(
        ModelConfig(
            layers=16,
            width=2048,
            heads=32,
            kv_heads=8,
            inner=8192,
            theta=500_000.0,
            tied=True,
        ),
        DataConfig(tokens=2048, batch=128),
        _on_devices(8),
        OptimizerConfig(fresh_rate=3e-4, warmup=1000),
        _long_run(100_000, every=1000),
    ),
    "gpt2": Config(
        ModelConfig(
            family="gpt",
            layers=12,
            width=768,
            heads=12,
            kv_heads=12,
            inner=3072,
            positions=1024,
            tied=True,
        ),
        DataConfig(tokens=1024, batch=64),
        _on_devices(4),
        OptimizerConfig(fresh_rate=6e-4, warmup=200),
        _long_run(10_000, every=500),
    ),
    "bert-base": Config(
        ModelConfig(
            family="bert",
            layers=12,
            width=768,
            heads=12,
            kv_heads=12,
            inner=3072,
            positions=512,
            tied=True,
        ),
        DataConfig(tokens=512, batch=256),
        _on_devices(4),
        OptimizerConfig(fresh_rate=1e-4, warmup=1000),
        _long_run(100_000, every=1000),
    ),
}
