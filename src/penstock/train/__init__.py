"""From a text file to a trained, exported model.

    before/                                   what happens before any worker starts: checks, measuring, planning
    job.py launch.py                          what a run is, and its processes
    setup.py loop.py weights.py optimizer.py  training
    rank_weights.py elastic.py                parts that move between workers
    history.py hooks.py checkpoints/          what a run leaves behind, and what happens beside its steps
    data/                                     text to batches
    hub.py after/                             exporting and evaluating

This file imports nothing, so that configs and histories can be read without torch.
"""
