"""Benchmark of the step link: how long an executor waits for its scheduler."""
