"""Workloads of a simulation: drawn at random, or read from a file."""
