"""Connections to schedulers, and calls that leave one that stands still."""
