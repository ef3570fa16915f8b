"""Streams measured: how many tokens reach how many clients."""
