"""Parallelism of an embedded engine: several runners, or one model over several processes."""
