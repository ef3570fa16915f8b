"""Logs of an engine, and its numbers for a metrics writer."""
