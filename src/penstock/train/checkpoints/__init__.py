"""Checkpoints of a run: written and found in its folder, in object storage, and on machines with separate folders."""
