"""Benchmark of the scheduler core: the cost of one decode-only turn and of an admission."""
