"""Names that a config does not have: what its settings were called before, and what other frameworks call them.

A key that is unknown in its section is looked up in this order:

    an earlier name          run.graphs       is run.cuda_graphs now
    the words of others      learning_rate    is optimizer.lr here
    a name that is near      hiden_size       is hidden_size
    the other sections       model.steps      is run.steps
"""

from __future__ import annotations

from dataclasses import fields

from penstock.config.sections import SECTIONS, Config
from penstock.errors import nearest_name

# What a setting was called before: its name today, or what to write instead.
RENAMED = {
    "model.width": "model.hidden_size",
    "model.inner": "model.intermediate_size",
    "model.vocab": "model.vocab_size",
    "model.theta": "model.rope_theta",
    "model.tied": "model.tie_embeddings",
    "model.weights": "model.path",
    "model.config": "write model.path = its config.json, which means new weights",
    "model.positions": "leave it out: the longest sequence is data.seq_len",
    "data.mixture": "write tables in data.sources, such as [{files = [web], weight = 3}, {files = [code]}]",
    "data.split": "name the folder of the split in data.sources, such as books/train",
    "data.endings": "name the files with a pattern in data.sources, such as notes/*.rst",
    "data.instructions": "write data.format = chat",
    "data.segments": "write data.format = text:segments=2",
    "data.template": "leave it out: the chat template is beside the tokenizer, as chat_template.jinja",
    "data.held_out": "write the share in data.validation",
    "data.cache": "leave it out: tokens are kept in the folder cache beside the run's folder",
    "data.field": "data.text_field",
    "data.tokens": "data.seq_len",
    "data.batch": "data.global_batch",
    "data.separate": "data.document_mask",
    "data.mask": "data.mlm_probability",
    "schedule.devices": "parallel.devices",
    "schedule.ranks": "parallel.pp",
    "schedule.copies": "parallel.dp_replicate",
    **{
        f"schedule.{word}": f"write it with the schedule: schedule.name = {example}"
        for word, example in {
            "waves": "hanayo:waves=2",
            "chunks": "interleaved:chunks=2",
            "slices": "seq1f1b:slices=4",
            "skips": "skip:skips=1",
            "skip": "auto:skip=0.25",
            "split": "1f1b:split",
        }.items()
    },
    **{
        f"paths.{word}": f"write it with the schedule: schedule.name = skip:share=0.25,{word}={example}"
        for word, example in {
            **{"rotate": "3", "full": "10", "warmup": "100", "swaps": "1"},
            "keep": "1+2",
        }.items()
    },
    "paths.share": "write it with the schedule: schedule.name = skip:share=0.25",
    "paths.mean": "leave it out: a gradient is a mean over all tokens (Pipeline(mean=...) has others)",
    "paths.sum_messages": "leave it out: the plan says in which type gradients are summed",
    "mesh.shard": "parallel.dp_shard",
    "mesh.tensor": "parallel.tp",
    "optimizer.rate": "optimizer.lr",
    "optimizer.schedule": "optimizer.lr_schedule",
    "optimizer.warmup": "optimizer.warmup_steps",
    "optimizer.decay": "optimizer.weight_decay",
    "optimizer.clip": "optimizer.clip_norm",
    "optimizer.fresh_rate": "optimizer.lr",
    "optimizer.final": "write optimizer.lr_schedule = cosine:min=0.1",
    "optimizer.cooldown": "write optimizer.lr_schedule = wsd:0.2",
    "optimizer.beta1": "write optimizer.betas = [0.9, 0.95]",
    "optimizer.beta2": "write optimizer.betas = [0.9, 0.95]",
    "optimizer.eps": "write optimizer.options = {eps = 1e-8}",
    "run.messages": "run.comm_dtype",
    "run.graphs": "run.cuda_graphs",
    "run.log": "run.log_every",
    "run.evaluate": "run.eval_every",
    "run.save": "run.save_every",
    "run.keep": "run.keep_checkpoints",
    "run.checkpoints": "run.checkpoint_url",
    "run.patience": "run.timeout",
    "run.recompute_mlp": "write run.recompute = mlp",
    "run.recompute_attention": "write run.recompute = attention",
    "run.forecast": "write run.checks = gradients,memory to leave it out",
    "run.prove": "write run.checks = forecast,memory to leave it out",
    "run.check_memory": "write run.checks = forecast,gradients to leave it out",
    "run.smoothing": "write run.loss = cross_entropy:smoothing=0.1",
    "run.z_loss": "write run.loss = cross_entropy:z=1e-4",
    "run.reduction": "leave it out: whether a loss is a sum or a mean is found out by a trial",
    "run.loss_chunk": "leave it out: large logits are never in memory all at once",
    "run.threads": "leave it out, or set the environment variable OMP_NUM_THREADS",
    "run.timed": "leave it out: step 3, every 50th and the last are timed",
    "run.evaluations": "leave it out: an evaluation takes two batches",
    "run.compare": "leave it out: every 100th step is compared",
    "run.elastic": "write elastic.mode = on, off or auto",
    "run.listen": "elastic.listen",
    "run.key": "leave it out: the key of a run is key.pem in its folder",
    "run.workers": "elastic.workers",
    "run.mirror": "write elastic.mode = on, which keeps replicas of parts that one worker holds alone",
    "run.slow": "write elastic.mode = on:slow=2",
    "run.silence": "leave it out: a worker is lost after a twentieth of run.timeout without a heartbeat",
    "run.restarts": "elastic.restarts",
}
# What transformers, torchtitan, Megatron and DeepSpeed call our settings, where they do not agree with us.
OTHER_WORDS = {
    "dim": "model.hidden_size",
    "ffn_hidden_size": "model.intermediate_size",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "max_position_embeddings": "data.seq_len",
    "tie_word_embeddings": "model.tie_embeddings",
    "model_name_or_path": "model.path",
    "dataset": "data.sources",
    "batch_size": "data.global_batch",
    "train_batch_size": "data.global_batch",
    "micro_batch_size": "schedule.microbatches",
    "seq_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "packing": "data.document_mask",
    "stages": "parallel.pp",
    "dp": "parallel.dp_replicate",
    "fsdp": "parallel.dp_shard",
    "lora": "lora.rank",
    "learning_rate": "optimizer.lr",
    "lr_scheduler_type": "optimizer.lr_schedule",
    "min_lr": "optimizer.lr_schedule",
    "max_grad_norm": "optimizer.clip_norm",
    "gradient_clipping": "optimizer.clip_norm",
    "clip_grad": "optimizer.clip_norm",
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
    "save_steps": "run.save_every",
    "save_interval": "run.save_every",
    "eval_steps": "run.eval_every",
    "eval_interval": "run.eval_every",
    "logging_steps": "run.log_every",
    "log_interval": "run.log_every",
    "save_total_limit": "run.keep_checkpoints",
}
# What others call the values of our settings. The nearest name of a gpu would be the cpu.
OTHER_VALUES = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp32": "float32",
}


def advise(section: str, key: str) -> str:
    """Return what to write instead of a key that `section` does not have.

    >>> advise("run", "graphs")
    'this is called run.cuda_graphs'
    >>> advise("run", "stepps"), advise("model", "steps")
    ("did you mean 'steps'?", "did you mean 'run.steps'?")
    """
    renamed = RENAMED.get(f"{section}.{key}", "")
    if renamed:
        return renamed if " " in renamed else f"this is called {renamed}"
    meant = find_settings(section, key)
    if meant:
        return f"did you mean {' or '.join(map(repr, meant))}?"
    known = keys_by_section()
    return f"known: {', '.join(known.get(section, known))}"


def advise_section(name: str, keys: list[str]) -> str:
    """Return what to write instead of a section that a config does not have, in which there are these keys."""
    advice = [advise(name, key) for key in keys]
    renamed = [one for one in advice if one.startswith("this is")]
    near = nearest_name(name, keys_by_section())
    if near and not renamed:
        return f"did you mean {near!r}?"
    return next(iter([*renamed, *advice]), f"known: {', '.join(keys_by_section())}")


def find_settings(section: str, key: str) -> tuple[str, ...]:
    """Return the settings that were probably meant by a key that `section` does not have.

    Those of the same section are returned without its name.

    >>> find_settings("model", "num_attention_heads"), find_settings("train", "lr")
    (('heads',), ('optimizer.lr',))
    >>> find_settings("model", "steps"), find_settings("model", "quantized")
    (('run.steps',), ())
    """
    known = keys_by_section()
    own_prefix = f"{section}."
    if key.casefold() in OTHER_WORDS:
        return (OTHER_WORDS[key.casefold()].removeprefix(own_prefix),)
    own = nearest_name(key, known.get(section, ()))
    if own:
        return (own,)
    names = sorted({name for keys in known.values() for name in keys})
    near = nearest_name(key, names, letters=4)  # there are many names
    return tuple(f"{place}.{near}" for place, keys in known.items() if near in keys)


def keys_by_section() -> dict[str, list[str]]:
    """Return the keys of each section."""
    config = Config()
    return {
        section: [item.name for item in fields(getattr(config, section))]
        for section in SECTIONS
    }
