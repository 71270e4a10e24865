"""Ranks as processes: how they start, how they watch each other, and what the operating system must be told."""
