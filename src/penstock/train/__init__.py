"""From a text file to a trained, exported model.

    session.py                                from Python       start.py                    before any worker starts
    placement.py capacity.py forecast.py      before a run      profile.py trial.py         time a layer, try a schedule
    launch.py                                 processes         lock.py screen.py           the folder, the terminal
    loop.py weights.py optimizer.py mesh.py   training          checkpoint.py history.py    what a run leaves behind
    handover.py                               parts that move   place.py                    copies of checkpoints
    data/                                     text to batches   hub.py after/               exporting and evaluating

This file imports nothing, so that configs and histories can be read without torch.
"""
