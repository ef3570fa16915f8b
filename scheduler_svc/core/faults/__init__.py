"""Poison bisection, out-of-memory back-off, and the loss of an executor."""
