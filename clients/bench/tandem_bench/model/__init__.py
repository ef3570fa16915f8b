"""Benchmarks of decode steps with random weights, and of the least time they could take."""
