"""The proof of a model before its first step: every stage as the plan runs it, beside a plain call."""
