"""Ranks as processes: how they are started, how they watch each other, and what they need from the operating system."""
