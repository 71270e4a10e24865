"""Encrypted and authenticated connections between the machines of a run."""
