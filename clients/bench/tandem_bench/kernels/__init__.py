"""Benchmark of single operations, beside other implementations of the same."""
