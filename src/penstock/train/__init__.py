"""From a text file to a trained, exported model: what a run is told, its data, its loop, its checkpoints.

    config.py config_file.py                  what to do            corpus.py tokenizer.py order.py data.py   on what
    weights.py optimizer.py loop.py           one rank's training   checkpoint.py history.py                  what stays
    worker.py launcher.py                     ranks as processes    hub.py generate.py                        and after
    profile.py trial.py                       before a run: how long a layer takes; does a schedule run?

Nothing is imported here: configs and histories are read without torch.
"""
