"""Benchmark of streams: how many tokens reach how many clients."""
