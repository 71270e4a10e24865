"""Penstock inside torchtitan: our planner and executor take the place of its pipelining.

    torchrun ... -m torchtitan.train --module penstock.titan --config llama3_8b \\
        --parallelism.pipeline_parallel_degree 4 --penstock.schedule hanayo --penstock.waves 2

torchtitan loads this package through its option `--module` and is not changed. Its data, FSDP, checkpoints, metrics and
config stay. A model of your own gets the same with `penstock.titan.trainer.with_penstock(config)`.
"""
