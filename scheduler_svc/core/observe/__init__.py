"""Counters, the step log, and the events of each request."""
