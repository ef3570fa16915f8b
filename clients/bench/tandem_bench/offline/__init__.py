"""Comparison of whole engines on one machine: the embedded engine beside others."""
