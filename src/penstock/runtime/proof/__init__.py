"""Proves a model before its first step: compares every stage as the plan runs it with a plain call."""
