"""The folders of a run whose ranks a launcher has started: one that all ranks see, or one on each machine."""
