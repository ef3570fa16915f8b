"""Whole engines compared on one machine: the embedded engine beside what else one could use."""
