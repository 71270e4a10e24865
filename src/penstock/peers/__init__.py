"""Runs plans inside other people's runtimes."""
