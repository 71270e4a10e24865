"""The words of configs: the names of whole configs, and which setting is meant by a word that is none of ours.

A key that is unknown in its section is looked up in this order:

    the words of others      learning_rate    is optimizer.rate here
    a name that is near      widht            is width
    the other sections       model.steps      is run.steps
"""

from __future__ import annotations

from dataclasses import fields

from penstock.config.sections import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from penstock.errors import nearest_name

# What transformers, torchtitan, Megatron and DeepSpeed call our settings.
OTHER_WORDS = {
    "hidden_size": "model.width",
    "dim": "model.width",
    "intermediate_size": "model.inner",
    "ffn_hidden_size": "model.inner",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "max_position_embeddings": "model.positions",
    "rope_theta": "model.theta",
    "tie_word_embeddings": "model.tied",
    "model_name_or_path": "model.weights",
    "dataset": "data.sources",
    "batch_size": "data.batch",
    "global_batch_size": "data.batch",
    "train_batch_size": "data.batch",
    "micro_batch_size": "schedule.microbatches",
    "seq_len": "data.tokens",
    "seq_length": "data.tokens",
    "sequence_length": "data.tokens",
    "max_length": "data.tokens",
    "max_seq_length": "data.tokens",
    "packing": "data.separate",
    "pp": "schedule.ranks",
    "stages": "schedule.ranks",
    "dp": "schedule.copies",
    "tp": "mesh.tensor",
    "fsdp": "mesh.shard",
    "lora": "lora.rank",
    "lr": "optimizer.rate",
    "learning_rate": "optimizer.rate",
    "lr_scheduler_type": "optimizer.schedule",
    "min_lr": "optimizer.final",
    "max_grad_norm": "optimizer.clip",
    "gradient_clipping": "optimizer.clip",
    "clip_grad": "optimizer.clip",
    "output_dir": "run.folder",
    "epochs": "run.steps",
    "num_train_epochs": "run.steps",
    "train_iters": "run.steps",
    "dtype": "run.precision",
    "bf16": "run.precision",
    "fp16": "run.precision",
    "gradient_checkpointing": "run.recompute",
    "activation_checkpoint": "run.recompute",
    "gradient_accumulation_steps": "run.accumulate",
    "save_steps": "run.save",
    "save_interval": "run.save",
    "eval_steps": "run.evaluate",
    "eval_interval": "run.evaluate",
    "logging_steps": "run.log",
    "log_interval": "run.log",
    "save_total_limit": "run.keep",
}
# What others call the values of our settings. The nearest name of a gpu would be the cpu.
OTHER_VALUES = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp32": "float32",
}


def find_settings(section: str, key: str) -> tuple[str, ...]:
    """The settings that were probably meant by a key that `section` does not have.

    Those of the same section are returned without its name.

    >>> find_settings("model", "hidden_size"), find_settings("train", "lr")
    (('width',), ('optimizer.rate',))
    >>> find_settings("model", "steps"), find_settings("model", "keep")
    (('run.steps',), ('paths.keep', 'run.keep'))
    >>> find_settings("model", "quantized")
    ()
    """
    known = _keys_by_section()
    own_prefix = f"{section}."
    if key.casefold() in OTHER_WORDS:
        return (OTHER_WORDS[key.casefold()].removeprefix(own_prefix),)
    own = nearest_name(key, known.get(section, ()))
    if own:
        return (own,)
    names = sorted({name for keys in known.values() for name in keys})
    near = nearest_name(key, names, letters=4)  # there are many names
    return tuple(f"{place}.{near}" for place, keys in known.items() if near in keys)


def _keys_by_section() -> dict[str, list[str]]:
    config = Config()
    return {
        section.name: [item.name for item in fields(getattr(config, section.name))]
        for section in fields(config)
    }


# ---------------------------------------------------------------- presets
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
